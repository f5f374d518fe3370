"""From a configuration to the parts of a run: images, loaders, models."""

from copy import deepcopy
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from msvit.backbones import Backbone, adapt
from msvit.conversion import convert
from msvit.gates import GATES, AllCoarse, AllFine, ContextGate, Gate, LearnedGate, LogitGate
from msvit.model import MSViT
from msvit.reduction import REDUCERS, make_reducer
from msvit.types import ScaleGrid
from msvit_lab.auto_settings import LOGIT_LOSSES, own_normalization, training_mode
from msvit_lab.config import TRAINED_GATES, Config
from msvit_lab.data import Loader
from msvit_lab.evaluation_files import OWN
from msvit_lab.gate_names import read_gate
from msvit_lab.hosts import make_host, read_run
from msvit_lab.runs import Run, is_evaluated, read_config, run_to_start_from
from msvit_lab.tasks import TASKS


class Sources(NamedTuple):
    train: Any
    val: Any


def open_sources(config: Config, classes: list[str] | None = None) -> Sources:
    """The training and the validation set. `classes`: an order that labels have already, in a run that goes on."""
    train = TASKS[config.task].open(config, "train", classes)
    if len(train.classes) < 2:
        raise ValueError(
            f"{config.data.source} has {len(train.classes)} class ({', '.join(train.classes)}), but there must be at "
            f"least 2 to tell apart; put the images of each class into a folder of its own, such as train/CLASS"
        )
    start = run_to_start_from(config)
    known = None if classes is not None or start is None else read_config(start)["classes"]
    if known is not None and known != train.classes and sorted(known) == sorted(train.classes):
        return open_sources(config, known)  # the classifier it starts from has this order
    return Sources(train, open_val(config, train.classes))


def open_val(config: Config, classes: list[str]) -> Any:
    """The validation set, its labels numbered as in training."""
    return TASKS[config.task].open(config, "val", classes)


def make_loader(source: Any, config: Config, *, train: bool, **where: Any) -> Loader:
    """`where`: device, and which process of how many this is (rank, world_size)."""
    size = config.optim.batch_size
    if train and len(source) < size:
        raise ValueError(
            f"there are {len(source)} images to train on, but optim.batch_size is {size}; "
            f"make it smaller, such as --set optim.batch_size={2 ** (len(source).bit_length() - 1)}"
        )
    return TASKS[config.task].loader(source, config, train, **where)


def make_model(config: Config, num_classes: int) -> Any:
    """An `MSViT` or, to segment, a `Segmenter`."""
    backbone = adapt(make_host(config, num_classes), config.model.merge_at)
    own, gate_from = config.model.coarse, config.model.gate_from
    coarse = own or backbone.default_coarse(None if gate_from is None else read_gate(Path(gate_from))[0])
    size = config.data.img_size
    if config.model.gate == "none" and gate_from is None:
        backbone, coarse = dense_cells(backbone, coarse, size)
    ScaleGrid(size, size, fine=backbone.fine, coarse=coarse)  # do cells fit?
    about = config.reducer
    reducer = make_reducer(about.name, rate=about.rate, r=about.r, at=about.at)
    gate = make_gate(config, coarse, backbone.in_chans)
    model = MSViT(backbone, gate, coarse, training_mode(config), reducer)
    return TASKS[config.task].wrap(model, config, num_classes)


