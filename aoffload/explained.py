"""What a runtime says about itself when nothing goes on."""

from __future__ import annotations

from collections.abc import Iterable

from .core.ledger import Ledger
from .core.status import Holder, RequestStatus, printable

__all__ = ["Explained"]


class Explained:
    """The questions that a runtime passes on to its ledger. They change nothing, and may be asked at any time."""

    ledger: Ledger

    def requests(self) -> tuple[RequestStatus, ...]:
        """The live requests, the one that is in its state for the longest first: what each holds and waits for, and who
        holds that."""
        return self.ledger.requests()

    def holders(self) -> tuple[Holder, ...]:
        """Everybody who holds device blocks, the biggest first: requests, steps (also for requests that are over),
        pins, jobs, prefetches, demotions."""
        return self.ledger.holders()

    def explain(self) -> str:
        """`requests()` and `holders()` as a table to print."""
        return "\n".join((self.ledger.explain(), *map(printable, self._remarks())))

    def _remarks(self) -> Iterable[str]:
        """What the ledger does not know, in lines."""
        return ()
