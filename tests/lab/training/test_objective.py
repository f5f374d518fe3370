"""What a gate learns from, and the settings of its training: prior, rate of theta, clipping, mode."""

import math

import pytest
import torch
from accelerate import Accelerator
from smoke_runs import EDGES, SEGMENT, lines, smoke

import msvit
from msvit.losses.targets import edge_cells
from msvit_lab.auto_settings import describe_mode, resolve_settings
from msvit_lab.build import make_loader, make_model, open_sources
from msvit_lab.config import Config, override
from msvit_lab.data import Batch
from msvit_lab.training import objective
from msvit_lab.training.loop import train
from msvit_lab.training.objective import compute_losses, make_objective, teacher_attention
from msvit_lab.training.optimizer import clip, make_optimizer, set_rates

CPU = torch.device("cpu")


def pets(**changes: object) -> Config:
    """The smoke version of `pets`: a ContextGate that learns from attention."""
    return resolve_settings(smoke("pets", **changes), CPU)


def contrast(image: torch.Tensor) -> torch.Tensor:
    """Stands in for the attention of a dense model: to cells in which something happens."""
    cells = image.mean(1).unfold(1, 32, 32).unfold(2, 32, 32).flatten(3)
    strength = (2 * cells.std(-1)).exp()
    return strength / strength.sum((1, 2), keepdim=True)


@pytest.mark.slow
def test_a_gate_learns_a_dense_models_attention_and_keeps_the_share(tmp_path, monkeypatch):
    monkeypatch.setattr(objective, "teacher_attention", lambda *parts: contrast)
    config = pets(data__img_size=128, optim__epochs=25, optim__lr=1e-4, gate__target=0.25)
    train(config, tmp_path, quiet=True)
    shares = [line["fine"] for line in lines(tmp_path, "train")]
    assert sum(shares[-20:]) / 20 == pytest.approx(0.25, abs=0.08), shares
    image = next(make_loader(open_sources(config).val, config, train=False, device="cpu").iterate(0)).image
    with torch.no_grad():
        logits = msvit.load(tmp_path / "model").gate.eval()(image).logits.flatten()
        assert torch.corrcoef(torch.stack([contrast(image).log().flatten(), logits]))[0, 1] > 0.5


@pytest.mark.slow  # how the threshold follows: tests/library/losses/test_targets.py
@pytest.mark.parametrize("target", ["0.25", "0.5"])
def test_a_gate_learns_where_edges_are_and_keeps_the_share(tmp_path, target):
    """Of a cell with an edge and one without, the one with the edge has the higher logit; chance is a half."""
    changes = {"optim.epochs": "120", "optim.lr": "3e-3", "data.photometric": "false", "gate.target": target}
    config = smoke(**EDGES, **changes, gate__weight=1)
    train(config, tmp_path, quiet=True)
    found = lines(tmp_path, "train")
    shares = [line["fine"] for line in found]
    assert shares[0] == 1
    assert found[-1]["task"] < 0.8 * found[0]["task"], "the decoder learns, too"
    assert sum(shares[-40:]) / 40 == pytest.approx(float(target), abs=0.05)
    gate = msvit.load(tmp_path / "model").gate
    loader = make_loader(open_sources(config).train, config, train=True, device=CPU)
    with torch.no_grad():
        found = [(gate(batch.image).logits, edge_cells(batch.label, gate.coarse)) for batch in loader.iterate(0)]
    logits, edge = (torch.cat(column).flatten() for column in zip(*found, strict=True))
    assert (logits[edge == 1][:, None] > logits[edge == 0]).float().mean() > 0.75


def test_the_teacher_may_be_a_dense_run_of_another_width_but_needs_a_class_token(tmp_path):
    dense = train(pets(model__gate="none", optim__lr="1e-2"), tmp_path / "dense", quiet=True)
    image, found = torch.randn(2, 3, 64, 64), []
    for changes in ({}, {"gate__teacher": dense}, {"gate__teacher": dense, "model__options__embed_dim": 16}):
        torch.manual_seed(0)
        config = pets(**changes)
        found.append(teacher_attention(config, make_model(config, 8))(image))
    assert found[0].shape == (2, 2, 2)
    assert (found[0] - found[1]).abs().max() > 1e-6
    torch.testing.assert_close(found[1].sum((1, 2)), torch.ones(2))
    assert torch.equal(found[1], found[2]), "whatever the model's width"
    pooled = pets(model__options__class_token="false", model__options__global_pool="avg")
    with pytest.raises(ValueError, match=r"no class token; choose another gate loss, give a teacher that has one"):
        make_objective(pooled, make_model(pooled, 8))


