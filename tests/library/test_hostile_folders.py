"""A saved folder comes back whole or is refused with a sentence, whoever wrote it.

Loading it runs no code of it, reaches no network and fills no memory.
"""

import json
import os
import pickle
import socket
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from safetensors.torch import load_file, save_file
from timm.models.vision_transformer import VisionTransformer
from tiny import HOSTS, SWINS, assert_same_output, batch_of, images, tiny_host, tiny_model, tiny_swin

import msvit
from msvit.saving.file import read_header, write_tensors
from msvit.saving.host import check_name


def described(weights: Path) -> dict[str, Any]:
    """The description in the header of a safetensors file."""
    return json.loads(read_header(weights).metadata["about"])


def forge(folder: Path, change: dict[str, Any], stem: str = "model") -> None:
    """Change some values of the description; the checksum is right."""
    weights = folder / f"{stem}.safetensors"
    state = {name: tensor.clone() for name, tensor in load_file(weights).items()}
    write_tensors(weights, state, {"about": json.dumps(described(weights) | change)})


def forge_gate(folder: Path, normalization: Any = None, **config: Any) -> None:
    """A saved gate with other settings, and another record of its images."""
    gate = described(folder / "gate.safetensors")["gate"]
    record = {} if normalization is None else {"normalization": normalization}
    forge(folder, {"gate": gate | record | {"config": gate["config"] | config}}, stem="gate")


def forge_host(folder: Path, name: str | None = None, **options: Any) -> None:
    """A saved model whose host has another name or other options."""
    host = described(folder / "model.safetensors")["host"]
    forge(folder, {"host": host | {"name": name or host["name"], "options": host["options"] | options}})


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
    **{name: partial(tiny_model, name, mode="trimmed", drop_path_rate=0.1) for name in HOSTS},
    **{name: partial(tiny_model, name, mode="masked") for name in SWINS},
    **{str(gate): partial(tiny_model, gate=gate) for gate in GATES},
    **{str(reducer): partial(tiny_model, reducer=reducer) for reducer in REDUCERS},
    "overruling options": partial(tiny_model, **OVERRULING, qk_norm=True), "built without a name": built_without_a_name,
    "a gate in another precision": partial(tiny_model, dtype=torch.bfloat16, gate=msvit.LearnedGate(8)),
}  # fmt: skip


def settings(model: msvit.MSViT) -> list[Any]:
    parts = [(type(part), part and dict(part.config)) for part in (model.gate, model.reducer)]
    return [model.mode, model.coarse, model.backbone.merge_at, *parts]


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
            ({"proportional_attention": 0.5}, "no longer has"),
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


