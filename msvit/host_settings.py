"""The base class of converted models: mode, class names, and the host's attributes that timm's functions read.

    timm.data.resolve_model_data_config(model)                   # the host's own mean, std, crop and interpolation
    timm.optim.create_optimizer_v2(model, layer_decay=0.7)       # the host's layer groups and no_weight_decay
    model.classes                                                # what each label is called, where that is known
    model.preprocessing                                          # how images are prepared for it
    model.run_record                                             # what the run that trained it used and measured
    model.budget                                                 # Budget(value=0.6, unit="macs"), as it was set last
    model.blocks, model.head                                     # the host's
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor, nn

from msvit.checks import MAX_PIXEL, check_flag, check_kind, is_readable, is_traced, shown, warn, warn_of_pixels
from msvit.gates import AllFine, Gate, Normalization
from msvit.types import whole_cells

if TYPE_CHECKING:
    from msvit.preprocessing import Preprocessing
    from msvit.run_record import RunRecord
    from msvit.speed_report import SpeedReport

DATA_KEYS = ("input_size", "mean", "std", "interpolation", "crop_pct", "crop_mode")  # how images are prepared
OF_HOST = ("blocks", "head")  # parts that a model shows as its own


class Budget(NamedTuple):
    """A budget that was set: a share of the dense model's multiply-adds or tokens, or ms per image."""

    value: float
    unit: str


class HostSettings(nn.Module):
    """Base class of models with the attributes `host`, `gate` and `reducer`."""

    host: Any
    coarse: Any
    gate: Any
    reducer: Any
    _classes: tuple[str, ...] | None = None
    _preprocessing: "Preprocessing | None" = None
    run_record: "RunRecord | None" = None  # settings and figures of the run that trained it, for its model card
    _budget: Budget | None = None
    _checked_batch = False  # whether `warn_of_images` has seen one
    speed_report: "SpeedReport | None" = None  # of `msvit.speed_up`: what was measured
    _mode: str

    @property
    def mode(self) -> str:
        """The way tokens are run: "packed", "trimmed" or "masked"."""
        return self._mode

    @mode.setter
    def mode(self, name: str) -> None:
        raise AttributeError(
            f"a model's mode is set when it is made; model.with_options(mode={name!r}) returns one of the same weights"
        )

    @property
    def classes(self) -> tuple[str, ...] | None:
        """The name of each label, as `msvit train` found them; saved and loaded with the model."""
        return self._classes

    @classes.setter
    def classes(self, names: Iterable[Any] | None) -> None:
        known = tuple(names) if isinstance(names, Iterable) and not isinstance(names, str) else (names,)
        if names is not None and (isinstance(names, str) or not all(isinstance(name, str) for name in known)):
            raise ValueError(f"classes is {shown(names)}, but must be a list of names, one for each label")
        if names is not None and len(known) != self.num_classes:
            raise ValueError(f"there are {len(known)} names of classes, but the model has {self.num_classes} outputs")
        self._classes = None if names is None else known

    @property
    def preprocessing(self) -> "Preprocessing | None":
        """The preprocessing of images, as in the evaluation of `msvit train`; saved and loaded with the model.

        Of other models what timm would do, or the published models of transformers, at the host's own size; None where
        the host has no `pretrained_cfg`.
        """
        if self._preprocessing is not None:
            return self._preprocessing
        from msvit.preprocessing import Preprocessing

        sides = getattr(self.host.patch_embed, "img_size", None)
        return Preprocessing.of_config(self.pretrained_cfg, self.whole_cells(sides[-1]) if sides else None)

    @preprocessing.setter
    def preprocessing(self, value: "Preprocessing | None") -> None:
        if value is not None:
            from msvit.preprocessing import Preprocessing

            check_kind("preprocessing", value, Preprocessing, "a msvit.Preprocessing(size=224, mean=..., std=...)")
        self._preprocessing = value

    def take_metadata(self, other: "HostSettings") -> None:
        """Copy training flag, class names, preprocessing and, for equal gates and reducers, budget and speed report."""
        self.training, self.classes, self.preprocessing = other.training, other.classes, other._preprocessing
        if other._budget is not None and _settings(self) == _settings(other):
            self._budget = other._budget
            self.speed_report = other.speed_report if self.mode == other.mode else None

    @property
    def budget(self) -> Budget | None:
        """The budget that was set last, and its unit; None if there was none, or for another gate or reducer."""
        return self._budget

    def with_budget(self, value: float, unit: str) -> Any:
        """Record the budget in this model, which is new, and return it."""
        for part in (self, getattr(self, "encoder", self)):
            part._budget = Budget(value, unit)
        return self

    def warn_of_images(self, image: Tensor, mask: Tensor) -> None:
        """Warn of pixels that are not normalised, or if all cells are fine, as in noise.

        Only of a model with a budget, by its first batch; later ones are not read.
        """
        if is_traced() or self._checked_batch or self._budget is None or not is_readable(image, mask):
            return
        self._checked_batch = True
        if warn_of_pixels(image, self.max_pixel) or isinstance(self.gate, AllFine):
            return
        if (self._budget.unit == "ms" or self._budget.value < 1) and bool((mask > 0.5).all()):
            warn(
                f"all cells of these images are fine, although the model's budget is {_words(self._budget)}: it is met "
                f"on average over photographs, and noise such as torch.randn has detail everywhere; use photographs, "
                f"or set the budget by images of yours: msvit.calibrate(model, images, budget)"
            )

    @property
    def max_pixel(self) -> float:
        """The largest value that is taken for a normalised pixel: twice the largest by its preprocessing, or 20."""
        known = self._preprocessing or host_normalization(self.host)
        pairs = () if known is None else zip(known.mean, known.std, strict=True)
        return max(MAX_PIXEL, *(2 * max(mean, 1 - mean) / std for mean, std in pairs), 0.0)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in OF_HOST:
            raise AttributeError(f"{name} is the host's, and weights are shared; set model.host.{name}")
        super().__setattr__(name, value)

    @property
    def blocks(self) -> Any:
        """The host's transformer blocks, where it has them; a Swin has `layers`."""
        return self.host.blocks

    @property
    def head(self) -> Any:
        """The host's classifier."""
        return self.host.head

    def extra_repr(self) -> str:
        cost = [f"budget={_words(self.budget)}"] if self.budget else []
        if not cost and self.gate.config.get("threshold") is not None:
            cost = [f"threshold={self.gate.config['threshold']:.4g}"]
        reducer = [] if self.reducer is None else [f"reducer={type(self.reducer).__name__}"]
        parts = [f"gate={type(self.gate).__name__}", f"mode={self.mode}", *cost, *reducer, f"host={self.host_name}"]
        return ", ".join(parts)

    @property
    def host_name(self) -> str:
        """The architecture of the host as timm calls it, or its class."""
        kind: str = getattr(self.host, "kind", type(self.host).__name__)
        return self.pretrained_cfg.get("architecture") or kind

    num_classes = property(lambda self: self.host.num_classes)
    num_features = property(lambda self: self.host.num_features)
    embed_dim = property(lambda self: self.host.embed_dim)

    num_prefix_tokens = property(lambda self: getattr(self.host, "num_prefix_tokens", 0))

    @property
    def feature_info(self) -> list[dict[str, Any]]:
        """The channels and pixels per token of each block, or stage, with the name it has here."""
        return [{**info, "module": self._prefix() + info["module"]} for info in self.host.feature_info]

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Load weights as `nn.Module` does. Raise ValueError for those of the host alone."""
        names = {str(name).removeprefix("module.") for name in state_dict} if isinstance(state_dict, Mapping) else set()
        if names & self.host.state_dict().keys() and not names & self.state_dict().keys():
            raise ValueError(
                f"these are weights of the host, whose names begin with {self._prefix()!r} here; call "
                f"model.host.load_state_dict(...), and refresh() if the model is compiled"
            )
        return super().load_state_dict(state_dict, *args, **kwargs)

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Compute activations of blocks again in the backward pass, in place of keeping them."""
        check_flag("enable", enable)
        self.host.set_grad_checkpointing(enable)

    @property
    def pretrained_cfg(self) -> dict[str, Any]:
        """The host's `pretrained_cfg`, for transformers' models that of published ones; its size has whole cells."""
        config = getattr(self.host, "pretrained_cfg", None) or getattr(self.host, "published_cfg", None) or {}
        sizes = {name: config[name] for name in ("input_size", "test_input_size") if config.get(name)}
        return config | {name: (num, *map(self.whole_cells, sides)) for name, (num, *sides) in sizes.items()}

    def whole_cells(self, side: int) -> int:
        """Return the side in px nearest to this that images may have, of two the larger."""
        return side if hasattr(self, "pad") else whole_cells(side, self.coarse)

    default_cfg = property(lambda self: self.pretrained_cfg)

    def no_weight_decay(self) -> set[str]:
        """Return names of parameters without decay: those the host names, and all of gate and reducer."""
        of_host: set[str] = getattr(self.host, "no_weight_decay", set)()
        new = {id(p) for part in (self.gate, self.reducer) if part is not None for p in part.parameters()}
        return {self._prefix() + name for name in of_host} | {n for n, p in self.named_parameters() if id(p) in new}

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Return the host's patterns, for the names its parameters have here. What is new goes with the head."""
        prefix = re.escape(self._prefix())

        def inside(pattern: str) -> str:
            return f"^{prefix}(?:" + re.sub(r"(^|\|)\^", r"\1", pattern) + ")"

        def moved(rule: Any) -> Any:
            if rule is None or isinstance(rule, str):
                return rule and inside(rule)
            return [(inside(pattern), order) for pattern, order in rule]

        return {name: moved(rule) for name, rule in self.host.group_matcher(coarse=coarse).items()}

    def _prefix(self) -> str:
        return next(f"{name}." for name, part in self.named_modules() if part is self.host)


