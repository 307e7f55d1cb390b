"""A minimal engine with its own blocks. A `HostCache` manages host memory.

`finish_copies` makes the copies, and a variable stands for the engine's prefix cache. See docs/engines.md.

Prints:
    released: 6 blocks are still held by the store
    stored: 0 blocks are held
    first: 96 tokens in host memory; second: PENDING
    loaded: computing goes on at token 96
    second, asked again: 96 tokens on the device, 0 to load
"""

from collections import Counter, deque
from time import monotonic

import numpy as np

from aoffload import HostCache, KVCacheGroup, OffloadConfig, Tier
from aoffload.ledger import Completion, Outcome, Prefix, Root

BLOCK, NUM_ROWS, NUM_HOST_BLOCKS = 16, 40, 100
memory = {Tier.DEVICE: np.zeros((NUM_ROWS, BLOCK), int), Tier.HOST: np.zeros((NUM_HOST_BLOCKS, BLOCK), int)}


class Pool:
    """The engine's blocks, with a reference count each. A block without references is free."""

    def __init__(self):
        self.free, self.references = deque(range(1, NUM_ROWS)), Counter()

    def take(self, num_blocks):
        block_ids = [self.free.popleft() for _ in range(num_blocks)]
        self.hold(block_ids)
        return block_ids

    def hold(self, block_ids):
        self.references.update(block_ids)

    def give(self, block_ids):
        for block_id in block_ids:
            self.references[block_id] -= 1
            if not self.references[block_id]:
                self.free.append(block_id)


pool, under_way = Pool(), deque()
config = OffloadConfig(groups=[KVCacheGroup("full", block_size=BLOCK)], num_host_blocks=NUM_HOST_BLOCKS)
cache = HostCache(config, NUM_ROWS, engine_blocks=pool, clock=monotonic)


def launch(plans):
    under_way.extend(plan for plan in plans if cache.launch(plan.job_id))


def finish_copies():
    while under_way:
        plan = under_way.popleft()
        memory[plan.destination][plan.destination_ids] = memory[plan.source][plan.source_ids]
        cache.settle(Completion(plan.job_id, Outcome.LANDED, plan.num_blocks))


def forward(tokens, start, table):
    for at in range(start, len(tokens)):
        memory[Tier.DEVICE][table[at // BLOCK], at % BLOCK] = tokens[at]


tokens = range(100)
prompt = Prefix.of(Root("toy"), tokens)

# Nothing is cached: compute, offer, and leave while the store is in progress.
request = cache.admit(prompt, num_device_tokens=0)
table = pool.take(7)
forward(tokens, 0, table)
launch(cache.offer(request, 100, [table], is_last=True))
cache.release(request)
pool.give(table)
print(f"released: {39 - len(pool.free)} blocks are still held by the store")
finish_copies()
print(f"stored: {39 - len(pool.free)} blocks are held")

# Two requests for the same prompt: one loads, the other one is PENDING.
first = cache.admit(prompt, num_device_tokens=0)
table = pool.take(7)
launch(cache.plan_load(first, into=[table]))
second = cache.admit(prompt, num_device_tokens=0)
print(f"first: {first.match.num_host_tokens} tokens in host memory; second: {second.match.answer.name}")
finish_copies()
print(f"loaded: computing goes on at token {first.num_computed_tokens}")
forward(tokens, first.num_computed_tokens, table)
launch(cache.offer(first, 100, [table]))

# The engine's own prefix cache has these blocks now: the second request shares six of them.
again = cache.match_again(second, num_device_tokens=96)
print(f"second, asked again: {again.num_device_tokens} tokens on the device, {again.num_host_tokens} to load")
