"""Tasks: what differs between a label for an image and a class for every pixel.

    task = TASKS[config.task]
    source = task.open(config, "train")
    model = task.wrap(msvit_model, config, num_classes=len(source.classes))
    task.loss(output.logits, batch.label, smoothing=0.0)
    task.score(model, loader, config, accelerator)      # {"top1": ...} or {"miou": ...}, with tokens
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import Tensor, nn

from msvit.model import MSViT
from msvit.preprocessing import Preprocessing
from msvit.segmenter import Segmenter, attach_decoder
from msvit_lab.config import Config
from msvit_lab.data import IGNORE, Augmentation, Loader, batches, dense_batches, open_source
from msvit_lab.evaluation.segmentation import PixelCounts, scores, segment
from msvit_lab.evaluation.sliding import Slide
from msvit_lab.runs import run_to_start_from


class Classify:
    """A label for an image, by the host's own head."""

    metric = "top1"

    def open(self, config: Config, split: str, classes: list[str] | None = None) -> Any:
        options = scene_options(config, split)
        return open_source(config.data.source, split, classes=classes, holdout=config.data.holdout, **options)

    def loader(self, source: Any, config: Config, train: bool, **where: Any) -> Loader:
        data = config.data
        return batches(
            source, train=train, img_size=data.img_size, crops=data.crops, interpolation=data.interpolation,
            eval_crop=data.eval_crop, **loader_options(config), **where,
        )  # fmt: skip

    def host_options(self, num_classes: int) -> dict[str, Any]:
        return {"num_classes": num_classes}

    def data_settings(self, config: Config) -> dict[str, Any]:
        """How the run's validation images are prepared, in the words of timm's pretrained_cfg."""
        data = config.data
        crop = {"crop_pct": data.eval_crop, "crop_mode": "squash" if data.eval_crop == 1 else "center"}
        size = {"input_size": (3, data.img_size, data.img_size), "interpolation": data.interpolation}
        return {**mean_and_std(config), **size, **crop}

    def preprocessing(self, config: Config) -> Preprocessing | None:
        """That of validation images, of a run that is resolved."""
        return Preprocessing.of_config(self.data_settings(config))

    def wrap(self, model: MSViT, config: Config, num_classes: int) -> MSViT:
        if config.optim.zero_head and run_to_start_from(config) is None:
            for head in classifiers(model.host):
                nn.init.zeros_(head.weight)
                nn.init.zeros_(head.bias)
        return model

    def head(self, model: Any) -> list[nn.Parameter]:
        """Parameters of the classifier, whose learning rate is scaled by optim.head_scale."""
        return [p for module in classifiers(model.host) for p in module.parameters()]

    def loss(self, logits: Tensor, label: Tensor, smoothing: float) -> Tensor:
        """Cross-entropy with classes (b,), or with their shares (b, classes), which are smoothed already."""
        return F.cross_entropy(logits.float(), label, label_smoothing=smoothing if label.ndim == 1 else 0.0)

    def accuracy(self, logits: Tensor, label: Tensor) -> Tensor:
        """Share of images with the right class; of mixed images, with the class of the larger share."""
        return (logits.argmax(1) == (label if label.ndim == 1 else label.argmax(1))).double().mean()

    @torch.no_grad()
    def score(self, model: Any, loader: Loader, config: Config, accelerator: Accelerator) -> dict[str, float]:
        """Accuracy and tokens, over all processes."""
        sums = torch.zeros(5, dtype=torch.float64, device=accelerator.device)  # images, top-1, top-5, loss, tokens
        for batch in loader.iterate(0):
            with accelerator.autocast():
                output = model(batch.image)
            logits = output.logits.float()
            top = logits.topk(min(5, logits.shape[1]), dim=1).indices == batch.label[:, None]
            loss = F.cross_entropy(logits, batch.label, reduction="sum")
            num = torch.full_like(loss, len(logits))
            sums += torch.stack([num, top[:, 0].sum(), top.sum(), loss, output.tokens.count.sum()])
        total = accelerator.reduce(sums, "sum")
        return dict(zip(("top1", "top5", "loss", "tokens"), (total[1:] / total[0]).tolist(), strict=True))


