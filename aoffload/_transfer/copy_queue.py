"""The copy queue: launches planned jobs, limits the copies in flight, and gives up copies that take too long.

    submit(plans)     queue; launch as many jobs as the bounds allow, loads before stores
    deliver(done)     from any thread: a copy has ended
    advance()         settle delivered completions, give up late jobs, launch waiting jobs
    settle_now()      settle delivered completions, launch waiting jobs; the turn goes on

It has no thread, no event loop and no timer. The worker of `OffloadRuntime` drives it from an event loop; an engine
that steps calls `advance` once a step.

**Links.** A link is the copies from one tier to another that are queued or in flight. Each link has its own bounds and
time-outs, so a link that hangs stops only its own copies. A job is late when it has been the first in flight for its
time-out, because a link copies one job after the other. `max_bytes` may follow the bytes that the link copies in a step
of an engine: it doubles while the link idles with jobs waiting, and falls slowly while the link is busy.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any, Protocol, runtime_checkable

import attrs

from .._common.arguments import as_tuple, check_bool, check_callable, check_has, check_int, check_type
from .._common.tiers import DEVICE, LOWER_TIERS, TIERS, Tier
from .._config.config import OffloadConfig
from .._config.tiers import parse_bytes
from .._extensions.assembly import AnyLedger, check_ledger
from .._kernel.events import CacheTurnedOff, Event, Observer, TransportRecovered, TransportStalled, WorkerFailed
from .._kernel.plans import Completion, TransferPlan, check_completion
from .._kernel.pools import TierBlocks
from .._kernel.records import do_nothing
from .._kernel.states import CORRUPT, FAILED, JOB_QUEUED, LANDED, UNPROVEN, Outcome
from ..errors import DeviceGone, ExtensionError, TransferRefused
from .fences import Fence, RegionWatch
from .rates import TransferRate
from .transport import CopiesAtOnce, GivesUp, KnowsItsLink

JOBS_IN_FLIGHT = 4
UNBOUNDED_JOBS = 2**30
"""A number of jobs that means no bound."""
LINK_S = 0.02
"""The bytes in flight keep a GPU's link busy for this time, so that it does not idle while the event loop stalls."""
LOWER_BYTES = 64 * 2**20
"""Maximum bytes in flight of a link from or to a tier below the host, because a tier that hangs keeps these host
blocks."""
SLOWER = 64
"""`max_bytes` falls by 1/64 in a step during which the link was always busy."""


@attrs.frozen
class InFlight:
    num_bytes: int
    deadline: float


