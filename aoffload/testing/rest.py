"""The oracles of the end: when nobody is served and nothing is under way, nothing is left but what is cached."""

from __future__ import annotations

import attrs

from ..core.matching import find_hit
from ..core.plan import Tier
from ..core.tokens import TokenSequence
from ..runtime import OffloadRuntime
from .engine import Ask, SimulatedEngine
from .faults import Faults
from .violations import Violation

__all__ = ["Rest"]


@attrs.frozen
class Rest:
    """What one runtime leaves behind."""

    runtime: OffloadRuntime
    engine: SimulatedEngine
    faults: Faults

    def check_empty(self) -> None:
        """Nothing is pinned, waited for or known of any more."""
        found = self.runtime.statistics()
        pinned = (found.device.num_pinned, found.host.num_pinned)
        if (found.num_requests, found.num_waiting, found.num_jobs, *pinned) != (0, 0, 0, 0, 0):
            raise Violation("a leak", f"at rest: {found}")
        if len(self.runtime._requests):
            raise Violation("a leak", f"requests are still known: {list(self.runtime._requests)}")

    def check_nothing_is_lost(self) -> None:
        """No block is in quarantine where no fault explains it."""
        found = self.runtime.statistics()
        if found.device.num_quarantined or found.host.num_quarantined:
            raise Violation("a leak", f"quarantined without a fault: {found}")

    def check_proofs(self) -> None:
        """Whose end was proven, however late, is in quarantine no more."""
        ledger, transport = self.runtime.ledger, self.engine.transport
        worker = self.runtime.worker
        ignored = transport.proven & (set(ledger.jobs.quarantined) | worker._overdue)
        if worker._num_bytes or worker._in_flight:
            raise Violation("a leak", f"{worker._num_bytes} bytes count as in flight")
        if ignored:
            raise Violation("a proof was ignored", f"jobs {sorted(ignored)}")

    def check_forgotten(self, job_ids: set[int]) -> None:
        """What the ends of these loads said to be corrupt is forgotten."""
        corrupt = self.engine.transport.corrupt
        bad = {one for job_id in job_ids for one in corrupt.get(job_id, ())}
        kept = sorted(block_id for block_id, generation in bad if self._is_findable(block_id, generation))
        if kept:
            raise Violation("a bad entry was kept", f"host blocks {kept}")

    def _is_findable(self, host_id: int, generation: int) -> bool:
        host = self.engine.transport.host
        return host.is_owned[host_id] and host.generation[host_id] == generation

    def check_reachable(self) -> None:
        """Unless something failed: a prefix loses its tail before its head, so no tier holds a tail without one."""
        if self.faults.fired or self.engine.num_invalidations or self.runtime.config.eviction != "lru":
            return
        for run in self.runtime.ledger.cache.index.runs.values():
            for part in run.parts:
                before = run.before.parts[part.run.parts.index(part)] if run.before is not None else None
                if part.blocks and before is not None and run.before is not None and before.stop < run.before.stop:
                    raise Violation("a tail without its head", f"{run} behind {run.before}")

    def check_hits(self, asks: list[Ask]) -> None:
        """At rest, exactly what lies in memory hits: the device from the start on, behind it the host."""
        lost_bytes = {"rot", "early", "flip"} & set(self.faults.fired)
        for ask in asks:
            expected = self._expected_hit(ask)
            found = self._found_hit(ask)
            if found != expected and not lost_bytes and not self.engine.num_invalidations:
                raise Violation("what may hit", f"{found} units of {ask.tokens} hit, memory says {expected}")

    def _found_hit(self, ask: Ask) -> tuple[int, int]:
        cache = self.runtime.ledger.cache
        prefix = self.runtime._prefix(ask.tokens, ask.salt, ask.adapter, ask.key_spans)
        sequence = TokenSequence(prefix, cache.layout.unit_tokens)
        hit = find_hit(cache.index, sequence, len(ask.tokens) // cache.layout.unit_tokens)
        return hit.device_stop, hit.stop

    def _expected_hit(self, ask: Ask) -> tuple[int, int]:
        num_units = len(ask.tokens) // self.runtime.ledger.layout.unit_tokens
        device = self._present(ask, Tier.DEVICE, 0, num_units)
        return device, self._present(ask, Tier.HOST, device, num_units)

    def _present(self, ask: Ask, tier: Tier, start: int, stop: int) -> int:
        """Up to where every unit from `start` on is in memory, whole, and in somebody's hands."""
        memory = self.engine.device if tier is Tier.DEVICE else self.engine.transport.host
        quarantined = {
            block_id
            for job in self.runtime.ledger.jobs.quarantined.values()
            if job.plan.destination is tier
            for block_id in job.plan.destination_ids
        }
        for unit in range(start, stop):
            if not all(set(memory.holders(tag)) - quarantined for tag in self._tags_of(ask, unit)):
                return unit
        return stop

    def _tags_of(self, ask: Ask, unit: int) -> list[int]:
        unit_tokens = self.runtime.ledger.layout.unit_tokens
        found: list[int] = []
        for group, config in enumerate(self.runtime.config.groups):
            for end in range(unit * unit_tokens + config.block_size, (unit + 1) * unit_tokens + 1, config.block_size):
                found.append(self.engine.tags.of(self.engine.identity(ask, group, ask.tokens[:end])))
        return found
