"""Long prompts: long work is split or moved to a thread, and anything else may happen in between."""

from __future__ import annotations

from unittest.mock import patch

from aoffload.testing import Simulation

from .common import after, bystanders, canceller, expect, serve, tokens
from .table import scenario


@scenario("request_done")
async def long_prompts(sim: Simulation) -> None:
    """Every prompt is longer than a slice of a list and than the longest run.

    Lists are read with other tasks in between, a thread hashes while the request may be cancelled, and runs end in the
    middle of a prompt."""
    with patch("aoffload._common.prefix.MAX_LIST", 3), patch("aoffload._kernel.tokens.MAX_RUN_TOKENS", 4):
        engine = sim.runtime(num_device_blocks=9, num_host_blocks=12)
        async with engine.runtime:
            for index in range(4):
                prompt = tokens(1, sim.random.randint(7, 12), branch=index % 2)
                serve(sim, engine, f"r{index}", prompt, num_new_tokens=sim.random.choice((0, 3)))
            canceller(sim, engine, "r1")
            bystanders(sim, engine, 2)
            await after(sim, engine)
            done = [client for client in sim.clients if client.outcome == "D"]
            expect(sim, len(done) >= 4, f"{len(done)} of {len(sim.clients)} ended well")
