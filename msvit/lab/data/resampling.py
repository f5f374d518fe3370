"""Resampling: a window of an image becomes a square of another size, one image with PIL or a batch on its device.

    cut(image, box, flip, size=224, interpolation="bicubic")       # PIL image -> (3, 224, 224) uint8
    resample(images, windows, size=224, interpolation="bicubic")   # (b, 3, s, s) uint8 -> (b, 3, 224, 224)

Both widen the filter when they shrink (antialiasing) and agree to within about a grey level. The batch is two matrix
products an image: weights (size, s) over the columns, then over the rows, so any window, flipped or not, shrunk or
enlarged, costs the same and needs no special case.
"""

import numpy as np
import torch
from jaxtyping import Float, UInt8
from PIL import Image
from torch import Tensor

from msvit.lab.data.crops import Windows

FILTERS = {"bilinear": Image.Resampling.BILINEAR, "bicubic": Image.Resampling.BICUBIC}


def check_interpolation(interpolation: str) -> None:
    if interpolation not in FILTERS:
        raise ValueError(f"interpolation is {interpolation!r}, but must be one of {', '.join(FILTERS)}")


def cut(image: Image.Image, box: np.ndarray, flip: bool, *, size: int, interpolation: str) -> UInt8[Tensor, "c h w"]:
    """The window `box` (left, top, right, bottom as shares) of an RGB or grey image, `size` px wide and high."""
    left, top, right, bottom = box.tolist()
    pixels = (left * image.width, top * image.height, right * image.width, bottom * image.height)
    square = np.asarray(image.resize((size, size), FILTERS[interpolation], box=pixels))
    square = square.reshape(size, size, -1).transpose(2, 0, 1)  # (c, size, size)
    return torch.from_numpy(np.array(square[:, :, ::-1] if flip else square, order="C"))


def resample(
    images: UInt8[Tensor, "b c s s"], windows: Windows, *, size: int, interpolation: str
) -> Float[Tensor, "b c h w"]:
    """The same for a batch of squares, on the device they lie on. Grey levels 0 to 255, not rounded."""
    dtype = torch.float16 if images.is_cuda else torch.float32  # 11 bits are enough for 8
    left, top, right, bottom = torch.from_numpy(windows.box.T).to(images.device, torch.float32)
    flip = torch.from_numpy(windows.flip).to(images.device)
    left, right = torch.where(flip, right, left), torch.where(flip, left, right)
    rows = weights(top, bottom, images.shape[2], size, interpolation).to(dtype)  # (b, h, s)
    columns = weights(left, right, images.shape[3], size, interpolation).to(dtype)  # (b, w, s)
    narrow = images.to(dtype).flatten(1, 2) @ columns.mT  # (b, c * s, w)
    return (rows[:, None] @ narrow.unflatten(1, images.shape[1:3])).float().clamp_(0, 255)  # (b, c, h, w)


def weights(
    start: Float[Tensor, " b"], stop: Float[Tensor, " b"], num_pixels: int, size: int, interpolation: str
) -> Float[Tensor, "b size s"]:
    """How much each of `num_pixels` pixels counts in each of `size` samples between start and stop (shares)."""
    count = torch.full_like(start, num_pixels)
    return pixel_weights(start * count, stop * count, count, canvas=num_pixels, size=size, interpolation=interpolation)


def pixel_weights(
    start: Float[Tensor, " b"],
    stop: Float[Tensor, " b"],
    count: Float[Tensor, " b"],
    *,
    canvas: int,
    size: int,
    interpolation: str,
) -> Float[Tensor, "b size canvas"]:
    """The same with start and stop in pixels, for images that fill `count` pixels of a larger canvas.

    Pixels after these count for nothing. A sample beyond the image is its nearest pixel.
    """
    step = (stop - start)[:, None, None] / size  # pixels a sample; negative from right to left
    reach = step.abs().clamp(min=1)
    count = count[:, None, None]
    centre = start[:, None, None] + step * (torch.arange(size, device=start.device)[:, None] + 0.5)
    centre = centre.clamp(min=0).minimum(count)
    pixel = torch.arange(canvas, device=start.device) + 0.5
    distance = (pixel / reach - centre / reach).abs_()  # (b, size, canvas)
    weight = triangle(distance) if interpolation == "bilinear" else cubic(distance)
    weight = weight.mul_(pixel < count)
    return weight.div_(weight.sum(2, keepdim=True))


def triangle(x: Tensor) -> Tensor:
    return (1 - x).clamp_(min=0)


def cubic(x: Tensor) -> Tensor:
    """The cubic convolution kernel with a = -1/2, as PIL has it."""
    near = (1.5 * x - 2.5) * x * x + 1
    far = ((-0.5 * x + 2.5) * x - 4) * x + 2
    return torch.where(x < 1, near, torch.where(x < 2, far, torch.zeros_like(x)))