class Segment:
    """A class for every pixel, by a decoder of Segmenter."""

    metric = "miou"

    def open(self, config: Config, split: str, classes: list[str] | None = None) -> Any:
        scenes = scene_options(config, split)
        return open_source(config.data.source, split, target="label_map", classes=classes, **scenes)

    def loader(self, source: Any, config: Config, train: bool, **where: Any) -> Loader:
        data = config.data
        slide(config)  # before hours of training: can it be evaluated?
        return dense_batches(
            source, train=train, img_size=data.img_size, short_side=data.short_side, scales=data.scales,
            max_share=data.max_share, photometric=data.photometric, **loader_options(config), **where,
        )  # fmt: skip

    def host_options(self, num_classes: int) -> dict[str, Any]:
        return {"num_classes": 0}

    def data_settings(self, config: Config) -> dict[str, Any]:
        return mean_and_std(config)

    def preprocessing(self, config: Config) -> None:
        """Images are cut into windows, which no `Preprocessing` does."""

    def wrap(self, model: MSViT, config: Config, num_classes: int) -> Segmenter:
        segmenter = attach_decoder(model, num_classes, config.model.decoder)
        for part in segmenter.unused():  # several processes would wait for their gradients
            part.requires_grad_(False)
        return segmenter

    def head(self, model: Any) -> list[nn.Parameter]:
        return list(model.decoder.parameters())

    def loss(self, logits: Tensor, label: Tensor, smoothing: float) -> Tensor:
        how: dict[str, Any] = {"label_smoothing": smoothing, "ignore_index": IGNORE, "reduction": "sum"}
        total = F.cross_entropy(logits.float(), label, **how)
        return total / (label != IGNORE).sum().clamp(min=1)  # a batch may hold no label at all

    def accuracy(self, logits: Tensor, label: Tensor) -> Tensor:
        return (logits.argmax(1) == label).double().sum() / (label != IGNORE).sum().clamp(min=1)

    @torch.no_grad()
    def score(self, model: Any, loader: Loader, config: Config, accelerator: Accelerator) -> dict[str, float]:
        """mIoU and tokens by sliding windows, over all processes; NaN where nothing is labelled."""
        counts = PixelCounts(model.num_classes, accelerator.device)
        segmented = segment(model, loader, slide(config), counts, accelerator.autocast)
        tokens = [each.costs.tokens for each in segmented]
        found = torch.cat([torch.zeros(0, device=accelerator.device), *tokens])
        confusion, num = counts.confusion.compute(), torch.stack([found.sum(), torch.ones_like(found).sum()])
        total, windows = accelerator.reduce((confusion, num), "sum")
        values = scores(total)
        known = {key: math.nan if values[key] is None else values[key] for key in ("miou", "pixel_accuracy")}
        return {**known, "tokens": (windows[0] / windows[1]).item()}


def classifiers(host: Any) -> list[nn.Linear]:
    """The last layers of a host, as far as they are linear: one, or two of a distilled one."""
    found = (getattr(host, name, None) for name in ("head", "head_dist"))
    found = (getattr(head, "fc", head) for head in found)  # a Swin's is one layer further down
    return [head for head in found if isinstance(head, nn.Linear)]


def scene_options(config: Config, split: str) -> dict[str, Any]:
    """Size and number of the images to generate; only the source `scenes` uses them."""
    data = config.data
    return {"size": data.scene_size, "num_images": data.num_train if split == "train" else data.num_val}


def slide(config: Config) -> Slide:
    """The sliding-window settings for evaluating a segmentation run."""
    batch = max(1, config.optim.batch_size // config.optim.accumulate)
    return Slide(window=config.data.img_size, stride=config.data.stride, batch=batch)


def mean_and_std(config: Config) -> dict[str, Any]:
    """Mean and std of the images, where they are resolved."""
    found = {"mean": config.data.mean, "std": config.data.std}
    return {name: value for name, value in found.items() if value is not None}


def loader_options(config: Config) -> dict[str, Any]:
    data, optim = config.data, config.optim
    assert None not in (data.mean, data.std), "call msvit_lab.auto_settings.resolve_settings before images are read"
    augmentation = Augmentation(  # what training does besides cropping; labels are smoothed where they are mixed
        rand_augment=data.rand_augment, erasing=data.erasing, mixup=data.mixup, cutmix=data.cutmix,
        smoothing=optim.smoothing, repeats=data.repeats,
    )  # fmt: skip
    return {
        "batch_size": optim.batch_size // optim.accumulate, "mean": data.mean, "std": data.std, "seed": config.seed,
        "workers": data.workers, "cache": data.cache, "skip_bad": data.skip_bad, "augmentation": augmentation,
    }  # fmt: skip


Task = Classify | Segment
TASKS: dict[str, Task] = {"classify": Classify(), "segment": Segment()}
