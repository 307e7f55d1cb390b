"""What may not be called: every state, every call, every bad argument is refused by name and changes nothing."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from operator import attrgetter
from typing import Any

import pytest
from disk_driving import disk_of
from driving import Driven, prompt
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule
from public_methods import verbs_of
from remote_driving import remote_tier
from test_match_machine import WHICH, MatchMachine

from aoffload._common.prefix import Prefix, Root
from aoffload._extensions.assembly import Ledger
from aoffload._kernel.plans import Completion, RequestOptions
from aoffload._kernel.records import LedgerRequest
from aoffload._kernel.states import JobState, Outcome, RequestState
from aoffload.errors import DuplicateRequest, IllegalTransition, InvalidArgument, OutOfBlocks, WrongState
from proof.programs.fingerprint import changes, fingerprint, with_handles

S = RequestState
A = prompt(1, 9)
Call = Callable[[Ledger, LedgerRequest], object]

CALLS: dict[str, tuple[str, Call]] = {
    "allocate_nowait": ("allocate", lambda ledger, request: ledger.allocate_nowait(request)),
    "queue_allocation": ("allocate", lambda ledger, request: ledger.queue_allocation(request)),
    "fetches.match_again": ("match_again", lambda ledger, request: ledger.fetches.match_again(request)),
    "extend_nowait": ("extend", lambda ledger, request: ledger.extend_nowait(request, 16)),
    "queue_extension": ("extend", lambda ledger, request: ledger.queue_extension(request, 16)),
    "plan_load": ("load", lambda ledger, request: ledger.plan_load(request)),
    "abandon_load": ("abandon_load", lambda ledger, request: ledger.abandon_load(request)),
    "commit": ("commit", lambda ledger, request: ledger.commit(request, request.num_computed_tokens)),
    "commit_all": ("commit", lambda ledger, request: ledger.commit_all([(request, request.num_computed_tokens, ())])),
    "check_commit": ("commit", lambda ledger, request: ledger.check_commit(request, request.num_computed_tokens)),
    "invalidation.invalidate": (
        "invalidate",
        lambda ledger, request: ledger.invalidation.invalidate(request, request.num_computed_tokens),
    ),
    "step": ("step", lambda ledger, request: enter(ledger.step([request]))),
    "preemption.preempt": ("preempt", lambda ledger, request: ledger.preemption.preempt(request)),
    "preemption.resume": ("resume", lambda ledger, request: ledger.preemption.resume(request)),
    "release": ("release", lambda ledger, request: ledger.release(request)),
    "block_ids": ("block_ids", lambda ledger, request: ledger.block_ids(request)),
    "planned_checkpoints": ("block_ids", lambda ledger, request: ledger.planned_checkpoints(request)),
    "resume_checkpoint": ("block_ids", lambda ledger, request: ledger.resume_checkpoint(request)),
    "overlap.can_start": ("block_ids", lambda ledger, request: ledger.overlap.can_start(request)),
    "overlap.num_expected_tokens": ("block_ids", lambda ledger, request: ledger.overlap.num_expected_tokens(request)),
    "lost_to_reset": ("lost_to_reset", lambda ledger, request: ledger.lost_to_reset(request)),
    "loadable": ("loadable", lambda ledger, request: ledger.loadable(request)),
    "overlap.block_ids": ("block_ids", lambda ledger, request: ledger.overlap.block_ids(request)),
    "overlap.first_invalid_token": ("block_ids", lambda ledger, request: ledger.overlap.first_invalid_token(request)),
    "overlap.begin_again": ("begin_again", lambda ledger, request: ledger.overlap.begin_again(request)),
    "forks.num_shared_tokens": ("fork", lambda ledger, request: ledger.forks.num_shared_tokens(request)),
    "forks.fork": ("fork", lambda ledger, request: ledger.forks.fork(request)),
}
"""Every call about a request: what it calls itself when it is refused, and how it is made."""
OTHER_CALLS = {
    "lookup", "admit", "accept", "withdraw", "launch", "settle", "discard", "reset", "statistics", "check_integrity",
    "last_step", "lapse", "watch", "unwatch", "explain", "pins.hold", "pins.release", "pins.drop", "eviction.returns",
    "eviction.done", "eviction.statistics", "transfers.prefetch", "transfers.demote", "transfers.cancel",
    "transfers.cancel_all",
    "hints.apply", "hints.apply_all", "hints.reject", "hints.answered", "hints.statistics",
    "write_back.plan", "reports.requests", "reports.holders", "fetches.fetch", "fetches.num_blocks",
    "fetches.num_remote_blocks", "disk.plan_stores", "disk.plan_flush", "disk.restore", "disk.take_forgotten",
    "remote.plan_stores", "remote.take_forgotten", "overlap.step", "quotas.statistics", "weights.set",
}  # fmt: skip

LOOKING = (
    "block_ids loadable lost_to_reset overlap.block_ids overlap.can_start overlap.first_invalid_token "
    "overlap.num_expected_tokens planned_checkpoints resume_checkpoint"
)
ALWAYS = f"release {LOOKING}"
COMMITS = "commit commit_all check_commit"
COMPUTED = f"{ALWAYS} plan_load {COMMITS} invalidation.invalidate step forks.num_shared_tokens overlap.begin_again"
LEGAL: dict[tuple[str, str], str] = {
    ("QUEUED", ""): ALWAYS,
    ("MATCHED", ""): ALWAYS,
    ("PINNED", ""): f"{ALWAYS} allocate_nowait queue_allocation fetches.match_again",
    ("PINNED", "waiting"): ALWAYS,
    (
        "ALLOCATED",
        "",
    ): f"{ALWAYS} extend_nowait queue_extension plan_load {COMMITS} step preemption.preempt",
    ("ALLOCATED", "waiting"): f"{ALWAYS} {COMMITS} step",
    ("ALLOCATED", "stepping"): f"{ALWAYS} extend_nowait queue_extension {COMMITS} step",
    ("LOADING", ""): f"{ALWAYS} plan_load abandon_load preemption.preempt".replace(" overlap.block_ids", ""),
    ("DRAINING", "stepping"): f"{ALWAYS} plan_load abandon_load",
    ("REQUEUED", "waiting"): f"{ALWAYS} plan_load abandon_load preemption.preempt",
    ("STRANDED", ""): f"{ALWAYS} abandon_load preemption.preempt",
    (
        "RUNNING",
        "",
    ): f"{COMPUTED} extend_nowait queue_extension preemption.preempt forks.fork",
    ("RUNNING", "waiting"): COMPUTED,
    ("RUNNING", "stepping"): f"{COMPUTED} extend_nowait queue_extension",
    ("PREEMPTED", ""): f"{ALWAYS} preemption.resume",
    ("DONE", ""): LOOKING,
    ("DONE", "stepping"): LOOKING,
    ("ABORTED", ""): LOOKING,
    ("ABORTED", "stepping"): LOOKING,
}
"""What may be called when; everything else is refused."""


def everything(num_device: int, **config: Any) -> Driven:
    """A ledger with a disk and a remote store, of which nothing is stored by itself."""
    config = {"disk": disk_of(64), "remote": remote_tier(), "max_fetch_share": 1.0, "namespace": "test", **config}
    return Driven(num_device, **config)


def row_of(request: LedgerRequest) -> tuple[str, str]:
    if request.waiter is not None:
        return request.state.name, "waiting"
    if request.num_steps:
        return request.state.name, "stepping"
    return request.state.name, ""


def enter(step: Any) -> None:
    with step:
        pass


# -- how a request gets there: 8 device blocks of 4 tokens ---------------------------------------------------------


def admitted(driven: Driven) -> LedgerRequest:
    driven.on_host_only(A)
    return driven.admit(A)


def forced(state: RequestState) -> Callable[[Driven], LedgerRequest]:
    """A state that no caller ever sees a request in: calls never end there."""

    def build(driven: Driven) -> LedgerRequest:
        request = driven.admit(A)
        request.state = state
        return request

    return build


def crowded(driven: Driven, num_blocks: int) -> LedgerRequest:
    return driven.running(prompt(2, num_blocks * 4))


def waiting(driven: Driven, *, is_granted: bool = False) -> LedgerRequest:
    hog, request = crowded(driven, 8), driven.admit(A)
    driven.ledger.queue_allocation(request)
    if is_granted:
        driven.release(hog)
    return request


def waiting_in_vain(driven: Driven) -> LedgerRequest:
    """Room is lost to quarantine: it will never fit."""
    loading = admitted(driven)
    driven.ledger.allocate_nowait(loading)
    plans = driven.launch(driven.ledger.plan_load(loading))
    request = driven.admit(prompt(3, 32))
    driven.ledger.queue_allocation(request)
    driven.end(plans[0], Outcome.UNPROVEN)
    assert request.waiter is not None and request.waiter.error is not None
    return request


def allocated(driven: Driven) -> LedgerRequest:
    request = admitted(driven)
    driven.ledger.allocate_nowait(request)
    return request


def loading(driven: Driven) -> LedgerRequest:
    request = allocated(driven)
    driven.plans = driven.ledger.plan_load(request)  # type: ignore[attr-defined]
    return request


def robbed(driven: Driven, *, is_granted: bool = False) -> LedgerRequest:
    """Its load went to quarantine, and there was no room for what is missing."""
    request = allocated(driven)
    hog = crowded(driven, 5)
    driven.end(driven.launch(driven.ledger.plan_load(request))[0], Outcome.UNPROVEN)
    if is_granted:
        driven.release(hog)
    return request


def draining(driven: Driven) -> LedgerRequest:
    """A step has begun on its load, which went to quarantine, and there is no room for what is missing."""
    request = allocated(driven)
    crowded(driven, 5)
    plans = driven.launch(driven.ledger.plan_load(request))
    driven.step = driven.ledger.overlap.step([], [request])  # type: ignore[attr-defined]
    driven.step.__enter__()  # type: ignore[attr-defined]
    driven.end(plans[0], Outcome.UNPROVEN)
    return request


def hopeless(driven: Driven) -> LedgerRequest:
    request = admitted(driven)
    driven.ledger.allocate_nowait(request, 28)
    driven.end(driven.launch(driven.ledger.plan_load(request))[0], Outcome.UNPROVEN)
    assert request.waiter is not None
    with pytest.raises(OutOfBlocks):
        driven.ledger.accept(request.waiter)
    return request


def running(driven: Driven) -> LedgerRequest:
    request = loading(driven)
    driven.land(driven.plans)  # type: ignore[attr-defined]
    driven.commit(request)
    return request


def preempted(driven: Driven) -> LedgerRequest:
    request = running(driven)
    driven.ledger.preemption.preempt(request)
    return request


def extending(start: Callable[[Driven], LedgerRequest]) -> Callable[[Driven], LedgerRequest]:
    def build(driven: Driven) -> LedgerRequest:
        request = start(driven)
        crowded(driven, 5)
        driven.ledger.queue_extension(request, 16)
        return request

    return build


def stepping(start: Callable[[Driven], LedgerRequest], *reasons: str) -> Callable[[Driven], LedgerRequest]:
    def build(driven: Driven) -> LedgerRequest:
        request = start(driven)
        driven.step = driven.ledger.step([request])  # type: ignore[attr-defined]
        driven.step.__enter__()  # type: ignore[attr-defined]
        for reason in reasons:
            driven.release(request, reason)
        return request

    return build


def over(start: Callable[[Driven], LedgerRequest], reason: str = "closed_early") -> Callable[[Driven], LedgerRequest]:
    def build(driven: Driven) -> LedgerRequest:
        request = start(driven)
        driven.release(request, reason)
        return request

    return build


SITUATIONS: dict[str, tuple[tuple[str, str], Callable[[Driven], LedgerRequest]]] = {
    "queued": (("QUEUED", ""), forced(S.QUEUED)),
    "matched": (("MATCHED", ""), forced(S.MATCHED)),
    "preempted": (("PREEMPTED", ""), preempted),
    "pinned": (("PINNED", ""), admitted),
    "pinned, waiting": (("PINNED", "waiting"), waiting),
    "pinned, granted": (("PINNED", "waiting"), lambda driven: waiting(driven, is_granted=True)),
    "pinned, failed": (("PINNED", "waiting"), waiting_in_vain),
    "allocated": (("ALLOCATED", ""), allocated),
    "allocated, waiting": (("ALLOCATED", "waiting"), extending(allocated)),
    "allocated, stepping": (("ALLOCATED", "stepping"), stepping(allocated)),
    "loading": (("LOADING", ""), loading),
    "loading, robbed under its step": (("DRAINING", "stepping"), draining),
    "loading, robbed": (("REQUEUED", "waiting"), robbed),
    "loading, granted": (("REQUEUED", "waiting"), lambda driven: robbed(driven, is_granted=True)),
    "loading, hopeless": (("STRANDED", ""), hopeless),
    "running": (("RUNNING", ""), running),
    "running, waiting": (("RUNNING", "waiting"), extending(running)),
    "running, stepping": (("RUNNING", "stepping"), stepping(running)),
    "done": (("DONE", ""), over(running)),
    "done, stepping": (("DONE", "stepping"), stepping(running, "closed_early")),
    "aborted": (("ABORTED", ""), over(loading)),
    "aborted, stepping": (("ABORTED", "stepping"), stepping(allocated, "cancelled")),
}


@contextmanager
def refused(ledger: Ledger, *roots: object, error: type[Exception], says: tuple[str, ...]) -> Iterator[None]:
    """The call raises `error`, which names what is wrong, and leaves everything as it was."""
    before = fingerprint(with_handles(ledger), *roots)
    with pytest.raises(error) as refusal:
        yield
    assert all(word in str(refusal.value) for word in says), (str(refusal.value), says)
    assert not changes(before, fingerprint(ledger, *roots))


def refuse(ledger: Ledger, request: LedgerRequest, call: str) -> None:
    word, make = CALLS[call]
    with refused(ledger, request, error=WrongState, says=(f"{word}: ", str(request))):
        make(ledger, request)


# -- the table ----------------------------------------------------------------------------------------------------


def test_the_table_is_whole() -> None:
    """Every state of a request has a row and a way to get there; every call of the ledger is in the table, or is not
    about a request. A new call or a new state fails here until somebody has said when it is legal."""
    public = verbs_of(Ledger)
    assert set(public) == set(CALLS) | OTHER_CALLS
    about = {name for name, call in public.items() if list(inspect.signature(call).parameters)[1:2] == ["request"]}
    assert about | {"step", "commit_all"} == set(CALLS)
    assert {state for state, _ in LEGAL} == {state.name for state in RequestState}
    assert {row for row, _ in SITUATIONS.values()} == set(LEGAL)
    assert set(" ".join(LEGAL.values()).split()) == set(CALLS)


@pytest.mark.parametrize("situation", SITUATIONS)
def test_what_the_table_does_not_allow_is_refused(situation: str) -> None:
    """A call at the wrong time raises `WrongState`, says which call and which request, and changes nothing; what the
    table allows happens."""
    row, build = SITUATIONS[situation]
    for call in CALLS:
        driven = everything(8)
        request = build(driven)
        assert row_of(request) == row
        driven.ledger.check_integrity()
        if call in LEGAL[row].split():
            CALLS[call][1](driven.ledger, request)
        else:
            refuse(driven.ledger, request, call)
        driven.ledger.check_integrity()


def test_nothing_about_a_step_happens_if_one_of_its_requests_may_not_step() -> None:
    """A step holds all its requests or none."""
    driven = Driven(16)
    good, bad = driven.allocated(prompt(2, 8)), driven.admit(A)
    with refused(driven.ledger, error=WrongState, says=("step: ", str(bad), "PINNED")):
        enter(driven.ledger.step([good, bad]))


# -- arguments ----------------------------------------------------------------------------------------------------

HUGE = 2**70
NO_COUNT: tuple[object, ...] = (-1, -HUGE, True, False, 1.0, float("nan"), float("inf"), "4", b"4", [4], (), 4j)
BAD: dict[tuple[str, str], tuple[str, tuple[object, ...]]] = {
    ("forks.fork", "num_tokens"): ("running", (*NO_COUNT, HUGE, 36, None)),
    ("admit", "max_hit_tokens"): ("pinned", NO_COUNT),
    ("admit", "hit_alignment"): ("pinned", (*NO_COUNT, 0, None)),
    ("admit", "max_store_tokens"): ("pinned", NO_COUNT),
    ("allocate_nowait", "num_tokens"): ("pinned", (*NO_COUNT, 0, HUGE, 33)),
    ("queue_allocation", "num_tokens"): ("pinned", (*NO_COUNT, 0, HUGE, 33)),
    ("extend_nowait", "num_tokens"): ("running", (*NO_COUNT, 0, None, HUGE, 33)),
    ("queue_extension", "num_tokens"): ("running", (*NO_COUNT, 0, None, HUGE, 33)),
    ("plan_load", "max_tokens"): ("allocated", NO_COUNT),
    ("loadable", "max_tokens"): ("allocated", NO_COUNT),
    ("plan_load", "max_job_bytes"): ("allocated", (*NO_COUNT, 0)),
    ("commit", "num_computed_tokens"): ("running", (*NO_COUNT, None, HUGE, 8, 11, 13)),
    ("check_commit", "num_computed_tokens"): ("running", (*NO_COUNT, None, HUGE, 8, 11, 13)),
    ("preemption.resume", "num_tokens"): ("preempted", (*NO_COUNT, 0, HUGE, 33)),
    ("invalidation.invalidate", "from_token"): ("running", (*NO_COUNT, None, HUGE, 0, 7, 10)),
    ("disk.plan_stores", "max_blocks"): ("running", (*NO_COUNT, None)),
    ("disk.plan_flush", "max_blocks"): ("running", (*NO_COUNT, None)),
    ("remote.plan_stores", "max_blocks"): ("running", (*NO_COUNT, None)),
    ("fetches.fetch", "num_remote_tokens"): ("running", (*NO_COUNT, None, 12)),
    ("fetches.num_remote_blocks", "num_remote_tokens"): ("running", (*NO_COUNT, None)),
}
"""For each number that a call takes: when the call is legal, and what may not be handed in then."""
BAD_TOKENS = [[-1], [2**31], [HUGE], [1.5], [True], ["7"], [None], "12", b"12", [[1]], 7, None, [1, [2]]]


def with_argument(ledger: Ledger, request: LedgerRequest, call: str, name: str, value: object) -> object:
    if call == "admit":
        return ledger.admit(Prefix.of(Root("test"), A), **{name: value})  # type: ignore[arg-type]
    verb = attrgetter(call)(ledger)
    if call.startswith("fetches."):
        return verb(Prefix.of(Root("test"), A), **{name: value})
    if call == "remote.plan_stores":
        return verb(value, bool)
    if call.startswith("disk."):
        return verb(**{name: value})
    more = {"new_token_ids": [7]} if call in ("commit", "check_commit") else {}
    return verb(request, **{name: value}, **more)


def refuse_argument(ledger: Ledger, request: LedgerRequest, call: str, name: str, value: object) -> None:
    with refused(ledger, request, error=(InvalidArgument, OutOfBlocks), says=(f"{name}: ",)):  # type: ignore[arg-type]
        with_argument(ledger, request, call, name, value)


def test_every_number_that_a_call_takes_is_checked() -> None:
    """A new argument fails here until somebody has said what it may not be. Job ids are looked up, not checked."""
    taken = {
        (name, parameter.name)
        for name, call in verbs_of(Ledger).items()
        for parameter in inspect.signature(call).parameters.values()
        if parameter.annotation in ("int", "int | None") and parameter.name != "job_id"
    }
    options = {name: kind.__forward_arg__ for name, kind in RequestOptions.__annotations__.items()}
    taken |= {("admit", name) for name, kind in options.items() if kind in ("int", "int | None")}
    assert taken == set(BAD)


def test_an_unknown_option_is_refused_by_name() -> None:
    driven = Driven(8)
    with pytest.raises(TypeError, match=r"^Ledger\.admit\(\) got an unexpected keyword argument 'max_hits'$"):
        driven.ledger.admit(Prefix.of(Root("test"), A), max_hits=3)  # type: ignore[call-arg]
    driven.ledger.check_integrity()
    assert not driven.ledger.reports.requests()


@pytest.mark.parametrize(("call", "name"), BAD)
def test_a_bad_number_is_refused_by_name(call: str, name: str) -> None:
    """Negative, a bool, a float, text, beyond every pool: an error that names the argument, and nothing is changed."""
    situation, values = BAD[call, name]
    driven = everything(8)
    request = SITUATIONS[situation][1](driven)
    for value in values:
        refuse_argument(driven.ledger, request, call, name, value)


SMALLEST: dict[tuple[str, str], tuple[str, int]] = {
    ("admit", "max_hit_tokens"): ("pinned", 0),
    ("admit", "hit_alignment"): ("pinned", 1),
    ("admit", "max_store_tokens"): ("pinned", 0),
    ("allocate_nowait", "num_tokens"): ("pinned", 1),
    ("queue_allocation", "num_tokens"): ("pinned", 1),
    ("extend_nowait", "num_tokens"): ("running", 1),
    ("queue_extension", "num_tokens"): ("running", 1),
    ("plan_load", "max_tokens"): ("allocated", 0),
    ("preemption.resume", "num_tokens"): ("preempted", 1),
}


@pytest.mark.parametrize(("call", "name"), SMALLEST)
def test_the_smallest_number_is_taken(call: str, name: str) -> None:
    """Nobody has to ask for more than they need: one token, or none where none makes sense."""
    situation, value = SMALLEST[call, name]
    driven = Driven(8)
    request = SITUATIONS[situation][1](driven)
    with_argument(driven.ledger, request, call, name, value)
    driven.ledger.check_integrity()


@pytest.mark.parametrize("tokens", BAD_TOKENS, ids=repr)
def test_bad_tokens_are_refused_by_name(tokens: object) -> None:
    """What is no token id is appended to no sequence, however much of the commit was right."""
    driven = Driven(8)
    request = running(driven)
    with refused(driven.ledger, request, error=InvalidArgument, says=("new_token_ids: ",)):
        driven.ledger.commit(request, 9, tokens)


@pytest.mark.parametrize("name", [5, b"r", True, 1.0, ("r",), ["r"]], ids=repr)
def test_a_request_id_is_text(name: object) -> None:
    """Whatever else is handed in is named, and no request is left half admitted."""
    driven = Driven(8)
    with refused(driven.ledger, error=InvalidArgument, says=("request_id: ",)):
        driven.ledger.admit(Prefix.of(Root("test"), A), request_id=name)  # type: ignore[arg-type]


def test_a_live_request_keeps_its_name() -> None:
    """The second of two of one name is refused; it gets the name when the first is over."""
    driven = Driven(8)
    first = driven.admit(A, request_id="r")
    with refused(driven.ledger, first, error=DuplicateRequest, says=("request_id: ", "'r'")):
        driven.ledger.admit(Prefix.of(Root("test"), A), request_id="r")
    driven.release(first)
    assert driven.admit(A, request_id="r").request_id == "r"


BAD_HINTS: dict[str, tuple[object, ...]] = {
    "prefix": (A, None, "a prompt", b"", 5),
    "in_s": (float("nan"), "soon", b"1", True, False, 4j, [9.0], HUGE**20, -0.1),
    "category": (5, None, True, b"search", ["search"], {}, ("search",), float("nan"), "x" * 257),
}


@pytest.mark.parametrize("name", BAD_HINTS)
def test_a_bad_hint_is_refused_by_name(name: str) -> None:
    """And nothing is learned from it. The longest category, and none, are fine, and so is a time that is now or never
    comes."""
    driven = Driven(8, eviction="learned")
    driven.on_host_only(A)
    good: dict[str, Any] = {"prefix": Prefix.of(Root("test"), A), "in_s": 9.0, "category": "search"}
    for value in BAD_HINTS[name]:
        with refused(driven.ledger, error=InvalidArgument, says=(f"{name}: ",)):
            driven.ledger.eviction.returns(**{**good, name: value})
    assert not driven.ledger.eviction.learning.times._numbers
    for more in ({"category": ""}, {"category": "x" * 256}, {"in_s": 0.0}, {"in_s": float("inf")}, {"in_s": None}):
        assert driven.ledger.eviction.returns(**{**good, **more}) == 8
    driven.ledger.check_integrity()


# -- waiters and jobs ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("end", ["still waiting", "accepted", "withdrawn", "released"])
def test_a_waiter_is_accepted_once_and_in_time(end: str) -> None:
    """A grant is taken once, by who has it: not before it is there, not again, not after leaving."""
    driven = Driven(8)
    request = waiting(driven, is_granted=end == "accepted")
    waiter = request.waiter
    assert waiter is not None
    if end == "accepted":
        driven.ledger.accept(waiter)
    elif end == "withdrawn":
        driven.ledger.withdraw(waiter)
    elif end == "released":
        driven.release(request)
    with refused(driven.ledger, request, waiter, error=WrongState, says=("accept: ", repr(waiter))):
        driven.ledger.accept(waiter)
    driven.ledger.check_integrity()


@pytest.mark.parametrize("end", ["accepted", "withdrawn", "released", "waits again"])
def test_withdrawing_what_is_over_changes_nothing(end: str) -> None:
    """Stopping to wait for what nobody waits for any more is no error: it may cross a grant. It gives nothing back
    a second time and takes nobody else's place."""
    driven = Driven(8)
    request = waiting(driven, is_granted=end == "accepted")
    waiter = request.waiter
    assert waiter is not None
    if end == "accepted":
        driven.ledger.accept(waiter)
    elif end == "released":
        driven.release(request)
    else:
        driven.ledger.withdraw(waiter)
    if end == "waits again":
        driven.ledger.queue_allocation(request)
    before = fingerprint(driven.ledger, request, waiter)
    driven.ledger.withdraw(waiter)
    assert not changes(before, fingerprint(driven.ledger, request, waiter))


