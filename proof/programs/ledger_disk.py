"""Calls about the disk, and a simulated disk that keeps the records of its slots over restarts."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import attrs

from aoffload._common.prefix import Prefix, Root
from aoffload._common.tiers import Tier
from aoffload._kernel.plans import Completion, TransferPlan
from aoffload._kernel.states import JobState, NoEpoch, Outcome
from aoffload._tiers.disk.plans import BlockLabel, DiskPayload, RestoredRun

from .ledger_jobs import JobCalls
from .program import World

__all__ = ["DiskCalls"]


@attrs.frozen
class _Record:
    label: BlockLabel
    generation: int
    number: int


class DiskCalls(JobCalls):
    """The disk writes the record of a slot once its bytes are there; whatever spoils the bytes takes the record."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.records: dict[int, _Record] = {}
        self.survivors: list[RestoredRun] = []
        """What the last restart has found, and the ledger was not given so far."""
        self.generation = self.num_written = 0
        """Of the first store of this process; records written so far."""

    def do_write_behind(self, most: int, is_idle: bool = False, only_requested_twice: bool = False) -> str:
        plans = self.ledger.disk.plan_stores(most, is_idle=is_idle, only_requested_twice=only_requested_twice)
        return self._stored("write behind", most, plans)

    def do_idle(self, most: int, only_requested_twice: bool = False) -> str:
        """No request comes, and each store to the disk that the ledger plans lands. These stores come to an end, and
        none stores a block twice, even if the stores evict blocks from the disk."""
        seen, num_blocks = set[tuple[bytes, int, int]](), 0
        while plans := self.ledger.disk.plan_stores(most, is_idle=True, only_requested_twice=only_requested_twice):
            num_blocks += sum(plan.num_blocks for plan in plans)
            self._stored("idle", most, plans)
            labels = [label for plan in plans for label in DiskPayload.of(plan).labels if label]
            places = [(label.digest, label.component, label.place) for label in labels]
            again = seen.intersection(places)
            self._require(not again, "an idle ledger writes no block to the disk twice", sorted(again)[:3])
            most_ever = self.ledger.statistics().host.num_blocks ** 2
            self._require(num_blocks <= most_ever, "an idle ledger comes to rest", num_blocks)
            seen.update(places)
            self.do_land()
            self.erase_forgotten()
        return f"{num_blocks}"

    def do_disk_flush(self, most: int) -> str:
        return self._stored("disk flush", most, self.ledger.disk.plan_flush(most))

    def _stored(self, feature: str, most: int, plans: Sequence[TransferPlan]) -> str:
        self.take(plans)
        self._note(feature, plans)
        num_blocks = sum(plan.num_blocks for plan in plans)
        allowed = most + self.bytes.num_rows if most > 0 else 0  # a checkpoint is stored as a whole
        self._require(num_blocks <= allowed, "no more is stored than was allowed", f"{num_blocks} of {most}")
        is_labelled = all(len(DiskPayload.of(plan).labels) == plan.num_blocks for plan in plans)
        self._require(is_labelled, "each block that goes to the disk has a label", plans)
        return f"{num_blocks}"

    def do_fetch(self, name: str, tokens: Sequence[int], salt: str | None = None, told: int | None = None) -> str:
        prefix = Prefix.of(Root("programs", salt), tokens)
        transfer = self.ledger.fetches.fetch(prefix, num_remote_tokens=self._num_stored_tokens(prefix, told))
        self.cache_transfers[name] = transfer
        self.take(transfer.plans)
        self._note("fetch", transfer.plans)
        self._note("fetch shared", not transfer.is_over and not transfer.plans)
        host = self.ledger.statistics().host
        self._require(
            transfer.num_blocks <= self.world.max_fetch_share * host.num_blocks, "a fetch has its share", transfer
        )
        return f"{transfer} {transfer.num_blocks}"

    def _num_stored_tokens(self, prefix: Prefix, told: int | None) -> int:
        """Tokens that a remote store is said to have."""
        return 0

    def do_match_fetched(self, who: str) -> str:
        if (client := self.clients.get(who)) is None:
            return "skipped"
        before = client.record.match
        found = self.ledger.fetches.match_again(client.record)
        self._note("match fetched", found.num_tokens > before.num_tokens)
        return f"{found}"

    def do_cancel(self, name: str) -> str:
        if name not in self.cache_transfers:
            return "skipped"
        self.ledger.transfers.cancel(self.cache_transfers.pop(name))
        return "cancelled"

    def do_cancel_cache_transfers(self) -> str:
        self.ledger.transfers.cancel_all()
        return "cancelled"

    # -- what the disk keeps ----------------------------------------------------------------------------------------

    def _begin_writing(self, plan: TransferPlan) -> None:
        for slot in plan.destination_ids if plan.destination is Tier.DISK else ():
            self.records.pop(slot, None)

    def _written(self, plan: TransferPlan, num_landed: int) -> None:
        if plan.destination is not Tier.DISK:
            return
        payload = DiskPayload.of(plan)
        for slot, label in list(zip(plan.destination_ids, payload.labels, strict=True))[:num_landed]:
            if label is not None:
                self.num_written += 1
                self.records[slot] = _Record(label, self.generation + payload.generation, self.num_written)

    def erase_forgotten(self) -> None:
        """The shell erases what the ledger has forgotten before it does anything else."""
        for slot in self.ledger.disk.take_forgotten() if self.ledger.cache.has_lower_tiers else ():
            self.records.pop(slot, None)

    def do_restart(self, at: int = 0, most: int = 0) -> str:
        """The process is killed and starts again. Of each store under way, the first blocks were written, `at` at most.
        `most` of what the disk still proves is restored at once, the rest by `survive`."""
        if self.ledger.config.disk is None and not self.world.cell_units:
            return "skipped"
        for name, plan in list(self.plans.items()):
            job = self.job(name)
            if plan.destination is Tier.DISK and job is not None and job.state is JobState.LAUNCHED:
                landed = job.parked is not None and job.parked.outcome is Outcome.LANDED
                num_landed = plan.num_blocks if landed else min(at, plan.num_blocks)
                if job.epoch is NoEpoch.INVALIDATED:
                    # Killed between `invalidate` and the end of a store of it: nobody can rule out that this is found
                    # again, as after a kill right before `invalidate`. The laws are about all other moments.
                    num_landed = 0
                self.bytes.spoil(plan.destination, plan.destination_ids[num_landed:])
                self._copy(plan, num_landed)
        if self.ledger.cache.has_lower_tiers:
            self.generation += self.ledger.disk.num_resets
        self.records = {slot: one for slot, one in self.records.items() if one.generation == self.generation}
        self.reopen()
        self.survivors = self._proven()
        self.features.add("restart")
        return self.do_survive(most)

    def do_survive(self, most: int) -> str:
        """The next `most` of what the last process has left are given to the ledger."""
        given, self.survivors = self.survivors[:most], self.survivors[most:]
        taken = sum(self.ledger.disk.restore(run) for run in given)
        self._note("restored", taken)
        return f"{taken}"

    def _proven(self) -> list[RestoredRun]:
        """The units of the records, a prefix before what follows it. What has no front the ledger has to notice."""
        units: dict[bytes, tuple[BlockLabel, dict[tuple[int, int], int]]] = {}
        for slot, record in sorted(self.records.items(), key=lambda item: item[1].number):
            label = record.label
            units.setdefault(label.digest, (label, {}))[1][label.component, label.place] = slot
        found: list[RestoredRun] = []
        for label, slots in sorted(units.values(), key=lambda unit: unit[0].position):
            of_components = tuple(
                array("i", [slots.get((component.number, place), -1) for place in range(component.width)])
                for component in self.ledger.layout.components
            )
            whole = tuple(ids if -1 not in ids else array("i") for ids in of_components)
            at = label.position
            found.append(RestoredRun(label.root, label.before, label.digest, at, at + 1, label.tokens, whole))
        return found

    def reopen(self) -> None:
        """A new process: a ledger that knows nothing, on memories that hold nothing but the disk."""
        for tier in (Tier.DEVICE, Tier.HOST):
            self.bytes.spoil(tier, range(len(self.bytes.tiers[tier])))
        self.start_empty()

    # -- jobs ---------------------------------------------------------------------------------------------------------

    def _copy(self, plan: TransferPlan, num_landed: int) -> None:
        super()._copy(plan, num_landed)
        self._written(plan, num_landed)

    def _settle(self, completion: Completion, plan: TransferPlan) -> None:
        if completion.outcome is Outcome.UNPROVEN:
            self._begin_writing(plan)  # given up: what it writes later has no record
        if plan.source is Tier.DISK:
            for index in completion.corrupt:
                self.records.pop(plan.source_ids[index], None)
        super()._settle(completion, plan)
