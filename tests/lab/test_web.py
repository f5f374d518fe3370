"""The page as a folder: what is in it, what it computes, how it is served, and where its runtime is from."""

import io
import json
import re
import shutil
import subprocess
import tarfile
import threading
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch
from PIL import Image
from smoke_runs import call
from tiny import images, mixed_mask, tiny_host, tiny_swin

import msvit
from msvit_lab.cli.demo import trained_demo
from msvit_lab.config import Config, Model
from msvit_lab.runs import write_config
from msvit_lab.web import PageServer, runtime, write_page
from msvit_lab.web.model_files import prepared
from msvit_lab.web.page import PHOTOGRAPHS, STATIC, load_for_page
from msvit_lab.web.runtime import PACKAGE, VERSION, WASM, Runtime, find_runtime

SIZE = 64  # px of the tiny model's images: 4 x 4 cells of 16 px


@pytest.fixture(scope="module")
def model() -> msvit.MSViT:
    host = tiny_host(dtype=torch.float32, img_size=SIZE, patch_size=8, num_classes=5, depth=1)
    model = msvit.convert(host, 16, msvit.LearnedGate(coarse=16, grid=(4, 4))).eval()
    model.classes = ("ant", "bee", "cat", "dog", "elk")
    model.preprocessing = msvit.Preprocessing(SIZE, (0.5, 0.4, 0.3), (0.2, 0.25, 0.3), crop=0.9)
    return model


def package(folder: Path, name: str = PACKAGE) -> Path:
    """An unpacked runtime whose files are their own names."""
    (folder / "dist").mkdir(parents=True)
    (folder / "package.json").write_text(json.dumps({"name": name, "version": VERSION}))
    for file in WASM:
        (folder / "dist" / file).write_text(file)
    return folder


def archive(folder: Path, besides: dict[str, bytes] | None = None) -> Path:
    """package/ as npm packs it, with other files besides."""
    path = folder.with_suffix(".tgz")
    with tarfile.open(path, "w:gz") as file:
        file.add(folder, "package")
        for name, data in (besides or {}).items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            file.addfile(member, io.BytesIO(data))
    return path


def test_the_folder_has_every_file_that_the_page_names_and_they_compute_what_the_model_computes(model, tmp_path):
    page = write_page(tmp_path / "page", model, name="tiny", runtime=Runtime(package(tmp_path / "package")))
    text = (page / "index.html").read_text()
    named = set(re.findall(r'(?:src|href)="([^"]+)"', text))
    scripts = {path.name: path.read_text() for path in page.glob("*.js")}
    named |= {name for script in scripts.values() for name in re.findall(r'"(?:\./)([\w./-]+\.m?js)"', script)}
    assert {"page.js", "page.css", "cells.js", "resize.js", "runtime/ort.wasm.min.mjs"} <= named
    about = json.loads((page / "model" / "about.json").read_text())
    named |= {f"model/{file['name']}" for file in about["files"]} | {f"runtime/{name}" for name in WASM}
    named |= {f"examples/{example['file']}" for example in about["examples"]}
    assert not {name for name in named if not (page / name).is_file()}
    assert sorted(file["name"] for file in about["files"]) == ["dense.onnx", "gate.onnx", "trunk.onnx", "weights.bin"]
    assert all(example["alt"] and example["credit"] for example in about["examples"])
    assert {path.name for path in (STATIC / "examples").iterdir()} == {each.file for each in PHOTOGRAPHS}

    image, mask = images(1, SIZE, SIZE, torch.float32), mixed_mask(3, 4, 4)[2:] > 0.5
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    with torch.inference_mode():
        want = {
            "gate": ("scores", model.gate(image).logits - model.gate.threshold), "dense": ("logits", model.host(image)),
            "trunk": ("logits", model(image, mask=mask).logits),
        }  # fmt: skip
    for name, (output, value) in want.items():
        session = onnxruntime.InferenceSession(page / f"model/{name}.onnx", options, ["CPUExecutionProvider"])
        feed = {"images": image.numpy()} | ({"mask": mask.numpy()} if name == "trunk" else {})
        np.testing.assert_allclose(session.run([output], feed)[0], value, rtol=1e-4, atol=1e-5, err_msg=name)

    for num_fine in (0, 5, 16):
        mask = (torch.arange(16) < num_fine).view(1, 4, 4)
        assert about["tokens"][num_fine] == int(model(image, mask=mask).tokens.count)
        assert about["macs"][num_fine] == int(model.macs(image, mask)) + model.gate.num_macs(16)
    assert about["dense_macs"] == int(model.macs(image, torch.ones(1, 4, 4)))
    assert about.items() >= {
        "name": "vit_small_patch16_224 of tiny", "classes": list(model.classes or ()), "size": 64, "coarse": 16,
        "fine": 8, "rows": 4, "columns": 4, "predicts": True,
    }.items()  # fmt: skip


