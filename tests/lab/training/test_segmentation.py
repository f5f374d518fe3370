"""Training a Segmenter: the same loop, the gate of another run, and a gate that learns from label maps."""

import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from smoke_runs import command, lines, smoke

import msvit
from msvit.lab.build import make_loader, make_model, open_sources
from msvit.lab.config import Config, override
from msvit.lab.sweep import grid
from msvit.lab.tasks import TASKS
from msvit.lab.training import loop
from msvit.lab.training.loop import train
from msvit.lab.training.optimizer import make_optimizer, rate
from msvit.lab.training.state import read_step
from msvit.losses.targets import edge_cells
from msvit.segmenter import Segmenter
from msvit.types import IGNORE

SEGMENT = {"task": "segment", "data.scales": "1,1.2", "data.max_share": "1", "model.mode": "packed"}
EDGES = {"gate.loss": "edges", "gate.target": "0.25", "gate.weight": "1", "optim.epochs": "3"}


def config(**changes: str) -> Config:
    return override(smoke(), SEGMENT | {name.replace("__", "."): value for name, value in changes.items()})


def test_a_segmenter_learns(tmp_path):
    """Four scenes by heart: 85 % of their pixels are ground, which is found at once; the classes of objects follow."""
    few = {"data__num_train": "4", "optim__batch_size": "4", "data__photometric": "false", "data__num_val": "4"}
    few |= {"optim__epochs": "45", "eval_every": "45", "optim__lr": "3e-3"}
    train(config(model__gate="none", **few), tmp_path, quiet=True)
    found = lines(tmp_path, "train")
    assert found[-1]["task"] < 0.2 * found[0]["task"]
    assert found[-1]["accuracy"] > 0.94
    score = lines(tmp_path, "eval")[-1]
    assert 0 < score["miou"] < score["pixel_accuracy"]
    assert isinstance(msvit.load(tmp_path / "model"), Segmenter)


@pytest.mark.slow  # how the threshold follows: test_edges.py
@pytest.mark.parametrize("target", ["0.25", "0.5"])
def test_with_the_edges_loss_the_share_of_fine_cells_comes_to_the_target(tmp_path, target):
    train(config(**EDGES | {"gate.target": target, "optim.epochs": "60"}), tmp_path, quiet=True)
    found = [line["fine"] for line in lines(tmp_path, "train")]
    assert found[0] == 1
    assert abs(sum(found[80:]) / 40 - float(target)) < 0.05
    gate = msvit.load(tmp_path / "model").gate
    assert gate.threshold == load_file(tmp_path / "checkpoint.safetensors")["gate_loss.threshold"].item()


@pytest.mark.slow
def test_the_gate_learns_where_edges_are(tmp_path):
    """Of a cell with an edge and one without, it gives the one with the edge the higher score; chance is a half."""
    changes = EDGES | {"optim.epochs": "40", "optim.lr": "3e-3", "data.photometric": "false"}
    plan = config(**changes)
    train(plan, tmp_path, quiet=True)
    gate = msvit.load(tmp_path / "model").gate
    loader = make_loader(open_sources(plan).train, plan, train=True, device=torch.device("cpu"))
    with torch.no_grad():
        found = [(gate(batch.image).logits, edge_cells(batch.label, gate.coarse)) for batch in loader.iterate(0)]
    score, edge = (torch.cat(column).flatten() for column in zip(*found, strict=True))
    assert (score[edge == 1][:, None] > score[edge == 0]).float().mean() > 0.75


@pytest.mark.parametrize(
    "more", [pytest.param({}, marks=pytest.mark.slow), {"optim.ema": "0.9", "optim.accumulate": "2"}]
)
def test_a_stopped_run_goes_on_to_the_bit_its_threshold_included(tmp_path, monkeypatch, more):
    plan = config(**EDGES | {"checkpoint_every": "1"} | more)
    train(plan, tmp_path / "whole", quiet=True)
    kept, seen = loop.measure, []

    def measure(*args):
        seen.append(args)
        if len(seen) == 4:
            raise RuntimeError("the power went off")
        return kept(*args)

    monkeypatch.setattr(loop, "measure", measure)
    with pytest.raises(RuntimeError, match="power"):
        train(plan, tmp_path / "cut", quiet=True)
    monkeypatch.undo()
    train(plan, tmp_path / "cut", resume=True, quiet=True)
    assert lines(tmp_path / "cut") == lines(tmp_path / "whole")
    one, other = (load_file(tmp_path / name / "model/model.safetensors") for name in ("whole", "cut"))
    assert all(torch.equal(one[key], other[key]) for key in one)
    gates = [msvit.load(tmp_path / name / "model").gate for name in ("whole", "cut")]
    assert gates[0].threshold == gates[1].threshold


