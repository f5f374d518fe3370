"""Settings of the gate's training: its prior, the rate of theta, clipping, the mode."""

import math

import pytest
import torch
from accelerate import Accelerator
from smoke_runs import lines, smoke

import msvit
from msvit_lab.auto_settings import describe_mode, resolve_settings
from msvit_lab.build import make_model
from msvit_lab.config import override
from msvit_lab.data import Batch
from msvit_lab.training.loop import train
from msvit_lab.training.objective import compute_losses, make_objective
from msvit_lab.training.optimizer import clip, make_optimizer, set_rates

CPU = torch.device("cpu")


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
