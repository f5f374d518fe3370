"""Segmentation sets are read as they are published or packed, or the file that is wrong is named."""

import pickle
from pathlib import Path

import numpy as np
import pytest
from label_maps import label_map, painted, write, write_pair
from pictures import encoded, write_tar
from PIL import Image

from msvit.lab.data import BadImage
from msvit.lab.data.dense import IGNORE, BadLabelMap, open_dense
from msvit.lab.data.dense.published import CITYSCAPES, VOC
from msvit.lab.data.scenes import WEAVES


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
        assert_holds(open_dense(str(spec), "train"), [0, 1])
        assert_holds(open_dense(str(spec), "val"), [2])
    assert open_dense(str(root), "train").classes == [f"class {i}" for i in range(1, 151)]
    lines = ["Idx\tRatio\tTrain\tVal\tName", *(f"{i}\t0.1\t5\t6\tthing{i}, other" for i in range(1, 151))]
    (root / "objectInfo150.txt").write_text("\n".join(lines))
    assert open_dense(str(root), "validation").classes[149] == "thing150"
    values = np.zeros((20, 28), np.uint8)
    values[0, 0] = 150
    write(root / "annotations/training/ADE_0.png", Image.fromarray(values))
    labels = open_dense(str(root), "train")[0].label_map
    assert (labels[0, 0], labels[1, 1]) == (149, IGNORE)
    write(root / "annotations/training/ADE_0.png", Image.fromarray(values + np.uint8(1)))
    with pytest.raises(BadLabelMap, match=r"ADE_0\.png holds the value 151, but there are 150 classes, thing1 to"):
        open_dense(str(root), "train")[0]
    with pytest.raises(ValueError, match="has no split 'test'; splits found: training, validation"):
        open_dense(str(root), "test")


def test_pascal_voc_is_what_its_lists_name(tmp_path):
    root = tmp_path / "VOCdevkit" / "VOC2012"
    for seed in range(4):
        write_pair(root / f"JPEGImages/{seed}.jpg", root / f"SegmentationClass/{seed}.png", seed)
        palette = Image.fromarray(label_map(seed)).convert("P")
        palette.putdata(label_map(seed).ravel())
        palette.putpalette(list(range(200, 0, -1)) * 3)
        write(root / f"SegmentationClass/{seed}.png", palette)
    write(root / "JPEGImages/unlabelled.jpg", painted(label_map(9)))
    (root / "ImageSets/Segmentation").mkdir(parents=True)
    for name, stems in (("train", "2\n0\n"), ("val", "1\n"), ("trainval", "0\n1\n2\n"), ("gone", "7\n"), ("none", "")):
        (root / f"ImageSets/Segmentation/{name}.txt").write_text(stems)
    for spec in (root, tmp_path):
        assert_holds(open_dense(str(spec), "train"), [2, 0])
        assert_holds(open_dense(str(spec), "trainval"), [0, 1, 2])
    assert open_dense(str(root), "val").classes == VOC
    assert len(VOC) == 21
    with pytest.raises(ValueError, match=r"7\.jpg does not exist, but gone\.txt lists 7; add it"):
        open_dense(str(root), "gone")
    with pytest.raises(ValueError, match=r"none\.txt is empty"):
        open_dense(str(root), "none")
    with pytest.raises(ValueError, match="has no split 'test'; splits found: gone, none, train, trainval, val"):
        open_dense(str(root), "test")
    with pytest.raises(ValueError, match=r"has 21 classes, background, aeroplane, bicycle .* 2 were asked for, a, b"):
        open_dense(str(root), "val", classes=["a", "b"])


@pytest.mark.parametrize("trained", [True, False], ids=["labelTrainIds", "labelIds"])
def test_cityscapes_has_19_classes_whichever_label_maps_are_there(tmp_path, trained):
    ids = np.array([*CITYSCAPES.values(), 0, 9, 33], np.uint8).reshape(2, 11)
    want = np.array([*range(19), IGNORE, IGNORE, 18], np.uint8).reshape(2, 11)
    image, label = tmp_path / "leftImg8bit/val/bern", tmp_path / "gtFine/val/bern"
    write(image / "bern_0_leftImg8bit.png", painted(want % 5))
    write(label / "bern_0_gtFine_labelIds.png", Image.fromarray(ids))
    write(label / "bern_0_gtFine_color.png", painted(want % 5))
    if trained:
        write(label / "bern_0_gtFine_labelTrainIds.png", Image.fromarray(want))
    source = open_dense(str(tmp_path), "val")
    np.testing.assert_array_equal(source[0].label_map, want)
    assert (len(source), len(source.classes), source.classes[13]) == (1, 19, "car")
    if not trained:
        write(label / "bern_0_gtFine_labelIds.png", Image.fromarray(np.full_like(ids, 40)))
        with pytest.raises(BadLabelMap, match="holds the value 40, but there are 19 classes, road to bicycle"):
            source[0]


