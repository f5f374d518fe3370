"""torch.jit.trace: exact where shapes do not follow the gate, an error where they do."""

import warnings

import pytest
import torch
from tiny import Logits, tiny_host, tiny_swin
from torch import Tensor, nn

import msvit


def model_of(kind: str, mode: str, reducer: msvit.Reducer | None = None) -> msvit.MSViT:
    host, coarse = (tiny_host(), 8) if kind == "vit" else (tiny_swin(), 32)
    gate = msvit.GradientGate(coarse=coarse, threshold=0.05)
    return msvit.convert(host, coarse=coarse, gate=gate, mode=mode, reducer=reducer).eval()


def uneven(kind: str, batch: int, seed: int) -> Tensor:
    """Noise that is louder in some cells than in others: the gate decides otherwise for every image."""
    side, coarse = (16, 8) if kind == "vit" else (64, 32)
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(batch, 3, side, side, dtype=torch.float64, generator=generator)
    loud = torch.rand(batch, 1, side // coarse, side // coarse, dtype=torch.float64, generator=generator)
    return noise * loud.repeat_interleave(coarse, 2).repeat_interleave(coarse, 3) ** 3


def traced(model: msvit.MSViT, image: Tensor) -> nn.Module:
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", torch.jit.TracerWarning)
        warnings.filterwarnings("ignore", ".*torch.jit.*deprecated.*")
        return torch.jit.trace(Logits(model), image, check_trace=False)


@pytest.mark.parametrize(
    ("kind", "mode", "reducer", "words"),
    [
        ("vit", "packed", None, "mode 'packed'.*mode='masked'"),
        ("vit", "trimmed", None, "mode 'trimmed'.*mode='masked'"),
        ("swin", "packed", None, "mode 'packed'.*mode='masked'"),
        ("vit", "masked", msvit.EViT(rate=0.7, at=(0, 1)), "the reducer EViT.*reducer=None"),
    ],
)
def test_a_trace_that_would_record_its_examples_counts_is_an_error(
    kind: str, mode: str, reducer: msvit.Reducer | None, words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        traced(model_of(kind, mode, reducer), uneven(kind, 2, seed=0))


@pytest.mark.parametrize("kind", ["vit", "swin"])
@torch.no_grad()
def test_a_traced_masked_model_is_exact_on_other_images(kind: str) -> None:
    model, example, others = model_of(kind, "masked"), uneven(kind, 4, seed=0), uneven(kind, 4, seed=1)
    out = model(others)
    counts = out.gate.mask.sum((1, 2))
    assert len(counts.unique()) > 1
    assert not torch.equal(counts, model(example).gate.mask.sum((1, 2)))
    torch.testing.assert_close(traced(model, example)(others), out.logits, rtol=0, atol=1e-12)
