"""Resets, closing, deadlines, cancellations, and abandoned requests."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import anyio

from aoffload import Computed, OutOfBlocks, Tier
from aoffload.testing import Ask, Client, Simulation, Violation

from .common import after, ask, bystanders, expect, serve, store, tokens
from .table import scenario


@scenario("request_done")
async def reset_in_flight(sim: Simulation) -> None:
    """The cache is reset while copies and requests are under way: nothing from before is ever found again."""
    jobs = {"max_jobs_in_flight": sim.random.choice((1, 4)), "max_job_bytes": sim.random.choice((1, 100))}
    engine = sim.runtime(num_device_blocks=8, num_host_blocks=8, **jobs)
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
    """The runtime is closed under live requests and copies: each request is told, and nothing is left."""
    jobs = {"max_jobs_in_flight": sim.random.choice((1, 4)), "max_job_bytes": sim.random.choice((1, 100))}
    engine = sim.runtime(num_device_blocks=6, num_host_blocks=6, **jobs)
    async with engine.runtime:
        for index in range(7):
            prompt = tokens(index % 2, sim.random.randint(5, 8), branch=index % 3)
            client = serve(sim, engine, f"r{index}", prompt, num_new_tokens=index % 5)
            client.may_abort = ("runtime_closed",)
        for _ in range(sim.random.randint(3, 9)):
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
    """`runtime.run` spawns a task: cancelling its caller, natively too, cancels nothing but that request."""
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
    """Requests that are left by exceptions, cancelled by others, dropped without closing, or never entered."""
    engine = sim.runtime(num_device_blocks=14, num_host_blocks=6)
    async with engine.runtime:
        for index in range(4):
            client = serve(sim, engine, f"r{index}", tokens(index % 2, 7))
            client.may_abort = ("cancelled", "somebody said so")

        async def cancel_others(client: Client) -> None:
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

        async def drop_all(client: Client) -> None:
            """Drop a request with blocks that others wait for."""
            request = engine.open("dropped with blocks", ask(sim, engine, tokens(2, 5)))
            await request.__aenter__()
            request._scope.__exit__(None, None, None)
            with suppress(OutOfBlocks):
                request.allocate_nowait(20)
            del request

        async def raises(client: Client) -> None:
            """An error that the block raises comes out, even if the request was cancelled meanwhile."""
            try:
                async with engine.open(client.name, ask(sim, engine, tokens(1, 5))) as request:
                    request.cancel("somebody said so")
                    raise KeyError(client.name)
            except KeyError:
                return
            raise Violation("an error was swallowed", client.name)

        async def raises_both(client: Client) -> None:
            """An error that is raised together with a cancellation counts as an error."""
            request = engine.open(client.name, ask(sim, engine, tokens(1, 5)))
            with suppress(BaseExceptionGroup):
                async with request:
                    raise BaseExceptionGroup("both", [await _cancellation(), KeyError(client.name)])
            was_closed = sim.clients[0].was_injected and request.reason == "runtime_closed"
            if request.reason != "error: BaseExceptionGroup" and not was_closed:
                raise Violation("an error was swallowed", f"{client.name} was aborted with {request.reason}")

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

        sim.spawn("meddle", cancel_others)
        sim.spawn("drop", drop)
        sim.spawn("drop_all", drop_all)
        sim.spawn("raises", raises)
        sim.spawn("raises_both", raises_both)
        sim.spawn("batch", batch)
        bystanders(sim, engine, 1)
        await after(sim, engine)


async def _cancellation() -> BaseException:
    """The exception that cancels a task on this backend."""
    with anyio.CancelScope() as scope:
        scope.cancel()
        try:
            await anyio.lowlevel.checkpoint()
        except anyio.get_cancelled_exc_class() as error:
            found = error
            raise
    return found


@scenario("request_done")
async def tier_resets(sim: Simulation) -> None:
    """One tier is reset under copies and requests: nothing of it is found right after, and the other tier stays.

    Running requests keep their blocks."""
    engine = sim.runtime(num_device_blocks=9, num_host_blocks=8)
    async with engine.runtime:
        await store(sim, engine, "first", tokens(1, 6))
        for index in range(4):
            prompt = tokens(1, 7, branch=index % 2)
            serve(sim, engine, f"r{index}", prompt, num_new_tokens=index % 3, starts_early=index == 1)

        async def reset(client: Client) -> None:
            for tier in sim.random.sample([Tier.DEVICE, Tier.HOST], 2):
                await sim.jitter()
                engine.num_resets_of_tiers += 1
                engine.runtime.ledger.reset(tier)
                found = engine.runtime.lookup(tokens(1, 7))
                if (tier is Tier.DEVICE and found.num_device_tokens) or (tier is Tier.HOST and found.num_host_tokens):
                    raise Violation("may hit", f"{found} right after {tier.name} was reset")
                await engine.runtime.reset(tier, timeout_s=0.01)

        sim.spawn("reset", reset)
        await after(sim, engine)
