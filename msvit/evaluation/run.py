"""Evaluate a run folder: accuracy, tokens, GMACs and time, into eval.json and samples.safetensors."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from msvit.atomic import replacing
from msvit.data import Loader, check_classes
from msvit.evaluation.accuracy import Evaluation, evaluate
from msvit.evaluation.latency import measure_latency
from msvit.gates import AllFine
from msvit.model import MSViT
from msvit.reduction import Reducer
from msvit.training.build import load_trained, make_loader, open_val
from msvit.training.config import Config
from msvit.training.run import machine, read_config, versions, write_json

BATCHES = (1, 64)  # a single image, and enough of them to fill a machine


def evaluate_run(
    folder: Path, data: str | None = None, rounds: int = 20, skip_bad: bool = False, reducer: Reducer | None = None
) -> dict[str, Any]:
    """What `msvit eval` does. Returns what it wrote to eval.json. `reducer` takes the place of the run's own."""
    if reducer is not None and reducer.needs_teacher:
        raise ValueError(f"{type(reducer).__name__} must be trained; train with msvit train ... --reducer dynamicvit")
    about = read_config(folder)
    config: Config = about["config"]
    if data is not None:
        config = replace(config, data=replace(config.data, source=data))
    config = replace(config, data=replace(config.data, skip_bad=skip_bad or config.data.skip_bad))
    if not (folder / "model").is_dir():
        raise ValueError(f"{folder} has no trained model yet; finish it with msvit train ... --resume --out {folder}")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = load_trained(folder, about["config"], len(about["classes"])).to(device)
    if reducer is not None:
        model = MSViT(model.backbone, model.gate, model.coarse, model.mode, reducer)
    source = open_val(config, about["classes"])
    host: Any = model.host
    check_classes(source, host.num_classes)
    loader = make_loader(source, config, train=False, device=device)
    result = evaluate(model, loader, num_classes=len(source.classes), seed=config.seed)
    images = first_images(loader, max(BATCHES))
    latency = [row for batch in BATCHES if batch <= len(images) for row in timings(model, images, batch, rounds)]
    values = summary(model, result, config) | {
        "latency": [asdict(row) for row in latency], "versions": versions(), "machine": machine(),
        "data": config.data.source, "num_skipped": loader.num_skipped,
    }  # fmt: skip
    write_samples(folder / "samples.safetensors", result, model, config, source.classes)
    write_json(folder / "eval.json", values)  # last: where it is, the evaluation is whole
    return values


def timings(model: MSViT, images: torch.Tensor, batch: int, rounds: int) -> list[Any]:
    kinds = [torch.float32, torch.bfloat16] if images.is_cuda else [torch.float32]
    rows = [row for dtype in kinds for row in measure_latency(model, images, batch, dtype, rounds)]
    dense = is_dense(model)  # its packed form is the dense host by another road
    return [row for row in rows if not (dense and row.what == "packed")] if dense and len(rows) > len(kinds) else rows


def first_images(loader: Loader, num: int) -> torch.Tensor:
    found: list[torch.Tensor] = []
    for batch in loader.iterate(0):
        found.append(batch.image)
        if sum(map(len, found)) >= num:
            break
    return torch.cat(found)[:num]


def summary(model: MSViT, result: Evaluation, config: Config) -> dict[str, Any]:
    size = config.data.img_size
    grid = model.grid(result.samples.image)
    dense_macs = int(model.backbone.num_macs(torch.tensor([grid.num_patches]))[0])
    tokens, macs = result.tokens.double(), result.macs.double() / 1e9
    edges = torch.linspace(min(grid.num_cells, int(tokens.min())), grid.num_patches, 25).round().unique()
    counts = torch.histogram(tokens.float(), bins=edges).hist
    return {
        "top1": result.top1, "top5": result.top5, "loss": result.loss, "num_images": len(tokens), "img_size": size,
        "dense": is_dense(model), "reducer": None if model.reducer is None else model.reducer.words,
        "tokens": {
            "mean": tokens.mean().item(), "std": tokens.std(correction=0).item(), "min": int(tokens.min()),
            "max": int(tokens.max()), "dense": grid.num_patches,
            "histogram": {"edges": edges.tolist(), "counts": counts.int().tolist()},
        },
        "gmacs": {"mean": macs.mean().item(), "std": macs.std(correction=0).item(), "dense": dense_macs / 1e9},
        "fine_share": result.mask_mean.mean().item(), "mask_mean": result.mask_mean.tolist(),
        "mask_var": result.mask_var.tolist(), "fine_on_object": result.fine_on_object,
        "fine_on_ground": result.fine_on_ground,
    }  # fmt: skip


def is_dense(model: MSViT) -> bool:
    return isinstance(model.gate, AllFine) and model.reducer is None


def write_samples(path: Path, result: Evaluation, model: MSViT, config: Config, classes: list[str]) -> None:
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (config.data.mean, config.data.std))
    samples = result.samples
    pixels = ((samples.image.float() * std + mean) * 255).round().clamp(0, 255).byte()
    tensors = {
        "images": pixels.permute(0, 2, 3, 1).contiguous(), "masks": samples.mask.byte().contiguous(),
        "labels": samples.label, "predictions": samples.prediction,
    }  # fmt: skip
    about = {"classes": json.dumps(classes), "coarse": str(model.coarse), "fine": str(model.fine)}
    with replacing(path) as part:
        save_file(tensors, part, about)
