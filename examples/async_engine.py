"""An asyncio engine with its own block pool and prefix cache. The runtime manages only host memory.

Each request is a task. It may be cancelled at any await, and is preempted when an older request needs its blocks.
Copies may fail, hang, or end without proof. The engine computes the tokens that a load does not bring. Its "model"
reads the KV of all earlier tokens, so one wrong byte changes the output. docs/engines.md has the rules.

Prints:
    22 requests: 18 answered, 4 hung up on
    like those of a run without blocks: 22 of 22
    some were preempted: True; some loaded from host memory: True
    free at the end: 40 of 40 blocks, 0 held by copies
"""

import asyncio
from collections import Counter
from collections.abc import Iterable

import torch

from aoffload import HostCacheRuntime, KVCacheGroup, OffloadConfig
from aoffload.host_cache import EngineRequest

BLOCK, NUM_ROWS, NUM_NEW, VOCABULARY = 4, 41, 12, 64  # row 0 of the tensor is the null block
torch.set_num_threads(1)  # more of them would only wait for each other, because the model is tiny


def forward(kv: torch.Tensor, table: list[int], tokens: list[int], first: int) -> int:
    """Compute `tokens[first:]`, each of which reads the KV of all before it. Returns the next token."""
    for at in range(first, len(tokens)):
        before = int(kv[table].flatten()[:at].sum())
        kv[table[at // BLOCK], at % BLOCK] = value = (tokens[at] * 7919 + at * 31 + before * 17 + 1) % 1_000_003
    return value // 7 % VOCABULARY


class Pool:
    """The engine's blocks, ref-counted. Free blocks keep their content, and hit, until they are reused."""

    def __init__(self) -> None:
        self.free, self.num_holders = dict.fromkeys(range(1, NUM_ROWS)), [0] * NUM_ROWS  # least recently freed first
        self.cached, self.keys, self.freed = dict[tuple, int](), dict[int, tuple](), asyncio.Event()

    def hold(self, block_ids: Iterable[int]) -> None:  # also called by the runtime, for blocks that a copy touches
        for block_id in block_ids:
            self.free.pop(block_id, None)
            self.num_holders[block_id] += 1

    def give(self, block_ids: Iterable[int]) -> None:  # also called by the runtime, when the copy has ended
        for block_id in block_ids:
            self.num_holders[block_id] -= 1
            if not self.num_holders[block_id]:
                self.free[block_id] = None
        self.freed.set()

    def take(self, num_blocks: int) -> list[int]:
        block_ids = list(self.free)[:num_blocks]
        for block_id in block_ids:
            self.cached.pop(self.keys.pop(block_id, ()), None)
        self.hold(block_ids)
        return block_ids

    async def wait(self) -> None:
        """Wait until blocks are freed."""
        self.freed.clear()
        await self.freed.wait()

    def cache(self, tokens: list[int], table: list[int]) -> None:
        for at in range(len(tokens) // BLOCK):
            key = tuple(tokens[: (at + 1) * BLOCK])
            if key not in self.cached and table[at] not in self.keys:
                self.cached[key], self.keys[table[at]] = table[at], key

    def hit(self, tokens: list[int]) -> list[int]:
        keys = (tuple(tokens[:stop]) for stop in range(BLOCK, len(tokens), BLOCK))
        block_ids = [self.cached.get(key, 0) for key in keys]
        block_ids = block_ids[: block_ids.index(0)] if 0 in block_ids else block_ids
        self.hold(block_ids)
        return block_ids


class Turn:
    """A prompt, and its answer so far. Its client disconnects after `patience` tokens of the answer."""

    def __init__(self, name: str, prompt: list[int], patience: int = 99) -> None:
        self.name, self.prompt, self.tokens, self.patience = name, prompt, prompt, patience
        self.stop, self.task = len(prompt) + NUM_NEW, None

    def is_right(self) -> bool:
        """Whether the answer so far equals that of a run without blocks, caches and copies."""
        tokens, kv = self.prompt, torch.zeros(NUM_ROWS, BLOCK, dtype=torch.int64)
        while len(tokens) < len(self.tokens):
            tokens = [*tokens, forward(kv, [*range(NUM_ROWS)], tokens, 0)]
        return tokens == self.tokens


class Engine:
    def __init__(self, runtime: HostCacheRuntime, kv: torch.Tensor, pool: Pool) -> None:
        self.runtime, self.kv, self.pool = runtime, kv, pool
        self.door, self.running, self.counts, self.num_short = asyncio.Lock(), list[EngineRequest](), Counter[str](), 0

    async def serve(self, turn: Turn) -> None:
        max_hit = None
        while len(turn.tokens) < turn.stop:  # once more after each preemption
            table, num_own = await self.room(turn.tokens)
            has = {"num_device_tokens": num_own * BLOCK, "max_hit_tokens": max_hit}
            request = self.runtime.request(turn.tokens, turn.name, **has)
            self.running.append(request)
            try:
                async with request:  # swallows a cancellation by `runtime.cancel`; a native one passes through
                    await self.compute(request, turn, table)
            finally:
                self.running.remove(request)
                self.pool.give(reversed(table))  # evict a prefix from its end; blocks held by a copy are not free yet
            max_hit = request.retry_max_hit_tokens  # a copy that has failed is not repeated for ever
            self.counts[request.reason] += 1

    async def room(self, tokens: list[int]) -> tuple[list[int], int]:
        """Blocks for `tokens` and one more, and how many of them hit. A request that waits here holds nothing."""
        num_blocks = len(tokens) // BLOCK + 1
        async with self.door:  # first come, first served
            while self.num_short or len(self.pool.free) < num_blocks:  # blocks of preempted requests go to others first
                await self.pool.wait()
            found = self.pool.hit(tokens)
            return found + self.pool.take(num_blocks - len(found)), len(found)

    async def more(self, num_blocks: int) -> list[int]:
        """Take blocks. If necessary, preempt the youngest request, which may be the caller."""
        self.num_short += 1
        try:
            while len(self.pool.free) < num_blocks:
                self.runtime.cancel(self.running[-1].request_id, "preempted")
                await self.pool.wait()
            return self.pool.take(num_blocks)
        finally:
            self.num_short -= 1
            self.pool.freed.set()  # the request at the door checks again

    async def compute(self, request: EngineRequest, turn: Turn, table: list[int]) -> None:
        while request.match.is_pending:  # another request loads the next block: soon it hits in the pool
            self.counts["pending"] += 1
            found = self.pool.hit(turn.tokens)
            table[: len(found)], unneeded = found, table[: len(found)]
            self.pool.give(unneeded)
            await request.match_again(num_device_tokens=len(found) * BLOCK)
        await request.fetch()  # fetch blocks that only a disk or a remote store has; the hit may grow
        num_computed = await request.load(into=[table])  # never raises for a failed copy
        self.counts["loaded"] += num_computed - request.match.num_device_tokens
        if num_computed < request.match.num_tokens:  # a copy may still write to the other blocks: replace them
            kept = num_computed // BLOCK
            fresh = await self.more(len(table) - kept)
            table[kept:], doubtful = fresh, table[kept:]
            self.pool.give(doubtful)
        while len(turn.tokens) < turn.stop:
            table += await self.more(len(turn.tokens) // BLOCK + 1 - len(table))
            token = await self.forward(table, turn.tokens, num_computed)
            num_computed, turn.tokens = len(turn.tokens), [*turn.tokens, token]
            request.offer(num_computed, [table], [token], is_last=len(turn.tokens) == turn.stop)
            self.pool.cache(turn.tokens[:num_computed], table)
            if len(turn.tokens) == len(turn.prompt) + turn.patience:
                turn.task.cancel()  # natively, like a connection handler, in any task of the loop

    async def forward(self, table: list[int], tokens: list[int], first: int) -> int:
        """Run in a thread with its own references: after a cancellation, the thread continues to write."""
        held = list(table)
        self.pool.hold(held)
        computing = asyncio.ensure_future(asyncio.to_thread(forward, self.kv, held, tokens, first))
        computing.add_done_callback(lambda _: self.pool.give(held))
        return await asyncio.shield(computing)


async def main(**tiers) -> Engine:
    kv, pool = torch.zeros(NUM_ROWS, BLOCK, dtype=torch.int64), Pool()
    config = OffloadConfig(groups=[KVCacheGroup("full", block_size=BLOCK)], num_host_blocks=400, **tiers)
    turns, done, outcomes = [Turn(f"r{n}", [n % 3] * 9 + [n]) for n in range(11)], [], []
    async with HostCacheRuntime(config, kv, engine_blocks=pool) as runtime:
        if config.disk is not None:
            await runtime.disk.wait_restored()  # blocks that an earlier process has left
        engine = Engine(runtime, kv, pool)
        for question in ([7] * 5, [8] * 6):
            turns = [Turn(t.name, t.tokens + question, 5 if n in (4, 8) else 99) for n, t in enumerate(turns)]
            for turn in turns:
                turn.task = asyncio.create_task(engine.serve(turn))
            outcomes += await asyncio.gather(*(turn.task for turn in turns), return_exceptions=True)
            done += turns
        await runtime.flush()
        num_held = runtime.statistics().device.num_blocks
    num_left = sum(isinstance(outcome, asyncio.CancelledError) for outcome in outcomes)
    print(f"{len(done)} requests: {outcomes.count(None)} answered, {num_left} hung up on")
    print(f"like those of a run without blocks: {sum(turn.is_right() for turn in done)} of {len(done)}")
    n = engine.counts
    print(f"some were preempted: {n['preempted'] > 0}; some loaded from host memory: {n['loaded'] > 0}")
    print(f"free at the end: {len(pool.free)} of {NUM_ROWS - 1} blocks, {num_held} held by copies")
    return engine


if __name__ == "__main__":
    asyncio.run(main())
