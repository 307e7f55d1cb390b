"""A ledger driven by hand over two memories whose blocks hold tags: which prefix's KV it is, or that it is wrong."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeAlias

from driving import Driven

from aoffload import Tier
from aoffload.ledger import LedgerRequest, Outcome, TransferPlan

__all__ = ["Tagged"]

Tag: TypeAlias = tuple[int, bytes] | str
NEVER_WRITTEN, WRONG = "never written", "wrong"


class Tagged(Driven):
    """Groups of equal block sizes. A copy moves tags; a forward that reads what is not right writes what is wrong."""

    def __init__(self, num_device: int, num_host: int = 64, **config: Any) -> None:
        super().__init__(num_device, num_host, **config)
        self.memory: dict[Tier, dict[int, Tag]] = {tier.tier: {} for tier in self.ledger.cache.tiers}

    def end(
        self, plan: TransferPlan, outcome: Outcome = Outcome.LANDED, num_landed: int = 0, corrupt: Any = ()
    ) -> None:
        if outcome is Outcome.LANDED:
            for source_id, destination_id in zip(plan.source_ids, plan.destination_ids, strict=True):
                tag = self.memory[plan.source].get(source_id, NEVER_WRITTEN)
                self.memory[plan.destination][destination_id] = tag
        super().end(plan, outcome, num_landed, corrupt)

    def serve(self, tokens: list[int], **options: Any) -> LedgerRequest:
        request = self.running(tokens, **options)
        self.compute(request, len(tokens))
        self.land(self.release(request))
        return request

    def compute(self, request: LedgerRequest, num_tokens: int, *, failed: bool = False) -> None:
        """A forward up to `num_tokens` in a step of its own, its commit, and the stores that come of it."""
        with self.ledger.step([request]):
            self._forward(request, num_tokens, is_wrong=failed or not self.reads_right(request))
        self.land(self.commit(request, num_tokens))

    def _forward(self, request: LedgerRequest, num_tokens: int, *, is_wrong: bool) -> None:
        units = range(*(n // self.ledger.layout.unit_tokens for n in (request.num_computed_tokens, num_tokens)))
        for group, table in enumerate(self.ledger.block_ids(request)):
            for unit in units:
                self.memory[Tier.DEVICE][table[unit]] = WRONG if is_wrong else self._right(request, group, unit)

    def reads_right(self, request: LedgerRequest) -> bool:
        """Whether all that attention reads before where `request` has come to is the KV of exactly its tokens."""
        return all(found == right for found, right in self._reads(request))

    def _reads(self, request: LedgerRequest) -> Iterator[tuple[Tag, Tag]]:
        tables, size = self.ledger.block_ids(request), self.ledger.layout.unit_tokens
        for number, group in enumerate(self.ledger.layout.groups):
            for unit in group.attention.required_blocks(request.num_computed_tokens, size):
                found = self.memory[Tier.DEVICE].get(tables[number][unit], NEVER_WRITTEN)
                yield found, self._right(request, number, unit)

    @staticmethod
    def _right(request: LedgerRequest, group: int, unit: int) -> Tag:
        return group, bytes(request.sequence.stretch(0, unit + 1))

    def assert_at_rest(self) -> None:
        """Nobody holds anything, and every block is free or cached."""
        self.ledger.check_integrity()
        statistics = self.ledger.statistics()
        assert (statistics.num_requests, statistics.num_waiting, statistics.num_jobs) == (0, 0, 0)
        for tier in (statistics.device, statistics.host):
            assert tier.num_free + tier.num_cached == tier.num_blocks, tier
