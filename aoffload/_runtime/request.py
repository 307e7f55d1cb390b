"""The request as its task uses it: an `async with` block that owns the leases and the blocks of the request.

The block is the only owner. Inside it the request holds a match, then blocks, then a load under way. The end of the
block releases all of them, however the block is left. A call either waits or changes something: the calls named
`..._nowait` and the commits never wait, and a call that waits changes nothing until its wait is over.

Leaving never awaits. `__aexit__` first releases the record in one synchronous call, because a second cancellation could
interrupt an await there, and the blocks would stay held. Stores that the release plans, and copies under way, hold
their own references, so they continue without the request.

A cancellation ends the block through a cancel scope around it, so the request is over only once the block has unwound:
until then its task may still use the blocks. There are three exceptions, in which a scope would cancel other code:

    async generator        suspended at a `yield`, its task runs other code. The block has no scope: `cancel` and the
                           deadline release the blocks immediately, and the next call raises `RequestAborted`
    left in another task   the scope stays entered in its own task, and its deadline is removed
    left in another thread the same, and the event loop releases the record at its next turn

In addition to the scope, a deadline has a timer, because a scope reports nothing while its task waits for a thread.

Several tasks may wait in one request. Each has an event in `_waiting`, and `_wake` sets all of them; then each task
checks its own condition. `match_again_nowait`, `preempt` and a fetch pass `weak_wake`, because the callback may outlive
the task: a strong reference would keep an abandoned request alive, and its finaliser would not release it.
"""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from inspect import CO_ASYNC_GENERATOR
from types import FrameType, TracebackType
from typing import Any, Generic, Self, TypeVar
from weakref import ref

import anyio

from .._common.arguments import check_text
from .._common.prefix import LongList, Prefix, TokenIds
from .._extensions.assembly import Ledger
from .._extensions.preemption import Preemption
from .._host_cache.host_cache import NO_CHECKPOINTS, HostCache
from .._host_cache.requests import HostCacheRequest
from .._kernel.events import RequestCancelled, WaitedForBlocks
from .._kernel.plans import NO_MATCH, Checkpoint, Extension, PrefixMatch, TransferPlan
from .._kernel.records import LedgerRequest, Waiter
from .._kernel.states import (
    ABORTED,
    ALLOCATED,
    DONE,
    DRAINING,
    LOADING,
    PREEMPTED,
    QUEUED,
    REQUEUED,
    RUNNING,
    STRANDED,
    RequestState,
    require,
)
from .._tiers.fetch.loop import fetch
from .._transfer.fences import Fence
from ..errors import AoffloadError, OutOfBlocks, RequestAborted, RuntimeClosed, WrongState
from .loading import EnginePendingLoad, PendingLoad
from .session import AnyFace, Session, weak_wake

AnyRecord = TypeVar("AnyRecord", bound=LedgerRequest)
ENTERS = ("__aenter__", "enter_async_context")


def may_be_suspended(frame: FrameType | None) -> bool:
    """Whether the block entered in `frame` may be suspended at a `yield` while its task runs other code: true in the
    body of an async generator. A generator that is a context manager (`contextlib.asynccontextmanager`) is entered by
    another block, so the frame of that block is checked."""
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


OVER = (DONE, ABORTED)
WITH_TABLES = (
    ALLOCATED, LOADING, DRAINING, RUNNING, REQUEUED,
    STRANDED, PREEMPTED,
)  # fmt: skip
"""States with block tables, which are empty once the request has given up its blocks."""


async def _read(prompt: LongList) -> Prefix:
    """Read a long list slice by slice, with turns for other tasks in between."""
    slices: list[bytes] = []
    for encoded in prompt.slices():
        slices.append(encoded)
        await anyio.lowlevel.checkpoint()
    return prompt.prefix(slices)


def _expire(reference: ref[RequestBase[Any, Any]]) -> None:
    request = reference()
    if request is not None:
        request._cancel("deadline")


