"""Three scales or two: tokens of 16, 32 and 64 px in a quadtree, against two scales, ToMe and smaller inputs.

    python benchmarks/three_scales.py --vit-b FILE --val VAL.tar --photos PHOTOS.tar --setups imagenet-512 --out RUN
    python benchmarks/three_scales.py --vit-s FILE --voc VOC.tar --setups voc-512 --out RUN

Weights are of timm's vit_base_patch16_224 and vit_small_patch14_dinov2. VAL.tar has squares in folders named by the
index of their class, PHOTOS.tar others without labels, VOC.tar squares in {train,val}/{images,labels}. On VOC a linear
segmentation model is trained first, dense. RUN/three_scales.json is written after every row.

A budget is met by the mean of the measured images (`quadtree.py`). How the levels of three scales balance is chosen
for each budget by the divergence from the dense model on photographs. Scores other than the gate's are oracles: those
of the dense model on the measured images. Multiply-adds are without the gate's (0.1 % of ViT-B's, 0.3 % of ViT-S's).
`over_two`: the difference to the better pair of scales with the same score and budget, and its standard error.
"""

import argparse
import copy
from functools import partial
from pathlib import Path
from typing import Any

import timm
import torch
import torch.nn.functional as F
from quadtree import BATCH, NUM_CLASSES, RULES, SCALES, THREE, Encoder, Images, decide, predict
from shared import Clock, markdown, pick_device, read_tar, record, run_script, script_parser, source_line
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from torch import Tensor

import msvit
from msvit.budget.divergence import kl_divergence
from msvit.budget.thresholds import Cost
from msvit.tokens import dense_map
from msvit_lab.json_values import write_json

TRAINED = (0.2, 0.5)  # range of budgets in training
SHOWN = (224, 288, 384, 512)  # px: dense models
IGNORED = 255  # in label maps


