"""A prefix is stored in host memory, evicted from the device, and loaded back with the same bytes.

Prints:
    first time: 0 tokens on the device, 0 in host memory
    after a prompt that needs the room: 0 tokens on the device, 80 in host memory
    loaded 80 tokens, bytes right: True
"""

import anyio
import torch

from aoffload import KVCacheGroup, OffloadConfig, OffloadRuntime, Request

BLOCK_SIZE = 16
# [blocks, keys and values, tokens, head dim]: 8 usable blocks after the null block 0.
kv_cache = torch.zeros(9, 2, BLOCK_SIZE, 64)


def forward(token_ids: list[int], block_ids: list[int], num_ready: int) -> None:
    """Stands for a model: the KV of a token depends on all tokens up to it."""
    sums = torch.tensor(token_ids, dtype=torch.float32).cumsum(0)
    for position in range(num_ready, len(token_ids)):
        kv_cache[block_ids[position // BLOCK_SIZE], :, position % BLOCK_SIZE] = sums[position]


async def compute(runtime: OffloadRuntime, request: Request, token_ids: list[int]) -> int:
    await request.allocate()
    num_ready = await request.load()
    with runtime.step([request]):
        forward(token_ids, request.block_ids[0], num_ready)
    request.commit(len(token_ids))
    return num_ready


async def main() -> None:
    config = OffloadConfig(groups=[KVCacheGroup("full", block_size=BLOCK_SIZE)], num_host_blocks=64)
    prompt, other = list(range(90)), list(range(1000, 1120))
    async with OffloadRuntime(config, kv_cache) as runtime:
        async with runtime.request(prompt) as request:
            print(f"first time: {describe(request)}")
            await compute(runtime, request, prompt)
            right = kv_cache[request.block_ids[0][:5]]  # an index by a list copies
        async with runtime.request(other) as request:
            await compute(runtime, request, other)  # takes all eight blocks
        async with runtime.request(prompt) as request:
            print(f"after a prompt that needs the room: {describe(request)}")
            num_loaded = await compute(runtime, request, prompt)
            same = torch.equal(kv_cache[request.block_ids[0][:5]], right)
            print(f"loaded {num_loaded} tokens, bytes right: {same}")


def describe(request: Request) -> str:
    return f"{request.match.num_device_tokens} tokens on the device, {request.match.num_host_tokens} in host memory"


if __name__ == "__main__":
    anyio.run(main)
