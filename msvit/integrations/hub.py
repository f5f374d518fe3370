"""Converted timm models on the Hugging Face hub: `msvit.save` and `msvit.load` behind the calls of `huggingface_hub`.

    model.save_pretrained("folder")                      # what msvit.save writes, config.json and a model card
    model = MSViT.from_pretrained("folder")              # or "owner/name" of the hub
    model.push_to_hub("owner/name", model_card_kwargs={"license": "mit", "results": {"top-1 at night": 0.81}})

The card of a trained model, `msvit.load("runs/photos")`, has what its run measured: see `model_card.py`.
Of a repository only `model.safetensors` and `config.json` are fetched, and none of its code runs.
"""

import json
from pathlib import Path
from typing import Any, Self

from huggingface_hub import ModelCard, ModelHubMixin, snapshot_download
from torch import nn

FILES = ["model.safetensors"]  # of a repository, what is read
USAGE = """import msvit, torch

model = msvit.{kind}.from_pretrained("{name}")  # the repository, or a local folder
out = model(torch.randn{shape})  # normalised as for the host
out.logits, out.gate.mask, out.tokens.count  # mask: 1 = fine"""


class HubModel(ModelHubMixin):
    """Base class with the calls of the hub, for a model that `msvit.save` writes."""

    _hub_mixin_config = {}  # noqa: RUF012 - not None: the arguments of the constructor are not recorded

    def _save_pretrained(self, save_directory: Path) -> None:
        import msvit

        model: Any = self
        msvit.save(model, save_directory)
        config = {"architecture": model.host_name, "num_classes": model.num_classes}  # the weights have the rest
        (save_directory / "config.json").write_text(json.dumps(config, indent=2))

    @classmethod
    def _from_pretrained(
        cls, *, model_id: str, revision: str | None, cache_dir: str | Path | None, force_download: bool,
        local_files_only: bool, token: str | bool | None, host: nn.Module | None = None, **model_kwargs: Any,
    ) -> Self:  # fmt: skip
        """Load a folder or repository; `host` as for `msvit.load`."""
        import msvit

        if {"gate", "coarse"} <= model_kwargs.keys():  # of its config.json
            raise ValueError(
                f"{model_id} holds a transformers model; load it with transformers' AutoModel or "
                f"AutoModelForImageClassification, or a folder with msvit.load"
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
        """Return the README of a repository. `results`: more figures; `data`: its metadata, such as `license`."""
        from msvit.host_settings import native_size
        from msvit.integrations.model_card import TAGS, model_card

        model: Any = self
        segments = hasattr(model, "decoder")
        shape = (1, model.backbone.in_chans, *native_size(model))
        usage = USAGE.format(kind="Segmenter" if segments else "MSViT", name=name, shape=shape)
        data = {"pipeline_tag": f"image-{'segmentation' if segments else 'classification'}", **data}
        return model_card(model, usage, results, library_name="msvit", tags=[*TAGS, "timm"], **data)

    def push_to_hub(self, repo_id: str, *, model_card_kwargs: dict[str, Any] | None = None, **options: Any) -> str:
        """Write the model and its card into a repository of the hub; `options` as in `huggingface_hub`."""
        return super().push_to_hub(repo_id, model_card_kwargs={"name": repo_id, **(model_card_kwargs or {})}, **options)
