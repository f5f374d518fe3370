"""A Swin through the whole house: a ViT's gate drives it frozen, training, evaluation, report, pictures, benchmark."""

import json
from pathlib import Path

import pytest
import torch
from process_state import forget_accelerator
from smoke_runs import smoke, write_images
from tiny import tiny_swin

import msvit
from msvit_lab.bench.images import Pictures
from msvit_lab.bench.workload import Options, Workload, measure
from msvit_lab.build import make_model
from msvit_lab.config import override
from msvit_lab.evaluate import evaluate_run
from msvit_lab.recipes import recipe
from msvit_lab.report import write_report
from msvit_lab.sweep import grid
from msvit_lab.training.loop import train
from msvit_lab.viz.files import draw_files


def test_a_gate_trained_with_a_vit_drives_a_swin_frozen(tmp_path: Path) -> None:
    """It decides for its own cells, of 16 px, though coarse tokens enter at 8; nothing of it changes in training."""
    vit = train(smoke(), tmp_path / "vit", quiet=True)
    swin = override(recipe("pets_swin", smoke=True), {"model.merge_at": "2", "model.coarse": "none"})
    given = {"model.gate_from": str(vit), "model.freeze_gate": "true", "optim.epochs": "2"}
    given |= {"data.mean": "0.5,0.5,0.5", "data.std": "0.25,0.25,0.25"}  # the same images
    run = train(override(swin, given), tmp_path / "run", recipe="pets_swin", quiet=True)
    gate, model = msvit.load(vit / "model").gate, msvit.load(run / "model")
    assert (model.coarse, model.backbone.coarse_stride, model.backbone.merge_at) == (16, 8, 2)
    assert all(map(torch.equal, gate.state_dict().values(), model.gate.state_dict().values()))
    image = torch.randn(2, 3, 64, 64)
    assert torch.equal(gate(image).mask, model(image).gate.mask)
    torch.manual_seed(0)
    start = make_model(swin, model.host.num_classes).backbone
    assert not torch.equal(start.embed_coarse.weight, model.backbone.embed_coarse.weight), "the Swin has learned"

    forget_accelerator()
    evaluate_run(run, rounds=2)
    found = json.loads((run / "evaluations/val.json").read_text())
    assert found["tokens"]["dense"] == 256
    grid = msvit.ScaleGrid(64, 64, fine=4, coarse=16)
    assert found["gmacs"]["dense"] == pytest.approx(model.backbone.dense_macs(grid) / 1e9)
    assert found["gmacs"]["mean"] > 0
    write_report([run], tmp_path / "report.html")
    assert "tokens" in (tmp_path / "report.html").read_text()
    picture = write_images(tmp_path / "images") / "ant" / "0.png"
    (path, num_tokens, *_), *_ = draw_files([picture], run=run, share=0.3, out=tmp_path / "drawn")
    assert path.is_file()
    assert (num_tokens - 16 * 4) % 12 == 0  # a coarse cell has 4 tokens, a fine one 16


def test_the_benchmark_times_it(monkeypatch: pytest.MonkeyPatch) -> None:
    host = tiny_swin(dtype=torch.float32, num_classes=1000)
    monkeypatch.setattr("msvit_lab.bench.workload.make_host", lambda config, num_classes: host)
    work = Workload("swin_tiny_patch4_window7_224", 64, 2)
    options = Options(
        torch.device("cpu"), torch.float32, gate="random", share=0.5, rounds=4,
        settings={"model.merge_at": "4"},
    )  # fmt: skip
    found = measure(work, options, Pictures())
    assert [row["trouble"] for row in found["rows"]] == [None] * 3
    assert found["coarse"] == 32
    assert found["mac_ratio"] > 1


def test_sweeps_take_its_cells_for_steps() -> None:
    jobs = grid("imagenet_swin", targets=[0.5], weights=[4.0], changes={"model.coarse": "none"})
    assert [job.changes.get("data.img_size") for job in jobs[:5]] == ["224", "192", "160", "128", None]
