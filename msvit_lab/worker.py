"""A process of a sweep, which runs one command after the other: imports and decoding are done once.

    worker = Worker(decoded=Path("runs/.decoded"))     # a folder where workers share the images they decode
    error = worker.run(["train", "scenes", "--out", "runs/a"], log=Path("runs/a/log.txt"))     # None: it succeeded
    worker.stop()       # from another thread: the command saves and ends
    worker.close()

If the process dies, killed or for lack of memory, the command fails with its exit code, and the next gets a new one. (A
`ProcessPoolExecutor` has no exit codes, ends all of its processes if one dies, and leaves semaphores behind if all are
killed.) The process ends with the one that started it, however that ends: a training saves before.
"""

import gc
import os
import runpy
import signal
import sys
import traceback
from contextlib import redirect_stderr, redirect_stdout, suppress
from multiprocessing import get_context, parent_process, set_start_method
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path
from threading import Thread
from typing import Any


class Worker:
    def __init__(self, decoded: Path) -> None:
        self.decoded = decoded
        self.process: SpawnProcess | None = None
        self._stopping = False

    def run(self, arguments: list[str], log: Path) -> str | None:
        """Run `msvit` with these arguments, its output appended to `log`. Returns its last line if it failed."""
        if self.process is not None and not self.process.is_alive():
            self.close()
        if self.process is None:
            self._pipe, theirs = get_context("spawn").Pipe()
            self.process = get_context("spawn").Process(target=serve, args=(theirs, self.decoded))
            self.process.start()
            theirs.close()  # so that this side sees the end of the process
        if self._stopping:  # after the start, so that `stop` or this line sees the other
            return "stopped before it began"
        try:
            self._pipe.send((arguments, log))
            code = self._pipe.recv()
        except (EOFError, OSError):
            self.process.join()
            return f"the process died with code {self.process.exitcode}; {last_line(log)}"
        return None if code == 0 else last_line(log)

    def stop(self) -> None:
        """Ask the command that runs to save and end, and start no other."""
        self._stopping = True
        if (process := self.process) is not None:
            process.terminate()

    def close(self) -> None:
        if self.process is not None:
            self._pipe.close()  # ends `serve`
            self.process.join()
            self.process = None


def last_line(log: Path) -> str:
    text = log.read_text().strip() if log.is_file() else ""
    return (text.splitlines() or ["no output"])[-1]


def serve(pipe: Connection, decoded: Path) -> None:
    """In the new process: run commands until the other end of the pipe is closed."""
    set_start_method(None, force=True)  # of a loader's processes: the default, as in any command, not "spawn"
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal: between commands the parent decides what it means
    if os.name != "nt":  # there SIGTERM would end a training without a checkpoint
        Thread(target=end_with_parent, daemon=True).start()
    with suppress(EOFError, OSError):
        while True:
            arguments, log = pipe.recv()
            pipe.send(run_command(arguments, log, decoded))


def end_with_parent() -> None:
    """Once the parent has ended, SIGTERM to this process: a training saves and ends."""
    parent = parent_process()
    assert parent is not None
    parent.join()
    os.kill(os.getpid(), signal.SIGTERM)


def run_command(arguments: list[str], log: Path, decoded: Path) -> int:
    """The exit code of `msvit` with these arguments; 1 for an exception, whose traceback is logged."""
    import torch
    from accelerate.state import AcceleratorState

    from msvit_lab.data.cache import keep_decoded_in

    code: Any = 0
    sys.argv = ["msvit", *arguments]
    with keep_decoded_in(decoded), open(log, "a") as file, redirect_stdout(file), redirect_stderr(file):
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
    return code or 0
