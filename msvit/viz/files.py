"""Overlays of image files, with the gate of a trained run, the one that comes with msvit, or one without weights."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import timm
import torch
from PIL import Image, ImageOps

from msvit.checkpoint import load_gate
from msvit.conversion import convert
from msvit.data.sources import as_rgb
from msvit.gates import GATES, Gate
from msvit.gates.base import check_share
from msvit.gates.fixed import top_share
from msvit.host_config import check_name, without_weights
from msvit.model import MSViT
from msvit.recipes.imagenet import IMAGENET_MEAN, IMAGENET_STD
from msvit.training.build import load_trained
from msvit.training.run import read_config
from msvit.types import ScaleGrid
from msvit.viz.overlay import colour_by_token, overlay, save_png

SHARE = 0.3  # of fine cells, for gates without weights


@dataclass(frozen=True)
class Chooser:
    """A gate, the model it decides for, and how the images must be prepared for it."""

    gate: Gate
    model: MSViT
    size: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    share: float | None = None  # of fine cells in each image, where the gate's own threshold shall not decide


def draw_files(
    images: list[Path], run: Path | None, model: str, gate: str, share: float | None, size: int | None, out: Path
) -> Iterator[tuple[Path, int]]:
    """Writes NAME.tokens.png for each image; yields its path and the number of tokens.

    If the run has a reducer, NAME.reduced.png shows the tokens that are left at the end.
    """
    names = {path: out / f"{path.stem}.tokens.png" for path in images}
    if twice := [path for path in names if list(names.values()).count(names[path]) > 1]:
        raise ValueError(f"{twice[0]} and {twice[1]} would both be drawn to {names[twice[0]]}; draw them apart")
    chooser = from_run(run, size, share) if run is not None else without_run(model, gate, share, size)
    out.mkdir(parents=True, exist_ok=True)
    for path in images:
        pixels = read_image(path, chooser.size)
        mean, std = (torch.tensor(values).view(3, 1, 1) for values in (chooser.mean, chooser.std))
        image = (torch.from_numpy(pixels).permute(2, 0, 1)[None] / 255 - mean) / std  # (1, 3, size, size)
        with torch.inference_mode():
            choice = chooser.gate.eval()(image)
            mask = (choice.mask if chooser.share is None else top_share(choice.logits, chooser.share))[0]
        coarse, decided = chooser.gate.coarse, chooser.model
        drawn = overlay(pixels, mask.byte().numpy(), coarse, decided.fine, scale=max(1, 448 // chooser.size))
        grid = ScaleGrid(chooser.size, chooser.size, fine=decided.fine, coarse=coarse)
        yield save_png(drawn, names[path]), int(decided.backbone.num_tokens(mask.sum().long(), grid))
        if decided.reducer is not None:
            with torch.inference_mode():
                tokens = decided.eval()(image).tokens
            owner = tokens.layout.owner[0].view(tokens.layout.grid.patches).numpy()
            drawn = colour_by_token(pixels, owner, decided.fine, scale=max(1, 448 // chooser.size))
            yield save_png(drawn, out / f"{path.stem}.reduced.png"), int(tokens.count)


def from_run(run: Path, size: int | None, share: float | None) -> Chooser:
    about = read_config(run)
    config = about["config"]
    model = load_trained(run, config, len(about["classes"]))
    side = size or config.data.img_size
    share = None if share is None else check_share(share)
    return Chooser(model.gate, model, side, config.data.mean, config.data.std, share=share)


def without_run(name: str, gate: str, share: float | None, size: int | None) -> Chooser:
    kinds = ("default", "entropy", "gradient", "disc", "random")
    if gate not in kinds:
        raise ValueError(f"gate {gate!r} needs training or is unknown; without --run choose {', '.join(kinds)}")
    check_name(name)
    share = None if share is None else check_share(share)
    model = without_weights(lambda: convert(timm.create_model(name, pretrained=False)))
    side = size or model.backbone.native_patches[0] * model.fine // model.coarse * model.coarse
    if gate == "default":
        own = load_gate(gate, coarse=model.coarse, frozen=True)
        return Chooser(own, model, side, IMAGENET_MEAN, IMAGENET_STD, share=share)
    own = GATES[gate](coarse=model.coarse, share=SHARE if share is None else share)
    return Chooser(own, model, side, (0.5,) * 3, (0.5,) * 3)


def read_image(path: Path, size: int) -> np.ndarray:
    try:
        with Image.open(path) as image:
            upright = as_rgb(ImageOps.exif_transpose(image))
            return np.array(upright.resize((size, size), Image.Resampling.BICUBIC))
    except FileNotFoundError:
        raise ValueError(f"{path} does not exist; give the path of an image") from None
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise ValueError(f"{path} cannot be read as an image ({error}); give a JPEG, PNG or WebP") from None
