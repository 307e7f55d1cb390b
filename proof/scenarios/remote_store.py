"""A shared remote store below the host: hits in the store alone, missing cells, and hanging calls."""

from __future__ import annotations

import random
from functools import partial
from unittest.mock import patch

from aoffload import Tier
from aoffload.testing import Client, SimulatedEngine, Simulation
from aoffload.testing.faults import REMOTE_FAULTS
from aoffload.testing.tag_remote import TagStore

from .common import after, bystanders, canceller, expect, serve, tokens
from .disk import fetches_first, fetches_in_vain, forget, serve_and_evict, spoils
from .table import scenario

PROMPT = tokens(1, 9)
CALLS = (
    "remote_error", "remote_doubt", "remote_later", "remote_gone", "remote_lost", "remote_slow", "remote_late",
    "remote_hang",
)  # fmt: skip
READS = ("remote_poisoned", "remote_short", "remote_foreign")


def store_of(sim: Simulation) -> TagStore:
    """A store of one or several nodes; some keep what they have when it is put again."""
    rng = random.Random(f"store {sim.plan.seed}")
    return TagStore(rng, num_nodes=rng.choice((1, 1, 3)), keeps_first=rng.random() < 0.5)


def num_loaded(engine: SimulatedEngine) -> int:
    found = engine.runtime.statistics().remote_transfers
    assert found is not None
    return int(found.blocks_loaded)


@scenario("request_done", "remote_opened", faults=(*CALLS, *READS))
async def only_in_store(sim: Simulation) -> None:
    """Two requests want what only the store has: they share its cells, and both hit."""
    engine = sim.runtime(num_device_blocks=16, num_host_blocks=16, store=store_of(sim), max_fetch_share=0.5)
    async with engine.runtime:
        await serve_and_evict(sim, engine, PROMPT)
        before = num_loaded(engine)
        twins = [serve(sim, engine, f"twin{number}", (*PROMPT, number)) for number in range(2)]
        bystanders(sim, engine, 2)
        await after(sim, engine)
        found = num_loaded(engine) - before
        expect(sim, found == 4, f"{found} blocks were loaded for two, who share four")
        expect(sim, all(twin.outcome == "D" for twin in twins), "a twin has lost its hit")


@scenario("request_done", faults=("remote_gone",))
async def gone_in_between(sim: Simulation) -> None:
    """The store evicts cells at any moment: what it was said to have, it may not have when it is loaded."""
    store = store_of(sim)
    engine = sim.runtime(
        num_device_blocks=16, num_host_blocks=16, store=store, cell_units=2, max_fetch_share=0.5, verify=True
    )
    async with engine.runtime:
        await serve_and_evict(sim, engine, PROMPT, tokens(2, 9))

        async def evicts(client: Client) -> None:
            for _ in range(3):
                await sim.jitter()
                store.evict(list(store.objects)[: sim.random.randint(1, 2)])

        sim.spawn("evicts", evicts)
        for number in range(4):
            serve(sim, engine, f"r{number}", (*tokens(1 + number % 2, 9), number))
        await after(sim, engine)


@scenario("request_done", faults=CALLS)
async def fetched_from_store(sim: Simulation) -> None:
    """Fetches beside requests: awaited, by a request without blocks, and by a task that is cancelled already. Digests
    are computed in a thread."""
    with patch("aoffload._tiers.remote.loop.MUCH_TO_HASH", 3):
        engine = sim.runtime(num_device_blocks=16, num_host_blocks=12, store=store_of(sim), max_fetch_share=0.5)
        async with engine.runtime:
            await serve_and_evict(sim, engine, PROMPT)
            sim.spawn("fetches first", partial(fetches_first, sim, engine, (*PROMPT, 7)))
            sim.spawn("in vain", partial(fetches_in_vain, sim, engine, (*PROMPT, 8)))
            serve(sim, engine, "late", (*PROMPT, 8))
            serve(sim, engine, "given up", (*PROMPT, 9))
            canceller(sim, engine, "given up")
            await after(sim, engine)


@scenario("request_done", faults=("remote_hang", "remote_late", "remote_slow"))
async def store_that_hangs(sim: Simulation) -> None:
    """The store hangs in a question, a load or a store: requests go on within their bound, or end at their deadline;
    no block is lost by it."""
    engine = sim.runtime(
        num_device_blocks=10, num_host_blocks=12, store=store_of(sim), max_fetch_share=0.5, fetch_timeout_s=0.5,
        close_timeout_s=5.0,
    )  # fmt: skip
    async with engine.runtime:
        await serve_and_evict(sim, engine, PROMPT)
        for number in range(4):
            deadline_s = sim.random.choice((0.01, 0.1, 0.6)) if number % 2 else None
            client = serve(sim, engine, f"r{number}", (*PROMPT, number), deadline_s=deadline_s)
            client.may_abort = (*client.may_abort, "deadline")
        bystanders(sim, engine, 3)
        await after(sim, engine)
        serve(sim, engine, "afterwards", (*PROMPT, 9))
        await after(sim, engine)


