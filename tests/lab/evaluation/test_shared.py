"""Which images are kept, and in what mode a model is evaluated: the same for both evaluations."""

from typing import Any

import pytest
import torch
from smoke_runs import smoke
from tiny import tiny_host

import msvit
from msvit_lab.build import make_model
from msvit_lab.data import Batch, DenseImages, Loader, Plan
from msvit_lab.evaluation.classification import evaluate_classifier
from msvit_lab.evaluation.segmentation import evaluate_segmenter
from msvit_lab.evaluation.sliding import Slide


class Few(Loader):
    """A loader of 1000 images of which few can be read, in batches of two."""

    def __init__(self, num: int, dense: bool, torn: bool = False) -> None:
        self.plan = Plan(num_images=1000, batch_size=2, shuffle=False, drop_last=False, seed=0)
        self.num, self.dense, self.torn = num, dense, torn

    def iterate(self, epoch: int, start_step: int = 0) -> Any:
        side, label = (16, torch.zeros(16, 16, dtype=torch.long)) if self.dense else (64, torch.tensor(0))
        for start in range(0, self.num, 2):
            rows = list(range(start, min(start + 2, self.num)))
            images = [torch.full((3, side, side), row / 100) for row in rows]
            if self.dense:
                yield DenseImages(images, [label] * len(rows), [f"{row}" for row in rows], [row + 500 for row in rows])
            else:
                yield Batch(torch.stack(images), torch.stack([label] * len(rows)), None)
        if self.torn:
            raise RuntimeError("torn")


@pytest.fixture(scope="module", params=["labels", "label maps"])
def evaluation(request: Any) -> Any:
    """Either evaluation as a function of the number of images, with its model."""
    torch.manual_seed(0)
    dense = request.param == "label maps"
    if dense:
        gate = msvit.EntropyGate(coarse=8, share=0.5)
        model: Any = msvit.convert_segmenter(tiny_host(dtype=torch.float32), 4, gate=gate)
    else:
        model = make_model(smoke(model__gate="entropy"), num_classes=8)

    def run(num: int, torn: bool = False, **options: Any) -> Any:
        given: Any = Slide(window=16) if dense else 8
        return (evaluate_segmenter if dense else evaluate_classifier)(model, Few(num, dense, torn), given, **options)

    run.model = model  # type: ignore[attr-defined]
    return run


def rows(result: Any) -> list[int]:
    return (100 * result.samples.image[:, 0, 0, 0]).round().int().tolist()


@pytest.mark.parametrize("num", [1, 4, 5, 9])
def test_bad_images_leave_the_number_of_samples_as_asked(evaluation: Any, num: int) -> None:
    found = rows(evaluation(num, num_samples=4))
    assert len(found) == min(4, num)
    assert sorted(set(found)) == found  # in order, none twice
    assert found == rows(evaluation(num, num_samples=4))
