"""The ledger's calls about requests that begin: match, room, forks."""

from __future__ import annotations

import math
from collections.abc import Callable

from ..arguments import check_callable, check_type
from ..errors import DuplicateRequest, InvalidArgument
from ..prefix import Prefix
from .answer import PrefixMatch
from .arguments import check_bool, check_int, check_prefix, check_text
from .forked import Fork
from .hops import BELOW
from .ledger_rooms import LedgerRooms
from .lifecycle import RequestState as State
from .lifecycle import require
from .matching import fetchable_path, find_hit
from .owners import Holding, Waiter, nobody
from .policy import StoreScope, store_limit
from .results import Extension
from .table import NO_LIMIT
from .tokens import TokenSequence

__all__ = ["BeginningRequests"]


class BeginningRequests(LedgerRooms):
    """Calls from `admit` until the request has blocks."""

    # -- admission ------------------------------------------------------------------------------------------------

    def lookup(self, prefix: Prefix) -> PrefixMatch:
        """What a request for `prefix` would hit. Changes nothing, not even the eviction order."""
        unit = self.layout.unit_tokens
        limit = (check_prefix(prefix).num_tokens - 1) // unit
        sequence = TokenSequence(prefix, unit)
        if self._engine is not None:
            hit = self._engine.matches.hit_behind(sequence, limit, 0)
        else:
            hit = find_hit(self.cache.index, sequence, self.layout, limit)
        on_disk = 0
        if self.cache.has_disk:
            on_disk = max(0, fetchable_path(self.cache.index, sequence, self.layout, limit)[1] - hit.stop) * unit
        return PrefixMatch(hit.device_stop * unit, (hit.stop - hit.device_stop) * unit, num_disk_tokens=on_disk)

    def admit(
        self,
        prefix: Prefix,
        *,
        request_id: str | None = None,
        max_hit_tokens: int | None = None,
        hit_alignment: int = 1,
        reads_cache: bool = True,
        store: StoreScope | str = StoreScope.ALL,
        max_store_tokens: int | None = None,
        num_device_tokens: int = 0,
        wake: Callable[[], object] = nobody,
    ) -> Holding:
        """Match `prefix` and pin the hit, in one step. All limits are in tokens.

        `reads_cache=False`: use no hit. `store` (all, the prompt only, nothing) and `max_store_tokens` (leading tokens)
        limit what may be stored. At least one token is always left to compute: a fully cached prompt hits one block
        less.

        With `engine_blocks`, the engine has the first `num_device_tokens` on its device; the host is matched behind
        them. The answer may be `PENDING`: see `match_again`.
        """
        if self._moves.is_telling:
            raise self._in_report("admit")
        unit = self.layout.unit_tokens
        if reads_cache is not True:
            check_bool("reads_cache", reads_cache)
        sequence = TokenSequence(check_prefix(prefix), unit)
        limit = sequence.num_prompt_units if reads_cache else 0
        if max_hit_tokens is not None:
            limit = min(limit, check_int("max_hit_tokens", max_hit_tokens, 0) // unit)
        alignment = 1
        if type(hit_alignment) is not int or hit_alignment != 1:
            alignment = math.lcm(unit, check_int("hit_alignment", hit_alignment, 1)) // unit
        may_store = NO_LIMIT
        if store is not StoreScope.ALL or max_store_tokens is not None:
            may_store = store_limit(prefix, unit, store, max_store_tokens)
        if self._engine is not None or type(num_device_tokens) is not int or num_device_tokens:
            self._check_device_tokens(num_device_tokens, sequence.num_tokens)
        if wake is not nobody:
            check_callable("wake", wake)
        name = self._checked_name(request_id)
        holding = Holding(
            name, sequence, self.cache.epoch, self._num_admitted, limit, alignment,
            store_limit=may_store, ledger=self, evictions_before=self.cache.tiers[BELOW].num_evicted,
        )  # fmt: skip
        if may_store:
            self._policy.seen(holding, 0, sequence.num_prompt_units)  # a policy of the program's own may raise
        self._num_admitted += 1
        self.holdings[name] = holding
        if self._engine is not None:
            self._engine.offers.deferred.pop(name, None)  # of an earlier request with this id
            self._engine.matches.match(holding, num_device_tokens, wake)
            return holding
        self._request_leases.pin(holding)
        self._moves.request(holding, State.MATCHED)
        self._moves.request(holding, State.PINNED)
        return holding

    def _check_device_tokens(self, num_device_tokens: int, num_tokens: int) -> None:
        check_int("num_device_tokens", num_device_tokens, 0, max(0, num_tokens - 1))
        if num_device_tokens and self._engine is None:
            raise InvalidArgument("num_device_tokens", "is for `engine_blocks`: this ledger has device blocks itself")

    def match_again(
        self, holding: Holding, *, num_device_tokens: int, wake: Callable[[], object] = nobody
    ) -> PrefixMatch:
        """With `engine_blocks`: match again, before the load. The pins move if `num_device_tokens` has changed.

        `PENDING`: another request is loading the next block into the engine's blocks; this one holds no pins meanwhile.
        `wake` is called when that load falls short, or when its request has offered or is over. After
        `pending_timeout_s` the answer is no longer `PENDING`.
        """
        engine = self._engine_of(holding, "match_again")
        require(holding, "match_again", State.MATCHED, State.PINNED)
        self._check_device_tokens(num_device_tokens, holding.sequence.num_tokens)
        if wake is not nobody:
            check_callable("wake", wake)
        engine.matches.match(holding, num_device_tokens, wake)
        return holding.match

    def pending_until(self, holding: Holding) -> float:
        """With `engine_blocks`: from when on, by the ledger's clock, `match_again` does not answer `PENDING` any more.
        Infinity for a request whose last answer was another one."""
        return float(self._engine_of(holding, "pending_until").arrivals.pending_until(holding))

    def _checked_name(self, request_id: str | None) -> str:
        """`request_id`, or a name that no live request has."""
        if request_id is not None:
            name = check_text("request_id", request_id)
            if name in self.holdings:
                raise DuplicateRequest("request_id", f"a live request is called {name!r}")
            return name
        name = f"request-{self._num_admitted}"
        while name in self.holdings:
            name += "'"
        return name

    def allocate_nowait(self, holding: Holding, num_tokens: int | None = None) -> None:
        """Take blocks for `num_tokens` (None: the prompt), all or nothing; `OutOfBlocks` changes nothing."""
        self.admission.allocate_nowait(self._on_own_device(holding, "allocate"), num_tokens)

    def queue_allocation(
        self, holding: Holding, num_tokens: int | None = None, wake: Callable[[], object] = nobody
    ) -> Waiter:
        """Join the line. `wake` is called once the waiter is granted or failed; then `accept` or `withdraw` it.

        `wake` may call the ledger, but must not raise."""
        check_callable("wake", wake)
        waiter = self.admission.queue_allocation(self._on_own_device(holding, "allocate"), num_tokens, wake)
        self.admission.serve_line()
        return waiter

    def extend_nowait(self, holding: Holding, num_tokens: int) -> Extension:
        """Extend the block table to `num_tokens` in all; `OutOfBlocks` changes nothing."""
        return self.admission.extend_nowait(self._on_own_device(holding, "extend"), num_tokens)

    def queue_extension(self, holding: Holding, num_tokens: int, wake: Callable[[], object] = nobody) -> Waiter:
        """Join the line for more room, ahead of all allocations."""
        check_callable("wake", wake)
        waiter = self.admission.queue_extension(self._on_own_device(holding, "extend"), num_tokens, wake)
        self.admission.serve_line()
        return waiter

    def accept(self, waiter: Waiter) -> Extension:
        """Take what `waiter` was granted, or raise what it failed with."""
        self._own(check_type("waiter", waiter, Waiter).holding)
        return self.admission.accept(waiter)

    def withdraw(self, waiter: Waiter) -> None:
        """Stop waiting: give back an unused grant and serve the line."""
        self._own(check_type("waiter", waiter, Waiter).holding)
        self.admission.withdraw(waiter)
        self.admission.serve_line()

    # -- forks ----------------------------------------------------------------------------------------------------

    def num_shared_tokens(self, holding: Holding) -> int:
        """Leading tokens whose blocks a fork of `holding` would share; behind them it needs blocks of its own."""
        require(self._on_own_device(holding, "fork"), "fork", State.RUNNING)
        return self._forks.shared_stop(holding) * self.layout.unit_tokens

    def fork(
        self,
        holding: Holding,
        request_id: str | None = None,
        *,
        num_tokens: int = 0,
    ) -> Fork:
        """Start another request with the tokens that `holding` has so far, RUNNING at once. It shares the full blocks;
        the engine copies the others (`Fork.copies`). It has room for `num_tokens`, or for all known tokens if those are
        more. `OutOfBlocks` changes nothing.
        """
        shared = self.num_shared_tokens(holding) // self.layout.unit_tokens
        self._forks.check(holding)
        name, wanted = self._checked_name(request_id), check_int("num_tokens", num_tokens, 0)
        num_units = self._forks.num_units(holding, wanted)
        unborn = self._forks.twin(holding, name, self._num_admitted)
        blocks = self._forks.take(holding, shared, num_units)
        self._num_admitted += 1
        self.holdings[name] = unborn
        return self._forks.share(holding, unborn, shared, num_units, blocks)
