"""What is saved comes back; what is damaged or foreign is refused with a sentence."""

import json
import pickle
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from forging import forge
from safetensors.torch import save_file
from timm.models.vision_transformer import VisionTransformer
from tiny import HOSTS, SWINS, assert_same_output, batch_of, images, tiny_host, tiny_model

import msvit
from msvit.saving.file import read_header, write_tensors


def counting_areas(name: str) -> msvit.MSViT:
    return tiny_model(name, mode="trimmed", drop_path_rate=0.1).with_options(proportional_attention=0.5)


GATES = (
    msvit.DiscGate(coarse=8, share=0.4), msvit.RandomGate(coarse=8, share=0.4, seed=3),
    msvit.EntropyGate(coarse=8, threshold=2.0), msvit.AllCoarse(coarse=8),
)  # fmt: skip
REDUCERS = msvit.EViT(0.6, at=(0, 1), fuse=False), msvit.DynamicViT(0.6, at=(1,)), msvit.ToMe(r=3), msvit.ToMe(rate=0.9)
# Options that overrule those of a host's name.
OVERRULING = {"class_token": False, "global_pool": "avg", "mlp_ratio": 3, "init_values": 1e-3, "reg_tokens": 2}


def built_without_a_name() -> msvit.MSViT:
    host = VisionTransformer(img_size=16, patch_size=4, embed_dim=32, depth=2, num_heads=2, num_classes=5)
    return msvit.convert(host, 8, "learned")


MODELS: dict[str, Callable[[], msvit.MSViT]] = {
    **{name: partial(counting_areas, name) for name in HOSTS},
    **{name: partial(tiny_model, name, mode="masked") for name in SWINS},
    **{str(gate): partial(tiny_model, gate=gate) for gate in GATES},
    **{str(reducer): partial(tiny_model, reducer=reducer) for reducer in REDUCERS},
    "overruling options": partial(tiny_model, **OVERRULING, qk_norm=True), "built without a name": built_without_a_name,
    "a gate in another precision": partial(tiny_model, dtype=torch.bfloat16, gate=msvit.LearnedGate(8)),
}  # fmt: skip


def settings(model: msvit.MSViT) -> list[Any]:
    parts = [(type(part), part and dict(part.config)) for part in (model.gate, model.reducer)]
    return [model.mode, model.proportional_attention, model.coarse, model.backbone.merge_at, *parts]


@pytest.mark.parametrize("name", MODELS)
def test_a_saved_model_comes_back_whole(name: str, tmp_path: Path) -> None:
    """Settings, logits and all tensors, those too that are in no file."""
    model = MODELS[name]().eval()
    if isinstance(model.gate, msvit.LearnedGate):
        model.gate.head.bias.data.zero_()
    back = msvit.load(msvit.save(model, tmp_path))
    assert settings(back) == settings(model)
    assert not back.training
    mine, other = ({**dict(each.named_parameters()), **dict(each.named_buffers())} for each in (model, back))
    assert {key: mine[key].dtype for key in mine} == {key: other[key].dtype for key in other}
    assert all(torch.equal(mine[key], other[key]) for key in mine)
    with torch.no_grad():
        assert_same_output(back(batch_of(model)[0]), model(batch_of(model)[0]), 0)


def test_a_gate_alone_goes_into_another_model_size_and_task(tmp_path: Path) -> None:
    gate = msvit.LearnedGate(coarse=8, grid=(2, 2)).double().eval()
    gate.head.bias.data.zero_()
    msvit.save_gate(gate, tmp_path)
    other = tiny_model("vit_small_patch16_dinov3", gate=msvit.load_gate(tmp_path, frozen=True)).train()
    image = images(2, 24, 40)
    assert torch.equal(other(image).gate.mask, gate(image).mask)
    assert other.gate.frozen


