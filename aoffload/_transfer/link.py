"""A link: the copies from one tier to another that are queued or in flight, for the copy queue.

Each link has its own bounds and time-outs, so a link that hangs stops only its own copies. A job is late when it has
been the first in flight for its time-out, because a link copies one job after the other. `max_bytes` may follow the
bytes that the link copies in a step of an engine: it doubles while the link idles with jobs waiting, and falls slowly
while the link is busy.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable

import attrs

from .._config.config import OffloadConfig
from .._config.tiers import parse_bytes
from .._kernel.plans import Completion, TransferPlan
from .._kernel.states import Outcome, Tier
from .fences import Fence
from .rates import TransferRate

JOBS_IN_FLIGHT = 4
MANY = 2**30
"""A number of jobs that means no bound."""
LINK_S = 0.02
"""The bytes in flight keep a GPU's link busy for this time, so that it is not idle while the event loop stalls."""
DISK_BYTES = 64 * 2**20
"""Maximum bytes in flight of a link from or to the disk, because a disk that hangs keeps these host blocks."""

REMOTE_BYTES = 64 * 2**20
"""Maximum bytes in flight of a link from or to a remote store."""
SLOWER = 64
"""`max_bytes` falls by 1/64 in a step during which the link was always busy."""
REMOTE_PATIENCE = 2.0
"""The time-out of a job of a remote store, as a multiple of the time-out of its call, because the job may wait for the
end of another one. So a store that keeps to its time-outs is never given up."""


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
    """Jobs in flight whose completion came before `launch` returned. They are settled in the next turn, and do not
    count as running."""
    num_bytes: int = 0
    """Bytes of the jobs in flight."""
    bytes_over: int = 0
    """Bytes that ended jobs have moved, by their completions. A job that was given up counts with all its bytes."""
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
        """A job in flight has ended."""
        self.bytes_over += completion.num_bytes
        if self.rate is not None:
            is_whole = completion.outcome in (Outcome.LANDED, Outcome.CORRUPT)  # corrupt blocks were copied, too
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
        flight. If the speed is not known: the time that the copies in flight have taken so far, scaled to all bytes.
        0 if none is in flight and the link was not measured, or long ago, because then this copy measures it."""
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
        """Stop counting these launched jobs as in flight. Unless their link is of a remote store, they are overdue."""
        for job_id in job_ids:
            if job_id in self.in_flight:
                self.bytes_over += self.in_flight[job_id].num_bytes
            self.forget(job_id)
            if self.late_outcome is Outcome.UNPROVEN:
                self.overdue.add(job_id)

    def may_settle(self, job_id: int) -> bool:
        """Whether the queue may settle a job that it has given up: it has not reported since, as far as is known."""
        return self.late_outcome is not Outcome.UNPROVEN or job_id in self.overdue

    @property
    def late_outcome(self) -> Outcome:
        """The outcome of a job that is given up. FAILED for a remote store, because its copies never leave host memory
        in doubt."""
        return Outcome.FAILED if Tier.REMOTE in (self.source, self.destination) else Outcome.UNPROVEN

    @property
    def next_deadline(self) -> float:
        """The time at which the first job in flight is late. Its time-out counts from the moment it became the first,
        because a link copies one job after the other."""
        if not self.in_flight:
            return math.inf
        return max(next(iter(self.in_flight.values())).deadline, self.first_since + self.timeout_s)


def link_of(
    source: Tier, destination: Tier, config: OffloadConfig, link_bytes_per_s: float = 0.0, *, in_steps: bool = False
) -> Link:
    """A link with the bounds that `config` sets for it. It is measured if its loads compete with computing: from and to
    tiers below the host always, and from the host unless `load_choice` is "always". `link_bytes_per_s`: the speed of
    the device's link; 0: not known. `in_steps`: jobs are launched once a step of an engine, not whenever a job ends."""
    is_load, max_bytes, remote = destination < source, config.bytes_in_flight, config.remote
    max_jobs = config.max_jobs_in_flight or JOBS_IN_FLIGHT
    if Tier.REMOTE in (source, destination) and remote is not None:
        call_s = remote.load_timeout_s if is_load else remote.store_timeout_s
        bounds = REMOTE_PATIENCE * call_s, min(max_bytes, REMOTE_BYTES), max_jobs
        return Link(source, destination, *bounds, rate=TransferRate())
    timeout_s = config.transfer_timeout_s if is_load else config.store_bound_s
    if Tier.DISK in (source, destination):
        return Link(source, destination, timeout_s, min(max_bytes, DISK_BYTES), max_jobs, rate=TransferRate())
    if config.max_bytes_in_flight is None:
        max_bytes = max(max_bytes, int(LINK_S * link_bytes_per_s))
    if config.max_jobs_in_flight is None and in_steps:
        max_jobs = MANY  # a step has a small store for each of its requests
    elif config.max_jobs_in_flight is None and link_bytes_per_s:
        max_jobs = max(max_jobs, max_bytes // parse_bytes("max_job_bytes", config.max_job_bytes))
    is_choice = is_load and config.load_choice != "always"
    follows = in_steps and config.max_bytes_in_flight is None
    return Link(
        source, destination, timeout_s, max_bytes, max_jobs, follows, rate=TransferRate() if is_choice else None
    )
