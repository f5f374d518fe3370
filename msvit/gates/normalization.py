"""How images are normalised, (pixel - mean) / std for each channel, and the map from one normalisation to another."""

from collections.abc import Sequence
from dataclasses import dataclass

from msvit.checks import check_numbers


@dataclass(frozen=True)
class Normalization:
    """Mean and standard deviation of each channel, for pixels from 0 to 1."""

    mean: Sequence[float]
    std: Sequence[float]

    def __post_init__(self) -> None:
        for name, example, lowest in (("mean", (0.485, 0.456, 0.406), -1e6), ("std", (0.229, 0.224, 0.225), 1e-6)):
            words = f"one number per channel, such as {example}"
            values = check_numbers(name, getattr(self, name), None, words, at_least=lowest, at_most=1e6)
            object.__setattr__(self, name, values)
        if len(self.mean) != len(self.std):
            raise ValueError(f"mean is {self.mean} and std is {self.std}, but there must be one of each per channel")

    def __str__(self) -> str:
        return f"mean {self.mean} and std {self.std}"

    def affine_to(self, other: "Normalization") -> tuple[list[float], list[float]]:
        """Return scale and shift per channel: x * scale + shift is x of this normalisation in the other one."""
        ours, theirs = zip(self.mean, self.std, strict=True), zip(other.mean, other.std, strict=True)
        pairs = list(zip(ours, theirs, strict=True))
        return [s / t for (_, s), (_, t) in pairs], [(m - n) / t for (m, _), (n, t) in pairs]
