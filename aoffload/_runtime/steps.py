"""Steps: forwards over several requests, which hold their blocks and commit their results together.

A step holds blocks from its begin to its end, even if a request of it ends meanwhile, because the forward may still
read or write them. The ledger's step begins and ends in the event loop's thread; the forward may run in any thread:

    runtime.step       a `with` block. Any thread may leave it; the step ends in the loop's thread
    runtime.run_step   a function in a worker thread. The step belongs to the thread: a natively cancelled task leaves
                       while its thread still computes, and the step must not end before the thread has finished. If the
                       task waits to the end, the task ends the step, so it can commit before another task preempts

At its end a step records a fence, before its blocks become free: a load into one of these blocks waits for this fence.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from functools import partial
from inspect import iscoroutinefunction
from threading import get_ident
from types import TracebackType
from typing import TypeVar

import attrs

from .._common.arguments import as_tuple, check_callable, check_type, shown
from .._common.prefix import TokenIds
from .._extensions.assembly import Ledger
from .._kernel.records import LedgerRequest
from .._kernel.states import ABORTED, COMPUTES_LOST_BLOCKS, DONE, PREEMPTED
from .._transfer.fences import Fence
from ..errors import CommitError, InvalidArgument, WrongState
from .loading import PendingLoad
from .request import Request, commit_all
from .session import Session

Result = TypeVar("Result")
LedgerStep = AbstractContextManager[None]
GONE = (DONE, ABORTED, PREEMPTED)


@attrs.frozen
class Computed:
    """The result of one forward for one request, for `commit_step`."""

    request: Request
    num_computed_tokens: int
    new_token_ids: TokenIds = ()
    checkpoints: Iterable[int] = ()
    """See `Request.commit`."""


def _begin(session: Session[Ledger], requests: Iterable[Request | PendingLoad]) -> LedgerStep:
    """Hold the blocks of `requests` until `_end`."""
    session.check_usable()
    held: list[LedgerRequest] = []
    arriving: list[LedgerRequest] = []
    for one in as_tuple("requests", requests, "Request or PendingLoad"):
        if isinstance(one, PendingLoad):
            arriving.append(one._arriving(session))
        else:
            held.append(_own(session, "requests", one)._live())
    session.worker.step_begins()
    if session.speed is not None:
        session.speed.begins([record.request_id for record in (*held, *arriving)], session.now())
    step = session.ledger.overlap.step(held, arriving) if arriving else session.ledger.step(held)
    step.__enter__()
    return step


def _end(session: Session[Ledger], step: LedgerStep) -> None:
    try:
        if session.step_fences is not None:
            session.step_fences.ended(session.ledger.num_steps_ended + 1, session.fence_after(None))
    finally:
        step.__exit__(None, None, None)


class StepScope:
    """Returned by `OffloadRuntime.step`; enter it once, with `with`. Any thread may leave it; the step ends in the
    event loop's thread."""

    def __init__(self, session: Session[Ledger], requests: Iterable[Request | PendingLoad]) -> None:
        self._session = session
        self._requests = requests
        self._step: LedgerStep | None = None
        self._was_entered = self._is_over = False

    def __enter__(self) -> None:
        if self._was_entered:
            raise WrongState("step: this step was entered before: make another one")
        self._was_entered = True
        self._step = _begin(self._session, self._requests)

    def __exit__(
        self, exc_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._step is not None and not self._is_over:
            self._is_over = True
            self._session.leave_in_loop(partial(_end, self._session, self._step))

    def __del__(self) -> None:
        step = self._step
        if step is None:
            if not self._was_entered and self._session.is_open:
                warnings.warn("a step was never entered, and holds nothing: use `with`", ResourceWarning, stacklevel=2)
        elif not self._is_over:
            self._session.call_later(partial(_end, self._session, step))  # before the warning, which may raise
            warnings.warn("a step was abandoned: leave its with block", ResourceWarning, stacklevel=2, source=self)


async def run_step(
    session: Session[Ledger], requests: Iterable[Request | PendingLoad], function: Callable[[], Result]
) -> Result:
    """Run `function` in a worker thread; the step belongs to the thread. See `OffloadRuntime.run_step`."""
    check_callable("function", function)
    if iscoroutinefunction(function):
        raise InvalidArgument(
            "function", f"must be a plain function, because it runs in a thread, but {shown(function)} is async"
        )
    held = ThreadStep(session, _begin(session, requests))

    def compute() -> Result:
        held.begin()
        session.step_threads.add(get_ident())
        try:
            return function()
        finally:
            session.step_threads.discard(get_ident())
            if held.computed():
                session.worker.call_soon(held.end)

    try:
        return await session.env.run_in_thread(compute)
    finally:
        held.leave()


@attrs.define(eq=False)
class ThreadStep:
    """A step that its task ends, so that no other task can take the blocks before this task continues and commits. If
    the task has left before the thread has finished, the event loop ends the step after the thread."""

    session: Session[Ledger]
    step: LedgerStep
    _begun: threading.Lock = attrs.field(factory=threading.Lock)
    """Taken by the thread, or by a task that leaves before the thread has begun."""
    _computed: threading.Event = attrs.field(factory=threading.Event)
    _has_left: bool = False
    _is_over: bool = False

    def begin(self) -> None:
        if not self._begun.acquire(blocking=False):
            raise WrongState("the task of this step has left the step before its function could run")

    def computed(self) -> bool:
        """Called when the thread has finished. Returns whether the task has left: then the event loop has to end the
        step."""
        self._computed.set()
        return self._has_left

    def leave(self) -> None:
        self._has_left = True
        if self._begun.acquire(blocking=False) or self._computed.is_set():
            self.end()

    def end(self) -> None:
        """End the step. A second call does nothing, because the task and the thread may each find that the other has
        finished."""
        if not self._is_over:
            self._is_over = True
            _end(self.session, self.step)


def commit_step(session: Session[Ledger], computed: Iterable[Computed], after: Fence | None) -> tuple[Request, ...]:
    """Commit all of `computed` after one fence, or nothing. See `OffloadRuntime.commit_step`."""
    session.check_usable()
    each = [check_type("computed", one, Computed) for one in as_tuple("computed", computed, "Computed")]
    gone = tuple(one.request for one in each if _is_gone(_own(session, "computed", one.request)))
    there = [(one.request._live(), one) for one in each if one.request not in gone]
    seen: set[LedgerRequest] = set()
    commits: list[tuple[LedgerRequest, int, TokenIds, tuple[int, ...]]] = []
    for record, one in there:
        if record in seen:
            raise InvalidArgument("computed", f"names {record} twice")
        seen.add(record)
        try:
            written = as_tuple("checkpoints", one.checkpoints, "int", CommitError)
            session.ledger.check_commit(record, one.num_computed_tokens, one.new_token_ids, written)
        except InvalidArgument as error:  # name the request in the error
            raise type(error)(error.argument, f"{error.problem} ({record})") from error
        commits.append((record, one.num_computed_tokens, one.new_token_ids, written))
    commit_all(session, commits, session.fence_after(after))
    return gone


def _is_gone(request: Request) -> bool:
    """Whether the KV computed for it is lost: the request is over, or has given up the blocks of its step."""
    record = request._record
    is_lost = record is not None and record.computing is COMPUTES_LOST_BLOCKS
    return is_lost or request.state in GONE


def _own(session: Session[Ledger], name: str, request: object) -> Request:
    if not isinstance(request, Request) or request._session is not session:
        raise InvalidArgument(name, f"contains an object that is not a request of this runtime: {shown(request)}")
    return request
