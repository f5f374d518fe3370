"""What a training shows and writes while it runs: a bar, notes and metrics.jsonl."""

import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from msvit_lab.config import Config
from msvit_lab.runs import Metrics


class Log:
    """with Log(out, config, first_step, num_steps) as log: log.write("train", step, epoch, values)

    `out` is None where nothing is written: in all processes but the first.
    """

    def __init__(self, out: Path | None, config: Config, first_step: int, num_steps: int, quiet: bool) -> None:
        self.out, self.first_step, self.batch_size = out, first_step, config.optim.batch_size
        self.console = Console(quiet=quiet or out is None, markup=False)
        what = TextColumn("{task.description}", markup=False)
        columns = (BarColumn(bar_width=20), MofNCompleteColumn(), what, TimeRemainingColumn())
        self.bar = Progress(*columns, console=self.console, disable=self.console.quiet or not self.console.is_terminal)
        self.task = self.bar.add_task("", total=num_steps)

    def __enter__(self) -> "Log":
        self.metrics = Metrics(None if self.out is None else self.out / "metrics.jsonl", self.first_step)
        self.bar.start()
        self.start = time.perf_counter()
        return self

    def __exit__(self, *_: Any) -> None:
        self.bar.stop()
        self.metrics.__exit__()

    def note(self, text: str) -> None:
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def write(self, kind: str, step: int, epoch: float, values: dict[str, Any]) -> None:
        """One line of metrics.jsonl. `kind`: train, eval or prior."""
        if kind == "train":
            seconds = time.perf_counter() - self.start
            values = values | {"seconds": round(seconds, 3)}
            text = (
                f"loss {values['loss']:.3f}  accuracy {values['accuracy']:.1%}  tokens {values['tokens']:.1f}  "
                f"{(step - self.first_step) * self.batch_size / seconds:.0f} img/s"
            )
            self.bar.update(self.task, completed=step, description=text)
        self.metrics.write(kind, step=step, epoch=epoch, **values)
