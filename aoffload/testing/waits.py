"""The oracles of waiting: no task is woken without reason, no task sleeps after its wait has ended, and no wait exceeds
its bound.

They check when nothing is ready and time is about to pass. A task that sleeps at that moment was not woken.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs

from .._extensions.transfers import Fetch
from .._kernel.records import LedgerRequest
from .._kernel.states import RequestState
from .._runtime.request import RequestBase
from .._runtime.runtime import AnyRuntime
from .._tiers.remote.loop import LATE_S
from .._tiers.remote.rules import cells_before
from .transport import SimulatedTransport
from .violations import Violation

__all__ = ["Waits"]

MARGIN_S = 1e-6


@attrs.define(eq=False)
class Waits:
    """Watches the waits of one runtime."""

    runtime: AnyRuntime
    now: Callable[[], float]
    broken: list[Violation] = attrs.field(factory=list)
    """Violations found inside a call whose caller may swallow them."""
    is_brought: Callable[[LedgerRequest], bool] = lambda record: True
    """For a request that was answered PENDING: whether another request brings its next block."""
    _since: dict[int, tuple[Any, float]] = attrs.field(factory=dict)
    """By address, the events that tasks wait for, and the start of the wait. The events are stored here so that no
    other object gets their address."""
    _loading: set[int] = attrs.field(factory=set)
    """Tickets of records that have begun a load."""

    def watched(self, record: LedgerRequest, wake: Callable[[], object]) -> Callable[[], object]:
        """`wake`, with a check that the wait of `record` has ended."""

        def checked() -> object:
            waiter = record.waiter
            is_over = record.state in (RequestState.RUNNING, RequestState.PREEMPTED)
            if not is_over and (waiter is None or not waiter.is_over):
                self.broken.append(Violation("woken for nothing", f"{record} is woken, and its wait is not over"))
            return wake()

        return checked

    def load_begun(self, record: LedgerRequest) -> None:
        """Check that a request does not retry a lost load. Two requests that retry could free blocks for each other for
        ever."""
        if record.ticket in self._loading:
            raise Violation("loaded twice", f"{record} has begun its second load")
        self._loading.add(record.ticket)

    def has_resumed(self, record: LedgerRequest) -> None:
        """A resumed request may load once more."""
        self._loading.discard(record.ticket)

    # -- when nothing is ready ------------------------------------------------------------------------------------

    def check(self, until: float) -> None:
        """Check all waits. Nothing is ready, nor will be before `until`."""
        since = self._since
        self._since = {}
        for request in tuple(self.runtime._session.requests.values()):
            assert isinstance(request, RequestBase)
            for event in request._waiting or ():
                if not event.is_set():
                    began_s = since.get(id(event), (event, self.now()))[1]
                    self._since[id(event)] = (event, began_s)
                    self._check_wait(request, began_s, until)
        self._check_copies(until)

    def _check_wait(self, request: RequestBase[Any, Any], began_s: float, until: float) -> None:
        record = request._record
        assert record is not None
        if record.match.is_pending:
            self._check_pending(record, until - began_s)
            return
        in_line = record.waiter is not None and not record.waiter.is_over
        if record.load is None and not in_line and not record.num_steps:
            if self._check_fetch(record, until - began_s) or self._check_question(record, until - began_s):
                return
            raise Violation("nobody was woken", f"a task of {record} sleeps on what is over")
        waits_s, bound_s = until - began_s, self.runtime.config.load_timeout_s
        if record.load is not None and waits_s > bound_s + MARGIN_S:
            raise Violation("a wait past its bound", f"{record} waits for its load for {waits_s:.1f} s")

    def _check_fetch(self, record: LedgerRequest, waits_s: float) -> bool:
        """Whether it waits for a fetch of its own prompt, and no longer than the bound."""
        tokens = record.sequence._prompt
        fetches = [one for one in self.runtime.ledger.transfers.under_way.values() if isinstance(one, Fetch)]
        if not any(tokens.startswith(one.request.sequence._prompt) for one in fetches):
            return False
        if waits_s > self.runtime.config.fetch_bound_s + MARGIN_S:
            raise Violation("a wait past its bound", f"{record} waits for its fetch for {waits_s:.1f} s")
        return True

    def _check_question(self, record: LedgerRequest, waits_s: float) -> bool:
        """Whether it waits for a question to a remote store about its own prompt, and no longer than the bound."""
        transport = self.runtime.transport
        remote = transport.remote if isinstance(transport, SimulatedTransport) else None
        if remote is None:
            return False
        ledger, sequence = self.runtime.ledger, record.sequence
        cells = cells_before(sequence, sequence.num_tokens // ledger.layout.unit_tokens, ledger.remote.cell_units)
        if not any(labels and labels[0] in cells for labels in remote.asked):
            return False
        if waits_s > remote.tier.ask_timeout_s + LATE_S + MARGIN_S:
            raise Violation("a wait past its bound", f"{record} waits for an answer for {waits_s:.3f} s")
        return True

    def _check_pending(self, record: LedgerRequest, waits_s: float) -> None:
        if not self.is_brought(record):
            raise Violation("a wait without a need", f"{record} was told to ask again, and waits for nobody")
        if waits_s > self.runtime.config.pending_timeout_s + MARGIN_S:
            raise Violation("a wait past its bound", f"{record} waits for another's load for {waits_s:.1f} s")

    def _check_copies(self, until: float) -> None:
        worker = self.runtime.worker
        if worker.copies.next_deadline < until - MARGIN_S and not worker._has_ended:
            raise Violation("a wait past its bound", f"{worker.copies} still expects a job, or keeps a pin")
