"""Pairs of features that cannot occur in one program, with the reason."""

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
CHOICES = _of("load by cost", "load by random")
ONE_CHOICE = Forbidden(CHOICES, CHOICES, "there is one choice of loads")
ORDERS = _of("lru", "learned", "learned:device")
ONE_ORDER = Forbidden(ORDERS, ORDERS, "there is one eviction order")
NO_QUOTAS = Forbidden(_of("no host"), _of("quotas"), "quotas share out the host and the disk")
NO_COPIES = "without host blocks nothing is copied"
OF_A_DISK = _of(
    "disk", "write behind", "idle", "disk flush", "fetch", "fetch shared", "match fetched", "restart", "restored",
    "reset disk", "disk fault",
)  # fmt: skip
NO_DISK = Forbidden(_of("no host"), OF_A_DISK, "what is on the disk comes from the host")
OF_A_STORE = _of(
    "remote", "remote store", "remote store landed", "remote store failed", "remote store corrupt",
    "remote store unproven", "remote load landed", "remote load failed", "remote load corrupt", "cell gone",
    "cell taken back", "late put", "failed put arrives revoked", "revoked cell met", "told too much", "reset remote",
)  # fmt: skip
NO_STORE = Forbidden(
    _of("no host", "window", "chunk", "components"), OF_A_STORE, "a store keeps full attention that is in the host"
)

ANY_COPY = _of(
    "early", "flip", "rot", "refuse", "raise", "fail", "hang", "stuck_fence", "lose", "vanish", "twice", "die", "bug",
)  # fmt: skip

FORBIDDEN = {
    "ledger": (
        ONE_POLICY,
        NO_DISK,
        NO_STORE,
        NO_QUOTAS,
        Forbidden(_of("watermark"), POLICIES - {"lazy"}, "only a lazy policy has a watermark"),
        Forbidden(_of("store"), _of("off"), "this policy stores nothing"),
        Forbidden(
            _of("no host"),
            _of(
                "load", "load landed", "load failed", "load corrupt", "load unproven", "load shared",
                "host hit", "prefetch", "demote", "early start", "early start committed", "begin again", "store",
                "store landed", "store failed", "store unproven", "store corrupt", "watermark", "components", "discard",
                "late proof",
            ),
            NO_COPIES,
        ),
    ),
    "kernel": (
        Forbidden(
            _of("no host"),
            _of(
                "load", "load landed", "load failed", "load corrupt", "load unproven", "load shared", "host hit",
                "store", "store landed", "store failed", "store unproven", "store corrupt", "components", "discard",
                "late proof",
            ),
            NO_COPIES,
        ),
    ),
    "engine": (
        ONE_POLICY,
        NO_DISK,
        NO_STORE,
        NO_QUOTAS,
        Forbidden(_of("store"), _of("off"), "this policy stores nothing"),
        Forbidden(_of("discard", "store corrupt"), _of("no host"), NO_COPIES),
        Forbidden(_of("client pin", "hint"), _of("no host"), "a pin or a hint is about blocks in the host"),
        Forbidden(
            _of("off"),
            _of(
                "write behind", "idle", "disk flush", "match fetched", "deferred",
                "remote store", "remote store landed", "remote store failed", "remote store corrupt",
                "remote store unproven", "remote load landed", "late put",
                "cell taken back", "failed put arrives revoked", "revoked cell met", "store corrupt",
            ),
            "what is never stored goes no further down",
        ),
        Forbidden(
            _of("no host", "off"),
            _of(
                "load", "load landed", "load failed", "load corrupt", "load unproven", "load lost", "host hit", "pin",
                "pending", "declined", "store", "store landed", "store failed", "store unproven", "late proof",
                "components", "deferred",
            ),
            "what is never stored is neither copied nor hit",
        ),
    ),
    "runtime": (
        ONE_POLICY,
        ONE_CHOICE,
        ONE_ORDER,
        NO_DISK,
        Forbidden(
            _of("no host"),
            ANY_COPY | _of("load", "early start", "demote", "declined"),
            NO_COPIES,
        ),
    ),
    "runtime of an engine": (
        ONE_POLICY,
        ONE_CHOICE,
        ONE_ORDER,
        NO_DISK,
        Forbidden(_of("off"), _of("restored"), "what is never stored is not on the disk"),
        Forbidden(
            _of("no host", "off"),
            ANY_COPY | _of("load", "load lost", "host hit", "pending", "pin", "declined", "refused: OutOfBlocks"),
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
