"""How a runtime is made, opened and closed."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Any, Self

import anyio
from anyio.abc import TaskGroup

from .arguments import as_tuple, check_has, check_type
from .config import OffloadConfig
from .core.ledger import Ledger
from .core.pools import DevicePool, EngineBlocks
from .disk_work import DiskWork
from .env import Env
from .errors import ConfigError, InvalidArgument, RuntimeClosed, WrongThread
from .explained import Explained
from .fetch_gate import PrefillSpeed
from .load_costs import LoadCosts
from .observers import Observers, RuntimeObserver
from .opening import Opening
from .prefix import Roots
from .remote_work import RemoteWork
from .session import Session
from .session_life import SessionLife
from .telemetry import Telemetry
from .transfer.layout import check_block_sizes
from .transfer.local import LocalTransport
from .transfer.transport import TRANSPORTS, HasDisk, HasRemote, Transport, TransportDisk, TransportRemote
from .worker import CopyWorker

__all__ = ["RuntimeLife"]


class RuntimeLife(Explained):
    """The wiring of a runtime, from its making to its end. `OffloadRuntime` has the calls."""

    _session: Session

    def __init__(
        self,
        config: OffloadConfig,
        kv_caches: Any = None,
        *,
        transport: Transport | None = None,
        device_pool: DevicePool | None = None,
        engine_blocks: EngineBlocks | None = None,
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
        self.transport: Transport = (
            LocalTransport(kv_caches, disk=config.disk, remote=config.remote) if transport is None else transport
        )
        disk, remote = _disk_of(self.transport, config), _remote_of(self.transport, config)
        check_block_sizes(self.transport, config.groups)
        self.env = env if env is not None else Env()
        self.telemetry = Telemetry(logger)
        self.observers = Observers(self.telemetry, *as_tuple("observers", observers, "RuntimeObserver"))
        block_bytes = self.transport.block_bytes
        sessions: list[Session] = []  # not `self`: a thread of the transport would keep the runtime alive
        self.ledger = Ledger(
            config,
            self.transport.num_device_blocks,
            block_bytes=block_bytes,
            device_pool=device_pool,
            engine_blocks=engine_blocks,
            clock=None if engine_blocks is None else lambda: sessions[0].now(),
            observer=self.observers if len(self.observers.observers) > 1 else self.telemetry,
        )
        self.worker = CopyWorker(self.ledger, self.transport, config, self.env, self.telemetry)
        self._session = Session(
            config, self.env, self.ledger, self.worker, self.transport, self.telemetry, self.observers
        )
        sessions.append(self._session)
        if disk is not None:
            work = DiskWork(self.ledger, self.worker, disk, block_bytes, self.env, self.telemetry)
            self._session.disk = work
        if remote is not None:
            self._session.remote = RemoteWork(self.ledger, self.worker, remote, block_bytes, self.env, self.telemetry)
        chooses = config.load_choice != "always"
        if disk is not None or remote is not None or chooses:
            self._session.speed = speed = PrefillSpeed(config.prefill_tokens_per_s)
            if chooses:
                self._session.costs = LoadCosts(self.ledger, self.worker.copies, speed, self.telemetry.load_declined)
        if disk is not None or remote is not None:
            self.worker.after_settled = self._session.look_below
        has_own_ids = device_pool is not None or engine_blocks is not None
        self._opening = Opening(self._session, config.resolve_host_blocks(block_bytes), has_own_ids)
        self._roots = Roots(config.root_namespace)
        self._group: TaskGroup | None = None

    def __repr__(self) -> str:
        return f"<OffloadRuntime {'open' if self._session.is_open else 'closed'} {self.ledger!r}>"

    def __del__(self) -> None:
        opening = self.__dict__.get("_opening")  # missing if the constructor raised
        if opening is not None and opening.is_open and not self._session.is_in_fork:
            opening.let_go()  # first: a warning may be an error
            warnings.warn(
                f"{self!r} was abandoned: leave its async with block", ResourceWarning, stacklevel=2, source=self
            )

    def _remarks(self) -> Iterator[str]:
        for below in (self._session.disk, self._session.remote):
            if below is not None:
                yield from below.remarks()

    # -- life cycle -----------------------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        self._session.begin()
        self.worker.start()
        await self._opening.open()
        try:
            self._group = await self._start_worker()
        except BaseException:
            self._opening.close(self.config.close_timeout_s)  # nothing was launched: its threads end at once
            raise
        self._session.life = SessionLife.OPEN
        try:
            self._begin()
            if self._session.remote is not None:
                await self._session.remote.connect()
        except BaseException:  # no thread for a lower tier, say
            self._session.life = SessionLife.CLOSED
            await self._close()
            raise
        return self

    def _begin(self) -> None:
        """Say that it is open, and begin with the lower tiers."""
        self._opening.tell()
        if self._session.disk is not None:
            self._session.disk.begin()
        if self._session.remote is not None:
            self._session.remote.begin(self._session.hashing)

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
        """End live requests, drop queued jobs, then wait up to `close_timeout_s` for jobs in flight. With a disk, store
        before that what it lacks, for up to its `close_flush_s`.

        In another event loop, the runtime cannot wait, so it stores nothing: it ends its threads, closes its files, and
        raises `RuntimeClosed`. If a forked child leaves the block, nothing is closed, because the runtime belongs to
        the parent."""
        if self._session.is_in_fork:
            return
        if not self._session.is_bound:
            raise RuntimeClosed("the runtime was not entered: use `async with`")
        if self._session.is_elsewhere:
            raise WrongThread("leave the block of a runtime in the event loop's thread: it stays open")
        if not self._session.is_own_loop(self.env.running_loop()):
            if self._opening.is_open:
                self._opening.let_go()
            if error is None:
                raise RuntimeClosed("the event loop of the runtime is another one: it was closed without a wait")
            return
        self._session.life = SessionLife.CLOSED
        self._session.close_requests()
        if self._session.remote is not None:
            self._session.remote.end()
        try:
            if self._session.disk is not None:
                await self._session.disk.flush()
        finally:
            await self._close()

    async def _close(self) -> None:
        self.worker.refuse_all()
        deadline = anyio.current_time() + self.config.close_timeout_s
        try:
            # A launched copy can't be recalled, and its memory must outlive it: the one wait that is shielded.
            with anyio.CancelScope(shield=True, deadline=deadline):
                await self.worker.wait_idle()
                await self._opening.close_in_thread(max(0.0, deadline - anyio.current_time()))
        finally:
            self._opening.close(0.0)
            self.worker.drain()
            self.worker.stop("the runtime was closed")
            self.telemetry.runtime_closed(len(self.ledger.jobs.quarantined))
            self.worker.end()
            self._session.is_over = True
            assert self._group is not None
            await self._group.__aexit__(None, None, None)


def _disk_of(transport: Transport, config: OffloadConfig) -> TransportDisk | None:
    """The disk of `transport`, which has to be the one that `config` names."""
    found = transport.disk if isinstance(transport, HasDisk) else None
    if (None if found is None else found.tier) != config.disk:
        problem = "must be that of the transport: give it to LocalTransport, too; other transports have none"
        raise ConfigError("disk", problem)
    return found


def _remote_of(transport: Transport, config: OffloadConfig) -> TransportRemote | None:
    """The same for the remote tier."""
    found = transport.remote if isinstance(transport, HasRemote) else None
    if (None if found is None else found.tier) != config.remote:
        problem = "must be that of the transport: give it to LocalTransport, too; other transports have none"
        raise ConfigError("remote", problem)
    return found
