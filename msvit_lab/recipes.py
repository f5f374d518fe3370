"""Recipes: what to train, as functions that return a configuration. Each docstring is a lab note.

    config = recipe("scenes")                 # the demo
    config = recipe("scenes", smoke=True)     # the same, tiny: does it run at all?

A recipe of your own is a function like these and an entry in `RECIPES`.
"""

from collections.abc import Callable
from dataclasses import replace
from difflib import get_close_matches
from typing import Any

from msvit_lab.config import Config, Data, Gate, Model, Optim, Reduction

# Appendix C.3: temperature 0.3, sigma 0.1, a warm-up of 6 epochs, the model's own rate and, as all else, one clipping.
PAPER_GATE = Gate(
    loss="gbas", target=0.25, weight=4.0, center=True, prior="relaxed-bernoulli", prior_temperature=0.3, sigma=0.1,
    lr_scale=1.0, warmup_epochs=6.0, clip=None,
)  # fmt: skip
# The augmentation of DeiT, which EViT and DynamicViT took over; in Swin's and the latter's training without repeats.
DEIT_DATA = Data(
    source="imagenet", img_size=224, crops="inception", interpolation="bicubic", eval_crop=0.875,
    rand_augment="rand-m9-mstd0.5-inc1", erasing=0.25, mixup=0.8, cutmix=1.0, repeats=3,
)  # fmt: skip


def scenes() -> Config:
    """A ViT of two wide blocks, 128 px, patches of 8 and cells of 16 px: few calls, so that tokens are what costs time.

    Command: msvit train scenes --out runs/scenes
    In the demo (msvit sweep scenes --target 0.3 --gate-weight 50 --dense-sizes 128 --gates disc --shares 0.4
    --from-dense) the dense model comes first, and the gate and a disc of as many multiply-adds start from it: 84 steps
    each. Two seeds on a CPU: dense 98.2 and 99.2 %, the gate 98.8 and 99.4 at half of the multiply-adds, the disc 97.3
    and 96.1. Smaller dense inputs lose the weaves, which are patterns of single pixels: 11 % at 112 px.
    The gate learns from masked steps: only there do a cell's fine tokens and its coarse twin meet in the gradient.
    With packed steps alone it reaches the target within a hundred steps without having looked at what it coarsens
    (docs/method.md has the figures).
    """
    return Config(
        data=Data(
            source="scenes", img_size=128, scene_size=128, crops="none", mean=(0.5, 0.5, 0.5), std=(0.25, 0.25, 0.25),
            cache=True, num_train=2016, num_val=512,
        ),
        model=Model(
            name="vit_tiny_patch16_224",
            options={
                "patch_size": 8, "embed_dim": 128, "depth": 2, "num_heads": 4,
                "class_token": False, "global_pool": "avg",
            },
            mode="masked",
        ),
        gate=Gate(target=0.3, weight=50.0, center=False, lr_scale=10.0, warmup_epochs=0.0),
        optim=Optim(lr=1e-3, weight_decay=0.02, epochs=1.0, batch_size=24, warmup_epochs=0.3),
    )  # fmt: skip


def imagenet_vit() -> Config:
    """ViT-S/16 at 224 px, 20 epochs: the paper's table 1 (appendix C.1 and C.3).

    Command: msvit train imagenet_vit --data PATH --target 0.25 --gate-weight 4
    All of the table: msvit sweep imagenet_vit --data PATH, which has the paper's targets (0.5, 0.25 and 0.1) and gate
    weights (1, 4 and 20) as its defaults. Other sizes of table 3 and figure 11: --img-size 160, 192, 288, 320, 384.
    The paper: 79.51 % at 2.30 GMACs (98 tokens) and 81.47 % at 3.23 (138), where a dense ViT-S has 78.88 % at 2.27 and
    80.75 % at 3.32. ViT-Ti: --set model.name=vit_tiny_patch16_224.augreg_in21k. ViT-L (table 3): --set
    model.name=vit_large_patch16_224.augreg_in21k --set data.img_size=192; with less memory --set optim.accumulate=4,
    where batch-shaping sees one pass at a time. Not run here: ImageNet is not at hand.
    """
    return Config(
        data=Data(source="imagenet", img_size=224, crops="inception", interpolation="bilinear", eval_crop=1.0),
        model=Model(name="vit_small_patch16_224.augreg_in21k", pretrained=True, mode="auto"),
        gate=PAPER_GATE,
        optim=Optim(
            name="sgd", lr=0.03, momentum=0.9, weight_decay=0.0, epochs=20.0, batch_size=512, accumulate=1,
            schedule="cosine", warmup_epochs=0.5, clip=1.0, precision="auto", zero_head=True,
        ),
    )  # fmt: skip


