"""How often exported files predict the class that the model predicts.

    python benchmarks/export_agreement.py runs/pets --images PETS/val --count 500 --out benchmarks/results/int8.json
    python benchmarks/export_agreement.py runs/pets --images PETS/val --labels --out ...    # with accuracy

MODEL is a run or a folder of msvit.save. Of the ONNX file in 32 bits and of the one in 8: `top1_agreement`, the share
of images whose most probable class is the model's in torch; `same_masks`, the share of images with the same decisions
in all cells; `max_difference` of logits, in units of their standard deviation; with --labels the accuracy of each.
"""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import onnxruntime
import shared
import torch

import msvit
from msvit_lab.calibration import Prepared, find_model


def main() -> None:
    parser = shared.script_parser(__doc__)
    parser.add_argument("model", help="a run, or a folder of msvit.save")
    parser.add_argument("--images", type=Path, required=True, help="a folder or tar of images")
    parser.add_argument("--count", type=int, default=500, help="images, drawn at random but always the same")
    parser.add_argument("--labels", action="store_true", help="images lie in class folders: accuracy, too")
    args = parser.parse_args()
    about = shared.record(torch.device("cpu"), args.commit, str(args.images))
    shared.write(args.out, table, lambda: {**about, **measure(args)})


@torch.inference_mode()
def measure(args: Any) -> dict[str, Any]:
    model = find_model(args.model, None)
    batches = Prepared(model, args.images, None, args.count, args.labels).batches(model.preprocessing.size)
    images = torch.cat([batch.image for batch in batches])
    label = torch.cat([batch.label for batch in batches]) if args.labels else None
    outputs = [model(batch.image) for batch in batches]
    logits = torch.cat([output.logits for output in outputs])
    mask = torch.cat([output.gate.mask > 0.5 for output in outputs])
    rows = [{"file": "torch", **accuracy(logits, label)}]
    with TemporaryDirectory() as folder:
        for name, options in (("onnx", {}), ("onnx, int8", {"int8": True})):
            (path,) = msvit.export(model, Path(folder) / "model.onnx", **options)
            found, decided = run_file(path, images)
            row: dict[str, Any] = {"file": name, "mb": path.stat().st_size / 1e6, **accuracy(found, label)}
            row["top1_agreement"] = (found.argmax(1) == logits.argmax(1)).double().mean().item()
            row["same_masks"] = (decided == mask).flatten(1).all(1).double().mean().item()
            row["max_difference"] = ((found - logits).abs().max() / logits.std()).item()
            rows.append(row)
    return {"model": args.model, "images": len(images), "rows": rows}


def accuracy(logits: torch.Tensor, label: torch.Tensor | None) -> dict[str, float]:
    return {} if label is None else {"top1": (logits.argmax(1) == label).double().mean().item()}


def run_file(path: Path, images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits and masks, image by image."""
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    found = [session.run(["logits", "mask"], {"images": image[None].numpy()}) for image in images]
    logits, mask = (torch.from_numpy(np.concatenate(each)) for each in zip(*found, strict=True))
    return logits, mask


def table(results: dict[str, Any]) -> str:
    head = f"{results['images']} images\n\n| file | MB | top-1 agreement | same masks | largest difference | top-1 |\n"
    lines = []
    for row in results["rows"]:
        cells = [row["file"], f"{row['mb']:.1f}" if "mb" in row else ""]
        cells += [f"{row[name]:.1%}" if name in row else "" for name in ("top1_agreement", "same_masks")]
        cells += [f"{row['max_difference']:.2g} std" if "max_difference" in row else ""]
        cells += [f"{row['top1']:.1%}" if "top1" in row else ""]
        lines.append("| " + " | ".join(cells) + " |")
    return head + "| --- " * 6 + "|\n" + "\n".join(lines)


if __name__ == "__main__":
    shared.run_script(main)
