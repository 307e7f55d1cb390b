"""What a match says: how many leading tokens of a prompt are cached, and where."""

from __future__ import annotations

import enum

import attrs

__all__ = ["NO_MATCH", "Answer", "PrefixMatch"]


class Answer(enum.Enum):
    HIT = "hit"
    MISS = "miss"
    PENDING = "pending"
    """Another request's load is bringing the next block: ask again."""


@attrs.frozen
class PrefixMatch:
    """How many leading tokens of a prompt are cached: on the device, and behind those in host memory."""

    num_device_tokens: int
    num_host_tokens: int
    is_pending: bool = attrs.field(default=False, repr=False)

    @property
    def num_tokens(self) -> int:
        return self.num_device_tokens + self.num_host_tokens

    @property
    def answer(self) -> Answer:
        if self.is_pending:
            return Answer.PENDING
        return Answer.HIT if self.num_tokens else Answer.MISS


NO_MATCH = PrefixMatch(0, 0)
