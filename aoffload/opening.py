"""Opening and closing a transport, directly or in a worker thread."""

from __future__ import annotations

import _thread
import threading
from contextlib import suppress
from functools import partial

import anyio
import attrs

from .core.hops import Tier
from .errors import TransferRefused
from .session import Session
from .session_life import SessionLife
from .transfer.claims import claim, unclaim
from .transfer.layout import described
from .transfer.local import LocalTransport
from .transfer.region import KVRegion
from .transfer.transport import HasDisk, HasRemote, PinProgress, ReportsPinning, SlowToOpen

__all__ = ["Opening"]


@attrs.define(eq=False)
class Opening:
    """Opens and closes the transport of one runtime."""

    session: Session
    num_host_blocks: int
    has_own_ids: bool
    """The program hands out the block ids of the device."""
    is_open: bool = attrs.field(default=False, init=False)
    """The transport is open, and its closing has not begun."""

    async def open(self) -> None:
        """Open the transport; in a worker thread if it opens slowly, since page-locking gigabytes takes seconds."""
        claim(self._regions, has_own_ids=self.has_own_ids)
        try:
            await self._open_claimed()
        except BaseException:
            if not self.is_open:
                unclaim(self._regions)
            raise

    @property
    def _regions(self) -> tuple[KVRegion, ...]:
        """Empty if the transport is the program's own."""
        transport = self.session.transport
        return transport.regions if isinstance(transport, LocalTransport) else ()

    async def _open_claimed(self) -> None:
        transport = self.session.transport
        if isinstance(transport, ReportsPinning):
            transport.report_pinning(self._hear_pinning)
        if isinstance(transport, HasDisk) and transport.disk is not None:
            transport.disk.identify(self.session.ledger.layout, self.session.config.root_namespace)
        if isinstance(transport, HasRemote) and transport.remote is not None:
            transport.remote.identify(self.session.ledger.layout, self.session.config.root_namespace)
        if isinstance(transport, SlowToOpen) and transport.opens_slowly:
            await self._open_in_thread()
        else:
            self._open()

    def tell(self) -> None:
        """Log that the runtime is open, and what it found."""
        transport, ledger = self.session.transport, self.session.ledger
        self.session.telemetry.runtime_opened(
            transport.num_device_blocks - 1,
            self.num_host_blocks,
            described(transport),
            engine_blocks=ledger.cache.tiers[Tier.DEVICE].is_outside,
        )

    def let_go(self) -> None:
        """Close the transport of a runtime whose `async with` block was never left. A new thread closes it, because a
        finaliser calls this method, and a finaliser may interrupt code that holds a lock that closing needs. The task
        of the worker ends in its event loop, if that still runs."""
        self.is_open = False
        session, timeout_s = self.session, self.session.config.close_timeout_s
        session.life = SessionLife.CLOSED
        session.worker.call_soon(session.worker.end)
        with suppress(RuntimeError):  # the interpreter is ending, and starts no threads
            _thread.start_new_thread(self.close, (timeout_s,))

    def close(self, timeout_s: float) -> None:
        """Close the transport, waiting up to `timeout_s` seconds. Errors are only logged, so that a device that fails
        does not keep the engine from ending."""
        self.is_open = False
        try:
            if self.session.transport.close(timeout_s):
                unclaim(self._regions)
        except Exception as error:  # noqa: BLE001 - a driver error; what is in flight is quarantined
            self.session.telemetry.transport_failed(error)

    async def close_in_thread(self, timeout_s: float) -> None:
        """Close in a thread, so that the event loop goes on; where there is none, in this one."""
        close = partial(self.close, timeout_s)
        try:
            await self.session.env.run_in_thread(close)
        except RuntimeError:
            close()

    def _open(self) -> None:
        session = self.session
        deliver = session.observers.hearing(session.worker.deliver)
        session.transport.open(self.num_host_blocks, verify=session.config.verify, deliver=deliver, env=session.env)
        self.is_open = True

    async def _open_in_thread(self) -> None:
        """Open in a thread, so that the event loop goes on. A native cancellation leaves the thread running; the task
        or the thread, whichever ends last, then closes the transport."""
        is_over = threading.Lock()  # taken by the thread when it has opened, or by the task when it has given up
        has_begun = threading.Event()
        timeout_s = self.session.config.close_timeout_s

        def open_or_close() -> None:
            has_begun.set()
            if is_over.locked():
                return  # the task gave up before the thread began
            self._open()
            if not is_over.acquire(blocking=False):
                self.close(timeout_s)

        try:
            await self.session.env.run_in_thread(open_or_close, anyio.CapacityLimiter(1))
        except BaseException as error:
            if not is_over.acquire(blocking=False):
                self.close(timeout_s)
            if isinstance(error, RuntimeError) and not has_begun.is_set():
                raise TransferRefused(f"there is no thread to open the transport in: {error}") from error
            raise

    def _hear_pinning(self, progress: PinProgress) -> None:
        """Called in the thread that opens; logs the progress in the event loop."""
        self.session.worker.call_soon(partial(self.session.telemetry.host_memory_page_locked, progress))
