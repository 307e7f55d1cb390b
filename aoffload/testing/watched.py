"""The calls of a ledger that the oracles watch."""

from __future__ import annotations

from typing import Any

from ..errors import ConfigError

__all__ = ["CHANGING", "ENDING", "REFUSING", "WAKING", "owner_of"]

CHANGING = (
    "admit", "allocate_nowait", "queue_allocation", "extend_nowait", "queue_extension", "accept", "withdraw",
    "plan_load", "abandon_load", "launch", "settle", "discard", "commit", "invalidation.invalidate", "invalidate",
    "step", "overlap.step", "release", "reset", "preemption.preempt", "preemption.resume", "pins.hold", "pins.release",
    "lapse", "pins.drop", "eviction.returns", "eviction.done", "transfers.prefetch", "transfers.demote",
    "transfers.cancel", "transfers.cancel_all", "match_again", "offer", "fetches.fetch", "fetches.match_again",
    "disk.plan_stores", "disk.plan_flush", "disk.restore",
)  # fmt: skip
REFUSING = ("allocate_nowait", "extend_nowait", "queue_allocation", "queue_extension", "pins.hold")
ENDING = ("settle", "discard")
WAKING = ("queue_allocation", "queue_extension", "plan_load")


def owner_of(ledger: Any, verb: str) -> Any:
    """The ledger, or the handle that has `verb`, such as `pins.hold`; None if this ledger has no such verb."""
    *handles, name = verb.split(".")
    found = ledger
    for handle in handles:
        try:
            found = getattr(found, handle)
        except (AttributeError, ConfigError):
            return None
    return found if hasattr(found, name) else None
