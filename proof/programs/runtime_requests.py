"""A request of a program, seen by its engine: its tokens, its computed tokens, and its running forwards."""

from __future__ import annotations

from typing import Any

import attrs

from aoffload._kernel.states import RequestState
from aoffload._runtime.loading import PendingLoad
from aoffload._transfer.fences import LoadedRegion
from aoffload.errors import AoffloadError, CommitError, RegionNotLoaded
from aoffload.testing.asks import Ask
from aoffload.testing.memory import POISON
from aoffload.testing.violations import Violation

from .runtime_bytes import Forward, ProgramEngine, Read, Tables

__all__ = ["Served", "Work"]

_COMPUTING = (RequestState.ALLOCATED, RequestState.RUNNING)


@attrs.define(eq=False)
class Served:
    """What an engine knows of one request. The engine never commits what it has not computed."""

    engine: ProgramEngine
    request: Any
    """A `Request`, or an `EngineRequest`."""
    ask: Ask
    tokens: list[int]
    chain: list[int]
    """The number of each prefix of `tokens`."""
    born: int
    """The number of resets before it was matched."""
    written: list[int] = attrs.field(factory=list)
    """Like `chain`, of the tokens that lie in its blocks: a prefix, perhaps with drafts that were not accepted."""
    num_ready: int = 0
    """Tokens that its load has brought, by the last answer, except those that it has invalidated since."""
    life: int = 0
    """Counts the preemptions and invalidations that void the result of a forward under way."""
    num_works: int = 0
    """Forwards under way."""
    pending: Any = None
    early: Work | None = None
    """The forward that has computed before its load was over."""
    num_commits: int = 0
    forwards: dict[Forward, int] = attrs.field(factory=dict)
    """Its own forwards, each with the token up to which it counts: the rest the request has invalidated itself."""
    _now: set[Forward] = attrs.field(factory=set)
    """Its forwards since it got its blocks: what it computed before a preemption is a hit like any other."""
    _known_in: RequestState | None = None
    """The state in which `written` was true."""

    @property
    def name(self) -> str:
        return str(self.request.request_id)

    @property
    def must_end(self) -> bool:
        """Whether it is over, or is being cancelled: nothing that it computes counts any more."""
        is_over = self.request.state in (RequestState.DONE, RequestState.ABORTED)
        return is_over or bool(self.request._cancel_reason)

    @property
    def may_compute(self) -> bool:
        """Whether the engine begins a forward of it at all. If it should not, the package refuses the step."""
        return True

    def tables_of(self, pending: PendingLoad | None) -> Tables:
        """Its block tables, for a forward."""
        return self.request.block_ids if pending is None else pending.block_ids

    def has_written(self) -> None:
        """Called when a forward is over whose tokens lie in its blocks now."""

    def look(self) -> None:
        """Update `written` with the tokens that a match or a load has brought."""
        state = self.request.state
        if state in _COMPUTING and state is not self._known_in:
            self.num_ready, self._known_in = self.request.num_computed_tokens, state
            self.written = self.chain[: self.num_ready]

    def accept_second_answer(self, num_ready: int) -> None:
        """Take a second answer of its load. After a reset, it may name fewer tokens than the first one."""
        if num_ready < self.num_ready:
            self.fall_back_to(num_ready)

    def fall_back_to(self, num_ready: int) -> None:
        self.num_ready = num_ready
        del self.written[num_ready:]

    def start_again(self) -> None:
        """Forget what lay in the blocks that the request has given up."""
        self.written, self._known_in, self.pending, self.early = [], None, None, None
        self.num_ready = 0
        self._now.clear()
        self.life += 1

    def startable(self) -> PendingLoad | None:
        """A load that a forward may start on."""
        load = self.pending
        is_under_way = load is not None and not self.must_end and not load.is_over
        return load if is_under_way and load is not None and load.can_start else None

    @property
    def allocated(self) -> int:
        """Tokens that its block tables reach to."""
        sizes = [config.block_size for config in self.engine.runtime.config.groups]
        return int(min(len(table) * size for table, size in zip(self.tables_of(None), sizes, strict=True)))

    # -- what was read --------------------------------------------------------------------------------------------

    def check_read(self, read: Read, what: str) -> None:
        """The bytes are right and none of them was invalidated, unless the request was told."""
        if self.must_end:
            return
        if read.problem:
            raise Violation("wrong bytes", f"{self.name} reads {read.problem}, {what}")
        if read.stale:
            raise Violation("not told", f"{self.name} reads {read.stale}, {what}")
        record = self.request._record
        assert record is not None
        oldest = self.engine.oldest.get(record, 0)
        for forward, stop in read.forwards.items():
            if self.engine.is_old(forward, oldest) and stop > record.given_tokens:  # not an engine's own hit
                raise Violation("old weights", f"{self.name} reads {forward}, from before a reset, {what}")

    def check_match(self, *, is_first: bool) -> None:
        """Nothing hits that was never cached under the same root; never the last token; never more than was asked."""
        found, ask = self.request.match.num_tokens, self.ask
        if found >= len(self.tokens):
            raise Violation("hit cap", f"{self.name} hits {found} of {len(self.tokens)} tokens")
        if is_first and not self._may_hit(found):
            raise Violation("hit cap", f"{self.name} hits {found} tokens: {ask}")
        for group, config in enumerate(self.engine.runtime.config.groups):
            for end in range(config.block_size, found + 1, config.block_size):
                if (group, self.chain[end - 1]) not in self.engine.committed:
                    raise Violation("may not hit", f"{self.name} hits {found} tokens, {end} were never cached")

    def _may_hit(self, found: int) -> bool:
        ask = self.ask
        if not ask.reads_cache or (ask.max_hit_tokens is not None and found > ask.max_hit_tokens):
            return not found
        return found % ask.hit_alignment == 0

    def check_ready(self, num_ready: int) -> None:
        """The tokens that a load reports as ready are there."""
        read = self.engine.read(self.tables_of(None), self.chain, num_ready)
        self.check_read(read, f"of {num_ready} tokens that are ready")

    # -- commits --------------------------------------------------------------------------------------------------

    def accepted(self, new: tuple[int, ...]) -> tuple[list[int], int]:
        """The chain with `new` after it, and how many of its tokens are computed."""
        self.look()
        chain = self.engine.lengthened(self.chain, new)
        return chain, self.num_written(chain)

    def num_written(self, chain: list[int]) -> int:
        """How many of the first tokens of `chain` lie in its blocks."""
        pairs = zip(self.written, chain, strict=False)
        most = min(len(self.written), len(chain))
        return next((at for at, (held, wanted) in enumerate(pairs) if held != wanted), most)

    def check_computed(self, stop: int, chain: list[int]) -> None:
        """What is about to be committed is still there."""
        if self.request.state in _COMPUTING and not self.must_end and stop <= self.allocated:
            start = self.request.num_computed_tokens
            self.engine.check_written(self.name, self.tables_of(None), chain, start, stop)

    def committed(self, stop: int, chain: list[int], new: tuple[int, ...], num_computed: int) -> None:
        self.tokens += new
        self.chain, self.written = chain, self.written[:num_computed]
        self.num_commits += 1
        self._known_in = RequestState.RUNNING
        if self.born == self.engine.num_resets:
            self.engine.may_be_cached(chain[:stop])

    def taken_back(self, start: int) -> None:
        """The request has invalidated its own forwards from `start` on."""
        for forward in self._now:
            if forward.stop > start:
                forward.take_back(start)
            self.forwards[forward] = min(self.forwards[forward], start)
        num_prompt = len(self.ask.tokens)
        del self.tokens[max(num_prompt, start + 1) :]
        del self.chain[max(num_prompt, start + 1) :]
        del self.written[start:]
        self.num_ready = min(self.num_ready, start)
        self.life += 1

    def computed(self, forward: Forward) -> None:
        self.forwards[forward] = forward.stop
        self._now.add(forward)

    @property
    def has_wrong_input(self) -> bool:
        """Whether something that it has computed was not right."""
        return any(forward.wrong_from < min(forward.stop, stop) for forward, stop in self.forwards.items())

    def loaded(self, pending: PendingLoad, num_ready: int) -> None:
        """Its load is over: what an early start has computed counts, or the engine is told that it does not."""
        self.look()
        work, first = self.early, pending.first_invalid_token
        self.early = self.pending = None
        if first is not None and first != num_ready and not self.must_end:
            raise Violation("early start", f"{self.name}: invalid from token {first} on, but {num_ready} are ready")
        if work is None or self.must_end or work.pending is not pending or work.life != self.life:
            return
        if first is not None:
            self._check_refused(work, num_ready)
        elif work.misread:
            raise Violation("wrong bytes", f"{self.name} reads {work.misread}, before its load was over")
        elif work.start == len(self.written) == num_ready:
            self.written += work.chain[work.start : work.stop]

    def _check_refused(self, work: Work, num_ready: int) -> None:
        """Tokens computed after a load that fell short can't be committed."""
        if work.stop <= num_ready:
            return
        try:
            self.request.commit(work.stop)
        except CommitError:
            return
        except AoffloadError as error:
            raise Violation("early start", f"{self.name}: {error!r}") from None
        raise Violation("early start", f"{self.name} has committed what stood on a load that failed")


