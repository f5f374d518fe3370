"""The command line: `msvit` or `python -m msvit`. Each module adds its command."""

from msvit.lab.cli import bench, calibrate, demo, distill, eval, export, info, predict, report, sweep, train, viz  # noqa: F401
from msvit.lab.cli.app import app


def main() -> None:
    app()


__all__ = ["app", "main"]
