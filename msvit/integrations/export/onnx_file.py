"""ONNX files: plain operators, one file with its weights, metadata as JSON; in 8 bits by onnxruntime's quantizer.

    proto = to_onnx(program, inputs=["images"], outputs=["logits", "mask", "tokens"], opset=20)
    proto = to_int8(proto)
    write_onnx(proto, Path("model.onnx"), {"msvit.classes": ["beagle", ...]})
"""

import json
import logging
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch.export import ExportedProgram

from msvit.checks import check_int
from msvit.saving.file import replacing

PACKAGES = ("onnx", "onnxscript", "onnxruntime")
OLDEST_OPSET = 18  # with which torch's exporter writes
MAX_BYTES = 2**31 - 2**24  # of a protobuf, less what is not weights
BATCH = "batch"  # the name of the first axis, where it may have any length


def check_packages() -> None:
    """Raise ImportError unless the packages for ONNX are installed."""
    if missing := [name for name in PACKAGES if find_spec(name) is None]:
        raise ImportError(f"exporting to ONNX needs {', '.join(missing)}; pip install 'msvit[onnx]'")


def check_opset(opset: int) -> int:
    """Return the opset, or raise ValueError unless torch and onnx can write it."""
    import onnx

    return check_int("opset", opset, OLDEST_OPSET, onnx.defs.onnx_opset_version(), example=20)


def check_size(module: torch.nn.Module) -> None:
    """Raise ValueError unless the weights fit into an ONNX file."""
    size = 4 * sum(p.numel() for p in module.parameters())  # bytes in float32
    if size > MAX_BYTES:
        raise ValueError(
            f"the weights take {size / 2**30:.1f} GiB, but an ONNX file holds 2 GiB; write format='pt2', "
            f"or a smaller model"
        )


def to_onnx(program: ExportedProgram, inputs: list[str], outputs: list[str], opset: int) -> Any:
    """Convert an exported program to a ModelProto of standard operators."""
    with quiet():
        written = torch.onnx.export(
            program, dynamo=True, opset_version=opset, input_names=inputs, output_names=outputs, verbose=False
        )
        assert written is not None, "dynamo=True returns a program"
        proto: Any = written.model_proto
    domains = {part.domain for part in (*proto.graph.node, *proto.functions)} - {""}
    assert not domains, f"operators of {domains}, which other engines may not have"
    tidy(proto)
    return proto


def tidy(proto: Any) -> None:
    """Remove stack traces of the exporting machine, and name the first axis of inputs and outputs."""
    graph = proto.graph
    for part in (*graph.node, *graph.value_info, *graph.input, *graph.output, *graph.initializer, graph):
        part.ClearField("doc_string")
        part.ClearField("metadata_props")
    axes = [value.type.tensor_type.shape.dim[0] for value in (*graph.input, *graph.output)]
    symbols = {axis.dim_param for axis in axes if axis.dim_param}
    for value in (*graph.input, *graph.output, *graph.value_info):
        for axis in value.type.tensor_type.shape.dim:
            if axis.dim_param in symbols and axis.dim_param:
                axis.dim_param = BATCH


def to_int8(proto: Any) -> Any:
    """Quantize weights of matrix products to 8 bits, activations as they come; the gate's decisions stay exact.

    Weights use 7 of the 8 bits, as sums of two products overflow in 16 bits on x86_64 CPUs without VNNI.
    """
    import onnx
    from onnxruntime.quantization import QuantType, quantize_dynamic

    for number, node in enumerate(proto.graph.node):
        node.name = node.name or f"node_{number}"
    del proto.graph.value_info[:]  # shapes of weights, some of which the quantizer transposes
    with TemporaryDirectory() as folder, quiet():
        source, target = (Path(folder) / name for name in ("float32.onnx", "int8.onnx"))
        onnx.save(proto, source)
        quantize_dynamic(
            source, target, weight_type=QuantType.QInt8, per_channel=True, reduce_range=True,
            op_types_to_quantize=["MatMul"], nodes_to_exclude=sorted(nodes_behind(proto, "mask")),
        )  # fmt: skip
        return onnx.load(target)


def nodes_behind(proto: Any, output: str) -> set[str]:
    """Return the names of all nodes that an output is computed by."""
    makers = {name: node for node in proto.graph.node for name in node.output}
    names: set[str] = set()
    wanted = [output]
    while wanted:
        node = makers.get(wanted.pop())
        if node is not None and node.name not in names:
            names.add(node.name)
            wanted += node.input
    return names


def write_onnx(proto: Any, path: Path, metadata: Mapping[str, Any]) -> Path:
    """Write a file, or replace it whole, with metadata whose values are JSON."""
    import onnx

    onnx.helper.set_model_props(proto, {name: json.dumps(value) for name, value in metadata.items()})
    proto.producer_name, proto.producer_version = "msvit", metadata["msvit.version"]
    with replacing(path) as part:
        part.write_bytes(proto.SerializeToString())
    return path


@contextmanager
def quiet() -> Iterator[None]:
    """Silence the exporters' warnings and log lines, which are about their own code."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "torch.export", "onnxscript", "onnx_ir", "root", "")]
    levels = [logger.level for logger in loggers]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        try:
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)
