"""Commits: publish what a forward has computed, and store it in the host.

A commit names the number of tokens that are computed in all. Whole units are published: they become findable on the
device, for all requests. A checkpoint of a recurrent state is published only if the commit names it: a forward
overwrites the state, so how far it has computed does not tell where it has copied the state. `Stores` plans jobs for
the units that the host lacks. Last, the windows slide: blocks that no later token reads are given back.

Store policies and extensions may lower the unit up to which blocks are stored (`ask_store_stop`). They are asked before
anything has changed, with a request that looks as if the commit were done. If a program's store policy raises, the
commit fails with its exception and has changed nothing. If another extension of the program raises, the commit is
completed, and then raises `ExtensionError`, as every verb does.

What is stored, and when:

    at a commit         full attention: the units from the first that the host lacks on. An extension may defer them
                        (`ask_deferred`)
    windows             never deferred, because the device evicts the blocks of a window long before those of its
                        prefix. Stored only where a later hit may end: at the end of the prompt, at the last offer,
                        where the policy or the store limit ends the stores, and at *branch points*: units after which
                        the index has another prompt that continues differently. The second prompt with a prefix reveals
                        the branch point while it still holds the window there, so the third prompt hits. With
                        `OffloadConfig.window_interval_tokens`, windows are also stored at each multiple of it, so that
                        the second prompt hits up to there
    checkpoints         of a recurrent state: each one that the commit names, never deferred
    a host that evicts  units that the host has evicted since the request was admitted are stored again at its last
                        offer. Otherwise live requests whose prefixes do not fit together would evict each other's
                        blocks at every commit
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from .._common.arguments import as_tuple, shown
from .._common.prefix import TOKEN_BYTES, TokenIds, encode_tokens
from .._common.tiers import DEVICE
from ..errors import CommitError
from .cache import PrefixCache
from .events import StoreSkipped
from .hooks import Hooks
from .index import branch_points
from .jobs import Stores, first_stored, needed_at
from .leases import RequestLeases, publish, publish_checkpoint, slide_windows
from .loads import require_no_holes
from .moves import Moves
from .plans import TransferPlan
from .records import Job, LedgerRequest, Run
from .states import ALLOCATED, COMPUTES_LOST_BLOCKS, COMPUTES_NOTHING, RUNNING, require


@dataclass(slots=True, eq=False)
class Commits:
    """Commits, and the stores that they plan."""

    cache: PrefixCache
    request_leases: RequestLeases
    stores: Stores
    moves: Moves
    hooks: Hooks

    def commit(
        self,
        request: LedgerRequest,
        num_computed_tokens: object,
        new_token_ids: TokenIds = (),
        checkpoints: Iterable[int] = (),
    ) -> tuple[TransferPlan, ...]:
        """Append `new_token_ids`, then publish the whole units of the first `num_computed_tokens` (a total, not an
        increment), and `checkpoints`. Returns the stores to launch. If the policy raises, nothing has changed."""
        num_tokens, added, written = self.check(request, num_computed_tokens, new_token_ids, checkpoints)
        return self._publish(request, num_tokens, self._append(request, num_tokens, added), written)

    def commit_all(
        self, commits: Sequence[tuple[LedgerRequest, object, TokenIds, Iterable[int]]]
    ) -> list[tuple[TransferPlan, ...]]:
        """Commit several requests, or none if one commit is refused or the policy raises."""
        appended: list[tuple[LedgerRequest, int]] = []
        found: list[tuple[LedgerRequest, int, int, Sequence[int]]] = []
        try:
            for request, num_computed_tokens, new_token_ids, checkpoints in commits:
                num_tokens, added, written = self.check(request, num_computed_tokens, new_token_ids, checkpoints)
                known = request.sequence.num_tokens
                found.append((request, num_tokens, self._append(request, num_tokens, added), written))
                appended.append((request, known))
        except BaseException:
            for request, known in appended:
                request.sequence.drop_after(known)
            self.hooks.take_error()  # of a hook that was asked about a commit that is undone
            raise
        return [self._publish(*one) for one in found]

    def _append(self, request: LedgerRequest, num_tokens: int, added: bytes) -> int:
        """Append the new tokens of a commit. Returns the unit up to which the policy wants its blocks in the host. If
        the policy raises, nothing has changed."""
        known, computed, first = request.sequence.num_tokens, request.num_computed_tokens, request.published
        num_units = num_tokens // self.cache.layout.unit_tokens
        if added:
            request.sequence.append(added)
        if not num_units or not request.store_limit or request.epoch != self.cache.epoch:
            return 0
        request.num_computed_tokens, request.published = num_tokens, max(first, num_units)
        try:
            return self.wanted_stop(request)
        except BaseException:
            # The commit has changed nothing, so it may be repeated: that must not append the new tokens twice.
            request.sequence.drop_after(known)
            raise
        finally:
            request.num_computed_tokens, request.published = computed, first

    def _publish(
        self, request: LedgerRequest, num_tokens: int, wanted: int, written: Sequence[int] = ()
    ) -> tuple[TransferPlan, ...]:
        """Publish the units that a commit has computed, and the checkpoints `written`, by unit. Returns its stores, up
        to unit `wanted`."""
        computed, first = request.num_computed_tokens, request.published
        num_units, is_current = num_tokens // self.cache.layout.unit_tokens, request.epoch == self.cache.epoch
        if request.state is ALLOCATED:
            self.request_leases.end_host_lease(request)
            self.moves.request(request, RUNNING)
        if num_tokens > computed and request.computing is COMPUTES_NOTHING and not request.num_steps:
            self.cache.last_uses.are_covered = False  # no step covers this commit
        request.num_computed_tokens, request.has_committed, request.computing = num_tokens, True, COMPUTES_NOTHING
        plans: tuple[TransferPlan, ...] = ()
        if is_current:
            if num_units > first:
                publish(self.request_leases, request, num_units)
            for position in written:
                publish_checkpoint(self.cache, request, position)
            for hook in self.hooks.on_published:
                hook(request, first)
            plans = self.offer_stores(request, first, wanted)
        if self.cache.layout.partial:
            slide_windows(self.cache, request)
        return plans

    def check(
        self,
        request: LedgerRequest,
        num_computed_tokens: object,
        new_token_ids: TokenIds,
        checkpoints: Iterable[int] = (),
    ) -> tuple[int, bytes, Sequence[int]]:
        """Raise if the commit is invalid. Returns `num_computed_tokens`, the new tokens, encoded, and `checkpoints`, by
        unit."""
        if type(checkpoints) is not tuple:  # first, because it may run code of the caller
            checkpoints = as_tuple("checkpoints", checkpoints, "int", CommitError)
        if request.computing is COMPUTES_LOST_BLOCKS:
            problem = f"cannot be committed: {request} has given up its blocks since its last step: compute again"
            raise CommitError("num_computed_tokens", problem)
        if request.state is not RUNNING:
            require(request, "commit", ALLOCATED, RUNNING)
            require_no_holes(request, "commit")
        has_none = type(new_token_ids) is tuple and not new_token_ids  # the common case in a prefill
        added = b"" if has_none else encode_tokens(new_token_ids, "new_token_ids")
        num_tokens = request.checked_count(num_computed_tokens, request.num_computed_tokens, len(added) // TOKEN_BYTES)
        for ask in self.hooks.ask_commit:
            ask(request, num_tokens)
        allocated = request.num_units * self.cache.layout.unit_tokens
        if num_tokens > allocated:
            problem = f"is {num_tokens}, beyond the {allocated} tokens that were allocated: call `extend` for more"
            raise CommitError("num_computed_tokens", problem)
        if not checkpoints:  # the common case
            return num_tokens, added, ()
        return num_tokens, added, _written(request, checkpoints, num_tokens, self.cache.layout.unit_tokens)

    def wanted_stop(self, request: LedgerRequest) -> int:
        """The unit up to which the published blocks of `request` should be in the host."""
        stop = request.published
        if stop > request.store_limit:
            stop = request.store_limit
        for ask in self.hooks.ask_store_stop:
            stop = min(stop, ask(request))
        return stop

    def offer_last(self, request: LedgerRequest) -> tuple[TransferPlan, ...]:
        """The request is done: plan its last stores."""
        if DEVICE not in request.leases or not request.store_limit:
            return ()
        for hook in self.hooks.on_finishing:
            hook(request)
        return self.offer_stores(request, request.published, self.wanted_stop(request), is_last=True)

    def offer_stores(
        self, request: LedgerRequest, first: int, stop: int, *, is_last: bool = False
    ) -> tuple[TransferPlan, ...]:
        """Plan the stores on the path of `request` up to unit `stop`, which the policy wants: the units from `first`
        on, and those before it that the host lacks. The docstring of this module says what is
        stored when."""
        lease, layout = request.leases.get(DEVICE), self.cache.layout
        if lease is None or not request.store_limit:
            return ()
        for ask in self.hooks.ask_deferred:
            if ask(lease.run, stop):
                jobs = self._partial_stores(request, lease.run, first, stop, is_last) if layout.partial else []
                return tuple([job.plan for job in jobs])
        missing = self.stores.missing(lease.run, layout.full, first, stop)
        if missing and first and not is_last:
            has_evicted = self.cache.tiers[self.stores.destination].num_evicted != request.evictions_before
            if has_evicted and any(start < first for _, start, _ in missing):
                if first < stop:
                    self.moves.note(StoreSkipped(request, (stop - first) * layout.full.width, "evicted"))
                return ()
        jobs = self.stores.store_missing(request, layout.full, missing) if missing else []
        if layout.partial:
            jobs += self._partial_stores(request, lease.run, first, stop, is_last)
        return tuple([job.plan for job in jobs]) if jobs else ()

    def _partial_stores(self, request: LedgerRequest, run: Run, first: int, stop: int, is_last: bool) -> list[Job]:
        """Store the windows before each unit at which a later hit may end, and the checkpoints. The module docstring
        lists these units."""
        jobs = self.stores.offer_checkpoints(request, run, 0 if is_last else first, stop)
        if not self.cache.layout.windows:
            return jobs
        ends = branch_points(run, first, stop)
        if first <= stop < request.published:
            ends.append(stop)
        ends += self.stores.checkpoints(first, stop)
        is_end = is_last or request.is_at_end or first < stop == request.store_limit
        for component in self.cache.layout.windows:
            if is_end:
                start = first_stored(component, self.stores.last_end(request, stop))
                jobs += self.stores.offer(request, run, component, start, stop)
            for units in needed_at(component, [end - end % request.hit_alignment for end in ends]):
                jobs += self.stores.offer(request, run, component, units.start, units.stop)
        return jobs


def _written(request: LedgerRequest, checkpoints: Iterable[object], num_tokens: int, unit_tokens: int) -> Sequence[int]:
    """`checkpoints`, given in tokens, by unit in prefix order. `CommitError` if one of them is not planned, or not
    within the tokens that this commit adds."""
    planned = {} if request.checkpoints is None else request.checkpoints.planned
    known = {position * unit_tokens: position for position in planned}
    found: set[int] = set()
    for at in checkpoints:
        if type(at) is not int:
            raise CommitError("checkpoints", f"must hold positions in tokens (`num_tokens`), got {shown(at)}")
        if at not in known:
            names = ", ".join(map(str, sorted(known))) or "none"
            raise CommitError("checkpoints", f"names {shown(at)}, which is not planned: {request} plans {names}")
        if not request.num_computed_tokens < at <= num_tokens:
            within = f"between {request.num_computed_tokens + 1} and {num_tokens}, the tokens of this commit"
            raise CommitError("checkpoints", f"names {at}, which does not lie {within}")
        found.add(known[at])
    return sorted(found)
