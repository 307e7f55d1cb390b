"""Groups of layers, and how far back each of them reads.

A group is a set of layers that share a block table. Its attention kind answers which blocks before a position are still
read; everything else follows from that. Every token writes its own KV, into the block at its position, and later tokens
read it. An attention kind must keep four rules, which are checked before a group of that kind is accepted:

1. The blocks needed at a token are contiguous and end with the last whole block before it, because `commit` publishes
   every block that was computed into, and a run holds one stretch of a component.
2. A block is needed if and only if one of its tokens is read. With a block size of 1 a kind answers which tokens these
   are. Components round to units, the least common multiple of block sizes.
3. A later token never reads further back, because `slide` gives back the blocks before, and a match that lacks a block
   tries only earlier ends.
4. `free_end` is the last token, up to the given one, at which nothing is read. A match that lacks a block may end
   there.

**A recurrent state** (`RecurrentState`) is no attention kind of this sort, because it belongs to no token. It
summarises all tokens before a position, and a forward overwrites it with that of the next position. So a state is
cached as a *checkpoint*: a copy of the state at one position, in `num_rows` blocks of the pool. A hit needs one
checkpoint, that of its last token, in place of a range of blocks. `commit` publishes only the checkpoints that its
caller names.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Protocol

import attrs

from .._common.arguments import check_has, check_int, shown
from ..errors import ConfigError

EACH_TOKEN = 40
"""The rules are checked at each of the first tokens, up to this number."""


class AttentionKind(Protocol):
    """Answers which blocks before a position attention still reads.

    Every token has its own KV, in the block at its position. A block is needed if one of its tokens is read, and a
    later token never reads further back. `KVCacheGroup` refuses kinds that break these rules; all rules are in the
    docstring of this module. Only `RecurrentState` is exempt. Groups whose kinds are equal (`==`) form one component.
    """

    def required_blocks(self, hit_end: int, block_size: int) -> range:
        """The block positions needed to continue computing at token `hit_end`: contiguous, up to the last whole block
        before it."""
        ...

    def free_end(self, hit_end: int) -> int:
        """The last token up to `hit_end` at which no earlier block is needed."""
        ...


def check_kind(group: str, kind: AttentionKind, block_size: int) -> None:
    """Raise a `ConfigError` naming `group` if `kind` breaks a rule at one token of a grid."""
    try:
        problem = _problem(kind, block_size)
    except Exception as error:
        raise _refusal(group, kind, f"raised {type(error).__name__}: {error}") from error
    if problem:
        raise _refusal(group, kind, problem)


def _refusal(group: str, kind: AttentionKind, problem: str) -> ConfigError:
    return ConfigError("groups.attention", f"in group {group!r}, {type(kind).__name__} {problem:.200}")


def _problem(kind: AttentionKind, block_size: int) -> str:
    first_before = free_before = 0
    for token in _grid(block_size):
        read = kind.required_blocks(token, 1)
        if not _is_stretch(read, token):
            return f"must return from required_blocks({token}, 1) a range that ends at {token}, not {read!r:.80}"
        first = read.start
        if first < first_before:
            return (
                f"requires token {first} at token {token}, but an earlier token requires nothing before {first_before}"
            )
        found = read if block_size == 1 else kind.required_blocks(token, block_size)
        if not _is_stretch(found, token // block_size) or found.start != first // block_size:
            wanted = range(first // block_size, token // block_size)
            return (
                f"must require the blocks of {block_size} tokens in which it reads a token, {wanted} at token {token}, "
                f"not {found!r:.80}; for a recurrent state, use RecurrentState()"
            )
        if first == token:
            free_before = token
        free = kind.free_end(token)
        if type(free) is not int or not free_before <= free <= token or (free and _reads(kind, free)):
            return f"must return from free_end({token}) the last token that needs no earlier block, not {free!r:.80}"
        first_before = first
    return ""


def _is_stretch(found: object, stop: int) -> bool:
    """Whether `found` is a range with step 1 that ends at `stop`, also if it is empty."""
    return type(found) is range and found.step == 1 and found.stop == stop and 0 <= found.start <= stop


def _reads(kind: AttentionKind, token: int) -> bool:
    return len(kind.required_blocks(token, 1)) > 0


def _grid(block_size: int) -> list[int]:
    """The first tokens, and the tokens around block ends and powers of two up to the widest windows."""
    ends = [2**exponent for exponent in range(5, 31, 2)]
    ends += [end // block_size * block_size for end in ends]
    ends += [block_size * number for number in range(1, 5)]
    around = (token for end in ends for token in (end - 1, end, end + 1))
    return sorted({*range(EACH_TOKEN), *around} - {-1})


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
class RecurrentState:
    """Layers with a recurrent state in place of KV (Mamba, gated delta nets, short convolutions).

    A hit at a token needs the checkpoint of that token, and nothing else of these layers. A checkpoint takes
    `KVCacheGroup.num_rows` blocks, and `KVCacheGroup.block_size` divides its position."""

    def required_blocks(self, hit_end: int, block_size: int) -> range:
        """The block that ends at token `hit_end`, where the checkpoint of `hit_end` belongs. Empty if no block ends
        there, because then there is no checkpoint."""
        last = hit_end // block_size
        return range(last if hit_end % block_size or not last else last - 1, last)

    def free_end(self, hit_end: int) -> int:
        return 0


MAX_HIT_TOKENS = 2**20
MAX_ROWS = 2**20


def shortest_hit(block_sizes: Iterable[int]) -> int:
    """The tokens of the shortest hit, the least common multiple of `block_sizes`, because a hit ends where a block of
    every group ends. `ConfigError` if it is so long that no prompt would hit."""
    shortest = math.lcm(*block_sizes)
    if shortest > MAX_HIT_TOKENS:
        raise ConfigError(
            "groups", f"allow no hit below {shortest} tokens, the least common multiple of the block sizes"
        )
    return shortest


@attrs.frozen
class KVCacheGroup:
    """Layers that share a block table and an attention kind; a block holds `block_size` tokens.

    With `RecurrentState`, a checkpoint takes `num_rows` blocks, and lies at a multiple of `block_size` tokens."""

    name: str = attrs.field()
    attention: AttentionKind = attrs.field(factory=FullAttention)
    block_size: int = attrs.field(default=16)
    num_rows: int = attrs.field(default=1, kw_only=True)

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

    @num_rows.validator
    def _check_num_rows(self, _: object, value: object) -> None:
        if check_int("groups.num_rows", value, 1, MAX_ROWS, ConfigError) > 1 and not self.is_recurrent:
            raise ConfigError("groups.num_rows", f"is {value} in group {self.name!r}, which has no RecurrentState()")

    @property
    def is_recurrent(self) -> bool:
        """Whether the layers have a recurrent state, so that the group has checkpoints in place of a block table."""
        return isinstance(self.attention, RecurrentState)

    def __attrs_post_init__(self) -> None:
        if not self.is_recurrent:
            check_kind(self.name, self.attention, self.block_size)
