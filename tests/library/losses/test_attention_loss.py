"""Attention as a target: what a logit is told, and that the class token's attention is read as it is."""

import pytest
import torch
from tiny import images, tiny_host

import msvit
from msvit.losses import AttentionLoss, DirectLoss
from msvit.reduction.attention_recorder import AttentionRecorder


def test_a_logit_is_the_logarithm_of_attention_in_units_of_an_even_one():
    attention = torch.tensor([[[0.7, 0.1], [0.1, 0.1]]])
    told = (4 * attention).log()
    loss = AttentionLoss(target=0.25)
    assert loss(told, attention) == 0
    torch.testing.assert_close(loss(told + 0.5, attention), torch.tensor(0.25))
    torch.testing.assert_close(loss(told, 3 * attention), torch.tensor(0.0))  # of any sum
    assert loss(torch.zeros(1, 1, 2), torch.tensor([[[1.0, 0.0]]])).isfinite()


@pytest.mark.parametrize(
    ("attention", "words"),
    [
        (torch.full((3, 2, 2), -0.1), r"attention has values from -0\.1.*, but they must be numbers >= 0"),
        (torch.full((3, 2, 2), torch.nan), r"attention has values from nan"),
        (torch.ones(1, 2, 2), r"attention is a tensor \(1, 2, 2\).*must be \(3, 2, 2\)"),
        (torch.ones(3, 1, 1), r"attention is a tensor \(3, 1, 1\).*must be \(3, 2, 2\)"),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_attention_that_is_none_or_of_other_images(attention, words):
    with pytest.raises(ValueError, match=words):
        AttentionLoss(target=0.25)(torch.zeros(3, 2, 2), attention)


def test_a_threshold_follows_by_itself():
    loss = DirectLoss(target=0.25)
    threshold = loss.follow(torch.arange(16.0).view(1, 4, 4))
    assert (torch.arange(16.0) >= threshold).float().mean() == 0.25


@pytest.mark.parametrize("name", ["vit_small_patch16_224", "vit_small_patch14_reg4_dinov2"])
@torch.no_grad()
def test_what_is_seen_is_the_class_tokens_attention_in_the_later_blocks(name):
    host, image = tiny_host(name), images()
    host.set_grad_checkpointing(False)
    kept = {}
    block = host.blocks[1].attn
    block.qkv.register_forward_hook(lambda module, args, out: kept.update(qkv=out))
    for other in host.blocks:
        other.attn.fused_attn = False
    host(image)
    q, k, _ = kept["qkv"].unflatten(2, (3, block.num_heads, -1)).permute(2, 0, 3, 1, 4)
    row = (q[:, :, :1] @ k.transpose(2, 3) * block.scale).softmax(-1)[:, :, 0, host.num_prefix_tokens :].mean(1)
    cells = row.view(3, 2, 2, 2, 2).sum((2, 4))  # 4x4 patches, two by two
    watch = AttentionRecorder()
    model = msvit.convert(host, coarse=8, gate=msvit.AllFine(coarse=8), reducer=watch)
    model(image)
    torch.testing.assert_close(watch.seen(), cells / cells.sum((1, 2), keepdim=True))


def test_a_host_without_class_token_is_refused():
    host = tiny_host("vit_base_patch16_gap_224")
    with pytest.raises(ValueError, match="no class token; choose another gate loss"):
        msvit.convert(host, coarse=8, gate=msvit.AllFine(coarse=8), reducer=AttentionRecorder())
