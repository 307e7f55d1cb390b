"""The fetch gate: its comparison, and its measurements."""

from __future__ import annotations

import math

import attrs
import pytest

from aoffload._common.tiers import Tier
from aoffload._kernel.plans import Completion
from aoffload._kernel.states import Outcome
from aoffload._runtime.costs import PrefillSpeed, fetch_bound_s
from aoffload._transfer.copy_queue import Link
from aoffload._transfer.rates import FRESH_S, TransferRate

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
    """Nothing before the first measurement; what is ahead of it counts."""
    link = Measuring()
    assert link.link.arrives_s(1000, 0.0) == 0.0
    link.job(500, 0.0, 1.0)
    assert link.link.arrives_s(1000, 1.0) == 2.0
    link.begins(500, 1.0)
    assert link.link.arrives_s(1000, 1.0) == 3.0


# -- the tier ---------------------------------------------------------------------------------------------------------


@attrs.define(eq=False)
class Measuring:
    """A link, whose jobs begin and end as told."""

    link: Link = attrs.field(factory=lambda: Link(Tier.DISK, Tier.HOST, 1e9, 10**9, 4, rate=TransferRate()))
    num_jobs: int = 0

    def begins(self, num_bytes: int, now: float) -> int:
        self.num_jobs += 1
        self.link.begin(self.num_jobs, num_bytes, now)
        return self.num_jobs

    def ends(self, job_id: int, now: float, outcome: Outcome = Outcome.LANDED) -> None:
        self.link.end(Completion(job_id, outcome), now)

    def job(self, num_bytes: int, began_s: float, ended_s: float) -> None:
        self.ends(self.begins(num_bytes, began_s), ended_s)

    def bytes_per_s(self, now: float) -> float | None:
        found = self.link.arrives_s(1000, now) - self.link.arrives_s(0, now)
        return 1000 / found if found else None


def test_a_rate_counts_the_time_in_which_anything_was_in_flight() -> None:
    """Two jobs at a time are twice as fast as one, and nothing in flight is no time."""
    link = Measuring()
    assert link.bytes_per_s(0.0) is None
    for begin_s in range(10):
        jobs = [link.begins(100, 3.0 * begin_s) for _ in range(2)]
        for job_id in jobs:
            link.ends(job_id, 3.0 * begin_s + 1)
    assert link.bytes_per_s(29.0) == pytest.approx(200.0, rel=0.15)
    for begin_s in range(10, 20):
        link.job(100, 3.0 * begin_s, 3.0 * begin_s + 1)
    assert link.bytes_per_s(59.0) == pytest.approx(100.0, rel=0.15)


def test_what_does_not_end_makes_a_rate_small() -> None:
    """Before the first measurement, too: else each request would be the one that measures."""
    link = Measuring()
    job_id = link.begins(100, 0.0)
    assert link.bytes_per_s(0.0) is None
    assert link.bytes_per_s(50.0) == 2.0
    link.ends(job_id, 100.0)
    link.begins(1, 100.0)
    assert link.bytes_per_s(100.0) == 1.0
    assert link.bytes_per_s(100.0 + FRESH_S / 2) == pytest.approx(1 / (FRESH_S / 2))


def test_a_rate_gets_old() -> None:
    """What was slow is tried again after a while, by one job, and then counts as what that has shown."""
    link = Measuring()
    link.job(1, 0.0, 1.0)
    assert link.bytes_per_s(1.0 + FRESH_S / 2) == 1.0
    assert link.bytes_per_s(1.0 + FRESH_S) is None
    job_id = link.begins(1000, 1.0 + FRESH_S)
    assert link.bytes_per_s(1.0 + FRESH_S) == 1.0
    link.ends(job_id, 2.0 + FRESH_S)
    assert link.bytes_per_s(2.0 + FRESH_S) == pytest.approx(1000.0, rel=0.001)


def test_failures_measure_nothing() -> None:
    """A tier that said no is not a slow one; what it had moved before counts on."""
    link = Measuring()
    link.ends(link.begins(100, 0.0), 1.0, Outcome.FAILED)
    assert link.bytes_per_s(1.0) is None
    link.job(100, 1.0, 2.0)
    link.ends(link.begins(100, 2.0), 3.0, Outcome.FAILED)
    assert 0 < (link.bytes_per_s(3.0) or 0) < 100


def test_latency_is_told_from_bandwidth() -> None:
    """A second of latency and 100 bytes a second: both are found from jobs of several sizes, and neither a spell of
    equal ones nor a link that has become slow makes a latency of what is bandwidth."""
    link, now = Measuring(), 0.0
    for num_bytes in (100, 1000, 300, 2000, 500, 100, 1000):
        link.job(num_bytes, now, now + 1.0 + num_bytes / 100)
        now += 100.0 / 10
        now += 1.0 + num_bytes / 100 - FRESH_S / 2
    assert link.link.arrives_s(0, now) == pytest.approx(1.0, rel=0.1)
    assert link.link.arrives_s(1000, now) == pytest.approx(11.0, rel=0.05)
    slow = Measuring()
    for number in range(30):
        slow.job(1000, 20.0 * number, 20.0 * number + (10.0 if number < 20 else 19.0))
    assert slow.link.arrives_s(0, 600.0) == 0.0
    assert slow.bytes_per_s(600.0) == pytest.approx(1000 / 19, rel=0.1)


def test_a_small_job_shows_how_fast_large_ones_have_become() -> None:
    """What is old keeps its share of latency, or a link would seem to be all latency, or none."""
    link, now = Measuring(), 0.0
    for num_bytes in (100, 1000, 300, 2000, 500, 100, 1000):
        link.job(num_bytes, now, now + 1.0 + num_bytes / 100)
        now += 1.0 + num_bytes / 100
    now += 2 * FRESH_S
    link.job(100, now, now + 0.02)
    assert link.link.arrives_s(1000, now + 0.02) == pytest.approx(0.11, rel=0.05)


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