def main() -> None:
    parser = script_parser(__doc__)
    for name in ("--vit-b", "--val", "--photos", "--vit-s", "--voc"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--setups", default="imagenet-384,imagenet-512,voc-512", help="images and their side in px")
    parser.add_argument("--stages", default="check,dense,plain,distilled,tome")
    parser.add_argument("--budgets", default="0.4,0.3,0.25,0.2", help="of the dense model's multiply-adds at that side")
    parser.add_argument("--distill", default=",".join(SCALES), help="scales to distill")
    parser.add_argument("--steps", type=int, default=150, help="of distillation, for each choice of scales")
    parser.add_argument("--voc-steps", type=int, default=450, help="of training the dense model on VOC")
    parser.add_argument("--batch", type=int, default=32, help="images of a step")
    parser.add_argument("--tune", type=int, default=256, help="photographs by which rules are chosen")
    parser.add_argument("--limit", type=int, default=10**9, help="images read of each tar")
    args = parser.parse_args()
    torch.backends.cudnn.allow_tf32 = False
    args.out.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    clock, results = Clock(60), {**record(pick_device(), args.commit), "rows": rows}
    for setup in args.setups.split(","):
        # Without a cache: weights change between forwards of one autocast region.
        cuda = pick_device().type == "cuda"
        with torch.no_grad(), torch.autocast("cuda", torch.bfloat16, enabled=cuda, cache_enabled=False):
            study = Study(args, setup, clock, results)
            for stage in args.stages.split(","):
                getattr(study, stage)()
    print(table(results))


class Study:
    """The rows of one set-up, stage by stage."""

    def __init__(self, args: argparse.Namespace, setup: str, clock: Clock, results: dict[str, Any]) -> None:
        self.args, self.setup, self.clock, self.results = args, setup, clock, results
        self.budgets = [float(budget) for budget in args.budgets.split(",")]
        task, side = setup.split("-")
        torch.manual_seed(0)
        if task == "imagenet":
            vit = self.load("vit_base_patch16_224", args.vit_b)
            names, pixels = self.read(args.val)
            self.labels = torch.tensor([int(name.split("/")[-2]) for name in names], device=pixels.device)
            self.encoder = Encoder(vit, int(side), mean=(0.5,) * 3, std=(0.5,) * 3)
            self.photos = self.read(args.photos)[1]
        else:
            vit = self.load("vit_small_patch14_dinov2", args.vit_s, patch_size=16, img_size=int(side))
            vit.reset_classifier(NUM_CLASSES)
            self.encoder = Encoder(vit.to(pick_device()), int(side), IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD)
            pixels, self.labels = self.read(args.voc, "val/images")[1], self.read(args.voc, "val/labels", "L")[1][:, 0]
            self.photos = self.read(args.voc, "train/images")[1]
            maps = self.read(args.voc, "train/labels", "L")[1]
            self.train(self.encoder, args.voc_steps, 5e-5, 1e-3, partial(self.label_loss, maps))
        self.val, self.tune = Images(self.encoder, pixels), Images(self.encoder, self.photos[: args.tune])
        clock.note(f"{setup}: {len(pixels)} images, {len(self.photos)} photographs")

    def load(self, name: str, file: Path, **options: Any) -> Any:
        overlay = {"file": str(file)}
        vit = timm.create_model(name, pretrained=True, pretrained_cfg_overlay=overlay, **options)
        return vit.eval().to(pick_device())

    def read(self, path: Path, begins: str = "", mode: str = "RGB") -> tuple[list[str], Tensor]:
        names, pixels = read_tar(path, begins, self.args.limit, mode)
        return names, pixels.to(pick_device())

    def add(self, method: str, found: Tensor, macs: float, pairs: list[Tensor] | None = None, **about: Any) -> Tensor:
        """Add a row and return the `counts`. `pairs`: those of pairs of scales at the same budget."""
        counts = self.counts(found)
        row = {"setup": self.setup, "method": method, "macs": macs, "accuracy": accuracy(counts.sum(0)).item(), **about}
        if found.shape == self.val.dense.shape:
            row["kl"] = kl_divergence(self.val.dense, found).mean().item()
        if pairs:
            row["over_two"] = min(self.over(counts, pair) for pair in pairs)
        self.results["rows"].append(row)
        write_json(self.args.out / "three_scales.json", self.results)
        self.clock.note(", ".join(cells(row)))
        return counts

    def counts(self, found: Tensor) -> Tensor:
        """(n, k) of each image: right and 1, or the confusion matrix."""
        if found.ndim == 2:
            return torch.stack([found.argmax(1) == self.labels, torch.ones_like(self.labels)], 1).double()
        parts = []
        for logits, label in zip(found.split(BATCH), self.labels.long().split(BATCH), strict=True):
            classes = F.interpolate(logits, label.shape[1:], mode="bilinear").argmax(1)
            pair = torch.where(label == IGNORED, NUM_CLASSES**2, NUM_CLASSES * label + classes).flatten(1)
            empty = torch.zeros(len(pair), NUM_CLASSES**2 + 1, device=pair.device, dtype=torch.double)
            parts.append(empty.scatter_add(1, pair, torch.ones_like(pair, dtype=torch.double))[:, :-1])
        return torch.cat(parts)

    def over(self, one: Tensor, two: Tensor) -> list[float]:
        """The difference in accuracy, and its standard error by 500 samples of the images with replacement."""
        drawn = torch.randint(len(one), (500, len(one)), device=one.device)
        times = one.new_zeros(drawn.shape).scatter_add(1, drawn, torch.ones_like(drawn, dtype=one.dtype))
        changes = accuracy(times @ one) - accuracy(times @ two)
        return [(accuracy(one.sum(0)) - accuracy(two.sum(0))).item(), changes.std().item()]

    # Training

    @torch.enable_grad()
    def train(self, encoder: Encoder, steps: int, lr: float, head_lr: float, loss_of: Any) -> None:
        head = list(encoder.vit.head.parameters())
        rest = [weight for name, weight in encoder.vit.named_parameters() if not name.startswith("head.")]
        groups = [{"params": rest, "lr": lr}, {"params": head, "lr": head_lr}]
        optimizer = torch.optim.AdamW(groups, weight_decay=0.01, fused=encoder.device.type == "cuda")
        rate = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, [lr, head_lr], total_steps=steps, pct_start=0.1, cycle_momentum=False
        )
        for step in range(steps):
            loss = loss_of()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(encoder.vit.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            rate.step()
            if step % 50 == 0 or step == steps - 1:
                self.clock.note(f"step {step}: loss {loss.item():.4f}")

    def crops(self, *maps: Tensor) -> list[Tensor]:
        """A random square, mirrored or not, of a batch of the photographs and of the maps that belong to them."""
        index = torch.randint(len(self.photos), (self.args.batch,), device=self.photos.device)
        draw, full = torch.rand(4).tolist(), self.photos.shape[2]
        side = int(full * (0.6 + 0.4 * draw[0]))
        top, left = (int(part * (full - side + 1)) for part in draw[1:3])
        found = [part[index, :, top : top + side, left : left + side] for part in (self.photos, *maps)]
        return [part.flip(3) if draw[3] < 0.5 else part for part in found]

    def label_loss(self, maps: Tensor) -> Tensor:
        pixels, label = self.crops(maps)
        active = self.encoder.uniform(len(pixels), 2)
        logits = self.encoder.predict(self.encoder(self.encoder.prepare(pixels), active), active)
        logits = F.interpolate(logits, label.shape[2:], mode="bilinear")
        return F.cross_entropy(logits, label[:, 0].long(), ignore_index=IGNORED)

    def distillation_loss(self, student: Encoder, scales: str) -> Tensor:
        """Divergence of predictions and distance of the features they are made from, by a random score and budget."""
        (pixels,) = self.crops()
        dense = Images(self.encoder, pixels)
        names, draw = list(dense.scores), torch.rand(3).tolist()
        name = names[int(draw[0] * len(names))]
        rule = RULES[int(draw[1] * len(RULES)) if scales == THREE else 0]
        budget = TRAINED[0] + (TRAINED[1] - TRAINED[0]) * draw[2]
        active = student.fitted(scales, dense.scores[name], rule, budget)
        x = student(student.prepare(pixels), active)
        distance = 1 - F.cosine_similarity(dense.features.float(), student.features(x, active).float(), dim=1)
        return kl_divergence(dense.dense, student.predict(x, active)).mean() + distance.mean()

    # Stages

    def check(self) -> None:
        """In float64: all tokens of 16 px are the host; pairs of scales and multiply-adds are what msvit computes."""
        encoder, image = copy.deepcopy(self.encoder), self.encoder.prepare(self.val.pixels[:2]).double()
        vit, differences = encoder.vit.double(), []
        with torch.autocast(image.device.type, enabled=False):
            differences.append((encoder(image, encoder.uniform(2, 2)) - vit.forward_features(image)).abs().max().item())
            for scales, grid in zip(("16/64", "16/32"), encoder.grids, strict=True):
                model = msvit.convert(vit, coarse=grid.coarse, gate=msvit.AllFine(grid.coarse), mode="masked").eval()
                mask = (torch.rand(2, *grid.cells, device=image.device) > 0.5).double()
                active = decide(scales, [mask if scales == "16/64" else mask[:, ::2, ::2], mask], torch.tensor(0.5))
                assert active.sum(1).tolist() == (grid.num_cells + (grid.k**2 - 1) * mask.sum((1, 2))).tolist()
                assert encoder.macs(active.sum(1)).tolist() == model.macs(image, mask).double().tolist()
                wanted = dense_map(model(image, mask=mask).tokens)
                differences.append((encoder.spread(encoder(image, active), active) - wanted).abs().max().item())
        self.clock.note(f"{self.setup}: largest differences in features: {differences}")
        assert max(differences) < 1e-6, differences

    def dense(self) -> None:
        """With smaller inputs: the largest within each budget, and usual ones."""
        encoder, sides = self.encoder, range(16, self.encoder.side + 1, 16)
        shares = {side: encoder.share(torch.tensor((side // 16) ** 2)).item() for side in sides}
        chosen = {max(side for side in sides if shares[side] <= budget) for budget in self.budgets}
        for side in sorted(chosen | {encoder.side, *SHOWN} & set(sides), reverse=True):
            vit = copy.deepcopy(encoder.vit)
            vit.set_input_size(img_size=(side, side))
            found = []
            for part in self.val.pixels.split(BATCH):
                x = vit.forward_features(encoder.prepare(part, side))
                grid = x[:, 1:].mT.unflatten(2, (side // 16, side // 16))
                found.append(predict(vit, x[:, 0] if self.val.dense.ndim == 2 else grid))
            self.add(f"dense, {side} px", torch.cat(found), shares[side])

    def plain(self) -> None:
        self.compare("", dict.fromkeys(SCALES, self.encoder))

    def distilled(self) -> None:
        students = {scales: copy.deepcopy(self.encoder) for scales in self.args.distill.split(",")}
        for scales, student in students.items():
            self.train(student, self.args.steps, 1e-5, 1e-5, partial(self.distillation_loss, student, scales))
        self.compare("distilled ", students)

    def compare(self, training: str, encoders: dict[str, Encoder]) -> None:
        """Two and three scales by every score, each with its encoder."""
        for name, scores in self.val.scores.items():
            for budget in self.budgets:
                pairs: list[Tensor] = []
                for scales, encoder in encoders.items():
                    about: dict[str, Any] = {"score": name, "budget": budget, "rule": RULES[0]}
                    if scales == THREE:
                        losses = {}
                        for rule in RULES:
                            active = encoder.fitted(scales, self.tune.scores[name], rule, budget)
                            losses[rule] = kl_divergence(self.tune.dense, self.tune.run(encoder, active)).mean().item()
                        about |= {"rule": min(losses, key=losses.__getitem__), "losses": losses}
                    active = encoder.fitted(scales, scores, about["rule"], budget)
                    found, num = self.val.run(encoder, active), active.sum(1)
                    macs = encoder.share(num).mean().item()
                    about["tokens"] = num.double().mean().item()
                    counts = self.add(training + scales, found, macs, pairs if scales == THREE else None, **about)
                    pairs += [counts] if macs <= budget else []

    def tome(self) -> None:
        encoder = self.encoder
        vit = copy.deepcopy(encoder.vit).to(torch.bfloat16 if encoder.device.type == "cuda" else torch.float32)
        plain = msvit.convert(vit, gate="all-fine").eval()
        cost, fine = Cost(plain, encoder.grids[1], "macs"), torch.ones(1, *encoder.grids[1].cells, dtype=torch.bool)
        rates = [round(0.995 - 0.005 * index, 3) for index in range(100)]
        for budget in self.budgets:
            shares = ((rate, cost(fine, msvit.ToMe(rate=rate)).item()) for rate in rates)
            rate, share = next(pair for pair in shares if pair[1] <= budget)
            model, found = plain.with_options(reducer=msvit.ToMe(rate=rate)), []
            for part in self.val.pixels.split(BATCH):
                with torch.autocast(encoder.device.type, enabled=False):
                    out = model(encoder.prepare(part).to(vit.pos_embed.dtype))
                found.append(out.logits.float() if self.val.dense.ndim == 2 else predict(vit, dense_map(out.tokens)))
            self.add(f"ToMe, rate {rate}", torch.cat(found), share, budget=budget)


def accuracy(sums: Tensor) -> Tensor:
    """Top-1, or mean IoU, from sums of `counts`."""
    if sums.shape[-1] == 2:
        return sums[..., 0] / sums[..., 1]
    matrix = sums.unflatten(-1, (NUM_CLASSES, NUM_CLASSES))
    both = matrix.diagonal(dim1=-2, dim2=-1)
    union = matrix.sum(-1) + matrix.sum(-2) - both
    return (both / union.clamp(min=1)).sum(-1) / (union > 0).sum(-1)


def cells(row: dict[str, Any]) -> list[str]:
    """Of the table."""
    over = "{:+.2f} +- {:.2f}".format(*(100 * part for part in row["over_two"])) if "over_two" in row else ""
    kl, tokens = (f"{row[key]:.{digits}f}" if key in row else "" for key, digits in (("kl", 4), ("tokens", 0)))
    budget = f"{100 * row['budget']:.0f} %" if "budget" in row else ""
    shares = [f"{100 * row[key]:.{digits}f} %" for key, digits in (("macs", 1), ("accuracy", 2))]
    names = [row["setup"], row["method"], row.get("score", ""), row.get("rule", ""), budget]
    return [*names, shares[0], tokens, shares[1], kl, over]


def table(results: dict[str, Any]) -> str:
    heads = ["", "tokens by", "score", "rule", "budget", "multiply-adds", "tokens", "top-1 or mIoU", "divergence"]
    return markdown([*heads, "over the better pair of scales"], list(map(cells, results["rows"])), source_line(results))


if __name__ == "__main__":
    run_script(main)
