"""One simulated run. Its input is a scenario, a seed, a chooser and injections. Its result is outcomes, a trace and
perhaps a violation."""

from __future__ import annotations

import asyncio
import gc
import math
import random
import sys
import warnings
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import anyio
import attrs

from .._common.tiers import Tier
from .._config.config import OffloadConfig
from .._config.groups import AttentionKind, FullAttention, KVCacheGroup
from .._host_cache.protocols import EngineBlocks
from .._kernel.base import configured_groups
from .._kernel.events import Observer
from .._kernel.states import NoEpoch
from .._runtime.runtime import AnyRuntime, HostCacheRuntime, OffloadRuntime
from .._transfer.ranks.rank import LocalRank
from .._transfer.ranks.transport import RankTransport
from ..errors import InvalidArgument
from .asks import Ask
from .choosers import chooser_of
from .clients import Client, Log
from .copies import LATE_S
from .device import Stream
from .env import SimulatedEnv
from .faults import Faults
from .injector import Injector
from .launch_oracle import LaunchOracle
from .loop import SimulatedLoop
from .memory import Memory, OwnedPool, OwnedSlots
from .oracles import Oracles
from .pin_oracle import PinOracle
from .plans import Plan, Result
from .scheduler import Scheduler
from .serving import SimulatedEngine
from .slots import Slots, disk_of, tier_of
from .tag_remote import TagStore, remote_of
from .transport import SimulatedTransport
from .trio_run import run_trio
from .violations import Violation
from .waits import Waits

__all__ = ["Scenario", "Simulation", "simulate", "undisturbed", "violation_of"]

Scenario = Callable[["Simulation"], Awaitable[None]]
"""An async function that a simulation runs: a test program around a runtime."""


