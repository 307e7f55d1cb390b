"""Observers that raise anything, or that call the ledger which reports to them: no change is left half made."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import cycle
from typing import Any

import pytest
from driving import ROOT, Driven, prompt, write_back
from engine_driving import EngineDriven, Finding

from aoffload import AoffloadError, InvalidArgument, Ledger, RequestState
from aoffload._extensions.store_policies import EagerStore
from aoffload._kernel.events import Event, RequestMoved
from aoffload._kernel.records import call_all
from aoffload.ledger import Completion, Observers, Outcome, PinHint, Prefix

A, B = prompt(1, 17), prompt(2, 17)


class Own(BaseException):
    """No `Exception`."""


RAISED = [ValueError, asyncio.CancelledError, KeyboardInterrupt, SystemExit, GeneratorExit, Own]


class Raises:
    """Raises at each event, whatever that is."""

    def __init__(self, error: type[BaseException]) -> None:
        self.error, self.num_notified = error, 0

    def observe(self, event: Event) -> None:
        self.num_notified += 1
        raise self.error("an observer")


def live(driven: Driven) -> tuple[int, int]:
    """Requests of most kinds: hits in both tiers, a wait for free blocks, a fork, a preemption, a pin, a reset."""
    driven.on_host_only(A)
    request = driven.running(A)
    ready = request.num_computed_tokens
    driven.land(driven.commit(request))
    pin = driven.ledger.pins.hold(driven.prefix(A))
    child = driven.ledger.forks.fork(request, num_tokens=20).request
    waiter = driven.ledger.queue_allocation(driven.admit(B), 4 * 9)
    with pytest.raises(Exception, match="available"):
        driven.ledger.extend_nowait(request, 4 * 13)
    driven.release(child)
    driven.land(driven.ledger.preemption.preempt(request).plans)
    driven.ledger.pins.release(pin)
    driven.ledger.accept(waiter)
    driven.release(waiter.request)
    driven.ledger.preemption.resume(request)
    driven.ledger.reset()
    driven.release(request)
    assert driven.num_pinned() == (0, 0) and not driven.ledger.jobs.unsettled
    return ready, driven.ledger.statistics().device.num_free


@pytest.mark.parametrize("error", RAISED)
@pytest.mark.parametrize("is_counted", [False, True])
def test_nothing_of_an_observers_goes_through(error: type[BaseException], is_counted: bool) -> None:
    """Whatever an observer raises, the change is completed, and the call that made it says what it says without an
    observer. `Observers` counts what was raised."""
    raises = Raises(error)
    observers = Observers(raises)
    assert live(Driven(12, 16, observer=observers if is_counted else raises)) == live(Driven(12, 16)) == (16, 12)
    assert raises.num_notified > 20
    assert not is_counted or observers.num_failures == raises.num_notified


@pytest.mark.parametrize("error", RAISED)
def test_nothing_of_a_watchers_goes_through(error: type[BaseException]) -> None:
    """The same for a watcher of cached blocks."""

    class Watches:
        num_notified = 0

        def part_changed(self, *subject: object) -> None:
            self.num_notified += 1
            raise error

        all_cleared = part_changed

    driven, watcher = Driven(12, 16), Watches()
    driven.ledger.watch(watcher)
    assert live(driven) == (16, 12) and watcher.num_notified > 3


CALLS: dict[str, Callable[[Ledger, Any], object]] = {
    "admit": lambda ledger, _: ledger.admit(Prefix.of(ROOT, B)),
    "release": lambda ledger, subject: ledger.release(subject),
    "allocate": lambda ledger, subject: ledger.allocate_nowait(subject),
    "queue": lambda ledger, subject: ledger.queue_allocation(subject),
    "load": lambda ledger, subject: ledger.plan_load(subject),
    "commit": lambda ledger, subject: ledger.commit(subject, 17),
    "preempt": lambda ledger, subject: ledger.preemption.preempt(subject),
    "fork": lambda ledger, subject: ledger.forks.fork(subject),
    "step": lambda ledger, subject: ledger.step([subject]).__enter__(),
    "launch": lambda ledger, subject: ledger.launch(ledger.jobs.last_id),
    "settle": lambda ledger, subject: ledger.settle(_landed(ledger)),
    "discard": lambda ledger, subject: ledger.discard(ledger.jobs.last_id),
    "write_back": lambda ledger, _: write_back(ledger),
    "pin": lambda ledger, _: ledger.pins.hold(Prefix.of(ROOT, A)),
    "drop_pins": lambda ledger, _: ledger.pins.drop(),
    "lapse": lambda ledger, _: ledger.lapse(0.0),
    "hint": lambda ledger, _: ledger.eviction.returns(Prefix.of(ROOT, A), in_s=9.0),
    "client_hint": lambda ledger, _: ledger.hints.apply(Prefix.of(ROOT, A), PinHint(9.0), 0.0),
    "prefetch": lambda ledger, _: ledger.transfers.prefetch(Prefix.of(ROOT, A)),
    "demote": lambda ledger, _: ledger.transfers.demote(Prefix.of(ROOT, A)),
    "reset": lambda ledger, _: ledger.reset(),
    "check_integrity": lambda ledger, _: ledger.check_integrity(),
}


def _landed(ledger: Ledger) -> Any:
    return Completion(ledger.jobs.last_id, Outcome.LANDED)


MOST_CALLS = 12
"""Of an observer: a call of the ledger has events of its own."""


def ends_at_rest(driven: Any) -> None:
    """Whatever is under way ends, and nothing is held."""
    ledger = driven.ledger
    for request in tuple(ledger.live_requests.values()):
        ledger.release(request, "the test is over")
    ledger.pins.drop()
    ledger.transfers.cancel_all()
    for job in tuple(ledger.jobs.unsettled.values()):
        if ledger.launch(job.job_id) or job.job_id in ledger.jobs.unsettled:
            ledger.settle(Completion(job.job_id, Outcome.LANDED, job.plan.num_blocks))
    ledger.check_integrity()
    found = ledger.statistics()
    assert not found.num_requests and not found.num_jobs and not found.device.num_pinned and not found.host.num_pinned
    assert not ledger.moves.unreported


@pytest.mark.parametrize("name", CALLS)
def test_an_observer_may_call_the_ledger_that_reports_to_it(name: str) -> None:
    """The ledger reports after its change. So a call of an observer is answered like any other: it may be refused, and
    whatever it does, no block is without an owner afterwards, and nothing is held."""
    ledgers: list[Ledger] = []
    num_calls = num_checks = 0

    class Calls:
        def observe(self, event: Event) -> None:
            nonlocal num_calls, num_checks
            if ledgers and num_calls < MOST_CALLS and isinstance(event, RequestMoved):
                num_calls += 1
                ledgers[0].check_integrity()
                with suppress(AoffloadError):
                    CALLS[name](ledgers[0], event.request)
                ledgers[0].check_integrity()
                num_checks += 1  # what this raised, the ledger would have dropped

    driven = Driven(12, 16, observer=Calls())
    ledgers.append(driven.ledger)
    for tokens in (A, B, A, prompt(3, 30)):
        with suppress(AoffloadError):
            request = driven.admit(tokens)
            driven.ledger.allocate_nowait(request)
            driven.land(driven.ledger.plan_load(request))
            driven.land(driven.ledger.commit(request, len(tokens)))
            driven.land(driven.ledger.release(request))
    assert num_calls == num_checks > MOST_CALLS // 2
    ends_at_rest(driven)


def test_an_event_is_reported_once_its_change_is_complete() -> None:
    """An observer that hears that a request runs finds what the same commit has published."""
    seen: list[tuple[int, int]] = []

    class Looks:
        def observe(self, event: Event) -> None:
            if isinstance(event, RequestMoved) and event.new is RequestState.RUNNING:
                seen.append((event.request.num_computed_tokens, driven.ledger.statistics().host.num_pinned))

    driven = Driven(12, 16, observer=Looks())
    request = driven.allocated(A)
    driven.ledger.commit(request, len(A))
    assert seen == [(len(A), len(A) // 4)]


def test_events_of_an_observers_own_calls_come_after_those_before() -> None:
    """An observer that calls the ledger receives the events in the order in which things happened, one after the
    other: `observe` is not entered again before it has returned."""
    moves: list[str] = []
    inside: list[Event] = []
    ledgers: list[Ledger] = []

    class Calls:
        def observe(self, event: Event) -> None:
            assert isinstance(event, RequestMoved)
            moves.append(f"{event.request.request_id} {event.new.value}{' within another' * len(inside)}")
            inside.append(event)
            if event.request.request_id == "a" and event.new is RequestState.MATCHED:
                ledgers[0].release(ledgers[0].admit(Prefix.of(ROOT, B), request_id="b"))
            inside.pop()

    driven = Driven(12, 16, observer=Calls())
    ledgers.append(driven.ledger)
    request = driven.admit(A, request_id="a")
    assert moves == ["a matched", "a pinned", "b matched", "b pinned", "b aborted"]
    driven.release(request)


def test_an_observer_may_call_an_engines_ledger() -> None:
    """The same where an engine owns the device blocks."""
    engines: list[EngineDriven] = []
    calls: Iterator[Callable[[], object]] = cycle((
        lambda: engines[0].ledger.reset(), lambda: engines[0].ledger.admit(Prefix.of(ROOT, B)),
        lambda: engines[0].ledger.release(next(iter(engines[0].ledger.live_requests.values()))),
    ))  # fmt: skip
    num_calls = 0

    class Calls:
        def observe(self, event: Event) -> None:
            nonlocal num_calls
            if engines and num_calls < MOST_CALLS:
                num_calls += 1
                with suppress(AoffloadError, StopIteration):
                    next(calls)()
                engines[0].ledger.check_integrity()

    engines.append(driven := EngineDriven(observer=Calls()))
    for tokens in (A, B, A):
        with suppress(AoffloadError):
            request, tables = driven.admit(tokens), driven.fresh(17)
            driven.land(driven.load(request, tables))
            driven.land(driven.offer(request, 17, tables))
            driven.release(request)
    assert num_calls == MOST_CALLS
    ends_at_rest(driven)


def test_one_that_is_woken_and_raises_keeps_no_other_from_being_woken() -> None:
    """All are woken, and then the last error is raised, with those before it as its context."""
    woken: list[int] = []

    def wakes(number: int) -> Callable[[], object]:
        def wake() -> None:
            woken.append(number)
            if number in (1, 2):
                raise Own(number)

        return wake

    with pytest.raises(Own, match="2") as raised:
        call_all(iter([wakes(number) for number in range(5)]))
    assert isinstance(raised.value.__context__, Own)
    assert woken == [0, 1, 2, 3, 4]
    driven = Driven(8, 0)
    crowd = driven.allocated(prompt(3, 32))
    woken.clear()
    for number in range(4):
        driven.ledger.queue_allocation(driven.admit(prompt(4 + number, 8)), wake=wakes(number))
    with pytest.raises(Own, match="2"):
        driven.ledger.release(crowd)
    assert woken == [0, 1, 2, 3]
    driven.ledger.check_integrity()


def test_a_policy_that_raises_leaves_no_request_behind() -> None:
    """It is asked before the request is anywhere: the name is free, and nothing is counted."""

    class Raising(EagerStore):
        def seen(self, *_: object) -> None:
            raise Own

    driven = Driven(8, 8, store_policy=Raising())
    with pytest.raises(Own):
        driven.ledger.admit(driven.prefix(A), request_id="a")
    assert driven.ledger.statistics().num_requests == 0 and driven.num_pinned() == (0, 0)


class AnswersOnce(EagerStore):
    """Answers wrongly once: it raises `wrong`, or says it where that is no exception."""

    call = "wanted_stop"

    def __init__(self, wrong: Any = Own) -> None:
        self.wrong, self.is_next = wrong, False

    def _answer(self, call: str, right: Any) -> Any:
        if not self.is_next or call != self.call:
            return right
        self.is_next = False
        if isinstance(self.wrong, type):
            raise self.wrong
        return self.wrong

    def seen(self, *_: object) -> None:
        self._answer("seen", None)

    def wanted_stop(self, request: Any) -> int:
        return self._answer("wanted_stop", request.published)  # type: ignore[no-any-return]


WRONG = [*RAISED, -1, 1.5, None]


@pytest.mark.parametrize("wrong", WRONG)
def test_a_commit_is_undone_if_the_policy_raises(wrong: Any) -> None:
    """It may be repeated: its tokens are appended once, and all that follows is found under the tokens of the request,
    and under no others."""
    policy = AnswersOnce(wrong)
    driven = Driven(12, 16, store_policy=policy)
    request = driven.allocated(A)
    driven.ledger.extend_nowait(request, 24)
    driven.ledger.plan_load(request)
    policy.is_next = True
    with pytest.raises(wrong if isinstance(wrong, type) else InvalidArgument):
        driven.ledger.commit(request, 20, [7] * 3)
    assert (request.sequence.num_tokens, request.num_computed_tokens, request.published) == (17, 0, 0)
    assert not policy.is_next and not request.has_committed
    driven.ledger.check_integrity()
    driven.land(driven.ledger.commit(request, 20, [7] * 3))
    driven.land(driven.ledger.commit(request, 24, [8] * 4))
    assert driven.ledger.lookup(driven.prefix([*A, *[7] * 3, *[8] * 4, 9])).num_tokens == 24
    assert driven.ledger.lookup(driven.prefix([*A, *[7] * 7, 9])).num_tokens == 20
    driven.release(request)


@pytest.mark.parametrize("call", ["seen", "wanted_stop", "find"])
@pytest.mark.parametrize("wrong", WRONG)
def test_an_offer_is_undone_if_foreign_code_raises_in_it(call: str, wrong: Any) -> None:
    """The same where an engine owns the device blocks; `find` is the engine's."""
    policy, engine = AnswersOnce(wrong), Finding()
    policy.call = call
    if call == "find":
        find = engine.find
        engine.find = lambda *args: policy._answer("find", find(*args))  # type: ignore[method-assign]
    driven = EngineDriven(engine=engine, store_policy=policy)
    request, tables = driven.admit(A), driven.fresh(24)
    driven.load(request, tables)
    with_null = [[tables[0][0], 0, *tables[0][2:]]]
    policy.is_next = True
    if call == "seen" and not isinstance(wrong, type):
        return  # nobody asks what it returns
    error = wrong if isinstance(wrong, type) and (call != "find" or wrong is not ValueError) else InvalidArgument
    with pytest.raises(error):
        driven.offer(request, 20, with_null, [7] * 3, is_last=True)
    assert (request.sequence.num_tokens, request.num_computed_tokens, request.published) == (17, 0, 0)
    driven.land(driven.offer(request, 20, tables, [7] * 3, is_last=True))
    driven.land(driven.offer(request, 24, tables, [8] * 4, is_last=True))
    assert driven.ledger.lookup(Prefix.of(ROOT, [*A, *[7] * 3, *[8] * 4, 9])).num_tokens == 24
    assert driven.ledger.lookup(Prefix.of(ROOT, [*A, *[7] * 7, 9])).num_tokens == 20
    driven.release(request)


@pytest.mark.parametrize("call", ["seen", "wanted_stop"])
def test_a_request_ends_even_if_the_policy_raises(call: str) -> None:
    """Each request is left with one call, and no block stays with what is over."""
    policy = AnswersOnce()
    policy.call = call
    driven = Driven(12, 16, store_policy=policy)
    request = driven.running(A)
    driven.land(driven.commit(request))
    policy.is_next = True
    with pytest.raises(Own):
        driven.ledger.release(request)
    assert request.is_over and not driven.ledger.live_requests and driven.num_pinned() == (0, 0)
    driven.ledger.check_integrity()


def test_an_engine_that_refuses_to_hold_blocks_is_not_counted_on() -> None:
    """If `hold` raises, no block counts as held."""
    driven = EngineDriven()
    driven.serve(A)
    request, tables = driven.admit(A), driven.fresh(17)

    def hold(block_ids: Any) -> None:
        raise Own

    driven.engine.hold = hold
    with pytest.raises(Own):
        driven.ledger.plan_load(request, into=tables)
    assert driven.ledger.statistics().device.num_blocks == 0
