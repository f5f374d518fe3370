"""CUDA graphs without a GPU: a capture writes down every operation, a replay does them again into the same tensors.

Memory is never reused here, so this shows what a replay computes, not what it may have overwritten.
"""

import gc
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from msvit.fast import graphs


class FakeGraph:
    def __init__(self) -> None:
        self.operations: list[Any] = []

    def reset(self) -> None:
        self.operations.clear()

    def replay(self) -> None:
        with torch.no_grad():
            for function, args, kwargs, out in self.operations:
                again = function(*args, **kwargs)
                for old, new in zip(tree_leaves(out), tree_leaves(again), strict=True):
                    if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                        old.copy_(new)


class Recorder(TorchDispatchMode):
    def __init__(self, graph: FakeGraph) -> None:
        super().__init__()
        self.graph = graph

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        # A graph holds addresses: a parameter whose `.data` is set later is not followed.
        here = tree_map_only(torch.Tensor, torch.Tensor.detach, (args, kwargs or {}, out))
        self.graph.operations.append((function, *here))
        return out


@contextmanager
def fake_capture(graph: FakeGraph, pool: Any = None, capture_error_mode: str = "global") -> Any:
    with Recorder(graph):
        yield


def use_fake_graphs(patch: pytest.MonkeyPatch) -> None:
    """Nor is garbage collected for each pool of graphs: in a process of tests that takes half a second."""
    without_collecting = {name: getattr(gc, name) for name in ("isenabled", "enable", "disable")}
    patch.setattr(graphs, "gc", SimpleNamespace(**without_collecting, collect=lambda: 0))
    stream = SimpleNamespace(wait_stream=lambda other: None)
    patch.setattr(graphs, "side_stream", lambda device: stream)
    for name, value in {
        "CUDAGraph": FakeGraph, "graph": fake_capture, "graph_pool_handle": object,
        "current_device": lambda: 0, "current_stream": lambda: stream, "stream": lambda each: nullcontext(),
    }.items():  # fmt: skip
        patch.setattr(torch.cuda, name, value)
