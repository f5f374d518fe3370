"""What is compiled by default, what is not and why, and that neither changes what is learned or measured."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from smoke_runs import done, lines, smoke
from tiny import SWINS, assert_same, batch_of, tiny_model

import msvit
from msvit.fast import cpu, cuda
from msvit.fast.encoders import choose_backend
from msvit_lab import compiled
from msvit_lab.compiled import MIN_CALLS, Choice, choose, compile_where_supported
from msvit_lab.evaluate import evaluate_run
from msvit_lab.runs import write_config
from msvit_lab.training.loop import compiled_as_before, train

LONG, SHORT = MIN_CALLS + 1, MIN_CALLS
SAID = "training is compiled on a GPU only"
DISTILLED = "deit_small_distilled_patch16_224"


@pytest.mark.parametrize(("given", "expected"), [
    (("cuda", "auto", "auto", SHORT), Choice(compiled=True)),
    (("cuda", "auto", "auto", LONG), Choice(compiled=True, inductor=True)),
    (("cuda", "auto", "auto", LONG, True), Choice(compiled=True, inductor=True)),
    (("cuda", True, False, LONG, True), Choice(compiled=True)),
    (("cuda", "auto", True, SHORT, True), Choice(compiled=True, inductor=True)),
    (("cuda", False, True, LONG, True), Choice(compiled=False)),
    (("cuda", "auto", "auto", LONG, True, 4), Choice(compiled=False, reason="4 processes train together, and CUDA "
                                                     "graphs do not hold the exchange of gradients")),
    (("cpu", "auto", "auto", LONG), Choice(compiled=True)),
    (("cpu", False, "auto", LONG), Choice(compiled=False)),
    (("cpu", "auto", "auto", LONG, True), Choice(compiled=False, reason=SAID)),
    (("cpu", True, True, LONG, True), Choice(compiled=False, reason=SAID)),
    (("mps", "auto", "auto", LONG, True), Choice(compiled=False, reason=SAID)),
])  # fmt: skip
def test_what_is_compiled_follows_from_device_settings_and_length(given: tuple[Any, ...], expected: Choice) -> None:
    assert choose(*given) == expected


def checkpointed() -> msvit.MSViT:
    model = tiny_model(dtype=torch.float32)
    model.set_grad_checkpointing()
    return model


def distilled() -> msvit.MSViT:
    model = tiny_model(DISTILLED, torch.float32)
    model.host.set_distilled_training()
    return model.train()


def single(**options: Any) -> Callable[[], msvit.MSViT]:
    return lambda: tiny_model(dtype=torch.float32, **options)


@pytest.mark.skipif(choose_backend(torch.float32, 16, True) != "triton", reason="needs Triton")
@pytest.mark.parametrize(("make", "learns", "reason"), [
    (single(), True, None),
    (single(mode="trimmed"), True, None),
    (checkpointed, True, "gradient checkpointing is on, which CUDA graphs cannot hold"),
    (distilled, True, "distilled training is on"),
    (single(reducer=msvit.EViT(rate=0.7, at=(1,))), False, None),
    (single(reducer=msvit.EViT(rate=0.7, at=(1,))), True, "the reducer EViT.* is compiled for inference only"),
    (single(reducer=msvit.ToMe(r=1), mode="trimmed"), False, "with a reducer packed inference is compiled, .* trimmed"),
    (single(num_heads=4), True, "attention of 8 channels per head in torch.float32 runs by sdpa, but graphs need"),
    (lambda: tiny_model(SWINS[0], torch.float32), False, None),
    (lambda: tiny_model(SWINS[0], torch.float32), True, "a SwinTransformer is compiled for inference only"),
    (lambda: tiny_model(SWINS[0], torch.float32, mode="masked"), False, "a Swin is compiled in mode packed only"),
    (lambda: tiny_model(SWINS[0], torch.float32, num_heads=(2, 2, 2, 4)), False, "attention of 8 channels"),
])  # fmt: skip
def test_a_model_that_cannot_be_captured_has_a_reason(make: Any, learns: bool, reason: str | None) -> None:
    model = make() if learns else make().eval()
    found = cuda.CudaMSViT(model, inductor=False).unsupported_reason(needs_grad=learns)
    assert found is None if reason is None else re.match(reason, found or "none"), found


def test_on_a_cpu_inference_is_packed_and_gives_the_same() -> None:
    model = tiny_model(dtype=torch.float32).eval()
    fast, choice = compile_where_supported(model, num_calls=LONG)
    assert choice == Choice(compiled=True)
    assert fast.packed_layers()
    image, _ = batch_of(model, 3)
    with torch.inference_mode():
        assert_same([fast(image).logits], [model(image).logits], 1e-5)


SEGMENT = {"task": "segment", "data__scales": "1,1", "data__max_share": 1}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = smoke(data__num_val=22, model__mode="packed")  # a batch of 16 and one of 6
    return train(config, tmp_path_factory.mktemp("run"), quiet=True)


@pytest.mark.parametrize("task", ["classify", "segment"])
def test_an_evaluation_is_the_same_compiled_or_not(run: Path, tmp_path: Path, task: str) -> None:
    if task == "segment":
        run = train(smoke(**SEGMENT, model__mode="packed"), tmp_path, quiet=True)
    fast, plain = (evaluate_run(run, rounds=0, compile=compile) for compile in (True, False))
    assert (fast.pop("compiled"), plain.pop("compiled")) == (True, False)
    assert fast.pop("uncompiled") is plain.pop("uncompiled") is None
    for name in fast.keys() & {"loss", "miou", "iou", "pixel_accuracy", "class_accuracy"}:
        assert fast.pop(name) == pytest.approx(plain.pop(name), abs=1e-3)  # a pixel between two classes may be either
    assert fast == plain


def test_eval_says_once_why_it_is_not_compiled(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "can_pack", lambda module: False)
    assert done("eval", run, "--rounds", 0).count("evaluated uncompiled: ") == 1
    assert "uncompiled" not in done("eval", run, "--rounds", 0, "--no-compile")


def settings(run: Path) -> tuple[Any, Any]:
    """As they are in the file."""
    optim = json.loads((run / "config.json").read_text())["config"]["optim"]
    return optim["graphs"], optim["inductor"]


def test_a_run_writes_what_it_chose_and_says_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(smoke(), tmp_path / "auto")
    assert capsys.readouterr().out.count(f"uncompiled: {SAID}") == 1
    assert settings(tmp_path / "auto") == (False, False)
    train(smoke(optim__graphs=False), tmp_path / "off")
    assert "uncompiled" not in capsys.readouterr().out
    assert lines(tmp_path / "off") == lines(tmp_path / "auto")


@pytest.mark.parametrize("began", [(True, False), (False, True)])
def test_a_run_that_goes_on_keeps_what_it_began_with(tmp_path: Path, began: tuple[bool, bool]) -> None:
    config = replace(smoke(), optim=replace(smoke().optim, graphs=began[0], inductor=began[1]))
    write_config(tmp_path, config, "scenes", [])
    kept = compiled_as_before(smoke(), tmp_path).optim
    assert (kept.graphs, kept.inductor) == began


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("mode", "min_calls"), [("packed", MIN_CALLS), ("trimmed", MIN_CALLS), ("masked", MIN_CALLS), ("trimmed", 3)]
)
def test_on_a_gpu_steps_are_compiled_and_learn_the_same(
    tmp_path: Path, mode: str, min_calls: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With more than `min_calls` steps by inductor, too."""
    monkeypatch.setattr(compiled, "MIN_CALLS", min_calls)
    own = {"model__mode": mode, "optim__epochs": 2, "gate__noise": 0}  # four steps
    train(smoke(**own), tmp_path / "auto")
    assert settings(tmp_path / "auto") == (True, min_calls == 3)
    said = capsys.readouterr().out
    assert "uncompiled" not in said
    assert ("compiling" in said) == (min_calls == 3)
    train(smoke(**own, optim__graphs=False), tmp_path / "plain", quiet=True)
    for name in ("loss", "fine"):
        fast, plain = ([line[name] for line in lines(tmp_path / run, "train")] for run in ("auto", "plain"))
        assert fast == pytest.approx(plain, rel=1e-2, abs=1e-3)
    train(smoke(**own | {"optim__epochs": 3}), tmp_path / "auto", resume=True, quiet=True)
    assert settings(tmp_path / "auto") == (True, min_calls == 3)


