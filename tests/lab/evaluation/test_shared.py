"""Which images of an evaluation are kept."""

import pytest

from msvit_lab.evaluation.shared import Reservoir


@pytest.mark.parametrize("num", [1, 4, 5, 9, 100])
def test_as_many_as_asked_are_kept_in_order_and_always_the_same(num: int) -> None:
    found: list[list[int]] = []
    for seed in (3, 3, 4):
        made: list[int] = []
        reservoir: Reservoir[int] = Reservoir(4, seed)
        for item in range(num):
            reservoir.offer(lambda item, made=made: made.append(item) or item, item)
        found.append(reservoir.items())
        assert len(made) < 30, "copies are made of few"
    assert len(found[0]) == min(4, num)
    assert sorted(set(found[0])) == found[0] == found[1]
    assert num < 100 or found[0] != found[2]


def test_nothing_to_keep_is_an_error() -> None:
    with pytest.raises(ValueError, match="0 images were evaluated"):
        Reservoir(4, 0).items()
