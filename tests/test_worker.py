"""A process that runs one command after the other."""

import json

import numpy as np
import pytest
from smoke_runs import smoke, write_images

from msvit.data.sources import FileSource
from msvit.data.workers import keeping
from msvit.training.build import make_loader, open_sources
from msvit.worker import Worker


@pytest.fixture
def worker():
    worker = Worker()
    yield worker
    worker.close()


def test_commands_run_in_one_process_and_a_failure_leaves_its_last_words(worker, tmp_path):
    log = tmp_path / "log.txt"
    assert worker.run(["train", "scenes", "--smoke", "--out", str(tmp_path / "a"), "--rounds", "0"], log) is None
    first = worker.process
    assert json.loads((tmp_path / "a/eval.json").read_text())["latency"] == []
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


def test_a_process_that_dies_over_a_command_says_so(worker, tmp_path, monkeypatch):
    monkeypatch.setattr("msvit.worker.PROGRAM", "import sys; sys.stdin.readline(); sys.exit(7)")
    (tmp_path / "log.txt").write_text("epoch 1\n")
    assert worker.run(["--version"], tmp_path / "log.txt") == "the process died with code 7; epoch 1"


def test_what_was_decoded_is_kept_for_the_next_run_and_not_beyond(tmp_path, monkeypatch):
    for split in ("train", "val"):
        write_images(tmp_path / split)
    read = []
    kept = FileSource.__getitem__
    monkeypatch.setattr(FileSource, "__getitem__", lambda self, i: read.append(i) or kept(self, i))

    def run(seed: int):
        plan = smoke(data__source=str(tmp_path), data__cache="true", data__crops="light", data__workers=0, seed=seed)
        loader = make_loader(open_sources(plan).train, plan, train=True, device="cpu", drop_last=False)
        return next(loader.iterate(0)).image

    def num_read() -> int:
        num = len(read)
        read.clear()
        return num

    alone = run(1)
    each = num_read()
    assert each >= 12
    with keeping():
        run(0)
        assert num_read() == each
        assert np.array_equal(run(1), alone)  # another seed, the same images
        assert num_read() == 0
    run(0)
    assert num_read() == each
