"""The configuration of a run: plain typed records, checked when made, overridden by name.

    config = Config(data=Data(source="pets"), optim=Optim(epochs=10))
    override(config, {"gate.target": "0.1", "optim.lr": "3e-4"})      # as `--set gate.target=0.1`
    from_dict(to_dict(config)) == config
"""

import math
from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import asdict, dataclass, field, is_dataclass
from difflib import get_close_matches
from typing import Any, Literal, get_type_hints

from msvit.lab.config_values import fits, guess, names, read, wanted

Crops = Literal["inception", "medium", "light", "none"]
GateKind = Literal["learned", "context", "none", "disc", "entropy", "gradient", "random", "all-coarse"]
GateLoss = Literal["gbas", "bas", "bas-flat", "l0", "edges", "attention"]  # edges: for segmentation
Mode = Literal["packed", "trimmed", "masked"]
ReducerKind = Literal["none", "evit", "dynamicvit", "tome"]
Task = Literal["classify", "segment"]


@dataclass(frozen=True)
class Data:
    source: str = "scenes"  # a path, wds/FOLDER, hfds/NAME, or scenes
    img_size: int = 224
    crops: Crops = "inception"
    mean: tuple[float, float, float] | None = None  # of pixel values in [0, 1]; by default what the host's weights want
    std: tuple[float, float, float] | None = None
    interpolation: Literal["bilinear", "bicubic"] = "bilinear"
    eval_crop: float = 1.0  # 1.0: the whole image, resized; 0.875: resize and centre crop
    cache: bool = False  # decode once, keep the images on the device
    workers: int | None = None
    skip_bad: bool = False
    num_train: int | None = None  # images drawn for scenes
    num_val: int | None = None
    scene_size: int = 64  # px: scenes are drawn at one size and resized to img_size, as photographs are
    objects: str | None = None  # masks of what is labelled, a tar or folder of PNGs; {split} stands for val
    # Segmentation, where img_size is the side of training crops and of the windows of evaluation:
    short_side: int | None = None  # images are resized to this first
    scales: tuple[float, float] = (0.5, 2.0)  # then, in training, by a random factor
    max_share: float = 0.75  # of one class in a crop
    photometric: bool = True
    stride: int | None = None  # of windows; their own side by default


@dataclass(frozen=True)
class Model:
    name: str = "vit_small_patch16_224"
    weights: str | None = None  # a file of pretrained weights, or a run to start from
    pretrained: bool = False  # timm's own weights
    options: dict[str, Any] = field(default_factory=dict)  # further arguments of timm.create_model
    coarse: int | None = None  # twice the patch size by default; of a Swin, the scale of block merge_at
    merge_at: int | None = None  # of a Swin: the block at which coarse tokens enter, 3 by default
    gate: GateKind = "learned"  # context: one that looks around; none: the dense baseline
    share: float = 0.3  # of fine cells, for the gates that do not learn
    gate_from: str | None = None  # a trained gate: a folder of msvit.save_gate, or a run
    freeze_gate: bool = False  # do not train it further
    mode: Mode = "packed"
    decoder: Literal["mask", "linear"] = "mask"  # of a Segmenter


@dataclass(frozen=True)
class Gate:
    loss: GateLoss = "gbas"
    target: float = 0.25  # wanted share of fine cells: a pull, not a promise
    weight: float = 4.0
    center: bool = True  # GBaS starts with its priors high in the centre
    sampled: bool = False  # the noisy decision into the gate loss, as the paper has it, instead of the probability
    noise: float = 1.0
    temperature: float = 1.0
    lr_scale: float = 1.0  # of the model's learning rate
    warmup_epochs: float = 6.0
    clip: float | None = 1.0
    teacher: str | None = None  # loss attention: a dense run; by default the host as it was before training
    follow: bool = False  # a frozen gate: its threshold goes where the target share of the cells lies above it


@dataclass(frozen=True)
class Reduction:
    name: ReducerKind = "none"
    rate: float | None = None  # share of tokens kept: by evit and dynamicvit at each stage, by tome in each block
    r: int | None = None  # tome: tokens merged in each block, instead of a rate
    at: tuple[int, ...] | None = None  # blocks of evit and dynamicvit; 3, 6 and 9 by default
    teacher: str | None = None  # dynamicvit: a dense run; by default the host as it was before training


