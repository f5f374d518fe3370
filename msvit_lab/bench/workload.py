"""A workload: one model, input size and batch, its rows timed in turn; everything about it in one record.

    work = Workload("vit_small_patch16_224", size=224, batch=64)
    found = measure(work, Options(device=torch.device("cuda"), dtype=torch.bfloat16), Pictures(Path("photos")))
    found["mac_ratio"], found["rows"][0]["ms"]
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from msvit.conversion import convert
from msvit.gates import Normalization
from msvit.gates.base import check_share
from msvit.host_settings import host_normalization
from msvit.model import MSViT
from msvit_lab.bench import rows
from msvit_lab.bench.calibration import Chosen, calibrate, choose_gate, spread_out
from msvit_lab.bench.images import Pictures, batches
from msvit_lab.bench.machine import Rates, bytes_held, lower_bounds, measure_memory
from msvit_lab.bench.rows import Subject
from msvit_lab.bench.summary import Measured, count, summarise
from msvit_lab.build import fit_dense
from msvit_lab.config import Config, override
from msvit_lab.data.decode import Finish
from msvit_lab.gate_names import is_trained
from msvit_lab.hosts import make_host, read_model
from msvit_lab.timing import Call, Times, burst_size, error_line, take_turns, warm_up

SHARE = 0.33  # of fine cells: about half of the tokens
SETS = 4  # batches of different images, timed in turn
ONE_BY_ONE = 16  # or so many images, where batches are small
SMALL, BASE, LARGE = (f"vit_{size}_patch16_224" for size in ("small", "base", "large"))
SWIN = "swin_tiny_patch4_window7_224"


@dataclass(frozen=True)
class Workload:
    model: str  # a timm name, or a folder of `msvit.save` or of a run
    size: int
    batch: int
    train: bool = False
    rows: tuple[str, ...] | None = None  # None: what suits the device
    settings: dict[str, str] = field(default_factory=dict)  # of the model, as in `msvit train --set`
    rounds: int | None = None  # None: those of the options

    def __str__(self) -> str:
        return f"{self.model}, {self.size} px, batch {self.batch}{', training step' if self.train else ''}"


SUITES: dict[str, list[Workload]] = {  # the most telling first, as a run may be stopped
    # Everything the README says about time on a GPU, in eight minutes.
    "readme": [
        Workload(SMALL, 224, 1, rows=rows.ONE_IMAGE, rounds=128),  # half a millisecond per call, so that noise counts
        Workload(SMALL, 224, 256, rows=rows.README),
        Workload(SMALL, 384, 128, rows=rows.README),
        Workload(SMALL, 512, 64, rows=rows.README),
        Workload(LARGE, 224, 128, rows=rows.README),
        Workload(SMALL, 224, 256, train=True, rows=rows.README),
        Workload(SWIN, 224, 128, rows=rows.README, settings={"model.merge_at": "4"}),
    ],
    "cpu": [
        Workload(model, size, batch, rows=rows.CPU)
        for model, size, batch in ((SMALL, 224, 1), (SMALL, 224, 8), (SMALL, 384, 1), (BASE, 224, 1))
    ],
}  # fmt: skip


@dataclass(frozen=True)
class Options:
    """How workloads are measured."""

    device: torch.device
    dtype: torch.dtype  # of weights and images; in training, of the autocast forward
    rows: list[str] | None = None
    gate: str = "learned"
    share: float | None = None  # of fine cells; None: 0.33, or what a gate from a folder decides by itself
    rounds: int = 40
    seconds: float | None = None  # no further round begins after that many
    settings: dict[str, str] = field(default_factory=dict)  # of the model, as in `msvit train --set`
    reducers: list[str] = field(default_factory=list)  # whose rows are timed too
    rate: float | None = None  # of the reducers; None: the rate at which they cost as much as the gate alone


def measure(work: Workload, options: Options, pictures: Pictures, rates: Rates | None = None) -> dict[str, Any]:
    """Build, warm up and time every row; the record of it, ready for JSON."""
    start_afresh(options.device)
    subject, device = prepare(work, options, pictures), options.device
    model, sets = subject.wrap(), subject.sets
    names = options.rows or work.rows or rows.usual_rows(device, work.train, model.backbone.modes)
    reducers = [row for name in options.reducers for row in (name, f"{name} gated")]  # by itself, and with the gate
    names = [*names, *(name for name in reducers if name not in names)]
    if work.train and (wrong := [name for name in names if name in (*rows.REDUCED, *rows.FP8)]):
        raise ValueError(f"the row {wrong[0]} is timed in inference only; leave it out, or leave out --train")
    with as_forward(work, options):
        left = count(model, sets)
    measured = {name: Measured(left.dense() if name in rows.ALL_TOKENS else left, Times()) for name in names}
    calls: dict[str, Call] = {}
    with torch.inference_mode(not work.train):
        for name, row in measured.items():
            before = bytes_held(device)
            try:
                call = rows.ROWS[name](subject)
                for part in (subject.host, subject.gate, call):  # shared by rows: building one may change their mode
                    if isinstance(part, nn.Module):
                        part.train(work.train)
                if name in rows.COUNTED and isinstance(call, MSViT):
                    with as_forward(work, options):
                        row.work = count(call, sets)
                if work.train:
                    call = rows.training_step(call, subject, gated=not name.startswith("dense"))
                warm_up(call, sets, passes=3 if device.type == "cuda" else 1)
                row.memory = measure_memory(call, sets[0], before)
                calls[name] = call
            except Exception as error:  # out of memory, no compiler, not supported: the other rows go on
                row.times.error = error_line(error)
                if device.type == "cuda":
                    torch.cuda.empty_cache()
        rounds, burst = work.rounds or options.rounds, burst_size(device, work.batch)
        times = take_turns(calls, sets, device=device, rounds=rounds, burst=burst, seconds=options.seconds)
    for name, row in measured.items():
        row.times = times.get(name, row.times)
        if not work.train and name not in (*rows.COUNTED, *rows.PADDED, *rows.FP8):
            row.floors = lower_bounds(model, row.work, sets[0], rates)
    return {
        **describe(work, options, pictures),
        "fine": model.fine,
        "coarse": model.coarse,
        "images": {
            "from": pictures.name, "num": sum(map(len, sets)), "sets": len(sets), "unreadable": pictures.num_bad,
        },
        "gate": subject.gate_name,
        "rates": None if rates is None else asdict(rates),
        **summarise(left, measured, work.batch),
    }  # fmt: skip


def describe(work: Workload, options: Options, pictures: Pictures) -> dict[str, Any]:
    """What makes it this workload and no other."""
    gate = Path(options.gate).name if is_trained(options.gate) else options.gate
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


def prepare(work: Workload, options: Options, pictures: Pictures) -> Subject:
    """The model and its images, on the device, with the gate calibrated."""
    device = options.device
    if work.train and options.dtype is torch.float16:
        raise ValueError("a training step in float16 needs a scaled loss, which is not timed; give --dtype bfloat16")
    amp = "bf16" if work.train and options.dtype is torch.bfloat16 else "no"
    dtype = torch.float32 if work.train else options.dtype
    given = {"model.name": work.model, "data.img_size": str(work.size), "optim.precision": amp}
    config = override(Config(), options.settings | work.settings | given)
    torch.manual_seed(config.seed)
    share = None if options.share is None else check_share("share", options.share)
    if Path(work.model).is_dir():
        model = read_classifier(Path(work.model))
        chosen = Chosen(model.gate, "its own", trained=True)
    else:
        host = make_host(config, num_classes=1000)
        model = convert(host, coarse=config.model.coarse, gate="learned", merge_at=config.model.merge_at)
        if share is None and not is_trained(options.gate):
            share = SHARE
        chosen = choose_gate(options.gate, model, share, config.model.coarse)
        model = MSViT(model.backbone, chosen.gate, chosen.gate.coarse)
    model = model.to(device, torch.float32).train(work.train)
    model = fit_dense(model, work.size)
    host, gate = model.host, model.gate
    config = replace(config, model=replace(config.model, merge_at=model.backbone.merge_at))
    own = host_normalization(host) or Normalization((0.5,) * 3, (0.5,) * 3)
    colours = Finish(tuple(own.mean), tuple(own.std), device)
    wanted = work.batch * min(options.rounds, max(SETS, ONE_BY_ONE // work.batch))  # so many that all are timed
    squares = pictures.squares(work.size, wanted=wanted, least=work.batch)
    sets = [colours.normalise(part) for part in batches(squares, work.batch)]
    model.grid(sets[0])  # raises unless cells fit
    if not chosen.trained:
        spread_out(gate, sets)
    model.to(dtype)
    sets = [images.to(dtype) for images in sets]
    if share is not None:
        with as_forward(work, options):
            calibrate(gate, sets, share)
    return Subject(host, gate, chosen.name, sets, config, share, options.rate, model.reducer)


def read_classifier(folder: Path) -> MSViT:
    model, _ = read_model(folder)
    if not isinstance(model, MSViT):
        raise ValueError(
            f"{folder} holds a {type(model).__name__}, but models around a timm classifier or encoder are timed here; "
            f"of trained runs also others: msvit bench --runs {folder}"
        )
    return model


@contextmanager
def as_forward(work: Workload, options: Options) -> Iterator[None]:
    """As a row's forward runs: without gradients, or in training perhaps under autocast."""
    amp = work.train and options.dtype is torch.bfloat16
    with torch.inference_mode(not work.train), torch.autocast(options.device.type, torch.bfloat16, enabled=amp):
        yield


def start_afresh(device: torch.device) -> None:
    """Forget other workloads: a shape seen there would make this one's dynamic, and their graphs hold memory."""
    torch.compiler.reset()
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()
