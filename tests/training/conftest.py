from collections.abc import Iterator

import pytest
from accelerate.state import AcceleratorState


@pytest.fixture(autouse=True)
def _fresh_accelerator() -> Iterator[None]:
    """Accelerate remembers the first precision it was asked for."""
    AcceleratorState._reset_state(True)
    yield
    AcceleratorState._reset_state(True)
