"""Conversion of a Vision Transformer of timm or transformers, or a Swin, into a model with mixed-scale tokens."""

from typing import Any

from torch import nn

from msvit.backbones import Backbone, adapt
from msvit.budget.merge_schedules import fit_reducer, merge_by_rule
from msvit.budget.thresholds import set_budget
from msvit.checks import check_choice, check_kind, warn
from msvit.gates import GATES, AllFine, Gate
from msvit.host_settings import gate_for_host, host_normalization, native_size
from msvit.model import MSViT, inner_msvit
from msvit.reduction import Reducer
from msvit.saving.folder import DEFAULT, named_gate
from msvit.segmenter import Segmenter, attach_decoder

TRAINABLE = ("learned", "context")  # by name they are made for the host, all cells fine at the start


def convert(
    host: nn.Module,
    coarse: int | None = None,
    gate: Gate | str | None = None,
    mode: str = "packed",
    reducer: Reducer | None = None,
    merge_at: int | None = None,
    budget: float | None = None,
    unit: str = "macs",
    method: str | None = None,
    images: Any = None,
) -> Any:
    """Give a timm or transformers Vision Transformer mixed-scale tokens. Weights are shared; the host stays as it was.

        model = msvit.convert(vit, budget=0.6)                         # 60 % of the dense multiply-adds
        model = msvit.convert(vit, gate="learned")                     # to be trained, all cells fine at the start
        model = msvit.convert(vit, method="auto", budget=0.6)          # what is nearest to the host without training
        model = msvit.convert(vit, method="auto", budget=0.6, images=images)     # chosen by images, without labels
        model = msvit.convert(vit, gate=msvit.DiscGate(coarse=32))     # a fixed one
        model = msvit.convert(vit, reducer=msvit.EViT(rate=0.7))       # and fewer tokens from block to block
        model = msvit.convert(AutoModel.from_pretrained(name))         # a transformers model, before and after
        model = msvit.convert(swin, merge_at=3, gate=gate)             # coarse cells skip the Swin's stages 1 and 2

    `coarse` is the side of a cell in px, by default that of the gate given, else twice the host's patch size; with
    AllFine, the gate of a dense model, it may be the patch size itself, so that any whole number of patches will do.
    For a Swin it must be a multiple of the px that a token of stage `merge_at` covers (stages count from 1; 3 by
    default).

    `gate` is one, or its name: "default" (the trained one that comes with msvit, and taken where none is given),
    "disc", "entropy", "gradient", "random", "all-fine", "all-coarse", or "learned" and "context", which have to be
    trained.

    `budget` is met on average, for images of the size the host was built for; see `msvit.set_budget`, which takes other
    sizes, and `msvit.calibrate`, which sets the gate by images of your own.

    `method="auto"` with a budget takes what measured best on ImageNet without training: all cells fine, and ToMe with
    more merging in later blocks; with `images`, the schedule of `msvit.fit_reducer`. To train, see `msvit.distill`.

    A gate with a record of the normalisation it was trained with gets its images in it: they are mapped from the mean
    and std of the host's `pretrained_cfg`, where that has them. A gate made here is recorded with those.

    The result is an `MSViT`; of a transformers model, a `PreTrainedModel` around one: see
    `msvit.integrations.transformers`.
    """
    if method is None and images is not None:
        raise ValueError('images choose how many tokens each block merges: pass method="auto", or set a gate by them: '
                         'msvit.calibrate(model, images, budget)')
    if method is None:
        model = to_msvit(host, coarse, gate, mode, reducer, merge_at)
        model = model if budget is None else set_budget(model, budget, unit)
    else:
        check_choice("method", method, ("auto",))
        chosen = {"coarse": coarse, "gate": gate, "reducer": reducer, "merge_at": merge_at}
        if given := [name for name, value in chosen.items() if value is not None]:
            raise ValueError(f'method="auto" chooses {given[0]} itself; leave it out, or leave out method')
        model = merge_only(host, mode, budget, unit, images)
    warn_of_size(model)
    if model.backbone.library != "transformers":
        return model
    from msvit.integrations.transformers import wrap

    return wrap(model)


def warn_of_size(model: MSViT) -> None:
    """Warn where images of the host's own size have no whole cells."""
    height, width = getattr(model.host.patch_embed, "img_size", None) or native_size(model)
    near = model.whole_cells(height), model.whole_cells(width)
    if near != (height, width):
        down, coarse = (height - 1) // model.coarse * model.coarse, model.coarse
        who = "model.preprocessing and timm.data.resolve_model_data_config(model) have"
        who = "the image processor needs" if model.backbone.library == "transformers" else who
        warn(
            f"the host takes images of {height}x{width}px, in which cells of {coarse}px do not fit; the model takes "
            f"multiples of {coarse}, such as {f'{down} or ' if down else ''}{down + coarse}px: "
            f"{who} {near[0]}x{near[1]}"
        )


