"""The line for room: who is served first, who keeps pins, who has to fail, and one way out of everything."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
from driving import Driven, Tier, prompt

import aoffload
from aoffload._kernel.records import LedgerRequest, Waiter
from aoffload._kernel.states import Outcome, RequestState
from aoffload.errors import OutOfBlocks, WrongState


class Line(Driven):
    """Notes the order in which waiters are woken."""

    def __init__(self, num_device: int, num_host: int = 16) -> None:
        super().__init__(num_device, num_host)
        self.woken: list[str] = []

    def wait(self, request: LedgerRequest, num_tokens: int | None = None) -> Waiter:
        queue = self.ledger.queue_allocation
        waiter = queue(request, num_tokens, lambda: self.woken.append(request.request_id))
        self.ledger.check_integrity()
        return waiter

    def wait_more(self, request: LedgerRequest, num_tokens: int) -> Waiter:
        queue = self.ledger.queue_extension
        waiter = queue(request, num_tokens, lambda: self.woken.append(request.request_id))
        self.ledger.check_integrity()
        return waiter

    def full(self, name: int = 9, num_tokens: int = 16) -> LedgerRequest:
        return self.allocated(prompt(name, num_tokens), request_id=f"full {name}")


def test_first_come_first_served() -> None:
    """A small request does not overtake a large one that came first, not even without waiting."""
    line = Line(4)
    blocker = line.full(num_tokens=12)
    large, small = (line.admit(prompt(i, size), request_id=str(i)) for i, size in ((1, 16), (2, 4)))
    first, second = line.wait(large), line.wait(small)
    late = line.admit(prompt(3, 4))
    with pytest.raises(OutOfBlocks, match="retry"):
        line.ledger.allocate_nowait(late)
    line.release(blocker)
    assert line.woken == ["1"]
    assert first.granted is not None and not second.is_over
    line.ledger.accept(first)
    assert large.state is RequestState.ALLOCATED
    line.release(large)
    assert line.woken == ["1", "2"]


def test_the_grant_is_there_before_anybody_is_woken() -> None:
    """Whoever is woken finds the grant in the waiter, and nobody can take it away in between."""
    line = Line(4)
    blocker, request = line.full(), line.admit(prompt(1, 16))
    seen: list[bool] = []
    waiter = line.ledger.queue_allocation(request, None, lambda: seen.append(waiter.granted is not None))
    line.release(blocker)
    assert seen == [True]
    with pytest.raises(OutOfBlocks):
        line.ledger.allocate_nowait(line.admit(prompt(2, 4)))
    line.ledger.accept(waiter)
    assert len(request.table) == 4


def test_only_the_head_keeps_pins() -> None:
    """Waiting must not hold what others wait for: behind the head, hits are let go of and matched again in time."""
    line = Line(6, 0)
    line.serve(prompt(1, 8))
    line.serve(prompt(2, 8))
    blocker = line.full(num_tokens=8)
    first, second = line.admit(prompt(1, 24)), line.admit(prompt(2, 24))
    assert line.num_pinned()[0] == 6
    line.wait(first)
    line.wait(second)
    assert first.leases and not second.leases
    assert line.num_pinned()[0] == 4
    line.release(first, "cancelled")
    assert second.leases
    line.release(blocker)
    assert second.waiter is not None and second.waiter.granted is not None


def test_a_waiter_matches_again_in_the_step_that_grants_it() -> None:
    """What was cached while it waited is a hit, what was evicted is none: the match is never older than the grant."""
    line = Line(6, 0)
    blocker = line.running(prompt(1, 17))
    waits = line.admit(prompt(1, 17))
    assert waits.match.num_device_tokens == 0
    waiter = line.wait(waits)
    line.commit(blocker)
    assert waiter.granted is not None, "what was published is room enough for who is first in line"
    line.ledger.accept(waiter)
    assert waits.match.num_device_tokens == 16
    line.release(blocker)
    gone = line.admit(prompt(1, 17))
    gone_waiter = line.wait(gone, 24)
    line.release(waits)
    assert gone_waiter.granted is not None


def test_withdrawing_gives_an_unused_grant_back() -> None:
    """A waiter that is cancelled after it was granted returns the blocks, and the next one gets them at once."""
    line = Line(4)
    blocker = line.full()
    first, second = line.admit(prompt(1, 16), request_id="1"), line.admit(prompt(2, 16), request_id="2")
    granted, waiting = line.wait(first), line.wait(second)
    line.release(blocker)
    assert granted.granted is not None and not waiting.is_over
    line.ledger.withdraw(granted)
    line.ledger.check_integrity()
    assert waiting.granted is not None and line.woken == ["1", "2"]
    assert first.state is RequestState.PINNED
    with pytest.raises(WrongState):
        line.ledger.accept(granted)
    line.ledger.withdraw(granted)  # a second time is nothing
    line.ledger.check_integrity()
    again = line.wait(first)  # a cancelled allocate may be tried again
    line.release(second)
    assert again.granted is not None


def test_withdrawing_from_the_line_pins_again() -> None:
    """Who leaves the line is as it was before it joined: matched, pinned, free to try again."""
    line = Line(6, 0)
    line.serve(prompt(1, 8))
    blocker = line.full(num_tokens=16)
    line.wait(line.admit(prompt(2, 12)))
    request = line.admit(prompt(1, 16))
    waiter = line.wait(request)
    assert not request.leases
    line.ledger.withdraw(waiter)
    assert request.leases and request.match.num_device_tokens == 8
    line.release(blocker)


def test_a_request_waits_once() -> None:
    """While a request waits, every other call that wants room for it is refused by name."""
    line = Line(4)
    line.full()
    request = line.admit(prompt(1, 8))
    line.wait(request)
    with pytest.raises(WrongState, match="waiting for blocks already"):
        line.wait(request)
    with pytest.raises(WrongState, match="waiting for blocks already"):
        line.ledger.allocate_nowait(request)


def test_extend_goes_before_allocate() -> None:
    """Who holds room is served before who holds none; the head of the line gives up its pins for it."""
    line = Line(6, 0)
    line.serve(prompt(1, 8))
    grows, blocker = line.allocated(prompt(2, 8), request_id="grows"), line.allocated(prompt(3, 8))
    line.wait(line.admit(prompt(1, 24), request_id="new"))
    assert line.num_pinned()[0] == 6
    more = line.wait_more(grows, 16)
    assert more.granted is not None, "the pins of a waiter without blocks must not block who has some"
    line.ledger.accept(more)
    assert len(grows.table) == 4
    line.release(blocker)
    line.release(grows)
    assert line.woken == ["grows", "new"]


def test_extend_does_not_overtake_extend() -> None:
    """Extensions are served in their order, and `extend_nowait` is refused while one waits."""
    line = Line(6)
    first, second, blocker = (line.allocated(prompt(i, 8), request_id=str(i)) for i in (1, 2, 3))
    one = line.wait_more(first, 16)
    with pytest.raises(OutOfBlocks, match="retry"):
        line.ledger.extend_nowait(second, 12)
    two = line.wait_more(second, 12)
    line.release(blocker)
    assert one.granted is not None and not two.is_over
    added = line.ledger.accept(one)
    assert [len(ids) for ids in added.added] == [2] and added.nulled == [[]]


def test_the_youngest_extend_fails_when_only_waiters_hold_room() -> None:
    """Nobody will ever let go: the one that came last gets a retryable `OutOfBlocks`, the first is served after it."""
    line = Line(4)
    first, second = line.allocated(prompt(1, 8), request_id="1"), line.allocated(prompt(2, 8), request_id="2")
    one = line.wait_more(first, 12)
    assert not one.is_over
    two = line.wait_more(second, 12)
    assert line.woken == ["2"] and not one.is_over
    with pytest.raises(OutOfBlocks) as refusal:
        line.ledger.accept(two)
    assert refusal.value.retryable
    line.release(second, "preempted")
    assert one.granted is not None


def test_a_lone_extend_that_cannot_fit_fails_at_once() -> None:
    """There is no hang: who waits for room that only itself could free is told."""
    line = Line(4)
    request = line.allocated(prompt(1, 8))
    line.full(num_tokens=4)
    assert not line.wait_more(request, 16).is_over
    line = Line(4, 0)
    request = line.allocated(prompt(1, 12))
    line.wait(line.admit(prompt(2, 8)))
    waiter = line.wait_more(request, 16)
    assert waiter.granted is not None


def test_a_grant_nobody_has_taken_yet_counts_as_room_held() -> None:
    """Between the grant and its acceptance, an extend waits for that request instead of failing."""
    line = Line(4)
    blocker, request = line.full(num_tokens=8), line.allocated(prompt(1, 4))
    granted = line.wait(line.admit(prompt(2, 12)))
    line.release(blocker)
    assert granted.granted is not None
    waiter = line.wait_more(request, 8)
    assert not waiter.is_over
    line.release(granted.request, "cancelled")
    assert waiter.granted is not None


def test_quarantine_fails_who_can_no_longer_fit() -> None:
    """Room lost to a copy that nobody can prove over fails the waiter that needed it, and serves the others."""
    line = Line(6, 8)
    line.on_host_only(prompt(1, 17))
    loading = line.allocated(prompt(1, 17))
    (plan,) = line.launch(line.ledger.plan_load(loading))
    large, small = line.wait(line.admit(prompt(2, 24))), line.wait(line.admit(prompt(3, 8)))
    line.end(plan, Outcome.UNPROVEN)
    assert line.ledger.statistics().device.num_quarantined == 4
    assert large.error is not None and not large.error.retryable
    with pytest.raises(OutOfBlocks, match="can never fit"):
        line.ledger.accept(large)
    assert large.request.state is RequestState.PINNED
    line.release(loading, "cancelled")
    assert small.granted is not None
    line.end(plan)
    assert line.ledger.statistics().device.num_quarantined == 0


def test_who_can_no_longer_fit_need_not_come_first_to_hear_of_it() -> None:
    """Room that is lost fails the waiters that needed it at once, also those behind a head that still fits."""
    line = Line(6, 8)
    line.on_host_only(prompt(1, 9))
    blocker = line.allocated(prompt(4, 8))
    loading = line.allocated(prompt(1, 9))
    (plan,) = line.launch(line.ledger.plan_load(loading))
    small, large = line.wait(line.admit(prompt(2, 16))), line.wait(line.admit(prompt(3, 24)))
    line.end(plan, Outcome.UNPROVEN)
    assert line.ledger.statistics().device.num_quarantined == 2
    assert not small.is_over
    assert large.error is not None and not large.error.retryable
    line.release(blocker)
    line.release(loading, "cancelled")
    assert small.granted is not None


def test_everything_that_changes_room_serves_the_line() -> None:
    """Release, cancellation of the head, the end of a step, a settled job, late proof: each serves the line."""
    for change in ("release", "head", "step", "job", "late proof"):
        line = Line(6, 8)
        line.on_host_only(prompt(1, 17))
        if change in ("job", "late proof"):
            loading = line.allocated(prompt(1, 17))
            (plan,) = line.launch(line.ledger.plan_load(loading))
            line.release(loading, "cancelled")
            if change == "late proof":
                line.end(plan, Outcome.UNPROVEN)
                line.full(num_tokens=8)
            waiter = line.wait(line.admit(prompt(2, 8 if change == "late proof" else 24)))
            assert not waiter.is_over
            line.end(plan)
        elif change == "head":
            line.full(num_tokens=16)
            head = line.admit(prompt(2, 24))
            line.wait(head)
            waiter = line.wait(line.admit(prompt(3, 8)))
            line.release(head, "cancelled")
        elif change == "step":
            held = line.full(num_tokens=24)
            step = line.ledger.step([held])
            step.__enter__()
            line.release(held, "cancelled")
            waiter = line.wait(line.admit(prompt(2, 24)))
            assert not waiter.is_over
            step.__exit__(None, None, None)
        else:
            held = line.full(num_tokens=24)
            waiter = line.wait(line.admit(prompt(2, 24)))
            line.release(held, "cancelled")
        line.ledger.check_integrity()
        assert waiter.granted is not None, change


def test_leaving_while_granted_returns_the_grant() -> None:
    """A request that leaves between its grant and its acceptance takes no block with it."""
    line = Line(4)
    blocker, request = line.full(), line.admit(prompt(1, 16))
    waiter = line.wait(request)
    line.release(blocker)
    assert waiter.granted is not None
    line.release(request, "cancelled")
    assert line.num_pinned() == (0, 0)
    assert line.ledger.cache.tiers[Tier.DEVICE].num_available == 4


def test_who_is_first_lets_go_of_what_nobody_finds_any_more() -> None:
    """A reset of the device leaves blocks to those who read them; who has matched what was computed there again keeps
    them from being freed, and must not wait for them when it is the last one to do so."""
    line = Line(8, 0)
    reader = line.running(prompt(1, 16))
    line.commit(reader)
    line.ledger.reset(Tier.DEVICE)
    again = line.running(prompt(1, 9))
    line.commit(again, 8)
    first = line.wait(line.admit(prompt(1, 32), request_id="first"))
    for request in (reader, again):
        assert not first.is_over
        line.release(request)
    assert first.granted is not None and len(first.granted) == 6
    line.ledger.accept(first)
    line.ledger.check_integrity()


def test_the_line_is_served_where_the_ledger_is_left() -> None:
    """One way out: nothing below the ledger's face serves the line, so no call does it twice or half way."""
    package = Path(aoffload.__file__).parent
    callers = {path.name for path in package.rglob("*.py") if ".serve_queue" in path.read_text()}
    assert callers == {"ledger.py"}


def test_who_is_woken_may_call_the_ledger() -> None:
    """All is decided before anybody is woken: whoever is told that it can never fit may take the refusal and leave at
    once, and those behind it are told, too."""
    line = Line(6, 8)
    line.on_host_only(prompt(1, 17))
    loading = line.allocated(prompt(1, 17))
    (plan,) = line.launch(line.ledger.plan_load(loading))
    waiters: dict[str, Waiter] = {}
    told: list[str] = []

    def leave(name: str) -> None:
        with pytest.raises(OutOfBlocks, match="can never fit"):
            line.ledger.accept(waiters[name])
        line.ledger.release(waiters[name].request, "rejected")
        told.append(name)

    for name in ("a", "b", "c"):
        request = line.admit(prompt(ord(name), 24), request_id=name)
        waiters[name] = line.ledger.queue_allocation(request, None, partial(leave, name))
    line.end(plan, Outcome.UNPROVEN)
    assert told == ["a", "b", "c"]
    assert not line.ledger.admission.queue.allocating
