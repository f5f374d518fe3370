"""Evaluate a run folder: how good, tokens, GMACs and time, into RUN/evaluations/NAME.json and NAME.safetensors.

    evaluate_run(Path("runs/gbas"))                     # "val": the run's own evaluation
    evaluate_run(Path("runs/gbas"), data="flowers")     # "data-flowers": beside it, never in its place
"""

import json
import re
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from msvit.gates import AllFine
from msvit.model import MSViT
from msvit.reduction import Reducer
from msvit.saving.file import check_writable, replacing
from msvit.segmenter import Segmenter
from msvit.types import ScaleGrid
from msvit_lab.build import fit_dense, make_loader, open_val
from msvit_lab.compiled import compile_for_batches
from msvit_lab.config import Config, override
from msvit_lab.data import Loader, check_classes
from msvit_lab.evaluation.classification import evaluate_classifier
from msvit_lab.evaluation.latency import Latency, measure_latency
from msvit_lab.evaluation.segmentation import evaluate_segmenter
from msvit_lab.evaluation.shared import Evaluation, Samples, packed
from msvit_lab.evaluation.sliding import cut
from msvit_lab.evaluation_files import OWN
from msvit_lab.hosts import load_trained
from msvit_lab.run_record import write_run_record
from msvit_lab.runs import Run, machine, versions
from msvit_lab.tasks import slide

BATCHES = (1, 64)  # a single image, and enough of them to keep a machine busy


def evaluate_run(
    folder: Path, data: str | None = None, rounds: int = 20, skip_bad: bool = False, reducer: Reducer | None = None,
    size: int | None = None, name: str | None = None, compile: bool = True,
    device: torch.device | None = None,
) -> dict[str, Any]:  # fmt: skip
    """What `msvit eval` does. Returns what it wrote to RUN/evaluations/NAME.json.

    The run's own evaluation is `val`; one with other settings gets a name that says what differs, or `name`. `size` is
    for classification; `reducer` takes the place of the run's own. With `rounds` 0 nothing is timed: times that were
    measured before stay, with the record of when and on what. `compile`: the images run through the compiled model
    where that is supported; "uncompiled" of the result is the reason if not.
    """
    if reducer is not None and reducer.needs_teacher:
        raise ValueError(f"{type(reducer).__name__} must be trained; train with msvit train ... --reducer dynamicvit")
    run = Run(folder)
    own, given = run.config, {"data.source": data, "data.img_size": size, "data.skip_bad": skip_bad or None}
    if own.task == "segment" and size is not None:
        raise ValueError(f"size is {size}, but this run segments in windows of its own size; leave it out")
    config = override(own, {name: str(value) for name, value in given.items() if value is not None})
    run.check_finished()
    check_writable(folder, "copy the run to a folder of yours, and evaluate it there")
    device = device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = load_trained(run).to(device)
    replaces_reducer = reducer is not None and (model.reducer is None or model.reducer.words != reducer.words)
    if reducer is not None and replaces_reducer:
        encoder = MSViT(model.backbone, model.gate, model.coarse, model.mode, reducer)
        model = Segmenter(encoder, model.decoder) if isinstance(model, Segmenter) else encoder
    if not isinstance(model, Segmenter):  # which pads its windows to whole cells
        model = fit_dense(model, config.data.img_size)
    chosen: dict[str, Any] = {
        "data": config.data.source, "img_size": config.data.img_size,
        "reducer": None if model.reducer is None else model.reducer.words,
    }  # fmt: skip
    default = default_name(own, config, reducer if replaces_reducer else None)
    name = name or default
    before = check_replaced(run, name, default, chosen)
    source = open_val(config, run.classes)
    check_classes(source, model.num_classes)
    loader = make_loader(source, config, train=False, device=device)
    segments = isinstance(model, Segmenter)
    batch = slide(config).batch if segments else loader.plan.batch_size
    runner, choice = compile_for_batches(packed(model), batch, len(loader), graphs="auto" if compile else False)
    if segments:
        result = evaluate_segmenter(runner, loader, slide(config), seed=config.seed)
    else:
        result = evaluate_classifier(runner, loader, num_classes=len(source.classes), seed=config.seed)
    values = summarise(model, result, config) | chosen
    values |= {"name": name, "versions": versions(), "machine": machine(), "num_skipped": len(loader.skipped)}
    values |= {"compiled": choice.compiled, "uncompiled": choice.reason}
    if rounds:
        inputs = first_inputs(loader, config, max(BATCHES))
        values |= measure_times(model.encoder if segments else model, inputs, rounds)
    else:
        values |= {key: before[key] for key in ("latency", "measured") if key in before}
    path = run.evaluations.path(name, ".safetensors")
    path.parent.mkdir(exist_ok=True)
    write_samples(path, result.samples, model, config, source.classes)
    run.evaluations.write(name, values)  # where it is, the evaluation is whole
    if name == OWN:
        write_run_record(folder)
    return values


def default_name(own: Config, config: Config, reducer: Reducer | None = None) -> str:
    """A name that says what differs from the run's own evaluation: data-flowers+evit-0.7, 96px."""
    parts = []
    if not same_source(config.data.source, own.data.source):
        parts.append(f"data-{name_part(config.data.source)}")
    if config.data.img_size != own.data.img_size:
        parts.append(f"{config.data.img_size}px")
    if reducer is not None:
        amounts = ((mark, reducer.config.get(key)) for mark, key in (("", "rate"), ("r", "r")))
        words = [f"{mark}{amount:g}" for mark, amount in amounts if amount is not None]
        parts.append("-".join([type(reducer).__name__.lower(), *words]))
    return "+".join(parts) or OWN