def test_any_folder_has_images_beside_labels(tmp_path):
    folders(tmp_path / "a", "train")
    folders(tmp_path / "a", "validation", num=2)
    train = open_dense(str(tmp_path / "a"), "train")
    assert_holds(train, [0, 1, 2])
    assert_holds(open_dense(str(tmp_path / "a"), "val"), [0, 1])
    assert_holds(open_dense(str(tmp_path / "a" / "train"), "train"), [0, 1, 2])
    assert_holds(open_dense(str(tmp_path / "a" / "train"), "all"), [0, 1, 2])
    assert train.classes == ["0", "1", "2", "3", "4"]
    for seed in range(2):
        write_pair(tmp_path / f"b/images/val/{seed}.png", tmp_path / f"b/labels/val/{seed}.png", seed)
    assert_holds(open_dense(str(tmp_path / "b"), "val"), [0, 1])
    (tmp_path / "a" / "classes.txt").write_text("sky\nsea\nsand\nsalt\nsun\n")
    assert open_dense(str(tmp_path / "a"), "val").classes == ["sky", "sea", "sand", "salt", "sun"]


@pytest.mark.parametrize("layout", ["folder of tars", "tar beside", "one tar"])
def test_tars_hold_what_the_folders_held(tmp_path, layout):
    members = {}
    for seed in range(4):
        members[f"images/{seed}.png"] = encoded(painted(label_map(seed)), "png")
        members[f"labels/{seed}.png"] = encoded(Image.fromarray(label_map(seed)), "png")
    root, split = tmp_path / "set", "train"
    if layout == "folder of tars":
        write_tar(root / "train" / "0.tar", dict(list(members.items())[:4]))
        write_tar(root / "train" / "1.tar", dict(list(members.items())[4:]))
    elif layout == "tar beside":
        write_tar(root / "train.tar", members)
    else:
        root, split = write_tar(root / "any.tar", members), "all"
    source = open_dense(str(root), split)
    assert_holds(source, [0, 1, 2, 3])
    assert source.classes == ["0", "1", "2", "3", "4"]
    assert_holds(pickle.loads(pickle.dumps(source)), [0, 1, 2, 3])


def test_a_set_called_voc_with_21_classes_has_their_names(tmp_path):
    for name, highest in (("voc_small", 20), ("voc_other", 19), ("mine", 20)):
        labels = np.array([[0, highest], [IGNORE, 1]], np.uint8)
        write(tmp_path / name / "train/images/0.png", painted(labels))
        write(tmp_path / name / "train/labels/0.png", Image.fromarray(labels))
    assert open_dense(str(tmp_path / "voc_small")).classes == VOC
    assert len(open_dense(str(tmp_path / "voc_other")).classes) == 20
    assert open_dense(str(tmp_path / "mine")).classes == [str(i) for i in range(21)]


def test_the_training_split_says_which_classes_there_are(tmp_path):
    folders(tmp_path, "train")
    folders(tmp_path, "val", num=1)
    write(tmp_path / "val/labels/a/0.png", Image.fromarray(np.full((20, 28), 7, np.uint8)))
    for classes in (None, ["a", "b", "c", "d", "e"]):
        val = open_dense(str(tmp_path), "val", classes=classes)
        with pytest.raises(BadLabelMap, match=r"val/labels/a/0\.png holds the value 7, but there are 5 classes"):
            val[0]
    assert val.classes == ["a", "b", "c", "d", "e"]


def test_scenes_are_ground_and_objects():
    source = open_dense("scenes", "val", size=32, num_images=8)
    assert (len(source), source.classes) == (8, ["ground", *WEAVES])
    for i in range(8):
        assert set(np.unique(source[i].label_map)) == {0, 1 + i}
        assert source[i].image.size == (32, 32)
    with pytest.raises(ValueError, match="scenes has no split 'holdout'"):
        open_dense("scenes", "holdout")
    with pytest.raises(ValueError, match=r"scenes has 9 classes, ground, upright, level .* 1 were asked for, cat"):
        open_dense("scenes", "train", classes=["cat"])


