"""Suites: the workloads of one machine, the most telling first, so that a run that is stopped has said most."""

from msvit.lab.bench.rows import CPU_ROWS, README_ROWS
from msvit.lab.bench.workload import Workload

SMALL, BASE, LARGE = (f"vit_{size}_patch16_224" for size in ("small", "base", "large"))
SWIN = "swin_tiny_patch4_window7_224"

SUITES: dict[str, list[Workload]] = {
    # Everything the README says about time on a GPU, in eight minutes.
    "readme": [
        Workload(SMALL, 224, 1, rows=README_ROWS, rounds=128),  # half a millisecond a call, so that noise counts
        Workload(SMALL, 224, 256, rows=README_ROWS),
        Workload(SMALL, 384, 128, rows=README_ROWS),
        Workload(SMALL, 512, 64, rows=README_ROWS),
        Workload(LARGE, 224, 128, rows=README_ROWS),
        Workload(SMALL, 224, 256, train=True, rows=README_ROWS),
        Workload(SWIN, 224, 128, rows=README_ROWS, settings={"model.merge_at": "4"}),
    ],
    "h200": [
        Workload(SMALL, 224, 256),
        Workload(LARGE, 224, 128),
        Workload(SMALL, 384, 128),
        Workload(SMALL, 512, 64),
        Workload(SMALL, 224, 1),
        Workload(SMALL, 224, 64),
        Workload(BASE, 224, 128),
        Workload(SMALL, 224, 256, train=True),
    ],
    # The same on a CPU.
    "cpu": [
        Workload(SMALL, 224, 1, rows=CPU_ROWS),
        Workload(SMALL, 224, 8, rows=CPU_ROWS),
        Workload(SMALL, 384, 1, rows=CPU_ROWS),
        Workload(BASE, 224, 1, rows=CPU_ROWS),
    ],
}


def suite(name: str) -> list[Workload]:
    if name not in SUITES:
        raise ValueError(f"unknown suite {name!r}; known: {', '.join(SUITES)}")
    return SUITES[name]
