"""Segmentation sets are read as they are published or packed, or the file that is wrong is named."""

import pickle
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from pictures import encoded, label_map, painted, write, write_pair, write_tar
from PIL import Image

from msvit_lab.data import IGNORE, BadImage, BadLabelMap, open_source
from msvit_lab.data.layouts import CITYSCAPES_IDS, VOC_CLASSES

open_maps = partial(open_source, target="label_map")


def folders(root: Path, split: str = "train", num: int = 3) -> Path:
    for seed in range(num):
        ending = ("png", "webp", "jpg")[seed % 3]
        write_pair(root / f"{split}/images/a/{seed}.{ending}", root / f"{split}/labels/a/{seed}.png", seed)
    return root


def assert_holds(source, seeds: list[int]) -> None:
    """The source is the images of these seeds, in order."""
    assert len(source) == len(seeds) > 0
    for i, seed in enumerate(seeds):
        item = source[i]
        np.testing.assert_array_equal(item.label_map, label_map(seed), err_msg=item.name)
        assert item.label_map.dtype == np.uint8
        assert (item.image.mode, item.image.size) == ("RGB", (28, 20))
        near = np.abs(np.asarray(item.image, int) - np.asarray(painted(label_map(seed)), int))
        assert np.median(near) < 12, item.name  # some are JPEGs


def test_ade20k_ignores_0_and_counts_from_1(tmp_path):
    root = tmp_path / "ADEChallengeData2016"
    for split, seeds in (("training", (0, 1)), ("validation", (2,))):
        for seed in seeds:
            write_pair(root / f"images/{split}/ADE_{seed}.jpg", root / f"annotations/{split}/ADE_{seed}.png", seed, 1)
    for spec in (root, tmp_path):
        assert_holds(open_maps(str(spec), "train"), [0, 1])
        assert_holds(open_maps(str(spec), "val"), [2])
    assert open_maps(str(root), "train").classes == [f"class {i}" for i in range(1, 151)]
    lines = ["Idx\tRatio\tTrain\tVal\tName", *(f"{i}\t0.1\t5\t6\tthing{i}, other" for i in range(1, 151))]
    (root / "objectInfo150.txt").write_text("\n".join(lines))
    assert open_maps(str(root), "validation").classes[149] == "thing150"
    values = np.zeros((20, 28), np.uint8)
    values[0, 0] = 150
    write(root / "annotations/training/ADE_0.png", Image.fromarray(values))
    labels = open_maps(str(root), "train")[0].label_map
    assert (labels[0, 0], labels[1, 1]) == (149, IGNORE)
    write(root / "annotations/training/ADE_0.png", Image.fromarray(values + np.uint8(1)))
    with pytest.raises(BadLabelMap, match=r"ADE_0\.png holds the value 151, but there are 150 classes, thing1 to"):
        open_maps(str(root), "train")[0]
    with pytest.raises(ValueError, match="for split 'test'; splits found: training, validation"):
        open_maps(str(root), "test")


def test_pascal_voc_is_what_its_lists_name(tmp_path):
    root = tmp_path / "VOCdevkit" / "VOC2012"
    for seed in range(4):
        write_pair(root / f"JPEGImages/{seed}.jpg", root / f"SegmentationClass/{seed}.png", seed)
        palette = Image.fromarray(label_map(seed)).convert("P")
        palette.putdata(label_map(seed).ravel())
        palette.putpalette(list(range(200, 0, -1)) * 3)
        write(root / f"SegmentationClass/{seed}.png", palette)
    write(root / "JPEGImages/unlabelled.jpg", painted(label_map(9)))
    for year, name, stems in (
        (2012, "train", "2\n0\n"), (2012, "val", "1\n"), (2012, "trainval", "0\n1\n2\n"), (2012, "gone", "7\n"),
        (2012, "none", ""), (2007, "test", "3\n"),
    ):  # fmt: skip
        file = tmp_path / f"VOCdevkit/VOC{year}/ImageSets/Segmentation/{name}.txt"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(stems)
    for spec in (root, tmp_path):
        assert_holds(open_maps(str(spec), "train"), [2, 0])
        assert_holds(open_maps(str(spec), "trainval"), [0, 1, 2])
    assert open_maps(str(root), "val").classes == VOC_CLASSES
    for split, sentence in (
        ("gone", r"7\.jpg does not exist, but gone\.txt lists 7; add it"),
        ("none", r"none\.txt is empty"),
        ("test", "has no split 'test'; splits found: gone, none, train, trainval, val"),
    ):
        with pytest.raises(ValueError, match=sentence):
            open_maps(str(tmp_path), split)
    with pytest.raises(ValueError, match=r"has 21 classes, background, aeroplane, bicycle .* 2 were asked for, a, b"):
        open_maps(str(root), "val", classes=["a", "b"])


