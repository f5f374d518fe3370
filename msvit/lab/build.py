"""From a configuration to the parts of a run: images, loaders, models."""

import logging
import re
import socket
import urllib.request
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, Self
from urllib.parse import urlsplit

import huggingface_hub
import timm
import torch
from timm.data import resolve_data_config
from timm.models import get_pretrained_cfg
from torch import nn

from msvit.backbones import Backbone, adapt
from msvit.checkpoint import is_run, load, load_or_build
from msvit.conversion import convert
from msvit.gates import GATES, AllCoarse, AllFine, ContextGate, Gate, LearnedGate, LogitGate, Normalization
from msvit.host_config import check_name, run_options
from msvit.lab.config import Config, Mode
from msvit.lab.data import Loader, check_same_classes
from msvit.lab.gate_names import read_gate
from msvit.lab.runs import check_finished, read_config, run_to_start_from
from msvit.lab.tasks import TASKS
from msvit.model import MSViT
from msvit.reduction import REDUCERS, make_reducer
from msvit.types import ScaleGrid

LOGIT_LOSSES = ("edges", "attention")  # with a target for each cell: their gates need no noise to explore
BLOCK_WEIGHT = re.compile(r"(blocks|layers)\..*\.(weight|bias|gamma)")  # buffers such as attn_mask are made anew
CONNECT_SECONDS = 5.0  # for a hub to be reached, before its own retries take a minute


class Sources(NamedTuple):
    train: Any
    val: Any


def settle(config: Config, device: torch.device) -> Config:
    """Fill in what `config.OPEN` lists: mean and std of the weights the run starts from, mode and precision."""
    data, optim = config.data, config.optim
    if data.mean is None or data.std is None:
        mean, std = normalisation(config)
        data = replace(data, mean=data.mean or mean, std=data.std or std)
    if optim.precision == "auto":
        optim = replace(optim, precision="bf16" if computes_bf16(device) else "no")
    return replace(config, data=data, model=replace(config.model, mode=training_mode(config)), optim=optim)


def gate_learns(config: Config) -> bool:
    return config.model.gate in ("learned", "context") and not config.model.freeze_gate


def training_mode(config: Config) -> Mode:
    """The mode to train in. `auto`: trimmed if the gate learns from the task, which needs inactive tokens, too."""
    if config.model.mode != "auto":
        return config.model.mode
    return "trimmed" if gate_learns(config) and config.gate.loss not in LOGIT_LOSSES else "packed"


def describe_mode(config: Config) -> str | None:
    """What `auto` is in this run, in words; None for a mode that was chosen, and for a dense model."""
    if config.model.mode != "auto" or config.model.gate == "none":
        return None
    mode = training_mode(config)
    learns = "learns" if mode == "trimmed" else "does not learn"
    return f"training {mode}, as the gate {learns} from the task; --mode chooses another"


def normalisation(config: Config) -> tuple[Any, Any]:
    """Mean and std for the weights a run starts from: another run's, or what timm says of the model."""
    run = run_to_start_from(config)
    if run is not None:
        data = read_config(run)["config"].data
        return data.mean, data.std
    check_name(config.model.name)
    known = get_pretrained_cfg(config.model.name)
    found = resolve_data_config({"img_size": config.data.img_size}, known.to_dict() if known else {})
    return tuple(found["mean"]), tuple(found["std"])


def own_normalization(config: Config) -> Normalization | None:
    """Of the run's images, where it is settled."""
    data = config.data
    return None if data.mean is None or data.std is None else Normalization(data.mean, data.std)


