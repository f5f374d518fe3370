"""msvit.export: files that give the model's numbers without msvit, whatever the number of tokens and images."""

import json
import re
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from PIL import Image
from tiny import KINDS, SWINS, images, tiny_host, tiny_model
from torch import Tensor, nn

import msvit
from msvit.integrations.export import Part, onnx_file, trace
from msvit.integrations.export.graph import GateGraph, TrunkGraph, WholeGraph, pad_conv_channels
from msvit.types import ScaleGrid

HOSTS = (KINDS[0], "deit_small_distilled_patch16_224", KINDS[1], *KINDS[3:])
SIZE = 32  # px: 4 x 4 cells
GRID = ScaleGrid(SIZE, SIZE, fine=4, coarse=8)


class SignGate(msvit.Gate):
    """Fine where the mean of a cell is positive: any number of fine cells, and a gate without any settings."""

    def forward(self, image: Tensor) -> msvit.GateOutput:
        mean = nn.functional.avg_pool2d(image.mean(1, keepdim=True), self.coarse)[:, 0]
        return msvit.GateOutput.from_mask((mean > 0).to(image.dtype))


def learned_gate() -> msvit.Gate:
    torch.manual_seed(0)
    gate = msvit.LearnedGate(coarse=8, grid=(4, 4)).requires_grad_(False)
    for layer in (module for module in gate.modules() if isinstance(module, nn.Linear)):
        nn.init.normal_(layer.weight, std=0.12)
    nn.init.zeros_(gate.head.bias)
    gate.threshold = 0.1
    return gate


def export_model(name: str = HOSTS[0], gate: msvit.Gate | None = None, mode: str = "packed", **options: Any) -> Any:
    gate = learned_gate() if gate is None else gate
    return msvit.convert(tiny_host(name, torch.float32, img_size=SIZE, **options), 8, gate, mode).eval()


def photos(num: int = 5, side: int = SIZE) -> Tensor:
    """Images with few and with many fine cells: by SignGate the first is all coarse, the last all fine."""
    return images(num, side, side, torch.float32) + torch.linspace(-2, 2, num).pow(3).view(-1, 1, 1, 1) / 20


def run_onnx(path: Path, **inputs: Tensor) -> dict[str, Tensor]:
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    found = session.run(None, {name: value.numpy() for name, value in inputs.items()})
    return {out.name: torch.from_numpy(value) for out, value in zip(session.get_outputs(), found, strict=True)}


@torch.no_grad()
def assert_same(found: dict[str, Tensor], model: Any, image: Tensor) -> None:
    output = model(image)
    assert torch.equal(found["mask"], output.gate.mask > 0.5)
    assert found["tokens"].tolist() == output.tokens.count.tolist()
    torch.testing.assert_close(found["logits"], output.logits, atol=1e-4, rtol=1e-4)


def whole(model: Any, batch: int | None, max_tokens: int | None = None, features: bool = False) -> WholeGraph:
    gate = GateGraph(model, GRID, max_tokens)
    return WholeGraph(gate, TrunkGraph(model, GRID, batch, max_tokens, features)).eval()


@torch.no_grad()
def check_graph(model: Any, batch: int | None, image: Tensor) -> int:
    """Compare numbers and features with the model's before they are written; return the number of tokens."""
    found, features = (whole(model, batch, features=each)(image) for each in (False, True))
    assert_same(found, model, image)
    want, num = model.forward_features(image), model.backbone.num_prefix
    torch.testing.assert_close(features["features"].flatten(2).transpose(1, 2), want[:, num:], atol=1e-5, rtol=1e-5)
    assert num == 0 or torch.allclose(features["prefix"], want[:, :num], atol=1e-5)
    return int(found["tokens"].sum())


@pytest.mark.parametrize("name", HOSTS)
def test_graphs_give_the_numbers_of_the_model(name: str) -> None:
    """One image packed, batches packed and trimmed, and with merging."""
    model = export_model(name, SignGate(8))
    assert len({check_graph(model, 1, image[None]) for image in photos()}) > 3
    for mode in ("packed", "trimmed"):
        for num in (2, 5):
            check_graph(model.with_options(mode=mode), None, photos(num))
    for model in (merging_model(name), merging_model(name, rate=0.8), merging_model(name, coarse=4, r=(0, 32))):
        check_graph(model, None, photos())


