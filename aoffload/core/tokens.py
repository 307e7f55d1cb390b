"""The tokens of one request, as the index reads them: its prompt, then what it generated."""

from __future__ import annotations

from copy import copy
from typing import Protocol

import numpy as np

from ..prefix import TOKEN_BYTES, Hasher, KeySpan, Prefix, Root

__all__ = ["TokenSequence", "hash_run", "max_run_units"]


MAX_RUN_TOKENS = 2**17
"""No run goes over a multiple of so many tokens, so whatever is done to one (hash, compare, cut, join) is done soon."""


def max_run_units(unit_tokens: int) -> int:
    """The same in units."""
    return max(1, MAX_RUN_TOKENS // unit_tokens)


class Stretch(Protocol):
    """Tokens of units `[start, stop)`, which are all touched by `spans`."""

    @property
    def start(self) -> int: ...
    @property
    def stop(self) -> int: ...
    @property
    def tokens(self) -> bytes: ...
    @property
    def spans(self) -> tuple[KeySpan, ...]: ...


class TokenSequence:
    """Tokens by units. The encoding that is hashed: a unit's tokens, then a record of each span that touches it.

    The prompt stays where it is; what is generated is kept beside it, or every request would copy its prompt once more.
    """

    __slots__ = (
        "_added", "_cuts", "_hashed", "_prompt", "_spans", "_unit_bytes", "_unit_tokens", "num_prompt_tokens",
        "num_prompt_units", "num_tokens", "root",
    )  # fmt: skip

    def __init__(self, prefix: Prefix, unit_tokens: int) -> None:
        self.root: Root = prefix.root
        self._prompt = prefix.tokens
        self._added = bytearray()
        self._spans = prefix.spans
        self._unit_tokens = unit_tokens
        self._unit_bytes = unit_tokens * TOKEN_BYTES
        self.num_prompt_tokens = self.num_tokens = prefix.num_tokens
        self.num_prompt_units = self.num_tokens // unit_tokens
        """Whole units of the prompt."""
        self._cuts = _cuts_of(prefix.spans, unit_tokens) if prefix.spans else ()
        self._hashed: dict[int, Hasher] = {}

    def copy(self) -> TokenSequence:
        """The same tokens, to go on with others."""
        twin = copy(self)
        twin._added = self._added[:]
        return twin

    def agrees(self, other: TokenSequence, num_tokens: int) -> bool:
        """Whether the KV of the first `num_tokens` is that of `other`."""
        if self.root != other.root or min(self.num_tokens, other.num_tokens) < num_tokens:
            return False
        mine, theirs = ([s for s in tokens._spans if s.start < num_tokens] for tokens in (self, other))
        if mine != theirs:
            return False
        count = num_tokens * TOKEN_BYTES
        return self is other or self._bytes(0, count) == other._bytes(0, count)

    def begins_alike(self, other: TokenSequence, num_tokens: int) -> bool:
        """Whether the first `num_tokens` tokens are those of `other`, whatever is embedded in them."""
        count = num_tokens * TOKEN_BYTES
        return self.root == other.root and self._bytes(0, count) == other._bytes(0, count)

    def first_bytes(self, start: int, num_tokens: int) -> bytes:
        """The token bytes from unit `start` on, up to the first `num_tokens` of all."""
        return self._bytes(start * self._unit_bytes, num_tokens * TOKEN_BYTES)

    def has_much_to_hash(self, start: int) -> bool:
        """Whether publishing the prompt from unit `start` on would hash so much that a thread had better do it."""
        num_bytes = len(self._prompt) - start * self._unit_bytes
        return num_bytes > MAX_RUN_TOKENS * TOKEN_BYTES and not self._spans and not self._hashed

    def hash_ahead(self, start: int) -> None:
        """Hash the prompt to where the longest runs end, so that publishing what lies behind unit `start` need not.

        Any thread may do it: nobody sees anything of it before it is done. Not for a prompt with spans."""
        most, hasher, hashed = max_run_units(self._unit_tokens), self.root.hasher, {}
        for stop in range(most, self.num_prompt_units + 1, most):
            hasher = hash_run(hasher, self.stretch(stop - most, stop), (), self._unit_bytes)
            if stop > start:
                hashed[stop] = hasher
        self._hashed = hashed

    def hasher_at(self, position: int) -> Hasher | None:
        """The running hash of all units before `position`, if it was made ahead."""
        return self._hashed.get(position)

    def append(self, tokens: bytes) -> None:
        self._added += tokens
        self.num_tokens += len(tokens) // TOKEN_BYTES

    def drop_after(self, num_tokens: int) -> None:
        """Forget what was appended from `num_tokens` on; never the prompt."""
        del self._added[max(0, num_tokens * TOKEN_BYTES - len(self._prompt)) :]
        self.num_tokens = (len(self._prompt) + len(self._added)) // TOKEN_BYTES

    def _bytes(self, start: int, stop: int) -> bytes:
        """The encoded tokens from byte `start` to byte `stop`."""
        border = len(self._prompt)
        if stop <= border:
            return self._prompt[start:stop]
        return self._prompt[start:] + self._added[max(0, start - border) : stop - border]

    def spans_at(self, position: int) -> tuple[KeySpan, ...]:
        """The spans that touch the unit at `position`."""
        if not self._spans:
            return ()
        start, stop = position * self._unit_tokens, (position + 1) * self._unit_tokens
        return tuple(span for span in self._spans if span.start < stop and span.stop > start)

    def run_stop(self, position: int, limit: int) -> int:
        """Up to where one run may go that begins at `position`: its units are touched by the same spans, and there is a
        longest one."""
        most = max_run_units(self._unit_tokens)
        limit = min(limit, position - position % most + most)
        return self._uniform_stop(position, limit)

    def _uniform_stop(self, position: int, limit: int) -> int:
        for cut in self._cuts:
            if position < cut < limit:
                return cut
        return limit

    def key_at(self, hasher: Hasher, position: int) -> bytes:
        """The digest of the prefix up to and with the unit at `position`; `hasher` has run up to `position`."""
        probe: Hasher = hasher.copy()
        at = position * self._unit_bytes
        probe.update(self._bytes(at, at + self._unit_bytes))
        if self._spans:
            for span in self.spans_at(position):
                probe.update(span.record())
        return probe.digest()

    def stretch(self, start: int, stop: int) -> bytes:
        """The token bytes of units `[start, stop)`."""
        return self._bytes(start * self._unit_bytes, stop * self._unit_bytes)

    def common_stop(self, run: Stretch, limit: int) -> int:
        """Up to which unit `run` says what this sequence says, at most `limit`."""
        limit = min(limit, run.stop)
        if self._spans or run.spans:
            if self.spans_at(run.start) != run.spans:
                return run.start
            limit = self._uniform_stop(run.start, limit)
        at, num_bytes = run.start * self._unit_bytes, (limit - run.start) * self._unit_bytes
        if limit == run.stop and self._prompt.startswith(run.tokens, at):
            return limit
        if at + num_bytes <= len(self._prompt):
            mine = np.frombuffer(self._prompt, np.int32, num_bytes // TOKEN_BYTES, at)
        else:
            mine = np.frombuffer(self._bytes(at, at + num_bytes), np.int32)
        differs = mine != np.frombuffer(run.tokens, np.int32, len(mine))
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