# Folders as somebody who means harm would write them.


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    return msvit.save(msvit.convert(tiny_host(), 8, "learned"), tmp_path / "saved")


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("something reached for the network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


UNSAVED = (
    {"checkpoint_path": "x.pth"}, {"pretrained": True}, {"pretrained_cfg": {"file": "x.pth"}}, {"cache_dir": "/tmp"},
    {"pretrained_cfg_overlay": {"url": "http://127.0.0.1:9/x"}}, {"block_fn": "os.system"}, {"scriptable": True},
)  # fmt: skip
DATA = (
    {"url": "http://127.0.0.1:9/x"}, {"file": "x.pth"}, {"hf_hub_id": "a/b"}, {"mean": "x"}, {"crop_mode": "/etc"}, 5,
)  # fmt: skip
NAMES = (
    "hf-hub:someone/model", "hf_hub:someone/model", "local-dir:/tmp/x", "https://example.org/vit", "../vit", "os", "",
)  # fmt: skip


@pytest.mark.parametrize(
    ("change", "words"),
    [
        *(({"options": option}, f"option '{min(option)}' is none that a saved host may have") for option in UNSAVED),
        *(({"data": data}, "the option .* is|a host is described by") for data in DATA),
        *(({"name": name}, "timm has no model|must be one of timm's") for name in NAMES),
    ],
)
def test_a_host_is_one_of_timms_by_its_bare_name_with_options_that_saving_writes(
    change: dict[str, Any], words: str, saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = described(saved / "model.safetensors")["host"]
    options = {"options": host["options"] | change.get("options", {})}
    monkeypatch.setattr(timm, "create_model", lambda *a, **k: pytest.fail("timm was asked"))
    forge(saved, {"host": host | change | options})
    with pytest.raises(ValueError, match=words):
        msvit.load(saved)


@pytest.mark.parametrize("name", ["hf-hub:a/b.c", "vit_small_patch16_224.a/b", "vit_small_patch16_224:x", "a b"])
def test_a_name_is_no_path_and_no_address(name: str) -> None:
    with pytest.raises(ValueError, match="timm has no model"):
        check_name(name)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"num_heads": 0}, "num_heads is 0, but must be whole numbers from 1"),
        ({"num_heads": True}, "num_heads is True"),
        ({"depth": 10**9}, "blocks, but has .* tensors|depth is 1000000000"),
        ({"depth": "2"}, "blocks"),
        ({"embed_dim": 10**9}, "embed_dim is 1000000000"),
        ({"embed_dim": 60000}, r"is \(.*32.*\), but the model needs"),
        ({"num_classes": 900_000}, r"head\.bias is \(5,\), but the model needs \(900000,\)"),
        ({"num_classes": -1}, "num_classes is -1"), ({"img_size": 60_000}, "would have tables"),
        ({"img_size": [16, "x"]}, "img_size is"), ({"patch_size": 0}, "patch_size is 0"),
        ({"drop_rate": float("nan")}, "drop_rate is nan"), ({"drop_path_rate": 1e300}, "drop_path_rate is 1e"),
        ({"global_pool": "/etc/passwd"}, "global_pool is"), ({"mlp_ratio": "4"}, "mlp_ratio is '4'"),
        ({"window_size": 7}, "does not describe a model"),
    ],
)  # fmt: skip
def test_options_out_of_range_are_a_sentence(options: dict[str, Any], why: str, saved: Path) -> None:
    forge_host(saved, **options)
    with pytest.raises(ValueError, match=why):
        msvit.load(saved)


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({"grid": [100_000, 100_000]}, "make a layer of 1040000000000 weights"),
        ({"grid": [3000, 3000]}, r"position is \(1, 96, 7, 7\), but the model needs \(1, 96, 3000, 3000\)"),
        ({"widths": [96, 16_000, 16_000]}, "but the model needs"), ({"cell": 1000}, "but the model needs"),
        ({"coarse": 10**12, "cell": None}, "weights, but 1073741824 are the most"),
        ({"depth": 10**9}, "describes 1000000000 blocks, but has .* tensors"),  # not built one by one
        ({"threshold": [1]}, "does not describe|threshold is"), ({"bad": 1}, "does not describe"),
        ({"grid": 3}, "does not describe|grid is"), ({"grid": [7]}, "does not describe|grid is"),
        ({"coarse": None}, "does not describe|coarse is"),
        ({"normalization": {"mean": [0.5] * 3, "std": [0] * 3}}, r"std\[0\] is 0"),
        *(({"normalization": record}, "does not describe") for record in ("half", {"mean": 1})),
    ],
)  # fmt: skip
def test_settings_of_a_gate_are_held_against_its_file_before_it_is_built(
    config: dict[str, Any], why: str, tmp_path: Path
) -> None:
    msvit.save_gate((msvit.ContextGate if "depth" in config else msvit.LearnedGate)(coarse=8), tmp_path)
    forge_gate(tmp_path, **config)
    before = torch.get_rng_state()
    with pytest.raises(ValueError, match=why):
        msvit.load_gate(tmp_path)
    assert torch.equal(torch.get_rng_state(), before)  # nothing was initialised


def test_sizes_of_decoders_and_of_a_swins_tables_are_bounded(tmp_path: Path) -> None:
    segmenter = msvit.save(msvit.convert_segmenter(tiny_host(), 3, coarse=8), tmp_path / "segmenter")
    for wrong, words in (({"num_classes": 10**6}, "but the model needs"), ({"host": None}, "not what is saved")):
        forge(segmenter, {"decoder": {"decoder": "mask", "num_classes": 3} | wrong})
        with pytest.raises(ValueError, match=words):
            msvit.load(segmenter)
    swin = msvit.save(msvit.convert(tiny_swin()), tmp_path / "swin")
    forge_host(swin, window_size=64, img_size=4096)
    with pytest.raises(ValueError, match="would have tables of 4294967296 numbers"):
        msvit.load(swin)


def test_a_host_that_is_given_is_not_changed_by_what_does_not_fit(saved: Path) -> None:
    host = tiny_host()
    forge(saved, {"gate": {"name": "learned", "config": {"coarse": 8, "grid": [3000, 3000]}}})
    with pytest.raises(ValueError, match=r"gate\.position is"):
        msvit.load(saved, host=host)
    assert {p.device.type for p in host.parameters()} == {"cpu"}
    assert torch.equal(host(images()), tiny_host()(images()))


@pytest.mark.parametrize("target", ["fifo", "/dev/zero"])
def test_files_that_are_none_are_not_opened(target: str, saved: Path) -> None:
    (saved / "model.safetensors").unlink()
    if target == "fifo":
        os.mkfifo(saved / "model.safetensors")
    else:
        (saved / "model.safetensors").symlink_to(target)
    with pytest.raises(ValueError, match=r"has no model\.safetensors"):
        msvit.load(saved)


def test_loading_unpickles_connects_and_starts_nothing(saved: Path) -> None:
    """With every audited way to other code, processes and addresses watched, as the interpreter sees them."""
    watched = {"pickle.find_class", "socket.connect", "subprocess.Popen", "os.system", "os.exec"}
    seen: list[str] = []
    sys.addaudithook(lambda event, args: seen.append(event) if event in watched else None)
    msvit.load(saved)
    watched.clear()  # as a hook stays for good
    assert not seen
