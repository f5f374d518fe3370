"""One process at a time writes into a folder, and a lock outlives its holder by little."""

import json
import os
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from threading import Barrier

import pytest
from smoke_runs import smoke, wait_for

from msvit_lab import folder_lock
from msvit_lab.folder_lock import LOCK, VOID, acquire, find_holder, locked, temporary_folder, this_process
from msvit_lab.training.loop import train


@pytest.fixture
def ended() -> int:
    """The number of a process that is no more."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def write_lock(folder, seconds_ago=0.0, **changes):
    (folder / LOCK).write_text(json.dumps(asdict(replace(this_process(), **changes))))
    then = time.time() - seconds_ago
    os.utime(folder / LOCK, (then, then))


def everything(folder):
    found = [folder, *folder.rglob("*")]
    return {path: (path.stat().st_mtime_ns, path.is_file() and path.read_bytes()) for path in found}


def test_the_second_gets_the_name_of_the_first_and_changes_nothing(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    with locked(run):
        before = everything(run)
        words = f"run is in use by process {os.getpid()} on {re.escape(this_process().host)}; wait for its end"
        with pytest.raises(ValueError, match=words):
            acquire(run)
        with pytest.raises(ValueError, match=words):
            train(smoke(), run, quiet=True)
        assert everything(run) == before
    assert not list(run.iterdir())
    train(smoke(), run, quiet=True)
    assert not (run / LOCK).exists()


def test_a_lock_ends_with_its_process_or_a_restart_of_the_machine(tmp_path, ended, monkeypatch):
    monkeypatch.setattr(folder_lock, "this_process", lambda: replace(this_process(), machine="this one"))
    here = folder_lock.this_process()
    for changes, holds in [
        ({}, True),
        ({"pid": ended}, False),
        ({"started": "1"}, not here.started),  # its number is another process now; unless the system reports no times
        ({"boot": "before"}, False),
        ({"boot": "before", "machine": "another of the same name"}, True),
    ]:
        write_lock(tmp_path, **({"machine": "this one"} | changes))
        assert (find_holder(tmp_path) is not None) == holds, changes
    write_lock(tmp_path, pid=ended)
    with locked(tmp_path) as lock:
        assert lock.is_held
    assert not list(tmp_path.iterdir())


def test_on_another_machine_the_last_touch_decides(tmp_path, ended):
    write_lock(tmp_path, seconds_ago=VOID - 60, pid=ended, host="node7")
    words = rf"process {ended} on node7 \(its last sign of life was 5\d\d s ago; after 600 s without one its lock is"
    with pytest.raises(ValueError, match=words):
        train(smoke(), tmp_path, quiet=True)
    assert [path.name for path in tmp_path.iterdir()] == [LOCK]
    write_lock(tmp_path, seconds_ago=VOID + 60, host="node7")
    with locked(tmp_path) as lock:
        assert find_holder(tmp_path) == lock.holder


def test_a_lock_that_was_not_written_whole_goes_by_its_age(tmp_path):
    (tmp_path / LOCK).write_text('{"pid": 3')
    assert find_holder(tmp_path) is not None
    os.utime(tmp_path / LOCK, (0, 0))
    with locked(tmp_path):
        pass


def test_the_holder_touches_its_lock(tmp_path, monkeypatch):
    monkeypatch.setattr(folder_lock, "TOUCHED", 0.01)
    with locked(tmp_path):
        os.utime(tmp_path / LOCK, (0, 0))
        wait_for(lambda: (tmp_path / LOCK).stat().st_mtime > 0, seconds=20)


def test_a_holder_whose_lock_was_taken_over_writes_no_more(tmp_path, monkeypatch):
    """Two on different machines, of which the first slept for too long."""
    kept = folder_lock.Lock.check

    def lose(self):
        write_lock(tmp_path / "run", host="node7", pid=12)
        kept(self)

    monkeypatch.setattr(folder_lock.Lock, "check", lose)
    with pytest.raises(ValueError, match=r"was taken over by process 12 on node7: nothing more is written"):
        train(smoke(), tmp_path / "run", quiet=True)
    assert not (tmp_path / "run/checkpoint.safetensors").exists()
    assert find_holder(tmp_path / "run").host == "node7", "it does not remove what is not its own"


def test_of_many_that_find_a_void_lock_one_gets_it(tmp_path, ended, monkeypatch):
    """Each with a token of its own, as processes have it, and slow between its look and its claim."""
    together, look = Barrier(12), folder_lock.check_free
    monkeypatch.setattr(folder_lock, "check_free", lambda folder: (look(folder), time.sleep(0.01))[0])

    def contend(_):
        together.wait()
        try:
            return acquire(tmp_path)
        except ValueError:
            return None

    for _ in range(3):
        write_lock(tmp_path, pid=ended)
        with ThreadPoolExecutor(12) as threads:
            found = [lock for lock in threads.map(contend, range(12)) if lock is not None]
        assert len(found) == 1
        found[0].release()
    assert not list(tmp_path.iterdir())


def test_a_lock_that_became_another_since_it_was_found_void_stays(tmp_path, ended, monkeypatch):
    write_lock(tmp_path, pid=ended)
    kept = folder_lock.writing_beside

    def meanwhile(path):
        monkeypatch.setattr(folder_lock, "writing_beside", kept)
        write_lock(tmp_path, host="node7")
        return kept(path)

    monkeypatch.setattr(folder_lock, "writing_beside", meanwhile)
    with pytest.raises(ValueError, match="on node7"):
        acquire(tmp_path)
    assert find_holder(tmp_path).host == "node7"


def test_temporary_folders_of_processes_that_are_gone_are_removed(tmp_path, ended):
    for name in ("gone", "empty", "half", "here"):
        (tmp_path / f".decoded-{name}").mkdir()
    (tmp_path / ".decoded-half/.lock.12345678.part").mkdir()
    for name, changes in (("gone", {"pid": ended}), ("here", {})):
        (tmp_path / f".decoded-{name}/images").write_text("large")
        write_lock(tmp_path / f".decoded-{name}", **changes)
    with temporary_folder(tmp_path, ".decoded-") as folder:
        assert {path.name for path in tmp_path.iterdir()} == {folder.name, ".decoded-here"}
        (folder / "images").write_text("large")
        with temporary_folder(tmp_path, ".decoded-"):
            assert (folder / "images").exists()
    assert [path.name for path in tmp_path.iterdir()] == [".decoded-here"]


@pytest.mark.parametrize("token", ["0123", ""])
def test_a_claim_whose_process_was_killed_keeps_nobody_out(tmp_path, ended, token):
    write_lock(tmp_path, pid=ended, token=token)
    claim = json.dumps(asdict(replace(this_process(), pid=ended)))
    (tmp_path / f"{LOCK}-{token}").write_text(claim)
    with locked(tmp_path):
        assert [path.name for path in tmp_path.iterdir()] == [LOCK]


def test_a_void_lock_is_left_to_the_one_that_claims_it(tmp_path, ended, monkeypatch):
    write_lock(tmp_path, pid=ended, token="0123")
    claim = tmp_path / f"{LOCK}-0123"
    claim.write_text(json.dumps(asdict(this_process())))
    waits = []

    def wait(seconds):
        assert folder_lock.read_holder(tmp_path / LOCK).pid == ended
        waits.append(seconds)
        if len(waits) == 3:
            claim.unlink()

    monkeypatch.setattr(folder_lock.time, "sleep", wait)
    with locked(tmp_path) as lock:
        assert len(waits) == 3
        assert lock.is_held
