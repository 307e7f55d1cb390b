"""Steps: forwards over several requests, which hold their blocks and commit their results together."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, ExitStack
from typing import TypeVar

import attrs

from .arguments import as_tuple, check_callable, check_type, shown
from .core.lifecycle import RequestState
from .core.owners import Holding
from .errors import InvalidArgument, WrongState
from .loading import PendingLoad
from .prefix import TokenIds
from .request import Request
from .session import Session
from .transfer.fence import Fence

__all__ = ["Computed", "commit_step", "hold", "run_step"]

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
    held: list[Holding] = []
    arriving: list[Holding] = []
    for one in as_tuple("requests", requests, "Request or PendingLoad"):
        if isinstance(one, PendingLoad):
            arriving.append(one._arriving(session))
        else:
            held.append(_own(session, "requests", one)._live())
    session.worker.step_begins()
    return session.ledger.step(held, arriving)


async def run_step(
    session: Session, requests: Iterable[Request | PendingLoad], function: Callable[[], Result]
) -> Result:
    """Run `function` in a worker thread; the step belongs to the thread. See `OffloadRuntime.run_step`."""
    check_callable("function", function)
    with ExitStack() as stack:
        stack.enter_context(hold(session, requests))
        held = stack.pop_all()
    begun = threading.Lock()  # taken by the thread, or by a task that gives up before the thread has begun

    def compute() -> Result:
        if not begun.acquire(blocking=False):
            raise WrongState("nobody waits for this step any more")
        try:
            return function()
        finally:
            session.worker.call_soon(held.close)

    try:
        return await session.env.run_in_thread(compute)
    finally:
        if begun.acquire(blocking=False):
            held.close()
        else:
            session.worker.drain()  # a thread that has ended has queued `held.close`: call it now


def commit_step(session: Session, computed: Iterable[Computed], after: Fence | None) -> None:
    """Commit all of `computed` behind one fence, or nothing. See `OffloadRuntime.commit_step`."""
    session.check_usable()
    each = [check_type("computed", one, Computed) for one in as_tuple("computed", computed, "Computed")]
    for one in each:
        _own(session, "computed", one.request)
    there = [(one.request._live(), one) for one in each if one.request.state not in GONE]
    if len({holding for holding, _ in there}) < len(there):
        raise InvalidArgument("computed", "names a request twice")
    for holding, one in there:
        session.ledger.check_commit(holding, one.num_computed_tokens, one.new_token_ids)
    fence = session.fence_after(after)
    for holding, one in there:
        session.commit_behind(fence, holding, one.num_computed_tokens, one.new_token_ids)


def _own(session: Session, name: str, request: object) -> Request:
    if not isinstance(request, Request) or request._session is not session:
        raise InvalidArgument(name, f"holds what is no request of this runtime: {shown(request)}")
    return request
