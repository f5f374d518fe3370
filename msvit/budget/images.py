"""Images of every kind that people have, as batches of tensors.

    for batch in batches(model, images):           # a folder, paths, PIL images, a tensor, a DataLoader
    for batch in checked_batches(model, images):   # the same on the model's device, of one size, without NaN
    images = some_images(model, images, 1024)      # at most so many of them, on the CPU, in a fixed random order
"""

import os
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from msvit.checks import check_kind, shown, warn_of_pixels
from msvit.host_settings import HostSettings
from msvit.image_files import open_input, read_folder
from msvit.preprocessing import Preprocessing
from msvit.types import check_channels

BATCH = 64  # images, where they do not come in batches
KINDS_OF_IMAGES = (
    "a folder, paths, PIL images, a tensor (n, 3, h, w) or batches of tensors, such as a DataLoader; "
    'a batch may be a tensor, begin with one, or have one as "pixel_values"'
)


def checked_batches(model: Any, images: Tensor | Iterable[Any]) -> Iterator[Tensor]:
    """Yield batches as the encoder takes them. Raise ValueError unless there are some, of one size, without NaN."""
    encoder = gated_encoder(model)
    weight = encoder.host.patch_embed.proj.weight
    first: Tensor | None = None
    for batch in batches(model, images):
        check_channels(batch, encoder.backbone.in_chans)
        if not batch.isfinite().all():
            raise ValueError("images have NaN or infinite pixels, on which nothing can be measured; leave these out")
        if first is None:
            warn_of_pixels(batch, model.max_pixel)
        batch = batch.to(weight.device, weight.dtype)
        batch = batch if encoder is model else model.pad(batch)
        first = batch if first is None else first
        if encoder.grid(batch) != encoder.grid(first):
            raise ValueError(
                f"images are {tuple(first.shape[2:])} and {tuple(batch.shape[2:])} px, but costs are those of "
                f"one size; resize them, or call once for each"
            )
        yield batch
    if first is None:
        raise ValueError("there are no images; pass a folder, a tensor (n, 3, h, w) or batches of them")


def some_images(model: Any, images: Any, most: int) -> Tensor:
    """Return at most so many images on the CPU, in a fixed random order. No more batches are read than needed."""
    if isinstance(images, list | tuple) and all(isinstance(each, str | os.PathLike) for each in images):
        images = shuffled(images)
    parts: list[Tensor] = []
    for batch in checked_batches(model, images):
        parts.append(batch.detach().cpu())
        if sum(map(len, parts)) >= most:
            break
    found = torch.cat(parts)
    return found[torch.randperm(len(found), generator=torch.Generator().manual_seed(0))[:most]]


def batches(model: Any, images: Any) -> Iterator[Tensor]:
    """Yield tensors (b, c, h, w) of a tensor of all images, of batches, or of files and PIL images.

    The last two are prepared as the model has it.
    """
    from msvit.prediction import resolve  # here: `convert` imports this module, and few models read files

    preprocessing = partial(resolve, model, None, None, None)
    if isinstance(images, Tensor):
        if images.numel():
            check_channels(images)
            yield from images.split(BATCH)
        return
    given = [images] if isinstance(images, str | os.PathLike | Image.Image | Mapping) else images
    if not isinstance(given, Iterable) or isinstance(given, bytes):
        raise ValueError(f"images is {shown(images)}, but must be {KINDS_OF_IMAGES}")
    single: list[Tensor] = []  # images that did not come in batches
    for item in given:
        for image in image_tensors(item, preprocessing):
            if image.ndim != 3:
                yield image
                continue
            if single and (len(single) == BATCH or image.shape != single[0].shape):
                yield torch.stack(single)
                single = []
            single.append(image)
    if single:
        yield torch.stack(single)


def image_tensors(item: Any, preprocessing: Callable[[], Preprocessing]) -> Iterator[Tensor]:
    """Yield an item's batch (b, c, h, w), or its images, (c, h, w) each; files are prepared, labels left out."""
    if isinstance(item, Mapping):
        item = next((item[name] for name in ("pixel_values", "image") if name in item), item)
    if isinstance(item, tuple | list) and item and (isinstance(item, tuple) or isinstance(item[0], Tensor)):
        item = item[0]  # what follows are labels
    for image in item if isinstance(item, list) and item else [item]:
        if isinstance(image, Tensor):
            yield image
        elif not isinstance(image, str | os.PathLike | Image.Image):
            raise ValueError(f"images has an item {shown(image)}, but images must be {KINDS_OF_IMAGES}")
        elif not isinstance(image, Image.Image) and os.path.isdir(image):
            yield from (preprocessing()(picture) for _, picture in read_folder(image, shuffled))
        else:
            yield preprocessing()(open_input(image))


def shuffled(paths: Sequence[Any]) -> list[Any]:
    """Shuffle paths, always in the same order: files lie in folders of their class."""
    return random.Random(0).sample(paths, len(paths))


def gated_encoder(model: Any) -> Any:
    """Return the MSViT that has the gate: the model itself, or the encoder of a Segmenter."""
    check_kind("model", model, HostSettings, "a converted model; call msvit.convert first")
    return getattr(model, "encoder", model)
