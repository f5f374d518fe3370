"""Images and a saved model that the tests of commands share."""

from pathlib import Path

import pytest
import timm
import torch
from smoke_runs import write_images
from tiny import tiny_host

import msvit


@pytest.fixture(scope="session")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twelve images in three class folders, and one that is none."""
    folder = write_images(tmp_path_factory.mktemp("photos") / "val")
    (folder / "ant/cut.png").write_bytes(b"no image")
    return folder


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of msvit.save, for 64 px, with names of classes and a gate; what the patches hold changes its logits."""
    host = tiny_host(dtype=torch.float32, img_size=64, num_classes=2, depth=4, embed_dim=64)
    for weight in (*host.blocks.parameters(), host.head.weight):
        weight.data *= 2
    host.pretrained_cfg = timm.get_pretrained_cfg("vit_small_patch16_224").to_dict() | {"input_size": (3, 64, 64)}
    model = msvit.convert(host, gate="gradient").eval()
    model.classes = ["cat", "dog"]
    return msvit.save(model, tmp_path_factory.mktemp("saved") / "model")
