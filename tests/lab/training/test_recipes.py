"""The recipes have the numbers of the paper, and of the pipelines that it refers to."""

from inspect import signature

import pytest
import torch

from msvit_lab.auto_settings import resolve_settings
from msvit_lab.cli.sweep import sweep
from msvit_lab.config import Config, settings
from msvit_lab.recipes import recipe

IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
HALF = ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))

# Section 2 (GBaS with ctr init, a relaxed Bernoulli), section 2.3 ("we always use AT") and appendix C.3.
GATE = {
    "model.mode": "trimmed", "gate.loss": "gbas", "gate.center": True, "gate.prior": "relaxed-bernoulli",
    "gate.prior_temperature": 0.3, "gate.sigma": 0.1, "gate.warmup_epochs": 6.0, "gate.lr_scale": 1.0,
    "gate.prior_lr": None, "gate.clip": None,
}  # fmt: skip
# Appendix C.1, "crop+fliplr" with the crops of section 4.3.1; below, what is of the ViT repository alone.
VIT = {
    **GATE, "optim.batch_size": 512, "optim.accumulate": 1, "data.crops": "inception", "optim.epochs": 20.0,
    "optim.name": "sgd", "optim.lr": 0.03, "optim.momentum": 0.9, "optim.clip": 1.0, "optim.weight_decay": 0.0,
    "optim.warmup_epochs": 0.5, "optim.schedule": "cosine",
    "optim.min_lr": 0.0, "optim.zero_head": True, "data.mean": HALF[0], "data.std": HALF[1], "data.eval_crop": 1.0,
    "data.interpolation": "bilinear", "data.rand_augment": None, "data.mixup": 0.0, "optim.smoothing": 0.0,
}  # fmt: skip
# Appendix C.2; below, what is of DeiT's and EViT's repositories alone (main.py, finetune.sh).
DEIT = {
    **GATE, "data.mean": IMAGENET[0], "data.std": IMAGENET[1], "data.interpolation": "bicubic", "optim.name": "adamw",
    "optim.lr": 2e-5, "optim.clip": None, "optim.smoothing": 0.1, "optim.epochs": 20.0, "optim.batch_size": 512,
    "optim.weight_decay": 1e-6, "optim.min_lr": 2e-6, "optim.schedule": "cosine", "optim.warmup_epochs": 0.5,
    "optim.ema": 0.0, "data.rand_augment": "rand-m9-mstd0.5-inc1", "data.mixup": 0.8, "data.cutmix": 1.0,
    "data.erasing": 0.25, "data.repeats": 3, "data.eval_crop": 0.875, "model.options": {"drop_path_rate": 0.1},
}  # fmt: skip
# EViT's finetune.sh; its rate of 2e-5 is scaled by batch / 512 (main.py).
EVIT = {
    **DEIT, "optim.epochs": 30.0, "optim.batch_size": 1024, "optim.lr": 4e-5, "optim.warmup_epochs": 0.0,
    "model.options": {}, "reducer.name": "evit", "reducer.rate": 0.7,
}  # fmt: skip
# DynamicViT's README, main.py, optim_factory.py: 1e-3 for the predictors, 0.01 of it for the host.
DYNAMICVIT = {
    **EVIT, "optim.lr": 1e-5, "gate.lr_scale": 100.0, "optim.min_lr": 1e-8, "optim.weight_decay": 0.05,
    "optim.warmup_epochs": 5.0, "gate.warmup_epochs": 5.0, "data.repeats": 1, "reducer.name": "dynamicvit",
}  # fmt: skip
# configs/swin/swin_tiny_patch4_window7_224_22kto1k_finetune.yaml and config.py of Swin; rates scaled by batch / 512.
SWIN = {
    **DEIT, "model.mode": "packed", "optim.epochs": 30.0, "optim.batch_size": 1024, "optim.lr": 4e-5,
    "optim.min_lr": 4e-7, "optim.weight_decay": 1e-8, "optim.warmup_epochs": 5.0, "optim.clip": 5.0, "data.repeats": 1,
    "model.name": "swin_tiny_patch4_window7_224.ms_in22k", "model.coarse": 32,
}  # fmt: skip
# Figure 4 (a): 512 px; the rest is of Segmenter's repository (segm/config.yml, train.py).
SEGMENTER = {
    **GATE, "task": "segment", "data.img_size": 512, "data.short_side": 512, "data.stride": None,
    "data.scales": (0.5, 2.0), "data.max_share": 0.75, "data.photometric": True, "optim.name": "sgd", "optim.lr": 1e-3,
    "optim.min_lr": 1e-5, "optim.momentum": 0.9, "optim.weight_decay": 0.0, "optim.epochs": 64.0, "optim.batch_size": 8,
    "optim.schedule": "poly", "optim.warmup_epochs": 0.0, "optim.clip": None, "model.decoder": "mask",
    "model.options": {"drop_path_rate": 0.1},
}  # fmt: skip
PAPER = {
    "imagenet_vit": VIT | {"model.name": "vit_small_patch16_224.augreg_in21k", "data.img_size": 224},  # table 1
    "imagenet_deit": DEIT | {"model.name": "deit_small_patch16_224", "data.img_size": 224},  # table 1
    "imagenet_evit": EVIT | {"model.name": "deit_small_patch16_224", "data.img_size": 224},  # figure 5 (a)
    "imagenet_dynamicvit": DYNAMICVIT | {"model.name": "deit_small_patch16_224", "data.img_size": 224},  # figure 5 (b)
    "imagenet_swin": SWIN | {"data.img_size": 224},  # table 2
    "ade20k": SEGMENTER | {"model.name": "vit_small_patch16_384.augreg_in21k_ft_in1k"},  # figure 4 (a)
}
TARGETS, WEIGHTS = {0.5, 0.25, 0.1}, {1.0, 4.0, 20.0}  # table 1, appendix C.3


def values(config: Config) -> dict[str, object]:
    """The settings of a run as it starts."""
    return {name: value for name, _, value in settings(resolve_settings(config, torch.device("cpu")))}


@pytest.mark.parametrize("name", PAPER)
def test_a_recipe_of_the_paper_has_its_numbers(name):
    found = values(recipe(name))
    assert {key: found[key] for key in PAPER[name]} == {
        key: pytest.approx(value, rel=1e-12) if isinstance(value, float) else value
        for key, value in PAPER[name].items()
    }
    assert found["gate.target"] in TARGETS
    assert found["gate.weight"] in WEIGHTS
    assert found["model.pretrained"]


def test_a_sweep_has_the_papers_targets_and_weights_by_default():
    defaults = {name: parameter.default for name, parameter in signature(sweep).parameters.items()}
    assert {float(value) for value in defaults["target"].default.split(",")} == TARGETS
    assert {float(value) for value in defaults["gate_weight"].default.split(",")} == WEIGHTS
