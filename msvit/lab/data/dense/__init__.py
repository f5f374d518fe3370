"""Dense data: images with a label for every pixel, as batches for semantic segmentation.

    train = open_dense("ade20k", "train")                         # ADE20K, VOC, Cityscapes, folders, tars, "scenes"
    val = open_dense("ade20k", "val", classes=train.classes)
    options = dict(img_size=512, short_side=512, mean=(0.5,) * 3, std=(0.5,) * 3, device="cuda", cache=True)
    for batch in dense_batches(train, batch_size=16, train=True, **options):
        batch.image, batch.label                                  # (b, 3, 512, 512), (b, 512, 512); IGNORE is 255
    for batch in dense_batches(val, batch_size=4, train=False, **options):
        batch.images, batch.labels, batch.names                   # lists: (3, h, w), (h0, w0) as on disk

As in `msvit.lab.data`, seed, epoch and step say what a batch is: not workers, processes, caches or a resumed run.
"""

from msvit.lab.data.dense.feeds import DenseBatch, DenseImages
from msvit.lab.data.dense.loader import dense_batches
from msvit.lab.data.dense.sources import BadLabelMap, DenseItem, DenseSource, open_dense
from msvit.lab.data.dense.windows import RandomWindow
from msvit.types import IGNORE

__all__ = [
    "IGNORE",
    "BadLabelMap",
    "DenseBatch",
    "DenseImages",
    "DenseItem",
    "DenseSource",
    "RandomWindow",
    "dense_batches",
    "open_dense",
]
