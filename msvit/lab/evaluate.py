"""Evaluate a run folder: how good, tokens, GMACs and time, into RUN/evaluations/NAME.json and NAME.safetensors.

    evaluate_run(Path("runs/gbas"))                     # "val": the run's own evaluation
    evaluate_run(Path("runs/gbas"), data="flowers")     # "data-flowers": beside it, never in its place
"""

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from msvit.atomic import check_writable, replacing
from msvit.gates import AllFine
from msvit.lab.build import load_trained, make_loader, open_val
from msvit.lab.config import Config
from msvit.lab.data import Loader, check_classes
from msvit.lab.evaluation.accuracy import Evaluation, Samples, evaluate
from msvit.lab.evaluation.latency import Latency, measure_latency
from msvit.lab.evaluation.pixels import PixelEvaluation, PixelSamples, evaluate_pixels, known, scores
from msvit.lab.evaluation.sliding import cut
from msvit.lab.runs import OWN, Run, check_source, machine, read_config, versions
from msvit.lab.tasks import TASKS, slide
from msvit.model import MSViT
from msvit.reduction import Reducer
from msvit.segmenter import Segmenter
from msvit.types import ScaleGrid

BATCHES = (1, 64)  # a single image, and enough of them to fill a machine
TIMES = ("latency", "measured")
SETTINGS = ("data", "img_size", "objects", "reducer", "flip", "scales")  # that tell evaluations of a run apart


def evaluate_run(
    folder: Path,
    data: str | None = None,
    rounds: int = 20,
    skip_bad: bool = False,
    flip: bool = False,
    scales: tuple[float, ...] = (1.0,),
    reducer: Reducer | None = None,
    objects: str | None = None,
    size: int | None = None,
    name: str | None = None,
) -> dict[str, Any]:
    """What `msvit eval` does. Returns what it wrote to RUN/evaluations/NAME.json.

    The run's own evaluation is `val`; one with other settings gets a name that says what differs, or `name`. `flip` and
    `scales` are for segmentation, `size` for classification; `reducer` takes the place of the run's own. With `rounds`
    0 nothing is timed: times that were measured before stay, with the record of when and on what.
    """
    if reducer is not None and reducer.needs_teacher:
        raise ValueError(f"{type(reducer).__name__} must be trained; train with msvit train ... --reducer dynamicvit")
    about = read_config(folder)
    own: Config = about["config"]
    if own.task == "classify" and (flip or tuple(scales) != (1.0,)):
        raise ValueError("flip and scales are for segmentation, but this run classifies; leave them out")
    if own.task == "segment" and size is not None:
        raise ValueError(f"size is {size}, but this run segments in windows of its own size; give scales instead")
    if data is None:
        check_source(folder, own)
    config = with_data(own, source=data, objects=objects, img_size=size, skip_bad=skip_bad or None)
    if not (folder / "model").is_dir():
        raise ValueError(f"{folder} has no trained model yet; finish it with msvit train ... --resume --out {folder}")
    check_writable(folder, "copy the run to a folder of yours, and evaluate it there")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = load_trained(folder, own, len(about["classes"])).to(device)
    other = reducer is not None and (model.reducer is None or model.reducer.words != reducer.words)
    if reducer is not None and other:
        encoder = MSViT(model.backbone, model.gate, model.coarse, model.mode, reducer)
        model = Segmenter(encoder, model.decoder) if isinstance(model, Segmenter) else encoder
    chosen: dict[str, Any] = {
        "data": config.data.source, "img_size": config.data.img_size, "objects": config.data.objects,
        "reducer": None if model.reducer is None else model.reducer.words, "flip": flip, "scales": list(scales),
    }  # fmt: skip
    run = Run(folder)
    usual = default_name(own, config, reducer if other else None, flip, scales)
    name = name or usual
    before = check_replaced(run, name, usual, chosen)
    source = open_val(config, about["classes"])
    check_classes(source, TASKS[config.task].num_classes(model))
    loader = make_loader(source, config, train=False, device=device)
    if isinstance(model, Segmenter):
        how = slide(config, flip, scales)
        pixels = evaluate_pixels(model, loader, how, seed=config.seed)
        samples: Samples | PixelSamples = pixels.samples
        values = summarise_pixels(model, pixels, config)
        images = first((cut(image, how) for batch in loader.iterate(0) for image in batch.images), max(BATCHES))
        timed = model.encoder
    else:
        result = evaluate(model, loader, num_classes=len(source.classes), seed=config.seed)
        values, samples = summarise(model, result, config), result.samples
        images = first_images(loader, max(BATCHES))
        timed = model
    values |= chosen | {"name": name, "versions": versions(), "machine": machine(), "num_skipped": loader.num_skipped}
    values |= measured(timed, images, rounds) if rounds else {key: before[key] for key in TIMES if key in before}
    path = run.samples.path(name)
    path.parent.mkdir(exist_ok=True)
    write_samples(path, samples, model, config, source.classes)
    run.evaluations.write(name, values)  # last: where it is, the evaluation is whole
    return values