class Simulation:
    """The argument of a scenario. It makes runtimes, spawns clients, waits, and draws random numbers."""

    def __init__(self, plan: Plan, *, keep_trace: bool = False, note_waits: bool = False) -> None:
        self.plan = plan
        self.random = random.Random(f"workload {plan.seed}")
        self.scheduler = Scheduler(chooser_of(plan.chooser, plan.seed), keep_trace=keep_trace)
        self.scheduler.after_step, self.scheduler.before_wait = self._look, self._look_at_waits
        self.faults = Faults(plan.faults)
        self.env = SimulatedEnv(scheduler=self.scheduler, delays=random.Random(f"delays {plan.seed}"))
        self.log = Log(self.scheduler, self.faults, keep_trace)
        self.clients: list[Client] = []
        self.engines: list[SimulatedEngine] = []
        self.oracles: list[Oracles] = []
        self.asks: list[Ask] = []
        self.violations: list[Violation] = []
        """Violations found inside clients. The first ends the run."""
        self.injector = Injector(plan, self.scheduler, self.faults, self.log, self.clients, note_waits)
        self.scheduler.before_step = self.injector.strike
        self._group: anyio.abc.TaskGroup | None = None

    @property
    def is_native(self) -> bool:
        """Whether the plan cancels tasks natively. Such a task does not wait for its thread."""
        return any("native" in cancel.how for cancel in self.plan.cancels)

    @property
    def may_recompute(self) -> bool:
        """Whether anything has happened that may turn a hit into a miss."""
        return bool(self.faults.fired) or any(
            engine.num_resets or engine.num_resets_of_tiers or engine.num_invalidations for engine in self.engines
        )

    # -- API for scenarios ----------------------------------------------------------------------------------------

    def runtime(
        self,
        *,
        num_device_blocks: int = 8,
        block_sizes: tuple[int, ...] = (2,),
        attention: tuple[AttentionKind, ...] = (),
        stream: bool = False,
        num_ranks: int = 1,
        num_slots: int = 0,
        store: TagStore | None = None,
        cell_units: int = 1,
        **options: Any,
    ) -> SimulatedEngine:
        """An engine on its own runtime: `async with engine.runtime: ...`. Groups without an entry in `attention` have
        full attention. Each rank has its own memories, and each must have the right bytes. With `num_slots`, the
        runtime has a disk of that many slots. With `store`, it has this store as its remote tier, in cells of
        `cell_units`."""
        options.setdefault("num_host_blocks", 8)
        kinds = (*attention, *[FullAttention()] * len(block_sizes))
        groups = [KVCacheGroup(f"group{i}", kinds[i], size) for i, size in enumerate(block_sizes)]
        if num_slots:
            options["disk"] = tier_of(num_slots, math.lcm(*block_sizes))
        if store is not None:
            options["remote"] = remote_of(store, cell_units, block_sizes)
        config = OffloadConfig(groups=groups, namespace="simulated", **options)
        return self.engine_of(config, num_device_blocks, stream=stream, num_ranks=num_ranks)

    def successor(
        self, engine: SimulatedEngine, slots: Slots | None = None, store: TagStore | None = None
    ) -> SimulatedEngine:
        """An engine like `engine` in another process. It finds on its disk the `slots` that the first one has left. By
        default, they share their remote store, if they have one."""
        config = engine.runtime.config
        if store is not None and config.remote is not None:
            config = attrs.evolve(config, remote=attrs.evolve(config.remote, store=store))
        found = self.engine_of(config, engine.transport.num_device_blocks - 1, slots=slots)
        found.tags, found.committed = engine.tags, engine.committed
        found.num_invalidations = engine.num_invalidations
        return found

    def engine_of(
        self,
        config: OffloadConfig,
        num_device_blocks: int,
        *,
        stream: bool = False,
        num_ranks: int = 1,
        observers: Iterable[Observer] = (),
        kind: type[SimulatedEngine] = SimulatedEngine,
        blocks_on: Callable[[Memory], EngineBlocks] | None = None,
        slots: Slots | None = None,
    ) -> SimulatedEngine:
        """Like `runtime`, for a whole configuration. `num_device_blocks` does not count the null block. `blocks_on`
        makes the `engine_blocks` of an engine that owns its device blocks; they report the owner of a block. `slots`
        are the contents of the configured disk, empty by default. `InvalidArgument` if a group has a recurrent state,
        unless engines of `kind` serve that."""
        recurrent = [group.name for group in configured_groups(config) if group.is_recurrent]
        if recurrent and not kind.SERVES_STATES:
            raise InvalidArgument(
                "groups", f"{recurrent[0]!r} has a RecurrentState, and a simulated engine keeps no running state"
            )
        rng = random.Random(f"device {self.plan.seed}")
        device = Stream(self.scheduler, rng) if stream else None
        made = partial(
            SimulatedTransport, self.scheduler, self.faults, rng, num_device_blocks, config.resolve_host_blocks(1),
            stream=device, disk=disk_of(config, slots), remote=config.remote,
        )  # fmt: skip
        ranks = [made() for _ in range(num_ranks)]
        transport = ranks[0] if num_ranks == 1 else RankTransport([LocalRank(rank) for rank in ranks])
        runtime: AnyRuntime
        if blocks_on is None:
            runtime = OffloadRuntime(config, transport=transport, env=self.env, logger=self.log, observers=observers)
        else:
            runtime = HostCacheRuntime(
                config, transport=transport, env=self.env, logger=self.log, observers=observers,
                engine_blocks=blocks_on(ranks[0].device),
            )  # fmt: skip
        for rank in ranks:
            self._own_blocks(runtime, rank)
        engine = kind(runtime, ranks[0], self.env, tuple(ranks))
        keeping = PinOracle(runtime, engine, self.faults, self.env.now)
        oracles = Oracles(runtime, engine, self.faults, Waits(runtime, self.env.now), keeping)
        oracles.attach()
        ranks[0].check_launch = LaunchOracle(runtime, self.faults).check
        self.engines.append(engine)
        self.oracles.append(oracles)
        return engine

    @staticmethod
    def _own_blocks(runtime: AnyRuntime, rank: SimulatedTransport) -> None:
        """Let the memories of `rank` track the owner of each block."""
        for tier in runtime.ledger.cache.tiers:
            if tier.is_outside or tier.tier is Tier.DISK:
                continue
            memory = rank.device if tier.tier is Tier.DEVICE else rank.host
            on_stream = rank.stream if tier.tier is Tier.DEVICE else None
            tier.pool = OwnedPool(tier.pool, memory, _poison(memory, on_stream))
        if rank.disk is not None:
            below = runtime.ledger.cache.tiers[Tier.DISK]
            slots: Any = OwnedSlots(below.pool, rank.disk.memory, lambda ids: None)
            below.pool = slots
            if (restores := runtime.ledger.disk._restores) is not None:
                restores.pool = slots
        unsettled = runtime.ledger.jobs.unsettled
        rank.is_doomed = lambda job_id: job_id not in unsettled or unsettled[job_id].epoch is NoEpoch.INVALIDATED

    def spawn(self, name: str, function: Callable[[Client], Awaitable[None]]) -> Client:
        """Start a client in a task of its own. Cancelling it does not affect other clients."""
        client = Client(name, function, self)
        self.clients.append(client)
        if self._group is not None:
            self._group.start_soon(client.run, name=name)
        else:
            client.task = asyncio.get_running_loop().create_task(client.run(), name=name)
        return client

    async def sleep(self, seconds: float) -> None:
        """Sleep for virtual seconds."""
        await anyio.sleep(seconds)

    async def jitter(self) -> None:
        """Sleep 0 to 10 virtual milliseconds."""
        await anyio.sleep(self.random.choice((0.0, 0.0, 0.001, 0.003, 0.01)))

    async def join(self) -> None:
        """Wait until every client that was spawned so far has ended."""
        for client in self.clients:
            if client.name != "main":
                await client.wait_over()

    # -- inspection -----------------------------------------------------------------------------------------------

    def _look(self) -> None:
        for oracles in self.oracles:
            oracles.num_timeouts += self.log.take_timeouts()
            oracles.check()
        if self.violations:
            raise self.violations[0]
        if self.log.failures:
            raise Violation("a crash inside", self.log.failures[0])

    def _look_at_waits(self, until: float) -> None:
        for oracles in self.oracles:
            oracles.waits.check(until)

    # -- the run --------------------------------------------------------------------------------------------------

    async def run(self, scenario: Scenario) -> None:
        """Run the scenario as the client `main`. After all clients have ended, check the laws at rest."""

        async def main(client: Client) -> None:
            await scenario(self)

        if self.plan.backend == "trio":
            async with anyio.create_task_group() as self._group:
                self.spawn("main", main)
        else:
            self.spawn("main", main)
            for client in self.clients:  # grows during the loop
                await client.wait_over()
        self._group = None
        self._look()
        for engine in self.engines:
            if engine.transport.stream is not None:
                await engine.transport.stream.wait_idle()
        for _ in range(3):  # late proofs come before the checks at rest, even if the clock leaps over a sleep
            await anyio.sleep(LATE_S)
        for client in self.clients:
            client.check()
        for oracles in self.oracles:
            oracles.is_cut_short = self.clients[0].was_injected and self.is_native
            oracles.check_at_rest(self.asks)

    def result(self, violation: Violation | None) -> Result:
        scheduler = self.scheduler
        return Result(
            plan=self.plan, violation=violation, outcomes={client.name: client.outcome for client in self.clients},
            num_steps=scheduler.step, num_choices=scheduler.num_choices, digest=scheduler.digest,
            num_cancels=self.injector.num_cancels, faults=self.faults.fired, opportunities=self.faults.opportunities,
            await_lines=frozenset(self.injector.await_lines), waits=self.injector.waits,
            suspensions={client.name: client.num_suspensions for client in self.clients},
            num_checks=sum(oracles.num_checks for oracles in self.oracles),
            num_blocks_checked=sum(engine.num_blocks_checked for engine in self.engines),
            counts=self.log.counts, trace=scheduler.trace, log=self.log.lines, time_s=scheduler.now,
        )  # fmt: skip