@pytest.mark.parametrize("job_id", [0, 99, HUGE])
def test_a_job_that_nobody_knows(job_id: Any) -> None:
    """Launching it says no, giving it up is nothing to do, and its end is counted and otherwise ignored."""
    driven = Driven(8)
    loading(driven)
    before = fingerprint(driven.ledger)
    assert driven.ledger.launch(job_id) is False
    driven.ledger.discard(job_id)
    assert not changes(before, fingerprint(driven.ledger))
    driven.ledger.settle(Completion(job_id, Outcome.LANDED))
    only_counted(driven, before, 1)


@pytest.mark.parametrize("job_id", [-1, True, 2.0, "1", None, [1]])
def test_what_is_no_job_id(job_id: Any) -> None:
    """Refused by name in every call that takes one; `2.0` and `True` are no jobs, even where 2 and 1 are."""
    driven = Driven(8)
    loading(driven)
    for call in (driven.ledger.launch, driven.ledger.discard):
        with refused(driven.ledger, error=InvalidArgument, says=("job_id",)):
            call(job_id)
    with refused(driven.ledger, error=InvalidArgument, says=("completion.job_id",)):
        driven.ledger.settle(Completion(job_id, Outcome.LANDED))


@pytest.mark.parametrize(
    ("wrong", "name"),
    [
        ({"outcome": "landed"}, "outcome"),
        ({"outcome": None}, "outcome"),
        ({"outcome": Outcome.FAILED, "num_landed": 1.0}, "num_landed"),
        ({"outcome": Outcome.FAILED, "num_landed": "1"}, "num_landed"),
        ({"outcome": Outcome.CORRUPT, "corrupt": ("a",)}, "corrupt"),
        ({"outcome": Outcome.CORRUPT, "corrupt": (0.5,)}, "corrupt"),
        ({"outcome": Outcome.CORRUPT, "corrupt": None}, "corrupt"),
    ],
)
def test_what_is_no_completion(wrong: dict[str, Any], name: str) -> None:
    """A transport of another program may say anything: it is looked at before anything is changed."""
    driven = Driven(8)
    loading(driven)
    (plan,) = driven.plans  # type: ignore[attr-defined]
    driven.ledger.launch(plan.job_id)
    with refused(driven.ledger, error=InvalidArgument, says=(f"completion.{name}",)):
        driven.ledger.settle(Completion(plan.job_id, **wrong))
    with refused(driven.ledger, error=InvalidArgument, says=("completion",)):
        driven.ledger.settle(None)  # type: ignore[arg-type]


