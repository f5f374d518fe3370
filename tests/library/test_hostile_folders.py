"""A saved folder may come from anywhere: loading it runs no code of it, reaches no network and fills no memory."""

import os
import socket
import sys
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from forging import described, forge, forge_gate, forge_host
from tiny import images, tiny_host, tiny_swin

import msvit
from msvit.saving.host import check_name


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
