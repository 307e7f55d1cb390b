"""The session: the state that the requests, loads, pins and steps of one open runtime share.

A runtime belongs to one event loop, in one thread of one process. The ledger has no locks: each of its calls is
synchronous, so the ledger does not change between two awaits. Therefore every call of the runtime is checked first:

    check_usable     a call that changes something: the runtime is open, and this is its process and its thread
    check_may_read   a report: the same, but any thread may read before opening and after closing, because nothing
                     changes then
    check_loop       a call that waits: this is also its event loop, because completions wake no other loop
    call_in_loop     `cancel`: calls immediately in the loop's thread, and soon from any other thread
    leave_in_loop    the end of a `with` block: the same; does nothing in a forked child, which only has a copy
    call_later       a finaliser: always calls soon, because a finaliser may interrupt a change of the ledger

The session registers each entered request by a weak reference, so that the garbage collector can find a request that
was abandoned. The session also has the fence of each request's last commit, because the stores at the end of a request
wait for that fence.

`Entered` is the part of a request that the session, its loads and the lower tiers need. With it, the session does not
import the request's own module.
"""

from __future__ import annotations

import enum
import math
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from threading import get_ident
from typing import Any, Final, Generic, Protocol, TypeVar
from weakref import ref

import anyio

from .._common.arguments import check_has, check_names
from .._common.env import Env
from .._common.prefix import Identity, Prefix, Roots, TokenIds
from .._config.config import OffloadConfig
from .._extensions.assembly import AnyLedger
from .._extensions.pins import Pins
from .._extensions.transfers import CacheTransfers
from .._kernel.events import WorkerFailed
from .._kernel.plans import RequestOptions, TransferPlan
from .._kernel.records import LedgerRequest, Waiter
from .._observe.log import Telemetry
from .._observe.observers import Observers
from .._tiers.disk.loop import DiskWork
from .._tiers.lower.loop import LowerWork, TierWork
from .._tiers.remote.loop import RemoteWork
from .._transfer.fences import Fence, StepFences, is_known_to_have_passed
from .._transfer.transport import Transport, WaitsOnlyAfter
from ..errors import AoffloadError, DeviceGone, RuntimeClosed, TransferRefused, WrongProcess, WrongThread
from .costs import LoadCosts, PrefillSpeed
from .worker import CopyWorker, SlowWatch

AnyFace = TypeVar("AnyFace", bound=AnyLedger)
"""A `Ledger` or a `HostCache`."""


class SessionLife(enum.Enum):
    NEW = "new"
    """Includes the time while it opens."""
    OPEN = "open"
    CLOSED = "closed"
    """Includes the time while it closes."""


OPEN: Final = SessionLife.OPEN
CLOSED: Final = SessionLife.CLOSED


class PromptOptions(Identity, RequestOptions, total=False):
    """The options of `OffloadRuntime.request`: the identity of the KV, the options of the ledger, and a deadline."""

    deadline_s: float | None
    """Seconds from entering until the request is cancelled. None (the default): no deadline."""


class Entered(Protocol):
    """A request, with the methods that the session, its loads and the lower tiers call."""

    _session: Any

    @property
    def _record(self) -> LedgerRequest | None: ...

    def _left_s(self) -> float | None:
        """Seconds until its deadline; None: it has none."""
        ...

    def _live(self) -> Any:
        """Its record. Raises if the request is over or the runtime is closed."""
        ...

    def _plan_load(
        self,
        record: Any,
        max_tokens: int | None,
        max_job_bytes: int | None,
        into: Mapping[str, Any],
    ) -> tuple[TransferPlan, ...]:
        """Plan the load of its host hit."""
        ...

    def _cancel(self, reason: str) -> None:
        """Cancel its block."""
        ...

    def _matched(self, record: Any) -> None:
        """`record` was matched."""
        ...

    def _wake(self) -> None:
        """Make the tasks that wait in this request check their conditions again."""
        ...

    async def _wait(self, bound_s: float | None = None) -> bool:
        """Wait until `_wake`, at most `bound_s` seconds. Returns whether it timed out."""
        ...

    async def _wait_for_blocks(self, waiter: Waiter | None) -> None:
        """Wait until `_wake`. Reports a long wait of `waiter`, and returns then, too."""
        ...