def test_another_ledgers_holdings_and_waiters() -> None:
    """What one ledger has handed out, no other takes: both would lose count of their blocks."""
    ours, theirs = Driven(8), Driven(8)
    waiting, allocated_there = theirs.admit(prompt(1, 9)), theirs.allocated(prompt(2, 9))
    waiter = theirs.ledger.queue_allocation(waiting)
    calls: list[Callable[[], Any]] = [
        lambda: ours.ledger.withdraw(waiter),
        lambda: ours.ledger.accept(waiter),
        lambda: ours.ledger.release(allocated_there),
        lambda: ours.ledger.allocate_nowait(waiting),
        lambda: ours.ledger.queue_allocation(waiting),
        lambda: ours.ledger.extend_nowait(allocated_there, 12),
        lambda: ours.ledger.queue_extension(allocated_there, 12),
        lambda: ours.ledger.plan_load(allocated_there),
        lambda: ours.ledger.abandon_load(allocated_there),
        lambda: ours.ledger.commit(allocated_there, 4),
        lambda: ours.ledger.invalidation.invalidate(allocated_there, 0),
        lambda: ours.ledger.step([allocated_there]).__enter__(),
        lambda: ours.ledger.step([None]).__enter__(),  # type: ignore[list-item]
    ]
    before = fingerprint(theirs.ledger)
    for call in calls:
        with refused(ours.ledger, error=InvalidArgument, says=("request",)):
            call()
    assert not changes(before, fingerprint(theirs.ledger))