@dataclass(frozen=True)
class Optim:
    name: Literal["sgd", "adamw"] = "adamw"
    lr: float = 1e-3
    min_lr: float = 0.0
    head_scale: float = 1.0  # of the learning rate, for what starts from nothing: the classifier, or the decoder
    momentum: float = 0.9
    weight_decay: float = 0.0
    epochs: float = 20.0
    batch_size: int = 512  # over all processes
    accumulate: int = 1
    schedule: Literal["cosine", "poly"] = "cosine"  # poly: to the power of 0.9
    warmup_epochs: float = 0.5
    clip: float | None = 1.0
    smoothing: float = 0.0
    ema: float = 0.0  # decay of a running mean of the weights; 0 for none
    precision: Literal["auto", "no", "bf16", "fp16"] = "no"  # no: float32; auto: bf16 where the device computes in it
    zero_head: bool = False  # start the classifier at zero
    graphs: bool = False  # on one GPU, replay packed steps as CUDA graphs: less work for the CPU, more memory


@dataclass(frozen=True)
class Config:
    task: Task = "classify"
    data: Data = Data()
    model: Model = field(default_factory=Model)
    gate: Gate = Gate()
    reducer: Reduction = Reduction()
    optim: Optim = Optim()
    seed: int = 0
    eval_every: float = 1.0  # epochs
    checkpoint_every: float = 1.0  # epochs
    log_every: int = 10  # steps
    tensorboard: bool = False

    def __post_init__(self) -> None:
        check(self)


# Values that a run replaces when it starts (training.build.settle): its config.json has what it found.
OPEN: dict[str, Any] = {"data.mean": None, "data.std": None, "optim.precision": "auto"}

# What a number may be, beside its type.
ABOVE_0 = (
    "data.img_size", "data.num_train", "data.num_val", "data.scene_size", "model.coarse",
    "gate.temperature", "gate.lr_scale", "gate.clip", "optim.lr", "optim.epochs", "optim.batch_size",
    "optim.accumulate", "optim.clip", "log_every", "eval_every", "checkpoint_every",
    "data.short_side", "data.scales", "data.stride", "optim.head_scale",
)  # fmt: skip
FROM_0 = (
    "data.workers", "gate.weight", "gate.noise", "gate.warmup_epochs", "optim.min_lr", "optim.weight_decay",
    "optim.warmup_epochs", "seed",
)  # fmt: skip
RANGES: dict[str, tuple[str, Callable[[float], bool]]] = {
    **{name: ("greater than 0", lambda x: x > 0) for name in ABOVE_0},
    **{name: ("0 or greater", lambda x: x >= 0) for name in FROM_0},
    **{name: ("in [0, 1)", lambda x: 0 <= x < 1) for name in ("optim.momentum", "optim.smoothing", "optim.ema")},
    "data.mean": ("in [0, 1], as pixel values are; divide by 255", lambda x: 0 <= x <= 1),
    "data.std": ("in (0, 1], as pixel values are in [0, 1]; divide by 255", lambda x: 0 < x <= 1),
    "data.max_share": ("in (0, 1]", lambda x: 0 < x <= 1),
    "data.eval_crop": ("in (0, 1]", lambda x: 0 < x <= 1),
    "model.share": ("in [0, 1]", lambda x: 0 <= x <= 1),
    "gate.target": ("strictly between 0 and 1", lambda x: 0 < x < 1),
}


