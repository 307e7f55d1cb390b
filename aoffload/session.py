"""The session: what requests, loads and pins of one open runtime share. Who may call, who is here, behind which fence.

It knows requests by what it needs of them (`Entered`), so it stands below them.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable
from functools import partial
from typing import Protocol
from weakref import ref

import anyio
import attrs

from .arguments import check_has
from .config import OffloadConfig
from .core.ledger import Ledger
from .core.lifecycle import RequestState
from .core.owners import Holding
from .core.policy import StoreScope
from .env import Env
from .errors import AoffloadError, DeviceGone, RuntimeClosed, TransferRefused, WrongProcess, WrongThread
from .observers import Observers
from .prefix import Prefix, TokenIds
from .telemetry import Telemetry
from .transfer.fence import Fence
from .transfer.transport import Transport
from .worker import CopyWorker

__all__ = ["Entered", "RequestOptions", "Session"]


@attrs.frozen
class RequestOptions:
    """What a request was opened with, besides its tokens."""

    request_id: str | None
    deadline_s: float | None
    max_hit_tokens: int | None
    hit_alignment: int
    reads_cache: bool
    store: StoreScope | str
    max_store_tokens: int | None


class Entered(Protocol):
    """A request, as the session and its loads know it."""

    _session: Session
    _holding: Holding | None

    @property
    def state(self) -> RequestState: ...

    def _live(self) -> Holding:
        """Its holding; an error that says why, if it is over or the runtime closed."""
        ...

    def _close(self, reason: str) -> None:
        """Let go of everything, now."""
        ...

    def _cancel(self, reason: str) -> None:
        """Have its block end."""
        ...

    def _wake(self) -> None:
        """Have whoever waits in it look again."""
        ...

    async def _wait(self, event: anyio.Event) -> None:
        """Wait for `event`, or to be woken."""
        ...


class Session:
    """The ledger, the worker and the transport of one runtime while it is open, in one thread of one process."""

    def __init__(
        self,
        config: OffloadConfig,
        env: Env,
        ledger: Ledger,
        worker: CopyWorker,
        transport: Transport,
        telemetry: Telemetry,
        observers: Observers,
    ) -> None:
        self.config = config
        self.env = env
        self.ledger = ledger
        self.worker = worker
        self.transport = transport
        self.telemetry = telemetry
        self.observers = observers
        self.is_open = False
        self.running_task: Callable[[], object] = object
        """Which task runs; known once it has begun."""
        self.hashing: anyio.CapacityLimiter | None = None
        """Not the pool that a program's own threads fill: they may be waiting for us."""
        # Weak, or an abandoned request would never be noticed.
        self._entered: dict[str, ref[Entered]] = {}
        self._fences: dict[str, Fence | None] = {}
        """Behind the last commit of each live request: what is stored when it ends waits for that, too."""
        self._thread_id = 0
        self._process_id = 0

    # -- who may call ---------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """This thread's event loop is the one from here on. Once."""
        if self._process_id:
            raise RuntimeClosed("a runtime is entered once: make another one")
        self._thread_id, self._process_id = threading.get_ident(), os.getpid()
        self.running_task = self.env.running_task()
        self.hashing = anyio.CapacityLimiter(1)

    def check_usable(self) -> None:
        """Raise unless it is open, and this is its thread."""
        if not self.is_open or os.getpid() != self._process_id or threading.get_ident() != self._thread_id:
            raise self._why_not()

    def _why_not(self) -> AoffloadError:
        if self._process_id and os.getpid() != self._process_id:
            return WrongProcess("the runtime belongs to the process it was opened in, not to a fork of it")
        if not self.is_open:
            return RuntimeClosed("the runtime is not open: use it inside its `async with` block")
        return WrongThread("call the runtime in its event loop's thread (anyio.from_thread.run_sync gets there)")

    def call_in_loop(self, function: Callable[[], None]) -> None:
        """Now, if this is the event loop's thread, and soon there if it is not."""
        if self._process_id and os.getpid() != self._process_id:
            raise self._why_not()
        if threading.get_ident() == self._thread_id:
            function()
        else:
            self.worker.call_soon(function)

    def call_later(self, function: Callable[[], None]) -> None:
        """For finalisers: they run in any thread, or in this one in the middle of changing the ledger."""
        if self.is_open and os.getpid() == self._process_id:
            self.worker.call_soon(function)

    # -- who is here ----------------------------------------------------------------------------------------------

    @property
    def requests(self) -> dict[str, Entered]:
        """Those that were entered, and neither left nor abandoned."""
        found = {name: reference() for name, reference in self._entered.items()}
        return {name: request for name, request in found.items() if request is not None}

    def admit(self, request: Entered, prefix: Prefix, options: RequestOptions) -> Holding:
        self.check_usable()
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

    def release(self, holding: Holding, reason: str) -> None:
        """End a request: its stores wait for what was computed last."""
        self._entered.pop(holding.request_id, None)
        fence = self._fences.pop(holding.request_id, None)
        self.worker.submit(self.ledger.release(holding, reason), fence)
        if self.is_open:  # nobody comes back to a cache that closes
            self.worker.submit(self.ledger.plan_frontier())

    def abandon(self, holding: Holding, scope: anyio.CancelScope | None) -> None:
        """Called by a request's finaliser: see `call_later`."""

        def let_go() -> None:
            if scope is not None:
                scope.deadline = math.inf  # it stays around a task that has nothing to do with this any more
            if not holding.is_over:
                self.release(holding, "abandoned")

        self.call_later(let_go)

    def cancel(self, request_id: str, reason: str) -> bool:
        """Cancel the live request of that id; whether there was one."""
        reference = self._entered.get(request_id)
        request = reference() if reference is not None else None
        if request is None:
            return False
        request._cancel(reason)
        return True

    def close_requests(self) -> None:
        """End whatever is owned: nobody can use it any more."""
        for request in self.requests.values():
            request._close("runtime_closed")
            request._wake()
        for holding in tuple(self.ledger.holdings.values()):  # abandoned, and nobody has got round to it yet
            self.release(holding, "abandoned")
        self.ledger.drop_pins()
        self.ledger.cancel_errands()

    # -- what is computed -----------------------------------------------------------------------------------------

    def fence_after(self, after: Fence | None) -> Fence | None:
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

    def commit_behind(
        self, fence: Fence | None, holding: Holding, num_computed_tokens: int, new_token_ids: TokenIds
    ) -> None:
        """Publish what was computed; store it once `fence` has passed, if there is one."""
        plans = self.ledger.commit(holding, num_computed_tokens, new_token_ids)
        self._fences[holding.request_id] = fence
        if fence is None:
            self.worker.refuse(plans)
        else:
            self.worker.submit(plans, fence)
        # Behind no fence of one request: what is about to be evicted may have been computed by anybody.
        self.worker.submit(self.ledger.plan_frontier())

    def invalidate(self, holding: Holding, from_token: int) -> None:
        """Take back what was committed, and abort who may have read it."""
        for tainted in self.ledger.invalidate(holding, from_token):
            self.cancel(tainted.request_id, "prefix_invalidated")


def _wake(reference: ref[Entered]) -> None:
    request = reference()
    if request is not None:
        request._wake()
