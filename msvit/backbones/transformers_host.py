"""transformers' Vision Transformers under the names of timm's: patch_embed, blocks, pos_embed, norm.

    host = TransformersHost(ViTForImageClassification(config))
    host.blocks[0].attn.q_proj      # the module that the model has there now
    host.model                      # the model itself

Nothing here holds a weight: the model is the only child, and every other name is looked up on it at each access. So
weights keep their names, and what `from_pretrained` or peft put in their place is seen. transformers is not imported.
"""

import sys
from collections.abc import Iterator
from typing import Any

from timm.data import constants
from torch import Tensor, nn

from msvit.backbones.base import unsupported, unsupported_projection

# Each class that can be converted, with the module of transformers.models that defines it and all its parts.
FAMILIES = {
    **dict.fromkeys(("ViTModel", "ViTForImageClassification"), "vit"),
    **dict.fromkeys(("DeiTModel", "DeiTForImageClassification", "DeiTForImageClassificationWithTeacher"), "deit"),
    **dict.fromkeys(("Dinov2Model", "Dinov2ForImageClassification"), "dinov2"),
    **dict.fromkeys(
        ("Dinov2WithRegistersModel", "Dinov2WithRegistersForImageClassification"), "dinov2_with_registers"
    ),
    "DINOv3ViTModel": "dinov3_vit",
    **dict.fromkeys(
        ("CLIPVisionModel", "CLIPVisionModelWithProjection", "CLIPModel", "CLIPForImageClassification"), "clip"
    ),
    **dict.fromkeys(("SiglipVisionModel", "SiglipModel", "SiglipForImageClassification"), "siglip"),
}
HALF = (0.5,) * 3, (0.5,) * 3
IMAGENET = constants.IMAGENET_DEFAULT_MEAN, constants.IMAGENET_DEFAULT_STD
CLIP = constants.OPENAI_CLIP_MEAN, constants.OPENAI_CLIP_STD
PUBLISHED = {"vit": HALF, "siglip": HALF, "clip": CLIP}  # mean and std of published models; of others ImageNet's
ATTENTIONS = ("eager", "sdpa", "flex_attention", "flash_attention_2", "flash_attention_3", "flash_attention_4")


def known_class(model: Any) -> Any:
    """Return the class in `FAMILIES` that the model is of, perhaps by a subclass that changes no forward; else None."""
    kinds: tuple[Any, ...] = type(model).__mro__
    for kind in kinds:
        family = FAMILIES.get(kind.__name__)
        if family is not None and kind.__module__ == module_name(family):
            return kind if type(model).forward is kind.forward else None
    return None


def module_name(family: str) -> str:
    return f"transformers.models.{family}.modeling_{family}"


