"""A write rate in bytes a second, independent of the times of its calls."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from aoffload._tiers.write_rate import WriteRate


def test_a_second_may_be_spent_at_once() -> None:
    """And then nothing, until time has passed."""
    rate = WriteRate(100, 10)
    assert rate.left(0.0) == 100
    rate.spend_up_to(100, 0.0)
    assert rate.left(0.0) == 0
    assert rate.left(0.5) == 50
    assert rate.left(100.0) == 100


def test_the_smallest_thing_may_be_larger_than_a_second() -> None:
    """It goes into debt, which is paid before the next one."""
    rate = WriteRate(10, 25)
    assert rate.left(0.0) == 25
    rate.spend_up_to(25, 0.0)
    rate.spend_up_to(50, 0.0)
    assert rate.left(2.5) == 0
    assert rate.left(3.0) == 5


@given(st.integers(0, 2**32))
def test_no_more_than_the_rate_in_the_long_run(seed: int) -> None:
    """Spending all that is left at any times: never more than the time that has passed, and one second."""
    rng = random.Random(seed)
    rate, now, spent = WriteRate(1000, 1), 0.0, 0
    for _ in range(50):
        now += rng.random() * 3
        spent += rate.left(now)
        rate.spend_up_to(spent, now)
        assert spent <= 1000 * (now + 1)
