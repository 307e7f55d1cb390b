"""The stage of programs over a runtime whose device blocks are its engine's: with the engine's pool, and its laws."""

from __future__ import annotations

from typing import Any

from aoffload._common.tiers import Tier
from aoffload._kernel.records import LedgerRequest
from aoffload._kernel.states import RequestState
from aoffload._runtime.request import Request
from aoffload.testing.memory import Memory
from aoffload.testing.violations import Violation

from .engine_laws import check_held, check_written_to
from .engine_pool import EnginePool, pool_of
from .engine_runtime_requests import EngineServed
from .engine_tables import EngineTables, Tables
from .runtime_bytes import ProgramEngine
from .runtime_requests import Served
from .runtime_stage import Stage

__all__ = ["EngineStage"]

NO_HASTE_S = 5.0
"""Every copy without a fault is over by then."""


class EngineStage(Stage):
    """The engine frees its blocks at once and reuses them, and hits its own cache first."""

    SERVED = EngineServed
    pool: EnginePool
    own: EngineTables

    def begin(self) -> ProgramEngine:
        engine = super().begin()
        oracles = self.simulation.oracles[-1]
        oracles.also.append(self._check_blocks)
        config = self.runtime.config
        oracles.is_hasty = min(config.load_timeout_s, config.store_timeout_s or NO_HASTE_S) < NO_HASTE_S
        oracles.waits.is_brought = self._is_brought
        return engine

    def _engine(self, **options: Any) -> ProgramEngine:
        world = self.program.world

        def blocks_on(memory: Memory) -> Any:
            self.pool = pool_of(world, memory)
            return self.pool.engine_blocks()

        engine = super()._engine(blocks_on=blocks_on)
        layout, nulls = engine.runtime.ledger.layout, world.num_device_blocks % 4 < 2
        self.own = EngineTables(self.pool, layout.groups, layout.unit_tokens, nulls, engine.device.poison)
        return engine

    # -- requests -------------------------------------------------------------------------------------------------

    def options(self, args: Any) -> dict[str, Any]:
        return {**super().options(args), "num_device_tokens": self.hit(args)[0]}

    def hit(self, args: Any) -> tuple[int, Tables]:
        """What the engine's own cache has of the prompt in `args`."""
        roots, spans = (args.get("salt"), args.get("adapter")), self.identity(args)["key_spans"]
        chain = self.engine.chain(roots, args["tokens"], spans)
        return self.own.hit(lambda num_tokens: chain[num_tokens - 1], len(chain), args.get("fewer", 0))

    def admitted(self, request: Request, args: Any) -> Served:
        served = super().admitted(request, args)
        assert isinstance(served, EngineServed)
        served.own = self.own
        self.pool.prefixes[served.name] = served.prefix
        if served.take_hit(args.get("fewer", 0)):
            self.met("engine hit")
        self.matched(served)
        return served

    def matched(self, served: EngineServed) -> None:
        """It was matched just now."""
        match, state = served.request.match, served.request.state
        if (state is RequestState.MATCHED) is not match.is_pending:
            raise Violation("an answer", f"{served.name} is {state.name}: {match}")
        if match.num_host_tokens:
            self.met("host hit")
        if match.is_pending:
            self.met("pending")

    def left(self, served: Served) -> None:
        assert isinstance(served, EngineServed)
        super().left(served)
        self.own.free(served)
        served.drop_states()
        if self.pool.prefixes.get(served.name) == served.prefix and not self._is_deferred(served.name):
            del self.pool.prefixes[served.name]

    def _is_deferred(self, name: str) -> bool:
        """Whether the ledger may call `find` for the request after its end."""
        return name in self.runtime.ledger.deferred_requests

    def _note_calls(self) -> None:
        super()._note_calls()
        ledger: Any = self.runtime.ledger
        plan_load, reset, set_epoch = ledger.plan_load, ledger.reset, ledger.weights.set

        def changes(epoch: str) -> None:
            is_other = epoch != self.epoch
            set_epoch(epoch)
            for block_id in self.pool.all_cached() if is_other else ():
                self.pool.forget(block_id)

        def forgets(tier: Tier | None = None) -> None:
            reset(tier)
            for block_id in self.pool.all_cached() if tier is None else ():
                self.pool.forget(block_id)

        def planned(record: LedgerRequest, *args: Any, **kwargs: Any) -> Any:
            plans = plan_load(record, *args, **kwargs)
            served = self._of(record)
            if served is not None and plans:
                served.has_loaded = True
            return plans

        ledger.plan_load, ledger.reset, ledger.weights.set = planned, forgets, changes

    def _of(self, record: LedgerRequest) -> EngineServed | None:
        return next((one for one in self._all() if one.request._record is record), None)

    def _all(self) -> list[EngineServed]:
        return [served for served in self.live if isinstance(served, EngineServed)]

    def check_told(self) -> None:
        """Also of running states: they were copied out of blocks that may be gone."""
        super().check_told()
        for served in self._all():
            wrong = [at for at, forwards in served.states.items() for one in forwards if one.wrong_from < at]
            if wrong and not served.must_end:
                raise Violation("not told", f"{served.name} has the state at token {wrong[0]}, which was taken back")

    # -- laws -----------------------------------------------------------------------------------------------------

    def _check_blocks(self) -> None:
        check_held(self.runtime.ledger, self.pool)
        check_written_to(self.runtime.ledger, {served.name: served for served in self._all()})

    def _is_brought(self, record: LedgerRequest) -> bool:
        """Whether the next block of `record` comes with another request's load."""
        waiting, stop = self._of(record), record.given_tokens + self.own.unit
        return waiting is None or any(
            other.has_loaded and len(other.chain) >= stop and other.chain[stop - 1] == waiting.chain[stop - 1]
            for other in self._all()
            if other is not waiting and self._may_bring(other, stop)
        )

    @staticmethod
    def _may_bring(other: EngineServed, stop: int) -> bool:
        has_come = other.request.state is RequestState.RUNNING and other.request.num_computed_tokens >= stop
        return has_come or other.request.state is RequestState.LOADING

    def check_end(self) -> None:
        super().check_end()
        self._check_blocks()
        if self.pool.num_tables:
            raise Violation("at rest", f"blocks are still named: {self.pool.num_tables}")