@pytest.mark.parametrize("saved", ["run", "gate"])
def test_a_gate_of_another_task_is_taken_frozen(tmp_path, saved):
    source = train(smoke(gate__warmup_epochs=0, gate__lr_scale=3), tmp_path / "classified", quiet=True)
    gate = msvit.load(source / "model").gate
    if saved == "gate":
        source = msvit.save_gate(gate, tmp_path / "gate")
    plan = config(model__gate_from=str(source), model__freeze_gate="true", optim__epochs="2")
    train(plan, tmp_path / "run", quiet=True)
    model = msvit.load(tmp_path / "run/model")
    for name, value in gate.state_dict().items():
        assert torch.equal(model.gate.state_dict()[name], value), name
    assert "gate" not in lines(tmp_path / "run", "train")[0]  # nothing pulls at it


def test_a_gate_of_another_task_may_learn_on(tmp_path):
    source = train(smoke(), tmp_path / "classified", quiet=True)
    gate = msvit.load(source / "model").gate
    train(config(**EDGES, model__gate_from=str(source)), tmp_path / "run", quiet=True)
    after = msvit.load(tmp_path / "run/model").gate
    assert not torch.equal(after.answer.weight, gate.answer.weight)
    assert after.noise == 0.0  # it is told where edges are


def test_a_gate_that_learned_edges_takes_its_decisions_along_to_other_losses(tmp_path):
    source = train(config(**EDGES), tmp_path / "edges", quiet=True)
    before = msvit.load(source / "model").gate
    before.threshold = 2.0
    msvit.save_gate(before, tmp_path / "gate")
    gate = make_model(config(model__gate_from=str(tmp_path / "gate"), gate__loss="gbas"), 9).gate.eval()
    image = torch.randn(4, 3, 64, 64)
    assert gate.threshold == 0
    with torch.no_grad():
        assert torch.equal(gate(image).mask, before(image).mask)
        assert torch.equal(gate(image).fine_prob > 0.5, gate(image).mask > 0.5)  # what the losses see is what is done


def test_a_gate_from_elsewhere_and_another_kind_of_gate_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"model\.gate_from is .*, but model\.gate is none; give one of them"):
        config(model__gate_from="runs/one", model__gate="none")


def test_dense_runs_of_a_sweep_with_a_gate_from_elsewhere_stay_dense():
    changes = SEGMENT | {"model.gate_from": "runs/one", "model.freeze_gate": "true"}
    jobs = {job.name: job for job in grid("scenes", [0.5], [1.0], [64], gates=["disc"], shares=[0.3], changes=changes)}
    made = {name: override(smoke(), job.changes).model for name, job in jobs.items()}
    assert (made["dense-64-s0"].gate, made["dense-64-s0"].gate_from) == ("none", None)
    assert (made["disc-0.3-s0"].gate, made["disc-0.3-s0"].gate_from) == ("disc", None)
    assert (made["t0.5-w1-s0"].gate, made["t0.5-w1-s0"].gate_from) == ("learned", "runs/one")


def test_settings_that_belong_together_come_in_any_order():
    plan = override(smoke(), {"model.freeze_gate": "true", "model.gate_from": "runs/one"})
    assert plan.model.freeze_gate


def test_what_was_learned_survives_an_evaluation_that_fails(tmp_path, monkeypatch):
    def fails(*_):
        raise RuntimeError("out of memory")

    plan = config(checkpoint_every="20")
    monkeypatch.setattr(loop, "quick_score", fails)
    with pytest.raises(RuntimeError, match="out of memory"):
        train(plan, tmp_path, quiet=True)
    monkeypatch.undo()
    assert read_step(tmp_path / "checkpoint.safetensors") == 2
    train(plan, tmp_path, resume=True, quiet=True)
    assert (tmp_path / "model/model.safetensors").is_file()
    assert [line["step"] for line in lines(tmp_path, "train")] == [1, 2]  # none was done again


