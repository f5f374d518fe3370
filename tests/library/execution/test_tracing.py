"""torch.jit.trace: exact where shapes do not follow the gate, an error where they do."""

import warnings

import pytest
import torch
from tiny import KINDS, SWINS, Logits, batch_of, tiny_model
from torch import Tensor, nn

import msvit


def traced(model: msvit.MSViT, image: Tensor) -> nn.Module:
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", torch.jit.TracerWarning)
        warnings.filterwarnings("ignore", ".*torch.jit.*deprecated.*")
        return torch.jit.trace(Logits(model), image, check_trace=False)


@pytest.mark.parametrize(
    ("name", "mode", "reducer", "words"),
    [
        (KINDS[0], "packed", None, "mode 'packed'.*mode='masked'"),
        (KINDS[0], "trimmed", None, "mode 'trimmed'.*mode='masked'"),
        (SWINS[0], "packed", None, "mode 'packed'.*mode='masked'"),
        (KINDS[0], "masked", msvit.EViT(rate=0.7, at=(0, 1)), "the reducer EViT.*reducer=None"),
    ],
)
def test_a_trace_that_would_record_its_examples_counts_is_an_error(
    name: str, mode: str, reducer: msvit.Reducer | None, words: str
) -> None:
    model = tiny_model(name, mode=mode, reducer=reducer).eval()
    with pytest.raises(ValueError, match=words):
        traced(model, batch_of(model)[0])


@pytest.mark.parametrize("name", [KINDS[0], SWINS[0]])
@torch.no_grad()
def test_a_traced_masked_model_is_exact_on_other_images(name: str) -> None:
    model = tiny_model(name, mode="masked").eval()
    image, _ = batch_of(model, 8)
    model.gate.threshold = model.gate.scores(image).median().item()
    example, others = image.split(4)
    out = model(others)
    counts = out.gate.mask.sum((1, 2))
    assert len(counts.unique()) > 1
    assert not torch.equal(counts, model(example).gate.mask.sum((1, 2)))
    torch.testing.assert_close(traced(model, example)(others), out.logits, rtol=0, atol=1e-12)
