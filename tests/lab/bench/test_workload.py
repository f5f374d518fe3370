"""A workload's record: the fine cells asked for, multiply-adds, lower bounds, what became time, and what failed."""

import json
import shutil
import tarfile

import pytest
import torch
from smoke_runs import write_images
from tiny import images, tiny_host

import msvit
from msvit_lab.bench.images import Pictures, batches, list_places
from msvit_lab.bench.machine import Rates, bytes_held, lower_bounds, measure_memory, measure_rates, traffic
from msvit_lab.bench.rows import DENSE_GRAPHS, FP8, REDUCED, ROWS, check_rows, training_step, usual_rows
from msvit_lab.bench.summary import Measured, Work, summarise
from msvit_lab.bench.workload import Options, Workload, measure, prepare
from msvit_lab.timing import Times

CPU = torch.device("cpu")
TINY = {
    f"model.options.{name}": str(value)
    for name, value in {"patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2, "num_classes": 5}.items()
}
WORK = Workload("vit_tiny_patch16_224", size=64, batch=4)
STEP = Workload("vit_tiny_patch16_224", size=64, batch=4, train=True)


@pytest.fixture(scope="module")
def pictures():
    return Pictures()


def options(**changes):
    given = {"dtype": torch.float32, "rows": ["dense", "packed"], "rounds": 4, "share": 0.4, "settings": TINY}
    return Options(device=CPU, **given | changes)


@pytest.mark.parametrize(("gate", "dtype"), [("learned", torch.bfloat16), ("gradient", torch.float32)])
def test_a_record_has_every_field_and_the_multiply_adds_of_the_images_timed(pictures, gate, dtype):
    given = options(gate=gate, dtype=dtype)
    found = measure(WORK, given, pictures)
    assert json.loads(json.dumps(found)) == found
    assert found.keys() == {
        "model", "size", "batch", "train", "device", "dtype", "asked", "fine", "coarse", "images", "gate", "rates",
        "tokens", "fine_share", "gmacs", "mac_ratio", "baseline", "basis", "rounds", "rows",
    }  # fmt: skip
    for row in found["rows"]:
        assert row.keys() == {
            "name", "trouble", "ms", "burst_ms", "images_per_second", "speed_up", "mac_ratio", "share", "memory",
            "floors", "tokens", "tokens_share", "speed_up_over_all_tokens",
        }  # fmt: skip
        assert row["ms"].keys() == row["speed_up"].keys() == {"median", "low", "high"}
    subject = prepare(WORK, given, pictures)
    model = subject.wrap()
    own = torch.cat([msvit.macs(model, images) for images in subject.sets]).double().mean()
    dense = msvit.macs(model, subject.sets[0], mask=torch.ones(4, 4, 4))[0]
    assert found["mac_ratio"] == pytest.approx(float(dense / own), abs=1e-4)
    tokens = torch.cat([model(images).tokens.count for images in subject.sets])
    assert found["tokens"]["mean"] == pytest.approx(float(tokens.double().mean()), abs=0.01)
    assert found["fine_share"]["mean"] == pytest.approx(0.4, abs=0.02)
    assert found["fine_share"]["std"] > 0.02, "images differ"
    assert {row["name"]: row["mac_ratio"] for row in found["rows"]} == {"dense": 1, "packed": found["mac_ratio"]}
    assert found["images"] == {"from": "scenes", "num": 16, "sets": 4, "unreadable": 0}


def test_the_share_is_the_speed_up_over_the_compiled_host_divided_by_the_ratio_of_multiply_adds():
    work = Work(torch.tensor([10, 20]), torch.tensor([60, 100]), torch.tensor([0.0, 1.0]), 40, 200, num_prefix=1)

    def summary(times):
        rows = {name: Measured(work if name == "packed" else work.dense(), own) for name, own in times.items()}
        found = summarise(work, rows, batch=2)
        return found, {row["name"]: row for row in found["rows"]}

    milliseconds = {"dense": 8.0, "dense compiled": 6.0, "packed": 4.0, "all fine compiled": 5.0}
    times = {name: Times([ms] * 3) for name, ms in milliseconds.items()}
    found, rows = summary(times)
    assert (found["mac_ratio"], found["baseline"], found["basis"]) == (2.5, "dense compiled", "single calls")
    packed, whole = rows["packed"], rows["all fine compiled"]
    assert (packed["speed_up"]["median"], packed["share"], packed["images_per_second"]) == (1.5, 0.6, 500)
    assert (packed["speed_up_over_all_tokens"]["median"], packed["tokens_share"]) == (1.25, 0.5)
    assert (whole["share"], whole["tokens"], packed["tokens"]) == (1.2, 40, 15)
    found, rows = summary(times | {"dense compiled": Times(error="no compiler")})
    assert (found["baseline"], rows["packed"]["share"]) == ("dense", 0.8)
    assert rows["dense compiled"] == {"name": "dense compiled", "trouble": "no compiler"}


def test_a_row_that_fails_says_why_and_the_others_go_on(pictures, monkeypatch):
    def fails(subject):
        raise torch.OutOfMemoryError("all gone")

    monkeypatch.setitem(ROWS, "masked", fails)
    monkeypatch.setitem(ROWS, "dense", lambda subject: lambda images: {}[0])
    found = measure(WORK, options(rows=["dense", "masked", "trimmed", "packed"]), pictures)
    dense, masked, *others = found["rows"]
    assert masked == {"name": "masked", "trouble": "OutOfMemoryError: all gone"}
    assert (dense["trouble"], found["baseline"]) == ("KeyError: 0", None)
    for row in others:
        assert row["ms"]["median"] > 0
        assert (row["speed_up"], row["share"]) == (None, None)


@pytest.mark.parametrize("row", ["packed", "dense"])
def test_a_training_step_reaches_host_and_gate_and_moves_nothing_of_note(pictures, row):
    subject = prepare(STEP, options(), pictures)
    assert subject.host.training
    assert subject.gate.training
    weights = {"host": subject.host.blocks[0].mlp.fc1.weight, "gate": subject.gate.head.weight}
    seen = {}
    for name, weight in weights.items():
        weight.register_hook(lambda grad, name=name: seen.update({name: float(grad.abs().sum())}))
    before = {name: weight.detach().clone() for name, weight in weights.items()}
    training_step(ROWS[row](subject), subject, gated=row == "packed")(subject.sets[0])
    assert all(value > 0 for value in seen.values())
    assert list(seen) == (["host", "gate"] if row == "packed" else ["host"])
    for name, weight in weights.items():
        assert weight.grad is None
        torch.testing.assert_close(weight, before[name], atol=1e-6, rtol=0)


def test_usual_rows_suit_the_device_and_can_be_compared():
    assert check_rows(usual_rows(CPU, train=False)) == ["dense", "packed", "packed compiled"]
    left_out = (*REDUCED, DENSE_GRAPHS, *FP8)
    assert usual_rows(torch.device("cuda"), train=False) == [name for name in ROWS if name not in left_out]
    assert usual_rows(CPU, train=True) == ["dense", "packed"]
    assert {*FP8} < {*ROWS}


@pytest.mark.parametrize("work", [WORK, STEP], ids=["inference", "training"])
def test_a_row_that_changes_the_mode_of_shared_parts_changes_it_for_itself_only(pictures, monkeypatch, work):
    seen = []

    def changes(subject):
        subject.wrap().train(not work.train)
        return ROWS["packed"](subject).train(not work.train)

    def records(subject):
        model = subject.wrap()
        return lambda images: seen.append((model.host.training, model.gate.training)) or model(images)

    for name, row in (("masked", changes), ("trimmed", records)):
        monkeypatch.setitem(ROWS, name, row)
    found = measure(work, options(rows=["dense", "masked", "trimmed"], share=0.2), pictures)
    assert [row["trouble"] for row in found["rows"]] == [None, None, None]
    assert set(seen) == {(work.train, work.train)}
    assert found["fine_share"]["mean"] == pytest.approx(0.2, abs=0.06), "in training of noisy decisions"


@pytest.mark.parametrize(
    ("gate", "names"),
    [
        ("learned", ["tome"]),
        *(pytest.param(gate, ["evit", "dynamicvit", "tome"], marks=pytest.mark.slow) for gate in ("learned", "disc")),
    ],
)
def test_reducers_are_timed_at_the_cost_of_the_gate_alone(pictures, gate, names):
    """Plain and with a gate that leaves more tokens: within what the rounding of counts to whole tokens allows."""
    settings = TINY | {"model.options.depth": "8"}
    found = measure(WORK, options(reducers=names, gate=gate, share=0.3, settings=settings), pictures)
    rows = {row["name"]: row for row in found["rows"]}
    assert list(rows) == ["dense", "packed", *(row for name in names for row in (name, f"{name} gated"))]
    assert all(row["trouble"] is None for row in rows.values())
    for name in (row for row in REDUCED if row in rows):
        assert rows[name]["mac_ratio"] == pytest.approx(found["mac_ratio"], rel=0.06 if gate == "learned" else 0.2)
        assert rows[name]["mac_ratio"] >= 0.999 * found["mac_ratio"], "never more work than the gate leaves"


def test_reducers_can_be_timed_at_a_rate(pictures):
    found = measure(WORK, options(reducers=["tome"], rate=0.9), pictures)
    ratios = {row["name"]: row["mac_ratio"] for row in found["rows"]}
    model = msvit.convert(prepare(WORK, options(), pictures).host, reducer=msvit.ToMe(rate=0.9))
    grid = msvit.ScaleGrid(8 * model.fine, 8 * model.fine, fine=model.fine, coarse=model.coarse)
    dense, reduced = (model.backbone.dense_macs(grid, each) for each in (None, model.reducer))
    assert ratios["tome"] == pytest.approx(dense / reduced, abs=1e-4)
    assert ratios["tome gated"] > ratios["packed"]
    with pytest.raises(ValueError, match="inference only; leave it out"):
        measure(STEP, options(reducers=["tome"]), pictures)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")  # torch.compile's own, before its first capture
@pytest.mark.parametrize("work", [WORK, STEP], ids=["inference", "training"])
def test_on_a_gpu_memory_floors_and_calls_back_to_back_are_there(pictures, work):
    cuda = torch.device("cuda")
    rows = ["dense", "masked", "trimmed", "packed", *(() if work.train else (DENSE_GRAPHS,))]
    gpu = Options(device=cuda, dtype=torch.bfloat16, rounds=4, settings=TINY, rows=rows)
    found = measure(work, gpu, pictures, measure_rates(cuda))
    assert found["basis"] == "calls back to back"
    for row in found["rows"]:
        assert row["trouble"] is None
        assert row["memory"]["call_mb"] > 0 or row["name"] == DENSE_GRAPHS  # whose outputs lie in its graph's memory
        assert row["burst_ms"]["median"] > 0
        assert (row["floors"] is not None) == (not work.train and row["name"] in ("dense", "packed", DENSE_GRAPHS))


def test_lower_bounds_are_for_the_tokens_a_row_runs_and_what_each_layer_reads_and_writes():
    model = msvit.convert(tiny_host(), coarse=8, gate=msvit.AllFine(coarse=8))  # width 32, two blocks, float64
    weights, pixels = sum(p.numel() for p in model.host.parameters()), 3 * 3 * 16 * 16
    linear = (32 + 96) + (32 + 32) + (32 + 128) + (128 + 32)  # qkv, proj, fc1, fc2
    block = linear + 2 * 2 * 32 + 4 * 32
    assert traffic(model, 10, images(3)) == 8 * (weights + 2 * pixels + 10 * (2 * block + 2 * 32))
    work = Work(torch.tensor([4, 10]), torch.tensor([50, 150]), torch.zeros(2), 16, dense_macs=400, num_prefix=1)
    rates = Rates(tflops=1e-9, gb_per_second=1e-3)
    for own, macs, tokens in ((work, 100, 8), (work.dense(), 400, 17)):
        found = lower_bounds(model, own, images(3), rates)
        assert found["matrix_ms"] == pytest.approx(3 * macs * 2)
        assert found["traffic_ms"] == pytest.approx(traffic(model, 3 * tokens, images(3)) / 1e3, abs=1e-3)


@pytest.mark.gpu
def test_memory_of_a_call_is_what_it_needs_beyond_what_is_there():
    x = torch.zeros(2**20, device="cuda")  # 4 MB
    before = bytes_held(x.device)
    kept = []

    def call(images):
        kept[:] = [kept[0] if kept else images.clone()]
        return images + (images + 1)

    call(x)
    assert measure_memory(call, x, before) == {"peak_mb": 12, "held_mb": 4, "call_mb": 8}


def test_no_two_images_are_equal_and_a_batch_has_as_many_as_it_says(tmp_path):
    """Seven different images: four in folders, three in a tar; three copies, a torn file and a text besides."""
    folder = write_images(tmp_path / "photos", ("ant", "bee"), each=2)
    with tarfile.open(folder / "more.tar", "w") as tar:
        tar.add(write_images(tmp_path / "packed", ("cat",), each=3), arcname="inside")
    for copy in range(3):
        shutil.copy(folder / "ant/0.png", folder / f"copy{copy}.png")
    (folder / "torn.png").write_bytes((folder / "ant/0.png").read_bytes()[:50])
    (folder / "notes.txt").write_text("no image")
    pictures = Pictures(folder)
    few = pictures.squares(size=16, wanted=2, least=1)
    assert len(few) == 2
    squares = pictures.squares(size=16, wanted=100, least=1)
    assert squares.shape == (7, 3, 16, 16)
    assert len(squares.flatten(1).unique(dim=0)) == 7
    assert torch.equal(squares[:2], few)
    assert (pictures.num_bad, pictures.name) == (1, f"{folder.parent.name}/photos")
    assert pictures.squares(size=32, wanted=3, least=1).shape == (3, 3, 32, 32)
    assert [part.tolist() for part in batches(torch.arange(7), 3)] == [[0, 1, 2], [3, 4, 5]]
    with pytest.raises(ValueError, match="7 different images, but a batch of 8 needs as many"):
        pictures.squares(size=16, wanted=32, least=8)
    with pytest.raises(ValueError, match="has no images in it"):
        Pictures(folder / "notes.txt")
    shutil.rmtree(folder)
    assert torch.equal(pictures.squares(size=16, wanted=200, least=1), squares), "read once: there are no more"


@pytest.mark.parametrize(
    ("images", "others"),
    [
        (("images/a.webp", "images/b.webp"), ("labels/a.png", "labels/b.png")),
        (("images/a.jpg", "mylabels/a.jpg"), ("annotations/trimaps/a.png",)),
        (("val/ADE_1.jpg", "val/other_seg.png"), ("val/ADE_1_seg.png",)),
        (("images/val/a.jpg",), ("annotations/val/a.png",)),
        (("JPEGImages/a.jpg", "JPEGImages/b.jpg"), ("SegmentationClass/a.png", "SegmentationObject/a.png")),
        (("leftImg8bit/val/x/0_leftImg8bit.png",), ("gtFine/val/x/0_gtFine_labelIds.png", "gtFine/val/x/0_color.png")),
        (("a.jpg", "b.png", "c/a.png", "c/b.JPEG"), ("a.png", "c/b.PNG")),
        (("labels/a.png", "labels/b.jpg", "images.jpg", "classes/labels/0.png"), ("labels/b.png",)),
    ],
    ids=["plain", "pets", "ade20k in full", "ade20k", "voc", "cityscapes", "side by side", "without images beside"],
)
@pytest.mark.parametrize("packed", [False, True], ids=["folder", "tar"])
def test_label_maps_and_pictures_of_msvit_viz_are_no_images(tmp_path, images, others, packed):
    root = tmp_path / "set"
    for name in (*images, *others, "images/a.tokens.png"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(b"")
    if packed:
        with tarfile.open(tmp_path / "set.tar", "w") as tar:
            tar.add(root, arcname=".")
    found = list_places(tmp_path / "set.tar" if packed else root)
    below = "set.tar/./" if packed else "set/"
    assert sorted(place.name.split(below)[1] for place in found) == sorted(images)
