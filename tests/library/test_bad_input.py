"""Bad input raises a ValueError or TypeError that names the argument, with both values and the remedy.

Every public name is called with the values of `VALID`, and once for each wrong value of each argument: values of other
types than the valid one, and those of `OUTSIDE`, which are of the type but not allowed. Names that need other values
have an entry in `own_calls`. `WRONG` has the sentences.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from inspect import signature
from math import inf, nan
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from PIL import Image
from timm.models.vision_transformer import VisionTransformer
from tiny import SWINS, images, mixed_mask, tiny_host, tiny_model, tiny_swin
from torch import Tensor, nn

import msvit
from msvit import gates, heads, losses, reduction, tokens
from msvit.backbones import adapt
from msvit.budget import gate_fitting
from msvit.budget.distillation import Distiller
from msvit.budget.merge_schedules import ScheduleSearch
from msvit.execution.attention import force_backend
from msvit.fast import cuda
from msvit.reduction.attention_recorder import AttentionRecorder
from msvit.saving.host import build_on_meta

HUGE = 10**12
ANY_TYPE = [None, "no", [1], {}, object(), torch.zeros(2, 2)]
NUMBER = [*ANY_TYPE, "0.3", True, nan, inf, -inf, 1j]
INT = [*NUMBER, 7.9, 2.0, "7"]
FLAG = ["no", "yes", 0, 1, None, nan, [], torch.zeros(2)]
CHOICE = ["", "unknown", 3, nan, [], {}, None]
COLOURS = [*ANY_TYPE, 7, nan, (), *((0.5, 0.5, bad) for bad in (True, nan, None, "4", inf, 1e7)), (0.5,) * 4]
FOLDERS = [None, 3, nan, [], "", True]


def several(num: int) -> list[Any]:
    """What is not so many whole numbers from 1 on."""
    first = [4] * (num - 1)
    return [*ANY_TYPE, 7, nan, (), (4,) * (num + 1), *((*first, bad) for bad in (0, -1, 7.9, True, nan, None, "4"))]


def tensor(right: Tensor) -> list[Any]:
    """Of other types, axes, dtypes and batches than one that is right."""
    wrong = [None, "no", 3, [1.0], nan, right[0], right[None], right[:0], right.bool(), right.to(torch.complex64)]
    return [*wrong, right.long() if right.is_floating_point() else right.float()]


def of_other_types(value: Any) -> list[Any]:
    if isinstance(value, Tensor):
        return tensor(value)
    if isinstance(value, tuple):
        return several(len(value))
    kinds = {bool: FLAG, int: INT, float: NUMBER, str: CHOICE}
    return kinds.get(type(value), ANY_TYPE)


# What calls are made of: tiny, and made once.

IMAGE = images(2, dtype=torch.float32)
MANY = IMAGE.repeat(8, 1, 1, 1)
MASK = mixed_mask(2, 2, 2, torch.float32)
SHARES = torch.rand(4, 2, 2, generator=torch.Generator().manual_seed(0))
GRID = msvit.ScaleGrid(16, 16, fine=4, coarse=8)
LABEL = torch.arange(256).view(1, 16, 16).repeat(2, 1, 1) % 5
X = SHARES.flatten()
COLOUR = (0.5, 0.25, 0.1)


@cache
def host() -> nn.Module:
    return tiny_host(dtype=torch.float32)


@cache
def model() -> msvit.MSViT:
    return tiny_model(dtype=torch.float32, gate=msvit.DiscGate(8, share=0.5)).eval()


@cache
def output() -> msvit.MSViTOutput:
    return model()(IMAGE, MASK)


DENSE = msvit.dense_map(output().tokens)

# By the name of an argument: a value of it that is right, if it is not the default and a call has none of its own;
VALID = {
    "coarse": 8, "share": 0.3, "grid": (2, 2), "widths": (4, 4, 4), "cell": 8, "image": IMAGE, "mean": 0.5, "std": 0.1,
    "target": 0.5, "fine_prob": SHARES, "logits": SHARES, "attention": SHARES, "label": LABEL, "x": X, "location": 0.5,
    "in_chans": 3, "temperature": 1.0, "noise": 1.0, "threshold": 0.0, "rate": 0.7, "at": (0, 1), "name": "evit",
    "layout": output().tokens.layout, "tokens": output().tokens, "dense": DENSE, "features": DENSE, "width": 32,
    "num_classes": 3, "height": 16, "fine": 4, "mask": MASK, "gate": msvit.DiscGate(8),
    "reducer": msvit.EViT(0.6, at=(0, 1)), "output": output(), "host": host(),
    "model": model(), "budget": 0.6, "unit": "tokens", "images": MANY, "steps": 1, "trials": 1, "progress": False,
    "verbose": False, "encoder": model(), "backbone": adapt(host()), "folder": "nowhere", "path": "model.onnx",
    "format": "onnx", "batch": 2, "max_tokens_per_image": 10, "size": (16, 16),
}  # fmt: skip

# values that are of its type but not allowed;
OUTSIDE = {
    "coarse": [0, 1, -8], "share": [-0.1, 1.1], "in_chans": [0, -3], "cell": [0, -8, HUGE], "seed": [2**64],
    "temperature": [0, -1], "noise": [-1], "depth": [-1, HUGE], "target": [0, 1, -1, 2], "prior": [0.3, losses.Normal],
    "std": [0, -1], "dropout": [-0.1, 1], "num_classes": [0, -1, HUGE], "rate": [0, -0.1, 1.1],
    "max_tokens": [0, -1, HUGE], "per_image": [0, -1, 3, HUGE], "gate": [3, msvit.DiscGate, msvit.DiscGate(16)],
    "reducer": [3, msvit.EViT], "steps": [0], "trials": [-1],
    "image": [IMAGE[..., :15], IMAGE[..., :4], IMAGE.permute(0, 2, 3, 1)], "model": [host()], "encoder": [host()],
    "budget": [0, -0.5, 0.01, 1.1], "unit": ["share"], "layout": [output().tokens, GRID], "tokens": [output()],
    "output": [output().tokens], "backbone": [host()], "opset": [9, HUGE], "crop": [0, 1.1],
    "width": [0, -1], "height": [0, -16, 15], "fine": [0, -4, 5],
    "interpolation": ["lanczos"], "crop_mode": ["border"], "widths": [(HUGE, 4, 4)], "batch": [0, -1, HUGE, "all"],
    "max_tokens_per_image": [3],
}  # fmt: skip

# and what is tried instead of values of other types and these.
PROBS = [bad for bad in tensor(SHARES) if getattr(bad, "shape", None) != SHARES.shape[1:]]  # (b, cells) will do
MAPS = [*tensor(DENSE)[:8], DENSE.permute(0, 2, 3, 1)]
NUMBERS = [*[bad for bad in NUMBER if not isinstance(bad, Tensor)], torch.ones(16).long()]  # a number or a tensor
INSTEAD = {
    "mask": ["no", 3, [1.0], nan, MASK[0], MASK[None], MASK[:0], MASK[:1], MASK[:, :1], MASK.to(torch.complex64),
             MASK + nan, MASK + 1, MASK - 0.5],  # (None: the gate decides)
    "fine_prob": [*PROBS, SHARES[0, 0], SHARES + 1, SHARES - 1, SHARES * nan],
    "x": [None, "no", 3, [0.5], nan, X.long(), X.to(torch.complex64)],
    "mean": [*NUMBERS, X * nan], "location": [*NUMBERS, X - 1, X * nan, -0.1, 1.1],
    "at": [(), None, "3", (1, 1), (3, 1), (-1,), (True,), (1.5,), nan, {}],
    "features": [*MAPS, DENSE[:, :3]], "folder": FOLDERS, "path": FOLDERS,
    "images": [*tensor(MANY), MANY[:, :2], MANY * nan, [], [3], ["no"]],
    "preprocessing": [3, "no", nan, []],
}  # fmt: skip


@dataclass(frozen=True)
class Call:
    """A call that works; values that must not, beside those of other types, or instead of them."""

    run: Callable[..., Any]
    own: dict[str, Any] = field(default_factory=dict)  # values that work here; None: the argument is left out
    outside: dict[str, list[Any]] = field(default_factory=dict)
    instead: dict[str, list[Any]] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The public name that it belongs to."""
        return getattr(self.run, "__qualname__", type(self.run).__name__).split(".")[0]

    @property
    def parameters(self) -> Any:
        return signature(self.run.forward if isinstance(self.run, nn.Module) else self.run).parameters

    @property
    def valid(self) -> dict[str, Any]:
        defaults = {name: p.default for name, p in self.parameters.items() if p.default is not p.empty}
        found = defaults | {name: VALID[name] for name in self.parameters if name in VALID} | self.own
        return {name: value for name, value in found.items() if value is not None}

    @property
    def arguments(self) -> set[str]:
        return {*self.valid, *self.instead, *(self.parameters.keys() & INSTEAD.keys() - self.own.keys())}

    def wrong(self, argument: str) -> list[Any]:
        if argument in self.instead:
            return self.instead[argument]
        if argument in INSTEAD and argument not in self.own:
            return INSTEAD[argument] + self.outside.get(argument, [])
        optional = argument in self.parameters and self.parameters[argument].default is None
        wrong = of_other_types(self.valid[argument]) + OUTSIDE.get(argument, []) + self.outside.get(argument, [])
        return [bad for bad in wrong if bad is not None or not optional]


