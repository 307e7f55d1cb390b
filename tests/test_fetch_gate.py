"""The gate of fetches, in numbers: what it compares, and what it measures."""

from __future__ import annotations

import math

import pytest

from aoffload.fetch_gate import PrefillSpeed, fetch_bound_s, transfer_s
from aoffload.transfer.rates import FRESH_S, TransferRate

# -- the choice -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tokens_per_s", "fetch_s", "expected_s"),
    [
        (1000.0, 0.0, 2.0),  # nothing is known of the tier: try
        (1000.0, 1.5, 2.0),
        (1000.0, 1.6, 0.0),  # 0.8 of 2 s
        (1000.0, math.inf, 0.0),
        (None, 7.9, 10.0),  # nothing is known of the engine: as long as it may
        (None, 8.0, 0.0),
        (10.0, 7.9, 10.0),  # it computes for 200 s, and waits for no fetch that long
        (10.0, 8.1, 0.0),
    ],
)
def test_what_is_computed_sooner_is_not_fetched(tokens_per_s: float | None, fetch_s: float, expected_s: float) -> None:
    """A fetch of 2,000 tokens that takes 0.8 of the time to compute them is none; one that is, may take all of it."""
    assert fetch_bound_s(2000, tokens_per_s, fetch_s, most_s=10.0) == expected_s


def test_the_time_of_a_fetch() -> None:
    """Nothing before the first measurement."""
    assert transfer_s(1000, None) == 0.0
    assert transfer_s(1000, 500.0) == 2.0
    assert transfer_s(0, 500.0) == 0.0


# -- the tier ---------------------------------------------------------------------------------------------------------


def test_a_rate_counts_the_time_in_which_anything_was_in_flight() -> None:
    """Two jobs at a time are twice as fast as one, and nothing in flight is no time."""
    rate = TransferRate()
    assert rate.bytes_per_s(0, 0.0) is None
    for begin_s in range(10):
        rate.begins(3.0 * begin_s)
        rate.ended(100, 3.0 * begin_s + 1)
        rate.ended(100, 3.0 * begin_s + 1)
    assert rate.bytes_per_s(0, 29.0) == pytest.approx(200.0, rel=0.15)
    for begin_s in range(10, 20):
        rate.begins(3.0 * begin_s)
        rate.ended(100, 3.0 * begin_s + 1)
    assert rate.bytes_per_s(0, 59.0) == pytest.approx(100.0, rel=0.15)


def test_what_does_not_end_makes_a_rate_small() -> None:
    """Before the first measurement, too: else each request would be the one that measures."""
    rate = TransferRate()
    rate.begins(0.0)
    assert rate.bytes_per_s(100, 0.0) is None
    assert rate.bytes_per_s(100, 50.0) == 2.0
    rate.ended(100, 100.0)
    rate.begins(100.0)
    assert rate.bytes_per_s(100, 100.0) == 1.0
    assert rate.bytes_per_s(100, 100.0 + FRESH_S / 2) == 1.0
    assert rate.bytes_per_s(1, 100.0 + FRESH_S / 2) == pytest.approx(1 / (FRESH_S / 2))


def test_a_rate_gets_old() -> None:
    """What was slow is tried again after a while, and counts no more then."""
    rate = TransferRate()
    rate.begins(0.0)
    rate.ended(1, 1.0)
    assert rate.bytes_per_s(0, 1.0 + FRESH_S / 2) == 1.0
    assert rate.bytes_per_s(0, 1.0 + FRESH_S) is None
    rate.begins(1.0 + FRESH_S)
    rate.ended(1000, 2.0 + FRESH_S)
    assert rate.bytes_per_s(0, 2.0 + FRESH_S) == 1000.0


def test_failures_measure_nothing() -> None:
    """A tier that said no is not a slow one; what it had moved before counts on."""
    rate = TransferRate()
    rate.begins(0.0)
    rate.ended(0, 1.0)
    assert rate.bytes_per_s(0, 1.0) is None
    rate.ended(100, 2.0)
    rate.ended(0, 3.0)
    assert 0 < (rate.bytes_per_s(0, 3.0) or 0) < 100


# -- the engine -------------------------------------------------------------------------------------------------------


def test_the_speed_of_an_engine() -> None:
    """Tokens of all requests of a step count together, over its time; what decodes says nothing of prompts."""
    speed = PrefillSpeed()
    speed.begins(["a", "b", "c"], 0.0)
    speed.computed("c", 1, 1.0)
    assert speed.tokens_per_s is None
    speed.computed("a", 100, 2.0)
    speed.computed("b", 300, 2.5)  # its task comes later: the forward was over before
    assert speed.tokens_per_s == 200.0
    speed.begins(["a"], 10.0)
    speed.computed("a", 15, 20.0)
    assert speed.tokens_per_s == 200.0


def test_steps_at_the_same_time_are_told_apart() -> None:
    """Each commit counts from the begin of its own step."""
    speed = PrefillSpeed()
    speed.begins(["a"], 0.0)
    speed.begins(["b"], 9.0)
    speed.computed("a", 100, 10.0)
    assert speed.tokens_per_s == 10.0


def test_what_says_nothing_of_the_speed() -> None:
    """A commit without a step, one whose request was over meanwhile, and a step that took no time."""
    speed = PrefillSpeed()
    speed.computed("a", 100, 1.0)
    speed.begins(["a"], 2.0)
    speed.forget("a")
    speed.forget("a")
    speed.computed("a", 100, 3.0)
    speed.begins(["a"], 4.0)
    speed.computed("a", 100, 4.0)
    assert speed.tokens_per_s is None and not speed._steps


def test_a_speed_that_is_given_is_not_measured() -> None:
    """The configuration has the last word."""
    speed = PrefillSpeed(5.0)
    speed.begins(["a"], 0.0)
    speed.computed("a", 100, 1.0)
    assert speed.tokens_per_s == 5.0
