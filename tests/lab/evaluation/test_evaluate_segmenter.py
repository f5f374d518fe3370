"""Sliding windows; mIoU and other scores, against counts made one pixel at a time, and against torchmetrics."""

import json
import math
import shutil
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from PIL import Image
from smoke_runs import smoke
from tiny import images, tiny_host
from torchmetrics.classification import MulticlassJaccardIndex

import msvit
from msvit_lab.build import make_loader, open_val
from msvit_lab.cli.app import console
from msvit_lab.cli.tables import show_evaluation
from msvit_lab.data import IGNORE, DenseImages, Loader, Plan
from msvit_lab.evaluate import evaluate_run
from msvit_lab.evaluation.segmentation import PixelCounts, evaluate_segmenter, scores, segment
from msvit_lab.evaluation.sliding import Slide, cut, predict, stitch
from msvit_lab.report import write_report
from msvit_lab.runs import read_config
from msvit_lab.tasks import TASKS
from msvit_lab.training.loop import train


class Some(Loader):
    """Three images of their own sizes, in two batches."""

    def __init__(self) -> None:
        self.plan = Plan(num_images=3, batch_size=2, train=False, seed=0)

    def iterate(self, epoch: int, start_step: int = 0) -> Any:
        generator = torch.Generator().manual_seed(3)
        for sizes in ([(16, 16), (20, 33)], [(9, 12)]):
            images = [torch.randn(3, *size, generator=generator) for size in sizes]
            labels = [torch.randint(0, 4, (2 * h, w), generator=generator) for h, w in sizes]
            for label in labels:
                label[0, :3] = IGNORE
                label[label == 3] = 2  # class 3 never occurs
            yield DenseImages(images, labels)


@pytest.fixture(scope="module")
def model() -> Any:
    torch.manual_seed(0)
    gate = msvit.EntropyGate(coarse=8, share=0.5)
    return msvit.convert_segmenter(tiny_host(dtype=torch.float32), 4, gate=gate, decoder="linear").eval()


@pytest.mark.parametrize("stride", [None, 5, 16])
@pytest.mark.parametrize("size", [(16, 16), (40, 23), (7, 30), (3, 5), (33, 48)])
def test_stitching_undoes_cutting(size: tuple[int, int], stride: int | None) -> None:
    slide = Slide(window=16, stride=stride)
    image = images(1, *size)[0]
    parts = cut(image, slide)
    assert parts.shape[1:] == (3, 16, 16)
    assert torch.allclose(stitch(parts, size, slide), image)
    row = torch.arange(40.0).expand(1, 16, 40)
    touching = [part[0, 0, 0].item() for part in cut(row, Slide(window=16))]
    assert touching == [0, 16, 24], "the last ends with the image"


def test_one_window_is_the_model_itself(model: Any) -> None:
    image = images(3, dtype=torch.float32)
    want = model(image)
    for i, view in enumerate(predict(model, list(image), [(16, 16)] * 3, Slide(window=16, batch=2))):
        assert torch.allclose(view.prob, want.logits[i].softmax(0), atol=1e-6)
        assert torch.equal(view.fine, want.gate.mask[i].repeat_interleave(8, 0).repeat_interleave(8, 1))
        assert view.costs.tokens.tolist() == [want.tokens.count[i]]
        assert view.costs.macs.tolist() == [model.encoder.macs(image[i : i + 1], head=False).item()]


def test_the_model_gets_full_batches_and_no_more_than_are_needed(model: Any) -> None:
    seen: list[int] = []
    hook = model.register_forward_hook(lambda _, given, out: seen.append(len(given[0])))
    many = [images(1, 16, width, dtype=torch.float32)[0] for width in (40, 16, 48)]  # 3, 1 and 3 windows, no more
    sizes = [(16, image.shape[2]) for image in many]
    views = predict(model, many, sizes, Slide(window=16, batch=4))
    next(views)
    assert seen == [4]
    list(views)
    assert seen == [4, 3]
    hook.remove()


@pytest.mark.parametrize(
    ("confusion", "iou", "pixels", "classes"),
    [
        ([[6, 2, 0], [1, 3, 0], [0, 0, 0]], [6 / 9, 3 / 6, None], 9 / 12, (6 / 8 + 3 / 4) / 2),
        ([[5, 5], [0, 0]], [0.5, 0.0], 0.5, 0.5),  # a class that is predicted but never occurs counts as missed
        ([[0, 0], [0, 0]], [None, None], None, None),  # nothing is labelled
    ],
)
def test_scores_of_small_tables(confusion, iou, pixels, classes):
    known = [value for value in iou if value is not None]
    mean = pytest.approx(sum(known) / len(known)) if known else None
    wanted = {"miou": mean, "pixel_accuracy": pixels, "class_accuracy": classes, "iou": iou}
    assert scores(torch.tensor(confusion)) == wanted