@pytest.mark.parametrize("trained", [True, False], ids=["labelTrainIds", "labelIds"])
def test_cityscapes_has_19_classes_whichever_label_maps_are_there(tmp_path, trained):
    ids = np.array([*CITYSCAPES_IDS.values(), 0, 9, 33], np.uint8).reshape(2, 11)
    want = np.array([*range(19), IGNORE, IGNORE, 18], np.uint8).reshape(2, 11)
    image, label = tmp_path / "leftImg8bit/val/bern", tmp_path / "gtFine/val/bern"
    write(image / "bern_0_leftImg8bit.png", painted(want % 5))
    write(label / "bern_0_gtFine_labelIds.png", Image.fromarray(ids))
    write(label / "bern_0_gtFine_color.png", painted(want % 5))
    if trained:
        write(label / "bern_0_gtFine_labelTrainIds.png", Image.fromarray(want))
    source = open_maps(str(tmp_path), "val")
    np.testing.assert_array_equal(source[0].label_map, want)
    assert (len(source), len(source.classes), source.classes[13]) == (1, 19, "car")
    if not trained:
        write(label / "bern_0_gtFine_labelIds.png", Image.fromarray(np.full_like(ids, 40)))
        with pytest.raises(BadLabelMap, match="holds the value 40, but there are 19 classes, road to bicycle"):
            source[0]


def test_any_folder_has_images_beside_labels(tmp_path):
    folders(tmp_path / "a", "train")
    folders(tmp_path / "a", "validation", num=2)
    for seed in range(2):
        write_pair(tmp_path / f"b/images/val/{seed}.png", tmp_path / f"b/labels/val/{seed}.png", seed)
    train = open_maps(str(tmp_path / "a"), "train")
    assert_holds(train, [0, 1, 2])
    assert train.classes == ["0", "1", "2", "3", "4"]
    for spec, split, num in (("a", "val", 2), ("a/train", "train", 3), ("b", "val", 2)):
        assert_holds(open_maps(str(tmp_path / spec), split), list(range(num)))
    (tmp_path / "a" / "classes.txt").write_text("sky\nsea\nsand\nsalt\nsun\n")
    assert open_maps(str(tmp_path / "a"), "val").classes == ["sky", "sea", "sand", "salt", "sun"]


@pytest.mark.parametrize("layout", ["folder of tars", "tar beside", "one tar"])
def test_tars_hold_what_the_folders_held(tmp_path, layout):
    members = {}
    for seed in range(4):
        members[f"images/{seed}.png"] = encoded(painted(label_map(seed)), "png")
        members[f"labels/{seed}.png"] = encoded(Image.fromarray(label_map(seed)), "png")
    root = tmp_path / "set"
    if layout == "folder of tars":
        for part in (0, 1):
            write_tar(root / f"train/{part}.tar", dict(list(members.items())[4 * part :][:4]))
    elif layout == "tar beside":
        write_tar(root / "train.tar", members)
    else:
        root = write_tar(root / "training.tar", members)
    source = open_maps(str(root), "train")
    assert source.classes == ["0", "1", "2", "3", "4"]
    assert_holds(pickle.loads(pickle.dumps(source)), [0, 1, 2, 3])  # it must cross to a worker


