"""The published methods written plainly: the same numbers as ours, and timed beside them."""

import json
import sys

import pytest
import torch
from scripts import load_script
from tiny import images, relative_error, tiny_host

import msvit

script = load_script("peers")
MAKERS = {
    "evit-0.7": lambda: msvit.EViT(rate=0.7, at=(0, 1)),
    "dynamicvit-0.7": lambda: msvit.DynamicViT(rate=0.7, at=(0, 1)),
    "tome-r3": lambda: msvit.ToMe(r=3),
}


@pytest.mark.parametrize("name", MAKERS)
def test_written_plainly_they_are_the_same(name):
    plain, model = script.pair(name, tiny_host("deit_small_patch16_224"), MAKERS[name](), 8)
    image = images(4)
    with torch.no_grad():
        assert relative_error(plain(image), model(image).logits) < 1e-9


def test_all_are_timed_in_turn(tmp_path, monkeypatch, capsys):
    host = tiny_host("deit_small_patch16_224", torch.float32, img_size=224, patch_size=16)
    monkeypatch.setattr(script.timm, "create_model", lambda name: host)
    monkeypatch.setattr(script, "MAKERS", MAKERS)
    words = f"peers.py --batch 2 --rounds 3 --commit 1a2b3c4 --out {tmp_path}/new/peers.json"
    monkeypatch.setattr(sys, "argv", words.split())
    script.main()
    found = json.loads((tmp_path / "new/peers.json").read_text())
    assert [row["name"] for row in found["rows"]] == [
        "dense", *(f"{name}, {how}" for name in MAKERS for how in ("plain", "msvit"))
    ]  # fmt: skip
    assert found["rows"][0]["speed_up"]["median"] == 1
    assert all(row["ms"]["median"] > 0 for row in found["rows"])
    assert "| tome-r3, msvit |" in capsys.readouterr().out
