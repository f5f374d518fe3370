"""For all tests: one draw, a process as it was found, and `pytest --shuffle 7`: files and tests in random order."""

import os
import random
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from process_state import SWITCHES, forget_accelerator

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before Triton is imported: its kernels then run on the CPU

torch.set_num_threads(1)  # tiny tensors: more threads only wait for each other


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--shuffle", type=int, metavar="SEED", help="files in random order, and the tests of each")


@pytest.hookimpl(tryfirst=True)  # pytest then puts tests of a shared fixture together
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if (seed := config.getoption("shuffle")) is not None:
        draw = random.Random(seed)
        files = list(dict.fromkeys(item.path for item in items))
        draw.shuffle(files)
        place = {path: index for index, path in enumerate(files)}
        draw.shuffle(items)
        items.sort(key=lambda item: place[item.path])
    for item in items:
        if not item.get_closest_marker("gpu"):
            continue
        if not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
        item.add_marker(pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"))


@pytest.fixture(autouse=True)
def _same_process_every_time() -> Iterator[None]:
    """The same draw for every test, and what one changes for the whole process is put back."""
    before = [read() for read, _ in SWITCHES]
    forget_accelerator()
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    yield
    forget_accelerator()
    for (read, write), value in zip(SWITCHES, before, strict=True):
        if read() != value:
            write(value)
