"""The simulation: it finds failures, repeats them, and reports none in correct programs."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import suppress
from itertools import pairwise
from typing import Any

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aoffload._common.tiers import Tier
from aoffload._config.groups import FullAttention, RecurrentState
from aoffload.errors import InvalidArgument, TransferRefused
from aoffload.testing import (
    FAULTS,
    HOWS,
    Ask,
    Cancel,
    Client,
    Fault,
    Memory,
    Plan,
    SimulatedEngine,
    Simulation,
    Violation,
    cancel_sweep,
    exhaust,
    explain,
    fault_sweep,
    replay,
    shrink,
    simulate,
)
from aoffload.testing.choosers import Exactly, Option, PriorityChooser, RandomChooser, chooser_of
from aoffload.testing.faults import DISK_FAULTS, REMOTE_FAULTS
from aoffload.testing.tag_remote import TagStore

BACKENDS: Any = pytest.mark.parametrize("backend", ["asyncio", "trio"])
CHOOSERS = ["random", "pct:3", "exactly:2=1,7=1"]


async def serving(sim: Simulation) -> None:
    """Eight requests of two families on a device too small for all of them."""
    engine = sim.runtime(num_device_blocks=5, num_host_blocks=6)
    async with engine.runtime:
        for index in range(8):
            prompt = tuple(range(index % 2, index % 2 + 7))
            wanted = Ask(tokens=prompt, num_new_tokens=index % 2, style="thread")

            async def run(client: Client, wanted: Ask = wanted) -> None:
                await sim.jitter()
                await client.serve(engine, wanted)

            sim.spawn(f"r{index}", run)
        await sim.join()
        await engine.runtime.flush()


@BACKENDS
@pytest.mark.parametrize("chooser", CHOOSERS)
def test_nothing_is_found_where_nothing_is_wrong(backend: Any, chooser: str) -> None:
    """A sound runtime passes every oracle, whatever the schedule; and there were real choices, copies and checks."""
    for seed in range(15):
        result = simulate(Plan(scenario="serving", backend=backend, seed=seed, chooser=chooser), serving)
        assert result.violation is None, explain(result)
        assert set(result.outcomes.values()) == {"D"}
        assert result.num_choices > 10 and result.num_checks > 10 and result.num_blocks_checked
        assert result.counts["job_completed"]


@BACKENDS
def test_one_plan_is_one_run(backend: Any) -> None:
    """The same plan makes the same decisions; another seed makes others."""
    plan = Plan(scenario="serving", backend=backend, seed=3, cancels=(Cancel("r1", 2),), faults=(Fault("fail", 1),))
    first, again = (replay(str(plan), serving) for _ in range(2))
    assert first.trace == again.trace and first.log == again.log and first.digest == again.digest
    assert simulate(Plan(scenario="serving", backend=backend, seed=4), serving).digest != first.digest


TRACE = """
import sys; sys.path.insert(0, {path!r})
from test_simulation import traces
print(traces())
"""


def traces() -> str:
    plans = [f"scenario=s backend={name} seed=5 cancel=r2@3:native*2" for name in ("asyncio", "trio")]
    return " ".join(str(replay(plan, serving).trace) for plan in plans)


def test_one_plan_is_one_run_in_every_process() -> None:
    """Neither the seed of string hashes nor where objects lie in memory decides anything."""
    program = TRACE.format(path=os.path.dirname(__file__))
    runs = [
        subprocess.run(
            [sys.executable, "-c", program], env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, check=True
        ).stdout
        for seed in ("0", "1")
    ]
    assert {run.decode().strip() for run in runs} == {traces()} and len(runs[0]) > 1000


@BACKENDS
def test_a_deadlock_is_found_at_once(backend: Any) -> None:
    """A wait that nothing will end is named as what it is; no timeout is waited for."""

    async def stuck(sim: Simulation) -> None:
        await anyio.Event().wait()

    result = simulate(Plan(scenario="stuck", backend=backend), stuck)
    assert result.violation is not None and result.violation.oracle == "deadlock"


@BACKENDS
def test_a_livelock_is_found(backend: Any) -> None:
    """Steps without end, and no time passes: nobody has to kill the run."""

    async def spinning(sim: Simulation) -> None:
        while True:
            await anyio.lowlevel.checkpoint()

    result = simulate(Plan(scenario="spinning", backend=backend), spinning)
    assert result.violation is not None and result.violation.oracle == "livelock"


@BACKENDS
def test_time_is_virtual(backend: Any) -> None:
    """Hours cost nothing, deadlines fire in their order, and a leap of the clock fires all of them."""
    order: list[str] = []

    async def waits(sim: Simulation) -> None:
        async def nap(client: Client) -> None:
            with anyio.move_on_after(3600):
                await anyio.sleep(7200)
            order.append(client.name)

        sim.spawn("late", nap)
        await anyio.sleep(60)
        order.append("main")
        await sim.join()

    result = simulate(Plan(scenario="waits", backend=backend), waits)
    assert result.violation is None and result.time_s >= 3600
    assert order == ["main", "late"]


def unreleased(sim: Simulation) -> None:
    """Take the protection out: a request that is aborted keeps what it has."""
    ledger: Any = sim.engines[-1].runtime.ledger
    release = ledger.release
    kept = ("cancelled", "abandoned")
    ledger.release = lambda record, reason="": () if reason in kept else release(record, reason)


async def leaking(sim: Simulation) -> None:
    engine = sim.runtime(num_device_blocks=8)
    unreleased(sim)
    async with engine.runtime:
        for index in range(3):

            async def run(client: Client, index: int = index) -> None:
                await client.serve(engine, Ask(tokens=tuple(range(index, index + 5)), style="thread"))

            sim.spawn(f"r{index}", run)
        await sim.join()


@BACKENDS
def test_what_is_broken_is_found_shrunk_and_replayed(backend: Any) -> None:
    """A leak that takes a cancellation: the sweep meets it, and what is left of the plan breaks the same law again."""
    plan = Plan(scenario="leaking", backend=backend, seed=1)
    broken = [found for found in cancel_sweep(plan, leaking, "r1", "native") if found.violation is not None]
    assert broken
    long = Plan(
        scenario="leaking", backend=backend, seed=1, chooser="random",
        cancels=(*broken[0].plan.cancels, Cancel("r2", 90)), faults=(Fault("fail", 90),),
    )  # fmt: skip
    small = shrink(long, leaking)
    assert small.violation is not None and len(small.plan.cancels) == 1 and not small.plan.faults
    line = explain(small).splitlines()[0]
    again = replay(line, leaking)
    assert again.violation is not None and str(again.violation) == str(small.violation)


@BACKENDS
@pytest.mark.parametrize("how", HOWS)
def test_a_cancelled_client_harms_nobody(backend: Any, how: str) -> None:
    """Cancelled at each of its checkpoints in turn, in each way; the sweep ends when there is no further one."""
    results = list(cancel_sweep(Plan(scenario="serving", backend=backend, seed=2), serving, "r1", how))
    assert len(results) > 3 and results[-1].num_cancels == 0
    for result in results:
        assert result.violation is None, explain(result)
        assert {result.outcomes[name] for name in ("main", "r0", "r2", "r3")} == {"D"}
    assert sum(result.num_cancels for result in results) >= len(results) - 1


@BACKENDS
@pytest.mark.parametrize("kind", FAULTS)
def test_every_fault_ends_in_an_outcome(backend: Any, kind: str) -> None:
    """Each kind, at each of its first opportunities: nobody hangs, nothing leaks, no byte is wrong."""
    scenario = on_disk if kind in DISK_FAULTS else on_store if kind in REMOTE_FAULTS else verified
    sweep = fault_sweep(Plan(scenario=scenario.__name__, backend=backend, seed=3), scenario, kind, at_most=6)
    results = list(sweep)
    for result in results:
        assert result.violation is None, explain(result)
    is_possible = backend == "asyncio" or kind != "worker"
    assert any(result.faults[kind] for result in results) or not is_possible


async def served_in_threads(sim: Simulation, engine: SimulatedEngine, turn: int, num_prompts: int) -> None:
    """The same prompts each turn, at the same time, until all is quiet."""
    for index in range(num_prompts):
        wanted = Ask(tokens=tuple(range(index * 10, index * 10 + 7)), style="thread")

        async def run(client: Client, wanted: Ask = wanted) -> None:
            await client.serve(engine, wanted)

        sim.spawn(f"r{turn}{index}", run)
    await sim.join()
    await engine.runtime.flush()


async def verified(sim: Simulation) -> None:
    """As `serving`, with checksums, and a prompt that comes back from the host."""
    engine = sim.runtime(num_device_blocks=6, num_host_blocks=12, verify=True)
    async with engine.runtime:
        for turn in range(2):
            await served_in_threads(sim, engine, turn, 3)


async def on_disk(sim: Simulation) -> None:
    """Prompts that come back when only the disk has them, before it is reset."""
    engine = sim.runtime(
        num_device_blocks=8,
        num_host_blocks=6,
        num_slots=24,
        max_fetch_share=0.5,
        fetch_timeout_s=0.5,
        close_timeout_s=5.0,
    )
    async with engine.runtime:
        await engine.runtime.disk.wait_restored()
        for turn in range(3):
            await served_in_threads(sim, engine, turn, 4)
        with suppress(TransferRefused):
            await engine.runtime.reset(Tier.DISK)


async def on_store(sim: Simulation) -> None:
    """Prompts that come back when only a remote store has them."""
    engine = sim.runtime(
        num_device_blocks=8, num_host_blocks=12, store=TagStore(), max_fetch_share=0.5, fetch_timeout_s=0.5,
        close_timeout_s=5.0,
    )  # fmt: skip
    async with engine.runtime:
        for turn in range(4):
            await served_in_threads(sim, engine, turn, 3)
            for tier in (Tier.DEVICE, Tier.HOST) if turn else ():
                engine.num_resets_of_tiers += 1
                await engine.runtime.reset(tier)


def test_a_small_world_is_exhausted() -> None:
    """Two clients of one step each have two orders; the search finds both and knows that there is no third."""

    async def two(sim: Simulation) -> None:
        async def step(client: Client) -> None:
            pass

        sim.spawn("a", step)
        sim.spawn("b", step)
        await sim.join()

    results = list(exhaust(Plan(scenario="two"), two, num_deviations=5))
    assert {result.digest for result in results} and len(results) < 2000
    assert len({result.digest for result in results}) == len(results)
    assert any(result.trace[0].name == "a" for result in results) and any(
        decision.name == "b" for result in results for decision in result.trace[:1]
    )


# -- plans and choosers -----------------------------------------------------------------------------------------------

cancels = st.builds(Cancel, st.sampled_from(["r1", "step", "main"]), st.integers(0, 99), st.sampled_from(HOWS))
faults = st.builds(Fault, st.sampled_from(sorted(FAULTS)), st.integers(0, 99), st.booleans())
plans = st.builds(
    Plan,
    scenario=st.sampled_from(["serving", "mixed"]),
    backend=st.sampled_from(["asyncio", "trio"]),
    seed=st.integers(0, 10**6),
    chooser=st.sampled_from(CHOOSERS),
    cancels=st.lists(cancels).map(tuple),
    faults=st.lists(faults).map(tuple),
)


@given(plans)
def test_a_plan_is_what_its_line_says(plan: Plan) -> None:
    """The line that a report prints is the whole plan."""
    assert Plan.parse(str(plan)) == plan


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("backend=trio", "plan"),
        ("scenario=a seed=x", "plan"),
        ("scenario=a nonsense", "plan"),
        ("scenario=a fault=hang@x", "fault"),
        ("scenario=a fault=meteor@1", "meteor"),
        ("scenario=a cancel=r1@x:native", "cancel"),
    ],
)
def test_what_is_no_plan_is_refused_by_name(text: str, says: str) -> None:
    """A line that was mistyped says what is wrong with it."""
    with pytest.raises(InvalidArgument, match=says):
        Plan.parse(text)


def test_a_recurrent_state_is_refused_by_name() -> None:
    """The simulated engine keeps no running state, so it does not pretend to serve such a model."""
    with pytest.raises(InvalidArgument, match="groups: 'group1' has a RecurrentState"):
        Simulation(Plan(scenario="states")).runtime(block_sizes=(2, 2), attention=(FullAttention(), RecurrentState()))


@pytest.mark.parametrize("text", ["", "pct", "pct:x", "random:x", "exactly:1", "dice"])
def test_what_is_no_chooser_is_refused_by_name(text: str) -> None:
    with pytest.raises(InvalidArgument, match="chooser"):
        chooser_of(text, 0)


def options(*actors: int) -> list[Option]:
    return [Option(actor, f"actor {actor}", 0, None) for actor in actors]


def test_priorities_hold_until_they_fall() -> None:
    """PCT: of the same actors the same one runs, but for `depth - 1` steps at which it falls behind all others."""
    for seed in range(20):
        chooser = PriorityChooser(seed, depth=2, num_steps=10)
        chosen = [chooser.choose(step, options(1, 2, 3)) for step in range(10)]
        changes = sum(one != other for one, other in pairwise(chosen))
        assert changes <= 1


def test_choosers_choose_what_is_there() -> None:
    """Random meets every option; `Exactly` takes the first but where it is told otherwise, and never a missing one."""
    chooser = RandomChooser(1)
    assert {chooser.choose(step, options(1, 2, 3)) for step in range(60)} == {0, 1, 2}
    exactly = Exactly({2: 1, 3: 9})
    assert [exactly.choose(step, options(1, 2)) for step in range(4)] == [0, 0, 1, 1]


# -- the memory -------------------------------------------------------------------------------------------------------


def test_memory_knows_whose_block_is_whose() -> None:
    """Handed out twice, given back twice, touched after it changed hands: each is noticed where it happens."""
    memory = Memory(Tier.HOST, 4)
    memory.hand_out([1, 2])
    generation = memory.generation[1]
    memory.check_owner("a copy", 1, generation)
    with pytest.raises(Violation, match="handed out twice"):
        memory.hand_out([2])
    memory.take_back([1])
    with pytest.raises(Violation, match="no owner"):
        memory.check_owner("a copy", 1, generation)
    memory.hand_out([1])
    with pytest.raises(Violation, match="another owner"):
        memory.check_owner("a copy", 1, generation)
    with pytest.raises(Violation, match="given back twice"):
        memory.take_back([3])