def _settings(model: HostSettings) -> list[tuple[type, dict[str, Any]]]:
    return [(type(part), dict(part.config)) for part in (model.gate, model.reducer) if part is not None]


def _words(budget: Budget) -> str:
    return f"{budget.value:g} ms" if budget.unit == "ms" else f"{budget.value:g} of the dense {budget.unit}"


def host_normalization(host: Any) -> Normalization | None:
    """Return the normalisation of the host's images; None unless its `pretrained_cfg` has one for each channel."""
    config: dict[str, Any] = getattr(host, "pretrained_cfg", None) or {}
    num = host.patch_embed.proj.in_channels
    known = {name: config.get(name) for name in ("mean", "std")}
    if not all(isinstance(values, Sequence) and len(values) == num for values in known.values()):
        return None
    return Normalization(**known)  # type: ignore[arg-type]


def gate_for_host(gate: Gate, host: Any) -> Gate:
    """Return the gate for images normalised as the host's; as it is where either normalisation is not known."""
    images = None if gate.normalization is None else host_normalization(host)
    return gate if images is None else gate.for_normalization(images.mean, images.std)


def native_size(model: Any) -> tuple[int, int]:
    """Return the size of images that the host was built for, in px, or the nearest of whole cells."""
    rows, columns = model.backbone.native_patches
    return model.whole_cells(rows * model.fine), model.whole_cells(columns * model.fine)
