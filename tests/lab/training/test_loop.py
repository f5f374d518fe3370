"""One loop for every gate, loss, mode, recipe and precision."""

import math
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from smoke_runs import SEGMENT, lines, smoke, write_images

import msvit
from msvit.gates import LogitGate
from msvit.types import IGNORE
from msvit_lab.build import make_loader, make_model, open_sources
from msvit_lab.config import override
from msvit_lab.hosts import make_host, read_run
from msvit_lab.recipes import RECIPES, recipe
from msvit_lab.runs import Run
from msvit_lab.tasks import TASKS
from msvit_lab.training import loop
from msvit_lab.training.loop import train
from msvit_lab.training.optimizer import make_optimizer, rate
from msvit_lab.training.state import differences


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_runs_two_steps(tmp_path, name):
    config = recipe(name, smoke=True)
    train(config, tmp_path, recipe=name, quiet=True)
    assert differences(Run(tmp_path).config, config) == []
    found = lines(tmp_path, "train")
    assert [line["step"] for line in found] == [1, 2]
    assert all(math.isfinite(line["loss"]) and line["gate"] > 0 for line in found)
    assert isinstance(msvit.load(tmp_path / "model").gate, LogitGate)


def test_the_gate_loss_pulls_the_gate(tmp_path):
    """From 95 % of cells towards 10 %, although the task would rather have them all (each loss: library/gates)."""
    fast = {"gate.warmup_epochs": 0, "gate.lr_scale": 3, "gate.weight": 20, "gate.target": 0.1, "optim.epochs": 3}
    train(smoke(**fast, gate__loss="bas", model__mode="trimmed"), tmp_path, quiet=True)
    first, *_, last = lines(tmp_path, "train")
    assert last["gate"] < first["gate"]
    assert last["fine"] < first["fine"]


@pytest.mark.parametrize("gate", ["entropy", "all-coarse"])
def test_gates_that_do_not_learn_train_the_model_alone(tmp_path, gate):
    train(smoke(model__gate=gate, model__share=0.25), tmp_path, quiet=True)
    for line in lines(tmp_path, "train"):
        assert "gate" not in line
        assert line["loss"] == line["task"]
        assert line["fine"] == (0 if gate == "all-coarse" else pytest.approx(0.25, abs=0.07))


def test_bf16_works_without_a_gpu_and_is_another_arithmetic(trained, tmp_path):
    train(smoke(optim__precision="bf16", optim__ema=0.5), tmp_path, quiet=True)
    half, full = (lines(run, "train")[-1]["task"] for run in (tmp_path, trained / "gated"))
    assert half != full
    assert half == pytest.approx(full, rel=0.02)


def test_accumulation_takes_the_step_of_the_whole_batch(tmp_path):
    """Where the loss is a mean over images: batch-shaping looks at the images of one pass together."""
    for accumulate in (1, 4):
        config = smoke(optim__accumulate=accumulate, gate__loss="l0", gate__noise=0, optim__name="sgd", optim__lr=0.1)
        train(config, tmp_path / str(accumulate), quiet=True)
    one, four = (msvit.load(tmp_path / name / "model").state_dict() for name in ("1", "4"))
    start = make_model(config, num_classes=8).state_dict()
    moved = [key for key in one if not torch.equal(one[key], start[key])]
    assert len(moved) > 10
    for key, value in one.items():
        torch.testing.assert_close(four[key], value, rtol=1e-4, atol=1e-6, msg=key)


def test_passes_that_fill_no_whole_step_are_left_out(tmp_path, monkeypatch):
    """56 images in passes of 8 are 7; two of them make a step, so an epoch has 3 steps and not 3 1/2."""
    seen = []
    compute = loop.compute_losses
    monkeypatch.setattr(loop, "compute_losses", lambda *args: seen.append(args[1].label) or compute(*args))
    config = smoke(data__num_train=56, optim__accumulate=2, optim__epochs=2)
    train(config, tmp_path, quiet=True)
    assert [line["epoch"] for line in lines(tmp_path, "train")] == [n / 3 for n in (1, 2, 3, 4, 5, 6)]
    loader = make_loader(open_sources(config).train, config, train=True, device=torch.device("cpu"))
    wanted = [batch.label for epoch in (0, 1) for batch in list(loader.iterate(epoch))[:6]]
    assert torch.equal(torch.stack(seen), torch.stack(wanted))


