"""Data: images with labels, as batches for a training loop.

    train = open_source("pets", "train")                          # a folder, tars, wds/..., hfds/... or "scenes"
    val = open_source("pets", "val", classes=train.classes)
    loader = batches(train, img_size=224, batch_size=512, train=True, crops="light",
                     mean=(0.5,) * 3, std=(0.5,) * 3, device="cuda", cache=True)
    for batch in loader:
        batch.image, batch.label, batch.object_mask               # (b, 3, 224, 224), (b,), None
    loader.num_skipped                                            # with skip_bad=True

Seed, epoch and step say what a batch is: not the number of workers, nor of processes, nor where a run was resumed.
"""

from msvit.lab.data.crops import CROPS, CentreCrop, RandomCrop, WholeImage
from msvit.lab.data.feeds import Batch
from msvit.lab.data.loader import Loader, Plan, batches
from msvit.lab.data.resampling import FILTERS, cut, resample
from msvit.lab.data.sources import BadImage, Item, Source, check_classes, check_same_classes, open_source

__all__ = [
    "CROPS",
    "FILTERS",
    "BadImage",
    "Batch",
    "CentreCrop",
    "Item",
    "Loader",
    "Plan",
    "RandomCrop",
    "Source",
    "WholeImage",
    "batches",
    "check_classes",
    "check_same_classes",
    "cut",
    "open_source",
    "resample",
]
