"""The states of requests and jobs, as tables.

Every entity with a life (a request, a job, ...) has one state. A table says which states may follow which, and `Moves`
refuses any other move. So a state is never a combination of flags, and an illegal call names the state.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Any, Final, Protocol, TypeAlias

from ..errors import WrongState


class Plain(enum.Enum):
    """Base of enums that are hashed often: the hash of `Enum` is a Python function, that of `object` is not."""

    __hash__ = object.__hash__  # differs between processes; harmless, because no set of these members is iterated


class Direction(Plain):
    """The direction of a copy: a load goes up the tiers, a store down."""

    LOAD = "load"
    STORE = "store"


class Outcome(Plain):
    """How a transfer ended. Only `UNPROVEN` leaves its destination in doubt."""

    LANDED = "landed"
    """Every block is proven at its destination. `num_landed` is the number of all blocks, or 0. With any other number,
    the outcome counts as FAILED; with corrupt blocks, as CORRUPT."""
    FAILED = "failed"
    """The copy is over for certain, but only the leading `num_landed` blocks are proven. The outcome says nothing about
    the source."""
    CORRUPT = "corrupt"
    """The copy is over for certain. The blocks at `corrupt` differ from the bytes that were stored. The first
    `num_landed` blocks, all before the corrupt ones, are proven."""
    UNPROVEN = "unproven"
    """The copy may still be writing: its destination is quarantined."""
    REFUSED = "refused"
    """Nothing was copied, because the lower tier failed lately and is not tried for a while. The ledger treats this
    outcome as FAILED."""


class RequestState(Plain):
    """The states of a request (docs/lifecycle.md)."""

    QUEUED = "queued"
    """The request is created, and not matched yet."""
    MATCHED = "matched"
    """A request stays here only in a `HostCache`, while its match is `PENDING` and it has no leases."""
    PINNED = "pinned"
    """The hit is leased; there are no blocks for the rest."""
    ALLOCATED = "allocated"
    LOADING = "loading"
    DRAINING = "draining"
    """The load fell short, and the request has to give up its blocks, but a step still uses them."""
    REQUEUED = "requeued"
    """The load fell short, and the request has given up its blocks. It waits for blocks again, at its old place."""
    STRANDED = "stranded"
    """The request was REQUEUED, and its wait has failed, because it can never fit."""
    RUNNING = "running"
    PREEMPTED = "preempted"
    DONE = "done"
    ABORTED = "aborted"


class JobState(Plain):
    """The states of a job, which is one copy (docs/lifecycle.md)."""

    QUEUED = "queued"
    LAUNCHED = "launched"
    COMPLETED = "completed"
    FAILED = "failed"
    DISCARDED = "discarded"


class Computing(enum.Enum):
    """The blocks into which the last step of a request computes KV that is not committed yet."""

    NOTHING = "nothing"
    """There was no step, or all of it is committed."""
    ITS_BLOCKS = "its blocks"
    """The blocks in its tables: a commit publishes them."""
    LOST_BLOCKS = "lost blocks"
    """Blocks that it has given up in a preemption since the step began: nothing of the step can be committed."""


class NoEpoch(enum.Enum):
    """Stands in place of an epoch. It equals no epoch, so nothing of the job or the request is published."""

    INVALIDATED = "invalidated"
    """The request may have read wrong KV, or the blocks of the job are wrong or were withdrawn."""
    ORPHANED = "orphaned"
    """A reset of the device tier has made the blocks of the request unfindable, or the weights have changed since it
    began. Only requests have this value."""


# The members as constants: see `_common/tiers`.
QUEUED: Final = RequestState.QUEUED
MATCHED: Final = RequestState.MATCHED
PINNED: Final = RequestState.PINNED
ALLOCATED: Final = RequestState.ALLOCATED
LOADING: Final = RequestState.LOADING
DRAINING: Final = RequestState.DRAINING
REQUEUED: Final = RequestState.REQUEUED
STRANDED: Final = RequestState.STRANDED
RUNNING: Final = RequestState.RUNNING
PREEMPTED: Final = RequestState.PREEMPTED
DONE: Final = RequestState.DONE
ABORTED: Final = RequestState.ABORTED
JOB_QUEUED: Final = JobState.QUEUED
JOB_LAUNCHED: Final = JobState.LAUNCHED
JOB_COMPLETED: Final = JobState.COMPLETED
JOB_FAILED: Final = JobState.FAILED
JOB_DISCARDED: Final = JobState.DISCARDED
LOAD: Final = Direction.LOAD
STORE: Final = Direction.STORE
LANDED: Final = Outcome.LANDED
FAILED: Final = Outcome.FAILED
CORRUPT: Final = Outcome.CORRUPT
UNPROVEN: Final = Outcome.UNPROVEN
REFUSED: Final = Outcome.REFUSED
COMPUTES_NOTHING: Final = Computing.NOTHING
COMPUTES_ITS_BLOCKS: Final = Computing.ITS_BLOCKS
COMPUTES_LOST_BLOCKS: Final = Computing.LOST_BLOCKS

_R = RequestState
_J = JobState

State: TypeAlias = enum.Enum
"""A state of any kind."""

REQUEST_MOVES: Mapping[State, frozenset[State]] = {
    _R.QUEUED: frozenset({_R.MATCHED, _R.ABORTED}),
    _R.MATCHED: frozenset({_R.PINNED, _R.ABORTED}),
    _R.PINNED: frozenset({_R.MATCHED, _R.ALLOCATED, _R.ABORTED}),
    _R.ALLOCATED: frozenset({_R.LOADING, _R.RUNNING, _R.PREEMPTED, _R.ABORTED}),
    _R.LOADING: frozenset({_R.DRAINING, _R.REQUEUED, _R.RUNNING, _R.ABORTED}),
    _R.DRAINING: frozenset({_R.REQUEUED, _R.RUNNING, _R.ABORTED}),
    _R.REQUEUED: frozenset({_R.ALLOCATED, _R.STRANDED, _R.PREEMPTED, _R.ABORTED}),
    _R.STRANDED: frozenset({_R.PREEMPTED, _R.ABORTED}),
    _R.RUNNING: frozenset({_R.REQUEUED, _R.DONE, _R.PREEMPTED, _R.ABORTED}),
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


class Stateful(Protocol):
    """A request, a job, or an entity of an extension."""

    state: Any


_COMES_FIRST: Mapping[State, str] = {
    _R.MATCHED: "call `match_again` first, until the match is no longer pending",
    _R.PINNED: "call `allocate` first, and await it",
    _R.ALLOCATED: "call `load` first, and await it",
    _R.LOADING: "wait first until its load is over",
    _R.DRAINING: "wait first until its load is over",
    _R.REQUEUED: "wait first until its load is over",
    _R.PREEMPTED: "call `resume` first, and await it",
}
"""Advice in the error of `require`, by state: the next call towards a state with blocks. The advice says "await" for
users of the runtime; calls of a `Ledger` are not awaited."""
_TOO_LATE: Mapping[State, str] = {
    _R.STRANDED: "it has given up its blocks: leave it, or `preempt` and `resume` it",
    _R.DONE: "it is over",
    _R.ABORTED: "it is over",
}


def require(entity: Stateful, call: str, *states: State, instead: str = "") -> None:
    """Refuse `call` unless `entity` is in one of `states`. The error says what to do `instead`. By default,
    the error names the call that the caller has left out, according to the table of moves."""
    if entity.state not in states:
        allowed = " or ".join(state.name for state in states)
        advice = instead or _instead(call, entity.state, states)
        raise WrongState(f"{call}: {entity} is {entity.state.name}, but must be {allowed}{advice and ': '}{advice}")


def _instead(call: str, state: State, states: tuple[State, ...]) -> str:
    """What to do instead, if the table of moves has a path from `state` to one of `states`. Paths through a preemption
    do not count, because a caller does not forget to preempt."""
    if state in _TOO_LATE:
        return _TOO_LATE[state]
    reached, ways = {state}, [state] if state in _COMES_FIRST else []
    for at in ways:  # the loop appends to it
        for new in REQUEST_MOVES[at]:
            if new in states:
                return _COMES_FIRST[state]
            if new is not _R.PREEMPTED and new not in reached:
                reached.add(new)
                ways.append(new)
    has_blocks = state in (_R.ALLOCATED, _R.RUNNING)
    return "it has its blocks: call `extend` for more" if call == "allocate" and has_blocks else ""


is_compiled: bool = not __file__.endswith((".py", ".pyc"))
"""Whether this file runs as a compiled extension (docs/compiled.md)."""