def dense_cells(backbone: Backbone, coarse: int, size: int) -> tuple[Backbone, int]:
    """Backbone and cells of a dense model for images of `size` px: as they are or, if cells do not fit, the smallest.

    Those of a ViT are its patches. Those of a Swin are 2 x 2 of them, which its first merging makes one token.
    """
    if size >= coarse and size % coarse == 0:
        return backbone, coarse
    unit = dense_unit(backbone)
    if size < unit or size % unit:
        near = max(unit, size // unit * unit)
        kind = type(backbone.host).__name__
        raise ValueError(
            f"images are {size}px, but a dense {kind} with patches of {backbone.fine}px needs a multiple of {unit}; "
            f"give for example {near} or {near + unit}"
        )
    if backbone.merge_at is not None:
        backbone = adapt(backbone.host, merge_at=2).train(backbone.training)
    return backbone, unit


def dense_unit(backbone: Backbone) -> int:
    """The px that a dense model needs a multiple of: a patch of a ViT, 2 x 2 patches of a Swin."""
    return backbone.fine if backbone.merge_at is None else 2 * backbone.fine


def fit_dense(model: Any, size: int) -> Any:
    """A classifier for images of `size` px: a dense one with cells that fit, any other as it is."""
    if not isinstance(model.gate, AllFine):
        return model
    backbone, coarse = dense_cells(model.backbone, model.coarse, size)
    if coarse == model.coarse:
        return model
    other = MSViT(backbone, AllFine(coarse=coarse), coarse, model.mode, model.reducer).train(model.training)
    other.take_metadata(model)
    return other


def make_teacher(config: Config, model: Any) -> MSViT | None:
    """The dense model that a reducer learns from, if it does."""
    if model.reducer is None or not model.reducer.needs_teacher:
        return None
    teacher, own = dense_model(config.reducer.teacher, model), model.host
    shapes = [(h.embed_dim, h.num_classes, h.patch_embed.patch_size[0]) for h in (teacher.host, own)]
    if shapes[0] != shapes[1]:
        raise ValueError(
            f"the teacher {config.reducer.teacher} has width, classes and patch size {shapes[0]}, but the model has "
            f"{shapes[1]}; train a dense one of the same kind (--gate none) and give it by --set reducer.teacher=RUN"
        )
    if teacher.classes is not None and model.classes is not None and teacher.classes != model.classes:
        differ = next(pair for pair in zip(teacher.classes, model.classes, strict=True) if pair[0] != pair[1])
        raise ValueError(
            f"the teacher {config.reducer.teacher} has other classes than the images: its {differ[0]} is {differ[1]} "
            f"here; start from it too (--set model.weights=RUN), or train it again"
        )
    return teacher


def dense_model(folder: str | None, model: Any) -> MSViT:
    """A run's dense model or, without a folder, this one's host as it is now."""
    other = model if folder is None else read_run(Path(folder))[0]
    host = deepcopy(model.host) if folder is None else other.host
    teacher = convert(host, coarse=model.coarse, gate=AllFine(coarse=model.coarse))
    teacher.classes = other.classes if other.num_classes == teacher.num_classes else None
    return teacher.to(next(model.parameters()).device).eval().requires_grad_(False)


def needs_first_weights(config: Config) -> bool:
    """Whether the host as it was before training serves as teacher, so that a run that goes on needs it too."""
    gate = config.gate.loss == "attention" and config.gate.teacher is None
    reducer = config.reducer.name != "none" and config.reducer.teacher is None
    return gate or (reducer and REDUCERS[config.reducer.name].needs_teacher)


def make_gate(config: Config, coarse: int, in_chans: int) -> Gate:
    about = config.model
    noise = 0.0 if config.gate.loss in LOGIT_LOSSES else config.gate.noise
    sampling: dict[str, Any] = {"noise": noise, "temperature": config.gate.temperature}
    if about.gate_from is not None:
        return trained_gate(config, about.gate_from, coarse, **sampling)
    if about.gate in TRAINED_GATES:
        side = config.data.img_size // coarse
        kind = LearnedGate if about.gate == "learned" else ContextGate
        gate = kind(coarse, grid=(side, side), in_chans=in_chans, **sampling)
        if config.gate.loss == "attention":  # logits of a uniform one are 0, and a threshold decides what is fine
            nn.init.zeros_(gate.head.bias)
        return gate.set_normalization(own_normalization(config))
    if about.gate in ("none", "all-coarse"):
        return AllFine(coarse=coarse) if about.gate == "none" else AllCoarse(coarse=coarse)
    share = about.share if about.share_of is None else fine_share(Path(about.share_of))
    return GATES[about.gate](coarse=coarse, share=share)


def fine_share(folder: Path) -> float:
    """Of a run's gate, in its own evaluation."""
    if not is_evaluated(folder):
        raise ValueError(f"model.share_of is {folder}, but there is no finished run; give one with a gate")
    return Run(folder).evaluations[OWN]["fine_share"]


def trained_gate(config: Config, folder: str, coarse: int, noise: float, temperature: float) -> Gate:
    """The gate of `model.gate_from`, with this run's noise; frozen if asked."""
    gate, images = read_gate(Path(folder), coarse)[0], own_normalization(config)
    if gate.normalization is not None and images is not None:
        gate = gate.for_normalization(images.mean, images.std)
    if isinstance(gate, LogitGate):
        gate.noise, gate.temperature = noise, temperature
        if not config.model.freeze_gate and config.gate.loss not in LOGIT_LOSSES:  # others have no threshold
            nn.init.constant_(gate.head.bias, gate.head.bias.item() - gate.threshold)
            gate.threshold = 0.0
    return gate.requires_grad_(not config.model.freeze_gate)
