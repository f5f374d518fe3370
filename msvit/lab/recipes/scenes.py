"""The demo: a small ViT from scratch on the built-in scenes."""

from dataclasses import replace

from msvit.lab.config import Config, Data, Gate, Model, Optim


def scenes(smoke: bool = False) -> Config:
    """A ViT of two wide blocks, 128 px, patches of 8 and cells of 16 px: few calls, so that tokens are what costs time.

    Command: msvit train scenes --out runs/scenes
    In the demo (msvit sweep scenes --target 0.3 --gate-weight 50 --dense-sizes 128,96 --from-dense) the dense model
    comes first, and the mixed one starts from it: 84 steps each.
    The gate learns from masked steps: only there do a cell's fine tokens and its coarse twin meet in the gradient.
    With packed steps alone it reaches the target within a hundred steps without having looked at what it coarsens
    (docs/method.md has the figures).
    """
    config = Config(
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
    return shrink(config) if smoke else config


def shrink(config: Config) -> Config:
    """The same configuration, tiny: two steps on 32 scenes with a model of two blocks."""
    data = replace(config.data, source="scenes", img_size=64, scene_size=64, num_train=32, num_val=16, workers=0)
    options = {**config.model.options, "embed_dim": 32, "depth": 2, "num_heads": 2}
    model = replace(config.model, name="vit_tiny_patch16_224", options=options, weights=None, pretrained=False)
    optim = replace(config.optim, epochs=1.0, batch_size=16, precision="no")
    return replace(config, data=data, model=model, optim=optim, log_every=1)


def shrink_swin(config: Config) -> Config:
    """The same for a Swin: four stages of one block."""
    tiny = shrink(config)
    options = {"embed_dim": 16, "depths": [1, 1, 1, 1], "num_heads": [1, 1, 2, 2], "window_size": 4}
    return replace(tiny, model=replace(tiny.model, name="swin_tiny_patch4_window7_224", options=options))
