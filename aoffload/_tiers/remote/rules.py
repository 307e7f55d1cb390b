"""The rules of the remote tier: which cells are stored, and which cells have to be removed.

A *cell* is one object in the store: a power of two of units, aligned from the prompt's first token. Its label is the
digest of the prefix at its end, so every process that serves the same model finds the same cell by the same tokens.

The tier stores whole cells that the host holds and that were requested twice, the most recently requested first. Other
processes read and write the store, too, and the store has no list of its cells. So the ledger remembers the cells that
it has planned to store, as long as a live request may invalidate the KV in them, because invalidated cells have to be
removed from the store.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ..._common.arguments import check_int, check_type
from ..._common.prefix import Prefix, check_epoch
from ..._common.tiers import Tier
from ..._extensions.integrity import demand
from ..._extensions.store_policies import RequestCounts
from ..._kernel.cache import PrefixCache
from ..._kernel.index import present_stop
from ..._kernel.jobs import JobBook
from ..._kernel.records import Job, Run
from ..._kernel.states import JobState
from ..._kernel.tokens import TokenSequence
from ...errors import InvalidArgument
from .plans import CellLabel


def cells_of(prefix: Prefix, unit_tokens: int, cell_units: int, weights_epoch: str = "") -> tuple[CellLabel, ...]:
    """The labels of the whole cells that a request for `prefix` may hit while the ledger has this `weights_epoch`, in
    prefix order. The last token is left out, because a request always computes at least one token. May be called in any
    thread."""
    check_int("unit_tokens", unit_tokens, 1)
    if check_int("cell_units", cell_units, 1) & (cell_units - 1):
        raise InvalidArgument("cell_units", f"must be a power of two, got {cell_units}")
    sequence = TokenSequence(check_type("prefix", prefix, Prefix), unit_tokens)
    if epoch := check_epoch("weights_epoch", weights_epoch):
        sequence = sequence.under(prefix.root.under_weights(epoch))
    return cells_to_hit(sequence, unit_tokens, cell_units)


def cells_to_hit(sequence: TokenSequence, unit_tokens: int, cell_units: int) -> tuple[CellLabel, ...]:
    """The labels of the whole cells that a request for `sequence` may hit: see `cells_of`."""
    return cells_before(sequence, (sequence.num_tokens - 1) // unit_tokens, cell_units)


def cells_before(sequence: TokenSequence, stop: int, cell_units: int) -> tuple[CellLabel, ...]:
    """The labels of the whole cells of `sequence` before unit `stop`."""
    hasher, found = sequence.root.hasher, list[CellLabel]()
    for start in range(0, stop - cell_units + 1, cell_units):
        hasher = sequence.hash_on(hasher, start, start + cell_units)
        found.append(CellLabel(0, hasher.digest(), start, start + cell_units))
    return tuple(found)


def places_in_cells(start: int, stop: int, cell_units: int, width: int) -> array[int]:
    """For each block of units `[start, stop)`, its place in its cell. A unit has `width` blocks."""
    num_blocks = cell_units * width
    return array("i", [at % num_blocks for at in range(start * width, stop * width)])


MAX_SCANNED = 16
"""Maximum number of prompts that one call scans."""
MAX_KNOWN = 2**16
"""Maximum number of cells that are remembered or to be removed. With more, nothing is stored."""


@dataclass(slots=True, frozen=True)
class _Known:
    label: CellLabel
    before: bytes
    """The digest of the prefix before the cell."""
    ticket: int
    """Requests with this ticket or a later one were admitted after the cell was scanned."""


@dataclass(slots=True, eq=False)
class RemoteStores:
    cache: PrefixCache
    jobs: JobBook
    counts: RequestCounts
    cell_units: int
    forgotten: dict[bytes, CellLabel] = field(default_factory=dict)
    """By digest: cells whose KV was invalidated, until the caller calls `take_forgotten` and removes them from the
    store."""
    _known: dict[bytes, _Known] = field(default_factory=dict)
    """By digest, in the order of their last scan: cells that were chosen to be stored, and the cells before them."""
    _stores: dict[bytes, Job] = field(default_factory=dict)
    """By digest: stores under way, and some that are over."""
    _situation: tuple[int, ...] = ()
    """The state at the last scan. While it stays the same, no prompt is scanned twice and no cell is planned twice."""
    _num_seen: int = 0
    """Number of recent prompts that were scanned in this state and are still in the list, at its beginning."""
    _tried: set[bytes] = field(default_factory=set)
    """Digests of the cells that were planned in this state. They are not planned again, because a store that has failed
    would fail again."""

    @property
    def _is_full(self) -> bool:
        return len(self._known) + len(self.forgotten) >= MAX_KNOWN

    # -- storing --------------------------------------------------------------------------------------------------

    def plan(self, most: int, is_wanted: Callable[[CellLabel], bool], ticket: int, oldest: int) -> list[Job]:
        """Store at most `most` blocks, in cells for which `is_wanted` returns True. `ticket`: the ticket of the next
        request. `oldest`: the ticket of the live request that was admitted first."""
        self._remember_since(oldest)
        recent, left = self.counts.recent, most // (self.cell_units * self.cache.layout.full.width)
        now = (self.cache.tiers[Tier.HOST].num_changes, recent.num_added, len(self.forgotten))
        if now != self._situation:
            self._situation, self._num_seen, self._tried = now, 0, set()
        if not left or self._num_seen >= len(recent):
            return []
        chosen: dict[CellLabel, Run] = {}  # planned at the end, because `is_wanted` may raise
        seen = set[tuple[Run, int]]()
        for _ in range(min(len(recent) - self._num_seen, MAX_SCANNED)):
            sequence = recent.take()
            asked = self.counts.requested_stop(sequence, sequence.num_tokens // self.cache.layout.unit_tokens)
            path, there = self._in_host(sequence, asked - asked % self.cell_units)
            if path and (path[-1], there) not in seen:
                seen.add((path[-1], there))
                self._choose(chosen, left, path, cells_before(sequence, there, self.cell_units), is_wanted, ticket)
            if len(chosen) == left:
                recent.give_back(sequence, as_last=False)
                break
            if there + self.cell_units <= asked:
                recent.give_back(sequence, as_last=True)  # the host lacks the other cells, perhaps only for now
                self._num_seen += 1
        self._tried.update([cell.digest for cell in chosen])
        return [self._store(run, cell) for cell, run in chosen.items()]

    def _in_host(self, sequence: TokenSequence, stop: int) -> tuple[list[Run], int]:
        """The path of `sequence`, and the unit, at most `stop`, up to which the host holds it."""
        walked = list(self.cache.index.walk(sequence, stop))
        path = [run for run, _ in walked]
        return path, present_stop(path, Tier.HOST, 0, walked[-1][1]) if path else 0

    def _choose(
        self,
        chosen: dict[CellLabel, Run],
        most: int,
        path: Sequence[Run],
        cells: Sequence[CellLabel],
        is_wanted: Callable[[CellLabel], bool],
        ticket: int,
    ) -> None:
        """Add the cells of `cells` that should be stored to `chosen`, each with its run, up to `most` cells in all."""
        before, runs = path[0].root.digest, iter(path)
        run = next(runs)
        for cell in cells:
            if len(chosen) == most or self._is_full or cell.digest in self.forgotten:
                break  # a forgotten cell has to be removed first
            self._known.pop(cell.digest, None)
            self._known[cell.digest] = _Known(cell, before, ticket)
            before = cell.digest
            under_way = self._stores.get(cell.digest)
            is_free = cell.digest not in self._tried and (under_way is None or under_way.is_settled)
            if is_free and is_wanted(cell):
                while run.stop < cell.stop:
                    run = next(runs)
                chosen[cell] = run

    def _store(self, run: Run, cell: CellLabel) -> Job:
        full, units = self.cache.layout.full, (cell.start, cell.stop)
        places = places_in_cells(*units, self.cell_units, full.width)
        (job,) = self.jobs.plan(
            None, Tier.HOST, Tier.REMOTE, run, full, *units, places, (self.cell_units,), payloads=(cell,)
        )
        self._stores[cell.digest] = job
        return job

    # -- invalidating ---------------------------------------------------------------------------------------------

    def _remember_since(self, oldest: int) -> None:
        """Forget the cells that were scanned before the oldest live request was admitted, because no live request can
        invalidate their KV."""
        known = self._known
        while known and known[first := next(iter(known))].ticket <= oldest:
            del known[first]
        if len(self._stores) > len(self._known):
            self._stores = {digest: job for digest, job in self._stores.items() if not job.is_settled}

    def invalidate(self, sequence: TokenSequence, first: int, stop: int) -> list[Job]:
        """Invalidate the cells with KV of `sequence` from unit `first` on, or with KV that was computed after it. The
        units before `stop` were published. Returns the queued stores of these cells; discard them.

        Every cell after the last correct cell counts as wrong, because a cell may hold wrong KV of a request whose
        tokens agree only for a part of the cell."""
        own, number = cells_before(sequence, max(first, stop), self.cell_units), first // self.cell_units
        before = own[number - 1].digest if number else sequence.root.digest
        wrong = {cell.digest: cell for cell in own[number:]}
        after: dict[bytes, list[CellLabel]] = {}
        for known in self._known.values():
            after.setdefault(known.before, []).append(known.label)
        waiting = [before, *wrong]
        while waiting:  # other requests may have continued from the wrong KV
            for cell in after.pop(waiting.pop(), ()):
                wrong[cell.digest] = cell
                waiting.append(cell.digest)
        is_full = len(self.forgotten) >= MAX_KNOWN
        for digest, cell in wrong.items():
            if self._known.pop(digest, None) is not None or not is_full:
                self.forgotten[digest] = cell
        stores = [self._stores[digest] for digest in wrong if digest in self._stores]
        return [job for job in stores if job.state is JobState.QUEUED]

    def take_forgotten(self) -> tuple[CellLabel, ...]:
        """Return and clear `forgotten`, except cells that a store under way may still write."""
        under_way = {digest for digest, job in self._stores.items() if not job.is_settled}
        found = [digest for digest in self.forgotten if digest not in under_way]
        return tuple([self.forgotten.pop(digest) for digest in found])


def check_cell(cache: PrefixCache, job: Job) -> None:
    """Check that a job from or to a remote store copies units of one cell, whose digest is that of their tokens."""
    plan, cell, width = job.plan, job.plan.payload, cache.layout.components[job.component].width
    if not isinstance(cell, CellLabel):
        demand(Tier.REMOTE not in plan.link, "a copy from or to a remote store without a cell", job)
        return
    num_units = cell.stop - cell.start
    if job.run.stop < cell.stop:  # too few free host blocks for the whole cell, so the index lacks its tokens
        demand(plan.source is Tier.REMOTE, "a part of a cell is stored", job, cell)
    else:
        digest = cells_before(TokenSequence.of_path(job.run), cell.stop, num_units)[-1].digest
        demand(digest == cell.digest, "a cell of other tokens", job, cell)
    demand(not cell.start % num_units, "a cell that begins elsewhere", job, cell)
    ids = plan.source_ids if plan.source is Tier.REMOTE else plan.destination_ids
    is_inside = cell.start <= job.start < job.stop <= cell.stop
    places = places_in_cells(job.start, job.stop, num_units, width)
    demand(is_inside and ids == places, "blocks at other places of their cell", job, cell, ids)
    demand(all(lease.tier is not Tier.REMOTE for lease in job.leases()), "a lease in a remote store", job)
