"""Features for k-nearest neighbours, with and without a gate: accuracy and images per second.

    python examples/knn_features.py                                                   # built-in scenes, random weights
    python examples/knn_features.py --data PETS --weights dinov2.safetensors --size 224      # train/ and val/ in PETS
    python examples/knn_features.py --data PHOTOS --pretrained                        # PHOTOS/CLASS/*.jpg

With random weights it shows that it runs, and how fast, but no accuracy above chance. As DINOv2 is evaluated: the class
token after the last norm, of length 1; the neighbours of an image vote with exp(similarity / 0.07). The gate is the one
that comes with msvit; its threshold is set on the training images such that `--share` of the cells are fine. Both
models are timed in turn on the same batches, on the device that is there.
"""

import argparse
import time
from itertools import islice
from typing import Any

import timm
import torch
import torch.nn.functional as F
from torch import Tensor

import msvit
from msvit.lab.data import Loader, batches, open_source

TEMPERATURE = 0.07  # of the votes


def main(arguments: list[str] | None = None) -> dict[str, dict[str, float]]:
    args = parse(arguments)
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    overlay = {} if args.weights is None else {"file": args.weights, "custom_load": False}
    vit = timm.create_model(
        args.model, pretrained=args.pretrained or args.weights is not None, pretrained_cfg_overlay=overlay,
        num_classes=0, img_size=args.size,
    ).eval().to(device)  # fmt: skip
    dense = msvit.convert(vit)
    gate = msvit.load_gate("default", coarse=dense.coarse).to(device)
    about = timm.data.resolve_model_data_config(vit)
    train, val = read(args, about, device)
    gated = msvit.convert(vit, gate=gate).eval()
    first = [batch.image for batch in islice(train.iterate(0), 4)]
    set_share(gated, first, args.share)

    models, found = {"dense": dense, "gated": gated}, {}
    features: dict[str, tuple[list[Tensor], list[Tensor]]] = {name: ([], []) for name in models}
    targets: tuple[list[Tensor], list[Tensor]] = ([], [])
    seconds, tokens = dict.fromkeys(models, 0.0), dict.fromkeys(models, 0)
    for model in models.values():
        extract(model, first[0])  # a first call warms up
    for side, loader in enumerate((train, val)):
        for batch in loader.iterate(0):
            targets[side].append(batch.label)
            for name, model in models.items():
                start = time.perf_counter()
                feature, count = extract(model, batch.image)
                seconds[name] += time.perf_counter() - start
                tokens[name] += count
                features[name][side].append(feature)
    labels = [torch.cat(part) for part in targets]
    num = sum(map(len, labels))
    for name, (known, asked) in features.items():
        accuracy = knn(torch.cat(known), labels[0], torch.cat(asked), args.k) == labels[1]
        found[name] = {
            "accuracy": accuracy.double().mean().item(), "images_per_second": num / seconds[name],
            "tokens": tokens[name] / num,
        }  # fmt: skip
        print(
            f"{name}: {found[name]['accuracy']:.1%} of {len(labels[1])} images by {args.k} of {len(labels[0])} "
            f"neighbours, {found[name]['tokens']:.0f} tokens, {found[name]['images_per_second']:.1f} images per second"
        )
    return found


@torch.inference_mode()
def extract(model: Any, image: Tensor) -> tuple[Tensor, int]:
    """Features of length 1 (b, d), and the tokens of all images."""
    output = model(image)  # without a classifier logits are the pooled features
    return F.normalize(output.logits.float(), dim=1), int(output.tokens.count.sum())


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


def read(args: Any, about: dict[str, Any], device: str) -> list[Loader]:
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
    parser.add_argument("--workers", type=int, default=2)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