def check(config: Config) -> None:
    """Every value has its field's type and can be meant."""
    for name, kind, value in settings(config):
        if not fits(value, kind):
            raise ValueError(f"{name} is {value!r}, but must be {wanted(kind)}")
        rule, holds = RANGES.get(name, ("finite", math.isfinite))
        numbers = value if isinstance(value, tuple) else (value,)
        if not all(holds(x) and math.isfinite(x) for x in numbers if isinstance(x, int | float)):
            raise ValueError(f"{name} is {value}, but must be {rule}")
    size, accumulate = config.optim.batch_size, config.optim.accumulate
    if size % accumulate:
        raise ValueError(f"optim.batch_size is {size}, but must be a multiple of optim.accumulate, {accumulate}")
    if config.gate.loss == "edges" and config.task != "segment":
        raise ValueError("gate.loss is edges, which needs label maps, but the task is to classify; choose another loss")
    if config.gate.teacher is not None and config.gate.loss != "attention":
        raise ValueError(
            f"gate.teacher is {config.gate.teacher}, but gate.loss is {config.gate.loss}, which asks no teacher; "
            f"choose --gate-loss attention"
        )
    about = config.reducer
    if about.name == "none" and (about.rate, about.r, about.at, about.teacher) != (None,) * 4:
        raise ValueError("reducer.name is none, but it has settings; choose a reducer, such as --reducer evit")
    if config.reducer.name == "dynamicvit" and config.task == "segment":
        raise ValueError("reducer.name is dynamicvit, which learns from a classifier; to segment choose evit or tome")
    if config.model.gate_from is not None and config.model.gate not in ("learned", "context"):
        raise ValueError(
            f"model.gate_from is {config.model.gate_from}, but model.gate is {config.model.gate}; give one of them"
        )
    if config.model.freeze_gate and config.model.gate_from is None:
        raise ValueError("model.freeze_gate is true, but an untrained gate would stay so; give one with --gate-from")
    if config.gate.follow and not config.model.freeze_gate:
        raise ValueError("gate.follow is true, but is for a gate that does not learn; give one with --freeze-gate")


def settings(record: Any, prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Dotted name, type and value of every setting."""
    for name, kind in get_type_hints(type(record)).items():
        value = getattr(record, name)
        if is_dataclass(kind) and isinstance(value, kind):  # type: ignore[arg-type]
            yield from settings(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", kind, value


def to_dict(config: Config) -> dict[str, Any]:
    return asdict(config)


def from_dict(values: dict[str, Any]) -> Config:
    """What `to_dict` wrote, perhaps by way of JSON."""
    return _build(Config, values, "")


def override(config: Config, values: dict[str, str]) -> Config:
    """Replace fields by dotted name; values are text and are read by the field's type."""
    for name, text in values.items():
        config = _set(config, name.split("."), text, name)
    check(config)  # once: on the way settings need not fit each other
    return config


def _set(record: Any, path: list[str], text: str, name: str) -> Any:
    hints = get_type_hints(type(record))
    if isinstance(record, dict):  # options of the model: whatever timm takes
        return {**record, ".".join(path): guess(text)}
    if path[0] not in hints:
        raise ValueError(f"there is no setting {name!r}; {_near(name)}")
    value = getattr(record, path[0])
    if len(path) > 1 and (is_dataclass(value) or isinstance(value, dict)):
        return _with(record, path[0], _set(value, path[1:], text, name))
    if len(path) > 1 or is_dataclass(value):
        raise ValueError(f"{name!r} is no single setting; its fields are {', '.join(names(hints[path[0]]))}")
    return _with(record, path[0], read(text, hints[path[0]], name))


def _with(record: Any, name: str, value: Any) -> Any:
    """A copy with one value changed, not checked yet."""
    changed = copy(record)
    object.__setattr__(changed, name, value)
    return changed


def _near(name: str) -> str:
    """The settings that may have been meant, best first: of the same last name, or spelt alike."""
    known = [known for known, _, _ in settings(Config())]
    last = name.split(".")[-1]
    same = [other for other in known if other.split(".")[-1] == last]
    near = same or get_close_matches(name, known, n=3) or [k for k in known if last and last in k]
    return f"did you mean {' or '.join(near)}?" if near else f"known are {', '.join(known)}"


def _build(kind: Any, values: Any, name: str) -> Any:
    if not isinstance(values, dict):
        raise ValueError(f"{name or 'the configuration'} is {values!r}, but must have fields {', '.join(names(kind))}")
    hints = get_type_hints(kind)
    if unknown := values.keys() - hints.keys():
        wrong = f"{name}.{min(unknown)}".lstrip(".")
        raise ValueError(f"there is no setting {wrong!r}; this msvit knows {', '.join(hints)}")
    ready = {}
    for key, value in values.items():
        if is_dataclass(hints[key]):
            ready[key] = _build(hints[key], value, f"{name}.{key}".lstrip("."))
        else:
            ready[key] = tuple(value) if isinstance(value, list) else value
    return kind(**ready)
