"""An extension that lets commits store at most `max_blocks` blocks of each cache salt in host memory.

Prints:
    blocks in host memory: {'alice': 4, 'bob': 3}, hits: [48, 16, 0, 48]
"""

from collections import Counter

import anyio
import torch

from aoffload import KVCacheGroup, OffloadConfig, OffloadRuntime, Tier
from aoffload.ledger import CoreLedger, LedgerExtension, LedgerRequest, Part


class StoreQuota(LedgerExtension):
    def __init__(self, max_blocks: int) -> None:
        self.max_blocks, self.num_blocks = max_blocks, Counter[object]()  # cached in host memory, by salt

    def on_attach(self, ledger: CoreLedger) -> None:
        self.index, self.jobs, self.width = ledger.cache.index, ledger.jobs, ledger.layout.width
        ledger.watch(self)

    def part_changed(self, part: Part, first: int, stop: int) -> None:
        """Called after each change of the cached blocks (see `BlockWatcher`)."""
        if part.tier is Tier.HOST:
            self.num_blocks[part.run.root.cache_salt] += (part.stop - part.first - (stop - first)) * part.width

    def all_cleared(self, epoch: int) -> None:
        self.num_blocks.clear()

    def ask_store_stop(self, request: LedgerRequest) -> int:
        """The unit up to which host memory holds the blocks of the request, or the quota allows more of them."""
        salt, jobs = request.sequence.root.cache_salt, self.jobs.unsettled.values()
        stores = [job for job in jobs if job.plan.destination is Tier.HOST and job.run.root.cache_salt == salt]
        in_flight = sum(len(job.plan.destination_ids) for job in stores)
        room, stop = max(0, self.max_blocks - self.num_blocks[salt] - in_flight) // self.width, 0
        for run, stop in self.index.walk(request.sequence, request.published):
            room -= max(0, stop - max(run.start, run.parts[Tier.HOST].stop))  # its last units may not be there
            if room < 0:
                break
        return stop + room


async def main() -> None:
    quota, kv_cache = StoreQuota(max_blocks=4), torch.zeros(9, 2, 16, 64)
    config = OffloadConfig(groups=[KVCacheGroup("full", block_size=16)], num_host_blocks=64)
    prompts = [(salt, [token] * 50) for salt, token in (("alice", 1), ("alice", 2), ("alice", 3), ("bob", 1))]
    async with OffloadRuntime(config, kv_cache, extensions=[quota]) as runtime:
        for salt, tokens in prompts:
            async with runtime.request(tokens, cache_salt=salt) as request:
                await request.allocate()
                request.commit(await request.load() or 50)
        await runtime.reset(Tier.DEVICE)  # returns after the stores have ended
        hits = [runtime.lookup(tokens, cache_salt=salt).num_host_tokens for salt, tokens in prompts]
        print(f"blocks in host memory: {dict(quota.num_blocks)}, hits: {hits}")


if __name__ == "__main__":
    anyio.run(main)
