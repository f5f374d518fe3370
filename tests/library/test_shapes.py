"""The shapes and types in signatures are true."""

import os
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]


def test_what_is_passed_and_returned_has_the_annotated_shapes_and_types() -> None:
    environment = {**os.environ, "PYTHONPATH": f"{TESTS.parent}{os.pathsep}{TESTS}", "PYTHONWARNINGS": "ignore"}
    script = [sys.executable, str(TESTS / "check_shapes.py")]
    done = subprocess.run(script, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
