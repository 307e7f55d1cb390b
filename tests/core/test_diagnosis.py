"""Reports on waiting requests: the reason, the age, and the holders of blocks, for each kind of wait."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from driving import Driven, prompt
from engine_driving import EngineDriven

from aoffload._common.prefix import Prefix, Root
from aoffload._common.tiers import Tier
from aoffload._config.config import OffloadConfig
from aoffload._config.groups import KVCacheGroup
from aoffload._extensions.assembly import Ledger
from aoffload._extensions.status import Declined, Holder, RequestStatus, WaitsFor
from aoffload._kernel.events import Event, ExtensionRefused
from aoffload._kernel.pools import LeastRecentlyUsed
from aoffload._kernel.records import Part
from aoffload._kernel.states import Outcome, RequestState
from aoffload.errors import OutOfBlocks
from aoffload.ledger import LearnedEviction


class Own:
    """An order that a program might pass."""

    def __init__(self) -> None:
        order = LeastRecentlyUsed()
        self.add, self.add_newer, self.add_back = order.add, order.add_newer, order.add_back
        self.are_adjacent = order.are_adjacent
        self.remove, self.oldest, self.order = order.remove, order.oldest, order

    def __iter__(self) -> Iterator[Part]:
        return iter(self.order)


class Timed(Driven):
    """Driven by hand, with a clock that the test sets."""

    def __init__(self, num_device: int, num_host: int = 16, **config: Any) -> None:
        super().__init__(num_device, num_host, **config)
        self.now = 0.0
        groups = [KVCacheGroup("full", block_size=4)]
        self.ledger = Ledger(
            OffloadConfig(groups=groups, num_host_blocks=num_host, **config), num_device + 1, clock=lambda: self.now
        )

    def status(self, request_id: str) -> RequestStatus:
        (found,) = [status for status in self.ledger.reports.requests() if status.request_id == request_id]
        return found

    def held(self) -> list[tuple[str, str, int]]:
        return [(holder.kind, holder.name, holder.num_blocks) for holder in self.ledger.reports.holders()]


def test_an_idle_ledger_says_that_nobody_holds_anything() -> None:
    driven = Timed(8)
    assert driven.ledger.reports.requests() == driven.ledger.reports.holders() == ()
    assert driven.ledger.explain().splitlines()[-1] == "  nothing"
    assert driven.ledger.explain().startswith("8 device blocks: 8 free, 0 cached, 0 pinned, 0 quarantined; 0 requests")


def test_an_eviction_that_is_not_the_default_has_a_line() -> None:
    """Which order rules in each tier; an order of the program's own by its name."""
    driven = Timed(8, 8, eviction=LearnedEviction(device=True))
    driven.serve(prompt(1, 8))
    (found,) = [line for line in driven.ledger.explain().splitlines() if line.startswith("eviction")]
    assert found == "eviction: host by LRU, device by LRU, chosen by the guard"

    assert "eviction" not in Timed(8).ledger.explain()
    own = Timed(8, eviction=Own).ledger.explain()
    assert "\neviction: custom order Own\n" in own


def test_numbers_are_written_in_one_way() -> None:
    """By thousands, blocks and tokens alike, and never with an exponent."""
    driven = Timed(20_000, 3_000)
    driven.allocated(prompt(1, 4 * 15_000), request_id="one")
    driven.ledger.queue_allocation(driven.admit(prompt(2, 4 * 6_000), request_id="two"))
    text = driven.ledger.explain()
    assert text.startswith("20,000 device blocks: 5,000 free, 0 cached, 15,000 pinned, 0 quarantined; 2 requests")
    assert "3,000 host blocks" in text and "6,000 blocks for 0.0 s" in text
    assert "request one, allocated for 0.0 s: 15,000 blocks" in text
    assert str(Declined(1_234, 1_234.5, 0.0123)) == (
        "computes 1,234 tokens of its host hit instead of loading them: "
        "first token in 0.0123 s, with the load in 1,234 s"
    )


def test_explain_names_the_holders_once() -> None:
    """However many requests wait for free blocks: the first one names the holders, the others only their place. The
    list below names every holder, and each status has its holders."""
    driven = Timed(8)
    driven.allocated(prompt(1, 32), request_id="hog")
    for number in range(2, 12):
        driven.ledger.queue_allocation(driven.admit(prompt(number, 8), request_id=f"waiter{number}"))
    text, holder = driven.ledger.explain(), "request hog, allocated for 0.0 s: 8 blocks"
    assert text.count(f"held by {holder}") == 1 and text.count(holder) == 2
    (first, *others) = [line for line in text.splitlines() if "waiter" in line]
    assert first.endswith(f"2 blocks for 0.0 s, place 1 in the queue; held by {holder}")
    assert [line[-len("place 10 in the queue") :].strip() for line in others] == [
        f"place {place} in the queue" for place in range(2, 11)
    ]
    assert all(str(status).endswith(holder) for status in driven.ledger.reports.requests()[1:])


