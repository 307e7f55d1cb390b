"""Forks: a new request continues from the present token of its parent, and shares the blocks of the full units.

    parent   [ published: cached, leased ........)[ private, partly computed )
    child    [ the same blocks, its own lease ......)[ own blocks, into which the engine copies )
             0                                shared

The child begins RUNNING, with the tokens and the limits of its parent. It never waits for blocks. A fork takes blocks
before requests that wait for their first blocks, but after requests that wait to extend their tables.

A copied block carries KV from parent to child, but no lease shows it. So the extension records the *origins* of each
fork, with the number of tokens that each origin had computed at the fork. With that record, an invalidation of an
origin also finds its forks (`ask_first_wrong`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import attrs

from .._common.arguments import check_int
from .._common.tiers import Tier
from .._kernel.extension import LedgerExtension
from .._kernel.index import held_ids, stretches
from .._kernel.leases import checkpoint_ids
from .._kernel.ledger import CoreLedger
from .._kernel.plans import PrefixMatch
from .._kernel.records import NO_LIMIT, BlockTable, Checkpoints, LedgerRequest, nulls
from .._kernel.states import NoEpoch, require
from .._kernel.states import RequestState as State
from .._kernel.waiting import waiting_error
from ..errors import OutOfBlocks, WrongState
from .invalidation import Invalidation


@attrs.frozen
class Fork:
    """A forked request, and the blocks that the engine must copy before the fork or its parent continues."""

    request: LedgerRequest
    copies: tuple[tuple[int, int], ...]
    """Pairs of device blocks (source, destination) to copy: the blocks that are not full, and the blocks that could not
    be shared."""


class Forks(LedgerExtension):
    """Starts requests that share the blocks of others (`Ledger.forks`)."""

    def __init__(self) -> None:
        self._origins: dict[LedgerRequest, dict[LedgerRequest, int]] = {}
        """By fork: its origins, which are the requests that it descends from, each with its number of computed tokens
        at that fork."""
        self._over: dict[LedgerRequest, None] = {}
        """Forks that are over while one of their origins is live. Their published units may depend on a block that was
        copied from the origin, and the index does not show this."""
        self._over_of: dict[LedgerRequest, list[LedgerRequest]] = {}
        """The forks of `_over` by origin, so that the end of a request scans only its own forks."""

    def on_attach(self, ledger: CoreLedger) -> None:
        self._ledger, self._cache, self._admission = ledger, ledger.cache, ledger.admission
        self._invalidation = ledger.add_once(Invalidation, Invalidation)

    # -- the verbs ------------------------------------------------------------------------------------------------

    def num_shared_tokens(self, request: LedgerRequest) -> int:
        """Number of leading tokens whose blocks a fork of `request` would share. The fork needs its own blocks for the
        later tokens."""
        require(self._ledger.own(request), "fork", State.RUNNING)
        return self._shared_stop(request) * self._cache.layout.unit_tokens

    def fork(self, request: LedgerRequest, request_id: str | None = None, *, num_tokens: int = 0) -> Fork:
        """Start another request with the present tokens of `request`. The fork is RUNNING from the start. It shares the
        full blocks; the engine copies the others (`Fork.copies`). The fork gets blocks for `num_tokens`, or for all
        known tokens if there are more. If `OutOfBlocks` is raised, nothing has changed."""
        ledger = self._ledger
        require(ledger.own(request), "fork", State.RUNNING)
        self._check(request)
        name, wanted = ledger.new_name(request_id), check_int("num_tokens", num_tokens, 0)
        fork = self._fork(request, name, ledger.num_admitted, wanted)
        ledger.enrol(fork.request, request)
        for state in (State.MATCHED, State.PINNED, State.ALLOCATED, State.RUNNING):
            ledger.moves.request(fork.request, state)
        ledger.moves.report()
        if ledger.hooks.error is not None:
            ledger.release(fork.request, "error: ExtensionError")  # the caller does not get the fork
        return fork

    # -- hooks ----------------------------------------------------------------------------------------------------

    def on_leaving(self, request: LedgerRequest, is_last: bool) -> None:
        """Remember a fork with published units, because an invalidation of an origin must find these."""
        if not is_last or request not in self._origins:
            return
        origins = [origin for origin in self._origins[request] if not origin.is_over]
        if origins and (self._invalidation.has_read(request) or request.published > request.ready_stop):
            self._invalidation.keep(request)
            self._over[request] = None
            for origin in origins:
                self._over_of.setdefault(origin, []).append(request)

    def on_released(self, request: LedgerRequest) -> None:
        """Forget the forks whose origins are all over, because no invalidation has to find their units any more."""
        for fork in self._over_of.pop(request, ()):
            if all(origin.is_over for origin in self._origins.get(fork, ())):
                self._over.pop(fork, None)
                self._origins.pop(fork, None)
                self._invalidation.forget(fork)
        if request not in self._over:
            self._origins.pop(request, None)

    def ask_former_readers(self) -> Iterable[LedgerRequest]:
        return self._over

    def ask_first_wrong(self, request: LedgerRequest, sources: Mapping[LedgerRequest, int]) -> int | None:
        """The first wrong unit that `request`, a fork, has copied from one of `sources`."""
        copied, unit = self._origins.get(request, {}).items(), self._cache.layout.unit_tokens
        return min(
            [sources[one] // unit for one, stop in copied if one in sources and stop > sources[one]], default=None
        )

    # -- the fork itself ------------------------------------------------------------------------------------------

    def _check(self, parent: LedgerRequest) -> None:
        """Refuse to fork a request that waits for blocks, is in a step, or was invalidated."""
        if parent.waiter is not None:
            raise waiting_error(parent, "fork")
        if parent.num_steps:
            raise WrongState(f"fork: a step writes into the blocks of {parent}")
        if parent.epoch is NoEpoch.INVALIDATED:
            raise WrongState(f"fork: {parent} has read KV that was invalidated: it must be aborted")
        resume = parent.checkpoints.resume if parent.checkpoints is not None else None
        if resume:
            at = parent.ready_stop
            is_shared = self._shared_stop(parent) == at and checkpoint_ids(self._cache, parent, at) == resume
            if not is_shared:
                raise WrongState(f"fork: the checkpoint of {parent} is no longer cached: fork after its first commit")

    def _shared_stop(self, parent: LedgerRequest) -> int:
        """The unit up to which `parent` can share its blocks. They must be published, and not found corrupt since."""
        stop = parent.published
        for component, table in zip(self._cache.layout.paged, parent.tables, strict=True):
            for run, first, last in stretches(parent.device_run, table.start, stop) if component.width else ():
                part = run.part(Tier.DEVICE, component.number)
                if part.stop < last or part.first > first:
                    stop = min(stop, part.stop if part.first <= first else first)
        return stop

    def _fork(self, parent: LedgerRequest, name: str, ticket: int, num_tokens: int) -> Fork:
        """Make a request with the same tokens, and with blocks for `num_tokens`, or for all known tokens if there are
        more of them. `OutOfBlocks` changes nothing. The caller sets the state of the new request."""
        layout, components, shared = self._cache.layout, self._cache.layout.paged, self._shared_stop(parent)
        num_units = layout.num_units(max(num_tokens, parent.sequence.num_tokens, parent.num_computed_tokens))

        firsts = [max(shared, table.start) for table in parent.tables]
        counts = [
            max(0, num_units - first) * component.width for component, first in zip(components, firsts, strict=True)
        ]
        available, capacity = self._admission.num_available, self._admission.capacity
        needed = sum(num_units * table.width - table.start * table.width for table in parent.tables)
        if needed > capacity:
            raise OutOfBlocks(needed, capacity, retryable=False)
        would_overtake = bool(self._admission.queue.extending)
        if would_overtake or sum(counts) > available:
            raise OutOfBlocks(sum(counts), 0 if would_overtake else available, retryable=True)
        own = [self._cache.take(Tier.DEVICE, count) for count in counts]

        child = LedgerRequest(
            name, parent.sequence.copy(), parent.epoch, ticket, parent.hit_limit, parent.hit_alignment,
            store_limit=parent.store_limit, ledger=parent.ledger, evictions_before=parent.evictions_before,
        )  # fmt: skip
        child.has_parent = True
        if shared:
            lease = parent.leases[Tier.DEVICE]
            run = self._cache.cut(lease.run, shared)
            starts = [start if start == NO_LIMIT else min(start, run.stop) for start in lease.starts]
            child.leases[Tier.DEVICE] = self._cache.lease(Tier.DEVICE, run, starts)
        tables: list[BlockTable] = []
        for component, first, fresh in zip(components, firsts, own, strict=True):
            start = parent.tables[component.number].start
            held = held_ids(child.device_run, Tier.DEVICE, component.number, start, shared)
            before, between = min(start, shared), min(first, num_units) - shared
            ids = nulls(before * component.width) + held + nulls(between * component.width) + fresh
            tables.append(BlockTable(component.width, ids, start))
        child.tables, child.num_units = tuple(tables), num_units
        child.published = child.ready_stop = child.hit_stop = shared
        child.match = PrefixMatch(shared * layout.unit_tokens, 0)
        child.num_computed_tokens = parent.num_computed_tokens
        if parent.checkpoints is not None:
            # The engine copies the running state, or both requests continue from the same checkpoint.
            child.checkpoints = Checkpoints()
            child.checkpoints.resume = parent.checkpoints.resume[:]
        origins = {origin: stop for origin, stop in self._origins.get(parent, {}).items() if not origin.is_over}
        self._origins[child] = {**origins, parent: parent.num_computed_tokens}

        copies: list[tuple[int, int]] = []
        old_ids, new_ids = ([table.ids for table in request.tables] for request in (parent, child))
        for group, old, new in zip(layout.groups, layout.by_group(old_ids), layout.by_group(new_ids), strict=True):
            start = shared * (layout.unit_tokens // group.block_size)
            stop = -(-parent.num_computed_tokens // group.block_size)
            copies += [pair for pair in zip(old[start:stop], new[start:stop], strict=True) if all(pair)]
        parent.last_step = 0  # the engine copies from its blocks, outside of steps
        return Fork(child, tuple(copies))