def test_a_frozen_gates_threshold_follows_a_target_and_nothing_else_of_it_changes(tmp_path):
    gate = msvit.load_gate("default")
    msvit.save_gate(gate, tmp_path / "gate")
    own = {"model__gate_from": tmp_path / "gate", "model__freeze_gate": "true", "optim__epochs": "7"}
    train(pets(**own, gate__follow="true", gate__target="0.6", data__img_size="128"), tmp_path / "run", quiet=True)
    after = msvit.load(tmp_path / "run/model").gate
    found = lines(tmp_path / "run", "train")
    assert all(torch.equal(value, dict(after.named_parameters())[name]) for name, value in gate.named_parameters())
    assert after.threshold != gate.threshold
    assert "gate" not in found[0], "it has no loss"
    assert sum(line["fine"] for line in found[-5:]) / 5 == pytest.approx(0.6, abs=0.1)
    msvit.save_gate(msvit.DiscGate(coarse=32, share=0.3), tmp_path / "disc")
    disc = pets(model__gate_from=tmp_path / "disc", model__freeze_gate="true", gate__follow="true")
    with pytest.raises(ValueError, match="a DiscGate has no threshold"):
        make_objective(disc, make_model(disc, 8))


def test_a_gate_of_another_task_is_taken_frozen_or_learns_on(trained, tmp_path):
    run = trained / "gated"
    before = msvit.load(run / "model").gate
    train(smoke(**SEGMENT, model__gate_from=run, model__freeze_gate="true"), tmp_path / "frozen", quiet=True)
    gate = msvit.load(tmp_path / "frozen/model").gate
    assert all(torch.equal(gate.state_dict()[name], value) for name, value in before.state_dict().items())
    assert "gate" not in lines(tmp_path / "frozen", "train")[0]
    train(smoke(**EDGES, model__gate_from=run, optim__epochs=3), tmp_path / "on", quiet=True)
    after = msvit.load(tmp_path / "on/model").gate
    assert not all(map(torch.equal, after.parameters(), before.parameters()))
    assert after.noise == 0.0  # with a target for each cell it need not explore


def test_a_gate_decides_the_same_in_a_run_with_other_statistics(trained, tmp_path):
    run = trained / "gated"
    before, pixels = msvit.load_gate(run / "model"), torch.rand(2, 3, 64, 64)
    alone = msvit.save_gate(before, tmp_path / "gate")
    mean, std = (0.4, 0.5, 0.3), (0.2, 0.1, 0.5)
    own = (pixels - torch.tensor(mean).view(3, 1, 1)) / torch.tensor(std).view(3, 1, 1)
    want = before.eval()((pixels - 0.5) / 0.25).logits

    def taken_from(folder):
        return make_model(smoke(model__gate_from=folder, data__mean=mean, data__std=std), 9).gate.eval()

    for folder in (run, alone):
        torch.testing.assert_close(taken_from(folder)(own).logits, want)


def test_a_gate_that_learned_with_a_threshold_keeps_its_decisions_under_other_losses(tmp_path):
    before, image = msvit.LearnedGate(coarse=16).eval(), torch.randn(4, 3, 64, 64)
    before.threshold = before(image).logits.mean().item()
    msvit.save_gate(before, tmp_path)
    gate = make_model(smoke(model__gate_from=tmp_path, gate__loss="gbas"), 9).gate.eval()
    assert gate.threshold == 0
    with torch.no_grad():
        assert 0 < before(image).mask.mean() < 1
        assert torch.equal(gate(image).mask, before(image).mask)
        assert torch.equal(gate(image).fine_prob > 0.5, gate(image).mask > 0.5)  # what the losses see is what is done


def test_theta_has_a_rate_of_its_own_only_if_one_is_given():
    """Without one its place among the optimizer's parameters is the same as ever: saved states go by that."""
    found = {}
    for prior_lr in ("none", "0.5"):
        config = smoke(gate__prior_lr=prior_lr, gate__lr_scale=3, optim__lr=0.01, optim__min_lr=0.001)
        config = override(config, {"gate.warmup_epochs": "4", "optim.warmup_epochs": "1"})
        model = make_model(config, 8)
        loss = make_objective(config, model).module
        optimizer = make_optimizer(config, model, loss)
        set_rates(optimizer, step=1, num_steps=80, per_epoch=10, config=config)
        found[prior_lr] = optimizer.param_groups, [*model.gate.parameters(), loss.raw]
    groups, own = found["none"]
    assert [id(p) for p in groups[-1]["params"]] == [id(p) for p in own]
    groups, own = found["0.5"]
    assert [id(p) for group in groups[-2:] for p in group["params"]] == [id(p) for p in own]
    assert groups[-1]["params"] == own[-1:]
    assert [group["peak"] for group in groups[-2:]] == [pytest.approx(0.03), 0.5]
    cosine = 0.5 * (1 + math.cos(math.pi / 80))
    assert groups[-1]["lr"] == pytest.approx(
        2 / 40 * (0.05 + 0.45 * cosine)
    )  # warm-up of the gate, floor in proportion
    assert groups[-1]["weight_decay"] == 0
    assert groups[0]["lr"] == pytest.approx(2 / 10 * (0.001 + 0.009 * cosine)), "the host's warm-up is its own"


