"""The wait queue: the order of service, pins of waiting requests, requests that must fail, and cancellation."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
from driving import Driven, Tier, prompt

import aoffload
from aoffload._kernel.records import LedgerRequest, Waiter
from aoffload._kernel.states import Outcome, RequestState
from aoffload.errors import OutOfBlocks, WrongState


class QueueDriver(Driven):
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
    driver = QueueDriver(4)
    blocker = driver.full(num_tokens=12)
    large, small = (driver.admit(prompt(i, size), request_id=str(i)) for i, size in ((1, 16), (2, 4)))
    first, second = driver.wait(large), driver.wait(small)
    late = driver.admit(prompt(3, 4))
    with pytest.raises(OutOfBlocks, match="retry"):
        driver.ledger.allocate_nowait(late)
    driver.release(blocker)
    assert driver.woken == ["1"]
    assert first.granted is not None and not second.is_over
    driver.ledger.accept(first)
    assert large.state is RequestState.ALLOCATED
    driver.release(large)
    assert driver.woken == ["1", "2"]


def test_the_grant_is_there_before_anybody_is_woken() -> None:
    """A woken request finds the grant in its waiter, and no other one can take it in between."""
    driver = QueueDriver(4)
    blocker, request = driver.full(), driver.admit(prompt(1, 16))
    seen: list[bool] = []
    waiter = driver.ledger.queue_allocation(request, None, lambda: seen.append(waiter.granted is not None))
    driver.release(blocker)
    assert seen == [True]
    with pytest.raises(OutOfBlocks):
        driver.ledger.allocate_nowait(driver.admit(prompt(2, 4)))
    driver.ledger.accept(waiter)
    assert len(request.table) == 4


def test_only_the_head_keeps_pins() -> None:
    """Waiting must not hold what others wait for: after the head, hits are released and matched again in time."""
    driver = QueueDriver(6, 0)
    driver.serve(prompt(1, 8))
    driver.serve(prompt(2, 8))
    blocker = driver.full(num_tokens=8)
    first, second = driver.admit(prompt(1, 24)), driver.admit(prompt(2, 24))
    assert driver.num_pinned()[0] == 6
    driver.wait(first)
    driver.wait(second)
    assert first.leases and not second.leases
    assert driver.num_pinned()[0] == 4
    driver.release(first, "cancelled")
    assert second.leases
    driver.release(blocker)
    assert second.waiter is not None and second.waiter.granted is not None


def test_a_waiter_matches_again_in_the_step_that_grants_it() -> None:
    """What was cached while it waited is a hit, what was evicted is none: the match is never older than the grant."""
    driver = QueueDriver(6, 0)
    blocker = driver.running(prompt(1, 17))
    waits = driver.admit(prompt(1, 17))
    assert waits.match.num_device_tokens == 0
    waiter = driver.wait(waits)
    driver.commit(blocker)
    assert waiter.granted is not None, "what was published is room enough for who is first in line"
    driver.ledger.accept(waiter)
    assert waits.match.num_device_tokens == 16
    driver.release(blocker)
    gone = driver.admit(prompt(1, 17))
    gone_waiter = driver.wait(gone, 24)
    driver.release(waits)
    assert gone_waiter.granted is not None


def test_withdrawing_gives_an_unused_grant_back() -> None:
    """A waiter that is cancelled after it was granted returns the blocks, and the next one gets them at once."""
    driver = QueueDriver(4)
    blocker = driver.full()
    first, second = driver.admit(prompt(1, 16), request_id="1"), driver.admit(prompt(2, 16), request_id="2")
    granted, waiting = driver.wait(first), driver.wait(second)
    driver.release(blocker)
    assert granted.granted is not None and not waiting.is_over
    driver.ledger.withdraw(granted)
    driver.ledger.check_integrity()
    assert waiting.granted is not None and driver.woken == ["1", "2"]
    assert first.state is RequestState.PINNED
    with pytest.raises(WrongState):
        driver.ledger.accept(granted)
    driver.ledger.withdraw(granted)  # a second time is nothing
    driver.ledger.check_integrity()
    again = driver.wait(first)  # a cancelled allocate may be tried again
    driver.release(second)
    assert again.granted is not None


def test_withdrawing_from_the_line_pins_again() -> None:
    """A request that leaves the wait queue is as it was before: matched, pinned, free to try again."""
    driver = QueueDriver(6, 0)
    driver.serve(prompt(1, 8))
    blocker = driver.full(num_tokens=16)
    driver.wait(driver.admit(prompt(2, 12)))
    request = driver.admit(prompt(1, 16))
    waiter = driver.wait(request)
    assert not request.leases
    driver.ledger.withdraw(waiter)
    assert request.leases and request.match.num_device_tokens == 8
    driver.release(blocker)


def test_a_request_waits_once() -> None:
    """While a request waits, every other call that wants room for it is refused by name."""
    driver = QueueDriver(4)
    driver.full()
    request = driver.admit(prompt(1, 8))
    driver.wait(request)
    with pytest.raises(WrongState, match="waiting for blocks already"):
        driver.wait(request)
    with pytest.raises(WrongState, match="waiting for blocks already"):
        driver.ledger.allocate_nowait(request)


def test_extend_goes_before_allocate() -> None:
    """A request that holds blocks is served before one that holds none; the head of the wait queue gives up its pins
    for it."""
    driver = QueueDriver(6, 0)
    driver.serve(prompt(1, 8))
    grows, blocker = driver.allocated(prompt(2, 8), request_id="grows"), driver.allocated(prompt(3, 8))
    driver.wait(driver.admit(prompt(1, 24), request_id="new"))
    assert driver.num_pinned()[0] == 6
    more = driver.wait_more(grows, 16)
    assert more.granted is not None, "the pins of a waiter without blocks must not block who has some"
    driver.ledger.accept(more)
    assert len(grows.table) == 4
    driver.release(blocker)
    driver.release(grows)
    assert driver.woken == ["grows", "new"]


def test_extend_does_not_overtake_extend() -> None:
    """Extensions are served in their order, and `extend_nowait` is refused while one waits."""
    driver = QueueDriver(6)
    first, second, blocker = (driver.allocated(prompt(i, 8), request_id=str(i)) for i in (1, 2, 3))
    one = driver.wait_more(first, 16)
    with pytest.raises(OutOfBlocks, match="retry"):
        driver.ledger.extend_nowait(second, 12)
    two = driver.wait_more(second, 12)
    driver.release(blocker)
    assert one.granted is not None and not two.is_over
    added = driver.ledger.accept(one)
    assert [len(ids) for ids in added.added] == [2] and added.nulled == [[]]


def test_the_youngest_extend_fails_when_only_waiters_hold_room() -> None:
    """Nobody will ever let go: the one that came last gets a retryable `OutOfBlocks`, the first is served after it."""
    driver = QueueDriver(4)
    first, second = driver.allocated(prompt(1, 8), request_id="1"), driver.allocated(prompt(2, 8), request_id="2")
    one = driver.wait_more(first, 12)
    assert not one.is_over
    two = driver.wait_more(second, 12)
    assert driver.woken == ["2"] and not one.is_over
    with pytest.raises(OutOfBlocks) as refusal:
        driver.ledger.accept(two)
    assert refusal.value.retryable
    driver.release(second, "preempted")
    assert one.granted is not None


def test_a_lone_extend_that_cannot_fit_fails_at_once() -> None:
    """A request that waits for blocks that only it could free fails instead of hanging."""
    driver = QueueDriver(4)
    request = driver.allocated(prompt(1, 8))
    driver.full(num_tokens=4)
    assert not driver.wait_more(request, 16).is_over
    driver = QueueDriver(4, 0)
    request = driver.allocated(prompt(1, 12))
    driver.wait(driver.admit(prompt(2, 8)))
    waiter = driver.wait_more(request, 16)
    assert waiter.granted is not None


def test_a_grant_nobody_has_taken_yet_counts_as_room_held() -> None:
    """Between the grant and its acceptance, an extend waits for that request instead of failing."""
    driver = QueueDriver(4)
    blocker, request = driver.full(num_tokens=8), driver.allocated(prompt(1, 4))
    granted = driver.wait(driver.admit(prompt(2, 12)))
    driver.release(blocker)
    assert granted.granted is not None
    waiter = driver.wait_more(request, 8)
    assert not waiter.is_over
    driver.release(granted.request, "cancelled")
    assert waiter.granted is not None


def test_quarantine_fails_who_can_no_longer_fit() -> None:
    """Room lost to a copy that nobody can prove over fails the waiter that needed it, and serves the others."""
    driver = QueueDriver(6, 8)
    driver.on_host_only(prompt(1, 17))
    loading = driver.allocated(prompt(1, 17))
    (plan,) = driver.launch(driver.ledger.plan_load(loading))
    large, small = driver.wait(driver.admit(prompt(2, 24))), driver.wait(driver.admit(prompt(3, 8)))
    driver.end(plan, Outcome.UNPROVEN)
    assert driver.ledger.statistics().device.num_quarantined == 4
    assert large.error is not None and not large.error.retryable
    with pytest.raises(OutOfBlocks, match="can never fit"):
        driver.ledger.accept(large)
    assert large.request.state is RequestState.PINNED
    driver.release(loading, "cancelled")
    assert small.granted is not None
    driver.end(plan)
    assert driver.ledger.statistics().device.num_quarantined == 0


def test_who_can_no_longer_fit_need_not_come_first_to_hear_of_it() -> None:
    """Room that is lost fails the waiters that needed it at once, also those after a head that still fits."""
    driver = QueueDriver(6, 8)
    driver.on_host_only(prompt(1, 9))
    blocker = driver.allocated(prompt(4, 8))
    loading = driver.allocated(prompt(1, 9))
    (plan,) = driver.launch(driver.ledger.plan_load(loading))
    small, large = driver.wait(driver.admit(prompt(2, 16))), driver.wait(driver.admit(prompt(3, 24)))
    driver.end(plan, Outcome.UNPROVEN)
    assert driver.ledger.statistics().device.num_quarantined == 2
    assert not small.is_over
    assert large.error is not None and not large.error.retryable
    driver.release(blocker)
    driver.release(loading, "cancelled")
    assert small.granted is not None


def test_everything_that_changes_room_serves_the_line() -> None:
    """Release, cancellation of the head, the end of a step, a settled job, late proof: each serves the line."""
    for change in ("release", "head", "step", "job", "late proof"):
        driver = QueueDriver(6, 8)
        driver.on_host_only(prompt(1, 17))
        if change in ("job", "late proof"):
            loading = driver.allocated(prompt(1, 17))
            (plan,) = driver.launch(driver.ledger.plan_load(loading))
            driver.release(loading, "cancelled")
            if change == "late proof":
                driver.end(plan, Outcome.UNPROVEN)
                driver.full(num_tokens=8)
            waiter = driver.wait(driver.admit(prompt(2, 8 if change == "late proof" else 24)))
            assert not waiter.is_over
            driver.end(plan)
        elif change == "head":
            driver.full(num_tokens=16)
            head = driver.admit(prompt(2, 24))
            driver.wait(head)
            waiter = driver.wait(driver.admit(prompt(3, 8)))
            driver.release(head, "cancelled")
        elif change == "step":
            held = driver.full(num_tokens=24)
            step = driver.ledger.step([held])
            step.__enter__()
            driver.release(held, "cancelled")
            waiter = driver.wait(driver.admit(prompt(2, 24)))
            assert not waiter.is_over
            step.__exit__(None, None, None)
        else:
            held = driver.full(num_tokens=24)
            waiter = driver.wait(driver.admit(prompt(2, 24)))
            driver.release(held, "cancelled")
        driver.ledger.check_integrity()
        assert waiter.granted is not None, change


def test_leaving_while_granted_returns_the_grant() -> None:
    """A request that leaves between its grant and its acceptance takes no block with it."""
    driver = QueueDriver(4)
    blocker, request = driver.full(), driver.admit(prompt(1, 16))
    waiter = driver.wait(request)
    driver.release(blocker)
    assert waiter.granted is not None
    driver.release(request, "cancelled")
    assert driver.num_pinned() == (0, 0)
    assert driver.ledger.cache.tiers[Tier.DEVICE].num_available == 4


def test_who_is_first_lets_go_of_what_nobody_finds_any_more() -> None:
    """A reset of the device leaves blocks to those who read them; who has matched what was computed there again keeps
    them from being freed, and must not wait for them when it is the last one to do so."""
    driver = QueueDriver(8, 0)
    reader = driver.running(prompt(1, 16))
    driver.commit(reader)
    driver.ledger.reset(Tier.DEVICE)
    again = driver.running(prompt(1, 9))
    driver.commit(again, 8)
    first = driver.wait(driver.admit(prompt(1, 32), request_id="first"))
    for request in (reader, again):
        assert not first.is_over
        driver.release(request)
    assert first.granted is not None and len(first.granted) == 6
    driver.ledger.accept(first)
    driver.ledger.check_integrity()


def test_the_line_is_served_where_the_ledger_is_left() -> None:
    """One way out: nothing below the ledger's face serves the line, so no call does it twice or half way."""
    package = Path(aoffload.__file__).parent
    callers = {path.name for path in package.rglob("*.py") if ".serve_queue" in path.read_text()}
    assert callers == {"ledger.py"}


def test_who_is_woken_may_call_the_ledger() -> None:
    """All is decided before any waiter is woken: a request that can never fit may take the refusal and leave at once,
    and those after it are told, too."""
    driver = QueueDriver(6, 8)
    driver.on_host_only(prompt(1, 17))
    loading = driver.allocated(prompt(1, 17))
    (plan,) = driver.launch(driver.ledger.plan_load(loading))
    waiters: dict[str, Waiter] = {}
    woken_names: list[str] = []

    def leave(name: str) -> None:
        with pytest.raises(OutOfBlocks, match="can never fit"):
            driver.ledger.accept(waiters[name])
        driver.ledger.release(waiters[name].request, "rejected")
        woken_names.append(name)

    for name in ("a", "b", "c"):
        request = driver.admit(prompt(ord(name), 24), request_id=name)
        waiters[name] = driver.ledger.queue_allocation(request, None, partial(leave, name))
    driver.end(plan, Outcome.UNPROVEN)
    assert woken_names == ["a", "b", "c"]
    assert not driver.ledger.admission.queue.allocating
