"""Requests that are preempted and come back, with copies in flight and both pools nearly full."""

from __future__ import annotations

from typing import Any

from aoffload import FullAttention, SlidingWindow
from aoffload.testing import Simulation

from .common import after, serve, tokens
from .table import scenario


@scenario("request_preempted", "request_done", faults=("fail", "refuse", "vanish"))
async def preemption_storm(sim: Simulation) -> None:
    """Everybody is preempted at random points, device and host nearly full: all go on where they were."""
    rng = sim.random
    engine = sim.runtime(
        num_device_blocks=10, num_host_blocks=rng.choice((2, 8, 14)), max_job_bytes=rng.choice((1, 100)),
        max_jobs_in_flight=rng.choice((1, 4)),
    )  # fmt: skip
    async with engine.runtime:
        for index in range(5):
            options: dict[str, Any] = {"num_preemptions": rng.randint(1, 3), "slice_tokens": rng.choice((2, 3))}
            serve(sim, engine, f"r{index}", tokens(index % 3, rng.randint(4, 9)), num_new_tokens=index % 3, **options)
        await after(sim, engine)


@scenario("request_preempted", "request_done", faults=("fail", "lose", "rot"))
async def preempted_windows(sim: Simulation) -> None:
    """The same with windows: what has left them is not needed back."""
    rng = sim.random
    engine = sim.runtime(
        num_device_blocks=20, num_host_blocks=rng.choice((6, 20)), block_sizes=(2, 2), verify=rng.random() < 0.3,
        attention=(FullAttention(), SlidingWindow(4)),
    )  # fmt: skip
    async with engine.runtime:
        for index in range(4):
            options: dict[str, Any] = {"num_preemptions": rng.randint(1, 3), "slice_tokens": rng.choice((2, 3))}
            serve(sim, engine, f"r{index}", tokens(index % 2, rng.randint(6, 10)), num_new_tokens=index % 3, **options)
        await after(sim, engine)
