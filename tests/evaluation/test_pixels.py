"""mIoU and its company, against counts made one pixel at a time, and against torchmetrics' own."""

from typing import Any

import pytest
import torch
from smoke_runs import smoke
from tiny import tiny_host
from torchmetrics.classification import MulticlassJaccardIndex

import msvit
from msvit.data.dense import IGNORE, DenseImages
from msvit.evaluation.pixels import Tally, evaluate_pixels, scores
from msvit.evaluation.run import evaluate_run
from msvit.evaluation.sliding import Slide, look
from msvit.training.loop import train


class Some:
    """A loader of three images of their own sizes, in two batches."""

    class plan:  # noqa: N801
        num_images = 3

    def iterate(self, epoch: int) -> Any:
        generator = torch.Generator().manual_seed(3)
        for sizes in ([(16, 16), (20, 33)], [(9, 12)]):
            images = [torch.randn(3, *size, generator=generator) for size in sizes]
            labels = [torch.randint(0, 4, (2 * h, w), generator=generator) for h, w in sizes]
            for label in labels:
                label[0, :3] = IGNORE
                label[label == 3] = 2  # class 3 never occurs
            yield DenseImages(images, labels, ["a", "b"][: len(sizes)], list(range(len(sizes))))


@pytest.fixture(scope="module")
def model() -> Any:
    torch.manual_seed(0)
    gate = msvit.EntropyGate(coarse=8, share=0.5)
    return msvit.convert_segmenter(tiny_host(dtype=torch.float32), 4, gate=gate, decoder="linear").eval()


def test_scores_of_a_small_table():
    found = scores(torch.tensor([[6, 2, 0], [1, 3, 0], [0, 0, 0]]))
    assert found["iou"] == [6 / 9, 3 / 6, None]
    assert found["miou"] == pytest.approx((6 / 9 + 3 / 6) / 2)
    assert found["pixel_accuracy"] == 9 / 12
    assert found["class_accuracy"] == pytest.approx((6 / 8 + 3 / 4) / 2)


def test_a_class_that_is_predicted_but_never_there_counts_as_missed():
    found = scores(torch.tensor([[5, 5], [0, 0]]))
    assert found["iou"] == [0.5, 0.0]
    assert found["miou"] == 0.25


def test_it_counts_every_pixel_once(model: Any):
    slide = Slide(window=16, batch=2)
    result = evaluate_pixels(model, Some(), slide, num_samples=2)
    confusion = torch.zeros(4, 4, dtype=torch.long)
    coarse, jaccard = torch.zeros(4), MulticlassJaccardIndex(4, ignore_index=IGNORE, zero_division=0)
    for batch in Some().iterate(0):
        for image, label in zip(batch.images, batch.labels, strict=True):
            (view,) = look(model, [image], [tuple(label.shape)], slide)
            prediction = view.prob.argmax(0)
            jaccard.update(prediction[None], label[None])
            pixels = zip(label.flatten().tolist(), prediction.flatten().tolist(), view.fine.flatten(), strict=True)
            for t, p, f in pixels:
                if t != IGNORE:
                    confusion[t, p] += 1
                    coarse[t] += 1 - f
    assert torch.equal(result.confusion, confusion)
    torch.testing.assert_close(result.coarse[:3], coarse[:3] / confusion.sum(1)[:3])
    assert result.coarse[3].isnan()
    assert scores(result.confusion)["miou"] == pytest.approx(jaccard.compute().item(), abs=1e-6)
    assert result.num_images == 3
    assert len(result.tokens) == len(result.macs) == len(result.masks) == 1 + 2 * 3 + 1


def test_samples_are_the_first_windows_with_their_labels(model: Any):
    result = evaluate_pixels(model, Some(), Slide(window=16), num_samples=3)
    samples = result.samples
    assert samples.image.shape == (3, 3, 16, 16)
    assert samples.label.shape == samples.prediction.shape == (3, 16, 16)
    small = samples.label[2]  # 9 x 12 px
    assert (small[9:] == IGNORE).all()
    assert (small[:, 12:] == IGNORE).all()
    _, last = Some().iterate(0)
    assert torch.equal(small[:9, :12], last.labels[0][1::2])  # nearest of twice as many rows
    assert torch.equal(samples.image[2][:, :9, :12], last.images[0])


def test_a_batch_without_any_label_counts_nothing():
    tally = Tally(3, torch.device("cpu"))
    model = msvit.convert_segmenter(tiny_host(dtype=torch.float32), 3).eval()
    image = torch.zeros(3, 16, 16)
    tally.add([torch.full((16, 16), IGNORE)], list(look(model, [image], [(16, 16)], Slide(window=16))))
    assert tally.confusion.compute().sum() == 0
    assert tally.coarse.sum() == 0


def test_a_run_is_evaluated_with_flips_and_scales(tmp_path):
    config = smoke(task="segment", data__scales="1,1.2", gate__loss="edges", model__mode="packed")
    train(config, tmp_path, quiet=True)
    plain = evaluate_run(tmp_path, rounds=2)
    assert plain["task"] == "segment"
    assert 0 <= plain["miou"] <= plain["pixel_accuracy"] <= 1
    assert len(plain["iou"]) == len(plain["class_coarse"]) == len(plain["class_frequency"]) == 9
    assert sum(plain["class_frequency"]) == pytest.approx(1, abs=1e-6)
    assert plain["tokens"]["dense"] == 64
    assert plain["gmacs"]["mean"] < plain["gmacs"]["dense"] + 0.01
    assert {row["what"] for row in plain["latency"]} == {"packed", "dense host"}
    both = evaluate_run(tmp_path, rounds=2, flip=True, scales=(1.0, 1.5))
    assert both["scales"] == [1.0, 1.5]
    assert both["flip"]
    assert both["tokens"] == plain["tokens"]  # of the image as it is


def test_a_classifier_has_no_flips_and_scales(tmp_path):
    train(smoke(), tmp_path, quiet=True)
    with pytest.raises(ValueError, match="flip and scales are for segmentation, but this run classifies"):
        evaluate_run(tmp_path, flip=True)