@pytest.mark.parametrize("name", HOSTS)
@torch.no_grad()
def test_a_fixed_number_of_tokens_is_a_budget_of_each_image(name: str) -> None:
    model, gate = export_model(name), learned_gate()
    num = model.backbone.num_prefix + 16 + 3 * 7 + 1  # seven fine cells fit
    assert (gate(photos()).mask.sum((1, 2)) > 7).any()
    found = whole(model, None, num)(photos())
    for place, image in enumerate(photos()):
        output = model(image[None], max_tokens=num)
        torch.testing.assert_close(found["logits"][place : place + 1], output.logits, atol=1e-5, rtol=1e-5)
        assert torch.equal(found["mask"][place], output.gate.mask[0] > 0.5)


def merging_model(name: str = HOSTS[0], coarse: int = 8, **tome: Any) -> Any:
    host = tiny_host(name, torch.float32, img_size=SIZE)
    return msvit.convert(host, coarse, msvit.AllFine(coarse), reducer=msvit.ToMe(**(tome or {"r": (9, 20)}))).eval()


def test_a_model_of_the_rule_is_a_file_of_plain_operators_and_static_shapes(tmp_path: Path) -> None:
    model = msvit.convert(tiny_host(HOSTS[0], torch.float32, img_size=SIZE), method="auto", budget=0.8).eval()
    (path,) = msvit.export(model, tmp_path / "model.onnx")
    assert_same(run_onnx(path, images=photos(1)), model, photos(1))
    proto = onnx.load(path)
    assert not {"NonZero", "ScatterND", "ScatterElements", "Loop", "If"} & {node.op_type for node in proto.graph.node}
    sides = [side for value in proto.graph.value_info for side in value.type.tensor_type.shape.dim]
    assert len(sides) > 50
    assert not any(side.dim_param for side in sides)
    about = {prop.key: json.loads(prop.value) for prop in proto.metadata_props}
    assert about["msvit.classes"] == [f"class {label}" for label in range(model.num_classes)], "as predict names them"
    count, cost = int(model(photos(1)).tokens.count), int(msvit.macs(model, photos(1))) / 1e9
    assert about["msvit.macs"]["by_tokens"] == {str(count): pytest.approx(cost)}


class EveryGate(msvit.Gate):
    """Fine where an odd number of gates say so: one file for all of them, as to write one takes seconds."""

    def __init__(self) -> None:
        super().__init__(8)
        torch.manual_seed(0)
        context = msvit.ContextGate(8, grid=(4, 4), widths=(8, 8, 8), depth=1).eval()
        nn.init.normal_(context.head.weight)
        context.threshold = context.scores(photos(8)).median().item()
        fixed = msvit.DiscGate(8, share=0.3), msvit.EntropyGate(8, share=0.4), msvit.AllFine(8)
        gates = context, *fixed, msvit.GradientGate(8, threshold=0.2), learned_gate()
        self.graphs = nn.ModuleList(GateGraph(export_model(gate=gate), GRID, None) for gate in gates)

    def forward(self, image: Tensor) -> msvit.GateOutput:
        return msvit.GateOutput.from_mask(sum(graph(image)["mask"].to(image.dtype) for graph in self.graphs) % 2)


@torch.no_grad()
def test_the_graph_of_every_gate_decides_as_the_gate() -> None:
    """Before they are written: all of them are in the file below."""
    for graph in EveryGate().eval().graphs:
        assert torch.equal(graph(photos())["mask"], graph.gate(photos()).mask > 0.5), type(graph.gate)


@torch.no_grad()
def test_padded_channels_change_no_value() -> None:
    gate = msvit.load_gate("default")
    image = images(2, 224, 224, torch.float32)
    want = gate(image).logits
    padded = pad_conv_channels(msvit.load_gate("default"))
    torch.testing.assert_close(padded(image).logits, want, atol=1e-5, rtol=1e-5)
    assert padded.downsample[0].weight.shape[1] == 36


