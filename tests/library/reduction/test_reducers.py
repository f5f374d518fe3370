"""EViT, DynamicViT and ToMe: the published methods on dense tokens, and one definition on mixed ones."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import published
import pytest
import torch
from cases import each_once, pairwise
from tiny import KINDS, assert_same, assert_same_output, gradients, images, mixed_mask, tiny_host

import msvit
from msvit.execution import MODES
from msvit.reduction import dynamicvit, make_reducer
from msvit.reduction.attention_recorder import AttentionRecorder
from msvit.tokens.tokenizer import tokenize
from msvit.types import GateOutput, Heads, Layout, TokenBatch

DEPTH = 4
AT = (1, 3)
MAKERS: dict[str, Callable[[], msvit.Reducer]] = {
    "evit": lambda: msvit.EViT(0.6, at=AT),
    "evit without fusing": lambda: msvit.EViT(0.6, at=AT, fuse=False),
    "dynamicvit": lambda: msvit.DynamicViT(0.6, at=AT),
    "tome r": lambda: msvit.ToMe(r=(3, 0, 2, 9)),
    "tome rate": lambda: msvit.ToMe(rate=0.7),
}
NOTHING: dict[str, Callable[[], msvit.Reducer]] = {
    "evit": lambda: msvit.EViT(1.0, at=AT),
    "dynamicvit": lambda: msvit.DynamicViT(1.0, at=AT),
    "tome": lambda: msvit.ToMe(r=0),
}


def host_of(name: str = "vit_small_patch16_224", **options: object) -> torch.nn.Module:
    return tiny_host(name, dynamic_img_size=True, depth=DEPTH, **options)


def model_of(
    host: torch.nn.Module, reducer: msvit.Reducer, mode: str = "packed", train: bool = False
) -> msvit.MSViT:
    gate = msvit.AllFine(coarse=8)
    model = msvit.convert(host, coarse=8, gate=gate, mode=mode, reducer=reducer)
    draw = torch.Generator().manual_seed(5)
    for weight in reducer.parameters():  # predictors start with nearly equal answers: give them weight
        weight.data = 0.3 * torch.randn(weight.shape, dtype=torch.float64, generator=draw).to(weight)
    return model.train(train)


def fits(kind: str, name: str, *other: object) -> bool:
    """EViT needs a class token."""
    return name == "dynamicvit" or "tome" in name or kind not in KINDS[4:]


@pairwise(fits, kind=KINDS, name=NOTHING, mode=MODES)
def test_with_nothing_to_take_away_it_is_the_host(kind: str, name: str, mode: str) -> None:
    host, image = host_of(kind), images(3)
    with torch.no_grad():
        assert_same([model_of(host, NOTHING[name](), mode)(image).logits], [host(image)], 1e-8)


PLAIN, DEIT3, DISTILLED = "vit_small_patch16_224", "deit3_small_patch16_224", "deit_small_distilled_patch16_224"


@pytest.mark.parametrize(
    ("name", "method", "options"),
    [(name, "evit", {"rate": rate, "at": AT, "fuse": fuse})
     for name in (PLAIN, DEIT3) for rate in (0.3, 0.6, 0.7) for fuse in (True, False)]
    + [(name, "tome", {"r": r})  # with 8 the last blocks have fewer left than are to be merged
       for name in (PLAIN, DISTILLED) for r in (1, 3, 8, (0, 5, 0, 4))]
    + [(PLAIN, "dynamicvit", {"rate": rate, "at": AT}) for rate in (0.4, 0.7)],
)  # fmt: skip
def test_all_fine_is_the_method_as_published(name: str, method: str, options: dict[str, Any]) -> None:
    """Values, the map of features, and the gradients of all weights."""
    host, image, reducer = host_of(name), images(4), make_reducer(method, **options)
    out = model_of(host, reducer)(image)
    if method == "tome":
        want, unmerged = published.tome(host, image, **options, distilled=name == DISTILLED)
        assert_same([msvit.dense_map(out.tokens).flatten(2)], [unmerged[:, -16:].transpose(1, 2)], 1e-12)
    else:
        predictors = [reducer.predictors] if method == "dynamicvit" else []
        want = getattr(published, method)(host, *predictors, image, **options)
    assert_same([out.logits], [want], 1e-12)
    assert_same(gradients(out.logits, host), gradients(want, host))


@pytest.mark.parametrize("name", KINDS[:2])
@torch.no_grad()
def test_recorded_attention_is_that_of_the_class_token_in_the_later_blocks(name: str) -> None:
    host, image, recorder = tiny_host(name), images(), AttentionRecorder()
    model_of(host, recorder)(image)
    first, later = host.blocks
    x = published.mlp(first, published.attend(first, published.embed(host, image))[0])
    row = published.attend(later, x)[1][:, :, 0, host.num_prefix_tokens :].mean(1)
    cells = row.view(3, 2, 2, 2, 2).sum((2, 4))  # 4x4 patches, two by two
    assert_same([recorder.attention_map()], [cells / cells.sum((1, 2), keepdim=True)])


@pytest.fixture
def _without_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = dynamicvit.straight_through
    monkeypatch.setattr(dynamicvit, "straight_through", lambda logits, noise: draw(logits))


@pytest.mark.usefixtures("_without_noise")
@pytest.mark.parametrize("mode", MODES)
def test_dynamicvit_in_training_is_the_published_policy(mode: str) -> None:
    """Dropped tokens go on seeing themselves in the original, not here: nobody else sees them, so values agree."""
    host, image = host_of(), images(4)
    reducer = msvit.DynamicViT(0.7, at=AT)
    out = model_of(host, reducer, mode, train=True)(image)
    want, kept = published.dynamicvit_training(host.eval(), reducer.predictors, image, AT)
    assert_same([out.logits, *out.tokens.kept], [want, *(policy.mean(1) for policy in kept)], 1e-12)
    assert all(0 < share.mean() < 1 for share in out.tokens.kept)
    # The last stage's decisions are followed by one attention: gradients agree too.
    assert_same(*(gradients(logits, reducer.predictors[1]) for logits in (out.logits, want)))


@each_once(fits, kind=KINDS, name=MAKERS)
def test_modes_agree(kind: str, name: str) -> None:
    """Batches that mix all fine, all coarse and random images: logits, maps, counts, and with spare slots."""
    host, image, mask = host_of(kind), images(4), mixed_mask(4, 2, 2)
    exact = int(4 * (host.num_prefix_tokens + 4) + 3 * mask.sum())
    found = []
    for mode, max_tokens in (("masked", None), ("trimmed", None), ("packed", None), ("packed", exact), ("packed", 90)):
        with torch.no_grad():
            model = model_of(host, MAKERS[name](), mode)
            found.append(model(image, mask=mask, max_tokens=max_tokens))
    for out in found[1:]:
        assert_same_output(out, found[0])
    packed = found[2].tokens
    assert packed.layout.token.shape[0] == int((packed.count + host.num_prefix_tokens).sum()), "they are really gone"


@pytest.mark.usefixtures("_without_noise")
@pairwise(fits, kind=[KINDS[0], KINDS[2], *KINDS[4:]], name=MAKERS, train=[False, True])  # rotary positions, poolings
def test_gradients_of_weights_and_of_active_tokens_agree(kind: str, name: str, train: bool) -> None:
    host, reducer, found = host_of(kind), MAKERS[name](), []
    image, mask = images(4), mixed_mask(4, 2, 2)
    for mode in MODES:
        model = model_of(host, reducer, mode, train)
        layout = MODES[mode](GateOutput.from_mask(mask), model.grid(image), model.backbone.num_prefix)
        weight = layout.weight.clone().requires_grad_()  # a leaf: what a gate would get
        tokens = tokenize(image, replace(layout, weight=weight), model.backbone)
        logits = model.backbone.head(model.backbone(tokens, reducer=reducer))
        learning = [reducer] if train else []
        of_slots, *others = gradients(logits, weight, host, *learning)
        active = weight.new_zeros(4, layout.num_prefix + layout.grid.num_ids)
        active[layout.image[layout.valid], layout.token[layout.valid]] = of_slots[layout.valid]
        found.append([*others, active])
    for other in found[1:]:
        for mine, plain in zip(other, found[0], strict=True):
            assert (mine - plain).norm() < 1e-9 * max(1.0, plain.norm())


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("mode", MODES)
def test_every_patch_knows_its_token(name: str, mode: str) -> None:
    """Areas are those of the map of owners; nothing is lost but by dropping; the map can be undone."""
    with torch.no_grad():
        tokens = model_of(host_of(), MAKERS[name](), mode)(images(4), mask=mixed_mask(4, 2, 2)).tokens
    layout, slots = tokens.layout, tokens.layout.patch_slots
    active = layout.valid[slots]
    area = torch.zeros(4, dtype=torch.long).index_add(0, layout.image, layout.area)
    drops = name in ("dynamicvit", "evit without fusing")
    assert (area < 16).all() if drops else (area == 16).all()
    assert torch.equal(layout.area[slots] > 0, active)
    assert torch.equal((layout.owner < 0).sum(1), 16 - area)
    if "tome" in name:  # origins and sizes are kept apart from each other
        assert torch.equal(layout.size[slots][active], layout.area[slots][active].double())
    dense = msvit.dense_map(tokens)
    assert torch.equal(dense.abs().sum(1).flatten(1) == 0, layout.owner < 0)
    assert torch.equal(msvit.from_dense(dense, layout)[active], tokens.x[slots][active])


@pytest.mark.parametrize("mode", MODES)
def test_merging_keeps_the_mean_over_the_area_and_how_often_tokens_count_together(mode: str) -> None:
    """A coarse token of 2 x 2 patches weighs 4 in means and counts 4 times in attention."""
    reducer = msvit.ToMe(r=3)
    model, mask = model_of(host_of(), reducer, mode), mixed_mask(4, 2, 2)
    _, tokens = model.embed(images(4), mask)
    start, keys = tokens.layout, torch.randn(tokens.x.shape[0], 2, 16, dtype=torch.float64)
    merged = reducer.begin(tokens)
    for index in range(2):
        keys = keys[: merged.x.shape[0]]
        merged = reducer.between(index, start, merged, Heads(keys, keys))
    totals = []
    for each in (tokens, merged):
        area = (each.layout.weight * each.layout.area)[:, None]
        totals.append(each.layout.sum_by_image(area * each.x))
    torch.testing.assert_close(totals[1], totals[0])
    assert (merged.count < start.count).all()
    num_fine = mask.sum((1, 2)) * 4
    counts = merged.layout.sum_by_image((merged.layout.weight * merged.layout.size)[:, None])[:, 0]
    torch.testing.assert_close(counts, 1 + num_fine + (4 - mask.sum((1, 2))) * 4)


@pytest.mark.parametrize("mode", MODES)
def test_the_fused_token_counts_once_and_the_gate_does_not_decide_about_it(mode: str) -> None:
    """Whether a fine or a coarse token was in its place, whose weight must not become its own.

    In the next stage it is one of the candidates.
    """
    image = images(4)
    model = model_of(host_of(), msvit.EViT(0.3, at=(1,)), mode)
    layout = model(image, mask=torch.zeros(4, 2, 2)).tokens.layout
    kept, fused, prefix = ((layout.area == num) & layout.valid for num in (4, 8, 0))
    assert (int(kept.sum()), int(fused.sum()), int(prefix.sum())) == (8, 4, 4)
    assert layout.size is None
    assert model_of(host_of(), msvit.EViT(0.5, at=AT), mode)(image).tokens.count.tolist() == [6] * 4  # 16 -> 9 -> 5 + 1
    mask = torch.ones(4, 2, 2, dtype=torch.float64, requires_grad=True)
    after = model_of(host_of(), msvit.EViT(0.5, at=(1,)), mode)(image, mask=mask).tokens
    assert after.count.tolist() == [8 + 1] * 4
    (reached,) = torch.autograd.grad(after.layout.weight[after.layout.valid].sum(), mask)
    assert int(reached.sum()) == 4 * 8, "the kept ones, of fine cells"


@pytest.mark.parametrize("name", MAKERS)
def test_room_suffices_for_every_mask_and_is_little_more_than_needed(name: str) -> None:
    """Slots are bounded without asking how many tokens each image has."""
    reducer, grid = MAKERS[name]().eval(), msvit.ScaleGrid(224, 224, fine=16, coarse=32)
    for share in (0.0, 0.1, 0.5, 0.9, 1.0):
        gate = GateOutput.from_mask((torch.rand(32, 7, 7) < share).float())
        start = MODES["packed"](gate, grid, 1)
        for index in range(DEPTH):
            now = first = start.count
            for block in range(index + 1):
                now = reducer.num_kept(block, now, first)
            needed = int((now + 1).sum())
            assert needed <= reducer.max_kept(index, start) <= needed + 32 * 3


def test_the_rate_of_evit_falls_slowly_in_training() -> None:
    reducer = msvit.EViT(0.5)
    rates = []
    for share in (0.0, 1 / 30, 0.1, 11 / 30, 1.0):
        reducer.at_progress(share)
        rates.append(reducer.rate[0] / reducer.rate[1])
    assert 0.5 < rates.pop(2) < 1.0
    assert rates == [1.0, 1.0, 0.5, 0.5]
    reducer.at_progress(0.0)
    assert reducer.eval().rate == (1, 2), "only in training"


@pytest.mark.parametrize("fine", [True, False])
def test_dynamicvit_distils_from_a_dense_teacher(fine: bool) -> None:
    """A coarse token is taught by the mean of what it covers."""
    host, image, mask = host_of(), images(3), torch.full((3, 2, 2), float(fine))
    reducer = msvit.DynamicViT(0.7, at=AT)
    model = model_of(host, reducer, train=True)
    with torch.no_grad():
        teacher = msvit.convert(host, coarse=8, gate=msvit.AllFine(coarse=8)).eval()(image)
        output = model.train()(image, mask)
        found = reducer.losses(output, teacher)
    log_p, log_q = (t.logits.log_softmax(-1) for t in (output, teacher))
    divergence = (log_q.exp() * (log_q - log_p)).sum(1).mean()
    assert found["distill"] == pytest.approx(float(0.5 * divergence), rel=1e-3)  # in float32
    side, kept = (4 if fine else 2), output.tokens.layout.valid.view(3, -1)[:, 1:]
    want = torch.nn.functional.adaptive_avg_pool2d(msvit.dense_map(teacher.tokens), side).flatten(2).transpose(1, 2)
    miss = (output.tokens.x.view(3, 1 + side**2, -1)[:, 1:] - want)[kept].square().mean()
    assert found["features"] == pytest.approx(float(0.5 * miss), rel=1e-9)
    wanted = [(k - 0.7 ** (i + 1)).square().mean() for i, k in enumerate(output.tokens.kept)]
    assert len(wanted) == 2
    assert found["ratio"] == pytest.approx(float(2 * sum(wanted) / 2), rel=1e-6)


@pytest.mark.usefixtures("_without_noise")
@pytest.mark.parametrize("name", MAKERS)
def test_activation_checkpointing_and_autocast(name: str) -> None:
    host, image, mask = tiny_host(dtype=torch.float32, depth=DEPTH), images(4, dtype=torch.float32), mixed_mask(4, 2, 2)
    model = model_of(host, MAKERS[name](), train=True)
    found = []
    for enable in (False, True):
        host.set_grad_checkpointing(enable)
        host.zero_grad()
        model(image, mask=mask.float()).logits.square().sum().backward()
        found.append([p.grad for p in host.parameters()])
    assert_same(*found, 0)
    host.set_grad_checkpointing(False)
    for mode in MODES:
        model = model.with_options(mode=mode)
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(image, mask=mask.float()).logits
            assert all(torch.isfinite(grad).all() for grad in gradients(logits.float(), host))


@pytest.mark.parametrize("batch", [1, 2])
def test_images_that_become_equally_long_may_part_again(batch: int) -> None:
    """Counts of later stages go by what an image started with, not by what it has."""
    host, reducer = tiny_host(depth=DEPTH, img_size=(16, 24)), msvit.DynamicViT(0.29, at=(1, 2))
    mask = torch.ones(batch, 2, 3, dtype=torch.float64)
    mask[0, 0, 0] = 0
    with torch.no_grad():
        found = [model_of(host, reducer, mode)(images(batch, 16, 24), mask).logits for mode in MODES]
    assert_same(found[:2], found[2:] * 2)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["vit_small_patch16_224", "vit_base_patch16_gap_224", "vit_base_patch16_siglip_224"])
def test_one_token_is_always_kept_and_one_that_is_left_stays(name: str, mode: str) -> None:
    reducers = [msvit.ToMe(r=8), msvit.ToMe(rate=0.5), msvit.DynamicViT(0.05, at=AT)]
    for reducer in reducers if "small" not in name else [*reducers, msvit.EViT(1e-3, at=AT, fuse=False)]:
        with torch.no_grad():
            out = model_of(tiny_host(name, depth=6), reducer, mode)(images(3), mixed_mask(3, 2, 2))
        assert out.tokens.count.tolist() == [1, 1, 1]
        assert out.logits.isfinite().all()


@pytest.mark.parametrize("mode", MODES)
def test_the_ratio_loss_counts_what_predictors_keep_of_what_the_gate_gave(
    mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With predictors that look at nothing there is no road from this loss to the gate."""
    blind = lambda self, x, *_: self.head[0].bias[0].expand(len(x))  # noqa: E731
    monkeypatch.setattr(dynamicvit.Predictor, "forward", blind)
    model = model_of(host_of(), msvit.DynamicViT(0.6, at=AT), mode, train=True)
    mask = mixed_mask(3, 2, 2).requires_grad_()
    loss = model.reducer.losses(model(images(3), mask), None)["ratio"]
    to_gate, *to_predictors = torch.autograd.grad(loss, [mask, *model.reducer.parameters()], allow_unused=True)
    assert to_gate is None or to_gate.abs().max() < 1e-12
    assert any(grad is not None and grad.abs().max() > 0 for grad in to_predictors)


