"""`OffloadRuntime` in an asyncio program. Forwards run in threads, and one client is cancelled.

Prints:
    first time: 0 of 8 prompts were warm
    second time: 8 of 8 prompts were warm
    a client was cancelled: True, live requests: 0
"""

import asyncio

import torch

from aoffload import KVCacheGroup, OffloadConfig, OffloadRuntime

kv_cache = torch.zeros(17, 2, 16, 64)  # [blocks, keys and values, tokens, head dim]; block 0 is the null block


async def generate(runtime: OffloadRuntime, token_ids: list[int]) -> bool:
    """Whether the prompt was warm. Eight of these do not fit at once, so `allocate` waits for its turn."""
    async with runtime.request(token_ids) as request:
        await request.allocate()
        num_ready = await request.load()
        private = request.block_ids[0][num_ready // 16 :]
        # The blocks are held until the thread has ended, even if this task is cancelled while it computes.
        await runtime.run_step([request], lambda: kv_cache.index_fill_(0, torch.tensor(private), 1.0))
        request.commit(len(token_ids))
        return num_ready > 0
    return False  # cancelled by `request.cancel`, its deadline or `runtime.cancel`: the block swallows that


async def main() -> None:
    config = OffloadConfig(groups=[KVCacheGroup("full", block_size=16)], num_host_blocks=64)
    async with OffloadRuntime(config, kv_cache) as runtime:
        for time in ("first", "second"):
            warm = await asyncio.gather(*(generate(runtime, 70 * [n]) for n in range(8)))
            print(f"{time} time: {sum(warm)} of 8 prompts were warm")
        leaver = asyncio.create_task(generate(runtime, 70 * [0]))
        await asyncio.sleep(0)  # it has entered its request, and computes
        leaver.cancel()
        await asyncio.wait([leaver])
        live = runtime.statistics().num_requests
        print(f"a client was cancelled: {leaver.cancelled()}, live requests: {live}")


if __name__ == "__main__":
    asyncio.run(main())
