"""Dense loader: epochs of images with a label for every pixel, for training and for evaluation.

    loader = dense_batches(train, img_size=512, batch_size=16, train=True, short_side=512,
                           mean=(0.5,) * 3, std=(0.5,) * 3, device="cuda", cache=True)
    for batch in loader:
        batch.image, batch.label                    # (b, 3, 512, 512) normalised, (b, 512, 512), 255 is ignored
    loader = dense_batches(val, img_size=512, batch_size=4, train=False, short_side=512, ...)
    for batch in loader:
        batch.images[0], batch.labels[0]            # (3, h, w), (h0, w0) as on disk
"""

from typing import Any

import torch

from msvit.lab.data.dense.decoding import CropDecoder, WholeDecoder
from msvit.lab.data.dense.feeds import CachedCrops, CachedImages, DecodedCrops, DecodedImages, Finish
from msvit.lab.data.dense.sources import DenseSource
from msvit.lab.data.dense.windows import RandomWindow
from msvit.lab.data.feeds import Normalise
from msvit.lab.data.loader import Feed, Loader, Plan, usable_cores
from msvit.lab.data.workers import Decoding


def dense_batches(
    source: DenseSource,
    *,
    img_size: int,
    batch_size: int,
    train: bool,
    mean: tuple[float, float, float],
    std: tuple[float, float, float],
    short_side: int | None = None,
    scales: tuple[float, float] = (0.5, 2.0),
    max_share: float = 0.75,
    photometric: bool = True,
    device: torch.device | str = "cpu",
    seed: int = 0,
    epoch: int = 0,
    workers: int | None = None,
    cache: bool = False,
    skip_bad: bool = False,
    rank: int = 0,
    world_size: int = 1,
    drop_last: bool | None = None,
) -> Loader[Any]:
    """The loader of a source: `DenseBatch`es in training, `DenseImages` in evaluation (every image once, in order).

    `short_side`: images are scaled so that their shorter side has this many px; None leaves them as they are.
    In training, `scales` is the range of a further random factor, and a square of `img_size` px is cut from the image
    where no class takes more than `max_share` of it, mirrored half the time; `photometric` distorts its colours.
    In evaluation images are whole, and `img_size` to `photometric` say nothing.
    `workers`: decoding processes; by default one for each CPU core, 16 at most. 0 decodes in this one.
    `cache`: decode once, keep the bytes on the device, images at `short_side`, label maps as they are. Every process
    keeps all of them.
    `skip_bad`: in training the next good image stands in for a bad one; in evaluation it is left out.
    `drop_last`: leave out the last, smaller batch; by default in training only.
    """
    rule = RandomWindow(side=img_size, short_side=short_side, scales=scales, max_share=max_share)
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
    finish = Finish(normalise, photometric=photometric, seed=seed)
    workers = usable_cores() if workers is None else workers
    whole = WholeDecoder(source, short_side)
    feed: Feed[Any]
    if cache:
        decoding = Decoding(whole, device=normalise.device, workers=workers, skip_bad=skip_bad)
        feed = CachedCrops(decoding, rule, finish, skip_bad) if train else CachedImages(decoding, normalise)
    elif train:
        decoder = CropDecoder(source, rule, seed=seed, replace_bad=skip_bad)
        feed = DecodedCrops(decoder, finish, workers=workers, skip_bad=skip_bad)
    else:
        feed = DecodedImages(whole, normalise, workers=workers, skip_bad=skip_bad)
    return Loader(plan, feed, epoch)
