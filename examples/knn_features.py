"""Features for k-nearest neighbours, with and without a gate: accuracy and images per second.

    python examples/knn_features.py                                                   # built-in scenes, random weights
    python examples/knn_features.py --data PETS --weights dinov2.safetensors --size 224      # train/ and val/ in PETS
    python examples/knn_features.py --data PETS --weights FILE --size 224 --batch 256 --device cuda --dtype bfloat16 \
        --compile --out knn.json
    python examples/knn_features.py --data PHOTOS --pretrained                        # PHOTOS/CLASS/*.jpg

With random weights it shows that it runs, and how fast, but no accuracy above chance. As DINOv2 is evaluated: the class
token after the last norm, of length 1; the neighbours of an image vote with exp(similarity / 0.07). The gate is the one
that comes with msvit; its threshold is set on the training images such that `--share` of the cells are fine.

Images are decoded once, in class folders or tars, and stay on the device (600 KB each at 224 px in float32). A first
pass over them gives the features; then `--rounds` passes are timed, both models in turn on each batch, and the median
is shown. Dense is timm's own model; with `--compile` it runs under torch.compile, the other under msvit.compile.
"""

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import timm
import torch
import torch.nn.functional as F
from torch import Tensor

import msvit
from msvit_lab.data import Loader, batches, open_source

TEMPERATURE = 0.07  # of the votes
Model = Callable[[Tensor], Tensor]  # (b, 3, h, w) -> (b, d)


def main(arguments: list[str] | None = None) -> dict[str, dict[str, float]]:
    args = parse(arguments)
    torch.manual_seed(0)
    device, dtype = torch.device(args.device), getattr(torch, args.dtype)
    overlay = {} if args.weights is None else {"file": args.weights, "custom_load": False}
    vit = timm.create_model(
        args.model, pretrained=args.pretrained or args.weights is not None, pretrained_cfg_overlay=overlay,
        num_classes=0, img_size=args.size,
    ).eval().to(device, dtype)  # fmt: skip
    gated = msvit.convert(vit, gate=msvit.load_gate("default", coarse=2 * msvit.convert(vit).fine)).eval()
    gated.to(device, dtype)

    loaders = read(args, timm.data.resolve_model_data_config(vit), device)
    decoded = [[(batch.image.to(dtype), batch.label) for batch in loader.iterate(0)] for loader in loaders]
    images = [[image for image, _ in part] for part in decoded]
    labels = [torch.cat([label for _, label in part]) for part in decoded]
    set_share(gated, images[0][:4], args.share)
    tokens = {"dense": float(vit.patch_embed.num_patches), "gated": mean_tokens(gated, images)}

    fast = msvit.compile(gated) if args.compile else gated
    dense = torch.compile(vit) if args.compile else vit
    models: dict[str, Model] = {"dense": dense, "gated": lambda image: fast(image).logits}
    features = {name: [extract(model, part) for part in images] for name, model in models.items()}
    speed = time_in_turn(models, images[0] + images[1], args.rounds)
    found = {}
    for name, (known, asked) in features.items():
        right = knn(known, labels[0], asked, args.k) == labels[1]
        found[name] = {
            "accuracy": right.double().mean().item(), "tokens": tokens[name], "images_per_second": speed[name],
        }  # fmt: skip
    show(found, args, [len(part) for part in labels])
    if args.out is not None:
        about = {"settings": vars(args), "num_images": [len(part) for part in labels], "device": name_of(device)}
        versions = {"msvit": msvit.__version__, "torch": torch.__version__, "timm": timm.__version__}
        text = json.dumps({"results": found, **about, "versions": versions}, indent=2, default=str)
        args.out.write_text(text + "\n")
    return found


@torch.inference_mode()
def extract(model: Model, images: list[Tensor]) -> Tensor:
    """Features of length 1 (n, d). Without a classifier the output of a model is its pooled features."""
    return torch.cat([F.normalize(model(image).float(), dim=1) for image in images])


@torch.inference_mode()
def mean_tokens(model: Any, images: list[list[Tensor]]) -> float:
    return torch.cat([model(image).tokens.count for part in images for image in part]).double().mean().item()


