"""The command line: `msvit` or `python -m msvit`."""

from msvit.cli import benching, looking, training  # noqa: F401  (each adds its commands)
from msvit.cli.app import app


def main() -> None:
    app()


__all__ = ["app", "main"]