@pytest.fixture(scope="module")
def packed_file(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    model = export_model(gate=EveryGate(), depth=1)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    model.classes = list("abcde")
    model.preprocessing = msvit.Preprocessing(SIZE, (0.5,) * 3, (0.2,) * 3, crop=0.9)
    (path,) = msvit.export(model.train(), tmp_path_factory.mktemp("packed") / "model.onnx")
    assert model.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    return model.eval(), path


def test_a_file_for_one_image_and_in_int8(packed_file: tuple[Any, Path], tmp_path: Path) -> None:
    model, path = packed_file
    proto = onnx_file.to_int8(onnx.load(path))
    small = onnx_file.write_onnx(proto, tmp_path / "int8.onnx", {"msvit.version": "0"})
    assert "MatMulInteger" in {node.op_type for node in proto.graph.node}
    arrays = map(onnx.numpy_helper.to_array, proto.graph.initializer)
    weights = [torch.tensor(array).int() for array in arrays if array.dtype == "int8"]
    assert max(int(weight.abs().max()) for weight in weights) == 64, "7 bits, which do not overflow without VNNI"
    counts = set()
    for image in photos(8):
        found, rounded = (run_onnx(each, images=image[None]) for each in (path, small))
        assert_same(found, model, image[None])
        counts.add(int(found["tokens"]))
        assert torch.equal(rounded["mask"], found["mask"]), "int8 keeps the decisions"
        assert nn.functional.cosine_similarity(rounded["logits"], found["logits"]) > 0.99
    assert len(counts) > 2


def test_a_file_has_plain_operators_and_what_a_server_needs(packed_file: tuple[Any, Path]) -> None:
    proto = onnx.load(packed_file[1])
    onnx.checker.check_model(proto, full_check=True)
    assert [(each.domain, each.version) for each in proto.opset_import] == [("", 20)]
    ops = [node.op_type for node in proto.graph.node]
    assert ops.count("NonZero") == 1
    assert not {"Loop", "If", "Scan"} & set(ops)
    of_gates = onnx_file.nodes_behind(proto, "mask")  # a histogram is scattered
    assert 50 < len(of_gates) < len(ops)
    assert not {"ScatterND", "ScatterElements"} & {n.op_type for n in proto.graph.node if n.name not in of_gates}
    assert str(Path(msvit.__file__).parent).encode() not in packed_file[1].read_bytes()  # no stack traces
    about = {prop.key: json.loads(prop.value) for prop in proto.metadata_props}
    assert about["msvit.classes"] == list("abcde")
    assert about["msvit.input_size"] == [3, SIZE, SIZE]
    assert (about["msvit.mean"], about["msvit.std"], about["msvit.crop"]) == ([0.5] * 3, [0.2] * 3, 0.9)
    assert (about["msvit.coarse"], about["msvit.fine"], about["msvit.num_prefix"]) == (8, 4, 1)
    model, image = packed_file[0], photos(1)
    count = int(model(image).tokens.count)
    assert about["msvit.macs"]["by_tokens"][str(count)] == pytest.approx(int(msvit.macs(model, image)) / 1e9)
    assert about["msvit.macs"]["dense"] == pytest.approx(model.backbone.dense_macs(GRID) / 1e9)


def test_the_example_of_the_docs_predicts_what_the_model_predicts(
    packed_file: tuple[Any, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (Path(__file__).parents[2] / "docs/serving.md").read_text()
    (code,) = (block for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "InferenceSession" in block)
    model, path = packed_file
    (tmp_path / "photos.onnx").write_bytes(path.read_bytes())
    pixels = np.random.default_rng(0).integers(0, 255, (50, 70, 3), np.uint8)
    Image.fromarray(pixels).save(tmp_path / "photo.png")
    monkeypatch.chdir(tmp_path)
    values: dict[str, Any] = {}
    exec(code.replace("photo.jpg", "photo.png"), values)
    prepared = model.preprocessing(Image.fromarray(pixels))[None]
    np.testing.assert_allclose(values["logits"], model(prepared).logits.detach(), atol=1e-4)


@torch.no_grad()
def test_with_max_tokens_per_image_no_shape_depends_on_the_image() -> None:
    graph = trace(Part(whole(export_model(depth=1), 1, 40), {"images": photos(1)}), dynamic=False).graph
    values = [node.meta["val"] for node in graph.nodes if isinstance(node.meta.get("val"), Tensor)]
    assert len(values) > 50
    assert all(isinstance(side, int) for value in values for side in value.shape)


WITHOUT_MSVIT = """
import sys
sys.modules["msvit"] = sys.modules["timm"] = None
import torch
extra = {"msvit.json": ""}
module = torch.export.load(sys.argv[1], extra_files=extra).module()
assert "msvit.macs" in extra["msvit.json"]
images = torch.load(sys.argv[2])
torch.save({num: module(images=images[:num]) for num in (1, 2, 5)}, sys.argv[3])
"""


@pytest.mark.slow
def test_a_pt2_file_runs_without_msvit(tmp_path: Path) -> None:
    model = export_model("vit_small_patch14_reg4_dinov2", mode="trimmed", depth=1)
    (path,) = msvit.export(model, tmp_path / "model.pt2", batch="dynamic")
    torch.save(photos(), tmp_path / "images")
    files = [path, tmp_path / "images", tmp_path / "found"]
    subprocess.run([sys.executable, "-W", "ignore", "-c", WITHOUT_MSVIT, *map(str, files)], check=True, cwd=tmp_path)
    for num, found in torch.load(tmp_path / "found").items():
        assert_same(found, model, photos()[:num])


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (lambda: tiny_model(SWINS[0], torch.float32), {}, "SwinTransformer cannot be exported"),
        (lambda: export_model().with_options(reducer=msvit.EViT(at=(1,))), {}, r"EViT cannot be .*reducer=None"),
        (lambda: export_model().with_options(reducer=msvit.ToMe(r=2)), {}, r"ToMe beside a LearnedGate .*AllFine\(c"),
        (merging_model, {"split": True}, "split=True is for gates, but the model merges"),
        (merging_model, {"max_tokens_per_image": 40}, "max_tokens_per_image=40 is for gates"),
        (lambda: export_model(gate=msvit.RandomGate(8)), {}, "RandomGate cannot be exported"),
        (lambda: export_model(mode="masked"), {}, "mode 'masked'.*mode='packed'"),
        (lambda: msvit.compile(export_model()), {}, r"pass model\.uncompiled\(\) to msvit\.export"),
        (lambda: tiny_host(HOSTS[0]), {}, "got VisionTransformer; wrap it"),
        (export_model, {"opset": 11}, r"opset is 11, but must be a whole number in \[18, .*opset=20"),
        (export_model, {"max_tokens_per_image": 5}, "max_tokens_per_image is 5, but an image of 32x32px has 17 tokens"),
        (export_model, {"path": "model.PT2", "int8": True}, "int8 .* 'pt2'"),
        (export_model, {"format": "pt2"}, r"is model\.onnx, but format is 'pt2'; call it model\.pt2"),
        (export_model, {"path": "file/model.onnx"}, "file cannot be written"),
        (export_model, {"path": "folder.onnx"}, "folder.onnx is a folder"),
    ],
)
def test_what_cannot_be_exported_is_named_and_nothing_is_written(
    make: Any, options: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    (tmp_path / "folder.onnx").mkdir()
    with pytest.raises(ValueError, match=message):
        msvit.export(make(), **({"path": "model.onnx"} | options))
    assert sorted(each.name for each in tmp_path.iterdir()) == ["file", "folder.onnx"]


def test_missing_packages_are_named_with_the_line_that_brings_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onnx_file, "find_spec", lambda name: None if name == "onnxscript" else name)
    with pytest.raises(ImportError, match=r"needs onnxscript; pip install 'msvit\[onnx\]'"):
        onnx_file.check_packages()


def segmenter() -> msvit.Segmenter:
    host = tiny_host(HOSTS[0], torch.float32, img_size=SIZE)
    return msvit.convert_segmenter(host, 5, 8, learned_gate(), decoder="linear").eval()


def of_transformers() -> Any:
    host = pytest.importorskip("tests.tiny_transformers").tiny_transformers("ViTForImageClassification", torch.float32)
    return msvit.convert(host, coarse=8, gate=msvit.GradientGate(8, threshold=0.337)).eval()


FILES: list[tuple[Any, dict[str, Any]]] = [
    *((partial(export_model, name, SignGate(8)), {"batch": "dynamic"}) for name in HOSTS),
    (partial(export_model, HOSTS[3], mode="trimmed"), {"batch": "dynamic", "opset": 18}),
    (partial(export_model, HOSTS[3]), {"batch": "dynamic", "max_tokens_per_image": 45}),
    (partial(export_model, HOSTS[2]), {"batch": 3, "features": True, "opset": 21}),
    (partial(export_model, HOSTS[0]), {"batch": "dynamic", "split": True}),
    (of_transformers, {"batch": "dynamic", "size": 16}),
    *((partial(merging_model, name), {"batch": "dynamic"}) for name in HOSTS[:4]),
    *((segmenter, {"batch": "dynamic", "split": side == 32, "size": side}) for side in (32, 28)),  # 28: padded
]


@pytest.mark.slow
@pytest.mark.parametrize(("make", "options"), FILES)
@torch.no_grad()
def test_files_of_all_kinds(make: Any, options: dict[str, Any], tmp_path: Path) -> None:
    """In two files the trunk takes any mask, too; with max_tokens_per_image every shape is static but the batch's."""
    model, side = make(), options.get("size", SIZE)
    files = msvit.export(model, tmp_path / "model.onnx", **options)
    for num in (options["batch"],) if options["batch"] == 3 else (1, 2, 5):
        image, found = photos(num, side), {}
        for path in files:
            found |= run_onnx(path, images=image, **({"mask": found["mask"]} if found else {}))
        if "max_tokens_per_image" in options:
            want = torch.cat([model(each[None], max_tokens=options["max_tokens_per_image"]).logits for each in image])
            torch.testing.assert_close(found["logits"], want, atol=1e-4, rtol=1e-4)
            continue
        if "features" in options:
            want = model.forward_intermediates(image, 1, norm=True, intermediates_only=True)[0]
            torch.testing.assert_close(found["features"], want, atol=1e-4, rtol=1e-4)
            continue
        assert_same(found, getattr(model, "msvit", model), image)
        if options.get("split"):
            mask = torch.rand(found["mask"].shape) < 0.5
            logits = run_onnx(files[-1], images=image, mask=mask)["logits"]
            torch.testing.assert_close(logits, model(image, mask).logits, atol=1e-4, rtol=1e-4)
    about = {prop.key: json.loads(prop.value) for prop in onnx.load(files[-1]).metadata_props}
    assert make is not of_transformers or about["msvit.classes"] == [f"LABEL_{number}" for number in range(5)]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["vit_small_patch16_224", "vit_small_patch14_reg4_dinov2"])
def test_a_full_model_with_the_gate_that_comes_with_msvit(name: str, tmp_path: Path) -> None:
    import timm

    host = timm.create_model(name, img_size=224, num_classes=10).eval()
    model = msvit.convert(host, gate="default", budget=0.5)
    (path,) = msvit.export(model, tmp_path / "model.onnx")
    (small,) = msvit.export(model, tmp_path / "int8.onnx", int8=True)
    assert small.stat().st_size < 0.4 * path.stat().st_size
    blobs = nn.functional.interpolate(torch.randn(4, 3, 9, 9), size=(224, 224), mode="bicubic")
    for image in blobs * torch.linspace(0, 3, 4).view(4, 1, 1, 1):
        assert_same(run_onnx(path, images=image[None]), model, image[None])
