"""Invalidation: withdraw the KV that a failed forward has committed, and find the requests that may have read it.

A forward has failed after its tokens were committed. The KV from `from_token` on is wrong, and so is all KV that was
computed from it. A search fills two sets until neither of them grows:

    wrong      runs whose blocks are wrong: at first the runs that the request itself has published from there on
    sources    requests that have computed wrong KV, each with its first wrong token: at first the request

    A request is tainted if it may have read wrong KV:
        a lease of its block tables covers a wrong run; or
        it gave up its blocks since (preempted), and its tokens agree with wrong tokens of a source; or
        an extension reports it (`ask_first_wrong`): a fork has copied wrong KV of a source
    Then it is a source, too, and the runs that it uses from its first wrong unit on are wrong.

Requests that are over but still in a step, and forks that are over, are searched too, because other requests may have
read the KV that they computed. A tainted request publishes nothing any more, and its caller aborts it. All wrong runs
and the runs after them are removed from the index. A request without blocks whose match pins such runs is matched
again.

The request itself computes again from `from_token` on. Its blocks there become private again, so no other request may
read them. In place of blocks that other requests still read, it takes fresh blocks. If it cannot take them, it is
tainted, too. So is a request with a recurrent state, because its running state is that of a later token.

**Checkpoints.** A checkpoint of a recurrent state may be wrong although the KV of its run is not, if another request
has computed and published that KV first. So the checkpoints of the sources after their first wrong tokens are withdrawn
by themselves. A request has read such a checkpoint if it continued at its position and agrees with the source up to
there.

**Memory.** After a request has given up its blocks, no lease shows which units it has read. So its number of published
units is remembered until the request is over. For a fork it is remembered until no origin is live any more (`keep`).
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable

from .._common.arguments import check_int
from .._common.tiers import Tier
from .._kernel.cache import PrefixCache
from .._kernel.extension import LedgerExtension
from .._kernel.index import stretches
from .._kernel.layout import Component, without
from .._kernel.leases import step_back
from .._kernel.ledger import CoreLedger
from .._kernel.records import LedgerRequest, Run
from .._kernel.states import NoEpoch, require
from .._kernel.states import RequestState as State
from ..errors import CommitError


class Invalidation(LedgerExtension):
    """Withdraws wrong KV (`Ledger.invalidation`)."""

    def __init__(self) -> None:
        self._read_before: dict[LedgerRequest, int] = {}
        """Number of leading units that a request may have read from blocks that it no longer leases."""
        self._kept: dict[LedgerRequest, None] = {}
        """Requests that are over and not forgotten yet."""

    def on_attach(self, ledger: CoreLedger) -> None:
        self._ledger, self.hooks = ledger, ledger.hooks
        self.cache, self.request_leases, self.admission = ledger.cache, ledger.request_leases, ledger.admission
        self.jobs = ledger.jobs

    # -- the verb -------------------------------------------------------------------------------------------------

    def invalidate(self, request: LedgerRequest, from_token: int) -> tuple[LedgerRequest, ...]:
        """Invalidate the KV of `request` from `from_token` on, because the forward that committed it has failed.

        Drops the generated tokens after `from_token`, because that forward or a later one sampled them. Returns the
        other requests that may have read the wrong KV; abort them. If `request` itself comes first in the result, abort
        it, too: it cannot compute again. The reason is one of three: the units have left its window, its recurrent
        state is that of a later token, or other requests still read its blocks and it cannot get fresh ones.
        """
        ledger = self._ledger
        require(ledger.own(request), "invalidate", State.RUNNING)
        ready = request.ready_stop * self.cache.layout.unit_tokens
        check_int("from_token", from_token, 0)
        if not ready <= from_token <= request.num_computed_tokens:
            raise CommitError("from_token", f"must lie in [{ready}, {request.num_computed_tokens}], got {from_token}")
        sequence, published = request.sequence, request.published
        if self.hooks.on_invalidated:
            sequence = sequence.copy()
        # Requests that are over, but in a step or forks, may have read the KV, too. They need not be aborted.
        readers = dict.fromkeys((*ledger.live_requests.values(), *ledger.closing))
        for ask in self.hooks.ask_former_readers:
            readers.update(dict.fromkeys(ask()))
        tainted = self._invalidate(request, from_token, readers)
        start, wakes = from_token // self.cache.layout.unit_tokens, list[Callable[[], object]]()
        if start < published:
            wakes += ledger.invalidated(sequence, start, published)
        for reader, first in tainted.items() if self.hooks.on_invalidated else ():
            # A fork may have published units of which `request` has only a part.
            stop = max(reader.published, self._read_before.get(reader, 0))
            if reader is not request and first < stop:
                wakes += ledger.invalidated(reader.sequence, first, stop)
        return ledger.end_invalidation(tuple([reader for reader in tainted if not reader.is_over]), wakes)

    # -- the search -----------------------------------------------------------------------------------------------

    def _invalidate(
        self, request: LedgerRequest, from_token: int, readers: Iterable[LedgerRequest]
    ) -> dict[LedgerRequest, int]:
        """Returns the tainted requests, each with its first wrong unit, including those that are over. `request` comes
        first if it cannot compute again.

        A request that is matched again may have a grant that it has not accepted yet. Then it gives back the grant and
        joins the wait queue again.
        """
        start = from_token // self.cache.layout.unit_tokens
        others = [other for other in readers if other is not request]
        # Needed after a reset, too, when the index has none of these runs, because other requests may still share the
        # blocks.
        wrong = dict.fromkeys(self._runs_from(request, first_published(self.cache, request, start), ()))
        sources = {request: from_token}
        tainted = self._taint(wrong, others, sources)
        self.cache.withdraw_all(wrong, self.jobs.unsettled.values())
        matched = [other for other in others if other in tainted or _leases_any(other, wrong)]
        if request.checkpoints is not None:
            self._withdraw_checkpoints(sources)
            matched = [other for other in others if other in matched or not other.tables]
        for hook in self.hooks.on_withdrawn:  # a hook may split runs of `wrong`
            hook()
        self.admission.match_again(matched)
        is_back = request.checkpoints is not None and from_token < request.num_computed_tokens
        goes_on = self._compute_again(request, from_token, tainted) and not is_back
        request.sequence.drop_after(from_token + 1)
        request.num_computed_tokens = from_token
        tables = zip(self.cache.layout.windows, request.tables[1:], strict=True)
        if goes_on and all(table.start <= component.first_needed(from_token) for component, table in tables):
            return tainted
        # Other requests read its blocks, or its windows or its running state no longer reach back to `from_token`.
        request.epoch = NoEpoch.INVALIDATED
        return {request: start, **tainted}

    def _compute_again(self, request: LedgerRequest, from_token: int, readers: Iterable[LedgerRequest]) -> bool:
        """Let `request` compute again from `from_token` on, into private blocks. False: other requests still read some
        of its blocks, and `request` cannot take fresh blocks in their place. There are too few available blocks, or a
        step of `request` writes to its blocks, or the first block begins with correct KV, which a fresh block would
        lack."""
        start, excess = divmod(from_token, self.cache.layout.unit_tokens)
        published = published_by(self.cache, request, start)
        shared = read_by(readers, published)
        needed = sum((run.stop - run.start) * component.width for component, run in shared)
        is_half_right = excess and any(run.start == start for _, run in shared)  # in any component
        if shared and (request.num_steps or needed > self.admission.num_available or is_half_right):
            return False
        take_private(self.cache, request, published, shared)
        step_back(self.request_leases, request, start)
        return True

    def _taint(
        self, wrong: dict[Run, None], others: list[LedgerRequest], sources: dict[LedgerRequest, int]
    ) -> dict[LedgerRequest, int]:
        """Find the requests among `others` that may have read wrong KV, and taint them. Returns them, each with its
        first wrong unit. Adds them to `sources`, and their runs to `wrong`: the head of this module describes the
        search."""
        tainted: dict[LedgerRequest, int] = {}
        found = True
        while found:
            found = False
            for other in others:
                if other in tainted:
                    continue
                # A request without block tables has read nothing: its leases only pin.
                leases = other.all_leases() if other.tables else ()
                read = [run.start for lease in leases for run in lease.run.path() if run in wrong]
                read += self._read_before_of(other, sources)
                read += self._checkpoints_read_by(other, sources)
                for ask in self.hooks.ask_first_wrong:
                    if (first := ask(other, sources)) is not None:
                        read.append(first)
                if read:
                    # The KV that it computed before its first wrong unit is correct, and other requests may use it.
                    tainted[other] = min(read)
                    sources[other] = min(read) * self.cache.layout.unit_tokens
                    other.epoch = NoEpoch.INVALIDATED  # its task may still commit before it unwinds
                    wrong.update(dict.fromkeys(self._runs_from(other, min(read), wrong)))
                    found = True
        return tainted

    def _read_before_of(self, other: LedgerRequest, sources: dict[LedgerRequest, int]) -> list[int]:
        """The first wrong unit of each of `sources` whose wrong KV `other` may have read before it gave up its blocks.
        No lease of `other` shows this any more, so its tokens are compared. `other` is tainted even if it computes all
        KV again, because tokens that it sampled from wrong KV are wrong."""
        read_before = self._read_before.get(other, 0)
        if not read_before:
            return []
        unit = self.cache.layout.unit_tokens
        firsts = {source: at // unit for source, at in sources.items()}
        return [
            first
            for source, first in firsts.items()
            if first < read_before and other.sequence.agrees(source.sequence, (first + 1) * unit)
        ]

    def _checkpoints_read_by(self, other: LedgerRequest, sources: dict[LedgerRequest, int]) -> list[int]:
        """The units of the wrong checkpoints of `sources` from which `other` may have continued."""
        stop, unit = other.ready_stop, self.cache.layout.unit_tokens
        if other.checkpoints is None or not other.tables or not stop:
            return []
        return [
            stop
            for source, from_token in sources.items()
            if stop in _wrong_checkpoints(source, from_token, unit)
            and other.sequence.agrees(source.sequence, stop * unit)
        ]

    def _withdraw_checkpoints(self, sources: dict[LedgerRequest, int]) -> None:
        """Withdraw the checkpoints that `sources` have published after their first wrong tokens."""
        for source, from_token in sources.items():
            for position in _wrong_checkpoints(source, from_token, self.cache.layout.unit_tokens):
                for run, agreed in list(self.cache.index.walk(source.sequence, position)):
                    if agreed == position:
                        self.cache.withdraw_checkpoint(run, position, self.jobs.unsettled.values())
                        self.cache.tidy(run)

    def _runs_from(self, request: LedgerRequest, start: int, cut: Container[Run]) -> list[Run]:
        """The runs from unit `start` on that the request uses: the runs of its device lease. If it has no tables: the
        cached runs of the tokens that it had published when it gave up its tables. Splits a run at `start`, unless it
        is in `cut`."""
        if request.tables:
            runs = request.device_run.whole_path() if request.device_run is not None else []
        else:
            walked = self.cache.index.walk(request.sequence, self._read_before.get(request, 0))
            runs = [run for run, _ in walked]
        for run in runs:
            if run.start < start < run.stop and run not in cut:
                self.cache.split(run, start)
        return [run for run in runs if run.stop > start]

    # -- remembered requests --------------------------------------------------------------------------------------

    def on_leaving(self, request: LedgerRequest, is_last: bool) -> None:
        if not is_last:
            self.remember(request)

    def remember(self, request: LedgerRequest) -> None:
        """Record that `request`, which is about to give up its blocks, may have read all its published units."""
        if request.published > self._read_before.get(request, 0):
            self._read_before[request] = request.published

    def has_read(self, request: LedgerRequest) -> bool:
        """Whether `request` may have read units that it no longer leases."""
        return request in self._read_before

    def keep(self, request: LedgerRequest) -> None:
        """Remember `request` beyond its end, until `forget`."""
        self.remember(request)
        self._kept[request] = None

    def forget(self, request: LedgerRequest) -> None:
        self._kept.pop(request, None)
        self._read_before.pop(request, None)

    def on_released(self, request: LedgerRequest) -> None:
        if request not in self._kept:
            self._read_before.pop(request, None)


def _leases_any(request: LedgerRequest, runs: dict[Run, None]) -> bool:
    return any(run in runs for lease in request.all_leases() for run in lease.run.path())


def _wrong_checkpoints(source: LedgerRequest, from_token: int, unit_tokens: int) -> list[int]:
    """The positions after `from_token`, in units, of the checkpoints that `source` has published."""
    published = [] if source.checkpoints is None else source.checkpoints.published
    return [position for position in published if position * unit_tokens > from_token]


def published_by(cache: PrefixCache, request: LedgerRequest, start: int) -> list[tuple[Component, Run]]:
    """The runs, by component, whose blocks from unit `start` on the request itself has published, without runs whose
    blocks another request has published first. Splits runs where these units begin and end."""
    own = _own_units(cache, request, start)
    for at in {at for _, units in own for at in (units.start, units.stop)}:
        for run, _, _ in stretches(request.device_run, at, at + 1):
            if run.start < at:
                cache.split(run, at)
    return [
        (component, run)
        for component, units in own
        for run, _, _ in stretches(request.device_run, units.start, units.stop)
    ]


def first_published(cache: PrefixCache, request: LedgerRequest, start: int) -> int:
    """The first unit from `start` on that the request itself has published; `request.published` if there is none."""
    return min((units.start for _, units in _own_units(cache, request, start)), default=request.published)


def _own_units(cache: PrefixCache, request: LedgerRequest, start: int) -> list[tuple[Component, range]]:
    ready = max(start, request.ready_stop)
    return [
        (component, units)
        for component, table in zip(cache.layout.paged, request.tables, strict=True)
        for units in without(table.duplicates, ready, request.published)
        if component.width
    ]


def read_by(readers: Iterable[LedgerRequest], published: list[tuple[Component, Run]]) -> list[tuple[Component, Run]]:
    """The runs of `published` whose blocks are in the tables of `readers`."""
    leases = [reader.leases[Tier.DEVICE] for reader in readers if reader.tables and Tier.DEVICE in reader.leases]
    paths = [(lease, set(lease.run.path())) for lease in leases]
    return [
        (component, run)
        for component, run in published
        if any(run in path and run.start >= lease.starts[component.number] for lease, path in paths)
    ]


def take_private(
    cache: PrefixCache,
    request: LedgerRequest,
    published: list[tuple[Component, Run]],
    shared: list[tuple[Component, Run]],
) -> None:
    """Make the withdrawn blocks of `published` private to the request again. The requests that read `shared` blocks
    keep them, and the request gets fresh blocks in their place, which must be available."""
    for component, run in published:
        table = request.tables[component.number]
        if run.start < table.start:
            continue  # the run has left the window
        if (component, run) in shared:
            cache.last_uses.gave_up(request, table.at(run.start, run.stop))
            table.put(run.start, cache.take(Tier.DEVICE, (run.stop - run.start) * component.width))
        else:
            run.part(Tier.DEVICE, component.number).disown(set(table.at(run.start, run.stop)))
