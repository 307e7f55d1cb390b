"""A store policy that stores prompts of named tenants at once, others at their second use, and short prompts never.

Prints:
    host hits after one use:  {'gold': 48, 'free': 0, 'short': 0}
    host hits after two uses: {'gold': 48, 'free': 48, 'short': 0}
"""

from collections.abc import Collection

import anyio
import torch

from aoffload import EagerStore, KVCacheGroup, OffloadConfig, OffloadRuntime, SelectiveStore, Tier
from aoffload.ledger import Layout, LedgerRequest, StorePolicy


class TenantStore(EagerStore):
    def __init__(self, tenants: Collection[str], min_tokens: int) -> None:
        self.tenants, self.min_tokens = tenants, min_tokens
        self.others: StorePolicy = SelectiveStore(min_seen=2)  # counts how often each prefix was requested

    def for_ledger(self, layout: Layout, num_device_blocks: int) -> StorePolicy:
        """A policy for one runtime, because it counts the requests of that runtime."""
        policy = type(self)(self.tenants, self.min_tokens)
        policy.others = self.others.for_ledger(layout, num_device_blocks)
        return policy

    def seen(self, request: LedgerRequest, first: int, stop: int) -> None:
        self.others.seen(request, first, stop)

    def wanted_stop(self, request: LedgerRequest) -> int:
        if request.sequence.num_tokens < self.min_tokens:
            return 0
        if request.sequence.root.cache_salt in self.tenants:
            return request.published
        return self.others.wanted_stop(request)


PROMPTS = {"gold": [1] * 60, "free": [2] * 60, "short": [3] * 20}  # by cache salt


async def main() -> None:
    policy = TenantStore({"gold", "short"}, min_tokens=32)
    config = OffloadConfig(groups=[KVCacheGroup("full", block_size=16)], num_host_blocks=64, store_policy=policy)
    async with OffloadRuntime(config, torch.zeros(9, 2, 16, 64)) as runtime:
        for uses in ("after one use: ", "after two uses:"):
            for salt, tokens in PROMPTS.items():
                async with runtime.request(tokens, cache_salt=salt) as request:
                    await request.allocate()
                    request.commit(await request.load() or len(tokens))
            await runtime.reset(Tier.DEVICE)  # returns after the stores have ended
            hits = {salt: runtime.lookup(tokens, cache_salt=salt).num_host_tokens for salt, tokens in PROMPTS.items()}
            print(f"host hits {uses} {hits}")


if __name__ == "__main__":
    anyio.run(main)
