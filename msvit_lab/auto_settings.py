"""Settings that a run leaves open, filled in: mode, precision, mean and std of its images."""

from dataclasses import replace
from typing import Any

import torch
from timm.data import resolve_data_config
from timm.models import get_pretrained_cfg

from msvit.gates import Normalization
from msvit.saving.host import check_name
from msvit_lab.config import TRAINED_GATES, Config, Mode
from msvit_lab.runs import read_config, run_to_start_from

LOGIT_LOSSES = ("edges", "attention")  # with a target for each cell: their gates need no noise to explore


def resolve_settings(config: Config, device: torch.device) -> Config:
    """Fill in what `config.AUTO_VALUES` lists: mean and std of the weights the run starts from, mode and precision."""
    data, optim = config.data, config.optim
    if data.mean is None or data.std is None:
        mean, std = normalisation(config)
        data = replace(data, mean=data.mean or mean, std=data.std or std)
    if optim.precision == "auto":
        optim = replace(optim, precision="bf16" if computes_bf16(device) else "no")
    return replace(config, data=data, model=replace(config.model, mode=training_mode(config)), optim=optim)


def gate_learns(config: Config) -> bool:
    return config.model.gate in TRAINED_GATES and not config.model.freeze_gate


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
    """Of the run's images, where it is resolved."""
    data = config.data
    return None if data.mean is None or data.std is None else Normalization(data.mean, data.std)


def computes_bf16(device: torch.device) -> bool:
    """Whether the device has instructions for products of bfloat16; without them they are slower than float32."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    found = torch.cpu.get_capabilities()
    return any(found.get(name, False) for name in ("avx512_bf16", "amx_bf16", "bf16", "sve_bf16"))


def describe_precision(config: Config, device: torch.device) -> str:
    """The precision of a resolved run in words, for the person who started it."""
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
