"""Data sets may hold anything: nothing in them waits for ever, fills the memory or starts another program."""

import io
import os
import struct
import subprocess
import tarfile
import zlib
from copy import deepcopy
from pathlib import Path

import pytest
import torch
from pictures import encoded, picture, write_folders, write_tar
from PIL import EpsImagePlugin

from msvit.image_files import images_below, read_image
from msvit_lab.bench.images import list_places
from msvit_lab.data import BadImage
from msvit_lab.data.cache import read_parts, write_parts
from msvit_lab.data.decode import Decoded
from msvit_lab.data.files import list_images, scan
from msvit_lab.data.opening import decode, decode_label_map
from msvit_lab.data.sources import FileSource

POSTSCRIPT = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\n(/tmp/x) (w) file\nshowpage\n%%EOF\n"


@pytest.fixture
def images(tmp_path: Path) -> Path:
    return write_folders(tmp_path / "set", ["ant", "bee"], each=2)


def read_all(path: Path) -> list[str]:
    """What is said of the images that cannot be read."""
    source = FileSource(**vars(list_images(path)))
    said = []
    for i in range(len(source)):
        try:
            source[i]
        except BadImage as error:
            said.append(str(error))
    return said


def test_postscript_called_photo_never_reaches_ghostscript(tmp_path, monkeypatch):
    def run(*_: object, **__: object) -> None:
        raise AssertionError("Ghostscript was called")

    monkeypatch.setattr(EpsImagePlugin, "Ghostscript", run)
    monkeypatch.setattr(subprocess, "check_call", run)
    for read in (lambda: decode(POSTSCRIPT, "photo.jpg"), lambda: decode_label_map(POSTSCRIPT, "photo.png")):
        with pytest.raises(BadImage, match="no known image format"):
            read()
    (tmp_path / "photo.jpg").write_bytes(POSTSCRIPT)
    with pytest.raises(ValueError, match=r"photo\.jpg cannot be read as an image"):
        read_image(tmp_path / "photo.jpg")


@pytest.mark.parametrize("target", ["fifo", "/dev/zero", "/dev/stdin"])
def test_only_plain_files_are_opened(images, target):
    path = images / "ant/9.jpg"
    if target == "fifo":
        os.mkfifo(path)
    else:
        path.symlink_to(target)
    (said,) = read_all(images)
    assert "9.jpg is no plain file" in said
    with pytest.raises(ValueError, match="is no plain file"):
        read_image(path)


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_an_image_that_unpacks_to_more_than_the_limit_is_a_sentence(tmp_path):
    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    for side in (10_000, 60_000):  # PIL warns of the first and does not open the second
        size = struct.pack(">IIBBBBB", side, side, 8, 0, 0, 0, 0)
        bomb = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", size) + chunk(b"IDAT", zlib.compress(bytes(100)))
        with pytest.raises(BadImage, match="MAX_IMAGE_PIXELS"):
            decode(bomb, "bomb.png")
        (tmp_path / "bomb.png").write_bytes(bomb)
        with pytest.raises(ValueError, match="MAX_IMAGE_PIXELS"):
            read_image(tmp_path / "bomb.png")


def test_links_that_lead_back_do_not_multiply_images(images):
    for name in ("one", "two", "three"):
        (images / "ant" / name).symlink_to(images, target_is_directory=True)
    listing = list_images(images)
    assert len(listing.places) == len(images_below(images)) == 4
    assert listing.classes == ["ant", "bee"]
    linked = images.parent / "linked"
    linked.mkdir()
    (linked / "all").symlink_to(images, target_is_directory=True)
    (linked / "gone.png").symlink_to(linked / "nowhere.png")
    assert len(list_places(linked)) == 4
    (linked / "gone.png").unlink()
    assert len(images_below(linked)) == 4
    (images.parent / "a_link").symlink_to(images / "ant", target_is_directory=True)
    assert all("a_link" not in path.parts for path in images_below(images.parent)), "by its own name"


@pytest.mark.parametrize("num", [6, 100, pytest.param(400, marks=pytest.mark.slow)])
def test_tars_in_tars_have_an_end(tmp_path, num):
    inside = encoded(picture(1), "jpg")
    name = "ant/a.jpg"
    for _ in range(num):
        inside, name = write_tar(tmp_path / "x.tar", {name: inside}).read_bytes(), "x.tar"
    (tmp_path / "x.tar").write_bytes(inside)
    with pytest.raises(ValueError, match="more than 4 tars lie in each other"):
        scan(tmp_path / "x.tar")


def test_a_file_a_member_or_a_header_of_gigabytes_is_not_read(tmp_path, images):
    os.truncate(images / "ant/0.jpg", 20 << 30)
    (bad,) = read_all(images)
    assert "has 21474836480 bytes to be read at once, but 536870912" in bad
    for kind in (tarfile.REGTYPE, tarfile.XHDTYPE, tarfile.GNUTYPE_LONGNAME):
        info = tarfile.TarInfo("ant/a.jpg")
        info.size, info.type = 20 << 30, kind
        path = tmp_path / "all.tar"
        path.write_bytes(info.tobuf(tarfile.GNU_FORMAT))
        os.truncate(path, (20 << 30) + 4096)
        if kind == tarfile.REGTYPE:
            (bad,) = read_all(path)
            assert "has 21474836480 bytes to be read at once" in bad
        else:
            with pytest.raises(ValueError, match="a header of 21474836480 bytes"):
                scan(path)


def test_a_sparse_member_is_a_sentence(tmp_path):
    info = tarfile.TarInfo("ant/a.jpg")
    info.pax_headers = {"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.name": "ant/a.jpg"}
    info.pax_headers["GNU.sparse.realsize"] = str(20 << 30)
    data = b"1\n0\n10\n".ljust(512, b"\0") + b"x" * 10
    info.size = len(data)
    with tarfile.open(tmp_path / "all.tar", "w", format=tarfile.PAX_FORMAT) as tar:
        tar.addfile(info, io.BytesIO(data))
    with pytest.raises(ValueError, match=r"a\.jpg is sparse; pack it without --sparse"):
        scan(tmp_path / "all.tar")


def test_what_was_decoded_is_written_and_read_without_a_pickle(tmp_path, monkeypatch):
    part = Decoded(
        pixels=torch.arange(12, dtype=torch.uint8), label_maps=torch.zeros(0, dtype=torch.uint8),
        object_masks=torch.arange(4, dtype=torch.uint8), labels=[3], filled=[[2, 2]], sizes=[[5, 4]], numbers=[7],
        bad=[BadImage("b.png", "torn")],
    )  # fmt: skip
    for name in ("load", "save"):
        monkeypatch.setattr(torch, name, lambda *_, **__: pytest.fail("a pickle"))
    write_parts(tmp_path / "parts", [part, deepcopy(part)])
    back = list(read_parts(tmp_path / "parts"))
    assert len(back) == 2
    assert all(map(torch.equal, back[1][:3], part[:3]))
    assert (back[1][3:-1], str(back[1].bad[0])) == (part[3:-1], str(part.bad[0]))
