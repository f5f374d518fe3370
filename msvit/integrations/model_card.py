"""The model card of a converted model: what it is, how it is loaded and, of a trained one, what its run measured.

    card = model_card(model, usage, library_name="msvit", pipeline_tag="image-classification")
    card.data.eval_results                # the `model-index` of the hub, where the model has a run record
    card.save("README.md")

Figures come from `model.run_record`. A section without figures is left out.
"""

import re
from typing import Any

import timm
from huggingface_hub import EvalResult, ModelCard, ModelCardData

from msvit.host_settings import native_size
from msvit.run_record import Measured, RunRecord

PAPER = "https://arxiv.org/abs/2307.02321"
TAGS = ["msvit", "vision-transformer", "token-reduction"]
METRICS = {  # of the hub, by the names of scores
    "top-1": ("accuracy", "Accuracy"),
    "top-5": ("accuracy", "Top-5 accuracy"),
    "mIoU": ("mean_iou", "Mean IoU"),
    "pixel accuracy": ("accuracy", "Pixel accuracy"),
    "mean class accuracy": ("accuracy", "Mean class accuracy"),
}
CARD = """{% macro rows(values) %}{% for name, value in values.items() %}
| {{ name }} | {{ value }} |
{%- endfor %}{% endmacro %}---
{{ card_data }}
---

# {{ title }}

A Vision Transformer with tokens of mixed scale ([MSViT]({{ paper }})): a gate chooses, for each cell of the image,
between one coarse token and several fine ones.

```python
{{ usage }}
```

| | |
| --- | --- |{{ rows(facts) }}
{%- if results or measured %}

## Results
{%- endif %}
{%- if measured %}

{{ measured.sentence }}

| {{ measured.titles | join(" | ") }} |
|{{ " --- |" * (measured.titles | length) }}
{%- for row in measured.rows %}
| {{ row | join(" | ") }} |
{%- endfor %}
{%- endif %}
{%- if results %}

| metric | value |
| --- | --- |{{ rows(results) }}
{%- endif %}
{%- if training %}

## Training

| | |
| --- | --- |{{ rows(training) }}
{%- endif %}
{%- if limits %}

## Limits
{% for limit in limits %}
- {{ limit }}
{%- endfor %}
{%- endif %}
"""


def model_card(model: Any, usage: str, results: dict[str, Any] | None = None, **data: Any) -> ModelCard:
    """Return the card of a converted model. `results`: more figures for its table; `data`: metadata, as `license`."""
    if results is not None and not isinstance(results, dict):
        raise ValueError(f"results is a {type(results).__name__}, but must be a dict such as {{'top-1': 0.8}}")
    record, title = model.run_record, f"MSViT of {model.host_name}"
    scores = eval_results(record, data.get("pipeline_tag")) if record is not None else []
    if scores:
        data = {"model_name": title, "eval_results": scores, **data}
    if (base := base_model(model)) is not None:
        data = {"base_model": base, **data}
    return ModelCard.from_template(
        ModelCardData(**data), template_str=CARD, title=title, paper=PAPER, usage=usage, facts=_facts(model),
        results=results, measured=_table(record) if scores else None, training=record and record.training,
        limits=_limits(model, record) if scores else [],
    )  # fmt: skip


def eval_results(record: RunRecord, task: str | None) -> list[EvalResult]:
    """Return the scores of the run in the hub's terms; none without a data set."""
    name = record.dataset
    if name is None:
        return []
    kind = re.sub(r"[^a-z0-9_.-]+", "-", name.lower()).strip("-.") or "images"
    return [
        EvalResult(
            task_type=task or "image-classification", dataset_type=kind, dataset_name=name, dataset_split="validation",
            metric_type=METRICS[score][0], metric_name=METRICS[score][1], metric_value=round(value, 6),
        )
        for score, value in record.mixed.scores.items()
    ]  # fmt: skip


def base_model(model: Any) -> str | None:
    """Return the repository of the weights that the model began with, or None where that is not known."""
    source = getattr(getattr(model.host, "config", None), "name_or_path", None)  # of a transformers host
    if isinstance(source, str) and re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", source):
        return source
    record = model.run_record
    known = None if record is None or record.pretrained is None else timm.get_pretrained_cfg(record.pretrained, True)
    if known is None or not known.hf_hub_id:
        return None
    name = f"{known.architecture}.{known.tag}" if known.tag else known.architecture
    return f"{known.hf_hub_id}{name}" if known.hf_hub_id.endswith("/") else known.hf_hub_id


def _table(record: RunRecord) -> dict[str, Any]:
    """Columns and rows of the dense host, where something is known of it, and of the model."""
    per, scores = "window" if record.task == "segment" else "image", list(record.mixed.scores)
    of = "" if record.num_images is None else f"{record.num_images} "
    at = "" if record.img_size is None else f" at {record.img_size} px"
    rows = []
    for name, measured in (("dense host", record.dense), ("this model", record.mixed)):
        if measured != Measured():
            parts = ["-" if (part := measured.scores.get(score)) is None else f"{part:.1%}" for score in scores]
            tokens = "-" if measured.tokens is None else f"{measured.tokens:.0f}"
            rows.append([name, *parts, tokens, "-" if measured.gmacs is None else f"{measured.gmacs:.3g}"])
    return {
        "sentence": f"On {of}validation images of {record.dataset}{at}; multiply-adds include the gate.",
        "titles": ["", *scores, f"tokens per {per}", f"GMACs per {per}"],
        "rows": rows,
    }


def _limits(model: Any, record: RunRecord) -> list[str]:
    limits = ["The figures are those of one run, on its own validation images, with the gate as that run left it."]
    if not record.dense.scores:
        limits.append("The accuracy of the dense host, trained alike, was not measured.")
    limits.append(f"Sides of images must be multiples of {model.coarse} px. On a GPU use `msvit.compile`.")
    return limits


def _facts(model: Any) -> dict[str, Any]:
    height, width = native_size(model)
    gate = f"{type(model.gate).__name__}({model.gate.extra_repr()})"
    facts = {
        "host": model.host_name,
        "fine patches": f"{model.fine} px",
        "coarse cells": f"{model.coarse} px",
        "images": f"{height}x{width} px; other multiples of {model.coarse} px will do",
        "gate": gate,
        "mode": model.mode,
        "reducer": model.reducer,
        "classes": model.num_classes,
    }
    return {name: value for name, value in facts.items() if value is not None}
