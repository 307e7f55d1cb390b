"""The disk of a simulated transport. Its jobs take virtual time, and fail as configured."""

from __future__ import annotations

import errno
import random
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

import attrs

from .._common.tiers import Tier
from .._config.tiers import DiskTier
from .._kernel.layout import Component, Layout
from .._kernel.plans import Completion, TransferPlan
from .._kernel.states import Direction, Outcome
from .._tiers.disk.plans import DiskPayload, DiskTrouble, RestoredRun, forgotten
from .._transfer.breaker import Breaker, StorageMove, Use, taken
from .._transfer.transport import DiskStatistics
from ..errors import TransferRefused
from .faults import Faults
from .memory import TORN, Memory
from .scheduler import Scheduler
from .slots import SlotCopy, Slots

__all__ = ["TagDisk"]

NUM_AT_ONCE = 3
"""Number of units that are read back at a time."""
LATE_S = 90.0
"""Delay after which a call that hung ends: later than any time-out of a copy."""


@attrs.define(eq=False)
class TagDisk:
    """Implements `TransportDisk` over `slots`, which an earlier process may have filled.

    `is_right` returns whether a host block matches its checksum. `landed` is called with the host blocks that a load
    fills.
    """

    tier: DiskTier
    slots: Slots
    host: Memory
    scheduler: Scheduler
    faults: Faults
    random: random.Random
    deliver: Callable[[Completion], None]
    is_right: Callable[[int], bool]
    landed: Callable[[int], None]
    memory: Memory = attrs.field(init=False)
    """The owner of each slot, as this process knows it."""
    under_way: dict[int, SlotCopy] = attrs.field(factory=dict, init=False)
    """Launched jobs that have not ended, by id."""
    corrupt: dict[int, set[tuple[int, int]]] = attrs.field(factory=dict, init=False)
    """By job id, slots with their generation that a load's completion reported as corrupt."""
    is_resetting: bool = attrs.field(default=False, init=False)
    """Whether a reset has not reached the disk yet, or never will."""
    _sums: dict[int, int] = attrs.field(factory=dict, init=False)
    """The intended content of each slot, as this process knows it."""
    _components: tuple[Component, ...] = attrs.field(default=(), init=False)
    _first_generation: int = attrs.field(default=0, init=False)
    _num_resets: int = attrs.field(default=0, init=False)
    _breakers: dict[Direction, Breaker] = attrs.field(init=False)
    _moves: deque[StorageMove] = attrs.field(factory=deque, init=False)
    _hear_trouble: Callable[[DiskTrouble], None] = attrs.field(default=lambda trouble: None, init=False)
    _refusal: str = attrs.field(default="", init=False)
    _is_closed: bool = attrs.field(default=False, init=False)
    _counts: dict[str, int] = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self.memory = Memory(Tier.DISK, len(self.slots.content))
        self.memory.content = self.slots.content
        self._breakers = {direction: Breaker() for direction in Direction}
        names = ("num_loads", "num_stores", "blocks_loaded", "blocks_stored", "blocks_corrupt", "num_failures")
        self._counts = dict.fromkeys(names, 0)

    # -- the protocol ---------------------------------------------------------------------------------------------

    @property
    def num_slots(self) -> int:
        return len(self.slots.content)

    @property
    def is_off(self) -> bool:
        """Whether the disk has reported that it must not be used any more."""
        return bool(self._refusal)

    def identify(self, layout: Layout, namespace: str) -> None:
        self.slots.identify((namespace, repr(layout.groups)))
        self._components, self._first_generation = layout.components, self.slots.generation

    def read_back(
        self, hear: Callable[[Sequence[RestoredRun]], None], over: Callable[[str], None],
        hear_trouble: Callable[[DiskTrouble], None],
    ) -> None:  # fmt: skip
        self._check_open()
        self._hear_trouble = hear_trouble
        left = self.slots.proven(self._components)
        self._sums = {slot: record.content for slot, record in self.slots.records.items()}

        def read() -> None:
            if self._is_closed:
                over("closed before everything was read")
            elif self.faults.fire("disk_unread"):
                self._refusal = "the disk was not read to its end"
                over(self._refusal)
            elif not left:
                over("")
            else:
                hear(left[:NUM_AT_ONCE])
                del left[:NUM_AT_ONCE]
                self._soon("the disk is read", read)

        self._soon("the disk is read", read)

    def reset(self, num_resets: int, over: Callable[[str], None]) -> None:
        self._check_open()
        self.is_resetting = True

        def reset() -> None:
            if self.faults.fire("disk_reset"):
                self._refusal = "a reset did not reach the disk"
                over(self._refusal)
                return
            if num_resets > self._num_resets:
                self._num_resets = num_resets
                self.slots.generation = self._first_generation + num_resets
            self.is_resetting = bool(self._refusal)
            over("")

        self._soon("a reset reaches the disk", reset)

    def forget(self, slots: Sequence[int]) -> None:
        self._check_open()
        self._forget(slots)

    def _forget(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self._sums.pop(slot, None)
        trouble = forgotten(partial(self._erase, slots), self._raise_generation, self._drop)
        if trouble is not None:
            self._refusal = self._refusal or (trouble.reason if trouble.is_off else "")
            self._soon("trouble is told", lambda: self._hear_trouble(trouble))

    def _erase(self, slots: Sequence[int]) -> None:
        if self.faults.fire("disk_erase"):
            raise OSError(errno.EIO, "Input/output error")
        self.slots.erase(slots)

    def _raise_generation(self) -> None:
        if self.faults.fire("disk_reset"):
            raise OSError(errno.EIO, "Input/output error")
        self._first_generation += 1
        self.slots.generation = self._first_generation + self._num_resets

    def _drop(self) -> None:
        self.slots.records.clear()
        self.slots.identity = None  # a restart finds no later stores either

    def refuses(self, direction: Direction) -> bool:
        return bool(self._refusal) or self._breakers[direction].is_open(self.scheduler.now)

    def take_moves(self) -> Sequence[StorageMove]:
        return taken(self._moves)

    def statistics(self) -> DiskStatistics:
        alone = [(Use(each.value), breaker) for each, breaker in self._breakers.items() if breaker.is_on_trial]
        return DiskStatistics(**self._counts, left_alone=tuple(one.left_alone(use) for use, one in alone))

    def _check_open(self) -> None:
        if self._is_closed:
            raise TransferRefused("the disk is closed")

    # -- API for the transport ------------------------------------------------------------------------------------

    def launch(self, plan: TransferPlan) -> None:
        if self._refusal or self._is_closed:
            raise TransferRefused(self._refusal or "the disk is closed")
        memories = (self.host, self.memory)
        source, destination = memories if plan.destination is Tier.DISK else memories[::-1]
        copy = SlotCopy(plan, source.generations(plan.source_ids), destination.generations(plan.destination_ids))
        self.under_way[plan.job_id] = copy
        self._soon(f"{copy.name} starts", lambda: self._start(copy), 0.0, 0.0, 0.002, 0.02, 0.2)

    def give_up(self, job_id: int) -> None:
        if job_id in self.under_way:
            self.under_way[job_id].is_given_up = True

    def close(self) -> bool:
        """Begin nothing any more. Returns whether everything has ended."""
        self._is_closed = True
        return not self.under_way

    def after_a_kill(self) -> Slots:
        """The contents that the process would leave if it were killed now."""
        found = self.slots.after_a_kill(
            list(self.under_way.values()), self._first_generation, self.host, self.is_right, self.random
        )
        if self.is_resetting:
            found.records.clear()  # a reset may have reached the disk or not, so these records are not checked
        return found

    # -- progress of a job ----------------------------------------------------------------------------------------

    def _soon(self, name: str, run: Callable[[], None], *delays: float) -> None:
        self.scheduler.act(name, run, self.random.choice(delays or (0.0, 0.0, 0.001, 0.01)))

    def _start(self, copy: SlotCopy) -> None:
        if copy.is_given_up:
            self._end(copy, Completion(copy.plan.job_id, Outcome.FAILED, error="given up before it was begun"))
            return
        is_store = copy.plan.direction is Direction.STORE
        if is_store:
            for slot in copy.plan.destination_ids:
                self._sums.pop(slot, None)
        expected = [self._sums.get(slot) for slot in copy.plan.source_ids]
        if self.faults.fire("disk_hang"):
            return
        move = self._store if is_store else self._load
        if not move(copy, copy.plan.num_blocks // 2):
            return
        is_late = self.faults.fire("disk_late")
        delays = (LATE_S,) if is_late else (0.0, 0.0, 0.003)
        self._soon(f"{copy.name} ends", lambda: self._land(copy, expected), *delays)

    def _land(self, copy: SlotCopy, expected: list[int | None]) -> None:
        move = self._store if copy.plan.direction is Direction.STORE else self._load
        is_failed = self.faults.fire("disk_error")
        if not is_failed and not move(copy, copy.plan.num_blocks):
            return
        corrupt = self._mismatches(copy, expected)
        if corrupt:
            self._end(copy, Completion(copy.plan.job_id, Outcome.CORRUPT, corrupt[0], corrupt))
        elif is_failed:
            self._fail(copy, "EIO")
        else:
            self._end(copy, Completion(copy.plan.job_id, Outcome.LANDED, copy.plan.num_blocks))

    def _store(self, copy: SlotCopy, stop: int) -> bool:
        """Write blocks up to `stop`, and their records. False: the job has ended."""
        plan, payload = copy.plan, DiskPayload.of(copy.plan)
        if copy.is_given_up:
            self._fail(copy, "given up")
            return False
        generation = self._first_generation + payload.generation
        for index in range(copy.num_moved, stop):
            host_id, slot = plan.source_ids[index], plan.destination_ids[index]
            self.memory.check_owner(copy.name, slot, copy.destination_generations[index])
            self.host.check_owner(copy.name, host_id, copy.source_generations[index])
            if not self.is_right(host_id):
                self._fail(copy, "a block in host memory is not what was stored there")
                return False
            right = self.host.content[host_id]
            is_lost = self.faults.fire("disk_lost")
            self.slots.write(slot, TORN if is_lost else right, right, payload.labels[index], generation)
            self._sums[slot] = right
            if self.faults.fire("disk_rot"):
                self.slots.tear(slot)
            copy.num_moved = index + 1
        return True

    def _load(self, copy: SlotCopy, stop: int) -> bool:
        """Read blocks up to `stop`, into the job's own blocks, even after it was given up."""
        for index in range(copy.num_moved, stop):
            slot, host_id = copy.plan.source_ids[index], copy.plan.destination_ids[index]
            self.host.check_owner(copy.name, host_id, copy.destination_generations[index])
            self.host.content[host_id] = self.slots.content[slot]
            self.landed(host_id)
            copy.num_moved = index + 1
        return True

    def _mismatches(self, copy: SlotCopy, expected: list[int | None]) -> tuple[int, ...]:
        """The blocks that a load has read and that differ from the stored ones. Their slots are forgotten, if their
        content is still the same."""
        if copy.plan.direction is Direction.STORE:
            return ()
        slots = copy.plan.source_ids
        wrong = [
            at for at, slot in enumerate(slots[: copy.num_moved])
            if expected[at] is None or self.host.content[copy.plan.destination_ids[at]] != expected[at]
        ]  # fmt: skip
        self.forget_still([slots[at] for at in wrong if self._sums.get(slots[at]) == expected[at]])
        if not copy.is_given_up:
            bad = {(slots[at], copy.source_generations[at]) for at in wrong}
            self.corrupt.setdefault(copy.plan.job_id, set()).update(bad)
        self._counts["blocks_corrupt"] += len(wrong)
        return tuple(wrong)

    def forget_still(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self._sums.pop(slot, None)
        self.slots.erase(slots)

    def _fail(self, copy: SlotCopy, error: str) -> None:
        """Write or read a part of the next block. A store that was given up leaves no record."""
        plan, at = copy.plan, min(copy.num_moved, copy.plan.num_blocks - 1)
        if plan.direction is Direction.STORE:
            self.slots.tear(plan.destination_ids[at])
            self.slots.erase(plan.destination_ids[at:])
            if copy.is_given_up:
                self._forget(plan.destination_ids)
        self._end(copy, Completion(plan.job_id, Outcome.FAILED, 0 if copy.is_given_up else at, error=error))

    def _end(self, copy: SlotCopy, completion: Completion) -> None:
        plan = copy.plan
        del self.under_way[plan.job_id]
        self._counts[f"num_{plan.direction.value}s"] += 1
        self._counts["blocks_loaded" if plan.direction is Direction.LOAD else "blocks_stored"] += completion.num_landed
        breaker, now, move = self._breakers[plan.direction], self.scheduler.now, None
        if completion.outcome is not Outcome.FAILED:
            move = breaker.succeeded(now)
        elif not copy.is_given_up:
            self._counts["num_failures"] += 1
            move = breaker.failed(now, completion.error)
        if move is not None:
            self._moves.append(StorageMove(Tier.DISK, Use(plan.direction.value), "", move))
        self.deliver(completion)
