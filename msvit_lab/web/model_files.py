"""The model of the page: ONNX files for the browser, and what the page has to know of them.

    about = write_model(folder, model)          # gate.onnx, trunk.onnx, dense.onnx, weights.bin
    about = write_model(folder, None)           # gate.onnx: the default gate alone

`dense.onnx` is the plain host. Its weights are those of the trunk, and lie in one file for both.
"""

import hashlib
from collections import Counter
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import timm
import torch

import msvit
from msvit.backbones.plain import PlainBackbone
from msvit.backbones.transformers_vit import TransformersViT
from msvit.integrations.export import onnx_file
from msvit.integrations.export.metadata import costs_by_num_fine
from msvit.model import MSViT
from msvit.types import ScaleGrid

GATE_ALONE = "vit_small_patch16_224"  # whose multiply-adds are shown where there is only a gate
OPSET = 20
SHARED = 1024  # bytes from which on weights go to the shared file
ALIGNED = 64  # bytes


def write_model(folder: Path, model: MSViT | None) -> dict[str, Any]:
    """The ONNX files, and what the page has to know of them."""
    onnx_file.check_packages()
    folder.mkdir()
    predicts = model is not None
    model = gate_alone() if model is None else prepared(model)
    preprocessing = model.preprocessing
    assert preprocessing is not None, "it was checked, or made here"
    (gate, trunk) = msvit.export(model, folder / "page.onnx", split=True, size=preprocessing.size)
    gate.rename(folder / "gate.onnx")
    trunk.rename(folder / "trunk.onnx")
    if predicts:
        export_host(model.host, preprocessing.size, folder / "dense.onnx")
        share_weights([folder / "trunk.onnx", folder / "dense.onnx"], folder / "weights.bin")
    else:
        (folder / "trunk.onnx").unlink()
        model = msvit.convert(timm.create_model(GATE_ALONE), gate=model.gate)
    files = [{"name": path.name, "size": path.stat().st_size} for path in sorted(folder.iterdir())]
    classes = None if model.classes is None else list(model.classes)
    about = {"name": model.host_name, "classes": classes, **asdict(preprocessing), **costs(model, preprocessing.size)}
    about |= {} if predicts else {"name": f"the default gate, before a {GATE_ALONE}"}
    return {**about, "predicts": predicts, "files": files}


def gate_alone() -> MSViT:
    """The default gate before a host of next to nothing, for images of 224 px."""
    host = timm.create_model(GATE_ALONE, embed_dim=8, depth=1, num_heads=1, num_classes=2).eval()
    return prepared(msvit.convert(host, gate="default"))


def prepared(model: MSViT) -> MSViT:
    """The model on the CPU, packed; raise ValueError for what the page cannot show."""
    if not isinstance(model.backbone, PlainBackbone) or isinstance(model.backbone, TransformersViT):
        raise ValueError(f"the page shows timm's ViTs, not a {type(model.host).__name__}; use msvit viz for its cells")
    if model.preprocessing is None:
        raise ValueError("how images are prepared for this model is not known; set model.preprocessing, save it again")
    size = model.preprocessing.size
    if size % model.coarse:
        raise ValueError(f"images have {size} px, but the page needs whole cells of {model.coarse} px")
    if len(model.preprocessing.mean) != 3:
        raise ValueError(f"the page prepares images of 3 channels, but the model takes {len(model.preprocessing.mean)}")
    return deepcopy(model).with_options(mode="packed").cpu().float().eval()


def export_host(host: Any, size: int, path: Path) -> None:
    """The plain host, without gate and layout: the dense side of the comparison."""
    host = deepcopy(host)
    if getattr(host.patch_embed, "img_size", (size, size)) != (size, size) and hasattr(host, "set_input_size"):
        host.set_input_size(img_size=size)
    images = torch.zeros(1, 3, size, size)
    with torch.no_grad(), onnx_file.quiet():
        program = torch.export.export(host.eval(), (images,), strict=False)
    path.write_bytes(onnx_file.to_onnx(program, ["images"], ["logits"], OPSET).SerializeToString())


def share_weights(models: Sequence[Path], file: Path) -> None:
    """Move the weights of several ONNX files to one beside them; what is equal, byte by byte, is stored once."""
    import onnx
    from onnx.external_data_helper import set_external_data

    places: dict[bytes, int] = {}
    with file.open("wb") as out:
        for path in models:
            model = onnx.load(path)
            transpose_gemms(model.graph)
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


def transpose_gemms(graph: Any) -> None:
    """Store weights that Gemm would transpose as (in, out), which is how MatMul has them."""
    import onnx

    weights = {tensor.name: tensor for tensor in graph.initializer}
    uses = Counter(name for node in graph.node for name in node.input)
    for node in graph.node:
        flag = next((each for each in node.attribute if each.name == "transB"), None)
        if node.op_type != "Gemm" or flag is None or not flag.i or uses[node.input[1]] > 1:
            continue
        tensor = weights.get(node.input[1])
        if tensor is None:
            continue
        flag.i = 0
        array = np.ascontiguousarray(onnx.numpy_helper.to_array(tensor).T)
        tensor.CopyFrom(onnx.numpy_helper.from_array(array, tensor.name))


def costs(model: MSViT, size: int) -> dict[str, Any]:
    """Tokens and multiply-adds by the number of fine cells, gate included; of the dense host without it."""
    grid = ScaleGrid(size, size, fine=model.fine, coarse=model.coarse)
    rows, columns = grid.cells
    tokens, macs = costs_by_num_fine(model, grid)
    return {
        "rows": rows, "columns": columns, "coarse": model.coarse, "fine": model.fine, "tokens": tokens, "macs": macs,
        "dense_macs": model.backbone.dense_macs(grid),
    }  # fmt: skip