class TransformersHost(nn.Module):
    """A model of transformers, read under timm's names."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        kind = known_class(model)
        if kind is None:
            raise unsupported(model, "its class is not one that is supported")
        self.kind: str = kind.__name__
        self.family, self.is_classifier = FAMILIES[self.kind], "ForImageClassification" in self.kind
        for reason in self._unsupported_reasons():
            if reason:
                raise unsupported(model, reason)

    def forward(self, image: Tensor) -> Tensor | None:
        """Return logits of a classifier, else the pooled output: those of the model itself at any image size."""
        if self.kind in ("CLIPModel", "SiglipModel"):
            return self.model.get_image_features(image, interpolate_pos_encoding=True).pooler_output
        resized = {"interpolate_pos_encoding": True} if self.family in ("vit", "deit", "clip", "siglip") else {}
        out = self.model(pixel_values=image, **resized)
        name = "image_embeds" if self.kind == "CLIPVisionModelWithProjection" else "pooler_output"
        return out.logits if self.is_classifier else getattr(out, name)

    @property
    def published_cfg(self) -> dict[str, Any]:
        """How images of the published models are prepared, as a timm `pretrained_cfg`: the model itself has no such."""
        mean, std = PUBLISHED.get(self.family, IMAGENET)
        size = (3, *self.patch_embed.img_size)
        return {"mean": mean, "std": std, "input_size": size, "crop_pct": 1.0, "interpolation": "bicubic"}

    # Parts of the model

    @property
    def body(self) -> Any:
        """The part with the embeddings and the layers."""
        model = self.model
        if hasattr(model, "embeddings"):
            return model
        return model.vision_model if hasattr(model, "vision_model") else model.base_model

    @property
    def layers(self) -> nn.ModuleList:
        return self._first(self.body, "layers", "encoder.layer", "encoder.layers", "model.layer")

    @property
    def blocks(self) -> "list[BlockView]":
        return [BlockView(layer) for layer in self.layers]

    @property
    def patch_embed(self) -> "PatchEmbedView":
        embeddings = self.body.embeddings
        proj = self._first(embeddings, "patch_embeddings.projection", "patch_embedding", "patch_embeddings")
        return PatchEmbedView(proj, self.body.config.image_size)

    @property
    def pos_drop(self) -> nn.Module:
        return getattr(self.body.embeddings, "dropout", None) or nn.Identity()

    @property
    def norm_pre(self) -> nn.Module:
        return getattr(self.body, "pre_layrnorm", None) or nn.Identity()

    @property
    def norm(self) -> nn.Module:
        """The norm of all tokens. CLIP has none: it norms the class token alone."""
        return nn.Identity() if self.family == "clip" else self._first(self.body, "layernorm", "norm", "post_layernorm")

    @property
    def fc_norm(self) -> nn.Module:
        """The norm after pooling."""
        return self.body.post_layernorm if self.family == "clip" else nn.Identity()

    @property
    def rope(self) -> Any:
        return getattr(self.body, "rope_embeddings", None)

    @property
    def attention_pooling(self) -> Any:
        """SigLIP's head, where it runs: its classifier averages instead."""
        return getattr(self.body, "head", None) if self.family == "siglip" and not self.is_classifier else None

    @property
    def head_layers(self) -> list[nn.Module]:
        """The layers that run on one vector per image."""
        names = ("classifier", "cls_classifier", "distillation_classifier", "visual_projection")
        layers = [getattr(self.model, name, None) for name in names]
        layers.append(None if self.is_classifier else getattr(self.body, "pooler", None))
        return [layer for layer in layers if layer is not None]

    @property
    def head(self) -> nn.ModuleList:
        """The modules that belong to the head."""
        return nn.ModuleList([*self.head_layers, *filter(None, [self.attention_pooling])])

    # Prefix tokens and positions

    @property
    def prefix_tokens(self) -> list[Tensor]:
        """Prefix tokens in order, (1, n, d) each."""
        names = ("class_embedding", "cls_token", "distillation_token", "register_tokens")
        tokens = [getattr(self.body.embeddings, name, None) for name in names]
        return [token.view(1, -1, token.shape[-1]) for token in tokens if token is not None]

    @property
    def cls_token(self) -> Tensor | None:
        """The class token, (1, 1, d), or None: SigLIP has none."""
        return self.prefix_tokens[0] if self.prefix_tokens else None

    @property
    def num_prefix_tokens(self) -> int:
        return sum(token.shape[1] for token in self.prefix_tokens)

    @property
    def pos_embed(self) -> Tensor | None:
        """Positions of the first prefix tokens and of the patches, (1, n, d)."""
        embeddings = self.body.embeddings
        if getattr(embeddings, "position_embedding", None) is not None:
            return embeddings.position_embedding.weight[None]
        return getattr(embeddings, "position_embeddings", None)

    def positions(self, patches: tuple[int, int]) -> Tensor | None:
        """Return positions (n, d) for so many patches, resized by the model's own function."""
        table, embed = self.pos_embed, self.patch_embed
        if table is None or embed.grid_size == patches:
            return None if table is None else table[0]
        rows, columns = embed.grid_size
        if rows != columns:
            raise ValueError(
                f"the images have {patches[0]} x {patches[1]} patches, but the host's positions are for {rows} x "
                f"{columns}, and transformers resizes those of square images only; resize the images"
            )
        num = table.shape[1] - rows * columns + patches[0] * patches[1]
        like = table.new_empty(1, 1, 1).expand(1, num, table.shape[2])  # only its shape is read
        height, width = (num * side for num, side in zip(patches, embed.patch_size, strict=True))
        return self.body.embeddings.interpolate_pos_encoding(like, height, width)[0]

    # Settings

    config = property(lambda self: self.model.config)
    embed_dim = num_features = property(lambda self: self.patch_embed.proj.out_channels)

    @property
    def num_classes(self) -> int:
        return self.config.num_labels if self.is_classifier else 0

    @property
    def grad_checkpointing(self) -> bool:
        """Whether activations are recomputed: in training alone, as in transformers."""
        return any(getattr(layer, "gradient_checkpointing", False) and layer.training for layer in self.layers)

    def no_weight_decay(self) -> set[str]:
        """Return the names of prefix tokens and positions."""
        parts = (self.body.embeddings, self.patch_embed.proj)
        all_embeddings, projection = ({id(p) for p in part.parameters()} for part in parts)
        return {name for name, p in self.named_parameters() if id(p) in all_embeddings - projection}

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Return patterns of layer groups, as timm's layer decay reads them."""
        names = {id(part): name.replace(".", r"\.") for name, part in self.named_modules()}
        body, layers = names[id(self.body)], names[id(self.layers)]
        stem = rf"^{body}\.embeddings|^{body}\.pre_layrnorm"
        if coarse:
            return {"stem": stem, "blocks": rf"^{layers}\.(\d+)"}
        return {"stem": stem, "blocks": [(rf"^{layers}\.(\d+)", None), (rf"^{body}\.(?:layer)?norm", (99999,))]}

    def _first(self, part: Any, *paths: str) -> Any:
        """Return the module at the first of these paths that exists."""
        module = first_of(part, *paths)
        if isinstance(module, nn.Module):
            return module
        raise unsupported(self.model, f"its {type(part).__name__} has no {' or '.join(paths)} {other_version()}")

    def _unsupported_reasons(self) -> Iterator[str | None]:
        yield unsupported_projection(self.patch_embed)
        for layer in self.layers:
            attention = attention_of(layer)
            if not hasattr(layer, "mlp") or not hasattr(attention, "q_proj"):
                yield f"its {type(layer).__name__} has no mlp or no q_proj {other_version()}"
            for part in (layer, attention, layer.mlp):
                if type(part).__module__ != module_name(self.family):
                    yield f"its {type(part).__name__} is not a part that {self.kind} has in transformers"
            if drop := first_of(attention, "attention_dropout", "dropout"):
                yield f"attention dropout ({drop}) has no packed form; set it to 0 in the configuration"
        implementation = self.body.config._attn_implementation
        if implementation not in (None, *ATTENTIONS):
            yield (
                f"its attention is {implementation!r}, which may compute something else; "
                f"call model.set_attn_implementation('sdpa')"
            )


