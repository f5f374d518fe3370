"""Time is measured side by side, and every number says how."""

import pytest
import torch
from smoke_runs import smoke

from msvit.compiling.cpu import CpuMSViT
from msvit.lab.build import make_model
from msvit.lab.evaluation import latency
from msvit.lab.evaluation.latency import measure_latency


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


def test_both_sides_take_turns_on_the_same_images_and_other_ones_in_each_round(model, monkeypatch):
    seen = []

    def clock(call, device):
        ours = isinstance(call.func, CpuMSViT)
        seen.append((ours, call.args[0][:, 0, 0, 0].tolist(), call.func.mode if ours else None, call.func.training))
        call()
        return 0.25

    monkeypatch.setattr(latency, "clock", clock)
    images = torch.arange(6.0).view(6, 1, 1, 1).expand(6, 3, 64, 64)
    model = model.with_options(mode="masked")
    rows = measure_latency(model, images, batch=2, rounds=3)
    assert model.mode == "masked"
    assert [ours for ours, *_ in seen] == 3 * [True, False, False, True]
    assert [shown for _, shown, *_ in seen[::2]] == 2 * [[0, 1], [2, 3], [4, 5]]  # once to warm up
    assert [shown for _, shown, *_ in seen[::2]] == [shown for _, shown, *_ in seen[1::2]]
    assert {(mode, training) for _, _, mode, training in seen} == {("packed", False), (None, False)}
    assert [row.ms_per_image for row in rows] == [125, 125]  # 0.25 s for two


def test_a_speed_up_is_the_median_of_the_ratios_round_by_round(model, monkeypatch):
    """The machine gets slower from round to round: neighbours in time still compare."""
    num = iter(range(100))

    def clock(call, device):
        slower = 2.0 ** (next(num) // 2)
        return slower * (1.0 if isinstance(call.func, CpuMSViT) else 3.0)

    monkeypatch.setattr(latency, "clock", clock)
    ours, host = measure_latency(model, torch.zeros(2, 3, 64, 64), batch=1, rounds=5)
    assert (ours.speed_up, host.speed_up) == (3.0, None)


def test_a_host_of_another_size_is_not_timed(model):
    assert [row.what for row in measure_latency(model, torch.randn(1, 3, 32, 32), batch=1, rounds=2)] == ["packed"]


def test_what_cannot_be_measured_is_refused(model):
    with pytest.raises(ValueError, match="there are 2 images, but a batch of 4 was asked for"):
        measure_latency(model, torch.randn(2, 3, 64, 64), batch=4)
    with pytest.raises(ValueError, match="rounds is 1, but quartiles need at least 2"):
        measure_latency(model, torch.randn(2, 3, 64, 64), batch=2, rounds=1)