@cache
def calls() -> dict[str, list[Call]]:
    """By public name: what is made, and then the methods of it that are called with arguments."""
    own = [*gate_calls(), *loss_calls(), *token_calls(), *model_calls()]
    found: dict[str, list[Call]] = {}
    for name, value in public_names().items():
        found[name] = [] if any(call.run is value for call in own) else [Call(value)]
    for call in own:
        found[call.name].append(call)
    return found


def public_names() -> dict[str, Any]:
    """All that can be called, of the modules whose names are public."""
    modules = (msvit, gates, losses, reduction, tokens, heads)
    every = {name: getattr(module, name) for module in modules for name in module.__all__ if name not in RESULTS}
    return {n: value for n, value in every.items() if callable(value) and not getattr(value, "_is_protocol", False)}


def without(names: str) -> dict[str, None]:
    return dict.fromkeys(names.split())


def gate_calls() -> list[Call]:
    large = {"grid": [(10**6, 10**6)], "in_chans": [HUGE]}
    found = [
        *(Call(kind) for kind in (msvit.AllFine, msvit.AllCoarse, msvit.DiscGate, msvit.RandomGate)),
        *(Call(kind, own) for kind in (msvit.EntropyGate, msvit.GradientGate)
          for own in (without("threshold"), {"share": None, "threshold": 0.1})),
        *(Call(kind, outside=large) for kind in (msvit.LearnedGate, msvit.ContextGate)),
    ]  # fmt: skip
    gate, same = msvit.LearnedGate(8).with_normalization((0.4,) * 3, (0.2,) * 3), msvit.AllFine(8)
    takers = [run for each in (gate, same) for run in (each.with_normalization, each.for_normalization)]
    statistics, colours = dict.fromkeys(("mean", "std"), COLOUR), dict.fromkeys(("mean", "std"), COLOURS)
    return [
        *found, *(Call(call.run(**call.valid)) for call in found), Call(same.for_cells),
        *(Call(run, statistics, instead=colours) for run in (gates.Normalization, *takers)),
        Call(msvit.LearnedGate, without("cell"), {"coarse": [10**9]}),  # the size of a cell that it looks at, too
    ]  # fmt: skip