def test_the_training_split_says_which_classes_there_are(tmp_path):
    folders(tmp_path, "train")
    folders(tmp_path, "val", num=1)
    write(tmp_path / "val/labels/a/0.png", Image.fromarray(np.full((20, 28), 7, np.uint8)))
    for classes in (None, ["a", "b", "c", "d", "e"]):
        val = open_maps(str(tmp_path), "val", classes=classes)
        with pytest.raises(BadLabelMap, match=r"val/labels/a/0\.png holds the value 7, but there are 5 classes"):
            val[0]
    assert val.classes == ["a", "b", "c", "d", "e"]


def test_an_image_or_label_map_alone_is_named_and_counted_and_a_torn_one_is_named(tmp_path):
    folders(tmp_path)
    for file, sentence in (
        ("images/b.png", r"1 of 4 images have no label map of the same name, the first is .*/b\.png"),
        ("labels/c.png", r"1 of 4 label maps have no image of the same name, the first is .*/c\.png"),
    ):
        write(tmp_path / "train" / file, painted(label_map(0)))
        with pytest.raises(ValueError, match=sentence):
            open_maps(str(tmp_path))
        (tmp_path / "train" / file).unlink()
    torn = tmp_path / "train/labels/a/0.png"
    torn.write_bytes(torn.read_bytes()[:60])
    with pytest.raises(BadImage, match=r"labels/a/0\.png cannot be read as an image"):
        open_maps(str(tmp_path), classes=list("abcde"))[0]
    write(tmp_path / "train/labels/a/0.webp", painted(label_map(0)))
    with pytest.raises(ValueError, match=r"0\.png and .*0\.webp differ in their endings only; remove one"):
        open_maps(str(tmp_path))


def grey(values, dtype=np.uint8) -> Image.Image:
    return Image.fromarray(np.broadcast_to(np.array(values, dtype), (20, 28)).copy())


@pytest.mark.parametrize(
    ("image", "ending", "sentence"),
    [
        (grey(0).resize((30, 20)), "png", r"0\.png is 20x30, but its image 0\.png is 20x28; scale one to the other"),
        (grey(0).convert("RGB"), "png", r"0\.png has the channels RGB, but .* where colours stand for classes"),
        (grey(5), "png", "holds the value 5, but there are 5 classes, a to e; add its class, or make it 255"),
        (grey(300, np.uint16), "png", "holds the value 300, but labels are 0 to 254, 255 is ignored; renumber it"),
        (grey(3), "jpg", r"0\.jpg is a JPEG, which does not keep numbers as they are; write label maps as PNG"),
    ],
    ids=["size", "colours", "outside", "16 bits", "jpeg"],
)
def test_a_label_map_that_does_not_fit_is_named_with_the_remedy(tmp_path, image, ending, sentence):
    folders(tmp_path, num=1)
    (tmp_path / "train/labels/a/0.png").unlink()
    write(tmp_path / f"train/labels/a/0.{ending}", image)
    source = open_maps(str(tmp_path), classes=list("abcde"))
    with pytest.raises(BadLabelMap, match=sentence + ".*, or pass skip_bad=True") as caught:
        source[0]
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)  # it must cross from a worker
    assert isinstance(caught.value, BadImage)


def test_what_is_no_set_is_an_error_with_the_known_layouts(tmp_path):
    folders(tmp_path / "set")
    write(tmp_path / "photos/a.png", grey(0))
    (tmp_path / "empty").mkdir()
    empty, flat = write_tar(tmp_path / "empty.tar", {}), write_tar(tmp_path / "flat.tar", {"a.png": b""})
    for path, split, sentence in (
        (tmp_path / "nowhere", "train", r"nowhere does not exist; give a folder or a tar .*ADE20K.*Cityscapes"),
        (tmp_path / "empty", "train", r"holds nothing, but no images .* for split 'train'; .* known are ADE"),
        (tmp_path / "photos", "train", r"holds a\.png, but no images with label maps"),
        (tmp_path / "set", "test", r"for split 'test'; splits found: train; .* rename or move the folders"),
        (empty, "train", r"empty\.tar, but no images with label maps"),
        (flat, "train", r"flat\.tar, but no images with label maps"),
    ):
        with pytest.raises(ValueError, match=sentence):
            open_maps(str(path), split)
