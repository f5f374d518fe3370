"""One call from a dense model to a faster one, with what it costs in agreement and what it saves, measured here.

    model = msvit.speed_up(vit, "photos/", budget=0.6)      # a folder, paths, PIL images, a tensor, or a loader
    model(images)                                           # an ordinary model: what the host gives, with fewer tokens
    model.speed_report                                      # agreement, multiply-adds and times, as printed
"""

import sys
import warnings
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from msvit.backbones import adapt
from msvit.backbones.transformers_host import TransformersHost
from msvit.budget.divergence import compared, dense_model, divergence
from msvit.budget.images import some_images
from msvit.budget.merge_schedules import MAX_IMAGES, fit_reducer
from msvit.budget.thresholds import Cost, calibrate, check_budget, time_values
from msvit.checks import check_flag, check_kind, check_number
from msvit.conversion import check_not_converted, convert
from msvit.fast.compile import compile
from msvit.model import inner_msvit
from msvit.preprocessing import Preprocessing
from msvit.speed_report import SpeedReport

MIN_IMAGES = 8
HELD_BACK = {"cuda": 342, "cpu": 96}  # images, at least a third of MAX_IMAGES; a quarter of fewer
BATCH = {"cuda": 64, "cpu": 8}  # images that are timed
BUSY = 0.9  # of the time on one thread
ROUNDS = 7  # of timing, in each of which both models run once


