"""The `async with` block of a request: how it is entered, left and cancelled, and how its methods wait."""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import Any, Self
from weakref import ref

import anyio

from .arguments import check_text
from .core.answer import NO_MATCH, PrefixMatch
from .core.lifecycle import RequestState, require
from .core.owners import Holding
from .errors import RequestAborted, RuntimeClosed, WrongState
from .prefix import LongList, Prefix
from .scopes import is_cancellation, may_be_suspended
from .session import RequestOptions, Session

__all__ = ["RequestBlock"]

WITH_TABLES = (
    RequestState.ALLOCATED, RequestState.LOADING, RequestState.DRAINING, RequestState.RUNNING, RequestState.REQUEUED,
    RequestState.STRANDED, RequestState.PREEMPTED,
)  # fmt: skip
"""States with block tables, which are empty once the request has given up its blocks."""


class RequestBlock:
    """Holds what a request has until the block ends, and no longer. `Request` says what its scope does."""

    def __init__(self, session: Session, prompt: Prefix | LongList, options: RequestOptions) -> None:
        self._session = session
        self._runtime: object = None
        """The runtime that opened the session. A reference keeps it open as long as this request exists."""
        self._prompt = prompt
        self._options = options
        self._prefix: Prefix
        """The prompt, once it is entered."""
        self._holding: Holding | None = None
        self._deadline = math.inf
        self._scope: anyio.CancelScope | None = None
        """Around the entered block; None in an async generator."""
        self._cancel_reason = ""
        self._aborted: RequestAborted | None = None
        """The error raised in a block without a scope."""
        self._stop_timer: Callable[[], object] = _nothing
        self._waiting: set[anyio.Event] = set()
        """One event per task that waits in a method of this request."""

    def __repr__(self) -> str:
        return f"<Request {self.request_id!r} {self.state.name}>"

    # -- life cycle -----------------------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        is_scoped = not may_be_suspended(sys._getframe(1))
        self._session.check_loop(self._session.env.running_loop())
        bound_s = self._options.deadline_s
        deadline = None if bound_s is None else anyio.current_time() + bound_s
        prefix = self._prompt if isinstance(self._prompt, Prefix) else await _read(self._prompt)
        if self._holding is not None:
            raise WrongState(f"request {self.request_id} was entered before: open another one")
        self._prefix = prefix
        self._holding = self._session.admit(self, prefix, self._options)
        self._task_id = id(self._session.running_task())
        if deadline is not None and deadline < math.inf:
            self._deadline = deadline
            self._start_timer(deadline)
        if is_scoped:
            self._enter_scope(deadline)
        elif self._cancel_reason:
            self._close(self._cancel_reason)
        return self

    def _enter_scope(self, deadline: float | None) -> None:
        self._scope = scope = anyio.CancelScope(deadline=math.inf if deadline is None else deadline)
        if self._cancel_reason:
            self._cancel_scope(scope)
        scope.__enter__()

    def _start_timer(self, deadline: float) -> None:
        """Also beside a scope, which tells nobody that its deadline has passed: its task may wait for a thread."""
        late = partial(_expire, ref(self))
        self._stop_timer = self._session.env.call_at(deadline, partial(self._session.worker.call_soon, late))

    async def __aexit__(
        self, exc_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if self._session.is_in_fork:
            return False  # the request belongs to the parent, and this is a copy of it
        if self._session.is_elsewhere:
            self._session.call_in_loop(partial(self._left_elsewhere, self._why(error)))
            warnings.warn(f"{self!r} was left in another thread than it was entered in", ResourceWarning, stacklevel=2)
            return False
        # First and synchronously: nothing after this can keep blocks held, not even a second cancellation.
        self._close(self._why(error))
        self._stop_timer()
        scope, is_elsewhere = self._scope, id(self._session.running_task()) != self._task_id
        if is_elsewhere and (scope is not None or isinstance(error, GeneratorExit)):
            warnings.warn(f"{self!r} was left in another task than it was entered in", ResourceWarning, stacklevel=2)
        if scope is None:
            return error is not None and error is self._aborted
        if is_elsewhere:
            scope.deadline = math.inf  # it stays around a task that no longer serves this request
            return False
        return bool(scope.__exit__(exc_type, error, trace))

    def _left_elsewhere(self, reason: str) -> None:
        """End the block in the event loop's thread. The scope stays entered in the task that entered it."""
        self._close(reason)
        self._stop_timer()
        if self._scope is not None:
            self._scope.deadline = math.inf

    def __del__(self) -> None:
        holding = self._holding
        if holding is not None and not holding.is_over:
            self._session.abandon(holding, self._scope)  # first: a warning may be an error
            warnings.warn(
                f"{self!r} was abandoned: leave its async with block", ResourceWarning, stacklevel=2, source=self
            )

    def _why(self, error: BaseException | None) -> str:
        """The reason to release with, when the block ends with `error`. `closed_early` is DONE after a commit."""
        if self._cancel_reason:
            return self._cancel_reason
        if error is None:
            return "closed_early"
        if self._scope is not None and self._scope.cancel_called:
            return "deadline"
        if is_cancellation(error):
            return "cancelled"
        return "abandoned" if isinstance(error, GeneratorExit) else f"error: {type(error).__name__}"

    def _left_s(self) -> float | None:
        return None if self._deadline == math.inf else max(0.0, self._deadline - self._session.now())

    def _close(self, reason: str) -> None:
        if self._holding is not None and not self._holding.is_over:
            self._session.release(self._holding, reason)

    def cancel(self, reason: str = "cancelled") -> None:
        """Cancel the request's block. The request is over, and the cancellation swallowed, once the block has unwound:
        until then its id is taken.

        A request that is not entered yet is cancelled at the first wait in its block. Callable in any thread: outside
        of the event loop's thread, it takes effect at the loop's next turn.
        """
        reason = check_text("reason", reason)
        self._session.call_in_loop(partial(self._cancel, reason))

    def _cancel(self, reason: str) -> None:
        if self._holding is not None and self._holding.is_over:
            return
        is_first = not self._cancel_reason
        self._cancel_reason = self._cancel_reason or reason
        if self._scope is not None:
            if is_first:
                self._cancel_scope(self._scope)
        elif self._holding is not None:
            self._close(self._cancel_reason)
            self._wake()

    def _cancel_scope(self, scope: anyio.CancelScope) -> None:
        assert self._holding is not None
        self._session.cancelled(self._holding, self._cancel_reason)
        scope.cancel()

    def _wake(self) -> None:
        """Make waiting tasks check again: a load is over, room was granted, or the request or the runtime ended."""
        for event in self._waiting:
            event.set()

    async def _wait(self, event: anyio.Event) -> None:
        self._waiting.add(event)
        try:
            await event.wait()
        finally:
            self._waiting.discard(event)

    def _entered(self) -> Holding:
        self._session.check_usable()
        if self._holding is None:
            raise WrongState(f"request {self.request_id} was not entered: use `async with`")
        return self._holding

    def _with_blocks(self) -> Holding:
        """Its holding, for a call that reads the block tables."""
        holding = self._live()
        if not self._session.ledger.is_engine_owned:  # the ledger itself refuses the call, in every state
            require(holding, "block_ids", *WITH_TABLES)
        return holding

    def _live(self) -> Holding:
        holding = self._entered()
        if holding.is_over:
            if holding.reason == "runtime_closed":
                raise RuntimeClosed(f"the runtime was closed under {holding}")
            if self._scope is None and self._cancel_reason:
                self._aborted = RequestAborted(self.request_id, holding.reason)
                raise self._aborted
            raise WrongState(f"{holding} is {holding.state.name}: it has given up its blocks")
        return holding

    # -- properties -----------------------------------------------------------------------------------------------

    @property
    def request_id(self) -> str:
        if self._holding is not None:
            return self._holding.request_id
        return self._options.request_id or "(not entered)"

    @property
    def state(self) -> RequestState:
        return RequestState.QUEUED if self._holding is None else self._holding.state

    @property
    def reason(self) -> str:
        """Why it was aborted; empty otherwise."""
        holding = self._holding
        return holding.reason if holding is not None and holding.state is RequestState.ABORTED else ""

    @property
    def match(self) -> PrefixMatch:
        """The hit of the last matching: on entering, and again if the request had to wait for room."""
        return NO_MATCH if self._holding is None else self._holding.match

    @property
    def num_computed_tokens(self) -> int:
        """Tokens whose KV is on the device: by a hit, a load or a commit. After the block: the last count."""
        return 0 if self._holding is None else self._holding.num_computed_tokens

    @property
    def log(self) -> Any:
        """The runtime's logger, bound to this request."""
        return self._session.telemetry.logger.bind(request_id=self.request_id)


async def _read(prompt: LongList) -> Prefix:
    """Read a long list slice by slice, with turns for other tasks in between."""
    slices: list[bytes] = []
    for encoded in prompt.slices():
        slices.append(encoded)
        await anyio.lowlevel.checkpoint()
    return prompt.prefix(slices)


def _nothing() -> None:
    """Default `_stop_timer`: does nothing."""


def _expire(reference: ref[RequestBlock]) -> None:
    request = reference()
    if request is not None:
        request._cancel("deadline")
