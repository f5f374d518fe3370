"""A workload's record: multiply-adds of the images timed, the share that became time, and who failed."""

import json

import pytest
import torch

import msvit
from msvit.lab.bench import workload
from msvit.lab.bench.images import Pictures
from msvit.lab.bench.roofline import measure_rates
from msvit.lab.bench.rows import REDUCED, ROWS, Subject, check_rows, usual_rows
from msvit.lab.bench.summary import Work, summarise
from msvit.lab.bench.training import training_step
from msvit.lab.bench.workload import Options, Workload, count, measure, prepare
from msvit.lab.timing import Times

CPU = torch.device("cpu")
TINY = {
    f"model.options.{name}": str(value)
    for name, value in {"patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2, "num_classes": 5}.items()
}
WORK = Workload("vit_tiny_patch16_224", size=64, batch=4)


@pytest.fixture(scope="module")
def pictures():
    return Pictures()


def options(**changes):
    given = {"rows": ["dense", "packed"], "rounds": 20, "share": 0.4, "settings": TINY}
    return Options(device=CPU, dtype=torch.float32, **given | changes)


def test_the_ratio_of_multiply_adds_is_that_of_the_images_timed(pictures):
    ready = prepare(WORK, options(), pictures)
    model = ready.subject.wrap()
    own = torch.cat([msvit.macs(model, images) for images in ready.sets]).double().mean()
    all_fine = torch.ones(4, 4, 4)
    dense = msvit.macs(model, ready.sets[0], mask=all_fine)[0]
    found = measure(WORK, options(), pictures)
    assert found["mac_ratio"] == pytest.approx(float(dense / own), abs=1e-4)
    tokens = torch.cat([model(images).tokens.count for images in ready.sets])
    assert found["tokens"]["mean"] == pytest.approx(float(tokens.double().mean()), abs=0.01)
    assert found["fine_share"]["mean"] == pytest.approx(0.4, abs=0.02)
    assert {row["name"]: row["mac_ratio"] for row in found["rows"]} == {"dense": 1, "packed": found["mac_ratio"]}
    assert found["images"] == {"from": "scenes", "num": 16, "sets": 4, "unreadable": 0}


def test_no_image_is_timed_twice(pictures):
    ready = prepare(WORK, options(), pictures)
    images = torch.cat(ready.sets)
    assert len(images.flatten(1).unique(dim=0)) == len(images) == 16
    assert len(prepare(Workload(WORK.model, 64, 1), options(), pictures).sets) == 16
    assert len(prepare(Workload(WORK.model, 64, 1), options(rounds=3), pictures).sets) == 3  # no more than are timed


def work(macs):
    tokens = torch.tensor([10, 20])
    return Work(
        tokens=tokens, macs=torch.tensor(macs), fine=torch.tensor([0.0, 1.0]), dense_tokens=40, dense_macs=200,
        num_prefix=1,
    )  # fmt: skip


def test_the_share_is_the_speed_up_over_the_compiled_host_divided_by_the_ratio_of_multiply_adds():
    times = {
        "dense": Times(single=[8.0, 8.0, 8.0]), "dense compiled": Times(single=[6.0, 6.0, 6.0]),
        "packed": Times(single=[4.0, 4.0, 4.0]), "all fine accelerated": Times(single=[5.0, 5.0, 5.0]),
    }  # fmt: skip
    found = summarise(work([60, 100]), times, {}, {}, batch=2)
    rows = {row["name"]: row for row in found["rows"]}
    assert (found["mac_ratio"], found["baseline"], found["basis"]) == (2.5, "dense compiled", "single calls")
    assert rows["packed"]["speed_up"]["median"] == 1.5
    assert rows["packed"]["share"] == 0.6
    assert rows["all fine accelerated"]["share"] == rows["all fine accelerated"]["speed_up"]["median"] == 1.2
    assert rows["packed"]["images_per_second"] == 500
    without = summarise(work([60, 100]), {name: times[name] for name in ("dense", "packed")}, {}, {}, batch=2)
    assert (without["baseline"], without["rows"][1]["share"]) == ("dense", 0.8)


def test_calls_back_to_back_count_where_they_were_timed():
    times = {"dense": Times(single=[9.0, 9.0], burst=[4.0, 4.0]), "packed": Times(single=[9.0, 9.0], burst=[2.0, 2.0])}
    found = summarise(work([100, 100]), times, {}, {}, batch=1)
    assert found["basis"] == "calls back to back"
    assert (found["rows"][1]["share"], found["rows"][1]["images_per_second"]) == (1, 500)


def test_a_failing_row_is_told_and_the_others_go_on(pictures, monkeypatch):
    def fails(subject):
        raise torch.OutOfMemoryError("all gone")

    monkeypatch.setitem(workload.ROWS, "masked", fails)
    found = measure(WORK, options(rows=["dense", "masked", "trimmed", "packed"]), pictures)
    rows = {row["name"]: row for row in found["rows"]}
    assert list(rows) == ["dense", "masked", "trimmed", "packed"]
    assert rows["masked"] == {"name": "masked", "trouble": "OutOfMemoryError: all gone"}
    assert all(rows[name]["ms"]["median"] > 0 for name in ("dense", "trimmed", "packed"))


def test_without_a_baseline_that_ran_there_is_no_share(pictures, monkeypatch):
    monkeypatch.setitem(workload.ROWS, "dense", lambda subject: lambda images: {}[0])
    found = measure(WORK, options(), pictures)
    assert found["baseline"] is None
    assert found["rows"][0]["trouble"] == "KeyError: 0"
    assert (found["rows"][1]["speed_up"], found["rows"][1]["share"]) == (None, None)


def test_all_rows_but_the_host_give_the_packed_models_answer(pictures):
    ready = prepare(WORK, options(), pictures)
    images = ready.sets[0]
    with torch.inference_mode():
        want = ROWS["packed"](ready.subject)(images)
        for name in ("masked", "trimmed"):
            torch.testing.assert_close(ROWS[name](ready.subject)(images).logits, want.logits, atol=1e-4, rtol=1e-4)
        assert ROWS["dense"](ready.subject)(images).shape == want.logits.shape


def test_a_record_is_plain_json_with_every_field(pictures):
    found = measure(WORK, options(), pictures)
    assert json.loads(json.dumps(found)) == found
    assert found.keys() == {
        "model", "size", "batch", "train", "device", "dtype", "asked", "fine", "coarse", "images", "gate", "rates",
        "tokens",
        "fine_share", "gmacs", "mac_ratio", "baseline", "basis", "rounds", "rows",
    }  # fmt: skip
    for row in found["rows"]:
        assert row.keys() == {
            "name", "trouble", "ms", "burst_ms", "images_per_second", "speed_up", "mac_ratio", "share", "memory",
            "floors", "tokens", "tokens_share", "speed_up_over_all_tokens",
        }  # fmt: skip
        assert row["ms"].keys() == row["speed_up"].keys() == {"median", "low", "high"}


def test_a_training_step_reaches_gate_and_host_and_moves_nothing_of_note(pictures):
    train = Workload(WORK.model, 64, 4, train=True)
    found = measure(train, options(), pictures)
    assert [row["trouble"] for row in found["rows"]] == [None, None]
    assert found["fine_share"]["mean"] == pytest.approx(0.4, abs=0.06)

    ready = prepare(train, options(), pictures)
    assert ready.subject.host.training
    assert ready.subject.gate.training
    modules = {"host": ready.subject.host.blocks[0].mlp.fc1.weight, "gate": ready.subject.gate.head.weight}
    seen = {}
    for name, weight in modules.items():
        weight.register_hook(lambda grad, name=name: seen.update({name: float(grad.abs().sum())}))
    before = {name: weight.detach().clone() for name, weight in modules.items()}
    step = training_step(ROWS["packed"](ready.subject), ready.subject, ready.config, gated=True)
    step(ready.sets[0])
    assert seen["host"] > 0
    assert seen["gate"] > 0
    for name, weight in modules.items():
        assert weight.grad is None
        torch.testing.assert_close(weight, before[name], atol=1e-6, rtol=0)


def test_the_dense_step_leaves_the_gate_alone(pictures):
    ready = prepare(Workload(WORK.model, 64, 4, train=True), options(), pictures)
    seen = []
    ready.subject.host.blocks[0].mlp.fc1.weight.register_hook(lambda grad: seen.append("host"))
    ready.subject.gate.head.weight.register_hook(lambda grad: seen.append("gate"))
    training_step(ROWS["dense"](ready.subject), ready.subject, ready.config, gated=False)(ready.sets[0])
    assert seen == ["host"]


def test_decisions_are_counted_in_training_with_their_noise(pictures):
    ready = prepare(Workload(WORK.model, 64, 4, train=True), options(), pictures)
    first, second = (count(ready.subject.wrap(), ready.sets).tokens for _ in range(2))
    assert not torch.equal(first, second)
    ready.subject.host.eval()
    first, second = (count(ready.subject.wrap(), ready.sets).tokens for _ in range(2))
    assert torch.equal(first, second)


def test_rows_that_are_unknown_or_have_no_baseline_are_refused():
    with pytest.raises(ValueError, match=f"unknown row 'fast'; known: {', '.join(ROWS)}"):
        check_rows(["dense", "fast"])
    with pytest.raises(ValueError, match="nothing to be compared with; add one of dense compiled, dense"):
        check_rows(["packed", "masked"])
    assert check_rows(usual_rows(CPU, train=False)) == ["dense", "packed", "packed accelerated"]
    assert usual_rows(torch.device("cuda"), train=False) == [name for name in ROWS if name not in REDUCED]
    assert usual_rows(CPU, train=True) == ["dense", "packed"]


@pytest.mark.parametrize("train", [False, True])
def test_a_row_that_changes_the_mode_of_shared_parts_changes_it_for_itself_only(pictures, monkeypatch, train):
    seen = []

    def changes(subject):
        subject.wrap().train(not train)
        return ROWS["packed"](subject).train(not train)

    def looks(subject):
        model = subject.wrap()
        return lambda images: seen.append((model.training, model.host.training, model.gate.training)) or model(images)

    for name, row in (("masked", changes), ("trimmed", looks)):
        monkeypatch.setitem(workload.ROWS, name, row)
    found = measure(Workload(WORK.model, 64, 4, train=train), options(rows=["dense", "masked", "trimmed"]), pictures)
    assert [row["trouble"] for row in found["rows"]] == [None, None, None]
    assert {modes[1:] for modes in seen} == {(train, train)}


def test_the_gate_may_be_any_that_fits(pictures):
    for gate in ("gradient", "disc"):
        found = measure(WORK, options(gate=gate, share=0.25), pictures)
        assert found["gate"] == gate
        assert found["fine_share"]["mean"] == pytest.approx(0.25, abs=0.02)
    assert isinstance(prepare(WORK, options(gate="disc"), pictures).subject, Subject)


@pytest.mark.parametrize("gate", ["learned", pytest.param("disc", marks=pytest.mark.slow)])
def test_reducers_are_timed_at_the_cost_of_the_gate_alone(pictures, gate):
    """Plain and with a gate that leaves more tokens: within what the rounding of counts to whole tokens allows."""
    names = ["evit", "dynamicvit", "tome"]
    settings = TINY | {"model.options.depth": "8"}
    found = measure(WORK, options(reducers=names, gate=gate, share=0.3, settings=settings, rounds=4), pictures)
    rows = {row["name"]: row for row in found["rows"]}
    assert list(rows) == ["dense", "packed", *(row for name in names for row in (name, f"{name} gated"))]
    assert all(row["trouble"] is None for row in rows.values())
    for name in REDUCED:
        assert rows[name]["mac_ratio"] == pytest.approx(found["mac_ratio"], rel=0.06 if gate == "learned" else 0.2)
        assert rows[name]["mac_ratio"] >= 0.999 * found["mac_ratio"], "never more work than the gate leaves"
    assert json.loads(json.dumps(found)) == found


def test_reducers_can_be_timed_at_a_rate(pictures):
    found = measure(WORK, options(reducers=["tome"], rate=0.9, rounds=4), pictures)
    ratios = {row["name"]: row["mac_ratio"] for row in found["rows"]}
    model = msvit.convert(prepare(WORK, options(), pictures).subject.host, reducer=msvit.ToMe(rate=0.9))
    grid = msvit.ScaleGrid(8 * model.fine, 8 * model.fine, fine=model.fine, coarse=model.coarse)
    dense, reduced = (model.backbone.dense_macs(grid, each) for each in (None, model.reducer))
    assert ratios["tome"] == pytest.approx(dense / reduced, abs=1e-4)
    assert ratios["tome gated"] > ratios["packed"]
    with pytest.raises(ValueError, match="inference only; leave it out"):
        measure(Workload(WORK.model, 64, 4, train=True), options(reducers=["tome"]), pictures)


@pytest.mark.gpu
@pytest.mark.parametrize("train", [False, True])
def test_on_a_gpu_memory_floors_and_calls_back_to_back_are_there(pictures, train):
    cuda = torch.device("cuda")
    rows = ["dense", "masked", "trimmed", "packed"]
    gpu = Options(device=cuda, dtype=torch.bfloat16, rounds=4, settings=TINY, rows=rows)
    found = measure(Workload(WORK.model, 64, 4, train=train), gpu, pictures, measure_rates(cuda))
    assert found["basis"] == "calls back to back"
    for row in found["rows"]:
        assert row["trouble"] is None
        assert row["memory"]["call_mb"] > 0
        assert row["burst_ms"]["median"] > 0
        assert (row["floors"] is not None) == (not train and row["name"] in ("dense", "packed"))
