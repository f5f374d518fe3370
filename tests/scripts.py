"""The scripts of benchmarks/, as modules."""

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]


def run_script(script: Any, patch: pytest.MonkeyPatch, *words: object) -> None:
    """As `python benchmarks/NAME.py ...` does."""
    patch.setattr(sys, "argv", [f"benchmarks/{script.__name__}.py", *map(str, words)])
    script.main()


def load_script(name: str) -> Any:
    spec = spec_from_file_location(name, ROOT / f"benchmarks/{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "benchmarks")  # scripts use each other
        spec.loader.exec_module(module)
    return module
