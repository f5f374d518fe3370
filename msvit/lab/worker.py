"""Processes of a sweep, each of which runs one command after the other: imports and decoding are done once.

    with Workers(num=4, decoded=Path("runs/.decoded")) as workers:    # `decoded`: where they share decoded images
        error = workers.run(["train", "scenes", "--out", "runs/a"], log=Path("runs/a/log.txt"))    # None: it succeeded
        workers.stop()      # from another thread: commands save and end

Every process is a `ProcessPoolExecutor` of its own: if it dies, killed or for lack of memory, only its own command
fails (a common pool would end all), and the next command gets a new one. A process ends with the one that started it,
however that ends: a training saves before.
"""

import gc
import multiprocessing
import os
import runpy
import signal
import sys
import traceback
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import Any


class Workers:
    """`run` is called by as many threads at once as there are processes."""

    def __init__(self, num: int, decoded: Path) -> None:
        self._decoded, self._stopping = decoded, False
        self._idle = SimpleQueue[ProcessPoolExecutor]()
        for _ in range(num):
            self._idle.put(new_pool())

    def run(self, arguments: list[str], log: Path) -> str | None:
        """Run `msvit` with these arguments, its output appended to `log`. Returns its last line if it failed."""
        pool = self._idle.get()
        try:
            try:
                future = self._submit(pool, arguments, log)
            except BrokenProcessPool:  # it died since its last command
                pool = new_pool()
                future = self._submit(pool, arguments, log)
            return None if future.result() == 0 else last_line(log)
        except BrokenProcessPool:
            pool = new_pool()
            return f"its process died, killed or out of memory; {last_line(log)}"
        finally:
            self._idle.put(pool)

    def _submit(self, pool: ProcessPoolExecutor, arguments: list[str], log: Path) -> "Future[int]":
        future = pool.submit(run_command, arguments, log, self._decoded)  # starts the process, if there is none
        if self._stopping:  # `stop` may have come before the process
            terminate_all()
        return future

    def stop(self) -> None:
        """Ask all commands to save and end."""
        self._stopping = True
        terminate_all()

    def __enter__(self) -> "Workers":
        return self

    def __exit__(self, *_: Any) -> None:
        while not self._idle.empty():
            self._idle.get().shutdown()


def new_pool() -> ProcessPoolExecutor:
    return ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), initializer=start_worker)


def terminate_all() -> None:
    """SIGTERM to all processes of all pools."""
    for process in multiprocessing.active_children():
        process.terminate()


def last_line(log: Path) -> str:
    text = log.read_text().strip() if log.is_file() else ""
    return (text.splitlines() or ["no output"])[-1]


def start_worker() -> None:
    """In a new process. Ctrl-C of a terminal reaches it too; between commands the parent decides what that means."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if os.name != "nt":  # there SIGTERM would end a training without a checkpoint
        Thread(target=end_with_parent, daemon=True).start()


def end_with_parent() -> None:
    """Once the parent has ended, SIGTERM to this process: an idle one ends, and a training saves first."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os.kill(os.getpid(), signal.SIGTERM)


def run_command(arguments: list[str], log: Path, decoded: Path) -> int:
    """In a worker: the exit code of `msvit` with these arguments; 1 for an exception, whose traceback is logged."""
    import torch
    from accelerate.state import AcceleratorState

    from msvit.lab.data.workers import keeping

    code: Any = 0
    sys.argv = ["msvit", *arguments]
    with keeping(decoded), open(log, "a") as file, redirect_stdout(file), redirect_stderr(file):
        try:
            runpy.run_module("msvit", run_name="__main__")  # as python -m msvit does
        except SystemExit as end:
            code = end.code
        except Exception:
            traceback.print_exc()
            code = 1
    AcceleratorState._reset_state(True)  # the next command may have another precision
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    parent = multiprocessing.parent_process()
    if parent is not None and not parent.is_alive():  # its SIGTERM was the command's; no other will end this process
        os._exit(1)
    return code or 0
