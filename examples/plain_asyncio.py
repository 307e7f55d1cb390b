"""The runtime in a plain asyncio program: one engine task computes, clients come and go, one is cancelled natively.

Prints:
    first time: 0 of 8 prompts were warm
    second time: 8 of 8 prompts were warm
    a client was cancelled: True, pinned: 0 blocks
"""

import asyncio

import torch

from aoffload import KVCacheGroup, OffloadConfig, OffloadRuntime, Request

kv_cache = torch.zeros(17, 2, 16, 64)  # [blocks, keys and values, tokens, head dim]; block 0 is the null block
Queue = asyncio.Queue[tuple[Request, int, asyncio.Future[None]] | None]


async def engine(runtime: OffloadRuntime, queue: Queue) -> None:
    """Only this task waits for the thread. Nobody cancels it: a native cancel would leave `step` before the thread."""
    while (work := await queue.get()) is not None:
        request, num_ready, done = work
        if not done.cancelled():
            with runtime.step([request]):  # the client may leave now, its blocks stay
                await asyncio.to_thread(kv_cache.__setitem__, request.block_ids[0][num_ready // 16 :], 1.0)
        if not done.cancelled():
            done.set_result(None)


async def generate(runtime: OffloadRuntime, queue: Queue, token_ids: list[int]) -> bool:
    """Whether the prompt was warm. Eight of these do not fit at once: `allocate` waits for its turn."""
    async with runtime.request(token_ids) as request:
        await request.allocate()
        num_ready = await request.load()
        queue.put_nowait((request, num_ready, done := asyncio.get_running_loop().create_future()))
        await done
        request.commit(len(token_ids))
        return num_ready > 0
    return False  # cancelled by `request.cancel`, its deadline or `runtime.cancel`: the block swallows that


async def main() -> None:
    config = OffloadConfig(groups=[KVCacheGroup("full", block_size=16)], num_host_blocks=64)
    async with OffloadRuntime(config, kv_cache) as runtime:
        queue = Queue()
        computing = asyncio.create_task(engine(runtime, queue))
        for time in ("first", "second"):
            warm = await asyncio.gather(*(generate(runtime, queue, 70 * [n]) for n in range(8)))
            print(f"{time} time: {sum(warm)} of 8 prompts were warm")
        leaver = asyncio.create_task(generate(runtime, queue, 70 * [0]))
        await asyncio.sleep(0)  # it has entered its request
        leaver.cancel()
        queue.put_nowait(None)
        await asyncio.wait([leaver, computing])
        await runtime.flush()
        print(f"a client was cancelled: {leaver.cancelled()}, pinned: {runtime.statistics().device.num_pinned} blocks")


if __name__ == "__main__":
    asyncio.run(main())
