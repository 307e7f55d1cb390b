"""Steps: forwards over several requests, which hold their blocks and commit their results together."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from inspect import iscoroutinefunction
from threading import get_ident
from types import TracebackType
from typing import TypeVar

import attrs

from .._arguments import as_tuple, check_callable, check_type, shown
from .._kernel.prefix import TokenIds
from .._kernel.requests import LedgerRequest
from .._kernel.states import Computing, RequestState
from .._transfer.fences import Fence
from ..errors import InvalidArgument, WrongState
from .loading import PendingLoad
from .request import Request
from .session import Session

__all__ = ["Computed", "StepScope", "commit_step", "hold", "run_step"]


Result = TypeVar("Result")
GONE = (RequestState.DONE, RequestState.ABORTED, RequestState.PREEMPTED)


@attrs.frozen
class Computed:
    """The result of one forward for one request, for `commit_step`."""

    request: Request
    num_computed_tokens: int
    new_token_ids: TokenIds = ()


def hold(session: Session, requests: Iterable[Request | PendingLoad]) -> AbstractContextManager[None]:
    """A context manager that holds the blocks of `requests` during a forward."""
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
    return _held(session, held, arriving)


class StepScope:
    """Returned by `OffloadRuntime.step`; enter it once, with `with`. Any thread may leave it; the step ends in the
    event loop's thread."""

    def __init__(self, session: Session, requests: Iterable[Request | PendingLoad]) -> None:
        self._session = session
        self._requests = requests
        self._held: AbstractContextManager[None] | None = None
        self._was_entered = self._is_over = False

    def __enter__(self) -> None:
        if self._was_entered:
            raise WrongState("step: this one was entered before: make another one")
        self._was_entered = True
        held = hold(self._session, self._requests)
        held.__enter__()
        self._held = held

    def __exit__(
        self, exc_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        held = self._held
        if held is not None and not self._is_over:
            self._is_over = True
            self._session.leave_in_loop(lambda: _end(held))

    def __del__(self) -> None:
        held = self._held
        if held is None:
            if not self._was_entered and self._session.is_open:
                warnings.warn("a step was never entered, and holds nothing: use `with`", ResourceWarning, stacklevel=2)
        elif not self._is_over:
            self._session.call_later(lambda: _end(held))  # before the warning, which may raise
            warnings.warn("a step was abandoned: leave its with block", ResourceWarning, stacklevel=2, source=self)


def _end(held: AbstractContextManager[None]) -> None:
    held.__exit__(None, None, None)


@contextmanager
def _held(session: Session, held: Iterable[LedgerRequest], arriving: Iterable[LedgerRequest]) -> Iterator[None]:
    with session.ledger.step(held, arriving):
        try:
            yield
        finally:
            session.step_ends()


async def run_step(
    session: Session, requests: Iterable[Request | PendingLoad], function: Callable[[], Result]
) -> Result:
    """Run `function` in a worker thread; the step belongs to the thread. See `OffloadRuntime.run_step`."""
    check_callable("function", function)
    if iscoroutinefunction(function):
        raise InvalidArgument("function", f"must compute in a thread, {shown(function)} is async")
    with ExitStack() as stack:
        stack.enter_context(hold(session, requests))
        held = ThreadStep(stack.pop_all())

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
    """A step that its task ends, so that nobody can take the blocks before the task goes on: it commits first. If the
    task has left before the thread is through, the loop ends the step behind the thread."""

    held: ExitStack
    _begun: threading.Lock = attrs.field(factory=threading.Lock)
    """Taken by the thread, or by a task that leaves before the thread has begun."""
    _computed: threading.Event = attrs.field(factory=threading.Event)
    _has_left: bool = False

    def begin(self) -> None:
        if not self._begun.acquire(blocking=False):
            raise WrongState("nobody waits for this step any more")

    def computed(self) -> bool:
        """The thread is through; whether the task has left, so that somebody else has to end the step."""
        self._computed.set()
        return self._has_left

    def leave(self) -> None:
        self._has_left = True
        if self._begun.acquire(blocking=False) or self._computed.is_set():
            self.end()

    def end(self) -> None:
        """Once: if both sides see that the other one is through, the second time does nothing."""
        self.held.close()


def commit_step(session: Session, computed: Iterable[Computed], after: Fence | None) -> tuple[Request, ...]:
    """Commit all of `computed` behind one fence, or nothing. See `OffloadRuntime.commit_step`."""
    session.check_usable()
    each = [check_type("computed", one, Computed) for one in as_tuple("computed", computed, "Computed")]
    gone = tuple(one.request for one in each if _is_gone(_own(session, "computed", one.request)))
    there = [(one.request._live(), one) for one in each if one.request not in gone]
    seen: set[LedgerRequest] = set()
    for record, one in there:
        if record in seen:
            raise InvalidArgument("computed", f"names {record} twice")
        seen.add(record)
        try:
            session.ledger.check_commit(record, one.num_computed_tokens, one.new_token_ids)
        except InvalidArgument as error:  # the error has to say which of the requests is meant
            raise type(error)(error.argument, f"{error.problem} ({record})") from error
    fence = session.fence_after(after)
    for record, one in there:
        session.commit_behind(fence, record, one.num_computed_tokens, one.new_token_ids)
    return gone


def _is_gone(request: Request) -> bool:
    """Whether what was computed for it has nowhere to go: it is over, or has given up the blocks of its step."""
    record = request._record
    is_lost = record is not None and record.computing is Computing.LOST_BLOCKS
    return is_lost or request.state in GONE


def _own(session: Session, name: str, request: object) -> Request:
    if not isinstance(request, Request) or request._session is not session:
        raise InvalidArgument(name, f"holds what is no request of this runtime: {shown(request)}")
    return request
