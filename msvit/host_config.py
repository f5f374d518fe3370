"""A host in words: what timm needs to build the same model again, and how it wants its images.

    about = describe_host(vit)    # {"name": "vit_small_patch16_224", "options": {...}, "data": {...}}, or None
    rebuild_host(about)           # the same architecture, with weights of its own

timm keeps a model's name but not the arguments it was made with. They are read off the model, the model is
built once more from them, and the two are compared part by part; only a perfect copy counts as described.
"""

from collections.abc import Callable
from difflib import get_close_matches
from functools import partial
from typing import Any, TypeVar

import timm
import torch
from timm.layers import Mlp
from timm.models.eva import Eva
from timm.models.swin_transformer import SwinTransformer
from timm.models.swin_transformer_v2 import SwinTransformerV2
from timm.models.vision_transformer import VisionTransformer
from torch import nn

from msvit.backbones.blocks import qkv_bias
from msvit.host_settings import DATA_KEYS

T = TypeVar("T")


def describe_host(host: nn.Module) -> dict[str, Any] | None:
    plain = _options(host)
    for options in (plain, plain | _further_options(host)):
        about = {"name": _name(host), "options": options, "data": _data(host)}
        try:
            copy = without_weights(partial(rebuild_host, about))
        except Exception:  # whatever timm says of these options: they do not describe the host
            continue
        if _same(host, copy):
            return about
    return None


def check_name(name: str) -> None:
    """Refuse a model that timm does not have, naming those that are spelled nearly so."""
    bare = name.split(".")[0]  # without the name of its weights
    if not timm.is_model(bare):
        near = get_close_matches(bare, timm.list_models(), n=4) or ["vit_small_patch16_224", "deit_small_patch16_224"]
        raise ValueError(f"timm has no model {name!r}; near it are {', '.join(near)}")


def without_weights(make: Callable[[], T]) -> T:
    """Build a model without memory for its weights, where timm can (from 1.0.21 on); else with it."""
    try:
        with torch.device("meta"):
            return make()
    except (RuntimeError, NotImplementedError, ValueError):  # a mistake is made again, and told
        return make()


def rebuild_host(about: dict[str, Any]) -> nn.Module:
    options = {key: tuple(value) if isinstance(value, list) else value for key, value in about["options"].items()}
    if about["name"] in _CLASSES:
        return _CLASSES[about["name"]](**options)
    data = about.get("data") or {}
    return timm.create_model(about["name"], pretrained=False, pretrained_cfg_overlay=data, **options)


_SWINS: dict[str, Any] = {"SwinTransformer": SwinTransformer, "SwinTransformerV2": SwinTransformerV2}
_CLASSES: dict[str, Any] = {"VisionTransformer": VisionTransformer, "Eva": Eva, **_SWINS}


def _name(host: Any) -> str:
    architecture = (getattr(host, "pretrained_cfg", None) or {}).get("architecture")
    return architecture or type(host).__name__


def _data(host: Any) -> dict[str, Any]:
    """How images are prepared for it: weights of one architecture may want another mean than those of another."""
    known = getattr(host, "pretrained_cfg", None) or {}
    return {key: known[key] for key in DATA_KEYS if known.get(key) is not None}


def _options(host: Any) -> dict[str, Any]:
    if type(host).__name__ in _SWINS:
        return _swin_options(host)
    block = host.blocks[0]
    return {
        **_common_options(host),
        "depth": len(host.blocks),
        "num_heads": block.attn.num_heads,
        "dynamic_img_size": host.dynamic_img_size,
        "drop_rate": host.head_drop.p,
        "pos_drop_rate": host.pos_drop.p,
        "proj_drop_rate": block.attn.proj_drop.p,
        "drop_path_rate": getattr(host.blocks[-1].drop_path1, "drop_prob", 0.0),
    }


