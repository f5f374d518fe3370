"""Sources give the same images and labels whatever they are packed in, or say what is wrong."""

import io
import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
from pictures import CLASSES, encoded, picture, write_folders, write_tar
from PIL import Image
from timm.data.readers.reader_image_in_tar import ReaderImageInTar

from msvit.lab.data import BadImage, check_classes, check_same_classes, open_source
from msvit.lab.data.files import image_endings


def pixels(source) -> dict[tuple[str, str], np.ndarray]:
    """Every image under its class and its own number."""
    items = [source[i] for i in range(len(source))]
    return {(source.classes[item.label], Path(item.name).stem): np.asarray(item.image) for item in items}


def packed(folder) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in sorted(folder.rglob("*.*"))}


@pytest.fixture
def folder(tmp_path):
    write_folders(tmp_path / "set" / "train")
    write_folders(tmp_path / "set" / "validation", each=1)
    return tmp_path / "set"


def test_class_folders_are_read_with_jpg_png_and_webp(folder):
    train, val = open_source(str(folder), "train"), open_source(str(folder), "val")
    assert (len(train), len(val)) == (12, 4)
    assert train.classes == val.classes == CLASSES
    image = train[0].image
    assert (image.mode, image.size, train[0].label) == ("RGB", (28, 20), 0)
    assert [train[i].label for i in range(12)] == [CLASSES.index(Path(train[i].name).parent.name) for i in range(12)]


@pytest.mark.parametrize("layout", ["one tar", "folder of tars", "tar a class", "tar of tars", "tar beside"])
def test_tars_hold_what_the_folders_held(folder, layout):
    files = packed(folder / "train")
    root = folder.parent / "packed"
    if layout == "one tar":
        spec, split = write_tar(root / "any.tar", files), "all"
    elif layout == "folder of tars":
        for part in (0, 1):
            write_tar(root / "train" / f"{part}.tar", dict(list(files.items())[part::2]))
        spec, split = root, "train"
    elif layout == "tar a class":
        for name in CLASSES:
            inside = {key.split("/")[1]: data for key, data in files.items() if key.startswith(f"{name}/")}
            write_tar(root / "train" / f"{name}.tar", inside)
        spec, split = root, "training"
    elif layout == "tar of tars":
        outer = {}
        for name in CLASSES:
            inside = {key.split("/")[1]: data for key, data in files.items() if key.startswith(f"{name}/")}
            outer[f"{name}.tar"] = write_tar(root / f"{name}.tar", inside).read_bytes()
        spec, split = write_tar(root / "outer" / "train.tar", outer), "train"
    else:
        write_tar(root / "train.tar", files)
        spec, split = root, "train"
    want, got = pixels(open_source(str(folder), "train")), pixels(source := open_source(str(spec), split))
    assert source.classes == CLASSES
    assert want.keys() == got.keys()
    assert all(np.array_equal(want[key], got[key]) for key in want)


def test_images_in_tars_have_the_classes_that_timm_gives_them(folder):
    image_endings()
    tar = write_tar(folder.parent / "train.tar", packed(folder / "train"))
    reader, source = ReaderImageInTar(str(tar)), open_source(str(tar), "train")
    pairs = zip(reader.samples, reader.targets, strict=True)
    theirs = {member.name: reader.class_idx_to_name[int(label)] for (member, *_), label in pairs}
    items = [source[i] for i in range(len(source))]
    assert {item.name.removeprefix(f"{tar}/"): source.classes[item.label] for item in items} == theirs


@pytest.mark.parametrize("layout", ["info", "folders", "names"])
def test_webdataset_shards_are_read_by_number(tmp_path, layout):
    def shard(keys):
        parts = [{f"{k:03}.cls": str(k % 3).encode(), f"{k:03}.webp": encoded(picture(k), "webp")} for k in keys]
        return {name: data for part in parts for name, data in part.items()}

    names = {"info": "{}.{}.tar", "folders": "{}/{}.tar", "names": "set-{}-{}.tar"}[layout]
    write_tar(tmp_path / names.format("train", 0), shard([0, 1, 2]))
    write_tar(tmp_path / names.format("train", 1), shard([3, 4]))
    write_tar(tmp_path / names.format("validation", 0), shard([5]))
    if layout == "info":
        files = {"train": ["train.0.tar", "train.1.tar"], "validation": ["validation.0.tar"]}
        info = {"splits": {name: {"filenames": shards} for name, shards in files.items()}}
        (tmp_path / "_info.json").write_text(json.dumps(info))
    source = open_source(f"wds/{tmp_path}", "train")
    assert [source[i].label for i in range(len(source))] == [0, 1, 2, 0, 1]
    assert source.classes == ["0", "1", "2"]
    assert np.array_equal(source[4].image, Image.open(io.BytesIO(encoded(picture(4), "webp"))))
    assert len(open_source(f"wds/{tmp_path}", "val")) == 1
    with pytest.raises(ValueError, match="has no split 'test'; splits found: train, validation"):
        open_source(f"wds/{tmp_path}", "test")