def convert_segmenter(
    host: nn.Module,
    num_classes: int,
    coarse: int | None = None,
    gate: Gate | str | None = None,
    decoder: str = "mask",
    mode: str = "packed",
    reducer: Reducer | None = None,
    budget: float | None = None,
    unit: str = "macs",
) -> Segmenter:
    """Make a Segmenter of a timm Vision Transformer, whose weights are shared and whose own head has no part in it.

        model = msvit.convert_segmenter(vit, num_classes=21, gate=msvit.DiscGate(coarse=32))

    `coarse`, `gate`, `mode`, `reducer`, `budget` and `unit` are as for `msvit.convert`, multiply-adds
    with those of the decoder; `decoder` is "mask" or "linear".
    """
    if isinstance(host, MSViT | Segmenter):
        raise ValueError("the model is converted already; pass its host: msvit.convert_segmenter(model.host, ...)")
    encoder = to_msvit(host, coarse, gate, mode, reducer)
    model = attach_decoder(encoder, num_classes, decoder)
    return model if budget is None else set_budget(model, budget, unit)


def merge_only(host: nn.Module, mode: str, budget: float | None, unit: str, images: Any) -> MSViT:
    """Convert with all cells fine, and tokens merged to meet the budget."""
    if budget is None or unit != "macs":
        raise ValueError(
            f'budget is {budget} and unit is "{unit}", but method="auto" needs a share of the dense multiply-adds; '
            f"pass budget=0.6"
        )
    backbone = adapt(host, None)
    if backbone.is_hierarchical:
        raise ValueError(f'method="auto" merges tokens, which a {type(host).__name__} cannot; pass a gate instead')
    model = to_msvit(host, backbone.fine, AllFine(backbone.fine), mode)
    return merge_by_rule(model, budget) if images is None else fit_reducer(model, images, budget)


def to_msvit(
    host: nn.Module,
    coarse: int | None = None,
    gate: Gate | str | None = None,
    mode: str = "packed",
    reducer: Reducer | None = None,
    merge_at: int | None = None,
) -> MSViT:
    """Convert any host to an MSViT."""
    check_not_converted(host)
    backbone = adapt(host, merge_at)
    gate = DEFAULT if gate is None else gate
    if isinstance(gate, str):
        gate = make_gate(gate, backbone, coarse)
    check_kind("gate", gate, Gate, 'a msvit gate such as msvit.DiscGate(coarse=32), or its name, such as "default"')
    weight = backbone.host.patch_embed.proj.weight
    coarse = gate.coarse if coarse is None else coarse
    model = MSViT(backbone, gate_for_host(gate, backbone.host), coarse, mode, reducer)
    for each in (gate, model.gate):  # they share weights, but perhaps not all buffers
        each.to(weight.device)
    return model.train(host.training)


def check_not_converted(host: Any) -> None:
    if isinstance(host, MSViT) or inner_msvit(host) is not None:
        raise ValueError("the model is converted already; use model.with_options(gate=...), or pass model.host")


def make_gate(name: str, backbone: Backbone, coarse: int | None) -> Gate:
    """Make a gate by its name, for the cells of this host; one that has to be trained with a position for each."""
    if name not in TRAINABLE:
        gate = named_gate(name)
        if name == DEFAULT and coarse is not None:
            backbone.check_coarse(coarse)
        if name == DEFAULT and backbone.in_chans != gate.config["in_chans"]:
            raise ValueError(
                f"the gate that comes with msvit takes images of {gate.config['in_chans']} channels, and the host's "
                f'have {backbone.in_chans}; pass another, such as gate="learned", which has to be trained'
            )
        return gate.for_cells(backbone.default_coarse(gate if name == DEFAULT else None) if coarse is None else coarse)
    coarse = backbone.default_coarse(None) if coarse is None else coarse
    backbone.check_coarse(coarse)
    rows, columns = backbone.native_patches
    k = coarse // backbone.fine
    kind: Any = GATES[name]
    gate = kind(coarse, grid=(max(1, rows // k), max(1, columns // k)), in_chans=backbone.in_chans)
    return gate.to(backbone.host.patch_embed.proj.weight.dtype).set_normalization(host_normalization(backbone.host))
