"""Records: the objects that the kernel keeps (runs, parts, leases, jobs, loads, block tables), and their references.

    Run <- Part -> Job       a run is a stretch of a prompt; a part holds its blocks in one component and one tier, and
                             refers to the job that adds to them
    Lease -> Run             protects the blocks of a path: they are neither evicted nor freed
    Job -> Lease, Run        one copy between two tiers, with leases of its own
    Load <-> Job             the jobs that one request waits for. A job may serve several loads
    BlockTable               the blocks of one request in one component

These classes decide nothing. The verbs are elsewhere: `PrefixCache` changes runs and parts and takes leases, `JobBook`
plans and settles jobs, `Loads` begins and ends loads.

A part is a piece of the index, a block table is a piece of a request. A published block is in both: the part keeps it
findable, and the request reads it under a lease. A block of a table that is not published is private: only the request
reads it, and only the request frees it.

Tombstones. A block may become unfindable while leases still protect it, because its bytes were found wrong or because
its tier was reset. It leaves the part at once, so that no match finds it, and becomes a tombstone of the part. The last
reference of the part frees the tombstones.

A block table, by units. The units before `start` have left the window and are null:

    0        start          published              load.stop                  num_units
    |--------|--------------|-----------------------|--------------------------|
    | null:  | leased: the  | in flight: the jobs   | private: only the        |
    | needed | cached path  | own these blocks (0   | request reads these and  |
    | no more| (duplicates  | in the table until    | computes into them       |
    |        | are private) | the load ends)        |                          |

Without a load in flight, the private part begins at `published`. A duplicate is a published unit whose cached copy is
another request's: that request published the same tokens first, and this one keeps its private copy.

**Owners.** Every block that is neither free nor evictable has an owner. One call ends an owner and gives back
everything that it owns. `check_integrity` checks that the owners account for all blocks.

Owner | owns | ends by
--- | --- | ---
`LedgerRequest` | leases on the cached path that it reads or will load, and private blocks | `Ledger.release`
`Waiter` | the blocks of a grant that its request has not accepted | `Ledger.accept`, `Ledger.withdraw`
`Step` | the blocks of its requests, although they may be over | the end of the forward
`Job` | the blocks that it writes, and leases | its completion

Extensions may own leases and blocks, too (`LedgerExtension.report_leases`).

**Published units.** The tables of a request name cached blocks before unit `published`, which its device lease pins,
and private blocks from there on. The match, the load and commits raise `published`; `ready_stop` stays where the
request began to compute.

    units   [ hit on the device | loaded from the host | computed and committed | allocated )
            0                                  ready_stop               published    num_units

The verbs of the kernel set these fields directly. The state alone is moved by `Moves`, which checks the move and
reports it.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from .._common.arguments import shown
from .._common.prefix import Hasher, KeySpan, Root
from .._common.tiers import DEVICE, Tier
from ..errors import CommitError, OutOfBlocks
from .layout import within
from .plans import NO_MATCH, Completion, PrefixMatch, TransferPlan
from .states import (
    ABORTED,
    COMPUTES_NOTHING,
    DONE,
    DRAINING,
    JOB_DISCARDED,
    JOB_QUEUED,
    LOADING,
    MATCHED,
    PINNED,
    QUEUED,
    REQUEUED,
    STRANDED,
    Computing,
    JobState,
    NoEpoch,
    RequestState,
)
from .tokens import TokenSequence, hash_run


class Part:
    """The blocks of one run in one component and one tier: those of units `[first, stop)`. For full attention `first`
    is the run's start. A part without blocks has first == stop == the run's start."""

    __slots__ = (
        "blocks", "component", "first", "incoming", "last_use", "newer", "num_references", "older", "rank", "run",
        "stop", "tier", "tombstones", "width",
    )  # fmt: skip

    def __init__(
        self, tier: Tier, component: int, width: int, run: Run, first: int, stop: int,
        num_references: int = 0, incoming: Job | None = None,
    ) -> None:  # fmt: skip
        self.tier = tier
        self.component = component
        self.width = width
        """Block ids per unit."""
        self.run = run
        self.first = first
        self.stop = stop
        self.blocks: array[int] = array("i")
        """len(blocks) == (stop - first) * width."""
        self.num_references = num_references
        """Number of leases that pin this run in the tier and component of the part. At zero the blocks are evictable,
        and the part is in the eviction order if it has any."""
        self.incoming = incoming
        """The unsettled job that was planned last to add to this part. Most earlier ones are found through
        `predecessor`."""
        self.tombstones: tuple[Tombstone, ...] = ()
        """Unfindable blocks that references still protect; freed with the last reference."""
        self.last_use = 0
        """Number of the last use that has ended, counted by the eviction order of the tier. 0 while in use."""
        self.rank = 0
        """Written by the eviction order of the tier, which alone knows what it means: see `EvictionOrder`."""
        self.older: Part | None = None
        """The neighbour that is evicted before this part, if the eviction order is a linked list."""
        self.newer: Part | None = None

    def __str__(self) -> str:
        return f"{self.stop - self.first}/{self.num_references}"

    def ids(self, start: int, stop: int) -> array[int]:
        """The ids of units `[start, stop)`, all of them in this part."""
        return self.blocks[(start - self.first) * self.width : (stop - self.first) * self.width]

    def append(self, ids: array[int], stop: int) -> None:
        """Append `ids`, which end at unit `stop`. The part may keep the array: do not change it afterwards."""
        if self.blocks:
            self.blocks.extend(ids)
        else:
            self.blocks = ids  # exact size: an extended array keeps spare capacity
        self.stop = stop

    def enter(self, first: int, last: int, ids: array[int]) -> range:
        """Add the blocks of the units of `[first, last)` that the part lacks; the range must adjoin or overlap the
        part. `ids` are the blocks from unit `first` on; those after unit `last` are not used. The part may keep the
        array, so the caller must not change it. Returns the units that the part held already: the caller keeps their
        ids."""
        if not self.blocks:
            if len(ids) == (last - first) * self.width:  # no id is left over: keep the array without a copy
                self.first, self.stop, self.blocks = first, last, ids
                return range(first, first)
            self.first = self.stop = first
        known = range(max(first, self.first), max(first, self.first, min(last, self.stop)))
        if first < self.first:
            self.blocks = ids[: (self.first - first) * self.width] + self.blocks
            self.first = first
        if last > self.stop:
            self.append(ids[(self.stop - first) * self.width : (last - first) * self.width], last)
        return known

    def cut_off(self, head: Run, start: int, at: int, num_references: int, incoming: Job | None) -> Part:
        """Split at unit `at`: this part keeps the units from `at` on. Returns the front as a new part of `head`, which
        begins at unit `start`; `num_references` and `incoming` are those of the front."""
        front = Part(self.tier, self.component, self.width, head, start, start, num_references, incoming)
        front.last_use, front.rank = self.last_use, self.rank
        if self.tombstones:
            front.tombstones, self.tombstones = divided(self.tombstones, self.width, at)
        if self.first < at:
            front.first, front.stop = self.first, min(at, self.stop)
        cut = (front.stop - front.first) * self.width
        front.blocks, self.blocks = self.blocks[:cut], self.blocks[cut:]  # exact size
        self.begin_at(at)
        return front

    def hand_over(self, front: Part, at: int) -> int:
        """Move the blocks before unit `at` to `front`, the part right before this one. Returns their number."""
        before, self.tombstones = divided(self.tombstones, self.width, at)
        front.tombstones += before
        count = (min(max(at, self.first), self.stop) - self.first) * self.width
        if count and not front.blocks:
            front.first = front.stop = self.first
        if count:
            front.blocks.extend(self.blocks[:count])
            front.stop += count // self.width
            del self.blocks[:count]
        self.begin_at(at)
        return count

    def join(self, fronts: Sequence[Part]) -> None:
        """Prepend the blocks of `fronts`, the parts right before this one, nearest first."""
        nearest = next((front for front in fronts if front.blocks), None)
        if nearest is None:
            return
        if not self.blocks:
            self.stop = nearest.stop
        blocks = array("i")
        for front in reversed(fronts):
            blocks.extend(front.blocks)
        self.blocks = blocks + self.blocks
        self.first = self.stop - len(self.blocks) // self.width

    def begin_at(self, start: int) -> None:
        """The run begins at unit `start` now; move an empty part there. The part holds no block before `start`."""
        self.first, self.stop = (max(self.first, start), max(self.stop, start)) if self.blocks else (start, start)

    def truncate(self, stop: int) -> array[int]:
        """Truncate the part to end at unit `stop`. Returns the dropped blocks."""
        keep = max(0, stop - self.first) * self.width
        if keep:
            dropped = self.blocks[keep:]
            del self.blocks[keep:]
            self.stop = stop
        else:
            dropped, self.blocks = self.blocks, array("i")
            self.first = self.stop = self.run.start
        return dropped

    def clear(self) -> array[int]:
        """Empty the part. Returns the blocks it held."""
        return self.truncate(self.first)

    def entomb(self, start: int, ids: array[int]) -> None:
        """Add a tombstone for `ids`, which the part held from unit `start` on."""
        self.tombstones = (*self.tombstones, Tombstone(start, ids))

    def tombstone_ids(self) -> array[int]:
        return sum((one.ids for one in self.tombstones), array("i"))

    def take_tombstones(self) -> array[int]:
        """Remove all tombstones. Returns their blocks."""
        ids, self.tombstones = self.tombstone_ids(), ()
        return ids

    def disown(self, ids: Container[int]) -> None:
        """Remove `ids` from the tombstones without freeing them: they become private blocks of a request."""
        units = [unit for one in self.tombstones for unit in one.units(self.width)]
        self.tombstones = tuple([unit for unit in units if unit.ids[0] not in ids])


class Run:
    """A node of the index: the tokens of units `[start, stop)`, and their blocks in every component and tier."""

    __slots__ = (
        "_hash_after", "before", "epoch", "hash_before", "key", "num_after", "num_tiers", "offered_stop",
        "parts", "root", "spans", "start", "stop", "tokens",
    )  # fmt: skip

    def __init__(
        self, key: bytes, before: Run | None, start: int, stop: int, tokens: bytes | memoryview,
        spans: tuple[KeySpan, ...], hash_before: Hasher, epoch: int, root: Root, num_tiers: int,
    ) -> None:  # fmt: skip
        self.key = key
        """The digest of the prefix up to and including the first unit."""
        self.before = before
        """The parent: the run that ends at unit `start`. None if the run begins the prefix."""
        self.start = start
        self.stop = stop
        self.tokens = tokens
        self.spans = spans
        """The key spans that touch the units; the same for every unit of a run."""
        self.hash_before = hash_before
        """The running hash of the prefix before unit `start`."""
        self.epoch = epoch
        """The epoch of the index that the run belongs to. After a reset, the run is not findable."""
        self.root = root
        self.num_tiers = num_tiers
        self.parts: tuple[Part, ...] = ()
        """By component, then by tier: `parts[tier]` is that of full attention."""
        self.offered_stop = 0
        """End of the units of the run that the eviction watermark has to store before they are evicted; 0: none. If
        the run has such units, all runs before it are offered up to their ends."""
        self.num_after = 0
        """Number of child runs: those whose `before` is this one. A run stays in the index while it has any."""
        self._hash_after: Hasher | None = None

    def __repr__(self) -> str:
        held = " ".join(f"{part.tier.name.lower()}={part}" for part in self.parts)
        return f"<Run [{self.start},{self.stop}) {held}>"

    @property
    def hash_after(self) -> Hasher:
        if self._hash_after is None:
            unit_bytes = len(self.tokens) // (self.stop - self.start)
            self._hash_after = hash_run(self.hash_before, self.tokens, self.spans, unit_bytes)
        return self._hash_after

    def place(self, tier: Tier, component: int) -> int:
        """Index into `parts` of the part in this tier and component. It is the same in every run of an index."""
        return component * self.num_tiers + tier

    def part(self, tier: Tier, component: int) -> Part:
        return self.parts[component * self.num_tiers + tier]

    def parts_in(self, tier: Tier) -> tuple[Part, ...]:
        """The parts of one tier, by component."""
        return self.parts[tier :: self.num_tiers]

    def whole_path(self) -> list[Run]:
        """This run and all before it, in prefix order."""
        found = [self]
        run = self.before
        while run is not None:
            found.append(run)
            run = run.before
        found.reverse()
        return found

    def path(self) -> Iterator[Run]:
        """This run and all before it, last first; `whole_path` reversed, without a list."""
        run: Run | None = self
        while run is not None:
            yield run
            run = run.before

    def holds_nothing(self) -> bool:
        return not self.num_after and all(
            not part.blocks and not part.num_references and part.incoming is None for part in self.parts
        )


class Lease:
    """Pins blocks of `run` and of the runs before it, in one tier: of each component those from its entry in `starts`
    on, which is 0 in full attention. `PrefixCache` takes and releases leases.

    A lease refers to a run object, never to block ids or keys. A split puts a new head before that run, so the head is
    on the path and stays pinned. No change of the index can make a lease release the wrong blocks.
    """

    __slots__ = ("released", "run", "starts", "tier")

    def __init__(self, tier: Tier, run: Run, starts: list[int]) -> None:
        self.tier = tier
        self.run = run
        self.starts = starts
        """For each component: the first unit that is pinned, always the start of a run. A start at or after the end of
        `run` pins nothing of the component. `NO_LIMIT`: none is pinned, wherever the lease ends later."""
        self.released = False


class Job:
    """One transfer: the blocks of units `[start, stop)` in one component, copied from one tier to the other."""

    __slots__ = (
        "claims", "completion", "component", "destination_lease", "epoch", "followers", "parked", "plan",
        "predecessor", "request_id", "run", "since_s", "source_lease", "start", "state", "stop",
    )  # fmt: skip

    def __init__(
        self, plan: TransferPlan, run: Run, start: int, stop: int, epoch: int | NoEpoch, component: int,
        source_lease: Lease | None, destination_lease: Lease | None, request_id: str, since_s: float = 0.0,
    ) -> None:  # fmt: skip
        self.plan = plan
        self.run = run
        """The run in which the job's units end. The runs before it are found through `before`."""
        self.start = start
        self.stop = stop
        self.epoch = epoch
        self.component = component
        """The component whose blocks it copies. A transfer of several components is several jobs."""
        self.source_lease = source_lease
        self.destination_lease = destination_lease
        """Keeps the run, and the blocks before the new ones, until the job is settled. Either lease is None if the
        blocks are not in the index, because their tier `is_outside`: the job then holds the blocks themselves
        (`TierBlocks.hold`)."""
        self.predecessor: Job | None = None
        """The unsettled job that brings the units before this job's. Publishing waits for it, in prefix order."""
        self.request_id = request_id
        """The request that caused it; empty for write-back before eviction."""
        self.state: JobState = JOB_QUEUED
        self.claims: dict[Load, None] = {}
        """The loads that wait for this job, as an ordered set. A queued load job without claims is discarded."""
        self.followers: list[Job] = []
        """The jobs whose `predecessor` is this one."""
        self.parked: Completion | None = None
        """A completion that came before the predecessor was settled. Right after that, this job is settled with it."""
        self.completion: Completion | None = None
        """The completion that settled the job."""
        self.since_s = since_s
        """When it entered its state, where the ledger has a clock."""

    def num_left_out(self, width: int) -> int:
        """The blocks before the window, at the start of the first unit, that the job does not copy. `width`: the blocks
        of a unit."""
        return (self.stop - self.start) * width - self.plan.num_blocks

    def __repr__(self) -> str:
        return f"<Job {self.job_id} {self.plan.direction.value} [{self.start},{self.stop}) {self.state.name}>"

    def __str__(self) -> str:
        return f"job {self.job_id}"

    @property
    def job_id(self) -> int:
        return self.plan.job_id

    def leases(self) -> list[Lease]:
        return [lease for lease in (self.source_lease, self.destination_lease) if lease is not None]

    @property
    def is_settled(self) -> bool:
        return self.completion is not None or self.state is JOB_DISCARDED


