"""Data: images with labels, as batches for a training loop.

    train = open_source("pets", "train")                          # a folder, tars or "scenes"
    val = open_source("pets", "val", classes=train.classes)
    options = dict(mean=(0.5,) * 3, std=(0.5,) * 3, device="cuda", cache=True)
    for batch in batches(train, img_size=224, batch_size=512, train=True, crops="light", **options).iterate(0):
        batch.image, batch.label, batch.object_mask               # (b, 3, 224, 224), (b,), None
    deit = Augmentation(rand_augment="rand-m9-mstd0.5-inc1", erasing=0.25, mixup=0.8, cutmix=1.0, repeats=3)
    batches(train, img_size=224, batch_size=512, train=True, augmentation=deit, **options | {"cache": False})

    train = open_source("ade20k", "train", target="label_map")    # ADE20K, VOC, Cityscapes, folders, tars, "scenes"
    for batch in dense_batches(train, img_size=512, short_side=512, batch_size=16, train=True, **options).iterate(0):
        batch.image, batch.label                                  # (b, 3, 512, 512), (b, 512, 512); IGNORE is 255
    for batch in dense_batches(val, img_size=512, short_side=512, batch_size=4, train=False, **options).iterate(0):
        batch.images, batch.labels                                # lists: (3, h, w), (h0, w0) as on disk

Seed, epoch and step determine a batch: not the number of workers, nor of processes, caches or where a run was resumed.
Only mixup and cutmix depend on the number of processes: each mixes the images of its own share of a batch.
"""

from msvit.types import IGNORE
from msvit_lab.data.augmentation import Augmentation
from msvit_lab.data.decode import Batch, DenseImages
from msvit_lab.data.items import Item, Source
from msvit_lab.data.loader import Loader, Plan, batches, dense_batches
from msvit_lab.data.opening import BadImage, BadLabelMap
from msvit_lab.data.sources import check_classes, open_source
from msvit_lab.data.transforms import CROPS, CentreCrop, Crop, RandomCrop, RandomWindow

__all__ = [
    "CROPS", "IGNORE", "Augmentation", "BadImage", "BadLabelMap", "Batch", "CentreCrop", "Crop", "DenseImages", "Item",
    "Loader", "Plan", "RandomCrop", "RandomWindow", "Source", "batches", "check_classes", "dense_batches",
    "open_source",
]  # fmt: skip
