"""Every supported class of transformers, converted and all fine, is the model itself; the modes agree."""

import copy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from reference import reference_logits
from tiny import assert_same, gradients, images, mixed_mask, relative_error
from tiny_transformers import CLASSES, configuration, hidden_of, tiny_transformers, transformers
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import msvit
from msvit.backbones import TransformersViT

CLASSIFIER = "ViTForImageClassification"


def all_fine(model: nn.Module, **options: Any) -> msvit.MSViT:
    return msvit.convert(model, gate=msvit.AllFine(coarse=8), **options)


@pytest.mark.parametrize("name", CLASSES)
def test_all_fine_is_the_transformers_model_at_any_size(name: str) -> None:
    """Output, last_hidden_state, and at two sizes the gradients of every weight."""
    model = all_fine(tiny_transformers(name))
    host = model.host
    for size in ((16, 16), (24, 24), (32, 8), (8, 8)):
        image = images(2, *size)
        out = model(image)
        want, hidden = host(image), hidden_of(host, image)
        assert relative_error(out.logits, want) < 1e-9
        assert relative_error(model.backbone.hidden(out.tokens), hidden) < 1e-9
        if size in ((16, 16), (32, 8)):
            assert_same(gradients(out.logits, host.model), gradients(want, host.model), 1e-8)


@pytest.mark.parametrize("name", CLASSES)
def test_modes_agree_and_so_do_their_gradients(name: str) -> None:
    model = msvit.convert(tiny_transformers(name), coarse=8)
    image = images(4, 24, 16)
    results = []
    for mode in ("masked", "packed", "trimmed"):
        mask = mixed_mask(4, 3, 2).requires_grad_(mode != "packed")
        out = model.with_options(mode=mode)(image, mask=mask)
        results.append([out.logits, model.backbone.hidden(out.tokens), *gradients(out.logits, model.host)])
    for other in results[1:]:
        assert_same(other, results[0])


@pytest.mark.parametrize("name", CLASSES)
def test_mixed_tokens_are_those_of_the_naive_definition(name: str) -> None:
    model = msvit.convert(tiny_transformers(name), coarse=8)
    image, mask = images(3), mixed_mask(3, 2, 2)
    fine = mask.bool().repeat_interleave(2, 1).repeat_interleave(2, 2).flatten(1)
    exists = torch.cat([torch.ones(3, model.backbone.num_prefix), ~mask.bool().flatten(1), fine], 1).bool()
    with torch.no_grad():
        want = reference_logits(Named(model.host), image, mask, 8, exists)
        assert relative_error(model(image, mask=mask).logits, want) < 1e-9


class Named:
    """What the reference reads of a host beside timm's names."""

    def __init__(self, host: Any) -> None:
        self.host = host

    def __getattr__(self, name: str) -> Any:
        return getattr(self.host, name)


@pytest.mark.parametrize("name", CLASSES)
def test_macs_of_all_fine_images_are_what_the_flop_counter_sees_in_the_transformers_model(name: str) -> None:
    model = all_fine(tiny_transformers(name)).requires_grad_(False)
    for image in (images(1), images(1, 24, 8)):
        with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
            model.host(image)
        assert int(msvit.macs(model, image)) * 2 == counter.get_total_flops()
