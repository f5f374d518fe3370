"""Gates and reducers as a name and arguments, as a saved model has them, and built from them again.

    about = describe_gate(gate)     # {"name": "disc", "config": {"coarse": 32, "share": 0.3}}
    build_gate(about)               # such a gate; its weights are loaded by the caller
"""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from msvit.checked_file import as_tuples
from msvit.gates import GATES, Gate, LogitGate, Normalization
from msvit.gates.curve import Curve


def describe_gate(gate: Gate) -> dict[str, Any]:
    about = describe_part(gate, GATES, "gate")
    if gate.normalization is not None:
        about["normalization"] = asdict(gate.normalization)
    if gate.input_normalization != gate.normalization:
        about["input_normalization"] = asdict(gate.input_normalization)  # type: ignore[arg-type]
    if gate.curves:
        about["curves"] = [asdict(curve) for curve in gate.curves]
    return about


def build_gate(about: dict[str, Any]) -> Gate:
    """A gate as described; earlier versions had no record of the normalisation, nor of curves."""
    gate: Gate = build_part(about, GATES, "gate")
    given = (about.get(name) for name in ("normalization", "input_normalization"))
    trained, images = (None if each is None else Normalization(**each) for each in given)
    if isinstance(gate, LogitGate):
        gate.set_normalization(trained, images)
    gate.curves = tuple(Curve(**as_tuples(each)) for each in about.get("curves", ()))
    return gate


def describe_part(part: Any, known: Mapping[str, type[Any]], word: str) -> dict[str, Any]:
    names = [name for name, kind in known.items() if kind is type(part)]
    if not names:
        kind = type(part).__name__
        raise ValueError(
            f"{kind} is not among the known {word}s ({', '.join(known)}); "
            f"add it first: msvit.{'gates.GATES' if word == 'gate' else 'reduction.REDUCERS'}['my-{word}'] = {kind}"
        )
    return {"name": names[0], "config": dict(part.config)}


def build_part(about: dict[str, Any], known: Mapping[str, type[Any]], word: str) -> Any:
    if about["name"] not in known:
        raise ValueError(f"unknown {word} {about['name']!r}; known: {', '.join(known)}")
    return known[about["name"]](**as_tuples(about["config"]))
