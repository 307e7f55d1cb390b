"""The copy queue: launches planned jobs, bounds what is in flight, and gives up what takes too long.

    submit(plans)     queue; launch what the bounds allow, loads before stores
    deliver(done)     from any thread: a copy has ended
    advance()         settle what was delivered, give up what is late, launch what waits

It has no thread, no event loop and no timer. The worker of `OffloadRuntime` drives it from an event loop; an engine
that steps calls `advance` once a step.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any, Protocol, runtime_checkable

import attrs

from .._arguments import check_bool, check_callable, check_has, check_int, check_type
from .._config.config import OffloadConfig
from .._kernel.events import CacheTurnedOff, Event, Observer, TransportRecovered, TransportStalled, WorkerFailed
from .._kernel.ledger import Ledger
from .._kernel.plans import Completion, TransferPlan, check_completion
from .._kernel.requests import nobody
from .._kernel.states import JobState, Outcome, Tier
from ..errors import DeviceGone, TransferRefused
from .fences import Fence, RegionWatch
from .link import Link, link_of
from .transport import CopiesAtOnce, GivesUp, KnowsItsLink


class Launches(Protocol):
    """What the queue needs of a `Transport`."""

    def launch(self, plan: TransferPlan, after: Fence | None) -> None:
        """Start copying once `after` has passed. `TransferRefused`: nothing was started, and no completion follows."""
        ...


@runtime_checkable
class RecordsFences(Protocol):
    def record_fence(self) -> Fence: ...


@attrs.define(eq=False)
class CopyQueue:
    """Launches the jobs that `ledger` plans on `transport`, and settles their completions in the ledger.

    At most `Link.max_jobs` jobs that run and `Link.max_bytes` bytes of each link are in flight (see `link_of`); a job
    above the bound goes alone. `in_steps`: an engine calls `advance` once a step, so nothing is launched between two
    steps. Then the default bound is at least the bytes that a step computes, and grows until the link is busy from one
    step to the next. Set `in_steps` to False if `wake` makes your loop call `advance` whenever a copy has ended.

    A job has `transfer_timeout_s` (a store: `store_timeout_s`) from its launch, or from the end of the job before it if
    that is later. Without a completion by then it is given up: its destination is quarantined, and its link launches
    nothing more until the job is proven to be over, which an UNPROVEN report does not do. A stalled transport thus
    makes misses, not queues. If the ledger itself fails, or the device is lost, the cache turns itself off: nothing is
    launched any more, and requests see only misses.

    `clock` counts seconds, such as `time.monotonic`. All calls belong to the ledger's thread, except for `deliver`.
    `observer` receives the events of a copy queue, see `Event`. An exception of it is dropped.
    `block_bytes` is the size of a block over all regions. `wake` is called by `deliver`, in its thread; `ended` after
    jobs have ended, in the ledger's thread.
    """

    ledger: Ledger
    transport: Launches
    config: OffloadConfig
    clock: Callable[[], float] = attrs.field(kw_only=True)
    block_bytes: int = attrs.field(kw_only=True)
    observer: Observer | None = attrs.field(kw_only=True, default=None)
    wake: Callable[[], object] = attrs.field(kw_only=True, default=nobody)
    ended: Callable[[], object] = attrs.field(kw_only=True, default=nobody)
    in_steps: bool = attrs.field(kw_only=True, default=True)
    is_accepting: bool = attrs.field(init=False, default=True)
    off_reason: str = attrs.field(init=False, default="")
    """Why the cache has turned itself off; empty while it is on."""
    regions: RegionWatch = attrs.field(init=False)
    _links: dict[tuple[Tier, Tier], Link] = attrs.field(init=False, factory=dict)
    """Loads first: the order in which they are launched."""
    _inbox: deque[Completion] = attrs.field(init=False, factory=deque)
    _step_bytes: int = attrs.field(init=False, default=0)
    """The most bytes of stores from the device that were submitted at once, that is, in one step."""
    _gives_up: Callable[[int], None] | None = attrs.field(init=False)
    """How the transport is told of a job that is given up, if it wants to know."""
    _begin_turn: Callable[[], object] = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        check_type("ledger", self.ledger, Ledger)
        check_has("transport", self.transport, "transport", "launch")
        check_type("config", self.config, OffloadConfig)
        if self.observer is not None:
            check_has("observer", self.observer, "Observer", "observe")
        for name in ("clock", "wake", "ended"):
            check_callable(name, getattr(self, name))
        check_int("block_bytes", self.block_bytes, 1)
        check_bool("in_steps", self.in_steps)
        self.regions = RegionWatch(self.transport)
        self._gives_up = self.transport.give_up if isinstance(self.transport, GivesUp) else None
        self._begin_turn = self.transport.begin_turn if isinstance(self.transport, CopiesAtOnce) else nobody
        self._begin_turn()

    def __repr__(self) -> str:
        state = "on" if self.is_accepting else "off"
        num_queued = sum(len(link.queue) for link in self._links.values())
        return f"<CopyQueue {state}, {num_queued} queued, {self.num_in_flight} in flight>"

    # -- launching ------------------------------------------------------------------------------------------------

    def submit(self, plans: Sequence[TransferPlan], after: Fence | None = None) -> None:
        """Queue `plans` (stores wait for `after`) and launch what may be launched now."""
        if not plans:
            return  # the usual case; queued jobs are launched when a completion makes room
        computed_bytes = 0
        for plan in plans:
            link = self.link(plan.source, plan.destination)
            if not self.is_accepting or link.overdue:
                self.refuse([plan])
                continue
            link.queue.append((plan, after))
            num_bytes = len(plan.source_ids) * self.block_bytes
            link.queued_bytes += num_bytes
            if plan.source is Tier.DEVICE:
                computed_bytes += num_bytes
        self._step_bytes = max(self._step_bytes, computed_bytes)
        self._dispatch()

    def link(self, source: Tier, destination: Tier) -> Link:
        """The link between these two tiers: one object for the life of the queue."""
        found = self._links.get((source, destination))
        if found is None:
            link = self.transport.link_bytes_per_s if isinstance(self.transport, KnowsItsLink) else 0.0
            found = link_of(source, destination, self.config, link, in_steps=self.in_steps)
            links = [*self._links.values(), found]
            links.sort(key=lambda link: (link.destination > link.source, link.destination, link.source))
            self._links = {(link.source, link.destination): link for link in links}
        return found

    def refuse(self, plans: Iterable[TransferPlan]) -> None:
        """Discard planned jobs that were never queued."""
        for plan in plans:
            self._discard(plan)

    def _discard(self, plan: TransferPlan) -> None:
        self.tell(self.ledger.discard, plan.job_id)
        self.regions.end(plan.job_id, "never started")

    def _dispatch(self) -> None:
        """Launch what the bounds of each link allow, loads first."""
        for link in self._links.values():
            while link.queue:
                plan, after = link.queue[0]
                job_id, num_bytes = plan.job_id, len(plan.source_ids) * self.block_bytes
                num_jobs = len(link.in_flight) - len(link.reported)
                most = max(link.max_bytes, self._step_bytes) if link.follows else link.max_bytes
                fits = link.num_bytes + num_bytes <= most and num_jobs < link.max_jobs
                if not fits and link.in_flight:  # a job above the bound runs alone
                    break
                link.queue.popleft()
                link.queued_bytes -= num_bytes
                if not self.tell(self.ledger.launch, job_id):
                    self.regions.end(job_id, "no request waits for it any more")
                    continue
                link.begin(job_id, num_bytes, self.clock())
                try:
                    self.regions.launch(job_id)
                    self.transport.launch(plan, after)
                    if self._inbox and self._inbox[-1].job_id == job_id:  # copied at once
                        link.reported.add(job_id)
                except TransferRefused as error:
                    self.deliver(Completion(job_id, Outcome.FAILED, error=str(error)))
                    if isinstance(error, DeviceGone):
                        self.turn_off(str(error))
                except Exception as error:  # noqa: BLE001 - a driver error: the copy may have begun, the engine goes on
                    self.deliver(Completion(job_id, Outcome.UNPROVEN, error=repr(error)))
                except BaseException:  # a signal handler raised: the copy may have begun, and the caller gets the error
                    self.deliver(Completion(job_id, Outcome.UNPROVEN, error="the launch was interrupted"))
                    raise

    # -- completions ----------------------------------------------------------------------------------------------

    def deliver(self, completion: Completion) -> None:
        """Accept a completion from any thread; never blocks. `advance` settles it. `InvalidArgument` for what is none:
        its job counts as under way until its time is over."""
        check_completion(completion)
        self._inbox.append(completion)
        self.wake()

    def advance(self) -> None:
        """Settle what was delivered, give up what is late, let pins lapse, and launch what waits."""
        self.settle_delivered()  # first: what was delivered in time is not late
        self.give_up_late()

    def settle_delivered(self) -> None:
        while self._inbox:
            completion = self._inbox.popleft()
            job = self.ledger.jobs.unsettled.get(completion.job_id)
            if job is not None and job.state is JobState.QUEUED:
                continue  # it was never launched: the report is of something else
            for link in self._links.values():
                if completion.job_id in link.in_flight:
                    link.end(completion, self.clock())
                # An UNPROVEN report is no end: the copy may still be moving bytes, and a later copy of this link could
                # not be distinguished from it. Without a late proof, the link stays stopped. A fence that has raised is
                # not queried again, because its answer would reflect the device's error state and prove nothing.
                if completion.job_id in link.overdue and completion.outcome is not Outcome.UNPROVEN:
                    link.overdue.discard(completion.job_id)
                    if not link.overdue:
                        self._report(TransportRecovered(link.source, link.destination))
            if completion.outcome is Outcome.UNPROVEN:
                self._tell_given_up(completion.job_id)
            self.tell(self.ledger.settle, completion)
            self.regions.settle(completion)
            if completion.outcome in (Outcome.FAILED, Outcome.UNPROVEN):
                self._ask_device()
        self._begin_turn()
        for link in self._links.values():
            link.step_ended()
        self._dispatch()
        self.ended()

    def tell(self, function: Callable[..., Any], *args: object) -> Any:
        """Call into the ledger. A bug there turns the cache off, but must not end the caller: a loop, or a request."""
        try:
            return function(*args)
        except Exception as error:  # noqa: BLE001 - see above
            self._report(WorkerFailed(error))
            self.turn_off("the ledger failed")
            return None

    def _report(self, event: Event) -> None:
        if self.observer is not None:
            with suppress(BaseException):
                self.observer.observe(event)

    # -- giving up ------------------------------------------------------------------------------------------------

    @property
    def next_deadline(self) -> float:
        """When a copy in flight is late or a pin lapses, on `clock`; infinity if neither. `advance` is due then."""
        due = self.ledger.next_lapse
        for link in self._links.values():
            if link.in_flight:
                due = min(due, link.next_deadline)
        return due

    def give_up_late(self) -> None:
        """Give up the copies whose time is over, and let pins lapse."""
        now = self.clock()
        for link in tuple(self._links.values()):
            if link.next_deadline <= now:
                late = [job_id for job_id, job in link.in_flight.items() if job.deadline <= now]
                if link.late_outcome is Outcome.UNPROVEN:
                    self._report(TransportStalled(link.source, link.destination, len(late)))
                self._give_up(link, late, "no end within transfer_timeout_s")
        if self.ledger.next_lapse <= now:
            self.tell(self.ledger.lapse, now)

    def give_up(self, job_ids: Iterable[int], error: str) -> None:
        """Stop waiting for these launched jobs, as if their time were over."""
        wanted = set(job_ids)
        for link in tuple(self._links.values()):
            if mine := [job_id for job_id in link.in_flight if job_id in wanted]:
                self._give_up(link, mine, error)

    def take_back(self, job_ids: Iterable[int]) -> None:
        """What these launched jobs read turns out to be wrong: nobody is to find it. They report when they are over."""
        for job_id in job_ids:
            self._tell_given_up(job_id)

    def _give_up(self, link: Link, job_ids: Iterable[int], error: str) -> None:
        """Stop waiting for launched jobs. Their destinations are quarantined until a late completion ends the doubt,
        and the link launches nothing before. Of a remote store, they have failed, and others go on."""
        late = tuple(job_ids)
        link.give_up(late)
        for job_id in late:
            if not link.may_settle(job_id):
                continue  # whoever was woken has had it settled meanwhile
            self._tell_given_up(job_id)
            given_up = Completion(job_id, link.late_outcome, error=error)
            self.tell(self.ledger.settle, given_up)
            self.regions.settle(given_up)
        if link.late_outcome is Outcome.UNPROVEN:
            self._discard_queued(link)
        self._dispatch()
        self.ended()

    def _tell_given_up(self, job_id: int) -> None:
        """Before the ledger settles it, which releases its source: somebody may write there at once."""
        if self._gives_up is not None:
            try:
                self._gives_up(job_id)
            except Exception as error:  # noqa: BLE001 - a transport's own mistake: the cache ends, the engine goes on
                self._report(WorkerFailed(error))
                self.turn_off("the transport failed")

    def turn_off(self, reason: str) -> None:
        """Launch nothing any more. Jobs in flight still report, or are given up at their deadline."""
        if self.is_accepting:
            self.is_accepting, self.off_reason = False, reason
            self._report(CacheTurnedOff(reason))
            self.discard_queued()

    def _ask_device(self) -> None:
        """Turn off if the device is lost. A completion does not tell why a copy failed; recording a fence does."""
        if self.is_accepting and isinstance(self.transport, RecordsFences):
            try:
                self.transport.record_fence()
            except DeviceGone as error:
                self.turn_off(str(error))
            except Exception:  # noqa: BLE001 - refused, or a driver error: may be temporary, and nothing was started
                return

    def discard_queued(self) -> None:
        """Drop jobs that were never launched; requests that wait for them compute instead."""
        for link in tuple(self._links.values()):
            self._discard_queued(link)
        self.ended()

    def _discard_queued(self, link: Link) -> None:
        self.refuse(link.take_queued())

    def stop(self, error: str) -> None:
        """Launch nothing any more; what is still in flight is quarantined."""
        self.is_accepting = False
        self.discard_queued()
        self.settle_delivered()  # jobs without a completion are quarantined
        self.give_up([job_id for link in self._links.values() for job_id in link.in_flight], error)

    # -- what is left ---------------------------------------------------------------------------------------------

    @property
    def num_in_flight(self) -> int:
        """Launched jobs that have neither ended nor been given up."""
        return sum(len(link.in_flight) for link in self._links.values())

    @property
    def num_bytes_in_flight(self) -> int:
        return sum(link.num_bytes for link in self._links.values())

    def num_under_way(self, source: Tier, destination: Tier) -> int:
        """Jobs of this link that are queued or in flight."""
        link = self.link(source, destination)
        return len(link.queue) + len(link.in_flight)

    def room_bytes(self, source: Tier, destination: Tier) -> int:
        """Bytes of this link that can be under way at once, besides what is queued or in flight; 0 where it stalls."""
        link = self.link(source, destination)
        is_stalled = link.overdue or not self.is_accepting
        return 0 if is_stalled else max(0, link.max_bytes - link.num_bytes - link.queued_bytes)

    def seconds(self, source: Tier, destination: Tier, num_blocks: int) -> float:
        """How long a copy of so much would take that is submitted now. 0 where nothing was measured: the first copy is
        the measurement."""
        return self.link(source, destination).arrives_s(num_blocks * self.block_bytes, self.clock())

    def is_stalled(self, source: Tier, destination: Tier) -> bool:
        """Whether jobs of this link are refused, because some were given up and are not over."""
        return bool(self.link(source, destination).overdue)

    @property
    def overdue(self) -> frozenset[int]:
        """Launched jobs that were given up and have not reported since."""
        return frozenset(job_id for link in self._links.values() for job_id in link.overdue)

    @property
    def oldest_job(self) -> float:
        """The first job that is queued or in flight; infinity if there is none."""
        oldest = math.inf
        for link in self._links.values():
            if link.queue:
                oldest = min(oldest, link.queue[0][0].job_id)
            if link.in_flight:
                oldest = min(oldest, *link.in_flight)
        return oldest

    def in_flight_up_to(self, job_id: int) -> tuple[int, ...]:
        """The launched jobs up to `job_id` that have neither ended nor been given up."""
        return tuple(sorted(number for link in self._links.values() for number in link.in_flight if number <= job_id))
