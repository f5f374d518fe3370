"""Loader: epochs of a source, the same for one process or many, from the start or from the middle.

    loader.iterate(epoch=3, start_step=120)       # from its 121st batch on
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Int

from msvit_lab.data.augmentation import Augmentation, erase, make_mixup, make_rand_augment, seeded, seeds
from msvit_lab.data.cache import Cache
from msvit_lab.data.decode import Batch, Decoder, DecodingFeed, Finish
from msvit_lab.data.items import Source
from msvit_lab.data.transforms import CROPS, MIXING, CentreCrop, Crop, Key, RandomCrop, RandomWindow, Scaled, shuffled


@dataclass(frozen=True)
class Plan:
    """Which images make up which batch: a function of seed and epoch alone.

    Process `rank` of `world_size` takes its share of every batch, in order, so that the processes together see what
    one process would. `batch_size` counts the images of all of them.

    With `repeats` (repeated augmentation, as in DeiT) an epoch has as many samples as there are images, but shows
    `repeats` views of each of the first images of its order, all in one batch unless that ends between them. A batch
    has all first views before all second ones, so that those of an image lie in different processes if there are as
    many as repeats.
    """

    num_images: int
    batch_size: int
    train: bool  # shuffled, and without the last, smaller batch
    seed: int
    rank: int = 0
    world_size: int = 1
    repeats: int = 1

    def __post_init__(self) -> None:
        if self.batch_size < 1 or self.batch_size % self.world_size:
            near = max(1, self.batch_size // self.world_size) * self.world_size
            raise ValueError(
                f"batch_size is {self.batch_size}, but it counts the images of all {self.world_size} processes "
                f"and must be a multiple of their number; try {near}"
            )
        if self.num_steps == 0:
            raise ValueError(
                f"batch_size is {self.batch_size}, but there are {self.num_images} images; "
                f"make it smaller"
            )

    @property
    def num_steps(self) -> int:
        whole, rest = divmod(self.num_images, self.batch_size)
        return whole + (rest > 0 and not self.train)

    def rows(self, epoch: int) -> list[np.ndarray]:
        """This process's numbers of images, or of views (as in Key), step by step.

        The last may be fewer, in evaluation even none.
        """
        order = shuffled(self.num_images, self.seed, epoch) if self.train else np.arange(self.num_images)
        image, view = np.divmod(np.arange(self.num_images), self.repeats)
        order = order[image] + self.num_images * view
        steps = [order[step * self.batch_size : (step + 1) * self.batch_size] for step in range(self.num_steps)]
        if self.repeats > 1:
            steps = [s[np.argsort(s // self.num_images, kind="stable")] for s in steps]  # by view
        return [s[self.rank * len(s) // self.world_size : (self.rank + 1) * len(s) // self.world_size] for s in steps]


class Loader:
    """Epochs of batches. `len` is the number of steps of one.

    `erasing`: probability of random erasing. `mixup`: timm's Mixup, of the images of each batch of this process.
    """

    def __init__(self, plan: Plan, feed: DecodingFeed | Cache, erasing: float = 0.0, mixup: Any = None) -> None:
        self.plan, self.feed, self.erasing, self.mixup = plan, feed, erasing, mixup

    def __len__(self) -> int:
        return self.plan.num_steps

    def iterate(self, epoch: int, start_step: int = 0) -> Iterator[Any]:
        """Epoch `epoch` without its first `start_step` batches, which are not decoded."""
        if not 0 <= start_step <= len(self):
            raise ValueError(f"start_step is {start_step}, but an epoch has {len(self)} steps; give 0 to {len(self)}")
        rows = [row for row in self.plan.rows(epoch)[start_step:] if len(row)]
        made = self.feed.batches(epoch, rows)
        return self.augmented(made, epoch, start_step, rows) if self.erasing or self.mixup is not None else made

    def augmented(
        self, made: Iterator[Any], epoch: int, start_step: int, rows: list[Int[np.ndarray, " b"]]
    ) -> Iterator[Batch]:
        """Training batches with erasing and mixing, drawn for their views and for their place in the epoch."""
        plan = self.plan
        for step, (row, batch) in enumerate(zip(rows, made, strict=True), start_step):
            if self.erasing:
                erase(batch.image, Key(plan.seed, epoch, row), self.erasing)
            if self.mixup is not None:
                number = step * plan.world_size + plan.rank  # among the batches of all processes
                with seeded(seeds(Key(plan.seed, epoch, np.array([number])), MIXING)[0]):
                    batch = Batch(*self.mixup(batch.image, batch.label))
            yield batch

    @property
    def skipped(self) -> list[str]:
        """Names of the bad images this process has met."""
        return self.feed.skipped


def batches(
    source: Source, *, img_size: int, train: bool, crops: str = "light", interpolation: str = "bilinear",
    eval_crop: float = 1.0, **options: Any,
) -> Loader:  # fmt: skip
    """The loader of a source with a class for each image; `options` are those of `make_loader`.

    `crops`, in training: "inception" (area 0.05 to 1), "medium" (0.35 to 1), "light" (0.9 to 1), all flipped half the
    time, or "none".
    `eval_crop`, in evaluation: 1.0 squeezes the whole image into the square, 0.875 cuts it from the centre.
    `cache=True` leaves evaluation and "none" unchanged to the bit; random crops are cut from squares that
    are larger (8/7 of img_size for "light", else 3/2, as windows are smaller).
    """
    how: dict[str, Any] = {"side": img_size, "interpolation": interpolation}
    area = CROPS[crops]
    crop = stored = CentreCrop(share=eval_crop, **how) if not train and eval_crop < 1 else Crop(**how)
    if train and area is not None:
        up, down = (8, 7) if crops == "light" else (3, 2)
        side = -(-img_size * up // down)  # rounded up
        # stored with the sharper filter: bilinear would blur twice
        crop, stored = RandomCrop(area=area, **how), Crop(side=side, interpolation="bicubic")
    return make_loader(source, crop, stored, train=train, **options)


def dense_batches(
    source: Source, *, img_size: int, train: bool, short_side: int | None = None,
    scales: tuple[float, float] = (0.5, 2.0), max_share: float = 0.75, photometric: bool = True, **options: Any,
) -> Loader:  # fmt: skip
    """The loader of a source with a class for every pixel: `Batch`es in training, `DenseImages` in evaluation.

    `short_side`: images are scaled so that their shorter side has this many px; None leaves them as they are.
    In training, `scales` is the range of a further random factor, and a square of `img_size` px is cut from the image
    where no class takes more than `max_share` of it, mirrored half the time; `photometric` distorts its colours.
    In evaluation images are whole, and `img_size` to `photometric` have no effect.
    `options` are those of `make_loader`; `cache=True` stores images at `short_side`, label maps as they are.
    An `augmentation` is an error in training: label maps would not follow it.
    """
    window = RandomWindow(side=img_size, short_side=short_side, scales=scales, max_share=max_share)
    stored = Scaled(short_side=short_side)
    return make_loader(
        source, window if train else stored, stored, train=train, photometric=photometric and train, **options
    )


def make_loader(
    source: Source, crop: Crop, stored: Crop, *, batch_size: int, train: bool, mean: tuple[float, float, float],
    std: tuple[float, float, float], photometric: bool = False, device: torch.device | str = "cpu", seed: int = 0,
    workers: int | None = None, cache: bool = False, skip_bad: bool = False, rank: int = 0, world_size: int = 1,
    augmentation: Augmentation | None = None,
) -> Loader:  # fmt: skip
    """The loader of a source, for training (shuffled) or evaluation (every image once, in order).

    `stored`: what a cache keeps of each image; a random `crop` is cut from that.
    `workers`: decoding processes; by default one for each CPU core, 16 at most. 0 decodes in this one.
    `cache`: decode once, keep the bytes on the device. Every process keeps all images.
    `skip_bad`: in training the next good image stands in for a corrupt one; in evaluation it is left out.
    `augmentation`: in training of classification, DeiT's augmentations. RandAugment needs `cache=False`.
    """
    extra = augmentation if train and augmentation is not None else Augmentation()
    plan = Plan(
        num_images=len(source), batch_size=batch_size, train=train, seed=seed, rank=rank, world_size=world_size,
        repeats=extra.repeats,
    )  # fmt: skip
    check_augmentation(extra, crop, cache, plan)
    drawn: dict[str, Any] = {"seed": seed, "replace_bad": train and skip_bad}
    augment = make_rand_augment(extra.rand_augment, side=crop.side, mean=mean, interpolation=crop.interpolation)
    feed = DecodingFeed(
        Decoder(source, stored) if cache else Decoder(source, crop, **drawn, augment=augment),
        Finish(mean, std, torch.device(device)), workers=usable_cores() if workers is None else workers,
        skip_bad=skip_bad, photometric=photometric,
    )  # fmt: skip
    made = Cache(feed, crop if crop.random else None, **drawn) if cache else feed
    return Loader(plan, made, erasing=extra.erasing, mixup=make_mixup(extra, len(source.classes)))


def check_augmentation(augmentation: Augmentation, crop: Crop, cache: bool, plan: Plan) -> None:
    """Raise ValueError unless images and batches can be augmented like this."""
    names = ("rand_augment", "erasing", "mixup", "cutmix", "repeats")
    given = [name for name in names if getattr(augmentation, name) != getattr(Augmentation, name)]
    if isinstance(crop, RandomWindow) and given:
        raise ValueError(
            f"the images have label maps, which cannot follow {' and '.join(given)}; leave these settings at their "
            f"defaults, or train a classifier (--set task=classify)"
        )
    if augmentation.rand_augment is not None and cache:
        raise ValueError(
            f"rand_augment is {augmentation.rand_augment}, which needs images that are decoded in every epoch, but "
            f"cache is True, which keeps them on the device; pass cache=False (--set data.cache=false)"
        )
    if augmentation.mixes and plan.batch_size % (2 * plan.world_size):
        raise ValueError(
            f"mixup and cutmix mix pairs of images, but a batch of {plan.batch_size} has no even number for each of "
            f"{plan.world_size} processes; make batch_size a multiple of {2 * plan.world_size}"
        )


def usable_cores() -> int:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores, 16)