def test_nothing_that_is_written_by_hand_has_an_outside_address():
    files = [path for path in STATIC.iterdir() if path.is_file()]
    assert len(files) > 8
    for path in files:
        text = path.read_text().replace("http://www.w3.org/2000/svg", "")  # the name of a language, never fetched
        assert not re.findall(r"(?:\w+:)?//[\w-]+\.\w+|@import", text), path.name


def test_a_page_is_replaced_but_other_files_are_not(tmp_path: Path) -> None:
    (tmp_path / "photo.jpg").touch()
    with pytest.raises(ValueError, match="holds other files"):
        write_page(tmp_path, runtime=Runtime(tmp_path))
    (tmp_path / "photo.jpg").unlink()
    with pytest.raises(ValueError, match=r"has no package\.json"):  # the folder is empty: it was not that
        write_page(tmp_path, runtime=Runtime(tmp_path))
    assert not list(tmp_path.iterdir()), "nothing is half written"


def test_models_that_cannot_be_shown_are_named(tmp_path: Path, model: msvit.MSViT) -> None:
    swin = msvit.convert(tiny_swin(dtype=torch.float32), 16, msvit.DiscGate(coarse=16))
    with pytest.raises(ValueError, match="not a SwinTransformer"):
        prepared(swin)
    dense = model.with_options(gate=msvit.AllFine(coarse=16))
    msvit.save(dense, tmp_path / "dense")
    with pytest.raises(ValueError, match="has no gate that chooses cells"):
        load_for_page(tmp_path / "dense")
    with pytest.raises(ValueError, match="is no folder"):
        load_for_page(tmp_path / "nothing")


# The runtime


def test_only_files_of_known_names_leave_an_archive(tmp_path: Path) -> None:
    path = archive(package(tmp_path / "package"), {"../../evil.js": b"1", "package/dist/extra.js": b"2"})
    out = tmp_path / "a" / "b"
    Runtime(path).write(out)
    assert {file.name for file in out.iterdir()} == {*WASM, "NOTICE.txt"}
    assert (out / WASM[2]).read_text() == WASM[2]
    assert not list(tmp_path.rglob("evil.js"))


def test_a_wrong_runtime_is_named_with_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "text.tgz").write_text("no archive")
    linked = package(tmp_path / "linked")
    (linked / "dist" / WASM[0]).unlink()
    (linked / "dist" / WASM[0]).symlink_to("/etc/passwd")
    wrong = {
        "which does not exist": tmp_path / "nothing",
        "cannot be read as an archive": tmp_path / "text.tgz",
        "is the package 'left-pad'": package(tmp_path / "other", name="left-pad"),
        f"{WASM[0]} in .* is no plain file": archive(linked),
    }
    for message, path in wrong.items():
        with pytest.raises(ValueError, match=f"(?s){message}.*npm pack {PACKAGE}@{VERSION}"):
            find_runtime(path).write(tmp_path / "out")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(ValueError, match="there is no npm"):
        find_runtime()


