"""msvit info: models and gates in numbers."""

import pytest
from typer.testing import CliRunner

from msvit_lab.cli import app


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("vit_small_patch16_224 --coarse 32", ("49", "196", "4.599", "0.0170", "22.05 M")),  # all coarse to all fine
        ("default", ("ContextGate", "cells of 32 px", "0.24 M parameters", "0.0148 GMACs for 224 px (49 cells)")),
        ("disc --coarse 16 --size 64", ("DiscGate", "cells of 16 px", "(16 cells)", "share 0.3")),
    ],
)
def test_info_shows_tokens_and_costs(arguments: str, words: tuple[str, ...]) -> None:
    result = CliRunner().invoke(app, ["info", *arguments.split()])
    assert result.exit_code == 0, result.output
    assert all(word in result.stdout for word in words), result.stdout
