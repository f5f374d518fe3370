"""Speed of exported files: a model with a gate over its dense host, batch 1, in one process and in turn.

    python benchmarks/export_speed.py --threads 1 2 --out benchmarks/results/export/speed.json
    python benchmarks/export_speed.py --model vit_base_patch16_224 --images photos --openvino

Both are ONNX files that onnxruntime runs: the dense one is the host as torch.onnx.export writes it, the other is
`msvit.export` of the converted host with the shipped gate. Weights are random unless --weights names a file. Each round
times both on the same image, in alternating order. `share` is the speed-up over the ratio of multiply-adds of
the same images, gate included: 1 means that every saved multiply-add became time.
"""

import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import onnx
import onnxruntime
import shared
import timm
import torch
from timm.models import load_checkpoint
from torch import Tensor, nn

import msvit
from msvit.integrations.export.onnx_file import quiet, to_int8
from msvit_lab.calibration import Prepared

Run = Callable[[np.ndarray], Any]


def main() -> None:
    parser = shared.script_parser(__doc__)
    parser.add_argument("--model", default="vit_small_patch16_224")
    parser.add_argument("--weights", help="a file of the host's weights")
    parser.add_argument("--images", type=Path, help="a folder or tar of photographs; noise otherwise")
    parser.add_argument("--tokens", type=float, default=0.495, help="share of the dense tokens, on average")
    parser.add_argument("--num", type=int, default=16, help="images")
    parser.add_argument("--rounds", type=int, default=10, help="over all images")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--int8", action="store_true", help="both files in 8 bits, too")
    parser.add_argument("--openvino", action="store_true", help="with OpenVINO, too")
    args = parser.parse_args()
    about = shared.record(torch.device("cpu"), args.commit, None if args.images is None else str(args.images))
    shared.write(args.out, table, lambda: {**about, "rows": measure(args)})


@torch.no_grad()
def measure(args: Any) -> list[dict[str, Any]]:
    torch.manual_seed(0)
    host = timm.create_model(args.model).eval()
    if args.weights:
        load_checkpoint(host, args.weights)
    model = msvit.convert(host, gate="default")
    images = read_images(model, args.images, args.num)
    model = msvit.calibrate(model, images, args.tokens, unit="tokens")
    macs = msvit.macs(model, images).double().mean().item()
    dense_macs = model.backbone.dense_macs(model.grid(images))
    tokens = model(images).tokens.count.double()
    rows = []
    with TemporaryDirectory() as folder:
        dense, packed = Path(folder) / "dense.onnx", Path(folder) / "packed.onnx"
        write_dense(host, images[:1], dense)
        msvit.export(model, packed)
        files = {"onnxruntime": (dense, packed)}
        if args.int8:
            files["onnxruntime, int8"] = (in_int8(dense), msvit.export(model, Path(folder) / "int8.onnx", int8=True)[0])
        if args.openvino:
            files["openvino"] = (dense, packed)
        for name, pair in files.items():
            opened = open_openvino if name == "openvino" else open_onnxruntime
            for threads in args.threads:
                found = time_pair(*(opened(path, threads) for path in pair), images, args.rounds)
                row = {"engine": name, "threads": threads, **found, "macs_ratio": dense_macs / macs}
                row |= {"tokens": tokens.mean().item(), "tokens_std": tokens.std().item()}
                rows.append(row | {"share": row["speedup"] / row["macs_ratio"]})
    return rows


def read_images(model: Any, folder: Path | None, num: int) -> Tensor:
    """Prepared photographs, or noise of low and high frequencies, so that gates have something to decide."""
    if folder is not None:
        prepared = Prepared(model, folder, None, num).batches(model.preprocessing.size)
        return torch.cat([batch.image for batch in prepared])
    side = model.preprocessing.size
    smooth = nn.functional.interpolate(torch.randn(num, 3, 7, 7), size=(side, side), mode="bicubic")
    where = nn.functional.interpolate(torch.randn(num, 1, 4, 4), size=(side, side), mode="bicubic") > 0
    return smooth + where * torch.randn(num, 3, side, side)


def write_dense(host: nn.Module, image: Tensor, path: Path) -> None:
    with quiet():
        options = {"opset_version": 20, "input_names": ["images"], "verbose": False}
        program = torch.onnx.export(host, (image,), dynamo=True, **options)
    program.save(path, external_data=False)


def in_int8(path: Path) -> Path:
    found = path.with_suffix(".int8.onnx")
    onnx.save(to_int8(onnx.load(path)), found)
    return found


def open_onnxruntime(path: Path, threads: int) -> Run:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    options.add_session_config_entry("session.force_spinning_stop", "1")  # or it takes cores from the other file
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    return lambda image: session.run(None, {"images": image})


def open_openvino(path: Path, threads: int) -> Run:
    import openvino

    settings = {"INFERENCE_NUM_THREADS": threads, "PERFORMANCE_HINT": "LATENCY", "INFERENCE_PRECISION_HINT": "f32"}
    compiled = openvino.Core().compile_model(path, "CPU", settings)
    return lambda image: compiled({"images": image})


def time_pair(dense: Run, packed: Run, images: Tensor, rounds: int) -> dict[str, Any]:
    """Mean over the images of each one's median time, in ms, and their ratio."""
    given = [image[None].numpy() for image in images]
    times = {"dense": [[] for _ in given], "packed": [[] for _ in given]}
    runs = {"dense": dense, "packed": packed}
    for number in range(rounds + 1):
        for place, image in enumerate(given):
            for name in ("dense", "packed") if (number + place) % 2 else ("packed", "dense"):
                begin = time.perf_counter()
                runs[name](image)
                if number:  # the first round warms up
                    times[name][place].append(time.perf_counter() - begin)
    ms = {name: 1e3 * float(np.mean([median(each) for each in rows])) for name, rows in times.items()}
    return {"dense_ms": ms["dense"], "packed_ms": ms["packed"], "speedup": ms["dense"] / ms["packed"]}


def table(results: dict[str, Any]) -> str:
    head = "| engine | threads | tokens | MACs | dense | packed | over dense | share |\n" + "| --- " * 8 + "|\n"
    lines = [
        f"| {row['engine']} | {row['threads']} | {row['tokens']:.0f} ± {row['tokens_std']:.0f} "
        f"| 1/{row['macs_ratio']:.2f} | {row['dense_ms']:.1f} ms | {row['packed_ms']:.1f} ms "
        f"| **{row['speedup']:.2f}x** | {row['share']:.2f} |"
        for row in results["rows"]
    ]
    return head + "\n".join(lines)


if __name__ == "__main__":
    shared.run_script(main)