def test_who_waits_to_begin_again_cannot_only_stop_waiting() -> None:
    """A load that lost its room has nothing left but its place in the line: it is accepted, or released."""
    driven = Driven(8)
    request = robbed(driven)
    assert request.waiter is not None
    with refused(driven.ledger, error=WrongState, says=("withdraw", "release it")):
        driven.ledger.withdraw(request.waiter)


def only_counted(driven: Driven, before: dict[str, object], num_late: int) -> None:
    jobs = driven.ledger.jobs
    assert jobs.num_late == num_late
    jobs.num_late -= 1
    assert not changes(before, fingerprint(driven.ledger))
    jobs.num_late += 1


def test_a_job_moves_only_forwards() -> None:
    """Not settled before it was launched, launched once, never given up after that, settled once."""
    driven = Driven(8)
    loading(driven)
    (plan,) = driven.plans  # type: ignore[attr-defined]
    landed = Completion(plan.job_id, Outcome.LANDED)
    with refused(driven.ledger, error=WrongState, says=("settle: ", f"job {plan.job_id}", "QUEUED", "LAUNCHED")):
        driven.ledger.settle(landed)
    assert driven.ledger.launch(plan.job_id)
    before = fingerprint(driven.ledger)
    assert driven.ledger.launch(plan.job_id) is False
    assert not changes(before, fingerprint(driven.ledger))
    with refused(driven.ledger, error=IllegalTransition, says=(f"job {plan.job_id}", "LAUNCHED", "DISCARDED")):
        driven.ledger.discard(plan.job_id)
    driven.end(plan)
    for num_late, outcome in enumerate(Outcome, start=1):
        before = fingerprint(driven.ledger)
        driven.ledger.settle(Completion(plan.job_id, outcome, corrupt=(0,)))
        only_counted(driven, before, num_late)


