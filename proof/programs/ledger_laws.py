"""What must hold after each call of a program over the ledger, and when it is at rest."""

from __future__ import annotations

from aoffload._common.tiers import Tier
from aoffload._extensions.assembly import Ledger
from aoffload._extensions.overlap import Overlap
from aoffload._kernel.records import Job, LedgerRequest, Part
from aoffload._kernel.states import NoEpoch, RequestState
from aoffload.testing.violations import Violation

from .ledger_state import Forward, LedgerState
from .program import Call
from .quota_laws import QuotaLaws

__all__ = ["Laws"]


class Laws:
    """Checks the laws after a call: the cheap ones after each; the whole ledger after every `whole_every` calls, after
    calls that change much, and at the end."""

    def __init__(self, machine: LedgerState, *, watches: bool, whole_every: int) -> None:
        self._machine = machine
        self._whole_every = whole_every
        self._watcher = _Watcher(machine.ledger) if watches else None
        if self._watcher is not None:
            machine.ledger.watch(self._watcher)
        quotas = machine.world.quotas
        self._quotas = QuotaLaws(machine.ledger, quotas) if quotas else None

    @property
    def _ledger(self) -> Ledger:
        return self._machine.ledger

    def after(self, call: Call, number: int) -> None:
        self._progress(call)
        if self._quotas is not None:
            self._quotas.after(call)
        if self._machine.steps or self._ledger.jobs.unsettled:
            self._foreign_blocks()
        if number % self._whole_every == 0 or call.name in ("invalidate", "reset", "weights", "preempt", "fork", "end"):
            self._whole()
        if call.name in ("settle", "land", "load", "accept", "abandon", "invalidate", "reset", "weights"):
            self._readable()

    def _whole(self) -> None:
        try:
            self._ledger.check_integrity()
        except Exception as error:  # an inconsistent ledger may raise anything
            raise Violation("integrity", str(error) or repr(error)) from error
        self._findable()
        if self._watcher is not None:
            self._watcher.compare()

    def _findable(self) -> None:
        """Every block that can be found was written, depends on no invalidated forward, and is not known to be corrupt:
        a block that a job found corrupt is a miss as soon as that job is settled."""
        machine = self._machine
        rotten = {place: job.completion is not None for place, job in machine.rotten.items()}
        for run in self._ledger.cache.index.runs.values():
            for part in run.parts:
                known = {block_id: is_over for (tier, block_id), is_over in rotten.items() if tier is part.tier}
                if any(known.get(block_id) for block_id in part.blocks):
                    raise Violation("a bad entry", f"{run} still offers {list(part.blocks)}")
                readable = [one for one in part.blocks if one not in known]
                if problem := machine.bytes.problem(part.tier, readable, machine.epoch_of(run.root)):
                    law, how = problem
                    raise Violation(law, f"{part.tier.name} {how}: {run}")
                recurrent = self._ledger.layout.recurrent
                if recurrent is not None and part.component == recurrent.number and not known:
                    for unit in range(part.first, part.stop):
                        if found := machine.bytes.checkpoint_problem(part.tier, part.ids(unit, unit + 1)):
                            raise Violation("wrong bytes", f"a checkpoint in {part.tier.name} {found}: {run}")

    def after_reset(self, tier: Tier | None) -> None:
        """No lookup finds KV from before the reset, and no request without blocks keeps a hit."""
        for record in self._ledger.live_requests.values() if tier is None else ():
            if record.may_match_again and (record.leases or record.reserve is not None):
                raise Violation("may not hit", f"{record} keeps {record.match} after a reset")
        for run in self._ledger.cache.index.runs.values():
            for part in run.parts:
                if part.blocks and tier in (None, part.tier):
                    raise Violation("may not hit", f"{run} can be found after a reset of {tier or 'all'}")

    def after_weights(self) -> None:
        """No request without blocks keeps a hit of another weights' epoch, and no pin is held."""
        machine = self._machine
        for record in self._ledger.live_requests.values():
            for lease in record.all_leases() if record.may_match_again else ():
                if machine.epoch_of(lease.run.root) != machine.bytes.epoch:
                    raise Violation("may not hit", f"{record} keeps {record.match} of another epoch")
        if self._ledger.pins.held:
            raise Violation("a pin", f"{self._ledger.pins.held} outlives the weights")

    def _readable(self) -> None:
        """Every running request could go on with the right bytes, unless it was told to abort."""
        for client in self._machine.clients.values():
            record = client.record
            if record.state is RequestState.RUNNING and not client.must_end and not _in_doubt(record):
                tables = self._ledger.block_ids(record)
                self._machine.read(client, tables, record.num_computed_tokens)
                resume = self._ledger.resume_checkpoint(record)
                self._machine.enter_state(client, record.num_computed_tokens, resume)

    def _foreign_blocks(self) -> None:
        """Blocks that a step or a job touches are neither free nor private to another request."""
        free = set(self._ledger.cache.tiers[Tier.DEVICE].pool.free_ids())
        for step in self._machine.steps.values():
            for forward in step.forwards:
                self._held(forward, free)
        for job in self._ledger.jobs.unsettled.values():
            if (
                job.plan.source is Tier.DEVICE
                and job.epoch is not NoEpoch.INVALIDATED
                and not free.isdisjoint(job.plan.source_ids)
            ):
                raise Violation("a job's blocks", f"{job} reads blocks that are free")

    def _held(self, forward: Forward, free: set[int]) -> None:
        machine, mine = self._machine, forward.client.record
        held = set(machine.written_by(forward))
        if not forward.is_early:  # else the load may fail, and its blocks may get another owner
            held.update(machine.read_by(forward))
        if not free.isdisjoint(held):
            raise Violation("a step's blocks", f"{sorted(held & free)} of {mine} are free")
        for client in machine.clients.values():
            if client.record is not mine and not held.isdisjoint(client.record.private_blocks()):
                raise Violation("a step's blocks", f"some of {sorted(held)} of {mine} are private to {client.record}")
        for job in self._ledger.jobs.unsettled.values():
            if self._is_anothers(job, mine) and not held.isdisjoint(job.plan.destination_ids):
                raise Violation("a step's blocks", f"{job} writes to some of {sorted(held)} of {mine}")

    @staticmethod
    def _is_anothers(job: Job, mine: LedgerRequest) -> bool:
        return job.plan.destination is Tier.DEVICE and mine.load not in job.claims

    def _progress(self, call: Call) -> None:
        """The first waiter waits only while its room is missing. If only waiters hold room, one of them is granted room
        or fails."""
        ledger = self._ledger
        wait_queue = ledger.admission.queue
        for first in (wait_queue.extending or wait_queue.allocating)[:1]:
            if ledger.admission.num_missing(first.request, first.num_units) <= ledger.admission.num_available:
                raise Violation("a wait without a need", f"after {call}: {first} waits and there is room")
        if wait_queue.is_empty or ledger.jobs.unsettled or self._machine.steps:
            return
        for record in ledger.live_requests.values():
            waits = record.waiter is not None and not record.waiter.is_over
            if record.holds_device_blocks and not waits:
                return
        raise Violation("progress", f"after {call}: {wait_queue} waits for nobody, {ledger.statistics()}")

    def at_rest(self) -> None:
        """With no request left, nothing is held: every block is free or cached."""
        ledger = self._ledger
        self._whole()
        found = ledger.statistics()
        for tier in (found.device, found.host, found.disk):
            if tier is not None and (tier.num_pinned or tier.num_quarantined):
                raise Violation("at rest", f"blocks are still held: {found}")
        if found.num_requests or found.num_waiting or found.num_jobs or found.num_pins:
            raise Violation("at rest", f"somebody is still there: {found}")


