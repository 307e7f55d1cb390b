"""Cancellations: the client, the moment, and the way. A plan injects them together with faults."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import attrs

from ..errors import InvalidArgument

__all__ = ["HOWS", "Cancel", "await_lines"]

HOWS = ("request", "scope", "native", "request*2", "scope*2", "native*2", "native*3", "request+native")
"""Ways to cancel a client: by the request's own scope, by a scope around it, or by `asyncio.Task.cancel` (on trio, by
the outermost scope). `*2`: again at the client's next step, that is, during its clean-up."""
ANY_STEP = "step"


@attrs.frozen
class Cancel:
    """Cancel `victim` when it has been suspended `at + 1` times. With the victim `step`: cancel some live client at
    global step `at`."""

    victim: str
    at: int
    how: str = attrs.field(default="native", validator=attrs.validators.in_(HOWS))

    def __str__(self) -> str:
        return f"{self.victim}@{self.at}:{self.how}"

    @classmethod
    def parse(cls, text: str) -> Cancel:
        head, _, how = text.partition(":")
        victim, _, at = head.rpartition("@")
        try:
            return cls(victim, int(at), how or "native")
        except ValueError:
            raise InvalidArgument("cancel", f"must be VICTIM@NUMBER:HOW, got {text!r}") from None

    @property
    def blows(self) -> list[str]:
        """The victim's cancellations, one at each of its steps."""
        kind, _, times = self.how.partition("*")
        return kind.split("+") if not times else [kind] * int(times)


def await_lines(coroutine: Any) -> Iterator[tuple[str, int]]:
    """File and line of each await that a suspended coroutine is in, outermost first."""
    while coroutine is not None:
        for kind in ("cr", "gi", "ag"):
            frame = getattr(coroutine, f"{kind}_frame", None)
            if frame is not None:
                yield frame.f_code.co_filename, frame.f_lineno
        following = None
        for name in ("cr_await", "gi_yieldfrom", "ag_await"):
            following = following or getattr(coroutine, name, None)
        coroutine = following
