"""Tiny models of transformers' own classes, with weights that make every part matter."""

from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 16, "patch_size": 4}
MLP = {"intermediate_size": 48}
LABELS = {"num_labels": 5}

# Each class with its own settings: whatever its configuration can switch is on in one of them.
CLASSES: dict[str, dict[str, Any]] = {
    "ViTModel": MLP,
    "ViTForImageClassification": MLP | LABELS,
    "DeiTModel": MLP,
    "DeiTForImageClassification": MLP | LABELS | {"qkv_bias": False},
    "DeiTForImageClassificationWithTeacher": MLP | LABELS,
    "Dinov2Model": {"use_swiglu_ffn": True},
    "Dinov2ForImageClassification": LABELS,
    "Dinov2WithRegistersModel": {"num_register_tokens": 3, "use_swiglu_ffn": True},
    "Dinov2WithRegistersForImageClassification": LABELS | {"num_register_tokens": 3},
    "DINOv3ViTModel": MLP | {"num_register_tokens": 3, "use_gated_mlp": True},
    "CLIPVisionModel": MLP,
    "CLIPVisionModelWithProjection": MLP | {"projection_dim": 6},
    "CLIPModel": MLP,
    "CLIPForImageClassification": MLP | LABELS,
    "SiglipVisionModel": MLP,
    "SiglipModel": MLP,
    "SiglipForImageClassification": MLP | LABELS,
}
TEXT = MLP | {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 11}
TEXT |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def configuration(name: str, settings: dict[str, Any]) -> Any:
    """A configuration of the class's own kind; of two towers, with a small one for texts."""
    kind = getattr(transformers, name).config_class
    if "vision_config" not in kind.sub_configs:
        return kind(**settings)
    labels = {key: settings[key] for key in LABELS if key in settings}
    vision = {key: value for key, value in settings.items() if key not in LABELS}
    both = {"projection_dim": 6} if name.startswith("CLIP") else {}
    return kind(text_config=TEXT, vision_config=vision, **labels, **both)


def tiny_transformers(name: str, dtype: torch.dtype = torch.float64, **options: Any) -> Any:
    """Two layers of width 32, patches of 4 px, 16 px images."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = getattr(transformers, name)(configuration(name, SIZES | CLASSES[name] | options)).to(dtype).eval()
        for parameter in model.parameters():  # biases and tokens start at 0: give them weight
            parameter.data += 0.1 * torch.randn(parameter.shape, dtype=torch.float64).to(dtype)
    return model


def hidden_of(host: Any, image: torch.Tensor) -> torch.Tensor:
    """last_hidden_state of the model itself."""
    resized = {} if "Dinov2" in host.kind or "DINOv3" in host.kind else {"interpolate_pos_encoding": True}
    return host.body(image, **resized).last_hidden_state


def enable_checkpointing(model: Any) -> None:
    """Checkpoint the layers' activations, by the name that the installed transformers has for it."""
    newer = hasattr(model, "activation_checkpointing_enable")
    (model.activation_checkpointing_enable if newer else model.gradient_checkpointing_enable)()