def test_what_npm_fetches_is_kept_if_its_digest_is_right(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = archive(package(tmp_path / "package"))

    def npm(command: list[str], **options: object) -> None:
        shutil.copy(real, Path(command[command.index("--pack-destination") + 1]) / runtime.ARCHIVE)

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(shutil, "which", lambda name: name)
    monkeypatch.setattr(subprocess, "run", npm)
    with pytest.raises(ValueError, match="its SHA-512 is another"):
        find_runtime()
    assert not (tmp_path / "cache").exists()
    monkeypatch.setattr(runtime, "SHA512", runtime.digest(real))
    assert find_runtime().version() == VERSION
    monkeypatch.setattr(subprocess, "run", None)  # not called again
    assert find_runtime().version() == VERSION


# The server


@pytest.fixture
def server(tmp_path: Path) -> Iterator[PageServer]:
    folder = tmp_path / "page"
    (folder / "model").mkdir(parents=True)
    (folder / "index.html").write_text("page")
    (folder / "code.mjs").write_text("code")
    (tmp_path / "secret.txt").write_text("secret")
    (folder / "link.txt").symlink_to(tmp_path / "secret.txt")
    with PageServer(folder) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def ask(server: PageServer, path: str, method: str = "GET") -> tuple[int, dict[str, str], bytes]:
    connection = HTTPConnection(*server.server_address[:2], timeout=10)
    connection.request(method, path)
    answer = connection.getresponse()
    return answer.status, dict(answer.getheaders()), answer.read()


def test_the_server_isolates_the_page_so_that_it_may_have_threads(server: PageServer) -> None:
    assert server.server_address[0] == "127.0.0.1"
    for path, kind, body in (("/", "text/html", b"page"), ("/code.mjs", "text/javascript", b"code")):
        status, headers, found = ask(server, path)
        assert (status, found) == (200, body)
        assert headers["Content-type"].startswith(kind)
        assert headers["Cross-Origin-Opener-Policy"] == "same-origin"
        assert headers["Cross-Origin-Embedder-Policy"] == "require-corp"


def test_the_server_has_nothing_but_files_of_its_folder_and_only_reads(server: PageServer) -> None:
    hidden = ("/../secret.txt", "/%2e%2e/secret.txt", "/..%2fsecret.txt", "//secret.txt", "/link.txt", "/model/")
    for path in (*hidden, "/model"):
        status, _, body = ask(server, path)
        assert status == 404, path
        assert b"secret" not in body.replace(path.encode(), b""), path
    assert ask(server, "/", "POST")[0] == ask(server, "/new.txt", "PUT")[0] == 501


def test_a_folder_without_a_page_and_a_taken_port_are_named(tmp_path: Path, server: PageServer) -> None:
    with pytest.raises(ValueError, match=r"has no index\.html"):
        PageServer(tmp_path)
    with pytest.raises(OSError, match="choose another --port"):
        PageServer(tmp_path / "page", port=server.server_address[1])


# The commands


def test_the_demo_shows_the_best_run_with_a_gate(tmp_path: Path) -> None:
    assert trained_demo(tmp_path / "nothing") is None
    for name, gate, score, trained in (
        ("dense", "none", 0.9, True), ("disc", "disc", 0.9, True), ("worse", "learned", 0.5, True),
        ("better", "learned", 0.7, True), ("begun", "learned", 0.8, False),
    ):  # fmt: skip
        (tmp_path / name / "evaluations").mkdir(parents=True)
        write_config(tmp_path / name, Config(model=Model(gate=gate)), "scenes", ["a", "b"])
        (tmp_path / name / "evaluations" / "val.json").write_text(json.dumps({"task": "classify", "top1": score}))
        if trained:
            (tmp_path / name / "model").mkdir()
    assert trained_demo(tmp_path) == tmp_path / "better"


def test_the_demo_says_what_it_is_busy_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = call("demo", "--runtime", "nothing")
    said = ["there is no trained run in runs/demo", "loading torch", "looking for onnxruntime-web"]
    assert [line.startswith(words) for line, words in zip(result.stderr.splitlines(), said, strict=False)] == [True] * 3
    assert "nothing" in result.stderr.splitlines()[3], "it ends with the error"
    monkeypatch.setattr("msvit_lab.web.find_runtime", lambda given: None)
    monkeypatch.setattr("msvit_lab.web.write_page", lambda folder, runtime: folder)
    monkeypatch.setattr("msvit_lab.web.PageServer.serve_forever", lambda server: None)
    result = call("demo", "--folder", "page", "--port", 0)
    assert result.stderr.splitlines()[3].startswith("writing the gate as ONNX files")


# Pixels

CASES = (
    ((64, 48), 32, "bicubic", 0.9, "center"),
    ((81, 37), 32, "bilinear", 1.0, "center"),
    ((60, 41), 24, "bicubic", 0.875, "squash"),
    ((20, 16), 32, "bicubic", 0.95, "center"),  # enlarged
    ((32, 32), 32, "bilinear", 1.0, "center"),
)
SCRIPT = """
import fs from "node:fs";
import { normalise, resize, shownBox } from "RESIZE";
const cases = JSON.parse(fs.readFileSync(0));
console.log(JSON.stringify(cases.map(({ pixels, width, height, about }) => {
  const box = shownBox(about, width, height);
  const square = resize(Uint8Array.from(pixels), width, height, box, about.size, about.interpolation);
  return Array.from(normalise(square, about));
})));
"""


@pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")
def test_javascript_prepares_images_to_the_bit_as_python_does(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    given, want = [], []
    for (width, height), size, interpolation, crop, mode in CASES:
        image = Image.fromarray(rng.integers(0, 256, (height, width, 3), np.uint8))
        prepare = msvit.Preprocessing(size, (0.485, 0.456, 0.406), (0.229, 0.224, 0.225), interpolation, crop, mode)
        about = {"size": size, "mean": prepare.mean, "std": prepare.std, "crop": crop, "crop_mode": mode}
        pixels = np.array(image.convert("RGBA")).flatten().tolist()
        about["interpolation"] = interpolation
        given.append({"pixels": pixels, "width": width, "height": height, "about": about})
        want.append(prepare(image).flatten().numpy())
    script = tmp_path / "prepare.mjs"
    script.write_text(SCRIPT.replace("RESIZE", (STATIC / "resize.js").as_uri()))
    run = subprocess.run(["node", script], input=json.dumps(given), capture_output=True, text=True, check=True)
    for got, wanted in zip(json.loads(run.stdout), want, strict=True):
        np.testing.assert_array_equal(np.array(got, np.float32), wanted)
