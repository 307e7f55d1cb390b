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
ONE_POLICY = Forbidden(POLICIES, POLICIES, "there is one store policy")
NO_COPIES = "without host blocks nothing is copied"

ANY_COPY = _of(
    "early", "flip", "rot", "refuse", "raise", "fail", "hang", "stuck_fence", "lose", "vanish", "twice", "die", "bug",
)  # fmt: skip

FORBIDDEN = {
    "ledger": (
        ONE_POLICY,
        Forbidden(_of("watermark"), POLICIES - {"lazy"}, "only a lazy policy has a watermark"),
        Forbidden(_of("store"), _of("lazy", "off", "watermark"), "none of these policies stores at commit"),
        Forbidden(
            _of("no host"),
            _of(
                "load", "load landed", "load failed", "load corrupt", "load unproven", "load abandoned", "load shared",
                "host hit", "prefetch", "demote", "early start", "early start committed", "begin again", "store",
                "store landed", "store failed", "store unproven", "watermark", "bands", "discard", "late proof",
            ),
            NO_COPIES,
        ),
    ),
    "engine": (
        ONE_POLICY,
        Forbidden(_of("store"), _of("off"), "this policy stores nothing"),
        Forbidden(
            _of("no host", "off"),
            _of(
                "load", "load landed", "load failed", "load corrupt", "load unproven", "load lost", "host hit", "pin",
                "pending", "store", "store landed", "store failed", "store unproven", "late proof", "discard", "bands",
            ),
            "what is never stored is neither copied nor hit",
        ),
    ),
    "runtime": (
        ONE_POLICY,
        Forbidden(
            _of("no host"),
            ANY_COPY | _of("load", "early start", "demote"),
            NO_COPIES,
        ),
    ),
    "runtime of an engine": (
        ONE_POLICY,
        Forbidden(
            _of("no host", "off"),
            ANY_COPY | _of("load", "load lost", "host hit", "pending", "pin", "refused: OutOfBlocks"),
            "what is never stored is neither copied nor hit",
        ),
    ),
}  # fmt: skip
"""By the side whose features they are. On a runtime, `prefetch` is a call that may do nothing, and `store` an option of
a request."""


def refusal(side: str, one: str, other: str) -> str:
    """Why no program meets both; empty if nothing forbids it."""
    for row in FORBIDDEN[side]:
        if (one in row.these and other in row.those) or (other in row.these and one in row.those):
            return row.why
    return ""
