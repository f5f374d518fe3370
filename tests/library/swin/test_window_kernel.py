"""The kernel for windows against plain torch: on a GPU, or else in Triton's interpreter (see conftest.py)."""

import pytest
import torch
from cases import each_once
from tiny import SWINS, interpretable, relative_error, tiny_swin

import msvit
from msvit.execution.attention import force_backend

pytestmark = pytest.mark.skipif(not interpretable(), reason="needs a GPU, or Triton with an interpreter that works")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HALF = torch.bfloat16 if DEVICE == "cuda" else torch.float16  # the interpreter has no bfloat16


CASES = [
    (4, 3, 32, torch.float32),
    (3, 2, 24, torch.float32),
    (12, 2, 16, torch.float32),  # more tokens than a program takes at once
    (7, 2, 16, HALF),
]


@each_once(name=SWINS, case=CASES)
def test_a_model_run_by_it_gives_the_same(name: str, case: tuple[int, int, int, torch.dtype]) -> None:
    """Whole and padded windows, shifted and not, cells of all kinds; no fine cell, and some."""
    window, merge_at, coarse, dtype = case
    side = 64 if coarse == 32 else 48
    small = {"window_size": window, "depths": (2, 1, 1)[:merge_at], "num_heads": (1, 2, 2)[:merge_at]}
    host = tiny_swin(name, torch.float32, **small).to(DEVICE)
    model = msvit.convert(host, merge_at=merge_at, gate=msvit.AllFine(coarse=coarse))
    image = torch.randn(2, 3, side, side, device=DEVICE)
    mask = torch.rand(2, side // coarse, side // coarse, device=DEVICE) < 0.5
    mask[0] = False
    with torch.no_grad():
        with force_backend("sdpa"):
            want = model(image, mask=mask).logits
        model.to(dtype)
        with force_backend("triton"):
            got = model(image.to(dtype), mask=mask).logits
    assert relative_error(got.float(), want) < (1e-4 if dtype is torch.float32 else 0.03)
