"""The folder of the page: its static files, the runtime, a model in ONNX, and example pictures.

    DIR/index.html, *.js, page.css     # as they are in static/
    DIR/runtime/                       # onnxruntime-web
    DIR/model/about.json               # size, normalisation, cells, classes, tokens and multiply-adds by fine cells
    DIR/model/gate.onnx                # and, of a trained model, trunk.onnx and dense.onnx
    DIR/model/weights.bin              # weights of trunk and dense, those that are equal once
    DIR/examples/
"""

import json
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from PIL import Image

from msvit.gates import AllCoarse, AllFine
from msvit.model import MSViT
from msvit.saving.file import writing_beside
from msvit_lab.data.scenes import Scenes
from msvit_lab.hosts import read_model
from msvit_lab.web.model_files import write_model
from msvit_lab.web.runtime import Runtime, find_runtime

STATIC = Path(__file__).parent / "static"
NUM_SCENES = 8


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
    model, _ = read_model(run)
    if not isinstance(model, MSViT) or not model.num_classes:
        raise ValueError(f"{run} holds a {type(model).__name__} without classes of whole images; give a classifier")
    if isinstance(model.gate, AllFine | AllCoarse):
        raise ValueError(f"{run} has no gate that chooses cells, so there are none to show; give a model that has one")
    return model


def write_page(
    folder: Path, model: MSViT | None = None, *, name: str | None = None, runtime: Runtime | None = None,
    scenes: bool = False,
) -> Path:  # fmt: skip
    """Write the page of a model, or of the default gate alone, into a folder, and return the folder.

    `name`: of the run. `scenes`: examples are made-up scenes, for a model trained on them. The folder must be new,
    empty, or such a page, which is then replaced.
    """
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file, but the page is a folder; choose another name")
    if folder.exists() and any(folder.iterdir()) and not (folder / "model" / "about.json").is_file():
        raise ValueError(f"{folder} holds other files, which the page would replace; choose a new folder")
    runtime = find_runtime() if runtime is None else runtime
    folder.parent.mkdir(parents=True, exist_ok=True)
    with writing_beside(folder) as (beside, _):
        page = beside / "page"
        shutil.copytree(STATIC, page, ignore=shutil.ignore_patterns("examples"))
        runtime.write(page / "runtime")
        examples = write_scenes(page / "examples") if scenes else PHOTOGRAPHS
        if not scenes:
            shutil.copytree(STATIC / "examples", page / "examples")
        about = write_model(page / "model", model)
        about |= {"examples": [asdict(example) for example in examples]}
        about |= {} if name is None else {"name": f"{about['name']} of {name}"}
        (page / "model" / "about.json").write_text(json.dumps(about), encoding="utf-8")
        if folder.exists():
            shutil.rmtree(folder)
        page.rename(folder)
    return folder


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
