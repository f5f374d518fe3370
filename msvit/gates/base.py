"""The base class of gates, a module from images to one decision per cell, and how their images are normalised."""

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from torch import Tensor, nn

from msvit.checks import check_int, check_number, check_numbers
from msvit.gates.curve import Curve
from msvit.gates.ranking import with_num_fine
from msvit.types import GateOutput, check_image


@dataclass(frozen=True)
class Normalization:
    """Mean and standard deviation of each channel, for pixels from 0 to 1: images are (pixel - mean) / std."""

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


class Gate(nn.Module):
    """Base class of gates: image (b, c, h, w) -> GateOutput. `config` has the constructor's arguments, for saving."""

    normalization: Normalization | None = None  # of the images it was trained with, where that is recorded
    curves: tuple[Curve, ...] = ()  # share of fine cells by threshold, for each grid it was calibrated for
    fit_record: Any = None  # of `msvit.fit_gate`: what was tried and kept; not saved

    def __init__(self, coarse: int, **config: Any) -> None:
        super().__init__()
        self.coarse = check_int("coarse", coarse, at_least=2, example=32)  # px
        self._config: dict[str, Any] = {"coarse": self.coarse, **config}

    @property
    def config(self) -> Mapping[str, Any]:
        """The arguments that make such a gate, as they are now. Read only: set attributes instead."""
        return MappingProxyType(self._config)

    @property
    def constants(self) -> tuple[Any, ...]:
        """Settings that a captured CUDA graph of this gate holds as constants: with others it is captured again."""
        return ()

    def forward(self, image: Tensor) -> GateOutput:
        """Return a decision for every cell of every image."""
        raise TypeError(f"{type(self).__name__} has no forward; write one that returns a GateOutput")

    def scores(self, image: Tensor) -> Tensor:
        """Return the scores (b, hc, wc) that cells are ranked by: those with the highest are fine first."""
        raise TypeError(f"{type(self).__name__} has no scores; write a method that returns (b, hc, wc)")

    def decide_num(self, image: Tensor, num_fine: int) -> GateOutput:
        """Decide with exactly `num_fine` fine cells in each image, those that rank highest."""
        return with_num_fine(self(image), num_fine)

    def with_settings(self, **values: Any) -> "Gate":
        """Return a gate of the same weights (not copies) with other settings, such as `threshold` or `share`."""
        gate = self._with_same_weights()
        for name, value in values.items():
            setattr(gate, name, value)
        return gate

    def _with_same_weights(self) -> Any:
        return deepcopy(self, {id(tensor): tensor for tensor in (*self.parameters(), *self.buffers())})

    def cells(self, image: Tensor) -> tuple[int, int]:
        """Return rows and columns (hc, wc) of cells, or raise ValueError unless they divide the image."""
        check_image(image, self.coarse)
        return image.shape[2] // self.coarse, image.shape[3] // self.coarse

    def num_macs(self, num_cells: int) -> int:
        """Return the multiply-adds for one image."""
        return 0

    def for_cells(self, coarse: int) -> "Gate":
        """Return this gate for cells of another size; a learned one resizes them to the size it was trained for."""
        if check_int("coarse", coarse, at_least=2) == self.coarse:
            return self
        kind: Any = type(self)
        gate: Gate = kind(**{**self.config, "coarse": coarse})
        gate.load_state_dict(self.state_dict(), assign=True)  # with its precision and device
        if (weight := next(self.parameters(), None)) is not None:
            gate.to(weight.device)  # buffers too
        for new, other in zip(gate.parameters(), self.parameters(), strict=True):
            new.requires_grad_(other.requires_grad)
        gate.curves = self.curves
        return gate.train(self.training)

    @property
    def input_normalization(self) -> Normalization | None:
        """The normalisation of the images it takes: that of its training, or what `for_normalization` was given."""
        return self.normalization

    def with_normalization(self, mean: Sequence[float], std: Sequence[float]) -> "Gate":
        """Return a gate of the same weights, recorded as trained with and for such images; itself if it has none."""
        Normalization(mean, std)
        return self

    for_normalization = with_normalization  # of one with weights: for images of another normalisation than in training

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={value}" for name, value in self.config.items())


def setting(name: str, check: Callable[[str, Any], Any]) -> Any:
    """Return a property for an argument of the constructor, checked whenever it is set."""

    def read(gate: Gate) -> Any:
        return gate._config[name]

    def write(gate: Gate, value: Any) -> None:
        gate._config[name] = check(name, value)

    return property(read, write)


def check_share(name: str, share: float) -> float:
    """Return a share of fine cells, or raise ValueError unless it is from 0 to 1."""
    return check_number(name, share, at_least=0, at_most=1, example=0.3)
