"""What is saved comes back; what is damaged or foreign is refused with a sentence."""

import json
import pickle
from pathlib import Path

import pytest
import torch
from forging import forge
from safetensors.torch import save_file
from timm.layers import trunc_normal_
from tiny import HOSTS, images, tiny_host, tiny_swin
from torch import nn

import msvit
from msvit.skip_init import skip_init


@pytest.mark.parametrize("name", HOSTS)
def test_a_saved_model_comes_back_whole(name: str, tmp_path: Path) -> None:
    model = msvit.convert(tiny_host(name, drop_path_rate=0.1), coarse=8, mode="trimmed")
    model.gate.head.bias.data.zero_()
    msvit.save(model, tmp_path)
    back = msvit.load(tmp_path)
    assert (back.mode, back.coarse, back.gate.config) == ("trimmed", 8, model.gate.config)
    with torch.no_grad():
        out, again = model(images()), back(images())
    assert torch.equal(out.gate.mask, again.gate.mask)
    assert torch.equal(out.logits, again.logits)
    assert not back.training


@pytest.mark.parametrize(
    "gate",
    [
        msvit.DiscGate(coarse=8, share=0.4),
        msvit.RandomGate(coarse=8, share=0.4, seed=3),
        msvit.EntropyGate(coarse=8, threshold=2.0),
        msvit.AllCoarse(coarse=8),
    ],
)
def test_every_gate_comes_back_with_its_settings(gate: msvit.Gate, tmp_path: Path) -> None:
    msvit.save(msvit.convert(tiny_host(), coarse=8, gate=gate), tmp_path)
    back = msvit.load(tmp_path).gate
    assert (type(back), back.config) == (type(gate), gate.config)


@pytest.mark.parametrize(
    "reducer",
    [
        msvit.EViT(0.6, at=(0, 1), fuse=False),
        msvit.DynamicViT(0.6, at=(1,)),
        msvit.ToMe(r=3),
        msvit.ToMe(rate=0.9),
    ],
)
def test_every_reducer_comes_back_with_its_settings_and_weights(reducer: msvit.Reducer, tmp_path: Path) -> None:
    model = msvit.convert(tiny_host(), coarse=8, reducer=reducer).eval()
    msvit.save(model, tmp_path)
    back = msvit.load(tmp_path)
    assert (type(back.reducer), back.reducer.config) == (type(reducer), reducer.config)
    with torch.no_grad():
        assert torch.equal(model(images()).logits, back(images()).logits)


def test_a_model_saved_before_there_were_reducers_is_still_read(tmp_path: Path) -> None:
    msvit.save(msvit.convert(tiny_host(), coarse=8), tmp_path)
    forge(tmp_path)
    about = json.loads((tmp_path / "msvit.json").read_text())
    assert about.pop("reducer") is None
    (tmp_path / "msvit.json").write_text(json.dumps(about))
    assert msvit.load(tmp_path).reducer is None


def test_a_gate_alone_goes_into_another_model_size_and_task(tmp_path: Path) -> None:
    gate = msvit.LearnedGate(coarse=8, grid=(2, 2)).double().eval()
    gate.head.bias.data.zero_()
    msvit.save_gate(gate, tmp_path)
    other = msvit.convert(
        tiny_host("vit_small_patch16_dinov3"), coarse=8, gate=msvit.load_gate(tmp_path, frozen=True)
    ).train()
    image = images(2, 24, 40)
    assert torch.equal(other(image).gate.mask, gate(image).mask)
    assert other.gate.frozen
    wider = msvit.load_gate(tmp_path, coarse=12).eval()
    assert wider(images(2, 24, 36)).mask.shape == (2, 2, 3)


def test_a_host_that_words_do_not_describe_is_loaded_with_a_host_given(tmp_path: Path) -> None:
    host = tiny_host(act_layer="relu")  # timm does not remember this
    msvit.save(msvit.convert(host, coarse=8), tmp_path)
    with pytest.raises(ValueError, match=r"msvit\.load\(folder, host=my_vit\)"):
        msvit.load(tmp_path)
    back = msvit.load(tmp_path, host=tiny_host(act_layer="relu"))
    assert torch.equal(back.host(images()), host(images()))


def test_options_that_overrule_a_named_model_come_back(tmp_path: Path) -> None:
    host = tiny_host(class_token=False, global_pool="avg", mlp_ratio=3, init_values=1e-3, reg_tokens=2, qk_norm=True)
    msvit.save(msvit.convert(host, coarse=8), tmp_path)
    assert torch.equal(msvit.load(tmp_path).host(images()), host(images()))


def test_a_host_built_without_a_name_comes_back(tmp_path: Path) -> None:
    from timm.models.vision_transformer import VisionTransformer

    host = VisionTransformer(img_size=16, patch_size=4, embed_dim=32, depth=2, num_heads=2, num_classes=5).eval()
    msvit.save(msvit.convert(host, coarse=8), tmp_path)
    image = images(dtype=torch.float32)
    assert torch.equal(msvit.load(tmp_path).host(image), host(image))


