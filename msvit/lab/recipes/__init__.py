"""Recipes: what to train, as functions that return a configuration. Each docstring is a lab note.

    config = RECIPES["scenes"]()              # the demo
    config = RECIPES["scenes"](smoke=True)    # the same, tiny: does it run at all?

A recipe of your own is a function like these and one line in `RECIPES`.
"""

from collections.abc import Callable
from difflib import get_close_matches

from msvit.lab.config import Config
from msvit.lab.recipes.imagenet import imagenet_deit, imagenet_swin, imagenet_vit
from msvit.lab.recipes.pets import pets, pets_swin
from msvit.lab.recipes.scenes import scenes
from msvit.lab.recipes.segmentation import ade20k, voc

RECIPES: dict[str, Callable[..., Config]] = {
    "scenes": scenes,
    "imagenet_vit": imagenet_vit,
    "imagenet_deit": imagenet_deit,
    "imagenet_swin": imagenet_swin,
    "pets": pets,
    "pets_swin": pets_swin,
    "ade20k": ade20k,
    "voc": voc,
}


def recipe(name: str, smoke: bool = False) -> Config:
    if name not in RECIPES:
        near = get_close_matches(name, RECIPES, n=2) or list(RECIPES)
        raise ValueError(f"unknown recipe {name!r}; did you mean {' or '.join(near)}? Known: {', '.join(RECIPES)}")
    return RECIPES[name](smoke=smoke)


__all__ = [
    "RECIPES",
    "ade20k",
    "imagenet_deit",
    "imagenet_swin",
    "imagenet_vit",
    "pets",
    "pets_swin",
    "recipe",
    "scenes",
    "voc",
]
