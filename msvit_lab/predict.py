"""Predictions of a trained run, or of a saved model, for image files: one record for each, and pictures if wanted.

    predictor = read_predictor(Path("runs/photos"))
    for found in predict_files(predictor, ["photo.jpg", "holiday/"], top=5, overlays=Path("drawn")):
        found.path, found.error                  # a file that cannot be read has an error instead of a prediction
        print(found)                             # holiday/a.jpg: beagle 93.1 %, basset hound 4.0 %; 103 of 196 tokens
        found.record()                           # the same as values for JSON

Classes are those of an image or, of a segmentation run, of its pixels, whose shares are counted.
"""

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, UInt8
from PIL import Image

from msvit.image_files import ENDINGS, read_image
from msvit.model import inner_msvit
from msvit.prediction import ClassScore, Prediction, class_names, groups, predict_sorted, resolve, stack
from msvit.segmenter import Segmenter
from msvit_lab.config import Config
from msvit_lab.evaluation.sliding import predict, starts
from msvit_lab.hosts import read_model
from msvit_lab.tasks import slide
from msvit_lab.viz.files import list_files, name_pictures
from msvit_lab.viz.pictures import PALETTE, label_picture, overlay, save_png, side_by_side, with_caption
from msvit_lab.viz.tokens import draw_reduced, for_display, in_words, reduced_beside

BATCH = 16  # images at once
PANEL = 512  # px: masks and classes are enlarged by whole numbers as long as their longer side is not above
WINDOW = 256  # images among which those with similar numbers of tokens are batched together


@dataclass(frozen=True)
class FilePrediction:
    """What was found for one file: classes with their probabilities, or shares of pixels; or why there is nothing."""

    path: Path
    top: tuple[ClassScore, ...] = ()
    tokens: int = 0
    max_tokens: int = 0
    pictures: tuple[Path, ...] = ()
    error: str | None = None
    reduced: bool = False  # tokens are those that a reducer leaves at the end

    def __str__(self) -> str:
        if self.error is not None:
            return self.error
        return f"{self.path}: {in_percent(self.top)}; {in_words(self.tokens, self.max_tokens, self.reduced)}"

    def record(self) -> dict[str, Any]:
        """Values for JSON."""
        if self.error is not None:
            return {"path": str(self.path), "error": self.error}
        top = [{"class": name, "probability": value} for name, value in self.top]
        found = {"path": str(self.path), "top": top, "tokens": self.tokens, "max_tokens": self.max_tokens}
        return {**found, "pictures": list(map(str, self.pictures))} if self.pictures else found


