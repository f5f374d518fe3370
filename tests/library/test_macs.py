"""Multiply-adds are exact, per image."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import timm
import torch
from cases import each_once
from tiny import HOSTS, batch_of, tiny_model
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import msvit
from msvit.host_config import without_weights
from msvit_lab.evaluation.info import describe

# Printed in the method's notes for all-fine hosts, in GMACs.
TABLE = {
    "vit_tiny_patch16_224": {160: "0.60", 192: "0.89", 224: "1.25"},
    "vit_small_patch16_224": {
        128: "1.44", 160: "2.27", 192: "3.32", 224: "4.60", 288: "7.97", 320: "10.11", 384: "15.49",
    },
    "vit_large_patch16_224": {160: "31.08", 192: "44.9"},
}  # fmt: skip


@contextmanager
def counted() -> Iterator[FlopCounterMode]:
    """torch's counter, with attention spelled out: older ones do not know the CPU's fused kernel."""
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        yield counter


def per_image(model: msvit.MSViT, image: torch.Tensor, mask: torch.Tensor) -> list[int]:
    """Multiply-adds that the counter sees in runs of one image each."""
    found = []
    for i in range(len(image)):
        with counted() as counter:
            model(image[i : i + 1], mask=mask[i : i + 1])
        found.append(counter.get_total_flops() // 2)
    return found


@pytest.mark.parametrize("name", HOSTS)
def test_macs_are_what_the_flop_counter_sees_in_the_packed_run(name: str) -> None:
    """Of single images, of a ragged batch, and with the gate's own cost."""
    model = tiny_model(name).requires_grad_(False)  # the counter stumbles over expanded parameters, timm's own too
    image, mask = batch_of(model)
    assert msvit.macs(model, image, mask).tolist() == per_image(model, image, mask)
    for given in (mask, None):
        with counted() as counter:
            model.eval()(image, mask=given)
        assert msvit.macs(model, image, given).sum() * 2 == counter.get_total_flops()


@pytest.mark.parametrize(("name", "size"), [(name, size) for name, sizes in TABLE.items() for size in sizes])
def test_dense_macs_are_those_of_the_papers_tables(name: str, size: int) -> None:
    printed = TABLE[name][size]
    assert f"{describe(name, size=size).dense_gmacs:.{len(printed.split('.')[1])}f}" == printed


def test_the_formula_is_the_flop_count_of_the_host_itself() -> None:
    with torch.device("meta"), counted() as counter:
        timm.create_model("vit_small_patch16_224").requires_grad_(False)(torch.zeros(1, 3, 224, 224))
    assert describe("vit_small_patch16_224").dense_gmacs == pytest.approx(counter.get_total_flops() / 2e9, rel=1e-12)


REDUCERS = (
    lambda: msvit.EViT(0.6, at=(1, 3)),
    lambda: msvit.EViT(0.6, at=(1, 3), fuse=False),
    lambda: msvit.EViT(0.9, at=(1, 3)),  # of 4 tokens all are kept, and nothing is fused
    lambda: msvit.DynamicViT(0.6, at=(1, 3)),
    lambda: msvit.ToMe(r=3),
    lambda: msvit.ToMe(rate=0.8),
)


@each_once(
    name=["vit_small_patch16_224", "vit_small_patch14_reg4_dinov2", "eva02_tiny_patch14_224"], make=REDUCERS
)
def test_macs_with_a_reducer_are_what_the_flop_counter_sees(name: str, make: Callable[[], msvit.Reducer]) -> None:
    model = tiny_model(name, depth=4, reducer=make()).requires_grad_(False).eval()
    host, (image, mask) = model.host, batch_of(model)
    assert msvit.macs(model, image, mask).tolist() == per_image(model, image, mask)
    with counted() as counter:
        out = model(image, mask=mask)
    if not isinstance(model.reducer, msvit.ToMe):  # its matching is padded to the longest image
        padded = 0
        if model.reducer.config.get("fuse"):  # and so is fusing
            now = msvit.convert(host, coarse=8)(image, mask=mask).tokens.count
            for index in range(4):
                total = now + model.backbone.num_prefix
                if model.reducer.acts_within(index):
                    padded += int(len(total) * total.max() - total.sum()) * host.embed_dim
                now = model.reducer.num_kept(index, now, now)
        assert (msvit.macs(model, image, mask).sum() + padded) * 2 == counter.get_total_flops()
    with_gate = model.macs_of(out) - model.gate.num_macs(4)
    assert torch.equal(with_gate, msvit.macs(model, image, mask))


@pytest.mark.parametrize(
    ("make", "gmacs"),
    [
        (lambda: msvit.EViT(0.7), 3.0),
        (lambda: msvit.EViT(0.5), 2.3),
        (lambda: msvit.DynamicViT(0.7), 2.9),
        (lambda: msvit.ToMe(r=13), 2.7),
    ],
)
def test_plain_methods_on_deit_s_cost_what_was_published(make: Callable[[], msvit.Reducer], gmacs: float) -> None:
    def convert() -> msvit.MSViT:
        host = timm.create_model("deit_small_patch16_224")
        return msvit.convert(host, gate=msvit.AllFine(coarse=32), reducer=make()).eval()

    model = without_weights(convert)
    own = model.backbone.dense_macs(msvit.ScaleGrid(224, 224, fine=16, coarse=32), model.reducer) / 1e9
    predictors = sum(float(model.reducer.num_macs(at, torch.tensor([n]), 1)) for at, n in ((3, 196), (6, 137), (9, 96)))
    if isinstance(model.reducer, msvit.DynamicViT):  # 0.1 G, which the published number leaves out
        own -= predictors / 1e9
    assert own == pytest.approx(gmacs, abs=0.05)
