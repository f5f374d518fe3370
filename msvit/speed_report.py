"""The report of `msvit.speed_up`, which is saved with its model."""

import math
from dataclasses import dataclass, fields
from typing import Any

from msvit.checks import check_kind


@dataclass(frozen=True)
class SpeedReport:
    """Measurements of `speed_up` on the images held back."""

    agreement: float  # share of images with the dense model's class; without classes the mean cosine of features
    has_classes: bool
    macs_share: float  # mean multiply-adds, gate included, as a share of the dense model's
    ms: float  # per image
    dense_ms: float  # of the host as it was given, measured alternately
    num_images: int
    batch_size: int
    device: str
    compiled: bool

    def __post_init__(self) -> None:
        for each in fields(self):
            kind: Any = each.type
            check_kind(each.name, getattr(self, each.name), kind, f"a {kind.__name__}")

    def __str__(self) -> str:
        low, high = wilson(self.agreement, self.num_images)
        what = f"same class as the dense model: {self.agreement:.1%}, 95% interval {low:.1%} to {high:.1%}"
        if not self.has_classes:
            what = f"cosine similarity with the dense model's features: {self.agreement:.4f}"
        ours = f"{self.ms:.3g}{' compiled' if self.compiled else ''}"
        slower = "" if self.ms < self.dense_ms else "; not faster: too small a model or images, or a busy machine"
        return (
            f"{what} ({self.num_images} images held back)\n"
            f"multiply-adds: {self.macs_share:.1%} of the dense model's\n"
            f"ms per image: {ours}, dense uncompiled {self.dense_ms:.3g} "
            f"({self.device}, batches of {self.batch_size}){slower}"
        )


def wilson(share: float, num: float) -> tuple[float, float]:
    """Return Wilson's 95 % interval of a share that was observed in so many trials."""
    z = 1.96
    middle, half = share + z**2 / (2 * num), z * math.sqrt(share * (1 - share) / num + z**2 / (4 * num**2))
    return max(0.0, (middle - half) / (1 + z**2 / num)), min(1.0, (middle + half) / (1 + z**2 / num))
