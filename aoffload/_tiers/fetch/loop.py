"""A request fetches KV that only lower tiers hold into host memory, before it allocates blocks.

    ask     ask the remote store how many of the cells after the hit it has, for at most `ask_timeout_s`
    gate    estimate whether the blocks would arrive before they could be computed. If not, the request computes them
    fetch   copy the blocks into the host, for as long as computing them would take, and `fetch_timeout_s` at most
    match   match again: the request hits the blocks that have arrived; later blocks are for the next request

One transfer fetches from all tiers, up to the last token that any of them has. If the transfer would be too slow with
the remote store, the gate tries the tiers in the index alone: the disk, and the program's own tier. If one of these
fails, its copies are refused, and the fetch ends before their first unit.
"""

from __future__ import annotations

import attrs

from ..._common.prefix import Prefix
from ..._kernel.records import LedgerRequest
from ..._kernel.states import RequestState
from ..._runtime.costs import fetch_bound_s
from ..._runtime.session import Entered, weak_wake
from ..remote.loop import RemoteWork
from .rules import first_tokens


async def fetch(request: Entered, record: LedgerRequest, prefix: Prefix) -> None:
    """Fetch the blocks of `prefix` after the hit of `record` that lower tiers have, and match again.

    When the fetch ends for any reason, the request hits the blocks that are in host memory at that moment. A
    cancellation does not stop launched copies, because the next request can use their blocks.
    """
    if not _may_match_again(record):
        return
    found = await _Search(request, record, prefix).worth()
    if found is None or not _may_match_again(record):
        return

    def arrived() -> None:
        # Called by the ledger as the fetch ends: its blocks are evictable from now on.
        _match_again(request, record)
        request._wake()

    session = request._session
    transfer = session.ledger.fetches.fetch(
        found.wanted, arrived, num_remote_tokens=found.num_remote_tokens, for_request=record
    )
    session.worker.submit(transfer.plans)
    deadline = session.now() + found.bound_s
    try:
        while not transfer.is_over and (left_s := deadline - session.now()) > 0:
            await request._wait(left_s)
            request._live()  # raises if the request is over, or the runtime closed
    finally:
        if not transfer.is_over:
            session.ledger.transfers.cancel(transfer)
    request._live()
    _match_again(request, record)


@attrs.frozen
class _Worth:
    """A fetch that is worth its time."""

    wanted: Prefix
    num_remote_tokens: int
    bound_s: float


@attrs.frozen
class _Search:
    """Searches the lower tiers for the blocks after the hit of one request."""

    request: Entered
    record: LedgerRequest
    prefix: Prefix

    async def worth(self) -> _Worth | None:
        """The fetch to begin. None: no fetch is worth its time."""
        indexed_stop, indexed_s = self._of_index()
        limit_tokens = self.record.hit_limit * self.request._session.ledger.layout.unit_tokens
        # The longest hit that the request may have.
        most = first_tokens(self.prefix, min(limit_tokens, self.prefix.num_tokens - 1))
        remote = self.request._session.remote
        remote_stop = 0 if remote is None else await self._of_remote(remote, most, max(indexed_stop, self._hit))
        stop = max(indexed_stop, remote_stop)
        if stop <= self._hit:
            return None
        fetch_s = indexed_s
        if remote is not None and remote_stop:
            fetch_s = max(fetch_s, remote.fetch_s(most, remote_stop))
        bound_s = self._bound_s(stop, fetch_s)
        if not bound_s and remote_stop and indexed_stop > self._hit:  # without the remote store
            stop, remote_stop, fetch_s = indexed_stop, 0, indexed_s
            bound_s = self._bound_s(stop, fetch_s)
        if not bound_s:
            self._declined(stop, fetch_s)
            return None
        return _Worth(first_tokens(self.prefix, stop), remote_stop, bound_s)

    @property
    def _hit(self) -> int:
        return self.record.match.num_tokens

    def _of_index(self) -> tuple[int, float]:
        """The token up to which the tiers in the index could extend the hit, and the seconds that this would take."""
        works, match = self.request._session.indexed_tiers, self.record.match
        if not match.num_lower_tokens:
            return 0, 0.0
        usable = [work for work in works if work.may_fetch]
        if not usable:
            for work in works:
                work.skip_fetch(self.record.request_id)
            return 0, 0.0
        stop = match.num_tokens + match.num_lower_tokens
        return stop, max([work.fetch_s(first_tokens(self.prefix, stop)) for work in usable])

    async def _of_remote(self, remote: RemoteWork, prefix: Prefix, after: int) -> int:
        """The token up to which the remote store has cells; 0 if it is not after token `after`. The store is not asked
        if even a fetch of the whole prompt would not be worth its time."""
        stop = remote.cells_stop(prefix.num_tokens)
        if stop <= after:
            return 0
        if not remote.may_fetch:
            remote.skip_fetch(self.record.request_id)
            return 0
        fetch_s = remote.fetch_s(prefix, stop)
        if not self._bound_s(stop, fetch_s):
            self._declined(stop, fetch_s)
            return 0
        labels = await remote.labels(prefix, after)
        answers: list[int] = []
        wake = weak_wake(self.request)

        def answered(num_cells: int) -> None:
            answers.append(num_cells)
            wake()

        session = self.request._session
        question = remote.ask(labels, answered)
        session.ledger.reports.asking[self.record] = session.now()
        try:
            while not answers:
                await self.request._wait()
                self.request._live()
        finally:
            question.cancel()
            session.ledger.reports.asking.pop(self.record, None)
        if not remote.is_on:
            return 0  # a reset came meanwhile, and the cells are from before it
        num_cells = min(answers[0], len(labels))
        return labels[num_cells - 1].stop * self.request._session.ledger.layout.unit_tokens if num_cells else 0

    def _bound_s(self, stop: int, fetch_s: float) -> float:
        """Seconds that the request waits for a fetch up to token `stop` that takes `fetch_s`. 0: the request computes
        instead."""
        session = self.request._session
        speed = None if session.speed is None else session.speed.tokens_per_s
        return fetch_bound_s(stop - self._hit, speed, fetch_s, session.config.fetch_bound_s)

    def _declined(self, stop: int, fetch_s: float) -> None:
        session = self.request._session
        session.num_fetches_declined += 1
        session.telemetry.fetch_declined(self.record.request_id, stop - self._hit, fetch_s)


def _may_match_again(record: LedgerRequest) -> bool:
    return record.state is RequestState.PINNED and record.waiter is None


def _match_again(request: Entered, record: LedgerRequest) -> None:
    if _may_match_again(record):
        request._session.ledger.fetches.match_again(record)
        request._matched(record)
