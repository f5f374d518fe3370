"""The demo: a small ViT from scratch on the built-in scenes."""

from dataclasses import replace

from msvit.training.config import Config, Data, Gate, Model, Optim


def scenes(smoke: bool = False) -> Config:
    """A ViT of four blocks, 64 px, patches of 8 and cells of 16 px; 1.5 minutes on two CPU cores.

    Command: msvit train scenes --out runs/scenes
    The gate learns from masked steps: only there do a cell's fine tokens and its coarse twin meet in the gradient.
    With packed steps alone it reaches the target within a hundred steps without having looked at what it coarsens
    (docs/method.md has the figures).
    """
    config = Config(
        data=Data(
            source="scenes", img_size=64, crops="none", std=(0.25, 0.25, 0.25), cache=True, num_train=4096, num_val=1024
        ),
        model=Model(
            name="vit_tiny_patch16_224",
            options={
                "patch_size": 8, "embed_dim": 64, "depth": 4, "num_heads": 2,
                "class_token": False, "global_pool": "avg",
            },
            mode="masked",
        ),
        gate=Gate(target=0.25, weight=20.0, center=False, warmup_epochs=1.0),
        optim=Optim(lr=1e-3, weight_decay=0.02, epochs=7.0, batch_size=32, warmup_epochs=0.5),
        eval_every=2.0,
        checkpoint_every=2.0,
    )  # fmt: skip
    return shrink(config) if smoke else config


def shrink(config: Config) -> Config:
    """The same configuration, tiny: two steps on 32 scenes with a model of two blocks."""
    data = replace(config.data, source="scenes", img_size=64, num_train=32, num_val=16, workers=0)
    options = {**config.model.options, "embed_dim": 32, "depth": 2, "num_heads": 2}
    model = replace(config.model, name="vit_tiny_patch16_224", options=options, weights=None, pretrained=False)
    optim = replace(config.optim, epochs=1.0, batch_size=16, precision="no")
    return replace(config, data=data, model=model, optim=optim, log_every=1)


def shrink_swin(config: Config) -> Config:
    """The same for a Swin: four stages of one block."""
    tiny = shrink(config)
    options = {"embed_dim": 16, "depths": [1, 1, 1, 1], "num_heads": [1, 1, 2, 2], "window_size": 4}
    return replace(tiny, model=replace(tiny.model, name="swin_tiny_patch4_window7_224", options=options))
