"""What a gate is trained with: a loss on its decisions or logits, a teacher, a controller of its threshold.

    objective = make_objective(config, model)
    losses = compute_losses(output, batch, objective, config)      # loss, task and, if the gate learns, gate
    objective.after_step(output, step)                             # the threshold follows the logits
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from msvit.execution.layout import stop_cut_gradients
from msvit.gates import LogitGate
from msvit.losses import LOSSES, Beta, Normal, Prior, RelaxedBernoulli, ThresholdController, attention_loss, edge_loss
from msvit.output import MSViTOutput
from msvit.reduction.attention_recorder import AttentionRecorder
from msvit.reduction.evit import needs_class_token
from msvit_lab.auto_settings import training_mode
from msvit_lab.build import dense_model
from msvit_lab.config import Config
from msvit_lab.data import Batch
from msvit_lab.tasks import TASKS
from msvit_lab.training.state import check_finite

LogitLoss = Callable[[Tensor, Batch], Tensor]  # logits (b, hc, wc), and the batch that they are of


class GateObjective:
    """The base class, and the objective of a gate that is not trained: no loss, nothing to do after a step."""

    module: nn.Module | None = None  # what the optimizer takes and a checkpoint holds

    def loss(self, output: MSViTOutput, batch: Batch) -> Tensor | None:
        return None

    def after_step(self, output: MSViTOutput, step: int) -> None:
        """Called after each optimizer step and EMA update."""

    def after_resume(self) -> None:
        """After a checkpoint was read."""

    def record(self) -> dict[str, Any]:
        """What it has learned, for metrics.jsonl."""
        return {}

    def progress(self) -> dict[str, float]:
        """The same in short, for the lines of training steps."""
        return {}


class ShapingObjective(GateObjective):
    """A loss on the probability of fine cells, or on the noisy sample: the paper's."""

    def __init__(self, module: nn.Module, sampled: bool) -> None:
        self.module, self.sampled = module, sampled

    def loss(self, output: MSViTOutput, batch: Batch) -> Tensor | None:
        assert self.module is not None
        gate = output.gate
        return self.module(fine_prob=gate.sample.float()) if self.sampled else self.module(logits=gate.logits.float())

    def record(self) -> dict[str, Any]:
        theta = getattr(self.module, "theta", None)  # of GBaS
        return {} if theta is None else {"theta": theta.detach().cpu().tolist()}

    def progress(self) -> dict[str, float]:
        theta = getattr(self.module, "theta", None)
        return {} if theta is None else {"prior": theta.mean().item()}  # beside `fine`, the share of fine cells


class LogitObjective(GateObjective):
    """A target for each logit, and a threshold that keeps the share of fine cells; without a loss only the latter.

    `averaged`: the gate of the EMA of the weights, which gets the weights that the threshold belongs to.
    `gather`: from the logits of this process to those of all.
    """

    def __init__(
        self, target: float, gate: LogitGate, averaged: LogitGate, logit_loss: LogitLoss | None,
        gather: Callable[[Tensor], Tensor],
    ) -> None:  # fmt: skip
        self.controller = self.module = ThresholdController(target).to(next(gate.parameters()).device)
        self.gate, self.averaged, self.logit_loss, self.gather = gate, averaged, logit_loss, gather

    def loss(self, output: MSViTOutput, batch: Batch) -> Tensor | None:
        return None if self.logit_loss is None else self.logit_loss(output.gate.logits, batch)

    def after_step(self, output: MSViTOutput, step: int) -> None:
        logits = self.gather(output.gate.logits.detach().contiguous())
        check_finite("a logit of the gate", [logits], step)
        self.controller.update(logits)
        if self.averaged is not self.gate:
            self.averaged.load_state_dict(self.gate.state_dict())
        self.after_resume()

    def after_resume(self) -> None:
        self.gate.threshold = self.averaged.threshold = self.controller.threshold.item()


def make_objective(
    config: Config, model: Any, averaged: Any = None, gather: Callable[[Tensor], Tensor] = lambda logits: logits
) -> GateObjective:
    """`averaged`: the gate of the EMA of the weights, if there is one."""
    gate, about = model.gate, config.gate
    if not isinstance(gate, LogitGate):
        if about.follow:
            raise ValueError(f"gate.follow is true, but a {type(gate).__name__} has no threshold; leave it out")
        return GateObjective()
    if gate.frozen and not about.follow:
        return GateObjective()
    if not gate.frozen and about.loss in LOSSES:
        loss = make_shaping_loss(config, model.coarse).to(next(model.parameters()).device)
        return ShapingObjective(loss, about.sampled)
    logit_loss = None if gate.frozen else make_logit_loss(config, model)
    return LogitObjective(about.target, gate, gate if averaged is None else averaged, logit_loss, gather)


def make_shaping_loss(config: Config, coarse: int) -> nn.Module:
    """A loss of the paper, with the prior and, for GBaS, the hyperprior of the configuration."""
    about, side = config.gate, config.data.img_size // coarse
    width = about.prior_temperature
    priors: dict[str, Prior] = {"relaxed-bernoulli": RelaxedBernoulli(width), "normal": Normal(width), "beta": Beta()}
    options: dict[str, Any] = {} if about.loss == "l0" else {"prior": priors[about.prior]}
    if about.loss == "gbas":
        options |= {"grid": (side, side), "std": about.sigma, "center": about.center}
    return LOSSES[about.loss](target=about.target, **options)


def make_logit_loss(config: Config, model: Any) -> LogitLoss:
    if config.gate.loss == "edges":
        return lambda logits, batch: edge_loss(logits, batch.label, model.coarse)
    attention = teacher_attention(config, model)
    return lambda logits, batch: attention_loss(logits, attention(batch.image))


def teacher_attention(config: Config, model: Any) -> Callable[[Tensor], Tensor]:
    """From images to the attention (b, hc, wc) of a dense model's class token."""
    teacher, recorder = dense_model(config.gate.teacher, model), AttentionRecorder()
    remedy = "choose another gate loss, give a teacher that has one (--set gate.teacher=RUN)"
    needs_class_token("gate.loss attention", teacher.host, remedy)
    teacher = teacher.with_options(reducer=recorder)

    @torch.no_grad()
    def attention(image: Tensor) -> Tensor:
        teacher(image)
        return recorder.attention_map()

    return attention


def compute_losses(
    output: MSViTOutput, batch: Batch, objective: GateObjective, config: Config
) -> dict[str, Tensor]:
    task = TASKS[config.task].loss(output.logits, batch.label, config.optim.smoothing)
    gate = objective.loss(output, batch)
    if gate is None:
        return {"loss": task, "task": task}
    if config.gate.cut_twins == "zero" and training_mode(config) == "trimmed":
        stop_cut_gradients(output.gate.mask, output.tokens.layout)
    return {"loss": task + config.gate.weight * gate, "task": task, "gate": gate}


def reducer_losses(loss: Tensor, model: Any, output: MSViTOutput, teacher: Any, image: Tensor) -> dict[str, Tensor]:
    """What a reducer adds to the loss, and their sum; nothing if it adds nothing."""
    if model.reducer is None:
        return {}
    with torch.no_grad():
        teacher_output = None if teacher is None else teacher(image)
    added = model.reducer.losses(output, teacher_output)
    return {**added, "loss": loss + torch.stack(list(added.values())).sum()} if added else {}