def with_data(config: Config, **changes: Any) -> Config:
    """With other settings of the data; those that are None stay."""
    return replace(config, data=replace(config.data, **{key: new for key, new in changes.items() if new is not None}))


def default_name(
    own: Config, config: Config, reducer: Reducer | None = None, flip: bool = False, scales: Sequence[float] = (1.0,)
) -> str:
    """A name that says what differs from the run's own evaluation: data-flowers+evit-0.7, 96px, flip-0.5-1."""
    parts = []
    if not same_source(config.data.source, own.data.source):
        parts.append(f"data-{file_word(config.data.source)}")
    if config.data.img_size != own.data.img_size:
        parts.append(f"{config.data.img_size}px")
    if config.data.objects != own.data.objects:
        parts.append(f"objects-{file_word(config.data.objects or 'none')}")
    if reducer is not None:
        amounts = ((mark, reducer.config.get(key)) for mark, key in (("", "rate"), ("r", "r")))
        words = [f"{mark}{amount:g}" for mark, amount in amounts if amount is not None]
        parts.append("-".join([type(reducer).__name__.lower(), *words]))
    if flip or tuple(scales) != (1.0,):
        sizes = [f"{scale:g}" for scale in scales] if tuple(scales) != (1.0,) else []
        parts.append("-".join(["flip" if flip else "scales", *sizes]))
    return "+".join(parts) or OWN


def same_source(one: str, other: str) -> bool:
    paths = Path(one), Path(other)
    return one == other or (all(path.exists() for path in paths) and paths[0].samefile(paths[1]))


def file_word(source: str) -> str:
    """The last part of a path or source, in letters that a name may have."""
    word = source.rstrip("/").rpartition("/")[2].removesuffix(".tar")
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", word).strip("-.") or "other"


def check_replaced(run: Run, name: str, usual: str, chosen: dict[str, Any]) -> dict[str, Any]:
    """The evaluation of this name that would be replaced, {} if there is none.

    Raise ValueError if it is the run's own, or one with other settings.
    """
    if name == OWN != usual:
        raise ValueError(f"{OWN} is the name of the run's own evaluation, but this is {usual}; give another --name")
    try:
        before = run.evaluations.get(name, {})
    except ValueError:  # cut short: there is nothing to lose
        return {}
    for key in () if name == OWN else SETTINGS:
        if key in before and before[key] != chosen[key]:
            raise ValueError(
                f"{run.evaluations.find(name)} has {key} {before[key]}, but this evaluation has {chosen[key]}; "
                "give another --name"
            )
    return before


def measured(model: MSViT, images: Tensor, rounds: int) -> dict[str, Any]:
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
        return hosts  # the packed form is the same by another road
    return rows


def first_images(loader: Loader, num: int) -> Tensor:
    return first((batch.image for batch in loader.iterate(0)), num)


def first(groups: Iterable[Tensor], num: int) -> Tensor:
    """The first `num` rows of some tensors, looking at no more of these than it takes."""
    found: list[Tensor] = []
    for group in groups:
        found.append(group)
        if sum(map(len, found)) >= num:
            break
    return torch.cat(found)[:num]


