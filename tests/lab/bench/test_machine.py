"""Lower bounds of time and memory of a call, where a machine's rates are known."""

import pytest
import torch
from tiny import images, tiny_host

import msvit
from msvit_lab.bench.machine import Rates, bytes_held, lower_bounds, measure_memory, traffic
from msvit_lab.bench.summary import Work


def test_traffic_is_weights_pixels_and_what_each_layer_reads_and_writes():
    model = msvit.convert(tiny_host(), coarse=8, gate=msvit.AllFine(coarse=8))  # width 32, two blocks, float64
    weights, pixels = sum(p.numel() for p in model.host.parameters()), 3 * 3 * 16 * 16
    linear = (32 + 96) + (32 + 32) + (32 + 128) + (128 + 32)  # qkv, proj, fc1, fc2
    block = linear + 2 * 2 * 32 + 4 * 32
    assert traffic(model, 10, images(3)) == 8 * (weights + 2 * pixels + 10 * (2 * block + 2 * 32))


def test_lower_bounds_are_for_the_tokens_a_row_runs():
    model = msvit.convert(tiny_host(), coarse=8)
    work = Work(
        tokens=torch.tensor([4, 10]), macs=torch.tensor([50, 150]), fine=torch.zeros(2), dense_tokens=16,
        dense_macs=400, num_prefix=1,
    )  # fmt: skip
    rates = Rates(tflops=1e-9, gb_per_second=1e-3)
    for own, macs, tokens in ((work, 100, 8), (work.dense(), 400, 17)):
        found = lower_bounds(model, own, images(3), rates)
        assert found["matrix_ms"] == pytest.approx(3 * macs * 2)
        assert found["traffic_ms"] == pytest.approx(traffic(model, 3 * tokens, images(3)) / 1e3, abs=1e-3)


@pytest.mark.gpu
def test_memory_of_a_call_is_what_it_needs_beyond_what_is_there():
    x = torch.zeros(2**20, device="cuda")  # 4 MB
    before = bytes_held(x.device)
    kept = []

    def call(images):
        kept[:] = [kept[0] if kept else images.clone()]
        return images + (images + 1)

    call(x)
    assert measure_memory(call, x, before) == {"peak_mb": 12, "held_mb": 4, "call_mb": 8}
