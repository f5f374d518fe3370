"""The page in a headless Chromium: a photograph dropped, the slider moved, a cell painted; errors; ten predictions.

    pip install 'msvit[browser]'; npm pack onnxruntime-web@1.30.0 --pack-destination ~/.cache/msvit
    pytest -m slow tests/lab/test_web_browser.py
"""

import base64
import io
import json
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image, ImageOps
from tiny import tiny_host

import msvit
from msvit_lab.web import PageServer, write_page
from msvit_lab.web.page import STATIC
from msvit_lab.web.runtime import ARCHIVE, Runtime, cache_folder

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
RUNTIME = cache_folder() / ARCHIVE
playwright = pytest.importorskip("playwright.sync_api", reason="not installed: pip install 'msvit[browser]'")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed"),
    pytest.mark.skipif(not RUNTIME.is_file(), reason=f"{RUNTIME} is missing: npm pack onnxruntime-web@1.30.0"),
]
SIZE, NUM = 128, 64  # px; cells, 8 x 8 of 16 px
FLAGS = ("--no-sandbox", "--use-fake-device-for-media-stream")
SECONDS = 90_000  # ms


@pytest.fixture(scope="module")
def model() -> msvit.MSViT:
    """Random weights, a trained gate; logits far enough apart that a wrong pixel would be seen."""
    host = tiny_host(dtype=torch.float32, img_size=SIZE, patch_size=8, embed_dim=64, num_classes=6)
    host.head.weight.data *= 3
    model = msvit.convert(host, 16, "default").eval()
    model.classes = ("ant", "bee", "cat", "dog", "elk", "fox <b>")
    model.preprocessing = msvit.Preprocessing(SIZE, (0.485, 0.456, 0.406), (0.229, 0.224, 0.225), crop=0.9)
    return model


