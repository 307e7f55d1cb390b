"""The set of committed prefixes: the hits that a ledger may have. It knows no runs, blocks, tiers or leases.

A prefix that was never committed must never hit. A committed prefix may hit until it is invalidated or a reset comes.
It must hit as long as none of its blocks was lost, either; only the test knows whether one was.
"""

from __future__ import annotations

import attrs

from aoffload._common.prefix import KeySpan, Root

__all__ = ["Author", "MayHit", "Text"]

Key = tuple[object, ...]


@attrs.frozen
class Text:
    """A prompt, or what became of it: everything that identifies its KV."""

    root: Root
    tokens: tuple[int, ...]
    spans: tuple[KeySpan, ...] = ()

    def keys(self, unit: int) -> list[Key]:
        """One key for each whole unit: two are equal if the prefixes up to there, and all spans in them, are."""
        found: list[Key] = []
        for stop in range(unit, len(self.tokens) + 1, unit):
            spans = tuple(span for span in self.spans if span.start < stop)
            found.append((self.root, self.tokens[:stop], spans))
        return found


@attrs.define(eq=False)
class Author:
    """One request: the units that it has committed itself, from `ready` on, up to `stop`."""

    epoch: int
    text: Text
    ready: int = 0
    stop: int = 0
    is_wrong: bool = False
    """It has read invalidated KV: nothing that it commits will be found."""


class MayHit:
    def __init__(self, unit: int) -> None:
        self.unit, self.epoch = unit, 0
        self.authors_of: dict[Key, set[Author]] = {}

    def commit(self, author: Author, text: Text, num_tokens: int) -> None:
        author.text, author.stop = text, num_tokens // self.unit
        if author.epoch != self.epoch or author.is_wrong:
            return
        for key in text.keys(self.unit)[author.ready : author.stop]:
            self.authors_of.setdefault(key, set()).add(author)

    def invalidate(self, author: Author, num_tokens: int, misled: list[Author]) -> None:
        """`author` takes back everything from `num_tokens` on; `misled` have read it, and are over with that."""
        first = num_tokens // self.unit
        wrong: set[Key] = set()
        for key in author.text.keys(self.unit)[first : author.stop]:
            authors = self.authors_of.get(key, set())
            authors.discard(author)
            if authors <= set(misled):
                wrong.add(key)
        author.stop = min(author.stop, first)
        for other in misled:
            other.is_wrong = True
        for key in [key for key in self.authors_of if not wrong.isdisjoint(_prefixes(key, self.unit))]:
            del self.authors_of[key]

    def reset(self) -> None:
        self.epoch += 1
        self.authors_of.clear()

    def longest(self, text: Text) -> int:
        """The most tokens of `text` that may hit: whole units, each of them committed, and never the last token."""
        most = 0
        for key in text.keys(self.unit)[: (len(text.tokens) - 1) // self.unit]:
            if key not in self.authors_of:
                break
            most += self.unit
        return most


def _prefixes(key: Key, unit: int) -> list[Key]:
    root, tokens, spans = key
    return Text(root, tokens, spans).keys(unit)  # type: ignore[arg-type]