class RequestBase(Generic[AnyFace, AnyRecord]):
    """Base of `Request` and `EngineRequest`: an async context manager for the task that serves the request.

    Its cancel scope swallows a cancellation by `cancel` or `deadline_s`; check `state` and `reason` after the block.
    Any other cancellation or exception passes through. The blocks are released in either case.

    In an async generator the block has no cancel scope: while the generator is suspended at a `yield`, its task runs
    other code, which the scope would cancel instead. There, `cancel` and `deadline_s` release the blocks immediately,
    and the next use of the request (or the method that is waiting) raises `RequestAborted`, which the block swallows.
    """

    __slots__ = (
        "__weakref__", "_aborted", "_cancel_reason", "_deadline", "_deadline_s", "_options", "_prefix", "_prompt",
        "_record", "_request_id", "_runtime", "_scope", "_session", "_stop_timer", "_task_id", "_waiting",
    )  # fmt: skip

    def __init__(
        self,
        session: Session[AnyFace],
        prompt: Prefix | LongList,
        request_id: str | None,
        deadline_s: float | None,
        options: Any,
    ) -> None:
        self._session = session
        self._runtime: object = None
        """The runtime that opened the session. A reference keeps it open as long as this request exists."""
        self._prompt = prompt
        self._request_id = request_id
        self._deadline_s = deadline_s
        self._options = options
        self._prefix: Prefix
        """The prompt, once it is entered."""
        self._record: AnyRecord | None = None
        self._deadline = math.inf
        self._scope: anyio.CancelScope | None = None
        """Around the entered block; None in an async generator."""
        self._task_id = 0
        """The task that entered the block."""
        self._cancel_reason = ""
        self._aborted: RequestAborted | None = None
        """The error raised in a block without a scope."""
        self._stop_timer: Callable[[], object] | None = None
        self._waiting: set[anyio.Event] | None = None
        """One event per task that waits in a method of this request; None until a task waits."""

    def __repr__(self) -> str:
        return f"<Request {self.request_id!r} {self.state.name}>"

    # -- entering -------------------------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        is_scoped = not may_be_suspended(sys._getframe(1))
        session = self._session
        session.check_loop()
        deadline = math.inf if self._deadline_s is None else anyio.current_time() + self._deadline_s
        prefix = self._prompt if isinstance(self._prompt, Prefix) else await _read(self._prompt)
        if self._record is not None:
            raise WrongState(f"request {self.request_id} was entered before: open another one")
        self._prefix = prefix
        session.check_usable()
        record = self._admit(prefix)
        session.enter(self, record)
        self._record = record
        self._task_id = id(session.running_task())
        if deadline < math.inf:
            self._deadline = deadline
            late = partial(_expire, ref(self))
            self._stop_timer = session.env.call_at(deadline, partial(session.worker.call_soon, late))
        if is_scoped:
            self._scope = scope = anyio.CancelScope(deadline=deadline)
            if self._cancel_reason:
                self._cancel_scope(scope)
            scope.__enter__()
        elif self._cancel_reason:
            session.release(self._record, self._cancel_reason)
        return self

    def _admit(self, prefix: Prefix) -> AnyRecord:
        """Match the prompt and pin the hit."""
        raise NotImplementedError

    def _matched(self, record: Any) -> None:
        """`record` was matched. Does nothing here."""

    def _plan_load(
        self, record: Any, max_tokens: int | None, max_job_bytes: int | None, into: Mapping[str, Any]
    ) -> tuple[TransferPlan, ...]:
        """Plan the load of the host hit."""
        raise NotImplementedError

    # -- properties -----------------------------------------------------------------------------------------------

    @property
    def request_id(self) -> str:
        """The id of the request. If you passed none, it gets one on entering."""
        if self._record is not None:
            return self._record.request_id
        return "(not entered)" if self._request_id is None else self._request_id

    @property
    def state(self) -> RequestState:
        """The state of the request."""
        return QUEUED if self._record is None else self._record.state

    @property
    def reason(self) -> str:
        """Why the request was aborted; empty otherwise."""
        record = self._record
        return record.reason if record is not None and record.state is ABORTED else ""

    @property
    def match(self) -> PrefixMatch:
        """The hit of the last match: on entering, and again if the request had to wait for blocks."""
        return NO_MATCH if self._record is None else self._record.match

    @property
    def num_computed_tokens(self) -> int:
        """Tokens whose KV is on the device, from a hit, a load or a commit. After the `async with` block: the last
        count."""
        return 0 if self._record is None else self._record.num_computed_tokens

    @property
    def num_lost_tokens(self) -> int:
        """Tokens that the load of the request failed to bring."""
        return 0 if self._record is None else self._record.num_lost_tokens

    @property
    def log(self) -> Any:
        """The runtime's logger, bound to this request."""
        return self._session.telemetry.logger.bind(request_id=self.request_id)

    # -- the lower tiers ------------------------------------------------------------------------------------------

    async def fetch(self) -> int:
        """Fetch the units after the hit that the disk and the remote store hold into host memory, and match again. Call
        this before the request has blocks, or blocks to load into. Returns the whole hit in tokens. `allocate` fetches
        by itself.

        A fetch takes at most `fetch_timeout_s`. It never raises for a tier that fails, because the request can compute
        the missing tokens.
        """
        await anyio.lowlevel.checkpoint_if_cancelled()
        await self._fetch(self._live())
        return self.match.num_tokens

    async def _fetch(self, record: AnyRecord) -> None:
        """Fetch the blocks of the prompt that only lower tiers have into host memory, and match again."""
        await fetch(self, record, self._prefix)

    # -- cancelling and leaving -----------------------------------------------------------------------------------

    def cancel(self, reason: str = "cancelled") -> None:
        """Cancel the `async with` block of the request. The request is over, and the cancellation swallowed, once the
        block has unwound. Until then, its id is taken.

        A request that is not entered yet is cancelled at the first wait in its block. Any thread may call this. Outside
        of the event loop's thread, the call takes effect at the loop's next turn.
        """
        reason = check_text("reason", reason)
        self._session.call_in_loop(partial(self._cancel, reason))

    def _cancel(self, reason: str) -> None:
        record = self._record
        if record is not None and record.is_over:
            return
        is_first = not self._cancel_reason
        self._cancel_reason = self._cancel_reason or reason
        if self._scope is not None:
            if is_first:
                self._cancel_scope(self._scope)
        elif record is not None:
            self._session.end(record, self._cancel_reason)
            self._wake()

    def _cancel_scope(self, scope: anyio.CancelScope) -> None:
        """Cancel the block. The request keeps its blocks until its task has left the block."""
        assert self._record is not None
        self._record.reason = self._cancel_reason
        self._session.observers.observe(RequestCancelled(self._record, self._cancel_reason))
        scope.cancel()

    async def __aexit__(
        self, exc_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if not self._session.is_here:
            if self._session.is_in_fork:
                return False  # this process has only a copy of the request, which belongs to the parent
            self._session.call_in_loop(partial(self._left_elsewhere, self._why(error)))
            warnings.warn(f"{self!r} was left in another thread than it was entered in", ResourceWarning, stacklevel=2)
            return False
        # First and synchronously: nothing after this can keep blocks held, not even a second cancellation.
        try:
            if self._record is not None:
                self._session.release(self._record, self._why(error))
        except BaseException as raised:  # a store policy of the program's own raised; the request is over
            self._leave(type(raised), raised, raised.__traceback__)
            raise
        return self._leave(exc_type, error, trace)

    def _leave(
        self, exc_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        """Leave the scope of the block, which ends with `error`. Returns whether the block swallows it."""
        if self._stop_timer is not None:
            self._stop_timer()
        scope, is_elsewhere = self._scope, id(self._session.running_task()) != self._task_id
        if is_elsewhere and (scope is not None or isinstance(error, GeneratorExit)):
            warnings.warn(f"{self!r} was left in another task than it was entered in", ResourceWarning, stacklevel=3)
        if scope is None:
            return error is not None and error is self._aborted
        if is_elsewhere:
            scope.deadline = math.inf  # it stays around a task that no longer serves this request
            return False
        return bool(scope.__exit__(exc_type, error, trace))

    def _left_elsewhere(self, reason: str) -> None:
        """End the block in the event loop's thread. The scope stays entered in the task that entered it."""
        if self._record is not None:
            self._session.end(self._record, reason)
        if self._stop_timer is not None:
            self._stop_timer()
        if self._scope is not None:
            self._scope.deadline = math.inf

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

    def __del__(self) -> None:
        record = self._record
        if record is not None and not record.is_over:
            self._session.abandon(record, self._scope)  # first: a warning may be an error
            warnings.warn(
                f"{self!r} was abandoned: leave its async with block", ResourceWarning, stacklevel=2, source=self
            )

    # -- waiting --------------------------------------------------------------------------------------------------

    async def _wait(self, bound_s: float | None = None) -> bool:
        event, worker = anyio.Event(), self._session.worker
        if bound_s is not None:
            worker.set_alarm(event, bound_s)
        if self._waiting is None:
            self._waiting = set()
        self._waiting.add(event)
        try:
            await event.wait()
        finally:
            self._waiting.discard(event)
            was_pending = worker.clear_alarm(event)
        return bound_s is not None and not was_pending

    async def _wait_for_blocks(self, waiter: Waiter | None) -> None:
        slow = self._session.slow
        if await self._wait(slow.left_s(waiter)) and waiter is not None:
            slow.check_wait(waiter)

    def _wake(self) -> None:
        """Make waiting tasks check again: a load is over, blocks were granted, or the request or the runtime ended."""
        for event in self._waiting or ():
            event.set()

    def _left_s(self) -> float | None:
        return None if self._deadline == math.inf else max(0.0, self._deadline - self._session.now())

    async def _hash(self, record: AnyRecord) -> None:
        """Hash the tokens after the hit of a long prompt in a thread, while the load is under way."""
        await self._session.env.run_in_thread(
            partial(record.sequence.hash_ahead, record.hit_stop), self._session.hashing
        )
        self._live()

    # -- checks ---------------------------------------------------------------------------------------------------

    def _abort_readers(self, invalidate: Callable[[], tuple[LedgerRequest, ...]]) -> None:
        """Call `invalidate`, and abort the requests that it returns."""
        session = self._session
        for reader in invalidate():
            session.cancel(reader.request_id, "prefix_invalidated")
        for work in session.lower_tiers:
            work.invalidate()

    def _live(self) -> AnyRecord:
        self._session.check_usable()
        record = self._record
        if record is None or record.state in OVER:
            raise self._why_not()
        return record

    def _why_not(self) -> AoffloadError:
        record = self._record
        if record is None:
            return WrongState(f"request {self.request_id} was not entered: use `async with`")
        if record.reason == "runtime_closed":
            return RuntimeClosed(f"the runtime was closed before {record} was over")
        if self._scope is None and self._cancel_reason:
            self._aborted = RequestAborted(self.request_id, record.reason)
            return self._aborted
        return WrongState(f"{record} is {record.state.name}: it has given up its blocks")


class Request(RequestBase[Ledger, LedgerRequest]):
    """Returned by `OffloadRuntime.request`: a request whose device blocks are those of the runtime."""

    __slots__ = ()

    def _admit(self, prefix: Prefix) -> LedgerRequest:
        return self._session.ledger.admit(prefix, request_id=self._request_id, **self._options)

    # -- allocation -----------------------------------------------------------------------------------------------

    def allocate_nowait(self, num_tokens: int | None = None) -> None:
        """Allocate blocks for `num_tokens` tokens in total (None: the prompt's). If `OutOfBlocks` is raised, nothing
        has changed.

        To allocate only the first part of a prompt, allocate whole blocks. A part that ends inside a block causes a
        warning, because it is most often a mistake, and the rest of that block costs nothing. With windows, allocate at
        least the hit: a hit that ends earlier needs other window blocks, which may not be there. Allocating less causes
        a warning.
        """
        record = self._live()
        self._warn_of_part(record, num_tokens)
        self._session.ledger.allocate_nowait(record, num_tokens)

    async def allocate(self, num_tokens: int | None = None) -> None:
        """As `allocate_nowait`, but first fetches from the tiers below the host, and then waits for free blocks. Raises
        `OutOfBlocks` only if the request can never fit."""
        await anyio.lowlevel.checkpoint_if_cancelled()
        record = self._live()
        self._warn_of_part(record, num_tokens)
        await self._allocate(record, num_tokens)

    def _warn_of_part(self, record: LedgerRequest, num_tokens: int | None) -> None:
        num_known = record.sequence.num_tokens
        if type(num_tokens) is not int or not 0 < num_tokens < num_known:
            return
        layout, match = self._session.ledger.layout, record.match
        hit = match.num_tokens + match.num_lower_tokens
        problem = ""
        if num_tokens % layout.unit_tokens:
            problem = (
                f"{num_tokens} tokens in total are fewer than the {num_known} of {record}, and end inside of a block:"
                f" allocate a multiple of {layout.unit_tokens}"
            )
        elif layout.partial and num_tokens < hit > match.num_device_tokens:
            problem = (
                f"{num_tokens} tokens in total are fewer than the hit of {hit} of {record}: with windows or a recurrent"
                f" state, a part of a hit may load nothing"
            )
        if problem:
            warnings.warn(f"allocate: {problem}", UserWarning, stacklevel=3)

    async def _allocate(self, record: LedgerRequest, num_tokens: int | None) -> None:
        ledger = self._session.ledger
        if record.match.num_lower_tokens or self._session.remote is not None:
            await self._fetch(record)
        try:
            ledger.allocate_nowait(record, num_tokens)
            return
        except OutOfBlocks as error:
            if not error.retryable:
                raise
        await self._wait_for_grant(ledger.queue_allocation(record, num_tokens, self._wake))

    @property
    def block_ids(self) -> list[list[int]]:
        """The block table, one list per group. It has the null block 0 for blocks that are not needed or still loading.
        `WrongState` before `allocate`; empty after `preempt`."""
        return self._session.ledger.block_ids(self._with_blocks())

    @property
    def planned_checkpoints(self) -> tuple[Checkpoint, ...]:
        """The checkpoints of the recurrent state to write, in prefix order. End a forward at `num_tokens`, copy the
        running state into the blocks, and name the position to `commit`. You may leave out any of them. Empty if the
        model has no recurrent state. `WrongState` before `allocate`."""
        return self._session.ledger.planned_checkpoints(self._with_blocks("planned_checkpoints"))

    @property
    def resume_checkpoint(self) -> Checkpoint | None:
        """The checkpoint of the recurrent state from which the request continues. Read it after `load` or `resume`, and
        copy it into the running state in the first step, before the forward. None: begin with the initial state, or the
        request has computed since then. `WrongState` before `allocate`."""
        return self._session.ledger.resume_checkpoint(self._with_blocks("resume_checkpoint"))

    def extend_nowait(self, num_tokens: int) -> Extension:
        """Allocate blocks for `num_tokens` tokens in total. Returns the additions to the block tables.

        If it raises `OutOfBlocks`, the request is not in the wait queue. Blocks that another request frees by `preempt`
        go to the requests in the queue, so wait for them with `extend`.
        """
        return self._session.ledger.extend_nowait(self._live(), num_tokens)

    async def extend(self, num_tokens: int) -> Extension:
        """As `extend_nowait`, but waits for free blocks. After a retryable `OutOfBlocks`, abort a waiting request: only
        waiting requests hold blocks."""
        await anyio.lowlevel.checkpoint_if_cancelled()
        record = self._live()
        try:
            return self._session.ledger.extend_nowait(record, num_tokens)
        except OutOfBlocks as error:
            if not error.retryable:
                raise
        return await self._wait_for_grant(self._session.ledger.queue_extension(record, num_tokens, self._wake))

    async def _wait_for_grant(self, waiter: Waiter) -> Extension:
        session = self._session
        began_s = session.env.now()
        try:
            while not waiter.is_over:  # a grant may be withdrawn before its task has run
                await self._wait_for_blocks(waiter)
                self._live()
            return session.ledger.accept(waiter)
        finally:  # leave the wait queue, or give an unused grant back, however the wait ends
            session.ledger.withdraw(waiter)
            session.observers.observe(WaitedForBlocks(waiter.request, session.env.now() - began_s))

    # -- loading --------------------------------------------------------------------------------------------------

    def load_nowait(self, max_tokens: int | None = None) -> PendingLoad:
        """Start to load the host hit onto the device, region by region, without waiting for it."""
        return PendingLoad(self, self._live(), max_tokens)

    async def load(self, max_tokens: int | None = None) -> int:
        """Load the host hit onto the device. Returns how many tokens are ready there. Never raises for a failed copy.

        `max_tokens` limits the load: rounded down to a block, never below the device hit. `block_ids` is final
        afterwards. If another task has preempted the request meanwhile, the result is 0: call `resume` then.
        """
        await anyio.lowlevel.checkpoint_if_cancelled()
        record = self._live()
        load = PendingLoad(self, record, max_tokens, has_fences=False)
        if record.sequence.has_much_to_hash(record.hit_stop):
            await self._hash(record)
        return await load._until_over(record)

    def _plan_load(
        self,
        record: Any,
        max_tokens: int | None,
        max_job_bytes: int | None,
        into: Mapping[str, Any],
    ) -> tuple[TransferPlan, ...]:
        session = self._session
        if session.costs is not None:
            max_tokens = session.costs.limit(record, max_tokens, self._left_s())
        return session.ledger.plan_load(record, max_tokens, self._wake, max_job_bytes=max_job_bytes)

    # -- computing ------------------------------------------------------------------------------------------------

    def commit(
        self,
        num_computed_tokens: int,
        new_token_ids: TokenIds = (),
        after: Fence | None = None,
        *,
        checkpoints: Iterable[int] = (),
    ) -> None:
        """Append `new_token_ids`, then publish the KV of the first `num_computed_tokens` tokens.

        `after` is a fence after the compute that wrote this KV; None: after all work on the current stream so far.
        `checkpoints`: the positions, in tokens, of the `planned_checkpoints` that you have written. They are published,
        too. Checkpoints that the request has passed without writing them are given up.
        """
        record, session = self._live(), self._session
        fence, before = session.fence_after(after), record.num_computed_tokens
        plans = session.ledger.commit(record, num_computed_tokens, new_token_ids, checkpoints)
        session.was_committed(record, before, plans, fence)

    def invalidate(self, from_token: int) -> None:
        """Invalidate the tokens that a failed forward committed from `from_token` on. Aborts requests that may have
        read them.

        With a disk, the records of these blocks, and of blocks freed since the last reset, are erased in the background
        and synced. If the process is killed before that, the next process may find the blocks: call `reset(Tier.DISK)`
        there. With a remote store, the cells are removed in the background. This process never again loads a cell that
        it has put there before the call, but other processes may hit a cell until it is removed."""
        record = self._live()
        self._abort_readers(partial(self._session.ledger.invalidation.invalidate, record, from_token))

    # -- preemption -----------------------------------------------------------------------------------------------

    def preempt_nowait(self) -> Preemption:
        """Release every device block. Computed blocks are stored in host memory if it has free blocks for them, and
        stay pinned there until `resume`. Not allowed inside a step. Returns how many blocks are free now, and which
        jobs free the rest."""
        found = self._session.ledger.preemption.preempt(self._live())
        self._session.worker.submit(found.plans)
        return found

    async def preempt(self) -> Preemption:
        """As `preempt_nowait`, but waits: first for steps that hold blocks of the request, then until every block is
        free. Any task may call it. The call frees nothing if the request has ended meanwhile, was preempted by another
        task, or waits for blocks.

        A request that needs these blocks must already wait in `extend`; otherwise, a `resume` takes them back.
        """
        await anyio.lowlevel.checkpoint_if_cancelled()
        self._session.check_usable()
        record = self._record
        if record is None:
            raise self._why_not()
        while record.num_steps and not record.is_over:
            record.when_idle = weak_wake(self)
            await self._wait()
        if record.reason == "runtime_closed":
            self._live()  # raises
        if not self._session.ledger.preemption.may_preempt(record):
            return Preemption(0, 0, ())  # no error: the caller cannot know what another task has done
        found = self.preempt_nowait()
        await self._session.worker.wait_over(max(found.job_ids, default=0))
        return found

    async def resume(self, num_tokens: int | None = None) -> int:
        """Wait for blocks for `num_tokens` tokens (None: all known tokens) and load the tokens that are in host memory.
        Returns how many tokens are ready; later ones have to be computed again.

        A cancellation leaves the request in the state of the wait: continue with `allocate` (PINNED) or `load`
        (ALLOCATED, LOADING), or leave the block.
        """
        await anyio.lowlevel.checkpoint_if_cancelled()
        self._session.ledger.preemption.resume(self._live(), num_tokens)
        await self._allocate(self._live(), num_tokens)
        return await self.load()

    # -- checks ---------------------------------------------------------------------------------------------------

    def _with_blocks(self, call: str = "block_ids") -> LedgerRequest:
        record = self._live()
        require(record, call, *WITH_TABLES)
        return record


def commit_all(
    session: Session[Ledger],
    commits: Sequence[tuple[LedgerRequest, int, TokenIds, Iterable[int]]],
    fence: Fence | None,
) -> None:
    """As `Request.commit`, for several requests of one forward, all or nothing."""
    before = [record.num_computed_tokens for record, *_ in commits]
    plans = session.ledger.commit_all(commits)
    for (record, *_), computed, stores in zip(commits, before, plans, strict=True):
        session.was_committed(record, computed, stores, fence)


class EngineRequest(RequestBase[HostCache, HostCacheRequest]):
    """Returned by `HostCacheRuntime.request`: a request whose device blocks are the engine's."""

    __slots__ = ()

    def _admit(self, prefix: Prefix) -> HostCacheRequest:
        return self._session.ledger.admit(prefix, request_id=self._request_id, **self._options)

    def _matched(self, record: Any) -> None:
        """The engine learns from the match how many tokens will be loaded. So the choice between loading and computing
        is made at the match, and not when the load begins."""
        if self._session.costs is not None:
            self._session.costs.bound(record, self._left_s() if self._record is not None else self._deadline_s)

    @property
    def planned_checkpoints(self) -> tuple[int, ...]:
        """The positions after the hit, in tokens, at which a checkpoint of the recurrent state serves later prompts.
        Pass the positions that you have written to `offer`."""
        return self._session.ledger.planned_checkpoints(self._live())

    @property
    def retry_max_hit_tokens(self) -> int | None:
        """The `max_hit_tokens` for the next request with the same prompt: the end of a load that fell short. With this
        limit, the same copy is not tried forever. None if no load fell short."""
        return None if self._record is None else self._record.retry_max_hit_tokens

    # -- the hit --------------------------------------------------------------------------------------------------

    def match_again_nowait(self, *, num_device_tokens: int) -> PrefixMatch:
        """Match again before the load, because the engine's own prefix cache has the first `num_device_tokens` tokens
        now. The pins move if this number has changed."""
        record = self._live()
        wake = weak_wake(self)  # the ledger keeps it for as long as the request is PENDING
        self._session.ledger.match_again(record, num_device_tokens=num_device_tokens, wake=wake)
        try:
            self._matched(record)
        finally:
            if not record.match.is_pending:
                self._wake()  # another task may wait for this answer
        return record.match

    async def match_again(self, *, num_device_tokens: int) -> PrefixMatch:
        """As `match_again_nowait`. If the answer is PENDING, waits until a new match may give another answer, and at
        most until `pending_timeout_s` is over. Returns the answer from before the wait, because the engine's own cache
        may hold more tokens after it: match again with that number.

            while request.match.is_pending:
                await request.match_again(num_device_tokens=own_hit(tokens))
        """
        await anyio.lowlevel.checkpoint_if_cancelled()
        found, session = self.match_again_nowait(num_device_tokens=num_device_tokens), self._session
        if found.is_pending:
            bound_s = session.ledger.pending_until(self._live()) - session.now()
            if session.worker.has_alarms:
                await self._wait(bound_s)
            else:  # the worker's task has ended, so an alarm would be set immediately, and this loop would never end
                with anyio.move_on_after(bound_s):
                    await self._wait()
            self._live()
        return found

    # -- loading --------------------------------------------------------------------------------------------------

    def load_nowait(
        self,
        max_tokens: int | None = None,
        *,
        into: Sequence[Sequence[int]] | None = None,
        into_checkpoint: Sequence[int] | None = None,
    ) -> EnginePendingLoad:
        """Start to load the host hit into the blocks that `into` names, region by region, without waiting for it."""
        return EnginePendingLoad(self, self._live(), max_tokens, {"into": into, "into_checkpoint": into_checkpoint})

    async def load(
        self,
        max_tokens: int | None = None,
        *,
        into: Sequence[Sequence[int]] | None = None,
        into_checkpoint: Sequence[int] | None = None,
    ) -> int:
        """Load the host hit into the blocks that `into` names. Returns how many tokens are ready there. Never raises
        for a failed copy.

        `into` holds the request's block tables, one per group, from the first token at least to the end of the hit.
        Copies write only to the blocks that it names for the loaded tokens. If fewer tokens are ready than were
        matched, compute the others into other blocks, because copies may still write to the blocks of `into`.
        `max_tokens` limits the load and is rounded down to a block. After a cancellation, you may call this again,
        without `into`. With a recurrent state, `into_checkpoint` holds the blocks for the checkpoint at the end of the
        hit, and the lists of its groups in `into` are ignored.
        """
        await anyio.lowlevel.checkpoint_if_cancelled()
        record = self._live()
        named = {"into": into, "into_checkpoint": into_checkpoint}
        load = EnginePendingLoad(self, record, max_tokens, named, has_fences=False)
        if record.sequence.has_much_to_hash(record.hit_stop):
            await self._hash(record)
        return await load._until_over(record)

    def _plan_load(
        self,
        record: Any,
        max_tokens: int | None,
        max_job_bytes: int | None,
        into: Mapping[str, Any],
    ) -> tuple[TransferPlan, ...]:
        return self._session.ledger.plan_load(record, max_tokens, self._wake, max_job_bytes=max_job_bytes, **into)

    # -- computing ------------------------------------------------------------------------------------------------

    def offer(
        self,
        num_computed_tokens: int,
        block_ids: Sequence[Sequence[int]],
        new_token_ids: TokenIds = (),
        after: Fence | None = None,
        *,
        checkpoints: Mapping[int, Sequence[int]] = NO_CHECKPOINTS,
        is_last: bool = False,
    ) -> None:
        """Append `new_token_ids`, then store the blocks of the first `num_computed_tokens` tokens that the host lacks.
        `block_ids` names the blocks: one table per group, from the first token on. Only the ids of stored blocks are
        read and checked; with `is_last`, all are checked.

        `after` is a fence after the compute that wrote the blocks; None: after all work on the current stream so far.
        Copies hold the blocks until they are over, even if the request ends. `is_last` marks the last offer of the
        request, which also stores the window blocks that a later prompt needs. With a recurrent state, `checkpoints`
        names the blocks that hold a checkpoint now, by the checkpoint's number of tokens; the lists of its groups in
        `block_ids` are ignored.
        """
        record, session = self._live(), self._session
        fence, before = session.fence_after(after), record.num_computed_tokens
        plans = session.ledger.offer(
            record, num_computed_tokens, block_ids, new_token_ids, checkpoints=checkpoints, is_last=is_last
        )
        if session.costs is not None:
            session.costs.computed(record.request_id, record.num_computed_tokens - before)
        session.store(plans, fence)

    def invalidate(self, from_token: int) -> None:
        """Invalidate the tokens that a failed forward has offered from `from_token` on. Aborts requests that may have
        read them."""
        record = self._live()
        self._abort_readers(partial(self._session.ledger.invalidate, record, from_token))
