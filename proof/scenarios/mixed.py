"""Mixed traffic, several groups, several runtimes, and bad input."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from aoffload import OutOfBlocks
from aoffload._kernel.states import JobState
from aoffload.errors import DuplicateRequest, IllegalTransition, InvalidArgument, LeaseError, WrongState
from aoffload.testing import Client, Simulation, Violation

from .common import after, ask, bystanders, evict_device, serve, store, tokens
from .table import scenario


@scenario("request_loading", "job_completed")
async def mixed(sim: Simulation) -> None:
    """Everything at once, sizes and shapes drawn anew for each seed."""
    await traffic(sim, stream=False)


@scenario("request_loading", "job_completed")
async def mixed_on_stream(sim: Simulation) -> None:
    """Mixed traffic on a device whose compute runs later, in order: fences are all that keeps the copies right."""
    await traffic(sim, stream=True)


@scenario("request_done", faults=("fail", "rot", "flip"))
async def two_groups(sim: Simulation) -> None:
    """Two groups of layers with different block sizes share one pool; a unit of both may exceed the bound in flight."""
    stream, verify = sim.random.random() < 0.3, sim.random.random() < 0.5
    await traffic(
        sim, stream=stream, verify=verify, block_sizes=(2, 4), num_device_blocks=18, num_host_blocks=24, shared=8,
        max_bytes_in_flight=sim.random.choice((2, 5, 100)),
    )  # fmt: skip


async def traffic(sim: Simulation, *, stream: bool, shared: int = 2, **options: Any) -> None:
    rng = sim.random
    options.setdefault("num_device_blocks", rng.randint(6, 12))
    options.setdefault("num_host_blocks", rng.choice((2, 6, 14)))
    options.setdefault("max_job_bytes", rng.choice((1, 2, 100)))
    options.setdefault("max_jobs_in_flight", rng.choice((1, 2, 4)))
    options.setdefault("verify", rng.random() < 0.3)
    engine = sim.runtime(stream=stream, **options)
    async with engine.runtime:
        if rng.random() < 0.5:  # what comes first is in host memory only
            await store(sim, engine, "before", tokens(0, 9, shared=5))
            await evict_device(engine)
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
    """Invalid calls are refused with typed errors, and change nothing for requests that are served meanwhile."""
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
                record = engine.runtime.ledger.live_requests[request.request_id]
                leases = list(record.leases.values())
            _refused(WrongState, lambda: engine.runtime.ledger.release(record))
            for lease in leases:
                _refused(LeaseError, lambda lease=lease: engine.runtime.ledger.cache.release(lease))
            for job in tuple(engine.runtime.ledger.jobs.unsettled.values()):
                if job.state is JobState.LAUNCHED:  # it can't be recalled
                    _refused(IllegalTransition, lambda job=job: engine.runtime.ledger.discard(job.job_id))

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
