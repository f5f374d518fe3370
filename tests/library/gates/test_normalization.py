"""A gate decides the same for a host of another normalisation: its images are mapped to that of its training."""

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import images, tiny_host
from torch import Tensor

import msvit
from msvit.gates import Normalization
from msvit.host_settings import host_normalization
from msvit.model import MSViT
from msvit.segmenter import attach_decoder

TRAINED = {"mean": (0.5, 0.4, 0.3), "std": (0.5, 0.25, 0.2)}
OTHER = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}


def normalised(pixels: Tensor, mean: tuple[float, ...], std: tuple[float, ...]) -> Tensor:
    mean_, std_ = (torch.tensor(values, dtype=pixels.dtype).view(-1, 1, 1) for values in (mean, std))
    return (pixels - mean_) / std_


def a_gate(kind: type = msvit.LearnedGate) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        gate = kind(coarse=8, grid=(2, 2), widths=(16, 16, 8)).eval()
        for parameter in gate.parameters():
            parameter.data += 0.2 * torch.randn_like(parameter)
    return gate.with_normalization(**TRAINED)


PIXELS = images(3, 16, 24).abs().clamp(max=1)


@pytest.mark.parametrize("kind", [msvit.LearnedGate, msvit.ContextGate])
@pytest.mark.parametrize(
    "way", ["plain", "convert", "with_options", "cells", "copied", "saved", "model", "segmenter", "compiled"]
)
def test_decisions_are_those_of_the_original_for_a_host_with_other_statistics(
    kind: type, way: str, tmp_path: Path
) -> None:
    gate, host = a_gate(kind), tiny_host(dtype=torch.float32, pretrained_cfg_overlay=OTHER, img_size=(16, 24))
    converted, other = msvit.convert(host, coarse=8, gate=gate), gate.for_normalization(**OTHER)
    model = MSViT(msvit.convert(tiny_host(dtype=torch.float32), coarse=8).backbone, other, 8).eval()
    assert [*map(id, converted.gate.parameters())] == [*map(id, gate.parameters())], "weights are shared"
    other = {
        "plain": lambda: other,
        "convert": lambda: converted.gate,
        "with_options": lambda: msvit.convert(host, coarse=8).with_options(gate=gate).gate,
        "cells": lambda: other.for_cells(4),
        "copied": lambda: deepcopy(other),
        "saved": lambda: msvit.load_gate(msvit.save_gate(other, tmp_path)),
        "model": lambda: msvit.load(msvit.save(model, tmp_path)).gate,  # whatever its host says
        "segmenter": lambda: msvit.load(msvit.save(attach_decoder(model, 3, "linear"), tmp_path)).gate,
        "compiled": lambda: msvit.compile(converted).gate,
    }[way]().eval()
    own = gate.for_cells(4) if way == "cells" else gate
    assert other.normalization == Normalization(**TRAINED)
    assert other.input_normalization == Normalization(**OTHER)
    with torch.no_grad():
        want, wrong = (own(normalised(PIXELS.float(), **each)) for each in (TRAINED, OTHER))
        got = other(normalised(PIXELS.float(), **OTHER))
    torch.testing.assert_close(got.logits, want.logits, atol=1e-4, rtol=0)
    assert torch.equal(got.mask, want.mask)
    assert (wrong.logits - want.logits).abs().max() > 1e-2, "it would be another without the map"


def test_where_both_normalisations_agree_or_one_is_unknown_nothing_is_computed() -> None:
    gate = a_gate()
    image = torch.rand(1, 3, 16, 16)
    assert gate.for_normalization(**TRAINED) is gate
    assert gate.for_normalization(**OTHER).for_normalization(**TRAINED).renormalized(image) is image
    assert msvit.convert(tiny_host(pretrained_cfg_overlay=TRAINED), gate=gate, coarse=8).gate is gate
    unknown = msvit.LearnedGate(coarse=8)
    assert msvit.convert(tiny_host(), gate=unknown, coarse=8).gate is unknown
    bare = tiny_host()
    bare.pretrained_cfg = {}
    assert msvit.convert(bare, gate=gate, coarse=8).gate is gate
    assert msvit.convert(bare, 8, "learned").gate.normalization is None
    disc = msvit.DiscGate(coarse=8)
    assert disc.for_normalization(**OTHER) is disc
    assert host_normalization(tiny_host(in_chans=1)) is None, "timm's has three channels all the same"


def test_a_new_gate_is_recorded_with_the_statistics_of_its_host() -> None:
    gate = msvit.convert(tiny_host(pretrained_cfg_overlay=OTHER), coarse=8).gate
    assert gate.normalization == gate.input_normalization == Normalization(**OTHER)
    assert msvit.load_gate("default").normalization == Normalization(**OTHER)


def test_the_map_is_exact_in_a_gate_of_16_bits_and_in_no_state_dict() -> None:
    gate = a_gate().for_normalization(**OTHER).to(torch.bfloat16)
    image = normalised(PIXELS.float(), **OTHER)
    torch.testing.assert_close(gate.renormalized(image), normalised(PIXELS.float(), **TRAINED))
    assert gate(image.bfloat16()).logits.isfinite().all()
    assert gate.state_dict().keys() == a_gate().state_dict().keys()


def test_a_pixel_that_is_nan_makes_the_decision_nan() -> None:
    image = torch.rand(1, 3, 16, 16)
    image[0, 1, 3, 3] = torch.nan
    mask = a_gate().for_normalization(**OTHER)(image).mask
    assert mask.isnan().flatten().tolist() == [True, False, False, False]
