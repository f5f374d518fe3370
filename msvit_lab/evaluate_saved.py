"""Evaluate a folder of `msvit.save` on labelled images, beside its dense host. Nothing is written.

    evaluate_saved(Path("vit-60"), "photos/val")     # {"top1": 0.81, "dense_top1": 0.82, "tokens": {...}, ...}
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from msvit.gates import AllFine
from msvit.model import MSViT, inner_msvit
from msvit.prediction import class_names, resolve
from msvit.preprocessing import Preprocessing
from msvit.saving.model import load
from msvit.segmenter import Segmenter
from msvit_lab.compiled import compile_for_batches
from msvit_lab.config import Config, Data
from msvit_lab.data import Source
from msvit_lab.data.files import find_split, list_images, split_below
from msvit_lab.data.loader import make_loader
from msvit_lab.data.sources import FileSource
from msvit_lab.data.transforms import Crop, Key, Windows
from msvit_lab.evaluate import summarise
from msvit_lab.evaluation.classification import evaluate_classifier
from msvit_lab.evaluation.shared import packed

BATCH = 64


@dataclass(frozen=True, kw_only=True)
class Shown(Crop):
    """What a model's preprocessing shows of an image."""

    preprocessing: Preprocessing

    def __call__(self, size: np.ndarray, key: Key, thumb: np.ndarray | None = None) -> Windows:
        box = np.array([self.preprocessing.box(width, height) for height, width in size])  # (b, 4) px
        return self.inside(box / np.tile(size[:, ::-1], 2))


def evaluate_saved(
    folder: Path, data: str, *, skip_bad: bool = False, compile: bool = True, device: torch.device | None = None
) -> dict[str, Any]:
    """What `msvit eval` shows of a saved model."""
    saved = load(folder)
    if isinstance(saved, Segmenter):
        raise ValueError(f"{folder} holds a Segmenter, but not the windows it was trained with; evaluate its run")
    device = device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = (inner_msvit(saved) or saved).float().to(device)
    if not model.num_classes:
        raise ValueError(f"{folder} holds a model without a classifier, which has no accuracy; give another")
    shown, source = resolve(model, None, None, None), open_labelled(data, model)
    crop = Shown(side=shown.size, interpolation=shown.interpolation, preprocessing=shown)
    about: dict[str, Any] = {"mean": shown.mean, "std": shown.std, "skip_bad": skip_bad, "device": device}
    loader = make_loader(source, crop, crop, batch_size=BATCH, train=False, **about)
    config = Config(data=Data(source=data, img_size=shown.size))
    runner, choice = compile_for_batches(packed(model), BATCH, len(loader), graphs="auto" if compile else False)
    result = evaluate_classifier(runner, loader, num_classes=len(source.classes))
    dense = MSViT(model.backbone, AllFine(model.coarse), model.coarse)  # nothing is merged
    of_dense = evaluate_classifier(dense, loader, num_classes=len(source.classes))
    return {
        **summarise(model, result, config), "dense_top1": of_dense.scores["top1"], "data": data,
        "img_size": shown.size, "reducer": None if model.reducer is None else model.reducer.words,
        "num_skipped": len(loader.skipped), "compiled": choice.compiled, "uncompiled": choice.reason,
    }  # fmt: skip


def open_labelled(data: str, model: MSViT) -> Source:
    """DATA/val, or DATA itself. Class folders have the names of the model's classes, their numbers, or their order."""
    path, names = Path(data).expanduser(), list(class_names(model))
    if not path.exists():
        raise ValueError(f"{path} does not exist; give a folder with a folder of images for each class, or a tar")
    whole = split_below(path, "val") is None and split_below(path, "train") is None
    listing = list_images(path if whole else find_split(path, "val"))
    numbered = [name for name in listing.classes if name.isdecimal()]
    if set(listing.classes) <= set(names):
        numbers = [names.index(name) for name in listing.classes]
    elif numbered == listing.classes and "0" in numbered and max(map(int, numbered)) < len(names):
        numbers = [int(name) for name in numbered]
    else:
        if len(listing.classes) != len(names) or numbered:
            raise ValueError(
                f"{path} has {len(listing.classes)} classes, among them {', '.join(listing.classes[:3])}, but the "
                f"model has {len(names)}, such as {', '.join(names[:3])}; name the folders as these, or number them "
                f"from 0"
            )
        numbers = list(range(len(names)))
    return FileSource(listing.places, [numbers[label] for label in listing.labels], names)
