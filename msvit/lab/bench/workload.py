"""A workload: one model, input size and batch, its rows timed in turn; everything about it in one record.

    work = Workload("vit_small_patch16_224", size=224, batch=64)
    found = measure(work, Options(device=torch.device("cuda"), dtype=torch.bfloat16), Pictures(Path("photos")))
    found["mac_ratio"], found["rows"][0]["ms"]
"""

import gc
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from msvit.conversion import convert
from msvit.gates.base import check_share
from msvit.lab.bench.images import Pictures, in_sets, normalise
from msvit.lab.bench.masks import calibrate, choose_gate, spread_out
from msvit.lab.bench.memory import Memory, held, measure_memory
from msvit.lab.bench.roofline import Rates, floors
from msvit.lab.bench.rows import COUNTED, REDUCED, ROWS, Subject, reducer_rows, usual_rows
from msvit.lab.bench.summary import Work, summarise
from msvit.lab.build import make_host
from msvit.lab.config import Config, override
from msvit.lab.gate_names import is_trained
from msvit.lab.timing import Call, Times, burst_of, in_words, take_turns
from msvit.model import MSViT

SHARE = 0.33  # of fine cells: about half of the tokens
SETS = 4  # batches of different images, timed in turn
ONE_BY_ONE = 16  # or so many images, where batches are small


@dataclass(frozen=True)
class Workload:
    model: str  # a timm name
    size: int
    batch: int
    train: bool = False
    rows: tuple[str, ...] | None = None  # None: what suits the device
    settings: dict[str, str] = field(default_factory=dict)  # of the model, as in `msvit train --set`
    rounds: int | None = None  # None: those of the options

    def __str__(self) -> str:
        return f"{self.model}, {self.size} px, batch {self.batch}{', training step' if self.train else ''}"


@dataclass(frozen=True)
class Options:
    """How workloads are measured."""

    device: torch.device
    dtype: torch.dtype  # of weights and images; in training, of the autocast forward
    rows: list[str] | None = None
    gate: str = "learned"
    gate_from: Path | None = None
    share: float | None = None  # of fine cells; None: 0.33, or what a gate from a folder decides by itself
    rounds: int = 40
    seconds: float | None = None  # no further round begins after that many
    settings: dict[str, str] = field(default_factory=dict)  # of the model, as in `msvit train --set`
    reducers: list[str] = field(default_factory=list)  # whose rows are timed too
    rate: float | None = None  # of the reducers; None: the rate at which they cost as much as the gate alone


@dataclass(frozen=True)
class Prepared:
    """A subject with its images; decisions of the gate are calibrated on them."""

    subject: Subject
    sets: list[Tensor]
    config: Config
    gate_name: str


def measure(work: Workload, options: Options, pictures: Pictures, rates: Rates | None = None) -> dict[str, Any]:
    """Build, warm up and time every row; the record of it, ready for JSON."""
    start_afresh(options.device)
    ready = prepare(work, options, pictures)
    device = options.device
    with context(work, ready.config, device, timing=False):
        counted = count(ready.subject.wrap(), ready.sets)
    calls: dict[str, Call] = {}
    times: dict[str, Times] = {}
    memory: dict[str, Memory | None] = {}
    modes = ready.subject.wrap().backbone.modes
    names = options.rows or work.rows or usual_rows(device, work.train, modes)
    reducers = reducer_rows(options.reducers)
    names = [*names, *(name for name in reducers if name not in names)]
    if work.train and (wrong := [name for name in names if name in REDUCED]):
        raise ValueError(f"the row {wrong[0]} is timed in inference only; leave it out, or leave out --train")
    own: dict[str, Work] = {}  # of rows that do not run the tokens the gate has left
    with context(work, ready.config, device, timing=True):
        for name in names:
            before = held(device)
            try:
                call = ROWS[name](ready.subject)
                set_modes([ready.subject.host, ready.subject.gate, call], train=work.train)
                if name in COUNTED and isinstance(call, MSViT):
                    with context(work, ready.config, device, timing=False):
                        own[name] = count(call, ready.sets)
                if work.train:
                    from msvit.lab.bench.training import training_step

                    call = training_step(call, ready.subject, ready.config, gated=not name.startswith("dense"))
                warm_up(call, ready.sets, passes=3 if device.type == "cuda" else 1)
                memory[name] = measure_memory(call, ready.sets[0], before)
                calls[name] = call
            except Exception as error:  # out of memory, no compiler, not supported: the other rows go on
                times[name] = Times(trouble=in_words(error))
                if device.type == "cuda":
                    torch.cuda.empty_cache()
        burst = burst_of(device, work.batch)
        times |= take_turns(
            calls, ready.sets, device=device, rounds=work.rounds or options.rounds, burst=burst, seconds=options.seconds
        )
    model = ready.subject.wrap()
    bounded = [] if work.train else [name for name in names if name not in COUNTED]
    bounds = {name: floors(name, model, counted, ready.sets[0], rates) for name in bounded}
    return {
        **describe(work, options, pictures),
        "fine": model.fine,
        "coarse": model.coarse,
        "images": {
            "from": pictures.name, "num": sum(map(len, ready.sets)), "sets": len(ready.sets),
            "unreadable": pictures.num_bad,
        },
        "gate": ready.gate_name,
        "rates": None if rates is None else asdict(rates),
        **summarise(counted, {name: times[name] for name in names}, memory, bounds, own, batch=work.batch),
    }  # fmt: skip


