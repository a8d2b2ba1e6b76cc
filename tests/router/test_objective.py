"""Objectives of a request: its headers, its key's, the router's; and headers that are nonsense."""

import json
import math

import pytest

from router.errors import BadRequest
from router.objective import Objective, Wish, wish_of


def test_each_time_alone_comes_from_who_says_it_first() -> None:
    header, key, flags = wish_of(["250"], []), Wish(800, 40.5), Wish(0, 90)
    assert header.over(key).over(flags).objective == Objective(0.25, 0.0405)
    assert Wish().over(flags).objective == Objective(math.inf, 0.09)


def test_zero_takes_back_what_others_say() -> None:
    assert wish_of(["0"], ["0.0"]).over(Wish(800, 40)).objective.is_none
    assert Wish().objective.is_none


@pytest.mark.parametrize(
    "value", ["", "-1", "nan", "inf", "1e3", "٢٥٠", "0x10", "12345678", "1 2", "250ms", "1_000"]
)
def test_anything_else_is_refused_by_name(value: str) -> None:
    with pytest.raises(BadRequest, match="x-slo-tpot-ms") as caught:
        wish_of(["250"], [value])
    error = json.loads(caught.value.body())["error"]
    assert (caught.value.status, error["param"]) == (400, "x-slo-tpot-ms")


def test_a_header_that_came_twice_is_refused() -> None:
    with pytest.raises(BadRequest, match="came 2 times"):
        wish_of(["250", "300"], [])
