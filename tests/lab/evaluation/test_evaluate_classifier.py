"""The numbers of an evaluation are those of the model, image by image."""

from dataclasses import asdict

import pytest
import torch
from smoke_runs import smoke, write_images

import msvit
from msvit_lab.build import make_model
from msvit_lab.data import batches, open_source
from msvit_lab.evaluate import evaluate_run
from msvit_lab.evaluation.classification import evaluate_classifier, object_cells
from msvit_lab.evaluation.shared import concatenate
from msvit_lab.runs import Run
from msvit_lab.training.loop import train


def loader(batch_size: int = 8, num_images: int = 40):
    source = open_source("scenes", "val", num_images=num_images)
    options = {"mean": (0.5,) * 3, "std": (0.25,) * 3, "workers": 0}
    return batches(source, img_size=64, batch_size=batch_size, train=False, **options)


def model(gate: str = "entropy") -> msvit.MSViT:
    torch.manual_seed(0)
    return make_model(smoke(model__gate=gate), num_classes=8).eval()


def test_the_numbers_are_those_of_the_images_one_by_one():
    vit = model()
    result = evaluate_classifier(vit, loader(), num_classes=8)
    right, right5, losses, tokens, macs, masks = [], [], [], [], [], []
    vit = vit.with_options(mode="packed")
    with torch.no_grad():
        for batch in loader(batch_size=1).iterate(0):
            output = vit(batch.image)
            ranking = output.logits[0].argsort(descending=True).tolist()
            right.append(ranking[0] == batch.label.item())
            right5.append(batch.label.item() in ranking[:5])
            losses.append(torch.nn.functional.cross_entropy(output.logits, batch.label).item())
            tokens.append(16 + 3 * int(output.gate.mask.sum()))
            macs.append(msvit.macs(vit, batch.image).item())
            masks.append(output.gate.mask[0])
    assert result.scores["top1"] == pytest.approx(sum(right) / 40)
    assert result.scores["top5"] == pytest.approx(sum(right5) / 40)
    assert result.scores["loss"] == pytest.approx(sum(losses) / 40, rel=1e-5)
    assert result.costs.tokens.tolist() == tokens
    assert result.costs.macs.tolist() == macs
    assert torch.equal(result.costs.masks, torch.stack(masks))
    assert result.fine["fine_share"] == pytest.approx(torch.stack(masks).mean().item())
    assert vit.mode == "packed"


def test_the_samples_depend_on_the_seed_and_not_on_the_batches():
    vit = model()
    one, other = (asdict(evaluate_classifier(vit, loader(size), 8, num_samples=6, seed=1).samples) for size in (8, 5))
    assert all(torch.equal(one[key], other[key]) and len(one[key]) == 6 for key in one)
    third = evaluate_classifier(vit, loader(), 8, num_samples=6, seed=2).samples
    assert not torch.equal(one["image"], third.image)
    with pytest.raises(ValueError, match="0 images were evaluated"):
        concatenate([])


def test_a_cell_holds_the_object_from_a_tenth_of_its_area_on():
    covered = torch.zeros(1, 16, 16)
    covered[0, :8, :8] = 1  # all of the first cell
    covered[0, 0, 8:14] = 1  # 6 of 64 pixels: neither object nor ground
    covered[0, 8, :7] = 1  # 7 of 64
    objects, ground = object_cells(covered, 8)
    assert objects.tolist() == [[[True, False], [True, False]]]
    assert ground.tolist() == [[[False, False], [False, True]]]


class Oracle(msvit.DiscGate):
    """Fine in the upper half."""

    def forward(self, image):
        mask = torch.zeros(len(image), *self.cells(image))
        mask[:, :2] = 1
        return msvit.types.GateOutput.from_mask(mask)


def test_fine_on_object_is_the_share_of_object_cells_that_are_fine():
    vit = model()
    vit.gate = Oracle(coarse=16)
    result = evaluate_classifier(vit, loader(), num_classes=8)
    counts = torch.zeros(2, 2)  # object or ground, all or fine
    for batch in loader().iterate(0):
        for row, where in enumerate(object_cells(batch.object_mask, 16)):
            counts[row] += torch.tensor([where.sum(), where[:, :2].sum()])
    assert result.fine["fine_on_object"] == pytest.approx((counts[0, 1] / counts[0, 0]).item())
    assert result.fine["fine_on_ground"] == pytest.approx((counts[1, 1] / counts[1, 0]).item())
    assert 0.2 < result.fine["fine_on_object"] < 0.8


def test_a_run_is_evaluated_on_other_data_by_the_names_of_its_classes(tmp_path):
    for split in ("train", "val"):
        write_images(tmp_path / "data" / split)
    write_images(tmp_path / "less/val", ("cat", "bee"))
    write_images(tmp_path / "more/val", ("ant", "wasp"))
    config = smoke(data__source=tmp_path / "data", data__img_size=32, optim__batch_size=6, model__gate="none")
    run = train(config, tmp_path / "run", quiet=True)
    found = evaluate_run(run, data=str(tmp_path / "less"), rounds=0)
    assert found["num_images"] == 8
    assert sorted(Run(run).evaluations.samples("data-less").labels) == [1] * 4 + [2] * 4, "cat is still the third class"
    with pytest.raises(ValueError, match=r"2 classes, among them wasp, which the 3 classes"):
        evaluate_run(run, data=str(tmp_path / "more"), rounds=2)