def imagenet_deit() -> Config:
    """DeiT-S/16 at 224 px, 20 epochs: the paper's table 1 (appendix C.2 and C.3).

    Command: msvit train imagenet_deit --data PATH --target 0.25 --gate-weight 4
    The paper: 76.99 % at 2.27 GMACs (97 tokens) and 78.76 % at 3.32 (142), where a dense DeiT-S has 75.86 % and
    77.79 %. Not run here: ImageNet is not at hand.
    The paper names the rate, the smoothing, no clipping and "small weight decay", and follows "standard available
    finetuning pipelines" of DeiT, EViT and DynamicViT; what is theirs here docs/method.md lists.
    At this rate AdamW moves a logit of theta by at most 0.4 in all, so the target hardly steers; gate.prior_lr gives
    theta a rate of its own.
    """
    return Config(
        data=DEIT_DATA,
        model=Model(
            name="deit_small_patch16_224", pretrained=True, options={"drop_path_rate": 0.1}, mode="auto",
        ),
        gate=PAPER_GATE,
        optim=Optim(
            name="adamw", lr=2e-5, min_lr=2e-6, weight_decay=1e-6, epochs=20.0, batch_size=512, warmup_epochs=0.5,
            clip=None, smoothing=0.1, precision="auto",
        ),
    )  # fmt: skip


def imagenet_evit() -> Config:
    """DeiT-S/16 with EViT's own fine-tuning of 30 epochs: the paper's figure 5 (a) (section 4.2.2, appendix E.2).

    Command: msvit train imagenet_evit --data PATH --gate-from runs/imagenet_deit-gbas-t0.5-w4 --freeze-gate --rate 0.7
    EViT alone: --gate none. The settings are those of finetune.sh in EViT's repository: its rate of 2e-5 counts for a
    batch of 512, and eight GPUs with 128 images each make it 4e-5. Drop-path is off, as it fine-tunes in eval mode.
    Not as there: the share of kept tokens falls over the first third of the steps, where its fine-tuning has it from
    the start. Its README has 79.5 % for EViT/0.7 and 78.5 % for EViT/0.5. Not run here.
    """
    deit = imagenet_deit()
    return replace(
        deit, model=replace(deit.model, options={}), reducer=Reduction(name="evit", rate=0.7),
        optim=replace(deit.optim, lr=2e-5 * 1024 / 512, epochs=30.0, batch_size=1024, warmup_epochs=0.0),
    )  # fmt: skip


def imagenet_dynamicvit() -> Config:
    """DeiT-S/16 with DynamicViT's own training of 30 epochs: the paper's figure 5 (b) (section 4.2.2, appendix E.2).

    Command: msvit train imagenet_dynamicvit --data PATH --gate-from runs/imagenet_deit-gbas-t0.5-w4 --freeze-gate
    DynamicViT alone: --gate none. The settings are those of its repository (main.py, the command for DeiT-S): a rate of
    1e-3 for the predictors and 0.01 of that for the host, decay 0.05, a warm-up of 5 epochs, batches of 1024.
    Not as there: the host's rate rises over the 5 epochs in which it is 0 there, the class token and the positions are
    trained, too, and the predictors have no decay. Its README has 79.32 % for DynamicViT/0.7. Not run here.
    """
    evit = imagenet_evit()
    return replace(
        evit, data=replace(evit.data, repeats=1), reducer=Reduction(name="dynamicvit", rate=0.7),
        gate=replace(PAPER_GATE, lr_scale=100.0, warmup_epochs=5.0),  # of the predictors, if the gate is frozen
        optim=replace(evit.optim, lr=0.01 * 1e-3, min_lr=0.01 * 1e-6, weight_decay=0.05, warmup_epochs=5.0),
    )  # fmt: skip


