"""A process that runs one command after the other."""

import json
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from multiprocessing import Pipe, active_children, get_start_method, set_start_method

import numpy as np
import pytest
from smoke_runs import smoke, write_images

from msvit_lab.build import make_loader, open_sources
from msvit_lab.data.cache import keep_decoded_in
from msvit_lab.data.sources import FileSource
from msvit_lab.worker import Worker, serve

TRAIN = ["train", "scenes", "--smoke", "--rounds", "0"]
LONG = ["--set", "optim.epochs=9000", "--set", "checkpoint_every=9000", "--set", "log_every=1"]


def only_child() -> int:
    (process,) = active_children()
    return process.pid


@pytest.mark.slow
def test_commands_share_a_process_until_it_dies_and_a_failure_is_its_last_line(tmp_path):
    log = tmp_path / "log.txt"
    with closing(Worker(tmp_path)) as worker:
        assert worker.run([*TRAIN, "--out", str(tmp_path / "a")], log) is None
        first = only_child()
        assert "latency" not in json.loads((tmp_path / "a/evaluations/val.json").read_text())
        assert "there is no setting" in worker.run([*TRAIN, "--set", "optim.l=1"], log)
        assert worker.run(["--version"], log) is None
        assert log.read_text().rstrip().splitlines()[-1].startswith("msvit ")
        assert only_child() == first
        with ThreadPoolExecutor(1) as thread:
            running = thread.submit(worker.run, [*TRAIN, *LONG, "--out", str(tmp_path / "b")], log)
            while not (tmp_path / "b/metrics.jsonl").is_file():
                assert not running.done(), running.result()
                time.sleep(0.02)
            os.kill(first, signal.SIGKILL)
            assert running.result().startswith("the process died with code -9; ")
        assert worker.run(["--version"], log) is None
        assert only_child() != first
    assert not active_children()


def test_loaders_start_their_processes_as_in_any_command(tmp_path, monkeypatch):
    """A spawned one imports everything again, one after the other: minutes on a machine with many cores."""
    ours, theirs = Pipe()
    ours.close()
    monkeypatch.setattr("msvit_lab.worker.end_with_parent", lambda: None)
    monkeypatch.setattr("msvit_lab.worker.signal.signal", lambda *_: None)
    set_start_method("spawn", force=True)  # as multiprocessing leaves it in a spawned process
    try:
        serve(theirs, tmp_path)
        assert get_start_method(allow_none=True) is None  # nothing but the default
    finally:
        set_start_method(None, force=True)


@pytest.mark.slow  # another start of a process
def test_a_process_that_dies_between_two_commands_fails_none(tmp_path):
    with closing(Worker(tmp_path)) as worker:
        assert worker.run(["--version"], tmp_path / "log.txt") is None
        os.kill(only_child(), signal.SIGKILL)
        while active_children():
            time.sleep(0.02)
        assert worker.run(["--version"], tmp_path / "log.txt") is None


@pytest.fixture
def images(tmp_path):
    for split in ("train", "val"):
        write_images(tmp_path / "images" / split)
    return tmp_path / "images"


@pytest.fixture
def num_read(monkeypatch):
    """How many images were read since the last call."""
    read = []
    kept = FileSource.__getitem__
    monkeypatch.setattr(FileSource, "__getitem__", lambda self, i: read.append(i) or kept(self, i))

    def num() -> int:
        found = len(read)
        read.clear()
        return found

    return num


def first_batch(images, seed: int):
    data = {"data__source": str(images), "data__cache": "true", "data__crops": "light", "data__workers": 0}
    plan = smoke(**data, seed=seed, optim__batch_size=4)
    loader = make_loader(open_sources(plan).train, plan, train=True, device="cpu")
    return next(loader.iterate(0)).image


def test_what_was_decoded_is_kept_for_the_next_run_and_not_beyond(images, num_read, tmp_path):
    alone = first_batch(images, 1)
    each = num_read()
    assert each >= 12
    with keep_decoded_in(tmp_path):
        first_batch(images, 0)
        assert num_read() == each
        assert np.array_equal(first_batch(images, 1), alone)  # another seed, the same images
        assert num_read() == 0
    first_batch(images, 0)
    assert num_read() == each


@pytest.mark.slow  # within one process: above
def test_what_one_process_has_decoded_the_others_need_not(images, num_read, tmp_path):
    settings = {"data.cache": "true", "data.crops": "light", "data.workers": "0", "optim.batch_size": "4"}
    given = [part for name, value in settings.items() for part in ("--set", f"{name}={value}")]
    with closing(Worker(tmp_path)) as worker:
        command = [*TRAIN, "--data", str(images), "--out", str(tmp_path / "a"), "--no-evaluate", *given]
        assert worker.run(command, tmp_path / "log.txt") is None
    alone = first_batch(images, 0)
    num_read()
    with keep_decoded_in(tmp_path):
        assert np.array_equal(first_batch(images, 0), alone)
    assert num_read() == 0
