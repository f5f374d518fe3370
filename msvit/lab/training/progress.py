"""What a person sees of a running training: one bar with loss, accuracy, tokens and time left."""

from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar


class Progress:
    """with Progress(num_steps) as progress: progress.update(step, line, images_per_second)"""

    def __init__(self, num_steps: int, quiet: bool = False) -> None:
        self.console = Console(quiet=quiet, markup=False)
        what = TextColumn("{task.description}", markup=False)
        columns = (BarColumn(bar_width=20), MofNCompleteColumn(), what, TimeRemainingColumn())
        self.bar = Bar(*columns, console=self.console, disable=quiet or not self.console.is_terminal)
        self.task = self.bar.add_task("", total=num_steps)

    def __enter__(self) -> "Progress":
        self.bar.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self.bar.stop()

    def update(self, step: int, line: dict[str, float], images_per_second: float) -> None:
        text = (
            f"loss {line['loss']:.3f}  accuracy {line['accuracy']:.1%}  tokens {line['tokens']:.1f}  "
            f"{images_per_second:.0f} img/s"
        )
        self.bar.update(self.task, completed=step, description=text)

    def note(self, text: str) -> None:
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)