class Load:
    """What one request, or one cache transfer, waits for: the jobs that bring its units up to `stop`.

    The load is over when the last of its jobs is settled, or when it is abandoned. Either way `conclude` is called. The
    owner of the load has set it, and it says what follows, so jobs need not know the owners."""

    __slots__ = ("conclude", "job_settled", "jobs", "stop", "ticket", "units_per_job", "wake")

    def __init__(
        self, stop: int, wake: Callable[[], object], conclude: Callable[[], list[Callable[[], object]]],
        ticket: int,
        jobs: Iterable[Job] = (), units_per_job: Sequence[int] = (),
    ) -> None:  # fmt: skip
        self.stop = stop
        self.wake = wake
        """Called once the request may go on."""
        self.conclude = conclude
        """Ends the load. Returns the callbacks to call once the wait queue is served."""
        self.ticket = ticket
        """The owner's. Loads that are over in the same call end in this order."""
        self.jobs = set(jobs)
        """Its unsettled jobs, also those that it shares with other loads."""
        for job in self.jobs:
            job.claims[self] = None
        self.units_per_job = units_per_job
        """Maximum units of one job, per component. Empty: the default of `JobBook`."""
        self.job_settled: Callable[[Job], object] | None = None
        """Called with each job of the load that is settled. Set while a step overlaps the load."""


