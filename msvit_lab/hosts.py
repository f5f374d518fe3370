"""A host by its configuration, from timm's weights, a file or another run; and the trained models of runs."""

import logging
import re
import socket
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import huggingface_hub
import timm
from timm.models import get_pretrained_cfg
from torch import nn

from msvit.saving.host import check_name, run_options
from msvit.saving.model import load, load_or_build
from msvit_lab.config import Config
from msvit_lab.runs import Run, is_run, run_to_start_from
from msvit_lab.tasks import TASKS

CONNECT_SECONDS = 5.0  # for a hub to be reached, before its own retries take a minute
BLOCK_WEIGHT = re.compile(r"(blocks|layers)\..*\.(weight|bias|gamma)")  # buffers such as attn_mask are made anew


def make_host(config: Config, num_classes: int) -> nn.Module:
    """A timm model with our number of classes and input size, and its pretrained weights if asked for."""
    about, run = config.model, run_to_start_from(config)
    own = {**TASKS[config.task].host_options(num_classes), "img_size": config.data.img_size, **about.options}
    overlay = TASKS[config.task].data_settings(config) | own.pop("pretrained_cfg_overlay", {})
    if run is None:
        return create_host(about.name, about.weights, about.pretrained, overlay, **own)
    host = create_host(about.name, None, False, overlay, **own)
    take_weights(host, run, config.data.img_size)
    return host


def create_host(
    name: str, weights: str | Path | None, pretrained: bool, overlay: dict[str, Any] | None = None, **options: Any
) -> Any:
    """A timm model: with random weights, with those of a file, or with timm's own. `overlay`: of its pretrained_cfg."""
    check_name(name)
    overlay = dict(overlay or {})
    if weights is not None:
        if not Path(weights).is_file():
            raise ValueError(f"model.weights is {weights}, but there is no such file or run; give one of them")
        overlay["file"] = str(weights)
        if not overlay["file"].endswith(".npz"):  # models whose own weights are JAX's would read nothing else
            overlay["custom_load"] = False
    elif pretrained:
        check_download(name)
    try:
        with collecting_unmatched() as unmatched:
            given = {"pretrained": pretrained or weights is not None, "pretrained_cfg_overlay": overlay}
            host = timm.create_model(name, **given, **options)
    except Exception as error:  # whatever a hub, a file of weights or a constructor may raise
        source = weights or ("its pretrained weights" if pretrained else "random weights")
        raise ValueError(
            f"timm cannot build {name} from {source} with the options {options} ({type(error).__name__}: {error}); "
            f"weights on disk are given by --weights FILE"
        ) from None
    if weights is not None and unmatched:
        raise ValueError(
            f"{weights} is not of {name}: {len(unmatched)} weights of blocks are in one of them only "
            f"({', '.join(unmatched[:2])}, ...); name the model that they are of by --model"
        )
    return host


@contextmanager
def collecting_unmatched() -> Iterator[list[str]]:
    """Collect the names of weights in blocks that a host or its file lacks: timm loads the others and only logs it."""
    names, logger = list[str](), logging.getLogger("timm.models._builder")

    def collect(record: logging.LogRecord) -> bool:
        listed = re.match(r"(?:Missing|Unexpected) keys \((.*?)\)", record.getMessage())
        names.extend(name for name in (listed[1].split(", ") if listed else []) if BLOCK_WEIGHT.fullmatch(name))
        return False  # nothing is shown

    level = logger.level
    logger.setLevel(logging.INFO)  # missing weights are of this level
    logger.addFilter(collect)
    try:
        yield names
    finally:
        logger.removeFilter(collect)
        logger.setLevel(level)


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
            f"timm downloads the weights of {name} from {hub.hostname}, which cannot be reached ({error}); download "
            f"them elsewhere, and give the file by --weights FILE"
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


def load_trained(run: Run) -> Any:
    """The model of a run; if `msvit.save` could not describe its host, that is built from the run's configuration.

    Options from a folder are not trusted: `run_options` allows only arguments of the constructor.
    """

    def make() -> nn.Module:
        run_options(run.config.model.options)
        return make_host(without_weights(run.config), len(run.classes))

    run.check_finished()
    return load_or_build(run.model, make)


def without_weights(config: Config) -> Config:
    """The same with random weights, for what will be filled with others."""
    return replace(config, model=replace(config.model, weights=None, pretrained=False))


def read_run(folder: Path) -> tuple[Any, Config]:
    """The trained model of a run, and its configuration."""
    run = Run(folder)
    return load_trained(run), run.config


def read_model(folder: Path) -> tuple[Any, Config | None]:
    """The model of a run and its configuration; or of a folder of `msvit.save` or `save_pretrained`, which has none."""
    if not folder.is_dir():
        raise ValueError(f"{folder} is no folder; give a run of msvit train, such as runs/photos, or one of msvit.save")
    return read_run(folder) if is_run(folder) else (load(folder), None)
