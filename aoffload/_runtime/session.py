"""Whether a session is open, and the one thread of one process that it belongs to.

The session: what requests, loads and pins of one open runtime share.

It knows the entered requests, and records the fences of commits. It sees requests only as
`Entered`, so that it does not depend on their module.
"""

from __future__ import annotations

import enum
import math
import os
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol
from weakref import ref

import anyio
import attrs

from .._arguments import check_has
from .._config.config import OffloadConfig
from .._extensions.store_policies import StoreScope
from .._kernel.ledger import Ledger
from .._kernel.plans import TransferPlan
from .._kernel.prefix import Prefix, TokenIds
from .._kernel.requests import LedgerRequest
from .._kernel.states import RequestState
from .._observe.log import Telemetry
from .._observe.observers import Observers
from .._tiers.disk.loop import DiskWork
from .._tiers.remote.loop import RemoteWork
from .._transfer.fences import Fence, StepFences
from .._transfer.transport import Transport, WaitsOnlyAfter
from ..env import Env
from ..errors import AoffloadError, DeviceGone, RuntimeClosed, TransferRefused, WrongProcess, WrongThread
from .costs import LoadCosts, PrefillSpeed
from .worker import CopyWorker, SlowWatch

__all__ = ["Entered", "RequestOptions", "Session", "SessionLife"]


class SessionLife(enum.Enum):
    NEW = "new"
    """Also while it opens."""
    OPEN = "open"
    CLOSED = "closed"
    """Also while it closes."""


@attrs.frozen
class RequestOptions:
    """The options of a request, besides its tokens."""

    request_id: str | None
    deadline_s: float | None
    max_hit_tokens: int | None
    hit_alignment: int
    reads_cache: bool
    store: StoreScope | str
    max_store_tokens: int | None
    num_device_tokens: int


