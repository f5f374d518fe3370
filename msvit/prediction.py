"""Predictions: image files or PIL images -> the most probable classes of each, by a converted classifier.

    (prediction,) = model.predict("photo.jpg")
    prediction.name, prediction.probability      # "beagle", 0.93
    prediction.top                               # (ClassScore("beagle", 0.93), ClassScore("basset hound", 0.04), ...)
    prediction.tokens, prediction.max_tokens     # 103, 196
    model.predict(["a.jpg", Image.open("b.png")], top=1)
    model.predict("photos/")                     # of all images in a folder and those inside it, sorted by path: .path
"""

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from PIL import Image
from torch import Tensor

from msvit.checks import check_int, shown
from msvit.image_files import ImageInput, open_input, read_folder
from msvit.preprocessing import Preprocessing
from msvit.shapes import Float

T = TypeVar("T")
NUM_IMAGENET = 1000  # classes


class ClassScore(NamedTuple):
    """A class and its probability."""

    name: str
    probability: float


@dataclass(frozen=True)
class Prediction:
    """The prediction for one image."""

    top: tuple[ClassScore, ...]  # the most probable first
    tokens: int  # after the last block, without class token and registers
    max_tokens: int  # with all cells fine
    mask: Float[Tensor, "hc wc"] = field(repr=False, compare=False)  # 1 = fine
    gmacs: float = field(kw_only=True)  # of gate and forward
    path: Path | None = field(default=None, kw_only=True, compare=False)  # of the file, where it was one

    @property
    def name(self) -> str:
        return self.top[0].name

    @property
    def probability(self) -> float:
        return self.top[0].probability


@torch.inference_mode()
def predict(
    model: Any, images: ImageInput | Iterable[ImageInput], top: int, preprocessing: Preprocessing, batch_size: int
) -> list[Prediction]:
    """Predict as `MSViT.predict` does, with this preprocessing."""
    check_int("top", top, at_least=1, example=5)
    check_int("batch_size", batch_size, at_least=1, example=32)
    if not model.num_classes:
        raise ValueError("the model has no classifier (num_classes is 0); call model.encode for features")
    given = [images] if isinstance(images, str | os.PathLike | Image.Image) else images
    if isinstance(given, Tensor) or not isinstance(given, Iterable):
        raise ValueError(f"images are {shown(given)}, but must be paths or PIL images; call model(images) for tensors")
    was_training = model.training
    if was_training:
        model.eval()  # no noise in the gate, no dropout
    try:
        predictions = []
        for group in groups(read_inputs(given), batch_size):
            found = predict_batch(model, stack(model, [preprocessing(image) for _, image in group]), top)
            predictions += [replace(each, path=path) for each, (path, _) in zip(found, group, strict=True)]
    finally:
        if was_training:
            model.train()
    return predictions


def read_inputs(images: Iterable[ImageInput]) -> Iterator[tuple[Path | None, Image.Image]]:
    """Yield the images, of folders those that can be read, with the paths of files."""
    for image in images:
        if isinstance(image, str | os.PathLike) and os.path.isdir(image):
            yield from read_folder(image)
        else:
            picture = open_input(image)
            yield None if isinstance(image, Image.Image) else Path(image), picture


@torch.inference_mode()
def predict_sorted(model: Any, images: list[Tensor], top: int, batch_size: int) -> list[Prediction]:
    """Predict prepared images (c, h, w): the gate first, then batches of similar numbers of tokens; in their order."""
    image = stack(model, images)  # (n, c, h, w)
    mask = torch.cat([model.gate(part).mask for part in image.split(batch_size)])  # (n, hc, wc)
    order = mask.flatten(1).sum(1).sort(descending=True, stable=True).indices  # the largest first: memory is got once
    predictions: dict[int, Prediction] = {}
    for rows in order.split(batch_size):
        decided = mask[rows] if mask[rows].isfinite().all() else None  # NaN of broken weights: as without a mask
        predictions |= zip(rows.tolist(), predict_batch(model, image[rows], top, decided), strict=True)
    return [predictions[row] for row in range(len(images))]


def stack(model: Any, images: list[Tensor]) -> Tensor:
    """Stack images to one batch, on the device and in the precision of the model's weights."""
    weight = model.host.patch_embed.proj.weight
    return torch.stack(images).to(weight.device, weight.dtype)


def predict_batch(
    model: Any, image: Float[Tensor, "b c h w"], top: int, mask: Float[Tensor, "b hc wc"] | None = None
) -> list[Prediction]:
    """Predict one batch. `mask`: the decisions of the model's gate, if it has run already."""
    output = model(image) if mask is None else model(image, mask=mask)
    grid = output.tokens.layout.grid
    max_tokens = int(model.backbone.num_tokens(torch.tensor(grid.num_cells), grid))
    best = output.logits.float().softmax(1).topk(min(top, output.logits.shape[1]), dim=1)
    names = class_names(model)
    scores = [
        tuple(ClassScore(names[label], value) for label, value in zip(*row, strict=True))
        for row in zip(best.indices.tolist(), best.values.tolist(), strict=True)
    ]
    gmacs = [macs / 1e9 for macs in model.macs_of(output).tolist()]
    rows = zip(scores, output.tokens.count.tolist(), output.gate.mask.float().cpu(), gmacs, strict=True)
    return [Prediction(each, count, max_tokens, mask, gmacs=cost) for each, count, mask, cost in rows]


def class_names(model: Any) -> Sequence[str]:
    """Return the names of a model's classes; if it has none, ImageNet's for its 1,000, else their numbers."""
    if model.classes is None and model.num_classes == model.pretrained_cfg.get("num_classes") == NUM_IMAGENET:
        return imagenet_names()
    return model.classes or [f"class {label}" for label in range(model.num_classes)]


@cache
def imagenet_names() -> Sequence[str]:
    """Return the first name of each class, as timm has them."""
    from timm.data import ImageNetInfo

    known = ImageNetInfo()
    return [known.index_to_description(label).split(",")[0] for label in range(NUM_IMAGENET)]


def resolve(model: Any, size: int | None, mean: Sequence[float] | None, std: Sequence[float] | None) -> Preprocessing:
    """Return the model's preprocessing with what is given instead; raise ValueError where neither is known."""
    given: dict[str, Any] = {"size": size, "mean": mean and tuple(mean), "std": std and tuple(std)}
    given = {name: value for name, value in given.items() if value is not None}
    default = model.preprocessing
    if default is not None:
        return replace(default, **given)
    if missing := [f"{name}=" for name in ("size", "mean", "std") if name not in given]:
        raise ValueError(
            f"how images are prepared for this model is not known, as it was saved without a preprocessing and its "
            f"host has no pretrained_cfg; pass {', '.join(missing)}, such as model.predict(image, size=224, "
            f"mean=(0.5,) * 3, std=(0.5,) * 3), set model.preprocessing = msvit.Preprocessing(...), or, to "
            f"msvit.speed_up, pass preprocessing=msvit.Preprocessing(...)"
        )
    return Preprocessing(**given)


def groups(values: Iterable[T], num: int) -> Iterator[list[T]]:
    """Yield lists of `num` values; the last may be shorter."""
    left = iter(values)
    while group := list(islice(left, num)):
        yield group
