"""Forks: a new request continues from where its parent is, and shares the blocks of the full units.

    parent   [ published: cached, leased ........)[ private, partly computed )
    child    [ the same blocks, a lease of its own )[ own blocks, into which the engine copies )
             0                                shared

The child begins RUNNING, with the tokens and the limits of its parent. It never waits for blocks. Like an extension, a
fork goes ahead of allocations, but not of waiting extensions.

Copied blocks carry KV from parent to child without a lease. So a request remembers its origins, each with the number of
tokens that it had computed at the fork, and an invalidation of an origin reaches its forks (`taken_from`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import attrs

from .._kernel.cache import PrefixCache
from .._kernel.index import held_ids, stretches
from .._kernel.leases import RequestLeases
from .._kernel.moves import Moves
from .._kernel.plans import PrefixMatch
from .._kernel.records import BlockTable, nulls
from .._kernel.requests import LedgerRequest
from .._kernel.states import NoEpoch, Tier
from .._kernel.waiting import Admission, waiting_error
from ..errors import OutOfBlocks, WrongState


@attrs.frozen
class Fork:
    """A forked request, and the blocks that the engine must copy before the fork or its parent goes on."""

    request: LedgerRequest
    copies: tuple[tuple[int, int], ...]
    """(source, destination) device blocks: blocks that are not full, and others that could not be shared."""


@dataclass(slots=True, eq=False)
class Forks:
    cache: PrefixCache
    request_leases: RequestLeases
    admission: Admission
    moves: Moves
    over: dict[LedgerRequest, None] = field(default_factory=dict)
    """Forks that are over while a request from which they were forked is live. Their published units depend on a block
    that was copied from that request, and the index does not show this."""
    _over_of: dict[LedgerRequest, list[LedgerRequest]] = field(default_factory=dict)
    """The same by origin, so that the end of a request scans its own forks only."""

    def leaving(self, request: LedgerRequest) -> None:
        """`request` is about to release everything: remember it if it is a fork with published units, which an
        invalidation of an origin must reach."""
        origins = [origin for origin in request.origins if not origin.is_over]
        if origins and (request.read_before or request.published > request.ready_stop):
            request.read_before = max(request.read_before, request.published)
            self.over[request] = None
            for origin in origins:
                self._over_of.setdefault(origin, []).append(request)

    def left(self, request: LedgerRequest) -> None:
        """`request` is over: forget its forks whose origins are all over, because no invalidation can reach them."""
        for fork in self._over_of.pop(request, ()):
            if all(origin.is_over for origin in fork.origins):
                del self.over[fork]

    def check(self, parent: LedgerRequest) -> None:
        """Refuse to fork a request that waits for blocks, is in a step, or was invalidated."""
        if parent.waiter is not None:
            raise waiting_error(parent, "fork")
        if parent.num_steps:
            raise WrongState(f"fork: a step writes into the blocks of {parent}")
        if parent.epoch is NoEpoch.INVALIDATED:
            raise WrongState(f"fork: {parent} has read KV that was invalidated: it must be aborted")

    def shared_stop(self, parent: LedgerRequest) -> int:
        """The unit up to which `parent` can share its blocks: published, and not found corrupt since."""
        stop = parent.published
        for component, table in zip(self.cache.layout.components, parent.tables, strict=True):
            for run, first, last in stretches(parent.device_run, table.start, stop) if component.width else ():
                part = run.part(Tier.DEVICE, component.number)
                if part.stop < last or part.first > first:
                    stop = min(stop, part.stop if part.first <= first else first)
        return stop

    def fork(self, parent: LedgerRequest, name: str, ticket: int, num_tokens: int) -> Fork:
        """A request with the same tokens, and with blocks for `num_tokens`, or for all known tokens if those are more.
        `OutOfBlocks` changes nothing. The caller moves the state of the new request."""
        layout, components, shared = self.cache.layout, self.cache.layout.components, self.shared_stop(parent)
        num_units = layout.num_units(max(num_tokens, parent.sequence.num_tokens, parent.num_computed_tokens))

        firsts = [max(shared, table.start) for table in parent.tables]
        counts = [
            max(0, num_units - first) * component.width for component, first in zip(components, firsts, strict=True)
        ]
        available, capacity = self.admission.num_available, self.admission.capacity
        needed = sum(num_units * table.width - table.start * table.width for table in parent.tables)
        if needed > capacity:
            raise OutOfBlocks(needed, capacity, retryable=False)
        would_overtake = bool(self.admission.queue.extending)
        if would_overtake or sum(counts) > available:
            raise OutOfBlocks(sum(counts), 0 if would_overtake else available, retryable=True)
        own = [self.cache.take(Tier.DEVICE, count) for count in counts]

        child = LedgerRequest(
            name, parent.sequence.copy(), parent.epoch, ticket, parent.hit_limit, parent.hit_alignment,
            store_limit=parent.store_limit, ledger=parent.ledger, evictions_before=parent.evictions_before,
        )  # fmt: skip
        if shared:
            lease = parent.leases[Tier.DEVICE]
            run = self.cache.cut(lease.run, shared)
            starts = [min(start, run.stop) for start in lease.starts]
            child.leases[Tier.DEVICE] = self.cache.lease(Tier.DEVICE, run, starts)
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
        child.origins = {origin: stop for origin, stop in parent.origins.items() if not origin.is_over}
        child.origins[parent] = parent.num_computed_tokens

        copies: list[tuple[int, int]] = []
        old_ids, new_ids = ([table.ids for table in request.tables] for request in (parent, child))
        for group, old, new in zip(layout.groups, layout.by_group(old_ids), layout.by_group(new_ids), strict=True):
            start = shared * (layout.unit_tokens // group.block_size)
            stop = -(-parent.num_computed_tokens // group.block_size)
            copies += [pair for pair in zip(old[start:stop], new[start:stop], strict=True) if all(pair)]
        parent.last_step = 0  # the engine copies from its blocks, outside of steps
        return Fork(child, tuple(copies))


def taken_from(request: LedgerRequest, sources: Mapping[LedgerRequest, int], unit_tokens: int) -> list[int]:
    """For each of `sources` (with its first wrong token) of which `request` is a fork that copied wrong KV: the first
    wrong unit."""
    copied = request.origins.items()
    return [sources[source] // unit_tokens for source, stop in copied if source in sources and stop > sources[source]]