@dataclass(slots=True, frozen=True)
class Tombstone:
    """Unfindable blocks that a part held from unit `start` on."""

    start: int
    ids: array[int]

    def units(self, width: int) -> list[Tombstone]:
        """One tombstone per unit."""
        count = len(self.ids) // width
        return [Tombstone(self.start + at, self.ids[at * width : (at + 1) * width]) for at in range(count)]


def divided(
    tombstones: tuple[Tombstone, ...], width: int, at: int
) -> tuple[tuple[Tombstone, ...], tuple[Tombstone, ...]]:
    """The tombstones before unit `at`, and those from it on."""
    units = [unit for one in tombstones for unit in one.units(width)]
    return tuple([unit for unit in units if unit.start < at]), tuple([unit for unit in units if unit.start >= at])


NO_LIMIT: Final = 2**40
"""A number of units that means no limit. Never multiply it: compiled code multiplies numbers of 2**30 or more as Python
objects, where a signal handler may run; an exception of the handler is then taken for a lack of memory, and ends the
process."""
MIN_FOR_NUMPY: Final = 100
"""From this many ids on, numpy is faster than a loop that makes each id a Python int."""


_NULL: Final = array("i", [0])


class BlockTable:
    """The block ids of one request in one component, `width` for each unit; 0 is the null block. The docstring of
    this module shows who owns the blocks."""

    __slots__ = ("duplicates", "ids", "start", "width")

    def __init__(self, width: int, ids: array[int], start: int = 0) -> None:
        self.width = width
        """Block ids per unit."""
        self.ids = ids
        self.start = start
        """Units before this one are null. It never decreases."""
        self.duplicates: list[range] = []
        """Published units whose blocks in this table are private or null, because another request has cached its own
        copy first."""

    def at(self, start: int, stop: int) -> array[int]:
        return self.ids[start * self.width : stop * self.width]

    def put(self, start: int, ids: array[int]) -> None:
        """Write `ids` from unit `start` on."""
        self.ids[start * self.width : start * self.width + len(ids)] = ids

    def exchange(self, start: int, ids: array[int]) -> array[int]:
        """Write `ids` from unit `start` on. Returns the ids they replace, without nulls."""
        at = start * self.width
        taken = self.ids[at : at + len(ids)]
        self.ids[at : at + len(ids)] = ids
        return not_null(taken)

    def step_back(self, stop: int) -> None:
        """Forget duplicates from unit `stop` on, where every block is private."""
        self.duplicates = within(self.duplicates, 0, stop)

    def null(self, start: int, stop: int) -> array[int]:
        """Make units `[start, stop)` null. Returns the ids that were there, without nulls."""
        return not_null(self.take(start, stop)) if start < stop else array("i")

    def take(self, start: int, stop: int) -> array[int]:
        """As `null`, for units of which none is null yet: skips the search for nulls."""
        at, end = start * self.width, stop * self.width
        taken = self.ids[at:end]
        self.ids[at:end] = _NULL * len(taken)
        return taken

    @property
    def num_held(self) -> int:
        return len(self.ids) - self.ids.count(0)

    def num_null(self, start: int, stop: int) -> int:
        return self.ids[start * self.width : stop * self.width].count(0)

    def fill(self, start: int, stop: int, ids: array[int]) -> None:
        """Write `ids` into the null positions of units `[start, stop)`."""
        fresh = iter(ids)
        self.put(start, array("i", [block_id or next(fresh) for block_id in self.at(start, stop)]))

    def private(self, published: int, start: int = 0, stop: int = NO_LIMIT) -> array[int]:
        """The ids in units `[start, stop)` that only the request reads and frees. It has published the units before
        `published`."""
        stop = min(stop, len(self.ids))  # at least the number of units
        found = not_null(self.ids[max(start, published) * self.width : stop * self.width])
        for units in within(self.duplicates, start, stop) if self.duplicates else ():
            found.extend(not_null(self.at(units.start, units.stop)))
        return found