def test_the_running_mean_is_what_is_kept(tmp_path):
    """With a decay of 1/2 the mean after two steps is (start + first) / 4 + second / 2."""
    for ema in (0, 0.5):
        for epochs in (0.5, 1):
            sgd = {"optim.name": "sgd", "optim.warmup_epochs": 0, "optim.min_lr": 1e-3}
            config = smoke(**sgd, optim__ema=ema, optim__epochs=epochs)
            train(config, tmp_path / f"{ema}-{epochs}", quiet=True)
    torch.manual_seed(0)
    start = make_model(config, num_classes=8).state_dict()
    first, second, mean = (
        msvit.load(tmp_path / name / "model").state_dict() for name in ("0-0.5", "0-1", "0.5-1")
    )
    for key, value in mean.items():
        torch.testing.assert_close(value, (start[key] + first[key]) / 4 + second[key] / 2, msg=key)


@pytest.mark.parametrize(("schedule", "half"), [("cosine", 0.5), ("poly", 0.5**0.9)])
def test_the_rate_rises_to_its_peak_and_falls_to_its_floor(schedule, half):
    rates = [rate(step, 100, num_warmup=10.0, peak=1.0, floor=0.1, schedule=schedule) for step in range(101)]
    assert rates[0] == pytest.approx(0.1)
    assert max(rates) == rates[9] == pytest.approx(1, abs=0.09)
    assert all(a > b for a, b in pairwise(rates[9:]))
    assert rates[50] == pytest.approx(0.1 + 0.9 * half)
    assert rates[100] == pytest.approx(0.1)


def test_a_corrupt_image_stops_the_run_with_its_path_or_is_skipped_and_counted(tmp_path, capsys):
    for split in ("train", "val"):
        write_images(tmp_path / "data" / split)
    bad = tmp_path / "data/train/bee/0.png"
    bad.write_bytes(bad.read_bytes()[:100])
    config = smoke(data__source=tmp_path / "data", optim__batch_size=6, data__img_size=32)
    with pytest.raises(ValueError, match=rf"{bad} cannot be read.*--skip-bad"):
        train(config, tmp_path / "stops", quiet=True)
    train(override(config, {"data.skip_bad": "true"}), tmp_path / "goes-on")
    assert f"1 unreadable images were skipped, such as {bad}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"data.source": "nowhere"}, r"nowhere"),
        ({"optim.batch_size": "64"}, r"32 images .*batch_size is 64; .* such as --set optim\.batch_size=32"),
        ({"model.name": "vit_tinny_patch16_224"}, r"timm has no model.*near it are .*vit_tiny_patch16_224"),
        ({"model.weights": "nowhere.safetensors"}, r"nowhere\.safetensors, but there is no such file"),
        ({"data.img_size": "40"}, r"40x40.*multiples of 16"),
        (SEGMENT | {"data.stride": "1000"}, "gaps"),
        ({"data.source": "{tmp}/empty"}, r"val is empty"),
        ({"data.source": "{tmp}/unequal"}, r"4 classes, among them wasp.*3 classes"),
        ({"reducer.name": "evit", "reducer.at": "1"}, r"no class token.*DynamicViT or msvit\.ToMe"),  # scenes pools
        ({"reducer.name": "tome", "reducer.r": "33"}, r"r is 33.*64 tokens.*r=32"),
        ({"reducer.name": "dynamicvit", "reducer.r": "5"}, r"dynamicvit has no r; its settings are rate, at"),
    ],
)
def test_what_cannot_be_trained_raises_before_anything_is_written(tmp_path, changes, words):
    for name in ("empty", "unequal"):
        write_images(tmp_path / name / "train")
        (tmp_path / name / "val").mkdir()
    write_images(tmp_path / "unequal/val", ("ant", "bee", "cat", "wasp"))
    with pytest.raises(ValueError, match=words):
        train(override(smoke(), {k: v.format(tmp=tmp_path) for k, v in changes.items()}), tmp_path / "run", quiet=True)
    assert not (tmp_path / "run").exists() or "reducer.r" in changes, "which depends on the tokens of an image"