def _in_doubt(record: LedgerRequest) -> bool:
    """Whether its forward started early and the engine still has to begin again."""
    overlap = record.ledger.find(Overlap)
    return overlap is not None and record in overlap


class _Watcher:
    """The cached units as the ledger reports them, each by everything that identifies its KV."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._cached: set[object] = set()

    def part_changed(self, part: Part, first: int, stop: int) -> None:
        self._cached.difference_update(_units(part, first, stop))
        self._cached.update(_units(part, part.first, part.stop))

    def all_cleared(self, epoch: int) -> None:
        self._cached.clear()

    def compare(self) -> None:
        found: set[object] = set()
        for run in self._ledger.cache.index.runs.values():
            for part in run.parts:
                found.update(_units(part, part.first, part.stop))
        if found != self._cached:
            raise Violation(
                "watcher", f"{len(found - self._cached)} units untold, {len(self._cached - found)} told wrongly"
            )


def _units(part: Part, first: int, stop: int) -> list[object]:
    run = part.run
    if first >= stop or not part.width:
        return []
    path = run.whole_path()
    tokens = b"".join(one.tokens for one in path)
    unit_bytes = len(run.tokens) // (run.stop - run.start)
    spans = tuple(sorted({span for one in path for span in one.spans}))  # however the path is cut
    place = (part.tier, part.component, run.root, spans)
    return [(*place, tokens[: (unit + 1) * unit_bytes]) for unit in range(first, stop)]
