"""Captures without cuBLAS's workspace; that they compute the same is tested on a GPU with all that is captured."""

import os
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch

from msvit.compiling import workspaces
from msvit.compiling.workspaces import VARIABLES, is_set_by_user, lean_stream, without_workspace

SETTINGS = ("cublas_workspace_size", "cublaslt_workspace_size")


class Setting:
    """As `torch.backends.cuda.cublas_workspace_size`."""

    def __init__(self) -> None:
        self.size = 4096

    def __call__(self, size: int | None = None) -> int:
        self.size = self.size if size is None else size
        return self.size


@pytest.fixture(autouse=True)
def _nothing_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


def end_by_error() -> None:
    with without_workspace():
        raise KeyError


def test_sizes_are_none_inside_and_as_before_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = [Setting(), Setting()]
    for name, setting in zip(SETTINGS, settings, strict=True):
        monkeypatch.setattr(torch.backends.cuda, name, setting, raising=False)
    with without_workspace():
        assert [setting.size for setting in settings] == [0, 0]
    with pytest.raises(KeyError):
        end_by_error()
    assert [setting.size for setting in settings] == [4096, 4096]
    assert not set(VARIABLES) & set(os.environ)


def test_an_older_torch_is_told_by_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in SETTINGS:
        monkeypatch.delattr(torch.backends.cuda, name, raising=False)
    with without_workspace():
        assert {name: os.environ[name] for name in VARIABLES} == VARIABLES
    with pytest.raises(KeyError):
        end_by_error()
    assert not set(VARIABLES) & set(os.environ)


@pytest.mark.parametrize(
    "choose",
    [
        lambda patch: patch.setenv("CUBLASLT_WORKSPACE_SIZE", "4096"),
        lambda patch: patch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8"),
        lambda patch: patch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True),
        lambda patch: patch.setattr(
            torch.backends.cuda, "preferred_blas_library", lambda: torch._C._BlasBackend.Cublaslt
        ),
    ],
)
def test_what_a_user_has_set_stays(
    choose: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not is_set_by_user()
    choose(monkeypatch)
    assert is_set_by_user()


def test_where_products_fail_without_a_workspace_they_keep_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object) -> None:
        raise RuntimeError("OOM trying to allocate workspace for cublaslt")

    monkeypatch.setattr(torch.cuda, "Stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "stream", nullcontext)
    monkeypatch.setattr(workspaces, "without_workspace", fail)
    assert lean_stream.__wrapped__(0) is None


@pytest.mark.gpu
def test_products_of_large_batches_clear_no_counters() -> None:
    from torch.profiler import ProfilerActivity, profile

    from msvit.compiling.graphs import Captured

    x, weight = torch.randn(25344, 384, device="cuda").bfloat16(), torch.randn(384, 1152, device="cuda").bfloat16()
    bias, found = weight[0].clone(), []
    for lean in (False, True):
        run = Captured(lambda: (torch.addmm(bias, x, weight),), torch.cuda.graph_pool_handle(), lean=lean)
        with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as seen:
            (y,) = run()
            torch.cuda.synchronize()
        found.append(y)
        cleared = [event for event in seen.events() if "memset" in event.name.lower()]
        assert not lean or not cleared
    assert torch.allclose(*found, rtol=2e-2, atol=2e-2)
