"""The request as its task sees it. It holds blocks until its `async with` block ends, and no longer."""

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
from .core.lifecycle import RequestState
from .core.owners import Extension, Holding, Waiter
from .core.preemption import Preemption
from .errors import OutOfBlocks, RequestAborted, RuntimeClosed, WrongState
from .loading import AwaitedLoad, PendingLoad
from .prefix import LongList, Prefix, TokenIds
from .scopes import is_cancellation, may_be_suspended
from .session import RequestOptions, Session
from .transfer.fence import Fence

__all__ = ["Request"]


class Request:
    """Returned by `OffloadRuntime.request`; an async context manager for the task that serves the request.

    Its cancel scope swallows a cancellation by `cancel` or `deadline_s`; check `state` and `reason` after the block.
    Any other cancellation or exception passes through. The blocks are released in either case.

    In an async generator the block has no cancel scope: while the generator is suspended at a `yield`, its task runs
    other code, which the scope would cancel instead. There, `cancel` and `deadline_s` release the blocks at once, and
    the next use of the request (or the method that is waiting) raises `RequestAborted`, which the block swallows.
    """

    def __init__(self, session: Session, prompt: Prefix | LongList, options: RequestOptions) -> None:
        self._session = session
        self._prompt = prompt
        self._options = options
        self._holding: Holding | None = None
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
        bound_s = self._options.deadline_s
        deadline = None if bound_s is None else anyio.current_time() + bound_s
        prefix = self._prompt if isinstance(self._prompt, Prefix) else await _read(self._prompt)
        if self._holding is not None:
            raise WrongState(f"request {self.request_id} was entered before: open another one")
        self._holding = self._session.admit(self, prefix, self._options)
        self._task_id = id(self._session.running_task())
        if is_scoped:
            self._enter_scope(deadline)
        else:
            self._do_without_scope(deadline)
        return self

    def _enter_scope(self, deadline: float | None) -> None:
        self._scope = scope = anyio.CancelScope(deadline=math.inf if deadline is None else deadline)
        if self._cancel_reason:
            scope.cancel()
        scope.__enter__()

    def _do_without_scope(self, deadline: float | None) -> None:
        if self._cancel_reason:
            self._close(self._cancel_reason)
        elif deadline is not None and deadline < math.inf:
            late = partial(_expire, ref(self))
            self._stop_timer = self._session.env.call_at(deadline, partial(self._session.worker.call_soon, late))

    async def __aexit__(
        self, exc_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
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

    def _close(self, reason: str) -> None:
        if self._holding is not None and not self._holding.is_over:
            self._session.release(self._holding, reason)

    def cancel(self, reason: str = "cancelled") -> None:
        """Cancel the request's block. The request is over, and the cancellation swallowed, once the block has unwound.

        A request that is not entered yet is cancelled at the first wait in its block. Callable in any thread: outside
        of the event loop's thread, it takes effect at the loop's next turn.
        """
        reason = check_text("reason", reason)
        self._session.call_in_loop(partial(self._cancel, reason))

    def _cancel(self, reason: str) -> None:
        if self._holding is not None and self._holding.is_over:
            return
        self._cancel_reason = self._cancel_reason or reason
        if self._scope is not None:
            self._scope.cancel()
        elif self._holding is not None:
            self._close(self._cancel_reason)
            self._wake()

    def _wake(self) -> None:
        """Make waiting tasks check again: a load is over, room was granted, or the request or the runtime ended."""
        for event in self._waiting:
            event.set()

    def _live(self) -> Holding:
        self._session.check_usable()
        holding = self._holding
        if holding is None:
            raise WrongState("the request was not entered: use `async with`")
        if holding.is_over:
            if holding.reason == "runtime_closed":
                raise RuntimeClosed(f"the runtime was closed under {holding}")
            if self._scope is None and self._cancel_reason:
                self._aborted = RequestAborted(self.request_id, holding.reason)
                raise self._aborted
            raise WrongState(f"{holding} is {holding.state.name}")
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
        return "" if self._holding is None else self._holding.reason

    @property
    def match(self) -> PrefixMatch:
        """The hit of the last matching: on entering, and again if the request had to wait for room."""
        return NO_MATCH if self._holding is None else self._holding.match

    @property
    def block_ids(self) -> list[list[int]]:
        """The block table, one list per group; null block 0 for blocks that are not needed or still loading."""
        return self._session.ledger.block_ids(self._live())

    @property
    def num_computed_tokens(self) -> int:
        """Tokens whose KV is on the device: by a hit, a load or a commit. After the block: the last count."""
        return 0 if self._holding is None else self._holding.num_computed_tokens

    @property
    def log(self) -> Any:
        """The runtime's logger, bound to this request."""
        return self._session.telemetry.logger.bind(request_id=self.request_id)

    # -- allocation -----------------------------------------------------------------------------------------------

    def allocate_nowait(self, num_tokens: int | None = None) -> None:
        """Allocate blocks for `num_tokens` tokens in total (None: the prompt's). `OutOfBlocks` changes nothing."""
        self._session.ledger.allocate_nowait(self._live(), num_tokens)

    async def allocate(self, num_tokens: int | None = None) -> None:
        """As `allocate_nowait`, but waits for room; `OutOfBlocks` only if it can never fit."""
        await anyio.lowlevel.checkpoint_if_cancelled()
        holding = self._live()
        try:
            self._session.ledger.allocate_nowait(holding, num_tokens)
            return
        except OutOfBlocks as error:
            if not error.retryable:
                raise
        await self._wait_in_line(self._session.ledger.queue_allocation(holding, num_tokens, self._wake))

    def extend_nowait(self, num_tokens: int) -> Extension:
        """Allocate blocks for `num_tokens` tokens in total. Returns what was added to the block tables.

        A refused request is not in the waiter queue: blocks that another request frees for it by `preempt` go to
        waiters, so wait for them with `extend`.
        """
        return self._session.ledger.extend_nowait(self._live(), num_tokens)

    async def extend(self, num_tokens: int) -> Extension:
        """As `extend_nowait`, but waits. A retryable `OutOfBlocks`: only waiters hold blocks, so abort one of them."""
        await anyio.lowlevel.checkpoint_if_cancelled()
        holding = self._live()
        try:
            return self._session.ledger.extend_nowait(holding, num_tokens)
        except OutOfBlocks as error:
            if not error.retryable:
                raise
        return await self._wait_in_line(self._session.ledger.queue_extension(holding, num_tokens, self._wake))

    async def _wait_in_line(self, waiter: Waiter) -> Extension:
        session = self._session
        began_s = session.env.now()
        try:
            while not waiter.is_over:  # a grant may be taken back before its task has run
                await self._wait(anyio.Event())
                self._live()
            return self._session.ledger.accept(waiter)
        finally:  # leave the line, or give an unused grant back, however the wait ends
            self._session.ledger.withdraw(waiter)
            session.observers.waited_for_room(waiter.holding, session.env.now() - began_s)

    async def _wait(self, event: anyio.Event) -> None:
        self._waiting.add(event)
        try:
            await event.wait()
        finally:
            self._waiting.discard(event)

    # -- preemption -----------------------------------------------------------------------------------------------

    def preempt_nowait(self) -> Preemption:
        """Release every device block. Computed blocks are stored to host memory as far as there is room, and pinned
        there until `resume`. Not inside a step. Returns how many blocks are free now, and which jobs free the rest."""
        found = self._session.ledger.preempt_nowait(self._live())
        self._session.worker.submit(found.plans)
        return found

    async def preempt(self) -> Preemption:
        """As `preempt_nowait`, but waits: first for steps that hold its blocks, then until every block is free.

        A request that needs these blocks must be waiting in `extend` by then; otherwise, a `resume` takes them back."""
        await anyio.lowlevel.checkpoint_if_cancelled()
        holding = self._live()
        while holding.num_steps:
            await self._wait(anyio.Event())
            self._live()
        found = self.preempt_nowait()
        await self._session.worker.wait_over(max(found.job_ids, default=0))
        return found

    async def resume(self, num_tokens: int | None = None) -> int:
        """Wait for room for `num_tokens` tokens (None: all known tokens) and load what is in host memory. Returns how
        many tokens are ready; later ones have to be computed again.

        A cancellation leaves the request in the state of the wait: go on with `allocate` (PINNED) or `load` (ALLOCATED,
        LOADING), or leave the block.
        """
        await anyio.lowlevel.checkpoint_if_cancelled()
        self._session.ledger.resume(self._live(), num_tokens)
        await self.allocate(num_tokens)
        return await self.load()

    # -- loading --------------------------------------------------------------------------------------------------

    def load_nowait(self, max_tokens: int | None = None) -> PendingLoad:
        """Start to load the host hit onto the device, region by region, without waiting for it."""
        load = PendingLoad(self, max_tokens)
        load._start(self._live())
        return load

    async def load(self, max_tokens: int | None = None) -> int:
        """Load the host hit onto the device. Returns how many tokens are ready there. Never raises for a failed copy.

        `max_tokens` limits the load: rounded down to a block, never below the device hit. `block_ids` is final
        afterwards. Returns 0 if another task has preempted the request meanwhile: call `resume` then.
        """
        await anyio.lowlevel.checkpoint_if_cancelled()
        holding, load = self._live(), AwaitedLoad(self, max_tokens)
        load._start(holding)
        if holding.sequence.has_much_to_hash(holding.hit_stop):
            await self._session.env.run_in_thread(
                partial(holding.sequence.hash_ahead, holding.hit_stop), self._session.hashing
            )
            self._live()
        return await load._until_over(holding)

    # -- computing ------------------------------------------------------------------------------------------------

    def commit(self, num_computed_tokens: int, new_token_ids: TokenIds = (), after: Fence | None = None) -> None:
        """Append `new_token_ids`, then publish the KV of the first `num_computed_tokens` tokens.

        `after` is the fence behind the compute that wrote it; None: behind all work on the current stream so far.
        """
        holding, session = self._live(), self._session
        session.commit_behind(session.fence_after(after), holding, num_computed_tokens, new_token_ids)

    def invalidate(self, from_token: int) -> None:
        """Invalidate what a failed forward committed from `from_token` on. Aborts requests that may have read it."""
        self._session.invalidate(self._live(), from_token)


async def _read(prompt: LongList) -> Prefix:
    """Read a long list slice by slice, with turns for other tasks in between."""
    slices: list[bytes] = []
    for encoded in prompt.slices():
        slices.append(encoded)
        await anyio.lowlevel.checkpoint()
    return prompt.prefix(slices)


def _nothing() -> None:
    """Default `_stop_timer`: does nothing."""


def _expire(reference: ref[Request]) -> None:
    request = reference()
    if request is not None:
        request._cancel("deadline")