@scenario("request_done", faults=CALLS)
async def taken_back_in_store(sim: Simulation) -> None:
    """A forward has failed, and its KV is in the store or on its way there. Neither this process nor another one finds
    that KV. Even if a put arrives long after the removal, this process does not hit its object."""
    engine = sim.runtime(num_device_blocks=16, num_host_blocks=8, store=store_of(sim), max_fetch_share=0.5)
    async with engine.runtime:
        sim.spawn("spoils", partial(spoils, sim, engine)).may_abort = ("prefix_invalidated",)
        for number in range(4):
            client = serve(sim, engine, f"r{number}", (*PROMPT, number))
            client.may_abort = ("prefix_invalidated",)
        bystanders(sim, engine, 3, num_tokens=8)
        await sim.join()
        for when in ("afterwards", "much later"):
            await forget(engine, Tier.HOST, Tier.DEVICE)
            serve(sim, engine, when, (*PROMPT, 9))
            await after(sim, engine)
            await sim.sleep(100.0)
    await _served_by_another(sim, engine)


@scenario("request_done", "runtime_closed", faults=CALLS)
async def closed_on_a_store(sim: Simulation) -> None:
    """A runtime closes with questions, loads, stores and removals under way. Another process goes on with the store."""
    engine = sim.runtime(num_device_blocks=16, num_host_blocks=12, store=store_of(sim), close_timeout_s=3.0)
    async with engine.runtime:
        await serve_and_evict(sim, engine, PROMPT)
        if takes_back := sim.random.random() < 0.5:
            spoiling = sim.spawn("spoils", partial(spoils, sim, engine))
            spoiling.may_abort = ("prefix_invalidated",)
        for number in range(4):
            client = serve(sim, engine, f"r{number}", tokens(1 + number % 2, 9, branch=number // 2))
            client.may_abort = ("runtime_closed", "prefix_invalidated")
        if takes_back:
            await spoiling.wait_over()  # who ends before it takes anything back leaves it to everybody
        else:
            await sim.jitter()
    await sim.join()
    await _served_by_another(sim, engine)


async def _served_by_another(sim: Simulation, engine: SimulatedEngine) -> None:
    """After the removals, which closing a real transport waits for. A store that fails may keep what is wrong."""
    if engine.num_invalidations and any(kind in REMOTE_FAULTS for kind in sim.faults.fired):
        return
    await sim.sleep(1.0)
    following = sim.successor(engine)
    async with following.runtime:
        for number in range(2):
            client = serve(sim, following, f"new{number}", (*PROMPT, number))
            client.may_abort = ("prefix_invalidated",)
        await after(sim, following)


@scenario("request_done", "runtime_closed", faults=(*CALLS, *READS))
async def shared_by_two(sim: Simulation) -> None:
    """Two processes serve the same prompts at the same time: each stores what the other may have stored just now, and
    hits what the other has computed."""
    one = sim.runtime(
        num_device_blocks=12, num_host_blocks=10, store=store_of(sim), cell_units=sim.random.choice((1, 2)),
        max_fetch_share=0.5,
    )  # fmt: skip
    other = sim.successor(one)
    async with one.runtime, other.runtime:
        for number in range(8):
            engine = (one, other)[number % 2]
            serve(sim, engine, f"r{number}", (*tokens(1, 7, branch=number // 4), number % 3))
            if number == 5:
                await sim.jitter()
                await forget(one, Tier.HOST)
        await after(sim, one)
        await other.runtime.flush()


@scenario("request_done", faults=("remote_hang", "remote_late"))
async def reset_with_a_store(sim: Simulation) -> None:
    """A reset while requests wait for the store: what comes from there later is of before, and nobody gets it."""
    engine = sim.runtime(num_device_blocks=12, num_host_blocks=10, store=store_of(sim), max_fetch_share=0.5)
    async with engine.runtime:
        await serve_and_evict(sim, engine, PROMPT)
        for number in range(3):
            serve(sim, engine, f"r{number}", (*PROMPT, number))
        await sim.jitter()
        engine.forget_everything()
        await engine.runtime.reset()
        serve(sim, engine, "afterwards", (*PROMPT, 8))
        await after(sim, engine)