def test_ages_count_from_the_last_move() -> None:
    """A request's from its state, a wait's from joining the line; the one that has been there for longest is first."""
    driven = Timed(8)
    driven.now = 1.0
    driven.allocated(prompt(1, 32), request_id="one")
    driven.now = 2.0
    waiting = driven.admit(prompt(2, 8), request_id="two")
    driven.now = 5.0
    driven.ledger.queue_allocation(waiting)
    driven.now = 10.0
    assert [(one.request_id, one.age_s, one.waited_s) for one in driven.ledger.reports.requests()] == [
        ("one", 9.0, None),
        ("two", 8.0, 5.0),
    ]
    assert driven.ledger.reports.oldest_wait_s() == 5.0
    assert driven.ledger.reports.oldest_by_state() == {"allocated": 9.0, "pinned": 8.0}


def test_the_age_of_a_copy_counts_from_its_planning() -> None:
    """Also before it is launched: a copy that waits for the bounds in flight shows for how long."""
    driven = Timed(8)
    driven.now = 100.0
    request = driven.allocated(prompt(1, 8), request_id="one")
    driven.ledger.plan_load(request)
    driven.ledger.commit(request, 8)
    driven.now = 103.0
    (copy,) = (one for one in driven.ledger.reports.holders() if one.kind == "store")
    assert copy.age_s == 3.0


def test_a_ledger_without_a_clock_has_no_ages() -> None:
    """None, which is not nothing; all else is there."""
    driven = Driven(8)
    driven.allocated(prompt(1, 32), request_id="one")
    driven.ledger.queue_allocation(driven.admit(prompt(2, 8), request_id="two"))
    one, two = driven.ledger.reports.requests()
    assert one.age_s is one.waited_s is two.waited_s is None
    assert str(two) == (
        "request two, pinned, 0 blocks; waits for 2 blocks, place 1 in the queue; "
        "held by request one, allocated: 8 blocks"
    )


def test_who_extends_stands_before_who_begins() -> None:
    """Places are those in which the line is served. What a waiter holds itself is not what it waits for."""
    driven = Timed(8)
    first = driven.running(prompt(1, 16), request_id="first")
    driven.running(prompt(2, 16), request_id="second")
    driven.ledger.queue_allocation(driven.admit(prompt(3, 8), request_id="third"))
    driven.ledger.queue_allocation(driven.admit(prompt(4, 8), request_id="fourth"))
    driven.ledger.queue_extension(first, 24)
    places = {one.request_id: (one.place, one.num_missing) for one in driven.ledger.reports.requests()}
    assert places == {"first": (1, 2), "second": (None, 0), "third": (2, 2), "fourth": (3, 2)}
    extending = driven.status("first")
    assert (extending.state, extending.waits_for) == (RequestState.RUNNING, WaitsFor.BLOCKS)
    assert [holder.name for holder in extending.held_by] == ["second"]
    assert {holder.name for holder in driven.status("third").held_by} == {"first", "second"}


def test_a_load_is_waited_for_by_its_jobs() -> None:
    """Its own or another request's, queued, launched or parked; once it is over, the program is next."""
    driven = Timed(12, 16, max_job_bytes=1)
    driven.on_host_only(prompt(1, 9))
    one = driven.allocated(prompt(1, 9), request_id="one")
    plans = driven.ledger.plan_load(one)
    two = driven.allocated(prompt(1, 9), request_id="two")
    driven.ledger.plan_load(two)
    driven.launch(plans[1:])
    driven.now = 3.0
    driven.end(plans[1])
    for name in ("one", "two"):
        status = driven.status(name)
        assert (status.state, status.waits_for) == (RequestState.LOADING, WaitsFor.COPIES)
        found = [(job.kind, job.name, job.state, job.num_blocks, job.request_ids) for job in status.held_by]
        ids = [str(plan.job_id) for plan in plans]
        assert found == [("load", ids[0], "queued", 1, ("one",)), ("load", ids[1], "parked", 1, ("one",))]
    driven.land(plans[:1])
    assert driven.status("two").waits_for is WaitsFor.PROGRAM
    assert driven.status("two").what() == "its program, which makes the next call"


