"""The session: what requests, loads and pins of one open runtime share.

It knows the entered requests, and records the fences of commits. It sees requests only as
`Entered`, so that it does not depend on their module.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
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
from .core.plan import TransferPlan
from .core.policy import StoreScope
from .disk_work import DiskWork
from .env import Env
from .errors import DeviceGone, TransferRefused
from .fetch_gate import PrefillSpeed
from .load_costs import LoadCosts
from .observers import Observers
from .prefix import Prefix, TokenIds
from .remote_work import RemoteWork
from .session_life import BoundSession
from .slow import SlowWatch
from .telemetry import Telemetry
from .transfer.fence import Fence
from .transfer.step_fences import StepFences
from .transfer.transport import Transport, WaitsOnlyAfter
from .worker import CopyWorker

__all__ = ["Entered", "RequestOptions", "Session"]


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
    _holding: Holding | None

    @property
    def state(self) -> RequestState: ...

    def _left_s(self) -> float | None:
        """Seconds until its deadline; None: it has none."""
        ...

    def _live(self) -> Holding:
        """Its holding. Raises if the request is over or the runtime is closed."""
        ...

    def _with_blocks(self) -> Holding:
        """Its holding. As `_live`, and raises also if the request has no blocks."""
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


class Session(BoundSession):
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
        super().__init__(worker)
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

    def begin(self) -> None:
        """Bind to the event loop of this thread. `RuntimeClosed` the second time."""
        self.bind(self.env.running_loop())
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
            num_device_tokens=options.num_device_tokens,
        )
        self.bound(holding, options.deadline_s)
        self._entered[holding.request_id] = reference = ref(request)
        holding.when_idle = partial(_wake, reference)
        return holding

    def bound(self, holding: Holding, left_s: float | None) -> None:
        """Called where `holding` was matched. An engine that owns the device blocks is told what is to be loaded."""
        if self.costs is not None and self.ledger.is_engine_owned:
            self.costs.bound(holding, left_s)

    def load_limit(self, holding: Holding, max_tokens: int | None, left_s: float | None) -> int | None:
        """The `max_tokens` for a load that was asked for with `max_tokens`. An engine was told before."""
        if self.costs is None or self.ledger.is_engine_owned:
            return max_tokens
        return self.costs.limit(holding, max_tokens, left_s)

    def release(self, holding: Holding, reason: str) -> None:
        """End a request; its stores wait for the fence of its last commit."""
        self._entered.pop(holding.request_id, None)
        if self.speed is not None:
            self.speed.forget(holding.request_id)
        if self.costs is not None:
            self.costs.forget(holding.request_id)
        fence = self._fences.pop(holding.request_id, None)
        self.worker.submit(self.ledger.release(holding, reason), fence)
        if self.is_open:  # no write-back into a cache that closes
            self._write_back()

    def abandon(self, holding: Holding, scope: anyio.CancelScope | None) -> None:
        """End a request that was never left. Called by its finaliser, see `call_later`."""

        def let_go() -> None:
            if scope is not None:
                scope.deadline = math.inf  # it stays around a task that no longer serves this request
            if not holding.is_over:
                self.release(holding, "abandoned")

        self.call_later(let_go)

    def cancel(self, request_id: str, reason: str) -> bool:
        """Cancel the live request with that id. Returns whether there was one."""
        reference = self._entered.get(request_id)
        request = reference() if reference is not None else None
        if request is None:
            return False
        request._cancel(reason)
        return True

    def cancelled(self, holding: Holding, reason: str) -> None:
        """Its block is being cancelled. It holds what it has until its task has left the block."""
        holding.ends_for(reason)
        self.observers.request_cancelled(holding, reason)

    def close_requests(self) -> None:
        """End all requests, pins, prefetches and demotions."""
        for request in self.requests.values():
            request._close("runtime_closed")
            request._wake()
        for holding in tuple(self.ledger.holdings.values()):  # abandoned, and not released yet
            self.release(holding, "abandoned")
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
        self, fence: Fence | None, holding: Holding, num_computed_tokens: int, new_token_ids: TokenIds
    ) -> None:
        """Publish what was computed; store it once `fence` has passed, or not at all without a fence."""
        before = holding.num_computed_tokens
        plans = self.ledger.commit(holding, num_computed_tokens, new_token_ids)
        if self.speed is not None and fence is not None and _has_passed(fence):
            self.speed.computed(holding.request_id, holding.num_computed_tokens - before, self.now())
        if self.costs is not None:
            self.costs.computed(holding.request_id, holding.num_computed_tokens - before)
        self._fences[holding.request_id] = fence
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
        holding: Holding,
        num_computed_tokens: int,
        block_ids: Sequence[Sequence[int]],
        new_token_ids: TokenIds,
        *,
        is_last: bool,
    ) -> None:
        """Store from an engine's blocks once `fence` has passed, or not at all without a fence."""
        before = holding.num_computed_tokens
        plans = self.ledger.offer(holding, num_computed_tokens, block_ids, new_token_ids, is_last=is_last)
        if self.costs is not None:
            self.costs.computed(holding.request_id, holding.num_computed_tokens - before)
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

    def invalidate(self, holding: Holding, from_token: int) -> None:
        """Invalidate what was committed from `from_token` on, and abort requests that may have read it."""
        for tainted in self.ledger.invalidate(holding, from_token):
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
