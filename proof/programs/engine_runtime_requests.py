"""A request of a runtime over engine-owned blocks, seen by its engine: block tables, and results of loads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from aoffload._kernel.plans import Checkpoint
from aoffload._kernel.states import RequestState
from aoffload._runtime.loading import PendingLoad
from aoffload.testing.violations import Violation

from .engine_tables import EngineTables, Tables
from .provenance import row_group
from .runtime_bytes import Read
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
    checkpoints: dict[int, Sequence[int]] = attrs.field(factory=dict)
    """Blocks of the checkpoints that it has written, by number of tokens."""
    incoming: list[int] = attrs.field(factory=list)
    """Blocks into which its load copies a checkpoint."""
    is_spent: bool = False
    """What it would read has left a window, or the running state is that of a later token: it has to leave."""

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
        self.cut(0)
        self.written = self.chain[: self.num_hit]
        if self.num_hit and self.engine.has_states:
            self._copy_state(self.own.checkpoint(self.prefix(self.num_hit)), self.num_hit)
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
        if self.engine.has_states:
            self.incoming = self.own.take_checkpoint()
            if not self.incoming:
                self.own.shrink(self, self.num_hit)
                return False
        self.loads_from = self.num_hit
        return True

    def destinations(self) -> dict[str, Any]:
        """The blocks for a load."""
        return {"into": self.tables_of(None), "into_checkpoint": self.incoming or None}

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
            self._drop_incoming()
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
        if self.incoming and num_ready > before:
            self._copy_state(self.incoming, num_ready)
            self.engine.met("checkpoint loaded")
        self._drop_incoming()
        self.check_ready(num_ready)

    def fall_back_to(self, num_ready: int) -> None:
        super().fall_back_to(num_ready)
        self._go_back(num_ready)

    def _go_back(self, start: int) -> None:
        self.is_spent |= not self.own.go_back(self, start)
        self.is_spent |= self.engine.has_states and start > 0 and start not in self.states

    # -- the recurrent state --------------------------------------------------------------------------------------

    def _copy_state(self, block_ids: Sequence[int], stop: int) -> None:
        """Copy a checkpoint of `stop` tokens into the running state."""
        read = Read()
        self.engine.read_state(read, block_ids, self.prefix(stop), stop)
        self.check_read(read, f"of {stop} tokens that it has")
        self.states[stop] = tuple(read.forwards)

    def _drop_incoming(self) -> None:
        self.own.pool.drop(self.incoming)
        self.incoming = []

    def cut(self, stop: int) -> None:
        super().cut(stop)
        self._drop_checkpoints(stop)

    def _drop_checkpoints(self, stop: int) -> None:
        for at in [at for at in self.checkpoints if at > stop]:
            self.own.pool.drop(self.checkpoints.pop(at))

    def drop_states(self) -> None:
        """Give back the blocks of all checkpoints."""
        self._drop_incoming()
        self._drop_checkpoints(0)

    def resume(self, start: int) -> Checkpoint | None:
        if not self.must_end and not self.is_spent:
            raise Violation("no state", f"{self.name} computes from token {start} on, and has {list(self.states)}")
        return None

    def check_state(self) -> None:
        """It has no checkpoint of the hit: the engine has copied it."""

    def passed(self, start: int, stop: int, most: int, also: int) -> tuple[list[Checkpoint], int]:
        """The first `most` that it is advised to write, and one after unit `also`, as far as there is room."""
        wanted = [at for at in self.request.planned_checkpoints if start < at <= stop][:most]
        if start < also * self.own.unit <= stop:
            wanted.append(also * self.own.unit)
        found: list[Checkpoint] = []
        for at in sorted({*wanted}):
            if taken := self.own.take_checkpoint():
                found.append(Checkpoint(at, taken))
        return found, len(found)

    def has_copied(self, checkpoints: Sequence[Checkpoint], *, counts: bool) -> None:
        """The engine's own cache gets them with `has_written`."""
        for one in checkpoints:
            if counts and not self.must_end and not self.is_spent:
                self.own.pool.drop(self.checkpoints.pop(one.num_tokens, ()))
                self.checkpoints[one.num_tokens] = one.block_ids
            else:
                self.own.pool.drop(one.block_ids)

    def named(self, stop: int, chain: list[int]) -> Mapping[int, Sequence[int]]:
        """The checkpoints that an offer of the first `stop` tokens of `chain` names, with their blocks."""
        found = {at: ids for at, ids in self.checkpoints.items() if at <= stop}
        for at, ids in found.items() if not self.must_end else ():
            if not self.engine.is_checkpoint(ids, chain[at - 1]):
                raise Violation("wrong bytes", f"{self.name} has written a checkpoint at {at}, and it is not there")
        return found

    def _check_resume(self, read: Read, num_ready: int) -> None:
        """The state was copied when the load was over."""

    def check_match(self, *, is_first: bool) -> None:
        """As of any request, of what lies after the engine's own hit."""
        match, ask = self.request.match, self.ask
        if match.num_tokens >= len(self.tokens):
            raise Violation("hit cap", f"{self.name} hits {match.num_tokens} of {len(self.tokens)} tokens")
        if match.is_pending and match.num_host_tokens:
            raise Violation("an answer", f"{self.name} is told to ask again, and to load: {match}")
        if match.num_host_tokens and not self._may_hit(match.num_tokens):
            raise Violation("hit cap", f"{self.name} hits {match}: {ask}")
        if end := self.engine.missing(self.chain, match.num_device_tokens, match.num_tokens):
            raise Violation("may not hit", f"{self.name} hits {match}, {end} were never cached")

    def has_written(self) -> None:
        """A forward is over: its whole blocks hit from now on."""
        is_of_before = self.born != self.engine.num_resets  # some of its KV is of old weights
        if not self.must_end and not self.is_spent and not is_of_before:
            num_written = self.num_written(self.chain)
            self.own.cache(self, num_written)
            for at, ids in self.checkpoints.items():
                for row, block_id in enumerate(ids) if at <= num_written else ():
                    self.own.pool.cache((row_group(row), self.prefix(at)), block_id)

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
        self.cut(start)
        self._go_back(start)
