"""The runtime: it connects the ledger, the copy worker and the transport to one event loop.

    __aenter__   bind the session to the running loop, and the worker's wake-ups; open the transport; start the worker's
                 task, and wait until it runs; OPEN; begin with the lower tiers
    __aexit__    CLOSED: every call but a report raises from now on; release the requests; flush the disk; discard
                 queued copies; wait for copies in flight up to `close_timeout_s`; close the transport; end the worker

A launched copy cannot be recalled, and the memory that it touches must outlive it. Therefore one wait is shielded from
cancellation: the wait for copies in flight when the runtime closes. This wait has a bound. The destinations of copies
that are still in flight after it stay quarantined.

A transport may open slowly, because page-locking gigabytes takes seconds. It then opens in a worker thread. A native
cancellation does not wait for that thread, so a lock decides whether the task or the thread closes the transport.

A runtime whose block is never left is closed by its finaliser. Therefore no thread, and no function that a thread
calls, may refer to the runtime itself: `Opening` and the session have everything that closing needs. A request and a
pin do refer to the runtime, which keeps it open as long as they live.
"""

from __future__ import annotations

import _thread
import math
import threading
import warnings
from collections.abc import Awaitable, Callable, Iterable
from contextlib import AbstractContextManager, AsyncExitStack, suppress
from functools import partial
from types import TracebackType
from typing import Any, Generic, Self, TypeAlias, TypeVar, Unpack

import anyio
import attrs
from anyio.abc import TaskGroup

from .._common.arguments import (
    as_tuple,
    check_callable,
    check_has,
    check_int,
    check_names,
    check_text,
    check_type,
    shown,
)
from .._common.env import Env
from .._common.prefix import Identity, TokenIds, prompt_of
from .._common.tiers import DEVICE, Tier
from .._config.config import OffloadConfig
from .._extensions.assembly import Ledger, LedgerStatistics
from .._extensions.status import printable
from .._host_cache.host_cache import HostCache
from .._host_cache.protocols import EngineBlocks
from .._kernel.base import check_time
from .._kernel.events import Observer
from .._kernel.extension import LedgerExtension
from .._kernel.plans import PrefixMatch
from .._kernel.protocols import DevicePool
from .._observe.log import Telemetry
from .._observe.loggers import check_logger
from .._observe.observers import Observers
from .._tiers.disk.loop import DiskWork
from .._tiers.lower.extension import LowerTier
from .._tiers.lower.loop import LowerWork
from .._tiers.remote.loop import RemoteWork
from .._transfer.fences import Fence
from .._transfer.local import LocalTransport, check_block_sizes, described
from .._transfer.region import KVRegion, claim, unclaim
from .._transfer.transport import (
    TRANSPORTS,
    DiskStatistics,
    HasDisk,
    HasRemote,
    HasTiers,
    PinProgress,
    RemoteStatistics,
    ReportsPinning,
    SlowToOpen,
    TransferStatistics,
    Transport,
)
from ..errors import ConfigError, InvalidArgument, RequestAborted, RuntimeClosed, TransferRefused, WrongThread
from .costs import MOST_TOKENS, LoadCosts, PrefillSpeed, check_report
from .handles import (
    RuntimeDisk,
    RuntimeFetches,
    RuntimeHints,
    RuntimePins,
    RuntimeReports,
    RuntimeTransfers,
    RuntimeWeights,
)
from .loading import PendingLoad
from .request import EngineRequest, Request, RequestBase
from .session import AnyFace, PromptOptions, Session, SessionLife
from .steps import Computed, StepScope, commit_step, run_step
from .worker import CopyWorker


