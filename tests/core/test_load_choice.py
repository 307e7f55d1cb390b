"""Load or compute: the comparison of the default rule, and the values that a load choice may return."""

from __future__ import annotations

from typing import Any

import pytest
from driving import Driven, prompt
from engine_driving import EngineDriven

from aoffload import InvalidArgument
from aoffload._common.tiers import Tier
from aoffload._extensions.load_choice import CostChoice, LoadOffer, chosen_stop, load_choice_of

NUM_UNITS, UNIT, SPEED = 10, 100, 1000.0
"""Computing the hit takes a second."""


def offer(
    load_s: float, *, wait_s: float = 0.0, queued: int = 0, rest: int = UNIT, speed: float | None = SPEED, **about: Any
) -> LoadOffer:
    """A hit that is copied in `load_s`, after what takes `wait_s`; `queued` tokens are computed before the request."""
    link = {"bytes_per_s": 1000 / load_s, "queued_bytes": int(1000 * wait_s / load_s)}
    return LoadOffer(NUM_UNITS, 1000, UNIT, rest, speed, queued, **link | about)  # type: ignore[arg-type]


def stop(load_s: float, **about: Any) -> int:
    return CostChoice().stop(offer(load_s, **about))


@pytest.mark.parametrize(("load_s", "loaded"), [(0.99, NUM_UNITS), (1.0, NUM_UNITS), (1.01, 0)])
def test_an_idle_engine_computes_what_arrives_later(load_s: float, loaded: int) -> None:
    """Nobody waits after the request: its own time decides."""
    assert stop(load_s) == loaded
    assert stop(load_s / 2, latency_s=load_s / 2) == loaded


def test_what_is_queued_to_be_computed_makes_computing_dear() -> None:
    """A load that ends before the request's turn costs nothing; one that ends later is weighed against what computing
    takes from everybody after."""
    assert stop(5.0, queued=5000) == NUM_UNITS
    assert stop(6.0, queued=5000) == NUM_UNITS
    assert stop(9.0, queued=5000) == 0
    assert stop(1.5, queued=100) == NUM_UNITS and stop(2.0, queued=100) == 0


def test_what_is_queued_to_be_copied_makes_loading_dear() -> None:
    """What waits for the link is before these bytes, and those after wait for them."""
    assert stop(0.6, wait_s=0.3) == 0
    assert stop(0.4, wait_s=0.1) == NUM_UNITS
    assert stop(1.5, wait_s=3.0, queued=5000) == NUM_UNITS
    assert stop(3.0, wait_s=3.0, queued=5000) == 0


def test_what_is_not_known() -> None:
    """Without a speed of computing everything is loaded. A link that nothing has measured is measured by one load."""
    assert stop(1e9, speed=None) == NUM_UNITS
    assert stop(1.0, bytes_per_s=None) == NUM_UNITS
    assert stop(1.0, bytes_per_s=None, queued_bytes=1) == 0


def test_what_was_slow_is_tried_again() -> None:
    """By a part of the hit that takes a hundredth of the time since then, if nothing else is copied."""
    assert [stop(10.0, age_s=age_s) for age_s in (0.0, 99.0, 100.0, 250.0, 1e9)] == [0, 0, 1, 2, NUM_UNITS]
    assert stop(5.0, latency_s=5.0, age_s=250.0) == 2 and stop(10.0, age_s=250.0, wait_s=0.1) == 0
    assert stop(10.0, age_s=250.0, queued_bytes=1) == 0


def test_a_deadline_goes_before_the_cost() -> None:
    """What meets it, if only one of the two does; if both do or neither does, what costs less."""
    assert stop(4.0, queued=3000) == NUM_UNITS and stop(4.0, queued=3000, left_s=4.15) == NUM_UNITS
    assert stop(5.5, queued=3000) == NUM_UNITS and stop(5.5, queued=3000, left_s=5.0) == 0
    assert stop(1.0, left_s=0.5) == stop(1.0) == NUM_UNITS
    assert stop(1.05, left_s=1.12) == 0 and stop(1.05, left_s=9.0) == 0


def test_both_estimates_are_told() -> None:
    """The time to the first token, with and without the load."""
    found = offer(0.5, queued=200)
    assert (found.first_token_s(0), found.first_token_s(NUM_UNITS)) == (pytest.approx(1.3), pytest.approx(0.6))


@pytest.mark.parametrize("said", [-1, 11, 2**70, 1.0, None, True, "4"])
def test_a_choice_says_a_number_of_units(said: Any) -> None:
    """Whatever else a program's own says is refused, by name."""

    class FixedChoice:
        def stop(self, _: LoadOffer) -> int:
            return said  # type: ignore[no-any-return]

    with pytest.raises(InvalidArgument, match=r"^load_choice.stop: "):
        chosen_stop(FixedChoice(), offer(1.0), 10)


def test_names() -> None:
    """Of what is always loaded nobody is asked."""
    own = CostChoice()
    assert load_choice_of("always") is None and load_choice_of(own) is own
    assert isinstance(load_choice_of("cost"), CostChoice)


# -- what could be loaded ---------------------------------------------------------------------------------------------

A = prompt(1, 13)


def test_what_a_load_would_bring() -> None:
    """As `plan_load` finds it: not what the device has or another request brings; nothing once it was planned."""
    driven = Driven(20)
    driven.on_host_only(A)
    first = driven.allocated(A)
    found = driven.ledger.loadable(first)
    assert found is not None and (found.start, found.stop, found.num_blocks) == (0, 3, 3)
    part = driven.ledger.loadable(first, 9)
    assert part is not None and (part.stop, part.num_blocks) == (2, 2)
    assert driven.ledger.loadable(first, 3) is None
    plans = driven.ledger.plan_load(first)
    assert sum(plan.num_blocks for plan in plans) == 3 and driven.ledger.loadable(first) is None
    second = driven.allocated(A)
    shared = driven.ledger.loadable(second)
    assert shared is not None and (shared.stop, shared.num_blocks) == (3, 0)
    driven.land(plans)
    assert driven.ledger.loadable(driven.admit(prompt(2, 9))) is None


def test_what_is_declined_is_computed() -> None:
    """Where an engine owns the blocks: the match has what is left, nothing of the rest is pinned, later matches and
    the load have no more."""
    driven = EngineDriven()
    driven.serve(A)
    request = driven.admit(A)
    found = driven.ledger.loadable(request)
    assert found is not None and (found.start, found.stop, found.num_blocks) == (0, 3, 3)
    assert driven.ledger.decline(request, 9).num_host_tokens == 8
    assert driven.ledger.statistics().host.num_pinned == 2
    assert driven.ledger.match_again(request, num_device_tokens=0).num_tokens == 8
    assert driven.ledger.decline(request, 0).num_tokens == 0
    assert driven.ledger.statistics().host.num_pinned == 0 and driven.ledger.loadable(request) is None
    assert driven.ledger.match_again(request, num_device_tokens=4).num_host_tokens == 0
    assert driven.ledger.cache.tiers[Tier.HOST].statistics().num_cached == 3
