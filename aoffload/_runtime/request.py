"""How the block of a request is entered, and why it is left.

The `async with` block of a request: how it is entered, left and cancelled, and how its methods wait.

The calls of a request whose device blocks are an engine's: see docs/engines.md.

The request as its task sees it. It holds blocks until its `async with` block ends, and no longer.
"""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from inspect import CO_ASYNC_GENERATOR
from types import FrameType, TracebackType
from typing import Any, Self
from weakref import ref

import anyio

from .._arguments import check_text
from .._kernel.events import WaitedForBlocks
from .._kernel.plans import NO_MATCH, Extension, Preemption, PrefixMatch
from .._kernel.prefix import LongList, Prefix, TokenIds
from .._kernel.requests import LedgerRequest, Waiter
from .._kernel.states import RequestState, require
from .._tiers.fetch.loop import fetch
from .._transfer.fences import Fence
from ..errors import OutOfBlocks, RequestAborted, RuntimeClosed, WrongState
from .loading import AwaitedLoad, PendingLoad, wait_for_room, wait_until_woken
from .session import RequestOptions, Session

__all__ = ["Request", "is_cancellation", "may_be_suspended"]


ENTERS = ("__aenter__", "enter_async_context")


def may_be_suspended(frame: FrameType | None) -> bool:
    """Whether the block entered in `frame` may be suspended at a `yield` while its task runs other code: true in the
    body of an async generator. A generator that is a context manager (`contextlib.asynccontextmanager`) is entered by
    another block in turn, and that block decides."""
    while frame is not None:
        driver = frame.f_back
        if frame.f_code.co_name not in ENTERS:
            if not frame.f_code.co_flags & CO_ASYNC_GENERATOR:
                return False
            if driver is None or driver.f_code.co_name not in ENTERS:
                return True
        frame = driver
    return False


def is_cancellation(error: BaseException) -> bool:
    """Whether `error` is only cancellation: task groups inside the block may have wrapped it in exception groups."""
    if isinstance(error, BaseExceptionGroup):
        return all(is_cancellation(inner) for inner in error.exceptions)
    return isinstance(error, anyio.get_cancelled_exc_class())


