"""Files are replaced whole or not at all, and what a killed writer leaves is removed by the next."""

import os
import signal
from contextlib import suppress
from functools import cache
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch
from tiny import images, tiny_host

import msvit
import msvit_lab.json_values
from msvit.saving.file import check_writable, remove_leftovers, replacing

HOST = tiny_host(depth=1)


@cache
def model(threshold: float) -> msvit.MSViT:
    made = msvit.convert(HOST, coarse=8)
    made.gate.threshold = threshold
    made.gate.head.bias.data.fill_(threshold)
    return made


def save(threshold: float, folder: Path) -> None:
    msvit.save(model(threshold), folder)


def save_gate(threshold: float, folder: Path) -> None:
    msvit.save_gate(model(threshold).gate, folder)


def state_of(folder: Path) -> tuple[float, float] | None:
    """Of the gate, or None where nothing was saved yet."""
    load = msvit.load_gate if (folder / "gate.safetensors").exists() else msvit.load
    if load is msvit.load and not (folder / "model.safetensors").exists():
        with pytest.raises(ValueError, match=r"model\.safetensors"):
            load(folder)
        return None
    gate = load(folder) if load is msvit.load_gate else load(folder).gate
    return gate.threshold, gate.head.bias.item()


class Cut(BaseException):
    """The process is gone."""


def step_by_step(monkeypatch: pytest.MonkeyPatch, stop: int) -> list[str]:
    """Every call that changes a folder or writes a file is counted; before number `stop` the process ends.

    Nothing that would run in a process that lives on runs afterwards, so nothing is tidied up either.
    """
    seen: list[str] = []

    def counted(owner, name):
        real = getattr(owner, name)

        def call(*args, **kwargs):
            if len(seen) >= stop:
                raise Cut
            seen.append(name)
            return real(*args, **kwargs)

        monkeypatch.setattr(owner, name, call)

    for name in ("replace", "link", "chmod", "fsync", "mkdir"):
        counted(os, name)
    counted(msvit.saving.file, "save_file")
    counted(Path, "write_text")
    counted(msvit.saving.file.shutil, "rmtree")
    return seen


@pytest.mark.parametrize(("save", "old"), [(save, 1.0), (save, None), (save_gate, 1.0)], ids=["again", "first", "gate"])
def test_a_save_cut_anywhere_is_all_old_or_all_new(tmp_path, monkeypatch, save, old):
    whole, ends = False, []
    while not whole:
        folder = tmp_path / str(len(ends))
        if old is not None:
            save(old, folder)
        with monkeypatch.context() as patch, suppress(Cut):
            seen = step_by_step(patch, stop=len(ends))
            save(2.0, folder)
            whole = True
        ends.append(state_of(folder))
        assert ends[-1] == (2.0, 2.0) or (ends[-1] == (old and (old, old)) and not whole), seen
        save(3.0, folder)
        assert state_of(folder) == (3.0, 3.0)
    assert len(ends) > 9
    assert len(set(ends)) == 2


def write_and_die(path: Path) -> None:
    with replacing(path) as part:
        part.write_text("half")
        (part.parent / ".tmpAbCdEf").write_text("as safetensors does")
        os.kill(os.getpid(), signal.SIGKILL)


def kill_a_writer(path: Path) -> None:
    process = get_context("fork").Process(target=write_and_die, args=(path,))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_what_a_killed_writer_left_goes_with_the_next_save(tmp_path):
    path = tmp_path / "file.txt"
    path.write_text("old")
    for _ in range(2):
        kill_a_writer(path)
    assert len(list(tmp_path.iterdir())) == 2  # the second writer removed what the first one left
    assert path.read_text() == "old"
    with replacing(path) as part:
        part.write_text("new")
    assert [p.name for p in tmp_path.iterdir()] == ["file.txt"]
    kill_a_writer(path)
    remove_leftovers(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["file.txt"]


def test_two_writers_at_once_do_not_disturb_each_other(tmp_path):
    path = tmp_path / "file.txt"
    with replacing(path) as one:
        one.write_text("one")
        with replacing(path) as other:
            other.write_text("other")
        assert path.read_text() == "other"
    assert path.read_text() == "one"
    assert [p.name for p in tmp_path.iterdir()] == ["file.txt"]


@pytest.mark.parametrize("umask", [0o022, 0o077, 0o002])
def test_permissions_follow_the_umask(tmp_path, umask):
    before = os.umask(umask)
    try:
        msvit.save(model(1.0), tmp_path)
        msvit.save_gate(msvit.LearnedGate(coarse=8), tmp_path)
    finally:
        os.umask(before)
    modes = {path.name: path.stat().st_mode & 0o777 for path in tmp_path.iterdir()}
    names = ("model.safetensors", "msvit.json", "gate.safetensors", "gate.json")
    assert modes == dict.fromkeys(names, 0o666 & ~umask)


def test_a_folder_that_cannot_be_written_is_an_error_with_a_remedy(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"file/runs cannot be written \(Not a directory\); choose another --out"):
        check_writable(tmp_path / "file/runs", "choose another --out")
    with pytest.raises(OSError, match=r"gone/a\.json cannot be written \(No such file or directory\); make its folder"):
        msvit_lab.json_values.write_json(tmp_path / "gone/a.json", {})


@pytest.mark.parametrize("every", [9, pytest.param(3, marks=pytest.mark.slow)])
def test_one_flipped_bit_anywhere_is_found(tmp_path, every):
    msvit.save(msvit.convert(tiny_host(), coarse=8, gate=msvit.DiscGate(coarse=8)), tmp_path)
    path = tmp_path / "model.safetensors"
    whole = path.read_bytes()
    start = 8 + int.from_bytes(whole[:8], "little")
    draw = torch.Generator().manual_seed(0)
    inside = torch.randint(start, len(whole), (40,), generator=draw).tolist()
    places = [*range(0, start, every), *inside]
    assert len(places) > 100
    for place in places:
        bit = 1 << int(torch.randint(8, (1,), generator=draw))
        path.write_bytes(whole[:place] + bytes([whole[place] ^ bit]) + whole[place + 1 :])
        with pytest.raises(ValueError, match=path.name):
            msvit.saving.folder.read_folder(tmp_path, msvit.saving.folder.MODEL)
    path.write_bytes(whole)
    assert msvit.load(tmp_path)(images()).logits.isfinite().all()


def test_the_json_beside_the_weights_is_for_people_only(tmp_path):
    for threshold in (1.0, 2.0):
        save(threshold, tmp_path / f"{threshold:g}")
    (tmp_path / "1/msvit.json").write_bytes((tmp_path / "2/msvit.json").read_bytes())
    assert state_of(tmp_path / "1") == (1.0, 1.0)