def computes_bf16(device: torch.device) -> bool:
    """Whether the device has instructions for products of bfloat16; without them they are slower than float32."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    if not hasattr(torch.cpu, "get_capabilities"):  # an older torch, which asks about x86 alone
        return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    found = torch.cpu.get_capabilities()
    return any(found.get(name, False) for name in ("avx512_bf16", "amx_bf16", "bf16", "sve_bf16"))


def describe_precision(config: Config, device: torch.device) -> str:
    """The precision of a settled run in words, for the person who started it."""
    name = {"no": "float32", "bf16": "bfloat16", "fp16": "float16"}[config.optim.precision]
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else "this CPU"
    if config.optim.precision == "bf16" and not computes_bf16(device):
        return (
            f"computing in bfloat16, for which {where} has no instructions: expect it to be several times slower "
            f"than --set optim.precision=no"
        )
    return f"computing in {name} on {where}"


def random_teacher_error(config: Config) -> str | None:
    """The error message for a gate that would learn from the attention of a randomly initialised model, or None."""
    started = config.model.weights is not None or config.model.pretrained
    if not gate_learns(config) or config.gate.loss != "attention" or config.gate.teacher is not None or started:
        return None
    return (
        "model.weights is not set, so the gate would learn what a network with random weights looks at; start from "
        "weights (--set model.weights=FILE_OR_DENSE_RUN, or --set model.pretrained=true to download timm's), name a "
        "trained dense run (--set gate.teacher=RUN), or train a gate that needs none (--gate learned --gate-loss gbas)"
    )


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
    val = open_val(config, train.classes)
    check_same_classes(train, val)
    return Sources(train, val)


def open_val(config: Config, classes: list[str]) -> Any:
    """The validation set, its labels numbered as in training."""
    return TASKS[config.task].open(config, "val", classes)


def make_loader(source: Any, config: Config, *, train: bool, **where: Any) -> Loader:
    """`where`: device, and which process of how many this is (rank, world_size)."""
    size = config.optim.batch_size
    if train and len(source) < size and where.get("drop_last") is not False:
        raise ValueError(
            f"there are {len(source)} images to train on, but optim.batch_size is {size}; "
            f"make it smaller, such as --set optim.batch_size={2 ** (len(source).bit_length() - 1)}"
        )
    return TASKS[config.task].loader(source, config, train, **where)


def make_model(config: Config, num_classes: int) -> Any:
    """An `MSViT` or, to segment, a `Segmenter`."""
    backbone = adapt(make_host(config, num_classes), config.model.merge_at)
    own, gate_from = config.model.coarse, config.model.gate_from
    coarse = own or backbone.usual_coarse(None if gate_from is None else read_gate(Path(gate_from))[0])
    size = config.data.img_size
    if config.model.gate == "none" and gate_from is None:
        backbone, coarse = dense_cells(backbone, coarse, size)
    ScaleGrid(size, size, fine=backbone.fine, coarse=coarse)  # do cells fit?
    about = config.reducer
    reducer = make_reducer(about.name, rate=about.rate, r=about.r, at=about.at)
    gate, power = make_gate(config, coarse, backbone.in_chans), config.model.proportional_attention
    model = MSViT(backbone, gate, coarse, training_mode(config), reducer, power)
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
    gate, power = AllFine(coarse=coarse), model.proportional_attention
    other = MSViT(backbone, gate, coarse, model.mode, model.reducer, power).train(model.training)
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


def make_host(config: Config, num_classes: int) -> nn.Module:
    """A timm model with our number of classes and input size, and its pretrained weights if asked for."""
    about = config.model
    check_name(about.name)
    own = TASKS[config.task].host_options(num_classes)
    options: dict[str, Any] = {**own, "img_size": config.data.img_size, **about.options}
    run = run_to_start_from(config)
    overlay = TASKS[config.task].data_settings(config)
    if about.weights is not None and run is None:
        if not Path(about.weights).is_file():
            raise ValueError(f"model.weights is {about.weights}, but there is no such file or run; give one of them")
        options |= {"pretrained": True}
        overlay["file"] = about.weights
        if not about.weights.endswith(".npz"):  # models whose own weights are JAX's would read nothing else
            overlay["custom_load"] = False
    elif about.pretrained and run is None:
        check_download(about.name)
        options |= {"pretrained": True}
    options["pretrained_cfg_overlay"] = overlay | options.get("pretrained_cfg_overlay", {})
    try:
        with UnmatchedWeights() as unmatched:
            host = timm.create_model(about.name, **options)
    except Exception as error:  # whatever a hub, a file of weights or a constructor may raise
        source = about.weights or ("its pretrained weights" if about.pretrained else "random weights")
        raise ValueError(
            f"timm cannot build {about.name} from {source} with model.options {about.options} "
            f"({type(error).__name__}: {error}); weights on disk are given by --weights FILE"
        ) from None
    if about.weights is not None and run is None and unmatched.names:
        raise ValueError(
            f"{about.weights} is not of {about.name}: {len(unmatched.names)} weights of blocks are in one of them only "
            f"({', '.join(unmatched.names[:2])}, ...); name the model that they are of by --model"
        )
    if run is not None:
        take_weights(host, run, config.data.img_size)
    return host


class UnmatchedWeights(logging.Handler):
    """Collects the names of weights in blocks that a host or its file lacks: timm loads the others and only logs it."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.logger = logging.getLogger("timm.models._builder")

    def emit(self, record: logging.LogRecord) -> None:
        listed = re.match(r"(?:Missing|Unexpected) keys \((.*?)\)", record.getMessage())
        found = listed[1].split(", ") if listed else []
        self.names += [name for name in found if BLOCK_WEIGHT.fullmatch(name)]

    def __enter__(self) -> Self:
        self.before = self.logger.level, self.logger.propagate
        self.logger.setLevel(logging.INFO)  # missing weights are of this level
        self.logger.propagate = False
        self.logger.addHandler(self)
        return self

    def __exit__(self, *error: object) -> None:
        self.logger.removeHandler(self)
        self.logger.setLevel(self.before[0])
        self.logger.propagate = self.before[1]


