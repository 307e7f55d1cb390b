"""A ledger whose two pools are full of cached prompts, and one request through it: hit, load or miss.

Each prompt is a run of its own. All need the same number of device blocks, so that each new one evicts exactly one. The
prompts were cached in one order and take turns in another: neighbours in time are no neighbours in memory, as after
hours of traffic.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Sequence

import numpy as np

from aoffload import KVCacheGroup, Ledger, OffloadConfig, PrefixMatch, Tier
from aoffload.ledger import Completion, Outcome, Prefix, TransferPlan

from .cycle import BLOCK_SIZE, ROOT, Tokens
from .harness import SAMPLE_S, Sample, timed

__all__ = ["ONE_GROUP", "RUN_BLOCKS", "FullPools", "ledger_of", "prompt_of", "serve"]

ONE_GROUP = (KVCacheGroup("full", block_size=BLOCK_SIZE),)
RUN_BLOCKS = 16


def ledger_of(num_device: int, num_host: int, groups: Sequence[KVCacheGroup] = ONE_GROUP) -> Ledger:
    """A ledger with the given numbers of usable blocks in the tiers."""
    return Ledger(OffloadConfig(groups=groups, num_host_blocks=num_host), num_device + 1)


def prompt_of(number: int, template: Tokens) -> Tokens:
    """`template` itself, changed to prompt `number` until the next call. It differs from all others from its first
    block on. No copy is made, because the ledger makes one, and a second copy would be timed as well."""
    template[0] = number
    return template


def land(ledger: Ledger, plans: Iterable[TransferPlan]) -> None:
    for plan in plans:
        ledger.launch(plan.job_id)
        ledger.settle(Completion(plan.job_id, Outcome.LANDED))


def serve(ledger: Ledger, tokens: Tokens) -> PrefixMatch:
    """Serve one request from its token ids to its release, every copy landed at once. Returns its match."""
    request = ledger.admit(Prefix.of(ROOT, tokens))
    ledger.allocate_nowait(request)
    land(ledger, ledger.plan_load(request))
    land(ledger, ledger.commit(request, len(tokens)))
    land(ledger, ledger.release(request))
    return request.match


class FullPools:
    """The device holds `num_prompts` prompts of `num_blocks` blocks. The host holds those and `num_more` more."""

    def __init__(
        self,
        num_prompts: int,
        num_blocks: int = RUN_BLOCKS,
        groups: Sequence[KVCacheGroup] = ONE_GROUP,
        *,
        num_more: int = 1,
    ) -> None:
        generator = np.random.default_rng(0)
        self._hit_tokens = num_blocks * BLOCK_SIZE
        self._template: Tokens = generator.integers(0, 100_000, self._hit_tokens + 1, dtype=np.int32)
        width = num_blocks * len(groups)
        self.ledger = ledger_of(num_prompts * width + len(groups), (num_prompts + num_more) * width, groups)
        cached = num_prompts + num_more
        for number in range(cached):
            serve(self.ledger, prompt_of(number, self._template))
        self.ledger.reset(Tier.DEVICE)
        self._order: deque[int] = deque(generator.permutation(cached).tolist())
        """Numbers of the cached prompts, in eviction order. The first one is not on the device."""
        self._unused = itertools.count(cached)
        for _ in range(cached):
            self._load()

    def park(self, number: int) -> None:
        """Leave `number` requests in flight that have computed their prompts. Each replaces a cached one."""
        template = self._template[: self._hit_tokens - BLOCK_SIZE + 1]
        for _ in range(number):
            tokens = prompt_of(next(self._unused), template)
            request = self.ledger.admit(Prefix.of(ROOT, tokens), store="none")
            self.ledger.allocate_nowait(request)
            self.ledger.commit(request, len(tokens))

    def device_hit(self) -> Sample:
        """Requests whose whole prefix hits on the device."""
        return timed(self._hit, SAMPLE_S)

    def host_hit(self) -> Sample:
        """Requests whose whole prefix hits in the host. Each evicts another prompt from the device."""
        return timed(self._load, SAMPLE_S)

    def miss(self) -> Sample:
        """Requests without a hit. Each evicts another prompt from the device and one from the host."""
        return timed(self._compute, SAMPLE_S)

    def _hit(self) -> None:
        match = serve(self.ledger, prompt_of(self._order[-1], self._template))
        assert match.num_device_tokens == self._hit_tokens, match

    def _load(self) -> None:
        number = self._order.popleft()
        match = serve(self.ledger, prompt_of(number, self._template))
        assert match.num_host_tokens == self._hit_tokens, match
        self._order.append(number)

    def _compute(self) -> None:
        self._order.popleft()
        number = next(self._unused)
        match = serve(self.ledger, prompt_of(number, self._template))
        assert not match.num_tokens, match
        self._order.append(number)