@attrs.define(eq=False)
class Work:
    """One request's share of a forward: `[start, stop)` of `chain`, in the tables as they were when it began."""

    served: Served
    tables: Tables
    chain: list[int]
    start: int
    stop: int
    pending: Any
    """The load, if the forward has begun before that was over."""
    regions: tuple[LoadedRegion, ...] = ()
    misread: str = ""
    life: int = 0
    _touched: list[tuple[int, int]] = attrs.field(factory=list)
    _is_over: bool = False

    @classmethod
    def begin(cls, served: Served, num_tokens: int, drafts: tuple[int, ...], pending: PendingLoad | None) -> Work:
        """Begin the forward, in a step that holds its blocks. It only reads while another one is under way."""
        engine = served.engine
        served.look()
        tables = served.tables_of(pending)
        chain = engine.lengthened(served.chain, drafts if pending is None else ())
        start = served.num_written(chain) if pending is None else pending.num_expected_tokens
        sizes = [config.block_size for config in engine.runtime.config.groups]
        allocated = min(len(table) * size for table, size in zip(tables, sizes, strict=True))
        stop = max(start, min(start + num_tokens, allocated, len(chain)))
        if served.num_works:
            stop = start
        if start < stop and pending is None:
            del served.written[start:]  # earlier drafts, which this forward may overwrite at any time
        regions = () if pending is None else pending.regions
        served.num_works += 1
        # Blocks that a load still fills belong to its jobs.
        touched = engine.blocks_of(tables, 0 if pending is None else start)
        return cls(served, tables, chain, start, stop, pending, regions, life=served.life, touched=touched)

    def check_owners(self) -> None:
        """Every block still has the same owner."""
        for block_id, generation in self._touched:
            self.served.engine.device.check_owner(f"a step of {self.served.name}", block_id, generation)

    def drop(self) -> None:
        """End the forward without computing."""
        if not self._is_over:
            self._is_over = True
            self.served.num_works -= 1

    def finish(self) -> None:
        """End the forward: check what it reads, and write what it computes."""
        if self._is_over:
            return
        self.drop()
        self.check_owners()
        if self.pending is not None and not self._has_regions():
            return
        served, engine = self.served, self.served.engine
        read = engine.read(self.tables, self.chain, self.start)
        if self.life != served.life:
            read.stale = ""  # the request itself has invalidated what this forward reads, or has given it up
        if self.pending is None:
            served.check_read(read, f"computing from token {self.start} on")
        else:
            self.misread = read.problem or read.stale
        if self.start < self.stop:
            self._write(read)
        if self.life != served.life:
            return
        if self.pending is not None:
            served.early = self
        elif self.start < self.stop:
            served.written = served.written[: self.start] + self.chain[self.start : self.stop]
            served.has_written()

    def _has_regions(self) -> bool:
        try:
            for region in self.regions:
                if not region.is_given:
                    return False
                region.synchronize()
        except RegionNotLoaded:
            return False
        return True

    def _write(self, read: Read) -> None:
        served, engine = self.served, self.served.engine
        if read.problem:
            engine.fill(self.tables, self.start, self.stop, POISON)
            return
        forward = Forward(served.name, self.start, self.stop, engine.weights)
        for parent, stop in read.forwards.items():
            parent.read_by(forward, stop)
        if self.life == served.life:  # else it computes nothing that counts
            served.computed(forward)
        engine.write_tokens(self.tables, self.chain, forward, self.start, self.stop)
