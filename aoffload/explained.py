"""What a runtime says about itself when nothing goes on."""

from __future__ import annotations

from collections.abc import Iterable

from .core.ledger import Ledger
from .core.status import Holder, RequestStatus, printable
from .session_life import BoundSession

__all__ = ["Explained"]


class Explained:
    """Queries that a runtime passes on to its ledger. They change nothing. Call them at any time in the event loop's
    thread, or, before the runtime is opened and after it is closed, in any thread."""

    ledger: Ledger
    _session: BoundSession

    def requests(self) -> tuple[RequestStatus, ...]:
        """The live requests, the one that is in its state for the longest first: what each holds and waits for, and who
        holds that."""
        self._session.check_may_look()
        return self.ledger.requests()

    def holders(self) -> tuple[Holder, ...]:
        """Everybody who holds device blocks, the biggest first: requests, steps (also for requests that are over),
        pins, jobs, prefetches, demotions."""
        self._session.check_may_look()
        return self.ledger.holders()

    def explain(self) -> str:
        """`requests()` and `holders()` as a table to print."""
        self._session.check_may_look()
        return "\n".join((self.ledger.explain(), *map(printable, self._remarks())))

    def _remarks(self) -> Iterable[str]:
        """What the ledger does not know, in lines."""
        return ()
