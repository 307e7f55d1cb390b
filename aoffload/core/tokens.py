"""The tokens of one request, as the index reads them: its prompt, then what it generated."""

from __future__ import annotations

from copy import copy
from typing import TYPE_CHECKING

import numpy as np

from ..prefix import TOKEN_BYTES, Hasher, KeySpan, Prefix, Root

if TYPE_CHECKING:
    from .index import Run

__all__ = ["TokenSequence"]


class TokenSequence:
    """Tokens by units. The encoding that is hashed: a unit's tokens, then a record of each span that touches it."""

    __slots__ = ("_buffer", "_cuts", "_prompt_bytes", "_spans", "_unit_bytes", "_unit_tokens", "root")

    def __init__(self, prefix: Prefix, unit_tokens: int) -> None:
        self.root: Root = prefix.root
        self._buffer: bytes | bytearray = prefix.tokens
        self._prompt_bytes = len(prefix.tokens)
        self._spans = prefix.spans
        self._unit_tokens = unit_tokens
        self._unit_bytes = unit_tokens * TOKEN_BYTES
        self._cuts = _cuts_of(prefix.spans, unit_tokens) if prefix.spans else ()

    @property
    def num_tokens(self) -> int:
        return len(self._buffer) // TOKEN_BYTES

    @property
    def num_prompt_tokens(self) -> int:
        return self._prompt_bytes // TOKEN_BYTES

    @property
    def num_prompt_units(self) -> int:
        """Whole units of the prompt."""
        return self._prompt_bytes // self._unit_bytes

    def copy(self) -> TokenSequence:
        """The same tokens, to go on with others."""
        twin = copy(self)
        twin._buffer = self._buffer if isinstance(self._buffer, bytes) else bytearray(self._buffer)
        return twin

    def agrees(self, other: TokenSequence, num_tokens: int) -> bool:
        """Whether the KV of the first `num_tokens` is that of `other`."""
        if self.root != other.root or min(self.num_tokens, other.num_tokens) < num_tokens:
            return False
        mine, theirs = ([s for s in tokens._spans if s.start < num_tokens] for tokens in (self, other))
        if mine != theirs:
            return False
        count = num_tokens * TOKEN_BYTES
        return self is other or memoryview(self._buffer)[:count] == memoryview(other._buffer)[:count]

    def append(self, tokens: bytes) -> None:
        if not tokens:
            return
        if isinstance(self._buffer, bytes):  # most requests never get here with a long prompt twice
            self._buffer = bytearray(self._buffer)
        self._buffer += tokens

    def drop_after(self, num_tokens: int) -> None:
        """Forget what was appended from `num_tokens` on; never the prompt."""
        stop = max(self._prompt_bytes, num_tokens * TOKEN_BYTES)
        if stop < len(self._buffer):
            self._buffer = bytearray(self._buffer[:stop])

    def spans_at(self, position: int) -> tuple[KeySpan, ...]:
        """The spans that touch the unit at `position`."""
        if not self._spans:
            return ()
        start, stop = position * self._unit_tokens, (position + 1) * self._unit_tokens
        return tuple(span for span in self._spans if span.start < stop and span.stop > start)

    def uniform_stop(self, position: int, limit: int) -> int:
        """Up to where the units from `position` on are touched by the same spans: spans cut runs."""
        for cut in self._cuts:
            if position < cut < limit:
                return cut
        return limit

    def key_at(self, hasher: Hasher, position: int) -> bytes:
        """The digest of the prefix up to and with the unit at `position`; `hasher` has run up to `position`."""
        probe: Hasher = hasher.copy()
        at = position * self._unit_bytes
        probe.update(self._buffer[at : at + self._unit_bytes])
        if self._spans:
            for span in self.spans_at(position):
                probe.update(span.record())
        return probe.digest()

    def stretch(self, start: int, stop: int) -> bytes:
        """The token bytes of units `[start, stop)`, a copy of their own."""
        with memoryview(self._buffer) as view:
            return bytes(view[start * self._unit_bytes : stop * self._unit_bytes])

    def common_stop(self, run: Run, limit: int) -> int:
        """Up to which unit `run` says what this sequence says, at most `limit`."""
        limit = min(limit, run.stop)
        if self._spans or run.spans:
            if self.spans_at(run.start) != run.spans:
                return run.start
            limit = self.uniform_stop(run.start, limit)
        at = run.start * self._unit_bytes
        if limit == run.stop and self._buffer.startswith(run.tokens, at):
            return limit
        count = (limit - run.start) * self._unit_tokens
        mine = np.frombuffer(self._buffer, np.int32, count, at)
        differs = mine != np.frombuffer(run.tokens, np.int32, count)
        first = int(differs.argmax())
        return run.start + first // self._unit_tokens if differs[first] else limit


def hash_run(hasher: Hasher, tokens: bytes, spans: tuple[KeySpan, ...], unit_bytes: int) -> Hasher:
    """The running hash behind a run whose units are all touched by `spans`."""
    after = hasher.copy()
    if not spans:
        after.update(tokens)
        return after
    record = b"".join(span.record() for span in spans)
    for at in range(0, len(tokens), unit_bytes):
        after.update(tokens[at : at + unit_bytes] + record)
    return after


def _cuts_of(spans: tuple[KeySpan, ...], unit_tokens: int) -> tuple[int, ...]:
    """Where the set of spans that touch a unit changes: before the first unit of a span and behind its last."""
    return tuple(sorted({cut for span in spans for cut in (span.start // unit_tokens, -(-span.stop // unit_tokens))}))