def same_source(one: str, other: str) -> bool:
    paths = Path(one), Path(other)
    return one == other or (all(path.exists() for path in paths) and paths[0].samefile(paths[1]))


def name_part(source: str) -> str:
    """The last part of a path or source, in letters that a name may have."""
    word = source.rstrip("/").rpartition("/")[2].removesuffix(".tar")
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", word).strip("-.") or "other"


def check_replaced(run: Run, name: str, default: str, chosen: dict[str, Any]) -> dict[str, Any]:
    """The evaluation of this name that would be replaced, {} if there is none.

    Raise ValueError if it is the run's own, or one with other settings.
    """
    if name == OWN != default:
        raise ValueError(f"{OWN} is the name of the run's own evaluation, but this is {default}; give another --name")
    try:
        before = run.evaluations[name]
    except (KeyError, ValueError):  # there is none, or it was cut short: there is nothing to lose
        return {}
    for key, value in chosen.items() if name != OWN else ():
        if key in before and before[key] != value:
            where = run.evaluations.path(name)
            raise ValueError(f"{where} has {key} {before[key]}, but this evaluation has {value}; give another --name")
    return before


def measure_times(model: MSViT, images: Tensor, rounds: int) -> dict[str, Any]:
    """Times of the model and its dense host, in turn, and when and on what they were measured."""
    sizes = [batch for batch in BATCHES if batch <= len(images)]
    latency = [asdict(row) for batch in sizes for row in timings(model, images, batch, rounds)]
    now = datetime.now(UTC).isoformat(timespec="seconds")
    return {"latency": latency, "measured": {"at": now, "machine": machine(), "versions": versions()}}


def timings(model: MSViT, images: Tensor, batch: int, rounds: int) -> list[Latency]:
    kinds = [torch.float32, torch.bfloat16] if images.is_cuda else [torch.float32]
    rows = [row for dtype in kinds for row in measure_latency(model, images, batch, dtype, rounds)]
    hosts = [row for row in rows if row.what == "dense host"]
    if is_dense(model) and hosts:  # a host of another input size is not timed
        return hosts  # the packed form computes the same
    return rows


def first_inputs(loader: Loader, config: Config, num: int) -> Tensor:
    """The first `num` images of a classifier, or windows of a Segmenter, as its evaluation cuts them."""
    found: list[Tensor] = []
    for batch in loader.iterate(0):
        dense = config.task == "segment"
        found += [cut(image, slide(config)) for image in batch.images] if dense else [batch.image]
        if sum(map(len, found)) >= num:
            break
    return torch.cat(found)[:num]


def is_dense(model: MSViT | Segmenter) -> bool:
    return isinstance(model.gate, AllFine) and model.reducer is None


def summarise(model: MSViT | Segmenter, result: Evaluation, config: Config) -> dict[str, Any]:
    """Of a Segmenter tokens and GMACs are per window; GMACs are of gate and encoder, those of the decoder apart."""
    size, segments, masks = config.data.img_size, isinstance(model, Segmenter), result.costs.masks
    grid = ScaleGrid(size, size, fine=model.fine, coarse=model.coarse)
    tokens, macs = result.costs.tokens.double(), result.costs.macs.double() / 1e9
    return {
        "task": config.task, **result.scores, "num_images": result.num_images, "dense": is_dense(model),
        "tokens": {
            "mean": tokens.mean().item(), "std": tokens.std(correction=0).item(), "min": int(tokens.min()),
            "max": int(tokens.max()), "dense": grid.num_patches,
        },
        "gmacs": {
            "mean": macs.mean().item(), "std": macs.std(correction=0).item(),
            "dense": model.backbone.dense_macs(grid, head=not segments) / 1e9,
        },
        **({"decoder_gmacs": model.decoder_macs(grid) / 1e9} if isinstance(model, Segmenter) else {}),
        **result.fine, "mask_mean": masks.mean(0).tolist(), "mask_var": masks.var(0, correction=0).tolist(),
    }  # fmt: skip


def write_samples(
    path: Path, samples: Samples, model: MSViT | Segmenter, config: Config, classes: list[str]
) -> None:
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (config.data.mean, config.data.std))
    pixels = ((samples.image.float() * std + mean) * 255).round().clamp(0, 255).byte()
    tensors = {
        "images": pixels.permute(0, 2, 3, 1).contiguous(), "masks": samples.mask.byte().contiguous(),
        "labels": samples.label, "predictions": samples.prediction,
    }  # fmt: skip
    if samples.label.ndim > 1:  # of pixels: classes and 255 fit a byte
        tensors |= {key: tensors[key].byte() for key in ("labels", "predictions")}
    cell = ScaleGrid(model.coarse, model.coarse, fine=model.fine, coarse=model.coarse)
    about = {
        "classes": json.dumps(classes), "coarse": str(model.coarse), "fine": str(model.fine),
        "cell_tokens": str(int(model.backbone.num_tokens(torch.tensor(0), cell))),
    }  # fmt: skip
    with replacing(path) as part:
        save_file(tensors, part, about)
