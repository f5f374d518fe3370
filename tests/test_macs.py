"""Multiply-adds are exact, per image."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import timm
import torch
from tiny import HOSTS, images, mixed_mask, tiny_host
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import msvit
from msvit.evaluation.info import describe

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


@pytest.mark.parametrize("name", HOSTS)
def test_macs_are_what_the_flop_counter_sees_in_the_packed_run(name: str) -> None:
    host = tiny_host(name).requires_grad_(False)  # the counter stumbles over expanded parameters, timm's own too
    gate = msvit.LearnedGate(coarse=8, grid=(2, 2)).double()
    model, image, mask = msvit.convert(host, coarse=8, gate=gate), images(4), mixed_mask(4, 2, 2)
    per_image = []
    for i in range(4):
        with counted() as counter:
            model(image[i : i + 1], mask=mask[i : i + 1])
        per_image.append(counter.get_total_flops() // 2)
    assert msvit.macs(model, image, mask).tolist() == per_image
    with counted() as counter:  # a ragged batch, one run
        model(image, mask=mask)
    assert msvit.macs(model, image, mask).sum() * 2 == counter.get_total_flops()
    with counted() as counter:  # the gate's own cost is counted too
        model.eval()(image)
    assert msvit.macs(model, image).sum() * 2 == counter.get_total_flops()


@pytest.mark.parametrize(("name", "size"), [(name, size) for name, sizes in TABLE.items() for size in sizes])
def test_dense_macs_are_those_of_the_papers_tables(name: str, size: int) -> None:
    printed = TABLE[name][size]
    assert f"{describe(name, size=size).dense_gmacs:.{len(printed.split('.')[1])}f}" == printed


def test_the_formula_is_the_flop_count_of_the_host_itself() -> None:
    host, image = timm.create_model("vit_small_patch16_224").requires_grad_(False), torch.zeros(1, 3, 224, 224)
    with counted() as counter:
        host(image)
    assert describe("vit_small_patch16_224").dense_gmacs == pytest.approx(counter.get_total_flops() / 2e9, rel=1e-12)


def test_a_host_that_was_not_converted_is_refused() -> None:
    with pytest.raises(ValueError, match=r"msvit\.convert"):
        msvit.macs(tiny_host(), images())
