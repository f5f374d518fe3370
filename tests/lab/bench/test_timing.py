"""Rows take turns on the same images, and one that fails stops no other; every time says how it was taken."""

import pytest
import torch
from smoke_runs import smoke

from msvit.fast.cpu import CpuMSViT
from msvit_lab import timing
from msvit_lab.build import make_model
from msvit_lab.evaluation.latency import measure_latency
from msvit_lab.timing import error_line, speed_up, spread, take_turns, time_all

CPU = torch.device("cpu")


def sets(num):
    return [torch.full((1, 1, 1, 1), float(i)) for i in range(num)]


def test_rows_take_turns_in_alternating_order_on_the_same_images_of_a_round():
    seen = []
    calls = {name: lambda images, name=name: seen.append((name, int(images))) for name in "abc"}
    times = take_turns(calls, sets(2), device=CPU, rounds=3)
    assert [name for name, _ in seen] == ["c", "b", "a", "a", "b", "c", "a", "b", "c"]
    assert [number for _, number in seen] == [0, 0, 0, 1, 1, 1, 0, 0, 0]
    assert all(len(own.single) == 3 and not own.burst and own.error is None for own in times.values())


def test_a_row_that_fails_stops_alone_and_is_an_error_where_all_are_needed():
    def fails(images):
        if int(images) == 1:
            raise RuntimeError("out of\n memory")

    times = take_turns({"good": int, "bad": fails}, sets(2), device=CPU, rounds=5)
    assert times["bad"].error == "RuntimeError: out of memory"
    assert (len(times["bad"].single), len(times["good"].single)) == (1, 5)
    assert error_line(KeyError()) == "KeyError"
    left = iter(range(3))  # calls of the warm-up
    with pytest.raises(ValueError, match=r"bad cannot be timed here \(StopIteration\); .* --batch"):
        time_all({"good": int, "bad": lambda images: next(left)}, sets(1), device=CPU, rounds=2)


def test_a_speed_up_is_the_median_of_neighbours_so_that_drift_cancels():
    assert speed_up([2.0, 20.0, 200.0, 2000.0], [1.0, 10.0, 100.0, 1000.0]) == (2, 2, 2)
    assert spread([4.0, 1.0, 3.0, 2.0, 5.0])._asdict() == {"median": 3, "low": 1.5, "high": 4.5}
    with pytest.raises(ValueError, match="shorter"):
        speed_up([1.0, 2.0], [1.0])


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
