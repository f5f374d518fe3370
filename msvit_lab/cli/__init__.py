"""The commands of `msvit` (`msvit_lab/__main__.py`). Each module adds one."""
# ruff: noqa: F401

from msvit_lab.cli import bench, calibrate, demo, distill, eval, export, predict, report, speed_up, sweep, train, viz
from msvit_lab.cli.app import app

__all__ = ["app"]
