"""The description of a host: the timm name and options that build the same model, and how images are prepared.

    metadata = describe_host(vit)    # {"name": "vit_small_patch16_224", "options": {...}, "data": {...}}, or None
    rebuild_host(metadata)           # the same architecture, with weights of its own

timm keeps a model's name but not the arguments it was made with. They are read off the model, the model is
built once more from them, and the two are compared part by part; only a perfect copy counts as described.

A description may come from anywhere: only names that timm has and options of these kinds are built. Nothing in it can
name a file or an address.
"""

import re
from collections.abc import Callable
from difflib import get_close_matches
from functools import partial
from inspect import signature
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
from msvit.backbones.transformers_host import TransformersHost
from msvit.host_settings import DATA_KEYS
from msvit.saving.folder import as_tuples

T = TypeVar("T")
Kind = tuple[str, Callable[[Any], bool]]  # what an option may be: a description, and a test
Kinds = dict[str, Kind]


def describe_host(host: nn.Module) -> dict[str, Any] | None:
    """Return name, options and data of a host; None if they would not build the same one."""
    if isinstance(host, TransformersHost):
        return None  # transformers describes its models itself
    config = getattr(host, "pretrained_cfg", None) or {}
    name = config.get("architecture") or type(host).__name__
    data = {key: config[key] for key in DATA_KEYS if config.get(key) is not None}  # depends on weights, not on the name
    plain = _options(host)
    for options in (plain, plain | _further_options(host)):
        metadata = {"name": name, "options": options, "data": data}
        try:
            copy = build_on_meta(partial(rebuild_host, metadata))
        except Exception:  # any error of timm: these options do not describe the host
            continue
        if _structure(host) == _structure(copy):
            return metadata
    return None


def check_name(name: str) -> None:
    """Raise ValueError unless timm has this model, naming those that are spelled nearly so."""
    bare = name.split(".")[0]  # without the name of its weights
    if not re.fullmatch(r"\w+(\.[\w-]+)?", name, re.ASCII) or not timm.is_model(bare):
        near = get_close_matches(bare, timm.list_models(), n=4) or ["vit_small_patch16_224", "deit_small_patch16_224"]
        raise ValueError(f"timm has no model {name!r}; near it are {', '.join(near)}")


def build_on_meta(make: Callable[[], T]) -> T:
    """Build a model without memory for its weights, where timm can; else with it."""
    try:
        with torch.device("meta"):
            return make()
    except (RuntimeError, NotImplementedError, ValueError):  # raised again below, with its message
        return make()


def rebuild_host(metadata: dict[str, Any]) -> nn.Module:
    """Build the described host. Raise ValueError for anything that `describe_host` does not write."""
    fields = {"name": object, "options": dict, "data": dict}
    known = isinstance(metadata, dict) and metadata.keys() == fields.keys()
    if not known or not all(isinstance(metadata[field], kind) for field, kind in fields.items()):
        raise ValueError(
            f"a host is described by its name, options and data, but here it is {metadata!r:.200}; save it again"
        )
    options, data, name = as_tuples(metadata["options"]), as_tuples(metadata["data"]), metadata["name"]
    check_options(options, _KINDS)
    check_options(data, _DATA)
    if name in _CLASSES:
        return _CLASSES[name](**options)
    if not isinstance(name, str) or "." in name:
        raise ValueError(f"the host's name is {name!r:.200}, but must be one of timm's, without weights; save it again")
    check_name(name)
    return timm.create_model(name, pretrained=False, pretrained_cfg_overlay=data, **options)


def check_options(options: dict[str, Any], known: Kinds) -> None:
    """Raise ValueError unless each option is known, and a model can be built with it in memory there is."""
    for key, value in options.items():
        if key not in known:
            raise ValueError(
                f"the option {key!r:.200} is none that a saved host may have; known are {', '.join(sorted(known))}"
            )
        wanted, fits = known[key]
        if not fits(value):
            raise ValueError(f"the option {key} is {value!r:.200}, but must be {wanted}; save the model again")
    # Tables computed from sizes are in no file: a few numbers must not make them gigabytes.
    sides = _leaves(options.get("img_size") or 0)
    side = max(sides) / options.get("patch_size", 4)
    window = max(_leaves(options.get("window_size") or 1))
    if side > MAX_SIDE or (side * window) ** 2 > MAX_TABLE:
        raise ValueError(
            f"img_size {options.get('img_size')} with patches of {options.get('patch_size', 4)} px and windows of "
            f"{window} would have tables of {(side * window) ** 2:.0f} numbers, but at most {MAX_SIDE} patches a side "
            f"and {MAX_TABLE} numbers are built; save a smaller model"
        )


def run_options(options: dict[str, Any]) -> None:
    """Raise ValueError unless options from an untrusted file are those of a constructor: others open files and URLs."""
    names = {name for kind in _CLASSES.values() for name in signature(kind).parameters}
    check_options(as_tuples(options), dict.fromkeys(names - {"kwargs", "device", "dtype"}, _PLAIN) | _KINDS)


def _leaves(value: Any) -> list[Any]:
    return [leaf for part in value for leaf in _leaves(part)] if isinstance(value, tuple) else [value]


