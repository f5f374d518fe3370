"""The optimizer, its groups of parameters, and their learning rates over a run."""

import math
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn

from msvit.losses import GeneralizedBatchShaping
from msvit_lab.config import Config
from msvit_lab.tasks import TASKS


def make_optimizer(config: Config, model: Any, gate_loss: nn.Module | None) -> torch.optim.Optimizer:
    """Weights with decay, weights without, the same of classifier or decoder, and those of gate and reducer.

    Classifier or decoder have a rate of their own; gate and reducer have a rate and a warm-up. With `gate.prior_lr`
    theta of GBaS is a last group, with that rate and the gate's warm-up.
    """
    optim, prior_lr = config.optim, config.gate.prior_lr
    head = {id(p) for p in TASKS[config.task].head(model)}
    groups = []
    for scale, inside in ((1.0, False), (optim.head_scale, True)):
        weights = [p for p in host_parameters(model) if p.requires_grad and (id(p) in head) == inside]
        peak = optim.lr * scale
        groups += [
            {"params": [p for p in weights if p.ndim > 1], "weight_decay": optim.weight_decay, "peak": peak},
            {"params": [p for p in weights if p.ndim <= 1], "weight_decay": 0.0, "peak": peak},
        ]
    gate = [p for p in gate_parameters(model, gate_loss) if p.requires_grad]
    theta = gate_loss.raw if prior_lr is not None and isinstance(gate_loss, GeneralizedBatchShaping) else None
    own = {"weight_decay": 0.0, "gate": True}
    groups += [
        {"params": [p for p in gate if p is not theta], "peak": optim.lr * config.gate.lr_scale, **own},
        {"params": [p for p in gate if p is theta], "peak": prior_lr, **own},
    ]
    groups = [{"gate": False, **group} for group in groups if group["params"]]
    if optim.name == "sgd":
        return torch.optim.SGD(groups, lr=optim.lr, momentum=optim.momentum)
    on_gpu = next(model.parameters()).is_cuda
    return torch.optim.AdamW(groups, lr=optim.lr, fused=on_gpu)  # one launch instead of many


def gate_parameters(model: Any, gate_loss: nn.Module | None) -> list[nn.Parameter]:
    """Of the gate, its loss and the reducer."""
    parts = (model.gate, gate_loss, model.reducer)
    return [parameter for part in parts if part is not None for parameter in part.parameters()]


def host_parameters(model: Any) -> list[nn.Parameter]:
    """All others of the model: the host's and, to segment, the decoder's."""
    gate = {id(p) for p in gate_parameters(model, None)}
    return [p for p in model.parameters() if id(p) not in gate]


def clip(accelerator: Accelerator, model: Any, gate_loss: nn.Module | None, config: Config) -> None:
    """Clip all gradients by one norm or, with `gate.clip`, those of gate and reducer apart from the others.

    Apart, neither norm hides the other; together is how the paper has it.
    """
    accelerator.unscale_gradients()
    host, gate = host_parameters(model), gate_parameters(model, gate_loss)
    apart = ((host, config.optim.clip), (gate, config.gate.clip))
    together = ((host + gate, config.optim.clip),)
    for parameters, norm in together if config.gate.clip is None else apart:
        if norm is not None and parameters:
            nn.utils.clip_grad_norm_(parameters, norm)


def rate(step: int, num_steps: int, num_warmup: float, peak: float, floor: float, schedule: str = "cosine") -> float:
    """The learning rate of a step, 0-based: linear warm-up, times a cosine or (1 - done)^0.9."""
    warm = min(1.0, (step + 1) / num_warmup) if num_warmup > 0 else 1.0
    done = step / max(1, num_steps)
    left = 0.5 * (1 + math.cos(math.pi * done)) if schedule == "cosine" else (1 - done) ** 0.9
    return warm * (floor + (peak - floor) * left)


def set_rates(optimizer: torch.optim.Optimizer, step: int, num_steps: int, per_epoch: int, config: Config) -> None:
    for group in optimizer.param_groups:
        epochs = config.gate.warmup_epochs if group["gate"] else config.optim.warmup_epochs
        floor = config.optim.min_lr * group["peak"] / config.optim.lr
        group["lr"] = rate(step, num_steps, epochs * per_epoch, group["peak"], floor, config.optim.schedule)
