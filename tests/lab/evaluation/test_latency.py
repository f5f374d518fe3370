"""Time is measured side by side, and every number says how."""

import pytest
import torch
from smoke_runs import smoke

from msvit.fast.cpu import CpuMSViT
from msvit_lab import timing
from msvit_lab.build import make_model
from msvit_lab.evaluation.latency import measure_latency


@pytest.fixture(scope="module")
def model():
    return make_model(smoke(), num_classes=8)


def test_rows_name_what_was_timed_and_how(model):
    rows = measure_latency(model, torch.randn(5, 3, 64, 64), batch=4, rounds=4)
    assert [row.what for row in rows] == ["packed", "dense host"]
    for row in rows:
        assert (row.batch, row.dtype) == (4, "float32")
        assert row.device == f"CPU, {torch.get_num_threads()} threads"
        low, high = row.quartiles
        assert 0 < low <= row.ms_per_image <= high
        assert row.images_per_second == pytest.approx(1e3 / row.ms_per_image, rel=0.01)
    assert measure_latency(model, torch.randn(1, 3, 64, 64), 1, torch.bfloat16, rounds=2)[0].dtype == "bfloat16"
    small = measure_latency(model, torch.randn(1, 3, 32, 32), batch=1, rounds=2)
    assert [row.what for row in small] == ["packed"], "the host takes no images of another size"


def test_both_sides_are_timed_on_the_same_images_and_compared_round_by_round(model, monkeypatch):
    """The machine gets slower from round to round: neighbours in time still compare."""
    seen = []

    def clock(call, device):
        ours, images = isinstance(call.func, CpuMSViT), call.args[0]
        seen.append((images[:, 0, 0, 0].tolist(), call.func.mode if ours else None, call.func.training))
        call()
        return 2.0 ** ((len(seen) - 1) // 2) * (0.25 if ours else 0.75)

    monkeypatch.setattr(timing, "clock", clock)
    images = torch.arange(6.0).view(6, 1, 1, 1).expand(6, 3, 64, 64)
    model = model.with_options(mode="masked")
    ours, host = measure_latency(model, images, batch=2, rounds=3)
    assert model.mode == "masked"
    pairs = [[0, 1], [2, 3], [4, 5]]
    assert [shown for shown, *_ in seen] == [pair for pair in pairs for _ in range(2)]
    assert {(mode, training) for _, mode, training in seen} == {("packed", False), (None, False)}
    assert (ours.speed_up, host.speed_up) == (3.0, None)
    assert ours.ms_per_image == 250  # 0.5 s for two
