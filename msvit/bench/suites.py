"""Suites: the workloads of one machine, the most telling first, so that a run that is stopped has said most."""

from msvit.bench.workload import Workload

SMALL, BASE, LARGE = (f"vit_{size}_patch16_224" for size in ("small", "base", "large"))

SUITES: dict[str, list[Workload]] = {
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
    "cpu": [
        Workload(SMALL, 224, 1),
        Workload(SMALL, 224, 8),
        Workload(SMALL, 384, 1),
        Workload(BASE, 224, 1),
        Workload(SMALL, 224, 8, train=True),
    ],
}


def suite(name: str) -> list[Workload]:
    if name not in SUITES:
        raise ValueError(f"unknown suite {name!r}; known: {', '.join(SUITES)}")
    return SUITES[name]
