"""onnxruntime-web, the runtime of the page: found on this machine, or fetched once by npm.

    find_runtime()                                       # the cache, else npm pack, whose archive is kept in the cache
    find_runtime(Path("onnxruntime-web-1.30.0.tgz"))     # the npm archive, or a folder with the package unpacked
    find_runtime(...).write(folder)                      # the files that the page loads

It is not part of msvit (30 MB, MIT licence, Microsoft). Only files of known names are read from an archive, and an
archive that npm fetched must have the digest recorded here.
"""

import base64
import hashlib
import json
import os
import shutil
import subprocess
import tarfile
import tempfile
from dataclasses import dataclass
from pathlib import Path

from msvit.image_files import read_plain
from msvit.saving.file import replacing

PACKAGE, VERSION = "onnxruntime-web", "1.30.0"
ARCHIVE = f"{PACKAGE}-{VERSION}.tgz"
SHA512 = "q0y+JrrtukXSzsBWEMccVfqX25LRmosXHF+CaRJmg8pZClzcV7svNc4rKY3jL02Vb7QmRMDs1SigqR4CXAfKYQ=="
WASM = ("ort.wasm.min.mjs", "ort-wasm-simd-threaded.mjs", "ort-wasm-simd-threaded.wasm")
MAX_FILE, MAX_ARCHIVE = 1 << 27, 1 << 29  # bytes
NPM_SECONDS = 300
REMEDY = f"get it with `npm pack {PACKAGE}@{VERSION}` on a machine with npm, and pass --runtime {ARCHIVE}"
NOTICE = f"""These files are of {PACKAGE} {{version}}, Copyright (c) Microsoft Corporation, under the MIT licence.
They are unchanged; `npm pack {PACKAGE}@{{version}}` has the whole package.
"""


@dataclass(frozen=True)
class Runtime:
    """The package: an archive of npm, or a folder that has what is in one."""

    source: Path

    def read(self, name: str) -> bytes:
        """A file of the package, by its path inside it. Raise ValueError where it has none, or one too large."""
        if self.source.is_dir():
            path = self.source / name
            if not path.is_file():
                raise ValueError(f"{self.source} has no {name}, so it is no unpacked {PACKAGE}; {REMEDY}")
            return read_plain(path, limit=MAX_FILE)
        try:
            with tarfile.open(self.source, "r:gz") as archive:
                member = archive.getmember(f"package/{name}")
                file = archive.extractfile(member) if member.isreg() and member.size <= MAX_FILE else None
                if file is None:
                    raise ValueError(f"{name} in {self.source} is no plain file of at most {MAX_FILE} bytes; {REMEDY}")
                return file.read()
        except KeyError:
            raise ValueError(f"{self.source} has no package/{name}, so it is no {PACKAGE}; {REMEDY}") from None
        except (tarfile.TarError, EOFError, OSError) as error:
            raise ValueError(f"{self.source} cannot be read as an archive of npm ({error}); {REMEDY}") from None

    def version(self) -> str:
        """The version; raise ValueError if it is another package."""
        try:
            about = json.loads(self.read("package.json"))
            name, version = about["name"], str(about["version"])
        except (KeyError, TypeError, UnicodeDecodeError, json.JSONDecodeError):
            raise ValueError(f"package.json of {self.source} is not that of an npm package; {REMEDY}") from None
        if name != PACKAGE:
            raise ValueError(f"{self.source} is the package {name!r}, but {PACKAGE} is needed; {REMEDY}")
        return version

    def write(self, folder: Path) -> None:
        """Copy what the page loads into a folder."""
        version = self.version()
        folder.mkdir(parents=True, exist_ok=True)
        for name in WASM:
            (folder / name).write_bytes(self.read(f"dist/{name}"))
        (folder / "NOTICE.txt").write_text(NOTICE.format(version=version))


def find_runtime(given: Path | None = None) -> Runtime:
    """The runtime that is given, in the cache, or fetched by npm. Raise ValueError with the remedy if there is none."""
    if given is not None:
        if not given.exists():
            raise ValueError(f"--runtime is {given}, which does not exist; {REMEDY}")
        return Runtime(given)
    cached = cache_folder() / ARCHIVE
    if not (cached.is_file() and digest(cached) == SHA512):
        fetch_with_npm(cached)
    return Runtime(cached)


def cache_folder() -> Path:
    """~/.cache/msvit, or where the system keeps what programs can fetch again."""
    base = os.environ.get("XDG_CACHE_HOME") or os.environ.get("LOCALAPPDATA")
    return Path(base) / "msvit" if base else Path.home() / ".cache" / "msvit"


def fetch_with_npm(to: Path) -> None:
    """Have npm fetch the archive, check its digest, keep it."""
    npm = shutil.which("npm")
    if npm is None:
        raise ValueError(f"the page needs {PACKAGE}, and there is no npm on this machine to fetch it; {REMEDY}")
    with tempfile.TemporaryDirectory() as folder:
        command = [npm, "pack", f"{PACKAGE}@{VERSION}", "--pack-destination", folder, "--silent"]
        try:
            subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True, timeout=NPM_SECONDS)
        except (subprocess.SubprocessError, OSError) as error:
            said = (getattr(error, "stderr", None) or str(error)).strip().splitlines()[-1:]
            raise ValueError(f"npm could not fetch {PACKAGE} {VERSION} ({' '.join(said)}); {REMEDY}") from None
        fetched = Path(folder) / ARCHIVE
        if not fetched.is_file() or digest(fetched) != SHA512:
            raise ValueError(f"what npm fetched is not {PACKAGE} {VERSION}: its SHA-512 is another; {REMEDY}")
        to.parent.mkdir(parents=True, exist_ok=True)
        with replacing(to) as part:
            shutil.copyfile(fetched, part)


def digest(path: Path) -> str:
    """SHA-512 in base64, as npm writes it."""
    return base64.b64encode(hashlib.sha512(read_plain(path, limit=MAX_ARCHIVE)).digest()).decode()
