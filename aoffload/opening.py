"""Opening and closing a transport: at once or in a thread, and whoever comes last closes what was opened."""

from __future__ import annotations

import threading
from functools import partial

import anyio
import attrs

from .session import Session
from .transfer.transport import PinProgress, ReportsPinning, SlowToOpen

__all__ = ["Opening"]


@attrs.define(eq=False)
class Opening:
    """What one runtime does with its transport, besides transfers."""

    session: Session
    num_host_blocks: int

    async def open(self) -> None:
        """Bring it up. Pinning gigabytes takes seconds: a transport that says so is opened in a thread."""
        transport = self.session.transport
        if isinstance(transport, ReportsPinning):
            transport.report_pinning(self._hear_pinning)
        if isinstance(transport, SlowToOpen) and transport.opens_slowly:
            await self._open_in_thread()
        else:
            self._open()

    def close(self, timeout_s: float) -> None:
        """Close it, or give it up once `timeout_s` are over. A device that does not let go is no reason for an engine
        not to end."""
        try:
            self.session.transport.close(timeout_s)
        except Exception as error:  # noqa: BLE001 - a driver error; what is in flight is quarantined
            self.session.telemetry.transport_failed(error)

    def _open(self) -> None:
        session = self.session
        deliver = session.observers.hearing(session.worker.deliver)
        session.transport.open(self.num_host_blocks, verify=session.config.verify, deliver=deliver, env=session.env)

    async def _open_in_thread(self) -> None:
        """The loop goes on meanwhile. A thread can't be recalled: natively cancelled, the task leaves it behind, and
        whoever of the two comes last closes what was opened."""
        is_over = threading.Lock()  # taken by the thread when it has opened, or by the task when it has given up
        timeout_s = self.session.config.close_timeout_s

        def open_or_close() -> None:
            if is_over.locked():
                return  # given up before it began
            self._open()
            if not is_over.acquire(blocking=False):
                self.close(timeout_s)

        try:
            await self.session.env.run_in_thread(open_or_close, anyio.CapacityLimiter(1))
        except BaseException:
            if not is_over.acquire(blocking=False):
                self.close(timeout_s)
            raise

    def _hear_pinning(self, progress: PinProgress) -> None:
        """In the thread that opens; told in the loop, which is not held up by it."""
        self.session.worker.call_soon(partial(self.session.telemetry.host_memory_pinned, progress))
