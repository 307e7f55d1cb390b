"""The runtime: the ledger, the worker and the transport, wired to one event loop."""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import AbstractContextManager, AsyncExitStack, ExitStack, contextmanager
from functools import partial
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack
from weakref import ref

import anyio
import attrs
from anyio.abc import TaskGroup

from .arguments import as_tuple, check_callable, check_has, check_text, check_type, number_of, shown
from .config import OffloadConfig
from .core.answer import PrefixMatch
from .core.blocks import DevicePool
from .core.ledger import Ledger, LedgerStatistics
from .core.lifecycle import RequestState
from .core.owners import Holding
from .core.plan import Tier
from .core.policy import StoreScope
from .env import Env
from .errors import (
    AoffloadError,
    DeviceGone,
    InvalidArgument,
    RequestAborted,
    RuntimeClosed,
    TransferRefused,
    WrongProcess,
    WrongState,
    WrongThread,
)
from .keeping import Identity, PendingDemotion, PendingPrefetch, PinScope, time_to_live
from .loading import PendingLoad
from .observers import Observers, RuntimeObserver
from .prefix import KeySpan, Prefix, Roots, TokenIds, prompt_of
from .request import Request, RequestOptions
from .telemetry import Telemetry
from .transfer.fence import Fence
from .transfer.local import LocalTransport
from .transfer.transport import TRANSPORTS, PinProgress, ReportsPinning, SlowToOpen, TransferStatistics, Transport
from .worker import CopyWorker

__all__ = ["Computed", "OffloadRuntime", "RuntimeStatistics"]

Result = TypeVar("Result")


@attrs.frozen
class Computed:
    """What one forward computed of one request, for `commit_step`."""

    request: Request
    num_computed_tokens: int
    new_token_ids: TokenIds = ()


@attrs.frozen
class RuntimeStatistics(LedgerStatistics):
    """A snapshot. `device` and `host` hold num_blocks, num_free, num_cached, num_pinned, num_quarantined."""

    transfers: TransferStatistics
    off_reason: str = ""
    """Why the cache has turned itself off: nothing is loaded or stored any more. Empty while it is on."""