@torch.inference_mode()
def time_in_turn(models: dict[str, Model], images: list[Tensor], rounds: int) -> dict[str, float]:
    """Images per second of each model, the median over passes in which they take turns on each batch."""
    seconds: dict[str, list[float]] = {name: [] for name in models}
    for _ in range(rounds):
        spent = dict.fromkeys(models, 0.0)
        for image in images:
            for name, model in models.items():
                wait(image)
                start = time.perf_counter()
                model(image)
                wait(image)
                spent[name] += time.perf_counter() - start
        for name, total in spent.items():
            seconds[name].append(total)
    return {name: sum(map(len, images)) / median(passes) for name, passes in seconds.items()}


def wait(image: Tensor) -> None:
    if image.is_cuda:
        torch.cuda.synchronize()


def name_of(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"


def show(found: dict[str, dict[str, float]], args: Any, num: list[int]) -> None:
    print(f"{num[1]} images by {args.k} of {num[0]} neighbours, {args.size} px, {args.dtype}, {args.device}")
    print("| | accuracy | tokens | images/s | speed-up |")
    print("| --- | --- | --- | --- | --- |")
    for name, row in found.items():
        ratio = row["images_per_second"] / found["dense"]["images_per_second"]
        print(
            f"| {name} | {row['accuracy']:.1%} | {row['tokens']:.0f} | {row['images_per_second']:.1f} | {ratio:.2f}x |"
        )


def knn(known: Tensor, labels: Tensor, asked: Tensor, k: int) -> Tensor:
    """(m,) labels of `asked` (m, d) by the votes of the k nearest of `known` (n, d)."""
    near = (asked @ known.T).topk(min(k, len(known)), dim=1)  # (m, k)
    votes = torch.zeros(len(asked), int(labels.max()) + 1, device=known.device)
    votes.scatter_add_(1, labels[near.indices], (near.values / TEMPERATURE).exp())
    return votes.argmax(1)


@torch.inference_mode()
def set_share(model: Any, images: list[Tensor], share: float) -> None:
    """Move the gate's threshold to where `share` of the cells of these images are fine."""
    logits = torch.cat([model.gate(image).logits.flatten() for image in images])
    model.gate.threshold = logits.quantile(1 - share).item()


def read(args: Any, about: dict[str, Any], device: torch.device) -> list[Loader]:
    """Loaders of the training and the validation images; of class folders without val/ a tenth is held out."""
    found, classes = [], None
    for split in ("train", "val"):
        num = args.images if split == "train" else max(1, args.images // 4)
        source = open_source(args.data, split, classes=classes, holdout=0.1, size=args.size, num_images=num)
        classes = source.classes
        options = {"mean": about["mean"], "std": about["std"], "device": device, "workers": args.workers}
        loader = batches(
            source, img_size=args.size, batch_size=args.batch, train=False, interpolation="bicubic", **options
        )  # fmt: skip
        found.append(loader)
    return found


def parse(arguments: list[str] | None) -> Any:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="scenes", help="a folder of class folders, or scenes")
    parser.add_argument("--images", type=int, default=128, help="scenes that are drawn")
    parser.add_argument("--model", default="vit_small_patch14_dinov2", help="a timm model with a class token")
    parser.add_argument("--weights", help="a file of weights; random ones by default")
    parser.add_argument("--pretrained", action="store_true", help="timm's own weights, which it downloads")
    parser.add_argument("--size", type=int, default=112, help="side of the input in px, a multiple of the cells")
    parser.add_argument("--share", type=float, default=0.3, help="of fine cells")
    parser.add_argument("--k", type=int, default=20, help="neighbours")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--workers", type=int, default=2, help="processes that decode")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cpu, cuda, cuda:1")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--compile", action="store_true", help="torch.compile for dense, msvit.compile for gated")
    parser.add_argument("--rounds", type=int, default=1, help="timed passes over all images")
    parser.add_argument("--out", type=Path, help="write settings and results to this JSON file")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