@attrs.define(eq=False)
class Opening:
    """Opens and closes the transport of one runtime."""

    session: Session[Any]
    num_host_blocks: int
    has_own_ids: bool
    """Whether the program hands out the block ids of the device."""
    is_open: bool = attrs.field(default=False, init=False)
    """Whether the transport is open, and its closing has not begun."""

    @property
    def _regions(self) -> tuple[KVRegion, ...]:
        """Empty if the transport is the program's own."""
        transport = self.session.transport
        return transport.regions if isinstance(transport, LocalTransport) else ()

    async def open(self) -> None:
        """Claim the memory, and open the transport; in a worker thread if it opens slowly."""
        session, transport = self.session, self.session.transport
        claim(self._regions, has_own_ids=self.has_own_ids)
        try:
            if isinstance(transport, ReportsPinning):
                transport.report_pinning(self._hear_pinning)
            layout, namespace = session.ledger.layout, session.config.root_namespace
            for work in session.lower_tiers:
                work.identify(layout, namespace)
            if isinstance(transport, SlowToOpen) and transport.opens_slowly:
                await self._open_in_thread()
            else:
                self._open()
        except BaseException:
            if not self.is_open:
                unclaim(self._regions)
            raise

    def _open(self) -> None:
        session = self.session
        deliver = session.observers.hearing(session.worker.copies.deliver)
        session.transport.open(self.num_host_blocks, verify=session.config.verify, deliver=deliver, env=session.env)
        self.is_open = True

    async def _open_in_thread(self) -> None:
        """Open in a thread, so that the event loop is not blocked. A native cancellation leaves the thread running. The
        task or the thread, whichever ends last, then closes the transport."""
        is_over = threading.Lock()  # taken by the thread when it has opened, or by the task when it has given up
        has_begun = threading.Event()
        timeout_s = self.session.config.close_timeout_s

        def open_or_close() -> None:
            has_begun.set()
            if is_over.locked():
                return  # the task has given up before the thread began: nothing is open
            self._open()
            if not is_over.acquire(blocking=False):
                self.close(timeout_s)

        try:
            await self.session.env.run_in_thread(open_or_close, anyio.CapacityLimiter(1))
        except BaseException as error:
            if not is_over.acquire(blocking=False):
                self.close(timeout_s)
            if isinstance(error, RuntimeError) and not has_begun.is_set():
                raise TransferRefused(f"cannot start a thread to open the transport: {error}") from error
            raise

    def _hear_pinning(self, progress: PinProgress) -> None:
        """Called in the thread that opens; logs the progress in the event loop."""
        self.session.worker.call_soon(partial(self.session.telemetry.host_memory_page_locked, progress))

    def close(self, timeout_s: float) -> None:
        """Close the transport, waiting up to `timeout_s` seconds. Errors are only logged, so that a device that fails
        does not keep the engine from ending."""
        self.is_open = False
        try:
            if self.session.transport.close(timeout_s):
                unclaim(self._regions)
        except Exception as error:  # noqa: BLE001 - a driver error; copies in flight are quarantined
            self.session.telemetry.transport_failed(error)

    async def close_in_thread(self, timeout_s: float) -> None:
        """Close in a thread, so that the event loop is not blocked. If no thread can be started, close in this one."""
        close = partial(self.close, timeout_s)
        try:
            await self.session.env.run_in_thread(close)
        except RuntimeError:
            close()

    def close_abandoned(self) -> None:
        """Close the transport of a runtime whose `async with` block was never left. A new thread closes it, because a
        finaliser calls this method, and a finaliser may interrupt code that holds a lock that closing needs. The task
        of the worker ends in its event loop, if that still runs."""
        self.is_open = False
        session, timeout_s = self.session, self.session.config.close_timeout_s
        session.life = SessionLife.CLOSED
        session.worker.call_soon(session.worker.end)
        with suppress(RuntimeError):  # the interpreter is ending, and starts no threads
            _thread.start_new_thread(self.close, (timeout_s,))


Result = TypeVar("Result")
AnyRequest = TypeVar("AnyRequest", bound=RequestBase[Any, Any])


