"""A transport without bytes or threads, for tests and simulations: copies land when, and how, a script says."""

from __future__ import annotations

from array import array
from collections.abc import Callable

import attrs

from aoffload._common.tiers import Tier
from aoffload._kernel.plans import Completion, TransferPlan
from aoffload._kernel.states import Direction, Outcome
from aoffload._transfer.fences import PASSED, Fence, OnlyAfter
from aoffload._transfer.transport import TransferStatistics
from aoffload.errors import TransferRefused
from aoffload.transport import Env

UNWRITTEN = 0
"""The content of a block that nothing was ever copied or written to."""
TORN = 2**31 - 1
"""The content of a block that a failed copy left half-written."""


@attrs.define(eq=False)
class ScriptedFence:
    """A fence that passes when the script says so."""

    has_passed: bool = False

    def query(self) -> bool:
        return self.has_passed

    def synchronize(self) -> None:
        assert self.has_passed, "nothing here runs while somebody waits: pass the fence first"


@attrs.frozen
class Launched:
    """One accepted launch and the fences it was told to wait for."""

    plan: TransferPlan
    after: Fence | None
    recorded: Fence | None = None
    """For a load, and a store without `after`: the fence after the compute under way at launch."""

    @property
    def may_start(self) -> bool:
        return all(fence.query() for fence in (self.after, self.recorded) if fence is not None)