def speed_up(
    host: nn.Module, images: Any, budget: float = 0.6, preprocessing: Preprocessing | None = None,
    verbose: bool = True,
) -> Any:  # fmt: skip
    """Return a model of the host's weights at a share of its multiply-adds, compiled for the host's device.

        model = msvit.speed_up(vit, "photos/")                     # a folder, with those inside it
        model = msvit.speed_up(vit, images, budget=0.5)            # (n, 3, h, w), prepared as for the host
        model = msvit.speed_up(vit, loader, verbose=False)         # batches, (batch, label), or dicts of pixel_values

    A few hundred images without labels will do. At most three quarters of them, and 1024 (64 on a CPU), choose how many
    tokens each block merges, as in `convert(host, method="auto")`; a Swin gets the gate "default" and is calibrated by
    them. On others, at most 342 (96), three lines are measured and printed: agreement with the dense model,
    multiply-adds, and the time per image beside that of the host as it is given, which is not compiled.
    `verbose=False` prints nothing; `model.speed_report` has the numbers.

    Image files are prepared as the host's `pretrained_cfg` has it, those of transformers' models with the mean and std
    of the published ones; `preprocessing` takes its place, in the model too. The host stays as it is: one in training
    mode, as timm makes them, is copied. What `msvit.compile` does not support runs uncompiled.
    """
    check_kind("host", host, nn.Module, 'a Vision Transformer such as timm.create_model("vit_base_patch16_224")')
    check_not_converted(host)
    check_budget(budget, "macs")
    check_number("budget", budget, below=1, example=0.6)
    check_flag("verbose", verbose)
    if preprocessing is not None:
        check_kind("preprocessing", preprocessing, Preprocessing, "a msvit.Preprocessing(size=224, mean=..., std=...)")
    host = deepcopy(host).eval() if any(part.training for part in host.modules()) else host
    backbone = adapt(host)
    weight = backbone.host.patch_embed.proj.weight
    kind = weight.device.type if weight.device.type in HELD_BACK else "cpu"
    gated = backbone.is_hierarchical  # it merges no tokens
    model = convert(host, gate="default") if gated else convert(host, backbone.fine, "all-fine")
    if preprocessing is not None:
        model.preprocessing = preprocessing
    image = some_images(inner_msvit(model) or model, images, MAX_IMAGES[kind] + HELD_BACK[kind])
    if (num := len(image)) < MIN_IMAGES:
        raise ValueError(
            f"there {'is 1 image' if num == 1 else f'are {num} images'}, but some choose the model's settings and "
            f"others are held back to compare it; pass {MIN_IMAGES} or more, better a few hundred"
        )
    held, fitted = image.tensor_split([max(num // 4, num - MAX_IMAGES[kind])])
    held = held.to(weight.device)
    if verbose:
        if gated:
            print("a Swin merges no tokens: it gets a gate, with which it should be trained", file=sys.stderr)
        print(f"choosing by {len(fitted)} images, comparing on {len(held)}", file=sys.stderr, flush=True)
        if kind == "cpu" and (busy := busy_cores()) is not None:
            print(busy, file=sys.stderr, flush=True)
    # As convert(host, method="auto", ...) does, but with the time that is left.
    model = calibrate(model, fitted, budget) if gated else fit_reducer(model, fitted, budget, progress=verbose)
    fast, reason = compiled(model)
    if verbose and reason is not None:
        print(f"it runs uncompiled: {reason}", file=sys.stderr)
    fast.speed_report = measure(model, fast, backbone.host, held, BATCH[kind])
    (inner_msvit(fast) or fast)._checked_batch = False  # the first of its user comes later
    if verbose:
        print(fast.speed_report)
    return fast


def compiled(model: Any) -> tuple[Any, str | None]:
    """Return the model, compiled if that is supported for it and the device where it is, or else why not."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="msvit.compile changes nothing here")
        fast = compile(model)
    inner: Any = inner_msvit(fast) or fast
    reason = inner.unsupported_reason()
    return (fast if reason is None else model), reason


def busy_cores() -> str | None:
    """Return a sentence if a product on all threads takes as long as on one, as where other processes use the cores."""
    if (num := torch.get_num_threads()) == 1:
        return None
    matrix = torch.ones(512, 512, device="cpu", dtype=torch.float32)

    def run(threads: float) -> None:
        torch.set_num_threads(int(threads))
        matrix @ matrix

    try:
        together, alone = time_values(run, (num, 1), ROUNDS)
    finally:
        torch.set_num_threads(num)
    if together < BUSY * alone:
        return None
    return (
        f"{num} threads are no faster than one here: other processes use the cores, or there are fewer than threads, "
        f"and all takes longer; start Python with OMP_NUM_THREADS set to the number of free cores"
    )


@torch.inference_mode()
def measure(model: Any, fast: Any, host: nn.Module, held: Tensor, batch_size: int) -> SpeedReport:
    """Compare and time a model, of which `fast` is perhaps compiled, with its host."""
    plain, plain_fast = (inner_msvit(each) or each for each in (model, fast))
    dense, batches = dense_model(plain), held.split(batch_size)
    agreement, macs = [], []
    for batch in batches:
        wanted, output = dense(batch), plain_fast(batch)
        if plain.num_classes:
            one, other = compared(wanted), compared(output)
            same = (one > 0) == (other > 0) if one.shape[1] == 1 else one.argmax(1) == other.argmax(1)
            agreement.append(same.flatten().cpu().double())
        else:
            agreement.append(1 - divergence(plain, wanted, output).cpu().double())
        macs.append(plain.macs(batch).cpu().double())
    sides = getattr(host.patch_embed, "img_size", None)
    fits = isinstance(host, TransformersHost) or sides is None or tuple(sides) == tuple(held.shape[2:])
    runs = (host if fits else dense, fast)  # timm's models take images of one size

    def run(index: float) -> None:
        runs[int(index)](batches[0])
        if held.is_cuda:
            torch.cuda.synchronize(held.device)

    seconds = time_values(run, (0, 1), ROUNDS)
    ms = [1e3 * each / len(batches[0]) for each in seconds]
    return SpeedReport(
        agreement=torch.cat(agreement).mean().item(), has_classes=bool(plain.num_classes),
        macs_share=torch.cat(macs).mean().item() / Cost(plain, plain.grid(held), "macs").dense, ms=ms[1],
        dense_ms=ms[0], num_images=len(held), batch_size=len(batches[0]), device=held.device.type,
        compiled=fast is not model,
    )  # fmt: skip
