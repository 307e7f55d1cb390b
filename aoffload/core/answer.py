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
    """How many leading tokens of a prompt are cached: on the device, behind those in host memory, then on the disk."""

    num_device_tokens: int
    num_host_tokens: int
    is_pending: bool = False
    num_disk_tokens: int = 0
    """Tokens behind those that a fetch from the disk would add. They are no part of the hit."""

    def __repr__(self) -> str:
        """Without a disk, `num_disk_tokens` and `is_pending` keep their defaults, so the text leaves them out."""
        also = f", num_disk_tokens={self.num_disk_tokens}" if self.num_disk_tokens else ""
        also += ", is_pending=True" if self.is_pending else ""
        return f"PrefixMatch(num_device_tokens={self.num_device_tokens}, num_host_tokens={self.num_host_tokens}{also})"

    @property
    def num_tokens(self) -> int:
        return self.num_device_tokens + self.num_host_tokens

    @property
    def answer(self) -> Answer:
        if self.is_pending:
            return Answer.PENDING
        return Answer.HIT if self.num_tokens else Answer.MISS


NO_MATCH = PrefixMatch(0, 0)
