"""The report on programs: how many, in which layouts, which pairs of features they met, which laws they broke."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import attrs

from .features import refusal
from .program_runs import STATE_FACES
from .report_lines import Line, at_least, table

__all__ = ["Pairs", "lines", "state_lines", "state_tables", "tables"]

Parts = Sequence[dict[str, Any]]
Pair = tuple[str, str]
MIN_PROGRAMS, MIN_CALLS = 20_000, 1_000_000
MIN_STATE_PROGRAMS, MIN_STATE_CALLS = 2_000, 80_000
"""In a campaign of all programs."""
RARE = 20
"""A feature that fewer programs have met is only listed, and left out of the pairs, because it meets most others by
chance alone."""
MOST_MISSED, MOST_MISSED_BY_A_QUARTER = 0.01, 0.05
"""The share of pairs that programs may miss by chance, of the pairs that no rule forbids: in a run of all programs, and
in a run of a quarter of them."""
MOST_NEVER_IN_A_QUARTER = 2
"""Features that all faces with states together may miss by chance in a quarter of the programs. 100 programs of a face
meet its rarest feature about four times."""
SIDES = {
    "ledger": ("ledger",), "kernel": ("kernel",), "engine": ("engine",), "runtime": ("asyncio", "trio"),
    "runtime of an engine": ("engine-asyncio", "engine-trio"),
}  # fmt: skip
"""The faces of each side. Features have different names on a ledger and on a runtime, and over an engine's blocks. The
meddled faces and those with states are on no side: they make the same calls as the others, and are there for their
violations."""
OF_STATES: dict[str, tuple[str, ...]] = {
    "states": ("checkpoint", "checkpoint hit", "checkpoint left out", "invalidate", "preempt", "fork", "step", "disk"),
    "engine-states": ("checkpoint", "checkpoint loaded", "invalidate", "pending", "disk"),
    **dict.fromkeys(
        ("asyncio-states", "trio-states"),
        (
            "checkpoint",
            "checkpoint hit",
            "checkpoint left out",
            "invalidate",
            "preempt",
            "run_step",
            "restart",
            "reset",
        ),
    ),
    **dict.fromkeys(
        ("engine-asyncio-states", "engine-trio-states"),
        ("checkpoint", "checkpoint loaded", "engine hit", "invalidate", "thread", "pending", "restart", "reset"),
    ),
}
"""What programs with a recurrent state have to meet, by face."""


@attrs.frozen
class Met:
    """How many programs have met two features, and what forbids it; empty if nothing does."""

    one: str
    other: str
    count: int
    refusal: str

    def __str__(self) -> str:
        return f"{self.one} + {self.other}"


@attrs.frozen
class Pairs:
    """`counts`: how many programs have met both features of a pair; a feature paired with itself: how many met it."""

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
        """The features that enough programs have met to be in the pairs."""
        return [one for one, count in self.singly() if count >= RARE]

    def singly(self) -> list[tuple[str, int]]:
        return sorted((one, count) for (one, other), count in self.counts.items() if one == other)

    def pairs(self) -> Iterator[Met]:
        for one, other in itertools.combinations(self.features, 2):
            yield Met(one, other, self.counts[one, other], refusal(self.side, one, other))

    def table(self) -> str:
        """A triangular table in markdown."""
        features, blank = self.features, [""] * len(self.features)
        rows = [
            (str(number), one, *(str(self.counts[other, one]) for other in features[:number]), *blank[number:])
            for number, one in enumerate(features, 1)
        ]
        return table(("", "feature", *(str(number) for number in range(1, len(features) + 1))), rows)


def lines(parts: Parts, *, is_short: bool = False) -> list[Line]:
    """The lines about programs. `is_short`: a quarter of them was run."""
    num_shares, most_missed = (4, MOST_MISSED_BY_A_QUARTER) if is_short else (1, MOST_MISSED)
    layouts, with_states = {layout for part in parts for layout in part["layouts"]}, _with_states(parts)
    num_programs, num_calls = (sum(part[what] for part in parts) for what in ("programs", "calls"))
    broken = [tuple(one[:2]) for part in parts for one in part["violations"]]
    least_states = MIN_STATE_PROGRAMS // num_shares, MIN_STATE_CALLS // num_shares
    most_never = MOST_NEVER_IN_A_QUARTER if is_short else 0
    return [
        at_least(f"programs ({_by_face(parts, 'programs')})", num_programs, MIN_PROGRAMS // num_shares),
        at_least(f"calls ({_by_face(parts, 'calls')})", num_calls, MIN_CALLS // num_shares),
        Line("layouts of groups", "any", f"{len(layouts):,}", True),
        Line("violations by programs", "0", f"{len(broken)} {broken[:3] or ''}", not broken),
        *(_pair_line(Pairs.of(side, parts), most_missed) for side in SIDES),
        *(state_lines(with_states, *least_states, most_never) if with_states else ()),
    ]


def state_lines(
    parts: Parts, min_programs: int = MIN_PROGRAMS, min_calls: int = MIN_CALLS, most_never: int = 0
) -> list[Line]:
    """The lines about programs whose model has a recurrent state. `most_never`: how many features of `OF_STATES` may be
    missed."""
    num_programs, num_calls = (sum(part[what] for part in parts) for what in ("programs", "calls"))
    broken = [tuple(one[:2]) for part in parts for one in part["violations"]]
    never = [f"{face}: {one}" for face, wanted in OF_STATES.items() for one in wanted if not _num_met(parts, face, one)]
    return [
        at_least(f"programs with states ({_by_face(parts, 'programs')})", num_programs, min_programs),
        at_least(f"calls with states ({_by_face(parts, 'calls')})", num_calls, min_calls),
        Line("violations by programs with states", "0", f"{len(broken)} {broken[:3] or ''}", not broken),
        Line(
            "features that programs with states never met",
            f"{most_never} at most" if most_never else "none",
            f"{never or 'none'}",
            len(never) <= most_never,
        ),
    ]


def _num_met(parts: Parts, face: str, feature: str) -> int:
    pairs = (pair for part in parts if part["face"] == face for pair in part["pairs"])
    return sum(int(count) for one, other, count in pairs if one == other == feature)


def _pair_line(pairs: Pairs, most_missed: float) -> Line:
    found = list(pairs.pairs())
    wrong = [str(pair) for pair in found if pair.count and pair.refusal]
    missed = [str(pair) for pair in found if not pair.count and not pair.refusal]
    num_met, num_forbidden = sum(pair.count > 0 for pair in found), sum(pair.refusal != "" for pair in found)
    about = f"{num_met:,} met, {num_forbidden} forbidden, {len(missed)} missed {missed[:5] or ''} {wrong or ''}"
    is_met = not wrong and len(missed) <= most_missed * (num_met + len(missed))
    return Line(f"pairs of features on a {pairs.side}", f"met or forbidden but {most_missed:.0%}", about, is_met)


def tables(parts: Parts) -> Iterator[str]:
    """In markdown: the broken programs, the pairs that were met, and those that were not."""
    yield from _broken(parts)
    for side in SIDES:
        pairs = Pairs.of(side, parts)
        yield f"\n## Programs on a {side} that met two features\n\n{pairs.table()}\n\nNever met:\n"
        never = [pair for pair in pairs.pairs() if not pair.count]
        yield table(("feature", "feature", "forbidden by"), [(x.one, x.other, x.refusal or "NOTHING") for x in never])
        rare = [f"{one} ({count})" for one, count in pairs.singly() if count < RARE]
        yield f"\nMet by fewer than {RARE} programs: {', '.join(rare) or 'none'}.\n"


def state_tables(parts: Parts) -> Iterator[str]:
    """In markdown: the broken programs, and how many programs of each face have met what they have to meet."""
    yield from _broken(parts)
    yield "\n## Programs with a recurrent state\n"
    rows = [(face, one, f"{_num_met(parts, face, one):,}") for face, wanted in OF_STATES.items() for one in wanted]
    yield table(("face", "feature", "programs"), rows)


def _broken(parts: Parts) -> Iterator[str]:
    for line, violation, test in (one for part in parts for one in part["violations"]):
        yield f"\n### {line}\n\n{violation}\n" + (f"\n```python\n{test}```\n" if test else "")


def _with_states(parts: Parts) -> Parts:
    return [part for part in parts if part["face"] in STATE_FACES]


def _by_face(parts: Parts, what: str) -> str:
    found: Counter[str] = Counter()
    for part in parts:
        found[part["face"]] += part[what]
    return ", ".join(f"{face} {count:,}" for face, count in sorted(found.items()))
