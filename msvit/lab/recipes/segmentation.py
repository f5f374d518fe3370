"""Segmenter, as the paper trains it (section 4.2.1): ADE20K, and Pascal VOC for a smaller budget."""

from dataclasses import replace

from msvit.lab.config import Config, Data, Gate, Model, Optim
from msvit.lab.recipes.scenes import shrink


def ade20k(smoke: bool = False) -> Config:
    """Seg-S-Mask/16 at 512 px, 64 epochs: figure 5 of the paper.

    Command: msvit train ade20k --data ADEChallengeData2016 --gate-from runs/imagenet --freeze-gate
    The paper: 44.9 mIoU at 19.2 encoder GMACs, where the dense model has 45.3 at 31.7. Not run here: neither ADE20K nor
    ImageNet weights are at hand.
    """
    config = Config(
        task="segment",
        data=Data(source="ade20k", img_size=512, short_side=512),
        model=Model(
            name="vit_small_patch16_384.augreg_in21k_ft_in1k", pretrained=True, options={"drop_path_rate": 0.1},
            decoder="mask",
        ),
        gate=Gate(target=0.5, weight=4.0),
        optim=Optim(
            name="sgd", lr=1e-3, min_lr=1e-5, momentum=0.9, weight_decay=0.0, epochs=64.0, batch_size=8,
            schedule="poly", warmup_epochs=0.0, clip=None, precision="auto",
        ),
        eval_every=4.0,
    )  # fmt: skip
    return shrink_dense(config) if smoke else config


def voc(smoke: bool = False) -> Config:
    """A ViT-S with 16 px patches and a linear decoder at 352 px on Pascal VOC 2012, 10 epochs, from weights on disk.

    Command: msvit train voc --data PATH --set model.weights=FILE
    One H200, 45 s of training alone on the card, three seeds: 65.1 mIoU at 64 % of the encoder's multiply-adds; the
    dense baseline (--gate none) 64.9. docs/segmentation.md has the table. The mask decoder learns more slowly here.
    """
    config = Config(
        task="segment",
        data=Data(source="voc", img_size=352, short_side=352, cache=True),
        model=Model(
            name="vit_small_patch14_dinov2", options={"patch_size": 16, "drop_path_rate": 0.1}, decoder="linear",
        ),
        gate=Gate(loss="edges", target=0.5, weight=1.0, lr_scale=20.0, warmup_epochs=0.0),
        optim=Optim(
            lr=5e-5, head_scale=20.0, weight_decay=0.02, epochs=10.0, batch_size=32, schedule="poly",
            warmup_epochs=1.0, precision="auto",
        ),
        eval_every=5.0,
    )  # fmt: skip
    return shrink_dense(config) if smoke else config


def shrink_dense(config: Config) -> Config:
    """The same configuration, tiny."""
    config = shrink(config)
    return replace(config, data=replace(config.data, short_side=None, cache=False))
