"""Pictures of image files, with the gate of a trained run, the one that comes with msvit, or one without weights.

    for drawn in draw_files(["photo.jpg", "holiday/"], out=Path("drawn")):
        print(drawn)                     # drawn/photo.tokens.png: 103 of 216 tokens (48 %)
    draw_files(["photo.jpg"], zoom=6)                       # photo.zoom.png: a row of random zooms and shifts
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

from msvit.image_files import ENDINGS, images_below, read_image
from msvit_lab.viz.tokens import Drawn, choose, draw_tokens
from msvit_lab.viz.views import draw_views, random_views


def draw_files(
    images: Sequence[Path | str], run: Path | None = None, gate: str = "default", share: float | None = None,
    size: int | None = None, out: Path | None = None, zoom: int | None = None,
) -> Iterator[Drawn | ValueError]:  # fmt: skip
    """Write NAME.tokens.png for each image, or of each image in a folder, beside it or to `out`.

    `out` is a folder or, for one image, a PNG. If the run has a reducer, NAME.reduced.png shows the tokens that are
    left at the end, alone if no gate chooses cells. With `zoom`, NAME.zoom.png shows the image and so many random
    zooms and shifts of it. For an image that cannot be read a ValueError is yielded, and the others are drawn all the
    same.
    """
    views = None if zoom is None else random_views(zoom)
    names = name_pictures(list_files(images), out, "tokens" if views is None else "zoom")
    chooser = choose(run, gate, share, size)
    for path, picture in names.items():
        try:
            photo = read_image(path, upright=True)
        except ValueError as error:
            yield error
        else:
            how = (photo, chooser, picture)
            yield from draw_tokens(*how) if views is None else draw_views(*how, views)


def list_files(images: Sequence[Path | str], command: str = "viz") -> list[tuple[Path, Path]]:
    """Each image, and its path below the folder that was given or its name alone."""
    found = []
    for image in images:
        if "://" in str(image):
            raise ValueError(f"{command} reads files, not URLs: download {image} first and give its path")
        if not (path := Path(image)).is_dir():
            found.append((path, Path(path.name)))
            continue
        found += [(p, p.relative_to(path)) for p in images_below(path)]
    return found


def name_pictures(files: list[tuple[Path, Path]], out: Path | None, kind: str) -> dict[Path, Path]:
    """The picture to write of each image; without `out`, beside it."""
    if out is not None and out.suffix.lower() in ENDINGS and not out.is_dir():
        if out.suffix.lower() != ".png":
            raise ValueError(f"--out is {out}, but pictures are written as PNG; call it {out.with_suffix('.png')}")
        if len(files) > 1:
            raise ValueError(f"--out is {out}, one file, but there are {len(files)} images; give a folder")
        return {files[0][0]: out}
    taken: dict[Path, Path] = {}
    for path, below in files:
        picture = (path if out is None else out / below).with_name(f"{below.stem}.{kind}.png")
        if (other := taken.setdefault(picture, path)) != path:
            raise ValueError(f"{other} and {path} would both be drawn to {picture}; draw them apart")
    return {path: picture for picture, path in taken.items()}
