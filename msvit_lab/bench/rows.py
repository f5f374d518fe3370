"""Rows: what is timed, each a function from a subject to something that takes a batch of images.

    call = ROWS["packed compiled"](subject)
    call(images)                              # gate and tokenizer included
    step = training_step(call, subject, gated=True)

The weights of host and gate are shared by all rows; each has a wrapper of its own, as compiling changes it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import msvit
from msvit.conversion import convert
from msvit.execution import MODES
from msvit.gates import AllFine, Gate
from msvit.host_settings import gate_for_host
from msvit.model import MSViT
from msvit.output import MSViTOutput
from msvit.reduction import REDUCERS, Reducer
from msvit_lab.bench import calibration
from msvit_lab.config import Config
from msvit_lab.data import Batch
from msvit_lab.timing import Call

PACKED, SHIPPED, ALL_FINE = "packed compiled", "shipped gate compiled", "all fine compiled"  # by msvit.compile
DENSE_GRAPHS = "dense CUDA graphs"
FP8 = PACKED_FP8, ALL_FINE_FP8 = f"{PACKED} fp8", f"{ALL_FINE} fp8"
LEARNING_RATE = 1e-9  # so small that weights, and with them the tokens, stay


@dataclass(frozen=True)
class Subject:
    """A host and the gate that decides for it, calibrated on these images."""

    host: nn.Module
    gate: Gate
    gate_name: str
    sets: list[Tensor]  # batches
    config: Config
    share: float | None  # of fine cells that the gate was calibrated to
    rate: float | None  # of reducers; None: the rate at which they cost as much as the gate alone
    reducer: Reducer | None = None  # of a saved model: it works behind its own gate

    def wrap(self, mode: str = "packed", gate: Gate | None = None) -> MSViT:
        reducer = self.reducer if gate is None else None
        gate = self.gate if gate is None else gate
        about = self.config.model
        return convert(
            self.host, coarse=gate.coarse, gate=gate, mode=mode, merge_at=about.merge_at, reducer=reducer
        )

    def shipped_gate(self) -> Gate:
        """The trained gate that comes with msvit, set to the same share of fine cells."""
        weight = next(self.host.parameters())
        gate = gate_for_host(msvit.load_gate("default", coarse=self.gate.coarse), self.host)
        gate.to(weight.device, weight.dtype)
        gate.train(self.gate.training)
        if self.share is not None:
            calibration.calibrate(gate, self.sets, self.share)
        return gate


def packed_compiled(subject: Subject) -> Call:
    model = subject.wrap()
    model.backbone.compile(dynamic=True)
    return model


def reduced(make: Callable[..., MSViT], name: str, subject: Subject) -> Call:
    """A published method, as fast as this code can run it: compiled, fused attention, captured."""
    return msvit.compile(make(name, subject.wrap(), subject.sets, subject.rate))


ROWS: dict[str, Callable[[Subject], Call]] = {
    "dense": lambda subject: subject.host,  # the timm model as it is
    "dense compiled": lambda subject: torch.compile(subject.host),
    # How much of the gain comes from CUDA graphs, where launches are what takes time.
    DENSE_GRAPHS: lambda subject: torch.compile(subject.host, mode="reduce-overhead"),
    "masked": lambda subject: subject.wrap("masked"),
    "trimmed": lambda subject: subject.wrap("trimmed"),
    "packed": lambda subject: subject.wrap(),
    "packed torch.compile": packed_compiled,
    PACKED: lambda subject: msvit.compile(subject.wrap()),
    PACKED_FP8: lambda subject: msvit.compile(subject.wrap(), dtype="fp8"),
    "trimmed compiled": lambda subject: msvit.compile(subject.wrap("trimmed")),
    "masked compiled": lambda subject: msvit.compile(subject.wrap("masked")),
    SHIPPED: lambda subject: msvit.compile(subject.wrap(gate=subject.shipped_gate())),
    # With every token there is: how much of the gain comes from kernels and not from tokens.
    ALL_FINE: lambda subject: msvit.compile(subject.wrap(gate=AllFine(coarse=subject.gate.coarse))),
    ALL_FINE_FP8: lambda subject: msvit.compile(subject.wrap(gate=AllFine(coarse=subject.gate.coarse)), dtype="fp8"),
    **{name: partial(reduced, calibration.plain, name) for name in REDUCERS},
    **{f"{name} gated": partial(reduced, calibration.gated, name) for name in REDUCERS},
}
REDUCED = tuple(name for name in ROWS if name.split()[0] in REDUCERS)
PADDED = tuple(name for name in ROWS if name.split()[0] in ("masked", "trimmed"))  # these run inactive tokens too
COUNTED = (*REDUCED, SHIPPED)  # these have multiply-adds of their own
ALL_TOKENS = ("dense", "dense compiled", DENSE_GRAPHS, ALL_FINE, ALL_FINE_FP8)  # no multiply-adds are saved in these
README, CPU = (("dense compiled", ALL_FINE, PACKED, SHIPPED), ("dense", ALL_FINE, PACKED, SHIPPED))  # rows of suites
ONE_IMAGE = (*README, DENSE_GRAPHS)  # of the suite's workload of one image
BASELINES = ("dense compiled", "dense")  # what speed-ups are over: the first of these that ran


def usual_rows(device: torch.device, train: bool, modes: tuple[str, ...] = tuple(MODES)) -> list[str]:
    """On a GPU all but reducers, dense graphs and FP8; on a CPU those of interest, compiled for inference only."""
    if device.type == "cuda":
        missing = tuple(mode for mode in MODES if mode not in modes)
        return [name for name in ROWS if name not in (*REDUCED, DENSE_GRAPHS, *FP8) and not name.startswith(missing)]
    return ["dense", "packed"] if train else ["dense", "packed", PACKED]


def check_rows(names: list[str]) -> list[str]:
    check_known("row", names, ROWS)
    if not any(name in BASELINES for name in names):
        raise ValueError(
            f"the rows {', '.join(names)} have nothing to be compared with; add one of {', '.join(BASELINES)}"
        )
    return names


def check_known(what: str, names: list[str], known: dict[str, Any]) -> None:
    for name in names:
        if name not in known:
            raise ValueError(f"unknown {what} {name!r}; known: {', '.join(known)}")


def training_step(call: Call, subject: Subject, gated: bool) -> Call:
    """Forward, loss, backward, optimizer: what `msvit train` does, without data and clipping.

    Weights are float32; in bfloat16 the forward runs under autocast. The gate samples its decisions and gets gradients
    of the task and of its own loss (GBaS by default). `gated`: the call is a model with a gate, not the dense host.
    """
    from msvit_lab.training.objective import GateObjective, compute_losses, make_objective  # slow to import

    host, config = subject.host, subject.config
    device, amp = next(host.parameters()).device, config.optim.precision == "bf16"
    objective = make_objective(config, subject.wrap()) if gated else GateObjective()
    trained = call if gated and isinstance(call, nn.Module) else host
    modules = (trained, objective.module)
    weights = [p for module in modules if module is not None for p in module.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=LEARNING_RATE, fused=device.type == "cuda")
    draws = torch.Generator().manual_seed(0)
    labels = torch.randint(int(host.num_classes), (len(subject.sets[0]),), generator=draws).to(device)  # type: ignore[arg-type]

    def step(images: Tensor) -> None:
        with torch.autocast(device.type, torch.bfloat16, enabled=amp):
            output = call(images)
            if isinstance(output, MSViTOutput):
                loss = compute_losses(output, Batch(images, labels, None), objective, config)["loss"]
            else:
                loss = F.cross_entropy(output.float(), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step
