"""Importing does nothing, and the library and the command need no more packages than they say."""

import re
import subprocess
import sys
import tomllib
from collections import Counter
from pathlib import Path
from types import FrameType

import pytest
import torch
from tiny import images, tiny_model

import msvit
from msvit_lab.__main__ import PACKAGES

ROOT = Path(__file__).parents[2]


def test_import_is_cheap_and_silent_and_waits_for_transformers() -> None:
    code = "import sys, msvit; print([name for name in ('torch', 'timm', 'scipy', 'typer') if name in sys.modules], "
    code += "type(sys.meta_path[0]).__module__)"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert (done.stdout.strip(), done.stderr) == ("[] msvit.integrations.auto_classes", "")


def test_a_warm_forward_makes_few_calls() -> None:
    """Arguments are checked where they come in, and not again in every part."""
    model, image, calls = tiny_model(gate="default").eval(), images(), Counter[str]()
    library = str(Path(msvit.__file__).parent)

    def count(frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(library):
            calls[frame.f_code.co_qualname] += 1

    with torch.inference_mode():
        model(image)
        sys.setprofile(count)
        try:
            model(image)
        finally:
            sys.setprofile(None)
    assert sum(calls.values()) <= 150, calls.most_common(20)


# In a process that cannot import what only the command needs. (torch and huggingface_hub bring filelock and jinja2.)
WITHOUT_LAB = f"import sys; sys.modules.update(dict.fromkeys({sorted({*PACKAGES} - {'filelock', 'jinja2'})}))\n"


def test_the_library_depends_on_four_packages_and_the_command_on_those_of_lab() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

    def names(requirements: list[str]) -> list[str]:
        return sorted(re.split(r"[<>=]", requirement)[0] for requirement in requirements)

    assert names(project["dependencies"]) == ["huggingface_hub", "safetensors", "timm", "torch"]
    assert names(project["optional-dependencies"]["lab"]) == PACKAGES
    assert "msvit[lab" in project["optional-dependencies"]["dev"][0]  # what make installs


def test_the_library_works_without_optional_packages_and_loads_the_modules_it_needs(tmp_path: Path) -> None:
    code = WITHOUT_LAB + """
sys.modules.update(dict.fromkeys(('scipy', 'transformers', 'peft', 'onnx', 'onnxscript', 'onnxruntime')))
import msvit.model
assert sum(name.split(".")[0] == "msvit" for name in sys.modules) <= 45
import msvit.fast, msvit
import pkgutil, timm, torch
vit = timm.create_model("vit_tiny_patch16_224", img_size=64, embed_dim=32, depth=2, num_heads=2, num_classes=5).eval()
model = msvit.convert(vit, gate=msvit.load_gate("default")).eval()
images = torch.rand(2, 3, 64, 64)
model(images)
unused = "kernels.", "swin.", "transformers_", "prediction", "model_card", "export_layout"
assert not [name for name in sys.modules if name.startswith("msvit.") and any(part in name for part in unused)]
for module in pkgutil.walk_packages(msvit.__path__, "msvit."):
    if module.name != "msvit.integrations.transformers":
        __import__(module.name)
msvit.save(model, sys.argv[1])
loaded = msvit.load(sys.argv[1]).eval()
with torch.inference_mode():
    torch.testing.assert_close(loaded(images).logits, model(images).logits)
    torch.testing.assert_close(msvit.compile(loaded)(images).logits, model(images).logits)
"""
    done = subprocess.run([sys.executable, "-c", code, tmp_path / "model"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("arguments", [[], ["train", "scenes"], ["--version"]])
def test_the_command_without_its_packages_names_the_line_that_installs_them(arguments: list[str]) -> None:
    code = WITHOUT_LAB + f"sys.argv[1:] = {arguments}; import runpy; runpy.run_module('msvit', run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    said = "the command msvit needs accelerate, jaxtyping, matplotlib, pydantic, rich, torchmetrics, typer; "
    assert (done.returncode, done.stdout, done.stderr) == (1, "", said + "pip install 'msvit[lab]'\n")
