"""The Hugging Face hub for converted timm models: `msvit.save` and `msvit.load` behind the calls of `huggingface_hub`.

    model.save_pretrained("folder")                      # what msvit.save writes, config.json and a model card
    model = MSViT.from_pretrained("folder")              # or "owner/name" of the hub
    model.push_to_hub("owner/name", model_card_kwargs={"results": {"top-1": 0.81}})

Of a repository only the two files of `msvit.save` are fetched, and none of its code runs.
"""

import json
from pathlib import Path
from typing import Any, Self

from huggingface_hub import ModelCard, ModelCardData, ModelHubMixin, snapshot_download
from torch import nn

FILES = ["model.safetensors", "msvit.json"]  # of a repository, those that are read
PAPER = "https://arxiv.org/abs/2307.02321"
TAGS = ["msvit", "vision-transformer", "token-reduction"]
CARD = """---
{{ card_data }}
---

# {{ title }}

A Vision Transformer with tokens of mixed scale ([MSViT]({{ paper }})): a gate chooses, for each cell of the image,
between one coarse token and several fine ones.

```python
{{ usage }}
```

| | |
| --- | --- |
{%- for name, value in facts.items() %}
| {{ name }} | {{ value }} |
{%- endfor %}
{%- if results %}

## Results

| metric | value |
| --- | --- |
{%- for name, value in results.items() %}
| {{ name }} | {{ value }} |
{%- endfor %}
{%- endif %}
"""
USAGE = """import msvit, torch

model = msvit.{kind}.from_pretrained("{name}")  # the repository, or a local folder
out = model(torch.randn{shape})  # normalised as for the host
out.logits, out.gate.mask, out.tokens.count  # mask: 1 = fine"""


class HubModel(ModelHubMixin):
    """The calls of the hub, for a model that `msvit.save` writes."""

    _hub_mixin_config = {}  # noqa: RUF012 - not None: the arguments of the constructor are not recorded

    def _save_pretrained(self, save_directory: Path) -> None:
        import msvit

        model: Any = self
        msvit.save(model, save_directory)
        about = {"architecture": host_name(model), "num_classes": model.num_classes}  # msvit.json has the rest
        (save_directory / "config.json").write_text(json.dumps(about, indent=2))

    @classmethod
    def _from_pretrained(
        cls, *, model_id: str, revision: str | None, cache_dir: str | Path | None, force_download: bool,
        local_files_only: bool, token: str | bool | None, host: nn.Module | None = None, **model_kwargs: Any,
    ) -> Self:  # fmt: skip
        """`host`: as for `msvit.load`."""
        import msvit

        if {"gate", "coarse"} <= model_kwargs.keys():  # of its config.json
            raise ValueError(
                f"{model_id} holds a transformers model; load it with transformers' AutoModel or "
                f"AutoModelForImageClassification, once msvit.transformers_models is imported"
            )
        if model_kwargs:
            raise ValueError(f"from_pretrained has no option {', '.join(model_kwargs)}; use model.with_options")
        folder = model_id
        if not Path(model_id).is_dir():
            folder = snapshot_download(
                model_id, revision=revision, cache_dir=cache_dir, force_download=force_download,
                local_files_only=local_files_only, token=token, allow_patterns=FILES,
            )  # fmt: skip
        model = msvit.load(folder, host=host)
        if not isinstance(model, cls):
            kind = type(model).__name__
            raise ValueError(f"{model_id} holds a {kind}, not a {cls.__name__}; use msvit.{kind}.from_pretrained")
        return model

    def generate_model_card(
        self, name: str = "owner/name", results: dict[str, Any] | None = None, **data: Any
    ) -> ModelCard:
        """The README of a repository. `results`: a table of metrics; `data`: its metadata, such as `license`."""
        model: Any = self
        segments = hasattr(model, "decoder")
        usage = USAGE.format(kind="Segmenter" if segments else "MSViT", name=name, shape=_image_shape(model))
        data = {"pipeline_tag": f"image-{'segmentation' if segments else 'classification'}", **data}
        return model_card(model, usage, results, library_name="msvit", tags=[*TAGS, "timm"], **data)

    def push_to_hub(self, repo_id: str, *, model_card_kwargs: dict[str, Any] | None = None, **options: Any) -> str:
        """Write the model and its card into a repository of the hub; `options` as in `huggingface_hub`."""
        return super().push_to_hub(repo_id, model_card_kwargs={"name": repo_id, **(model_card_kwargs or {})}, **options)


def model_card(model: Any, usage: str, results: dict[str, Any] | None = None, **data: Any) -> ModelCard:
    """The card of a converted model: how it is loaded, what it is, and `results`, a table of metrics."""
    if results is not None and not isinstance(results, dict):
        raise ValueError(f"results is a {type(results).__name__}, but must be a dict such as {{'top-1': 0.8}}")
    return ModelCard.from_template(
        ModelCardData(**data), template_str=CARD, title=f"MSViT of {host_name(model)}", paper=PAPER, usage=usage,
        facts=_facts(model), results=results,
    )  # fmt: skip


def _facts(model: Any) -> dict[str, Any]:
    height, width = native_size(model)
    gate = f"{type(model.gate).__name__}({model.gate.extra_repr()})"
    facts = {
        "host": host_name(model),
        "fine patches": f"{model.fine} px",
        "coarse cells": f"{model.coarse} px",
        "images": f"{height}x{width} px; other multiples of {model.coarse} px will do",
        "gate": gate,
        "mode": model.mode,
        "reducer": model.reducer,
        "classes": model.num_classes,
    }
    return {name: value for name, value in facts.items() if value is not None}


def host_name(model: Any) -> str:
    """The architecture of the host as timm calls it, or its class."""
    return model.pretrained_cfg.get("architecture") or getattr(model.host, "kind", type(model.host).__name__)


def _image_shape(model: Any) -> tuple[int, ...]:
    return 1, model.backbone.in_chans, *native_size(model)


def native_size(model: Any) -> tuple[int, int]:
    """The size of images that the host was built for, in px."""
    rows, columns = model.backbone.native_patches
    return rows * model.fine, columns * model.fine
