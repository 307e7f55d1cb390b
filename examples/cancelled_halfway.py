"""A request is cancelled during a forward. Its pins are released after the forward, and committed tokens stay cached.

Prints:
    cancelled while a thread computes: 16 blocks pinned
    r1 is aborted (client_gone) after 64 of 256 tokens
    stores landed: 0 blocks pinned
    the same prompt again: 64 tokens found
"""

import threading

import anyio
import torch

from aoffload import KVCacheGroup, OffloadConfig, OffloadRuntime

PROMPT, CHUNK = list(range(256)), 64
kv_cache = torch.zeros(33, 2, 16, 64)  # [blocks, keys and values, tokens, head dim]; block 0 is the null block
client_is_gone = threading.Event()


def forward(block_ids: list[int], started: anyio.Event) -> None:
    """Stands for a model that is busy in a worker thread when the client leaves. No scope can interrupt it."""
    anyio.from_thread.run_sync(started.set)
    client_is_gone.wait()
    kv_cache[block_ids] = 1.0


async def serve(runtime: OffloadRuntime, started: anyio.Event) -> None:
    num_computed = 0
    async with runtime.request(PROMPT, request_id="r1") as request:
        await request.allocate()
        await request.load()
        for stop in range(CHUNK, len(PROMPT) + 1, CHUNK):
            blocks = request.block_ids[0][(stop - CHUNK) // 16 : stop // 16]
            with runtime.step([request]):  # holds the blocks until the thread has ended
                await anyio.to_thread.run_sync(forward, blocks, started)
            request.commit(stop)
            num_computed = stop
    # The block swallows the cancellation by `runtime.cancel`; any other one would pass through.
    print(f"r1 is {request.state.value} ({request.reason}) after {num_computed} of {len(PROMPT)} tokens")


async def main() -> None:
    config = OffloadConfig(groups=[KVCacheGroup("full", block_size=16)], num_host_blocks=64)
    async with OffloadRuntime(config, kv_cache) as runtime:
        async with anyio.create_task_group() as group:
            started = anyio.Event()
            group.start_soon(serve, runtime, started)
            await started.wait()
            runtime.cancel("r1", reason="client_gone")
            print(f"cancelled while a thread computes: {runtime.statistics().device.num_pinned} blocks pinned")
            client_is_gone.set()
        await runtime.flush()  # a copy has leases of its own, which a cancelled request does not release
        print(f"stores landed: {runtime.statistics().device.num_pinned} blocks pinned")
        print(f"the same prompt again: {runtime.lookup(PROMPT).num_tokens} tokens found")


if __name__ == "__main__":
    anyio.run(main)
