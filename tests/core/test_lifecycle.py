"""The state tables: every move that they list is possible, and every other move is refused."""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from driving import Driven, prompt

from aoffload._extensions.overlap import OVERLAP_MOVES, LoadOverlap, OverlapMoved, OverlapState
from aoffload._extensions.pins import PIN_MOVES, PinMoved, PinState
from aoffload._extensions.transfers import CACHE_TRANSFER_MOVES, CacheTransferMoved, CacheTransferState
from aoffload._kernel.events import Event, JobMoved, RequestMoved
from aoffload._kernel.moves import Moves
from aoffload._kernel.states import JOB_MOVES, REQUEST_MOVES, JobState, RequestState, State
from aoffload.errors import IllegalTransition, WrongState
from proof.programs.fingerprint import fingerprint

PAGE = Path(__file__).parents[2] / "docs" / "lifecycle.md"
TABLES = {
    "request": REQUEST_MOVES,
    "job": JOB_MOVES,
    "pin": PIN_MOVES,
    "cache_transfer": CACHE_TRANSFER_MOVES,
    "overlap": OVERLAP_MOVES,
}
EVENTS: dict[str, Any] = {"pin": PinMoved, "cache_transfer": CacheTransferMoved, "overlap": OverlapMoved}


def entity_of(kind: str) -> Any:
    """Something that has states of this kind, in a ledger of its own."""
    driven = Driven(9, 9)
    driven.on_host_only(prompt(1, 5))
    request = driven.admit(prompt(1, 5))
    if kind == "request":
        return request
    if kind == "overlap":
        return LoadOverlap(request, 0, 0, ())
    if kind == "pin":
        return driven.ledger.pins.hold(driven.prefix(prompt(1, 5)))
    transfer = driven.ledger.transfers.prefetch(driven.prefix(prompt(1, 5)))
    return transfer if kind == "cache_transfer" else driven.ledger.jobs.unsettled[transfer.plans[0].job_id]


class LeftStates:
    """What an observer was told of: the states that were left."""

    def __init__(self) -> None:
        self.left: list[State] = []

    def observe(self, event: Any) -> None:
        self.left.append(event.old)


def pairs(*, legal: bool) -> list[tuple[str, State, State]]:
    found: list[tuple[str, State, State]] = []
    for kind, moves in TABLES.items():
        states = type(next(iter(moves)))
        found += [(kind, old, new) for old, new in product(states, states) if (new in moves[old]) is legal]
    return found


def move(moves: Moves, kind: str, entity: Any, new: State) -> None:
    """Move the state of `entity`, as the kernel and the extensions do."""
    if kind in ("request", "job"):
        getattr(moves, kind)(entity, new)
    else:
        old = moves.other(entity, new, TABLES[kind])
        moves.note(EVENTS[kind](entity, old, new))


@pytest.mark.parametrize(("kind", "old", "new"), pairs(legal=False))
def test_an_illegal_move_raises_and_changes_nothing(kind: str, old: State, new: State) -> None:
    """A move that the table does not have raises, names both states, and leaves the entity as it was."""
    entity = entity_of(kind)
    entity.state = old
    before, recorded = fingerprint(entity), LeftStates()
    with pytest.raises(IllegalTransition) as refusal:
        move(Moves(recorded), kind, entity, new)
    assert fingerprint(entity) == before
    assert not recorded.left
    assert (refusal.value.old, refusal.value.new) == (old.name, new.name)
    assert old.name in str(refusal.value) and new.name in str(refusal.value) and str(entity) in str(refusal.value)


@pytest.mark.parametrize(("kind", "old", "new"), pairs(legal=True))
def test_a_legal_move_happens(kind: str, old: State, new: State) -> None:
    """A move of the table changes the state, and the observer hears which one was left, if there is one."""
    recorded = LeftStates()
    for observer in (None, recorded):
        entity = entity_of(kind)
        entity.state = old
        moves = Moves(observer)
        move(moves, kind, entity, new)
        assert entity.state is new and not recorded.left
        moves.report()
    assert recorded.left == [old]


def test_an_observer_may_ignore_the_moves_of_requests() -> None:
    """If `wants_move` returns False for a move, the ledger makes no event for it. All other events still come."""
    recorded = LeftStates()
    recorded.wants_move = lambda kind, state: kind is not RequestMoved  # type: ignore[attr-defined]
    moves = Moves(recorded)
    for kind in ("request", "job"):
        old, new = next((old, new) for each, old, new in pairs(legal=True) if each == kind)
        entity = entity_of(kind)
        entity.state = old
        move(moves, kind, entity, new)
        assert entity.state is new
        assert len(moves.unreported) == (kind == "job")