def _common_options(host: Any) -> dict[str, Any]:
    embed = host.patch_embed
    return {
        "img_size": embed.img_size,
        "patch_size": embed.patch_size[0],
        "in_chans": embed.proj.in_channels,
        "num_classes": host.num_classes,
        "global_pool": host.global_pool,
        "embed_dim": host.embed_dim,
    }


def _swin_options(host: Any) -> dict[str, Any]:
    """The first stage's windows are what was asked for: those of the last may have become smaller."""
    first, last = host.layers[0].blocks[0], host.layers[-1].blocks[-1]
    options = {
        **_common_options(host),
        "depths": tuple(len(stage.blocks) for stage in host.layers),
        "num_heads": tuple(stage.blocks[0].attn.num_heads for stage in host.layers),
        "window_size": first.window_size,
        "always_partition": first.always_partition,
        "strict_img_size": host.patch_embed.strict_img_size,
        "mlp_ratio": first.mlp.fc1.out_features / host.embed_dim,
        "drop_rate": host.head.drop.p,
        "proj_drop_rate": first.attn.proj_drop.p,
        "drop_path_rate": getattr(last.drop_path1, "drop_prob", 0.0),
    }
    if type(host) is SwinTransformerV2:
        before = (stage.blocks[0].attn.pretrained_window_size[0] for stage in host.layers)
        options["pretrained_window_sizes"] = tuple(before)
    return options


def _further_options(host: Any) -> dict[str, Any]:
    """What a named model usually settles: needed where there is no name, or where a user overruled it."""
    if type(host).__name__ in _SWINS:
        windows = tuple(stage.blocks[0].window_size for stage in host.layers)
        biased = {"qkv_bias": qkv_bias(host.layers[0].blocks[0].attn) is not None}
        return biased | ({"window_size": windows} if "V2" not in type(host).__name__ else {})
    block = host.blocks[0]
    biases = (getattr(block.attn, "q_bias", None), getattr(block.attn.qkv, "bias", None))
    scaled = getattr(block, "gamma_1", None) is not None or hasattr(getattr(block, "ls1", None), "gamma")
    options = {
        "class_token": host.cls_token is not None,
        "no_embed_class": host.no_embed_class,
        "qkv_bias": any(bias is not None for bias in biases),
        "init_values": 1e-5 if scaled else None,
        "qk_norm": not isinstance(block.attn.q_norm, nn.Identity),
    }
    if host.reg_token is not None:
        options["num_reg_tokens" if isinstance(host, Eva) else "reg_tokens"] = host.reg_token.shape[1]
    if isinstance(block.mlp, Mlp):
        options["mlp_ratio"] = block.mlp.fc1.out_features / host.embed_dim
    return options


def _same(one: nn.Module, other: nn.Module) -> bool:
    """Are two models alike in every part, shape and setting? (Values of weights may differ.)"""
    parts, others = dict(one.named_modules()), dict(other.named_modules())
    if parts.keys() != others.keys():
        return False
    shapes = [{name: tuple(t.shape) for name, t in model.state_dict().items()} for model in (one, other)]
    settings = [{name: (_kind(part), _settings(part)) for name, part in ps.items()} for ps in (parts, others)]
    return shapes[0] == shapes[1] and settings[0] == settings[1]


def _kind(part: nn.Module) -> type:
    """The class of a part; for one that only runs faster, the class it took the place of."""
    return getattr(type(part), "stands_for", type(part))


# Settings that say how a model is run or how it came by its weights, not what it computes.
_INCIDENTAL = {"training", "fused_attn", "grad_checkpointing", "weight_init_mode", "init_values", "head_init_scale"}


def _settings(part: nn.Module) -> dict[str, Any]:
    plain = (bool, int, float, str, tuple, list, type(None))
    own = {key: value for key, value in vars(part).items() if isinstance(value, plain)}
    return {
        key: tuple(value) if isinstance(value, list) else value
        for key, value in own.items()
        if not key.startswith("_") and key not in _INCIDENTAL
    }
