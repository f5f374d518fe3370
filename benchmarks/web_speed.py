"""How much faster than the dense host is a mixed-scale ViT in the browser's WebAssembly?

    python benchmarks/web_speed.py --runtime onnxruntime-web-1.30.0.tgz --threads 1,2 --out web_speed.json

Writes the page of a ViT with random weights (times do not depend on them), opens a headless Chromium, and runs gate and
trunk with a fixed number of fine cells, and the dense host, in turn. The last column is the speed-up over what the
multiply-adds allow, gate included.
"""

import json
import shutil
import tempfile
import threading
from pathlib import Path
from typing import Any

import timm
import torch
from shared import markdown, record, run_script, script_parser, source_line, write

import msvit
from msvit_lab.timing import speed_up, spread
from msvit_lab.web import PageServer, find_runtime, write_page

PAGE = """<!DOCTYPE html><meta charset="utf-8"><title>speed</title><script type="module">
import * as ort from "./runtime/ort.wasm.min.mjs";
window.measure = async ({ threads, numFine, rounds }) => {
  const about = await (await fetch("model/about.json")).json();
  const bytes = async (name) => new Uint8Array(await (await fetch(`model/${name}`)).arrayBuffer());
  ort.env.wasm.numThreads = threads;
  ort.env.wasm.wasmPaths = new URL("runtime/", location.href).href;
  const weights = [{ path: "weights.bin", data: await bytes("weights.bin") }];
  const open = async (name, externalData) =>
    ort.InferenceSession.create(await bytes(name), { executionProviders: ["wasm"], externalData });
  const gate = await open("gate.onnx", []);
  const trunk = await open("trunk.onnx", weights);
  const dense = await open("dense.onnx", weights);
  const values = Float32Array.from({ length: 3 * about.size ** 2 }, () => 2 * Math.random() - 1);
  const images = new ort.Tensor("float32", values, [1, 3, about.size, about.size]);
  const cells = Uint8Array.from({ length: about.rows * about.columns }, (_, cell) => Number(cell < numFine));
  const mask = new ort.Tensor(about.mask_type, cells, [1, about.rows, about.columns]);
  const timed = async (step) => {
    const before = performance.now();
    await step();
    return performance.now() - before;
  };
  const steps = {
    gate: () => gate.run({ images }), trunk: () => trunk.run({ images, mask }), dense: () => dense.run({ images }),
  };
  const times = { gate: [], trunk: [], dense: [] };
  for (let round = -2; round < rounds; round++) {
    for (const name in steps) {
      const ms = await timed(steps[name]);
      if (round >= 0) times[name].push(ms);
    }
  }
  return { times, tokens: about.tokens[numFine], macs: about.macs[numFine], dense_macs: about.dense_macs };
};
</script>"""


def measure(given: Any) -> dict[str, Any]:
    from playwright.sync_api import sync_playwright

    executable = shutil.which(given.chromium)
    if executable is None:
        raise ValueError(f"--chromium is {given.chromium}, which is not installed; give the path of a Chromium")
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        page_folder = Path(folder) / "page" if given.page is None else given.page
        if not page_folder.exists():
            model = msvit.convert(timm.create_model(given.model).eval(), gate="default")
            write_page(page_folder, model, runtime=find_runtime(given.runtime))
        (page_folder / "speed.html").write_text(PAGE)
        with PageServer(page_folder) as server, sync_playwright() as playwright:
            threading.Thread(target=server.serve_forever, daemon=True).start()
            browser = playwright.chromium.launch(executable_path=executable, args=["--no-sandbox"])
            for threads in given.threads:
                page = browser.new_page()  # the number of threads is fixed when the runtime starts
                page.set_default_timeout(0)
                page.goto(f"{server.address}speed.html")
                wanted = {"threads": threads, "numFine": given.num_fine, "rounds": given.rounds}
                rows.append(make_row(threads, page.evaluate("(wanted) => window.measure(wanted)", wanted)))
                page.close()
            version = browser.version
            browser.close()
            server.shutdown()
    about = record(torch.device("cpu"), given.commit)
    return {**about, "model": given.model, "browser": f"Chromium {version}", "rows": rows}


def make_row(threads: int, found: dict[str, Any]) -> dict[str, Any]:
    """Medians over rounds; the speed-up is that of each round."""
    times = found["times"]
    mixed = [gate + trunk for gate, trunk in zip(times["gate"], times["trunk"], strict=True)]
    possible = found["dense_macs"] / found["macs"]
    faster = speed_up(times["dense"], mixed)
    return {
        "threads": threads, "tokens": found["tokens"], "macs": found["macs"], "dense_macs": found["dense_macs"],
        **{f"{name}_ms": spread(ms)._asdict() for name, ms in (*times.items(), ("mixed", mixed))},
        "speed_up": faster._asdict(), "of_macs": faster.median / possible,
    }  # fmt: skip


def table(results: dict[str, Any]) -> str:
    rows = [
        [
            str(row["threads"]), str(row["tokens"]),
            *(f"{row[f'{name}_ms']['median']:.1f}" for name in ("gate", "mixed", "dense")),
            f"{row['speed_up']['median']:.2f}x", f"{row['dense_macs'] / row['macs']:.2f}x", f"{row['of_macs']:.2f}",
        ]
        for row in results["rows"]
    ]  # fmt: skip
    titles = ["threads", "tokens", "gate, ms", "gate and trunk, ms", "dense, ms", "speed-up", "by MACs", "share of it"]
    return markdown(titles, rows, source_line(results)) + "\n" + json.dumps(results["rows"])


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--model", default="vit_small_patch16_224")
    parser.add_argument("--num-fine", type=int, default=16, help="fine cells of the 49: 16 are 97 tokens")
    parser.add_argument("--threads", type=lambda text: [int(part) for part in text.split(",")], default=[1, 2])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--runtime", type=Path, help="onnxruntime-web: the archive of npm pack, or its folder")
    parser.add_argument("--page", type=Path, help="keep the page in this folder; one that is there is used again")
    parser.add_argument("--chromium", default="chromium")
    given = parser.parse_args()
    write(given.out, table, lambda: measure(given))


if __name__ == "__main__":
    run_script(main)
