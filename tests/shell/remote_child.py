"""A process that serves prompts with a store in a real server, and prints the hits of each prompt.

Arguments: the server's URL, the secret (hexadecimal, or nothing), how often each prompt is served, and their seeds.
"""

from __future__ import annotations

import json
import sys

import anyio
from remote_serving import assert_quiet, forget_locally, quiet, with_remote
from serving import prompt

from aoffload.stores import RedisStore


async def serve(url: str, secret: bytes | None, num_times: int, seeds: list[int]) -> None:
    found: dict[int, int] = {}
    async with with_remote(RedisStore.from_url(url), secret=secret) as engine:
        for seed in seeds:
            for _ in range(num_times):
                found[seed] = await engine.serve(prompt(seed, 17))  # checks the bytes
                await quiet(engine.runtime)
            await forget_locally(engine)
        await assert_quiet(engine.runtime)
        statistics = engine.runtime.statistics().remote_transfers
        assert statistics is not None and not statistics.num_failures
        print(json.dumps({"hits": found, "corrupt": statistics.cells_corrupt, "stored": statistics.blocks_stored}))


if __name__ == "__main__":
    url, secret, num_times, *seeds = sys.argv[1:]
    anyio.run(serve, url, bytes.fromhex(secret) or None, int(num_times), [int(seed) for seed in seeds])
