"""What the index takes for granted of an attention kind, tried out before a group of that kind is accepted.

Every token writes KV of its own, into the block at its place, and later tokens read it. So:

1. What computing at a token needs ends with the last whole block before it, without a gap: `commit` publishes every
   block that was computed into, and a run holds one stretch of a band.
2. A block is needed if, and only if, one of its tokens is read. Asked for blocks of one token, a kind says which those
   are. Bands count in units of the least common multiple of block sizes, and round to them.
3. What is read never begins further back for a later token. `slide` gives back what lies before, and a match that lacks
   a block looks for its end no further on.
4. Nothing is read at a free end, and something is at every token between that and the one asked for: where a match goes
   on looking.

A recurrent state breaks the second rule. Its block stands for all tokens before it, is needed although none of its own
tokens is read, and only the state that a forward ended with was ever written, while `commit` publishes all blocks.
"""

from __future__ import annotations

from typing import Protocol

from ..errors import ConfigError

__all__ = ["AttentionKind", "check_kind"]

EACH_TOKEN = 40
"""So many of the first tokens are all tried."""


class AttentionKind(Protocol):
    """Which of the blocks before a position attention still reads.

    Every token has KV of its own, in the block at its place: a block is needed if one of its tokens is read, and what
    is read never begins further back for a later token. `KVCacheGroup` refuses kinds that answer otherwise
    (the rules stand above), a recurrent state among them. Kinds are compared with `==`: groups of equal kinds
    form one band.
    """

    def required_blocks(self, hit_end: int, block_size: int) -> range:
        """The block positions that must be present for computing to go on at token `hit_end`: up to the block before
        it, without a gap."""
        ...

    def free_end(self, hit_end: int) -> int:
        """The last token, at most `hit_end`, at which nothing that lies before it is needed."""
        ...


def check_kind(group: str, kind: AttentionKind, block_size: int) -> None:
    """`ConfigError` naming `group` unless the answers of `kind` keep the rules, at each token of a grid."""
    try:
        problem = _problem(kind, block_size)
    except Exception as error:
        raise _refusal(group, kind, f"cannot say what it needs: {type(error).__name__}: {error}") from error
    if problem:
        raise _refusal(group, kind, problem)


def _refusal(group: str, kind: AttentionKind, problem: str) -> ConfigError:
    return ConfigError("groups.attention", f"of group {group!r}, {type(kind).__name__}, {problem:.200}")


def _problem(kind: AttentionKind, block_size: int) -> str:
    first_before = free_before = 0
    for token in _grid(block_size):
        read = kind.required_blocks(token, 1)
        if not _is_stretch(read, token):
            return f"must require all blocks of 1 token from some on up to {token} at token {token}, not {read!r:.80}"
        first = read.start
        if first < first_before:
            return f"reads token {first} at token {token}, and nothing before {first_before} at an earlier one"
        found = read if block_size == 1 else kind.required_blocks(token, block_size)
        if not _is_stretch(found, token // block_size) or found.start != first // block_size:
            wanted = range(first // block_size, token // block_size)
            return (
                f"must require the blocks of {block_size} tokens in which it reads a token, {wanted} at token {token}, "
                f"not {found!r:.80}: a recurrent state is not supported"
            )
        if first == token:
            free_before = token
        free = kind.free_end(token)
        if type(free) is not int or not free_before <= free <= token or (free and _reads(kind, free)):
            return (
                f"must say as `free_end` of {token} the last token at which nothing before it is read, not {free!r:.80}"
            )
        first_before = first
    return ""


def _is_stretch(found: object, stop: int) -> bool:
    """Whether it ends at `stop`, and is written as such also where it is empty."""
    return type(found) is range and found.step == 1 and found.stop == stop and 0 <= found.start <= stop


def _reads(kind: AttentionKind, token: int) -> bool:
    return len(kind.required_blocks(token, 1)) > 0


def _grid(block_size: int) -> list[int]:
    """Every token of the first blocks, and those around the ends of later ones, as far apart as windows are wide."""
    ends = [2**exponent for exponent in range(5, 31, 2)]
    ends += [end // block_size * block_size for end in ends]
    ends += [block_size * number for number in range(1, 5)]
    around = (token for end in ends for token in (end - 1, end, end + 1))
    return sorted({*range(EACH_TOKEN), *around} - {-1})
