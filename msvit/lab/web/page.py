"""The folder of the page: its static files, the runtime, a model in ONNX, and example pictures.

    DIR/index.html, *.js, page.css     # as they are in static/
    DIR/runtime/                       # onnxruntime-web
    DIR/model/about.json               # size, normalisation, cells, classes, tokens and multiply-adds by fine cells
    DIR/model/gate.onnx                # and, of a trained model, trunk.onnx and dense.onnx
    DIR/model/weights.bin              # weights of trunk and dense, those that are equal once
    DIR/examples/
"""

import hashlib
import json
import shutil
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import timm
import torch
from PIL import Image
from torch import Tensor, nn

import msvit
from msvit.atomic import writing_beside
from msvit.backbones.plain import PlainBackbone
from msvit.checkpoint import load
from msvit.gates import AllCoarse, AllFine
from msvit.lab.build import read_run
from msvit.lab.data.scenes import Scenes
from msvit.lab.web.runtime import Runtime, find_runtime
from msvit.model import MSViT
from msvit.preprocessing import Preprocessing
from msvit.types import ScaleGrid

STATIC = Path(__file__).parent / "static"
GATE_ALONE = "vit_small_patch16_224"  # whose multiply-adds are shown where there is only a gate
NUM_SCENES = 8
SHARED = 1024  # bytes from which on weights go to the shared file
ALIGNED = 64  # bytes


@dataclass(frozen=True)
class Example:
    """A picture of the page: a file in its folder of examples, what it shows, and who made it."""

    file: str
    alt: str
    credit: str = ""


PHOTOGRAPHS = (
    Example("chelsea.jpg", "a tabby cat looking at the camera", "the cat Chelsea by Stéfan van der Walt (CC0)"),
    Example("coffee.jpg", "a cup of coffee on a wooden table", "a cup of coffee by Rachel Michetti (CC0)"),
    Example("astronaut.jpg", "an astronaut in an orange suit", "the astronaut Eileen Collins by NASA (public domain)"),
    Example("rocket.jpg", "a rocket starting at dusk", "the start of a rocket by SpaceX (public domain)"),
)


def load_for_page(run: Path) -> MSViT:
    """The classifier of a run, or of a folder of `msvit.save`. Raise ValueError where there is nothing to compare."""
    if not run.is_dir():
        raise ValueError(f"{run} is no folder; give a run of msvit train, such as runs/photos")
    model = read_run(run)[0] if (run / "config.json").is_file() else load(run)
    if not isinstance(model, MSViT) or not model.num_classes:
        raise ValueError(f"{run} holds a {type(model).__name__} without classes of whole images; give a classifier")
    if isinstance(model.gate, AllFine | AllCoarse):
        raise ValueError(f"{run} was trained without a gate, so there are no cells to show; give a run that has one")
    return model


def write_page(
    folder: Path, model: MSViT | None = None, *, name: str | None = None, runtime: Runtime | None = None,
    webgpu: bool = False, scenes: bool = False,
) -> Path:  # fmt: skip
    """Write the page of a model, or of the default gate alone, into a folder, and return the folder.

    `scenes`: examples are made-up scenes, for a model trained on them. The folder must be new, empty, or such a page,
    which is then replaced.
    """
    check_replaceable(folder)
    runtime = find_runtime() if runtime is None else runtime
    folder.parent.mkdir(parents=True, exist_ok=True)
    with writing_beside(folder) as (beside, _):
        page = beside / "page"
        shutil.copytree(STATIC, page, ignore=shutil.ignore_patterns("examples"))
        runtime.write(page / "runtime", webgpu)
        examples = write_scenes(page / "examples") if scenes else copy_photographs(page / "examples")
        about = write_model(page / "model", model)
        about |= {"webgpu": webgpu, "examples": [asdict(example) for example in examples]}
        about |= {"name": name} if name is not None else {}
        (page / "model" / "about.json").write_text(json.dumps(about), encoding="utf-8")
        if folder.exists():
            shutil.rmtree(folder)
        page.rename(folder)
    return folder


def check_replaceable(folder: Path) -> None:
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file, but the page is a folder; choose another name")
    if folder.exists() and any(folder.iterdir()) and not (folder / "model" / "about.json").is_file():
        raise ValueError(f"{folder} holds other files, which the page would replace; choose a new folder")


def copy_photographs(folder: Path) -> Sequence[Example]:
    shutil.copytree(STATIC / "examples", folder)
    return PHOTOGRAPHS


def write_scenes(folder: Path) -> Sequence[Example]:
    """Scenes that no run was trained with, as PNG: their classes are patterns of single pixels."""
    folder.mkdir()
    scenes = Scenes(NUM_SCENES, size=128, seed=2)
    examples = []
    for index in range(NUM_SCENES):
        item = scenes[index]
        assert isinstance(item.image, Image.Image)
        assert item.label is not None
        item.image.save(folder / f"scene-{index}.png")
        examples.append(Example(f"scene-{index}.png", f"a made-up scene with the weave “{scenes.classes[item.label]}”"))
    return examples


