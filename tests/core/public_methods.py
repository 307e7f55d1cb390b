"""The public verbs of `Ledger` and `HostCache`, those on their handles included, read from the classes."""

from __future__ import annotations

import typing
from collections.abc import Callable
from typing import Any

from aoffload._extensions.assembly import AnyLedger
from aoffload._kernel.extension import HOOKS

FOR_EXTENSIONS = {
    "add_once", "end_call", "end_invalidation", "enrol", "find", "hold", "invalidated", "new_name", "own", "plans_of",
    "rematch", "report_errors", "sequence_of", "waits_for", "has_begun", "match_all_again", "pending_wakes",
    "possible_publishers",
}  # fmt: skip
"""What a ledger has for the verbs of extensions."""
FOR_HANDLES = {
    "transfers.begin", "transfers.hit_of", "transfers.leaving", "pins.check_share", "pins.end_all", "pins.grow",
    "quotas.all_cleared", "quotas.ceiling", "quotas.max_pinned", "quotas.num_left", "quotas.number_of",
    "quotas.part_changed", "weights.begin_again", "weights.is_findable", "weights.root_of",
    "transfers.new_request", "transfers.over", "transfers.wait_for_jobs",
    "invalidation.forget", "invalidation.has_read", "invalidation.keep", "invalidation.remember",
    "preemption.may_preempt",
    "reports.fetching", "reports.oldest_by_state", "reports.oldest_step_s", "reports.oldest_wait_s", "reports.step",
    "reports.wait_for_room",
}  # fmt: skip
"""What extensions have for other rooms of the package."""


def verbs_of(face: type[AnyLedger]) -> dict[str, Callable[..., Any]]:
    """By name, such as `admit` or `pins.hold`."""
    found: dict[str, Callable[..., Any]] = {}
    for name in dir(face):
        value = getattr(face, name)
        if name.startswith("_"):
            continue
        if isinstance(value, property):
            kind: Any = typing.get_type_hints(value.fget)["return"]
            if isinstance(kind, type) and hasattr(kind, "on_attach"):
                methods = {f"{name}.{method}": getattr(kind, method) for method in dir(kind) if method not in HOOKS}
                found |= {verb: call for verb, call in methods.items() if "._" not in verb and callable(call)}
        elif callable(value):
            found[name] = value
    return {verb: call for verb, call in found.items() if verb not in FOR_EXTENSIONS | FOR_HANDLES}