def test_a_step_is_waited_for_until_it_ends() -> None:
    """By who is in it; of requests that are over it says that they are."""
    driven = Timed(8)
    one, two = (driven.running(prompt(name, 8), request_id=f"r{name}") for name in (1, 2))
    with driven.ledger.step([one, two]):
        driven.now = 2.0
        driven.release(one, "cancelled")
        status = driven.status("r2")
        assert (status.waits_for, len(status.held_by)) == (WaitsFor.STEP, 1)
        assert status.held_by[0] == Holder("step", "1", "open", 2.0, 4, ("r1", "r2"), ("r1",))
        assert str(status.held_by[0]) == "step 1 of r1 (over), r2, open for 2.0 s: 4 blocks"
        assert driven.held() == [("step", "1", 4), ("request", "r2", 2)]
        assert driven.ledger.reports.oldest_step_s() == 2.0
    assert driven.status("r2").waits_for is WaitsFor.PROGRAM
    assert driven.ledger.reports.oldest_step_s() == 0.0
    assert not driven.ledger.steps


def test_a_step_that_names_a_request_twice_holds_its_blocks_once() -> None:
    driven = Timed(8)
    one = driven.running(prompt(1, 8), request_id="one")
    with driven.ledger.step([one, one]):
        (step,) = driven.status("one").held_by
        assert (step.num_blocks, step.request_ids) == (2, ("one",))


def test_pins_and_jobs_hold_blocks_too() -> None:
    """A pin what is cached on the device; a store what it reads, until it is given up; a load in quarantine what it may
    still write."""
    driven = Timed(8, 16)
    driven.serve(prompt(1, 8))
    pin = driven.ledger.pins.hold(driven.prefix(prompt(1, 8)))
    assert driven.held() == [("pin", "1", 2)]
    driven.ledger.pins.release(pin)
    stores = driven.launch(driven.commit(driven.running(prompt(2, 12), request_id="two")))
    assert ("store", str(stores[0].job_id), 3) in driven.held()
    driven.end(stores[0], Outcome.UNPROVEN)
    assert ("store", str(stores[0].job_id), 3) not in driven.held()
    driven.end(stores[0])
    driven.on_host_only(prompt(3, 5))
    (load,) = driven.launch(driven.ledger.plan_load(driven.allocated(prompt(3, 5), request_id="three")))
    driven.end(load, Outcome.UNPROVEN)
    assert ("load", str(load.job_id), 1) in driven.held()
    assert "quarantined" in driven.ledger.explain()


def test_what_is_pinned_once_its_request_is_over_has_a_holder() -> None:
    """A store keeps what lies before its blocks, too: without that nobody could find them. With it, holders and the
    count of pinned blocks agree."""
    driven = Timed(8, 16)
    driven.serve(prompt(1, 8))
    one = driven.running(prompt(1, 16), request_id="one")
    (store,) = driven.launch(driven.commit(one))
    driven.release(one)
    assert store.num_blocks == 2
    assert driven.held() == [("store", str(store.job_id), 4)] and driven.num_pinned()[0] == 4
    driven.end(store)
    assert driven.held() == [] and driven.num_pinned()[0] == 0


def test_what_another_request_has_cached_first_is_held_beside_the_own_copy() -> None:
    """Two that computed the same: the second one reads its own copy, and pins what others find."""
    driven = Timed(8, 0)
    one, two = (driven.running(prompt(1, 8), request_id=name) for name in ("one", "two"))
    driven.commit(one)
    driven.commit(two)
    driven.release(one)
    assert driven.held() == [("request", "two", 4)] and driven.num_pinned()[0] == 4


def test_a_grant_that_is_not_accepted_yet_is_held() -> None:
    """It is out of the line, and its task is next; the blocks are its own."""
    driven = Timed(8)
    one = driven.allocated(prompt(1, 32), request_id="one")
    driven.ledger.queue_allocation(driven.admit(prompt(2, 8), request_id="two"))
    driven.release(one, "cancelled")
    status = driven.status("two")
    assert (status.waits_for, status.place, status.num_blocks) == (WaitsFor.PROGRAM, None, 2)
    assert driven.held() == [("request", "two", 2)]