def test_it_counts_every_pixel_once(model: Any):
    slide = Slide(window=16, batch=2)
    counts = PixelCounts(4, torch.device("cpu"))
    assert [len(each.costs.tokens) for each in segment(model, Some(), slide, counts)] == [1, 2 * 3, 1]
    confusion = torch.zeros(4, 4, dtype=torch.long)
    coarse, jaccard = torch.zeros(4), MulticlassJaccardIndex(4, ignore_index=IGNORE, zero_division=0)
    for batch in Some().iterate(0):
        for image, label in zip(batch.images, batch.labels, strict=True):
            (view,) = predict(model, [image], [tuple(label.shape)], slide)
            prediction = view.prob.argmax(0)
            jaccard.update(prediction[None], label[None])
            pixels = zip(label.flatten().tolist(), prediction.flatten().tolist(), view.fine.flatten(), strict=True)
            for t, p, f in pixels:
                if t != IGNORE:
                    confusion[t, p] += 1
                    coarse[t] += 1 - f
    assert torch.equal(counts.confusion.compute(), confusion)
    torch.testing.assert_close(counts.coarse.float(), coarse)
    result = evaluate_segmenter(model, Some(), slide, num_samples=2)
    assert result.scores == scores(confusion)
    assert result.scores["miou"] == pytest.approx(jaccard.compute().item(), abs=1e-6)
    assert result.fine["class_coarse"][:3] == pytest.approx((coarse / confusion.sum(1))[:3].tolist())
    assert result.fine["class_coarse"][3] is None
    assert result.num_images == 3
    assert len(result.costs.tokens) == len(result.costs.macs) == len(result.costs.masks) == 1 + 2 * 3 + 1


def test_samples_are_the_first_windows_with_their_labels(model: Any):
    samples = evaluate_segmenter(model, Some(), Slide(window=16), num_samples=3).samples
    assert samples.image.shape == (3, 3, 16, 16)
    assert samples.label.shape == samples.prediction.shape == (3, 16, 16)
    small = samples.label[2]  # 9 x 12 px
    assert (small[9:] == IGNORE).all()
    assert (small[:, 12:] == IGNORE).all()
    _, last = Some().iterate(0)
    assert torch.equal(small[:9, :12], last.labels[0][1::2])  # nearest of twice as many rows
    assert torch.equal(samples.image[2][:, :9, :12], last.images[0])


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    plan = smoke(task="segment", data__scales="1,1.2", model__gate="entropy", model__share=0.4)
    return train(plan, tmp_path_factory.mktemp("segmented"), quiet=True)


def test_a_run_is_evaluated(run):
    plain = evaluate_run(run, rounds=2)
    assert plain["task"] == "segment"
    assert 0 <= plain["miou"] <= plain["pixel_accuracy"] <= 1
    assert len(plain["iou"]) == len(plain["class_coarse"]) == len(plain["class_frequency"]) == 9
    assert sum(plain["class_frequency"]) == pytest.approx(1, abs=1e-6)
    assert plain["tokens"]["dense"] == 64
    assert {row["what"] for row in plain["latency"]} == {"packed", "dense host"}
    about = read_config(run)
    loader = make_loader(open_val(about["config"], about["classes"]), about["config"], train=False, device="cpu")
    model = msvit.load(run / "model")
    macs = [model.encoder.macs(image[None], head=False) for batch in loader.iterate(0) for image in batch.images]
    assert plain["gmacs"]["mean"] == pytest.approx(torch.cat(macs).double().mean().item() / 1e9, rel=1e-9)
    assert plain["gmacs"]["mean"] < 0.9 * plain["gmacs"]["dense"]


def test_a_set_without_labels_gives_dashes_and_json(run, tmp_path, monkeypatch):
    classes = read_config(run)["classes"]
    for kind, shown in (("images", np.zeros((64, 64, 3), np.uint8)), ("labels", np.full((64, 64), IGNORE, np.uint8))):
        (tmp_path / "data/val" / kind).mkdir(parents=True)
        Image.fromarray(shown).save(tmp_path / f"data/val/{kind}/a.png")
    (tmp_path / "data/classes.txt").write_text("\n".join(classes))
    folder = shutil.copytree(run, tmp_path / "run")
    found = evaluate_run(folder, data=str(tmp_path / "data"), rounds=2)
    path = folder / "evaluations/data-data.json"
    read = json.loads(path.read_text(), parse_constant=pytest.fail)  # NaN is no JSON
    assert read == json.loads(json.dumps(found))
    assert read["miou"] is read["pixel_accuracy"] is read["class_accuracy"] is None
    assert read["iou"] == read["class_frequency"] == read["class_coarse"] == [None] * 9
    monkeypatch.setattr(console, "width", 300)
    with console.capture() as printed:
        show_evaluation(folder, found)
    shown = " ".join(printed.get().replace("│", " ").split())
    assert "mIoU – pixel accuracy – mean class accuracy – no pixel is labelled" in shown  # noqa: RUF001
    assert "nan" not in shown
    path.replace(folder / "evaluations/val.json")
    html = write_report([folder], tmp_path / "report.html").read_text()
    assert "No mIoU yet: of 1 run(s), none has one." in html
    assert "<td>–</td>" in html  # noqa: RUF001


def test_training_goes_on_without_labels(model: Any):
    class Unlabelled(Some):
        def iterate(self, epoch: int, start_step: int = 0) -> Any:
            for batch in super().iterate(epoch):
                yield replace(batch, labels=[torch.full_like(label, IGNORE) for label in batch.labels])

    plan, accelerator = smoke(task="segment", data__img_size=16), Accelerator(cpu=True)
    found = TASKS["segment"].score(model, Some(), plan, accelerator)
    result = evaluate_segmenter(model, Some(), Slide(window=16))
    assert found["miou"] == pytest.approx(result.scores["miou"])
    assert found["tokens"] == pytest.approx(result.costs.tokens.double().mean().item())
    nothing = TASKS["segment"].score(model, Unlabelled(), plan, accelerator)
    assert math.isnan(nothing["miou"])
    assert nothing["tokens"] == found["tokens"]
