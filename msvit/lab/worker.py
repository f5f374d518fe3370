"""A process that runs one command after the other: what takes long to begin with, imports and decoding, is done once.

    worker = Worker(decoded=Path("runs/.decoded"))     # a folder where workers share the images they decode
    trouble = worker.run(["train", "scenes", "--out", "runs/a"], log=Path("runs/a/log.txt"))     # None: all is well
    worker.stop()       # from another thread: the command saves and ends
    worker.close()

A command that fails leaves its last words. One that takes the process with it, too: the next gets a new process. The
process ends with the one that started it, however that ends: a training saves before.
"""

import gc
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from threading import Thread
from typing import IO, Any

import msvit

READY = "#done "  # begins a line that is an answer
PROGRAM = """
import sys
from msvit.lab.cli import app
from msvit.lab.worker import serve
serve(app, sys.stdin, sys.stdout, sys.argv[1], int(sys.argv[2]))
"""
LOOK = 0.2  # seconds between two looks whether the parent is there


class Worker:
    """Commands go to the process as lines of JSON, answers come back the same way."""

    def __init__(self, decoded: Path) -> None:
        self.decoded = decoded
        self.process: subprocess.Popen[str] | None = None
        self.stopping = False

    def run(self, arguments: list[str], log: Path) -> str | None:
        """`msvit` with these arguments, its output added to a log. Returns its last words if it failed."""
        if self.process is not None and self.process.poll() is not None:
            self.close()
        if self.process is None:
            self.process = start(self.decoded)
        if self.stopping:  # after the start: one of this and `stop` sees the other
            return "stopped before it began"
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        with suppress(BrokenPipeError):  # it has just died: no answer will come
            print(json.dumps({"arguments": arguments, "log": str(log)}), file=self.process.stdin, flush=True)
        for line in self.process.stdout:
            if line.startswith(READY):
                return None if json.loads(line[len(READY) :]) == 0 else last_words(log)
        return f"the process died with code {self.process.wait()}; {last_words(log)}"

    def stop(self) -> None:
        """Ask the command that runs to save and end, and begin no other."""
        self.stopping = True
        if (process := self.process) is not None:
            process.terminate()

    def close(self) -> None:
        if self.process is not None:
            assert self.process.stdin is not None
            self.process.communicate()  # closes its pipes and waits for its end
            self.process = None


def start(decoded: Path) -> "subprocess.Popen[str]":
    home = str(Path(msvit.__file__).parents[1])  # a checkout that is not installed must be found again
    path = os.pathsep.join([home, os.environ.get("PYTHONPATH", "")]).strip(os.pathsep)
    command = [sys.executable, "-c", PROGRAM, str(decoded), str(os.getpid())]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, env={**os.environ, "PYTHONPATH": path}, **pipes)


def last_words(log: Path) -> str:
    text = log.read_text().strip() if log.is_file() else ""
    return (text.splitlines() or ["no output"])[-1]


def end_with_parent(parent: int) -> None:
    """As if somebody had sent SIGTERM. Windows does not say when a parent ends."""
    while os.getppid() == parent:
        time.sleep(LOOK)
    os.kill(os.getpid(), signal.SIGTERM)


def serve(app: Any, lines: IO[str], answers: IO[str], decoded: str, parent: int) -> None:
    """Run the commands of `app` that are asked for, until no line is left or the parent is gone."""
    if os.name != "nt":
        Thread(target=end_with_parent, args=(parent,), daemon=True).start()
    with suppress(KeyboardInterrupt, BrokenPipeError):  # between two commands; of a terminal, whose parent ends too
        _serve(app, lines, answers, decoded)


def _serve(app: Any, lines: IO[str], answers: IO[str], decoded: str) -> None:
    import torch
    from accelerate.state import AcceleratorState

    from msvit.lab.data.cache import keeping

    with keeping(Path(decoded)):
        for line in lines:
            asked = json.loads(line)
            with open(asked["log"], "a") as log, redirect_stdout(log), redirect_stderr(log):
                code = run(app, asked["arguments"])
            AcceleratorState._reset_state(True)  # the next may have another precision
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            print(f"\n{READY}{code}", file=answers, flush=True)


def run(app: Any, arguments: list[str]) -> int:
    """The exit code of `msvit` with these arguments; a traceback is printed and is 1."""
    import traceback

    try:
        found = app(arguments, standalone_mode=False)
    except Exception:
        traceback.print_exc()
        return 1
    return found if isinstance(found, int) else 0
