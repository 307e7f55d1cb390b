"""A request of a runtime over engine-owned blocks, seen by its engine: block tables, and results of loads."""

from __future__ import annotations

import attrs

from aoffload._kernel.states import RequestState
from aoffload._runtime.loading import PendingLoad
from aoffload.testing.violations import Violation

from .engine_tables import EngineTables, Tables
from .runtime_requests import Served

__all__ = ["EngineServed"]

_OVER = (RequestState.DONE, RequestState.ABORTED)
_ASKING = (RequestState.MATCHED, RequestState.PINNED)


@attrs.define(eq=False)
class EngineServed(Served):
    """What an engine with blocks of its own knows of one request."""

    own: EngineTables = attrs.field(init=False)
    tables: Tables = attrs.field(factory=list)
    unwritten: dict[int, range] = attrs.field(factory=dict)
    num_hit: int = 0
    """Tokens that were hit in the engine's own cache: the request may not have been told yet."""
    loads_from: int | None = None
    """The token from which on a load brings more, while it is not known to be over."""
    most: int = 0
    """Tokens that may be ready after that load."""
    has_loaded: bool = False
    """A load was planned, and nothing was offered since: other requests may wait for that."""
    has_computed: bool = False
    """It computes in place of a load."""
    is_spent: bool = False
    """Blocks that it would read have left a window: it has to leave."""

    def prefix(self, num_tokens: int) -> int:
        return self.chain[num_tokens - 1]

    def tables_of(self, pending: PendingLoad | None) -> Tables:
        return [list(table) for table in self.tables]

    @property
    def is_asking(self) -> bool:
        """Whether it may ask again, or load: it has computed nothing."""
        return self.request.state in _ASKING and not self.has_computed and not self.must_end

    @property
    def is_answered(self) -> bool:
        """Whether the request was told of the hit that its tables have."""
        return self.request.state is RequestState.PINNED and self.request.match.num_device_tokens == self.num_hit

    @property
    def may_compute(self) -> bool:
        self.look()
        is_ready = self.request.state is RequestState.RUNNING or self.is_answered
        return is_ready and not self.must_end and not self.is_spent

    def take_hit(self, fewer: int) -> int:
        """Name what the engine's own cache has now in place of what the tables name."""
        self.num_hit, tables = self.own.hit(self.prefix, len(self.tokens), fewer)
        self.own.change(self, tables)
        self.written = self.chain[: self.num_hit]
        return self.num_hit

    def begin_load(self, max_tokens: int | None, *, is_sparse: bool) -> bool:
        """Have blocks for the whole prompt, and expect a load into them. False: there is no room. `is_sparse`: null
        blocks where a window is past after the load."""
        match, unit = self.request.match, self.own.unit
        self.most = match.num_tokens
        if isinstance(max_tokens, int):
            self.most = max(self.num_hit, min(self.most, max_tokens // unit * unit))
        if not self.own.grow(self, len(self.tokens), self.most if is_sparse else 0):
            return False
        self.loads_from = self.num_hit
        return True

    def computes_now(self) -> None:
        """It begins to compute, in place of a load."""
        self.has_computed, record = True, self.request._record
        assert record is not None
        self.engine.answered(record)
        self.engine.computing.add(record)

    def load_refused(self) -> None:
        """The load was not planned: its blocks go back, unless a forward has begun to compute into them meanwhile."""
        if self.loads_from is not None and self.request.state in _ASKING:
            self.loads_from = None
            if not self.has_computed:
                self.own.shrink(self, self.num_hit)

    def look(self) -> None:
        """Go on with what a load has brought, once it is over."""
        before, state = self.loads_from, self.request.state
        if before is None or state not in (RequestState.RUNNING, *_OVER):
            return
        self.loads_from = None
        if state in _OVER:
            return
        num_ready, request = self.request.num_computed_tokens, self.request
        if not before <= num_ready <= self.most:
            raise Violation(
                "hit cap", f"{num_ready} tokens of {self.name} are ready: {before} before, {self.most} to be"
            )
        if request.num_lost_tokens and request.retry_max_hit_tokens != num_ready:
            raise Violation("an answer", f"{self.name} is to try again up to {request.retry_max_hit_tokens}")
        self.written, self.num_ready = self.chain[:num_ready], num_ready
        self.own.loaded(self, before, num_ready, is_whole=num_ready >= request.match.num_tokens)
        self.check_ready(num_ready)

    def fall_back_to(self, num_ready: int) -> None:
        super().fall_back_to(num_ready)
        self.is_spent |= not self.own.go_back(self, num_ready)

    def check_match(self, *, is_first: bool) -> None:
        """As of any request, of what lies after the engine's own hit."""
        match, ask = self.request.match, self.ask
        if match.num_tokens >= len(self.tokens):
            raise Violation("hit cap", f"{self.name} hits {match.num_tokens} of {len(self.tokens)} tokens")
        if match.is_pending and match.num_host_tokens:
            raise Violation("an answer", f"{self.name} is told to ask again, and to load: {match}")
        if match.num_host_tokens and not self._may_hit(match.num_tokens):
            raise Violation("hit cap", f"{self.name} hits {match}: {ask}")
        for group, config in enumerate(self.engine.runtime.config.groups):
            for end in range(config.block_size, match.num_tokens + 1, config.block_size):
                if end > match.num_device_tokens and (group, self.chain[end - 1]) not in self.engine.committed:
                    raise Violation("may not hit", f"{self.name} hits {match}, {end} were never cached")

    def has_written(self) -> None:
        """A forward is over: its whole blocks hit from now on."""
        is_of_before = self.born != self.engine.num_resets  # some of its KV is of old weights
        if not self.must_end and not self.is_spent and not is_of_before:
            self.own.cache(self, self.num_written(self.chain))

    def offered(self, num_computed: int) -> None:
        """The windows move on."""
        self.has_loaded = False
        if self.request.state not in _OVER:
            self.has_written()
            self.own.move_windows(self, num_computed)

    def taken_back(self, start: int) -> None:
        super().taken_back(start)
        held = self.engine.device.content
        for block_id in self.own.pool.all_cached():
            if self.engine.is_taken_back(held[block_id]):
                self.own.pool.forget(block_id)
        start -= start % self.own.unit
        self.is_spent |= not self.own.go_back(self, start)
        del self.written[start:]
