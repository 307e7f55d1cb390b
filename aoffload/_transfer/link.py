"""A link: the copies from one tier to another that are queued or in flight, for the copy queue.

Bounds and time-outs are counted for each link, so a link that hangs stops only its own copies. A job is late when it
has been the first in flight for its time-out, because a link copies one job after the other. `max_bytes` may follow the
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
"""No bound: more jobs than there can be."""
LINK_S = 0.02
"""Time for which a GPU's link stays busy with the copies in flight, so that it is not idle while the event loop
stalls."""
DISK_BYTES = 64 * 2**20
"""In flight of a link from or to the disk, at most: what a disk that hangs can keep."""

REMOTE_BYTES = 64 * 2**20
"""The same from or to a remote store."""
SLOWER = 64
"""`max_bytes` falls by 1/64 in a step during which the link was always busy."""
REMOTE_PATIENCE = 2.0
"""A job of a remote store has so many times the time-out of its call: it may wait for another one's end, and a store
that keeps to its time-outs is never given up."""


@attrs.frozen
class InFlight:
    num_bytes: int
    deadline: float


@attrs.define(eq=False)
class Link:
    """The copies from one tier to another. Bounds and time-outs are counted for each link: one that hangs stops only
    its own copies, and a load never waits for the bounds of stores."""

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
    """Of these jobs."""
    in_flight: dict[int, InFlight] = attrs.field(factory=dict)
    """Launched jobs in launch order, which is the order of their deadlines."""
    reported: set[int] = attrs.field(factory=set)
    """Jobs in flight that were over when their launch returned. They are settled in the next turn."""
    num_bytes: int = 0
    """In flight."""
    bytes_over: int = 0
    """What jobs that are over have moved, as they say; of those that were given up, all that they may move."""
    overdue: set[int] = attrs.field(factory=set)
    """Launched jobs that were given up and have not reported since."""

    rate: TransferRate | None = None
    """How fast it is, where that is measured."""
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
            is_whole = completion.outcome in (Outcome.LANDED, Outcome.CORRUPT)  # what is corrupt was read, too
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
        """How long a copy takes that begins now, behind what is queued and in flight. 0 where nothing was measured, or
        long ago: the next copy is the measurement, and shows more the longer it takes."""
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
        """What was moved since the beginning, or is queued or in flight."""
        return self.bytes_over + self.queued_bytes + self.num_bytes

    def take_queued(self) -> list[TransferPlan]:
        """The jobs that were not launched, which leave the queue."""
        queued = [plan for plan, _ in self.queue]
        self.queue.clear()
        self.queued_bytes = 0
        return queued

    def give_up(self, job_ids: Iterable[int]) -> None:
        """Nobody waits for these jobs any more."""
        for job_id in job_ids:
            if job_id in self.in_flight:
                self.bytes_over += self.in_flight[job_id].num_bytes
            self.forget(job_id)
            if self.late_outcome is Outcome.UNPROVEN:
                self.overdue.add(job_id)

    def may_settle(self, job_id: int) -> bool:
        """Whether a job that was given up has not reported since, as far as that is known."""
        return self.late_outcome is not Outcome.UNPROVEN or job_id in self.overdue

    @property
    def late_outcome(self) -> Outcome:
        """How a job ends that is given up. The copy from a remote store never leaves host memory in doubt."""
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
    """A link with the bounds that `config` sets for it. It is measured where loading competes with computing: from
    tiers below the host, and from the host if it is not always loaded from. `link_bytes_per_s`: the speed of the
    device's link; 0: not known. `in_steps`: jobs are launched once a step of an engine, not whenever a job ends."""
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