@attrs.frozen
class RuntimeStatistics(LedgerStatistics):
    """A snapshot of all counts. `device` and `host` have num_blocks, num_free, num_cached, num_pinned,
    num_quarantined."""

    transfers: TransferStatistics
    disk_transfers: DiskStatistics | None = None
    """None without a disk."""
    remote_transfers: RemoteStatistics | None = None
    """None without a remote tier."""
    num_fetches_declined: int = 0
    """Number of times that a request computed tokens that a tier below the host had, because computing was faster."""
    num_fetches_skipped: int = 0
    """Number of times that a request computed because a tier below the host had failed and was disabled."""
    num_loads_declined: int = 0
    """Number of times that a request computed a part of its host hit, because computing was faster, or better for the
    requests after it."""
    off_reason: str = ""
    """Why the cache has turned itself off, so that nothing is loaded or stored any more. Empty while it is on."""


class RuntimeBase(Generic[AnyFace, AnyRequest]):
    """Base of `OffloadRuntime` and `HostCacheRuntime`: an async context manager around one engine's KV cache."""

    ledger: AnyFace
    """The ledger, for reading."""
    _request_class: type[AnyRequest]

    def __init__(
        self,
        config: OffloadConfig,
        kv_caches: Any,
        make_ledger: Callable[[int, int, Observer, Callable[[], float]], AnyFace],
        *,
        has_own_ids: bool,
        transport: Transport | None,
        env: Env | None,
        logger: Any,
        observers: Iterable[Observer],
        extensions: tuple[LedgerExtension, ...],
    ) -> None:
        """`make_ledger` gets the number of device blocks, the bytes of a block, the observer, and a clock that counts
        once the runtime is open. `has_own_ids`: the program hands out the block ids of the device. `extensions`: the
        program's own extensions of the ledger."""
        check_type("config", config, OffloadConfig)
        if (kv_caches is None) == (transport is None):
            raise InvalidArgument("kv_caches", "give either kv_caches or a transport, and not both")
        if transport is not None:
            check_has("transport", transport, "Transport", TRANSPORTS)
        if env is not None:
            check_type("env", env, Env)
        check_logger(logger)
        self.config = config
        self.transport: Transport = (
            LocalTransport(kv_caches, disk=config.disk, remote=config.remote) if transport is None else transport
        )
        disk = self.transport.disk if isinstance(self.transport, HasDisk) else None
        remote = self.transport.remote if isinstance(self.transport, HasRemote) else None
        for name, found, wanted in (("disk", disk, config.disk), ("remote", remote, config.remote)):
            if (None if found is None else found.tier) != wanted:
                problem = (
                    "must be the same in the transport: give it to LocalTransport, too; other transports have none"
                )
                raise ConfigError(name, problem)
        own_tiers = [extension for extension in extensions if isinstance(extension, LowerTier)]
        for extension in own_tiers:
            _check_copies(extension, self.transport)
        check_block_sizes(self.transport, config.groups)
        self.env = env if env is not None else Env()
        self.telemetry = Telemetry(logger)
        self.observers = Observers(self.telemetry, *as_tuple("observers", observers, "Observer"))
        block_bytes = self.transport.block_bytes
        sessions: list[Session[AnyFace]] = []  # not `self`: a thread of the transport would keep the runtime alive
        observer = self.observers if len(self.observers.observers) > 1 else self.telemetry
        self.ledger = make_ledger(self.transport.num_device_blocks, block_bytes, observer, lambda: sessions[0].now())
        self.worker = CopyWorker(self.ledger, self.transport, config, self.env, self.telemetry)
        self._session = session = Session(
            config, self.env, self.ledger, self.worker, self.transport, self.telemetry, self.observers
        )
        sessions.append(session)
        if disk is not None:
            session.disk = DiskWork(self.ledger, self.worker, disk, block_bytes, self.env, self.telemetry)
            session.indexed_tiers.append(session.disk)
        session.indexed_tiers += [LowerWork(self.ledger, self.worker, found, block_bytes) for found in own_tiers]
        session.lower_tiers += session.indexed_tiers
        if remote is not None:
            session.remote = RemoteWork(self.ledger, self.worker, remote, block_bytes, self.env, self.telemetry)
            session.lower_tiers.append(session.remote)
        if session.lower_tiers:
            _ = self.ledger.fetches  # made here, because any thread may read the handle
            session.speed = PrefillSpeed(config.prefill_tokens_per_s)
            self.worker.after_settled = session.store_below
        if config.load_choice != "always":
            session.speed = speed = session.speed or PrefillSpeed(config.prefill_tokens_per_s)
            session.costs = LoadCosts(self.ledger, self.worker.copies, speed, self.telemetry.load_declined)
        self._opening = Opening(session, config.resolve_host_blocks(block_bytes), has_own_ids)
        self._group: TaskGroup | None = None

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {'open' if self._session.is_open else 'closed'} {self.ledger!r}>"

    # -- life cycle -----------------------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        session = self._session
        session.begin()
        self.worker.start()
        await self._opening.open()
        try:
            self._group = await self._start_worker()
        except BaseException:
            self._opening.close(self.config.close_timeout_s)  # nothing was launched: its threads end immediately
            raise
        session.life = SessionLife.OPEN
        try:
            num_blocks, is_outside = (
                self.transport.num_device_blocks - 1,
                self.ledger.cache.tiers[DEVICE].is_outside,
            )
            own = {work.tier: work.extension.num_blocks for work in session.lower_tiers if isinstance(work, LowerWork)}
            self.telemetry.runtime_opened(
                num_blocks, self._opening.num_host_blocks, described(self.transport), engine_blocks=is_outside, own=own
            )
            for work in session.lower_tiers:
                await work.open(session.hashing)
        except BaseException:  # for example, there is no thread for a lower tier
            session.life = SessionLife.CLOSED
            await self._close()
            raise
        return self

    async def _start_worker(self) -> TaskGroup:
        """Start the worker's task and wait until it runs: cancelled before its first step, it would cancel the caller,
        too. Not `TaskGroup.start`, which would wait for the shielded worker if it was cancelled itself."""
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
        """End live requests, discard queued jobs, then wait up to `close_timeout_s` for jobs in flight. With a disk,
        first store the blocks that the disk lacks, for up to its `close_flush_s`.

        In another event loop, the runtime cannot wait, so it stores nothing: it ends its threads, closes its files, and
        raises `RuntimeClosed`. If a forked child leaves the block, nothing is closed, because the runtime belongs to
        the parent."""
        session = self._session
        if session.is_in_fork:
            return
        if not session.is_bound:
            raise RuntimeClosed("the runtime was not entered: use `async with`")
        if session.is_elsewhere:
            raise WrongThread("the runtime stays open: leave its block in the event loop's thread")
        if self.env.running_loop() is not session.loop:
            if self._opening.is_open:
                self._opening.close_abandoned()
            if error is None:
                raise RuntimeClosed(
                    "the runtime belongs to another event loop: it was closed without waiting for copies"
                )
            return
        session.life = SessionLife.CLOSED
        session.close_requests()
        for work in session.lower_tiers:
            work.end()
        try:
            for work in session.lower_tiers:
                await work.flush()
        finally:
            await self._close()

    async def _close(self) -> None:
        self.worker.copies.is_accepting = False
        self.worker.copies.discard_queued()
        deadline = anyio.current_time() + self.config.close_timeout_s
        try:
            # A launched copy can't be recalled, and its memory must outlive it: the one wait that is shielded.
            with anyio.CancelScope(shield=True, deadline=deadline):
                await self.worker.wait_idle()
                await self._opening.close_in_thread(max(0.0, deadline - anyio.current_time()))
        finally:
            self._opening.close(0.0)
            self.worker.drain()
            self.worker.copies.stop("the runtime was closed")
            self.telemetry.runtime_closed(len(self.ledger.jobs.quarantined))
            self.worker.end()
            self._session.is_over = True
            assert self._group is not None
            await self._group.__aexit__(None, None, None)

    def __del__(self) -> None:
        opening = self.__dict__.get("_opening")  # missing if the constructor raised
        if opening is not None and opening.is_open and not self._session.is_in_fork:
            opening.close_abandoned()  # first: a warning may be an error
            warnings.warn(
                f"{self!r} was abandoned: leave its async with block", ResourceWarning, stacklevel=2, source=self
            )

    # -- requests -------------------------------------------------------------------------------------------------

    def _request(self, token_ids: TokenIds, request_id: str | None, options: dict[str, Any]) -> AnyRequest:
        """A request for the prompt `token_ids`. `options` are those of `request`, checked here."""
        session = self._session
        session.check_usable()
        seconds, cache_salt, adapter_key, key_spans = None, None, None, ()
        if options:
            deadline_s = options.pop("deadline_s", None)
            seconds = None if deadline_s is None else check_time("deadline_s", deadline_s)
            if seconds is not None and seconds < 0:  # no error: the rest of a time-out may be negative
                over = "has passed before the request begins; None means no deadline"
                warnings.warn(f"deadline_s: {shown(deadline_s)} {over}", UserWarning, stacklevel=3)
            cache_salt, adapter_key = options.pop("cache_salt", None), options.pop("adapter_key", None)
            key_spans = options.pop("key_spans", ())
        prompt = prompt_of(session.roots.of(cache_salt, adapter_key), token_ids, key_spans)
        request = self._request_class(session, prompt, request_id, seconds, options)
        request._runtime = self
        return request

    async def _run(self, function: Callable[[AnyRequest], Awaitable[Result]], request: AnyRequest) -> Result:
        """Run `function(request)` in a new task; returns its result."""
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
        """Cancel the live request with that id. Returns whether there was one."""
        self._session.check_usable()
        reason = check_text("reason", reason)
        return self._session.cancel(check_text("request_id", request_id), reason)

    # -- computing ------------------------------------------------------------------------------------------------

    def report_queue(self, num_tokens: int) -> None:
        """Report that the engine will compute `num_tokens` tokens of prompts before those of the next request. Call it
        at each step, or never. If you never call it, the runtime counts the tokens that requests have to compute after
        their loads."""
        self._session.check_usable()
        check_int("num_tokens", num_tokens, 0, MOST_TOKENS)
        if self._session.costs is not None:
            self._session.costs.report_queue(num_tokens)

    def report_compute(self, num_tokens: int, seconds: float) -> None:
        """Report that computing `num_tokens` tokens of prompts took `seconds`. For engines whose steps the runtime does
        not see: with a `HostCacheRuntime`, or where a commit comes before its forward is over."""
        self._session.check_usable()
        check_report(num_tokens, seconds)
        if self._session.speed is not None:
            self._session.speed.report(num_tokens, float(seconds))

    # -- cached prompts -------------------------------------------------------------------------------------------

    def lookup(self, token_ids: TokenIds, **identity: Unpack[Identity]) -> PrefixMatch:
        """The cached part of a prompt. The call pins and refreshes nothing, so this part may be evicted at the next
        await."""
        return self.ledger.lookup(self._session.prefix(f"{type(self).__name__}.lookup", token_ids, identity))

    # -- handles --------------------------------------------------------------------------------------------------

    @property
    def pins(self) -> RuntimePins:
        """Keep cached prompts from eviction."""
        return RuntimePins(self._session, self)

    @property
    def fetches(self) -> RuntimeFetches:
        """Fetch prompts from the tiers below the host. `ConfigError("disk")` if there is no such tier."""
        _ = self.ledger.fetches
        return RuntimeFetches(self._session, self)

    @property
    def hints(self) -> RuntimeHints:
        """Act on hints, in which clients predict the future of their prompts."""
        return RuntimeHints(self._session, self)

    @property
    def disk(self) -> RuntimeDisk:
        """Wait for the blocks that an earlier process has left on the disk. `ConfigError("disk")` without a disk."""
        _ = self.ledger.disk
        return RuntimeDisk(self._session, self)

    @property
    def weights(self) -> RuntimeWeights:
        """Change the weights' epoch."""
        return RuntimeWeights(self._session, self)

    @property
    def reports(self) -> RuntimeReports:
        """The holders of device blocks, and the cause of each request's wait."""
        return RuntimeReports(self._session, self)

    # -- whole cache ----------------------------------------------------------------------------------------------

    async def flush(self) -> None:
        """Wait until every transfer planned so far has ended or was given up."""
        self._session.check_usable()
        self._session.check_loop()
        await self.worker.wait_idle()

    async def reset(self, tier: Tier | None = None, timeout_s: float | None = None) -> tuple[int, ...]:
        """Drop the whole cache, or that of `tier`, and end all pins. Wait for the transfers in flight, which publish
        nothing in a tier that was dropped. Returns the ids of the jobs that are not over within `timeout_s` seconds
        (None: no limit); empty if all are.

        After a reset of the whole cache or of the device, no request begins to compute with KV from before it: a
        request whose load is not over, because `load`, `resume` or `PendingLoad.wait` has not returned, computes from
        its first token. After a reset of a lower tier alone, such a load continues. Requests whose load is over, or
        that compute without a load, keep their blocks and continue. If one of them has begun no step and committed
        nothing since its load, a further `load` gives up its old blocks and returns 0. Requests from before the reset
        publish and store nothing any more, unless `tier` is below the device.

        No restart finds blocks that were on the disk before the reset. If the disk cannot guarantee that,
        `TransferRefused` is raised. The runtime then stops using a disk that has failed. If the disk is only late, the
        runtime uses it again once the reset is complete. The cells of a remote store stay there for other users of its
        namespace, and this runtime stops using the store.
        """
        self._session.check_usable()
        self._session.check_loop()
        seconds = math.inf if timeout_s is None else check_time("timeout_s", timeout_s)
        if seconds < 0:
            raise InvalidArgument("timeout_s", f"must not be negative, got {shown(timeout_s)}")
        self.ledger.reset(tier)
        self.worker.copies.discard_queued()
        last_id, deadline = self.ledger.jobs.last_id, anyio.current_time() + seconds
        for work in reversed(self._session.lower_tiers):  # first the remote store, because the disk may raise
            await work.reset(tier, min(seconds, self.config.transfer_timeout_s))
        with anyio.CancelScope(deadline=deadline):
            await self.worker.wait_over(last_id)
        return self.worker.copies.in_flight_up_to(last_id)

    # -- reports --------------------------------------------------------------------------------------------------

    def explain(self) -> str:
        """The contents of `reports.requests()` and `reports.holders()` as a table to print."""
        self._session.check_may_read()
        remarks = [remark for work in self._session.lower_tiers for remark in work.remarks()]
        return "\n".join((self.ledger.explain(), *map(printable, remarks)))

    def statistics(self) -> RuntimeStatistics:
        """The counts of blocks, requests, jobs and transfers at this moment."""
        self._session.check_may_read()
        found = self.ledger.statistics()
        disk, remote = self._session.disk, self._session.remote
        return RuntimeStatistics(
            **attrs.asdict(found, recurse=False),
            transfers=self.transport.statistics(),
            disk_transfers=None if disk is None else disk.disk.statistics(),
            remote_transfers=None if remote is None else remote.remote.statistics(),
            num_fetches_declined=self._session.num_fetches_declined,
            num_fetches_skipped=sum(work.num_fetches_skipped for work in self._session.lower_tiers),
            num_loads_declined=0 if self._session.costs is None else self._session.costs.num_declined,
            off_reason=self.worker.copies.off_reason,
        )

    def check_integrity(self) -> None:
        """Raise `IntegrityError` unless every block has exactly one owner. Scans every block."""
        self._session.check_may_read()
        self.ledger.check_integrity()


