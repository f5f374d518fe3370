"""Two processes train as one."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from smoke_runs import EDGES, command, lines, num_lines, smoke, wait_for

import msvit
from msvit_lab.training.loop import train
from msvit_lab.training.state import read_step

# Noise differs between processes by design, so the comparison is without it.
SETTINGS = {"gate.noise": "0", "gate.warmup_epochs": "0", "optim.epochs": "3", "eval_every": "1"}
SETTINGS |= {"optim.name": "sgd", "optim.lr": "0.1", "optim.warmup_epochs": "0"}
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "msvit"]


def run_two(values: dict[str, str], run: Path, *options: str) -> Path:
    settings = [part for name, value in values.items() for part in ("--set", f"{name}={value}")]
    found = command("train", "scenes", "--smoke", *settings, "--out", run, *options)
    found["args"] = TORCHRUN + found["args"][3:]
    done = subprocess.run(**found, capture_output=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr
    return run


@pytest.mark.slow  # every day: their loss and gradients (test_distributed.py), their images (test_batches.py)
def test_two_processes_have_the_loss_curve_of_one(tmp_path):
    run = run_two(SETTINGS, tmp_path / "two")
    train(smoke(**SETTINGS), tmp_path / "one", quiet=True)
    one, two = lines(tmp_path / "one"), lines(run)
    assert len(one) == len(two) == 13
    assert one[-3]["loss"] < 0.95 * one[1]["loss"]  # a curve, not a line
    for ours, theirs in zip(one, two, strict=True):
        assert ours.keys() == theirs.keys()
        for key in ours.keys() - {"kind"}:
            torch.testing.assert_close(torch.tensor(theirs[key]), torch.tensor(ours[key]), rtol=1e-4, atol=1e-6)
    assert (run / "evaluations/val.json").is_file()


@pytest.mark.slow
def test_two_processes_segment_as_one(tmp_path):
    """Unused heads, the threshold and mIoU over processes."""
    values = EDGES | {"gate.target": "0.25", "gate.weight": "1", **SETTINGS}
    run_two(values, tmp_path / "two", "--no-evaluate")
    train(smoke(**values), tmp_path / "one", quiet=True)
    for ours, theirs in zip(lines(tmp_path / "one"), lines(tmp_path / "two"), strict=True):
        for key in ours.keys() & {"gate", "miou", "pixel_accuracy"}:
            assert theirs[key] == pytest.approx(ours[key], rel=1e-4), key
    gates = [msvit.load(tmp_path / name / "model").gate for name in ("one", "two")]
    assert gates[0].threshold == pytest.approx(gates[1].threshold, rel=1e-4)  # of the whole batch


@pytest.mark.slow
def test_ctrl_c_reaches_every_process_and_both_stop_at_one_step(tmp_path):
    found = command("train", "scenes", "--smoke", "--set", "optim.epochs=400", "--out", tmp_path / "run")
    found["args"] = TORCHRUN + found["args"][3:]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "start_new_session": True}
    process = subprocess.Popen(**found, **pipes)
    try:
        wait_for(lambda: num_lines(tmp_path / "run") >= 8)
    finally:
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does: torchrun too, which passes it on once more
    output = process.communicate(timeout=60)[0]
    assert "interrupted at step" in output
    assert read_step(tmp_path / "run/checkpoint.safetensors") == lines(tmp_path / "run", "train")[-1]["step"]
