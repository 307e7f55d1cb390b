"""Commits: what a forward has computed becomes findable and is offered to the host; or is taken back."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import attrs

from ..arguments import shown
from ..errors import CommitError
from ..prefix import TOKEN_BYTES, TokenIds, encode_tokens
from .admission import Admission
from .arguments import check_int
from .cache import PrefixCache
from .forks import taken_from
from .lifecycle import RequestState, require
from .loads import Loads, require_no_holes
from .overlap import check_valid
from .owners import Holding
from .pins import Pins
from .plan import TransferPlan
from .policy import StorePolicy
from .publish import first_published, publish, published_by, read_by, runs_from, step_back, take_private
from .records import Run
from .request_leases import RequestLeases
from .stores import Stores
from .watermark import EvictionWatermark
from .windows import slide

__all__ = ["Commits", "check_known", "check_progress", "is_at_end"]

_S = RequestState


@attrs.define(eq=False)
class Commits:
    cache: PrefixCache
    request_leases: RequestLeases
    stores: Stores
    admission: Admission
    loads: Loads
    policy: StorePolicy
    watermark: EvictionWatermark
    pins: Pins

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
            self.request_leases.end_host_lease(holding)
            self.loads.ready(holding)
        if added:
            holding.sequence.append(added)
        holding.committed(num_computed_tokens)
        plans: tuple[TransferPlan, ...] = ()
        first = holding.published
        if holding.epoch == self.cache.epoch:
            publish(self.request_leases, holding, num_computed_tokens // self.cache.layout.unit_tokens)
            plans = self.offer_stores(holding, first)
        if self.cache.layout.windows:
            slide(self.cache, holding)
        return plans

    def check(self, holding: Holding, num_computed_tokens: int, new_token_ids: TokenIds) -> bytes:
        """Refuse what can't be committed; the new tokens, encoded."""
        require(holding, "commit", _S.ALLOCATED, _S.RUNNING)
        if holding.state is _S.ALLOCATED:
            require_no_holes(holding, "commit")
        added = encode_tokens(new_token_ids, "new_token_ids")
        self._check_commit(holding, num_computed_tokens, len(added) // TOKEN_BYTES)
        return added

    def _check_commit(self, holding: Holding, num_computed_tokens: int, num_added: int) -> None:
        check_progress(num_computed_tokens, holding.num_computed_tokens)
        if holding.overlap is not None:
            check_valid(holding, num_computed_tokens)
        allocated = holding.num_units * self.cache.layout.unit_tokens
        if num_computed_tokens > allocated:
            problem = f"is {num_computed_tokens}, beyond the {allocated} tokens that were allocated"
            raise CommitError("num_computed_tokens", problem)
        check_known(holding, num_computed_tokens, num_added)

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
        if self.watermark.num_blocks:
            self.watermark.offer(run, stop)
            return ()
        with_windows = False
        if self.cache.layout.windows:
            with_windows = is_last or is_at_end(holding) or first < stop == holding.store_limit
        jobs = self.stores.offer(holding, run, first, stop, with_windows=with_windows)
        return tuple([job.plan for job in jobs]) if jobs else ()

    def plan_write_back(self) -> tuple[TransferPlan, ...]:
        """Stores of what is about to be evicted; none unless the policy has a watermark."""
        return tuple([job.plan for job in self.watermark.plan()]) if self.watermark.num_blocks else ()

    def invalidate(self, holding: Holding, from_token: int, readers: Iterable[Holding]) -> tuple[Holding, ...]:
        """Take back what a failed forward committed: nothing from `from_token` on was ever right.

        Generated tokens behind `from_token` are forgotten: that forward, or one after it, has sampled them.
        Returns the other holdings that may have read it meanwhile; they have to be aborted. So has `holding` itself, if
        it would have to go back behind its window, or if others still read blocks that it would compute into and there
        is no room for others. Who has only matched it is matched again, and a grant that it has not accepted yet goes
        back into the line.
        """
        require(holding, "invalidate", _S.RUNNING)
        ready = holding.ready_stop * self.cache.layout.unit_tokens
        if not ready <= check_int("from_token", from_token, 0) <= holding.num_computed_tokens:
            raise CommitError("from_token", f"must lie in [{ready}, {holding.num_computed_tokens}], got {from_token}")
        start = from_token // self.cache.layout.unit_tokens
        others = [other for other in readers if other is not holding]
        # After a reset too: its blocks are no less shared for that.
        wrong = dict.fromkeys(runs_from(self.cache, holding, first_published(self.cache, holding, start), ()))
        tainted = self._taint(wrong, others, {holding: from_token})
        self.cache.withdraw_all(wrong)
        self.pins.renew()
        self.admission.match_again(other for other in others if other in tainted or _leases_any(other, wrong))
        goes_on = self._compute_again(holding, from_token, tainted)
        holding.sequence.drop_after(from_token + 1)
        holding.computed(from_token)
        if goes_on and self._reaches_back(holding):
            return (*tainted,)
        holding.taint()
        return (holding, *tainted)

    def _compute_again(self, holding: Holding, from_token: int, readers: Iterable[Holding]) -> bool:
        """Let `holding` compute again from `from_token` on. False: others still read blocks that it would write to, and
        there is no room for as many; or a step of its own writes there, or half of one is right and has to stay."""
        start, excess = divmod(from_token, self.cache.layout.unit_tokens)
        published = published_by(self.cache, holding, start)
        shared = read_by(readers, published)
        needed = sum((run.stop - run.start) * band.width for band, run in shared)
        is_half_right = excess and any(run.start == start for _, run in shared)  # of any band
        if shared and (holding.num_steps or needed > self.admission.room or is_half_right):
            return False
        take_private(self.cache, holding, published, shared)
        step_back(self.request_leases, holding, start)
        return True

    def _reaches_back(self, holding: Holding) -> bool:
        """Whether what attention reads before where `holding` has come to is still there, or a window has left it."""
        tables = zip(self.cache.layout.windows, holding.tables[1:], strict=True)
        return all(table.start <= band.first_needed(holding.num_computed_tokens) for band, table in tables)

    def _taint(self, wrong: dict[Run, None], others: list[Holding], sources: dict[Holding, int]) -> dict[Holding, int]:
        """Those of `others` that may have read a wrong run, or have something of what `sources` computed from some
        token on, each with the first unit that is wrong. What they computed on it is wrong as well, and so on: it joins
        `sources`."""
        tainted: dict[Holding, int] = {}
        found = True
        while found:
            found = False
            for other in others:
                if other in tainted:
                    continue
                read = [run.start for run in _read(other) if run in wrong]
                read += taken_from(other, sources, self.cache.layout.unit_tokens)
                read += self._read_before(other, sources)
                if read:
                    # Only behind the first wrong block: what it computed before that is right, and others build on it.
                    tainted[other] = min(read)
                    sources[other] = min(read) * self.cache.layout.unit_tokens
                    other.taint()  # whatever its task still commits before it unwinds
                    wrong.update(dict.fromkeys(runs_from(self.cache, other, min(read), wrong)))
                    found = True
        return tainted

    def _read_before(self, other: Holding, sources: dict[Holding, int]) -> list[int]:
        """The first unit of what `sources` computed that `other` may have read before it was preempted. It leases that
        no more, so only its tokens tell; what it has sampled since is wrong as well."""
        if not other.read_before:
            return []
        unit = self.cache.layout.unit_tokens
        firsts = {source: at // unit for source, at in sources.items()}
        return [
            first
            for source, first in firsts.items()
            if first < other.read_before and other.sequence.agrees(source.sequence, (first + 1) * unit)
        ]


def is_at_end(holding: Holding) -> bool:
    """Whether the prompt is computed, and nothing was generated yet."""
    num_prompt = holding.sequence.num_prompt_tokens
    return num_prompt <= holding.num_computed_tokens <= holding.sequence.num_tokens <= num_prompt + 1


def check_progress(num_computed_tokens: int, before: int) -> None:
    """Refuse what is no number of tokens, or goes back behind that of `before`."""
    name = "num_computed_tokens"
    if type(num_computed_tokens) is not int:
        raise CommitError(name, f"must be an integer, got {shown(num_computed_tokens)}")
    if num_computed_tokens < before:
        raise CommitError(name, f"goes back from {before} to {num_computed_tokens}")


def check_known(holding: Holding, num_computed_tokens: int, num_added: int) -> None:
    """Refuse more computed tokens than are known, with `num_added` new ones."""
    known = holding.sequence.num_tokens + num_added
    if num_computed_tokens > known:
        problem = f"is {num_computed_tokens}, beyond the {known} tokens that are known"
        raise CommitError("num_computed_tokens", problem)


def _read(holding: Holding) -> Iterator[Run]:
    """What `holding` may have computed with: without tables, its leases are no more than pins."""
    for lease in holding.all_leases() if holding.tables else ():
        yield from lease.run.path()


def _leases_any(holding: Holding, runs: dict[Run, None]) -> bool:
    return any(run in runs for lease in holding.all_leases() for run in lease.run.path())
