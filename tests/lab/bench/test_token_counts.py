"""Time against the number of tokens: the blocks alone, and the whole model."""

import json

import pytest
import torch
from click.testing import Result
from PIL import Image
from typer.testing import CliRunner

from msvit_lab.bench.token_counts import make_vit, record_blocks, run_blocks
from msvit_lab.cli import app

TINY = {f"model.options.{name}": value for name, value in (("embed_dim", "32"), ("depth", "2"), ("num_heads", "2"))}
def bench(*arguments: object) -> Result:
    settings = [part for setting in TINY.items() for part in ("--set", "=".join(setting))]
    command = ["bench", "--tokens", "6,9", "--model", "vit_tiny_patch16_224", "--rounds", "4", "--device", "cpu"]
    return CliRunner().invoke(app, [*command, *settings, *map(str, arguments)], terminal_width=300)


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "vit_base_patch16_rope_mixed_224", "eva02_tiny_patch14_224"])
@torch.inference_mode()
def test_blocks_get_as_many_tokens_as_asked_for_and_compute_what_the_model_does(name: str) -> None:
    host = make_vit(name, 6, TINY).eval()
    assert host.patch_embed.grid_size == (2, 3)
    image = torch.randn(2, 3, *host.patch_embed.img_size)
    x, blocks = record_blocks(host, image)
    assert x.shape == (2, 6 + host.num_prefix_tokens, 32)
    assert [call.block for call in blocks] == list(host.blocks)
    seen: list[torch.Tensor] = []
    hook = host.blocks[-1].register_forward_hook(lambda _, __, found: seen.append(found))
    host(image)
    hook.remove()
    torch.testing.assert_close(run_blocks(blocks, x, image), seen[0])
    assert not any(block._forward_pre_hooks for block in host.blocks)


def test_msvit_bench_tokens_prints_a_table_and_writes_results_and_a_plot(tmp_path) -> None:
    result = bench("--out", tmp_path / "new/found.json", "--plot", tmp_path / "new/plot.png")
    assert result.exit_code == 0, result.output
    assert "blocks only" in result.output
    (found,) = json.loads((tmp_path / "new/found.json").read_text())["workloads"]
    assert found["asked"]["tokens"] == [6, 9]
    assert found["record"]["command"].startswith("msvit")
    assert all(row["ms"]["median"] > 0 for row in found["rows"])
    with Image.open(tmp_path / "new/plot.png") as plot:
        assert plot.width > plot.height
    assert json.loads(bench("--batch", 2, "--json").stdout)["batch"] == 2