def loss_calls() -> list[Call]:
    gbas, probs = losses.GeneralizedBatchShaping(0.5, (2, 2)), without("logits")
    labels = [LABEL[:1], LABEL[:, :4], LABEL + 300, LABEL - 1, LABEL[:, None]]
    return [
        Call(losses.GeneralizedBatchShaping, outside={"grid": [(10**6, 10**6)]}),
        *(Call(loss, probs) for loss in (losses.L0(0.5), losses.FlatBatchShaping(0.5), losses.BatchShaping(0.5), gbas)),
        Call(gbas.resized, {"grid": (3, 3)}),
        Call(losses.ThresholdController(0.5).update, outside={"logits": [SHARES * nan]}),
        Call(losses.edge_loss, {"logits": MASK}, {"logits": [MASK[:, :1]], "label": labels}),
        Call(losses.attention_loss, outside={"attention": [SHARES[:1], -SHARES, SHARES * nan, SHARES[:, :1]]}),
        Call(losses.relaxed_bernoulli_cdf, instead={"temperature": [*NUMBERS, -X, 0, -1]}),
        Call(losses.normal_cdf, instead={"std": [*NUMBERS, -X, 0 * X, 0, -1]}),
    ]


def token_calls() -> list[Call]:
    """Reducers, tokens, heads, and the records."""
    x, wide = output().tokens.x, {"width": [HUGE]}
    parts = dict.fromkeys(("logits", "fine_prob", "sample", "mask"), MASK)
    return [
        Call(msvit.ToMe, {"rate": None, "r": 2}, instead={"r": [-1, 2.5, nan, "no", [], [1.5], [-1], True]}),
        Call(msvit.ToMe, {"rate": 0.9}, {"rate": [0.4]}),
        Call(reduction.make_reducer, instead={"rate": NUMBER[1:]}),
        Call(msvit.from_dense, instead={"dense": [*MAPS, DENSE[..., :2], DENSE[..., :1]]}),
        *(Call(kind, outside=wide) for kind in (heads.LinearDecoder, heads.MaskDecoder)),
        *(Call(kind(32, 3)) for kind in (heads.LinearDecoder, heads.MaskDecoder)),
        Call(msvit.ScaleGrid, outside={"width": [15], "coarse": [2, 6]}),
        Call(msvit.GateOutput, parts, {part: [MASK[:1]] for part in parts}),
        Call(msvit.GateOutput.from_mask, instead={"mask": [None, "no", 3, [1.0], MASK[0], MASK[:0]]}),
        Call(msvit.TokenBatch, {"x": x}, instead={"x": [None, "no", 3, x[None], x[1:], torch.cat([x, x])]}),
        Call(msvit.MSViTOutput, {"gate": output().gate}, {"gate": [MASK], "tokens": [x]}),
    ]


