"""The command line: `msvit` or `python -m msvit`."""

from msvit.lab.cli import benching, looking, training  # noqa: F401  (each adds its commands)
from msvit.lab.cli.app import app


def main() -> None:
    app()


__all__ = ["app", "main"]
