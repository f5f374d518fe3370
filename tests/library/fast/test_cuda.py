"""On a GPU the compiled model gives what the plain one gives, for any mask, in inference and in training.

All kinds of hosts, with reducers and without; and nothing waits for the device.
"""

from collections.abc import Callable
from copy import deepcopy

import pytest
import torch
from tiny import KINDS, SWINS, assert_same, assert_same_output, batch_of, images, mixed_mask, relative_error, tiny_model
from torch import Tensor

import msvit
from msvit.execution import MODES
from msvit.fast import plan
from msvit.fast.fp8_encoder import Fp8Encoder, multiply_fp8, quantize_rows
from msvit.fast.fused_plan import FusedPlan
from msvit.swin.encoder import SwinEncoder
from msvit.tokens.tokenizer import tokenize
from msvit.types import GateOutput

pytestmark = pytest.mark.gpu

REDUCERS = {
    "evit": lambda: msvit.EViT(0.6, at=(1, 3)),
    "dynamicvit": lambda: msvit.DynamicViT(0.6, at=(1, 3)),
    "tome": lambda: msvit.ToMe(r=3),
}
PLAIN, CAPTURED = {"inductor": False, "graphs": False}, {"inductor": False}
COMPILED, BLOCKS = {}, {"inductor": "blocks"}


def model_of(name: str = KINDS[0], dtype: torch.dtype = torch.float32, **options: object) -> msvit.MSViT:
    """A host by its name, or the usual one with a reducer by its. A Swin with heads of 16 numbers, the smallest."""
    if name in REDUCERS:
        return tiny_model(dtype=dtype, depth=4, reducer=REDUCERS[name](), **options).cuda().eval()
    own = {"num_heads": (1, 2, 4, 8)} if name in SWINS else {"dynamic_img_size": True}
    return tiny_model(name, dtype, **own, **options).cuda().eval()


def pair(name: str = KINDS[0], **options: object) -> tuple[msvit.MSViT, msvit.MSViT]:
    model = model_of(name)
    return model, msvit.compile(model, **options)


