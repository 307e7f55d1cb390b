"""Matches where an engine owns the device blocks: what host memory holds behind the engine's own hit."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from .answer import PrefixMatch
from .cache import PrefixCache
from .choice import Loadable
from .engine_arrivals import Arrivals
from .engine_blocks import EngineTier
from .hops import BELOW
from .lifecycle import RequestState as State
from .matching import Hit, find_hit_behind
from .observer import Moves
from .owners import Holding
from .presence import held_stop
from .request_leases import RequestLeases
from .table import NO_LIMIT
from .tokens import TokenSequence

__all__ = ["EngineMatches"]


@dataclass(slots=True, eq=False)
class EngineMatches:
    cache: PrefixCache
    request_leases: RequestLeases
    moves: Moves
    arrivals: Arrivals
    device: EngineTier

    @property
    def loads_paused(self) -> bool:
        """Whether too many blocks are in quarantine: nothing is loaded, and hits are misses."""
        return not self.device.may_load

    def match(self, holding: Holding, num_device_tokens: int, wake: Callable[[], object]) -> None:
        """Match and pin what the host holds behind `num_device_tokens`: PINNED. While another request is loading the
        next block: MATCHED, without pins; `wake` is called when asking again may give another answer."""
        if holding.state is State.PINNED and self.is_current(holding, num_device_tokens):
            return
        holding.asked_behind(num_device_tokens)
        hit = self._hit(holding)
        bringer = None
        if hit.stop > hit.device_stop and self.arrivals.under_way:
            num_tokens = (hit.device_stop + 1) * self.cache.layout.unit_tokens
            bringer = self.arrivals.bringer(holding, hit.device_stop, num_tokens)
        self.request_leases.end_host_lease(holding)
        if bringer is not None:
            self.arrivals.ask_again(holding, bringer, wake)
            holding.told(PrefixMatch(hit.device_stop * self.cache.layout.unit_tokens, 0, is_pending=True))
        else:
            self.arrivals.answered(holding)
            self._pin(holding, hit)
        if holding.state is not State.MATCHED:  # observers find the answer in it
            self.moves.request(holding, State.MATCHED)
        if bringer is None:
            self.moves.request(holding, State.PINNED)

    def is_current(self, holding: Holding, num_device_tokens: int) -> bool:
        """Whether the last answer still holds, and its hit is pinned."""
        is_same = holding.state is State.PINNED and num_device_tokens == holding.engine_tokens
        return is_same and self._is_held(holding)

    def _is_held(self, holding: Holding) -> bool:
        """Whether the whole hit can still be loaded."""
        start = holding.engine_tokens // self.cache.layout.unit_tokens
        return self.held_stop(holding, start, holding.hit_stop) == holding.hit_stop

    def _hit(self, holding: Holding, at_most: int = NO_LIMIT) -> Hit:
        start = holding.engine_tokens // self.cache.layout.unit_tokens
        if holding.epoch != self.cache.epoch:
            return Hit(start, start, ())
        return self.hit_behind(holding.sequence, min(holding.hit_limit, at_most), start, holding.hit_alignment)

    def hit_behind(self, sequence: TokenSequence, limit: int, start: int, alignment: int = 1) -> Hit:
        """What host memory holds of units `[start, limit)`, the unit of the last token excluded. Nothing while too many
        blocks are in quarantine."""
        if not self.device.may_load:
            return Hit(start, start, ())
        layout = self.cache.layout
        limit = min((sequence.num_tokens - 1) // layout.unit_tokens, limit)
        return find_hit_behind(self.cache.index, sequence, layout, limit, start, alignment)

    def _pin(self, holding: Holding, hit: Hit) -> None:
        unit = self.cache.layout.unit_tokens
        if hit.stop > hit.device_stop:
            run = self.cache.cut(hit.run_at(hit.stop), hit.stop)
            self.request_leases.keep(holding, BELOW, run)
        on_disk = self.request_leases.num_fetchable(holding, hit.stop) * unit
        match = PrefixMatch(hit.device_stop * unit, (hit.stop - hit.device_stop) * unit, num_disk_tokens=on_disk)
        holding.matched(0, hit.stop, match)

    def match_fetched(self, holding: Holding) -> None:
        """Match a PINNED request again, behind the same tokens: the host may hold more by now."""
        self.request_leases.end_host_lease(holding)
        self._pin(holding, self._hit(holding))

    def loadable(self, holding: Holding) -> Loadable | None:
        """What a load of the whole hit would bring. None: nothing, or it was planned before."""
        start = holding.engine_tokens // self.cache.layout.unit_tokens
        if holding.state is not State.PINNED or holding.hit_stop <= start:
            return None
        return Loadable(start, holding.hit_stop, self.cache.layout.num_blocks(start, start, holding.hit_stop))

    def decline(self, holding: Holding, stop: int) -> None:
        """Match a PINNED request again, up to unit `stop`: the rest of its hit is computed."""
        holding.narrow_hit(stop)
        self.request_leases.end_host_lease(holding)
        self._pin(holding, self._hit(holding))

    def forget(self, holdings: Iterable[Holding]) -> None:
        """Match PINNED `holdings` again, up to their old hit, if the host no longer holds all of it."""
        for holding in holdings:
            if holding.state is State.PINNED and not self._is_held(holding):
                self.request_leases.end_host_lease(holding)
                self._pin(holding, self._hit(holding, holding.hit_stop))

    def held_stop(self, holding: Holding, start: int, stop: int) -> int:
        """The unit up to which the hit can still be loaded: a corrupt block may have cut it off, and nothing can be
        while too many blocks are in quarantine."""
        if holding.epoch != self.cache.epoch or BELOW not in holding.leases or self.loads_paused:
            return start
        path = holding.leases[BELOW].run.whole_path()
        return max(start, held_stop(self.cache.layout, path, BELOW, start, stop, given=start))