def simulate(plan: Plan, scenario: Scenario, *, keep_trace: bool = False, note_waits: bool = False) -> Result:
    """Run `scenario` as `plan` says. The same plan gives the same run, on every machine and in every process.

    `note_waits`: record the lines at which clients can be cancelled (`Result.waits`).
    """
    with undisturbed():
        result = _simulate(plan, scenario, keep_trace, note_waits)
        if result.violation is not None:
            gc.collect()  # objects that a broken-off run leaves
    return result


def _simulate(plan: Plan, scenario: Scenario, keep_trace: bool, note_waits: bool) -> Result:
    simulation = Simulation(plan, keep_trace=keep_trace, note_waits=note_waits)
    return simulation.result(violation_of(simulation, scenario))


def violation_of(simulation: Simulation, scenario: Scenario) -> Violation | None:
    """Run `scenario`, and return its violation, if any. Call it inside `undisturbed` if the run has to be
    repeatable."""
    violation: Violation | None = None
    try:
        _run(simulation, scenario)
    except Exception as error:  # noqa: BLE001 - whatever comes out of a run is its result
        violation = _violation_in(error) or Violation("a crash", repr(error))
        violation.__traceback__ = violation.__context__ = None  # its frames would keep the broken-off run alive
    return violation


def _run(simulation: Simulation, scenario: Scenario) -> None:
    scheduler = simulation.scheduler
    if simulation.plan.backend == "trio":
        run_trio(scheduler, lambda: simulation.run(scenario))
        return
    loop = SimulatedLoop(scheduler)  # type: ignore[abstract]
    simulation.env.others = loop.step_others
    try:
        loop.run_until_complete(simulation.run(scenario))
        if loop.unfinished:
            raise Violation("a leak", f"tasks are left: {loop.unfinished}")
        if loop.errors:
            raise Violation("a crash inside", repr(loop.errors[0]))
    finally:
        loop.close()


def _violation_in(error: BaseException) -> Violation | None:
    """The first violation in `error`, which may be an exception group."""
    if isinstance(error, Violation):
        return error
    inner = error.exceptions if isinstance(error, BaseExceptionGroup) else ()
    return next((found for one in inner if (found := _violation_in(one)) is not None), None)


@contextmanager
def undisturbed() -> Iterator[None]:
    """Run without the garbage collector, which would run finalizers at steps that no seed determines, and without
    warnings, because those about a broken-off run add nothing."""
    was_enabled, hook = gc.isenabled(), sys.unraisablehook
    gc.disable()
    sys.unraisablehook = lambda unraisable: None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        sys.unraisablehook = hook
        if was_enabled:
            gc.enable()


def _poison(memory: Any, stream: Stream | None) -> Callable[[Any], None]:
    if stream is None:
        return lambda ids: memory.poison(ids)

    def poison(block_ids: Any) -> None:
        for block_id in block_ids:
            stream.after_uses_of(block_id, partial(memory.poison, (block_id,)))

    return poison
