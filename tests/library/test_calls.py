"""Every public callable with every argument wrong in many ways: a ValueError or TypeError that names the argument.

A new public name needs an entry in `CALLS`: a call that works, and for each argument values that must not.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields
from functools import cache
from inspect import signature
from math import inf, nan
from types import ModuleType
from typing import Any

import jaxtyping
import pytest
import torch
from tiny import images, mixed_mask, tiny_host, tiny_swin
from torch import Tensor, nn

import msvit
from msvit import gates, heads, losses, reduction, segmenter, tokens, types
from msvit.backbones import adapt

HUGE = 10**12
ANY_TYPE = [None, "no", [1], {}, object(), torch.zeros(2, 2)]


@dataclass(frozen=True)
class Call:
    """One call that works, and for each argument what does not."""

    run: Callable[..., Any]
    valid: dict[str, Any] = field(default_factory=dict)
    wrong: dict[str, list[Any]] = field(default_factory=dict)


def number(*outside: float, optional: bool = False) -> list[Any]:
    """What is no number, or outside of what is allowed."""
    wrong = [*ANY_TYPE, "0.3", True, nan, inf, -inf, 1j, *outside]
    return wrong[1:] if optional else wrong


def whole(*outside: int, optional: bool = False) -> list[Any]:
    return [*number(*outside, optional=optional), 7.9, 2.0, "7"]


def several(num: int) -> list[Any]:
    """What is not so many whole numbers from 1 on."""
    first = [4] * (num - 1)
    return [*ANY_TYPE, 7, nan, (), (4,) * (num + 1), *((*first, bad) for bad in (0, -1, 7.9, True, nan, None, "4"))]


FLAG = ["no", "yes", 0, 1, None, nan, [], torch.zeros(2)]


def tensor(right: Tensor, *other: Any) -> list[Any]:
    """Of other types, axes, dtypes and batches than one that is right."""
    wrong = [None, "no", 3, [1.0], nan, right[0], right[None], right[:0], right.bool(), right.to(torch.complex64)]
    other_kind = right.long() if right.is_floating_point() else right.float()
    return [*wrong, other_kind, *other]


def choice(optional: bool = False) -> list[Any]:
    return ["", "unknown", 3, nan, [], {}, *([] if optional else [None])]


# What calls are made of: tiny, and made once.

IMAGE = images(2, dtype=torch.float32)
MASK = mixed_mask(2, 2, 2, torch.float32)
SHARES = torch.rand(4, 2, 2, generator=torch.Generator().manual_seed(0))
GRID = msvit.ScaleGrid(16, 16, fine=4, coarse=8)
LABEL = torch.arange(256).view(1, 16, 16).repeat(2, 1, 1) % 5
ANY_CHANNELS = tensor(IMAGE, IMAGE[..., :15], IMAGE[..., :4], IMAGE.permute(0, 2, 3, 1))
IMAGES = [*ANY_CHANNELS, IMAGE[:, :2]]
MASKS = ["no", 3, [1.0], nan, MASK[0], MASK[None], MASK[:0], MASK[:1], MASK[:, :1], MASK.to(torch.complex64)]
MASKS = [*MASKS, MASK + nan, MASK + 1, MASK - 0.5]  # (None: the gate decides)
FOLDERS = [None, 3, nan, [], "", True]


@cache
def host() -> nn.Module:
    return tiny_host(dtype=torch.float32)


@cache
def model() -> msvit.MSViT:
    return msvit.convert(host(), coarse=8, gate=msvit.DiscGate(8, share=0.5)).eval()


@cache
def output() -> msvit.MSViTOutput:
    return model()(IMAGE, MASK)


@cache
def calls() -> dict[str, list[Call]]:
    """By public name: what is made, and then the methods of it that are called with arguments."""
    out, layout = output(), output().tokens.layout
    dense = msvit.dense_map(out.tokens)
    logit_gate = {
        "coarse": whole(0, 1, -8, 10**9), "grid": [*several(2), (7.9, 7.9), (10**6, 10**6)],
        "in_chans": whole(0, -3, HUGE), "widths": [*several(3), (HUGE, 4, 4)],
        "temperature": number(0, -1), "noise": number(-1), "threshold": number(),
    }  # fmt: skip
    small: dict[str, Any] = {"coarse": 8, "grid": (2, 2), "widths": (4, 4, 4)}
    share = {"coarse": whole(0, 1, -8), "share": number(-0.1, 1.1)}
    one_of = {"coarse": whole(0, -8), "share": number(-0.1, 1.1, optional=True)}
    forward = {"image": ANY_CHANNELS}
    loss = {"target": number(0, 1, -1, 2)}
    shaped = {**loss, "prior": [*ANY_TYPE, 0.3, losses.Normal]}
    some = [bad for bad in tensor(SHARES) if shape_of(bad) != SHARES.shape[1:]]  # (b, cells) will do
    probs = {"fine_prob": [*some, SHARES[0, 0], SHARES + 1, SHARES - 1, SHARES * nan]}
    x = SHARES.flatten()
    values = [None, "no", 3, [0.5], nan, x.long(), x.to(torch.complex64)]
    cells = {"logits": tensor(SHARES), "attention": tensor(SHARES, SHARES[:1], -SHARES, SHARES * nan, SHARES[:, :1])}
    rates = {"rate": number(0, -0.1, 1.1), "at": [(), None, "3", (1, 1), (3, 1), (-1,), (True,), (1.5,), nan, {}]}
    decoder = {"width": whole(0, -1, HUGE), "num_classes": whole(0, -1, HUGE)}
    features = {"features": tensor(dense, dense[:, :3], dense.permute(0, 2, 3, 1))[:8]}
    converting = {
        "host": [*ANY_TYPE, 3, nan, nn.Linear(2, 2), model()],
        "coarse": whole(0, 4, 6, -8, optional=True), "gate": [*ANY_TYPE[1:], 3, msvit.DiscGate, msvit.DiscGate(16)],
        "mode": choice(), "reducer": [*ANY_TYPE[1:], 3, msvit.EViT],
    }  # fmt: skip
    running = {"image": IMAGES, "mask": MASKS}
    return {
        # gates
        "Gate": [Call(msvit.Gate, {"coarse": 8}, {"coarse": share["coarse"]})],
        "AllFine": [
            Call(msvit.AllFine, {"coarse": 8}, {"coarse": share["coarse"]}),
            Call(msvit.AllFine(8), {"image": IMAGE}, forward),
            Call(msvit.AllFine(8).for_cells, {"coarse": 16}, {"coarse": share["coarse"]}),
        ],
        "AllCoarse": [
            Call(msvit.AllCoarse, {"coarse": 8}, {"coarse": share["coarse"]}),
            Call(msvit.AllCoarse(8), {"image": IMAGE}, forward),
        ],
        "DiscGate": [
            Call(msvit.DiscGate, {"coarse": 8, "share": 0.3}, share),
            Call(msvit.DiscGate(8), {"image": IMAGE}, forward),
        ],
        "RandomGate": [
            Call(msvit.RandomGate, {"coarse": 8, "share": 0.3, "seed": 1}, {**share, "seed": whole(2**64)}),
            Call(msvit.RandomGate(8), {"image": IMAGE}, forward),
        ],
        "EntropyGate": [
            Call(msvit.EntropyGate, {"coarse": 8, "share": 0.3}, one_of),
            Call(msvit.EntropyGate, {"coarse": 8, "threshold": 2.0}, {"threshold": number()}),
            Call(msvit.EntropyGate(8, share=0.3), {"image": IMAGE}, forward),
        ],
        "GradientGate": [
            Call(msvit.GradientGate, {"coarse": 8, "share": 0.3}, one_of),
            Call(msvit.GradientGate, {"coarse": 8, "threshold": 0.1}, {"threshold": number()}),
            Call(msvit.GradientGate(8, share=0.3), {"image": IMAGE}, forward),
        ],
        "LearnedGate": [
            Call(msvit.LearnedGate, small, {**logit_gate, "cell": whole(0, -8, HUGE, optional=True)}),
            Call(msvit.LearnedGate(**small), {"image": IMAGE}, {"image": IMAGES}),
        ],
        "ContextGate": [
            Call(msvit.ContextGate, small, {**logit_gate, "coarse": whole(0, -8), "depth": whole(-1, HUGE)}),
            Call(msvit.ContextGate(**small), {"image": IMAGE}, {"image": IMAGES}),
        ],
        "LogitGate": [
            Call(
                gates.LogitGate, {"coarse": 8, "in_chans": 3, "temperature": 1.0, "noise": 1.0, "threshold": 0.0},
                logit_gate | {"coarse": whole(0, -8), "in_chans": whole(0, -3), "grid": [], "widths": []},
            ),
        ],
        # losses
        "L0": [Call(losses.L0, {"target": 0.5}, loss), Call(losses.L0(0.5), {"fine_prob": SHARES}, probs)],
        "BatchShaping": [
            Call(losses.BatchShaping, {"target": 0.5}, shaped),
            Call(losses.BatchShaping(0.5), {"fine_prob": SHARES}, {"fine_prob": [*probs["fine_prob"], SHARES[:1]]}),
        ],
        "FlatBatchShaping": [
            Call(losses.FlatBatchShaping, {"target": 0.5}, shaped),
            Call(losses.FlatBatchShaping(0.5), {"fine_prob": SHARES}, probs),
        ],
        "GeneralizedBatchShaping": [
            Call(
                losses.GeneralizedBatchShaping, {"target": 0.5, "grid": (2, 2)},
                {**shaped, "grid": [*several(2), (10**6, 10**6)], "std": number(0, -0.1), "center": FLAG},
            ),
            Call(
                losses.GeneralizedBatchShaping(0.5, (2, 2)), {"fine_prob": SHARES},
                {"fine_prob": [*probs["fine_prob"], SHARES[:, :1]]},
            ),
            Call(losses.GeneralizedBatchShaping(0.5, (2, 2)).resized, {"grid": (3, 3)}, {"grid": several(2)}),
        ],
        "ThresholdController": [
            Call(losses.ThresholdController, {"target": 0.5}, loss),
            Call(losses.ThresholdController(0.5).update, {"logits": SHARES}, {"logits": tensor(SHARES, SHARES * nan)}),
        ],
        "edge_loss": [
            Call(
                losses.edge_loss, {"logits": MASK, "label": LABEL, "coarse": 8},
                {
                    "logits": tensor(MASK, MASK[:1], MASK[:, :1]),
                    "label": tensor(LABEL, LABEL[:1], LABEL[:, :4], LABEL + 300, LABEL - 1, LABEL[:, None]),
                    "coarse": whole(0, -8),
                },
            ),
        ],
        "attention_loss": [Call(losses.attention_loss, {"logits": SHARES, "attention": SHARES}, cells)],
        "Normal": [Call(losses.Normal, {"std": 0.1}, {"std": number(0, -1)})],
        "RelaxedBernoulli": [Call(losses.RelaxedBernoulli, {"temperature": 0.3}, {"temperature": number(0, -1)})],
        "relaxed_bernoulli_cdf": [
            Call(
                losses.relaxed_bernoulli_cdf, {"x": x, "location": 0.5, "temperature": 0.3},
                {"x": values, "location": parameter(x - 1, x * nan, -0.1, 1.1), "temperature": parameter(-x, 0, -1)},
            ),
        ],
        "normal_cdf": [
            Call(
                losses.normal_cdf, {"x": x, "mean": 0.5, "std": 0.1},
                {"x": values, "mean": parameter(x * nan), "std": parameter(-x, 0 * x, 0, -1)},
            ),
        ],
        # reduction
        "Reducer": [Call(msvit.Reducer)],
        "EViT": [Call(msvit.EViT, {}, {**rates, "fuse": FLAG})],
        "DynamicViT": [Call(msvit.DynamicViT, {}, rates)],
        "ToMe": [
            Call(msvit.ToMe, {"r": 2}, {"r": whole(-1)}),
            Call(msvit.ToMe, {"rate": 0.9}, {"rate": number(0, 0.4, 1.1)}),
        ],
        "make_reducer": [Call(reduction.make_reducer, {"name": "evit"}, {"name": choice(), "rate": number(0)[1:]})],
        # tokens
        "dense_map": [Call(msvit.dense_map, {"tokens": out.tokens}, {"tokens": [*ANY_TYPE, out, layout]})],
        "from_dense": [
            Call(
                msvit.from_dense, {"dense": dense, "layout": layout},
                {
                    "dense": [*tensor(dense)[:8], dense[:1], dense.permute(0, 2, 3, 1), dense[..., :2], dense[..., :1]],
                    "layout": [*ANY_TYPE, out.tokens, GRID],
                },
            ),
        ],
        "tokenize": [
            Call(
                tokens.tokenize, {"image": IMAGE, "layout": layout, "embedding": model().backbone},
                {
                    "image": [*ANY_CHANNELS, IMAGE[:1]], "layout": [*ANY_TYPE, GRID], "embedding": ANY_TYPE,
                    "table": [3, "no", torch.zeros(3, 32), torch.zeros(21)], "mask": [3, "no", MASK[:1], MASK[:, :1]],
                },
            ),
        ],
        "active_pixels": [
            Call(
                tokens.active_pixels,
                {"image": IMAGE, "which": torch.zeros(3).long(), "patch": torch.arange(3), "grid": GRID},
                {
                    "image": ANY_CHANNELS, "which": [3, None, torch.zeros(3), torch.zeros(2).long()],
                    "patch": [3, None, torch.zeros(3)], "grid": [*ANY_TYPE, (16, 16)],
                },
            ),
        ],
        "patch_pixels": [Call(tokens.patch_pixels, {"image": IMAGE, "grid": GRID}, forward | {"grid": ANY_TYPE})],
        "cut_patches": [
            Call(
                tokens.cut_patches, {"image": IMAGE, "side": 4},
                {"image": [*tensor(IMAGE)[:5], IMAGE[0], IMAGE[..., :15]], "side": whole(0, -4, 5)},
            ),
        ],
        "coarse_positions": [
            Call(
                tokens.coarse_positions, {"fine": torch.rand(16, 8), "grid": GRID},
                {"fine": tensor(torch.rand(16, 8), torch.rand(15, 8)), "grid": ANY_TYPE},
            ),
        ],
        "nan_or_zero": [Call(tokens.nan_or_zero, {"mask": MASK}, {"mask": tensor(MASK)})],
        # heads
        "LinearDecoder": [
            Call(heads.LinearDecoder, {"width": 32, "num_classes": 3}, decoder),
            Call(heads.LinearDecoder(32, 3), {"features": dense}, features),
        ],
        "MaskDecoder": [
            Call(
                heads.MaskDecoder, {"width": 32, "num_classes": 3},
                {**decoder, "depth": whole(-1, HUGE), "dropout": number(-0.1, 1)},
            ),
            Call(heads.MaskDecoder(32, 3), {"features": dense}, features),
        ],
        "classify": [
            Call(heads.classify, {"host": host(), "tokens": out.tokens}, {"host": ANY_TYPE, "tokens": ANY_TYPE}),
        ],
        # types
        "ScaleGrid": [
            Call(
                msvit.ScaleGrid, {"height": 16, "width": 32, "fine": 4, "coarse": 8},
                {
                    "height": whole(0, -16, 15), "width": whole(0, -16, 15),
                    "fine": whole(0, -4, 5), "coarse": whole(0, 4, 6, -8),
                },
            ),
        ],
        "GateOutput": [
            Call(
                msvit.GateOutput, dict.fromkeys(("logits", "fine_prob", "sample", "mask"), MASK),
                {name: tensor(MASK, MASK[:1]) for name in ("logits", "fine_prob", "sample", "mask")},
            ),
            Call(msvit.GateOutput.from_mask, {"mask": MASK}, {"mask": [None, "no", 3, [1.0], MASK[0], MASK[:0]]}),
        ],
        "PackedLayout": [
            Call(
                types.PackedLayout, {each.name: getattr(layout, each.name) for each in fields(layout)},
                {
                    "grid": ANY_TYPE, "num_prefix": whole(-1), "batch": whole(0, -1, 5),
                    "token": [None, "no", 3, layout.token.float()],
                    **{name: [None, "no", 3, getattr(layout, name)[:-1]] for name in ("image", "weight")},
                    "cu_seqlens": [None, "no", 3, layout.cu_seqlens[:-1], layout.cu_seqlens.float()],
                },
            ),
        ],
        "TokenBatch": [
            Call(
                msvit.TokenBatch, {"x": out.tokens.x, "layout": layout},
                {
                    "x": [None, "no", 3, out.tokens.x[None], out.tokens.x[1:], torch.cat([out.tokens.x] * 2)],
                    "layout": [*ANY_TYPE, GRID],
                },
            ),
        ],
        "MSViTOutput": [
            Call(
                msvit.MSViTOutput, {"logits": out.logits, "gate": out.gate, "tokens": out.tokens},
                {"gate": [*ANY_TYPE, MASK], "tokens": [*ANY_TYPE, out.tokens.x]},
            ),
        ],
        # models
        "MSViT": [
            Call(
                msvit.MSViT, {"backbone": adapt(host()), "gate": msvit.DiscGate(8), "coarse": 8},
                {
                    **{name: values for name, values in converting.items() if name not in ("host", "coarse", "gate")},
                    "backbone": [*ANY_TYPE, host()], "coarse": whole(0, 4, 6, -8),
                    "gate": [*converting["gate"], None],
                },
            ),
            Call(
                model(), {"image": IMAGE, "mask": MASK, "max_tokens": 51},
                running | {"max_tokens": whole(0, -1, HUGE, optional=True)},
            ),
            Call(model().macs, {"image": IMAGE, "mask": MASK}, running | {"head": FLAG}),
            Call(model().macs_of, {"output": out}, {"output": [*ANY_TYPE, out.tokens], "head": FLAG}),
        ],
        "convert": [
            Call(msvit.convert, {"host": host(), "coarse": 8}, converting | {"merge_at": [2, "2", nan]}),
            Call(
                msvit.convert, {"host": tiny_swin(dtype=torch.float32), "merge_at": 3},
                {"merge_at": whole(0, 1, 5, optional=True), "coarse": whole(0, 8, optional=True), "gate": ["no", 3]},
            ),
        ],
        "Segmenter": [
            Call(
                msvit.Segmenter, {"encoder": model(), "decoder": heads.LinearDecoder(32, 3)},
                {"encoder": [*ANY_TYPE, host()], "decoder": ANY_TYPE},
            ),
            Call(
                msvit.convert_segmenter(host(), 3, 8), {"image": IMAGE, "mask": MASK},
                running | {"image": [bad for bad in IMAGES if bad is None or shape_of(bad)[-1:] not in ((15,), (4,))]},
            ),
        ],
        "convert_segmenter": [
            Call(
                msvit.convert_segmenter, {"host": host(), "num_classes": 3, "coarse": 8},
                {**converting, "num_classes": whole(0, 1, -3, HUGE), "decoder": choice()},
            ),
        ],
        "attach_decoder": [
            Call(
                segmenter.attach_decoder, {"encoder": model(), "num_classes": 3, "decoder": "mask"},
                {"encoder": [*ANY_TYPE, host()], "num_classes": whole(0, 1), "decoder": choice()},
            ),
        ],
        "compile": [
            Call(
                msvit.compile, {"model": model()},
                {"model": [*ANY_TYPE, host(), nn.Identity()], "inductor": ["no", None, 1, 0, nan, []], "graphs": FLAG},
            ),
        ],
        "macs": [
            Call(
                msvit.macs, {"model": model(), "images": IMAGE, "mask": MASK},
                {"model": [*ANY_TYPE, host()], "images": IMAGES, "mask": MASKS},
            ),
        ],
        # files
        "load": [Call(msvit.load, {}, {"folder": FOLDERS})],
        "save": [Call(msvit.save, {}, {"folder": FOLDERS, "model": [*ANY_TYPE, host()]})],
        "save_gate": [Call(msvit.save_gate, {}, {"folder": FOLDERS, "gate": [*ANY_TYPE, host()]})],
        "load_gate": [
            Call(
                msvit.load_gate, {"folder": "default"},
                {"folder": FOLDERS, "coarse": whole(0, -8, optional=True), "frozen": FLAG},
            ),
        ],
    }


def parameter(*outside: Any) -> list[Any]:
    """Of a distribution: a number, or a float tensor."""
    return [*[bad for bad in number() if not isinstance(bad, Tensor)], torch.ones(16).long(), *outside]


def shape_of(value: Any) -> tuple[int, ...]:
    return tuple(value.shape) if isinstance(value, Tensor) else ()


# What a name is called with where a file or another object must be there.
BESIDE: dict[str, dict[str, Any]] = {
    "load": {"folder": "nowhere"},
    "save": {"model": model, "folder": "nowhere"},
    "save_gate": {"gate": lambda: msvit.DiscGate(8), "folder": "nowhere"},
}


# Arguments of which anything is taken, or that only msvit itself gives.
UNTRIED = {
    "MSViTOutput": {"logits"},  # what the host's head gives, whatever that is
    "TokenBatch": {"kept"},
    "PackedLayout": {"max_len", "has_padding", "size", "has_inactive", "patch_to_slot", "initial_count"},
    "load": {"host"},
}


def public_names() -> Iterator[str]:
    """All that can be called, of the modules whose names are public."""
    modules: list[ModuleType] = [msvit, gates, losses, reduction, tokens, heads]
    for module in modules:
        for name in module.__all__:
            value = getattr(module, name)
            if callable(value) and not getattr(value, "_is_protocol", False):
                yield name


@pytest.fixture(autouse=True)
def _as_users_call_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the type checks that tests have and users do not."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)


def test_every_public_name_has_an_entry() -> None:
    missing = sorted(set(public_names()) - calls().keys())
    assert not missing, f"add to calls() in {__file__}: {', '.join(missing)}"


NAMES = sorted({*public_names(), "PackedLayout", "attach_decoder"})


@pytest.mark.parametrize("name", NAMES)
def test_the_valid_call_works_and_every_argument_is_tried(name: str) -> None:
    for call in calls()[name]:
        if name not in BESIDE:
            call.run(**call.valid)
    first = calls()[name][0]
    tried = {argument for call in calls()[name] for argument in call.wrong}
    taken = signature(first.run).parameters.values()
    left = {p.name for p in taken if p.kind is not p.VAR_KEYWORD} - tried - UNTRIED.get(name, set())
    assert not left, f"no wrong value is tried for {', '.join(sorted(left))}"


@pytest.mark.parametrize("name", NAMES)
def test_a_wrong_value_is_named(name: str) -> None:
    missed = []
    for call in calls()[name]:
        beside = {key: value() if callable(value) else value for key, value in BESIDE.get(name, {}).items()}
        for argument, values in call.wrong.items():
            for value in values:
                what = f"{argument}={value!r:.60}{shape_of(value) or ''}"
                try:
                    call.run(**{**beside, **call.valid, argument: value})
                except (ValueError, TypeError) as error:
                    if not re.search(rf"\b{argument.removesuffix('s')}", str(error), re.IGNORECASE):
                        missed.append(f"{what}: {type(error).__name__} without its name: {error}")
                except Exception as error:
                    missed.append(f"{what}: {type(error).__name__}: {error}")
                else:
                    missed.append(f"{what} is taken")
    assert not missed, "\n".join(missed)
