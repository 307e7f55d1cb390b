"""The calls of a ledger that the oracles watch."""

from __future__ import annotations

__all__ = ["CHANGING", "ENDING", "REFUSING", "WAKING"]

CHANGING = (
    "admit", "allocate_nowait", "queue_allocation", "extend_nowait", "queue_extension", "accept", "withdraw",
    "plan_load", "abandon_load", "launch", "settle", "discard", "commit", "invalidate", "step", "release", "reset",
    "preempt_nowait", "resume", "pin", "unpin", "lapse", "drop_pins", "hint", "prefetch", "demote", "cancel",
    "cancel_cache_transfers", "match_again", "offer", "fetch", "match_fetched", "plan_disk_stores", "plan_disk_flush",
    "restore",
)  # fmt: skip
REFUSING = ("allocate_nowait", "extend_nowait", "queue_allocation", "queue_extension", "pin")
ENDING = ("settle", "discard")
WAKING = ("queue_allocation", "queue_extension", "plan_load")