def describe(work: Workload, options: Options, pictures: Pictures) -> dict[str, Any]:
    """What makes it this workload and no other."""
    gate = options.gate if options.gate_from is None else options.gate_from.name
    asked: dict[str, Any] = {"gate": gate, "share": options.share}
    asked |= {"settings": options.settings | work.settings, "images": pictures.name}
    if options.reducers:
        asked |= {"reducers": options.reducers, "rate": options.rate}
    return {
        **{name: getattr(work, name) for name in ("model", "size", "batch", "train")},
        "device": options.device.type,
        "dtype": str(options.dtype).removeprefix("torch."),
        "asked": asked,
    }


def prepare(work: Workload, options: Options, pictures: Pictures) -> Prepared:
    device = options.device
    if work.train and options.dtype is torch.float16:
        raise ValueError("a training step in float16 needs a scaled loss, which is not timed; give --dtype bfloat16")
    amp = "bf16" if work.train and options.dtype is torch.bfloat16 else "no"
    dtype = torch.float32 if work.train else options.dtype
    given = {"model.name": work.model, "data.img_size": str(work.size), "optim.precision": amp}
    config = override(Config(), options.settings | work.settings | given)
    torch.manual_seed(config.seed)
    host = make_host(config, num_classes=1000)
    merge_at = config.model.merge_at
    model = convert(host, coarse=config.model.coarse, merge_at=merge_at)
    share = None if options.share is None else check_share(options.share)
    if share is None and options.gate_from is None and not is_trained(options.gate):
        share = SHARE
    chosen = choose_gate(options.gate, options.gate_from, model, share, config.model.coarse)
    model = MSViT(model.backbone, chosen.gate, chosen.gate.coarse).to(device, torch.float32).train(work.train)
    about: dict[str, Any] = getattr(host, "pretrained_cfg", None) or {}
    mean = chosen.mean or about.get("mean") or (0.5,) * 3
    std = chosen.std or about.get("std") or (0.5,) * 3
    wanted = work.batch * min(options.rounds, max(SETS, ONE_BY_ONE // work.batch))  # so many that all are timed
    squares = pictures.squares(work.size, wanted=wanted, least=work.batch)
    sets = [normalise(part.to(device), mean, std) for part in in_sets(squares, work.batch)]
    model.grid(sets[0])  # do cells fit?
    if not chosen.trained:
        spread_out(chosen.gate, sets)
    model.to(dtype)
    sets = [images.to(dtype) for images in sets]
    with context(work, config, device, timing=False):
        if share is not None:
            calibrate(chosen.gate, sets, share)
    return Prepared(Subject(host, chosen.gate, sets, options.rate, merge_at, share), sets, config, chosen.name)


def context(work: Workload, config: Config, device: torch.device, timing: bool) -> AbstractContextManager[Any]:
    """Inference runs without gradients. A training step chooses for itself; what is counted runs as its forward."""
    if not work.train:
        return torch.inference_mode()
    amp = config.optim.precision == "bf16" and not timing
    return torch.autocast(device.type, torch.bfloat16) if amp else nullcontext()


def start_afresh(device: torch.device) -> None:
    """Forget other workloads: a shape seen there would make this one's dynamic, and their graphs hold memory."""
    torch.compiler.reset()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def set_modes(parts: list[Any], *, train: bool) -> None:
    """For training or for inference, whatever building a row has left behind; rows share host and gate."""
    for part in parts:
        if isinstance(part, nn.Module):
            part.train(train)


def warm_up(call: Call, sets: list[Tensor], passes: int) -> None:
    """Long enough to compile and to capture, on every set; at least two calls."""
    for turn in range(max(2, passes * len(sets))):
        call(sets[turn % len(sets)])


@torch.no_grad()
def count(model: MSViT, sets: list[Tensor]) -> Work:
    """What the gate decides for these images: tokens and multiply-adds, gate included."""
    grid = model.grid(sets[0])
    masks = [model.gate(images).mask > 0.5 for images in sets]  # (b, hc, wc)
    macs = torch.cat([model.macs(images, mask) for images, mask in zip(sets, masks, strict=True)])
    fine = torch.cat(masks).flatten(1)  # (n, cells)
    return Work(
        tokens=model.backbone.num_tokens(fine.sum(1), grid).cpu(),
        macs=(macs + model.gate.num_macs(grid.num_cells)).cpu(),
        fine=fine.float().mean(1).cpu(),
        dense_tokens=grid.num_patches,
        dense_macs=model.backbone.dense_macs(grid),
        num_prefix=model.backbone.num_prefix,
    )