@pytest.fixture(params=["one graph", "buckets"])
def regime(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """With room for all cells fine, or as for large batches."""
    monkeypatch.setattr(plan, "SMALL", 8 if request.param == "buckets" else 10**6)
    monkeypatch.setattr(plan, "ALIGN", 32 if request.node.callspec.params.get("name") in SWINS else 4)


@pytest.mark.parametrize(
    ("name", "gate", "options"),
    [
        *((name, None, options) for name in KINDS for options in (PLAIN, CAPTURED)),
        *((KINDS[0], None, options) for options in (COMPILED, BLOCKS)),
        *((name, gate, o) for name in REDUCERS for gate in (None, msvit.AllFine(8)) for o in (CAPTURED, COMPILED)),
        *((name, gate, options) for name in SWINS for gate in (None, msvit.LearnedGate(32, grid=(2, 2)))
          for options in (PLAIN, CAPTURED, COMPILED)),
    ],
)  # fmt: skip
@pytest.mark.usefixtures("regime")
def test_the_same_output_for_any_mask(name: str, gate: msvit.Gate | None, options: dict[str, bool | str]) -> None:
    if name in SWINS and gate is not None:  # cells of 32 px
        model = msvit.convert(model_of(name).host, gate.coarse, gate).eval()
    else:
        model = model_of(name, gate=gate)
    fast = msvit.compile(model, **options)
    with torch.inference_mode():
        for turn, size in enumerate((4, 4, 3, 4)):
            image, mask = batch_of(model, size)
            image, drawn = image * (turn + 1), (torch.rand_like(mask) < turn / 3).float()
            for given in (None, mask, drawn):
                assert_same_output(fast(image, mask=given), model(image, mask=given), 1e-4)


@pytest.mark.parametrize("name", SWINS)
def test_in_half_precision_a_swin_is_nearly_the_same(name: str) -> None:
    model = model_of(name)
    image, mask = batch_of(model)
    with torch.inference_mode():
        want = model(image, mask=mask).logits
        got = msvit.compile(model.bfloat16())(image.bfloat16(), mask=mask).logits
    assert relative_error(got.float(), want) < 0.05


FUSED = (KINDS[0], KINDS[1], KINDS[4], KINDS[5])


def halves(name: str, dtype: torch.dtype) -> tuple[msvit.MSViT, msvit.MSViT]:
    """A model in 32 bits whose weights fit into 16, and the same in 16."""
    model = model_of(name).eval()
    with torch.no_grad():
        for weight in model.parameters():  # biases, positions and layer scales are 0 or constant at first
            weight.add_(0.2 * torch.randn_like(weight))
            weight.copy_(weight.to(dtype))
    return model, deepcopy(model).to(dtype)


@pytest.mark.parametrize("name", FUSED)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.usefixtures("regime")
def test_the_fused_encoder_is_as_near_to_float32_as_the_plain_model(name: str, dtype: torch.dtype) -> None:
    model, half = halves(name, dtype)
    fast = msvit.compile(half, inductor=False)
    with torch.inference_mode():
        for turn, size in enumerate((4, 4, 3, 4, 4)):  # what is predicted of the next batch is too little, too much
            image, mask = batch_of(model, size)
            mask = mask if turn % 2 else (torch.rand_like(mask) < turn / 3).float()
            want = model(image, mask=mask)
            outputs = [each(image.to(dtype), mask=mask.to(dtype)) for each in (half, fast)]
            for part in (lambda out: out.logits, lambda out: msvit.dense_map(out.tokens)):
                plain, fused = (relative_error(part(out).float(), part(want)) for out in outputs)
                assert fused < 1.5 * plain + 2e-3
    assert {type(plan) for plan in fast._plans.values()} == {FusedPlan}


@pytest.mark.parametrize("name", REDUCERS)
def test_fused_blocks_reduce_as_the_model_does(name: str) -> None:
    model, half = halves(name, torch.float16)
    image, mask = batch_of(model)
    with torch.inference_mode():
        got = msvit.compile(half, inductor=False)(image.half(), mask=mask.half()).logits.float()
        want = model(image, mask=mask).logits
    errors = (got - want).norm(dim=1) / want.norm(dim=1)
    assert errors.sort().values[:-1].max() < 2e-2  # of one image other tokens may be kept: a tie in 16 bits


@pytest.mark.parametrize("name", REDUCERS)
@pytest.mark.parametrize("mode", MODES)
def test_modes_agree_with_a_reducer(name: str, mode: str) -> None:
    found = []
    for each in (mode, "masked"):
        torch.manual_seed(0)
        model = model_of(name, mode=each)
        image, mask = batch_of(model)
        with torch.no_grad():
            found.append(model(image, mask=mask))
    assert_same_output(*found, 1e-4)


@pytest.mark.parametrize(
    ("mode", "options"),
    [
        *(("packed", options) for options in (CAPTURED, PLAIN, COMPILED, BLOCKS)),
        *((mode, options) for mode in ("trimmed", "masked") for options in (CAPTURED, COMPILED)),
    ],
)
@pytest.mark.usefixtures("regime")
def test_training_gives_the_same_gradients(mode: str, options: dict[str, bool | str]) -> None:
    model = model_of(mode=mode).train()
    fast = msvit.compile(model, **options).train()
    grads = []
    for each in (model, fast):
        for turn in range(3):  # gradients add up; the mask changes the bucket
            image, mask = batch_of(model)
            mask = mask if turn else 1 - mask
            mask.requires_grad_()
            out = each(image, mask=mask)
            (out.logits.square().sum() + out.tokens.prefix.sum()).backward()
        grads.append([mask.grad, *[p.grad for p in model.backbone.parameters()]])
        model.zero_grad()
    assert_same(grads[1], grads[0], 1e-3)


@pytest.mark.parametrize("options", [CAPTURED, COMPILED, BLOCKS])
@pytest.mark.usefixtures("regime")
def test_under_autocast_gradients_are_as_near_to_float32_as_the_plain_models(options: dict[str, bool | str]) -> None:
    model = model_of().train()
    fast, found = msvit.compile(model, **options).train(), []
    for each, half in ((model, False), (model, True), (fast, True)):
        model.zero_grad()
        for turn in range(3):
            image, mask = batch_of(model)
            with torch.autocast("cuda", torch.bfloat16, enabled=half):
                logits = each(image, mask=mask if turn else 1 - mask).logits
            logits.float().square().sum().backward()
        found.append([p.grad for p in model.backbone.parameters()])
    exact, *others = (torch.cat([grad.flatten() for grad in grads]) for grads in found)
    plain, compiled = (relative_error(each, exact) for each in others)
    assert compiled < 1.5 * plain + 2e-3


@pytest.mark.parametrize("kind", ["learned", "context"])
@pytest.mark.parametrize("options", [CAPTURED, COMPILED, BLOCKS])
@pytest.mark.usefixtures("regime")
def test_the_gate_learns_through_graphs(
    kind: str, options: dict[str, bool | str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the same noise it gets the gradients of the uncompiled one."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)  # convolutions would differ by their algorithms
    model = model_of(gate=msvit.gates.GATES[kind](coarse=8, grid=(2, 2))).train()
    torch.nn.init.normal_(model.gate.head.weight)
    torch.nn.init.zeros_(model.gate.head.bias)
    fast = msvit.compile(model, **options).train()
    image, grads = batch_of(model)[0], []
    for each in (model, fast):
        model.zero_grad()
        for turn in range(3):  # captured, replayed
            torch.manual_seed(turn)
            out = each((turn + 1) * image)
            (out.logits.square().sum() + out.gate.logits.square().sum()).backward()
        grads.append([out.gate.mask.detach(), *[p.grad for p in model.parameters()]])
    assert_same(grads[1], grads[0], 3e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", [CAPTURED, COMPILED])
@pytest.mark.usefixtures("regime")
def test_images_are_read_where_they_lie(dtype: torch.dtype, options: dict[str, bool | str]) -> None:
    """By their address, in any memory format, aligned or not."""
    model = model_of(dtype=dtype, gate=msvit.gates.GATES["context"](coarse=8, grid=(2, 2)))
    torch.nn.init.normal_(model.gate.head.weight)
    fast, image = msvit.compile(model, **options), batch_of(model)[0].to(dtype)
    unaligned = torch.empty(1 + image.numel(), device="cuda", dtype=dtype)[1:].view(image.shape)
    last = torch.empty_like(image, memory_format=torch.channels_last)
    with torch.inference_mode():
        model.gate.threshold = model.gate.scores(image).median().item()
        for memory in (None, None, unaligned, last, None):
            image = image.flip(0, 2) + 0.5
            out = fast(image if memory is None else memory.copy_(image))
            want = model(image, mask=out.gate.mask)
            assert relative_error(out.logits.float(), want.logits.float()) < (1e-3 if dtype is torch.float32 else 3e-2)
            assert relative_error(out.gate.logits, model.gate.scores(image)) < 3e-2
    (made,) = fast._plans.values()
    assert made.image is None
    assert int(made.address) == image.data_ptr()


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
def test_after_training_with_a_fused_optimizer_it_evaluates_with_the_new_weights(optimizer: type) -> None:
    model, fast = pair(inductor=False)
    image, mask = batch_of(model)
    with torch.no_grad():
        fast(image, mask=mask)
    step = optimizer(fast.parameters(), lr=0.1, fused=True)
    fast.train()
    fast(image, mask=mask).logits.square().sum().backward()
    step.step()
    fast.eval()
    model.eval()
    with torch.no_grad():
        assert relative_error(fast(image, mask=mask).logits, model(image, mask=mask).logits) < 1e-4


def test_a_frozen_model_passes_the_masks_gradient_on() -> None:
    model, fast = pair(inductor=False)
    model.requires_grad_(False)
    grads = []
    for each in (model, fast):
        image, mask = batch_of(model)
        each(image, mask=mask.requires_grad_()).logits.square().sum().backward()
        grads.append(mask.grad)
    assert relative_error(grads[1], grads[0]) < 1e-3


@pytest.mark.parametrize("name", ["vit_small_patch16_224", "deit_small_distilled_patch16_224"])
def test_what_no_graph_can_hold_runs_as_it_did(name: str) -> None:
    """float64, which our kernels do not take, and heads of a size that only SDPA takes in float32."""
    for dtype, dim in ((torch.float64, 16), (torch.float32, 12)):
        model = model_of(name, dtype, embed_dim=2 * dim)
        fast, (image, mask) = msvit.compile(model), batch_of(model)
        with torch.no_grad():
            got, want = (each(image, mask=mask).logits for each in (fast, model))
        assert relative_error(got, want) < 1e-5


@pytest.mark.parametrize("name", [KINDS[0], SWINS[0]])
def test_changed_weights_are_noticed(name: str) -> None:
    model, fast = pair(name, inductor=name in SWINS)
    image, mask = batch_of(model)
    table = "relative_position_bias_table"  # a Swin's are made into biases beforehand
    with torch.no_grad():
        fast(image, mask=mask)
        for key, parameter in model.named_parameters():
            if name not in SWINS or key.endswith(f"layers.0.blocks.0.attn.{table}"):
                parameter.mul_(-3 if name in SWINS else 0.9)
        assert relative_error(fast(image, mask=mask).logits, model(image, mask=mask).logits) < 1e-4


def test_the_results_of_one_call_survive_the_next() -> None:
    model, fast = pair(inductor=False)
    image, mask = batch_of(model)
    with torch.no_grad():
        first = fast(image, mask=mask)
        kept = first.logits.clone(), first.tokens.x.clone(), first.gate.mask.clone()
        fast(-image, mask=1 - mask)
    assert all(torch.equal(a, b) for a, b in zip(kept, (first.logits, first.tokens.x, first.gate.mask), strict=True))


def test_autocast_is_honoured() -> None:
    model, fast = pair(inductor=False)
    image, mask = batch_of(model)
    with torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
        want, got = model(image, mask=mask).logits, fast(image, mask=mask).logits
    assert got.dtype is torch.bfloat16
    assert relative_error(got.float(), want.float()) < 0.02


def without_waiting(run: Callable[[], Tensor]) -> tuple[Tensor, Tensor]:
    """What it gives at first, and what it gives where waiting for the device is an error."""
    with torch.inference_mode():
        want = run()
        torch.cuda.set_sync_debug_mode("error")
        try:
            return want, run()
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_with_a_budget_and_in_small_batches_nothing_waits_for_the_device() -> None:
    model, fast = pair(inductor=False)
    image, mask = batch_of(model)
    mask = mask.bool()
    assert torch.equal(*without_waiting(lambda: model(image, mask=mask, max_tokens=60).logits))
    assert torch.equal(*without_waiting(lambda: fast(image, mask=mask).logits))


def test_in_a_swins_encoder_nothing_waits_for_the_device() -> None:
    model = model_of(SWINS[0])
    image, mask = batch_of(model)
    encoder, grid = SwinEncoder(model.backbone, model.coarse), model.grid(image)

    def run() -> Tensor:
        indices = encoder.pack_indices(mask, mask, grid, 64 * 16, 0)
        return encoder(image, mask, indices, encoder.tables(grid), False).logits

    assert torch.equal(*without_waiting(run))


@pytest.mark.parametrize("name", REDUCERS)
@pytest.mark.parametrize("share", [0.5, 1.0], ids=["ragged", "all fine"])
def test_with_a_reducer_nothing_waits_for_the_device(name: str, share: float) -> None:
    model = model_of(name)
    image, mask = batch_of(model)
    layout = MODES["packed"](GateOutput.from_mask((torch.rand_like(mask) < share).float()), model.grid(image), 1)
    with torch.inference_mode():
        tokens, left = tokenize(image, layout, model.backbone), []

    def run() -> Tensor:
        left.append(model.backbone(tokens, reducer=model.reducer))
        return left[-1].x

    without_waiting(run)
    assert left[-1].layout.has_padding == (share < 1)


@pytest.mark.parametrize("name", [*REDUCERS, SWINS[0]])
def test_training_in_half_precision_gives_gradients(name: str) -> None:
    """Accelerated too, where it is the plain model that runs."""
    model = model_of(name).train()
    image, mask = batch_of(model)
    for mode in model.backbone.modes:
        model = model.with_options(mode=mode)
        for each in (model, msvit.compile(model)):
            model.zero_grad()
            with torch.autocast("cuda", torch.bfloat16):
                each(image, mask=mask if name in REDUCERS else None).logits.float().square().sum().backward()
            assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)
            assert name in REDUCERS or all(p.grad is not None for p in model.gate.parameters())


@pytest.mark.parametrize("learns", [False, True])
def test_a_segmenter_is_the_same(learns: bool) -> None:
    model = msvit.convert_segmenter(model_of().host, 5, 8, "learned").eval()
    fast = msvit.compile(model, inductor=False)
    image, mask = images(4, 13, 24, torch.float32).cuda(), mixed_mask(4, 2, 3, torch.float32).cuda()
    with torch.set_grad_enabled(learns):
        want, got = model(image, mask), fast(image, mask)
    assert got.logits.shape == (4, 5, 13, 24)
    assert relative_error(got.logits, want.logits) < 1e-4
    if learns:
        weights = [p for name, p in model.named_parameters() if "host.head" not in name and "gate" not in name]
        assert_same(*(torch.autograd.grad(out.logits.square().sum(), weights) for out in (got, want)), 1e-3)


@pytest.mark.parametrize("options", [CAPTURED, COMPILED])
@pytest.mark.usefixtures("regime")
def test_a_segmenter_is_the_same_without_the_hosts_head(options: dict[str, bool | str]) -> None:
    model = msvit.convert_segmenter(model_of().host, 7, gate="learned", decoder="linear").eval()
    fast = msvit.compile(model, **options)
    image, mask = batch_of(model.encoder)
    with torch.inference_mode():
        for given in (None, mask):
            assert_same_output(fast(image, given), model(image, given), 1e-4)
    grads = []
    for each in (model.train(), fast.train()):
        model.zero_grad()
        each(image, mask).logits.square().sum().backward()
        grads.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    assert len(grads[0]) > 25
    assert all(relative_error(got, want) < 1e-3 for want, got in zip(*grads, strict=True))


@pytest.mark.usefixtures("regime")
def test_a_captured_gate_reads_the_threshold_of_the_model() -> None:
    model, fast = pair(**CAPTURED)
    image, _ = batch_of(model)
    with torch.no_grad():
        for threshold, count in ((100.0, 4), (-100.0, 16)):
            model.gate.threshold = threshold
            assert fast(image).tokens.count.tolist() == [count] * len(image)


# In FP8: near the model in float32

CAPABLE = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9)
needs_fp8 = pytest.mark.skipif(not CAPABLE, reason="needs a CUDA device of compute capability 8.9 or newer")
FP8_HOSTS = (KINDS[0], KINDS[1], KINDS[4])  # a class token; layer scales and registers; pooling by attention
BATCHES = {1: 0.4, 3: 0.4, 256: 0.15}  # one graph, and buckets; relative error of logits: of few they vary much


def fp8_pair(name: str = KINDS[0]) -> tuple[msvit.MSViT, msvit.MSViT]:
    """A model in 32 bits whose weights fit into bfloat16, and the same compiled for FP8."""
    gate = msvit.LearnedGate(coarse=8, grid=(2, 2))
    model = tiny_model(name, torch.float32, gate=gate, embed_dim=64, num_heads=4).cuda().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())
    return model, msvit.compile(deepcopy(model).bfloat16(), inductor=False, dtype="fp8")


def half_batch(num: int) -> tuple[Tensor, Tensor]:
    """Images that are bfloat16 numbers, in float32, and their masks."""
    image = images(num, dtype=torch.bfloat16).float().cuda()
    return image, mixed_mask(max(2, num), 2, 2, torch.float32)[:num].cuda()


@needs_fp8
@pytest.mark.parametrize("rows", [1, 17, 197, 1000])
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_product_in_fp8_has_the_scales_of_both_sides(rows: int, has_bias: bool) -> None:
    x = torch.randn(rows, 64, device="cuda") * torch.rand(rows, 1, device="cuda")
    weight = torch.randn(48, 64, device="cuda") * 10 * torch.rand(48, 1, device="cuda")
    bias = torch.randn(48, device="cuda").bfloat16() if has_bias else None
    sides = [quantize_rows(each) for each in (x, weight)]
    out = multiply_fp8(*sides, bias, torch.empty(rows, 48, device="cuda", dtype=torch.bfloat16))
    restored = [value.double() * scale for value, scale in sides]
    want = restored[0] @ restored[1].T + (0 if bias is None else bias.double())
    assert relative_error(out.double(), want) < 5e-3
    assert relative_error(restored[0], x.double()) < 0.03


@needs_fp8
@pytest.mark.parametrize("name", FP8_HOSTS)
@pytest.mark.parametrize("batch", BATCHES)
def test_logits_in_fp8_are_near_those_in_float32(name: str, batch: int) -> None:
    model, fast = fp8_pair(name)
    assert type(fast.fused) is Fp8Encoder
    image, mask = half_batch(batch)
    with torch.inference_mode():
        for given in (torch.zeros_like(mask), torch.ones_like(mask), mask):  # captured, replayed
            want = model(image, mask=given)
            got = fast(image.bfloat16(), mask=given.bfloat16())
            assert relative_error(got.logits.float(), want.logits) < BATCHES[batch]
            assert relative_error(msvit.dense_map(got.tokens).float(), msvit.dense_map(want.tokens)) < 0.12
            assert torch.equal(got.tokens.count, want.tokens.count)
        encoded = fast.encode(image.bfloat16(), mask=mask.bfloat16())[1]
        assert relative_error(msvit.dense_map(encoded).float(), msvit.dense_map(got.tokens).float()) < 0.05
    same = (got.logits.argmax(1) == want.logits.argmax(1)).float().mean()
    assert batch < 256 or same > 0.8
    assert {type(plan) for plan in fast._plans.values()} == {FusedPlan}


@needs_fp8
@pytest.mark.parametrize("batch", BATCHES)
def test_replays_in_fp8_see_images_decisions_and_weights_that_change(batch: int) -> None:
    model, fast = fp8_pair(FP8_HOSTS[1])
    image, _ = half_batch(batch)
    fast.gate.threshold = model.gate.scores(image).median().item()
    with torch.inference_mode(False), torch.no_grad():
        for turn in range(4):
            got = fast((turn + 1) * image.bfloat16())
            want = model((turn + 1) * image, mask=got.gate.mask.float())
            assert relative_error(got.logits.float(), want.logits) < BATCHES[batch]
            if turn == 1:
                for old, new in zip(model.parameters(), fast.parameters(), strict=True):
                    old.copy_((-old if old.ndim == 2 else old).bfloat16())
                    new.copy_(old)