def test_a_shard_without_labels_is_refused(tmp_path):
    write_tar(tmp_path / "train" / "0.tar", {"a.png": encoded(picture(0), "png"), "a.cls": b"cat"})
    with pytest.raises(ValueError, match=r"0\.tar/a\.png needs its label, a number, in a\.cls; found b'cat'"):
        open_source(f"wds/{tmp_path}", "train")


def test_hugging_face_datasets_come_through_timm(monkeypatch):
    class Table(list):
        features = SimpleNamespace(str2int=["cat", "dog"].index, names=["cat", "dog"])
        info = SimpleNamespace(features={"label": features}, splits={"validation": SimpleNamespace(num_examples=2)})

        def cast_column(self, *_):
            return self

    rows = [{"image": {"bytes": encoded(picture(i), "png")}, "label": 1 - i} for i in (0, 1)]
    fake = ModuleType("datasets")
    fake.load_dataset = lambda name, split, **_: Table(rows)
    fake.get_dataset_split_names = lambda name: ["train", "validation"]
    fake.Image = lambda decode: None
    fake.__spec__ = SimpleNamespace()
    monkeypatch.setitem(sys.modules, "datasets", fake)
    monkeypatch.delitem(sys.modules, "timm.data.readers.reader_hfds", raising=False)
    source = open_source("hfds/some/pets", "val", classes=["dog", "cat"])
    assert [source[i].label for i in (0, 1)] == [0, 1]
    assert source[1].name == "hfds/some/pets[1]"
    assert np.array_equal(source[1].image, picture(1))
    with pytest.raises(ValueError, match="has no split 'test'; splits found: train, validation"):
        open_source("hfds/some/pets", "test")
    monkeypatch.delitem(sys.modules, "timm.data.readers.reader_hfds", raising=False)


def test_what_is_not_installed_or_cannot_be_counted_is_refused_with_the_remedy(monkeypatch):
    monkeypatch.setattr("msvit.lab.data.sources.find_spec", lambda name: None)
    with pytest.raises(ValueError, match="needs the package datasets, which is not installed; pip install datasets"):
        open_source("hfds/cifar10", "train")
    with pytest.raises(ValueError, match=r"tfds/cifar10 is a stream, .* use hfds/NAME"):
        open_source("tfds/cifar10", "train")


def test_scenes_differ_between_splits_and_know_their_object():
    train, val = open_source("scenes", "train", size=32, num_images=16), open_source("scenes", "val", size=32)
    assert (len(train), train[0].object_mask.shape, train.classes) == (16, (32, 32), val.classes)
    assert not np.array_equal(train[0].image, val[0].image)
    with pytest.raises(ValueError, match="scenes has no split 'holdout'; its splits are train, val, test"):
        open_source("scenes", "holdout")


def test_the_training_set_says_what_a_label_means(tmp_path):
    write_folders(tmp_path / "train", ["ant", "bee", "cow"])
    write_folders(tmp_path / "val", ["ant", "cow"])
    train, val = open_source(str(tmp_path), "train"), open_source(str(tmp_path), "val")
    with pytest.raises(ValueError, match=r"train has 3 classes and val has 2, .*bee \(train\).*classes=train\.classes"):
        check_same_classes(train, val)
    val = open_source(str(tmp_path), "val", classes=train.classes)
    check_same_classes(train, val)
    assert {val[i].label for i in range(len(val))} == {0, 2}
    with pytest.raises(ValueError, match=r"has 3 classes, among them bee, which the 2 .* do not have"):
        open_source(str(tmp_path), "train", classes=["ant", "cow"])