@attrs.define(eq=False)
class Link:
    """The copies from one tier to another, with bounds and time-outs of their own: a link that hangs stops only its own
    copies, and a load never waits for the bounds of stores."""

    source: Tier
    destination: Tier
    timeout_s: float
    max_bytes: int
    max_jobs: int
    follows: bool = False
    """Whether `max_bytes` follows the bytes that the link copies in a step of an engine."""
    least_bytes: int = attrs.field(init=False)
    """The initial `max_bytes`, below which it does not fall."""
    queue: deque[tuple[TransferPlan, Fence | None]] = attrs.field(factory=deque)
    """Jobs to launch, each with the fence that it waits for."""
    queued_bytes: int = 0
    """Bytes of the jobs in `queue`."""
    in_flight: dict[int, InFlight] = attrs.field(factory=dict)
    """Launched jobs in launch order, which is the order of their deadlines."""
    reported: set[int] = attrs.field(factory=set)
    """Jobs in flight whose completion arrived before `launch` returned. `settle_now` or the next turn settles them.
    They do not count as running."""
    num_bytes: int = 0
    """Bytes of the jobs in flight."""
    bytes_over: int = 0
    """Bytes that ended jobs have moved, according to their completions. A job that was given up counts with all its
    bytes."""
    overdue: set[int] = attrs.field(factory=set)
    """Launched jobs that were given up and have not reported since."""

    rate: TransferRate | None = None
    """The measured speed; None if the link is not measured."""
    first_since: float = 0.0
    """The time at which the first job in flight became the first."""

    def __attrs_post_init__(self) -> None:
        self.least_bytes = self.max_bytes

    def step_ended(self) -> None:
        """Let `max_bytes` follow the link. If jobs wait and nothing is in flight, the link was idle, so `max_bytes`
        doubles. If jobs wait and copies are still in flight, the link may have become slower, so `max_bytes` falls a
        little."""
        if self.follows and self.queue:
            less = max(self.least_bytes, self.max_bytes - self.max_bytes // SLOWER)
            self.max_bytes = less if self.in_flight else 2 * self.max_bytes

    def begin(self, job_id: int, num_bytes: int, now: float) -> None:
        if not self.in_flight:
            self.first_since = now
            if self.rate is not None:
                self.rate.begins(now)
        self.in_flight[job_id] = InFlight(num_bytes, now + self.timeout_s)
        self.num_bytes += num_bytes

    def end(self, completion: Completion, now: float) -> None:
        """Remove a job that has ended from the jobs in flight."""
        self.bytes_over += completion.num_bytes
        if self.rate is not None:
            is_whole = completion.outcome in (LANDED, CORRUPT)  # corrupt blocks were copied, too
            num_bytes = self.in_flight[completion.job_id].num_bytes if is_whole else completion.num_bytes
            self.rate.ended(num_bytes, now)
        if next(iter(self.in_flight)) == completion.job_id:
            self.first_since = now
        self.forget(completion.job_id)

    def forget(self, job_id: int) -> None:
        found = self.in_flight.pop(job_id, None)
        if found is not None:
            self.num_bytes -= found.num_bytes
            self.reported.discard(job_id)

    def arrives_s(self, num_bytes: int, now: float) -> float:
        """Seconds until a copy of `num_bytes` that is queued now has arrived, after the copies that are queued and in
        flight. If the speed is unknown, this is the time that the copies in flight have taken so far, scaled to all
        bytes. 0 if nothing is in flight and the link was never measured, or not recently, because then this copy
        measures it."""
        in_flight, rate = self.num_bytes, self.rate
        if rate is None or (not in_flight and rate.is_old(now)):
            return 0.0
        all_bytes = self.queued_bytes + in_flight + num_bytes
        speed = rate.bytes_per_s(in_flight, now)
        if speed:
            return rate.latency_s + all_bytes / speed
        return (now - rate.since_s) * all_bytes / in_flight if in_flight else 0.0

    @property
    def bytes_begun(self) -> int:
        """Bytes that were moved so far, or are queued or in flight."""
        return self.bytes_over + self.queued_bytes + self.num_bytes

    def take_queued(self) -> list[TransferPlan]:
        """Remove the queued jobs. Returns them."""
        queued = [plan for plan, _ in self.queue]
        self.queue.clear()
        self.queued_bytes = 0
        return queued

    def give_up(self, job_ids: Iterable[int]) -> None:
        """Stop counting these launched jobs as in flight. They are overdue, unless a late copy could do no harm."""
        for job_id in job_ids:
            if job_id in self.in_flight:
                self.bytes_over += self.in_flight[job_id].num_bytes
            self.forget(job_id)
            if self.late_outcome is UNPROVEN:
                self.overdue.add(job_id)

    def may_settle(self, job_id: int) -> bool:
        """Whether the queue may settle a job that it has given up: True unless the job is known to have reported
        since."""
        return self.late_outcome is not UNPROVEN or job_id in self.overdue

    @property
    def late_outcome(self) -> Outcome:
        """The outcome of a job that is given up: FAILED if a late copy could do no harm."""
        is_doubtful = TIERS[self.source].leaves_doubt and TIERS[self.destination].leaves_doubt
        return UNPROVEN if is_doubtful else FAILED

    @property
    def next_deadline(self) -> float:
        """The time at which the first job in flight is late. Its time-out counts from the moment it became the first,
        because a link copies one job after the other."""
        if not self.in_flight:
            return math.inf
        return max(next(iter(self.in_flight.values())).deadline, self.first_since + self.timeout_s)


def link_of(
    source: TierBlocks,
    destination: TierBlocks,
    config: OffloadConfig,
    link_bytes_per_s: float = 0.0,
    *,
    in_steps: bool = False,
) -> Link:
    """A link with the bounds that `config` sets for it. It is measured if its loads compete with computing: always
    between the host and lower tiers, and from the host to the device unless `load_choice` is "always".
    `link_bytes_per_s` is the speed of the device's link; 0 means unknown. `in_steps`: jobs are launched once a step of
    an engine, not whenever a job ends."""
    link, is_load = (source.tier, destination.tier), destination.tier < source.tier
    lower, max_bytes = source if is_load else destination, config.bytes_in_flight
    max_jobs, own_s = config.max_jobs_in_flight or JOBS_IN_FLIGHT, lower.timeouts_s
    if own_s is not None:
        timeout_s = own_s[0] if is_load else own_s[1]
    else:
        timeout_s = config.transfer_timeout_s if is_load else config.store_bound_s
    if lower.tier in LOWER_TIERS:
        return Link(*link, timeout_s, min(max_bytes, LOWER_BYTES), max_jobs, rate=TransferRate())
    if config.max_bytes_in_flight is None:
        max_bytes = max(max_bytes, int(LINK_S * link_bytes_per_s))
    if config.max_jobs_in_flight is None and in_steps:
        max_jobs = UNBOUNDED_JOBS  # a step has a small store for each of its requests
    elif config.max_jobs_in_flight is None and link_bytes_per_s:
        max_jobs = max(max_jobs, max_bytes // parse_bytes("max_job_bytes", config.max_job_bytes))
    is_choice = is_load and config.load_choice != "always"
    follows = in_steps and config.max_bytes_in_flight is None
    return Link(*link, timeout_s, max_bytes, max_jobs, follows, rate=TransferRate() if is_choice else None)


class Launches(Protocol):
    """The part of a `Transport` that the queue needs."""

    def launch(self, plan: TransferPlan, after: Fence | None) -> None:
        """Start copying once `after` has passed. If it raises `TransferRefused`, nothing was started, and no completion
        follows."""
        ...


@runtime_checkable
class RecordsFences(Protocol):
    def record_fence(self) -> Fence: ...


@attrs.define(eq=False)
class CopyQueue:
    """Launches the jobs that `ledger` plans on `transport`, and settles their completions in the ledger.

    At most `Link.max_jobs` running jobs and `Link.max_bytes` bytes of each link are in flight (see `link_of`). A job
    that is larger than the bound runs alone. `in_steps`: an engine calls `advance` once a step, so nothing is launched
    between two steps. Then the default bound is at least the bytes that a step computes, and grows until the link is
    busy from one step to the next. Set `in_steps` to False if `wake` makes your loop call `advance` whenever a copy has
    ended.

    A job has `transfer_timeout_s` (a store: `store_timeout_s`) from its launch, or from the end of the job before it if
    that is later. Without a completion by then, the job is given up: its destination is quarantined, and its link
    launches nothing more until the job is proven to be over. An UNPROVEN report is no such proof. So a stalled
    transport causes misses, and no queue grows. If the ledger itself fails, or the device is lost, the cache turns
    itself off: nothing is launched any more, and requests see only misses.

    `clock` counts seconds, such as `time.monotonic`. All calls belong to the ledger's thread, except for `deliver`.
    `observer` receives the events of a copy queue (see `Event`); its exceptions are dropped. `block_bytes` is the size
    of a block over all regions. `deliver` calls `wake` in its own thread. `ended` is called in the ledger's thread,
    after jobs have ended.
    """

    ledger: AnyLedger
    transport: Launches
    config: OffloadConfig
    clock: Callable[[], float] = attrs.field(kw_only=True)
    block_bytes: int = attrs.field(kw_only=True)
    observer: Observer | None = attrs.field(kw_only=True, default=None)
    wake: Callable[[], object] = attrs.field(kw_only=True, default=do_nothing)
    ended: Callable[[], object] = attrs.field(kw_only=True, default=do_nothing)
    in_steps: bool = attrs.field(kw_only=True, default=True)
    is_accepting: bool = attrs.field(init=False, default=True)
    off_reason: str = attrs.field(init=False, default="")
    """Why the cache has turned itself off; empty while it is on."""
    regions: RegionWatch = attrs.field(init=False)
    _links: dict[tuple[Tier, Tier], Link] = attrs.field(init=False, factory=dict)
    """In the order in which they are served: loads first."""
    _inbox: deque[Completion] = attrs.field(init=False, factory=deque)
    """Delivered completions that are not settled yet."""
    _step_bytes: int = attrs.field(init=False, default=0)
    """Maximum bytes of stores from the device that one `submit` had: the bytes that a step computes."""
    _gives_up: Callable[[int], None] | None = attrs.field(init=False)
    """The transport's `give_up`, if it has one."""
    _begin_turn: Callable[[], object] = attrs.field(init=False)
    """The transport's `begin_turn`, if it has one."""

    def __attrs_post_init__(self) -> None:
        check_ledger("ledger", self.ledger)
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
        self._begin_turn = self.transport.begin_turn if isinstance(self.transport, CopiesAtOnce) else do_nothing
        self._begin_turn()

    def __repr__(self) -> str:
        state = "on" if self.is_accepting else "off"
        num_queued = sum(len(link.queue) for link in self._links.values())
        return f"<CopyQueue {state}, {num_queued} queued, {self.num_in_flight} in flight>"

    # -- launching ------------------------------------------------------------------------------------------------

    def submit(self, plans: Sequence[TransferPlan], after: Fence | None = None) -> None:
        """Queue `plans` (stores wait for `after`) and launch the jobs that the bounds allow now."""
        if type(plans) is not tuple:
            plans = as_tuple("plans", plans, "TransferPlan")
        if not plans:
            return  # the common case; queued jobs are launched when a completion lets the bounds allow it
        for plan in plans:
            if type(plan) is not TransferPlan:
                check_type("plans", plan, TransferPlan)
        computed_bytes = 0
        for plan in plans:
            link = self.link(plan.source, plan.destination)
            if not self.is_accepting or link.overdue:
                self.refuse([plan])
                continue
            link.queue.append((plan, after))
            num_bytes = len(plan.source_ids) * self.block_bytes
            link.queued_bytes += num_bytes
            if plan.source is DEVICE:
                computed_bytes += num_bytes
        self._step_bytes = max(self._step_bytes, computed_bytes)
        self._dispatch()

    def link(self, source: Tier, destination: Tier) -> Link:
        """The link between these two tiers. Returns the same object for the life of the queue."""
        found = self._links.get((source, destination))
        if found is None:
            link = self.transport.link_bytes_per_s if isinstance(self.transport, KnowsItsLink) else 0.0
            tiers = self.ledger.jobs.tiers
            found = link_of(tiers[source], tiers[destination], self.config, link, in_steps=self.in_steps)
            links = [*self._links.values(), found]
            links.sort(key=lambda link: (link.destination > link.source, link.destination, link.source))
            self._links = {(link.source, link.destination): link for link in links}
        return found

    def refuse(self, plans: Iterable[TransferPlan]) -> None:
        """Discard planned jobs that were never queued."""
        for plan in plans:
            self._discard(plan)

    def _discard(self, plan: TransferPlan) -> None:
        self.call_ledger(self.ledger.discard, plan.job_id)
        self.regions.end(plan.job_id, "never started")

    def _dispatch(self) -> None:
        """Launch the jobs that the bounds of each link allow, loads first."""
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
                if not self.call_ledger(self.ledger.launch, job_id):
                    self.regions.end(job_id, "no request waits for it any more")
                    continue
                link.begin(job_id, num_bytes, self.clock())
                try:
                    self.regions.launch(job_id)
                    self.transport.launch(plan, after)
                    if self._inbox and self._inbox[-1].job_id == job_id:  # copied by `launch` itself
                        link.reported.add(job_id)
                except TransferRefused as error:
                    self.deliver(Completion(job_id, FAILED, error=str(error)))
                    if isinstance(error, DeviceGone):
                        self.turn_off(str(error))
                except Exception as error:  # noqa: BLE001 - a driver error: the copy may have begun, the engine goes on
                    self.deliver(Completion(job_id, UNPROVEN, error=repr(error)))
                except BaseException:  # a signal handler raised: the copy may have begun, and the caller gets the error
                    self.deliver(Completion(job_id, UNPROVEN, error="the launch was interrupted"))
                    raise

    # -- completions ----------------------------------------------------------------------------------------------

    def deliver(self, completion: Completion) -> None:
        """Accept a completion from any thread; never blocks. `advance` settles it. Raises `InvalidArgument` if the
        completion is invalid; its job then counts as in flight until its time-out."""
        check_completion(completion)
        self._inbox.append(completion)
        self.wake()

    def advance(self) -> None:
        """Settle delivered completions, give up late jobs, let pins lapse, and launch waiting jobs."""
        self.settle_delivered()  # first: a job whose completion arrived in time is not late
        self.give_up_late()

    def settle_delivered(self) -> None:
        """Settle delivered completions, and begin the next turn: `launch` may make small copies itself again."""
        self._settle_inbox()
        self._begin_turn()
        for link in self._links.values():
            link.step_ended()
        self._dispatch()
        self.ended()

    def settle_now(self) -> bool:
        """Settle the completions delivered so far, such as those of copies that `launch` has made itself, and launch
        waiting jobs. Returns whether there were any completions. No new turn begins: the bytes that `launch` has copied
        in this turn still count against its bound."""
        if not self._inbox:
            return False
        self._settle_inbox()
        self._dispatch()
        self.ended()
        return True

    def _settle_inbox(self) -> None:
        while self._inbox:
            completion = self._inbox.popleft()
            job = self.ledger.jobs.unsettled.get(completion.job_id)
            if job is not None and job.state is JOB_QUEUED:
                continue  # it was never launched, so the completion cannot be of this job
            for link in self._links.values():
                if completion.job_id in link.in_flight:
                    link.end(completion, self.clock())
                # An UNPROVEN completion does not end an overdue job, because its copy may still move bytes. The link
                # stays stopped until another completion proves that the copy is over. The transport does not query a
                # fence again that has raised: its answer would reflect the error state of the device, and prove
                # nothing.
                if completion.job_id in link.overdue and completion.outcome is not UNPROVEN:
                    link.overdue.discard(completion.job_id)
                    if not link.overdue:
                        self._report(TransportRecovered(link.source, link.destination))
            if completion.outcome is UNPROVEN:
                self._tell_given_up(completion.job_id)
            self.call_ledger(self.ledger.settle, completion)
            self.regions.settle(completion)
            if completion.outcome in (FAILED, UNPROVEN):
                self._check_device()

    def call_ledger(self, function: Callable[..., Any], *args: object) -> Any:
        """Call `function`, which calls the ledger. An exception is a bug in the ledger: the cache turns itself off, and
        this method returns None, because the exception must not end the caller, which is an event loop or a request.
        The error of an extension is only reported, because the ledger is intact."""
        try:
            return function(*args)
        except ExtensionError as error:
            self._report(WorkerFailed(error))
            return None
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
        """The time on `clock` at which to call `advance`, because a copy in flight becomes late or a pin lapses;
        infinity if neither will."""
        try:
            due = self.ledger.next_lapse
        except ExtensionError as error:
            self._report(WorkerFailed(error))
            due = math.inf
        for link in self._links.values():
            if link.in_flight and link.next_deadline < due:
                due = link.next_deadline
        return due

    def give_up_late(self) -> None:
        """Give up the copies whose time-out has passed, and let pins lapse."""
        now = self.clock()
        for link in tuple(self._links.values()):
            if link.next_deadline <= now:
                late = [job_id for job_id, job in link.in_flight.items() if job.deadline <= now]
                if link.late_outcome is UNPROVEN:
                    self._report(TransportStalled(link.source, link.destination, len(late)))
                self._give_up(link, late, "no end within transfer_timeout_s")
        self.call_ledger(self._lapse, now)

    def _lapse(self, now: float) -> None:
        if self.ledger.next_lapse <= now:
            self.ledger.lapse(now)

    def give_up(self, job_ids: Iterable[int], error: str) -> None:
        """Stop waiting for these launched jobs, as if their time-out had passed."""
        wanted = {check_int("job_ids", job_id, 0) for job_id in as_tuple("job_ids", job_ids, "int")}
        for link in tuple(self._links.values()):
            if mine := [job_id for job_id in link.in_flight if job_id in wanted]:
                self._give_up(link, mine, error)

    def invalidate_sources(self, job_ids: Iterable[int]) -> None:
        """Tell the transport that the sources of these launched jobs were invalidated, so that it does not make the
        copies findable. The jobs still report when they are over."""
        for job_id in job_ids:
            self._tell_given_up(job_id)

    def _give_up(self, link: Link, job_ids: Iterable[int], error: str) -> None:
        """Stop waiting for launched jobs. Until a late completion arrives, their destinations stay quarantined and the
        link launches nothing. If a late copy could do no harm, the jobs count as failed, and the link continues."""
        late = tuple(job_ids)
        link.give_up(late)
        for job_id in late:
            if not link.may_settle(job_id):
                continue  # a `wake` in this loop has caused a call that settled it
            self._tell_given_up(job_id)
            given_up = Completion(job_id, link.late_outcome, error=error)
            self.call_ledger(self.ledger.settle, given_up)
            self.regions.settle(given_up)
        if link.late_outcome is UNPROVEN:
            self._discard_queued(link)
        self._dispatch()
        self.ended()

    def _tell_given_up(self, job_id: int) -> None:
        """Tell the transport that a job is given up. Call it before the ledger settles the job, because that releases
        its source, which may be overwritten at once."""
        if self._gives_up is not None:
            try:
                self._gives_up(job_id)
            except Exception as error:  # noqa: BLE001 - a bug in the transport: only the cache turns off
                self._report(WorkerFailed(error))
                self.turn_off("the transport failed")

    def turn_off(self, reason: str) -> None:
        """Turn the cache off permanently: discard queued jobs, and launch no more. Jobs in flight still report, or are
        given up at their deadline."""
        if self.is_accepting:
            self.is_accepting, self.off_reason = False, reason
            self._report(CacheTurnedOff(reason))
            self.discard_queued()

    def _check_device(self) -> None:
        """Turn off if the device is lost. A completion does not say why a copy failed, but recording a fence does."""
        if self.is_accepting and isinstance(self.transport, RecordsFences):
            try:
                self.transport.record_fence()
            except DeviceGone as error:
                self.turn_off(str(error))
            except Exception:  # noqa: BLE001 - refused, or a driver error: may be temporary, and nothing was started
                return

    def discard_queued(self) -> None:
        """Discard jobs that were never launched; requests that wait for them compute instead."""
        for link in tuple(self._links.values()):
            self._discard_queued(link)
        self.ended()

    def _discard_queued(self, link: Link) -> None:
        self.refuse(link.take_queued())

    def stop(self, error: str) -> None:
        """Launch nothing any more, and quarantine the destinations of jobs that are still in flight."""
        self.is_accepting = False
        self.discard_queued()
        self.settle_delivered()  # jobs without a completion are quarantined
        self.give_up([job_id for link in self._links.values() for job_id in link.in_flight], error)

    # -- state of the queue ---------------------------------------------------------------------------------------

    @property
    def num_in_flight(self) -> int:
        """Launched jobs that have neither ended nor been given up."""
        return sum(len(link.in_flight) for link in self._links.values())

    @property
    def num_bytes_in_flight(self) -> int:
        return sum(link.num_bytes for link in self._links.values())

    def num_under_way(self, source: Tier, destination: Tier) -> int:
        """Number of jobs of this link that are queued or in flight."""
        link = self._links.get((source, destination))
        return 0 if link is None else len(link.queue) + len(link.in_flight)

    def room_bytes(self, source: Tier, destination: Tier) -> int:
        """Bytes that could be submitted to this link and launched at once: its bound minus the bytes that are queued or
        in flight. 0 if the link is stalled."""
        link = self.link(source, destination)
        is_stalled = link.overdue or not self.is_accepting
        return 0 if is_stalled else max(0, link.max_bytes - link.num_bytes - link.queued_bytes)

    def seconds(self, source: Tier, destination: Tier, num_blocks: int) -> float:
        """Seconds that a copy of `num_blocks` would take if it were submitted now. 0 if the link was not measured,
        because then the first copy measures it."""
        return self.link(source, destination).arrives_s(num_blocks * self.block_bytes, self.clock())

    def is_stalled(self, source: Tier, destination: Tier) -> bool:
        """Whether this link launches nothing, because jobs that were given up are not proven to be over."""
        link = self._links.get((source, destination))
        return link is not None and bool(link.overdue)

    @property
    def overdue(self) -> frozenset[int]:
        """Launched jobs that were given up and have not reported since."""
        return frozenset(job_id for link in self._links.values() for job_id in link.overdue)

    @property
    def oldest_job(self) -> float:
        """The id of the first job that is queued or in flight; infinity if there is none."""
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