def test_a_swin_can_start_from_another_of_the_same_windows(tmp_path):
    config = recipe("pets_swin", smoke=True)
    train(override(config, {"model.gate": "none"}), tmp_path / "dense", quiet=True)
    learned = read_run(tmp_path / "dense")[0].host
    config = override(config, {"model.weights": str(tmp_path / "dense")})
    host = make_host(config, learned.num_classes)
    assert all(torch.equal(t, host.state_dict()[name]) for name, t in learned.state_dict().items())
    larger = override(config, {"data.img_size": str(2 * config.data.img_size)})  # its last windows are larger too
    with pytest.raises(ValueError, match=r"relative_position_bias_table; .*of a Swin also data\.img_size"):
        make_host(larger, learned.num_classes)


def test_a_run_can_start_from_what_another_has_learned(trained):
    """At another input size, with as many classes or others; its classifier is taken if it fits."""
    learned = read_run(trained / "dense")[0].host
    same = make_host(smoke(model__weights=trained / "dense"), learned.num_classes)
    assert all(torch.equal(t, same.state_dict()[name]) for name, t in learned.state_dict().items())
    small = make_host(smoke(model__weights=trained / "dense", data__img_size=32), 3)
    assert small.pos_embed.shape[1] < learned.pos_embed.shape[1]
    assert torch.equal(small.blocks[1].mlp.fc1.weight, learned.blocks[1].mlp.fc1.weight)
    assert small.head.weight.shape[0] == 3
    kept = smoke(model__weights=trained / "dense", model__pretrained=True, optim__zero_head=True)
    assert torch.equal(make_model(kept, learned.num_classes).host.head.weight, learned.head.weight)
    deeper = smoke(model__weights=trained / "dense", model__options__depth=3)
    with pytest.raises(ValueError, match=r"differs from VisionTransformer .* in blocks\.2\..*give the same --model"):
        make_host(deeper, learned.num_classes)


def test_a_batch_without_labels_costs_nothing_and_the_others_their_mean():
    task = TASKS["segment"]
    logits = torch.randn(2, 5, 4, 4)
    label = torch.randint(0, 5, (2, 4, 4))
    torch.testing.assert_close(task.loss(logits, label, 0.1), F.cross_entropy(logits, label, label_smoothing=0.1))
    label[0] = IGNORE
    torch.testing.assert_close(task.loss(logits, label, 0.0), F.cross_entropy(logits[1:], label[1:]))
    assert task.loss(logits, torch.full_like(label, IGNORE), 0.0) == 0
    assert task.accuracy(F.one_hot(label.clamp(max=4)).movedim(3, 1), label) == 1
    assert task.accuracy(F.one_hot((label + 1) % 5).movedim(3, 1), label) == 0


def test_decoder_gate_and_reducer_have_learning_rates_of_their_own():
    """Each parameter is in one group: the host's, the decoder's or classifier's, or the one of gate and reducer."""
    scales = {"optim.head_scale": "20", "gate.lr_scale": "7", "optim.lr": "1e-4"}
    reducer = {"reducer.name": "dynamicvit", "reducer.rate": "0.6", "reducer.at": "0,1"}
    for changes, head in ((SEGMENT, lambda model: model.decoder), (reducer, lambda model: model.host.head)):
        config = smoke(**scales, **changes)
        model = make_model(config, 9)
        groups = make_optimizer(config, model, None).param_groups
        peaks = {id(p): group["peak"] for group in groups for p in group["params"]}
        assert sum(len(group["params"]) for group in groups) == len(peaks)
        assert peaks.keys() == {id(p) for p in model.parameters() if p.requires_grad}
        new = [model.gate] if model.reducer is None else [model.gate, model.reducer]
        for peak, modules in ((20e-4, [head(model)]), (7e-4, new), (1e-4, model.host.blocks)):
            assert all(peaks[id(p)] == pytest.approx(peak) for module in modules for p in module.parameters())
