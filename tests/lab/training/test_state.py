"""What a checkpoint holds beside weights: the scale of fp16, and the random state of every process."""

import pytest
import torch
from torch import nn

from msvit.lab.training.state import Parts, random_state, random_states, read_state, set_random_state, write_state


def parts(scale: float) -> Parts:
    model = nn.Linear(2, 2)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=5)
    return Parts(model, None, torch.optim.SGD(model.parameters()), None, scaler)


def test_the_scale_of_fp16_goes_on(tmp_path):
    written = parts(1024.0)
    for _ in range(3):
        loss = written.scaler.scale(written.model(torch.ones(1, 2)).sum())
        loss.backward()
        written.scaler.step(written.optimizer)
        written.scaler.update()
    write_state(tmp_path / "checkpoint.safetensors", written, step=3)
    found = parts(2.0)
    assert read_state(tmp_path / "checkpoint.safetensors", found).step == 3
    assert found.scaler.state_dict() == written.scaler.state_dict()
    assert found.scaler.state_dict()["_growth_tracker"] == 3


class Three:
    """Stands in for the first of three processes that gather."""

    num_processes, device = 3, torch.device("cpu")

    def gather(self, own):
        return torch.cat([own, own + 1, own + 2])


def test_every_process_gets_its_own_random_state_back(tmp_path):
    state = torch.get_rng_state()
    found = random_states(Three())
    assert torch.equal(found["rng.cpu"], state)
    write_state(tmp_path / "checkpoint.safetensors", parts(1.0), step=3, random=found)
    with pytest.MonkeyPatch.context() as patch:
        restored = []
        patch.setattr(torch, "set_rng_state", restored.append)
        for rank in range(3):
            assert read_state(tmp_path / "checkpoint.safetensors", parts(1.0), rank).has_random_state
        assert [torch.equal(found, state + rank) for rank, found in enumerate(restored)] == [True] * 3
    assert not read_state(tmp_path / "checkpoint.safetensors", parts(1.0), 3).has_random_state


def test_a_checkpoint_of_one_process_says_nothing_of_the_others():
    assert set_random_state(random_state(), 0)
    assert not set_random_state(random_state(), 1)
