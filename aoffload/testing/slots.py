"""The contents of a simulated disk: the content and the record of each slot. They outlive the process that wrote
them."""

from __future__ import annotations

import math
import random
from array import array
from collections.abc import Callable, Sequence

import attrs

from .._config.config import OffloadConfig
from .._config.tiers import ROUNDING_BYTES, SUPERBLOCK_BYTES, DiskTier, record_bytes
from .._kernel.layout import Component
from .._kernel.plans import TransferPlan
from .._tiers.disk.plans import BlockLabel, DiskPayload, RestoredRun
from .memory import POISON, TORN, Memory

__all__ = ["SlotCopy", "SlotRecord", "Slots", "disk_of", "tier_of"]


def tier_of(num_slots: int, unit_tokens: int) -> DiskTier:
    """The disk of a configuration with exactly `num_slots` slots, and blocks of one byte."""
    return DiskTier("nowhere", SUPERBLOCK_BYTES + ROUNDING_BYTES + num_slots * (1 + record_bytes(unit_tokens)))


@attrs.frozen
class SlotRecord:
    """The record of one slot, which a restart reads."""

    label: BlockLabel
    generation: int
    number: int
    """Of two records, the one with the higher number counts."""
    content: int
    """The sum of the intended content."""


@attrs.define(eq=False)
class SlotCopy:
    """A job of the disk that was begun, with the owners of its blocks."""

    plan: TransferPlan
    source_generations: tuple[int, ...]
    destination_generations: tuple[int, ...]
    num_moved: int = 0
    is_given_up: bool = False
    """Whether it was given up. Another job may then own its host blocks, and none of its copies is recorded."""

    @property
    def name(self) -> str:
        return f"the disk's {self.plan.direction.value} {self.plan.job_id}"


class Slots:
    """The contents of `num_slots` slots."""

    def __init__(self, num_slots: int) -> None:
        self.content: list[int] = [POISON] * num_slots
        self.records: dict[int, SlotRecord] = {}
        self.identity: object = None
        """The identity of KV that may use the contents."""
        self.generation = 0
        """Records of another generation are ignored."""
        self._num_written = 0

    def identify(self, identity: object) -> None:
        """A disk that is used with another identity than before is emptied."""
        if identity != self.identity:
            self.identity, self.generation, self.records = identity, self.generation + 1, {}

    def write(self, slot: int, content: int, right: int, label: BlockLabel | None, generation: int) -> None:
        """Write `content`, and a record with the sum `right` and the identity in `label`. None: no record."""
        self.content[slot] = content
        self.records.pop(slot, None)
        if label is not None:
            self._num_written += 1
            self.records[slot] = SlotRecord(label, generation, self._num_written, right)

    def tear(self, slot: int) -> None:
        """Write a part of the slot. Its record stays the old one."""
        self.content[slot] = TORN

    def erase(self, slots: Sequence[int]) -> None:
        """Erase the records, so that no restart finds these slots."""
        for slot in slots:
            self.records.pop(slot, None)

    def after_a_kill(
        self,
        under_way: Sequence[SlotCopy],
        first_generation: int,
        host: Memory,
        is_right: Callable[[int], bool],
        rng: random.Random,
    ) -> Slots:
        """The contents that the process would leave if it were killed now. More blocks of the stores in
        progress have reached the disk, and the last of these may be torn. `first_generation`: the generation of stores
        that were planned before any reset of the process."""
        found = Slots(len(self.content))
        found.content, found.records = list(self.content), dict(self.records)
        found.identity, found.generation, found._num_written = self.identity, self.generation, self._num_written
        for copy in under_way:
            if copy.plan.destination < copy.plan.source:
                continue
            if copy.is_given_up:
                # The process was killed before the records of a job given up were erased. They may be found again, as
                # after a kill right before the job was given up. So erase them here: the laws are about all other
                # moments.
                found.erase(copy.plan.destination_ids)
            else:
                found._go_on(copy, first_generation, host, is_right, rng)
        return found

    def _go_on(
        self,
        copy: SlotCopy,
        first_generation: int,
        host: Memory,
        is_right: Callable[[int], bool],
        rng: random.Random,
    ) -> None:
        plan, payload = copy.plan, DiskPayload.of(copy.plan)
        generation = first_generation + payload.generation
        stop = rng.randint(copy.num_moved, plan.num_blocks)
        for index in range(copy.num_moved, stop):
            if not is_right(plan.source_ids[index]):
                return
            content = host.content[plan.source_ids[index]]
            self.write(plan.destination_ids[index], content, content, payload.labels[index], generation)
        if stop < plan.num_blocks and rng.random() < 0.5:
            self.tear(plan.destination_ids[stop])

    def proven(self, components: Sequence[Component]) -> list[RestoredRun]:
        """The units of the records, a prefix before the units that follow it. The ledger has to notice units without a
        prefix."""
        units: dict[bytes, tuple[BlockLabel, dict[tuple[int, int], int]]] = {}
        self.records = {slot: one for slot, one in self.records.items() if one.generation == self.generation}
        for slot, record in sorted(self.records.items(), key=lambda item: item[1].number):
            label = record.label
            units.setdefault(label.digest, (label, {}))[1][label.component, label.place] = slot
        found: list[RestoredRun] = []
        for label, slots in sorted(units.values(), key=lambda unit: unit[0].position):
            of_components = tuple(
                array("i", [slots.get((component.number, place), -1) for place in range(component.width)])
                for component in components
            )
            whole = tuple(ids if -1 not in ids else array("i") for ids in of_components)
            at = label.position
            found.append(RestoredRun(label.root, label.before, label.digest, at, at + 1, label.tokens, whole))
        return found


def disk_of(config: OffloadConfig, slots: Slots | None) -> tuple[DiskTier, Slots] | None:
    """The disk of a configuration, of blocks of one byte, with `slots` or empty ones."""
    if config.disk is None:
        return None
    unit_tokens = math.lcm(*(group.block_size for group in config.groups))
    return config.disk, slots or Slots(config.disk.num_slots(1, unit_tokens))
