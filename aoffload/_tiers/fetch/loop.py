"""A request waits for what only tiers below the host have, before it asks for blocks.

question    what has the remote store behind the hit? For `ask_timeout_s`
gate        would it all arrive before it could be computed?
fetch       it is copied into the host, for as long as computing it would take
"""

from __future__ import annotations

import attrs

from ..._kernel.prefix import TOKEN_BYTES, Prefix
from ..._kernel.requests import LedgerRequest
from ..._kernel.states import RequestState
from ..._runtime.costs import fetch_bound_s
from ..._runtime.session import Entered
from ..remote.loop import RemoteWork

__all__ = ["fetch"]


async def fetch(request: Entered, record: LedgerRequest, prefix: Prefix) -> None:
    """Fetch what lower tiers have of `prefix` behind the hit of `record`, and match again: for as long as computing it
    would take, and `fetch_timeout_s` at most. What would arrive later than that is not fetched.

    However it ends, the request has what was in host memory at that moment. A cancellation leaves launched jobs alone:
    what they bring is there for the next one.
    """
    if not _may_match_again(record):
        return
    found = await _Offer(request, record, prefix).complete()
    if found is None or not _may_match_again(record):
        return

    def arrived() -> None:
        # In the step that ends the fetch: its blocks are evictable from now on.
        _match_again(request, record)
        request._wake()

    session = request._session
    transfer = session.ledger.fetch(
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
            session.ledger.cancel(transfer)
    request._live()
    _match_again(request, record)


@attrs.frozen
class _Worth:
    """What is worth a fetch."""

    wanted: Prefix
    num_remote_tokens: int
    bound_s: float


@attrs.frozen
class _Offer:
    """What lower tiers have for one request."""

    request: Entered
    record: LedgerRequest
    prefix: Prefix

    async def complete(self) -> _Worth | None:
        """None: nothing is worth a fetch."""
        disk_stop, disk_s = self._of_disk()
        most = self._first(self._limit_tokens)
        remote = self.request._session.remote
        remote_stop = 0 if remote is None else await self._of_remote(remote, most, max(disk_stop, self._hit))
        stop = max(disk_stop, remote_stop)
        if stop <= self._hit:
            return None
        fetch_s = disk_s if remote is None or not remote_stop else max(disk_s, remote.fetch_s(most, remote_stop))
        bound_s = self._bound_s(stop, fetch_s)
        if not bound_s and remote_stop and disk_stop > self._hit:  # the disk alone
            stop, remote_stop, fetch_s = disk_stop, 0, disk_s
            bound_s = self._bound_s(stop, fetch_s)
        if not bound_s:
            self._declined(stop, fetch_s)
            return None
        return _Worth(self._first(stop), remote_stop, bound_s)

    @property
    def _hit(self) -> int:
        return self.record.match.num_tokens

    @property
    def _limit_tokens(self) -> int:
        """Up to where the request may hit."""
        unit_tokens = self.request._session.ledger.layout.unit_tokens
        return min(self.record.hit_limit * unit_tokens, self.prefix.num_tokens - 1)

    def _of_disk(self) -> tuple[int, float]:
        """The token up to which the disk could bring the hit, and the seconds that it would take."""
        disk, match = self.request._session.disk, self.record.match
        if disk is None or not match.num_disk_tokens:
            return 0, 0.0
        if not disk.may_fetch:
            disk.skip_fetch(self.record.request_id)
            return 0, 0.0
        stop = match.num_tokens + match.num_disk_tokens
        return stop, disk.fetch_s(self._first(stop))

    async def _of_remote(self, remote: RemoteWork, prefix: Prefix, behind: int) -> int:
        """The token up to which the store has cells, if that is behind token `behind`; else 0. It is not asked if even
        all of the prompt would not be worth it."""
        stop = remote.cells_stop(prefix.num_tokens)
        if stop <= behind:
            return 0
        if not remote.may_fetch:
            remote.skip_fetch(self.record.request_id)
            return 0
        fetch_s = remote.fetch_s(prefix, stop)
        if not self._bound_s(stop, fetch_s):
            self._declined(stop, fetch_s)
            return 0
        labels = await remote.labels(prefix, behind)
        answers: list[int] = []
        wake = self.record.when_idle  # not `request._wake`: an answer that is late would keep the request alive

        def answered(num_cells: int) -> None:
            answers.append(num_cells)
            wake()

        session = self.request._session
        question = remote.ask(labels, answered)
        session.ledger.situation.asking[self.record] = session.now()
        try:
            while not answers:
                await self.request._wait()
                self.request._live()
        finally:
            question.cancel()
            session.ledger.situation.asking.pop(self.record, None)
        if not remote.is_on:
            return 0  # a reset has come in between: what the store has is of before
        num_cells = min(answers[0], len(labels))
        return labels[num_cells - 1].stop * self.request._session.ledger.layout.unit_tokens if num_cells else 0

    def _bound_s(self, stop: int, fetch_s: float) -> float:
        """How long the request waits for a fetch up to token `stop` that takes `fetch_s`; 0: it computes."""
        session = self.request._session
        speed = None if session.speed is None else session.speed.tokens_per_s
        return fetch_bound_s(stop - self._hit, speed, fetch_s, session.config.fetch_bound_s)

    def _declined(self, stop: int, fetch_s: float) -> None:
        session = self.request._session
        session.num_fetches_declined += 1
        session.telemetry.fetch_declined(self.record.request_id, stop - self._hit, fetch_s)

    def _first(self, num_tokens: int) -> Prefix:
        """The first tokens of the prompt, and one more, which is computed."""
        prefix = self.prefix
        if prefix.spans or num_tokens + 1 >= prefix.num_tokens:
            return prefix
        return Prefix(prefix.root, prefix.tokens[: (num_tokens + 1) * TOKEN_BYTES])


def _may_match_again(record: LedgerRequest) -> bool:
    return record.state is RequestState.PINNED and record.waiter is None


def _match_again(request: Entered, record: LedgerRequest) -> None:
    if _may_match_again(record):
        request._session.ledger.match_fetched(record)
        request._session.bound(record, request._left_s())
