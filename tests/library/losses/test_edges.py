"""Edges: cells with more than one class, and the threshold that keeps the share of fine cells at the target."""

import pytest
import torch

from msvit.losses import EdgeLoss
from msvit.losses.direct import edge_cells
from msvit.types import IGNORE


def test_cells_with_two_classes_hold_an_edge_and_ignored_pixels_make_none():
    label = torch.zeros(1, 8, 12, dtype=torch.long)
    label[0, 1, 1] = 3  # cell (0, 0): two classes
    label[0, :4, 4:8] = IGNORE  # cell (0, 1): nothing known
    label[0, 5, 5] = IGNORE  # cell (1, 1): one class and something unknown
    label[0, 4:, 8:] = 7  # cell (1, 2): another class alone
    label[0, 7, 3], label[0, 7, 2] = 20, IGNORE  # cell (1, 0): two classes and something unknown
    assert edge_cells(label, 4).tolist() == [[[1, 0, 0], [1, 0, 0]]]


def test_a_label_that_ends_inside_the_last_cells_is_padded_with_nothing():
    label = torch.zeros(1, 5, 9, dtype=torch.long)
    label[0, 3, 3] = 1  # in the first cell of 4 px; the last ones have one row or column of pixels
    label[0, 4, 8] = 1
    assert edge_cells(label, 4).tolist() == [[[1, 0, 0], [0, 0, 0]]]


def test_it_is_the_mean_over_cells_of_the_cross_entropy():
    label = torch.zeros(1, 4, 8, dtype=torch.long)
    label[0, 0, 0] = 1
    logits = torch.tensor([[[2.0, -1.0]]])
    want = -(torch.sigmoid(logits[0, 0, 0]).log() + torch.sigmoid(-logits[0, 0, 1]).log()) / 2
    torch.testing.assert_close(EdgeLoss(target=0.5, coarse=4)(logits, label), want)


@pytest.mark.parametrize("target", [0.1, 0.25, 0.5])
def test_the_threshold_follows_the_logits_to_the_target_share(target):
    torch.manual_seed(0)
    loss = EdgeLoss(target=target, coarse=32)
    assert loss.threshold.isnan()
    first = torch.randn(8, 20, 20)
    threshold = loss.follow(first)
    assert abs((first > threshold).float().mean() - target) < 0.01  # at once
    for _ in range(150):  # a gate that grows more decided
        later = 3 * torch.randn(8, 20, 20) - 2
        threshold = loss.follow(later)
    assert abs((later > threshold).float().mean() - target) < 0.02
    assert loss.state_dict()["threshold"].item() == threshold


def test_a_target_that_is_no_share_is_refused():
    with pytest.raises(ValueError, match="target"):
        EdgeLoss(target=1.5, coarse=32)


@pytest.mark.parametrize(
    ("label", "words"),
    [
        (torch.zeros(1, 4, 8), r"label is a tensor \(1, 4, 8\) of torch\.float32, but must be a int tensor"),
        (torch.full((1, 4, 8), 300), r"label has values from 300 to 300.*\[0, 255\]"),
        (torch.full((1, 4, 8), -1), r"label has values from -1 to -1"),
        (torch.zeros(2, 4, 8).long(), r"logits are \(1, 1, 2\), but a label \(2, 4, 8\) has cells \(2, 1, 2\) of 4px"),
        (torch.zeros(1, 4, 4).long(), r"logits are \(1, 1, 2\), but a label \(1, 4, 4\) has cells \(1, 1, 1\)"),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_labels_that_are_no_classes_or_of_other_images(label, words):
    with pytest.raises(ValueError, match=words):
        EdgeLoss(target=0.5, coarse=4)(torch.zeros(1, 1, 2), label)


def test_labels_of_8_bits_are_the_same_labels():
    label = torch.zeros(1, 4, 8, dtype=torch.uint8)
    label[0, 0, 0], label[0, 0, 7] = 1, IGNORE
    assert edge_cells(label, 4).tolist() == edge_cells(label.long(), 4).tolist() == [[[1, 0]]]