def test_windows_that_leave_gaps_are_refused_before_training(tmp_path):
    with pytest.raises(ValueError, match="gaps"):
        train(config(data__stride="1000"), tmp_path, quiet=True)
    assert not (tmp_path / "metrics.jsonl").exists()


def test_a_batch_without_labels_costs_nothing_and_the_others_their_mean():
    task = TASKS["segment"]
    logits = torch.randn(2, 5, 4, 4)
    label = torch.randint(0, 5, (2, 4, 4))
    torch.testing.assert_close(task.loss(logits, label, 0.1), F.cross_entropy(logits, label, label_smoothing=0.1))
    label[0] = IGNORE
    torch.testing.assert_close(task.loss(logits, label, 0.0), F.cross_entropy(logits[1:], label[1:]))
    assert task.loss(logits, torch.full_like(label, IGNORE), 0.0) == 0


def test_one_class_is_refused_before_training():
    with pytest.raises(ValueError, match="num_classes is 1, but must be a whole number >= 2"):
        make_model(config(), 1)


def test_a_gate_that_knows_other_colours_is_refused(tmp_path):
    source = train(smoke(data__mean="0.4,0.5,0.5"), tmp_path / "classified", quiet=True)
    with pytest.raises(ValueError, match=r"trained with mean \(0\.4, 0\.5, 0\.5\).*set data\.mean and data\.std"):
        make_model(config(model__gate_from=str(source)), 9)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model.freeze_gate": "true"}, "give one with --gate-from"),
        ({"task": "classify", "gate.loss": "edges"}, "which needs label maps"),
        ({"data.max_share": "0"}, r"data\.max_share is 0\.0, but must be in \(0, 1\]"),
        ({"model.decoder": "big"}, "one of mask, linear"),
    ],
)
def test_what_cannot_be_meant_is_refused(changes, words):
    values = SEGMENT | changes
    with pytest.raises(ValueError, match=words):
        override(smoke(), values)


def test_the_decoder_has_a_learning_rate_of_its_own():
    plan = config(optim__head_scale="20", optim__lr="1e-4", model__decoder="mask")
    model = make_model(plan, 9)
    peaks = {}
    for group in make_optimizer(plan, model, None).param_groups:
        peaks |= {id(p): group["peak"] for p in group["params"]}
    assert {peaks[id(p)] for p in model.decoder.parameters()} == {20 * 1e-4}
    encoder = [p for p in model.host.parameters() if p.requires_grad]
    assert {peaks[id(p)] for p in encoder} == {1e-4}
    everything = [p for p in model.parameters() if p.requires_grad]
    assert len(peaks) == len(everything)  # each once


def test_poly_falls_to_the_floor():
    rates = [rate(step, 100, 0.0, 1.0, 0.1, "poly") for step in range(100)]
    assert rates[0] == 1.0
    assert rates[50] == pytest.approx(0.1 + 0.9 * 0.5**0.9)
    assert sorted(rates, reverse=True) == rates


@pytest.mark.slow
def test_two_processes_segment_as_one(tmp_path):
    """Unused heads, the threshold and mIoU over processes."""
    values = SEGMENT | EDGES | {"optim.name": "sgd", "optim.lr": "0.1", "optim.warmup_epochs": "0", "eval_every": "1"}
    settings = [part for name, value in values.items() for part in ("--set", f"{name}={value}")]
    found = command("train", "scenes", "--smoke", *settings, "--no-evaluate", "--out", tmp_path / "two")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "msvit"]
    found["args"] = torchrun + found["args"][3:]
    done = subprocess.run(**found, capture_output=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    train(override(smoke(), values), tmp_path / "one", quiet=True)
    for ours, theirs in zip(lines(tmp_path / "one"), lines(tmp_path / "two"), strict=True):
        for key in ("gate", "miou", "pixel_accuracy"):
            if key in ours:
                assert theirs[key] == pytest.approx(ours[key], rel=1e-4), key
    gates = [msvit.load(tmp_path / name / "model").gate for name in ("one", "two")]
    assert gates[0].threshold == pytest.approx(gates[1].threshold, rel=1e-4)  # of the whole batch
