"""Captures survive: old graphs go with their model, the garbage collector waits, and a failure leaves CUDA usable."""

import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from compiled_pairs import pair, run
from tiny import KINDS, SWINS, assert_same_output, batch_of, tiny_model

import msvit
from msvit.fast import graphs
from msvit.fast.graphs import Captured, Pool


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("fake_graphs", "no_collector")
@pytest.mark.parametrize("learns", [False, True])
def test_graphs_are_freed_with_their_model(learns: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    kind = torch.cuda.CUDAGraph
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: made.append(kind()) or made[-1])
    model, fast = pair()
    run(fast, batch_of(model, 2)[0], learns=learns)
    graphs = [weakref.ref(graph) for graph in made]
    made.clear()
    assert graphs
    assert all(graph() is not None for graph in graphs)
    del fast
    assert [graph() for graph in graphs] == [None] * len(graphs)


@pytest.mark.usefixtures("fake_graphs", "no_collector")
@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("enabled", [False, True])
def test_the_collector_is_off_during_a_capture_and_as_before_afterwards(fails: bool, enabled: bool) -> None:
    seen = []

    def call() -> tuple[torch.Tensor, ...]:
        seen.append(gc.isenabled())
        if fails and len(seen) == 3:  # the first two are the warm-up
            raise KeyError("raised inside")
        return (torch.zeros(1),)

    if enabled:
        gc.enable()
    with pytest.raises(KeyError, match="raised inside") if fails else nullcontext():
        Captured(call, Pool())
    assert gc.isenabled() is enabled
    assert seen == [enabled, enabled, False]


# On a GPU

ALL = (*KINDS, *SWINS, "evit", "tome")


def model_of(name: str, dtype: torch.dtype = torch.float32) -> msvit.MSViT:
    reducers: dict[str, Callable[[], Any]] = {"evit": lambda: msvit.EViT(0.6, at=(1,)), "tome": lambda: msvit.ToMe(r=3)}
    if name in reducers:
        return tiny_model(dtype=dtype, reducer=reducers[name]()).cuda().eval()
    own = {"num_heads": (1, 2, 4, 8)} if name in SWINS else {}
    return tiny_model(name, dtype, **own).cuda().eval()


def step(model: msvit.MSViT, image: torch.Tensor, mask: torch.Tensor) -> None:
    model.train()
    model(image, mask=mask).logits.float().square().sum().backward()
    model.eval()


@pytest.mark.gpu
def test_models_of_every_kind_can_be_dropped_while_others_are_captured() -> None:
    kept: list[Any] = []
    threshold = gc.get_threshold()
    gc.set_threshold(1)
    try:
        for name in ALL:
            for dtype in (torch.float32, torch.bfloat16):
                model = model_of(name, dtype)
                fast = msvit.compile(model, inductor=False)
                image, mask = (t.to(dtype) for t in batch_of(model, 3))
                with torch.inference_mode():
                    assert_same_output(fast(image, mask=mask), model(image, mask=mask), 0.1)
                    fast(image)
                if name in KINDS:
                    step(fast, image, mask)
                kept.append(fast)
                fast.itself = kept[-1:]  # a cycle: only the collector can free its graphs
                del kept[:-1]
        torch.rand(4, device="cuda")
    finally:
        gc.set_threshold(*threshold)


FAILURES: dict[str, Callable[[], Any]] = {
    "out of memory": lambda: torch.empty(2**50, device="cuda", dtype=torch.uint8),
    "an error of Python": lambda: {}["raised inside"],
    "waiting for the device": torch.cuda.synchronize,
}


@pytest.mark.gpu
@pytest.mark.parametrize("failure", FAILURES)
@pytest.mark.parametrize("learns", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_after_a_failed_capture_everything_goes_on(failure: str, learns: bool, dtype: torch.dtype) -> None:
    model = model_of(KINDS[0], dtype)
    fast = msvit.compile(model, inductor=False)
    image, mask = (t.to(dtype) for t in batch_of(model, 3))

    def fails_in_a_capture(module: Any, args: Any) -> None:
        if torch.cuda.is_current_stream_capturing():
            torch.rand(2, device="cuda")
            FAILURES[failure]()

    def call() -> None:
        if learns:
            step(fast, image, mask)
        else:
            with torch.inference_mode():
                assert_same_output(fast(image, mask=mask), model(image, mask=mask), 0.1)

    head = fast.backbone.host.get_classifier()
    stream = torch.cuda.current_stream()
    hook = head.register_forward_pre_hook(fails_in_a_capture)
    for _ in range(2):
        with pytest.raises((RuntimeError, KeyError)):
            call()
        assert gc.isenabled()
        assert torch.cuda.current_stream() == stream
        assert torch.rand(1000, device="cuda").unique().numel() > 900
        with torch.inference_mode():
            model(image)
    hook.remove()
    for _ in range(2):
        call()


@pytest.mark.gpu
def test_other_threads_may_allocate_during_a_capture() -> None:
    begun, stop = threading.Event(), threading.Event()

    def allocate() -> None:
        size = 2**22
        while not stop.is_set():
            size += 2**21
            torch.empty(size % 2**28, dtype=torch.uint8, device="cuda")  # a size that no cache has
            begun.set()

    thread = threading.Thread(target=allocate)
    thread.start()
    try:
        begun.wait()
        for size in range(1, 9):
            model = model_of(KINDS[0], torch.bfloat16)
            image, mask = (t.bfloat16() for t in batch_of(model, size))
            with torch.inference_mode():
                assert_same_output(msvit.compile(model)(image, mask=mask), model(image, mask=mask), 0.1)
    finally:
        stop.set()
        thread.join()


@pytest.mark.gpu
def test_a_capture_that_cannot_be_ended_leaves_its_memory_to_others() -> None:
    pool = graphs.Pool()
    x = torch.zeros(4, device="cuda")

    def call() -> tuple[torch.Tensor, ...]:
        if torch.cuda.is_current_stream_capturing():
            torch.cuda.synchronize()
        return (x + 1,)

    first = pool.handle
    with pytest.raises(RuntimeError):
        Captured(call, pool)
    assert pool.handle != first
    (y,) = Captured(lambda: (x + 1,), pool)()
    assert y.tolist() == [1, 1, 1, 1]
