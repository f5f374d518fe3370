"""NaN stays visible: an image with NaN pixels or a NaN decision has NaN logits in every mode, and only that one."""

from collections.abc import Callable, Iterable

import pytest
import torch
from cases import each_once
from tiny import KINDS, SWINS, images, tiny_host, tiny_model, tiny_swin
from torch import Tensor, nn

import msvit
from msvit.execution import MODES

NAN = 1  # the image that has it
REDUCERS: dict[str, Callable[[], msvit.Reducer | None]] = {
    "none": lambda: None,
    "evit": lambda: msvit.EViT(0.6, at=(0, 1)),
    "evit-dropping": lambda: msvit.EViT(0.6, at=(0, 1), fuse=False),
    "tome": lambda: msvit.ToMe(r=2),
    "dynamicvit": lambda: msvit.DynamicViT(0.5, at=(0, 1)),  # before the first attention
}


class SometimesNaN(msvit.LearnedGate):
    """A gate with a NaN logit in one cell of one image, if asked for; others are fine and coarse in turn."""

    broken = False

    def logits(self, image: Tensor) -> Tensor:
        logits = super().logits(image) - 3.0
        turn = torch.arange(logits.numel(), device=logits.device).view_as(logits) % 3 - 1.0
        nan = torch.zeros_like(logits)
        nan[NAN, -1, 0] = torch.nan if self.broken else 0.0
        return logits + 20 * turn + nan


EVERY_WAY = ((False, False), (False, True), (True, False), (True, True))


def check_all(
    model: nn.Module, batch: Tensor, ways: Iterable[tuple[bool, bool]] = (EVERY_WAY[0], EVERY_WAY[3]), **options: int
) -> None:
    """With NaN from either side; in evaluation without gradients, and in training with them, or in other `ways`."""
    wrong = batch.clone()
    wrong[NAN, :, 5, 2] = torch.nan
    others = [i for i in range(len(batch)) if i != NAN]
    for training, grad in ways:
        model.train(training)
        with torch.set_grad_enabled(grad):
            want = run(model, batch, **options)
            assert want.logits.isfinite().all()
            gate: SometimesNaN = model.gate  # type: ignore[assignment]
            for name, broken, given in (("pixel", False, wrong), ("decision", True, batch)):
                gate.broken = broken
                got = run(model, given, **options)
                gate.broken = False
                what = f"{name}, training {training}, gradients {grad}"
                assert got.logits[NAN].isnan().all(), f"{what}: NaN is hidden"
                torch.testing.assert_close(got.logits[others], want.logits[others], rtol=1e-9, atol=1e-9, msg=what)
                assert got.gate.mask[NAN].isnan().any(), f"{what}: the mask does not show it"
                assert got.tokens.count[others].tolist() == want.tokens.count[others].tolist()


def run(model: nn.Module, batch: Tensor, **options: int) -> msvit.MSViTOutput:
    torch.manual_seed(0)
    return model(batch, **options)


@each_once(name=KINDS, mode=MODES)
def test_in_every_mode_and_host(name: str, mode: str) -> None:
    check_all(tiny_model(name, gate=SometimesNaN(coarse=8, grid=(2, 2)), mode=mode), images(), EVERY_WAY)


@pytest.mark.parametrize("way", [*MODES, "budget"])
@pytest.mark.parametrize("reducer", REDUCERS)
def test_with_reducers_and_within_a_budget(reducer: str, way: str) -> None:
    for name in (KINDS[0], KINDS[5]) if way == "packed" and "evit" not in reducer else KINDS[:1]:
        gate, mode = SometimesNaN(coarse=8, grid=(2, 2)), "packed" if way == "budget" else way
        model = tiny_model(name, gate=gate, mode=mode, reducer=REDUCERS[reducer]())
        check_all(model, images(), **({"max_tokens": 51} if way == "budget" else {}))


def test_a_nan_decision_takes_nothing_of_a_tight_budget() -> None:
    gate = SometimesNaN(coarse=8, grid=(2, 2))
    gate.broken = True
    out = tiny_model(gate=gate).eval()(images(), max_tokens=3 * (1 + 4) + 3)  # room for one fine cell
    assert (out.gate.mask > 0.5).sum() == 1
    assert out.logits.isnan().all(1).tolist() == [False, True, False]


@each_once(parts=[("linear", "none"), ("linear", "tome"), ("mask", "dynamicvit")], mode=MODES)
def test_in_segmentation(parts: tuple[str, str], mode: str) -> None:
    decoder, reducer = parts
    gate, reduced = SometimesNaN(coarse=8, grid=(2, 2)), REDUCERS[reducer]()
    model = msvit.convert_segmenter(tiny_host(), 3, 8, gate, decoder, mode, reduced)
    check_all(model, images(height=15))


@each_once(name=SWINS, mode=["packed", "masked"])
def test_in_a_swin(name: str, mode: str) -> None:
    for merge_at, window in ((2, 4), (4, 3)):  # whole windows, padded ones
        gate, host = SometimesNaN(coarse=32, grid=(2, 2)), tiny_swin(name, window_size=window)
        check_all(msvit.convert(host, merge_at=merge_at, gate=gate, mode=mode), images(height=64, width=64))


@pytest.mark.parametrize("gate", [msvit.AllCoarse(8), msvit.DiscGate(8), msvit.EntropyGate(8, share=0.5)])
@pytest.mark.parametrize("mode", MODES)
def test_nan_pixels_need_no_gate_that_notices(gate: msvit.Gate, mode: str) -> None:
    batch = images()
    batch[NAN, 0, 0, 0] = torch.nan
    logits = tiny_model(gate=gate, mode=mode)(batch).logits
    assert logits.isnan().all(1).tolist() == [False, True, False]


def test_a_gate_with_nan_weights_makes_all_logits_nan() -> None:
    model = tiny_model().eval()
    nn.init.constant_(model.gate.head.bias, torch.nan)  # type: ignore[union-attr]
    for mode in MODES:
        model = model.with_options(mode=mode)
        with torch.no_grad():
            assert model(images()).logits.isnan().all()
            assert msvit.compile(model)(images()).logits.isnan().all()
