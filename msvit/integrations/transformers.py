"""Converted transformers models, with the calls that users of transformers know.

    model = msvit.convert(ViTForImageClassification.from_pretrained(name))    # a MSViTForImageClassification
    out = model(pixel_values=images, labels=labels)      # out.loss, out.logits, out.gate.mask, out.tokens.count
    model.save_pretrained("folder")
    model = AutoModelForImageClassification.from_pretrained("folder")         # or msvit.load("folder")
    model = model.with_gate_loss("gbas", target=0.25, weight=4.0)             # what Trainer trains the gate with

Importing it registers the Auto classes, for which `import msvit` is enough: see `auto_classes.py`. `model.msvit` is the
MSViT inside; its attributes are those of the model, too.
"""

from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from huggingface_hub import HfApi
from torch import Tensor, nn

try:
    import transformers
    from transformers import PreTrainedConfig, PreTrainedModel
except ImportError as error:
    raise ImportError(
        f"msvit.integrations.transformers needs transformers 5 or later ({error}); pip install 'msvit[transformers]'"
    ) from None
from transformers.modeling_outputs import BaseModelOutputWithPooling, ImageClassifierOutput
from transformers.models.clip.modeling_clip import CLIPVisionModelOutput
from transformers.utils import logging

from msvit.backbones import adapt
from msvit.backbones.transformers_host import FAMILIES
from msvit.checks import check_choice, check_number, check_path
from msvit.gates import LogitGate
from msvit.host_settings import native_size
from msvit.integrations.model_card import TAGS, model_card
from msvit.losses import LOSSES
from msvit.model import MSViT
from msvit.output import shown_tokens
from msvit.preprocessing import Preprocessing
from msvit.saving.folder import describe_gate
from msvit.saving.model import build_msvit, describe_budget, describe_parts, restore_budget
from msvit.types import GateOutput, TokenBatch

logger = logging.get_logger(__name__)
LABELS = ("id2label", "label2id", "problem_type")  # settings of the host's configuration that are the model's, too
USAGE = """import msvit  # registers the Auto classes
from transformers import pipeline

pipe = pipeline("{task}", model="{name}")  # the repository, or a local folder, with an image processor"""


class MSViTConfig(PreTrainedConfig):
    """The host's configuration and class, and what `msvit.convert` was given."""

    model_type = "msvit"
    keys_to_ignore_at_inference = ["gate", "tokens"]  # noqa: RUF012 - Trainer gathers tensors only

    host_class: str | None = None  # such as ViTForImageClassification
    host: dict[str, Any] | None = None  # its configuration
    gate: dict[str, Any] | None = None  # name, arguments and normalisation, as in msvit.json
    coarse: int | None = None
    mode: str = "packed"
    reducer: dict[str, Any] | None = None
    budget: dict[str, Any] | None = None  # value and unit
    speed_report: dict[str, Any] | None = None  # of msvit.speed_up
    gate_loss: dict[str, Any] | None = None  # see GateLoss


@dataclass(frozen=True)
class GateLoss:
    """The gate's part of the loss: one of `msvit.losses.LOSSES`, and how much it counts."""

    name: str
    target: float  # wanted share of fine cells
    weight: float
    grid: tuple[int, int]  # cells of the images: GBaS has a parameter for each

    def build(self) -> nn.Module:
        """Make the loss, or raise ValueError for an unknown name."""
        check_choice("gate loss", self.name, LOSSES)
        options: dict[str, Any] = {"grid": tuple(self.grid)} if self.name == "gbas" else {}
        return LOSSES[self.name](target=self.target, **options)


class ShownByShapes:
    """An output of transformers that prints the shapes of its tensors and the number of tokens, not all numbers."""

    def __repr__(self) -> str:
        output: Any = self
        parts = [f"{name}={tuple(value.shape)}" for name, value in output.items() if isinstance(value, Tensor)]
        parts += [] if output.tokens is None else [f"tokens={shown_tokens(output.tokens)}"]
        return f"{type(self).__name__}({', '.join(parts)})"