def imagenet_swin() -> Config:
    """Swin-T at 224 px with Swin's own settings for fine-tuning, 30 epochs: the paper's table 2 (appendix E.3).

    Command: msvit train imagenet_swin --data PATH --gate-from runs/imagenet_deit-gbas-t0.5-w4 --freeze-gate
    Coarse cells of 32 px skip the blocks before the fourth: l = 3 of the paper's table, which counts from 0 (see
    docs/swin.md). Its l = 2 is --set model.merge_at=3. Swin-S and Swin-L: --model and their drop-path of 0.2.
    The settings are those of swin_tiny_patch4_window7_224_22kto1k_finetune in Swin's repository, whose rates count for
    a batch of 512: from ImageNet-21k, as the paper's dense accuracies are (Swin-L has no other weights).
    The paper: 80.0 % at 3.6 GMACs and 78.8 % at 3.1, where the dense Swin-T has 81.0 % at 4.3. Not run here: neither
    ImageNet nor a pretrained Swin is at hand.
    """
    return Config(
        data=replace(DEIT_DATA, repeats=1),
        model=Model(
            name="swin_tiny_patch4_window7_224.ms_in22k", pretrained=True, options={"drop_path_rate": 0.1}, coarse=32,
            merge_at=4,
        ),
        gate=replace(PAPER_GATE, target=0.5),
        optim=Optim(
            name="adamw", lr=2e-5 * 1024 / 512, min_lr=2e-7 * 1024 / 512, weight_decay=1e-8, epochs=30.0,
            batch_size=1024, warmup_epochs=5.0, clip=5.0, smoothing=0.1, precision="auto",
        ),
    )  # fmt: skip


def pets() -> Config:
    """A ViT-S with 16 px patches at 224 px, fine-tuned for 10 epochs from weights on disk.

    Command: msvit train pets --data PATH --set model.weights=FILE
    Data: PATH/train and PATH/val, class folders or tars of them. The weights are resampled to 16 px patches.

    The gate sees the cells around and learns the attention of a dense model's class token (not the paper's way; that is
    --gate learned --gate-loss gbas). Without weights there is nothing to learn from, and msvit train says so. The best
    start is a dense run: --gate none --set optim.epochs=30, then --set model.weights=RUN --set optim.lr=3e-5 --set
    optim.head_scale=1 --set optim.warmup_epochs=0.5 --set gate.lr_scale=50: that run is then also the teacher. One
    H200, three seeds (benchmarks/results/TABLES.md): dense 91.3 %, so with a gate 90.3 % at 46 % of the dense
    multiply-adds. Ten epochs of dense training with neither smoothing nor head_scale gave 88.1 % (one seed), with
    inception crops and 20 epochs 89.8 %, with light crops 86.7 %.
    """
    return Config(
        data=Data(source="pets", img_size=224, crops="medium", interpolation="bicubic", eval_crop=0.95, cache=True),
        model=Model(name="vit_small_patch14_dinov2", options={"patch_size": 16}, gate="context"),
        gate=Gate(loss="attention", target=0.3, weight=1.0, lr_scale=20.0, warmup_epochs=0.0),
        optim=Optim(
            lr=7e-5, head_scale=10.0, weight_decay=0.05, epochs=10.0, batch_size=128, warmup_epochs=1.0, smoothing=0.1,
            precision="auto",
        ),
    )  # fmt: skip


def folder() -> Config:
    """Your own photographs, a folder for each class, with any timm model: the settings are fitted to what is there.

    Command: msvit train folder --data PATH --model vit_small_patch16_224 --pretrained
    Data: PATH/CLASS/*.jpg, of which a tenth is held out to validate, or PATH/train and PATH/val. Weights are timm's
    (--pretrained), a file or a run (--weights FILE), or none. msvit_lab/fitting.py chooses input size, batch,
    epochs, learning rate and what the gate learns from, and msvit train says what it chose; any --set takes its place.
    The gate is the one that comes with msvit: in the few hundred steps that small sets give, one that starts from
    nothing does not learn where to look. With weights it goes on learning what the host attends to, as in `pets`, whose
    settings these are otherwise. The dense baseline: --gate none.
    """
    like = pets()
    return replace(
        like, data=replace(like.data, source="photos", cache=False, holdout=0.1),
        model=Model(name="vit_small_patch16_224", gate="context", mode="auto"),
        optim=replace(like.optim, lr=5e-5, batch_size=64),
    )  # fmt: skip


def cub() -> Config:
    """A ViT-S with 16 px patches at 224 px on CUB-200-2011, 200 kinds of birds: the paper's gate on few images.

    Command: msvit train cub --data PATH --set model.weights=FILE
    Data: PATH/train and PATH/test, class folders or tars of them. 1,500 masked steps of 128 images, gate and host
    together from weights on disk: every coarse cell has its fine tokens in the gradient, of which adaptive trimming
    cuts some. One H200, three seeds: dense 79.6 %, GBaS 76.5 % at 51 % of the multiply-adds, with --set
    model.gate=context 78.0 % at 49 % (docs/results.md). docs/method.md says what is not the paper's: 0.19 million image
    views instead of 25.6, AdamW, crops, sigma, and rates of gate and theta of their own. Dense: --gate none.
    """
    return Config(
        data=Data(source="cub", img_size=224, crops="medium", interpolation="bicubic", eval_crop=0.95, cache=True),
        model=Model(name="vit_small_patch14_dinov2", options={"patch_size": 16}, mode="masked"),
        gate=replace(PAPER_GATE, sigma=0.316, lr_scale=20.0, warmup_epochs=10.0, prior_lr=1e-2),
        optim=Optim(
            lr=1e-4, head_scale=10.0, weight_decay=0.05, epochs=32.6, batch_size=128, warmup_epochs=1.0, smoothing=0.1,
            precision="auto",
        ),
    )  # fmt: skip


