"""The states of requests, jobs, pins, errands and early starts, as tables; one function moves them.

`python -m aoffload.core.lifecycle` prints the diagrams that docs/lifecycle.md shows.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol, TypeAlias

import attrs

from ..errors import IllegalTransition, WrongState

if TYPE_CHECKING:
    from .early import EarlyStart
    from .errands import Errand
    from .holding import Holding
    from .jobs import Job
    from .keeping import Pin

__all__ = [
    "EARLY_MOVES",
    "ERRAND_MOVES",
    "JOB_MOVES",
    "PIN_MOVES",
    "REQUEST_MOVES",
    "EarlyState",
    "ErrandState",
    "JobState",
    "Moves",
    "NullObserver",
    "Observer",
    "PinState",
    "RequestState",
    "mermaid",
    "move",
    "require",
]


class _State(enum.Enum):
    __hash__ = object.__hash__  # that of enums is Python. Nobody goes through a set of them, so their order can differ


class RequestState(_State):
    QUEUED = "queued"
    MATCHED = "matched"
    PINNED = "pinned"
    ALLOCATED = "allocated"
    LOADING = "loading"
    RUNNING = "running"
    PREEMPTED = "preempted"
    DONE = "done"
    ABORTED = "aborted"


class JobState(_State):
    QUEUED = "queued"
    LAUNCHED = "launched"
    COMPLETED = "completed"
    FAILED = "failed"
    DISCARDED = "discarded"


class PinState(_State):
    NEW = "new"
    HELD = "held"
    RELEASED = "released"
    LAPSED = "lapsed"
    YIELDED = "yielded"
    DROPPED = "dropped"


class ErrandState(_State):
    NEW = "new"
    MOVING = "moving"
    DONE = "done"
    CANCELLED = "cancelled"


class EarlyState(_State):
    NEW = "new"
    TRUSTING = "trusting"
    CONFIRMED = "confirmed"
    REFUTED = "refuted"
    TOLD = "told"


_R = RequestState
_J = JobState
_P = PinState
_E = ErrandState
_S = EarlyState
State: TypeAlias = RequestState | JobState | PinState | ErrandState | EarlyState

REQUEST_MOVES: Mapping[State, frozenset[State]] = {
    _R.QUEUED: frozenset({_R.MATCHED, _R.ABORTED}),
    _R.MATCHED: frozenset({_R.PINNED, _R.ABORTED}),
    _R.PINNED: frozenset({_R.ALLOCATED, _R.ABORTED}),
    _R.ALLOCATED: frozenset({_R.LOADING, _R.RUNNING, _R.ABORTED}),
    _R.LOADING: frozenset({_R.RUNNING, _R.ABORTED}),
    _R.RUNNING: frozenset({_R.DONE, _R.PREEMPTED, _R.ABORTED}),
    _R.PREEMPTED: frozenset({_R.MATCHED, _R.ABORTED}),
    _R.DONE: frozenset(),
    _R.ABORTED: frozenset(),
}
JOB_MOVES: Mapping[State, frozenset[State]] = {
    _J.QUEUED: frozenset({_J.LAUNCHED, _J.DISCARDED}),
    _J.LAUNCHED: frozenset({_J.COMPLETED, _J.FAILED}),
    _J.COMPLETED: frozenset(),
    _J.FAILED: frozenset(),
    _J.DISCARDED: frozenset(),
}
PIN_MOVES: Mapping[State, frozenset[State]] = {
    _P.NEW: frozenset({_P.HELD}),
    _P.HELD: frozenset({_P.RELEASED, _P.LAPSED, _P.YIELDED, _P.DROPPED}),
    _P.RELEASED: frozenset(),
    _P.LAPSED: frozenset(),
    _P.YIELDED: frozenset(),
    _P.DROPPED: frozenset(),
}
ERRAND_MOVES: Mapping[State, frozenset[State]] = {
    _E.NEW: frozenset({_E.MOVING, _E.DONE}),
    _E.MOVING: frozenset({_E.DONE, _E.CANCELLED}),
    _E.DONE: frozenset(),
    _E.CANCELLED: frozenset(),
}
EARLY_MOVES: Mapping[State, frozenset[State]] = {
    _S.NEW: frozenset({_S.TRUSTING}),
    _S.TRUSTING: frozenset({_S.CONFIRMED, _S.REFUTED}),
    _S.CONFIRMED: frozenset(),
    _S.REFUTED: frozenset({_S.TOLD}),
    _S.TOLD: frozenset(),
}
_MOVES: Mapping[State, frozenset[State]] = {**REQUEST_MOVES, **JOB_MOVES, **PIN_MOVES, **ERRAND_MOVES, **EARLY_MOVES}


class Stateful(Protocol):
    state: State


def move(entity: Holding | Job | Pin | Errand | EarlyStart, new: State) -> State:
    """Move `entity` to `new` and return the state it left; an illegal move raises and changes nothing."""
    old = entity.state
    if new not in _MOVES[old]:
        raise IllegalTransition(str(entity), old.name, new.name)
    entity.state = new
    return old


def require(entity: Holding | Job, call: str, *states: State) -> None:
    """Refuse `call` unless `entity` is in one of `states`."""
    if entity.state not in states:
        allowed = " or ".join(state.name for state in states)
        raise WrongState(f"{call}: {entity} is {entity.state.name}, and that takes {allowed}")


class Observer(Protocol):
    """Who wants to know of every move: the telemetry. Called after the change; must not call back."""

    def request_moved(self, holding: Holding, old: RequestState, reason: str) -> None: ...
    def job_moved(self, job: Job, old: JobState, reason: str) -> None: ...
    def store_skipped(self, holding: Holding | None, num_blocks: int, reason: str) -> None:
        """`holding` is None for what would have been stored because it is about to be evicted."""

    def pin_moved(self, pin: Pin, old: PinState) -> None: ...
    def errand_moved(self, errand: Errand, old: ErrandState) -> None: ...
    def early_moved(self, early: EarlyStart, old: EarlyState) -> None: ...


class NullObserver:
    """Nobody wants to know."""

    def request_moved(self, holding: Holding, old: RequestState, reason: str) -> None: ...
    def job_moved(self, job: Job, old: JobState, reason: str) -> None: ...
    def store_skipped(self, holding: Holding | None, num_blocks: int, reason: str) -> None: ...
    def pin_moved(self, pin: Pin, old: PinState) -> None: ...
    def errand_moved(self, errand: Errand, old: ErrandState) -> None: ...
    def early_moved(self, early: EarlyStart, old: EarlyState) -> None: ...


@attrs.frozen
class Moves:
    """Moves states, and tells whoever wants to know."""

    observer: Observer

    def request(self, holding: Holding, state: RequestState) -> None:
        old = move(holding, state)
        self.observer.request_moved(holding, old, holding.reason)  # type: ignore[arg-type]

    def job(self, job: Job, state: JobState, reason: str = "") -> None:
        old = move(job, state)
        self.observer.job_moved(job, old, reason)  # type: ignore[arg-type]

    def pin(self, pin: Pin, state: PinState) -> None:
        self.observer.pin_moved(pin, move(pin, state))  # type: ignore[arg-type]

    def errand(self, errand: Errand, state: ErrandState) -> None:
        self.observer.errand_moved(errand, move(errand, state))  # type: ignore[arg-type]

    def early(self, early: EarlyStart, state: EarlyState) -> None:
        self.observer.early_moved(early, move(early, state))  # type: ignore[arg-type]


def mermaid(moves: Mapping[State, frozenset[State]]) -> str:
    """A table as a Mermaid state diagram."""
    lines = ["stateDiagram-v2", f"    [*] --> {next(iter(moves)).name}"]
    for old, targets in moves.items():
        lines += [f"    {old.name} --> {new.name}" for new in type(old) if new in targets]
        if not targets:
            lines.append(f"    {old.name} --> [*]")
    return "\n".join(lines)


if __name__ == "__main__":
    print(*map(mermaid, (REQUEST_MOVES, JOB_MOVES, PIN_MOVES, ERRAND_MOVES, EARLY_MOVES)), sep="\n\n")
