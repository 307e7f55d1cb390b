"""A continuous-batching engine on the runtime's blocks: each request is a task, and one loop computes them together.

Answers grow until the device is full. Then the youngest request is preempted, and resumes when enough blocks are free.
The request that needs the blocks is in the wait queue before they are freed, so that the youngest cannot take them
back. Clients disconnect, and copies may fail: the missing tokens are computed. See docs/howto/preempting.md.

Prints:
    12 requests: 10 answered, 2 hung up on; as if each had the device alone: 12
    several in one step: True; some were preempted: True; some were loaded: True
    left on the device: 0 blocks
"""

from collections import Counter
from contextlib import suppress
from functools import partial

import anyio
import torch

from aoffload import Computed, KVCacheGroup, OffloadConfig, OffloadRuntime, OutOfBlocks, RequestState

BLOCK, NUM_ROWS, NUM_NEW = 4, 17, 24  # row 0 is the null block; two requests fit as they end, not three
torch.set_num_threads(1)  # more of them would only wait for each other, because the model is tiny


def forward(kv: torch.Tensor, work: list[tuple[list[int], list[int], int]]) -> list[int]:
    """For each (tokens, table, first): compute `tokens[first:]`, which read the KV of all before. The new tokens."""
    for tokens, table, first in work:
        for at in range(first, len(tokens)):
            before = int(kv[table].flatten()[:at].sum())
            kv[table[at // BLOCK], at % BLOCK] = (tokens[at] * 31 + at + before * 17) % 10_007
    return [int(kv[table].flatten()[len(tokens) - 1]) % 997 for tokens, table, _ in work]


class Turn:
    """A prompt, and its answer so far. Its client disconnects after `patience` tokens of the answer."""

    def __init__(self, number: int, patience: int = 99) -> None:
        self.number, self.patience, self.request = number, patience, None  # the lower, the older
        self.prompt = [number % 4 + 5] * 6 + [number]
        self.tokens, self.stop, self.has_left = [*self.prompt], len(self.prompt) + NUM_NEW, anyio.Event()

    def is_right(self) -> bool:
        """Whether the answer so far equals that of a run without a cache."""
        tokens, kv = self.prompt, torch.zeros(NUM_ROWS, BLOCK, dtype=torch.int64)
        while len(tokens) < len(self.tokens):
            tokens = [*tokens, *forward(kv, [(tokens, [*range(NUM_ROWS)], 0)])]
        return tokens == self.tokens


class Engine:
    def __init__(self, runtime: OffloadRuntime, kv: torch.Tensor, group: anyio.abc.TaskGroup) -> None:
        self.runtime, self.kv, self.group, self.counts = runtime, kv, group, Counter[str]()
        # The turns that the loop computes, oldest first. Requests that wait for blocks are not in it.
        self.batch, self.has_joined = list[Turn](), anyio.Event()

    async def serve(self, turn: Turn) -> None:
        with suppress(OutOfBlocks):  # it never fits, because copies in doubt still hold blocks
            async with self.runtime.request(turn.tokens, f"r{turn.number}") as turn.request:
                await turn.request.allocate()
                await turn.request.load()
                while len(turn.tokens) < turn.stop:
                    await self.have_room(turn)
                    await self.be_computed(turn)
        self.counts[turn.request.reason] += 1

    async def have_room(self, turn: Turn) -> None:
        """Get blocks for all its tokens. If there are too few, preempt the youngest of the batch and this one."""
        request, num_tokens = turn.request, len(turn.tokens)
        while True:
            if request.state is RequestState.PREEMPTED:
                num_ready = await request.resume(num_tokens)
                self.counts["loaded"] += num_ready - request.match.num_device_tokens
            with suppress(OutOfBlocks):
                request.extend_nowait(num_tokens)
                return
            self.counts["preempted"] += 1
            if self.batch and self.batch[-1].number > turn.number:
                self.group.start_soon(self.preempt, self.batch.pop())
                with suppress(OutOfBlocks):  # waiting requests hold all blocks: the youngest, this one, gives way
                    await request.extend(num_tokens)  # queued before the victim has freed its blocks
                    return
            await request.preempt()

    async def preempt(self, victim: Turn) -> None:
        await victim.request.preempt()  # waits for the step that it is in; frees nothing if it has ended by then
        victim.has_left.set()

    async def be_computed(self, turn: Turn) -> None:
        """Stay in the batch until it is done, needs blocks, or is preempted."""
        self.batch = sorted([*self.batch, turn], key=lambda one: one.number)
        turn.has_left = anyio.Event()
        self.has_joined.set()
        try:
            await turn.has_left.wait()
        finally:  # its client may have disconnected
            self.batch = [one for one in self.batch if one is not turn]

    async def loop(self) -> None:
        while True:
            self.has_joined = anyio.Event()
            for turn in [turn for turn in self.batch if not self.goes_on(turn)]:
                self.batch.remove(turn)
                turn.has_left.set()
            await (self.step([*self.batch]) if self.batch else self.has_joined.wait())

    def goes_on(self, turn: Turn) -> bool:
        with suppress(OutOfBlocks):
            if len(turn.tokens) < turn.stop:
                turn.request.extend_nowait(len(turn.tokens))
                return True
        return False

    async def step(self, batch: list[Turn]) -> None:
        """One forward for all of them, in a thread. Requests that have ended meanwhile are left out."""
        work = [(turn.tokens, turn.request.block_ids[0], turn.request.num_computed_tokens) for turn in batch]
        sampled = await self.runtime.run_step([turn.request for turn in batch], partial(forward, self.kv, work))
        computed = [Computed(turn.request, len(turn.tokens), [new]) for turn, new in zip(batch, sampled, strict=True)]
        gone = self.runtime.commit_step(computed)  # at once: no await, so no request can be preempted in between
        self.counts["together"] = max(self.counts["together"], len(batch))
        for turn, new in zip(batch, sampled, strict=True):
            if turn.request not in gone:
                turn.tokens.append(new)
                if len(turn.tokens) == len(turn.prompt) + turn.patience:
                    turn.request.cancel("client_gone")  # like a connection handler, in any task


async def main(**options) -> Engine:
    kv, turns = torch.zeros(NUM_ROWS, BLOCK, dtype=torch.int64), [Turn(n, 5 if n in (3, 7) else 99) for n in range(12)]
    config = OffloadConfig(groups=[KVCacheGroup("full", block_size=BLOCK)], num_host_blocks=64)
    async with OffloadRuntime(config, kv, **options) as runtime, anyio.create_task_group() as group:
        engine = Engine(runtime, kv, group)
        group.start_soon(engine.loop)
        async with anyio.create_task_group() as clients:
            for turn in turns:
                clients.start_soon(engine.serve, turn)
        await runtime.flush()
        num_pinned, n = runtime.statistics().device.num_pinned, engine.counts
        group.cancel_scope.cancel()
    answered, right = sum(len(t.tokens) == t.stop for t in turns), sum(t.is_right() for t in turns)
    print(f"12 requests: {answered} answered, {n['client_gone']} hung up on; as if each had the device alone: {right}")
    several, preempted, loaded = n["together"] > 1, n["preempted"] > 0, n["loaded"] > 0
    print(f"several in one step: {several}; some were preempted: {preempted}; some were loaded: {loaded}")
    print(f"left on the device: {num_pinned} blocks")
    return engine


if __name__ == "__main__":
    anyio.run(main)