def pets_swin() -> Config:
    """A Swin-T from random weights, driven by the frozen gate of a ViT: that it works end to end, and no more.

    Command: msvit train pets_swin --data PATH --gate-from default --freeze-gate
    No pretrained Swin was at hand, and 3,680 photographs are too few to train one from nothing: what it reaches, 10.3 %
    at 44 % of the dense multiply-adds on one H200, says nothing about what a fine-tuned one would. With weights on
    disk: --set model.weights=FILE --set optim.lr=5e-5.
    """
    return Config(
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


def ade20k() -> Config:
    """Seg-S-Mask/16 at 512 px with Segmenter's own training of 64 epochs: the paper's figure 4 (a) and table 4.

    Command: msvit train ade20k --data ADEChallengeData2016 --gate-from runs/imagenet --freeze-gate
    The paper's gates are trained on ImageNet with targets 0.5, 0.25 and 0.1, and frozen (section 4.2.1).
    The paper: 44.9 mIoU at 19.2 encoder GMACs, where the dense model has 45.3 at 31.7. Seg-T: --model
    vit_tiny_patch16_384.augreg_in21k_ft_in1k. Not run here: neither ADE20K nor ImageNet weights are at hand.
    """
    return Config(
        task="segment",
        data=Data(source="ade20k", img_size=512, short_side=512),
        model=Model(
            name="vit_small_patch16_384.augreg_in21k_ft_in1k", pretrained=True, options={"drop_path_rate": 0.1},
            decoder="mask", mode="auto",
        ),
        gate=replace(PAPER_GATE, target=0.5),
        optim=Optim(
            name="sgd", lr=1e-3, min_lr=1e-5, momentum=0.9, weight_decay=0.0, epochs=64.0, batch_size=8,
            schedule="poly", warmup_epochs=0.0, clip=None, precision="auto",
        ),
        eval_every=4.0,
    )  # fmt: skip


def voc() -> Config:
    """A ViT-S with 16 px patches and a linear decoder at 352 px on Pascal VOC 2012, 10 epochs, from weights on disk.

    Command: msvit train voc --data PATH --set model.weights=FILE
    One H200, 45 s of training alone on the card, three seeds: 65.1 mIoU at 64 % of the encoder's multiply-adds; the
    dense baseline (--gate none) 64.9. docs/segmentation.md has the table. The mask decoder learns more slowly here.
    """
    return Config(
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


def shrink(config: Config) -> Config:
    """The same configuration, tiny: two steps on 32 scenes with a model of two blocks, or a Swin of four."""
    size: dict[str, Any] = {"img_size": 64, "scene_size": 64, "num_train": 32, "num_val": 16, "workers": 0}
    size |= {"short_side": None, "cache": False} if config.task == "segment" else {}
    name, options = "vit_tiny_patch16_224", {**config.model.options, "embed_dim": 32, "depth": 2, "num_heads": 2}
    if config.model.name.startswith("swin"):
        name = "swin_tiny_patch4_window7_224"
        options = {"embed_dim": 16, "depths": [1, 1, 1, 1], "num_heads": [1, 1, 2, 2], "window_size": 4}
    staged = config.reducer.name in ("evit", "dynamicvit")
    return replace(
        config,
        data=replace(config.data, source="scenes", **size),
        model=replace(config.model, name=name, options=options, weights=None, pretrained=False),
        reducer=replace(config.reducer, at=(1,)) if staged else config.reducer,
        optim=replace(config.optim, epochs=1.0, batch_size=16, precision="no"),
        log_every=1,
    )


RECIPES: dict[str, Callable[[], Config]] = {
    function.__name__: function
    for function in (
        scenes, imagenet_vit, imagenet_deit, imagenet_evit, imagenet_dynamicvit, imagenet_swin, folder,
        pets, cub, pets_swin, ade20k, voc,
    )
}  # fmt: skip


def recipe(name: str, smoke: bool = False) -> Config:
    if name not in RECIPES:
        near = get_close_matches(name, RECIPES, n=2) or list(RECIPES)
        raise ValueError(f"unknown recipe {name!r}; did you mean {' or '.join(near)}? Known: {', '.join(RECIPES)}")
    return shrink(RECIPES[name]()) if smoke else RECIPES[name]()
