"""Targets for a gate: what the fine tokens of each cell are worth to a dense model, by several measures.

    teacher = Teacher(model)                          # a dense classifier: all cells fine
    target_scores(["attention", "delta_token"], teacher, images)      # (b, hc, wc) each: the logarithms of

    attention            the class token's attention
    attention_detail     times what the coarse token loses
    scaled_classes       attention, times how much the output changes with half of the cells coarse
    gradient_classes     first order: derivatives by each cell's weight of Eq. 10
    one_classes          exact: one cell coarse at a time
    delta_classes        regressed from random masks: half of the cells coarse

The last four measure the change of the model's output, of one of three kinds (OUTPUTS): `classes`, the probabilities;
`token`, the direction of what the classifier is given; `map`, the direction of the features of every patch. Each is a
vector a such that half the squared distance of two of them is, to second order, their KL divergence, or one minus their
cosine. Where the change is linear in the coarse cells, a(mask) - a(fine) = sum of u_c, the distance that cell c adds to
masks in which every other cell is coarse with probability 1/4 is (u_c u_c + u_c sum u) / 4: that is what it is worth.
Such values are comparable between images; attention is not, as it sums to 1.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from msvit.gates import AllFine
from msvit.gates.ranking import top_share
from msvit.model import MSViT
from msvit.reduction.attention_recorder import AttentionRecorder
from msvit.tokens import dense_map
from msvit.types import TokenBatch

Cells = Float[Tensor, "b hc wc"]
Kinds = tuple[str, ...]
OUTPUTS = ("classes", "token", "map")
SMALLEST = 1e-9  # of a value, whose logarithm is learned
NUM_MASKS = 64  # random masks per image, for 49 unknowns
SHARES = (0.3, 0.7)  # of fine cells in them
NUM_PROBES = 6  # random directions of the output whose derivatives are computed
RIDGE = 1.0  # in units of one mask per cell


class Teacher:
    """A dense model, frozen, in three forms that share weights."""

    def __init__(self, model: MSViT, num_masks: int = NUM_MASKS, num_probes: int = NUM_PROBES) -> None:
        self.num_masks, self.num_probes = num_masks, num_probes
        self.dense = model.with_options(gate=AllFine(coarse=model.coarse), mode="packed", reducer=None)
        self.dense.eval().requires_grad_(False)
        self.masked = self.dense.with_options(mode="masked").eval()  # has the gradient of both scales
        self.recorder = AttentionRecorder()
        self.recorded = self.dense.with_options(reducer=self.recorder).eval()

    def cells(self, image: Tensor) -> tuple[int, int]:
        return self.dense.grid(image).cells

    def outputs(
        self, image: Tensor, mask: Tensor, kinds: Kinds, model: MSViT | None = None
    ) -> dict[str, Float[Tensor, "b d"]]:
        """Vectors such that half the squared distance of two is their KL divergence, or one minus their cosine."""
        model = self.dense if model is None else model
        _, tokens = model.encode(image, mask)
        return {kind: self.output(model, tokens, kind) for kind in kinds}

    def output(self, model: MSViT, tokens: TokenBatch, kind: str) -> Float[Tensor, "b d"]:
        if kind == "classes":
            return 2 * model.backbone.head(tokens).float().softmax(1).clamp(min=1e-12).sqrt()
        if kind == "token":
            return F.normalize(model.backbone.head(tokens, pre_logits=True).float(), dim=1)
        maps = F.normalize(dense_map(tokens).float(), dim=1)
        return maps.flatten(1) / (maps.shape[2] * maps.shape[3]) ** 0.5

    def tokens_after(self, image: Tensor, mask: Tensor, depth: int) -> Float[Tensor, "b d hf wf"]:
        """The map of tokens after `depth` blocks; 0: embedded pixels and positions."""
        _, tokens = self.dense.embed(image, mask)
        if depth:
            tokens = self.dense.backbone.run_blocks(tokens, record=until(depth))
        return dense_map(tokens).float()


def until(depth: int) -> Any:
    def record(index: int, tokens: TokenBatch) -> bool:
        return index + 1 == depth

    return record


@torch.no_grad()
def attention(teacher: Teacher, image: Tensor) -> Cells:
    """The share of the class token's attention that each cell gets, in the later half of the blocks."""
    teacher.recorded(image)
    return teacher.recorder.seen().float()


@torch.no_grad()
def detail(teacher: Teacher, image: Tensor, depth: int = 0) -> Cells:
    """The squared distance of a cell's fine tokens to its coarse one, all cells being fine or all coarse."""
    masks = (torch.full((len(image), *teacher.cells(image)), value, device=image.device) for value in (1.0, 0.0))
    fine, coarse = (teacher.tokens_after(image, mask, depth) for mask in masks)
    k = teacher.dense.grid(image).k
    return F.avg_pool2d((fine - coarse).square().mean(1, keepdim=True), k)[:, 0]


def attention_detail(teacher: Teacher, image: Tensor, depth: int = 0) -> Cells:
    return attention(teacher, image) * detail(teacher, image, depth).sqrt()


def worth(own: Tensor, with_all: Tensor) -> Tensor:
    """What a cell adds, from u_c u_c and u_c sum u."""
    return (own + with_all) / 4