def test_an_image_or_label_map_alone_is_named_and_counted(tmp_path):
    folders(tmp_path)
    write(tmp_path / "train/images/b.png", painted(label_map(0)))
    with pytest.raises(ValueError, match=r"1 of 4 images have no label map of the same name, the first is .*/b\.png"):
        open_dense(str(tmp_path))
    (tmp_path / "train/images/b.png").unlink()
    write(tmp_path / "train/labels/c.png", painted(label_map(0)))
    with pytest.raises(ValueError, match=r"1 of 4 label maps have no image of the same name, the first is .*/c\.png"):
        open_dense(str(tmp_path))
    write(tmp_path / "train/labels/c.webp", painted(label_map(0)))
    with pytest.raises(ValueError, match=r"c\.png and .*c\.webp differ in their endings only; remove one"):
        open_dense(str(tmp_path))


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
    source = open_dense(str(tmp_path), classes=list("abcde"))
    with pytest.raises(BadLabelMap, match=sentence + ".*, or pass skip_bad=True") as caught:
        source[0]
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)  # it must cross from a worker
    assert isinstance(caught.value, BadImage)


def test_grey_and_16_bit_files_are_fine(tmp_path):
    folders(tmp_path, num=1)
    write(tmp_path / "train/images/a/0.png", grey(40000, np.uint16))
    write(tmp_path / "train/labels/a/0.png", Image.fromarray(label_map(0).astype(np.uint16)))
    item = open_dense(str(tmp_path))[0]
    np.testing.assert_array_equal(item.label_map, label_map(0))
    assert set(np.unique(item.image)) == {156}
    write(tmp_path / "train/labels/a/0.png", Image.fromarray(label_map(0) > 1))
    assert set(np.unique(open_dense(str(tmp_path))[0].label_map)) == {0, 1}


@pytest.mark.parametrize("side", ["images", "labels"])
def test_a_corrupt_file_is_named(tmp_path, side):
    folders(tmp_path, num=1)
    file = tmp_path / "train" / side / "a" / "0.png"
    file.write_bytes(file.read_bytes()[:60])
    source = open_dense(str(tmp_path), classes=list("abcde"))
    with pytest.raises(BadImage, match=rf"{side}/a/0\.png cannot be read as an image"):
        source[0]
    file.unlink()
    with pytest.raises(BadImage, match=rf"{side}/a/0\.png cannot be read as an image .*No such file"):
        source[0]


def test_what_is_no_set_is_refused_with_the_known_layouts(tmp_path):
    with pytest.raises(ValueError, match=r"nowhere does not exist; give a folder or a tar .*ADE20K.*Cityscapes"):
        open_dense(str(tmp_path / "nowhere"))
    with pytest.raises(ValueError, match=r"holds nothing, which is no known layout .* split 'train'; known are ADE"):
        open_dense(str(tmp_path))
    (tmp_path / "photos").mkdir()
    with pytest.raises(ValueError, match=r"holds photos, which is no known layout"):
        open_dense(str(tmp_path))
    folders(tmp_path)
    with pytest.raises(ValueError, match=r"has no split 'test'; splits found: train\. Name one of these, or make"):
        open_dense(str(tmp_path), "test")
    for side in ("images", "labels"):
        (tmp_path / "test" / side).mkdir(parents=True)
    with pytest.raises(ValueError, match=r"test/images has 0 files, but none with a known ending \(\.png"):
        open_dense(str(tmp_path), "test")
    with pytest.raises(ValueError, match=r"empty\.tar is empty: 0 files; pack images/NAME\.jpg and labels"):
        open_dense(str(write_tar(tmp_path / "empty.tar", {})), "all")
    with pytest.raises(ValueError, match=r"flat\.tar has 1 files, the first .*a\.png, but none in images/ or labels/"):
        open_dense(str(write_tar(tmp_path / "flat.tar", {"a.png": b""})), "all")


def test_classes_are_counted_in_bytes(tmp_path):
    folders(tmp_path, num=1)
    with pytest.raises(ValueError, match="has 256 classes, but a label is a byte and 255 means ignored"):
        open_dense(str(tmp_path), classes=[str(i) for i in range(256)])
    (tmp_path / "classes.txt").write_text("\n")
    with pytest.raises(ValueError, match=r"classes\.txt is empty, but names the classes, one a line"):
        open_dense(str(tmp_path))
    (tmp_path / "classes.txt").unlink()
    write(tmp_path / "train/labels/a/0.png", grey(IGNORE))
    with pytest.raises(ValueError, match=r"no label map of .* has a label other than 255, which is ignored"):
        open_dense(str(tmp_path))