def nulls(count: int) -> array[int]:
    """`count` times the null block."""
    return _NULL * count


def not_null(ids: array[int]) -> array[int]:
    """`ids` without the null block."""
    if len(ids) < MIN_FOR_NUMPY:
        return array("i", filter(None, ids)) if 0 in ids else ids
    seen = np.frombuffer(ids, np.int32)
    number = np.count_nonzero(seen)
    if number == len(ids):
        return ids
    return array("i", seen[seen != 0].tobytes()) if number else array("i")


class Checkpoints:
    """The checkpoints of one request whose model has a recurrent state. Positions are in units: a checkpoint at
    position `p` is the state after the first `p` units.

    The request continues from one checkpoint, that of its hit, and plans to write others. Blocks for these are taken
    together with those of the block tables. They are private until a commit names the checkpoint as written; it is
    published then. Like blocks before a window, all of them are given up once the request has computed further and no
    step may read or write them any more (`slide_windows`). A published checkpoint then stays cached."""

    __slots__ = ("branch_stop", "incoming", "planned", "published", "resume", "written")

    def __init__(self) -> None:
        self.branch_stop = 0
        """Where other prompts leave the path of the request, at the end of the units of which the hit tiers held full
        attention at the match, also without a checkpoint; 0: nowhere."""
        self.planned: dict[int, array[int]] = {}
        """Private blocks by position, where the request is going to write a checkpoint."""
        self.incoming = array("i")
        """Private blocks into which a load copies the checkpoint of the host hit. Its job owns them later."""
        self.resume = array("i")
        """Cached blocks of the checkpoint from which the request continues, at `ready_stop`."""
        self.written = array("i")
        """Blocks of checkpoints that the request has published and not given up yet."""
        self.published: list[int] = []
        """The positions of all checkpoints that the request has published: an invalidation must find them."""

    def private(self) -> array[int]:
        """Ids of the blocks that only the request reads, writes and frees."""
        return sum(self.planned.values(), array("i", self.incoming))

    def ids(self) -> array[int]:
        """All blocks that a step of the request may read or write."""
        return self.private() + self.resume + self.written

    def clear(self) -> None:
        """Forget all blocks."""
        self.planned, self.incoming, self.resume, self.written = {}, array("i"), array("i"), array("i")


