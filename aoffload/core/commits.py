"""Commits: what a forward has computed becomes findable and is offered to the host; or is taken back."""

from __future__ import annotations

from collections.abc import Iterable

import attrs

from ..errors import CommitError
from ..prefix import TOKEN_BYTES, TokenIds, encode_tokens
from .admission import Admission
from .arguments import check_int
from .cache import UNPUBLISHABLE, PrefixCache
from .early import check_valid
from .forks import taken_from
from .frontier import Frontier
from .holding import Holding
from .index import Run
from .lifecycle import RequestState, require
from .loads import Loads, require_no_holes
from .pins import Pins
from .plan import TransferPlan
from .policy import StorePolicy
from .publish import publish, step_back, unpublish
from .stores import Stores
from .windows import slide

__all__ = ["Commits"]

_S = RequestState


@attrs.define(eq=False)
class Commits:
    cache: PrefixCache
    pins: Pins
    stores: Stores
    admission: Admission
    loads: Loads
    policy: StorePolicy
    frontier: Frontier

    def admitted(self, holding: Holding) -> None:
        """Have the policy know of its prompt."""
        if holding.store_limit:
            self.policy.seen(holding, 0, holding.sequence.num_prompt_units)

    def commit(
        self, holding: Holding, num_computed_tokens: int, new_token_ids: TokenIds = ()
    ) -> tuple[TransferPlan, ...]:
        """Append `new_token_ids`, then publish up to `num_computed_tokens` (absolute); returns the stores to launch."""
        added = self.check(holding, num_computed_tokens, new_token_ids)
        if holding.state is _S.ALLOCATED:
            self.pins.end_host_lease(holding)
            self.loads.ready(holding)
        if added:
            holding.sequence.append(added)
        holding.num_computed_tokens = num_computed_tokens
        holding.has_committed = True
        plans: tuple[TransferPlan, ...] = ()
        first = holding.published
        if holding.epoch == self.cache.epoch:
            publish(self.cache, holding, num_computed_tokens // self.cache.layout.unit_tokens)
            plans = self.offer_stores(holding, first)
        slid = slide(self.cache, holding)
        if slid or holding.published > first:
            self.admission.pump()  # there is room now, or who is first in line needs less
        return plans

    def check(self, holding: Holding, num_computed_tokens: int, new_token_ids: TokenIds) -> bytes:
        """Refuse what can't be committed; the new tokens, encoded."""
        require(holding, "commit", _S.ALLOCATED, _S.RUNNING)
        require_no_holes(holding, "commit")
        added = encode_tokens(new_token_ids, "new_token_ids")
        self._check_commit(holding, num_computed_tokens, len(added) // TOKEN_BYTES)
        return added

    def _check_commit(self, holding: Holding, num_computed_tokens: int, num_added: int) -> None:
        name = "num_computed_tokens"
        if isinstance(num_computed_tokens, bool) or not isinstance(num_computed_tokens, int):
            raise CommitError(name, f"must be an integer, got {num_computed_tokens!r}")
        if num_computed_tokens < holding.num_computed_tokens:
            raise CommitError(name, f"goes back from {holding.num_computed_tokens} to {num_computed_tokens}")
        check_valid(holding, num_computed_tokens)
        allocated = holding.num_units * self.cache.layout.unit_tokens
        if num_computed_tokens > allocated:
            raise CommitError(name, f"is {num_computed_tokens}, beyond the {allocated} tokens that were allocated")
        known = holding.sequence.num_tokens + num_added
        if num_computed_tokens > known:
            raise CommitError(name, f"is {num_computed_tokens}, beyond the {known} tokens that are known")

    def offer_stores(self, holding: Holding, first: int, *, is_last: bool = False) -> tuple[TransferPlan, ...]:
        """What the policy wants stored now of the path of `holding`, from unit `first` on and before it where missing.

        Of bands of limited reach only where a later prompt may end: at the end of what is known, of what may be
        stored, and of the request."""
        run = holding.device_run
        if run is None or not holding.store_limit:
            return ()
        if is_last:
            self.policy.seen(holding, holding.sequence.num_prompt_units, holding.published)
        stop = min(holding.published, holding.store_limit, self.policy.wanted_stop(holding))
        if self.frontier.num_blocks:
            self.frontier.offer(run, stop)
            return ()
        is_at_end = is_last or self._is_at_end(holding) or first < stop == holding.store_limit
        jobs = self.stores.offer(holding, run, first, stop, with_windows=is_at_end)
        return tuple([job.plan for job in jobs]) if jobs else ()

    def plan_frontier(self) -> tuple[TransferPlan, ...]:
        """Stores of what is about to be evicted; none unless the policy has a frontier."""
        return tuple([job.plan for job in self.frontier.plan()]) if self.frontier.num_blocks else ()

    @staticmethod
    def _is_at_end(holding: Holding) -> bool:
        """Whether the prompt is computed, and nothing was generated yet."""
        num_prompt = holding.sequence.num_prompt_tokens
        return num_prompt <= holding.num_computed_tokens <= holding.sequence.num_tokens <= num_prompt + 1

    def invalidate(self, holding: Holding, from_token: int, readers: Iterable[Holding]) -> tuple[Holding, ...]:
        """Take back what a failed forward committed: nothing from `from_token` on was ever right.

        Generated tokens behind `from_token` are forgotten: that forward, or one after it, has sampled them.
        Returns the other holdings that may have read it meanwhile; they have to be aborted. So has `holding` itself, if
        it would have to go back behind its window. Who has only matched it is matched again, and a grant that it has
        not accepted yet goes back into the line.
        """
        require(holding, "invalidate", _S.RUNNING)
        ready = holding.ready_stop * self.cache.layout.unit_tokens
        if not ready <= check_int("from_token", from_token, 0) <= holding.num_computed_tokens:
            raise CommitError("from_token", f"must lie in [{ready}, {holding.num_computed_tokens}], got {from_token}")
        start = from_token // self.cache.layout.unit_tokens
        wrong = unpublish(self.cache, holding, start)  # after a reset too: its blocks are no less shared for that
        others = [other for other in readers if other is not holding]
        tainted = self._taint(wrong, [other for other in others if other.has_read], {holding: from_token})
        self.cache.withdraw_behind(wrong)
        for other in others:
            if other.state is _S.PINNED and (other in tainted or _leases_any(other, wrong)):
                self.admission.match_again(other)
        step_back(self.cache, holding, start)
        holding.sequence.drop_after(from_token + 1)
        holding.num_computed_tokens = from_token
        self.admission.pump()
        return tainted if self._may_go_on(holding) else (holding, *tainted)

    def _may_go_on(self, holding: Holding) -> bool:
        """Whether what attention reads before where `holding` has come to is still there, or a window has left it."""
        tables = zip(self.cache.layout.windows, holding.tables[1:], strict=True)
        return all(table.start <= band.first_needed(holding.num_computed_tokens) for band, table in tables)

    def _taint(self, wrong: set[Run], others: list[Holding], sources: dict[Holding, int]) -> tuple[Holding, ...]:
        """Those of `others` that lease a wrong run, or have something of what `sources` computed from some token on.
        What they computed on it is wrong as well, and so on."""
        tainted: list[Holding] = []
        found = True
        while found:
            found = False
            for other in others:
                read = [run.start for lease in other.all_leases() for run in lease.run.path() if run in wrong]
                read += taken_from(self.cache, other, sources)
                read += self._read_before(other, sources)
                if read and other not in tainted:
                    tainted.append(other)
                    sources = {**sources, other: min(read) * self.cache.layout.unit_tokens}
                    other.epoch = UNPUBLISHABLE  # whatever its task still commits before it unwinds
                    # Only behind the first wrong block: what it computed before that is right, and others build on it.
                    wrong |= unpublish(self.cache, other, min(read))
                    found = True
        return tuple(tainted)

    def _read_before(self, other: Holding, sources: dict[Holding, int]) -> list[int]:
        """The first unit of what `sources` computed that `other` may have read before it was preempted. It leases that
        no more, so only its tokens tell; what it has sampled since is wrong as well."""
        unit = self.cache.layout.unit_tokens
        firsts = {source: at // unit for source, at in sources.items()}
        return [
            first
            for source, first in firsts.items()
            if first < other.read_before and other.sequence.agrees(source.sequence, (first + 1) * unit)
        ]


def _leases_any(holding: Holding, runs: set[Run]) -> bool:
    return any(not runs.isdisjoint(lease.run.path()) for lease in holding.all_leases())