def model_calls() -> list[Call]:
    hosts = {"host": [3, nan, nn.Linear(2, 2), model()]}
    plain = without("gate mode reducer unit images merge_at")
    fitted = {"model": model().with_options(gate=msvit.LearnedGate(8, grid=(2, 2))).eval()}
    dense = msvit.convert(host(), gate="all-fine").eval()
    return [
        Call(model(), {"max_tokens": 51}), Call(model(), {"mask": None, "per_image": 7}),
        Call(model().macs), Call(model().macs_of),
        Call(msvit.convert, without("images merge_at"), hosts, {"merge_at": [2, "2", nan]}),
        Call(
            msvit.convert,
            {**plain, "host": tiny_swin(dtype=torch.float32), "merge_at": 3, "coarse": 16, "budget": None},
            {"merge_at": [0, 1, 5]}, {"gate": ["no", 3]},
        ),
        Call(
            msvit.convert, {**plain, "coarse": None, "method": "auto", "budget": 0.9, "images": IMAGE},
            instead={"method": ["no", 3], "budget": [*NUMBER, 0.01],
                     "images": [IMAGE[:, :2], IMAGE * nan, [], [3], ["no"]]},
        ),
        Call(msvit.Segmenter, {"decoder": heads.LinearDecoder(32, 3)}),
        Call(
            msvit.convert_segmenter(host(), 3, 8),
            instead={"image": [*tensor(IMAGE), IMAGE[:, :2], IMAGE.permute(0, 2, 3, 1)]},
        ),
        Call(msvit.convert_segmenter, outside={**hosts, "num_classes": [1]}),
        Call(msvit.fit_gate, {**fitted, "targets": ["masks"]}, instead={"targets": ["no", 3, [], [3]]}),
        Call(
            msvit.distill, {**fitted, "reducers": ()}, instead={"reducers": [None, 7, {}, [3], [msvit.ToMe(r=1)]]}
        ),
        Call(msvit.fit_reducer, {"model": dense, "budget": 0.95}, instead={"budget": [*NUMBER, 0, 0.01]}),
        Call(
            msvit.speed_up, {"host": tiny_host(dtype=torch.float32, depth=4), "budget": 0.9},
            {"host": [3, nn.Linear(2, 2), model()]},
        ),
        Call(msvit.set_budget, outside={"size": [(16, 15)]}),
        Call(
            msvit.compile, outside={"model": [nn.Identity()]},
            instead={"inductor": ["no", None, 1, 0, nan, []], "dtype": ["fp8", "fp4", 8, nan, []]},
        ),
        Call(msvit.macs, {"images": IMAGE}, {"images": OUTSIDE["image"]}),
        Call(
            msvit.Preprocessing, {"size": 224, "mean": COLOUR, "std": COLOUR}, {"size": [0, -1]},
            {key: [None, "no", 3, nan, (), ("no",), (nan, nan, nan), (0.5, 0.5), MASK] for key in ("mean", "std")},
        ),
        Call(
            msvit.export, {"features": False},
            instead={"size": ["no", nan, (), (16, 16, 16), (16, nan), (0, 16), True, 0],
                     "classes": [3, nan, ["a"], "abcde", [1, 2, 3, 4, 5]]},
        ),
        Call(msvit.save_gate, instead={"gate": [*ANY_TYPE, host()]}),
        Call(msvit.load_gate, {"folder": "default", "coarse": 16}, instead={"folder": FOLDERS}),
    ]  # fmt: skip


