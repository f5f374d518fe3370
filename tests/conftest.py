import os

import jaxtyping
import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before Triton is imported: its kernels then run on the CPU


WARNINGS = (  # of torch about itself, when it compiles or is asked to look for waiting
    "ignore:.torch.jit.script_method. is deprecated:DeprecationWarning",
    "ignore:Synchronization debug mode is a prototype:UserWarning",
    "ignore:TensorFloat32 tensor cores:UserWarning",
    "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if not item.get_closest_marker("gpu"):
            continue
        if not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
        for words in WARNINGS:
            item.add_marker(pytest.mark.filterwarnings(words))


torch.set_num_threads(1)  # tiny tensors: more threads only wait for each other


@pytest.fixture(autouse=True)
def _same_draw_every_time() -> None:
    torch.manual_seed(0)


@pytest.fixture
def unchecked(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """For what is compiled: type checks would be compiled too, and take what is left open for no int."""
    given = getattr(request.node, "callspec", None)
    if given is None or given.params.get("options", {}).get("compile", True):
        monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
