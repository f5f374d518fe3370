"""JSON files, replaced whole."""

import json
from pathlib import Path
from typing import Any

from msvit.saving.file import replacing


def write_json(path: Path, values: dict[str, Any]) -> None:
    """Replaced whole or not at all."""
    with replacing(path) as part:
        part.write_text(json.dumps(values, indent=2))
