"""What lies on a simulated disk: for each slot what it holds, and its record. It outlives the process that wrote it."""

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
    """The disk of a configuration that has exactly `num_slots`, of blocks of one byte."""
    return DiskTier("nowhere", SUPERBLOCK_BYTES + ROUNDING_BYTES + num_slots * (1 + record_bytes(unit_tokens)))


@attrs.frozen
class SlotRecord:
    """What a restart knows of one slot."""

    label: BlockLabel
    generation: int
    number: int
    """The later one counts."""
    content: int
    """What was to be written: its sum."""


@attrs.define(eq=False)
class SlotCopy:
    """A job of the disk that was begun, with the owners of its blocks."""

    plan: TransferPlan
    source_generations: tuple[int, ...]
    destination_generations: tuple[int, ...]
    num_moved: int = 0
    is_given_up: bool = False
    """Nobody waits for it any more: another may have its host blocks, and nothing of it is recorded."""

    @property
    def name(self) -> str:
        return f"the disk's {self.plan.direction.value} {self.plan.job_id}"


class Slots:
    """The contents of `num_slots` slots."""

    def __init__(self, num_slots: int) -> None:
        self.content: list[int] = [POISON] * num_slots
        self.records: dict[int, SlotRecord] = {}
        self.identity: object = None
        """What the contents may be used for."""
        self.generation = 0
        """Records of another one count as nothing."""
        self._num_written = 0

    def identify(self, identity: object) -> None:
        """Used for something else than before, it is empty."""
        if identity != self.identity:
            self.identity, self.generation, self.records = identity, self.generation + 1, {}

    def write(self, slot: int, content: int, right: int, label: BlockLabel | None, generation: int) -> None:
        """Write `content`, and a record that says `right` and is of what `label` says. None: no record."""
        self.content[slot] = content
        self.records.pop(slot, None)
        if label is not None:
            self._num_written += 1
            self.records[slot] = SlotRecord(label, generation, self._num_written, right)

    def tear(self, slot: int) -> None:
        """A part of the slot is written. Its record is still that of before."""
        self.content[slot] = TORN

    def erase(self, slots: Sequence[int]) -> None:
        """No restart finds what is there."""
        for slot in slots:
            self.records.pop(slot, None)

    def after_a_kill(
        self, under_way: Sequence[SlotCopy], host: Memory, is_right: Callable[[int], bool], rng: random.Random
    ) -> Slots:
        """What the process leaves that is killed now. Of the stores under way some blocks more have reached the disk,
        of which the last may be torn."""
        found = Slots(len(self.content))
        found.content, found.records = list(self.content), dict(self.records)
        found.identity, found.generation, found._num_written = self.identity, self.generation, self._num_written
        for copy in under_way:
            if copy.plan.destination < copy.plan.source:
                continue
            if copy.is_given_up:
                # Killed before what was recorded of it is erased: nobody can rule out that it is found again, as after
                # a kill right before it was given up. The laws are about all other moments.
                found.erase(copy.plan.destination_ids)
            else:
                found._go_on(copy, host, is_right, rng)
        return found

    def _go_on(self, copy: SlotCopy, host: Memory, is_right: Callable[[int], bool], rng: random.Random) -> None:
        plan, labels = copy.plan, DiskPayload.of(copy.plan).labels
        stop = rng.randint(copy.num_moved, plan.num_blocks)
        for index in range(copy.num_moved, stop):
            if not is_right(plan.source_ids[index]):
                return
            content = host.content[plan.source_ids[index]]
            self.write(plan.destination_ids[index], content, content, labels[index], self.generation)
        if stop < plan.num_blocks and rng.random() < 0.5:
            self.tear(plan.destination_ids[stop])

    def proven(self, components: Sequence[Component]) -> list[RestoredRun]:
        """The units of the records, a prefix before what follows it. What has no front the ledger has to notice."""
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
