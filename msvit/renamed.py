"""Layers that had other names in earlier versions: files with either name are read."""

from collections.abc import Mapping
from typing import Any, ClassVar, TypeVar

from torch import nn

T = TypeVar("T")


class RenamedLayers(nn.Module):
    """`load_state_dict` also takes weights under the names that `old_names` maps to the present ones."""

    old_names: ClassVar[dict[str, str]] = {}

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        rename(state_dict, prefix, self.old_names)
        super()._load_from_state_dict(state_dict, prefix, *args)


def rename(values: dict[str, T], prefix: str, names: Mapping[str, str]) -> None:
    """Move what lies under an old name of a layer at `prefix` to the present one."""
    for name in [name for name in values if name.startswith(prefix)]:
        layer, dot, rest = name.removeprefix(prefix).partition(".")
        if dot and layer in names:
            values[f"{prefix}{names[layer]}.{rest}"] = values.pop(name)


def current_names(module: nn.Module, values: Mapping[str, T]) -> dict[str, T]:
    """A state dict, or anything keyed like one, under the names that `module` has now."""
    values = dict(values)
    for path, part in module.named_modules():
        if isinstance(part, RenamedLayers):
            rename(values, f"{path}." if path else "", part.old_names)
    return values
