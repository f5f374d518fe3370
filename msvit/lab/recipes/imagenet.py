"""ImageNet, as the paper fine-tunes: a ViT pretrained on ImageNet-21k, a DeiT and a Swin pretrained on ImageNet."""

from msvit.lab.config import Config, Data, Gate, Model, Optim
from msvit.lab.recipes.scenes import shrink, shrink_swin

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def imagenet_vit(smoke: bool = False) -> Config:
    """ViT-S/16 at 224 px, 20 epochs: the paper's table 2 (appendix C.1 and C.3).

    Command: msvit train imagenet_vit --data PATH --target 0.25 --gate-weight 4
    The paper: 79.51 % at 2.30 GMACs (98 tokens) and 81.47 % at 3.23 (138), where a dense ViT-S has 78.88 % at 2.27 and
    80.75 % at 3.32. Not run here: ImageNet is not at hand.
    """
    config = Config(
        data=Data(source="imagenet", img_size=224, crops="inception", interpolation="bilinear", eval_crop=1.0),
        model=Model(name="vit_small_patch16_224.augreg_in21k", pretrained=True),
        gate=Gate(target=0.25, weight=4.0, warmup_epochs=6.0),
        optim=Optim(
            name="sgd", lr=0.03, momentum=0.9, weight_decay=0.0, epochs=20.0, batch_size=512, warmup_epochs=0.5,
            clip=1.0, precision="auto", zero_head=True,
        ),
    )  # fmt: skip
    return shrink(config) if smoke else config


def imagenet_deit(smoke: bool = False) -> Config:
    """DeiT-S/16 at 224 px, 20 epochs: the paper's table 1 (appendix C.2 and C.3).

    Command: msvit train imagenet_deit --data PATH --target 0.25 --gate-weight 4
    The paper: 76.99 % at 2.27 GMACs (97 tokens) and 78.76 % at 3.32 (142), where a dense DeiT-S has 75.86 % and
    77.79 %. Not run here: ImageNet is not at hand.
    """
    config = Config(
        data=Data(
            source="imagenet", img_size=224, crops="inception", interpolation="bicubic", eval_crop=0.875,
        ),
        model=Model(name="deit_small_patch16_224", pretrained=True),
        gate=Gate(target=0.25, weight=4.0, warmup_epochs=6.0, clip=None),
        optim=Optim(
            name="adamw", lr=2e-5, min_lr=2e-6, weight_decay=1e-6, epochs=20.0, batch_size=512, warmup_epochs=0.5,
            clip=None, smoothing=0.1, precision="auto",
        ),
    )  # fmt: skip
    return shrink(config) if smoke else config


def imagenet_swin(smoke: bool = False) -> Config:
    """Swin-T at 224 px with Swin's own settings for fine-tuning, 30 epochs: the paper's table 4 (appendix E.3).

    Command: msvit train imagenet_swin --data PATH --gate-from runs/imagenet_deit-gbas-t0.5-w4 --freeze-gate
    Coarse cells of 32 px skip the blocks before the fourth: l = 3 of the paper's table, which counts from 0 (see
    docs/swin.md). Its l = 2 is --set model.merge_at=3. Mixup and the like of Swin's own pipeline are left out.
    The paper: 80.0 % at 3.6 GMACs and 78.8 % at 3.1, where the dense Swin-T has 81.0 % at 4.3. Not run here: neither
    ImageNet nor a pretrained Swin is at hand.
    """
    config = Config(
        data=Data(
            source="imagenet", img_size=224, crops="inception", interpolation="bicubic", eval_crop=0.875,
        ),
        model=Model(
            name="swin_tiny_patch4_window7_224", pretrained=True, options={"drop_path_rate": 0.2}, coarse=32,
            merge_at=4,
        ),
        gate=Gate(target=0.5, weight=4.0),
        optim=Optim(
            name="adamw", lr=2e-5, min_lr=2e-7, weight_decay=1e-8, epochs=30.0, batch_size=1024, warmup_epochs=5.0,
            clip=5.0, smoothing=0.1, precision="auto",
        ),
    )  # fmt: skip
    return shrink_swin(config) if smoke else config
