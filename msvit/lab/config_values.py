"""Values of a configuration's fields: do they fit a type, what is wanted in words, and what does a text mean?

    fits(3, int | None)                          # True
    wanted(Literal["sgd", "adamw"])              # "one of sgd, adamw"
    read("0.5,2", tuple[float, float], name)     # (0.5, 2.0)
"""

import types
from dataclasses import fields, is_dataclass
from typing import Any, Literal, Union, get_args, get_origin


def fits(value: Any, kind: Any) -> bool:
    """Whether a value is of a field's type; a whole number serves as a number."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Literal:
        return value in arguments
    if origin in (Union, types.UnionType):
        return any(fits(value, k) for k in arguments)
    if origin is tuple and arguments[-1] is Ellipsis:
        return isinstance(value, tuple) and all(fits(v, arguments[0]) for v in value)
    if origin is tuple:
        return (
            isinstance(value, tuple)
            and len(value) == len(arguments)
            and all(fits(v, k) for v, k in zip(value, arguments, strict=True))
        )
    if kind in (int, float):
        return isinstance(value, (int, kind)) and not isinstance(value, bool)
    return isinstance(value, origin or kind)


def wanted(kind: Any) -> str:
    """A field's type in words."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Literal:
        return f"one of {', '.join(arguments)}"
    if origin in (Union, types.UnionType):
        return " or ".join(wanted(k) for k in arguments)
    if origin is tuple:
        number = "values" if arguments[-1] is Ellipsis else f"{len(arguments)} values"
        return f"{number}, each {wanted(arguments[0])}"
    words = {int: "a whole number", float: "a number", bool: "true or false", str: "text", type(None): "none"}
    if is_dataclass(kind):
        return f"a record with the fields {', '.join(names(kind))}"
    return words.get(kind, "a dictionary" if origin is dict else str(kind))


def read(text: str, kind: Any, name: str) -> Any:
    """Text as a value of this type."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Literal:
        if text not in arguments:
            raise ValueError(f"{name} is {text!r}, but must be {wanted(kind)}")
        return text
    if origin in (Union, types.UnionType):
        if text.lower() in ("none", ""):
            return None
        return read(text, next(k for k in arguments if k is not type(None)), name)
    if origin is tuple:
        parts = text.strip("()[] ").split(",")
        if arguments[-1] is Ellipsis:
            arguments = (arguments[0],) * len(parts)
        if len(parts) != len(arguments):
            raise ValueError(f"{name} is {text!r}, but needs {len(arguments)} values separated by commas")
        return tuple(read(part.strip(), k, name) for part, k in zip(parts, arguments, strict=True))
    if kind is bool:
        if text.lower() not in ("true", "false"):
            raise ValueError(f"{name} is {text!r}, but must be {wanted(kind)}")
        return text.lower() == "true"
    try:
        return kind(text)
    except (TypeError, ValueError):
        raise ValueError(f"{name} is {text!r}, but must be {wanted(kind)}") from None


def guess(text: str) -> Any:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return {"true": True, "false": False, "none": None}.get(text.lower(), text)


def names(kind: Any) -> list[str]:
    return [f.name for f in fields(kind)] if is_dataclass(kind) else ["a value"]