def gradient(teacher: Teacher, image: Tensor, kinds: Kinds) -> dict[str, Cells]:
    """By the derivatives of random projections of the output by each cell's weight, where all cells are fine."""
    mask = torch.ones(len(image), *teacher.cells(image), device=image.device, requires_grad=True)
    generator = torch.Generator(image.device).manual_seed(0)
    found = {}
    for kind, output in teacher.outputs(image, mask, kinds, teacher.masked).items():
        total = torch.zeros_like(mask)
        for _ in range(teacher.num_probes):
            probe = torch.randn(output.shape, generator=generator, device=image.device)
            (slope,) = torch.autograd.grad((output * probe).sum(), mask, retain_graph=True)
            slope = slope.float()
            total = total + worth(slope.square(), slope * slope.sum((1, 2), keepdim=True))
        found[kind] = total.detach() / teacher.num_probes
    return found


@torch.no_grad()
def one(teacher: Teacher, image: Tensor, kinds: Kinds) -> dict[str, Cells]:
    """The distance of the output with one cell coarse to that with none, for each cell."""
    rows, columns = teacher.cells(image)
    fine = torch.ones(len(image), rows, columns, device=image.device)
    dense = teacher.outputs(image, fine, kinds)
    found = {kind: torch.zeros_like(fine) for kind in kinds}
    for row in range(rows):
        for column in range(columns):
            mask = fine.clone()
            mask[:, row, column] = 0
            for kind, output in teacher.outputs(image, mask, kinds).items():
                found[kind][:, row, column] = (output - dense[kind]).square().sum(1) / 2
    return found


@torch.no_grad()
def delta(teacher: Teacher, image: Tensor, kinds: Kinds) -> dict[str, Cells]:
    """By a linear model of each image: the change of the output as a sum over coarse cells, fitted on random masks."""
    rows, columns = teacher.cells(image)
    batch, cells = len(image), rows * columns
    generator = torch.Generator(image.device).manual_seed(0)
    dense = teacher.outputs(image, torch.ones(batch, rows, columns, device=image.device), kinds)
    masks, changes = [], {kind: [] for kind in kinds}
    for index in range(teacher.num_masks):
        share = SHARES[0] + (SHARES[1] - SHARES[0]) * (index + 0.5) / teacher.num_masks
        fine = torch.rand(batch, cells, generator=generator, device=image.device) < share
        masks.append((~fine).float())
        for kind, output in teacher.outputs(image, fine.float().view(batch, rows, columns), kinds).items():
            changes[kind].append(output - dense[kind])
    coarse = torch.stack(masks, 1)  # (b, masks, cells)
    with torch.autocast(image.device.type, enabled=False):
        gram = coarse.mT @ coarse + RIDGE * torch.eye(cells, device=image.device)
        fit = torch.linalg.solve(gram, coarse.mT)  # (b, cells, masks)
        effects = {kind: fit @ torch.stack(changes.pop(kind), 1) for kind in kinds}  # (b, cells, d)
    return {kind: additive_worth(effect).view(batch, rows, columns) for kind, effect in effects.items()}


def additive_worth(effect: Float[Tensor, "b cells d"]) -> Float[Tensor, "b cells"]:
    return worth(effect.square().sum(2), (effect * effect.sum(1, keepdim=True)).sum(2))


@torch.no_grad()
def scaled(teacher: Teacher, image: Tensor, kinds: Kinds) -> dict[str, Cells]:
    """Attention in units of distance: of the output with the less attended half of the cells coarse, shared by these.

    So cells of an image are ranked by attention, and images by how much they lose.
    """
    share = attention(teacher, image)
    fine = top_share(share, 0.5)
    lost = (share * (1 - fine)).sum((1, 2), keepdim=True)
    dense, half = (teacher.outputs(image, mask, kinds) for mask in (torch.ones_like(fine), fine))
    distance = {kind: (half[kind] - dense[kind]).square().sum(1) / 2 for kind in kinds}
    return {kind: share / lost * distance[kind][:, None, None] for kind in kinds}


SINGLE: dict[str, Callable[[Teacher, Tensor], Cells]] = {
    "attention": attention,
    "detail": detail,
    "attention_detail": attention_detail,
    "attention_detail3": partial(attention_detail, depth=3),
}
OF_OUTPUTS = {"scaled": scaled, "gradient": gradient, "one": one, "delta": delta}
USUAL = (
    "attention",
    "attention_detail3",
    "scaled_classes",
    "scaled_token",
    "delta_classes",
    "delta_token",
    "delta_map",
)
TARGETS = (*SINGLE, *(f"{name}_{kind}" for name in OF_OUTPUTS for kind in OUTPUTS))


def target_scores(names: list[str], teacher: Teacher, image: Tensor) -> dict[str, Cells]:
    """The logarithms of targets: what cells are ranked by, and what a gate learns.

    Targets that differ only in the kind of output share their forwards.
    """
    found = {name: SINGLE[name](teacher, image) for name in names if name in SINGLE}
    for measure, compute in OF_OUTPUTS.items():
        kinds = tuple(kind for kind in OUTPUTS if f"{measure}_{kind}" in names)
        if kinds:
            found |= {f"{measure}_{kind}": value for kind, value in compute(teacher, image, kinds).items()}
    return {name: found[name].float().clamp(min=SMALLEST).log() for name in names}
