"""Sliding windows: cutting and stitching are inverse, and a window's prediction is the model's own."""

from typing import Any

import pytest
import torch
from tiny import images, tiny_host

import msvit
from msvit_lab.evaluation.sliding import Slide, cut, predict, stitch


@pytest.fixture(scope="module")
def model() -> Any:
    torch.manual_seed(0)
    gate = msvit.EntropyGate(coarse=8, share=0.5)
    return msvit.convert_segmenter(tiny_host(dtype=torch.float32), 7, gate=gate).eval()


@pytest.mark.parametrize("stride", [None, 5, 16])
@pytest.mark.parametrize("size", [(16, 16), (40, 23), (7, 30), (3, 5), (33, 48)])
def test_stitching_undoes_cutting(size: tuple[int, int], stride: int | None) -> None:
    slide = Slide(window=16, stride=stride)
    image = images(1, *size)[0]
    parts = cut(image, slide)
    assert parts.shape[1:] == (3, 16, 16)
    assert torch.allclose(stitch(parts, size, slide), image)


def test_windows_touch_and_the_last_ends_with_the_image() -> None:
    image = torch.arange(40.0).expand(1, 16, 40)
    assert [part[0, 0, 0].item() for part in cut(image, Slide(window=16))] == [0, 16, 24]
    assert len(cut(image[:, :, :32], Slide(window=16))) == 2


def test_one_window_is_the_model_itself(model: Any) -> None:
    image = images(3, dtype=torch.float32)
    want = model(image)
    for i, view in enumerate(predict(model, list(image), [(16, 16)] * 3, Slide(window=16, batch=2))):
        assert torch.allclose(view.prob, want.logits[i].softmax(0), atol=1e-6)
        assert torch.equal(view.fine, want.gate.mask[i].repeat_interleave(8, 0).repeat_interleave(8, 1))
        assert view.costs.tokens.tolist() == [want.tokens.count[i]]
        assert view.costs.macs.tolist() == [model.encoder.macs(image[i : i + 1], head=False).item()]


def test_the_model_gets_full_batches_and_no_more_than_are_needed(model: Any) -> None:
    seen: list[int] = []
    hook = model.register_forward_hook(lambda _, given, out: seen.append(len(given[0])))
    many = [images(1, 16, width, dtype=torch.float32)[0] for width in (40, 16, 48)]  # 3, 1 and 3 windows
    sizes = [(16, image.shape[2]) for image in many]
    views = predict(model, many, sizes, Slide(window=16, batch=4))
    next(views)
    assert seen == [4]
    list(views)
    assert seen == [4, 3]
    hook.remove()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"stride": 17}, "stride is 17, but windows of 16 px leave gaps"),
        ({"stride": 0}, "stride is 0, but windows move on by 1 px or more"),
        ({"window": 0}, "window is 0, but needs at least 1 px"),
        ({"batch": 0}, "batch is 0, but the model takes 1 window"),
    ],
)
def test_impossible_settings_are_errors(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Slide(**({"window": 16} | options))