AnyRuntime: TypeAlias = RuntimeBase[Any, Any]


class OffloadRuntime(RuntimeBase[Ledger, Request]):
    """An async context manager around the KV cache of one engine. The runtime allocates the device blocks.

    `kv_caches`: a tensor `[num_blocks, ...]`, a sequence or mapping of them, or `KVRegion`s, all of one block pool;
    row 0 is the null block. `transport` replaces them if the tensors are elsewhere. `device_pool` hands out the block
    ids; by default a free list of the runtime's own. `observers` receive the same events as the log. `extensions` are
    features of the program's own; a `LowerTier` needs a `transport` with its copies. An engine that has a block pool
    and a prefix cache itself uses `HostCacheRuntime`.

    Leaving the block aborts live requests, discards queued copies, and waits up to `close_timeout_s` for launched
    ones. End the tasks of your requests first (docs/howto/the-promise.md). If the block is never left, the garbage
    collector closes the runtime without a wait, and warns with a `ResourceWarning`. A second open runtime over the same
    memory is refused, unless you hand out the block ids of both.
    """

    _request_class = Request

    def __init__(
        self,
        config: OffloadConfig,
        kv_caches: Any = None,
        *,
        transport: Transport | None = None,
        device_pool: DevicePool | None = None,
        env: Env | None = None,
        logger: Any = None,
        observers: Iterable[Observer] = (),
        extensions: Iterable[LedgerExtension] = (),
    ) -> None:
        own = as_tuple("extensions", extensions, "LedgerExtension")

        def make_ledger(num_blocks: int, block_bytes: int, observer: Observer, _: Callable[[], float]) -> Ledger:
            return Ledger(
                config, num_blocks, block_bytes=block_bytes, device_pool=device_pool, observer=observer,
                extensions=own,
            )  # fmt: skip

        super().__init__(
            config, kv_caches, make_ledger, has_own_ids=device_pool is not None, transport=transport, env=env,
            logger=logger, observers=observers, extensions=own,
        )  # fmt: skip
        self._session.last_step = self.ledger.last_step
        if self.ledger.writes_back:
            self._session.plan_write_back = self.ledger.write_back.plan

    def request(self, token_ids: TokenIds, request_id: str | None = None, **options: Unpack[PromptOptions]) -> Request:
        """A request for the prompt `token_ids` (one dimension of ids in `[0, 2**31)`, copied here).

        `cache_salt`, `adapter_key` and `key_spans` are part of the identity of KV: KV is shared only between requests
        for which they are equal. `deadline_s` counts from entering. `max_hit_tokens` and `hit_alignment` limit the
        cache hit; `reads_cache=False` disables it. `store` (all, the prompt, or nothing) and `max_store_tokens` (first
        tokens) limit the blocks that are stored to the host.

        An array of any length is read here. A list or tuple of more than 8,192 ids is read on entering, with turns for
        other tasks in between. It must not change until then, and `cancel(request_id)` finds the request only later.
        """
        if options:
            check_names("OffloadRuntime.request", options, PromptOptions)
        return self._request(token_ids, request_id, {**options})

    async def run(
        self,
        function: Callable[[Request], Awaitable[Result]],
        token_ids: TokenIds,
        /,
        request_id: str | None = None,
        **options: Unpack[PromptOptions],
    ) -> Result:
        """Run `function(request)` in a new task; returns its result. `RequestAborted` if the request was cancelled.

        Only this method spawns a task for a request: cancelling the caller, natively too, cancels only this request.
        """
        check_callable("function", function)
        return await self._run(function, self.request(token_ids, request_id, **options))

    def step(self, requests: Iterable[Request | PendingLoad]) -> AbstractContextManager[None]:
        """Hold the blocks of `requests` while a forward uses them, in any thread, even if a request ends meanwhile.

        A load waits only for the steps that used its destination blocks, and not for all compute so far. So once you
        use steps, run every forward in one, even if you may discard its result, and commit once for each step. If you
        never use steps, loads wait for all compute so far.

        Pass a pending load in place of its request to start the forward before the load is over (see `PendingLoad`).
        """
        self._session.check_usable()
        return StepScope(self._session, requests)

    async def run_step(self, requests: Iterable[Request | PendingLoad], function: Callable[[], Result]) -> Result:
        """Run `function()` in a worker thread and hold the blocks of `requests` until the *thread* has finished.

        A natively cancelled asyncio task leaves a `with runtime.step(...)` while the thread that it awaits still runs;
        here the step belongs to the thread. A task that waits to the end continues immediately: if its first call is a
        commit, no other task can preempt a request before it. `cancel` and a deadline of a request wait for the thread,
        too.
        """
        return await run_step(self._session, requests, function)

    def commit_step(self, computed: Iterable[Computed], after: Fence | None = None) -> tuple[Request, ...]:
        """Commit several requests of one forward after one fence, all or nothing.

        Requests that have ended or were preempted meanwhile are left out and returned, even if they were resumed since:
        the KV computed for them is lost.
        """
        return commit_step(self._session, computed, after)

    @property
    def transfers(self) -> RuntimeTransfers:
        """Prefetch and demote prompts."""
        return RuntimeTransfers(self._session, self)