class Session(Generic[AnyFace]):
    """The ledger, the worker and the transport of one runtime while it is open, in one thread of one process."""

    def __init__(
        self,
        config: OffloadConfig,
        env: Env,
        ledger: AnyFace,
        worker: CopyWorker,
        transport: Transport,
        telemetry: Telemetry,
        observers: Observers,
    ) -> None:
        self.life = SessionLife.NEW
        self.is_over = False
        """Whether closing has ended: nothing changes any more, so any thread may read."""
        self.step_threads: set[int] = set()
        """Ids of the threads in which `run_step` calls its functions."""
        self.loop: object = None
        """The event loop of the runtime; set by `begin`."""
        self._thread_id = 0
        self._process_id = 0
        self.worker = worker
        self.config = config
        self.env = env
        self.ledger = ledger
        self.transport = transport
        self.telemetry = telemetry
        self.observers = observers
        self.disk: DiskWork | None = None
        """Set if the transport has a disk."""
        self.remote: RemoteWork | None = None
        """Set if the transport has a remote tier."""
        self.indexed_tiers: list[DiskWork | LowerWork] = []
        """The tiers below the host whose blocks the index knows, nearest first."""
        self.lower_tiers: list[TierWork] = []
        """The tiers below the host, nearest first."""
        self.roots = Roots(config.root_namespace)
        self.speed: PrefillSpeed | None = None
        """Set if a fetch or a load competes with computing."""
        self.costs: LoadCosts | None = None
        """Set if `load_choice` may decline a part of a hit."""
        self.last_step: Callable[[Sequence[TransferPlan]], int] = _unknown
        """The number of the last step that may have used the destinations of loads; 0 if it is unknown."""
        self.plan_write_back: Callable[[], Sequence[TransferPlan]] | None = None
        """Set if the store policy has a watermark."""
        self.num_fetches_declined = 0
        """Number of fetches that were declined because computing was faster."""
        self.running_task: Callable[[], object] = object
        """Returns the current task; set by `begin`."""
        self.now: Callable[[], float] = float
        """The event loop's clock, also outside of a task; set by `begin`."""
        self.slow: SlowWatch
        """Set by `begin`."""
        self.hashing: anyio.CapacityLimiter | None = None
        """Limits hashing threads. The program's threads may fill the default limiter while they wait for the
        runtime."""
        self._entered: dict[str, ref[Entered]] = {}
        waits_only_after = isinstance(transport, WaitsOnlyAfter) and transport.waits_only_after
        self.step_fences = StepFences() if waits_only_after else None
        """The fences at the ends of steps, for loads into the blocks of these steps."""
        self._fences: dict[str, Fence | None] = {}
        """The fence of each live request's last commit."""

    # -- checks of the caller -------------------------------------------------------------------------------------

    @property
    def is_open(self) -> bool:
        return self.life is OPEN

    @property
    def is_bound(self) -> bool:
        """Whether the session was ever opened."""
        return bool(self._process_id)

    @property
    def is_here(self) -> bool:
        """Whether this is the process of the runtime, and the thread of its event loop."""
        return os.getpid() == self._process_id and get_ident() == self._thread_id

    @property
    def is_in_fork(self) -> bool:
        """Whether this process is a forked child, which has only a copy of the runtime and must not use it."""
        return bool(self._process_id) and os.getpid() != self._process_id

    @property
    def is_elsewhere(self) -> bool:
        """Whether this is not the thread of the event loop."""
        return get_ident() != self._thread_id

    def check_usable(self) -> None:
        """Raise unless the runtime is open and this is its process and thread."""
        if self.life is not OPEN or os.getpid() != self._process_id or get_ident() != self._thread_id:
            raise self._why_not()

    def check_may_read(self) -> None:
        """Raise if the runtime belongs to another process, or if another thread may be changing it. The runtime does
        not change before it is opened or after it is closed."""
        if self._process_id and not self.is_over and not self.is_here:
            raise self._why_not_here()

    def check_loop(self) -> None:
        """Raise in any event loop other than that of the runtime, even in the same thread. A wait in another loop would
        never end, because completions wake only the loop in which the runtime was opened."""
        if self.env.running_loop() is not self.loop and self.life is OPEN and self.is_here:
            raise WrongThread("the runtime belongs to the event loop that it was opened in: make one for each loop")

    def _why_not(self) -> AoffloadError:
        if self.is_in_fork:
            return self._why_not_here()
        if self.life is CLOSED:
            return RuntimeClosed("the runtime is closed: its `async with` block is over")
        if not self.is_open:
            return RuntimeClosed("the runtime is not open: use it inside its `async with` block")
        return self._why_not_here()

    def _why_not_here(self) -> AoffloadError:
        if self.is_in_fork:
            return WrongProcess("the runtime belongs to the process it was opened in, not to a fork of it")
        if get_ident() in self.step_threads:
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
        if self.is_here:
            function()
        elif self.is_in_fork:
            raise self._why_not_here()
        else:
            self.worker.call_soon(function)

    def leave_in_loop(self, function: Callable[[], None]) -> None:
        """As `call_in_loop`, for the end of a `with` block. In a forked child it does nothing, because the child owns
        nothing that has to end."""
        if os.getpid() == self._process_id:
            self.call_in_loop(function)

    def call_later(self, function: Callable[[], None]) -> None:
        """For finalisers, which run in any thread, or in the middle of a ledger change. Does nothing once closed."""
        if self.life is OPEN and os.getpid() == self._process_id:
            self.worker.call_soon(function)

    def begin(self) -> None:
        """Bind to the event loop of this thread. `RuntimeClosed` the second time."""
        if self._process_id:
            raise RuntimeClosed("a runtime can be entered only once: make another one")
        self.loop = self.env.running_loop()
        self._thread_id, self._process_id = get_ident(), os.getpid()
        self.running_task, self.now = self.env.running_task(), self.env.loop_clock()
        self.ledger.report_errors()
        self.ledger.moves.clock = self.now  # not given to the ledger when it is made: there was no loop yet
        self.slow = self.worker.slow = SlowWatch(self.ledger, self.config, self.observers, self.now)
        self.hashing = anyio.CapacityLimiter(1)

    def prefix(self, call: str, token_ids: TokenIds, identity: Identity) -> Prefix:
        """The prompt of the verb `call`."""
        check_names(call, identity, Identity)
        self.check_usable()
        root = self.roots.of(identity.get("cache_salt"), identity.get("adapter_key"))
        return Prefix.of(root, token_ids, identity.get("key_spans", ()))

    # -- requests -------------------------------------------------------------------------------------------------

    @property
    def requests(self) -> dict[str, Entered]:
        """Requests that were entered and were not left or abandoned, by id."""
        found = {name: reference() for name, reference in self._entered.items()}
        return {name: request for name, request in found.items() if request is not None}

    def enter(self, request: Entered, record: LedgerRequest) -> None:
        """Register `request`, whose record was admitted just now."""
        self._entered[record.request_id] = ref(request)
        if self.costs is None:
            return
        try:
            request._matched(record)
        except BaseException as error:  # a load choice of the program's own raised: the request is not entered
            self.release(record, f"error: {type(error).__name__}")
            raise

    def cancel(self, request_id: str, reason: str) -> bool:
        """Cancel the live request with that id. Returns whether there was one."""
        reference = self._entered.get(request_id)
        request = reference() if reference is not None else None
        if request is None:
            return False
        request._cancel(reason)
        return True

    def release(self, record: LedgerRequest, reason: str) -> None:
        """End a request, unless it is over. Its stores wait for the fence of its last commit."""
        if record.is_over:
            return
        self._entered.pop(record.request_id, None)
        if self.speed is not None:
            self.speed.forget(record.request_id)
        if self.costs is not None:
            self.costs.forget(record.request_id)
        fence = self._fences.pop(record.request_id, None)
        self.worker.submit(self.ledger.release(record, reason), fence)
        if self.life is OPEN:  # no write-back into a cache that closes
            self.write_back()

    def end(self, record: LedgerRequest, reason: str) -> None:
        """As `release`, for callers that cannot handle an error of the store policy. The error is reported."""
        try:
            self.release(record, reason)
        except Exception as error:
            if not record.is_over:  # the ledger itself has failed
                raise
            self.telemetry.observe(WorkerFailed(error))

    def abandon(self, record: LedgerRequest, scope: anyio.CancelScope | None) -> None:
        """End a request that was never left. Called by its finaliser, see `call_later`."""

        def let_go() -> None:
            if scope is not None:
                scope.deadline = math.inf  # it stays around a task that no longer serves this request
            self.end(record, "abandoned")

        self.call_later(let_go)

    def close_requests(self) -> None:
        """End all requests, pins, prefetches and demotions."""
        for request in self.requests.values():
            if request._record is not None:
                self.end(request._record, "runtime_closed")
            request._wake()
        for record in tuple(self.ledger.live_requests.values()):  # abandoned, and not released yet
            self.end(record, "abandoned")
        if (pins := self.ledger.find(Pins)) is not None:
            pins.drop()
        if (transfers := self.ledger.find(CacheTransfers)) is not None:
            transfers.cancel_all()

    # -- copies ---------------------------------------------------------------------------------------------------

    def submit_transfers(self, plans: Sequence[TransferPlan]) -> None:
        """Launch planned copies. A load waits for the steps that used its destinations, or for all compute so far if
        those steps are unknown. A store waits for all compute so far."""
        if plans:
            fences = self.step_fences
            self.worker.submit(plans, None if fences is None else fences.before_load(self.last_step(plans)))

    def fence_after(self, after: Fence | None) -> Fence | None:
        """`after`; if it is None, a new fence after all work on the current stream. None if no fence can be recorded:
        then commits are published on the device, but not stored."""
        if after is not None:
            check_has("after", after, "Fence", "query synchronize")
            return after
        if not self.worker.copies.is_accepting:
            return None
        try:
            return self.transport.record_fence()
        except DeviceGone as error:
            self.worker.copies.turn_off(str(error))
            return None
        except TransferRefused as error:
            self.telemetry.transport_failed(error)
            return None

    def was_committed(
        self, record: LedgerRequest, before: int, plans: Sequence[TransferPlan], fence: Fence | None
    ) -> None:
        """Count the tokens that a commit of `record`, which had computed `before`, has added. Store its `plans` once
        `fence` has passed."""
        if self.speed is not None and fence is not None and is_known_to_have_passed(fence):
            self.speed.computed(record.request_id, record.num_computed_tokens - before, self.now())
        if self.costs is not None:
            self.costs.computed(record.request_id, record.num_computed_tokens - before)
        self._fences[record.request_id] = fence
        if plans:
            self.store(plans, fence)
        self.write_back()

    def store(self, plans: Sequence[TransferPlan], fence: Fence | None) -> None:
        """Store once `fence` has passed. Without a fence, discard the plans."""
        if fence is None:
            self.worker.copies.refuse(plans)
        else:
            self.worker.submit(plans, fence)

    def write_back(self) -> None:
        """Store the blocks that are about to be evicted. These stores wait for all compute so far, and not for the
        fence of a commit, because any request may have computed the blocks."""
        if self.plan_write_back is not None and (plans := self.plan_write_back()):
            self.worker.submit(plans)
        for work in self.lower_tiers:
            work.store_more()

    def store_below(self) -> None:
        """Let the lower tiers plan their stores. Called after each change after which there may be more to store."""
        for work in self.lower_tiers:
            work.store_more()


def _unknown(_: Sequence[TransferPlan]) -> int:
    return 0


def weak_wake(request: Entered) -> Callable[[], None]:
    """A callback that calls `request._wake`, and does not keep `request` alive."""
    return partial(_wake, ref(request))


def _wake(reference: ref[Entered]) -> None:
    request = reference()
    if request is not None:
        request._wake()
