"""Calls about a remote store, and a simulated store of cells by digest. Other servers remove and corrupt cells."""

from __future__ import annotations

import attrs

from aoffload._common.prefix import Prefix
from aoffload._common.tiers import Tier
from aoffload._kernel.plans import Completion, TransferPlan
from aoffload._kernel.states import JobState, Outcome
from aoffload._tiers.remote.memory import Removals
from aoffload._tiers.remote.plans import CellLabel
from aoffload._tiers.remote.rules import cells_of
from aoffload.testing.violations import Violation

from .ledger_disk import DiskCalls
from .program import World
from .provenance import Block

__all__ = ["RemoteCalls"]


@attrs.frozen
class _Object:
    """The object that a put writes."""

    cell: CellLabel
    content: list[Block]
    number: int | None
    """The number of the put; None for a put of an earlier process."""


class RemoteCalls(DiskCalls):
    """A cell is there as a whole or not at all, and what does not verify is a miss. The store outlives the process."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.store: dict[bytes, _Object | None] = {}
        """None: something is there that does not verify."""
        self.puts: dict[str, _Object] = {}
        """By job: objects of puts that were given up, and may still arrive."""
        self.on_their_way: list[_Object] = []
        """Objects of puts that have failed, and arrive later all the same."""
        self.removals = Removals()
        """The removals of a transport. Here a removal is over at once, even while a put is under way."""
        self._named: dict[bytes, list[int]] = {}
        """By digest: the tokens that a cell was put there for."""

    # -- calls --------------------------------------------------------------------------------------------------------

    def do_remote_stores(self, most: int, blind: bool = False) -> str:
        """`blind`: the caller knows of no cell that it is there."""
        under_way = {
            job.plan.payload for job in self.ledger.jobs.unsettled.values() if job.plan.destination is Tier.REMOTE
        }

        def is_wanted(cell: CellLabel) -> bool:
            return blind or self.store.get(cell.digest) is None

        plans = self.ledger.remote.plan_stores(most, is_wanted)
        self.take(plans)
        self._note("remote store", plans)
        num_blocks, cells = sum(plan.num_blocks for plan in plans), [plan.payload for plan in plans]
        self._require(num_blocks <= most, "no more is stored than was allowed", f"{num_blocks} of {most}")
        self._require(len({*cells}) == len(cells), "a cell is stored once", cells)
        self._require(under_way.isdisjoint(cells), "a cell is not stored twice at a time", cells)
        return f"{num_blocks}"

    def do_lose_cell(self, at: int) -> str:
        """The store evicts a cell, or somebody else removes it."""
        if not self.store:
            return "skipped"
        del self.store[list(self.store)[at % len(self.store)]]
        return "lost"

    def do_poison_cell(self, at: int) -> str:
        """Somebody puts something else under the name of a cell."""
        if not self.store:
            return "skipped"
        self.store[list(self.store)[at % len(self.store)]] = None
        return "poisoned"

    def do_arrive(self, at: int) -> str:
        """A put that has failed arrives."""
        if not self.on_their_way:
            return "skipped"
        found = self.on_their_way.pop(at % len(self.on_their_way))
        self.store[found.cell.digest] = found
        self._note("failed put arrives revoked", self._is_revoked(found))
        return "arrived"

    def _is_revoked(self, found: _Object) -> bool:
        return found.number is not None and self.removals.has_revoked(found.cell, found.number)

    def _num_stored_tokens(self, prefix: Prefix, told: int | None) -> int:
        """`told`: cells that the store is said to have, however many it has. None: it has been asked just now."""
        if not self.world.cell_units:
            return 0
        there = 0
        for cell in cells_of(prefix, self.unit, self.world.cell_units, self.bytes.epoch):
            if cell.digest not in self.store:
                break
            there += 1
        self._note("told too much", told is not None and told > there)
        return (there if told is None else told) * self.world.cell_units * self.unit

    # -- jobs ---------------------------------------------------------------------------------------------------------

    def _begins(self, plan: TransferPlan) -> None:
        if plan.destination is not Tier.REMOTE:  # there, the old cell stays until the new one is there
            super()._begins(plan)

    def do_settle(self, job: str, outcome: str = "landed", at: int = 0) -> str:
        """For a cell, FAILED with an odd `at` means that the put has arrived unnoticed, or arrives later. CORRUPT means
        that the cell does not verify; a transport reports it, and ours reports FAILED. UNPROVEN means that the call is
        given up: a get is dropped, and a put may still arrive."""
        found, plan = self.job(job), self.plans.get(job)
        if plan is None or not isinstance(cell := plan.payload, CellLabel):
            return super().do_settle(job, outcome, at)
        if found is None or found.state is not JobState.LAUNCHED or found.parked is not None:
            return "skipped"
        how = Outcome(outcome)
        if plan.source is Tier.REMOTE:
            completion = self._got(plan, cell, how, at)
        else:
            completion = self._put(job, plan, cell, how, at)
        del self.plans[job]
        self.over[job] = completion
        self.features.add(f"remote {plan.direction.value} {completion.outcome.value}")
        self._settle(completion, plan)
        return completion.outcome.value

    def do_end_remote(self, outcome: str, at: int = 0) -> str:
        """All copies to and from the store that are planned so far end with `outcome`, in order."""
        for name in [name for name, plan in self.plans.items() if isinstance(plan.payload, CellLabel)]:
            self.do_launch(name)
            self.do_settle(name, outcome, at)
        return outcome

    def _got(self, plan: TransferPlan, cell: CellLabel, how: Outcome, at: int) -> Completion:
        found = self.store.get(cell.digest)
        self._note("cell gone", cell.digest not in self.store)
        if how is Outcome.CORRUPT:
            self.store[cell.digest] = None
            return Completion(plan.job_id, Outcome.CORRUPT, 0, (at % plan.num_blocks,))
        if found is None or how is Outcome.UNPROVEN:
            return Completion(plan.job_id, Outcome.FAILED)
        if self._is_revoked(found):
            self.features.add("revoked cell met")
            del self.store[cell.digest]
            return Completion(plan.job_id, Outcome.FAILED)
        num_landed = plan.num_blocks if how is Outcome.LANDED else at % plan.num_blocks
        for place, block_id in list(zip(plan.source_ids, plan.destination_ids, strict=True))[:num_landed]:
            self.bytes.tiers[Tier.HOST][block_id] = list(found.content[place])
        return Completion(plan.job_id, how, num_landed)

    def _put(self, job: str, plan: TransferPlan, cell: CellLabel, how: Outcome, at: int) -> Completion:
        if any((plan.source, block_id) in self.rotten for block_id in plan.source_ids):
            return Completion(plan.job_id, Outcome.FAILED)  # it has the sums of what it reads, and stops there
        content = [list(self.bytes.tiers[Tier.HOST][block_id]) for block_id in plan.source_ids]
        problem = self.bytes.problem(Tier.HOST, plan.source_ids)
        if problem is not None and problem[0] == "wrong bytes":
            raise Violation("wrong bytes", f"{cell} is stored from blocks that hold nothing of use")
        tokens = [one.prefix for block in content for one in block]
        if self._named.setdefault(cell.digest, tokens) != tokens:
            raise Violation("wrong bytes", f"{cell} is stored with the KV of other tokens")
        number = self.removals.begin_store(cell)
        self._require(number is not None, "what is removed is stored again", cell)
        self.removals.end_store(cell)
        made = _Object(cell, content, number)
        if how is Outcome.LANDED or (how is Outcome.FAILED and at % 4 == 1):
            self.store[cell.digest] = made
        elif how is Outcome.FAILED and at % 4 == 3:
            self.on_their_way.append(made)
        elif how is Outcome.CORRUPT:
            self.store[cell.digest] = None
        elif how is Outcome.UNPROVEN:
            self.puts[job] = made
            self.unproven[job] = plan
        return Completion(plan.job_id, how, plan.num_blocks if how is Outcome.LANDED else 0)

    def do_late(self, job: str) -> str:
        if (put := self.puts.pop(job, None)) is None:
            return super().do_late(job)
        plan = self.unproven.pop(job)
        self.store[put.cell.digest] = put
        self.over[job] = Completion(plan.job_id, Outcome.LANDED, plan.num_blocks)
        self.ledger.settle(self.over[job])
        self.features.add("late put")
        return "arrived"

    def do_stray(self, job: str) -> str:
        return "skipped" if job in self.puts else super().do_stray(job)

    # -- taking back -----------------------------------------------------------------------------------------------

    def erase_forgotten(self) -> None:
        super().erase_forgotten()
        if self.world.cell_units:
            self.removals.add(self.ledger.remote.take_forgotten())
        while (cell := self.removals.take(lambda cell: True, 0.0)) is not None:
            self._note("cell taken back", self.store.pop(cell.digest, None))
            self.removals.done(cell, True, 0.0)
        if self.bytes.invalid:
            self._check_store()

    def _check_store(self) -> None:
        """No object of invalidated KV is in the store or on its way there, unless the object is revoked or its cell
        waits for removal."""
        remote = self.ledger.remote.stores if self.world.cell_units else None
        waiting = set() if remote is None else remote.forgotten.keys()
        for found in (*self.store.values(), *self.puts.values(), *self.on_their_way):
            if found is None or found.cell.digest in waiting or self._is_revoked(found):
                continue
            if any(one.marks & self.bytes.invalid for block in found.content for one in block):
                raise Violation("bytes taken back", f"the store has a cell of wrong KV: {found.cell.digest.hex()[:16]}")

    def do_restart(self, at: int = 0, most: int = 0) -> str:
        """Of puts under way, those with an odd `at` arrive."""
        remote = self.ledger.remote.stores if self.world.cell_units else None
        for name, plan in list(self.plans.items()) if remote is not None else ():
            job, cell = self.job(name), plan.payload
            if not isinstance(cell, CellLabel) or plan.destination is not Tier.REMOTE or job is None:
                continue
            if job.state is JobState.LAUNCHED and at % 2:
                self._put(name, plan, cell, Outcome.LANDED, at)
        for digest in remote.forgotten if remote is not None else ():
            self.store.pop(digest, None)  # see there: nobody can rule out that these are found again
        self.puts.clear()
        self.on_their_way.clear()
        for digest, found in list(self.store.items()):
            if found is not None and self._is_revoked(found):
                del self.store[digest]  # nor that of revoked objects: see _tiers/remote/memory.py
            elif found is not None:
                self.store[digest] = attrs.evolve(found, number=None)
        self.removals = Removals()
        return super().do_restart(at, most)
