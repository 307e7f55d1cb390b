"""KV cache groups: layers that share a block table and an attention kind."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Protocol

import attrs

from ..errors import ConfigError

__all__ = ["AttentionKind", "ChunkedLocal", "FullAttention", "KVCacheGroup", "Layout", "SlidingWindow"]

MAX_BLOCK_SIZE = 65_536
MAX_UNIT_TOKENS = 2**20


class AttentionKind(Protocol):
    """Which of the blocks before a position attention still reads."""

    def required_blocks(self, hit_end: int, block_size: int) -> range:
        """The block positions that must be present for computing to go on at token `hit_end`."""
        ...


@attrs.frozen
class FullAttention:
    """Every token reads every token before it."""

    def required_blocks(self, hit_end: int, block_size: int) -> range:
        return range(hit_end // block_size)


def _positive(_: object, attribute: Any, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(attribute.name, f"must be a positive integer, got {value!r}")


@attrs.frozen
class SlidingWindow:
    """Every token reads itself and the `window - 1` tokens before it."""

    window: int = attrs.field(validator=_positive)

    def required_blocks(self, hit_end: int, block_size: int) -> range:
        return range(max(0, hit_end - self.window + 1) // block_size, hit_end // block_size)


@attrs.frozen
class ChunkedLocal:
    """Every token reads the tokens from the start of its own `chunk` on."""

    chunk: int = attrs.field(validator=_positive)

    def required_blocks(self, hit_end: int, block_size: int) -> range:
        return range((hit_end - hit_end % self.chunk) // block_size, hit_end // block_size)


@attrs.frozen
class KVCacheGroup:
    """`block_size` tokens of this group make a block."""

    name: str = attrs.field()
    attention: AttentionKind = attrs.field(factory=FullAttention)
    block_size: int = attrs.field(default=16)

    @name.validator
    def _check_name(self, _: object, value: object) -> None:
        if not isinstance(value, str) or not value:
            raise ConfigError("groups.name", f"must be a non-empty string, got {value!r}")

    @attention.validator
    def _check_attention(self, _: object, value: object) -> None:
        if not isinstance(value, FullAttention):
            raise ConfigError("groups.attention", f"must be FullAttention() so far, got {value!r}")

    @block_size.validator
    def _check_block_size(self, _: object, value: object) -> None:
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MAX_BLOCK_SIZE:
            raise ConfigError("groups.block_size", f"must be an integer in [1, {MAX_BLOCK_SIZE}], got {value!r}")


@attrs.frozen
class Layout:
    """How the groups share the index.

    The index counts in units of `unit_tokens`, the least common multiple of the block sizes, so that a hit is one for
    every group at once. The blocks of a unit lie together: `width` ids, group after group. With one group a unit is
    a block.
    """

    groups: tuple[KVCacheGroup, ...]
    unit_tokens: int
    width: int

    @classmethod
    def of(cls, groups: Sequence[KVCacheGroup]) -> Layout:
        unit = math.lcm(*(group.block_size for group in groups))
        if unit > MAX_UNIT_TOKENS:
            raise ConfigError("groups", f"no hit is shorter than {unit} tokens, which all block sizes have to divide")
        return cls(tuple(groups), unit, sum(unit // group.block_size for group in groups))

    def num_units(self, num_tokens: int) -> int:
        """Units it takes to hold `num_tokens`."""
        return -(-num_tokens // self.unit_tokens)

    def split_ids(self, flat: Sequence[int]) -> list[list[int]]:
        """The ids of whole units, as one list per group."""
        if len(self.groups) == 1:
            return [list(flat)]
        tables: list[list[int]] = []
        offset = 0
        for group in self.groups:
            per_unit = self.unit_tokens // group.block_size
            tables.append([flat[at + offset + i] for at in range(0, len(flat), self.width) for i in range(per_unit)])
            offset += per_unit
        return tables