@pytest.fixture(scope="module")
def folder(model: msvit.MSViT, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_page(tmp_path_factory.mktemp("web") / "page", model, name="tiny", runtime=Runtime(RUNTIME))


@contextmanager
def serving(folder: Path) -> Iterator[str]:
    with PageServer(folder) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server.address
        server.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def address(folder: Path) -> Iterator[str]:
    with serving(folder) as address:
        yield address


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as running:
        browser = running.chromium.launch(executable_path=CHROMIUM, args=list(FLAGS))
        yield browser
        browser.close()


class Visit:
    """One page, opened; what it asked for and what it complained of."""

    def __init__(self, browser: Any, address: str, script: str = "", **options: Any) -> None:
        self.context = browser.new_context(**options)
        self.page = self.context.new_page()
        self.page.set_default_timeout(SECONDS)
        self.address, self.requests, self.complaints = address, [], []
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.on("console", lambda message: self.complaints.append(message.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        if script:
            self.page.add_init_script(script)
        self.page.goto(address)

    def __enter__(self) -> "Visit":
        return self

    def __exit__(self, *error: object) -> None:
        self.context.close()

    def settle(self) -> None:
        """Until everything asked for is computed and the sentence has been written."""
        self.page.wait_for_selector("html[data-state=idle]", state="attached")

    def value(self, id: str) -> float:
        return float(self.page.locator(f"#{id} data").get_attribute("value"))

    def top(self, id: str) -> dict[str, float]:
        items = self.page.locator(f"#{id} li").all()
        return {i.locator("span").inner_text(): float(i.locator("data").get_attribute("value")) for i in items}

    def drop(self, data: bytes, name: str, kind: str = "image/jpeg") -> None:
        """As the desktop does it."""
        self.page.evaluate(
            """([text, name, type]) => {
                const bytes = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
                const dataTransfer = new DataTransfer();
                dataTransfer.items.add(new File([bytes], name, { type }));
                const target = document.getElementById("frame");
                for (const kind of ["dragenter", "dragover", "drop"]) {
                    target.dispatchEvent(new DragEvent(kind, { dataTransfer, bubbles: true, cancelable: true }));
                }
            }""",
            [base64.b64encode(data).decode(), name, kind],
        )

    def costs(self) -> tuple[float, ...]:
        return tuple(self.value(name) for name in ("tokens", "macs", "denseTokens", "denseMacs"))


def photographs() -> list[Image.Image]:
    """Ten: the examples, and parts of them turned, mirrored and of other sizes."""
    found = [Image.open(path).convert("RGB") for path in sorted((STATIC / "examples").glob("*.jpg"))]
    changed = [ImageOps.mirror(image).crop((40, 20, 300, 280)) for image in found]
    tall = found[1].rotate(90, expand=True)
    return [*found, *changed, tall, found[0].resize((97, 75))]


def jpeg(image: Image.Image) -> bytes:
    file = io.BytesIO()
    image.save(file, format="JPEG", quality=92)
    return file.getvalue()


@pytest.mark.parametrize("width", [390, 1440])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_follows_a_visitor(browser: Any, address: str, folder: Path, width: int, scheme: str) -> None:
    about = json.loads((folder / "model" / "about.json").read_text())
    with Visit(browser, address, viewport={"width": width, "height": 900}, color_scheme=scheme) as visit:
        page = visit.page
        visit.settle()
        first = visit.costs(), visit.top("denseTop")
        assert "of 256 tokens" in page.inner_text("#summary")
        dark = page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(18, 22, 29)"
        assert dark == (scheme == "dark")
        assert page.evaluate("document.documentElement.scrollWidth") <= width, "nothing beside the screen"
        assert page.evaluate("crossOriginIsolated"), "threads are allowed"

        visit.drop(jpeg(photographs()[5]), "mine.jpg")
        visit.settle()
        assert visit.top("denseTop") != first[1]
        assert "your photograph mine.jpg" in page.get_attribute("#cells", "aria-label")
        own = int(page.input_value("#budget"))
        assert visit.costs() == (about["tokens"][own], about["macs"][own], 256, about["dense_macs"])
        assert visit.value("ms") > 0
        assert visit.value("denseMs") > 0
        before = visit.top("mixedTop")

        page.focus("#budget")
        for _ in range(7):
            page.keyboard.press("ArrowRight")
        visit.settle()
        assert visit.costs()[:2] == (about["tokens"][own + 7], about["macs"][own + 7])
        assert f"{own + 7} of {NUM} cells fine" in page.inner_text("#budgetText")
        assert visit.top("mixedTop") != before

        page.click("#paint")
        label = page.get_attribute("#cells", "aria-label")
        box = page.locator("#cells").bounding_box()
        page.locator("#cells").click(position={"x": box["width"] * 0.5 / 8, "y": box["height"] * 0.5 / 8})  # the first
        visit.settle()
        assert page.get_attribute("#cells", "aria-label") != label
        assert abs(visit.value("tokens") - about["tokens"][own + 7]) == 3
        page.focus("#cells")
        page.keyboard.press("Space")  # and back, by the keys
        visit.settle()
        assert visit.value("tokens") == about["tokens"][own + 7]

        page.click("#reset")
        visit.settle()
        assert visit.costs()[0] == about["tokens"][own]
        assert visit.top("mixedTop") == pytest.approx(before)

        page.fill("#budget", str(NUM))  # with every cell fine it is the dense model
        visit.settle()
        assert visit.top("mixedTop") == pytest.approx(visit.top("denseTop"), abs=1e-4)
        assert all(url.startswith((address, "blob:", "data:")) for url in visit.requests), visit.requests
        assert not visit.complaints


def test_ten_photographs_are_predicted_as_in_python(browser: Any, address: str, model: msvit.MSViT) -> None:
    images = photographs()
    assert len(images) == 10
    with Visit(browser, address) as visit:
        visit.settle()
        tops = set()
        for number, image in enumerate(images):
            data = jpeg(image)
            visit.drop(data, f"{number}.jpg")
            visit.settle()
            (want,) = model.predict(Image.open(io.BytesIO(data)), top=3)
            assert visit.top("mixedTop") == pytest.approx(dict(want.top), abs=1e-3), number
            assert visit.value("tokens") == want.tokens
            with torch.inference_mode():
                dense = model.host(model.preprocessing(Image.open(io.BytesIO(data)))[None]).softmax(1)[0]
            found = visit.top("denseTop")
            assert found == pytest.approx({name: dense[model.classes.index(name)].item() for name in found}, abs=1e-3)
            tops.add(tuple(found))
        assert len(tops) > 1, "they differ"
        assert not visit.complaints


def test_errors_are_sentences_and_the_next_photograph_removes_them(browser: Any, address: str) -> None:
    with Visit(browser, address) as visit:
        visit.settle()
        for data, name, kind, words in (
            (b"%PDF-1.4", "paper.pdf", "application/pdf", "“paper.pdf” is no image but application/pdf"),
            (b"no pixels", "broken.jpg", "image/jpeg", "“broken.jpg” cannot be read as an image"),
        ):
            visit.drop(data, name, kind)
            visit.page.wait_for_selector("#error:not([hidden])")
            assert words in visit.page.inner_text("#error")
        visit.page.click("#camera")  # not allowed here
        visit.page.wait_for_selector("#error:has-text('camera was not allowed')")
        visit.drop(jpeg(photographs()[0]), "cat.jpg")
        visit.settle()
        assert visit.page.is_hidden("#error")


@pytest.mark.parametrize(
    ("script", "missing", "words"),
    [
        ("Object.defineProperty(window, 'WebAssembly', { value: undefined });", None, "no WebAssembly"),
        ("", "model/about.json", "model/about.json is missing"),
        ("", "model/trunk.onnx", "model/trunk.onnx is missing"),
        ("", "runtime/ort.wasm.min.mjs", "runtime/ort.wasm.min.mjs is missing"),
    ],
)
def test_what_the_page_lacks_is_said(
    browser: Any, folder: Path, tmp_path: Path, script: str, missing: str | None, words: str
) -> None:
    copy = shutil.copytree(folder, tmp_path / "page")
    if missing:
        (copy / missing).unlink()
    with serving(copy) as address, Visit(browser, address, script) as visit:
        visit.page.wait_for_selector("#error:not([hidden])")
        assert words in visit.page.inner_text("#error")


def test_once_loaded_it_needs_no_server(browser: Any, folder: Path) -> None:
    with serving(folder) as address:
        visit = Visit(browser, address)
        visit.settle()
    with visit:  # the server is gone
        visit.drop(jpeg(photographs()[2]), "coffee.jpg")
        visit.settle()
        assert "coffee.jpg" in visit.page.get_attribute("#cells", "aria-label")
        assert visit.page.is_hidden("#error")
