"""Calls of every part of the library with annotations checked: a value of another shape or type raises.

A program of its own (library/test_shapes.py runs it), as the hook must be there before msvit is imported. Only here,
as it would take a third of the time of all other tests.
"""

from typing import Any

import jaxtyping

PARTS = ("backbones", "execution", "gates", "heads", "losses", "model", "reduction", "segmenter", "tokens", "types")
HOOK = jaxtyping.install_import_hook([f"msvit.{part}" for part in PARTS], "beartype.beartype")

import torch  # noqa: E402
from tiny import KINDS, SWINS, batch_of, tiny_host, tiny_model  # noqa: E402

import msvit  # noqa: E402
from msvit import losses  # noqa: E402
from msvit.execution import MODES  # noqa: E402
from msvit.gates import GATES  # noqa: E402
from msvit.integrations.export.graph import GateGraph, TrunkGraph, WholeGraph  # noqa: E402


def check_hosts() -> None:
    """A class token in every mode; rotary positions, a query that pools and a Swin in one; with gradients."""
    for number, name in enumerate((KINDS[0], KINDS[2], KINDS[4], SWINS[0])):
        model = tiny_model(name)
        image, mask = batch_of(model, 2)
        modes = list(model.backbone.modes)
        for mode in modes[number % len(modes) :][: 3 if number == 0 else 1]:
            other = model.with_options(mode=mode).train()
            other(image).logits.square().sum().backward()
            other.eval()(image, mask)
        model(image, mask, max_tokens=4096)
        model.macs(image, mask)
        model.forward_intermediates(image, mask=mask)
        if name in KINDS:
            model.with_options(proportional_attention=0.5)(image, mask)


def check_reducers() -> None:
    for reducer in (msvit.EViT(0.6, at=(0, 1)), msvit.DynamicViT(0.6, at=(1,)).double(), msvit.ToMe(r=2)):
        for mode in MODES:
            model = tiny_model(mode=mode, reducer=reducer).train(isinstance(reducer, msvit.DynamicViT))
            out = model(*batch_of(model, 3))
            model.macs_of(out)
            msvit.dense_map(out.tokens)
    model.eval()(*batch_of(model, 3))


def check_gates_and_losses() -> None:
    image = torch.rand(4, 3, 16, 16)
    for name, kind in GATES.items():
        gate = kind(coarse=8, **({"share": 0.5} if name in ("entropy", "gradient") else {}))
        model = msvit.convert(tiny_host(dtype=torch.float32), coarse=8, gate=gate).eval()
        model(image)
        model(image, per_image=7)
    msvit.calibrate(model.with_options(gate=msvit.GradientGate(8, threshold=0.1)), image, 0.6, unit="tokens")
    logits = torch.randn(4, 2, 2, requires_grad=True)
    for name, kind in losses.LOSSES.items():
        for prior in (None,) if name == "l0" else (losses.Normal(0.1), losses.RelaxedBernoulli(0.3)):
            options: dict[str, Any] = {} if prior is None else {"prior": prior}
            loss = kind(0.3, **options, **({"grid": (2, 2)} if name == "gbas" else {}))
            (loss(logits.sigmoid()) + loss(logits=logits)).backward()
    losses.edge_loss(logits, torch.randint(5, (4, 16, 16)), coarse=8)
    losses.attention_loss(logits, torch.rand(4, 2, 2))
    losses.ThresholdController(0.5).update(logits)


def check_segmenters_and_exported_graphs() -> None:
    image = torch.randn(2, 3, 20, 17)
    for decoder in ("mask", "linear"):
        tokens = msvit.convert_segmenter(tiny_host(dtype=torch.float32), 3, coarse=8, decoder=decoder)(image).tokens
        msvit.from_dense(msvit.dense_map(tokens), tokens.layout)
    model = tiny_model(dtype=torch.float32, gate=msvit.DiscGate(8)).eval()
    image, _ = batch_of(model, 2)
    for mode, batch, max_tokens in (("packed", 1, None), ("packed", None, None), ("trimmed", None, None),
                                    ("packed", None, 12)):  # fmt: skip
        made, grid = model.with_options(mode=mode), model.grid(image)
        graph = WholeGraph(GateGraph(made, grid, max_tokens), TrunkGraph(made, grid, batch, max_tokens, False))
        graph.eval()(image[:batch])


if __name__ == "__main__":
    check_hosts()
    check_reducers()
    check_gates_and_losses()
    check_segmenters_and_exported_graphs()
