"""Two rank processes and many requests that store. Prints the process ids, then follows commands on its input: `serve`
prints the time of the slowest of 12 requests."""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import anyio
import torch

from aoffload import KVCacheGroup, OffloadConfig, OffloadRuntime
from aoffload._transfer.ranks.transport import RankTransport

BLOCK_SIZE = 16
NUM_TOKENS = 60
GIVE_UP_S = 45.0


def build(pools: list[torch.Tensor], rank: int, num_ranks: int) -> torch.Tensor:
    return pools[rank]


async def one(runtime: OffloadRuntime, number: int, took_s: list[float]) -> None:
    began_s = anyio.current_time()
    with anyio.move_on_after(GIVE_UP_S) as scope:
        async with runtime.request(range(number * 1000, number * 1000 + NUM_TOKENS)) as request:
            await request.allocate()
            await request.load()
            request.commit(NUM_TOKENS)
    took_s.append(float("inf") if scope.cancelled_caught else anyio.current_time() - began_s)


async def serve(runtime: OffloadRuntime, first: int) -> str:
    took_s: list[float] = []
    async with anyio.create_task_group() as group:
        for number in range(first, first + 12):
            group.start_soon(one, runtime, number, took_s)
    return f"{max(took_s)} {sum(took > 2.0 for took in took_s)}"


async def main() -> None:
    pools = [torch.zeros(17, 2, BLOCK_SIZE, 64).share_memory_() for _ in range(2)]  # type: ignore[no-untyped-call]
    transport = RankTransport.spawn(partial(build, pools), 2)
    ranks: Any = transport.ranks
    config = OffloadConfig(groups=[KVCacheGroup("full", block_size=BLOCK_SIZE)], num_host_blocks=200)
    async with OffloadRuntime(config, transport=transport) as runtime:
        print(*(rank.pid for rank in ranks), flush=True)
        first = 1
        while await anyio.to_thread.run_sync(sys.stdin.readline):
            print(await serve(runtime, first), flush=True)
            first += 12


if __name__ == "__main__":
    anyio.run(main)
