"""Sliding windows: cutting and stitching are inverse, and a window is what the model itself says."""

from typing import Any

import pytest
import torch
from tiny import images, tiny_host

import msvit
from msvit.evaluation.sliding import Slide, cut, look, stitch


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
    for i, view in enumerate(look(model, list(image), [(16, 16)] * 3, Slide(window=16, batch=2))):
        assert torch.allclose(view.prob, want.logits[i].softmax(0), atol=1e-6)
        assert torch.equal(view.fine, want.gate.mask[i].repeat_interleave(8, 0).repeat_interleave(8, 1))
        assert view.tokens.tolist() == [want.tokens.count[i]]
        assert view.macs.tolist() == [model.encoder.macs(image[i : i + 1], head=False).item()]


def test_images_of_many_sizes_do_not_mix(model: Any) -> None:
    many = [images(1, *size, dtype=torch.float32)[0] for size in ((16, 40), (9, 9), (30, 17))]
    sizes = [(20, 50), (9, 9), (15, 8)]
    slide = Slide(window=16, batch=3)
    together = list(look(model, many, sizes, slide))
    for image, size, view in zip(many, sizes, together, strict=True):
        (alone,) = look(model, [image], [size], slide)
        assert view.prob.shape == (7, *size)
        assert view.fine.shape == size
        assert torch.allclose(view.prob, alone.prob, atol=1e-6)
        assert torch.equal(view.masks, alone.masks)


def test_flips_and_scales_are_averaged(model: Any) -> None:
    image = images(1, 16, 24, dtype=torch.float32)[0]
    size = (16, 24)

    def prob(image: Any, **options: Any) -> Any:
        return next(look(model, [image], [size], Slide(window=16, **options))).prob

    mirrored = prob(image.flip(2)).flip(2)
    assert torch.allclose(prob(image, flip=True), (prob(image) + mirrored) / 2, atol=1e-6)
    scaled = [prob(image, scales=(scale,)) for scale in (0.5, 1.0, 1.5)]
    assert torch.allclose(prob(image, scales=(0.5, 1.0, 1.5)), torch.stack(scaled).mean(0), atol=1e-6)


def test_gaps_and_sizes_of_nothing_are_refused() -> None:
    with pytest.raises(ValueError, match="leave gaps"):
        Slide(window=16, stride=17)
    with pytest.raises(ValueError, match="at least one above 0"):
        Slide(window=16, scales=(0.0, 1.0))
