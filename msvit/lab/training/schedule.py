"""Learning rates over a run: linear warm-up, then a cosine or nearly a line; the gate warms up for longer."""

import math

import torch

from msvit.lab.config import Config


def cosine(done: float) -> float:
    return 0.5 * (1 + math.cos(math.pi * done))


def poly(done: float) -> float:
    return float((1 - done) ** 0.9)


SCHEDULES = {"cosine": cosine, "poly": poly}  # share of the run that is done -> share of the rate that is left


def rate(step: int, num_steps: int, num_warmup: float, peak: float, floor: float, schedule: str = "cosine") -> float:
    """The learning rate of a step, 0-based."""
    warm = min(1.0, (step + 1) / num_warmup) if num_warmup > 0 else 1.0
    return warm * (floor + (peak - floor) * SCHEDULES[schedule](step / max(1, num_steps)))


def set_rates(optimizer: torch.optim.Optimizer, step: int, num_steps: int, per_epoch: int, config: Config) -> None:
    for group in optimizer.param_groups:
        epochs = config.gate.warmup_epochs if group["gate"] else config.optim.warmup_epochs
        floor = config.optim.min_lr * group["peak"] / config.optim.lr
        group["lr"] = rate(step, num_steps, epochs * per_epoch, group["peak"], floor, config.optim.schedule)


def passes(step: int, every: float) -> bool:
    """Whether this step reaches a multiple of `every`, which need not be whole."""
    return int(step / every) > int((step - 1) / every)
