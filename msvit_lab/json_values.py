"""JSON files, replaced whole; and values read from them, None or empty where they are not of the expected kind."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float64

from msvit.saving.file import replacing


def write_json(path: Path, values: dict[str, Any]) -> None:
    """Replaced whole or not at all."""
    with replacing(path) as part:
        part.write_text(json.dumps(values, indent=2))


def look_up(value: Any, keys: Sequence[str]) -> Any:
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    return value


def finite(value: Any) -> float | None:
    """A number as a float; None for anything else, infinities included."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and math.isfinite(value) else None


def with_gaps(value: Any) -> list[float | None]:
    """A list of finite numbers, None where there is none; empty for anything else."""
    return [finite(item) for item in value] if isinstance(value, list) else []


def numbers(value: Any) -> list[float]:
    """A list of finite numbers as floats; empty for anything else."""
    known = with_gaps(value)
    return [] if None in known else [item for item in known if item is not None]


def cell_map(value: Any) -> Float64[np.ndarray, "hc wc"] | None:
    """Nested lists of finite numbers as an array; None for anything else."""
    try:
        array = np.array(value, dtype=np.float64)
    except (TypeError, ValueError):
        return None
    return array if array.ndim == 2 and array.size and np.isfinite(array).all() else None
