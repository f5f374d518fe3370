"""Oxford-IIIT Pets: a few thousand real photographs, 37 breeds."""

from msvit.lab.config import Config, Data, Gate, Model, Optim
from msvit.lab.recipes.scenes import shrink, shrink_swin


def pets(smoke: bool = False) -> Config:
    """A ViT-S with 16 px patches at 224 px, fine-tuned for 10 epochs from weights on disk.

    Command: msvit train pets --data PATH --set model.weights=FILE
    Data: PATH/train and PATH/val, class folders or tars of them. The weights are resampled to 16 px patches.

    The gate looks around and is told where the class token of a dense model looks (not the paper's way; that is --gate
    learned --gate-loss gbas). Without weights there is nothing to be told, and msvit train says so. The best start is
    a dense run: --gate none --set optim.epochs=30, then --set model.weights=RUN --set optim.lr=3e-5 --set
    optim.head_scale=1 --set optim.warmup_epochs=0.5 --set gate.lr_scale=50: that run is then also the teacher. One
    H200, three seeds (docs/results.md): dense 91.3 %, so with a gate 90.3 % at 46 % of the dense multiply-adds. Ten
    epochs of dense training with neither smoothing nor head_scale gave 88.1 % (one seed), with inception crops and 20
    epochs 89.8 %, with light crops 86.7 %.
    """
    config = Config(
        data=Data(
            source="pets", img_size=224, crops="medium", interpolation="bicubic", eval_crop=0.95, cache=True,
        ),
        model=Model(name="vit_small_patch14_dinov2", options={"patch_size": 16}, gate="context"),
        gate=Gate(loss="attention", target=0.3, weight=1.0, lr_scale=20.0, warmup_epochs=0.0),
        optim=Optim(
            lr=7e-5, head_scale=10.0, weight_decay=0.05, epochs=10.0, batch_size=128, warmup_epochs=1.0, smoothing=0.1,
            precision="auto",
        ),
    )  # fmt: skip
    return shrink(config) if smoke else config


def pets_swin(smoke: bool = False) -> Config:
    """A Swin-T from random weights, driven by the frozen gate of a ViT: that it works end to end, and no more.

    Command: msvit train pets_swin --data PATH --gate-from default --freeze-gate
    No pretrained Swin was at hand, and 3,680 photographs are too few to train one from nothing: what it reaches, 10.3 %
    at 44 % of the dense multiply-adds on one H200, says nothing about what a fine-tuned one would. With weights on
    disk: --set model.weights=FILE --set optim.lr=5e-5.
    """
    config = Config(
        data=Data(
            source="pets", img_size=224, crops="inception", interpolation="bicubic", eval_crop=0.875, cache=True,
        ),
        model=Model(name="swin_tiny_patch4_window7_224", options={"drop_path_rate": 0.1}, coarse=32, merge_at=4),
        gate=Gate(target=0.25, weight=4.0, warmup_epochs=2.0),
        optim=Optim(
            lr=5e-4, weight_decay=0.05, epochs=5.0, batch_size=128, warmup_epochs=1.0, clip=5.0, smoothing=0.1,
            precision="auto",
        ),
    )  # fmt: skip
    return shrink_swin(config) if smoke else config
