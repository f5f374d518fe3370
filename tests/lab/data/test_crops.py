"""Crops lie in the image, are what they are called, and are the same for ever."""

import numpy as np
import pytest
import torch
from PIL import Image

from msvit.lab.data import CROPS, CentreCrop, RandomCrop, WholeImage, cut, resample
from msvit.lab.data.crops import CROP, choose_crop, shuffled, uniform

NUM = 4000
SHAPES = [(224, 224), (300, 400), (400, 300), (200, 600), (500, 333)]


def sizes(shape: tuple[int, int]) -> np.ndarray:
    return np.tile(np.array(shape), (NUM, 1))


@pytest.mark.parametrize("name", ["inception", "light"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_crops_stay_inside_and_have_the_stated_area(name, shape):
    area = CROPS[name]
    windows = RandomCrop(area)(sizes(shape), seed=0, epoch=0, index=np.arange(NUM))
    left, top, right, bottom = windows.box.T
    assert min(left.min(), top.min()) >= 0
    assert max(right.max(), bottom.max()) <= 1
    share = (right - left) * (bottom - top)
    assert area[0] - 1e-9 <= share.min() < area[0] + 0.02
    assert share.max() <= area[1] + 1e-9
    assert np.ptp(left) > 0.02  # the place is random, whatever the shape
    assert np.ptp(top) > 0.02


def test_the_inception_crop_has_the_ratios_and_areas_of_torchvision():
    from torchvision.transforms import RandomResizedCrop

    shape = (375, 500)
    windows = RandomCrop((0.05, 1.0))(sizes(shape), seed=3, epoch=0, index=np.arange(NUM))
    ours = np.stack([(windows.box[:, 3] - windows.box[:, 1]) * 375, (windows.box[:, 2] - windows.box[:, 0]) * 500], 1)
    image = torch.empty(3, *shape)
    theirs = [RandomResizedCrop.get_params(image, [0.05, 1.0], [3 / 4, 4 / 3])[2:] for _ in range(NUM)]
    quantiles = np.linspace(0.02, 0.98, 25)
    for measure in (lambda x: x[:, 0] * x[:, 1] / (375 * 500), lambda x: np.log(x[:, 1] / x[:, 0])):
        difference = np.quantile(measure(ours), quantiles) - np.quantile(measure(np.array(theirs)), quantiles)
        assert abs(difference).max() < 0.03, difference


def test_flips_happen_half_the_time():
    flip = RandomCrop((0.9, 1.0))(sizes((64, 64)), seed=0, epoch=0, index=np.arange(NUM)).flip
    assert abs(flip.mean() - 0.5) < 4 * 0.5 / NUM**0.5


def test_no_crop_means_the_image_as_it_is():
    for crop in (choose_crop(train=True, crops="none", eval_crop=1.0), WholeImage()):
        windows = crop(sizes((30, 50)), seed=0, epoch=0, index=np.arange(NUM))
        assert (windows.box == [0, 0, 1, 1]).all()
        assert not windows.flip.any()


def test_the_centre_crop_is_resize_then_crop():
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 96, 3), dtype=np.uint8))
    window = CentreCrop(0.875)(np.array([[64, 96]]), seed=0, epoch=0, index=np.array([0]))
    ours = cut(image, window.box[0], False, size=28, interpolation="bicubic")
    theirs = image.resize((48, 32), Image.Resampling.BICUBIC).crop((10, 2, 38, 30))
    difference = ours.int() - torch.from_numpy(np.array(theirs)).permute(2, 0, 1).int()
    assert difference.abs().max() <= 1


def test_a_draw_depends_on_seed_epoch_and_index_alone():
    index = np.arange(50)
    whole = uniform(1, 2, index, 6, CROP)
    np.testing.assert_array_equal(uniform(1, 2, index[[7, 3]], 4, CROP), whole[[7, 3], :4])
    np.random.seed(0)
    np.testing.assert_array_equal(uniform(1, 2, index, 6, CROP), whole)
    for other in (uniform(2, 1, index, 6, CROP), uniform(1, 3, index, 6, CROP), uniform(1, 2, index + 50, 6, CROP)):
        assert not np.isin(other, whole).any()


def test_draws_are_uniform_and_unrelated():
    draw = uniform(0, 0, np.arange(20000), 4, CROP)
    following = uniform(0, 1, np.arange(20000), 1, CROP)
    correlation = np.corrcoef(np.concatenate([draw, following], 1).T) - np.eye(5)
    assert abs(correlation).max() < 0.03
    histogram = np.histogram(draw, bins=16, range=(0, 1))[0] / draw.size * 16
    assert abs(histogram - 1).max() < 0.06


def test_every_epoch_has_every_image_in_an_order_of_its_own():
    orders = [shuffled(100, 0, epoch) for epoch in range(3)] + [shuffled(100, 1, 0)]
    assert all(sorted(order) == list(range(100)) for order in orders)
    assert len({tuple(order) for order in orders}) == 4


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
@pytest.mark.parametrize("size", [17, 40, 90], ids=["shrunk", "same", "enlarged"])
def test_a_batch_is_resampled_as_pil_resamples_one(interpolation, size):
    noise = np.random.default_rng(0).integers(70, 190, (6, 40, 40, 3), dtype=np.uint8)  # PIL clips between its passes
    windows = RandomCrop((0.05, 1.0))(np.full((6, 2), 40), seed=0, epoch=0, index=np.arange(6))
    assert 0 < windows.flip.sum() < 6
    to = {"size": size, "interpolation": interpolation}
    batch = resample(torch.from_numpy(noise).permute(0, 3, 1, 2), windows, **to)
    for row in range(6):
        one = cut(Image.fromarray(noise[row]), windows.box[row], bool(windows.flip[row]), **to)
        assert (batch[row] - one).abs().max() < 1.6, row  # and rounds after each


@pytest.mark.gpu
@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
def test_the_gpu_resamples_as_the_cpu_does(interpolation):
    images = torch.randint(0, 256, (8, 3, 256, 256), dtype=torch.uint8)
    windows = RandomCrop((0.05, 1.0))(np.full((8, 2), 256), seed=0, epoch=0, index=np.arange(8))
    cpu = resample(images, windows, size=224, interpolation=interpolation)
    gpu = resample(images.cuda(), windows, size=224, interpolation=interpolation).cpu()
    assert (cpu - gpu).abs().max() < 0.5


def test_unknown_crops_are_refused_with_the_known_ones():
    with pytest.raises(ValueError, match="crops is 'heavy', but must be one of inception, medium, light, none"):
        choose_crop(train=True, crops="heavy", eval_crop=1.0)
    with pytest.raises(ValueError, match=r"eval_crop is 1\.5, but must lie in \(0, 1\]"):
        choose_crop(train=False, crops="none", eval_crop=1.5)