def write_model(folder: Path, model: MSViT | None) -> dict[str, Any]:
    """The ONNX files, and what the page has to know of them."""
    folder.mkdir()
    predicts = model is not None
    model = gate_alone() if model is None else prepared(model)
    preprocessing = model.preprocessing
    assert preprocessing is not None, "it was checked, or made here"
    (gate, trunk) = msvit.export(model, folder / "page.onnx", split=True)
    gate.rename(folder / "gate.onnx")
    trunk.rename(folder / "trunk.onnx")
    if predicts:
        export_host(model.host, preprocessing.size, folder / "dense.onnx")
        share_weights([folder / "trunk.onnx", folder / "dense.onnx"], folder / "weights.bin")
    else:
        (folder / "trunk.onnx").unlink()
        model = msvit.convert(timm.create_model(GATE_ALONE), gate=model.gate)
    mask_type = "" if not predicts else mask_type_of(folder / "trunk.onnx")
    files = [{"name": path.name, "size": path.stat().st_size} for path in sorted(folder.iterdir())]
    name = {} if predicts else {"name": f"the default gate, before a {GATE_ALONE}"}
    return {"predicts": predicts, "mask_type": mask_type, "files": files, **costs(model, preprocessing.size), **describe(model, preprocessing), **name}


def gate_alone() -> MSViT:
    """The default gate before a host of next to nothing, for images of 224 px."""
    host = timm.create_model(GATE_ALONE, embed_dim=8, depth=1, num_heads=1, num_classes=2).eval()
    return prepared(msvit.convert(host, gate="default"))


def prepared(model: MSViT) -> MSViT:
    """The model on the CPU, packed; raise ValueError for what the page cannot show."""
    if not isinstance(model.backbone, PlainBackbone):
        kind = type(model.host).__name__
        raise ValueError(f"the page shows hosts whose tokens keep their scale, not a {kind}; use msvit viz for its cells")
    if model.preprocessing is None:
        raise ValueError("how images are prepared for this model is not known; set model.preprocessing and save it again")
    size = model.preprocessing.size
    if size % model.coarse:
        raise ValueError(f"images have {size} px, but the page needs whole cells of {model.coarse} px; train at such a size")
    if len(model.preprocessing.mean) != 3:
        raise ValueError(f"the page prepares images of 3 channels, but the model takes {len(model.preprocessing.mean)}")
    return deepcopy(model).with_options(mode="packed").cpu().float().eval()


class HostLogits(nn.Module):
    def __init__(self, host: nn.Module) -> None:
        super().__init__()
        self.host = host

    def forward(self, images: Tensor) -> Tensor:
        logits = self.host(images)
        return logits if isinstance(logits, Tensor) else logits.logits


def export_host(host: nn.Module, size: int, path: Path) -> None:
    """The plain host, without gate and layout: the dense side of the comparison."""
    host = deepcopy(host)
    if getattr(host.patch_embed, "img_size", (size, size)) != (size, size) and hasattr(host, "set_input_size"):
        host.set_input_size(img_size=size)
    images = torch.zeros(1, 3, size, size)
    torch.onnx.export(
        HostLogits(host).eval(), (images,), path, input_names=["images"], output_names=["logits"], opset_version=20,
        dynamo=True, external_data=False, verbose=False,
    )  # fmt: skip


def mask_type_of(path: Path) -> str:
    """What onnxruntime-web calls the type of a trunk's mask."""
    import onnx

    names = {onnx.TensorProto.BOOL: "bool", onnx.TensorProto.UINT8: "uint8", onnx.TensorProto.FLOAT: "float32"}
    inputs = onnx.load(path, load_external_data=False).graph.input
    return names[next(each.type.tensor_type.elem_type for each in inputs if each.name == "mask")]


def share_weights(models: Sequence[Path], file: Path) -> None:
    """Move the weights of several ONNX files to one beside them; what is equal, byte by byte, is stored once."""
    import onnx
    from onnx.external_data_helper import set_external_data

    places: dict[bytes, int] = {}
    with file.open("wb") as out:
        for path in models:
            model = onnx.load(path)
            for tensor in model.graph.initializer:
                data = onnx.numpy_helper.to_array(tensor).tobytes()
                if len(data) < SHARED:
                    continue
                key = hashlib.sha256(data).digest()
                if key not in places:
                    out.write(bytes(-out.tell() % ALIGNED))
                    places[key] = out.tell()
                    out.write(data)
                tensor.raw_data = data
                set_external_data(tensor, file.name, offset=places[key], length=len(data))
                tensor.ClearField("raw_data")
            path.write_bytes(model.SerializeToString())


def costs(model: MSViT, size: int) -> dict[str, Any]:
    """Tokens and multiply-adds by the number of fine cells, gate included; of the dense host without it."""
    grid = ScaleGrid(size, size, fine=model.fine, coarse=model.coarse)
    rows, columns = grid.cells
    fine = torch.arange(grid.num_cells + 1)
    masks = (torch.arange(grid.num_cells) < fine[:, None]).unflatten(1, (rows, columns))
    macs = model.backbone.num_macs(masks, grid, model.reducer) + model.gate.num_macs(grid.num_cells)
    tokens = model.backbone.num_tokens(fine, grid)
    return {
        "rows": rows, "columns": columns, "coarse": model.coarse, "fine": model.fine, "tokens": tokens.tolist(),
        "macs": macs.tolist(), "dense_macs": model.backbone.dense_macs(grid),
    }  # fmt: skip


def describe(model: MSViT, preprocessing: Preprocessing) -> dict[str, Any]:
    from msvit.hub import host_name

    return {"name": host_name(model), "classes": list(model.classes) if model.classes else None, **asdict(preprocessing)}
