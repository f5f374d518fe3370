"""Settings that follow from the images and the model: what the recipe `folder` leaves open.

    fitted = fit_to_data(config, given={"data.source", "model.name"})
    config = override(config, fitted.changes)       # input size, batch, epochs, rates, and what the gate learns from
    fitted.notes                                    # the same in words

They are written to the run's config.json, so evaluation and --resume have the same.
"""

import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import timm

from msvit.backbones import Backbone, adapt
from msvit.saving.folder import DEFAULT
from msvit.saving.host import build_on_meta, check_name
from msvit_lab.build import open_sources
from msvit_lab.config import Config
from msvit_lab.data.files import splits_itself
from msvit_lab.gate_names import read_gate
from msvit_lab.runs import run_to_start_from

LARGEST = 384  # px: the native size of a model that is taken as it is; DINOv2's 518 px would cost five times 224
USUAL = 224
BATCHES = (8, 64)  # at least, if there are images for two, and at most
STEPS = 600  # about so many, within these epochs:
EPOCHS = {True: (10, 40), False: (30, 100)}  # by whether the host has weights
RATES = {True: 5e-5, False: 5e-4}  # for a batch of 64
CACHED = 5000  # images that are kept decoded, about a gigabyte
GATE_SETTINGS = ("model.gate", "model.gate_from", "model.freeze_gate", "gate.loss", "gate.teacher", "gate.follow")


@dataclass(frozen=True)
class Fitted:
    changes: dict[str, str]  # by dotted name, without those that were given
    notes: list[str]


def fit_to_data(config: Config, given: set[str]) -> Fitted:
    """`given`: names of the settings that a person chose, which stay."""
    sources = open_sources(config)
    num, host = len(sources.train), config.model
    check_name(host.name)
    options = {"pretrained": False, **host.options}  # without memory for its weights, at its native size:
    backbone = build_on_meta(lambda: adapt(timm.create_model(host.name, **options), host.merge_at))
    weights = host.weights is not None or host.pretrained
    batch = fit_batch(num, processes=int(os.environ.get("WORLD_SIZE", "1")))
    batch = config.optim.batch_size if "optim.batch_size" in given else batch
    epochs = config.optim.epochs if "optim.epochs" in given else fit_epochs(num // batch, weights)
    rate = float(f"{RATES[weights] * math.sqrt(batch / BATCHES[1]):.2g}")
    every = max(1, int(epochs) // 10)
    new_head = weights and run_to_start_from(config) is None
    changes: dict[str, Any] = {
        "data.img_size": fit_size(backbone), "data.cache": num + len(sources.val) <= CACHED,
        "optim.batch_size": batch, "optim.epochs": epochs, "optim.lr": rate, "optim.head_scale": 10 if new_head else 1,
        "eval_every": every, "checkpoint_every": every, "log_every": max(1, min(10, num // batch)),
    }  # fmt: skip
    notes = []
    if splits_itself(Path(config.data.source).expanduser()):
        notes.append(
            f"{config.data.source} has no validation set: {len(sources.val)} of {num + len(sources.val)} images are "
            f"held out, {100 * config.data.holdout:g} % of each class or at least one, always the same"
        )
    if not weights:
        notes.append(
            "training from random weights, for which a few thousand images are few; --pretrained starts from timm's, "
            "--weights FILE from weights on disk"
        )
    if not given.intersection(GATE_SETTINGS):
        gate, note = fit_gate(config, backbone, weights)
        changes |= gate
        notes.append(note)
    changes = {name: str(value) for name, value in changes.items() if name not in given}
    notes.append(f"fitted to {num} images: {', '.join(f'{name}={value}' for name, value in changes.items())}")
    return Fitted(changes, notes)


def fit_size(backbone: Backbone) -> int:
    """The host's native size, or 224 px where that is large, in whole cells."""
    host: Any = backbone.host
    native = (host.patch_embed.img_size or (USUAL,))[0]
    cell = backbone.default_coarse(read_gate(Path(DEFAULT))[0])
    return max(1, (native if native <= LARGEST else USUAL) // cell) * cell


def fit_batch(num_images: int, processes: int = 1) -> int:
    """A power of two, about an eighth of the images, within `BATCHES`, such that an epoch has two steps or more."""
    wanted = min(max(num_images // 8, BATCHES[0]), BATCHES[1], num_images // 2)
    batch = 2 ** (max(1, wanted).bit_length() - 1)
    return max(processes, batch // processes * processes)


def fit_epochs(steps: int, weights: bool) -> int:
    low, high = EPOCHS[weights]
    return min(max(math.ceil(STEPS / max(1, steps)), low), high)


def fit_gate(config: Config, backbone: Backbone, weights: bool) -> tuple[dict[str, Any], str]:
    """The gate that comes with msvit: it has learned from photographs what a few hundred steps cannot teach.

    Where a trained host has a class token it goes on learning what that host attends to. Elsewhere there is nothing to
    learn from, and only its threshold follows the images, to the wanted share of fine cells.
    """
    host: Any = backbone.host
    share = f"{config.gate.target:.0%} of the cells fine".replace("%", " %")
    if weights and getattr(host, "cls_token", None) is not None:
        return {"model.gate_from": DEFAULT}, f"msvit's own gate learns what the host attends to, {share}"
    why = "the host has no class token to learn from" if weights else "there are no weights to learn from"
    changes = {"model.gate_from": DEFAULT, "model.freeze_gate": True, "gate.follow": True}
    return changes, f"msvit's own gate is kept as it is, {share}, as {why}"
