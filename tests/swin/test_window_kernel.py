"""The kernel for windows against plain torch: on a GPU, or else in Triton's interpreter (see conftest.py)."""

import pytest
import torch
from tiny import SWINS, interpretable, relative_error, tiny_swin

import msvit
from msvit.execution.attention import force_backend

pytestmark = pytest.mark.skipif(not interpretable(), reason="needs a GPU, or Triton with an interpreter that works")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HALF = torch.bfloat16 if DEVICE == "cuda" else torch.float16  # the interpreter has no bfloat16


@pytest.mark.parametrize("name", SWINS)
@pytest.mark.parametrize(("window", "merge_at", "coarse"), [(4, 4, 32), (4, 2, 24), (3, 3, 16), (7, 3, 32)])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-4), (HALF, 0.03)])
def test_a_model_run_by_it_gives_the_same(
    name: str, window: int, merge_at: int, coarse: int, dtype: torch.dtype, bound: float
) -> None:
    """Whole and padded windows, shifted and not, cells of all kinds; no fine cell, one, all, and some."""
    side = 48 if coarse == 24 else 64
    host = tiny_swin(name, torch.float32, window_size=window, depths=(2, 2, 1, 2), num_heads=(1, 2, 4, 8)).to(DEVICE)
    model = msvit.convert(host, merge_at=merge_at, gate=msvit.AllFine(coarse=coarse))
    image = torch.randn(4, 3, side, side, device=DEVICE)
    mask = torch.rand(4, side // coarse, side // coarse, device=DEVICE) < 0.5
    mask[0], mask[1], mask[2] = True, False, False
    mask[2, 0, -1] = True
    with torch.no_grad():
        with force_backend("sdpa"):
            want = model(image, mask=mask).logits
        model.to(dtype)
        with force_backend("triton"):
            got = model(image.to(dtype), mask=mask).logits
    assert relative_error(got.float(), want) < bound