class EnginePromptOptions(PromptOptions, total=False):
    """The options of `HostCacheRuntime.request`."""

    num_device_tokens: int
    """Leading tokens of the prompt that the engine's own prefix cache has. Default: 0."""


class HostCacheRuntime(RuntimeBase[HostCache, EngineRequest]):
    """An async context manager around host memory, for an engine that has a block pool and a prefix cache of its own.

    `engine_blocks` is the engine's pool (docs/engines.md). `kv_caches`, `transport`, `observers` and `extensions` are
    those of `OffloadRuntime`.
    """

    _request_class = EngineRequest

    def __init__(
        self,
        config: OffloadConfig,
        kv_caches: Any = None,
        *,
        engine_blocks: EngineBlocks,
        transport: Transport | None = None,
        env: Env | None = None,
        logger: Any = None,
        observers: Iterable[Observer] = (),
        extensions: Iterable[LedgerExtension] = (),
    ) -> None:
        own = as_tuple("extensions", extensions, "LedgerExtension")

        def make_cache(num_blocks: int, block_bytes: int, observer: Observer, clock: Callable[[], float]) -> HostCache:
            return HostCache(
                config, num_blocks, engine_blocks, clock=clock, block_bytes=block_bytes, observer=observer,
                extensions=own,
            )  # fmt: skip

        super().__init__(
            config, kv_caches, make_cache, has_own_ids=True, transport=transport, env=env, logger=logger,
            observers=observers, extensions=own,
        )  # fmt: skip

    def request(
        self, token_ids: TokenIds, request_id: str | None = None, **options: Unpack[EnginePromptOptions]
    ) -> EngineRequest:
        """A request for the prompt `token_ids`, as from `OffloadRuntime.request`, which documents the options.
        `num_device_tokens`: leading tokens in the engine's own cache."""
        if options:
            check_names("HostCacheRuntime.request", options, EnginePromptOptions)
        return self._request(token_ids, request_id, {**options})

    async def run(
        self,
        function: Callable[[EngineRequest], Awaitable[Result]],
        token_ids: TokenIds,
        /,
        request_id: str | None = None,
        **options: Unpack[EnginePromptOptions],
    ) -> Result:
        """As `OffloadRuntime.run`, with an `EngineRequest`."""
        check_callable("function", function)
        return await self._run(function, self.request(token_ids, request_id, **options))

    def offer_deferred(self, after: Fence | None = None) -> None:
        """Call this at the beginning of each step. Stores blocks that offers have deferred because too many blocks were
        in flight, up to the bound of stores in flight. This includes blocks of requests that are over, because `find`
        returns the engine's block that holds their KV.

        `after` is a fence after all compute so far; None: after all work on the current stream so far.
        """
        session = self._session
        session.check_usable()
        if after is not None or self.ledger.deferred_requests:
            after = session.fence_after(after)
        session.store(self.ledger.offer_deferred(), after)


def _check_copies(extension: LowerTier, transport: Transport) -> None:
    """`ConfigError("extensions")` unless `transport` copies to and from the tier of `extension`."""
    copies = transport.tiers.get(extension.tier) if isinstance(transport, HasTiers) else None
    if copies is None:
        problem = "give its copies to LocalTransport as `tiers`, and that as `transport`"
        raise ConfigError("extensions", f"add the tier {extension.tier.name}, which the transport lacks: {problem}")
