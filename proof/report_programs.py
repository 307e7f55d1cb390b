"""What the programs add up to: how many, in which layouts, what they met in pairs, what they broke."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import attrs

from .features import refusal
from .lines import Line, at_least, table

__all__ = ["Pairs", "lines", "tables"]

Parts = Sequence[dict[str, Any]]
Pair = tuple[str, str]
MIN_PROGRAMS, MIN_CALLS = 20_000, 1_000_000
SIDES = {"ledger": ("ledger",), "runtime": ("asyncio", "trio")}
"""Features have other names on the ledger than on a runtime."""


@attrs.frozen
class Pairs:
    """`counts`: programs by two features that they have met; a feature with itself: programs that have met it."""

    side: str
    counts: Counter[Pair]

    @classmethod
    def of(cls, side: str, parts: Parts) -> Pairs:
        found: Counter[Pair] = Counter()
        for part in parts:
            if part["face"] in SIDES[side]:
                found.update({(one, other): count for one, other, count in part["pairs"]})
        return cls(side, found)

    @property
    def features(self) -> list[str]:
        return sorted(one for one, other in self.counts if one == other)

    @property
    def num_met(self) -> int:
        return sum(one != other for one, other in self.counts)

    def never(self) -> Iterator[tuple[str, str, str]]:
        """Pairs that no program has met, each with what forbids it; empty if nothing does."""
        for one, other in itertools.combinations(self.features, 2):
            if not self.counts[one, other]:
                yield one, other, refusal(one, other)

    def table(self) -> str:
        """Triangular, as markdown."""
        features, blank = self.features, [""] * len(self.features)
        rows = [
            (str(number), one, *(str(self.counts[other, one]) for other in features[:number]), *blank[number:])
            for number, one in enumerate(features, 1)
        ]
        return table(("", "feature", *(str(number) for number in range(1, len(features) + 1))), rows)


def lines(parts: Parts) -> list[Line]:
    layouts = {layout for part in parts for layout in part["layouts"]}
    broken = [tuple(one[:2]) for part in parts for one in part["violations"]]
    return [
        at_least(f"programs ({_by_face(parts, 'programs')})", sum(part["programs"] for part in parts), MIN_PROGRAMS),
        at_least(f"calls ({_by_face(parts, 'calls')})", sum(part["calls"] for part in parts), MIN_CALLS),
        Line("layouts of groups", "any", f"{len(layouts):,}", True),
        Line("violations by programs", "0", f"{len(broken)} {broken[:3] or ''}", not broken),
        *(_pair_line(Pairs.of(side, parts)) for side in SIDES),
    ]


def _pair_line(pairs: Pairs) -> Line:
    never = list(pairs.never())
    missing = [f"{one} + {other}" for one, other, why in never if not why]
    about = f"{len(missing)} {missing[:5] or ''}; {pairs.num_met:,} met, {len(never) - len(missing)} forbidden"
    # Rare things need more programs than these to meet one another: they are listed, and judge nothing.
    return Line(f"pairs of features on a {pairs.side} that never met, and nothing forbids", "listed", about, True)


def tables(parts: Parts) -> Iterator[str]:
    """As markdown: what is broken, the pairs that were met, those that cannot be."""
    for line, violation, test in (one for part in parts for one in part["violations"]):
        yield f"\n### {line}\n\n{violation}\n" + (f"\n```python\n{test}```\n" if test else "")
    for side in SIDES:
        pairs = Pairs.of(side, parts)
        yield f"\n## Programs on a {side} that met two features\n\n{pairs.table()}\n\nNever met:\n"
        yield table(("feature", "feature", "forbidden by"), [(*pair, why or "NOTHING") for *pair, why in pairs.never()])


def _by_face(parts: Parts, what: str) -> str:
    found: Counter[str] = Counter()
    for part in parts:
        found[part["face"]] += part[what]
    return ", ".join(f"{face} {count:,}" for face, count in sorted(found.items()))