def test_a_head_of_another_size_is_refused_with_both_counts(folder):
    source = open_source(str(folder), "train")
    check_classes(source, 4)
    with pytest.raises(ValueError, match=r"have 4 classes, but the model's head has 1000; .*num_classes=4"):
        check_classes(source, 1000)


def test_a_path_may_be_the_split_itself_but_never_by_accident(folder):
    assert len(open_source(str(folder / "validation"), "val")) == 4
    assert len(open_source(str(folder / "train"), "all")) == 12
    with pytest.raises(ValueError, match=r"train has no split 'val'; splits found: none.*split='all'"):
        open_source(str(folder / "train"), "val")
    tar = write_tar(folder / "any.tar", packed(folder / "train"))
    with pytest.raises(ValueError, match=r"any\.tar has no split 'val'; splits found: none.*split='all'"):
        open_source(str(tar), "val")


def test_missing_empty_and_foreign_folders_are_refused_with_the_remedy(folder, tmp_path):
    with pytest.raises(ValueError, match="nowhere does not exist; give a folder with train/CLASS"):
        open_source(str(tmp_path / "nowhere"), "train")
    with pytest.raises(ValueError, match="has no split 'test'; splits found: train, validation"):
        open_source(str(folder), "test")
    (folder / "test").mkdir()
    with pytest.raises(ValueError, match="test is empty: 0 files; put images"):
        open_source(str(folder), "test")
    (folder / "test" / "notes.txt").write_text("hello")
    with pytest.raises(ValueError, match=r"1 files but no image with a known ending: found \.txt, known are .*\.webp"):
        open_source(str(folder), "test")
    (folder / "test" / "a.png").write_bytes(encoded(picture(0), "png"))
    with pytest.raises(ValueError, match=r"images lie directly in .*test, but .* label is the name of its folder"):
        open_source(str(folder), "test")


def test_tars_that_are_none_are_refused(tmp_path):
    (tmp_path / "train.tar").write_bytes(b"no tar at all" * 100)
    with pytest.raises(ValueError, match=r"train\.tar cannot be read as a tar"):
        open_source(str(tmp_path), "train")
    flat = write_tar(tmp_path / "flat.tar", {"a.png": encoded(picture(0), "png")})
    with pytest.raises(ValueError, match="images lie directly in"):
        open_source(str(flat), "all")
    (tmp_path / "set.zip").write_bytes(b"")
    with pytest.raises(ValueError, match=r"is a \.zip file, but only \.tar is read"):
        open_source(str(tmp_path / "set.zip"), "all")
    empty = write_tar(tmp_path / "empty.tar", {})
    with pytest.raises(ValueError, match=r"empty\.tar is empty"):
        open_source(str(empty), "all")


@pytest.mark.parametrize("damage", ["truncated", "noise", "empty"])
def test_a_corrupt_image_is_named_with_the_remedy(folder, damage):
    path = folder / "train" / "bee" / "0.jpg"
    data = path.read_bytes()
    path.write_bytes({"truncated": data[: len(data) // 2], "noise": b"x" * 100, "empty": b""}[damage])
    with pytest.raises(BadImage, match=r"bee/0\.jpg cannot be read as an image \(.*\); .*--skip-bad"):
        open_source(str(folder), "train")[3]


@pytest.mark.parametrize("packed_up", [False, True])
def test_classes_are_numbered_as_python_sorts_their_names(tmp_path, packed_up):
    names = ["bee", "Zebra", "ant", "class10", "class2"]
    write_folders(tmp_path / "train", names)
    if packed_up:
        write_tar(tmp_path / "set.tar", packed(tmp_path / "train"))
        source = open_source(str(tmp_path / "set.tar"), "all")
    else:
        source = open_source(str(tmp_path), "train")
    assert source.classes == sorted(names) == ["Zebra", "ant", "bee", "class10", "class2"]
    for i in range(len(source)):
        assert Path(source[i].name).parent.name == source.classes[source[i].label]


def test_the_test_set_validates_where_there_is_no_other(tmp_path):
    for split, each in (("train", 3), ("test", 2)):
        write_folders(tmp_path / split, ["ant", "bee"][:each])
    assert "/test/" in open_source(str(tmp_path), "val")[0].name
    write_folders(tmp_path / "valid", ["ant", "bee"])
    assert "/valid/" in open_source(str(tmp_path), "val")[0].name
    with pytest.raises(ValueError, match="has no split 'val'"):  # its own name is not that of a validation set
        open_source(str(tmp_path / "test"), "val")
