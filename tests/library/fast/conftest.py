"""Graphs that need no GPU, for tests of captured calls."""

from collections.abc import Iterator

import pytest
from fake_graphs import use_fake_graphs
from plain_kernels import use_plain_kernels
from tiny import interprets

from msvit.execution.attention import force_backend
from msvit.fast import fp8_encoder, plan


@pytest.fixture
def fake_graphs(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Plans of buckets, or with the parameter "one graph" those of small batches."""
    if not interprets():
        pytest.skip("needs Triton's interpreter, and so no GPU")
    use_fake_graphs(monkeypatch)
    use_plain_kernels(monkeypatch)
    monkeypatch.setattr(fp8_encoder, "MIN_CAPABILITY", (0, 0))
    if getattr(request, "param", "buckets") == "buckets":
        monkeypatch.setattr(plan, "SMALL", 8)
        monkeypatch.setattr(plan, "ALIGN", 4)
    with force_backend("triton"):  # SDPA's list of lengths would stay as it was captured
        yield
