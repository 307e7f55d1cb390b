"""A transport whose copies take virtual time, land at a picked step, and fail as configured."""

from __future__ import annotations

import random
from collections.abc import Callable

from .._common.env import Env
from .._common.tiers import Tier
from .._config.tiers import DiskTier, RemoteTier
from .._kernel.plans import Completion, TransferPlan
from .._kernel.states import Direction, Outcome
from .._transfer.fences import PASSED, Fence, OnlyAfter, RegionFences
from .._transfer.transport import TransferStatistics
from ..errors import DeviceGone, TransferRefused
from .copies import LATE_S, Copy, otherwise
from .device import SimulatedFence, Stream
from .faults import Faults
from .memory import POISON, TORN, Memory
from .network import Network
from .scheduler import Scheduler
from .slots import Slots
from .tag_disk import TagDisk
from .tag_remote import TagRemote

__all__ = ["SimulatedTransport"]


class SimulatedTransport:
    """Implements `Transport` over two memories of tags. With `disk`, it also copies to slots that outlive it. With
    `remote`, whose store is a `TagStore`, it also copies to cells that others share.

    With a `stream`, compute runs later and fences matter. Without one, as on a CPU, compute has ended when the call
    returns.
    """

    num_regions = 2
    waits_only_after = True

    def __init__(
        self,
        scheduler: Scheduler,
        faults: Faults,
        rng: random.Random,
        num_device_blocks: int,
        num_host_blocks: int,
        *,
        block_bytes: int = 1,
        stream: Stream | None = None,
        disk: tuple[DiskTier, Slots] | None = None,
        remote: RemoteTier | None = None,
    ) -> None:
        self.num_device_blocks = num_device_blocks + 1
        self.block_bytes = block_bytes
        self.device = Memory(Tier.DEVICE, self.num_device_blocks)
        self.host = Memory(Tier.HOST, num_host_blocks)
        self.stream = stream
        self.faults = faults
        self.in_flight: dict[int, Copy] = {}
        """Launched copies without a completion, by job id."""
        self.check_launch: Callable[[SimulatedTransport, TransferPlan], None] = lambda transport, plan: None
        """Called before each launch."""
        self.is_doomed: Callable[[int], bool] = lambda job_id: False
        self.proven: set[int] = set()
        """Jobs with a proven end, in time or late."""
        self.corrupt: dict[int, set[tuple[int, int]]] = {}
        """By job id, host blocks with their generation that a load's completion reported as corrupt."""
        self._scheduler = scheduler
        self.random = rng
        self._watched: dict[int, RegionFences] = {}
        self._sums: list[int] = []
        self._dead: set[Direction] = set()
        self._is_lost = self._is_closed = self._verify = False
        self._counts = dict.fromkeys(("num_loads", "num_stores", "blocks_loaded", "blocks_stored"), 0)
        self._deliver: Callable[[Completion], None] = _not_open
        self.disk = None if disk is None else self._disk_of(*disk)
        self.remote = None if remote is None else self._remote_of(remote)

    # -- the protocol ---------------------------------------------------------------------------------------------

    def open(self, num_host_blocks: int, *, verify: bool, deliver: Callable[[Completion], None], env: Env) -> None:
        assert num_host_blocks == self.host.num_rows, "the host memory was made for another number of blocks"
        self._sums = [POISON] * num_host_blocks
        self._verify = verify
        self._deliver = deliver
        if self.remote is not None:
            self.remote.open(env)

    def record_fence(self) -> Fence:
        self._check_device()
        if self.faults.fire("no_fence"):
            raise TransferRefused("no fence can be recorded")
        return PASSED if self.stream is None else self.stream.fence()

    def launch(self, plan: TransferPlan, after: Fence | None) -> None:
        self._check(plan)
        self.check_launch(self, plan)
        if (lower := self._below_host(plan)) is not None:
            lower.launch(plan)
            return
        without = after is None and plan.direction is Direction.STORE and self.faults.fire("no_fence")
        if self._is_closed or plan.direction in self._dead or without or self.faults.fire("refuse"):
            raise TransferRefused(f"job {plan.job_id} is refused")
        if not self._is_lost and self.faults.fire("device_lost"):
            self._is_lost = True
            for direction in Direction:
                self._die(direction)
        self._check_device()
        if self.faults.fire("raise"):
            if self.random.random() < 0.5:
                self._begin(self._copy_of(plan), after, late=True)
            raise RuntimeError("the driver does not know")
        self._begin(self._copy_of(plan), after)

    def give_up(self, job_id: int) -> None:
        for lower in (self.disk, self.remote):
            if lower is not None:
                lower.give_up(job_id)

    def watch(self, job_id: int, fences: RegionFences) -> None:
        self._watched[job_id] = fences

    def forget(self, job_id: int) -> None:
        self._watched.pop(job_id, None)

    def _check_device(self) -> None:
        if self._is_lost:
            raise DeviceGone("the device is lost")

    def close(self, timeout_s: float) -> bool:
        self._is_closed = True
        is_disk_over = self.disk is None or self.disk.close()
        is_remote_over = self.remote is None or self.remote.close()
        if self.faults.fire("close"):
            raise RuntimeError("the transport does not close")
        return not self.in_flight and is_disk_over and is_remote_over

    def statistics(self) -> TransferStatistics:
        return TransferStatistics(**self._counts)

    # -- lower tiers ----------------------------------------------------------------------------------------------

    def _disk_of(self, tier: DiskTier, slots: Slots) -> TagDisk:
        return TagDisk(
            tier, slots, self.host, self._scheduler, self.faults, self.random, self._lower_over,
            is_right=self._is_right, landed=self._note_sum,
        )  # fmt: skip

    def _remote_of(self, tier: RemoteTier) -> TagRemote:
        network = Network(self._scheduler, self.faults, self.random)
        return TagRemote(
            tier, host=self.host, network=network, deliver=self._lower_over, is_right=self._is_right,
            landed=self._note_sum,
        )  # fmt: skip

    def _below_host(self, plan: TransferPlan) -> TagDisk | TagRemote | None:
        lower: dict[Tier, TagDisk | TagRemote | None] = {Tier.DISK: self.disk, Tier.REMOTE: self.remote}
        return lower.get(max(plan.source, plan.destination))

    def _lower_over(self, completion: Completion) -> None:
        self.proven.add(completion.job_id)
        self._deliver(completion)

    def _is_right(self, host_id: int) -> bool:
        """Whether a host block matches its checksum."""
        return not self._verify or self._sums[host_id] == self.host.content[host_id]

    def _note_sum(self, host_id: int) -> None:
        """Record the sum of a block that a lower tier has brought, for the comparison at loads."""
        self._sums[host_id] = self.host.content[host_id]

    # -- progress of a copy ---------------------------------------------------------------------------------------

    def _copy_of(self, plan: TransferPlan) -> Copy:
        source, destination = self._memory(plan.source), self._memory(plan.destination)
        before = source.generations(plan.source_ids), destination.generations(plan.destination_ids)
        return Copy(plan, source, destination, *before, lambda: self.is_doomed(plan.job_id))

    def _begin(self, copy: Copy, after: Fence | None, late: bool = False) -> None:
        fences = [*after.fences] if isinstance(after, OnlyAfter) else [after]
        is_load = copy.plan.direction is Direction.LOAD
        if self.stream is not None and (after is None or (is_load and not isinstance(after, OnlyAfter))):
            fences.append(self.stream.fence())
        if late:
            copy.is_told = True
        else:
            self.in_flight[copy.plan.job_id] = copy
        if self.faults.fire("stuck_fence"):
            return
        waiting = [fence for fence in fences if isinstance(fence, SimulatedFence) and not fence.has_passed]
        if not waiting and not late and self.random.random() < 0.2:
            self._start(copy)  # within the call that launches it
            return
        self._after_fences(copy, waiting)

    def _after_fences(self, copy: Copy, waiting: list[SimulatedFence]) -> None:
        if waiting:
            waiting[0].when_passed(lambda: self._after_fences(copy, waiting[1:]))
            return
        delay_s = LATE_S if copy.is_told else self.random.choice((0.0, 0.0, 0.001, 0.004, 0.02, 0.05))
        self._scheduler.act(f"{copy.name} starts", lambda: self._start(copy), delay_s)

    def _start(self, copy: Copy) -> None:
        if copy.plan.direction in self._dead or (not copy.is_told and self.faults.fire("hang")):
            return
        copy.move(copy.plan.num_blocks // 2)
        if self.faults.fire("die"):
            self._die(copy.plan.direction)
            return
        delay_s = self.random.choice((0.0, 0.0, 0.003))
        self._scheduler.act(f"{copy.name} lands", lambda: self._land(copy), delay_s)

    def _land(self, copy: Copy) -> None:
        if copy.plan.direction in self._dead:
            return
        if copy.is_told:
            copy.move(copy.plan.num_blocks)
            self._tell(copy, self._landed(copy))
        elif self.faults.fire("fail"):
            self._fail(copy)
        elif self.faults.fire("vanish"):
            self._tell(copy, Completion(copy.plan.job_id, Outcome.UNPROVEN, error="lost for good"))
        elif self.faults.fire("lose"):
            self._tell(copy, Completion(copy.plan.job_id, Outcome.UNPROVEN, error="lost"))
            self._scheduler.act(f"{copy.name} is proven late", lambda: self._land(copy), LATE_S)
        elif copy.plan.direction is Direction.STORE and self._verify and self.faults.fire("early"):
            self._land_early(copy)
        elif copy.plan.job_id in self._watched:
            self._give_regions(copy)
        else:
            self._land_all(copy)

    def _give_regions(self, copy: Copy) -> None:
        """All bytes have arrived. A forward that waits for its first layer continues now. The completion comes
        later."""
        copy.move(copy.plan.num_blocks)
        fences = self._watched.pop(copy.plan.job_id)
        for index in range(self.num_regions):
            fences.give(index, PASSED)
        self._scheduler.act(f"{copy.name} lands", lambda: self._land_given(copy), self.random.choice((0.0, 0.001)))

    def _land_given(self, copy: Copy) -> None:
        if not copy.is_told and copy.plan.direction not in self._dead:
            self._land_all(copy)

    def _land_all(self, copy: Copy) -> None:
        copy.move(copy.plan.num_blocks)
        if self._verify and copy.plan.direction is Direction.LOAD and self.faults.fire("flip"):
            copy.destination.content[self.random.choice(copy.plan.destination_ids)] = TORN
        completion = self._landed(copy)
        self._tell(copy, completion)
        if self._verify and copy.plan.direction is Direction.STORE and self.faults.fire("rot"):
            copy.destination.content[self.random.choice(copy.plan.destination_ids)] = TORN

    def _land_early(self, copy: Copy) -> None:
        """Report a store as landed while its second half is missing: the checksums of those blocks differ."""
        self._tell(copy, self._landed(copy))
        last = copy.plan.destination_ids[-1]

        def arrive() -> None:
            copy.destination.content[last] = TORN  # only a checksum notices, whatever its owner is now

        self._scheduler.act(f"{copy.name} really lands", arrive, 0.002)

    def _fail(self, copy: Copy) -> None:
        num_landed = self.random.randint(0, copy.plan.num_blocks - 1)
        copy.move(num_landed)
        num_landed = self._num_right(copy, num_landed)
        copy.destination.content[copy.plan.destination_ids[num_landed]] = TORN
        if self._verify and copy.plan.direction is Direction.STORE:
            self._sum(copy, num_landed)
        self._tell(copy, Completion(copy.plan.job_id, Outcome.FAILED, num_landed, error="broke off"))

    def _num_right(self, copy: Copy, num_landed: int) -> int:
        """The number of landed blocks that count. With checksums, a load counts only up to the first wrong block."""
        if not self._verify or copy.plan.direction is Direction.STORE:
            return num_landed
        pairs = zip(copy.plan.source_ids[:num_landed], copy.plan.destination_ids, strict=False)
        wrong = (i for i, (host, device) in enumerate(pairs) if self._sums[host] != copy.destination.content[device])
        return next(wrong, num_landed)

    def _die(self, direction: Direction) -> None:
        """The copy thread of this direction dies. Its copies end UNPROVEN, without any later proof. Those that wrote
        nothing may end FAILED."""
        self._dead.add(direction)
        for copy in [copy for copy in self.in_flight.values() if copy.plan.direction is direction]:
            outcome = Outcome.UNPROVEN if copy.num_moved or self.random.random() < 0.5 else Outcome.FAILED
            self._tell(copy, Completion(copy.plan.job_id, outcome, error="the copy thread died"))

    def _landed(self, copy: Copy) -> Completion:
        """The completion of a copy that has moved everything. With checksums, it is CORRUPT for a load of wrong
        blocks."""
        plan, num_blocks = copy.plan, copy.plan.num_blocks
        if self._verify and plan.direction is Direction.STORE:
            self._sum(copy, num_blocks)
        elif self._verify:
            pairs = zip(plan.source_ids, plan.destination_ids, strict=True)
            wrong = tuple(
                index for index, (host, device) in enumerate(pairs)
                if self._sums[host] != copy.destination.content[device]
            )  # fmt: skip
            if wrong:
                return Completion(plan.job_id, Outcome.CORRUPT, wrong[0], wrong, "other bytes than were stored")
        return Completion(plan.job_id, Outcome.LANDED, num_blocks, num_bytes=num_blocks * self.block_bytes)

    def _sum(self, copy: Copy, num_blocks: int) -> None:
        """Take the checksums at the source, so that a block which arrives too late differs from its checksum."""
        for block_id, host_id in zip(copy.plan.source_ids[:num_blocks], copy.plan.destination_ids, strict=False):
            self._sums[host_id] = copy.source.content[block_id]

    def _tell(self, copy: Copy, completion: Completion) -> None:
        copy.is_told = True
        self.in_flight.pop(copy.plan.job_id, None)
        kind = copy.plan.direction.value
        self._counts[f"num_{kind}s"] += 1
        self._counts["blocks_loaded" if kind == "load" else "blocks_stored"] += completion.num_landed
        if completion.outcome is not Outcome.UNPROVEN:
            self.proven.add(copy.plan.job_id)
        # Not for a job that was given up, because its source may have another owner.
        for index in completion.corrupt if not self.is_doomed(copy.plan.job_id) else ():
            bad = self.corrupt.setdefault(copy.plan.job_id, set())
            bad.add((copy.plan.source_ids[index], copy.source_generations[index]))
        self._deliver(completion)
        if self.faults.fire("twice"):
            self._scheduler.act(f"{copy.name} is told again", lambda: self._deliver(otherwise(completion)), 0.001)

    def _memory(self, tier: Tier) -> Memory:
        if tier is Tier.DISK:
            assert self.disk is not None, "a plan for a disk that is not there"
            return self.disk.memory
        assert tier is not Tier.REMOTE, "a store has no memory of its own"
        return self.device if tier is Tier.DEVICE else self.host

    def _check(self, plan: TransferPlan) -> None:
        """Fail at once on a plan that a real transport would refuse, because it is a bug of the caller."""
        for tier, ids in ((plan.source, plan.source_ids), (plan.destination, plan.destination_ids)):
            lowest, stop = int(tier is Tier.DEVICE), self._num_rows(tier)
            assert all(lowest <= block_id < stop for block_id in ids), f"{plan} names no block"
            assert len(set(ids)) == len(ids), f"{plan} names a block twice"
        assert len(plan.source_ids) == len(plan.destination_ids), f"{plan} has ids without a counterpart"

    def _num_rows(self, tier: Tier) -> int:
        if tier is Tier.REMOTE:
            assert self.remote is not None, "a plan for a store that is not there"
            return self.remote.num_blocks
        return self._memory(tier).num_rows


def _not_open(completion: Completion) -> None:
    raise AssertionError("the transport was never opened")
