"""Targets for logits: edges of label maps, attention (as recorded: reduction/); the threshold that keeps a share."""

import pytest
import torch

from msvit.losses import ThresholdController, attention_loss, edge_loss
from msvit.losses.targets import edge_cells
from msvit.types import IGNORE


def test_cells_with_two_classes_hold_an_edge_and_ignored_pixels_make_none():
    label = torch.zeros(1, 8, 12, dtype=torch.long)
    label[0, 1, 1] = 3  # cell (0, 0): two classes
    label[0, :4, 4:8] = IGNORE  # cell (0, 1): nothing known
    label[0, 5, 5] = IGNORE  # cell (1, 1): one class and something unknown
    label[0, 4:, 8:] = 7  # cell (1, 2): another class alone
    label[0, 7, 3], label[0, 7, 2] = 20, IGNORE  # cell (1, 0): two classes and something unknown
    assert edge_cells(label, 4).tolist() == edge_cells(label.to(torch.uint8), 4).tolist() == [[[1, 0, 0], [1, 0, 0]]]


def test_a_label_that_ends_inside_the_last_cells_is_padded_with_nothing():
    label = torch.zeros(1, 5, 9, dtype=torch.long)
    label[0, 3, 3] = 1  # in the first cell of 4 px; the last ones have one row or column of pixels
    label[0, 4, 8] = 1
    assert edge_cells(label, 4).tolist() == [[[1, 0, 0], [0, 0, 0]]]


def test_the_edge_loss_is_the_mean_over_cells_of_the_cross_entropy():
    label = torch.zeros(1, 4, 8, dtype=torch.long)
    label[0, 0, 0] = 1
    logits = torch.tensor([[[2.0, -1.0]]])
    want = -(torch.sigmoid(logits[0, 0, 0]).log() + torch.sigmoid(-logits[0, 0, 1]).log()) / 2
    torch.testing.assert_close(edge_loss(logits, label, coarse=4), want)


def test_the_target_of_a_logit_is_the_logarithm_of_attention_in_units_of_a_uniform_one():
    attention = torch.tensor([[[0.7, 0.1], [0.1, 0.1]]])
    target = (4 * attention).log()
    assert attention_loss(target, attention) == 0
    torch.testing.assert_close(attention_loss(target + 0.5, attention), torch.tensor(0.25))
    torch.testing.assert_close(attention_loss(target, 3 * attention), torch.tensor(0.0))  # of any sum
    assert attention_loss(torch.zeros(1, 1, 2), torch.tensor([[[1.0, 0.0]]])).isfinite()


@pytest.mark.parametrize("target", [0.1, 0.25, 0.5])
def test_the_threshold_follows_the_logits_to_the_target_share(target):
    torch.manual_seed(0)
    controller = ThresholdController(target)
    assert controller.threshold.isnan()
    first = torch.randn(8, 20, 20)
    threshold = controller.update(first)
    assert abs((first > threshold).float().mean() - target) < 0.01  # at once
    for _ in range(150):  # a gate whose logits spread
        later = 3 * torch.randn(8, 20, 20) - 2
        threshold = controller.update(later)
    assert abs((later > threshold).float().mean() - target) < 0.02
    assert controller.state_dict()["threshold"].item() == threshold
