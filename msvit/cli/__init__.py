"""The command line: `msvit` or `python -m msvit`."""

from msvit.cli.app import app


def main() -> None:
    app()


__all__ = ["app", "main"]