class PatchEmbedView:
    """The patch embedding, under the names of timm's PatchEmbed."""

    def __init__(self, proj: Any, image_size: Any) -> None:
        self.proj, self.norm = proj, identity
        self.patch_size: tuple[int, int] = tuple(proj.kernel_size)
        self.img_size = (image_size, image_size) if isinstance(image_size, int) else tuple(image_size)
        self.grid_size = self.img_size[0] // self.patch_size[0], self.img_size[1] // self.patch_size[1]


class BlockView:
    """A layer, under the names of timm's Block."""

    def __init__(self, layer: Any) -> None:
        self.layer, self.attn, self.modules = layer, AttentionView(layer), layer.modules
        self.norm1 = first_of(layer, "layernorm_before", "norm1", "layer_norm1")
        self.norm2 = first_of(layer, "layernorm_after", "norm2", "layer_norm2")
        self.ls1, self.ls2 = (getattr(layer, f"layer_scale{half}", identity) for half in (1, 2))
        self.drop_path1 = self.drop_path2 = getattr(layer, "drop_path", None)

    def mlp(self, x: Tensor) -> Tensor:
        """Apply the layer's MLP and its dropout."""
        return self.attn.proj_drop(self.layer.mlp(x))


class AttentionView:
    """The attention of a layer, under the names of timm's Attention with queries, keys and values apart."""

    qkv = None
    rotate_half = True  # where there are rotary positions

    def __init__(self, layer: Any) -> None:
        attention = attention_of(layer)
        self.q_proj, self.k_proj, self.v_proj = attention.q_proj, attention.k_proj, attention.v_proj
        self.proj = first_of(attention, "o_proj", "out_proj")
        self.num_heads: int = first_of(attention, "num_attention_heads", "num_heads")
        self.q_norm = self.k_norm = self.norm = identity  # these models do not norm queries and keys
        self.proj_drop = getattr(layer, "dropout", identity)
        self.modules = attention.modules


def identity(x: Tensor) -> Tensor:
    return x


def attention_of(layer: Any) -> Any:
    return first_of(layer, "attention", "self_attn")


def other_version() -> str:
    """Say what to do where parts have other names: they changed between versions."""
    version = getattr(sys.modules.get("transformers"), "__version__", "?")
    return f"in transformers {version}; install a version with those names: pip install 'msvit[transformers]'"


def first_of(part: Any, *paths: str) -> Any:
    """Return what lies at the first of these paths that exists, such as "encoder.layer"; None if none does."""
    for path in paths:
        found = part
        for name in path.split("."):
            found = getattr(found, name, None)
        if found is not None:
            return found
    return None