@pytest.mark.parametrize("mode", ["trimmed", "masked"])
def test_cells_whose_fine_tokens_were_cut_learn_from_the_gate_loss_alone_if_asked(mode):
    image, label = torch.randn(8, 3, 64, 64), torch.arange(8)
    found = []
    for what in ("keep", "zero"):
        torch.manual_seed(0)
        config = smoke(model__mode=mode, gate__cut_twins=what, gate__prior="beta")
        model = make_model(config, 8)
        torch.nn.init.zeros_(model.gate.head.bias)  # half of the cells are coarse
        output = model(image)
        output.gate.mask.retain_grad()
        output.gate.logits.retain_grad()
        losses = compute_losses(output, Batch(image, label, None), make_objective(config, model), config)
        losses["loss"].backward()
        found.append((output.gate.mask.grad, output.gate.logits.grad))
    (kept, _), (zeroed, by_logits) = found
    cut = zeroed == 0
    assert cut.any() == (mode == "trimmed")
    assert torch.equal(zeroed, kept.masked_fill(cut, 0))
    assert (by_logits != 0).all()
    with pytest.raises(ValueError, match=r"gate.cut_twins is zero, but reducer.name is evit, .*; leave one"):
        smoke(gate__cut_twins="zero", reducer__name="evit", reducer__rate=0.7)


@pytest.mark.parametrize(
    ("host", "gate", "wanted"),
    [(2.0, 1.0, (2.0, 1.0)), (2.0, None, None), (None, 1.0, (3.0, 1.0)), (None, None, (3.0, 4.0))],
)
def test_gradients_are_clipped_by_one_norm_or_the_gates_apart(host, gate, wanted):
    """From norms of 3 for the host and 4 for gate and theta, 5 together."""
    config = smoke(gate__clip=str(gate), optim__clip=str(host))
    model = make_model(config, 8)
    loss = make_objective(config, model).module
    own = [*model.gate.parameters(), loss.raw]
    others = [p for p in model.parameters() if not any(p is q for q in own)]
    for parameters, norm in ((others, 3.0), (own, 4.0)):
        total = math.sqrt(sum(p.numel() for p in parameters))
        for p in parameters:
            p.grad = torch.full_like(p, norm / total)
    clip(Accelerator(cpu=True), model, loss, config)
    norms = [math.sqrt(sum(p.grad.square().sum().item() for p in parameters)) for parameters in (others, own)]
    assert norms == pytest.approx(wanted or (2.0 * 3 / 5, 2.0 * 4 / 5), rel=1e-3)


def test_theta_is_recorded_before_the_first_step_and_once(tmp_path):
    config = smoke(gate__target=0.3, gate__prior_lr=0.1, gate__warmup_epochs=0)
    train(override(config, {"optim.epochs": "0.5"}), tmp_path, quiet=True)
    train(config, tmp_path, quiet=True, resume=True, force=True)
    found = lines(tmp_path, "prior")
    assert [line["step"] for line in found] == [0, 1, 2]
    torch.testing.assert_close(torch.tensor(found[0]["theta"]), torch.full((4, 4), 0.3))
    assert found[0]["theta"] != found[1]["theta"] != found[2]["theta"]
    mean = torch.tensor(found[2]["theta"]).mean().item()
    assert lines(tmp_path, "train")[-1]["prior"] == pytest.approx(mean)  # beside the share of fine cells
    train(smoke(gate__loss="l0"), tmp_path / "l0", quiet=True)
    assert not lines(tmp_path / "l0", "prior")


@pytest.mark.parametrize(
    ("changes", "mode", "words"),
    [
        ({}, "trimmed", "training trimmed, as the gate learns from the task"),
        ({"model__gate_from": "GATE"}, "trimmed", "learns from the task"),
        ({"model__gate_from": "GATE", "model__freeze_gate": "true"}, "packed", "packed, as the gate does not learn"),
        ({"gate__loss": "attention", "model__pretrained": "true"}, "packed", "does not learn from the task"),
        ({"model__gate": "disc"}, "packed", "does not learn"),
        ({"model__gate": "none"}, "packed", None),
        ({"model__gate_from": "GATE", "model__freeze_gate": "true", "model__mode": "trimmed"}, "trimmed", None),
    ],
)
def test_the_mode_auto_is_trimmed_where_the_gate_learns_from_the_task(changes, mode, words):
    config = smoke(**{"model__mode": "auto", **changes})
    assert resolve_settings(config, CPU).model.mode == mode
    assert resolve_settings(resolve_settings(config, CPU), CPU).model.mode == mode
    assert (words is None) == (describe_mode(config) is None)
    assert words is None or words in describe_mode(config)


def test_a_run_says_and_keeps_the_mode_that_auto_is(tmp_path, capsys):
    train(smoke(model__mode="auto", gate__prior_lr=0.01), tmp_path)
    assert "training trimmed, as the gate learns from the task" in capsys.readouterr().out
    assert '"mode": "trimmed"' in (tmp_path / "config.json").read_text()
    assert msvit.load(tmp_path / "model").mode == "packed"