_MAY_MATCH_AGAIN = (
    QUEUED, MATCHED, PINNED, REQUEUED, STRANDED,
)  # fmt: skip
_LOAD_NOT_OVER = (LOADING, DRAINING, REQUEUED)


class LedgerRequest:
    """One request, and everything that it owns. Programs may read it; only the verbs of its ledger change it."""

    __slots__ = (
        "checkpoints", "computing", "epoch", "evictions_before", "has_committed", "has_parent", "hit_alignment",
        "hit_limit", "hit_stop", "last_step", "leases", "ledger", "load", "match", "nulled", "num_computed_tokens",
        "num_lost_tokens", "num_steps", "num_units", "published", "ready_stop", "reason", "request_id", "reserve",
        "sequence", "since_s", "state", "store_limit", "tables", "ticket", "waiter", "when_idle",
    )  # fmt: skip

    def __init__(
        self, request_id: str, sequence: TokenSequence, epoch: int | NoEpoch, ticket: int, hit_limit: int,
        hit_alignment: int, *, ledger: Any, evictions_before: int = 0, store_limit: int = NO_LIMIT,
    ) -> None:  # fmt: skip
        self.request_id = request_id
        self.sequence = sequence
        self.epoch = epoch
        self.has_parent = False
        """Whether it began with the tokens and blocks of another request."""
        self.ticket = ticket
        """Its place in the wait queue. The request keeps it when it has to wait again."""
        self.hit_limit = hit_limit
        """Maximum units of a match."""
        self.ledger = ledger
        """The ledger that admitted it. Other ledgers refuse it."""
        self.evictions_before = evictions_before
        """`TierBlocks.num_evicted` of the host when it was admitted: whether the host has evicted since."""
        self.hit_alignment = hit_alignment
        """A match ends at a multiple of this number of units."""
        self.store_limit = store_limit
        """End of the units that may be stored."""
        self.state: RequestState = QUEUED
        self.reason = ""
        """Why it was aborted, or will be: a cancelled request ends once its task has left it."""
        self.match: PrefixMatch = NO_MATCH
        self.hit_stop = 0
        """End of the hit, in units: on the device up to `published`, from there on in the host."""
        self.load: Load | None = None
        """The load under way; None before `plan_load` and once the load is over."""
        self.tables: tuple[BlockTable, ...] = ()
        """One for each paged component, once the request has blocks."""
        self.num_units = 0
        """Units that the tables cover."""
        self.leases: dict[Tier, Lease] = {}
        """Device: a lease on the cached path that it reads. Host: a lease on the path that it will load."""
        self.reserve: Lease | None = None
        """Only with windows or a recurrent state: a second device lease, on blocks after the device hit, which the load
        adopts."""
        self.published = 0
        """Number of leading units that are in the index, or were when the request hit, loaded or committed them."""
        self.checkpoints: Checkpoints | None = None
        """From the first match on; None if the model has no recurrent state."""
        self.nulled: list[tuple[int, int, int]] = []
        """(component, start, stop): units that have left the window of a component since the last `Extension`."""
        self.ready_stop = 0
        """Number of leading units that the request did not compute: the device hit, and loaded units."""
        self.num_computed_tokens = 0
        self.has_committed = False
        self.num_lost_tokens = 0
        """Tokens that its loads failed to bring to the device."""
        self.waiter: Waiter | None = None
        self.computing: Computing = COMPUTES_NOTHING
        self.num_steps = 0
        """Number of steps under way that touch its blocks. No block is given back before all of them end."""
        self.last_step = 0
        """The number of its last step that has ended, see `LastUses`. 0: no step has ended, or its blocks were used
        outside of steps since then."""
        self.when_idle: Callable[[], object] = do_nothing
        """Called when the last of its steps has ended."""
        self.since_s = 0.0
        """When it entered its state, if the ledger has a clock."""

    def __repr__(self) -> str:
        return f"<LedgerRequest {self.request_id!r} {self.state.name} {self.num_blocks} blocks>"

    def __str__(self) -> str:
        return f"request {self.request_id}"

    @property
    def is_over(self) -> bool:
        return self.state in (DONE, ABORTED)

    @property
    def given_tokens(self) -> int:
        """Leading tokens whose KV the engine has on the device in addition to the hit: see `HostCache`."""
        return 0

    @property
    def device_run(self) -> Run | None:
        """The last run of the path that the request leases on the device."""
        lease = self.leases.get(DEVICE)
        return None if lease is None else lease.run

    @property
    def table(self) -> array[int]:
        """The block ids of full attention, of all its groups."""
        return self.tables[0].ids if self.tables else array("i")

    @property
    def may_match_again(self) -> bool:
        """Whether the request may be matched again: its match consists of leases only, without block tables."""
        return self.state in _MAY_MATCH_AGAIN

    @property
    def is_loading(self) -> bool:
        """Whether the load of the request is not over yet: the request waits for copies, for an overlapping step, or
        (REQUEUED) for free blocks."""
        return self.state in _LOAD_NOT_OVER

    @property
    def holds_device_blocks(self) -> bool:
        granted = self.waiter is not None and bool(self.waiter.granted)
        return self.num_units > 0 or granted or DEVICE in self.leases or self.reserve is not None

    def all_leases(self) -> list[Lease]:
        return [*self.leases.values()] if self.reserve is None else [self.reserve, *self.leases.values()]

    def private_blocks(self) -> array[int]:
        """Ids of the blocks that only this request reads and frees."""
        if len(self.tables) == 1 and self.checkpoints is None:  # the common case
            return self.tables[0].private(self.published)
        found = array("i")
        for table in self.tables:
            found.extend(table.private(self.published))
        if self.checkpoints is not None:
            found.extend(self.checkpoints.private())
        return found

    @property
    def is_at_end(self) -> bool:
        """Whether the request is at the end of its prompt: all of it is computed, and at most one token was
        generated."""
        num_prompt = self.sequence.num_prompt_tokens
        return num_prompt <= self.num_computed_tokens <= self.sequence.num_tokens <= num_prompt + 1

    def checked_count(self, num_computed_tokens: object, before: int, num_added: int) -> int:
        """Returns `num_computed_tokens`. `CommitError` unless it is an integer, at least `before`, and at most the
        number of known tokens, `num_added` new ones included."""
        name = "num_computed_tokens"
        if type(num_computed_tokens) is not int:
            raise CommitError(name, f"must be an integer, got {shown(num_computed_tokens)}")
        if num_computed_tokens < before:
            raise CommitError(name, f"goes back from {before} to {num_computed_tokens}")
        known = self.sequence.num_tokens + num_added
        if num_computed_tokens > known:
            known_are = f"the {known} tokens that are known, {num_added} of `new_token_ids` included"
            raise CommitError(name, f"is {num_computed_tokens}, beyond {known_are}")
        return num_computed_tokens

    @property
    def num_blocks(self) -> int:
        """Positions in the block tables of the request, including null ones."""
        found = 0
        for table in self.tables:
            found += len(table.ids)
        return found

    @property
    def num_held(self) -> int:
        """Blocks in the tables of the request, without null ones, and the blocks of its checkpoints."""
        held = sum(table.num_held for table in self.tables)
        return held if self.checkpoints is None else held + len(self.checkpoints.ids())


