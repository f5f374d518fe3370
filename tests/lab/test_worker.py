"""A process that runs one command after the other."""

import json
import subprocess
import sys
import time

import numpy as np
import pytest
from smoke_runs import command, lines, smoke, write_images

from msvit.lab.build import make_loader, open_sources
from msvit.lab.data.cache import keeping
from msvit.lab.data.sources import FileSource
from msvit.lab.folder_lock import LOCK, exists, find_holder
from msvit.lab.training.state import read_step
from msvit.lab.worker import Worker


@pytest.fixture(scope="module")
def decoded(tmp_path_factory):
    return tmp_path_factory.mktemp("decoded")


@pytest.fixture(scope="module")
def worker(decoded):
    """One for all: a process takes some seconds to start."""
    worker = Worker(decoded)
    yield worker
    worker.close()


def test_commands_run_in_one_process_and_a_failure_leaves_its_last_words(worker, tmp_path):
    log = tmp_path / "log.txt"
    assert worker.run(["train", "scenes", "--smoke", "--out", str(tmp_path / "a"), "--rounds", "0"], log) is None
    first = worker.process
    assert "latency" not in json.loads((tmp_path / "a/evaluations/val.json").read_text())
    assert "there is no setting" in worker.run(["train", "scenes", "--smoke", "--set", "optim.l=1"], log)
    assert worker.run(["--version"], log) is None
    assert worker.process is first
    assert log.read_text().rstrip().splitlines()[-1].startswith("msvit ")


def test_a_process_that_dies_is_replaced(worker, tmp_path):
    log = tmp_path / "log.txt"
    assert worker.run(["--version"], log) is None
    worker.process.kill()
    worker.process.wait()
    assert worker.run(["--version"], log) is None  # a new one


def test_a_process_that_dies_over_a_command_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr("msvit.lab.worker.PROGRAM", "import sys; sys.stdin.readline(); sys.exit(7)")
    (tmp_path / "log.txt").write_text("epoch 1\n")
    worker = Worker(tmp_path)
    assert worker.run(["--version"], tmp_path / "log.txt") == "the process died with code 7; epoch 1"
    worker.close()


PARENT = """
import sys
from pathlib import Path
from msvit.lab.worker import Worker
Worker(Path(sys.argv[1])).run(sys.argv[2:], Path(sys.argv[1], "log.txt"))
"""


@pytest.mark.slow  # and as a sweep: test_sweep.py
def test_a_process_ends_with_its_parent_and_saves_before(tmp_path):
    run = tmp_path / "run"
    settings = ["--set", "optim.epochs=4000", "--set", "checkpoint_every=4000", "--set", "log_every=1"]
    arguments = ["train", "scenes", "--smoke", "--out", str(run), *settings]
    parent = command()
    parent["args"] = [sys.executable, "-c", PARENT, str(tmp_path), *arguments]
    process = subprocess.Popen(**parent)
    end = time.monotonic() + 240
    try:
        while not (run / "metrics.jsonl").is_file() or len(lines(run)) < 3:
            assert time.monotonic() < end
            time.sleep(0.02)
        worker = find_holder(run)
        assert worker.pid != process.pid
    finally:
        process.kill()
        process.wait()
    while exists(worker) is not False:
        assert time.monotonic() < end, "the worker goes on without its parent"
        time.sleep(0.02)
    assert not (run / LOCK).exists()
    assert read_step(run / "checkpoint.safetensors") == lines(run, "train")[-1]["step"]
    assert f"go on with --resume --out {run}" in (tmp_path / "log.txt").read_text().replace("\n", "")


@pytest.fixture
def images(tmp_path):
    for split in ("train", "val"):
        write_images(tmp_path / "images" / split)
    return tmp_path / "images"


@pytest.fixture
def num_read(monkeypatch):
    """How many images were read since it was asked last."""
    read = []
    kept = FileSource.__getitem__
    monkeypatch.setattr(FileSource, "__getitem__", lambda self, i: read.append(i) or kept(self, i))

    def num() -> int:
        found = len(read)
        read.clear()
        return found

    return num


def first_batch(images, seed: int):
    plan = smoke(data__source=str(images), data__cache="true", data__crops="light", data__workers=0, seed=seed)
    loader = make_loader(open_sources(plan).train, plan, train=True, device="cpu", drop_last=False)
    return next(loader.iterate(0)).image


def test_what_was_decoded_is_kept_for_the_next_run_and_not_beyond(images, num_read, tmp_path):
    alone = first_batch(images, 1)
    each = num_read()
    assert each >= 12
    with keeping(tmp_path):
        first_batch(images, 0)
        assert num_read() == each
        assert np.array_equal(first_batch(images, 1), alone)  # another seed, the same images
        assert num_read() == 0
    first_batch(images, 0)
    assert num_read() == each


@pytest.mark.slow  # within one process: above
def test_what_one_process_has_decoded_the_others_need_not(worker, decoded, images, num_read, tmp_path):
    settings = {"data.cache": "true", "data.crops": "light", "data.workers": "0", "optim.batch_size": "4"}
    given = [part for name, value in settings.items() for part in ("--set", f"{name}={value}")]
    command = ["train", "scenes", "--smoke", "--data", str(images), "--out", str(tmp_path / "a"), "--no-evaluate"]
    assert worker.run([*command, *given], tmp_path / "log.txt") is None
    alone = first_batch(images, 0)
    num_read()
    with keeping(decoded):
        assert np.array_equal(first_batch(images, 0), alone)
    assert num_read() == 0
