"""The scenarios: what is explored. Each is a small world with a hazard in it, and bystanders who must not notice.

A scenario is an ordinary program against the public API. It says what must be true where the general oracles of
`aoffload.testing` can't know it; `CALM` runs (nothing injected) are held to more than disturbed ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import anyio
import attrs

from aoffload import Computed, KeySpan, OutOfBlocks, RequestState
from aoffload.errors import DuplicateRequest, InvalidArgument, LeaseError, WrongState
from aoffload.testing import SPOILED, Ask, Client, Scenario, SimulatedEngine, Simulation, Violation

from .paged import paged_engine

__all__ = ["SCENARIOS", "ScenarioRow"]


@attrs.frozen
class ScenarioRow:
    name: str
    run: Scenario
    about: str
    events: tuple[str, ...] = ()
    """Events that the scenario is for: a campaign in which one never happened was not about it."""
    faults: tuple[str, ...] = ()
    """Faults that it is for: drawn more often than the others."""


SCENARIOS: dict[str, ScenarioRow] = {}


def scenario(*events: str, faults: tuple[str, ...] = ()) -> Callable[[Scenario], Scenario]:
    """Enter a function into the table under its own name."""

    def enter(function: Any) -> Scenario:
        SCENARIOS[function.__name__] = ScenarioRow(function.__name__, function, function.__doc__ or "", events, faults)
        return function  # type: ignore[no-any-return]

    return enter


scenario("request_done")(paged_engine)

# -- what they have in common -----------------------------------------------------------------------------------------


def is_calm(sim: Simulation) -> bool:
    """Nothing is injected: exact numbers may be asked for."""
    return not sim.plan.cancels and not sim.plan.faults


def expect(sim: Simulation, truth: bool, message: str) -> None:
    """What holds unless something was injected."""
    if is_calm(sim) and not truth:
        raise Violation("expectation", message)


def style(sim: Simulation, engine: SimulatedEngine) -> Any:
    """Where a forward may run: a thread that is awaited inside a plain step is not safe from native cancellation."""
    if engine.transport.stream is not None:
        return "stream"
    return sim.random.choice(("inline", "thread") if sim.is_native else ("inline", "step", "thread"))


def tokens(family: int, num_tokens: int, branch: int = 0, shared: int = 4) -> tuple[int, ...]:
    """Prompts of one family share their first `shared` tokens, and all of them within a branch."""
    return tuple(family * 100 + index + (0 if index < shared else branch * 50) for index in range(num_tokens))


def ask(sim: Simulation, engine: SimulatedEngine, prompt: tuple[int, ...], **options: Any) -> Ask:
    rng = sim.random
    options.setdefault("style", style(sim, engine))
    options.setdefault("slice_tokens", rng.choice((2, 3, 100)))
    options.setdefault("waits", rng.random() < 0.7)
    return Ask(tokens=prompt, **options)


def serve(sim: Simulation, engine: SimulatedEngine, name: str, prompt: tuple[int, ...], **options: Any) -> Client:
    """A client that arrives some time soon and is served once."""
    wanted = ask(sim, engine, prompt, **options)

    async def run(client: Client) -> None:
        await sim.jitter()
        await client.serve(engine, wanted)

    return sim.spawn(name, run)


def bystanders(sim: Simulation, engine: SimulatedEngine, number: int = 3, num_tokens: int = 6) -> None:
    """Others, with prompts of their own."""
    for index in range(number):
        family = 50 + sim.random.randrange(2)
        length = sim.random.randint(2, num_tokens)
        serve(sim, engine, f"by{index}", tokens(family, length, branch=sim.random.randrange(2)))


async def store(sim: Simulation, engine: SimulatedEngine, name: str, prompt: tuple[int, ...]) -> None:
    """Serve a prompt in this task and wait until it is in host memory."""
    await engine.serve(name, ask(sim, engine, prompt))
    await engine.runtime.flush()


def canceller(sim: Simulation, engine: SimulatedEngine, *names: str) -> None:
    """A client that cancels others, one after the other."""

    async def cancel(client: Client) -> None:
        for name in names:
            await sim.jitter()
            engine.runtime.cancel(name)

    for client in sim.clients:
        if client.name in names:
            client.may_abort = (*client.may_abort, "cancelled")
    sim.spawn("canceller", cancel)


async def evict_device(engine: SimulatedEngine) -> None:
    """Give every unpinned device block to somebody else for a moment."""
    room = engine.runtime.statistics().device
    num_tokens = (room.num_free + room.num_cached) * engine.runtime.config.groups[0].block_size
    async with engine.runtime.request((7, 7)) as request:
        with suppress(OutOfBlocks):  # somebody was faster: then something was evicted, too
            request.allocate_nowait(num_tokens)


async def after(sim: Simulation, engine: SimulatedEngine) -> None:
    """Everybody ends, and what they have stored lands."""
    await sim.join()
    await engine.runtime.flush()


# -- the founding incidents -------------------------------------------------------------------------------------------


@scenario("job_launched")
async def hit_that_was_gone(sim: Simulation) -> None:
    """I1: b matches what is in host memory and dawdles; c and d want to store there. b still loads it."""
    engine = sim.runtime(num_device_blocks=12, num_host_blocks=4)
    async with engine.runtime:
        prompt = tokens(1, 5)
        await store(sim, engine, "a", prompt[:4])
        await evict_device(engine)
        wanted = ask(sim, engine, prompt)

        async def b(client: Client) -> None:
            async with engine.open("b", wanted) as request:
                client.request = request
                found = request.match.num_tokens
                await sim.jitter()
                await sim.jitter()
                await engine.run(request, wanted)
                expect(sim, found == request.match.num_tokens, f"b matched {found}, then {request.match}")
            client.ended()

        sim.spawn("b", b)
        for number, name in enumerate("cd", start=2):
            serve(sim, engine, name, tokens(number, 4), deadline_s=None)
        bystanders(sim, engine, 2, 4)
        await after(sim, engine)


@scenario("request_allocated")
async def stolen_prefix(sim: Simulation) -> None:
    """I2: a matches blocks that are cached on the device and dawdles; b allocates all there is. a reads its own."""
    engine = sim.runtime(num_device_blocks=6, num_host_blocks=sim.random.choice((0, 6)))
    async with engine.runtime:
        prompt = tokens(1, 5)
        await store(sim, engine, "first", prompt[:4])
        wanted = ask(sim, engine, prompt)

        async def a(client: Client) -> None:
            async with engine.open("a", wanted) as request:
                client.request = request
                await sim.jitter()
                await engine.run(request, wanted)
            client.ended()

        sim.spawn("a", a)
        for index in range(3):
            serve(sim, engine, f"b{index}", tokens(10 + index, 8), num_new_tokens=sim.random.choice((0, 0, 2)))
        await after(sim, engine)


@scenario("job_completed")
async def stored_twice(sim: Simulation) -> None:
    """I3: others hit the same device blocks while they are being stored, and again when that has failed."""
    engine = sim.runtime(num_device_blocks=14, num_host_blocks=10)
    async with engine.runtime:
        for index in range(4):
            serve(sim, engine, f"r{index}", tokens(1, 7, branch=index % 2))
        bystanders(sim, engine, 2)
        await after(sim, engine)
        await engine.serve("again", ask(sim, engine, tokens(1, 7)))
        await engine.runtime.flush()
        found = engine.runtime.lookup(tokens(1, 7))
        expect(sim, found.num_tokens == 6, f"6 tokens were stored, {found} are there")


@scenario("store_skipped")
async def stale_blocks(sim: Simulation) -> None:
    """I4: stores are refused for want of host blocks; the device blocks change hands; then there is room again."""
    engine = sim.runtime(num_device_blocks=6, num_host_blocks=3)
    async with engine.runtime:
        for index in range(5):
            serve(sim, engine, f"r{index}", tokens(index % 3, 6, shared=2, branch=index), num_new_tokens=index % 3)
        await after(sim, engine)
        await engine.serve("again", ask(sim, engine, tokens(0, 6, shared=2)))


@scenario("request_done")
async def exact_fit(sim: Simulation) -> None:
    """I5: prompts that are cached to their last block still compute a token, also when they fill the pool."""
    engine = sim.runtime(num_device_blocks=4, num_host_blocks=8)
    async with engine.runtime:
        prompt = tokens(1, 8)
        for index in range(4):
            serve(sim, engine, f"r{index}", prompt[: 8 if index % 2 else 4])
        await after(sim, engine)
        async with engine.open("exact", ask(sim, engine, prompt)) as request:
            expect(sim, request.match.num_tokens <= 6, f"hit {request.match}")


# -- sharing ----------------------------------------------------------------------------------------------------------


@scenario("request_loading", faults=("fail", "refuse", "vanish", "hang"))
async def shared_load(sim: Simulation) -> None:
    """Several requests want the same blocks from the host at once; whoever leads may go."""
    engine = sim.runtime(
        num_device_blocks=16, num_host_blocks=10, max_job_bytes=sim.random.choice((1, 2, 100)),
        max_jobs_in_flight=sim.random.choice((1, 4)),
    )  # fmt: skip
    async with engine.runtime:
        await store(sim, engine, "first", tokens(1, 8))
        await evict_device(engine)
        for index in range(4):
            serve(sim, engine, f"r{index}", tokens(1, sim.random.randint(5, 9)), num_new_tokens=index % 2)
        bystanders(sim, engine, 2)
        if sim.random.random() < 0.5:
            canceller(sim, engine, "r0", "r2")
        await after(sim, engine)


@scenario("request_loading", "request_done", faults=("fail", "lose", "twice"))
async def branches(sim: Simulation) -> None:
    """Prompts that part ways inside of blocks and runs which others load, compute and evict at the same time."""
    engine = sim.runtime(num_device_blocks=9, num_host_blocks=12, max_job_bytes=2)
    async with engine.runtime:
        for index in range(6):
            prompt = tokens(1, sim.random.randint(5, 11), branch=index % 3, shared=sim.random.choice((2, 5)))
            serve(sim, engine, f"r{index}", prompt, max_load_tokens=sim.random.choice((None, None, 4)))
        await after(sim, engine)


@scenario("request_loading")
async def conversations(sim: Simulation) -> None:
    """Turns that build on each other, more of them than the device can keep."""
    engine = sim.runtime(num_device_blocks=8, num_host_blocks=sim.random.choice((5, 16)))
    async with engine.runtime:
        for number in range(3):

            async def talk(client: Client, number: int = number) -> None:
                said = tokens(number, 4)
                for turn in range(3):
                    await sim.jitter()
                    wanted = ask(sim, engine, said, num_new_tokens=2, slice_tokens=100)
                    async with engine.open(f"{client.name}.{turn}", wanted) as request:
                        client.request = request
                        await engine.run(request, wanted)
                    client.ended()
                    said = (*said, 1000, 1001, *range(turn * 10, turn * 10 + 2))

            sim.spawn(f"talk{number}", talk)
        await after(sim, engine)


@scenario("request_done")
async def tenants(sim: Simulation) -> None:
    """The same tokens under other salts, adapters and images: never a hit across, whatever is shared within."""
    engine = sim.runtime(num_device_blocks=14, num_host_blocks=14)
    async with engine.runtime:
        for index in range(6):
            salt, adapter = (None, "t1", "t2")[index % 3], (None, "lora")[index // 3]
            serve(sim, engine, f"r{index}", tokens(1, 7), salt=salt, adapter=adapter)
            image = KeySpan(index % 3, 4, bytes([index // 2]) * 16)
            serve(sim, engine, f"image{index}", tokens(1, 7), key_spans=(image,))
        serve(sim, engine, "r6", tokens(1, 7), salt="t1")
        for index in range(3):  # other placeholder tokens under the same image
            prompt = (index % 2, index % 2, *tokens(1, 7)[2:])
            serve(sim, engine, f"under{index}", prompt, key_spans=(KeySpan(0, 2, b"image" * 4),))
        await after(sim, engine)


@scenario("request_loading", "request_aborted", faults=("hang", "fail", "vanish"))
async def host_pressure(sim: Simulation) -> None:
    """Loads out of a host that stores want to fill, while the loading requests are cancelled: sources stay."""
    engine = sim.runtime(num_device_blocks=16, num_host_blocks=6)
    async with engine.runtime:
        await store(sim, engine, "first", tokens(1, 8))
        await evict_device(engine)
        for index in range(4):
            serve(sim, engine, f"load{index}", tokens(1, 9))
            serve(sim, engine, f"store{index}", tokens(5 + index, 6))
        canceller(sim, engine, "load0", "load1", "load2", "load3")
        await after(sim, engine)


@scenario("request_loading", faults=("fail", "vanish"))
async def crowded_sharing(sim: Simulation) -> None:
    """Requests adopt what others have loaded and give blocks back, and a line waits for those."""
    engine = sim.runtime(num_device_blocks=9, num_host_blocks=12)
    async with engine.runtime:
        await store(sim, engine, "first", tokens(1, 8))
        await evict_device(engine)
        for index in range(4):
            serve(sim, engine, f"share{index}", tokens(1, 9), num_new_tokens=index % 2)
        for index in range(3):
            serve(sim, engine, f"other{index}", tokens(5 + index, sim.random.randint(4, 12)))
        await after(sim, engine)


@scenario("request_done")
async def least_recently_used(sim: Simulation) -> None:
    """Under pressure, what was touched last survives, in both tiers, and a prefix loses its tail first."""
    engine = sim.runtime(num_device_blocks=8, num_host_blocks=8)
    async with engine.runtime:
        for family in (1, 2, 1, 2):  # a store that lands is a touch, too: each is waited for
            await store(sim, engine, f"turn of {family}", tokens(family, 6))
        await store(sim, engine, "new", tokens(3, 7))
        found = engine.runtime.lookup((*tokens(2, 6), 9))
        expect(sim, found.num_device_tokens == 6, f"what was touched last is gone: {found}")
        for index in range(4):
            serve(sim, engine, f"r{index}", tokens(1 + index, sim.random.randint(3, 8), shared=2))
        await after(sim, engine)


# -- room -------------------------------------------------------------------------------------------------------------


@scenario("store_skipped")
async def host_full(sim: Simulation) -> None:
    """Stores find the host full and pinned; later they are offered again."""
    engine = sim.runtime(num_device_blocks=10, num_host_blocks=2)
    async with engine.runtime:
        for index in range(5):
            serve(sim, engine, f"r{index}", tokens(index % 4, 6), num_new_tokens=index % 2)
        await after(sim, engine)


@scenario("request_allocated")
async def device_full(sim: Simulation) -> None:
    """More prompts than fit: a line. Whoever waits without pins is matched again, and none waits for nothing."""
    engine = sim.runtime(num_device_blocks=5, num_host_blocks=sim.random.choice((0, 8)))
    async with engine.runtime:
        for index in range(6):
            serve(sim, engine, f"r{index}", tokens(index % 2, sim.random.randint(4, 9)), slice_tokens=2)
        canceller(sim, engine, "r2", "r4", "r3")
        await after(sim, engine)


@scenario("request_aborted")
async def growing(sim: Simulation) -> None:
    """Everybody grows and nobody has room: extensions go first, and the youngest is told when only waiters hold it."""
    engine = sim.runtime(num_device_blocks=6, num_host_blocks=4)
    async with engine.runtime:
        for index in range(5):
            serve(sim, engine, f"r{index}", tokens(index, 4), num_new_tokens=sim.random.randint(2, 6))
        await after(sim, engine)


@scenario("request_done")
async def retries(sim: Simulation) -> None:
    """A wait for room that was given up, and tried again; the same with a load."""
    engine = sim.runtime(num_device_blocks=5, num_host_blocks=8)
    async with engine.runtime:
        await store(sim, engine, "first", tokens(1, 6))

        async def patient(client: Client) -> None:
            wanted = ask(sim, engine, tokens(1, 8), waits=True)
            async with engine.open(client.name, wanted) as request:
                client.request = request
                for patience_s in (0.001, 0.0, 0.01, 0.003, None):
                    with anyio.move_on_after(patience_s):
                        await request.allocate()
                        break
                pending = request.load_nowait()
                for patience_s in (0.001, 0.0, 0.002):
                    with anyio.move_on_after(patience_s):
                        await pending.wait()
                num_ready = await pending.wait()
                engine.check_ready(request, wanted, num_ready)
                await engine.prefill(request, wanted, num_ready)
            client.ended()

        sim.spawn("patient", patient)
        sim.spawn("patient2", patient)
        for index in range(3):
            serve(sim, engine, f"r{index}", tokens(2 + index, 8))
        await after(sim, engine)


# -- ends -------------------------------------------------------------------------------------------------------------


@scenario("request_done")
async def reset_in_flight(sim: Simulation) -> None:
    """The cache is reset while copies and requests are under way: nothing from before is ever found again."""
    engine = sim.runtime(num_device_blocks=8, num_host_blocks=8)
    async with engine.runtime:
        for index in range(4):
            serve(sim, engine, f"r{index}", tokens(1, 7, branch=index % 2), num_new_tokens=index % 3)

        async def reset(client: Client) -> None:
            for _ in range(2):
                await sim.jitter()
                engine.forget_everything()
                await engine.runtime.reset()

        sim.spawn("reset", reset)
        for index in range(2):
            serve(sim, engine, f"late{index}", tokens(1, 7, branch=index))
        await after(sim, engine)


@scenario("runtime_closed")
async def close_in_flight(sim: Simulation) -> None:
    """The runtime is closed under live requests and copies: each hears of it, and nothing is left."""
    engine = sim.runtime(num_device_blocks=6, num_host_blocks=6)
    async with engine.runtime:
        for index in range(5):
            client = serve(sim, engine, f"r{index}", tokens(index % 2, 8), num_new_tokens=index)
            client.may_abort = ("runtime_closed",)
        for _ in range(sim.random.randint(1, 6)):
            await sim.jitter()


@scenario("request_aborted")
async def deadlines(sim: Simulation) -> None:
    """Deadlines that are over on entry, while queued, in the middle of a copy, or never."""
    engine = sim.runtime(num_device_blocks=5, num_host_blocks=8)
    async with engine.runtime:
        await store(sim, engine, "first", tokens(1, 8))
        for index, deadline_s in enumerate((0.0, 0.0005, 0.002, 0.02, -1.0, 100.0)):
            client = serve(sim, engine, f"r{index}", tokens(index % 2, 8), deadline_s=deadline_s)
            client.may_abort = ("deadline",)
        await after(sim, engine)
        for client in sim.clients:
            if client.name in ("r0", "r4"):
                expect(sim, client.outcome == "A", f"{client.name} ended {client.outcome} after its deadline")


@scenario("request_done")
async def run_form(sim: Simulation) -> None:
    """`runtime.run` spawns: whoever cancels its caller, natively too, cancels nothing but that request."""
    engine = sim.runtime(num_device_blocks=8, num_host_blocks=8)
    async with engine.runtime:
        for index in range(4):
            wanted = ask(sim, engine, tokens(index % 2, 7))

            async def run(client: Client, wanted: Ask = wanted) -> None:
                sim.asks.append(wanted)

                async def body(request: Any) -> None:
                    client.request = request
                    await engine.run(request, wanted)

                await engine.runtime.run(body, wanted.tokens, request_id=client.name)
                client.ended()

            sim.spawn(f"r{index}", run)
        bystanders(sim, engine, 2)
        await after(sim, engine)


@scenario("request_aborted")
async def abandoned(sim: Simulation) -> None:
    """Requests that are left by exceptions, cancelled by others, dropped on the floor, or never entered."""
    engine = sim.runtime(num_device_blocks=14, num_host_blocks=6)
    async with engine.runtime:
        for index in range(4):
            client = serve(sim, engine, f"r{index}", tokens(index % 2, 7))
            client.may_abort = ("cancelled", "somebody said so")

        async def meddle(client: Client) -> None:
            for index in (1, 2, 2, 9):
                await sim.jitter()
                engine.runtime.cancel(f"r{index}", "somebody said so")

        async def drop(client: Client) -> None:
            request = engine.open("dropped", ask(sim, engine, tokens(1, 5)))
            await request.__aenter__()
            request._scope.__exit__(None, None, None)
            await sim.jitter()
            del request
            engine.open("never entered", ask(sim, engine, tokens(1, 5)))

        async def raises(client: Client) -> None:
            """What the block raises comes out, also of a request that was cancelled meanwhile."""
            try:
                async with engine.open(client.name, ask(sim, engine, tokens(1, 5))) as request:
                    request.cancel("somebody said so")
                    raise KeyError(client.name)
            except KeyError:
                return
            raise Violation("an error was swallowed", client.name)

        async def batch(client: Client) -> None:
            """One forward of two requests; one is aborted before its results are committed."""
            first, second = (ask(sim, engine, tokens(8 + n, 5), style="inline") for n in range(2))
            async with engine.open("batch1", first) as one:
                await one.allocate()
                await one.load()
                async with engine.open("batch2", second) as other:
                    await other.allocate()
                    await other.load()
                    await engine.forward(one, first, first.tokens, one.match.num_device_tokens, 5)
                engine.runtime.commit_step([Computed(other, 5), Computed(one, 5)])
                engine.note_commit(one, first, first.tokens, 5)

        sim.spawn("meddle", meddle)
        sim.spawn("drop", drop)
        sim.spawn("raises", raises)
        sim.spawn("batch", batch)
        bystanders(sim, engine, 1)
        await after(sim, engine)


# -- copies -----------------------------------------------------------------------------------------------------------


@scenario("job_launched", faults=("fail", "lose", "hang", "twice"))
async def split_transfers(sim: Simulation) -> None:
    """Transfers in pieces of one block, one or many at a time: published in prefix order however they land."""
    engine = sim.runtime(
        num_device_blocks=12, num_host_blocks=12, max_job_bytes=1, max_jobs_in_flight=sim.random.choice((1, 2, 8))
    )
    async with engine.runtime:
        await store(sim, engine, "first", tokens(1, 10))
        await evict_device(engine)
        for index in range(5):
            serve(sim, engine, f"r{index}", tokens(index % 2, sim.random.randint(6, 10), branch=index % 3, shared=8))
        await after(sim, engine)


@scenario("request_loading")
async def loads_first(sim: Simulation) -> None:
    """Loads and stores compete for few places: in flight stays bounded, and what is queued may still be discarded."""
    engine = sim.runtime(
        num_device_blocks=14, num_host_blocks=12, max_jobs_in_flight=sim.random.choice((1, 3)), max_bytes_in_flight=2
    )
    async with engine.runtime:
        await store(sim, engine, "first", tokens(1, 8))
        await evict_device(engine)
        for index in range(3):
            serve(sim, engine, f"load{index}", tokens(1, 9))
            serve(sim, engine, f"store{index}", tokens(5 + index, 6))
        await after(sim, engine)
        expect(sim, len(engine.transport.in_flight) == 0, "something is in flight")


@scenario("request_loading", faults=("rot", "flip", "early", "fail"))
async def verified(sim: Simulation) -> None:
    """With checksums: bytes that rot in host memory or change on their way are a miss, and nobody else's."""
    engine = sim.runtime(num_device_blocks=12, num_host_blocks=14, verify=True, max_job_bytes=sim.random.choice((1, 3)))
    async with engine.runtime:
        await store(sim, engine, "first", tokens(1, 8))
        await evict_device(engine)
        for wave in range(2):
            for index in range(3):
                serve(sim, engine, f"r{wave}{index}", tokens(1 + index // 2, sim.random.randint(5, 9)))
            await after(sim, engine)
            await evict_device(engine)
        await engine.serve("last", ask(sim, engine, tokens(1, 9)))


@scenario("request_done")
async def failed_forwards(sim: Simulation) -> None:
    """A forward that was committed turns out to have failed: what it wrote is taken back, also from who matched it."""
    engine = sim.runtime(num_device_blocks=16, num_host_blocks=14)
    async with engine.runtime:

        async def fails(client: Client) -> None:
            wanted = ask(sim, engine, tokens(1, 9), style="inline")
            async with engine.open(client.name, wanted) as request:
                client.request = request
                await request.allocate()
                num_ready = await request.load()
                start = max(num_ready, sim.random.choice((2, 4, 6)))
                await engine.forward(request, wanted, wanted.tokens, num_ready, start)
                for block_id in request.block_ids[0][start // 2 :]:
                    engine.device.content[block_id] = SPOILED
                engine.commit(request, wanted, wanted.tokens, 9)
                try:
                    await sim.jitter()
                    await sim.jitter()
                finally:
                    engine.num_invalidations += 1
                    if request.state is RequestState.RUNNING:
                        request.invalidate(start)
                await sim.jitter()
                await engine.forward(request, wanted, wanted.tokens, start, 9)
                engine.commit(request, wanted, wanted.tokens, 9)
            client.ended()

        async def stubborn(client: Client) -> None:
            """Commits once more on its way out, whatever it was told."""
            wanted = ask(sim, engine, tokens(1, 9, branch=3), style="inline")
            sim.asks.append(wanted)
            async with engine.open(client.name, wanted) as request:
                client.request = request
                await request.allocate()
                num_ready = await request.load()
                await engine.forward(request, wanted, wanted.tokens, num_ready, 9)
                try:
                    await sim.jitter()
                    await sim.jitter()
                finally:
                    if request.state is RequestState.RUNNING:
                        engine.commit(request, wanted, wanted.tokens, 9)
            client.ended()

        sim.spawn("fails", fails)
        sim.spawn("stubborn", stubborn).may_abort = ("prefix_invalidated",)
        for index in range(4):
            client = serve(sim, engine, f"r{index}", tokens(1, 9, branch=index % 2))
            client.may_abort = ("prefix_invalidated",)
        await sim.join()
        for branch in (0, 1, 3):
            serve(sim, engine, f"afterwards{branch}", tokens(1, 10, branch=branch))
        await after(sim, engine)


# -- whole worlds -----------------------------------------------------------------------------------------------------


@scenario("request_loading", "job_completed")
async def mixed(sim: Simulation) -> None:
    """Everything at once, sizes and shapes drawn anew for each seed."""
    await traffic(sim, stream=False)


@scenario("request_loading", "job_completed")
async def mixed_on_stream(sim: Simulation) -> None:
    """The same on a device whose compute runs later, in order: fences are all that keeps the copies right."""
    await traffic(sim, stream=True)


@scenario("request_done", faults=("fail", "rot", "flip"))
async def two_groups(sim: Simulation) -> None:
    """Two groups of layers with block sizes of their own share one pool."""
    stream, verify = sim.random.random() < 0.3, sim.random.random() < 0.5
    await traffic(
        sim, stream=stream, verify=verify, block_sizes=(2, 4), num_device_blocks=18, num_host_blocks=24, shared=8
    )


@scenario("request_done")
async def nothing_to_offload_to(sim: Simulation) -> None:
    """No host blocks at all, or a policy that stores nothing: a prefix cache of one tier."""
    options: dict[str, Any] = sim.random.choice(({"num_host_blocks": 0}, {"store_policy": "off"}))
    await traffic(sim, stream=False, **options)


async def traffic(sim: Simulation, *, stream: bool, shared: int = 2, **options: Any) -> None:
    rng = sim.random
    options.setdefault("num_device_blocks", rng.randint(6, 12))
    options.setdefault("num_host_blocks", rng.choice((2, 6, 14)))
    options.setdefault("max_job_bytes", rng.choice((1, 2, 100)))
    options.setdefault("max_jobs_in_flight", rng.choice((1, 2, 4)))
    options.setdefault("verify", rng.random() < 0.3)
    engine = sim.runtime(stream=stream, **options)
    async with engine.runtime:
        for index in range(rng.randint(4, 7)):
            length, common = rng.randint(2, 9), rng.choice((shared, 5))
            prompt = tokens(rng.randrange(2), length, branch=rng.randrange(2), shared=common)
            serve(
                sim, engine, f"r{index}", prompt, num_new_tokens=rng.choice((0, 0, 1, 3)),
                salt=rng.choice((None, None, None, "s")), max_load_tokens=rng.choice((None, None, 2, 3)),
                max_hit_tokens=rng.choice((None, None, 4)), hit_alignment=rng.choice((1, 1, 4)),
            )  # fmt: skip
        await after(sim, engine)


@scenario("runtime_closed")
async def two_runtimes(sim: Simulation) -> None:
    """Two runtimes in one loop have nothing to do with each other."""
    one, other = sim.runtime(num_device_blocks=5), sim.runtime(num_device_blocks=5, num_host_blocks=3)
    async with one.runtime:
        async with other.runtime:
            for index in range(3):
                serve(sim, one, f"one{index}", tokens(1, 7, branch=index))
                serve(sim, other, f"other{index}", tokens(1, 7, branch=index))
            await after(sim, other)
        await after(sim, one)


@scenario("request_done")
async def bad_input(sim: Simulation) -> None:
    """What no program should ask for is refused by name, and changes nothing for those who are served meanwhile."""
    engine = sim.runtime(num_device_blocks=6, num_host_blocks=6)
    async with engine.runtime:
        bystanders(sim, engine, 4)

        async def hostile(client: Client) -> None:
            for wrong in ((), (-1,), (2**31,), ("a",), (1.5,), None, [[1]]):
                await sim.jitter()
                _refused(InvalidArgument, lambda wrong=wrong: engine.runtime.request(wrong))
            _refused(InvalidArgument, lambda: engine.runtime.request((1,), deadline_s="soon"))
            async with engine.open(client.name, ask(sim, engine, tokens(50, 5))) as request:
                _refused(WrongState, lambda: request.commit(1))
                await sim.jitter()
                with _expected(DuplicateRequest):
                    await engine.open(client.name, ask(sim, engine, tokens(50, 5))).__aenter__()
                with _expected(OutOfBlocks):
                    await request.allocate(10_000)
                await request.allocate()
                _refused(WrongState, request.allocate_nowait)
                holding = engine.runtime.ledger.holdings[request.request_id]
                leases = list(holding.leases.values())
            _refused(WrongState, lambda: engine.runtime.ledger.release(holding))
            for lease in leases:
                _refused(LeaseError, lambda lease=lease: engine.runtime.ledger.cache.release(lease))

        for index in range(2):
            sim.spawn(f"hostile{index}", hostile)
        await after(sim, engine)


@contextmanager
def _expected(error: type[Exception]) -> Iterator[None]:
    try:
        yield
    except error:
        return
    raise Violation("bad input", f"no {error.__name__} where one was due")


def _refused(error: type[Exception], call: Callable[[], object]) -> None:
    with _expected(error):
        call()
