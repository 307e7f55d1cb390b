"""A request of a program, seen by its engine: its tokens, its computed tokens, and its running forwards."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import attrs

from aoffload._kernel.plans import Checkpoint
from aoffload._kernel.states import RequestState
from aoffload._runtime.loading import PendingLoad
from aoffload._transfer.fences import LoadedRegion
from aoffload.errors import AoffloadError, CommitError, RegionNotLoaded
from aoffload.testing.asks import Ask
from aoffload.testing.memory import POISON, TORN
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
    states: dict[int, tuple[Forward, ...]] = attrs.field(factory=dict)
    """The running states that the engine keeps, by number of tokens: since the last commit, one after each token. Each
    with the forwards that have computed it. The initial state is none of them."""
    copied: set[int] = attrs.field(factory=set)
    """The planned checkpoints that its forwards have written, and that no commit has named."""
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
            self.cut(0)
            self.written = self.chain[: self.num_ready]

    def cut(self, stop: int) -> None:
        """Forget what has been computed after the first `stop` tokens."""
        del self.written[stop:]
        self.states = {at: forwards for at, forwards in self.states.items() if at <= stop}
        self.copied = {at for at in self.copied if at <= stop}

    def accept_second_answer(self, num_ready: int) -> None:
        """Take a second answer of its load. After a reset, it may name fewer tokens than the first one."""
        if num_ready < self.num_ready:
            self.fall_back_to(num_ready)

    def fall_back_to(self, num_ready: int) -> None:
        self.num_ready = num_ready
        self.cut(num_ready)

    def start_again(self) -> None:
        """Forget what lay in the blocks that the request has given up."""
        self.cut(0)
        self._known_in, self.pending, self.early = None, None, None
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
        return self.engine.allocated(self.tables_of(None))

    # -- the recurrent state --------------------------------------------------------------------------------------

    def resume(self, start: int) -> Checkpoint | None:
        """The checkpoint from which a forward goes on that computes from token `start` on, and whose engine has no
        running state. None: the request is over."""
        found: Checkpoint | None = None if self.must_end else self.request.resume_checkpoint
        if not self.must_end and (found is None or found.num_tokens != start):
            raise Violation("no state", f"{self.name} computes from token {start} on, from {found}, not {self.states}")
        return found

    def check_state(self) -> None:
        """Inside a step: nothing is left of the checkpoint of the hit once the request has computed further."""
        record, found = self.request._record, None if self.must_end else self.request.resume_checkpoint
        if found is not None and record.num_steps == 1 and found.num_tokens != record.num_computed_tokens:
            raise Violation("no state", f"{self.name} has computed {record.num_computed_tokens}, and is given {found}")

    def passed(self, start: int, stop: int, most: int, also: int) -> tuple[list[Checkpoint], int]:
        """The checkpoints that a forward over `[start, stop)` should write, and how many of them it writes: at most
        `most` of those that are planned."""
        planned: Sequence[Checkpoint] = self.request.planned_checkpoints
        return [one for one in planned if start < one.num_tokens <= stop], most

    def has_copied(self, checkpoints: Sequence[Checkpoint], *, counts: bool) -> None:
        """A forward is over that has written `checkpoints`. Unless it `counts`, the request goes on without it."""
        if counts:
            self.copied.update(one.num_tokens for one in checkpoints)

    def named(self, stop: int, chain: list[int]) -> Collection[int]:
        """The checkpoints that a commit of the first `stop` tokens of `chain` names: they are still in their blocks."""
        if not self.copied or self.request.state not in _COMPUTING:
            return ()
        found = tuple(sorted(at for at in self.copied if self.request.num_computed_tokens < at <= stop))
        planned = {one.num_tokens: one.block_ids for one in self.request.planned_checkpoints}
        for at in found if not self.must_end else ():
            if at not in planned or not self.engine.is_checkpoint(planned[at], chain[at - 1]):
                raise Violation("wrong bytes", f"{self.name} has written a checkpoint at {at}, and plans {planned}")
        return found

    def _check_resume(self, read: Read, num_ready: int) -> None:
        """The state of the tokens that are ready is there, unless the request has gone on."""
        request = self.request
        is_ready = request.state in _COMPUTING and request.num_computed_tokens == num_ready
        if self.engine.has_states and num_ready and is_ready and not self.states and not self.must_end:
            resume = self.resume(num_ready)
            assert resume is not None
            self.engine.read_state(read, resume.block_ids, self.chain[num_ready - 1], num_ready)

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
        if end := self.engine.missing(self.chain, 0, found):
            raise Violation("may not hit", f"{self.name} hits {found} tokens, {end} were never cached")

    def _may_hit(self, found: int) -> bool:
        ask = self.ask
        if not ask.reads_cache or (ask.max_hit_tokens is not None and found > ask.max_hit_tokens):
            return not found
        return found % ask.hit_alignment == 0

    def check_ready(self, num_ready: int) -> None:
        """The tokens that a load reports as ready are there."""
        read = self.engine.read(self.tables_of(None), self.chain, num_ready)
        self._check_resume(read, num_ready)
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

    def committed(
        self, stop: int, chain: list[int], new: tuple[int, ...], num_computed: int, named: Collection[int] = ()
    ) -> None:
        self.tokens += new
        self.cut(num_computed)
        self.chain = chain
        self.states = {at: forwards for at, forwards in self.states.items() if at >= stop}
        self.copied = {at for at in self.copied if at > stop}
        self.num_commits += 1
        self._known_in = RequestState.RUNNING
        if self.born == self.engine.num_resets:
            self.engine.may_be_cached(chain[:stop], named)

    def taken_back(self, start: int) -> None:
        """The request has invalidated its own forwards from `start` on."""
        for forward in self._now:
            if forward.stop > start:
                forward.take_back(start)
            self.forwards[forward] = min(self.forwards[forward], start)
        num_prompt = len(self.ask.tokens)
        del self.tokens[max(num_prompt, start + 1) :]
        del self.chain[max(num_prompt, start + 1) :]
        self.cut(start)
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
    state: tuple[Forward, ...] = ()
    """The running state from which it goes on."""
    resume: Checkpoint | None = None
    """The checkpoint that it first copies into the running state."""
    passed: list[Checkpoint] = attrs.field(factory=list)
    """The checkpoints that it should write."""
    most: int = 9
    """How many of them it writes. Of the others it leaves half a copy."""
    misread: str = ""
    life: int = 0
    _touched: list[tuple[int, int]] = attrs.field(factory=list)
    _is_over: bool = False

    @classmethod
    def begin(
        cls,
        served: Served,
        num_tokens: int,
        drafts: tuple[int, ...],
        pending: PendingLoad | None,
        most: int = 9,
        also: int = 0,
    ) -> Work:
        """Begin the forward, in a step that holds its blocks. It only reads while another one is under way. `also`: of
        an engine with blocks of its own, the unit after which it writes one more checkpoint."""
        engine = served.engine
        served.look()
        tables = served.tables_of(pending)
        chain = engine.lengthened(served.chain, drafts if pending is None else ())
        start = served.num_written(chain) if pending is None else pending.num_expected_tokens
        stop = max(start, min(start + num_tokens, engine.allocated(tables), len(chain)))
        if served.num_works:
            stop = start
        if start < stop and pending is None:
            served.cut(start)  # earlier drafts, which this forward may overwrite at any time
        regions = () if pending is None else pending.regions
        # Blocks that a load still fills belong to its jobs.
        touched = engine.blocks_of(tables, 0 if pending is None else start)
        work = cls(served, tables, chain, start, stop, pending, regions, most=most, life=served.life, touched=touched)
        if engine.has_states:
            work._begin_state(also)
        served.num_works += 1
        return work

    def _begin_state(self, also: int) -> None:
        served, generation = self.served, self.served.engine.device.generation
        served.check_state()
        self.state = served.states.get(self.start, ())
        if self.start and not self.state:
            self.resume = served.resume(self.start)
        if self.start < self.stop:
            self.passed, self.most = served.passed(self.start, self.stop, self.most, also)
        for checkpoint in (*self.passed, *([self.resume] if self.resume is not None else ())):
            self._touched += [(block_id, generation[block_id]) for block_id in checkpoint.block_ids]

    def check_owners(self) -> None:
        """Every block still has the same owner."""
        for block_id, generation in self._touched:
            self.served.engine.device.check_owner(f"a step of {self.served.name}", block_id, generation)

    def drop(self) -> None:
        """End the forward without computing."""
        if self._end():
            self.served.has_copied(self.passed, counts=False)

    def _end(self) -> bool:
        if self._is_over:
            return False
        self._is_over = True
        self.served.num_works -= 1
        return True

    def finish(self) -> None:
        """End the forward: check what it reads, and write what it computes."""
        if not self._end():
            return
        self.check_owners()
        if self.pending is not None and not self._has_regions():
            return
        served, engine = self.served, self.served.engine
        read = engine.read(self.tables, self.chain, self.start)
        self._enter_state(read)
        if self.life != served.life:
            read.stale = ""  # the request itself has invalidated what this forward reads, or has given it up
        if self.pending is None:
            served.check_read(read, f"computing from token {self.start} on")
        else:
            self.misread = read.problem or read.stale
        forward = self._write(read) if self.start < self.stop else None
        if self.life != served.life:
            served.has_copied(self.passed, counts=False)
            return
        if self.pending is not None:
            served.early = self
        elif self.start < self.stop:
            served.written = served.written[: self.start] + self.chain[self.start : self.stop]
            self._keep_state(forward)
            served.has_written()

    def _enter_state(self, read: Read) -> None:
        """Go on from the running state, or from a checkpoint."""
        engine = self.served.engine
        if not engine.has_states or not self.start:
            return
        engine.go_on(read, self.state, self.start)
        if self.resume is not None:
            engine.read_state(read, self.resume.block_ids, self.chain[self.start - 1], self.start)
            engine.met("checkpoint hit")
        elif not self.state:
            read.problem = read.problem or "no state"

    def _keep_state(self, forward: Forward | None) -> None:
        served = self.served
        if not served.engine.has_states:
            return
        state = () if forward is None else (forward,)
        served.states |= dict.fromkeys(range(self.start + 1, self.stop + 1), state)
        served.has_copied(self.passed[: self.most], counts=forward is not None)

    def _has_regions(self) -> bool:
        try:
            for region in self.regions:
                if not region.is_given:
                    return False
                region.synchronize()
        except RegionNotLoaded:
            return False
        return True

    def _write(self, read: Read) -> Forward | None:
        """Write what the forward has computed. None: it has read nothing of use."""
        served, engine = self.served, self.served.engine
        if read.problem:
            engine.fill(self.tables, self.start, self.stop, POISON)
            for checkpoint in self.passed:
                engine.tear(checkpoint.block_ids, POISON)
            return None
        forward = Forward(served.name, self.start, self.stop, engine.weights)
        for parent, stop in read.forwards.items():
            parent.read_by(forward, stop)
        if self.life == served.life:  # else it computes nothing that counts
            served.computed(forward)
        engine.write_tokens(self.tables, self.chain, forward, self.start, self.stop)
        for number, checkpoint in enumerate(self.passed):
            at = checkpoint.num_tokens
            engine.write_state(checkpoint.block_ids, self.chain[at - 1], forward, at)
            if number >= self.most:
                engine.tear(checkpoint.block_ids[::2], TORN)
            engine.met("checkpoint left out" if number >= self.most else "checkpoint")
        return forward
