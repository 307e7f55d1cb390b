"""The laws at rest: when no request is served and no copy is in progress, only the cache is left."""

from __future__ import annotations

import attrs

from .._common.prefix import Prefix
from .._common.tiers import HIT_TIERS, Tier
from .._kernel.index import find_hit
from .._runtime.runtime import AnyRuntime
from .asks import Ask
from .faults import Faults
from .serving import SimulatedEngine
from .violations import Violation

__all__ = ["Rest"]


@attrs.frozen
class Rest:
    """Checks the state that one runtime leaves."""

    runtime: AnyRuntime
    engine: SimulatedEngine
    faults: Faults

    def check_empty(self) -> None:
        """Check that no pin, wait, job, transfer or request is left."""
        found = self.runtime.statistics()
        pinned = (found.device.num_pinned, found.host.num_pinned)
        if (found.num_requests, found.num_waiting, found.num_jobs, *pinned) != (0, 0, 0, 0, 0):
            raise Violation("a leak", f"at rest: {found}")
        if found.num_pins or self.runtime.ledger.transfers.under_way:
            raise Violation(
                "a leak", f"at rest: {found.num_pins} pins, {list(self.runtime.ledger.transfers.under_way)}"
            )
        if self.runtime.worker.copies.regions.num_watched:
            raise Violation("a leak", f"at rest: regions of {self.runtime.worker.copies.regions.num_watched} loads")
        if len(self.runtime._session.requests):
            raise Violation("a leak", f"requests are still known: {list(self.runtime._session.requests)}")

    def check_nothing_is_lost(self) -> None:
        """Check that no block is in quarantine. Only for runs without a fault that explains one."""
        found = self.runtime.statistics()
        if found.device.num_quarantined or found.host.num_quarantined:
            raise Violation("a leak", f"quarantined without a fault: {found}")

    def check_proofs(self) -> None:
        """Check that a job whose end was proven, however late, is not quarantined, and that no bytes count as in
        flight."""
        ledger, worker = self.runtime.ledger, self.runtime.worker
        ignored = self.engine.proven & (set(ledger.jobs.quarantined) | worker.copies.overdue)
        if worker.copies.num_bytes_in_flight or worker.copies.num_in_flight:
            raise Violation("a leak", f"{worker.copies.num_bytes_in_flight} bytes count as in flight")
        if ignored:
            raise Violation("a proof was ignored", f"jobs {sorted(ignored)}")

    def check_forgotten(self, job_ids: set[int]) -> None:
        """Check that host blocks that these loads reported as corrupt are freed."""
        bad = {one for job_id in job_ids for one in self.engine.corrupt(job_id)}
        kept = sorted(block_id for block_id, generation in bad if self._is_findable(block_id, generation))
        if kept:
            raise Violation("a bad entry was kept", f"host blocks {kept}")

    def _is_findable(self, host_id: int, generation: int) -> bool:
        host = self.engine.transport.host
        return host.is_owned[host_id] and host.generation[host_id] == generation

    def check_reachable(self) -> None:
        """Unless something failed, check that no tier holds a tail without its head, because LRU evicts a prefix's tail
        before its head."""
        if self.faults.fired or self.engine.num_invalidations or self.runtime.config.eviction != "lru":
            return
        for run in self.runtime.ledger.cache.index.runs.values():
            for tier in HIT_TIERS:
                before = run.before.parts[tier] if run.before is not None else None
                if run.parts[tier].blocks and before is not None and before.stop < before.run.stop:
                    raise Violation("a tail without its head", f"{run} behind {run.before}")

    def check_hits(self, asks: list[Ask]) -> None:
        """Check that hits are exactly the blocks in memory: device blocks from the start on, then host blocks."""
        lost_bytes = {"rot", "early", "flip"} & set(self.faults.fired)
        for ask in asks:
            expected = self._expected_hit(ask)
            found = self._found_hit(ask)
            if lost_bytes or self.engine.num_invalidations or self.engine.num_epochs:
                continue
            # Without full attention, a hit may need no block at all, only a request that had these tokens before.
            is_right = found == expected if self.runtime.ledger.layout.full.width else found <= expected
            if not is_right:
                raise Violation("what may hit", f"{found} units of {ask.tokens} hit, memory says {expected}")

    def _found_hit(self, ask: Ask) -> tuple[int, int]:
        cache = self.runtime.ledger.cache
        root = self.runtime._session.roots.of(ask.salt, ask.adapter)
        prefix = Prefix.of(root, ask.tokens, ask.key_spans)
        sequence = self.runtime.ledger.sequence_of(prefix)
        hit = find_hit(cache.index, sequence, cache.layout, len(ask.tokens) // cache.layout.unit_tokens)
        return hit.device_stop, hit.stop

    def _expected_hit(self, ask: Ask) -> tuple[int, int]:
        """The expected hit, by a search over all lengths."""
        ends = range(len(ask.tokens) // self.runtime.ledger.layout.unit_tokens, -1, -1)
        held = {tier: self._held(ask, tier) for tier in HIT_TIERS}
        stop = next(end for end in ends if self._may_end(end, held, HIT_TIERS))
        return next(end for end in range(stop, -1, -1) if self._may_end(end, held, (Tier.DEVICE,))), stop

    def _may_end(self, stop: int, held: dict[Tier, set[tuple[int, int]]], tiers: tuple[Tier, ...]) -> bool:
        """Whether each group has the blocks that a hit of `stop` units needs: full attention on the device from the
        start on, then in the host; the other groups in any tier."""
        layout = self.runtime.ledger.layout
        needed = [
            (group, unit)
            for group, (component, _) in enumerate(layout.places)
            for unit in range(layout.components[component].first_needed(stop * layout.unit_tokens), stop)
        ]
        if not all(any(place in held[tier] for tier in tiers) for place in needed):
            return False
        spine = [group for group, (component, _) in enumerate(layout.places) if not component]
        on_device = [all((group, unit) in held[Tier.DEVICE] for group in spine) for unit in range(stop)]
        near = on_device.index(False) if False in on_device else stop
        behind = [(group, unit) for group in spine for unit in range(near, stop)]
        return not behind or (Tier.HOST in tiers and held[Tier.HOST].issuperset(behind))

    def _held(self, ask: Ask, tier: Tier) -> set[tuple[int, int]]:
        """The units of each group whose blocks are all in memory, owned, and not quarantined."""
        memory = self.engine.device if tier is Tier.DEVICE else self.engine.transport.host
        quarantined = {
            block_id
            for job in self.runtime.ledger.jobs.quarantined.values()
            if job.plan.destination is tier
            for block_id in job.plan.destination_ids
        }
        layout = self.runtime.ledger.layout
        return {
            (group, unit)
            for group in range(len(layout.groups))
            for unit in range(len(ask.tokens) // layout.unit_tokens)
            if all(set(memory.holders(tag)) - quarantined for tag in self._tags_of(ask, group, unit))
        }

    def _tags_of(self, ask: Ask, group: int, unit: int) -> list[int]:
        layout = self.runtime.ledger.layout
        config, stop = layout.groups[group], (unit + 1) * layout.unit_tokens
        if config.is_recurrent:
            return self.engine.state_tags(self.engine.identity(ask, group, ask.tokens[:stop]), config)
        size = config.block_size
        ends = range(unit * layout.unit_tokens + size, stop + 1, size)
        return [self.engine.tags.of(self.engine.identity(ask, group, ask.tokens[:end])) for end in ends]
