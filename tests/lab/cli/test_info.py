from typer.testing import CliRunner

from msvit.lab.cli import app


def test_info_shows_tokens_and_cost_from_all_coarse_to_all_fine() -> None:
    result = CliRunner().invoke(app, ["info", "vit_small_patch16_224", "--coarse", "32"])
    assert result.exit_code == 0
    for number in ("49", "196", "4.599", "0.0170", "22.05 M"):
        assert number in result.stdout


def test_info_refuses_what_it_cannot_convert() -> None:
    for arguments, words in [
        (["resnet18"], "convolutional stem"),
        (["vit_smal_patch16_224"], "vit_small_patch16_224"),
        (["vit_small_patch16_224", "--coarse", "24"], "coarse=32"),
        (["vit_small_patch16_224", "--size", "100"], "100x100"),
    ]:
        result = CliRunner().invoke(app, ["info", *arguments], terminal_width=400)
        assert result.exit_code == 2
        assert words in result.output


def test_info_describes_gates_by_name() -> None:
    for arguments, words in [
        (["default"], ("ContextGate", "cells of 32 px", "0.24 M parameters", "0.0148 GMACs for 224 px (49 cells)")),
        (["disc", "--coarse", "16", "--size", "64"], ("DiscGate", "cells of 16 px", "(16 cells)", "share 0.3")),
    ]:
        result = CliRunner().invoke(app, ["info", *arguments])
        assert result.exit_code == 0, result.output
        assert all(word in result.stdout for word in words), result.stdout
    result = CliRunner().invoke(app, ["info", "default", "--size", "100"])
    assert result.exit_code == 2
