"""The laws after each call of a program over a ledger whose device blocks belong to an engine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from aoffload._common.tiers import Tier
from aoffload._host_cache.host_cache import HostCache
from aoffload._kernel.states import RequestState
from aoffload.testing.violations import Violation

from .engine_pool import EnginePool
from .engine_state import EngineClient, EngineState
from .engine_tables import HasTables
from .ledger_laws import Laws
from .program import Call

__all__ = ["EngineLaws", "check_held", "check_written_to"]


def check_held(ledger: HostCache, pool: EnginePool) -> None:
    """A block is held once for each job that touches it, and no other block is held."""
    jobs, expected = ledger.jobs, Counter[int]()
    for job in (*jobs.unsettled.values(), *jobs.quarantined.values()):
        if job.plan.destination is Tier.DEVICE:
            expected.update(job.plan.destination_ids)
    for job in jobs.unsettled.values():
        if job.plan.source is Tier.DEVICE:
            expected.update(job.plan.source_ids)
    if expected != pool.held:
        raise Violation("a job's blocks", f"held are {pool.held}, jobs touch {expected}")


def check_written_to(ledger: HostCache, clients: Mapping[str, HasTables]) -> None:
    """A block that a copy may write to is in no block table but that of the copy's request."""
    for job in (*ledger.jobs.unsettled.values(), *ledger.jobs.quarantined.values()):
        for name, client in clients.items() if job.plan.destination is Tier.DEVICE else ():
            named = {block_id for table in client.tables for block_id in table}
            if name != job.request_id and not named.isdisjoint(job.plan.destination_ids):
                raise Violation("a job's blocks", f"{job} writes to blocks of {name}")


class EngineLaws(Laws):
    _machine: EngineState

    def after(self, call: Call, number: int) -> None:
        self._held_by_jobs()
        super().after(call, number)

    def _held_by_jobs(self) -> None:
        """A block is held once for each job that touches it, and no other block is held."""
        check_held(self._machine.ledger, self._machine.pool)

    def _foreign_blocks(self) -> None:
        """A block that a copy may write to is in no block table but that of the copy's request."""
        check_written_to(self._machine.ledger, {client.name: client for client in self._machine.clients.values()})

    def _readable(self) -> None:
        for client in self._machine.clients.values():
            if client.record.state is RequestState.RUNNING and not client.must_end:
                self._machine.read(client, client.tables, client.num_computed)
                self._machine.enter_state(client, client.num_computed, None)

    def _progress(self, call: Call) -> None:
        """A request that was told to ask again waits for a request that brings its next blocks, or was woken."""
        for client in self._machine.clients.values():
            if client.record.match.is_pending and not client.is_woken and not self._is_brought(client):
                raise Violation("a wait without a need", f"after {call}: {client.name} waits for nobody")

    def _is_brought(self, waiting: EngineClient) -> bool:
        stop = waiting.num_computed + self._machine.unit
        return any(
            other.has_loaded
            and (other.record.state is RequestState.LOADING or other.record.num_computed_tokens >= stop)
            and len(other.text.prefixes) > stop
            and other.text.prefixes[stop] == waiting.text.prefixes[stop]
            for other in self._machine.clients.values()
        )

    def at_rest(self) -> None:
        super().at_rest()
        pool = self._machine.pool
        if pool.held or pool.num_tables or self._ledger.statistics().device.num_blocks:
            raise Violation("at rest", f"blocks are still held: {pool.held} {pool.num_tables}")