class Entered(Protocol):
    """A request, as the session and its loads see it."""

    _session: Session
    _record: LedgerRequest | None

    @property
    def state(self) -> RequestState: ...

    def _left_s(self) -> float | None:
        """Seconds until its deadline; None: it has none."""
        ...

    def _live(self) -> LedgerRequest:
        """Its record. Raises if the request is over or the runtime is closed."""
        ...

    def _with_blocks(self) -> LedgerRequest:
        """Its record. As `_live`, and raises also if the request has no blocks."""
        ...

    def _close(self, reason: str) -> None:
        """Release everything now."""
        ...

    def _cancel(self, reason: str) -> None:
        """Cancel its block."""
        ...

    def _wake(self) -> None:
        """Make the tasks that wait in it check again."""
        ...

    async def _wait(self, event: anyio.Event) -> None:
        """Wait for `event`, which `_wake` sets, too."""
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
        self.life = SessionLife.NEW
        self.is_over = False
        """Closing has ended: nothing changes any more, so any thread may read."""
        self.step_threads: set[int] = set()
        """Ids of the threads in which `run_step` calls its functions."""
        self._thread_id = 0
        self._process_id = 0
        self._loop: object = None
        self.worker = worker
        self.config = config
        self.env = env
        self.ledger = ledger
        self.transport = transport
        self.telemetry = telemetry
        self.observers = observers
        self.disk: DiskWork | None = None
        """Set where the transport has a disk."""
        self.remote: RemoteWork | None = None
        """Set where the transport has a remote tier."""
        self.speed: PrefillSpeed | None = None
        """Set where a tier below the host is: fetches compete with computing."""
        self.costs: LoadCosts | None = None
        """Set where not all that could be loaded is."""
        self.num_fetches_declined = 0
        """Times that computing was sooner than a fetch would have been."""
        self.running_task: Callable[[], object] = object
        """Returns the current task; set by `begin`."""
        self.now: Callable[[], float] = float
        """The event loop's clock, also outside of a task; set by `begin`."""
        self.slow: SlowWatch
        """Set by `begin`."""
        self.hashing: anyio.CapacityLimiter | None = None
        """For hashing threads. The program's threads may fill the default limiter while they wait for the runtime."""
        # Weak, or an abandoned request would never be noticed.
        self._entered: dict[str, ref[Entered]] = {}
        waits_only_after = isinstance(transport, WaitsOnlyAfter) and transport.waits_only_after
        self._step_fences = StepFences() if waits_only_after else None
        self._fences: dict[str, Fence | None] = {}
        """The fence of each live request's last commit; stores at the end of the request wait for it, too."""

    @property
    def is_open(self) -> bool:
        return self.life is SessionLife.OPEN

    @property
    def is_bound(self) -> bool:
        """Whether the session was ever opened."""
        return bool(self._process_id)

    @property
    def is_in_fork(self) -> bool:
        """Whether this process is a forked child, which has only a copy of the runtime and must not use it."""
        return bool(self._process_id) and os.getpid() != self._process_id

    @property
    def is_elsewhere(self) -> bool:
        """Whether this is not the thread of the event loop."""
        return threading.get_ident() != self._thread_id

    def check_usable(self) -> None:
        """Raise unless the runtime is open and this is its process and thread."""
        if not self.is_open or os.getpid() != self._process_id or threading.get_ident() != self._thread_id:
            raise self._why_not()

    def check_may_look(self) -> None:
        """Raise if the runtime belongs to another process, or if another thread may be changing it. The runtime does
        not change before it is opened, nor after it is closed."""
        if self._process_id and not self.is_over and (self.is_in_fork or self.is_elsewhere):
            raise self._why_not_here()

    def check_loop(self, running: object) -> None:
        """Raise in any event loop other than that of the runtime, even in the same thread. No wait would end there,
        because completions wake the loop in which the runtime was opened."""
        if self.is_open and not self.is_in_fork and not self.is_elsewhere and running is not self._loop:
            raise WrongThread("the runtime belongs to the event loop that it was opened in: make one for each loop")

    def is_own_loop(self, running: object) -> bool:
        return running is self._loop

    def _why_not(self) -> AoffloadError:
        if self.is_in_fork:
            return self._why_not_here()
        if self.life is SessionLife.CLOSED:
            return RuntimeClosed("the runtime is closed: its `async with` block is over")
        if not self.is_open:
            return RuntimeClosed("the runtime is not open: use it inside its `async with` block")
        return self._why_not_here()

    def _why_not_here(self) -> AoffloadError:
        if self.is_in_fork:
            return WrongProcess("the runtime belongs to the process it was opened in, not to a fork of it")
        if threading.get_ident() in self.step_threads:
            return WrongThread(
                "the function of `run_step` runs in a worker thread, which may not call the runtime: read `block_ids`, "
                "and whatever else it needs, before `run_step`, and commit after it"
            )
        return WrongThread(
            "call the runtime in its event loop's thread: read `block_ids` there, before another thread begins to "
            "compute (anyio.from_thread.run_sync gets back there)"
        )

    def call_in_loop(self, function: Callable[[], None]) -> None:
        """Call `function` now in the event loop's thread; from another thread, have it called there soon."""
        if self.is_in_fork:
            raise self._why_not()
        if threading.get_ident() == self._thread_id:
            function()
        else:
            self.worker.call_soon(function)

    def leave_in_loop(self, function: Callable[[], None]) -> None:
        """As `call_in_loop`, for the end of a `with` block. In a forked child it does nothing, because the child owns
        nothing that has to end."""
        if not self.is_in_fork:
            self.call_in_loop(function)

    def call_later(self, function: Callable[[], None]) -> None:
        """For finalisers, which run in any thread, or in the middle of a ledger change. Does nothing once closed."""
        if self.is_open and os.getpid() == self._process_id:
            self.worker.call_soon(function)

    def begin(self) -> None:
        """Bind to the event loop of this thread. `RuntimeClosed` the second time."""
        if self._process_id:
            raise RuntimeClosed("a runtime is entered once: make another one")
        self._loop = self.env.running_loop()
        self._thread_id, self._process_id = threading.get_ident(), os.getpid()
        self.running_task, self.now = self.env.running_task(), self.env.loop_clock()
        self.ledger._moves.clock = self.now  # not given to the ledger when it is made: there was no loop yet
        self.slow = self.worker.slow = SlowWatch(self.ledger, self.config, self.observers, self.now)
        self.hashing = anyio.CapacityLimiter(1)

    # -- requests -------------------------------------------------------------------------------------------------

    @property
    def requests(self) -> dict[str, Entered]:
        """Requests that were entered and are neither left nor abandoned, by id."""
        found = {name: reference() for name, reference in self._entered.items()}
        return {name: request for name, request in found.items() if request is not None}

    def admit(self, request: Entered, prefix: Prefix, options: RequestOptions) -> LedgerRequest:
        self.check_usable()
        record = self.ledger.admit(
            prefix,
            request_id=options.request_id,
            max_hit_tokens=options.max_hit_tokens,
            hit_alignment=options.hit_alignment,
            reads_cache=options.reads_cache,
            store=options.store,
            max_store_tokens=options.max_store_tokens,
            num_device_tokens=options.num_device_tokens,
        )
        self.bound(record, options.deadline_s)
        self._entered[record.request_id] = reference = ref(request)
        record.when_idle = partial(_wake, reference)
        return record

    def bound(self, record: LedgerRequest, left_s: float | None) -> None:
        """Called where `record` was matched. An engine that owns the device blocks is told what is to be loaded."""
        if self.costs is not None and self.ledger.is_engine_owned:
            self.costs.bound(record, left_s)

    def load_limit(self, record: LedgerRequest, max_tokens: int | None, left_s: float | None) -> int | None:
        """The `max_tokens` for a load that was asked for with `max_tokens`. An engine was told before."""
        if self.costs is None or self.ledger.is_engine_owned:
            return max_tokens
        return self.costs.limit(record, max_tokens, left_s)

    def release(self, record: LedgerRequest, reason: str) -> None:
        """End a request; its stores wait for the fence of its last commit."""
        self._entered.pop(record.request_id, None)
        if self.speed is not None:
            self.speed.forget(record.request_id)
        if self.costs is not None:
            self.costs.forget(record.request_id)
        fence = self._fences.pop(record.request_id, None)
        self.worker.submit(self.ledger.release(record, reason), fence)
        if self.is_open:  # no write-back into a cache that closes
            self._write_back()

    def abandon(self, record: LedgerRequest, scope: anyio.CancelScope | None) -> None:
        """End a request that was never left. Called by its finaliser, see `call_later`."""

        def let_go() -> None:
            if scope is not None:
                scope.deadline = math.inf  # it stays around a task that no longer serves this request
            if not record.is_over:
                self.release(record, "abandoned")

        self.call_later(let_go)

    def cancel(self, request_id: str, reason: str) -> bool:
        """Cancel the live request with that id. Returns whether there was one."""
        reference = self._entered.get(request_id)
        request = reference() if reference is not None else None
        if request is None:
            return False
        request._cancel(reason)
        return True

    def cancelled(self, record: LedgerRequest, reason: str) -> None:
        """Its block is being cancelled. It holds what it has until its task has left the block."""
        record.reason = reason
        self.observers.request_cancelled(record, reason)

    def close_requests(self) -> None:
        """End all requests, pins, prefetches and demotions."""
        for request in self.requests.values():
            request._close("runtime_closed")
            request._wake()
        for record in tuple(self.ledger.live_requests.values()):  # abandoned, and not released yet
            self.release(record, "abandoned")
        self.ledger.drop_pins()
        self.ledger.cancel_cache_transfers()

    # -- loads ----------------------------------------------------------------------------------------------------

    def step_ends(self) -> None:
        """Called before a step ends in the ledger: record the fence for loads that need blocks of this step."""
        if self._step_fences is not None:
            self._step_fences.ended(self.ledger.num_steps_ended + 1, self._fence())

    def submit_transfers(self, plans: Sequence[TransferPlan]) -> None:
        """Launch planned copies. A load waits for the steps that used its destinations, or for all compute so far if
        those steps are unknown. A store waits for all compute so far."""
        if plans:
            fences = self._step_fences
            self.worker.submit(plans, None if fences is None else fences.before_load(self.ledger.last_step(plans)))

    # -- commits --------------------------------------------------------------------------------------------------

    def fence_after(self, after: Fence | None) -> Fence | None:
        """`after`; if it is None, a new fence behind all work on the current stream, or None if there can be none."""
        if after is not None:
            check_has("after", after, "Fence", "query synchronize")
            return after
        return self._fence()

    def _fence(self) -> Fence | None:
        """None if none can be recorded: what is committed then can be used on the device, but not stored."""
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
        self, fence: Fence | None, record: LedgerRequest, num_computed_tokens: int, new_token_ids: TokenIds
    ) -> None:
        """Publish what was computed; store it once `fence` has passed, or not at all without a fence."""
        before = record.num_computed_tokens
        plans = self.ledger.commit(record, num_computed_tokens, new_token_ids)
        if self.speed is not None and fence is not None and _has_passed(fence):
            self.speed.computed(record.request_id, record.num_computed_tokens - before, self.now())
        if self.costs is not None:
            self.costs.computed(record.request_id, record.num_computed_tokens - before)
        self._fences[record.request_id] = fence
        if plans:
            self._store_behind(fence, plans)
        self._write_back()

    def _write_back(self) -> None:
        """Store what is about to be evicted. Not behind the fence of a commit: any request may have computed it."""
        if self.ledger.writes_back and (plans := self.ledger.plan_write_back()):
            self.worker.submit(plans)
        self.look_below()

    def look_below(self) -> None:
        """Have lower tiers store what they should have. Called after whatever may have changed that."""
        if self.disk is not None:
            self.disk.look()
        if self.remote is not None:
            self.remote.look()

    def offer_behind(
        self,
        fence: Fence | None,
        record: LedgerRequest,
        num_computed_tokens: int,
        block_ids: Sequence[Sequence[int]],
        new_token_ids: TokenIds,
        *,
        is_last: bool,
    ) -> None:
        """Store from an engine's blocks once `fence` has passed, or not at all without a fence."""
        before = record.num_computed_tokens
        plans = self.ledger.offer(record, num_computed_tokens, block_ids, new_token_ids, is_last=is_last)
        if self.costs is not None:
            self.costs.computed(record.request_id, record.num_computed_tokens - before)
        self._store_behind(fence, plans)

    def offer_deferred(self, after: Fence | None) -> None:
        """Store the engine's blocks that earlier offers have deferred, once `after` has passed."""
        if after is not None or self.ledger.deferred_requests:
            after = self.fence_after(after)
        self._store_behind(after, self.ledger.offer_deferred())

    def _store_behind(self, fence: Fence | None, plans: Sequence[TransferPlan]) -> None:
        if fence is None:
            self.worker.refuse(plans)
        else:
            self.worker.submit(plans, fence)

    def invalidate(self, record: LedgerRequest, from_token: int) -> None:
        """Invalidate what was committed from `from_token` on, and abort requests that may have read it."""
        for tainted in self.ledger.invalidate(record, from_token):
            self.cancel(tainted.request_id, "prefix_invalidated")
        if self.disk is not None:
            self.disk.take_back()
        if self.remote is not None:
            self.remote.look()


def _has_passed(fence: Fence) -> bool:
    """Whether the compute before `fence` is known to be over."""
    try:
        return fence.query()
    except Exception:  # noqa: BLE001 - a driver error: whoever waits for the fence meets it
        return False


def _wake(reference: ref[Entered]) -> None:
    request = reference()
    if request is not None:
        request._wake()