@pytest.mark.parametrize("moves", TABLES.values(), ids=TABLES.keys())
def test_a_table_is_whole(moves: Mapping[State, frozenset[State]]) -> None:
    """Every state has a row, every state but the first is reached, and some end."""
    states = set(type(next(iter(moves))))
    assert set(moves) == states
    assert frozenset().union(*moves.values()) == states - {next(iter(moves))}
    assert any(not targets for targets in moves.values())


def test_every_live_request_can_abort() -> None:
    """Abort is legal in every state that is not final."""
    final = {RequestState.DONE, RequestState.ABORTED}
    assert all((RequestState.ABORTED in targets) is (state not in final) for state, targets in REQUEST_MOVES.items())


CALLS: dict[str, tuple[str, Any]] = {
    "allocate": ("PINNED", lambda ledger, request: ledger.allocate_nowait(request)),
    "queue": ("PINNED", lambda ledger, request: ledger.queue_allocation(request, None, lambda: None)),
    "extend": ("ALLOCATED RUNNING", lambda ledger, request: ledger.extend_nowait(request, 4)),
    "load": ("ALLOCATED LOADING RUNNING", lambda ledger, request: ledger.plan_load(request)),
    "abandon": ("LOADING", lambda ledger, request: ledger.abandon_load(request)),
    "commit": ("ALLOCATED RUNNING", lambda ledger, request: ledger.commit(request, 8)),
    "invalidate": ("RUNNING", lambda ledger, request: ledger.invalidation.invalidate(request, 8)),
    "step": ("ALLOCATED RUNNING", lambda ledger, request: ledger.step([request]).__enter__()),
    "release": ("PINNED ALLOCATED LOADING RUNNING", lambda ledger, request: ledger.release(request)),
}


@pytest.mark.parametrize("state", ["PINNED", "ALLOCATED", "LOADING", "RUNNING", "DONE", "ABORTED"])
@pytest.mark.parametrize("call", CALLS)
def test_a_call_at_the_wrong_time_changes_nothing(call: str, state: str) -> None:
    """Each call of the ledger is refused in every state that does not allow it, by a `WrongState` that names it."""
    driven = Driven(num_device=8)
    tokens = prompt(1, 9)
    driven.on_host_only(tokens)
    request = driven.admit(tokens)
    if state != "PINNED":
        driven.ledger.allocate_nowait(request)
    plans = driven.ledger.plan_load(request) if state in ("LOADING", "RUNNING", "DONE") else ()
    if state in ("RUNNING", "DONE"):
        driven.land(plans)
    if state in ("DONE", "ABORTED"):
        if state == "DONE":
            driven.commit(request)
        driven.release(request)
    assert request.state.name == state
    allowed, function = CALLS[call]
    if state in allowed.split():
        function(driven.ledger, request)
        return
    before = driven.picture()
    with pytest.raises(WrongState, match=state):
        function(driven.ledger, request)
    assert driven.picture() == before
    assert request.state.name == state


def test_every_move_is_told_once() -> None:
    """The observer hears of every move, with the state that was left, after it happened."""
    moves: list[str] = []

    class Witness:
        def observe(self, event: Event) -> None:
            if isinstance(event, RequestMoved | JobMoved):
                kind = "job " if isinstance(event, JobMoved) else ""
                moves.append(f"{kind}{event.old.name}>{event.new.name} {event.reason}".strip())

    driven = Driven(num_device=8, observer=Witness())
    driven.serve(prompt(1, 9))
    driven.release(driven.admit(prompt(2, 9)), "deadline")
    assert moves == [
        "QUEUED>MATCHED", "MATCHED>PINNED", "PINNED>ALLOCATED", "ALLOCATED>RUNNING", "RUNNING>DONE",
        "job QUEUED>LAUNCHED", "job LAUNCHED>COMPLETED landed",
        "QUEUED>MATCHED", "MATCHED>PINNED", "PINNED>ABORTED deadline",
    ]  # fmt: skip


def mermaid(moves: Mapping[State, frozenset[State]]) -> str:
    """A table as a Mermaid state diagram."""
    lines = ["stateDiagram-v2", f"    [*] --> {next(iter(moves)).name}"]
    for old, targets in moves.items():
        lines += [f"    {old.name} --> {new.name}" for new in type(old) if new in targets]
        if not targets:
            lines.append(f"    {old.name} --> [*]")
    return "\n".join(lines)


def test_the_diagrams_in_the_documentation_are_the_tables() -> None:
    """docs/lifecycle.md shows exactly the tables, and a line on every state."""
    text = PAGE.read_text()
    shown = re.findall(r"```mermaid\n(.*?)```", text, re.DOTALL)
    assert shown == [mermaid(moves) + "\n" for moves in TABLES.values()]
    for state in (*RequestState, *JobState, *PinState, *CacheTransferState, *OverlapState):
        assert f"\n`{state.name}` | " in text, f"docs/lifecycle.md says nothing about {state.name}"
