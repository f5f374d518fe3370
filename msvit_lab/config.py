"""The configuration of a run: frozen dataclasses, checked by pydantic when made, overridden by name.

    config = Config(data=Data(source="pets"), optim=Optim(epochs=10))
    override(config, {"gate.target": "0.1", "optim.lr": "3e-4"})      # as `--set gate.target=0.1`
    from_dict(asdict(config)) == config
"""

import json
from collections.abc import Iterator
from dataclasses import asdict, field, is_dataclass
from difflib import get_close_matches
from functools import reduce
from operator import getitem
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

Crops = Literal["inception", "medium", "light", "none"]
GateKind = Literal["learned", "context", "none", "disc", "entropy", "gradient", "random", "all-coarse"]
TRAINED_GATES = ("learned", "context")  # the others have no weights
GateLoss = Literal["gbas", "bas", "bas-flat", "l0", "edges", "attention"]  # edges: for segmentation
Mode = Literal["packed", "trimmed", "masked", "auto"]
ReducerKind = Literal["none", "evit", "dynamicvit", "tome"]
Switch = Literal["auto", True, False]
Task = Literal["classify", "segment"]

Count = Annotated[int, Field(gt=0)]
Natural = Annotated[int, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
NonNegative = Annotated[float, Field(ge=0)]
Decay = Annotated[float, Field(ge=0, lt=1)]
Share = Annotated[float, Field(ge=0, le=1)]
Portion = Annotated[float, Field(gt=0, le=1)]
Target = Annotated[float, Field(gt=0, lt=1)]

STRICT = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Data:
    source: str = "scenes"  # a path, or scenes
    img_size: Count = 224
    crops: Crops = "inception"
    mean: tuple[Share, Share, Share] | None = None  # of pixel values in [0, 1]; by default what the host's weights want
    std: tuple[Portion, Portion, Portion] | None = None
    interpolation: Literal["bilinear", "bicubic"] = "bilinear"
    eval_crop: Portion = 1.0  # 1.0: the whole image, resized; 0.875: resize and centre crop
    # Classification, in training, as timm has them:
    rand_augment: str | None = None  # such as rand-m9-mstd0.5-inc1; with cache=false
    erasing: Share = 0.0  # probability of random erasing
    mixup: NonNegative = 0.0  # alpha; 0 for none
    cutmix: NonNegative = 0.0  # alpha; 0 for none
    repeats: Count = 1  # repeated augmentation: views of an image in one epoch, which stays as long
    cache: bool = False  # decode once, keep the images on the device
    workers: Natural | None = None
    skip_bad: bool = False
    holdout: Decay = 0.0  # share of each class to validate with, where class folders have no validation set
    num_train: Count | None = None  # images drawn for scenes
    num_val: Count | None = None
    scene_size: Count = 64  # px: scenes are drawn at one size and resized to img_size, as photographs are
    # Segmentation, where img_size is the side of training crops and of the windows of evaluation:
    short_side: Count | None = None  # images are resized to this first
    scales: tuple[Positive, Positive] = (0.5, 2.0)  # then, in training, by a random factor
    max_share: Portion = 0.75  # of one class in a crop
    photometric: bool = True
    stride: Count | None = None  # of windows; their own side by default


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Model:
    name: str = "vit_small_patch16_224"
    weights: str | None = None  # a file of pretrained weights, or a run to start from
    pretrained: bool = False  # timm's own weights
    options: dict[str, Any] = field(default_factory=dict)  # further arguments of timm.create_model
    coarse: Count | None = None  # twice the patch size by default; of a Swin, the scale of block merge_at
    merge_at: int | None = None  # of a Swin: the block at which coarse tokens enter, 3 by default
    gate: GateKind = "learned"  # context: one that looks around; none: the dense baseline
    share: Share = 0.3  # of fine cells, for the gates that do not learn
    share_of: str | None = None  # or a run: as many fine cells as its gate
    gate_from: str | None = None  # a trained gate: a folder of msvit.save_gate, or a run
    freeze_gate: bool = False  # do not train it further
    mode: Mode = "packed"  # of training; auto: trimmed if the gate learns from the task, otherwise packed
    decoder: Literal["mask", "linear"] = "mask"  # of a Segmenter


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Gate:
    loss: GateLoss = "gbas"
    target: Target = 0.25  # wanted share of fine cells: a pull, not a promise
    weight: NonNegative = 4.0
    center: bool = True  # GBaS starts with its priors high in the centre
    prior: Literal["relaxed-bernoulli", "normal", "beta"] = "relaxed-bernoulli"  # of batch-shaping
    prior_temperature: Positive = 0.3  # of the relaxed Bernoulli; the standard deviation of a normal prior
    sigma: Positive = 0.1  # GBaS: standard deviation of the hyperprior
    prior_lr: Positive | None = None  # GBaS: peak learning rate of theta; the gate's by default, as is its warm-up
    cut_twins: Literal["keep", "zero"] = "keep"  # the task's gradient of coarse cells whose fine tokens were trimmed
    sampled: bool = False  # the noisy decision into the gate loss, as the paper has it, instead of the probability
    noise: NonNegative = 1.0
    temperature: Positive = 1.0
    lr_scale: Positive = 1.0  # of the model's learning rate
    warmup_epochs: NonNegative = 6.0
    clip: Positive | None = 1.0  # norm of the gate's gradients, apart; none: with all others, by optim.clip (the paper)
    teacher: str | None = None  # loss attention: a dense run; by default the host as it was before training
    follow: bool = False  # a frozen gate: its threshold goes where the target share of the cells lies above it


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Reduction:
    name: ReducerKind = "none"
    rate: float | None = None  # share of tokens kept: by evit and dynamicvit at each stage, by tome in each block
    r: int | None = None  # tome: tokens merged in each block, instead of a rate
    at: tuple[int, ...] | None = None  # blocks of evit and dynamicvit; 3, 6 and 9 by default
    teacher: str | None = None  # dynamicvit: a dense run; by default the host as it was before training


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Optim:
    name: Literal["sgd", "adamw"] = "adamw"
    lr: Positive = 1e-3
    min_lr: NonNegative = 0.0
    head_scale: Positive = 1.0  # of the learning rate, for what starts from nothing: the classifier, or the decoder
    momentum: Decay = 0.9
    weight_decay: NonNegative = 0.0
    epochs: Positive = 20.0
    batch_size: Count = 512  # over all processes
    accumulate: Count = 1
    schedule: Literal["cosine", "poly"] = "cosine"  # poly: to the power of 0.9
    warmup_epochs: NonNegative = 0.5
    clip: Positive | None = 1.0  # norm of the gradients, the gate's counted if gate.clip is none; none: no clipping
    smoothing: Decay = 0.0
    ema: Decay = 0.0  # decay of the EMA of the weights; 0 for none
    precision: Literal["auto", "no", "bf16", "fp16"] = "no"  # no: float32; auto: bf16 where the device computes in it
    zero_head: bool = False  # start the classifier at zero
    graphs: Switch = "auto"  # on one GPU, replay steps as CUDA graphs: less work for the CPU, more memory
    inductor: Switch = "auto"  # with graphs, compile too: up to a minute at the start; auto: for more than 2,000 steps


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Config:
    task: Task = "classify"
    data: Data = Data()
    model: Model = field(default_factory=Model)
    gate: Gate = Gate()
    reducer: Reduction = Reduction()
    optim: Optim = Optim()
    seed: Natural = 0
    eval_every: Positive = 1.0  # epochs
    checkpoint_every: Positive = 1.0  # epochs
    log_every: Count = 10  # steps

    def __post_init__(self) -> None:
        """Raise ValueError unless the settings fit each other."""
        model, gate, reducer, optim = self.model, self.gate, self.reducer, self.optim
        if optim.batch_size % optim.accumulate:
            must = f"must be a multiple of optim.accumulate, {optim.accumulate}"
            raise ValueError(f"optim.batch_size is {optim.batch_size}, but {must}")
        if gate.loss == "edges" and self.task != "segment":
            raise ValueError("gate.loss is edges, which needs label maps, but task is classify; choose another loss")
        if gate.teacher is not None and gate.loss != "attention":
            raise ValueError(
                f"gate.teacher is {gate.teacher}, but gate.loss is {gate.loss}, which has no teacher; "
                f"choose --gate-loss attention"
            )
        if gate.cut_twins == "zero" and reducer.name != "none":
            raise ValueError(
                f"gate.cut_twins is zero, but reducer.name is {reducer.name}, after which the tokens that trimming cut "
                f"are no longer known; leave one of them out"
            )
        if self.data.holdout and self.task == "segment":
            raise ValueError(f"data.holdout is {self.data.holdout}, but is for classification; make a folder val/")
        if reducer.name == "none" and reducer != Reduction():
            raise ValueError("reducer.name is none, but it has settings; choose a reducer, such as --reducer evit")
        if reducer.name == "dynamicvit" and self.task == "segment":
            raise ValueError("reducer.name is dynamicvit, which needs a classifier; to segment choose evit or tome")
        if model.gate_from is not None and model.gate not in TRAINED_GATES:
            raise ValueError(f"model.gate_from is {model.gate_from}, but model.gate is {model.gate}; give one of them")
        if model.share_of is not None and model.gate in (*TRAINED_GATES, "none"):
            raise ValueError(f"model.share_of is {model.share_of}, but is for a gate that does not learn; leave it out")
        if model.freeze_gate and model.gate_from is None:
            raise ValueError("model.freeze_gate is true, but the gate is not trained; give one with --gate-from")
        if gate.follow and not model.freeze_gate:
            raise ValueError("gate.follow is true, but is for a gate that does not learn; give one with --freeze-gate")


# Values that a run replaces when it starts (auto_settings.py, compiled.choose): its config.json has what it found.
AUTO_VALUES: dict[str, Any] = {
    "data.mean": None, "data.std": None, "model.mode": "auto", "optim.precision": "auto", "optim.graphs": "auto",
    "optim.inductor": "auto",
}  # fmt: skip


def settings(config: Any, prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Dotted name, type and value of every setting."""
    for name, kind in _kinds(type(config)).items():
        value = getattr(config, name)
        if is_dataclass(kind):
            yield from settings(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", kind, value


def from_dict(values: dict[str, Any]) -> Config:
    """What `asdict` returned, or what was read from its JSON. Raise ValueError for anything else."""
    try:
        return TypeAdapter(Config).validate_json(json.dumps(values))  # as JSON, where lists stand for tuples
    except ValidationError as error:
        raise ValueError(_sentence(error, values)) from None


def override(config: Config, values: dict[str, str]) -> Config:
    """Replace settings by dotted name; values are text and are read by the setting's type."""
    kinds = {name: kind for name, kind, _ in settings(config)}
    changed = asdict(config)
    for name, text in values.items():
        if name.startswith("model.options."):  # whatever timm takes
            changed["model"]["options"][name.removeprefix("model.options.")] = _guess(text)
        elif name in kinds:
            *path, last = name.split(".")
            reduce(getitem, path, changed)[last] = _read(text, kinds[name])
        elif name in changed:
            raise ValueError(f"{name!r} is no single setting; its fields are {', '.join(changed[name])}")
        else:
            raise ValueError(f"there is no setting {name!r}; {_near(name, list(kinds))}")
    return from_dict(changed)


def _read(text: str, kind: Any) -> Any:
    """Text as a value of this type, or as it is if it cannot be one, which is then an error of the whole."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return _read(text, arguments[0])
    if origin in (Union, UnionType):
        return None if text.lower() in ("none", "") else _read(text, arguments[0])
    if origin is tuple:
        return tuple(_read(part.strip(), arguments[0]) for part in text.strip("()[] ").split(","))
    if kind is bool or (origin is Literal and True in arguments):
        return {"true": True, "false": False}.get(text.lower(), text)
    try:
        return kind(text) if kind in (int, float) else text
    except ValueError:
        return text


def _guess(text: str) -> Any:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return {"true": True, "false": False, "none": None}.get(text.lower(), text)


def _near(name: str, known: list[str]) -> str:
    """The settings that may have been meant, best first: of the same last name, or spelt alike."""
    last = name.split(".")[-1]
    same = [other for other in known if other.split(".")[-1] == last]
    near = same or get_close_matches(name, known, n=3) or [k for k in known if last and last in k]
    return f"did you mean {' or '.join(near)}?" if near else f"known are {', '.join(known)}"


def _sentence(error: ValidationError, values: Any) -> str:
    """The first of pydantic's errors: the setting's name, its value, and what it must be."""
    about = error.errors()[0]
    if about["type"] == "value_error":
        return str(about["ctx"]["error"])
    if about["type"] == "json_invalid":
        return f"the configuration cannot be read ({about['msg']}); write it again"
    path = [str(part) for part in about["loc"] if not isinstance(part, int)]  # of a tuple, the whole is shown
    name, value = ".".join(path), reduce(getitem, path, values)
    if about["type"] == "unexpected_keyword_argument":
        known = _kinds(reduce(lambda kind, part: _kinds(kind)[part], path[:-1], Config))
        return f"there is no setting {name!r}; this msvit knows {', '.join(known)}"
    must = "has too few values" if about["type"] == "missing" else about["msg"].replace("Input should", "must")
    return f"{name or 'the configuration'} is {value!r}, but {must}"


def _kinds(cls: Any) -> dict[str, Any]:
    return get_type_hints(cls, include_extras=True)
