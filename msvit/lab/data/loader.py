"""Loader: epochs of a source, the same for one process or many, from the start or from the middle.

    loader = batches(source, img_size=224, batch_size=512, train=True, crops="light",
                     mean=(0.5,) * 3, std=(0.5,) * 3, device="cuda", cache=True)
    for batch in loader:                          # the next epoch
        batch.image, batch.label                  # (b, 3, 224, 224) normalised, (b,)
    loader.iterate(epoch=3, start_step=120)       # epoch 3 from its 121st batch on
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar, runtime_checkable

import numpy as np
import torch

from msvit.lab.data.crops import RandomCrop, WholeImage, choose_crop, shuffled
from msvit.lab.data.feeds import Batch, CachedFeed, Decoder, DecodingFeed, Normalise
from msvit.lab.data.resampling import check_interpolation
from msvit.lab.data.sources import Source


@dataclass(frozen=True)
class Plan:
    """Which images make up which batch: a function of seed and epoch alone.

    Process `rank` of `world_size` takes its share of every batch, in order, so that the processes together see what
    one process would. `batch_size` counts the images of all of them.
    """

    num_images: int
    batch_size: int
    shuffle: bool
    drop_last: bool
    seed: int
    rank: int = 0
    world_size: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size:
            raise ValueError(f"rank is {self.rank}, but {self.world_size} processes are numbered from 0")
        if self.batch_size < 1 or self.batch_size % self.world_size:
            near = max(1, self.batch_size // self.world_size) * self.world_size
            raise ValueError(
                f"batch_size is {self.batch_size}, but it counts the images of all {self.world_size} processes "
                f"and must be a multiple of their number; try {near}"
            )
        if self.num_steps == 0:
            raise ValueError(
                f"batch_size is {self.batch_size}, but there are {self.num_images} images; "
                f"make it smaller, or pass drop_last=False"
            )
        if self.shuffle and not self.drop_last and 0 < self.num_images % self.batch_size < self.world_size:
            raise ValueError(
                f"the last batch has {self.num_images % self.batch_size} images for {self.world_size} processes, "
                f"so some would wait for ever; pass drop_last=True"
            )

    @property
    def num_steps(self) -> int:
        whole, rest = divmod(self.num_images, self.batch_size)
        return whole + (rest > 0 and not self.drop_last)

    def rows(self, epoch: int) -> list[np.ndarray]:
        """This process's image numbers, step by step. The last may be fewer, in evaluation even none."""
        order = shuffled(self.num_images, self.seed, epoch) if self.shuffle else np.arange(self.num_images)
        steps = [order[step * self.batch_size : (step + 1) * self.batch_size] for step in range(self.num_steps)]
        return [s[self.rank * len(s) // self.world_size : (self.rank + 1) * len(s) // self.world_size] for s in steps]


B = TypeVar("B", covariant=True)  # what a batch is


@runtime_checkable
class Feed(Protocol[B]):
    """A way from image numbers, step by step, to batches on the device."""

    skipped: list[str]

    def batches(self, epoch: int, rows: list[np.ndarray]) -> Iterator[B]: ...


class Loader(Generic[B]):
    """Epochs of batches. `len` is the number of steps of one; `iter` begins the next, `iterate` any."""

    def __init__(self, plan: Plan, feed: Feed[B], epoch: int = 0) -> None:
        self.plan, self.feed, self.epoch = plan, feed, epoch

    def __len__(self) -> int:
        return self.plan.num_steps

    def __iter__(self) -> Iterator[B]:
        self.epoch += 1
        return self.iterate(self.epoch - 1)

    def iterate(self, epoch: int, start_step: int = 0) -> Iterator[B]:
        """Epoch `epoch` without its first `start_step` batches, which are not decoded."""
        if not 0 <= start_step <= len(self):
            raise ValueError(f"start_step is {start_step}, but an epoch has {len(self)} steps; give 0 to {len(self)}")
        rows = [row for row in self.plan.rows(epoch)[start_step:] if len(row)]
        return self.feed.batches(epoch, rows)

    @property
    def skipped(self) -> list[str]:
        """Names of the bad images this process has met."""
        return self.feed.skipped

    @property
    def num_skipped(self) -> int:
        return len(self.skipped)


def batches(
    source: Source,
    *,
    img_size: int,
    batch_size: int,
    train: bool,
    mean: tuple[float, float, float],
    std: tuple[float, float, float],
    crops: str = "light",
    interpolation: str = "bilinear",
    eval_crop: float = 1.0,
    device: torch.device | str = "cpu",
    seed: int = 0,
    epoch: int = 0,
    workers: int | None = None,
    cache: bool = False,
    cache_size: int | None = None,
    skip_bad: bool = False,
    rank: int = 0,
    world_size: int = 1,
    drop_last: bool | None = None,
) -> Loader[Batch]:
    """The loader of a source, for training (shuffled, cropped) or evaluation (every image once, in order).

    `crops`, in training: "inception" (area 0.05 to 1), "medium" (0.35 to 1), "light" (0.9 to 1), all flipped half the
    time, or "none".
    `eval_crop`, in evaluation: 1.0 squeezes the whole image into the square, 0.875 cuts it from the centre.
    `workers`: decoding processes; by default one for each CPU core, 16 at most. 0 decodes in this one.
    `cache`: decode once, keep the bytes on the device. Evaluation and "none" are unchanged to the bit; random crops
    are cut from squares of `cache_size` px (default 8/7 of img_size for "light", else 3/2, as windows are smaller).
    Every process keeps all images.
    `skip_bad`: in training the next good image stands in for a corrupt one; in evaluation it is left out.
    `drop_last`: leave out the last, smaller batch; by default in training only.
    """
    check_interpolation(interpolation)
    if img_size < 1:
        raise ValueError(f"img_size is {img_size}, but a side needs at least 1 px; 224 is usual")
    crop = choose_crop(train=train, crops=crops, eval_crop=eval_crop)
    plan = Plan(
        num_images=len(source),
        batch_size=batch_size,
        shuffle=train,
        drop_last=train if drop_last is None else drop_last,
        seed=seed,
        rank=rank,
        world_size=world_size,
    )
    normalise = Normalise(mean, std, torch.device(device))
    workers = usable_cores() if workers is None else workers
    replace_bad = train and skip_bad
    if not cache:
        decoder = Decoder(source, crop, size=img_size, interpolation=interpolation, seed=seed, replace_bad=replace_bad)
        return Loader(plan, DecodingFeed(decoder, normalise, workers=workers, skip_bad=skip_bad), epoch)

    random = isinstance(crop, RandomCrop)
    up, down = (8, 7) if crops == "light" else (3, 2)
    stored = cache_size or -(-img_size * up // down)  # rounded up
    decoder = Decoder(
        source,
        WholeImage() if random else crop,
        size=stored if random else img_size,
        interpolation="bicubic" if random else interpolation,  # the sharper: bilinear would blur twice
        seed=0,  # nothing is drawn there
        replace_bad=False,
    )
    decoding = DecodingFeed(decoder, normalise, workers=workers, skip_bad=skip_bad)
    feed = CachedFeed(
        decoding, crop if random else None, size=img_size, interpolation=interpolation, seed=seed,
        replace_bad=replace_bad,
    )  # fmt: skip
    return Loader(plan, feed, epoch)


def usable_cores() -> int:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores, 16)