def test_a_host_that_words_do_not_describe_is_loaded_with_a_host_given(tmp_path: Path) -> None:
    host = tiny_host(act_layer="relu")  # timm does not remember this
    msvit.save(msvit.convert(host, 8, "learned"), tmp_path)
    with pytest.raises(ValueError, match=r"msvit\.load\(folder, host=my_vit\)"):
        msvit.load(tmp_path)
    back = msvit.load(tmp_path, host=tiny_host(act_layer="relu"))
    assert torch.equal(back.host(images()), host(images()))


def test_a_folder_that_is_no_saved_model(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="does not exist"):
        msvit.load(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"has no gate\.safetensors.*msvit\.save_gate"):
        msvit.load_gate(tmp_path)
    with pytest.raises(ValueError, match=r"has no model\.safetensors.*msvit\.save"):
        msvit.load(tmp_path)
    unreadable = ("{not json", "[" * 100_000), "has no readable description"
    for abouts, words in (unreadable, (('{"format": 99}', "5"), r"format (99|'int').*reads format 1")):
        for about in abouts:
            write_tensors(tmp_path / "model.safetensors", {"x": torch.zeros(1)}, {"about": about})
            with pytest.raises(ValueError, match=words):
                msvit.load(tmp_path)


def test_weights_that_are_damaged_or_foreign(tmp_path: Path) -> None:
    msvit.save(tiny_model(), tmp_path)
    weights = tmp_path / "model.safetensors"
    whole = weights.read_bytes()
    state = {name: tensor.contiguous() for name, tensor in tiny_model().state_dict().items()}
    metadata = read_header(weights).metadata
    for damage, words in (
        (lambda: weights.write_bytes(whole[: len(whole) // 2]), "truncated or is no safetensors"),
        (lambda: weights.write_bytes(pickle.dumps({"gate.stem.weight": [1, 2, 3]})), "no safetensors file"),
        (lambda: weights.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1])), "its checksum is not that of its contents"),
        (lambda: save_file(state, weights), r"was not written by msvit; .* msvit\.convert"),
        (lambda: write_tensors(weights, {"other.weight": torch.zeros(2)}, metadata),
         r"belongs to another model.*other\.weight"),
        (lambda: write_tensors(weights, {**state, "gate.position": torch.zeros(1, 2, 3, 3)}, metadata),
         r"gate\.position is \(1, 2, 3, 3\)"),
        (lambda: write_tensors(weights, {**state, "extra.weight": torch.zeros(2)}, metadata),
         r"1 unknown ones \(extra\.weight\)"),
        (weights.unlink, r"has no model\.safetensors"),
        *((lambda change=change: weights.write_bytes(whole) and forge(tmp_path, change), words) for change, words in (
            ({"coarse": "x"}, "coarse is 'x'"), ({"format": 2}, "is of format 2"),
            *((each, "does not describe") for each in ({"host": 5}, {"gate": None}, {"gate": {"name": "learned"}})),
        )),
    ):  # fmt: skip
        damage()
        with pytest.raises(ValueError, match=words):
            msvit.load(tmp_path)


def test_a_failed_save_leaves_the_old_one_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model()
    msvit.save(model, tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    model.gate._config["coarse"] = object()  # cannot be written as JSON
    with pytest.raises(TypeError):
        msvit.save(model, tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    assert set(json.loads(before["msvit.json"])) >= {"format", "host", "coarse", "mode", "gate"}


def test_an_unknown_gate_is_refused_with_the_line_that_adds_it(tmp_path: Path) -> None:
    class MyGate(msvit.AllFine):
        pass

    with pytest.raises(ValueError, match=r"GATES\['my-gate'\] = MyGate"):
        msvit.save_gate(MyGate(coarse=8), tmp_path)
    msvit.save_gate(msvit.AllFine(coarse=8), tmp_path)
    forge(tmp_path, {"gate": {"name": "oracle", "config": {"coarse": 8}}}, "gate")
    with pytest.raises(ValueError, match="unknown gate 'oracle'; known: learned, context, disc"):
        msvit.load_gate(tmp_path)
