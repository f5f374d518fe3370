"""Divergence of a model of mixed scale from the dense one, image by image and without labels.

    dense = dense_model(model)                                  # the same weights, all cells fine, no reducer
    divergence(model, dense(images), model(images))             # (b,), at least 0; differentiable in the last

A classifier has the KL divergence of its probabilities from those of the dense model, KL(dense || mixed), a Segmenter
the mean of that over pixels, and a model without a classifier one minus the cosine of its features with the dense ones:
of the pooled features or, where the host does not pool, of the features of every patch, and their mean.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from msvit.gates import AllFine
from msvit.model import MSViT
from msvit.output import MSViTOutput
from msvit.shapes import Float
from msvit.tokens import dense_map


def dense_model(model: Any, mode: str = "packed") -> Any:
    """Return the same modules with all cells fine, no reducer and not compiled; in training mode if the model is."""
    gate = AllFine(coarse=model.coarse)
    if isinstance(model, MSViT):
        return MSViT.with_options(model, gate=gate, mode=mode, reducer=None)
    encoder = MSViT.with_options(model.encoder, gate=gate, mode=mode, reducer=None)
    dense = type(model)(encoder, model.decoder)
    dense.take_metadata(model)
    return dense


def divergence(model: Any, dense: MSViTOutput, mixed: MSViTOutput) -> Float[Tensor, " b"]:
    """Return each image's divergence, in float32 at least. `model` is the one that either output is of."""
    one, other = (compared(output) for output in (dense, mixed))
    if model.num_classes:
        return kl_divergence(one, other)
    # |a - b|^2 / 2 of unit vectors is 1 - cos, and exact where they are almost the same
    one, other = F.normalize(one, dim=1), F.normalize(other, dim=1)
    return mean_of_places((one - other).square().sum(1) / 2)


def total_variation(model: Any, dense: MSViTOutput, mixed: MSViTOutput) -> Float[Tensor, " b"]:
    """Return the total variation distance of the classes' probabilities, 0 to 1; without classes the divergence.

    A mean divergence is decided by few images; in this one each counts at most once, as in an accuracy.
    """
    one, other = (compared(output) for output in (dense, mixed))
    if not model.num_classes or one.shape[1] == 1:
        return divergence(model, dense, mixed)
    return mean_of_places((one.softmax(1) - other.softmax(1)).abs().sum(1) / 2)


def compared(output: MSViTOutput) -> Float[Tensor, "b d *places"]:
    """Return logits or pooled features or, where the host returns neither, the features of all patches."""
    values = dense_map(output.tokens) if output.logits is None else output.logits
    return values if values.dtype is torch.float64 else values.float()


def kl_divergence(
    dense: Float[Tensor, "b classes *places"], mixed: Float[Tensor, "b classes *places"]
) -> Float[Tensor, " b"]:
    """Return KL(dense || mixed) of the softmax over classes, mean over places; of the sigmoid if there is one class."""
    if dense.shape[1] == 1:
        dense, mixed = (torch.cat([logits, torch.zeros_like(logits)], 1) for logits in (dense, mixed))
    dense, mixed = dense.log_softmax(1), mixed.log_softmax(1)
    return mean_of_places((dense.exp() * (dense - mixed)).sum(1))


def mean_of_places(values: Float[Tensor, "b *places"]) -> Float[Tensor, " b"]:
    return values.flatten(1).mean(1) if values.ndim > 1 else values
