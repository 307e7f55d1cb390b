"""How a program ended."""

from __future__ import annotations

import attrs

from ..violations import Violation

__all__ = ["Outcome"]


@attrs.frozen
class Outcome:
    violation: Violation | None
    num_calls: int
    """Public calls made, refused ones included."""
    features: frozenset[str]
    """What this program has met, by name: for the table of what met what."""
    digest: str
    """Of everything that could be observed: equal in every process."""
