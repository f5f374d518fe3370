"""What belongs to the whole process, so that a test that changes it would change the next one."""

import os
import sys
from collections.abc import Callable
from typing import Any

import torch


def _set_mkldnn(enabled: bool) -> None:
    torch.backends.mkldnn.enabled = enabled


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}  # pytest's own


def _set_environment(variables: dict[str, str]) -> None:
    for name in _environment().keys() - variables.keys():
        del os.environ[name]
    os.environ.update(variables)


def _image_endings() -> Any:
    from timm.data import get_img_extensions  # not above: it imports Triton, see conftest.py

    return get_img_extensions()


def _set_image_endings(endings: Any) -> None:
    from timm.data import set_img_extensions

    set_img_extensions(endings)


# What belongs to the whole process: how to read it, how to set it.
SWITCHES: tuple[tuple[Callable[[], Any], Callable[[Any], None]], ...] = (
    (lambda: torch.backends.mkldnn.enabled, _set_mkldnn),  # off for good after a bf16 product on a CPU without bf16
    (_environment, _set_environment),  # accelerate writes into it
    (_image_endings, _set_image_endings),  # .webp is added when a folder is opened
    (torch.get_num_threads, torch.set_num_threads),
    (torch.get_default_dtype, torch.set_default_dtype),
    (torch.is_grad_enabled, torch.set_grad_enabled),
    (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    (torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms),
    (os.getcwd, os.chdir),
)


def forget_accelerator() -> None:
    """Accelerate remembers the first precision it was asked for."""
    if "accelerate.state" in sys.modules:
        sys.modules["accelerate.state"].AcceleratorState._reset_state(True)
