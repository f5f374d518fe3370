"""Which cases of a product of parameters run every day; all others are slow.

    @pairwise(mode=MODES, window=[4, 3, 7], merge_at=[2, 3, 4])     # every two values meet in some test
    @each_once(gate=GATES, loss=LOSSES)                             # every value is in some test
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from itertools import combinations, product
from typing import Any

import pytest


def pairwise(where: Callable[..., bool] = lambda *case: True, **values: Iterable[Any]) -> pytest.MarkDecorator:
    """Of the cases for which `where` is true."""
    return _covering(2, where, values)


def each_once(where: Callable[..., bool] = lambda *case: True, **values: Iterable[Any]) -> pytest.MarkDecorator:
    return _covering(1, where, values)


def _covering(size: int, where: Callable[..., bool], values: dict[str, Iterable[Any]]) -> pytest.MarkDecorator:
    lists = [list(each) for each in values.values()]
    places = [at for at in product(*map(range, map(len, lists))) if where(*_pick(lists, at))]
    chosen, params = set(_choose(size, [tuple(enumerate(at)) for at in places])), []
    for index, at in enumerate(places):
        names = (_name(value, place) for value, place in zip(_pick(lists, at), at, strict=True))
        marks = () if index in chosen else pytest.mark.slow
        params.append(pytest.param(*_pick(lists, at), id="-".join(names), marks=marks))
    return pytest.mark.parametrize(",".join(values), params)


def _pick(lists: list[list[Any]], at: tuple[int, ...]) -> list[Any]:
    return [values[place] for values, place in zip(lists, at, strict=True)]


def _name(value: Any, place: int) -> str:
    return str(place) if callable(value) else str(value).removeprefix("torch.")


def _choose(size: int, cases: list[tuple[tuple[int, int], ...]]) -> Iterator[int]:
    """Greedily, the case with most of what is missing; of equal ones that with the values that were chosen least."""
    parts = [{*combinations(case, size)} for case in cases]
    missing, used = set().union(*parts), Counter[tuple[int, int]]()
    while missing:
        best = max(range(len(cases)), key=lambda i: (len(parts[i] & missing), -sum(used[value] for value in cases[i])))
        missing -= parts[best]
        used.update(cases[best])
        yield best
