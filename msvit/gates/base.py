"""What every gate is: a module from images to one decision per cell."""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from msvit.checks import check_int, check_number
from msvit.types import GateOutput, check_image


class Gate(nn.Module):
    """image (b, c, h, w) -> GateOutput. `config` holds the constructor's arguments, so that a gate can be saved."""

    def __init__(self, coarse: int, **config: Any) -> None:
        super().__init__()
        self.coarse = check_int("coarse", coarse, at_least=2, example=32)  # px
        self.config: dict[str, Any] = {"coarse": self.coarse, **config}

    def forward(self, image: Tensor) -> GateOutput:
        raise TypeError(f"{type(self).__name__} has no forward; write one that returns a GateOutput")

    def cells(self, image: Tensor) -> tuple[int, int]:
        """(hc, wc) of these images."""
        check_image(image, self.coarse)
        return image.shape[2] // self.coarse, image.shape[3] // self.coarse

    def num_macs(self, num_cells: int) -> int:
        """Multiply-adds for one image."""
        return 0

    def for_cells(self, coarse: int) -> "Gate":
        """This gate for cells of another size; a learned one goes on looking at them at the size it knows."""
        if check_int("coarse", coarse, at_least=2) == self.coarse:
            return self
        kind: Any = type(self)
        gate: Gate = kind(**{**self.config, "coarse": coarse})
        gate.load_state_dict(self.state_dict(), assign=True)  # with its precision and device
        for own, other in zip(gate.parameters(), self.parameters(), strict=True):
            own.requires_grad_(other.requires_grad)
        return gate.train(self.training)

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={value}" for name, value in self.config.items())


def setting(name: str, check: Callable[[str, Any], float]) -> Any:
    """An attribute that lives in `config`, so that a value changed later is saved too, and checked when it is set."""

    def read(gate: Gate) -> Any:
        return gate.config[name]

    def write(gate: Gate, value: Any) -> None:
        gate.config[name] = check(name, value)

    return property(read, write)


def check_share(share: float) -> float:
    """The share of fine cells."""
    return check_number("share", share, at_least=0, at_most=1, example=0.3)