# -- anything, at any time ----------------------------------------------------------------------------------------


class IllegalMachine(MatchMachine):
    """Any legal calls, and in between one that is not: by the same tables."""

    def some(self, which: int) -> LedgerRequest:
        alive = [client.record for client in self.clients]
        gone = [*self.gone[-3:], *self.ledger.closing]
        return [*alive, *gone][which % len([*alive, *gone])]

    @property
    def gone(self) -> list[LedgerRequest]:
        return self.__dict__.setdefault("_gone", [])

    def end(self, client: Any, reason: str = "closed_early") -> None:
        super().end(client, reason)
        self.gone.append(client.record)

    @precondition(lambda self: self.clients or self.gone)
    @rule(which=WHICH, call=st.sampled_from(sorted(CALLS.keys() - {"fetches.match_again"})))  # there is no lower tier
    def call_at_the_wrong_time(self, which: int, call: str) -> None:
        request = self.some(which)
        if call not in LEGAL[row_of(request)].split():
            refuse(self.ledger, request, call)

    @precondition(lambda self: self.clients)
    @rule(which=WHICH, argument=st.sampled_from(sorted(BAD)), value=WHICH)
    def hand_in_nonsense(self, which: int, argument: tuple[str, str], value: int) -> None:
        request, (call, name) = self.clients[which % len(self.clients)].record, argument
        if call == "admit" or call in LEGAL[row_of(request)].split():
            nonsense = NO_COUNT[value % len(NO_COUNT)]
            refuse_argument(self.ledger, request, call, name, nonsense)

    @precondition(lambda self: self.plans)
    @rule(which=WHICH, call=st.sampled_from(["launch", "settle", "discard"]))
    def disturb_a_job(self, which: int, call: str) -> None:
        job_id = list(self.plans)[which % len(self.plans)]
        job = self.ledger.jobs.unsettled.get(job_id)
        if job is not None and job.state is JobState.QUEUED and call == "settle":
            with refused(self.ledger, error=WrongState, says=("settle: ", str(job), "QUEUED")):
                self.ledger.settle(Completion(job_id, Outcome.LANDED))
        elif job is not None and job.state is JobState.LAUNCHED and call == "discard":
            with refused(self.ledger, error=IllegalTransition, says=(str(job), "LAUNCHED", "DISCARDED")):
                self.ledger.discard(job_id)
        elif call == "launch" and (job is None or job.state is not JobState.QUEUED):
            before = fingerprint(self.ledger)
            assert self.ledger.launch(job_id) is False
            assert not changes(before, fingerprint(self.ledger))

    @precondition(lambda self: self.ledger.admission.queue.allocating)
    @rule(which=WHICH)
    def accept_too_early(self, which: int) -> None:
        wait_queue = self.ledger.admission.queue.allocating
        waiter = wait_queue[which % len(wait_queue)]
        with refused(self.ledger, waiter, error=WrongState, says=("accept: ", repr(waiter))):
            self.ledger.accept(waiter)


class TestIllegal(IllegalMachine.TestCase):
    """Whatever was called before: an illegal call raises what names it, and the whole ledger is as it was."""

    settings = settings(max_examples=40, stateful_step_count=50)
