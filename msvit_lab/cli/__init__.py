"""The commands of `msvit` (`msvit_lab/__main__.py`). Each module adds one."""

from msvit_lab.cli import bench, calibrate, demo, distill, eval, export, info, predict, report, sweep, train, viz  # noqa: F401
from msvit_lab.cli.app import app

__all__ = ["app"]