class Classifier:
    """A classifier with the preprocessing of its evaluation."""

    kind = "tokens"
    window = WINDOW

    def __init__(self, model: Any) -> None:
        self.model = model

    def prepare(self, photo: Image.Image) -> torch.Tensor:
        """What `predict_prepared` takes."""
        return resolve(self.model, None, None, None)(photo)

    def predict_prepared(self, images: list[torch.Tensor], top: int) -> list[Prediction]:
        """In batches of similar numbers of tokens."""
        return predict_sorted(self.model, images, top, BATCH)

    def draw(self, photo: Image.Image, found: Prediction, picture: Path) -> tuple[Path, ...]:
        """What the model sees of the photograph, with its tokens; the prediction below. And what a reducer leaves."""
        assert self.model.preprocessing is not None, "it has predicted"
        box = tuple(map(round, self.model.preprocessing.box(*photo.size)))
        shown = np.array(for_display(photo.crop(box)))
        drawn = overlay(shown, found.mask.byte().numpy(), self.model.coarse // self.model.fine)
        tokens = in_words(found.tokens, found.max_tokens, self.model.reducer is not None)
        text = f"{in_percent(found.top[:3])}; {tokens}"
        pictures = (save_png(with_caption(drawn, text), picture),)
        if self.model.reducer is None:
            return pictures
        image = stack(self.model, [self.prepare(photo)])
        seen = np.array(photo.crop(box).resize((image.shape[3], image.shape[2]), Image.Resampling.BICUBIC))
        return *pictures, draw_reduced(self.model, image, seen, shown.shape[:2], reduced_beside(picture)).path


class PixelClassifier:
    """A segmentation run: windows of its own size over the image at its own short side, as in its evaluation."""

    kind = "segmentation"
    window = BATCH  # whole photographs

    def __init__(self, model: Segmenter, config: Config) -> None:
        self.model, self.data, self.slide = model, config.data, slide(config)
        self.classes = class_names(model)

    def prepare(self, photo: Image.Image) -> Image.Image:
        return photo

    def predict_prepared(self, photos: list[Image.Image], top: int) -> list[Prediction]:
        return [self.predict_one(photo, top) for photo in photos]

    @torch.inference_mode()
    def predict_one(self, photo: Image.Image, top: int) -> Prediction:
        """Shares of pixels, largest first; classes without any are left out."""
        image = self.normalised(photo).to(next(self.model.parameters()).device)
        (found,) = predict(self.model, [image], [(photo.height, photo.width)], self.slide)
        labels = found.prob.argmax(0).cpu()
        counts = torch.bincount(labels.flatten(), minlength=len(self.classes)) / labels.numel()
        best = counts.sort(descending=True, stable=True)
        shares = zip(best.indices[:top].tolist(), best.values[:top].tolist(), strict=True)
        scores = tuple(ClassScore(self.classes[label], share) for label, share in shares if share > 0)
        tokens, window_tokens = found.costs.tokens, (self.slide.window // self.model.fine) ** 2  # with all cells fine
        return PixelPrediction(
            scores, int(tokens.sum()), window_tokens * len(tokens), found.costs.masks.cpu(), labels.numpy(),
            gmacs=float(found.costs.macs.double().sum()) / 1e9,
        )  # fmt: skip

    def scaled(self, photo: Image.Image) -> tuple[int, int]:
        """Width and height at which the run sees a photograph: its shorter side as in the run's evaluation."""
        factor = 1.0 if self.data.short_side is None else self.data.short_side / min(photo.size)
        return max(1, round(photo.width * factor)), max(1, round(photo.height * factor))

    def normalised(self, photo: Image.Image) -> Float[torch.Tensor, "3 h w"]:
        """At that size."""
        assert None not in (self.data.mean, self.data.std), "a run has resolved them"
        pixels = torch.from_numpy(np.array(photo.resize(self.scaled(photo), Image.Resampling.BILINEAR)))
        mean, std = (torch.tensor(values).view(3, 1, 1) for values in (self.data.mean, self.data.std))
        return (pixels.permute(2, 0, 1) / 255 - mean) / std

    def draw(self, photo: Image.Image, found: "PixelPrediction", picture: Path) -> tuple[Path, ...]:
        """NAME.labels.png, a byte for each pixel, and NAME.segmentation.png: masks and classes in colour."""
        stem, labels = picture.name.removesuffix(".png").removesuffix(f".{self.kind}"), found.labels.astype(np.uint8)
        width, height = self.scaled(photo)
        scale = max(1, PANEL // max(width, height))
        size = width * scale, height * scale
        shown = np.array(photo.resize(size, Image.Resampling.BICUBIC))
        resized = np.array(Image.fromarray(labels).resize(size, Image.Resampling.NEAREST))
        drawn = side_by_side([self.draw_masks(shown, found.mask.numpy(), scale), label_picture(resized)])
        classes = np.unique(labels).tolist()
        legend = [(np.full((64, 64, 3), PALETTE[index], np.uint8), self.classes[index]) for index in classes]
        return (
            save_png(labels, picture.with_name(f"{stem}.labels.png")),
            save_png(with_caption(drawn, in_words(found.tokens, found.max_tokens), legend), picture),
        )

    def draw_masks(self, shown: np.ndarray, masks: np.ndarray, scale: int) -> UInt8[np.ndarray, "height width 3"]:
        """The mask of each window where it lies on the picture, which has `scale` x `scale` px for each px of the run.

        Where windows overlap, that of the last is shown.
        """
        (height, width), side = shown.shape[:2], self.slide.window * scale
        plain = np.pad(shown, ((0, max(0, side - height)), (0, max(0, side - width)), (0, 0)))
        drawn = plain.copy()
        corners = product(starts(height // scale, self.slide), starts(width // scale, self.slide))
        for (top, left), mask in zip(corners, masks, strict=True):
            part = np.s_[top * scale : top * scale + side, left * scale : left * scale + side]
            drawn[part] = overlay(plain[part], mask, self.model.coarse // self.model.fine)
        return drawn[:height, :width]


@dataclass(frozen=True)
class PixelPrediction(Prediction):
    """`top` are shares of pixels; `mask` (n, hc, wc) is of each window."""

    labels: np.ndarray  # (h, w): the class of each pixel


Predictor = Classifier | PixelClassifier


def read_predictor(folder: Path) -> Predictor:
    """The model of a run, or of a folder of `msvit.save`, on the GPU if there is one."""
    model, config = read_model(folder)
    model = inner_msvit(model) or model
    model = model.to("cuda" if torch.cuda.is_available() else "cpu").eval()
    if not isinstance(model, Segmenter):
        return Classifier(model)
    if config is None:
        raise ValueError(
            f"{folder} holds a Segmenter, but not the windows it was trained with; give the run folder, the one with "
            f"config.json in it"
        )
    return PixelClassifier(model, config)


def predict_files(
    predictor: Predictor, images: Sequence[str | Path], top: int = 5, overlays: Path | None = None
) -> Iterator[FilePrediction]:
    """Each file in order. `overlays`: a folder for pictures of what was found, named after the files."""
    if overlays is not None and (overlays.is_file() or overlays.suffix.lower() in ENDINGS):
        raise ValueError(f"--overlay is {overlays}, but must be a folder for the pictures; call it {overlays.stem}")
    files = list_files(images, command="predict")
    pictures = {} if overlays is None else name_pictures(files, overlays, predictor.kind)
    for path, found in predict_paths(predictor, [path for path, _ in files], top, BATCH):
        if isinstance(found, ValueError):
            yield FilePrediction(path, error=str(found))
        else:
            drawn = predictor.draw(read_image(path), found, pictures[path]) if pictures else ()
            reduced = predictor.model.reducer is not None
            yield FilePrediction(path, found.top, found.tokens, found.max_tokens, drawn, reduced=reduced)


def predict_paths(predictor: Predictor, paths: Iterable[Path], top: int, window: int) -> Iterator[tuple[Path, Any]]:
    """Each file in order, `window` at once, with its prediction, or a ValueError. They are prepared in threads."""

    def prepare(path: Path) -> Any:
        try:
            return predictor.prepare(read_image(path))
        except ValueError as error:
            return error

    with ThreadPoolExecutor(torch.get_num_threads()) as threads:
        for group in groups(paths, window):
            prepared = list(threads.map(prepare, group))
            usable = [each for each in prepared if not isinstance(each, ValueError)]
            found = iter(predictor.predict_prepared(usable, top) if usable else [])
            for path, each in zip(group, prepared, strict=True):
                yield path, each if isinstance(each, ValueError) else next(found)


def in_percent(top: Sequence[ClassScore]) -> str:
    return ", ".join(f"{name} {100 * value:.1f} %" for name, value in top)