# Arguments of which anything is taken, or that only msvit itself gives.
UNTRIED = {
    "MSViTOutput": {"logits"},  # what the host's head gives, whatever that is
    "TokenBatch": {"kept"},
    "load": {"host"},
}
RESULTS = ("Prediction",)  # made by msvit alone
REMEDY = r"; |\bbut\b|\bmust\b|permute\(|Hosts that can are"  # what to do, or both values
FILES = ("load", "save", "save_gate", "export")  # valid calls are in test_hostile_folders.py and test_export.py


@pytest.mark.filterwarnings("ignore:the divergence from the dense model")  # after one step of distill
@pytest.mark.parametrize("name", sorted(public_names()))
def test_the_valid_call_works_and_a_wrong_value_of_any_argument_is_named(name: str) -> None:
    known, untried, missed = calls()[name], UNTRIED.get(name, set()), []
    tried = {argument for call in known for argument in call.arguments}
    taken = {p.name for p in signature(known[0].run).parameters.values() if p.kind is not p.VAR_KEYWORD}
    assert taken <= tried | untried, f"no wrong value is tried for {', '.join(sorted(taken - tried))}"
    for call in known:
        if name not in FILES:
            call.run(**call.valid)
        for argument in sorted(call.arguments - untried):
            for value in call.wrong(argument):
                what = f"{argument}={value!r:.60}{tuple(getattr(value, 'shape', ())) or ''}"
                try:
                    call.run(**{**call.valid, argument: value})
                except (ValueError, TypeError) as error:
                    if not re.search(rf"\b{argument.removesuffix('s')}", str(error), re.IGNORECASE):
                        missed.append(f"{what}: {type(error).__name__} without its name: {error}")
                    if not re.search(REMEDY, str(error)):
                        missed.append(f"{what}: {type(error).__name__} does not say what to do: {error}")
                except Exception as error:
                    missed.append(f"{what}: {type(error).__name__}: {error}")
                else:
                    missed.append(f"{what} is taken")
    assert not missed, "\n".join(missed)


# Sentences of what is not one wrong argument: above. Checkpoints and folders: test_hostile_folders.py.

VIT, GAP = "vit_small_patch16_224", "vit_base_patch16_gap_224"
NOISE = images(2)
TRANSFORM = r"model\.preprocessing\(picture\)"
FINE, RATE = msvit.AllFine(coarse=8), msvit.EViT(0.7, at=(1,))


@cache
def double() -> msvit.MSViT:
    return tiny_model()


@cache
def dense_segmenter() -> msvit.Segmenter:
    return msvit.convert_segmenter(tiny_host(), 7, coarse=8)


def run(*shape: int, dtype: torch.dtype = torch.float64) -> None:
    double()(torch.zeros(shape, dtype=dtype))


def reduce(reducer: msvit.Reducer, name: str = VIT, **options: object) -> None:
    tiny_model(name, gate=FINE, reducer=reducer, **options)(images())


def convert(name: str) -> None:
    msvit.convert(build_on_meta(lambda: timm.create_model(name)), coarse=32)


def learned() -> msvit.MSViT:
    return tiny_model(dtype=torch.float32, gate=msvit.LearnedGate(8, grid=(2, 2))).eval()