def _number(low: float, high: float, many: bool = False) -> Kind:
    """Numbers in a range, whole ones if the bounds are; if `many` is true also a few of them."""
    word, kinds = ("whole number", (int,)) if isinstance(low, int) else ("number", (int, float))
    words = f"{f'{word}s' if many else f'a {word}'} from {low:.7g} to {high:.7g}"
    return words, _all(lambda leaf: type(leaf) in kinds and low <= leaf <= high, many)  # NaN is in no range


def _all(fits: Callable[[Any], bool], many: bool) -> Callable[[Any], bool]:
    return lambda value: 0 < len(leaves := _leaves(value) if many else [value]) <= 64 and all(map(fits, leaves))


def _or_none(kind: Kind) -> Kind:
    return f"{kind[0]}, or null", lambda value: value is None or kind[1](value)


MAX_SIDE = 1024  # patches
MAX_TABLE = 2**26  # numbers: patches times those of a window, which each of them attends to
_POOLS = ("", "token", "avg", "avgmax", "max", "map", "prr")
_FLAG: Kind = ("true or false", lambda value: isinstance(value, bool))
_WORD: Kind = ("a word", lambda value: isinstance(value, str) and re.fullmatch(r"[\w,-]{0,64}", value) is not None)
_PLAIN: Kind = (
    "numbers, a word, or true or false",
    _all(lambda leaf: leaf is None or isinstance(leaf, bool | int | float) or _WORD[1](leaf), many=True),
)
# The options that describe_host writes, and what each may be.
_KINDS: Kinds = {
    "img_size": _or_none(_number(1, 1 << 16, many=True)),
    "patch_size": _number(1, 1024),
    "in_chans": _number(1, 1024),
    "num_classes": _number(0, 1_000_000),
    "global_pool": (f"one of {', '.join(_POOLS)}", lambda value: isinstance(value, str) and value in _POOLS),
    "embed_dim": _number(1, 1 << 16),
    "depth": _number(1, 1024),
    "depths": _number(1, 1024, many=True),
    "num_heads": _number(1, 1024, many=True),
    "window_size": _number(1, 64, many=True),
    "pretrained_window_sizes": _number(0, 1024, many=True),
    "mlp_ratio": _number(0.001, 1024.0),
    "init_values": _or_none(_number(-1e6, 1e6)),
    **dict.fromkeys(("reg_tokens", "num_reg_tokens"), _number(0, 1024)),
    **dict.fromkeys(("drop_rate", "pos_drop_rate", "proj_drop_rate", "drop_path_rate"), _number(0.0, 1.0)),
    **dict.fromkeys(("dynamic_img_size", "always_partition", "strict_img_size"), _FLAG),
    **dict.fromkeys(("class_token", "no_embed_class", "qkv_bias", "qk_norm"), _FLAG),
}
# How images are prepared.
_DATA: Kinds = {
    "input_size": _number(1, 1 << 16, many=True),
    **dict.fromkeys(("mean", "std"), _number(-1e6, 1e6, many=True)),
    "crop_pct": _number(0.0, 10.0),
    **dict.fromkeys(("interpolation", "crop_mode"), _WORD),
}
assert _DATA.keys() == set(DATA_KEYS)

_SWINS: dict[str, Any] = {"SwinTransformer": SwinTransformer, "SwinTransformerV2": SwinTransformerV2}
_CLASSES: dict[str, Any] = {"VisionTransformer": VisionTransformer, "Eva": Eva, **_SWINS}


def _options(host: Any) -> dict[str, Any]:
    """Return the options that hosts of every name may be made with."""
    embed = host.patch_embed
    options = {
        "img_size": embed.img_size,
        "patch_size": embed.patch_size[0],
        "in_chans": embed.proj.in_channels,
        "num_classes": host.num_classes,
        "global_pool": host.global_pool,
        "embed_dim": host.embed_dim,
    }
    if type(host).__name__ in _SWINS:
        return options | _swin_options(host)
    block = host.blocks[0]
    return options | {
        "depth": len(host.blocks),
        "num_heads": block.attn.num_heads,
        "dynamic_img_size": host.dynamic_img_size,
        "drop_rate": host.head_drop.p,
        "pos_drop_rate": host.pos_drop.p,
        "proj_drop_rate": block.attn.proj_drop.p,
        "drop_path_rate": getattr(host.blocks[-1].drop_path1, "drop_prob", 0.0),
    }


def _swin_options(host: Any) -> dict[str, Any]:
    """Return a Swin's options; its first stage has the windows asked for, the last may have smaller ones."""
    first, last = host.layers[0].blocks[0], host.layers[-1].blocks[-1]
    options = {
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
    """Return options that a timm name usually decides, for hosts without one or with others."""
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


def _structure(model: nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the shapes of weights, and the settings of all parts; values of weights may differ."""
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    return shapes, {name: _settings(part) for name, part in model.named_modules()}


# Settings that say how a model is run or how it came by its weights, not what it computes.
_INCIDENTAL = {"training", "fused_attn", "grad_checkpointing", "weight_init_mode", "init_values", "head_init_scale"}


def _settings(part: nn.Module) -> tuple[type, dict[str, Any]]:
    """Return the class of a part, for one that only runs faster the class it replaced, and its settings."""
    plain = (bool, int, float, str, tuple, list, type(None))
    return getattr(type(part), "stands_for", type(part)), {
        key: tuple(value) if isinstance(value, list) else value
        for key, value in vars(part).items()
        if isinstance(value, plain) and not key.startswith("_") and key not in _INCIDENTAL
    }
