"""From a configuration to the parts of a run: model, gate loss, optimizer, data."""

from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import timm
import torch
from torch import nn

from msvit.checkpoint import load, rebuilds
from msvit.conversion import convert
from msvit.data import Loader, Source, batches, check_same_classes, open_source
from msvit.gates import GATES, AllFine, Gate, LearnedGate
from msvit.host_config import check_name
from msvit.losses import LOSSES
from msvit.model import MSViT
from msvit.reduction import make_reducer
from msvit.training.config import Config
from msvit.training.run import read_config
from msvit.types import ScaleGrid

SCENE = 64  # px: scenes are drawn at one size and resized, as photographs are


@dataclass(frozen=True)
class Sources:
    train: Source
    val: Source


def open_sources(config: Config) -> Sources:
    data = config.data
    train = open_source(data.source, "train", size=SCENE, num_images=data.num_train)
    val = open_val(config, train.classes)
    check_same_classes(train, val)
    return Sources(train, val)


def open_val(config: Config, classes: list[str]) -> Source:
    """The validation set, its labels numbered as in training."""
    return open_source(config.data.source, "val", classes=classes, size=SCENE, num_images=config.data.num_val)


def make_loader(
    source: Source, config: Config, *, train: bool, device: torch.device, rank: int = 0, world_size: int = 1
) -> Loader:
    data, optim = config.data, config.optim
    return batches(
        source, img_size=data.img_size, batch_size=optim.batch_size // optim.accumulate, train=train, mean=data.mean,
        std=data.std, crops=data.crops, interpolation=data.interpolation, eval_crop=data.eval_crop, device=device,
        seed=config.seed, workers=data.workers, cache=data.cache, skip_bad=data.skip_bad, rank=rank,
        world_size=world_size,
    )  # fmt: skip


def make_model(config: Config, num_classes: int) -> MSViT:
    host = make_host(config, num_classes)
    model = convert(host, coarse=config.model.coarse, gate=AllFine(coarse=config.model.coarse or 2 * patch(host)))
    if config.optim.zero_head:
        for head in (getattr(host, name, None) for name in ("head", "head_dist")):
            if isinstance(head, nn.Linear):
                nn.init.zeros_(head.weight)
                nn.init.zeros_(head.bias)
    ScaleGrid(config.data.img_size, config.data.img_size, fine=model.fine, coarse=model.coarse)  # do cells fit?
    about = config.reducer
    reducer = make_reducer(about.name, rate=about.rate, r=about.r, at=about.at)
    return MSViT(model.backbone, make_gate(config, model), model.coarse, config.model.mode, reducer)


def make_teacher(config: Config, model: MSViT) -> MSViT | None:
    """The dense model that a reducer learns from, if it does: a run's, or the host as it is now."""
    if model.reducer is None or not model.reducer.needs_teacher:
        return None
    folder, own = config.reducer.teacher, model.host
    if folder is None:
        host = deepcopy(own)
    else:
        about = read_config(Path(folder))
        host = load_trained(Path(folder), about["config"], len(about["classes"])).host
        shapes = [(h.embed_dim, h.num_classes, patch(h)) for h in (host, own)]
        if shapes[0] != shapes[1]:
            raise ValueError(
                f"the teacher {folder} has width, classes and patch size {shapes[0]}, but the model has {shapes[1]}; "
                f"train a dense one of the same kind (--gate none) and give it by --set reducer.teacher=RUN"
            )
    teacher = convert(host, coarse=model.coarse, gate=AllFine(coarse=model.coarse))
    return teacher.eval().requires_grad_(False)


def patch(host: Any) -> int:
    return host.patch_embed.patch_size[0]


def make_host(config: Config, num_classes: int) -> nn.Module:
    """A timm model with our number of classes and input size, and its pretrained weights if asked for."""
    about = config.model
    check_name(about.name)
    options: dict[str, Any] = {"num_classes": num_classes, "img_size": config.data.img_size, **about.options}
    if about.weights is not None:
        if not Path(about.weights).is_file():
            raise ValueError(f"model.weights is {about.weights}, but there is no such file; give a weights file")
        options |= {"pretrained": True, "pretrained_cfg_overlay": {"file": about.weights}}
    elif about.pretrained:
        options |= {"pretrained": True}
    try:
        return timm.create_model(about.name, **options)
    except Exception as error:  # whatever a hub, a file of weights or a constructor may raise
        source = about.weights or ("its pretrained weights" if about.pretrained else "random weights")
        raise ValueError(
            f"timm cannot build {about.name} from {source} with model.options {about.options} "
            f"({type(error).__name__}: {error}); weights on disk are given by --set model.weights=FILE"
        ) from None


def load_trained(folder: Path, config: Config, num_classes: int) -> MSViT:
    """The model of a run; a host that words do not describe is built as it was for training."""
    bare = replace(config, model=replace(config.model, weights=None, pretrained=False))
    return load(folder / "model", host=None if rebuilds(folder / "model") else make_host(bare, num_classes))


def make_gate(config: Config, model: MSViT) -> Gate:
    about, coarse = config.model, model.coarse
    if about.gate == "none":
        return AllFine(coarse=coarse)
    if about.gate == "learned":
        side = config.data.img_size // coarse
        gate = config.gate
        return LearnedGate(
            coarse, grid=(side, side), in_chans=model.backbone.in_chans, noise=gate.noise, temperature=gate.temperature
        )
    options = {} if about.gate == "all-coarse" else {"share": about.share}
    return GATES[about.gate](coarse=coarse, **options)


def make_gate_loss(config: Config, model: MSViT) -> nn.Module | None:
    """The loss that pulls a learned gate towards its target; None where there is nothing to pull."""
    if not isinstance(model.gate, LearnedGate) or model.gate.frozen:
        return None
    gate = config.gate
    if gate.loss == "gbas":
        side = config.data.img_size // model.coarse
        return LOSSES["gbas"](target=gate.target, grid=(side, side), center=gate.center)
    return LOSSES[gate.loss](target=gate.target)


def make_optimizer(config: Config, model: MSViT, gate_loss: nn.Module | None) -> torch.optim.Optimizer:
    """Three groups: weights with decay, weights without, and what starts from nothing, gate and reducer.

    These have a warm-up and a rate of their own.
    """
    optim = config.optim
    weights = [p for p in model.host.parameters() if p.requires_grad]
    gate = [p for p in new_parameters(model, gate_loss) if p.requires_grad]
    groups = [
        {"params": [p for p in weights if p.ndim > 1], "weight_decay": optim.weight_decay, "peak": optim.lr},
        {"params": [p for p in weights if p.ndim <= 1], "weight_decay": 0.0, "peak": optim.lr},
        {"params": gate, "weight_decay": 0.0, "peak": optim.lr * config.gate.lr_scale, "gate": True},
    ]
    groups = [{"gate": False, **group} for group in groups if group["params"]]
    if optim.name == "sgd":
        return torch.optim.SGD(groups, lr=optim.lr, momentum=optim.momentum)
    return torch.optim.AdamW(groups, lr=optim.lr)


def new_parameters(model: MSViT, gate_loss: nn.Module | None) -> list[nn.Parameter]:
    """What the host did not bring: of the gate, its loss and the reducer."""
    parts = (model.gate, gate_loss, model.reducer)
    return [parameter for part in parts if part is not None for parameter in part.parameters()]
