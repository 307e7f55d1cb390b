"""Features of programs that cannot meet in one program, and what forbids it."""

from __future__ import annotations

import attrs

__all__ = ["FORBIDDEN", "Forbidden", "refusal"]


@attrs.frozen
class Forbidden:
    """None of `these` is ever met by a program that has met one of `those`."""

    these: frozenset[str]
    those: frozenset[str]
    why: str


def _of(*names: str) -> frozenset[str]:
    return frozenset(names)


POLICIES = _of("eager", "lazy", "selective", "off")
LOADS = _of(
    "load", "load landed", "load failed", "load corrupt", "load unproven", "load abandoned", "host hit", "prefetch",
    "early",
)  # fmt: skip
STORES = _of("store", "store landed", "store failed", "store corrupt", "store unproven", "demote")

FORBIDDEN = (
    Forbidden(POLICIES, POLICIES, "a ledger has one store policy"),
    Forbidden(_of("frontier"), POLICIES - {"lazy"}, "only a lazy policy has a frontier"),
    Forbidden(_of("no host"), LOADS | STORES | {"frontier"}, "nothing is stored without host blocks"),
    Forbidden(_of("off"), LOADS, "nothing is stored, so nothing is in host memory"),
)
"""In the order in which they are asked."""


def refusal(one: str, other: str) -> str:
    """Why no program meets both; empty if nothing forbids it."""
    for row in FORBIDDEN:
        if (one in row.these and other in row.those) or (other in row.these and one in row.those):
            return row.why
    return ""
