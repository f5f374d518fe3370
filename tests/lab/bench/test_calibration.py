"""The gate's share of fine cells is the one asked for, on the images that are timed, and images differ."""

import pytest
import torch
from cases import each_once
from tiny import tiny_host

import msvit
from msvit_lab.bench.calibration import calibrate, choose_gate, fine_share, spread_out
from msvit_lab.bench.images import Pictures, batches

SHARE = 0.33


@pytest.fixture(scope="module")
def sets():
    squares = Pictures().squares(size=64, wanted=32, least=32)
    return batches(squares / 127.5 - 1, 8)


@pytest.fixture
def model():
    return msvit.convert(tiny_host(img_size=64, dtype=torch.float32), 8, "learned")


@torch.no_grad()
def shares(gate, sets):
    return torch.cat([gate(images).mask.float().mean((1, 2)) for images in sets])


@each_once(kind=["learned", "entropy", "gradient"], dtype=[torch.float32, torch.bfloat16])
def test_calibration_hits_the_share_and_images_differ(model, sets, kind, dtype):
    chosen = choose_gate(kind, model, SHARE)
    gate = chosen.gate.eval()
    if kind == "learned":
        assert not chosen.trained
        spread_out(gate, sets)
    gate.to(dtype)
    sets = [images.to(dtype) for images in sets]
    calibrate(gate, sets, SHARE)
    found = shares(gate, sets)
    assert found.mean() == pytest.approx(SHARE, abs=0.01)
    assert found.std() > 0.02
    assert fine_share(gate, sets) == pytest.approx(float(found.mean()), abs=1e-4)


def test_in_training_the_share_is_that_of_noisy_decisions(model, sets):
    gate = choose_gate("learned", model, SHARE).gate.train()
    spread_out(gate, sets)
    calibrate(gate, sets, SHARE)
    assert torch.stack([shares(gate, sets).mean() for _ in range(4)]).mean() == pytest.approx(SHARE, abs=0.02)
    threshold = gate.threshold
    calibrate(gate.eval(), sets, SHARE)
    assert gate.threshold != pytest.approx(threshold, abs=0.05)
