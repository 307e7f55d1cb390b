"""A step loop with its own block pool and prefix cache. A `CopyQueue` makes the copies of its `HostCache`.

The pool has `find`, so a store that exceeds the limit of stores in flight is made in a later step. While no request can
compute, the loop waits until a copy ends, or until the first of its time limits.

Prints:
    a computes tokens 0 to 59
    b computes tokens 0 to 59
    c computes tokens 0 to 59
    a-again computes tokens 48 to 59
    4 outputs like those without a cache: True
    3 blocks loaded; at the end: 5 of 5 blocks free, 0 host blocks pinned
"""

import threading
from collections import Counter
from time import monotonic

import torch

from aoffload import HostCache, KVCacheGroup, OffloadConfig, RequestState
from aoffload.ledger import CopyQueue, Prefix, Root
from aoffload.transport import Env, LocalTransport

BLOCK = 16


def kv_of(token: int, before: torch.Tensor) -> int:
    return (token * 7919 + int(before.sum()) * 31 + len(before)) % 1_000_003


def output(tokens: range) -> int:
    kv = torch.zeros(len(tokens), dtype=torch.int64)
    for at, token in enumerate(tokens):
        kv[at] = kv_of(token, kv[:at])
    return int(kv.sum())


class Pool:
    """Ref-counted blocks. A free block keeps its content, and can be found, until it is reused."""

    def __init__(self, num_rows: int) -> None:
        self.free, self.references = dict.fromkeys(range(1, num_rows)), Counter()  # least recently freed first
        self.cached, self.keys = dict[tuple[int, ...], int](), dict[int, tuple[int, ...]]()
        self.tokens = dict[str, range]()  # of each request

    def hold(self, block_ids: list[int]) -> None:
        for block_id in block_ids:
            self.free.pop(block_id, None)  # `find` may have returned a free block
            self.references[block_id] += 1

    def give(self, block_ids: list[int]) -> None:
        for block_id in block_ids:
            self.references[block_id] -= 1
            if not self.references[block_id]:
                self.free[block_id] = None

    def take(self, num_blocks: int) -> list[int]:
        block_ids = list(self.free)[:num_blocks]
        for block_id in block_ids:
            self.cached.pop(self.keys.pop(block_id, ()), None)
        self.hold(block_ids)
        return block_ids

    def cache(self, tokens: range, table: list[int]) -> None:
        for at in range(len(tokens) // BLOCK):
            key = tuple(tokens[: (at + 1) * BLOCK])
            if key not in self.cached and table[at] not in self.keys:
                self.cached[key], self.keys[table[at]] = table[at], key

    def find(self, request_id: str, group: int, start: int, stop: int) -> list[int]:
        tokens = self.tokens[request_id]
        return [self.cached.get(tuple(tokens[: (at + 1) * BLOCK]), 0) for at in range(start, stop)]

    def hit(self, tokens: range) -> list[int]:
        table = list[int]()
        while len(table) < (len(tokens) - 1) // BLOCK:
            block_id = self.cached.get(tuple(tokens[: (len(table) + 1) * BLOCK]))
            if block_id is None:
                break
            table.append(block_id)
        return table


class Engine:
    def __init__(self, kv: torch.Tensor, transport: LocalTransport, **options: object) -> None:
        config = OffloadConfig(groups=[KVCacheGroup("full", block_size=BLOCK)], num_host_blocks=64, **options)
        sizes, self.kv, self.config, self.transport = {"block_bytes": transport.block_bytes}, kv, config, transport
        self.pool, self.woken = Pool(len(kv)), threading.Event()  # the event is set by the copy threads
        self.cache = HostCache(config, len(kv), engine_blocks=self.pool, clock=monotonic, **sizes)
        self.copies = CopyQueue(self.cache, transport, config, clock=monotonic, wake=self.woken.set, **sizes)
        transport.open(config.num_host_blocks, verify=config.verify, deliver=self.copies.deliver, env=Env())
        self.waiting, self.running, self.outputs = dict[str, object](), dict[str, tuple](), dict[str, int]()

    def step(self) -> None:
        self.woken.clear()
        self.copies.advance()  # settle ended copies, give up late ones, launch waiting ones
        self.copies.submit(self.cache.offer_deferred(), self.transport.record_fence())
        for name in tuple(self.waiting):
            if not self.start(name):
                break
        ready = [name for name in self.running if self.is_ready(name)]
        for name in ready:
            self.forward(name, *self.running.pop(name))
        if not ready and (self.waiting or self.running or self.copies.num_in_flight):
            self.woken.wait(max(0.0, min(self.next_deadline() - monotonic(), 3600)))

    def next_deadline(self) -> float:
        """When to step even if no copy ends: a copy is late, a match is no longer PENDING, or a load takes too long."""
        pending = [self.cache.pending_until(record) for record in self.waiting.values() if record]
        loads = [began + self.config.load_timeout_s for _, _, began in self.running.values()]
        return min([self.copies.next_deadline, *pending, *loads])

    def start(self, name: str) -> bool:
        tokens = self.pool.tokens[name]
        table = self.pool.hit(tokens)
        own = {"num_device_tokens": len(table) * BLOCK}
        record = self.waiting[name]
        if record is None:
            record = self.cache.admit(Prefix.of(Root("toy"), tokens), request_id=name, **own)
        match = self.cache.match_again(record, **own)  # in each step: the hit may have changed while it waited
        self.waiting[name] = record
        self.pool.hold(table)
        num_missing = -(-len(tokens) // BLOCK) - len(table)
        if match.is_pending or len(self.pool.free) < num_missing:
            self.pool.give(table)
            return match.is_pending  # a request that lacks blocks keeps later ones waiting, a PENDING one does not
        del self.waiting[name]
        table += self.pool.take(num_missing)
        self.copies.submit(self.cache.plan_load(record, into=[table]))
        self.running[name] = record, table, monotonic()
        return True

    def is_ready(self, name: str) -> bool:
        record, table, began = self.running[name]
        if record.state is RequestState.LOADING and monotonic() >= began + self.config.load_timeout_s:
            self.cache.abandon_load(record)
        first = record.num_computed_tokens // BLOCK
        if record.state is not RequestState.RUNNING:
            return False
        if record.num_computed_tokens < record.match.num_tokens:  # a copy failed, and may still write: use other blocks
            if len(self.pool.free) < len(table) - first:
                return False
            late, table[first:] = table[first:], self.pool.take(len(table) - first)
            self.pool.give(late)
        return True

    def forward(self, name: str, record: object, table: list[int], _: float) -> None:
        tokens, rows = self.pool.tokens[name], torch.tensor(table)
        print(f"{name} computes tokens {record.num_computed_tokens} to {len(tokens) - 1}")
        for at in range(record.num_computed_tokens, len(tokens)):
            before = self.kv[rows].flatten()[:at]
            self.kv[table[at // BLOCK], at % BLOCK] = kv_of(tokens[at], before)
        self.outputs[name] = int(self.kv[rows].flatten()[: len(tokens)].sum())
        after = self.transport.record_fence()  # a store copies after the forward
        self.copies.submit(self.cache.offer(record, len(tokens), [table], is_last=True), after)
        self.cache.release(record)
        self.pool.cache(tokens, table)
        self.pool.give(table[::-1])  # reuse the end of a prefix before its start

    def run(self, prompts: dict[str, range]) -> bool:
        """Whether every prompt has the output of a run without a cache."""
        self.pool.tokens = prompts
        self.waiting = dict.fromkeys(prompts)
        while self.waiting or self.running or self.copies.num_in_flight:
            self.step()
        return self.outputs == {name: output(tokens) for name, tokens in prompts.items()}

    def close(self, timeout_s: float = 10.0) -> None:
        self.transport.close(timeout_s)  # waits for the copies in flight
        self.copies.stop("the engine has ended")  # settles them


if __name__ == "__main__":
    kv = torch.zeros(6, BLOCK, dtype=torch.int64)  # block 0 is the null block; the others fit one prompt of 60 tokens
    engine = Engine(kv, LocalTransport([kv]))
    prompts = {"a": range(60), "b": range(100, 160), "c": range(200, 260), "a-again": range(60)}
    print(f"{len(prompts)} outputs like those without a cache: {engine.run(prompts)}")
    engine.close()
    num_loaded, num_pinned = engine.transport.statistics().blocks_loaded, engine.cache.statistics().host.num_pinned
    free = f"{len(engine.pool.free)} of {len(kv) - 1} blocks free"
    print(f"{num_loaded} blocks loaded; at the end: {free}, {num_pinned} host blocks pinned")
