"""How a program ended."""

from __future__ import annotations

import attrs

from aoffload.testing.violations import Violation

__all__ = ["Outcome"]


@attrs.frozen
class Outcome:
    violation: Violation | None
    num_calls: int
    """Public calls made, refused ones included."""
    features: frozenset[str]
    """Names of the features that this program has met, for the table of pairs."""
    digest: str
    """Hash of everything that could be observed: equal in every process."""
