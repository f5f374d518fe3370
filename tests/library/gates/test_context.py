"""The gate that looks around, and the trained one that comes with msvit."""

import pytest
import torch
from timm.data import IMAGENET_DEFAULT_MEAN as IMAGENET_MEAN
from timm.data import IMAGENET_DEFAULT_STD as IMAGENET_STD
from tiny import assert_same

import msvit
from msvit.fast import gates as fast
from msvit.gates import ContextGate


def untrained() -> ContextGate:
    """With an answer that differs from cell to cell."""
    torch.manual_seed(0)
    gate = ContextGate(coarse=32).eval()
    torch.nn.init.normal_(gate.head.weight)
    return gate


class Doubled(torch.nn.Conv2d):
    """As an adapter would be."""

    def forward(self, x):
        return 2 * super().forward(x)


def double(gate):
    gate.stem = Doubled(3, 32, 3, stride=2, padding=1, bias=False, dtype=torch.float64)


CHANGES = {
    "nothing": lambda gate: None,
    "another class": double,
    "a sequence": lambda gate: setattr(gate, "downsample", torch.nn.Sequential(gate.downsample)),
    "a hook": lambda gate: gate.downsample[0].register_forward_hook(lambda layer, given, out: 2 * out),
    "a hook that computes the weight": lambda gate: torch.nn.utils.spectral_norm(gate.stem),
}


@pytest.mark.parametrize("change", CHANGES)
def test_the_forms_for_compiled_training_give_the_same_logits_and_gradients(change, monkeypatch):
    """Whatever layers were replaced, or do more than their weights say."""
    gate, image, found = untrained().double(), torch.rand(2, 3, 64, 96, dtype=torch.float64), []
    before = gate(image).logits
    CHANGES[change](gate)
    for compiled in (False, True):
        monkeypatch.setattr(fast, "is_compiled_training", lambda x, compiled=compiled: compiled)
        logits = gate(image).logits
        found.append((logits, *torch.autograd.grad(logits.square().sum(), list(gate.parameters()))))
    assert_same(*found)
    assert (logits - before).abs().max() > 0.01 or change in ("nothing", "a sequence")


@torch.no_grad()
def test_a_negative_and_a_darker_copy_get_the_same_logits():
    gate, image = untrained().double(), torch.rand(2, 3, 96, 96, dtype=torch.float64)
    logits = gate(image).logits
    assert logits.std() > 0.1
    for other in (1 - image, 0.3 * image, 2 * image + 0.5):
        torch.testing.assert_close(gate(other).logits, logits)
    assert (gate(image.flip(3)).logits - logits).abs().max() > 0.01


@torch.no_grad()
def test_a_cell_is_seen_with_its_surroundings():
    gate, image = untrained(), torch.rand(1, 3, 224, 224)
    other = image.clone()
    other[:, :, :32, :32] = torch.rand(1, 3, 32, 32)
    changed = (gate(image).logits - gate(other).logits)[0].abs()
    assert changed[0, 0] > 1e-3
    assert changed[1, 1] > 1e-4


@torch.no_grad()
def test_the_gate_that_comes_with_msvit_finds_what_stands_out():
    gate = msvit.load_gate("default", frozen=True).eval()
    yy, xx = torch.meshgrid(torch.arange(224.0), torch.arange(224.0), indexing="ij")
    disc = ((yy - 112) ** 2 + (xx - 112) ** 2 < 60**2).float()
    stripes = (xx / 5).sin() * (yy / 7).cos()
    image = (0.1 * xx / 224 + disc * stripes)[None, None].expand(1, 3, -1, -1)
    logits = gate(image).logits[0]
    assert logits[2:5, 2:5].mean() > logits[0].mean() + 0.3
    assert msvit.load_gate("default", coarse=28)(torch.rand(1, 3, 196, 196)).mask.shape == (1, 7, 7)
    assert sum(p.numel() for p in gate.parameters()) * 4 < 2e6


COLOURS = [(255, 0, 0), (0, 0, 255), (255, 255, 255), (128, 128, 128), (0, 0, 0), (13, 201, 77)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@torch.no_grad()
def test_constant_images_of_all_colours_get_the_same_decision(dtype, device):
    """Normalised as photographs are, and whatever their colour rounds to: it is not texture."""
    gate = msvit.load_gate("default").eval()
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (IMAGENET_MEAN, IMAGENET_STD))
    image = ((torch.tensor(COLOURS).view(-1, 3, 1, 1) / 255 - mean) / std).expand(-1, -1, 224, 224).to(device, dtype)
    out = gate.to(device, dtype if device == "cuda" else torch.float32)(image)
    assert out.logits.isfinite().all()
    assert out.mask.sum() == 0
    if device == "cpu":
        torch.testing.assert_close(out.logits, out.logits[:1].expand_as(out.logits), rtol=0, atol=1e-6)


@torch.no_grad()
def test_faint_texture_is_still_seen():
    """A tenth of a grey level, far above rounding."""
    gate, image = untrained(), torch.full((1, 3, 96, 96), 2.0)
    image[..., 32:64, 32:64] += 0.002 * torch.randn(3, 32, 32, generator=torch.Generator().manual_seed(0))
    logits = gate(image).logits[0]
    assert (logits - gate(torch.full_like(image, 2.0)).logits[0]).abs().max() > 1e-2