def partly_in_training(model: msvit.MSViT) -> msvit.MSViT:
    model.host.blocks[1].train()
    return model


def merging(**options: Any) -> None:
    msvit.convert(host(), **{"method": "auto", "budget": 0.6, **options})


WRONG: list[tuple[Callable[[], object], str]] = [
    # images
    (lambda: run(1, 3, 20, 16), r"image is 20x16px.*multiples of 8.*resize"),
    (lambda: run(1, 4, 16, 16), r"4 channels.*built for 3.*in_chans=4"),
    (lambda: double()((255 * NOISE).byte()), rf"got \(2, 3, 16, 16\) torch\.uint8; .* normalised .*{TRANSFORM}"),
    *((lambda given=given: double()(given), rf"got {kind}; model\.predict takes files and PIL images; .*{TRANSFORM}")
      for given, kind in ((Image.new("RGB", (16, 16)), "Image"), ("photo.jpg", "str"), ([Path("photo.jpg")], "list"))),
    (lambda: run(1, 3, 16, 16, dtype=torch.float32), r"torch\.float32.*weights are torch\.float64.*autocast"),
    # masks, budgets and modes
    (lambda: tiny_model(mode="masked")(images(), max_tokens=99), r"with_options\(mode=.packed.\)"),
    (lambda: force_backend("fast").__enter__(), "varlen, sdpa"),
    # parts of a model
    (lambda: msvit.convert(tiny_host(), coarse=6), "coarse is 6px and fine is 4px.*coarse=8"),
    (lambda: msvit.EntropyGate(coarse=32, share=0.3, threshold=1.0), "exactly one"),
    # gates and their losses
    (lambda: msvit.convert(tiny_host(in_chans=1)), r"images of 3 channels, and the host's have 1; .* gate=.learned."),
    (lambda: msvit.LearnedGate(8).for_normalization((0.5,) * 3, (0.5,) * 3), "has no record .* record it first"),
    (lambda: losses.L0(0.5)(SHARES, logits=SHARES), "both given"),
    (lambda: losses.BatchShaping(0.5)(SHARES[:1]), "has 1 image, but .* at least 2 .*; use larger batches"),
    (lambda: losses.GeneralizedBatchShaping(0.5, grid=(7, 7))(SHARES), r"cells \(2, 2\), but .* 7x7; .*resized"),
    (lambda: msvit.convert(tiny_host(GAP), gate=FINE, reducer=AttentionRecorder()), "no class token; choose another"),
    # features
    (lambda: double().forward_intermediates(images(), 3), r"indices is 3, but must be a whole number in \[1, 2\]"),
    (lambda: double().forward_head(double()(images())), "x is a MSViTOutput, but must be the tensor of forward_featu"),
    (lambda: tiny_model(SWINS[0]).forward_intermediates(images(2, 64, 64), [1], stop_early=True),
     "stages after 1 are not run.*intermediates_only=True"),
    (lambda: msvit.compile(learned()).reset_classifier(3), r"shares its weights.*reset_classifier"),
    (lambda: tiny_model().reset_classifier(7, "max"), "global_pool is 'max', but .* 'token' or 'avg' only"),
    # reducers
    (lambda: msvit.ToMe(), r"r is None and rate is None.*pass r=13"),
    (lambda: reduce(msvit.EViT()), r"EViT reduces at blocks \(3, 6, 9\), but the host has blocks 0 to 1; pass .* at="),
    (lambda: reduce(RATE, GAP), r"no class token.*msvit\.ToMe"),
    (lambda: reduce(msvit.ToMe(r=9)), r"r is 9.*16x16px.*16 tokens.*at most r=8"),
    (lambda: tiny_model(reducer=tiny_model(reducer=msvit.DynamicViT(at=(1,))).reducer, embed_dim=64),
     r"tokens of 32 numbers, but the host's have 64; make a new one"),
    (lambda: model().generate_model_card(results=0.8), "results is a float, but must be a dict"),
    # hosts
    (lambda: convert("beit_base_patch16_224"), "relative position bias"),
    (lambda: convert("swinv2_cr_tiny_224"), "attention in windows"),
    (lambda: convert("vit_small_r26_s32_224"), "convolutional stem"),
    (lambda: convert("vit_small_patch16_rope_mixed_224"), "rotary positions"),
    (lambda: convert("vit_base_patch16_rpn_224"), "ResPostBlock"),
    (lambda: tiny_model(attn_drop_rate=0.1), "attention dropout"),
    (lambda: tiny_model(patch_drop_rate=0.1), "patch dropout"),
    (lambda: tiny_model(global_pool="max"), "pooling is 'max'"),
    (lambda: msvit.convert(tiny_host(patch_size=(4, 8)), coarse=16), "not square"),
    (lambda: msvit.convert(type("Other", (VisionTransformer,), {"forward": len})(depth=1)), "its forward is not one"),
    (lambda: msvit.convert(nn.DataParallel(tiny_host())), r"wrapped in a DataParallel; pass .* host\.module"),
    (lambda: msvit.convert(torch.compile(tiny_host())), r"wrapped in a OptimizedModule; pass .* host\._orig_mod"),
    (lambda: msvit.save(FINE, "x"), r"a gate is saved by msvit\.save_gate"),
    (lambda: msvit.load("x", "cpu"), r"host .* a model you built; .* msvit\.load\(folder\)\.to\(device\)"),
    # Swin
    (lambda: msvit.convert(tiny_swin(), gate=FINE, merge_at=3),
     "cells are 8px, .* enter block 3, where a token covers 16px; give a gate with cells of 16px or a multiple"),
    (lambda: msvit.convert(tiny_swin(), merge_at=4)(images(2, 64, 72)), "64x72px, .* of 32; resize it, .* to 64x64"),
    (lambda: msvit.convert(tiny_swin(), mode="trimmed"), "unknown mode 'trimmed' for a SwinTransformer"),
    (lambda: msvit.convert(tiny_swin(), reducer=RATE), "leave reducer out, or use a ViT"),
    (lambda: msvit.convert_segmenter(tiny_swin(), 5), "convert a ViT, or classify"),
    (lambda: msvit.convert(tiny_swin(attn_drop_rate=0.1)), "build it with attn_drop_rate=0"),
    (lambda: msvit.convert(tiny_host(), merge_at=3), "leave merge_at out, or convert a Swin"),
    # compiled models
    (lambda: msvit.compile(type("Other", (msvit.MSViT,), {})(double().backbone, double().gate, 8)),
     "whose forward may differ"),
    (lambda: cuda.CudaMSViT(model(), inductor=False, graphs=False).double(),
     r"convert model\.uncompiled\(\) .* msvit\.compile again"),
    (lambda: model().load_state_dict(tiny_host().state_dict(), strict=False), r"model\.host\.load_state_dict\("),
    (lambda: msvit.save(model(), __file__), "is a file; give the path of a folder"),
    (lambda: torch.onnx.export(model(), (IMAGE,), "model.onnx", dynamo=False),
     r"mode 'packed', .* call msvit\.export\(model, 'model\.onnx'\)"),
    (lambda: torch.export.export(model(), (IMAGE,)), r"msvit\.export\(model, 'model\.onnx'\), or 'model\.pt2'"),
    # budgets
    (lambda: msvit.calibrate(model(), MANY, 60), r"budget is 60, but is a share.*pass 0.6 for 60 %"),
    (lambda: msvit.convert(tiny_host(), gate="all-fine", budget=0.5),
     "AllFine, has neither a threshold nor a share.*speed_up call that again"),
    (lambda: msvit.convert(tiny_host(), gate="disc", budget=0.5, unit="ms"),
     'unit is "ms", but time is measured on images'),
    (lambda: msvit.calibrate(model(), [MANY, MANY[:, :, :8]], 0.7),
     r"\(16, 16\) and \(8, 16\) px.* costs are those of one size"),
    (lambda: model()(IMAGE, per_image=9, max_tokens=99), "per_image is 9, but max_tokens is given too"),
    (lambda: msvit.set_budget(learned(), 0.7), r"has not been calibrated; call msvit\.calibrate"),
    # what is fitted and distilled
    (lambda: msvit.fit_gate(model(), MANY, 0.6), "has no weights to fit"),
    (lambda: msvit.fit_gate(learned(), MANY[:1], 0.6, unit="tokens"), "there is 1 image, but"),
    (lambda: msvit.fit_gate(learned(), MANY, 0.6, targets=["pooling"]), r"\['pooling'\], but .* has attention, masks"),
    (lambda: msvit.fit_gate(partly_in_training(learned()), MANY, 0.6), r"model.eval\(\) first"),
    (lambda: msvit.distill(learned(), MANY[:1]), "another held back"),
    (lambda: msvit.distill(learned(), MANY, rate=1), "unknown setting of distill 'rate'; known: budgets"),
    (lambda: msvit.distill(learned(), MANY, budgets=(0.8, 0.4)), "must be a range of shares"),
    (lambda: msvit.distill(tiny_model(gate=FINE).eval(), MANY), "the dense model already"),
    (lambda: msvit.distill(learned(), MANY, reducers=[msvit.ToMe(r=2)]), "1 reducers are given"),
    (lambda: msvit.distill(tiny_model(gate=FINE, reducer=RATE).eval(), MANY, 0.6), "budget cannot be set"),
    (lambda: msvit.distill(msvit.compile(learned()), MANY), r"pass model\.uncompiled\(\) to msvit\.distill"),
    (lambda: msvit.distill(partly_in_training(learned()), MANY), r"model.eval\(\) first"),
    (lambda: msvit.fit_reducer(partly_in_training(tiny_model(gate=FINE).eval()), MANY, 0.6), "training mode"),
    (lambda: msvit.calibrate(partly_in_training(learned()), MANY, 0.6, unit="ms"), "training mode"),
    (lambda: merging(budget=None), "pass budget=0.6"),
    (lambda: merging(gate="default"), "chooses gate itself"),
    (lambda: merging(method=None, images=MANY), 'pass method="auto"'),
    (lambda: msvit.convert(tiny_swin(), method="auto", budget=0.6), "pass a gate instead"),
    (lambda: msvit.convert(host(), reducer=msvit.ToMe(r=(1, 2, 3))), "host has 2 blocks"),
    # files, and images for msvit.speed_up
    (lambda: msvit.speed_up(host(), MANY, 60), "pass 0.6 for 60 %"),
    (lambda: model()(IMAGE[0].permute(1, 2, 0)), r"add a batch axis: images\.permute\(2, 0, 1\)\[None\]"),
    (lambda: msvit.speed_up(host(), MANY[:7], 0.8), "there are 7 images.*pass 8 or more, better a few hundred"),
    (lambda: model().predict(IMAGE), r"images are a tensor .*call model\(images\) for tensors"),
    (lambda: model().predict([3]), "an image is 3, but must be a path or a PIL image"),
    (lambda: model().predict(__file__), "test_bad_input.py cannot be read as an image .*; give a JPEG, PNG or WebP"),
    (lambda: dense_segmenter().predict("photo.jpg"), "msvit predict RUN"),
    (lambda: tiny_model(num_classes=0).predict("photo.jpg"), r"model\.encode"),
]  # fmt: skip


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:Converting a tensor")  # of torch.onnx.export
@pytest.mark.parametrize(("call", "words"), WRONG, ids=[words for _, words in WRONG])
def test_bad_input_is_named_with_the_remedy_before_anything_is_trained(
    call: Callable[[], object], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for owner, name in ((gate_fitting, "views_and_targets"), (Distiller, "step"), (ScheduleSearch, "run")):
        monkeypatch.setattr(owner, name, lambda *given: pytest.fail("was trained first"))
    with pytest.raises(ValueError, match=words):
        call()


def test_an_unknown_name_of_the_package_lists_the_known_ones() -> None:
    with pytest.raises(AttributeError, match="convert"):
        _ = msvit.transform


@pytest.mark.parametrize("name", [VIT, GAP, "vit_base_patch16_siglip_224"])
def test_masks_of_any_sensible_type_are_taken(name: str) -> None:
    model, mask = tiny_model(name, torch.float32), torch.tensor([[[1, 0], [0, 1]]]).expand(3, -1, -1)
    for mode in model.backbone.modes:
        model = model.with_options(mode=mode)
        for dtype in (torch.bool, torch.uint8, torch.int64, torch.float16, torch.float32, torch.float64):
            assert model(images(dtype=torch.float32), mask=mask.to(dtype)).tokens.count.tolist() == [10, 10, 10]
