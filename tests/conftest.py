import os

import jaxtyping
import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before Triton is imported: its kernels then run on the CPU


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


torch.set_num_threads(1)  # tiny tensors: more threads only wait for each other


@pytest.fixture(autouse=True)
def _same_draw_every_time() -> None:
    torch.manual_seed(0)


@pytest.fixture
def unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    """For what is compiled: type checks would be compiled too, and take what is left open for no int."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
