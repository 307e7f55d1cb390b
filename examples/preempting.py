"""Requests that grow until the device is full: the youngest gives way, and comes back when there is room.

A request that needs room preempts another one, and is in line by `await extend()` before the victim's task runs again:
the victim's blocks go to that request, not to the victim's own `resume()`. See docs/howto/preempting.md.

Prints:
    6 of 6 answers as if each had the device alone
    somebody gave way: True, never twice for one block: True, left on the device: 0 blocks
"""

import anyio
import torch

from aoffload import KVCacheGroup, OffloadConfig, OffloadRuntime, OutOfBlocks, Request, RequestState

BLOCK, NUM_TOKENS = 4, 30
kv_cache = torch.zeros(17, BLOCK, dtype=torch.int64)  # 16 blocks: two of these requests fit as they end, not three
running: list[Request] = []  # the oldest first; requests that wait for room are not in it, so they are no victims
counts = {"blocks": 0, "preempted": 0}


def forward(tokens: list[int], num_computed: int, table: list[int]) -> int:
    """Write the KV of the tokens that are not computed yet; the next token is a digest of the KV of all tokens."""
    for at in range(num_computed, len(tokens)):
        kv_cache[table[at // BLOCK], at % BLOCK] = tokens[at] * 31 + at
    return int(kv_cache[table].flatten()[: len(tokens)].sum()) % 997


async def make_room(request: Request, num_tokens: int) -> None:
    counts["blocks"] += 1
    try:
        request.extend_nowait(num_tokens)
    except OutOfBlocks:
        counts["preempted"] += 1
        running.remove(request)
        try:
            if not running or running[-1].request_id < request.request_id:
                raise  # it is the youngest itself
            running.pop().preempt_nowait()
            await request.extend(num_tokens)  # there is no await in between: it is in line before the victim
        except OutOfBlocks:  # or waiting requests hold all room, and the youngest of them gives way
            await request.preempt()


async def generate(runtime: OffloadRuntime, name: str, tokens: list[int]) -> None:
    async with runtime.request(tokens, name) as request:
        await request.allocate()
        await request.load()
        while len(tokens) < NUM_TOKENS:
            if request in running and len(request.block_ids[0]) * BLOCK < len(tokens):
                await make_room(request, len(tokens))
            if request.state is RequestState.PREEMPTED:
                await request.resume(len(tokens))
            running[:] = sorted({*running, request}, key=lambda one: one.request_id)
            with runtime.step([request]):
                sampled = forward(tokens, request.num_computed_tokens, request.block_ids[0])
            request.commit(len(tokens), [sampled])
            tokens.append(sampled)
            await anyio.lowlevel.checkpoint()  # others compute meanwhile, and may preempt this one
        running[:] = [one for one in running if one is not request]


def alone(tokens: list[int]) -> list[int]:
    while len(tokens) < NUM_TOKENS:
        tokens = [*tokens, sum(token * 31 + at for at, token in enumerate(tokens)) % 997]
    return tokens


async def main() -> None:
    prompts = [[n, n + 1, n + 2] for n in range(6)]
    answers = [list(tokens) for tokens in prompts]
    config = OffloadConfig(groups=[KVCacheGroup("full", block_size=BLOCK)], num_host_blocks=64)
    async with OffloadRuntime(config, kv_cache) as runtime:
        async with anyio.create_task_group() as group:
            for number, tokens in enumerate(answers):
                group.start_soon(generate, runtime, f"request {number}", tokens)
        await runtime.flush()
        pinned = runtime.statistics().device.num_pinned
    right = sum(answer == alone(tokens) for answer, tokens in zip(answers, prompts, strict=True))
    print(f"{right} of {len(prompts)} answers as if each had the device alone")
    once = counts["preempted"] <= counts["blocks"]
    print(f"somebody gave way: {counts['preempted'] > 0}, never twice for one block: {once}", end=", ")
    print(f"left on the device: {pinned} blocks")


if __name__ == "__main__":
    anyio.run(main)