def test_only_the_biggest_holders_are_named_to_a_waiter() -> None:
    """All of them are in `holders()`; of equals the oldest comes first."""
    driven = Timed(10)
    for name, num_tokens in enumerate((8, 16, 4, 8, 4), 1):
        driven.now = float(name)
        driven.allocated(prompt(name, num_tokens), request_id=f"r{name}")
    driven.ledger.queue_allocation(driven.admit(prompt(9, 8), request_id="last"))
    assert [holder.name for holder in driven.ledger.reports.holders()] == ["r2", "r1", "r4", "r3", "r5"]
    assert [holder.name for holder in driven.status("last").held_by] == ["r2", "r1", "r4"]


def test_a_pending_request_waits_for_the_one_that_loads() -> None:
    """With an engine's blocks: whose load it is."""
    driven = EngineDriven()
    driven.serve(range(16))
    loading = driven.admit(range(17), request_id="first")
    plans = driven.load(loading, driven.fresh(17))
    pending = driven.admit(range(17), request_id="second")
    assert pending.match.is_pending
    driven.now = 1.0
    (status,) = [one for one in driven.ledger.reports.requests() if one.request_id == "second"]
    assert (status.state, status.waits_for, status.age_s) == (RequestState.MATCHED, WaitsFor.REQUEST, 1.0)
    assert [holder.name for holder in status.held_by] == ["first"]
    assert [(holder.kind, holder.num_blocks) for holder in driven.ledger.reports.holders()] == [("load", 4)]
    driven.land(plans)


def test_of_an_engines_blocks_it_says_how_many_there_are_and_what_copies_hold() -> None:
    """What is free and cached there only the engine knows: it is not counted as none."""
    driven = EngineDriven()
    assert driven.ledger.explain().startswith("999 device blocks, which the engine allocates: copies hold 0 (0 quar")
    driven.serve(range(16))
    request, plans = driven.loading(range(17), request_id="first")
    driven.end(plans[0], Outcome.UNPROVEN)
    about = driven.ledger.explain().splitlines()[0]
    assert about.endswith("which the engine allocates: copies hold 4 (4 quarantined); 1 request")
    driven.release(request)


def test_a_refused_extension_is_told_and_changes_nothing() -> None:
    """Where there is no room, and where it can never fit."""
    heard: list[tuple[str, int, int]] = []

    class Hears:
        def observe(self, event: Event) -> None:
            if isinstance(event, ExtensionRefused):
                heard.append((event.request.request_id, event.num_needed, event.num_available))

    driven = Driven(8, observer=Hears())
    one = driven.running(prompt(1, 16), request_id="one")
    driven.running(prompt(2, 12), request_id="two")
    before = driven.picture()
    for num_tokens in (24, 40):
        with pytest.raises(OutOfBlocks):
            driven.ledger.extend_nowait(one, num_tokens)
    assert driven.picture() == before
    assert heard == [("one", 2, 1), ("one", 10, 8)]


def test_a_wait_that_begins_again_is_as_old_as_before() -> None:
    """A reset takes back a grant that nobody has accepted: its request has been in the wait queue since it joined it
    first."""
    driven = Timed(8)
    one = driven.allocated(prompt(1, 32), request_id="one")
    waiter = driven.ledger.queue_allocation(driven.admit(prompt(2, 8), request_id="two"))
    driven.release(one, "cancelled")
    assert waiter.granted is not None
    driven.now = 6.0
    driven.ledger.reset(Tier.DEVICE)
    assert waiter.joined_s == 0.0


def test_a_request_id_commands_no_terminal_and_breaks_no_table() -> None:
    """Clients may choose ids: what is not printable is escaped, and a long one is cut. The values have it whole."""
    driven, name = Timed(8), "\x1b[2J\n" + "x" * 10_000
    with driven.ledger.step([driven.running(prompt(1, 8), request_id=name)]):
        text = driven.ledger.explain() + str(driven.status(name))
    assert "\x1b" not in text and "\\x1b[2J\\nxxx" in text
    assert len(driven.ledger.explain().splitlines()) == 6 and max(map(len, text.splitlines())) < 400


@pytest.mark.parametrize("number", [int, np.float64])
def test_ages_are_floats_whatever_a_clock_counts_in(number: Callable[[float], float]) -> None:
    """A program may write them as JSON, and print them, with either build of the core."""
    ticks = itertools.count()
    config = OffloadConfig(groups=[KVCacheGroup("full", block_size=4)], num_host_blocks=8)
    ledger = Ledger(config, 8, clock=lambda: number(next(ticks)))
    ledger.allocate_nowait(ledger.admit(Prefix.of(Root("ages"), range(9))))
    ages = [one.age_s for one in (*ledger.reports.requests(), *ledger.reports.holders())]
    assert {type(age_s) for age_s in ages} == {float}
