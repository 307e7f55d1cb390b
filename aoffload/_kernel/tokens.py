"""The tokens of one request, in units: its prompt, followed by the tokens that it has generated."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from .._common.prefix import TOKEN_BYTES, Hasher, KeySpan, Prefix, Root

MAX_RUN_TOKENS = 2**17
"""No run crosses a multiple of this number of tokens (a *maximum boundary*), which bounds the time to hash, compare,
split or merge a run."""
LONG_BYTES = 2**17
"""From this size on, the allocator gets memory for a copy from the system, which costs several times the copy."""


def max_run_units(unit_tokens: int) -> int:
    """`MAX_RUN_TOKENS` in units."""
    return max(1, MAX_RUN_TOKENS // unit_tokens)


class TokenRange(Protocol):
    """The tokens of units `[start, stop)`, such as those of a `Run`. `spans` touch every one of the units."""

    start: int
    stop: int
    tokens: bytes | memoryview
    spans: tuple[KeySpan, ...]


class EndOfPath(TokenRange, Protocol):
    """A token range whose whole prefix is known: the last run of a path."""

    root: Root

    def whole_path(self) -> Sequence[TokenRange]: ...


class TokenSequence:
    """Tokens by units. The hash covers, unit by unit, the tokens and then a record of each span that touches the unit.

    Generated tokens are kept apart from the prompt, so that no request copies its prompt.
    """

    __slots__ = (
        "_added", "_cuts", "_hashed", "_prompt", "_unit_bytes", "_unit_tokens", "keys", "num_prompt_tokens",
        "num_prompt_units", "num_tokens", "root", "spans",
    )  # fmt: skip

    def __init__(self, prefix: Prefix, unit_tokens: int) -> None:
        self.root: Root = prefix.root
        self._prompt = prefix.tokens
        self._added = bytearray()
        self.spans = prefix.spans
        """All key spans, in the order of their positions."""
        self._unit_tokens = unit_tokens
        self._unit_bytes = unit_tokens * TOKEN_BYTES
        self.num_prompt_tokens = self.num_tokens = len(prefix.tokens) // TOKEN_BYTES
        self.num_prompt_units = self.num_tokens // unit_tokens
        """Whole units of the prompt."""
        self._cuts: tuple[int, ...] = ()
        """Where the set of spans that touch a unit changes: before the first unit of a span, and after its last."""
        if self.spans:
            cuts = {cut for span in self.spans for cut in (span.start // unit_tokens, -(-span.stop // unit_tokens))}
            self._cuts = tuple(sorted(cuts))
        self._hashed: dict[int, Hasher] = {}
        self.keys: dict[int, bytes] = {}
        """The keys that `RunIndex.find` has computed (`key_at`), by position. A key depends only on the root, the
        tokens and the key spans before its end, so it stays valid while tokens are appended."""

    @classmethod
    def of_path(cls, end: EndOfPath) -> TokenSequence:
        """The tokens of the path that ends with `end`."""
        path = end.whole_path()
        spans = dict.fromkeys(span for stretch in path for span in stretch.spans)
        unit_bytes = len(end.tokens) // (end.stop - end.start)
        return cls(Prefix(end.root, b"".join([one.tokens for one in path]), tuple(spans)), unit_bytes // TOKEN_BYTES)

    def copy(self) -> TokenSequence:
        """A copy that can continue with other tokens."""
        twin = self.under(self.root)
        twin._hashed = self._hashed
        return twin

    def under(self, root: Root) -> TokenSequence:
        """The same tokens under `root`."""
        twin = TokenSequence(Prefix(root, self._prompt, self.spans), self._unit_tokens)
        twin.append(bytes(self._added))
        return twin

    def agrees(self, other: TokenSequence, num_tokens: int) -> bool:
        """Whether the first `num_tokens` have the same KV as those of `other`: same root, tokens and spans."""
        if self.root != other.root or min(self.num_tokens, other.num_tokens) < num_tokens:
            return False
        mine, theirs = ([s for s in tokens.spans if s.start < num_tokens] for tokens in (self, other))
        if mine != theirs:
            return False
        count = num_tokens * TOKEN_BYTES
        return self is other or self._bytes(0, count) == other._bytes(0, count)

    def begins_alike(self, other: TokenSequence, num_tokens: int) -> bool:
        """Whether root and first `num_tokens` tokens are those of `other`. Ignores spans."""
        count = num_tokens * TOKEN_BYTES
        return self.root == other.root and self._bytes(0, count) == other._bytes(0, count)

    def first_bytes(self, start: int, num_tokens: int) -> bytes:
        """The token bytes from unit `start` up to token `num_tokens`, counted from the beginning."""
        return self._bytes(start * self._unit_bytes, num_tokens * TOKEN_BYTES)

    def has_much_to_hash(self, start: int) -> bool:
        """Whether publishing the prompt from unit `start` on hashes enough tokens for `hash_ahead` in a thread to pay
        off."""
        num_bytes = len(self._prompt) - start * self._unit_bytes
        return num_bytes > MAX_RUN_TOKENS * TOKEN_BYTES and not self.spans and not self._hashed

    def hash_ahead(self, start: int) -> None:
        """Hash the prompt up to each maximum boundary after unit `start`, so that publishing does not have to.

        May run in any thread: it sets the complete result in one assignment. Not for a prompt with spans."""
        most, hasher, hashed = max_run_units(self._unit_tokens), self.root.hasher, {}
        for stop in range(most, self.num_prompt_units + 1, most):
            hasher = hash_run(hasher, self.stretch(stop - most, stop), (), self._unit_bytes)
            if stop > start:
                hashed[stop] = hasher
        self._hashed = hashed

    def hasher_at(self, position: int) -> Hasher | None:
        """The running hash of all units before `position`, if `hash_ahead` has computed it."""
        return self._hashed.get(position)

    def append(self, tokens: bytes) -> None:
        self._added += tokens
        self.num_tokens += len(tokens) // TOKEN_BYTES

    def drop_after(self, num_tokens: int) -> None:
        """Drop appended tokens after the first `num_tokens`; never prompt tokens."""
        del self._added[max(0, num_tokens * TOKEN_BYTES - len(self._prompt)) :]
        self.keys = {at: key for at, key in self.keys.items() if (at + 1) * self._unit_tokens <= num_tokens}
        self.num_tokens = (len(self._prompt) + len(self._added)) // TOKEN_BYTES

    def _bytes(self, start: int, stop: int) -> bytes:
        """The encoded tokens from byte `start` to byte `stop`."""
        border = len(self._prompt)
        if stop <= border:
            return self._prompt[start:stop]
        return self._prompt[start:] + self._added[max(0, start - border) : stop - border]

    def spans_at(self, position: int) -> tuple[KeySpan, ...]:
        """The spans that touch the unit at `position`."""
        if not self.spans:
            return ()
        start, stop = position * self._unit_tokens, (position + 1) * self._unit_tokens
        return tuple(span for span in self.spans if span.start < stop and span.stop > start)

    def run_stop(self, position: int, limit: int) -> int:
        """End of a run that begins at unit `position`, at most `limit`: the same spans touch all its units, and it
        crosses no maximum boundary."""
        most = max_run_units(self._unit_tokens)
        boundary = position - position % most + most
        limit = min(limit, boundary)
        return self._uniform_stop(position, limit) if self._cuts else limit

    def _uniform_stop(self, position: int, limit: int) -> int:
        for cut in self._cuts:
            if position < cut < limit:
                return cut
        return limit

    def key_at(self, hasher: Hasher, position: int) -> bytes:
        """The digest of the prefix up to and including the unit at `position`; `hasher` covers the units before."""
        probe: Hasher = hasher.copy()
        at = position * self._unit_bytes
        end = at + self._unit_bytes
        probe.update(self._prompt[at:end] if end <= len(self._prompt) else self._bytes(at, end))
        if self.spans:
            for span in self.spans_at(position):
                probe.update(span.record())
        return probe.digest()

    def unit_record(self, position: int) -> bytes:
        """The content of the unit at `position`: its tokens, and a record of each span that touches it."""
        at = position * self._unit_bytes
        end = at + self._unit_bytes
        tokens = self._prompt[at:end] if end <= len(self._prompt) else self._bytes(at, end)
        return tokens + b"".join([span.record() for span in self.spans_at(position)]) if self.spans else tokens

    def hash_on(self, hasher: Hasher, start: int, stop: int) -> Hasher:
        """The running hash of all units before `stop`; `hasher` covers those before `start`."""
        while start < stop:
            end = self._uniform_stop(start, stop)
            hasher = hash_run(hasher, self.stretch(start, end), self.spans_at(start), self._unit_bytes)
            start = end
        return hasher

    def stretch(self, start: int, stop: int) -> bytes:
        """The token bytes of units `[start, stop)`."""
        return self._bytes(start * self._unit_bytes, stop * self._unit_bytes)

    def shared_stretch(self, start: int, stop: int) -> bytes | memoryview:
        """As `stretch`, but a view instead of a copy if the units are nearly all of a long prompt, because a view keeps
        the whole prompt alive."""
        at, end, whole = start * self._unit_bytes, stop * self._unit_bytes, len(self._prompt)
        if end - at < LONG_BYTES or end - at < whole - whole // 16 or end > whole or self.spans:
            return self._bytes(at, end)
        return memoryview(self._prompt)[at:end]

    def common_stop(self, run: TokenRange, limit: int) -> int:
        """The unit, at most `limit`, up to which `run` and this sequence agree."""
        limit = min(limit, run.stop)
        if self.spans or run.spans:
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


def hash_run(hasher: Hasher, tokens: bytes | memoryview, spans: tuple[KeySpan, ...], unit_bytes: int) -> Hasher:
    """The running hash after a run; `spans` touch every one of its units."""
    after = hasher.copy()
    if not spans:
        after.update(tokens)
        return after
    record = b"".join(span.record() for span in spans)
    for at in range(0, len(tokens), unit_bytes):
        after.update(tokens[at : at + unit_bytes])
        after.update(record)
    return after
