"""Two rank processes, as with tensor parallelism. Each has a part of every block, and one runtime decides for both.

Prints:
    first time: 0 tokens ready
    bytes right on rank 0: True
    bytes right on rank 1: True
    after a prompt that needs the room: 80 tokens ready
    each rank has stored 12 blocks and loaded 5
"""

from functools import partial

import anyio
import torch

from aoffload import KVCacheGroup, OffloadConfig, OffloadRuntime
from aoffload.ranks import RankTransport

BLOCK_SIZE, PROMPT, OTHER = 16, list(range(90)), list(range(1000, 1120))  # the other one takes all eight blocks


def build(kv_caches: list[torch.Tensor], rank: int, num_ranks: int) -> torch.Tensor:
    """Called in the rank's process. A real one makes its tensors there. These are shared, to be checked here."""
    return kv_caches[rank]


def forward(kv_caches: list[torch.Tensor], token_ids: list[int], block_ids: list[int], num_ready: int) -> None:
    """Stands for a model: each rank computes its own heads. Checks the loaded bytes, which no rank computes."""
    sums, ready = torch.tensor(token_ids, dtype=torch.float32).cumsum(0), block_ids[: num_ready // BLOCK_SIZE]
    for rank, kv_cache in enumerate(kv_caches):
        if ready:
            right = torch.equal(kv_cache[ready][:, 0, :, 0].flatten(), sums[:num_ready] + rank)
            print(f"bytes right on rank {rank}: {right}")
        for position in range(num_ready, len(token_ids)):
            kv_cache[block_ids[position // BLOCK_SIZE], :, position % BLOCK_SIZE] = sums[position] + rank


async def serve(runtime: OffloadRuntime, kv_caches: list[torch.Tensor], token_ids: list[int]) -> int:
    async with runtime.request(token_ids) as request:
        await request.allocate()
        num_ready = await request.load()
        with runtime.step([request]):
            forward(kv_caches, token_ids, request.block_ids[0], num_ready)
        request.commit(len(token_ids))
    return num_ready


async def main() -> None:
    kv_caches = [torch.zeros(9, 2, BLOCK_SIZE, 64).share_memory_() for _ in range(2)]
    transport = RankTransport.spawn(partial(build, kv_caches), 2)
    config = OffloadConfig(groups=[KVCacheGroup("full", block_size=BLOCK_SIZE)], num_host_blocks=64)
    async with OffloadRuntime(config, transport=transport) as runtime:
        print(f"first time: {await serve(runtime, kv_caches, PROMPT)} tokens ready")
        await serve(runtime, kv_caches, OTHER)
        print(f"after a prompt that needs the room: {await serve(runtime, kv_caches, PROMPT)} tokens ready")
    print("each rank has stored {0.blocks_stored} blocks and loaded {0.blocks_loaded}".format(transport.statistics()))


if __name__ == "__main__":
    anyio.run(main)