@pytest.mark.gpu
@pytest.mark.parametrize("task", ["classify", "segment"])
def test_on_a_gpu_an_evaluation_replays_whole_batches(
    tmp_path: Path, task: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = {"data__num_val": 54, "model__mode": "packed"}  # three batches of 16 and one of 6
    own |= {} if task == "classify" else SEGMENT
    train(smoke(**own), tmp_path, quiet=True)
    sizes, planned = [], cuda.CudaMSViT._run_plan

    def run_plan(self: cuda.CudaMSViT, image: torch.Tensor, *args: Any, **options: Any) -> Any:
        sizes.append(len(image))
        return planned(self, image, *args, **options)

    monkeypatch.setattr(cuda.CudaMSViT, "_run_plan", run_plan)
    fast, plain = (evaluate_run(tmp_path, rounds=0, compile=compile) for compile in (True, False))
    assert sizes == [16, 16, 16]
    assert (fast["compiled"], plain["compiled"]) == (True, False)
    score = "top1" if task == "classify" else "miou"
    assert fast[score] == pytest.approx(plain[score], abs=0.02)  # TF32 may turn a pixel or an image
    assert fast["tokens"]["mean"] == pytest.approx(plain["tokens"]["mean"], rel=0.01)
    assert fast["num_images"] == plain["num_images"] == 54