class ScriptedTransport:
    """Implements `Transport`. Blocks hold tags (`device_content[block_id]`, `host_content[block_id]`) instead of bytes.

    A test writes tags where its requests would compute, lets plans land, fail or get lost in any order, and compares
    the tags afterwards. Tags move when a copy lands, so a write that overtakes a copy shows. With `auto`, a plan lands
    inside `launch` if its fences have passed; otherwise it waits for `land` or `land_all` as usual.
    """

    def __init__(self, num_device_blocks: int, *, block_bytes: int = 1, auto: bool = False) -> None:
        self.num_device_blocks = num_device_blocks
        self.block_bytes = block_bytes
        self.auto = auto
        self.fence: Fence = PASSED
        """What `record_fence` returns: replace it by a `ScriptedFence` while compute is under way."""
        self.device_content = array("q", [UNWRITTEN]) * num_device_blocks
        self.host_content = array("q")
        self.launched: list[Launched] = []
        """Every accepted launch, in order."""
        self.in_flight: dict[int, Launched] = {}
        """By job id, in launch order; lost jobs stay, since they may still land."""
        self.lost: set[int] = set()
        self.delivered: list[Completion] = []
        self.is_closed = False
        self._directions: dict[int, Direction] = {}
        self._num_refusals = 0
        self._deliver: Callable[[Completion], None] | None = None

    def open(self, num_host_blocks: int, *, verify: bool, deliver: Callable[[Completion], None], env: Env) -> None:
        self.host_content = array("q", [UNWRITTEN]) * num_host_blocks
        self._deliver = deliver

    @property
    def waits_only_after(self) -> bool:
        return True

    def record_fence(self) -> Fence:
        return self.fence

    def launch(self, plan: TransferPlan, after: Fence | None) -> None:
        if self.is_closed or self._deliver is None:
            raise TransferRefused("the transport is not open")
        if self._num_refusals:
            self._num_refusals -= 1
            raise TransferRefused("refused by the script")
        self._check(plan)
        is_on_its_own = after is None or (plan.direction is Direction.LOAD and not isinstance(after, OnlyAfter))
        recorded = self.record_fence() if is_on_its_own else None
        launched = Launched(plan, after, recorded)
        self.launched.append(launched)
        self._directions[plan.job_id] = plan.direction
        self.in_flight[plan.job_id] = launched
        if self.auto and launched.may_start:
            self.land(plan.job_id)

    def close(self, timeout_s: float) -> bool:
        self.is_closed = True
        return not self.in_flight

    def statistics(self) -> TransferStatistics:
        counts: dict[str, int] = dict.fromkeys(("num_loads", "num_stores", "blocks_loaded", "blocks_stored"), 0)
        for completion in self.delivered:
            kind = self._directions[completion.job_id].value
            counts[f"num_{kind}s"] += 1
            counts["blocks_loaded" if kind == "load" else "blocks_stored"] += completion.num_landed
        return TransferStatistics(**counts)

    def refuse_next(self, num_launches: int = 1) -> None:
        """Have the next launches raise `TransferRefused`."""
        self._num_refusals = num_launches

    def land(self, job_id: int) -> None:
        """Land every block. Also the late end of a lost job."""
        plan = self._end(job_id)
        self._move(plan, plan.num_blocks)
        self._tell(Completion(job_id, Outcome.LANDED, plan.num_blocks, num_bytes=plan.num_blocks * self.block_bytes))

    def land_all(self) -> None:
        """Land all jobs in flight but the lost ones, in launch order, including jobs launched meanwhile."""
        while waiting := [job_id for job_id in self.in_flight if job_id not in self.lost]:
            self.land(waiting[0])

    def fail(self, job_id: int, num_landed: int = 0, error: str = "failed by the script") -> None:
        """The copy is certainly over after `num_landed` blocks; the next block is torn."""
        plan = self._end(job_id)
        assert num_landed <= plan.num_blocks, f"job {job_id} has {plan.num_blocks} blocks"
        self._move(plan, num_landed)
        self._tear(plan, num_landed)
        self._tell(Completion(job_id, Outcome.FAILED, num_landed, error=error))

    def corrupt(self, job_id: int, *indices: int) -> None:
        """Land every block, but those at `indices` with other content, which verification reports."""
        plan = self._end(job_id)
        self._move(plan, plan.num_blocks)
        for index in indices:
            self._tear(plan, index)
        found = tuple(sorted(indices))
        self._tell(Completion(job_id, Outcome.CORRUPT, found[0], found, "corrupted by the script"))

    def lose(self, job_id: int) -> None:
        """Report UNPROVEN: the copy may be running. It stays in flight; `land` or `fail` it later as late proof."""
        assert job_id in self.in_flight, f"job {job_id} is not in flight"
        self.lost.add(job_id)
        self._tell(Completion(job_id, Outcome.UNPROVEN, error="lost by the script"))

    def deliver_again(self, job_id: int) -> None:
        """Repeat the last completion of a job."""
        self._tell(next(found for found in reversed(self.delivered) if found.job_id == job_id))

    def write_device(self, block_ids: array[int] | list[int], tags: array[int] | list[int]) -> None:
        """Put `tags[i]` into device block `block_ids[i]`, as a forward would."""
        for block_id, tag in zip(block_ids, tags, strict=True):
            self.device_content[block_id] = tag

    def _end(self, job_id: int) -> TransferPlan:
        assert job_id in self.in_flight, f"job {job_id} is not in flight"
        launched = self.in_flight[job_id]
        assert launched.may_start, f"job {job_id} cannot have copied anything: its fence has not passed"
        del self.in_flight[job_id]
        self.lost.discard(job_id)
        return launched.plan

    def _content(self, tier: Tier) -> array[int]:
        return self.device_content if tier is Tier.DEVICE else self.host_content

    def _move(self, plan: TransferPlan, num_blocks: int) -> None:
        source, destination = self._content(plan.source), self._content(plan.destination)
        for source_id, destination_id in zip(plan.source_ids[:num_blocks], plan.destination_ids, strict=False):
            destination[destination_id] = source[source_id]

    def _tear(self, plan: TransferPlan, index: int) -> None:
        if index < plan.num_blocks:
            self._content(plan.destination)[plan.destination_ids[index]] = TORN

    def _tell(self, completion: Completion) -> None:
        assert self._deliver is not None, "the transport was never opened"
        self.delivered.append(completion)
        self._deliver(completion)

    def _check(self, plan: TransferPlan) -> None:
        """Assert that a real transport would not refuse the plan: that would be a bug in the code that made it."""
        assert plan.job_id not in self.in_flight, f"job {plan.job_id} is in flight already"
        assert len(plan.source_ids) == len(plan.destination_ids), f"job {plan.job_id}: ids without a counterpart"
        for tier, ids in ((plan.source, plan.source_ids), (plan.destination, plan.destination_ids)):
            lowest = 1 if tier is Tier.DEVICE else 0
            stop = len(self._content(tier))
            in_range = all(lowest <= block_id < stop for block_id in ids)
            assert in_range, f"job {plan.job_id}: {list(ids)} outside {tier!r}"
            assert len(set(ids)) == len(ids), f"job {plan.job_id}: {list(ids)} names a block twice"