def do_nothing() -> None:
    """Default `wake`: does nothing."""


def call_all(wakes: Iterator[Callable[[], object]]) -> None:
    """Call all `wakes`, even after one of them raises, because each wakes another request."""
    try:
        for wake in wakes:
            wake()
    except BaseException:
        call_all(wakes)
        raise


class Waiter:
    """One wait of one request for device blocks. When it is over, exactly one of `granted` and `error` is set."""

    __slots__ = ("changes_seen", "error", "granted", "joined_s", "num_missing", "num_units", "request", "wake")

    def __init__(self, request: LedgerRequest, num_units: int, wake: Callable[[], object] = do_nothing) -> None:
        self.request = request
        self.num_units = num_units
        """Units of the whole table, not only those to add."""
        self.wake = wake
        self.granted: array[int] | None = None
        self.error: OutOfBlocks | None = None
        self.num_missing = 0
        """Blocks that it lacked when `serve_queue` last examined it."""
        self.changes_seen = -1
        """`TierBlocks.num_changes` of the device at that time; -1: examine it in any case."""
        self.joined_s: float | None = None
        """When it first joined the wait queue, if the ledger has a clock. It keeps this time if it joins again because
        its grant was withdrawn."""

    def __repr__(self) -> str:
        over = "granted" if self.granted is not None else "failed" if self.error else "waiting"
        return f"<Waiter {self.request.request_id!r} {self.num_units} units {over}>"

    @property
    def is_over(self) -> bool:
        return self.granted is not None or self.error is not None


@dataclass(slots=True, eq=False, repr=False)
class Step:
    """A forward over the blocks of `requests`. It holds the blocks until it ends, even if a request ends before."""

    step_id: int
    requests: tuple[LedgerRequest, ...]
    begun_s: float = 0.0
    """The time at which the step began; 0 if the ledger has no clock."""

    def __repr__(self) -> str:
        return f"<Step {self.step_id} {' '.join(request.request_id for request in self.requests)}>"

    @property
    def num_blocks(self) -> int:
        """Device blocks that the step holds. A block that several requests share counts for each of them."""
        return sum(request.num_held for request in dict.fromkeys(self.requests))