def check_download(name: str) -> None:
    """Raise ValueError unless weights that are not at hand can be downloaded."""
    known = get_pretrained_cfg(name)
    at_hand = known and known.hf_hub_id and huggingface_hub.try_to_load_from_cache(known.hf_hub_id, "model.safetensors")
    if isinstance(at_hand, str) or urllib.request.getproxies():  # behind a proxy only a download can tell
        return
    hub = urlsplit(huggingface_hub.constants.ENDPOINT)
    try:
        port = hub.port or (80 if hub.scheme == "http" else 443)
        socket.create_connection((hub.hostname or "", port), timeout=CONNECT_SECONDS).close()
    except OSError as error:
        raise ValueError(
            f"model.pretrained is true, but {hub.hostname} cannot be reached ({error}) to download the weights of "
            f"{name}; download them elsewhere and give the file by --weights FILE"
        ) from None


def take_weights(host: Any, run: Path, img_size: int) -> None:
    """Copy a run's weights into the host, position embedding resampled; the classifier only if its shape fits."""
    other: Any = read_run(run)[0].host
    if getattr(other, "pos_embed", None) is not None and other.patch_embed.img_size != host.patch_embed.img_size:
        other.set_input_size(img_size)
    own, given = host.state_dict(), other.state_dict()
    fits = {name: t for name, t in given.items() if name in own and own[name].shape == t.shape}
    if lacking := [name for name in (own.keys() | given.keys()) - fits.keys() if not name.startswith("head")]:
        raise ValueError(
            f"model.weights is the run {run}, whose model differs from {type(host).__name__} with these settings in "
            f"{min(lacking)}; give the same --model and model.options as that run has (of a Swin also data.img_size)"
        )
    host.load_state_dict(fits, strict=False)


def load_trained(folder: Path, config: Config, num_classes: int) -> Any:
    """The model of a run; if `msvit.save` could not describe its host, that is built from the run's configuration.

    Options from a folder are not trusted: `run_options` allows only arguments of the constructor.
    """

    def make() -> nn.Module:
        run_options(config.model.options)
        return make_host(without_weights(config), num_classes)

    return load_or_build(folder / "model", make)


def without_weights(config: Config) -> Config:
    """The same with random weights, for what will be filled with others."""
    return replace(config, model=replace(config.model, weights=None, pretrained=False))


def needs_first_weights(config: Config) -> bool:
    """Whether the host as it was before training serves as teacher, so that a run that goes on needs it too."""
    gate = config.gate.loss == "attention" and config.gate.teacher is None
    reducer = config.reducer.name != "none" and config.reducer.teacher is None
    return gate or (reducer and REDUCERS[config.reducer.name].needs_teacher)


def read_run(folder: Path) -> tuple[Any, Config]:
    """The trained model of a run, and its configuration."""
    about = read_config(folder)
    check_finished(folder, about)
    model = load_trained(folder, about["config"], len(about["classes"]))
    config = about["config"]
    model.classes = about["classes"]  # a model saved before these were part of it has none
    model.preprocessing = TASKS[config.task].preprocessing(config)
    return model, config


def read_model(folder: Path) -> tuple[Any, Config | None]:
    """The model of a run and its configuration; or of a folder of `msvit.save` or `save_pretrained`, which has none."""
    return read_run(folder) if is_run(folder) else (load(folder), None)


def make_gate(config: Config, coarse: int, in_chans: int) -> Gate:
    about = config.model
    noise = 0.0 if config.gate.loss in LOGIT_LOSSES else config.gate.noise
    sampling: dict[str, Any] = {"noise": noise, "temperature": config.gate.temperature}
    if about.gate_from is not None:
        return trained_gate(config, about.gate_from, coarse, **sampling)
    if about.gate in ("learned", "context"):
        side = config.data.img_size // coarse
        kind = LearnedGate if about.gate == "learned" else ContextGate
        gate = kind(coarse, grid=(side, side), in_chans=in_chans, **sampling)
        if config.gate.loss == "attention":  # logits of a uniform one are 0, and a threshold decides what is fine
            nn.init.zeros_(gate.head.bias)
        return gate.set_normalization(own_normalization(config))
    if about.gate in ("none", "all-coarse"):
        return AllFine(coarse=coarse) if about.gate == "none" else AllCoarse(coarse=coarse)
    return GATES[about.gate](coarse=coarse, share=about.share)


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