def test_a_folder_that_is_no_saved_model(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has no msvit\.json.*msvit\.save"):
        msvit.load(tmp_path)
    with pytest.raises(ValueError, match="does not exist"):
        msvit.load(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"has no gate\.json"):
        msvit.load_gate(tmp_path)
    (tmp_path / "msvit.json").write_text("{not json")
    with pytest.raises(ValueError, match="not readable as JSON"):
        msvit.load(tmp_path)
    (tmp_path / "msvit.json").write_text('{"format": 99}')
    with pytest.raises(ValueError, match=r"format 99.*reads format 1"):
        msvit.load(tmp_path)


def test_weights_that_are_damaged_or_foreign(tmp_path: Path) -> None:
    msvit.save(msvit.convert(tiny_host(), coarse=8), tmp_path)
    weights = tmp_path / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match="truncated or is no safetensors"):
        msvit.load(tmp_path)
    weights.write_bytes(pickle.dumps({"gate.stem.weight": [1, 2, 3]}))
    with pytest.raises(ValueError, match="no safetensors file"):
        msvit.load(tmp_path)
    weights.write_bytes(whole)
    forge(tmp_path)
    save_file({"other.weight": torch.zeros(2)}, weights)
    with pytest.raises(ValueError, match=r"belongs to another model.*other\.weight"):
        msvit.load(tmp_path)
    state = msvit.convert(tiny_host(), coarse=8).state_dict()
    save_file({**{k: v.contiguous() for k, v in state.items()}, "gate.position": torch.zeros(1, 2, 3, 3)}, weights)
    with pytest.raises(ValueError, match=r"gate\.position is \(1, 2, 3, 3\)"):
        msvit.load(tmp_path)
    weights.unlink()
    with pytest.raises(ValueError, match=r"has no model\.safetensors"):
        msvit.load(tmp_path)


def test_loading_never_unpickles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    msvit.save(msvit.convert(tiny_host(), coarse=8), tmp_path)

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("something was unpickled")

    monkeypatch.setattr(pickle, "Unpickler", refuse)
    monkeypatch.setattr(pickle, "load", refuse)
    monkeypatch.setattr(pickle, "loads", refuse)
    monkeypatch.setattr(torch, "load", refuse)
    assert isinstance(msvit.load(tmp_path), msvit.MSViT)


@pytest.mark.parametrize("change", [{"host": 5}, {"gate": None}, {"coarse": "x"}, {"gate": {"name": "learned"}}])
def test_a_description_that_was_tampered_with(change: dict, tmp_path: Path) -> None:
    msvit.save(msvit.convert(tiny_host(), coarse=8), tmp_path)
    forge(tmp_path, change)
    with pytest.raises(ValueError, match=r"does not describe|a host is described by"):
        msvit.load(tmp_path)


def test_settings_changed_after_making_a_gate_are_saved(tmp_path: Path) -> None:
    gate = msvit.LearnedGate(coarse=8)
    gate.threshold, gate.noise = 5.0, 0.3
    msvit.save_gate(gate, tmp_path)
    back = msvit.load_gate(tmp_path)
    assert (back.threshold, back.noise) == (5.0, 0.3)


def test_a_failed_save_leaves_the_old_one_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = msvit.convert(tiny_host(), coarse=8)
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
    forge(tmp_path, {"gate": {"name": "oracle", "config": {"coarse": 8}}}, "gate", "gate.json")
    with pytest.raises(ValueError, match="unknown gate 'oracle'; known: learned, context, disc"):
        msvit.load_gate(tmp_path)


@pytest.mark.parametrize("name", ["vit_small_patch16_224", "swin_tiny_patch4_window7_224", "vit_small_patch16_dinov3"])
def test_what_is_in_no_file_comes_back_too(tmp_path: Path, name: str) -> None:
    swin = name.startswith("swin")
    model = msvit.convert(tiny_swin(name), merge_at=2) if swin else msvit.convert(tiny_host(name), coarse=8)
    msvit.save(model, tmp_path)
    back = msvit.load(tmp_path)
    assert all(torch.equal(tensor, model.state_dict()[key]) for key, tensor in back.state_dict().items())
    own, other = dict(model.named_buffers()), dict(back.named_buffers())
    assert all(torch.equal(own[key], other[key]) for key in own)  # those too that are in no file


def test_a_sketch_is_not_drawn_and_a_model_is() -> None:
    with skip_init():
        drawn = trunc_normal_(torch.zeros(8, 8), std=0.02)
        with torch.device("meta"):
            before = torch.get_rng_state()
            assert trunc_normal_(nn.Linear(8, 8).weight).is_meta
            assert torch.equal(torch.get_rng_state(), before)
    assert 0 < drawn.std() < 0.04