WITH_TABLES = (
    RequestState.ALLOCATED, RequestState.LOADING, RequestState.DRAINING, RequestState.RUNNING, RequestState.REQUEUED,
    RequestState.STRANDED, RequestState.PREEMPTED,
)  # fmt: skip
"""States with block tables, which are empty once the request has given up its blocks."""


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
        self._runtime: object = None
        """The runtime that opened the session. A reference keeps it open as long as this request exists."""
        self._prompt = prompt
        self._options = options
        self._prefix: Prefix
        """The prompt, once it is entered."""
        self._record: LedgerRequest | None = None
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
        if self._record is not None:
            raise WrongState(f"request {self.request_id} was entered before: open another one")
        self._prefix = prefix
        self._record = self._session.admit(self, prefix, self._options)
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
        record = self._record
        if record is not None and not record.is_over:
            self._session.abandon(record, self._scope)  # first: a warning may be an error
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
        if self._record is not None and not self._record.is_over:
            self._session.release(self._record, reason)

    def cancel(self, reason: str = "cancelled") -> None:
        """Cancel the request's block. The request is over, and the cancellation swallowed, once the block has unwound:
        until then its id is taken.

        A request that is not entered yet is cancelled at the first wait in its block. Callable in any thread: outside
        of the event loop's thread, it takes effect at the loop's next turn.
        """
        reason = check_text("reason", reason)
        self._session.call_in_loop(partial(self._cancel, reason))

    def _cancel(self, reason: str) -> None:
        if self._record is not None and self._record.is_over:
            return
        is_first = not self._cancel_reason
        self._cancel_reason = self._cancel_reason or reason
        if self._scope is not None:
            if is_first:
                self._cancel_scope(self._scope)
        elif self._record is not None:
            self._close(self._cancel_reason)
            self._wake()

    def _cancel_scope(self, scope: anyio.CancelScope) -> None:
        assert self._record is not None
        self._session.cancelled(self._record, self._cancel_reason)
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

    def _entered(self) -> LedgerRequest:
        self._session.check_usable()
        if self._record is None:
            raise WrongState(f"request {self.request_id} was not entered: use `async with`")
        return self._record

    def _with_blocks(self) -> LedgerRequest:
        """Its record, for a call that reads the block tables."""
        record = self._live()
        if not self._session.ledger.is_engine_owned:  # the ledger itself refuses the call, in every state
            require(record, "block_ids", *WITH_TABLES)
        return record

    def _live(self) -> LedgerRequest:
        record = self._entered()
        if record.is_over:
            if record.reason == "runtime_closed":
                raise RuntimeClosed(f"the runtime was closed under {record}")
            if self._scope is None and self._cancel_reason:
                self._aborted = RequestAborted(self.request_id, record.reason)
                raise self._aborted
            raise WrongState(f"{record} is {record.state.name}: it has given up its blocks")
        return record

    # -- properties -----------------------------------------------------------------------------------------------

    @property
    def request_id(self) -> str:
        if self._record is not None:
            return self._record.request_id
        return self._options.request_id or "(not entered)"

    @property
    def state(self) -> RequestState:
        return RequestState.QUEUED if self._record is None else self._record.state

    @property
    def reason(self) -> str:
        """Why it was aborted; empty otherwise."""
        record = self._record
        return record.reason if record is not None and record.state is RequestState.ABORTED else ""

    @property
    def match(self) -> PrefixMatch:
        """The hit of the last matching: on entering, and again if the request had to wait for room."""
        return NO_MATCH if self._record is None else self._record.match

    @property
    def num_computed_tokens(self) -> int:
        """Tokens whose KV is on the device: by a hit, a load or a commit. After the block: the last count."""
        return 0 if self._record is None else self._record.num_computed_tokens

    @property
    def log(self) -> Any:
        """The runtime's logger, bound to this request."""
        return self._session.telemetry.logger.bind(request_id=self.request_id)

    @property
    def num_lost_tokens(self) -> int:
        """Tokens that its load failed to bring."""
        return 0 if self._record is None else self._record.num_lost_tokens

    @property
    def retry_max_hit_tokens(self) -> int | None:
        """The `max_hit_tokens` for a next request of the same prompt: where a load that fell short ended, so that the
        same copy is not tried for ever. None: no load fell short."""
        return None if self._record is None else self._record.retry_max_hit_tokens

    def match_again_nowait(self, *, num_device_tokens: int) -> PrefixMatch:
        """Match again before the load: the engine's own prefix cache has the first `num_device_tokens` tokens now. With
        the same number the pins stay, with another they move."""
        record = self._live()
        # Not `self._wake`: the ledger would keep an abandoned request alive for as long as it is PENDING.
        wake = record.when_idle
        self._session.ledger.match_again(record, num_device_tokens=num_device_tokens, wake=wake)
        self._session.bound(record, self._left_s())
        return record.match

    async def match_again(self, *, num_device_tokens: int) -> PrefixMatch:
        """As `match_again_nowait`. If the answer is PENDING, waits until asking again may give another one, and at most
        until `pending_timeout_s` is over. Returns that answer: by then the engine's own cache may have more, so ask
        again with what it has.

            while request.match.is_pending:
                await request.match_again(num_device_tokens=own_hit(tokens))
        """
        await anyio.lowlevel.checkpoint_if_cancelled()
        found = self.match_again_nowait(num_device_tokens=num_device_tokens)
        if found.is_pending:
            session = self._session
            await self._wait_pending(session.ledger.pending_until(self._live()) - session.now())
            self._live()
        return found

    async def _wait_pending(self, bound_s: float) -> None:
        if self._session.worker.has_alarms:
            await wait_until_woken(self, bound_s)
        else:  # a timer of its own: an engine that asks again at once, and again, would not let time pass
            with anyio.move_on_after(bound_s):
                await self._wait(anyio.Event())

    def offer(
        self,
        num_computed_tokens: int,
        block_ids: Sequence[Sequence[int]],
        new_token_ids: TokenIds = (),
        after: Fence | None = None,
        *,
        is_last: bool = False,
    ) -> None:
        """Append `new_token_ids`, then store what the host lacks of the first `num_computed_tokens` tokens, from the
        blocks that `block_ids` names: one table per group, from the first token on. Ids are read, and checked, only
        where something is stored; with `is_last`, all are.

        `after` is the fence behind the compute that wrote them; None: behind all work on the current stream so far.
        Copies hold the blocks until they are over, whatever becomes of the request. `is_last`: the last offer of the
        request, so what a later prompt needs of windows is stored too.
        """
        record, session = self._live(), self._session
        fence = session.fence_after(after)
        session.offer_behind(fence, record, num_computed_tokens, block_ids, new_token_ids, is_last=is_last)

    @property
    def block_ids(self) -> list[list[int]]:
        """The block table, one list per group; null block 0 for blocks that are not needed or still loading.
        `WrongState` before `allocate`; empty after `preempt`."""
        return self._session.ledger.block_ids(self._with_blocks())

    # -- allocation -----------------------------------------------------------------------------------------------

    def allocate_nowait(self, num_tokens: int | None = None) -> None:
        """Allocate blocks for `num_tokens` tokens in total (None: the prompt's). `OutOfBlocks` changes nothing.

        To allocate only the first part of a prompt, allocate whole blocks. A part that ends inside a block causes a
        warning, because it is most often a mistake, and the rest of that block costs nothing.
        """
        record = self._live()
        self._warn_of_part(record, num_tokens)
        self._session.ledger.allocate_nowait(record, num_tokens)

    def _warn_of_part(self, record: LedgerRequest, num_tokens: int | None) -> None:
        num_known = record.sequence.num_tokens
        if type(num_tokens) is not int or not 0 < num_tokens < num_known:
            return
        if num_tokens % self._session.ledger.layout.unit_tokens:
            problem = (
                f"{num_tokens} tokens in total are fewer than the {num_known} of {record}, and end inside of a block"
            )
            warnings.warn(f"allocate: {problem}", UserWarning, stacklevel=3)

    async def fetch(self) -> int:
        """Bring what disk and remote store have behind the hit into host memory, and match again, while the request has
        no blocks. Returns the whole hit in tokens. `allocate` does it; with `engine_blocks`, call it before `load`.

        It takes at most `fetch_timeout_s`, and never raises for a tier that fails: what is not there is computed.
        """
        await anyio.lowlevel.checkpoint_if_cancelled()
        await fetch(self, self._live(), self._prefix)
        return self.match.num_tokens

    async def allocate(self, num_tokens: int | None = None) -> None:
        """As `allocate_nowait`, but waits for room, and fetches before that what only the disk has; `OutOfBlocks` only
        if it can never fit."""
        await anyio.lowlevel.checkpoint_if_cancelled()
        record = self._live()
        self._warn_of_part(record, num_tokens)
        await self._allocate(record, num_tokens)

    async def _allocate(self, record: LedgerRequest, num_tokens: int | None) -> None:
        ledger = self._session.ledger
        if not ledger.is_engine_owned and (record.match.num_disk_tokens or self._session.remote is not None):
            await fetch(self, record, self._prefix)
        try:
            ledger.allocate_nowait(record, num_tokens)
            return
        except OutOfBlocks as error:
            if not error.retryable:
                raise
        await self._wait_in_line(ledger.queue_allocation(record, num_tokens, self._wake))

    def extend_nowait(self, num_tokens: int) -> Extension:
        """Allocate blocks for `num_tokens` tokens in total. Returns what was added to the block tables.

        A refused request is not in the waiter queue: blocks that another request frees for it by `preempt` go to
        waiters, so wait for them with `extend`.
        """
        return self._session.ledger.extend_nowait(self._live(), num_tokens)

    async def extend(self, num_tokens: int) -> Extension:
        """As `extend_nowait`, but waits. A retryable `OutOfBlocks`: only waiters hold blocks, so abort one of them."""
        await anyio.lowlevel.checkpoint_if_cancelled()
        record = self._live()
        try:
            return self._session.ledger.extend_nowait(record, num_tokens)
        except OutOfBlocks as error:
            if not error.retryable:
                raise
        return await self._wait_in_line(self._session.ledger.queue_extension(record, num_tokens, self._wake))

    async def _wait_in_line(self, waiter: Waiter) -> Extension:
        session = self._session
        began_s = session.env.now()
        try:
            while not waiter.is_over:  # a grant may be taken back before its task has run
                await wait_for_room(self, waiter)
                self._live()
            return self._session.ledger.accept(waiter)
        finally:  # leave the line, or give an unused grant back, however the wait ends
            self._session.ledger.withdraw(waiter)
            session.observers.observe(WaitedForBlocks(waiter.request, session.env.now() - began_s))

    # -- preemption -----------------------------------------------------------------------------------------------

    def preempt_nowait(self) -> Preemption:
        """Release every device block. Computed blocks are stored to host memory as far as there is room, and pinned
        there until `resume`. Not inside a step. Returns how many blocks are free now, and which jobs free the rest."""
        found = self._session.ledger.preempt_nowait(self._live())
        self._session.worker.submit(found.plans)
        return found

    async def preempt(self) -> Preemption:
        """As `preempt_nowait`, but waits: first for steps that hold its blocks, then until every block is free. Any
        task may call it. It frees nothing if the request has ended meanwhile, was preempted by another task, or waits
        for blocks.

        A request that needs these blocks must be waiting in `extend` by then; otherwise, a `resume` takes them back."""
        await anyio.lowlevel.checkpoint_if_cancelled()
        record = self._entered()
        while record.num_steps and not record.is_over:
            await self._wait(anyio.Event())
        if record.reason == "runtime_closed":
            self._live()  # raises
        if not self._session.ledger.is_engine_owned and not record.may_be_preempted:
            return Preemption(0, 0, ())  # no error: the caller cannot know what another task has done
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
        await self._allocate(self._live(), num_tokens)
        return await self.load()

    # -- loading --------------------------------------------------------------------------------------------------

    def load_nowait(self, max_tokens: int | None = None, *, into: Sequence[Sequence[int]] | None = None) -> PendingLoad:
        """Start to load the host hit onto the device, region by region, without waiting for it."""
        load = PendingLoad(self, max_tokens, into)
        load._start(self._live())
        return load

    async def load(self, max_tokens: int | None = None, *, into: Sequence[Sequence[int]] | None = None) -> int:
        """Load the host hit onto the device. Returns how many tokens are ready there. Never raises for a failed copy.

        `max_tokens` limits the load: rounded down to a block, never below the device hit. `block_ids` is final
        afterwards. Returns 0 if another task has preempted the request meanwhile: call `resume` then.

        With `engine_blocks`, `into` holds the request's block tables, one per group, from the first token at least to
        the end of the hit. Copies write only to the blocks named there for what is loaded. If fewer tokens are ready
        than were matched, compute the others into other blocks: copies may still write to those of `into`.
        """
        await anyio.lowlevel.checkpoint_if_cancelled()
        record, load = self._live(), AwaitedLoad(self, max_tokens, into)
        load._start(record)
        if record.sequence.has_much_to_hash(record.hit_stop):
            await self._session.env.run_in_thread(
                partial(record.sequence.hash_ahead, record.hit_stop), self._session.hashing
            )
            self._live()
        return await load._until_over(record)

    # -- computing ------------------------------------------------------------------------------------------------

    def commit(self, num_computed_tokens: int, new_token_ids: TokenIds = (), after: Fence | None = None) -> None:
        """Append `new_token_ids`, then publish the KV of the first `num_computed_tokens` tokens.

        `after` is the fence behind the compute that wrote it; None: behind all work on the current stream so far.
        """
        record, session = self._live(), self._session
        session.commit_behind(session.fence_after(after), record, num_computed_tokens, new_token_ids)

    def invalidate(self, from_token: int) -> None:
        """Invalidate what a failed forward committed from `from_token` on. Aborts requests that may have read it."""
        self._session.invalidate(self._live(), from_token)