def test_a_reducer_may_be_replaced_and_takes_the_mode_of_its_model() -> None:
    model = model_of(host_of(), msvit.EViT(0.6, at=AT))
    model = model.with_options(reducer=msvit.DynamicViT(0.6, at=AT).double())
    assert len(model.reducer.predictors) == 2, "made for the host's width"
    model = model.with_options(reducer=None)
    with torch.no_grad():
        assert model.eval()(images(1)).tokens.count.tolist() == [16]
    for training in (True, False):  # in training mode EViT's rate follows a schedule, and no reducer is compiled
        assert model.train(training).with_options(reducer=msvit.EViT(0.5, at=AT)).reducer.training is training


def test_many_stages_have_exact_counts() -> None:
    reducer = msvit.DynamicViT(0.8765, at=tuple(range(6)))
    count = torch.tensor([196])
    for index in range(6):
        assert reducer.num_kept(index, count, count).item() == int(196 * 0.8765 ** (index + 1))


class Own(msvit.Reducer):
    def between(self, index: int, start: Layout, tokens: TokenBatch, heads: Heads) -> TokenBatch:
        self.asked = [*getattr(self, "asked", []), index]
        return tokens


class Late(Own):
    def acts_between(self, index: int) -> bool:
        return index == 2


@pytest.mark.parametrize(("reducer", "asked"), [(Own(), [0, 1, 2]), (Late(), [2])])
def test_a_reducer_of_ones_own_is_asked_in_every_block_unless_it_says_otherwise(reducer: Own, asked: list[int]) -> None:
    msvit.convert(tiny_host(depth=3), coarse=8, reducer=reducer)(images(2))
    assert reducer.asked == asked
