"""What a configuration says of a model: its groups of layers, and how far back each of them reads."""

from __future__ import annotations

import attrs

from .arguments import check_has, check_int, shown
from .errors import ConfigError
from .kinds import AttentionKind, check_kind

__all__ = ["ChunkedLocal", "FullAttention", "KVCacheGroup", "SlidingWindow"]

MAX_BLOCK_SIZE = 65_536
MAX_REACH = 2**31 - 1


def _reach(_: object, attribute: attrs.Attribute[int], value: object) -> None:
    if type(value) is not int or not 1 <= value <= MAX_REACH:
        raise ConfigError(attribute.name, f"must be a positive integer up to {MAX_REACH}, got {shown(value)}")


@attrs.frozen
class FullAttention:
    """Every token reads every token before it."""

    def required_blocks(self, hit_end: int, block_size: int) -> range:
        return range(hit_end // block_size)

    def free_end(self, hit_end: int) -> int:
        return 0


@attrs.frozen
class SlidingWindow:
    """A token reads itself and the `window - 1` tokens before it (Gemma, gpt-oss, Mistral)."""

    window: int = attrs.field(validator=_reach)

    def required_blocks(self, hit_end: int, block_size: int) -> range:
        return range(max(0, hit_end - self.window + 1) // block_size, hit_end // block_size)

    def free_end(self, hit_end: int) -> int:
        return hit_end if self.window == 1 else 0


@attrs.frozen
class ChunkedLocal:
    """A token reads itself and the tokens before it in its own chunk of `chunk` tokens (Llama 4)."""

    chunk: int = attrs.field(validator=_reach)

    def required_blocks(self, hit_end: int, block_size: int) -> range:
        return range(self.free_end(hit_end) // block_size, hit_end // block_size)

    def free_end(self, hit_end: int) -> int:
        return hit_end - hit_end % self.chunk


@attrs.frozen
class KVCacheGroup:
    """Layers that share a block table and an attention kind; a block holds `block_size` tokens."""

    name: str = attrs.field()
    attention: AttentionKind = attrs.field(factory=FullAttention)
    block_size: int = attrs.field(default=16)

    @name.validator
    def _check_name(self, _: object, value: object) -> None:
        if not isinstance(value, str) or not value:
            raise ConfigError("groups.name", f"must be a non-empty string, got {shown(value)}")

    @attention.validator
    def _check_attention(self, _: object, value: object) -> None:
        check_has("groups.attention", value, "kind such as FullAttention()", "required_blocks free_end", ConfigError)

    @block_size.validator
    def _check_block_size(self, _: object, value: object) -> None:
        check_int("groups.block_size", value, 1, MAX_BLOCK_SIZE, ConfigError)

    def __attrs_post_init__(self) -> None:
        check_kind(self.name, self.attention, self.block_size)