def summarise(model: MSViT, result: Evaluation, config: Config) -> dict[str, Any]:
    grid = model.grid(result.samples.image)
    dense_macs = model.backbone.dense_macs(grid)
    return {
        "task": "classify", "top1": result.top1, "top5": result.top5, "loss": result.loss,
        "num_images": len(result.tokens), **costs(model, result.tokens, result.macs, dense_macs, config),
        "fine_share": result.mask_mean.mean().item(), "mask_mean": result.mask_mean.tolist(),
        "mask_var": result.mask_var.tolist(), "fine_on_object": result.fine_on_object,
        "fine_on_ground": result.fine_on_ground,
    }  # fmt: skip


def is_dense(model: MSViT | Segmenter) -> bool:
    return isinstance(model.gate, AllFine) and model.reducer is None


def summarise_pixels(model: Segmenter, result: PixelEvaluation, config: Config) -> dict[str, Any]:
    """Tokens and GMACs are those of a window; GMACs are of gate and encoder, the decoder's stand apart."""
    grid = model.encoder.grid(model.pad(result.samples.image))
    dense_macs = model.backbone.dense_macs(grid, head=False)
    return {
        "task": "segment", **scores(result.confusion), "num_images": result.num_images,
        **costs(model, result.tokens, result.macs, dense_macs, config),
        "decoder_gmacs": model.decoder_macs(grid) / 1e9, "fine_share": result.masks.mean().item(),
        "mask_mean": result.masks.mean(0).tolist(), "mask_var": result.masks.var(0, correction=0).tolist(),
        "fine_on_object": None, "fine_on_ground": None,
        "class_coarse": [known(share) for share in result.coarse],
        "class_frequency": [known(share) for share in result.frequency],
    }  # fmt: skip


def costs(model: MSViT | Segmenter, tokens: Tensor, macs: Tensor, dense_macs: int, config: Config) -> dict[str, Any]:
    """Tokens and multiply-adds of each input, in a few numbers."""
    size = config.data.img_size
    grid = ScaleGrid(size, size, fine=model.fine, coarse=model.coarse)
    tokens, macs = tokens.double(), macs.double() / 1e9
    edges = torch.linspace(min(grid.num_cells, int(tokens.min())), grid.num_patches, 25).round().unique()
    counts = torch.histogram(tokens.float(), bins=edges).hist
    return {
        "dense": is_dense(model),
        "tokens": {
            "mean": tokens.mean().item(), "std": tokens.std(correction=0).item(), "min": int(tokens.min()),
            "max": int(tokens.max()), "dense": grid.num_patches,
            "histogram": {"edges": edges.tolist(), "counts": counts.int().tolist()},
        },
        "gmacs": {"mean": macs.mean().item(), "std": macs.std(correction=0).item(), "dense": dense_macs / 1e9},
    }  # fmt: skip


def write_samples(
    path: Path, samples: Samples | PixelSamples, model: MSViT | Segmenter, config: Config, classes: list[str]
) -> None:
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (config.data.mean, config.data.std))
    pixels = ((samples.image.float() * std + mean) * 255).round().clamp(0, 255).byte()
    tensors = {
        "images": pixels.permute(0, 2, 3, 1).contiguous(), "masks": samples.mask.byte().contiguous(),
        "labels": samples.label, "predictions": samples.prediction,
    }  # fmt: skip
    if isinstance(samples, PixelSamples):  # classes and 255 fit a byte
        tensors |= {"labels": samples.label.byte(), "predictions": samples.prediction.byte()}
    cell = ScaleGrid(model.coarse, model.coarse, fine=model.fine, coarse=model.coarse)
    about = {
        "classes": json.dumps(classes), "coarse": str(model.coarse), "fine": str(model.fine),
        "cell_tokens": str(int(model.backbone.num_tokens(torch.tensor(0), cell))),
    }  # fmt: skip
    with replacing(path) as part:
        save_file(tensors, part, about)
