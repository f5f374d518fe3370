"""The base class of gates with weights: a logit for each cell, and a decision made from it."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from msvit.checks import check_int, check_ints, check_number, check_weights
from msvit.fast.gates import compute_logits
from msvit.gates.base import Gate, Normalization, setting
from msvit.shapes import Float
from msvit.types import GateOutput, check_image, unchecked

START_LOGIT = 3.0  # sigmoid(3) = 0.95: all cells fine, yet inside the range where the losses have a gradient


class LogitGate(Gate):
    """Base class of gates with weights: cells whose logit is over `threshold` are fine.

    In training decisions are sampled; with all parameters frozen, or in eval mode, they are deterministic. The
    threshold is a buffer: what shares the gate's tensors, such as a compiled model, has the same one.

    `normalization` is that of the images it was trained with. `for_normalization` makes a gate of the same weights for
    images of another one, which are mapped to the first before they are scored; where both agree nothing is computed.
    """

    kernel_form: Any = None  # the kernels that can compute `logits` (fast/gates.py)
    head: nn.Linear  # the last layer
    position: nn.Parameter  # (1, width, rows, columns): a learned table, added to the features of each cell
    _threshold: Tensor
    _scale: Tensor | None  # (c, 1, 1): images * scale + shift have the normalisation of the training; None if they do
    _shift: Tensor | None
    _input: Normalization | None = None  # of the images, if another than that of the training

    def __init_subclass__(cls, **options: Any) -> None:
        """Drop the kernels of a base class whose logits a subclass computes in another way."""
        super().__init_subclass__(**options)
        if "kernel_form" not in vars(cls) and any(name.startswith("logits") for name in vars(cls)):
            cls.kernel_form = None

    def __init__(
        self, coarse: int, in_chans: int, temperature: float, noise: float, threshold: float, **config: Any
    ) -> None:
        self.in_chans = check_int("in_chans", in_chans, at_least=1)
        super().__init__(coarse, in_chans=self.in_chans, **config)
        self.register_buffer("_threshold", torch.zeros((), dtype=torch.float32), persistent=False)  # in `config`
        self.register_buffer("_scale", None, persistent=False)
        self.register_buffer("_shift", None, persistent=False)
        self.temperature, self.noise, self.threshold = temperature, noise, threshold

    temperature = setting("temperature", partial(check_number, above=0))
    noise = setting("noise", partial(check_number, at_least=0))

    @property
    def config(self) -> Mapping[str, Any]:
        return MappingProxyType({**super().config, "threshold": self.threshold})

    @property
    def constants(self) -> tuple[Any, ...]:
        return self.temperature, self.noise if self.samples else 0.0

    @property
    def threshold(self) -> float:
        """The logit above which a cell is fine."""
        return self._threshold.item()

    @threshold.setter
    @torch.no_grad()
    def threshold(self, value: float) -> None:
        self._threshold.fill_(check_number("threshold", value))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "LogitGate":
        before, affine = self._threshold, (self._scale, self._shift)
        super()._apply(fn, recurse)
        self._threshold = before.to(self._threshold.device)  # half precision would round it
        self._scale, self._shift = affine
        self._set_affine()
        return self

    @property
    def input_normalization(self) -> Normalization | None:
        return self._input or self.normalization

    def with_normalization(self, mean: Sequence[float], std: Sequence[float]) -> "LogitGate":
        return self._with_same_weights().set_normalization(Normalization(mean, std))

    def for_normalization(self, mean: Sequence[float], std: Sequence[float]) -> "LogitGate":
        images = Normalization(mean, std)
        if self.normalization is None:
            raise ValueError(
                f"images have {images}, but the {type(self).__name__} has no record of those it was trained with; "
                f"record it first, for example gate.with_normalization(mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5))"
            )
        if images == self.input_normalization:
            return self
        return self._with_same_weights().set_normalization(self.normalization, images)

    def set_normalization(self, trained: Normalization | None, images: Normalization | None = None) -> "LogitGate":
        """Record what the gate was `trained` with and, if another, what its `images` have. For gates in the making."""
        for each in (trained, images):
            if each is not None and len(each.mean) != self.in_chans:
                raise ValueError(
                    f"{each} are of {len(each.mean)} channels, but the gate takes images of {self.in_chans}; "
                    f"pass {self.in_chans} numbers each"
                )
        if trained is None and images is not None:
            raise ValueError(f"images have {images}, but what the gate was trained with is unknown; pass both")
        self.normalization, self._input = trained, None if images == trained else images
        self._scale = self._shift = None
        self._set_affine()
        return self

    def _set_affine(self) -> None:
        """Scale and shift where the weights are; in float32, as half precision would round them, or in float64."""
        if self._input is None:
            return
        assert self.normalization is not None, "set_normalization has checked it"
        weight = next(self.parameters(), self._threshold)
        dtype = torch.float64 if weight.dtype is torch.float64 else torch.float32
        if self._scale is not None and (self._scale.dtype, self._scale.device) == (dtype, weight.device):
            return  # the same tensors: a captured graph reads them where they lie
        self._scale, self._shift = (
            torch.tensor(values, dtype=dtype, device=weight.device).view(-1, 1, 1)
            for values in self._input.affine_to(self.normalization)
        )

    def with_settings(self, **values: Any) -> "LogitGate":
        gate = self._with_same_weights()
        with torch.inference_mode(False):  # else no other threshold could be set outside of inference mode
            gate._threshold = self._threshold.clone()  # a buffer that is a setting
        for name, value in values.items():
            setattr(gate, name, value)
        return gate

    def scores(self, image: Tensor) -> Tensor:
        return self(image).logits

    def for_cells(self, coarse: int) -> "LogitGate":
        gate = super().for_cells(coarse)
        assert isinstance(gate, LogitGate), "of the same class"
        return gate if gate is self else gate.set_normalization(self.normalization, self._input)

    def renormalized(self, image: Tensor) -> Tensor:
        """Return the image in the normalisation of the training; itself where it has that already."""
        if self._scale is None or self._shift is None:
            return image
        return image * self._scale + self._shift

    @property
    def frozen(self) -> bool:
        return not any(p.requires_grad for p in self.parameters())

    @property
    def samples(self) -> bool:
        """Whether decisions are drawn with noise."""
        return self.training and not self.frozen

    def logits(self, image: Tensor) -> Tensor:
        """Return a logit (b, hc, wc) for each cell of images with the normalisation of the training."""
        raise TypeError(f"{type(self).__name__} has no logits; write a method that returns (b, hc, wc)")

    def positions(self, rows: int, columns: int) -> Tensor:
        """Return the table of positions for a grid of cells, interpolated if need be: (1, width, rows, columns)."""
        if self.position.shape[2:] == (rows, columns):
            return self.position
        return F.interpolate(self.position, size=(rows, columns), mode="bilinear", align_corners=False)

    def apply_head(self, hidden: Tensor) -> Tensor:
        """Apply the last layer, (..., width) -> (...), in the precision of its weights also under autocast.

        In 16 bits the logits of a new gate would be ties, and their ranks, which batch shaping sorts by, rounding.
        """
        device = hidden.device.type
        if hidden.is_meta or not torch.is_autocast_enabled(device):
            return self.head(hidden)[..., 0]
        with torch.autocast(device, enabled=False):
            return self.head(hidden.to(self.head.weight.dtype))[..., 0]

    def forward(self, image: Tensor) -> GateOutput:
        """Compute logits and decide by them; raise ValueError for other channels or sizes."""
        check_image(image, self.coarse, self.in_chans)
        return self.decide(compute_logits(self, image))

    def decide(self, logits: Tensor) -> GateOutput:
        """Decide by the logits (b, hc, wc); in training decisions are sampled."""
        logits = logits if logits.dtype is torch.float64 else logits.float()
        return decide(logits, self.temperature, self.noise if self.samples else 0.0, self._threshold)


def decide(
    logits: Float[Tensor, "b hc wc"], temperature: float = 1.0, noise: float = 0.0, threshold: float | Tensor = 0.0
) -> GateOutput:
    """Decide by logits. `noise` scales the logistic noise: 1 is the paper's, 0 makes the decision deterministic."""
    sample, mask = straight_through(logits - threshold, temperature, noise)
    return unchecked(GateOutput, logits=logits, fine_prob=torch.sigmoid(logits), sample=sample, mask=mask)


def straight_through(
    logits: Float[Tensor, "*any"], temperature: float = 1.0, noise: float = 0.0
) -> tuple[Float[Tensor, "*any"], Float[Tensor, "*any"]]:
    """Return the soft decision, and the hard one with its gradient (Eqs. 1 and 2). Both are NaN where the logit is."""
    if noise:
        uniform = torch.rand_like(logits).clamp(1e-6, 1 - 1e-6)
        logits = logits + noise * torch.logit(uniform)
    sample = torch.sigmoid(logits / temperature)
    hard = (logits > 0).to(sample.dtype)
    return sample, hard + (sample - sample.detach())


def check_table(grid: Any, widths: Any) -> tuple[tuple[int, int], tuple[int, int, int]]:
    """Check rows and columns of a table of positions, and the widths of a gate's layers."""
    rows, columns = check_ints("grid", grid, 2, example=(7, 7))
    first, second, third = check_ints("widths", widths, 3, at_most=2**14)
    check_weights(rows * columns * max(first, third), "grid and widths")
    return (rows, columns), (first, second, third)