class OffloadRuntime:
    """An async context manager around one engine's KV cache.

    `kv_caches`: a tensor `[num_blocks, ...]`, a sequence or mapping of them, or `KVRegion`s, all of one block pool;
    row 0 is the null block. `transport` takes their place where the tensors are elsewhere. `device_pool` hands out the
    block ids; by default a free list of our own. `observers` are told of what the log is told.
    """

    def __init__(
        self,
        config: OffloadConfig,
        kv_caches: Any = None,
        *,
        transport: Transport | None = None,
        device_pool: DevicePool | None = None,
        env: Env | None = None,
        logger: Any = None,
        observers: Iterable[RuntimeObserver] = (),
    ) -> None:
        check_type("config", config, OffloadConfig)
        if (kv_caches is None) == (transport is None):
            raise InvalidArgument("kv_caches", "give either kv_caches or a transport")
        if transport is not None:
            check_has("transport", transport, "Transport", TRANSPORTS)
        if env is not None:
            check_type("env", env, Env)
        if logger is not None:
            check_has("logger", logger, "structlog logger", "bind")
        self.config = config
        self.transport: Transport = LocalTransport(kv_caches) if transport is None else transport
        self.env = env if env is not None else Env()
        self.telemetry = Telemetry(logger)
        self.observers = Observers(self.telemetry, as_tuple("observers", observers, "RuntimeObserver"))
        block_bytes = self.transport.block_bytes
        self.ledger = Ledger(
            config,
            self.transport.num_device_blocks,
            block_bytes=block_bytes,
            device_pool=device_pool,
            observer=self.observers if self.observers.others else self.telemetry,
        )
        self.worker = CopyWorker(self.ledger, self.transport, config, self.env, self.telemetry)
        self._roots = Roots(_namespace_of(config))
        # Weak, or an abandoned request would never be noticed.
        self._entered: dict[str, ref[Request]] = {}
        self._fences: dict[str, Fence | None] = {}
        """Behind the last commit of each live request: what is stored when it ends waits for that, too."""
        self._group: TaskGroup | None = None
        self._thread_id = 0
        self._process_id = 0
        self._is_open = False
        self.running_task: Callable[[], object] = object
        """Set on entering: which task runs."""
        self.hashing: anyio.CapacityLimiter | None = None
        """Set on entering. Not the pool that a program's own threads fill: they may be waiting for us."""

    def __repr__(self) -> str:
        return f"<OffloadRuntime {'open' if self._is_open else 'closed'} {self.ledger!r}>"

    # -- its life -------------------------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        if self._process_id:
            raise RuntimeClosed("a runtime is entered once: make another one")
        self._thread_id, self._process_id = threading.get_ident(), os.getpid()
        self.running_task = self.env.running_task()
        self.hashing = anyio.CapacityLimiter(1)
        self.worker.start()
        num_host_blocks = self.config.resolve_host_blocks(self.transport.block_bytes)
        if isinstance(self.transport, ReportsPinning):
            self.transport.report_pinning(self._hear_pinning)
        if isinstance(self.transport, SlowToOpen) and self.transport.opens_slowly:
            await self._open_in_thread(num_host_blocks)
        else:
            self._open_transport(num_host_blocks)
        try:
            self._group = await self._start_worker()
        except BaseException:
            self._close_transport(self.config.close_timeout_s)  # nothing was launched: its threads end at once
            raise
        self._is_open = True
        self.telemetry.runtime_opened(self.transport.num_device_blocks - 1, num_host_blocks)
        return self

    def _open_transport(self, num_host_blocks: int) -> None:
        deliver = self.observers.hearing(self.worker.deliver)
        self.transport.open(num_host_blocks, verify=self.config.verify, deliver=deliver, env=self.env)

    async def _open_in_thread(self, num_host_blocks: int) -> None:
        """The loop goes on meanwhile. A thread can't be recalled: natively cancelled, the task leaves it behind, and
        whoever of the two comes last closes what was opened."""
        is_over = threading.Lock()  # taken by the thread when it has opened, or by the task when it has given up

        def open_or_close() -> None:
            if is_over.locked():
                return  # given up before it began
            self._open_transport(num_host_blocks)
            if not is_over.acquire(blocking=False):
                self._close_transport(self.config.close_timeout_s)

        try:
            await self.env.run_in_thread(open_or_close, anyio.CapacityLimiter(1))
        except BaseException:
            if not is_over.acquire(blocking=False):
                self._close_transport(self.config.close_timeout_s)
            raise

    def _hear_pinning(self, progress: PinProgress) -> None:
        """In the thread that opens; told in the loop, which is not held up by it."""
        self.worker.call_soon(partial(self.telemetry.host_memory_pinned, progress))

    async def _start_worker(self) -> TaskGroup:
        """The worker is under way when this returns: a task that was cancelled before its first step would take the
        caller with it. Not `TaskGroup.start`, which would wait for the shielded worker if it was cancelled itself."""
        async with AsyncExitStack() as stack:
            group = await stack.enter_async_context(anyio.create_task_group())
            stack.callback(self.worker.end)
            group.start_soon(self.worker.run, name="aoffload copy worker")
            await self.worker.has_begun.wait()
            stack.pop_all()
            return group
        raise RuntimeClosed("the copy worker was cancelled before it had begun")

    async def __aexit__(
        self, exc_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Live requests first, then what is queued, then what is in flight, each within bounds."""
        self._is_open = False
        self._close_requests()
        self.worker.is_accepting = False
        self.worker.discard_queued()
        deadline = anyio.current_time() + self.config.close_timeout_s
        try:
            # A launched copy can't be recalled, and its memory must outlive it: the one wait that is shielded.
            with anyio.CancelScope(shield=True, deadline=deadline):
                await self.worker.wait_idle()
                await self.env.run_in_thread(partial(self._close_transport, max(0.0, deadline - anyio.current_time())))
        finally:
            self._close_transport(0.0)
            self.worker.drain()
            self.worker.stop("the runtime was closed")
            self.telemetry.runtime_closed(len(self.ledger.jobs.quarantined))
            self.worker.end()
            assert self._group is not None
            await self._group.__aexit__(None, None, None)

    def _close_transport(self, timeout_s: float) -> None:
        """A device that does not let go is no reason for an engine not to end."""
        try:
            self.transport.close(timeout_s)
        except Exception as error:  # noqa: BLE001 - a driver error; what is in flight is quarantined
            self.telemetry.transport_failed(error)

    def _close_requests(self) -> None:
        for request in self._requests.values():
            request._close("runtime_closed")
            request._wake()
        for holding in tuple(self.ledger.holdings.values()):  # abandoned, and nobody has got round to it yet
            self._release(holding, "abandoned")
        self.ledger.drop_pins()
        self.ledger.cancel_errands()

    def _check_usable(self) -> None:
        if not self._is_open or os.getpid() != self._process_id or threading.get_ident() != self._thread_id:
            raise self._why_not()

    def _why_not(self) -> AoffloadError:
        """Why it is not usable here."""
        if self._process_id and os.getpid() != self._process_id:
            return WrongProcess("the runtime belongs to the process it was opened in, not to a fork of it")
        if not self._is_open:
            return RuntimeClosed("the runtime is not open: use it inside its `async with` block")
        return WrongThread("call the runtime in its event loop's thread (anyio.from_thread.run_sync gets there)")

    # -- requests -------------------------------------------------------------------------------------------------

    def request(
        self,
        token_ids: TokenIds,
        request_id: str | None = None,
        *,
        cache_salt: str | bytes | None = None,
        adapter_key: str | bytes | None = None,
        key_spans: Iterable[KeySpan] = (),
        deadline_s: float | None = None,
        max_hit_tokens: int | None = None,
        hit_alignment: int = 1,
        reads_cache: bool = True,
        store: StoreScope | str = StoreScope.ALL,
        max_store_tokens: int | None = None,
    ) -> Request:
        """A request for the prompt `token_ids` (one dimension of ids in `[0, 2**31)`, copied here).

        `cache_salt`, `adapter_key` and `key_spans` are part of what identifies KV: nothing is shared across them.
        `deadline_s` is counted from entering. `max_hit_tokens` and `hit_alignment` narrow what is taken from the cache,
        `reads_cache=False` takes nothing. `store` and `max_store_tokens` narrow what goes to the host: all of it, its
        prompt or nothing, and how many of its first tokens.

        An array is read here, however long it is. A list or tuple of more than 8,192 ids is read on entering, with
        turns for others in between, and has to stay as it is until then; `cancel(request_id)` finds it after that.
        """
        self._check_usable()
        seconds = None if deadline_s is None else _seconds("deadline_s", deadline_s)
        prompt = prompt_of(self._roots.of(cache_salt, adapter_key), token_ids, key_spans)
        options = RequestOptions(
            request_id, seconds, max_hit_tokens, hit_alignment, reads_cache, store, max_store_tokens
        )
        return Request(self, prompt, options)

    async def run(
        self, function: Callable[[Request], Awaitable[Result]], token_ids: TokenIds, /, **options: Any
    ) -> Result:
        """Run `function(request)` in a task of its own; its result. `RequestAborted` if it was cancelled meanwhile.

        Only this form spawns: whoever cancels the calling task, natively too, cancels nothing but this request.
        """
        check_callable("function", function)
        request = self.request(token_ids, **options)
        results: list[Result] = []
        errors: list[Exception] = []

        async def serve() -> None:
            try:
                async with request:
                    results.append(await function(request))
            except Exception as error:  # noqa: BLE001 - raised again in the caller's task, out of the group
                errors.append(error)

        async with anyio.create_task_group() as group:
            group.start_soon(serve, name=f"aoffload {request.request_id}")
        if errors:
            raise errors[0]
        if not results:
            raise RequestAborted(request.request_id, request.reason)
        return results[0]

    def cancel(self, request_id: str, reason: str = "cancelled") -> bool:
        """Cancel the live request of that id; whether there was one."""
        self._check_usable()
        reason = check_text("reason", reason)
        request_id = check_text("request_id", request_id)
        reference = self._entered.get(request_id)
        request = reference() if reference is not None else None
        if request is None:
            return False
        request._cancel(reason)
        return True

    def lookup(
        self,
        token_ids: TokenIds,
        *,
        cache_salt: str | bytes | None = None,
        adapter_key: str | bytes | None = None,
        key_spans: Iterable[KeySpan] = (),
    ) -> PrefixMatch:
        """What is cached of a prompt. Takes nothing, touches nothing: it may be gone at the next await."""
        self._check_usable()
        return self.ledger.lookup(self._prefix(token_ids, cache_salt, adapter_key, key_spans))

    def pin(self, token_ids: TokenIds, ttl_s: float, **identity: Unpack[Identity]) -> PinScope:
        """A `with` block in which what is cached of a prompt on entering stays cached, for at most `ttl_s`."""
        self._check_usable()
        return PinScope(self, self._prefix(token_ids, **identity), time_to_live(ttl_s))

    async def prefetch(self, token_ids: TokenIds, **identity: Unpack[Identity]) -> int:
        """Bring what is in host memory of a prompt onto the device; how many of its tokens are there then.

        Best effort: takes only room that nobody waits for, and never raises for a failed copy. Cancelled, it gives up
        what was not launched yet.
        """
        await anyio.lowlevel.checkpoint_if_cancelled()
        with self.prefetch_nowait(token_ids, **identity) as pending:
            return await pending.wait()

    def prefetch_nowait(self, token_ids: TokenIds, **identity: Unpack[Identity]) -> PendingPrefetch:
        """As `prefetch`, but goes on by itself."""
        self._check_usable()
        return PendingPrefetch(self, self._prefix(token_ids, **identity))

    async def demote(self, token_ids: TokenIds, **identity: Unpack[Identity]) -> int:
        """Send a prompt from the device to host memory; how many device blocks that gave back.

        What is pinned, what other cached prompts go on from, and what the host has no room for stays.
        """
        await anyio.lowlevel.checkpoint_if_cancelled()
        with self.demote_nowait(token_ids, **identity) as pending:
            return await pending.wait()

    def demote_nowait(self, token_ids: TokenIds, **identity: Unpack[Identity]) -> PendingDemotion:
        """As `demote`, but goes on by itself."""
        self._check_usable()
        return PendingDemotion(self, self._prefix(token_ids, **identity))

    def _prefix(
        self, token_ids: TokenIds, cache_salt: Any = None, adapter_key: Any = None, key_spans: Iterable[KeySpan] = ()
    ) -> Prefix:
        return Prefix.of(self._roots.of(cache_salt, adapter_key), token_ids, key_spans)

    def _admit(self, request: Request, prefix: Prefix, options: RequestOptions) -> Holding:
        self._check_usable()
        holding = self.ledger.admit(
            prefix,
            request_id=options.request_id,
            max_hit_tokens=options.max_hit_tokens,
            hit_alignment=options.hit_alignment,
            reads_cache=options.reads_cache,
            store=options.store,
            max_store_tokens=options.max_store_tokens,
        )
        self._entered[holding.request_id] = reference = ref(request)
        holding.when_idle = partial(_wake, reference)
        return holding

    @property
    def _requests(self) -> dict[str, Request]:
        """Those that were entered, and neither left nor abandoned."""
        found = {name: reference() for name, reference in self._entered.items()}
        return {name: request for name, request in found.items() if request is not None}

    def _release(self, holding: Holding, reason: str) -> None:
        self._entered.pop(holding.request_id, None)
        fence = self._fences.pop(holding.request_id, None)
        self.worker.submit(self.ledger.release(holding, reason), fence)
        if self._is_open:  # nobody comes back to a cache that closes
            self.worker.submit(self.ledger.plan_frontier())

    def _abandon(self, holding: Holding, scope: anyio.CancelScope | None) -> None:
        """Called by a request's finaliser: in any thread, or in this one in the middle of changing the ledger."""

        def let_go() -> None:
            if scope is not None:
                scope.deadline = math.inf  # it stays around a task that has nothing to do with this any more
            if not holding.is_over:
                self._release(holding, "abandoned")

        self._call_later(let_go)

    def _call_in_loop(self, function: Callable[[], None]) -> None:
        """Now, if this is the event loop's thread, and soon there if it is not."""
        if self._process_id and os.getpid() != self._process_id:
            raise self._why_not()
        if threading.get_ident() == self._thread_id:
            function()
        else:
            self.worker.call_soon(function)

    def _call_later(self, function: Callable[[], None]) -> None:
        """For finalisers: see `_abandon`."""
        if self._is_open and os.getpid() == self._process_id:
            self.worker.call_soon(function)

    # -- computing ------------------------------------------------------------------------------------------------

    @contextmanager
    def step(self, requests: Iterable[Request | PendingLoad]) -> Iterator[None]:
        """Hold the blocks of `requests` while a forward touches them, wherever it runs and whatever becomes of them.

        A pending load in place of its request: the forward starts on what is still on its way (see `PendingLoad`).
        """
        with self._hold(requests):
            yield

    def _hold(self, requests: Iterable[Request | PendingLoad]) -> AbstractContextManager[None]:
        self._check_usable()
        held: list[Holding] = []
        arriving: list[Holding] = []
        for one in as_tuple("requests", requests, "Request or PendingLoad"):
            if isinstance(one, PendingLoad):
                self._check_own("requests", one._request)
                arriving.append(one._arriving())
            else:
                held.append(self._check_own("requests", one)._live())
        return self.ledger.step(held, arriving)

    async def run_step(self, requests: Iterable[Request | PendingLoad], function: Callable[[], Result]) -> Result:
        """Run `function()` in a worker thread with the blocks of `requests` held until the *thread* is through.

        A natively cancelled asyncio task leaves a `with runtime.step(...)` while the thread it awaits still runs; here
        the step belongs to the thread, whatever becomes of the task that waits for it. It is over before that task goes
        on: another one may have preempted a request by then, and `commit` refuses it (`commit_step` leaves it out).
        """
        check_callable("function", function)
        with ExitStack() as stack:
            stack.enter_context(self._hold(requests))
            held = stack.pop_all()
        begun = threading.Lock()  # taken by the thread, or by whoever gives up before the thread has begun

        def compute() -> Result:
            if not begun.acquire(blocking=False):
                raise WrongState("nobody waits for this step any more")
            try:
                return function()
            finally:
                self.worker.call_soon(held.close)

        try:
            return await self.env.run_in_thread(compute)
        finally:
            if begun.acquire(blocking=False):
                held.close()
            else:
                self.worker.drain()  # a thread that is through has let go already: don't wait for the worker's turn

    def commit_step(self, computed: Iterable[Computed], after: Fence | None = None) -> None:
        """Commit for several requests of one forward behind one fence, all or nothing.

        Who was aborted or preempted meanwhile is left out: what was computed of it is gone.
        """
        self._check_usable()
        gone = (RequestState.DONE, RequestState.ABORTED, RequestState.PREEMPTED)
        each = [check_type("computed", one, Computed) for one in as_tuple("computed", computed, "Computed")]
        for one in each:
            self._check_own("computed", one.request)
        there = [(one.request._live(), one) for one in each if one.request.state not in gone]
        if len({holding for holding, _ in there}) < len(there):
            raise InvalidArgument("computed", "names a request twice")
        for holding, one in there:
            self.ledger.check_commit(holding, one.num_computed_tokens, one.new_token_ids)
        fence = self._fence_after(after)
        for holding, one in there:
            self._commit_behind(fence, holding, one.num_computed_tokens, one.new_token_ids)

    def _commit_behind(
        self, fence: Fence | None, holding: Holding, num_computed_tokens: int, new_token_ids: TokenIds
    ) -> None:
        plans = self.ledger.commit(holding, num_computed_tokens, new_token_ids)
        self._fences[holding.request_id] = fence
        if fence is None:
            self.worker.refuse(plans)
        else:
            self.worker.submit(plans, fence)
        # Behind no fence of one request: what is about to be evicted may have been computed by anybody.
        self.worker.submit(self.ledger.plan_frontier())

    def _check_own(self, name: str, request: Request) -> Request:
        if not isinstance(request, Request) or request._runtime is not self:
            raise InvalidArgument(name, f"holds what is no request of this runtime: {shown(request)}")
        return request

    def _fence_after(self, after: Fence | None) -> Fence | None:
        """The fence given by a caller, or one for what was given to the current stream so far."""
        if after is not None:
            check_has("after", after, "Fence", "query synchronize")
            return after
        return self._fence()

    def _fence(self) -> Fence | None:
        """None: the device records none. What is committed can be used on the device, but not stored."""
        if not self.worker.is_accepting:
            return None
        try:
            return self.transport.record_fence()
        except DeviceGone as error:
            self.worker.turn_off(str(error))
            return None
        except TransferRefused as error:
            self.telemetry.transport_failed(error)
            return None

    def _invalidate(self, holding: Holding, from_token: int) -> None:
        for tainted in self.ledger.invalidate(holding, from_token):
            self.cancel(tainted.request_id, "prefix_invalidated")

    # -- the whole ------------------------------------------------------------------------------------------------

    async def flush(self) -> None:
        """Wait until every transfer planned so far has landed, or is given up."""
        self._check_usable()
        await self.worker.wait_idle()

    async def reset(self, tier: Tier | None = None, timeout_s: float | None = None) -> tuple[int, ...]:
        """Forget everything cached, or what is cached in `tier`, and wait for the transfers in flight: what they bring
        there is not published any more. Returns the ids of the jobs that were not over within `timeout_s`; empty: all.

        Requests running meanwhile keep their blocks, but publish and store nothing, unless `tier` is a lower one.
        """
        self._check_usable()
        seconds = math.inf if timeout_s is None else _seconds("timeout_s", timeout_s)
        if seconds < 0:
            raise InvalidArgument("timeout_s", f"must not be negative, got {shown(timeout_s)}")
        self.ledger.reset(tier)
        self.worker.discard_queued()
        last_id = self.ledger.jobs.last_id
        with anyio.move_on_after(seconds):
            await self.worker.wait_over(last_id)
        return self.worker.in_flight_up_to(last_id)

    def statistics(self) -> RuntimeStatistics:
        found = self.ledger.statistics()
        transfers, off_reason = self.transport.statistics(), self.worker.off_reason
        return RuntimeStatistics(**attrs.asdict(found, recurse=False), transfers=transfers, off_reason=off_reason)

    def check_integrity(self) -> None:
        """Raise `IntegrityError` unless every block is in exactly one hand. Costs a look at every block."""
        self.ledger.check_integrity()


def _wake(reference: ref[Request]) -> None:
    request = reference()
    if request is not None:
        request._wake()


def _seconds(name: str, value: object) -> float:
    seconds = number_of(value)
    if seconds is None:
        raise InvalidArgument(name, f"must be a number of seconds, got {shown(value)}")
    return seconds


def _namespace_of(config: OffloadConfig) -> str:
    """The namespace as the root sees it: another layout of groups is another cache."""
    groups = ",".join(f"{group.name}:{group.block_size}" for group in config.groups)
    return f"{config.namespace}\n{groups}"
