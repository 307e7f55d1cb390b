"""The record of a request whose device blocks an engine owns."""

from __future__ import annotations

from typing import Any

from .._kernel.records import NO_LIMIT, LedgerRequest
from .._kernel.states import NoEpoch
from .._kernel.tokens import TokenSequence


class HostCacheRequest(LedgerRequest):
    """A request of a `HostCache`. It has no block tables and no device lease."""

    __slots__ = ("engine_tokens", "retry_max_hit_tokens", "stored_stop")

    def __init__(
        self, request_id: str, sequence: TokenSequence, epoch: int | NoEpoch, ticket: int, hit_limit: int,
        hit_alignment: int, *, ledger: Any, evictions_before: int = 0, store_limit: int = NO_LIMIT,
    ) -> None:  # fmt: skip
        super().__init__(
            request_id, sequence, epoch, ticket, hit_limit, hit_alignment, ledger=ledger,
            evictions_before=evictions_before, store_limit=store_limit,
        )  # fmt: skip
        self.engine_tokens = 0
        """Leading tokens in the engine's own prefix cache. The host match begins after them."""
        self.stored_stop = 0
        """Number of leading units that were in the host, or on their way there, after the last offer."""
        self.retry_max_hit_tokens: int | None = None
        """The `max_hit_tokens` for the next attempt at the same prompt, which is the end of a load that fell short.
        Without that limit, the same copy could fail at every attempt. None: no load fell short."""

    @property
    def given_tokens(self) -> int:
        return self.engine_tokens