@dataclass(repr=False)
class MSViTClassifierOutput(ShownByShapes, ImageClassifierOutput):
    """The host's output, the gate's decisions and the tokens; the two other logits are those of a distilled DeiT."""

    cls_logits: Tensor | None = None
    distillation_logits: Tensor | None = None
    gate: GateOutput | None = None
    tokens: TokenBatch | None = None


@dataclass(repr=False)
class MSViTModelOutput(ShownByShapes, BaseModelOutputWithPooling):
    """The host's output, the gate's decisions and the tokens. A coarse token is repeated over the patches it covers."""

    gate: GateOutput | None = None
    tokens: TokenBatch | None = None


@dataclass(repr=False)
class MSViTProjectionOutput(ShownByShapes, CLIPVisionModelOutput):
    """Output of a CLIPVisionModelWithProjection."""

    gate: GateOutput | None = None
    tokens: TokenBatch | None = None


class MSViTPreTrainedModel(PreTrainedModel):
    """A `PreTrainedModel` around an `MSViT`, `self.msvit`, built from a configuration, or a given `model`."""

    config_class = MSViTConfig
    base_model_prefix = "msvit"
    main_input_name = "pixel_values"
    input_modalities = "image"
    supports_gradient_checkpointing = True

    def __init__(self, config: MSViTConfig, model: MSViT | None = None) -> None:
        super().__init__(config)
        self.msvit = build_model(config) if model is None else model
        if self.msvit.host.is_classifier:
            self.msvit.classes = [name for _, name in sorted((config.id2label or {}).items())]
        self.gate_loss: Any = None if config.gate_loss is None else GateLoss(**config.gate_loss).build()
        self.post_init()

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "msvit":  # not made yet
                raise
            return getattr(self.msvit, name)

    @property
    def preprocessing(self) -> Preprocessing | None:
        """The preprocessing of image files; set it to what the image processor does."""
        return self.msvit.preprocessing

    @preprocessing.setter
    def preprocessing(self, value: Preprocessing | None) -> None:
        self.msvit.preprocessing = value

    def get_input_embeddings(self) -> nn.Module:
        """Return the host's patch embedding."""
        return self.msvit.host.model.get_input_embeddings()

    def init_weights(self) -> None:
        """Do nothing: host and gate have weights, from their constructors or from elsewhere."""

    def _init_weights(self, module: nn.Module) -> None:
        """Set what is in no file, after `from_pretrained`: a gate's buffers follow from its description."""
        if isinstance(module, LogitGate):
            assert self.config.gate is not None
            module.threshold = self.config.gate["config"]["threshold"]
            module.set_normalization(module.normalization, module._input)
        super()._init_weights(module)

    def with_options(self, **options: Any) -> "MSViTPreTrainedModel":
        """Return a model of the same weights (not copies) with other options; see `MSViT.with_options`."""
        return self.around(self.msvit.with_options(**options))

    def uncompiled(self) -> "MSViTPreTrainedModel":
        """Return a model of the same weights and options that is not compiled."""
        return self.around(self.msvit.uncompiled())

    def around(self, model: MSViT, gate_loss: Any = "same") -> "MSViTPreTrainedModel":
        """Return this model around another MSViT of the same host, such as a compiled one; with another gate loss."""
        gate_loss = self.config.gate_loss if gate_loss == "same" else gate_loss
        config = make_config(model, gate_loss if needs_grad(model.gate) else None)
        for name in LABELS:
            setattr(config, name, getattr(self.config, name))
        new = type(self)(config, model)
        if config.gate_loss is not None:
            new.gate_loss = self.gate_loss if gate_loss == self.config.gate_loss else new.gate_loss.to(self.device)
        new.training = self.training  # its parts have their own
        return new

    def with_gate_loss(
        self, name: str | None, target: float = 0.25, weight: float = 4.0, grid: tuple[int, int] | None = None
    ) -> "MSViTPreTrainedModel":
        """Return a model of the same weights whose training loss has this term for the gate; None: no such term.

        `name` is "gbas", "bas", "bas-flat" or "l0", `target` the wanted share of fine cells, `grid` the rows and
        columns of cells of the images, by default those of the size that the host was built for.
        """
        if name is None:
            return self.around(self.msvit, None)
        gate = self.msvit.gate
        if not needs_grad(gate):
            kind = f"{'frozen ' if isinstance(gate, LogitGate) else ''}{type(gate).__name__}"
            raise ValueError(f"a gate loss was asked for, but a {kind} has nothing to train; use a LearnedGate")
        check_number("weight", weight, at_least=0)
        rows, columns = (side // self.msvit.coarse for side in native_size(self.msvit))
        loss = GateLoss(name, target, weight, (rows, columns) if grid is None else grid)
        loss.build()  # raises ValueError for what is wrong
        return self.around(self.msvit, asdict(loss))

    def _returned(self, output: Any, return_dict: bool | None) -> Any:
        as_dict = self.config.return_dict if return_dict is None else return_dict
        return output if as_dict else output.to_tuple()

    def save_pretrained(  # its other arguments are in `options`
        self,
        save_directory: str | Path,
        *,
        results: dict[str, Any] | None = None,
        name: str = "owner/name",
        **options: Any,
    ) -> None:
        """Save as transformers does, with a model card where there is none: `results` is its table of metrics."""
        folder = check_path("save_directory", save_directory)
        if options.pop("push_to_hub", False):
            raise ValueError("save_pretrained does not push; use model.push_to_hub(repo_id)")
        self.config.gate = describe_gate(self.msvit.gate)  # as it is now: a threshold may have moved
        self.config.update({"budget": None, "speed_report": None} | describe_budget(self))
        options = {"save_original_format": False, **options}  # the names of the modules, which Trainer reads to resume
        super().save_pretrained(folder, **options)
        if not (folder / "README.md").exists():
            task = "image-classification" if self.msvit.host.is_classifier else "image-feature-extraction"
            usage, tags = USAGE.format(task=task, name=name), [*TAGS, "transformers"]
            card = model_card(self.msvit, usage, results, library_name="transformers", pipeline_tag=task, tags=tags)
            card.save(folder / "README.md")

    def push_to_hub(  # its other arguments are in `options`
        self, repo_id: str, *, results: dict[str, Any] | None = None, private: bool | None = None,
        token: bool | str | None = None, commit_message: str = "Upload MSViT", revision: str | None = None,
        create_pr: bool = False, **options: Any,
    ) -> str:  # fmt: skip
        """Write the model to a repository of the hub, with a card unless it has one; return the commit's address."""
        api = HfApi(token=token)
        repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
        there = api.file_exists(repo_id, "README.md", revision=revision)
        with TemporaryDirectory() as folder:
            self.save_pretrained(folder, results=results, name=repo_id, **options)
            return api.upload_folder(
                repo_id=repo_id, folder_path=folder, commit_message=commit_message, revision=revision,
                create_pr=create_pr, ignore_patterns=["README.md"] if there else None,
            )  # fmt: skip


class MSViTForImageClassification(MSViTPreTrainedModel):
    """A classifier around a host with labels."""

    def forward(
        self,
        pixel_values: Tensor,
        labels: Tensor | None = None,
        mask: Tensor | None = None,
        max_tokens: int | None = None,
        per_image: int | None = None,
        interpolate_pos_encoding: bool | None = None,
        return_dict: bool | None = None,
    ) -> Any:
        """Return logits, and with `labels` the loss, in training with the gate's, where the configuration has one.

        `mask` (b, hc, wc), 1 = fine, replaces the gate's decisions; `max_tokens` and `per_image` limit them as in
        `MSViT.forward`. Positions are interpolated whenever the size asks for it, so `interpolate_pos_encoding` changes
        nothing.
        """
        gate, tokens = self.msvit.encode(pixel_values, mask, max_tokens, per_image)
        backbone: Any = self.msvit.backbone
        logits, cls_logits, distilled = backbone.head(tokens), None, None
        if self.msvit.host.kind == "DeiTForImageClassificationWithTeacher":
            cls_logits, distilled = backbone.teacher_logits(tokens)
        loss = None if labels is None else self.loss_function(labels, logits, self.config)
        if loss is not None and self.training and self.gate_loss is not None and mask is None:
            loss = loss + self._weighted_gate_loss(gate)
        output = MSViTClassifierOutput(
            loss=loss, logits=logits, cls_logits=cls_logits, distillation_logits=distilled, gate=gate, tokens=tokens
        )
        return self._returned(output, return_dict)

    def _weighted_gate_loss(self, gate: GateOutput) -> Tensor:
        if self.msvit.mode == "packed":
            logger.warning_once(
                "the gate is trained in mode 'packed', in which it has no gradient from what the other scale would "
                "have been worth; train model.with_options(mode='trimmed'), and use 'packed' for inference"
            )
        settings, cells = GateLoss(**self.config.gate_loss), tuple(gate.logits.shape[1:])
        if settings.name == "gbas" and cells != tuple(settings.grid):
            raise ValueError(
                f"pixel_values have {cells[0]}x{cells[1]} cells, but the gate loss is for {settings.grid[0]}x"
                f"{settings.grid[1]}, those of the host's image size; use model.with_gate_loss('gbas', grid={cells})"
            )
        return settings.weight * self.gate_loss(logits=gate.logits.float())


class MSViTModel(MSViTPreTrainedModel):
    """A feature model: last_hidden_state and, where the host pools, pooler_output (or image_embeds)."""

    def forward(
        self,
        pixel_values: Tensor,
        mask: Tensor | None = None,
        max_tokens: int | None = None,
        per_image: int | None = None,
        interpolate_pos_encoding: bool | None = None,
        return_dict: bool | None = None,
    ) -> Any:
        """Run the host; `mask` and all after it as in `MSViTForImageClassification`."""
        gate, tokens = self.msvit.encode(pixel_values, mask, max_tokens, per_image)
        backbone: Any = self.msvit.backbone
        host = self.msvit.host
        features = {"last_hidden_state": backbone.hidden(tokens), "gate": gate, "tokens": tokens}
        pooled = None if host.is_classifier else backbone.head(tokens)
        if host.kind == "CLIPVisionModelWithProjection":
            return self._returned(MSViTProjectionOutput(image_embeds=pooled, **features), return_dict)
        return self._returned(MSViTModelOutput(pooler_output=pooled, **features), return_dict)


def wrap(model: MSViT) -> MSViTPreTrainedModel:
    """Return the transformers model around an MSViT whose host is one; a gate that needs gradients gets GBaS."""
    kind = MSViTForImageClassification if model.host.is_classifier else MSViTModel
    wrapped = kind(make_config(model, None), model)
    wrapped.training = model.training
    return wrapped.with_gate_loss("gbas") if model.host.is_classifier and needs_grad(model.gate) else wrapped


def needs_grad(gate: Any) -> bool:
    return isinstance(gate, LogitGate) and not gate.frozen


def make_config(model: MSViT, gate_loss: dict[str, Any] | None) -> MSViTConfig:
    """Return the configuration that describes a model."""
    host: Any = model.host
    labels: dict[str, Any] = {name: getattr(host.config, name) for name in LABELS if host.is_classifier}
    return MSViTConfig(
        host_class=host.kind,
        host=host.config.to_dict(),
        gate_loss=gate_loss,
        dtype=host.model.dtype,
        **describe_parts(model),
        **labels,
    )


def build_model(config: MSViTConfig) -> MSViT:
    """Build the described model; its weights are not yet loaded."""
    if config.host_class not in FAMILIES:
        raise ValueError(f"the host is a {config.host_class!r:.200}, but known are {', '.join(FAMILIES)}")
    if config.host is None or config.gate is None or config.coarse is None:
        raise ValueError("the configuration lacks host, gate or coarse; use that of a model from msvit.convert")
    kind = getattr(transformers, config.host_class)
    host_config = kind.config_class.from_dict(config.host)
    if "ForImageClassification" in config.host_class:  # labels may be new: from_pretrained(folder, num_labels=3)
        host_config.id2label, host_config.label2id = config.id2label, config.label2id
    model = build_msvit(adapt(kind(host_config)), vars(config))
    restore_budget(model, {"budget": config.budget, "speed_report": config.speed_report})
    return model


transformers.AutoConfig.register("msvit", MSViTConfig)
transformers.AutoModel.register(MSViTConfig, MSViTModel)
transformers.AutoModelForImageClassification.register(MSViTConfig, MSViTForImageClassification)
