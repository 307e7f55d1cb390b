"""The day's writes: never more than the cap within any day, whenever that day begins."""

from __future__ import annotations

import random

import pytest

from aoffload._tiers.write_rate import DAY_S, DailyBudget


@pytest.mark.parametrize("seed", range(6))
def test_no_day_has_more_than_the_cap(seed: int) -> None:
    """A writer that always takes all that is left stays below the cap in every window of a day, and uses most of it."""
    rng = random.Random(seed)
    budget, now, writes = DailyBudget(1000), rng.uniform(-1e6, 1e6), list[tuple[float, int]]()
    for _ in range(400):
        now += rng.choice([0.0, 1.0, 599.0, 600.0, 3000.0, 40_000.0, 2 * DAY_S])
        if num_bytes := rng.randint(0, budget.left(now)):
            budget.spend(num_bytes, now)
            writes.append((now, num_bytes))
    for begins, _ in writes:
        assert sum(size for at, size in writes if begins <= at < begins + DAY_S) <= 1000
    assert len(budget._slices) <= DAY_S / 600 + 2


def test_a_day_later_all_of_it_is_there_again() -> None:
    """And a quarter before its end it says so."""
    budget = DailyBudget(100)
    budget.spend(75, 0.0)
    assert (budget.left(1.0), budget.is_low(1.0)) == (25, False)
    budget.spend(1, 2.0)
    assert budget.is_low(2.0)
    budget.spend(24, 3.0)
    assert (budget.left(DAY_S), budget.left(DAY_S + 600.0)) == (0, 100)
