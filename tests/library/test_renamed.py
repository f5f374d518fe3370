"""Files written when layers of gates and predictors had other names are read."""

import json
import re
from pathlib import Path

import pytest
import torch
from tiny import images, tiny_host

import msvit
from msvit.checked_file import write_tensors

EARLIER = [
    (r"^gate\.stem\.", "gate.look."), (r"^gate\.downsample\.", "gate.gather."), (r"^gate\.mlp\.", "gate.think."),
    (r"^gate\.head\.", "gate.answer."), (r"^(gate\.blocks\.\d+)\.depthwise\.", r"\1.around."),
    (r"^(reducer\.predictors\.\d+)\.stem\.", r"\1.look."), (r"^(reducer\.predictors\.\d+)\.head\.", r"\1.answer."),
]  # fmt: skip


def earlier(name: str) -> str:
    for now, before in EARLIER:
        name = re.sub(now, before, name)
    return name


@pytest.mark.parametrize("kind", [msvit.LearnedGate, msvit.ContextGate])
def test_weights_under_earlier_names_are_read(kind: type[msvit.LearnedGate], tmp_path: Path) -> None:
    gate = kind(coarse=8, threshold=0.3)
    torch.nn.init.normal_(gate.head.weight)
    reducer = msvit.DynamicViT(0.6, at=(1,))
    model = msvit.convert(tiny_host(), coarse=8, gate=gate.double(), reducer=reducer.double()).eval()
    state = {earlier(name): value for name, value in model.state_dict().items()}
    assert len(state.keys() - model.state_dict().keys()) >= 12
    about = (msvit.save(model, tmp_path) / "msvit.json").read_text()
    write_tensors(tmp_path / "model.safetensors", state, {"about": json.dumps(json.loads(about))})
    other = msvit.convert(tiny_host(), 8, msvit.load_gate(tmp_path), reducer=msvit.DynamicViT(0.6, at=(1,)).double())
    other.load_state_dict(state)
    with torch.no_grad():
        for back in (msvit.load(tmp_path), other.eval()):
            assert torch.equal(back(images()).logits, model(images()).logits)
    assert other.gate.threshold == gate.threshold == pytest.approx(0.3)
