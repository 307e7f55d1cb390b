"""Matching under every order of calls: a ledger beside a set of committed prefixes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from typing import ClassVar

import attrs
import numpy as np
from committed_prefixes import Author, MayHit, Text
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from aoffload._common.prefix import KeySpan, Prefix, Root
from aoffload._config.config import OffloadConfig
from aoffload._config.groups import KVCacheGroup
from aoffload._extensions.assembly import Ledger
from aoffload._kernel.events import Event, StoreSkipped
from aoffload._kernel.plans import Completion, PrefixMatch, TransferPlan
from aoffload._kernel.records import LedgerRequest
from aoffload._kernel.states import Direction, JobState, Outcome, RequestState
from aoffload.errors import OutOfBlocks
from proof.programs.fingerprint import changes, fingerprint

S = RequestState
ROOTS = [Root("m"), Root("m", "salt"), Root("m", None, "adapter"), Root("another model")]
STRANGERS = [Root("m", b"salt"), Root("m", None, b"adapter"), Root("m", "adapter"), Root("msalt"), Root("")]
"""Roots that nobody ever commits under."""
MUST_HAPPEN = (
    "device hit", "host hit", "exactly what is on the device", "exactly what is anywhere", "evicted DEVICE",
    "evicted HOST", "queued", "invalidated", "reset", "load landed", "store landed",
)  # fmt: skip
OUTCOMES = st.sampled_from([Outcome.LANDED, Outcome.LANDED, *Outcome])
WHICH = st.integers(0, 99)
ALIGNMENTS = st.sampled_from([1, 1, 1, 3, 4, 8])
HINTS = st.sampled_from([None, None, 0, 1, 3, 4, 5, 8, 10**30])


BEGINNINGS = ([0] * 14, [0] * 14, [0, 0, 0, 0, 1] * 3)


@st.composite
def texts(draw: st.DrawFn) -> Text:
    """Two tokens, two images, mostly one root: prompts that share what they begin with."""
    tokens = draw(st.sampled_from(BEGINNINGS))[: draw(st.integers(0, 13))] + draw(
        st.lists(st.integers(0, 1), max_size=3)
    )
    tokens = tokens or [0]
    root = draw(st.sampled_from([ROOTS[0], ROOTS[0], *ROOTS]))
    if draw(st.integers(0, 3)) or len(tokens) < 2:
        return Text(root, tuple(tokens))
    start = draw(st.integers(0, len(tokens) - 1))
    stop = draw(st.integers(start + 1, len(tokens)))
    return Text(root, tuple(tokens), (KeySpan(start, stop, draw(st.sampled_from([b"cat", b"dog"]))),))


def prefix_of(text: Text) -> Prefix:
    return Prefix.of(text.root, text.tokens, text.spans)


@attrs.define(eq=False)
class Client:
    """One request as its engine knows it."""

    record: LedgerRequest
    author: Author
    text: Text
    num_prompt: int
    has_read: bool = False


class Losses:
    """Stores that found no room."""

    num_skipped = 0

    def observe(self, event: Event) -> None:
        if isinstance(event, StoreSkipped):
            self.num_skipped += event.num_blocks


class MatchMachine(RuleBasedStateMachine):
    """Every call of the ledger that a client may make, in any order."""

    ledger: Ledger
    happened: ClassVar[Counter[str]] = Counter()
    """Over all machines: one that never met an eviction would prove little."""

    @initialize(
        sizes=st.sampled_from([(2,), (3,), (4,), (2, 4)]),
        num_units=st.sampled_from([3, 4, 6, 100]),
        num_host=st.sampled_from([0, 3, 8, 500]),
        per_job=st.sampled_from([1, 2, 1000]),
        is_calm=st.booleans(),
    )
    def open(self, sizes: tuple[int, ...], num_units: int, num_host: int, per_job: int, is_calm: bool) -> None:
        groups = [KVCacheGroup(f"g{i}", block_size=size) for i, size in enumerate(sizes)]
        width = sum(max(sizes) // size for size in sizes)
        config = OffloadConfig(groups=groups, num_host_blocks=num_host * width, max_job_bytes=per_job * width)
        self.losses = Losses()
        self.ledger = Ledger(config, num_units * width + 1, observer=self.losses)
        self.unit, self.width = self.ledger.layout.unit_tokens, self.ledger.layout.width
        self.may = MayHit(self.unit)
        self.clients: list[Client] = []
        self.plans: dict[int, TransferPlan] = {}
        self.steps: list[ExitStack] = []
        self.seen: dict[Text, None] = {}
        self.bytes: tuple[dict[int, object], dict[int, object]] = ({}, {})  # whose KV each block holds, by tier
        self.is_calm, self.was_lost, self.was_lost_on_host, self.was_corrupt = is_calm, False, num_host == 0, False

    def one(self, which: int, *states: RequestState, waits: bool = False) -> Client | None:
        found = [
            client
            for client in self.clients
            if client.record.state in states and (client.record.waiter is not None) is waits
        ]
        return found[which % len(found)] if found else None

    def take(self, plans: tuple[TransferPlan, ...]) -> None:
        self.plans |= {plan.job_id: plan for plan in plans}

    # -- looking --------------------------------------------------------------------------------------------------

    @rule(text=texts())
    def look_up(self, text: Text) -> None:
        """Looking takes nothing and touches nothing: no reference, no place in an order, no cut of a run."""
        before = fingerprint(self.ledger)
        found = self.check_hit(text)
        assert not changes(before, fingerprint(self.ledger))
        assert found.num_tokens < len(text.tokens)
        for root in STRANGERS:
            assert not self.ledger.lookup(prefix_of(attrs.evolve(text, root=root))).num_tokens, root

    def check_hit(self, text: Text) -> PrefixMatch:
        found, most = self.ledger.lookup(prefix_of(text)), self.may.longest(text)
        assert found.num_tokens <= most, f"{text} was never committed so far: {found}"
        assert found.num_device_tokens % self.unit == found.num_host_tokens % self.unit == 0
        device, host = self.ledger.cache.tiers
        self.happened["device hit"] += found.num_device_tokens > 0
        self.happened["host hit"] += found.num_host_tokens > 0
        if not self.was_lost and not device.num_evicted:
            self.happened["exactly what is on the device"] += most > 0
            assert found == PrefixMatch(most, 0), f"nothing was lost: {found}, {most} committed"
        complete = not (self.was_lost or self.was_lost_on_host or self.losses.num_skipped or host.num_evicted)
        if complete and not self.ledger.jobs.unsettled:
            self.happened["exactly what is anywhere"] += found.num_host_tokens > 0
            assert found.num_tokens == most, f"all of it was stored: {found}, {most} committed"
        return found

    @invariant()
    def what_was_committed_hits_and_nothing_else_does(self) -> None:
        if not hasattr(self, "ledger"):
            return
        self.ledger.check_integrity()
        for text in list(self.seen)[-3:]:
            self.check_hit(attrs.evolve(text, tokens=(*text.tokens, 0)))

    @invariant()
    def whoever_reads_reads_its_own_prefix(self) -> None:
        for client in self.clients if hasattr(self, "ledger") else ():
            if client.record.state in (S.ALLOCATED, S.RUNNING):
                num_units = client.record.num_computed_tokens // self.unit
                right = self.right_bytes(client.text, client.record, 0, num_units)
                assert {block_id: self.bytes[0].get(block_id) for block_id in right} == right, client

    def right_bytes(self, text: Text, request: LedgerRequest, start: int, stop: int) -> dict[int, object]:
        keys, width = text.keys(self.unit), self.width
        return {request.table[at]: (keys[at // width], at % width) for at in range(start * width, stop * width)}

    @invariant()
    def a_cached_block_holds_what_it_is_found_by(self) -> None:
        runs = self.ledger.cache.index.runs.values() if hasattr(self, "ledger") else ()
        for run in runs:
            tokens = np.frombuffer(b"".join(reversed([before.tokens for before in run.path()])), np.int32).tolist()
            for part, found in zip(run.parts, self.bytes, strict=True):
                for at, block_id in enumerate(part.blocks):
                    stop = (run.start + at // self.width + 1) * self.unit
                    tag = found.get(block_id)
                    if tag != "rotten":  # and the ledger has not been told yet
                        assert isinstance(tag, tuple), (run, tag)
                        (_, said, _), place = tag
                        assert (said, place) == (tuple(tokens[:stop]), at % self.width), (run, tag)

    @invariant()
    def what_a_live_request_has_published_is_found(self) -> None:
        """It is pinned: no eviction, and nothing that becomes of others, takes it away."""
        for client in self.clients if hasattr(self, "ledger") and not self.was_corrupt else ():
            if client.author.epoch == self.may.epoch and not client.author.is_wrong:
                found = self.ledger.lookup(prefix_of(attrs.evolve(client.text, tokens=(*client.text.tokens, 0))))
                assert found.num_device_tokens >= client.record.published * self.unit, (client, found)

    @invariant()
    def a_prefix_loses_its_tail_before_its_head(self) -> None:
        for tier in self.ledger.cache.tiers if hasattr(self, "ledger") else ():
            place = {part.run: at for at, part in enumerate(tier.order)}
            for run, at in place.items():
                assert run.before is None or place.get(run.before, at + 1) > at, (tier, run)

    # -- a request's life -----------------------------------------------------------------------------------------

    @precondition(lambda self: len(self.clients) < 5)
    @rule(text=texts(), most=HINTS, alignment=ALIGNMENTS, calls=st.integers(0, 3))
    def admit(self, text: Text, most: int | None, alignment: int, calls: int) -> None:
        client = self.enter(text, most, alignment)
        for _ in range(calls):
            self.next_call(client)

    def enter(self, text: Text, most: int | None = None, alignment: int = 1) -> Client:
        """What is pinned is what a look-up says, narrowed to the limits, and not a token less."""
        found = self.check_hit(text)
        request = self.ledger.admit(prefix_of(text), max_hit_tokens=most, hit_alignment=alignment)
        total = found.num_tokens if most is None else min(found.num_tokens, most)
        total = max(n for n in range(total + 1) if n % alignment == n % self.unit == 0)
        device = min(found.num_device_tokens, total)
        assert request.match == PrefixMatch(device, total - device), (request.match, found, most, alignment)
        client = Client(request, Author(self.may.epoch, text), text, len(text.tokens))
        self.clients.append(client)
        self.seen[text] = None
        return client

    @precondition(lambda self: self.clients)
    @rule(which=WHICH, less=st.sampled_from([0, 0, 1, 2, 5, -3]), new=st.lists(st.integers(0, 1), max_size=3))
    def advance(self, which: int, less: int, new: list[int]) -> None:
        self.next_call(self.clients[which % len(self.clients)], less, new)

    def next_call(self, client: Client, less: int = 0, new: list[int] | tuple[()] = ()) -> None:
        """The next call in the life of a request."""
        request = client.record
        if request.waiter is not None:
            self.stop_waiting(client, less)
        elif request.state is S.PINNED:
            self.allocate(client, less)
        elif request.state is S.RUNNING or (request.state is S.ALLOCATED and less == 2):
            self.compute(client, less, new)
        elif request.load is None and not request.num_steps and request.table:
            self.take(self.ledger.plan_load(request, less * self.unit if less > 0 else None))

    def allocate(self, client: Client, less: int = 0) -> None:
        num_tokens = max(1, len(client.text.tokens) - less)
        error = self.try_nowait(self.ledger.allocate_nowait, client, num_tokens)
        if error is not None and error.retryable:
            self.happened["queued"] += 1
            self.ledger.queue_allocation(client.record, num_tokens)
        elif error is not None:
            self.end(client)

    def try_nowait(self, call: Callable[..., object], client: Client, num_tokens: int) -> OutOfBlocks | None:
        """Refusing changes no count, and nothing else either."""
        before = fingerprint(self.ledger)
        try:
            call(client.record, num_tokens)
        except OutOfBlocks as error:
            assert not changes(before, fingerprint(self.ledger))
            return error
        return None

    def stop_waiting(self, client: Client, less: int) -> None:
        waiter = client.record.waiter
        assert waiter is not None
        if less == 5 and client.record.state is not S.REQUEUED:
            self.ledger.withdraw(waiter)
        elif waiter.is_over:
            try:
                self.ledger.accept(waiter)
            except OutOfBlocks:
                self.end(client)

    @rule(which=WHICH)
    def abandon(self, which: int) -> None:
        client = self.one(which, S.LOADING, S.DRAINING, S.REQUEUED)
        if client is not None and not self.is_calm:
            self.ledger.abandon_load(client.record)

    def compute(self, client: Client, less: int = 0, new: list[int] | tuple[()] = ()) -> None:
        request, text = client.record, attrs.evolve(client.text, tokens=(*client.text.tokens, *new))
        most = min(len(request.table) // self.width * self.unit, len(text.tokens))
        if most < request.num_computed_tokens:
            return
        num_tokens = max(request.num_computed_tokens, most - max(0, less))
        if not client.has_read:
            client.has_read, client.author.ready = True, request.num_computed_tokens // self.unit
        first = request.num_computed_tokens // self.unit
        self.bytes[0].update(self.right_bytes(text, request, first, num_tokens // self.unit))
        self.take(self.ledger.commit(request, num_tokens, new))
        self.may.commit(client.author, text, num_tokens)
        client.text = text
        self.seen[text] = None

    @rule(which=WHICH, more=st.integers(1, 6))
    def extend(self, which: int, more: int) -> None:
        client = self.one(which, S.ALLOCATED, S.RUNNING)
        if client is None:
            return
        num_tokens = len(client.record.table) // self.width * self.unit + more
        error = self.try_nowait(self.ledger.extend_nowait, client, num_tokens)
        if error is not None and error.retryable:
            self.ledger.queue_extension(client.record, num_tokens)

    @precondition(lambda self: self.clients)
    @rule(which=WHICH, reason=st.sampled_from(["closed_early", "closed_early", "cancelled"]))
    def leave(self, which: int, reason: str) -> None:
        self.end(self.clients[which % len(self.clients)], reason)

    def end(self, client: Client, reason: str = "closed_early") -> None:
        self.clients.remove(client)
        self.take(self.ledger.release(client.record, reason))

    @precondition(lambda self: len(self.clients) < 5 and self.ledger.admission.queue.is_empty)
    @rule(text=texts())
    def serve(self, text: Text) -> None:
        """A whole life at once."""
        client = self.enter(text)
        if self.ledger.admission.num_missing(client.record, -(-len(text.tokens) // self.unit)) <= self.num_available:
            self.ledger.allocate_nowait(client.record)
            self.take(self.ledger.plan_load(client.record))
            self.end_jobs()
            if client.record.state is S.RUNNING:
                self.compute(client)
        self.end(client)

    @property
    def num_available(self) -> int:
        return self.ledger.cache.tiers[0].num_available

    @precondition(lambda self: len(self.clients) < 5 and self.ledger.admission.queue.is_empty)
    @rule(text=texts(), outcome=OUTCOMES, where=WHICH)
    def serve_from_the_host(self, text: Text, outcome: Outcome, where: int) -> None:
        """The same prompt twice, and in between a request that needs all blocks."""
        self.serve(text)
        self.end_jobs()
        filler = self.ledger.admit(Prefix.of(Root("filler"), [1]), max_hit_tokens=0)
        if self.num_available >= self.width:
            self.ledger.allocate_nowait(filler, self.num_available // self.width * self.unit)
        self.ledger.release(filler)
        client = self.enter(text)
        self.next_call(client)
        self.next_call(client)
        for job_id in tuple(self.plans):
            self.move_on(job_id, outcome, where)
        if client.record.state is S.RUNNING:
            self.compute(client)

    @precondition(lambda self: len(self.clients) < 5 and self.ledger.admission.queue.is_empty)
    @rule(root=st.sampled_from(ROOTS))
    def crowd_the_host(self, root: Root) -> None:
        """Prompts that share nothing: more than a small host keeps."""
        for first in range(2, 6):
            self.serve(Text(root, (first,) * (2 * self.unit + 1)))

    # -- steps, and what takes back -------------------------------------------------------------------------------

    @rule(which=st.lists(WHICH, min_size=1, max_size=2, unique=True))
    def step(self, which: list[int]) -> None:
        """Two forwards at most; the third that is asked for ends the first."""
        if len(self.steps) == 2:
            self.steps.pop(0).close()
            return
        found = {self.one(one, S.ALLOCATED, S.RUNNING) for one in which} - {None}
        if found:
            self.steps.append(ExitStack())
            self.steps[-1].enter_context(self.ledger.step([client.record for client in found if client]))

    @rule(which=WHICH, back=st.integers(0, 9), again=st.booleans())
    def invalidate(self, which: int, back: int, again: bool) -> None:
        client = self.one(which, S.RUNNING) or self.one(which, S.RUNNING, waits=True)
        if client is not None and not self.is_calm:
            self.take_back(client, back, again)

    @precondition(lambda self: len(self.clients) < 5 and self.ledger.admission.queue.is_empty)
    @rule(text=texts(), back=st.integers(0, 9), again=st.booleans())
    def serve_and_invalidate(self, text: Text, back: int, again: bool) -> None:
        """The first forward of a prompt fails."""
        client = self.enter(text)
        for _ in range(3):
            self.next_call(client)
        if client.record.state is S.RUNNING and not self.is_calm:
            self.take_back(client, back, again)

    def take_back(self, client: Client, back: int, again: bool) -> None:
        request = client.record
        start = max(request.ready_stop * self.unit, request.num_computed_tokens - back)
        wrong = request.table[start // self.unit * self.width : request.num_computed_tokens // self.unit * self.width]
        self.bytes[0].update(dict.fromkeys(wrong, "never right"))
        tainted = self.ledger.invalidation.invalidate(request, start)
        misled = [other for other in self.clients if other.record in tainted]
        assert len(misled) == len(tainted)
        self.may.invalidate(client.author, start, [other.author for other in misled])
        self.happened["invalidated"] += 1
        self.was_lost = True
        client.text = attrs.evolve(client.text, tokens=client.text.tokens[: max(client.num_prompt, start + 1)])
        for other in misled:
            self.end(other, "prefix_invalidated")
        if again and client not in misled:
            self.compute(client)
        for text in self.seen:  # what hangs on what was wrong is not back because that is right now
            self.check_hit(text)

    @rule(goes=st.integers(0, 2))
    def reset(self, goes: int) -> None:
        """Nothing that was cached, or that anybody who was there commits from now on, is ever found again."""
        if self.is_calm or goes:
            return
        self.ledger.reset()
        self.may.reset()
        self.was_lost = True
        self.happened["reset"] += 1

    # -- transfers ------------------------------------------------------------------------------------------------

    @precondition(lambda self: self.plans)
    @rule(which=WHICH, outcome=OUTCOMES, where=WHICH)
    def transfer(self, which: int, outcome: Outcome, where: int) -> None:
        """Jobs are launched and end in any order and in any way; one that is queued may be given up."""
        self.move_on(list(self.plans)[which % len(self.plans)], outcome, where)

    def move_on(self, job_id: int, outcome: Outcome, where: int) -> None:
        job = self.ledger.jobs.unsettled.get(job_id)
        if job is None or job.parked is not None:
            assert not self.ledger.launch(job_id)
        elif job.state is JobState.QUEUED and outcome is Outcome.FAILED and not self.is_calm:
            self.was_lost_on_host = True
            self.ledger.discard(job_id)
            return
        elif job.state is JobState.QUEUED:
            assert self.ledger.launch(job_id)
        if job is not None and job.parked is None and (where % 3 or outcome is not Outcome.LANDED):
            self.end_job(job_id, Outcome.LANDED if self.is_calm else outcome, where)

    def end_job(self, job_id: int, outcome: Outcome, where: int = 0) -> None:
        plan = self.plans.pop(job_id)
        if outcome is Outcome.CORRUPT and plan.direction is Direction.STORE:
            outcome = Outcome.FAILED  # only what was stored once can be other than it was
        self.happened[f"{plan.direction.value} {outcome.value}"] += 1
        at = where % plan.num_blocks
        num_landed = plan.num_blocks if outcome is Outcome.LANDED else at
        source, into = self.bytes[plan.source], self.bytes[plan.destination]
        if outcome is Outcome.CORRUPT:
            source[plan.source_ids[at]] = "rotten"
            self.was_lost = self.was_corrupt = True
        for index, (source_id, block_id) in enumerate(zip(plan.source_ids, plan.destination_ids, strict=True)):
            into[block_id] = source.get(source_id) if index < num_landed else "torn"
        self.was_lost_on_host = self.was_lost_on_host or outcome is not Outcome.LANDED
        self.ledger.settle(Completion(job_id, outcome, num_landed, (at,) if outcome is Outcome.CORRUPT else ()))

    @rule()
    def end_jobs(self) -> None:
        """Everything lands, the youngest first: publishing has to put it in prefix order."""
        for job_id in sorted(self.plans, reverse=True):
            self.ledger.launch(job_id)
        for job_id in sorted(self.plans, reverse=True):
            job = self.ledger.jobs.unsettled.get(job_id)
            if job is None or job.parked is not None:
                del self.plans[job_id]
            else:
                self.end_job(job_id, Outcome.LANDED)

    def teardown(self) -> None:
        """Everybody leaves and everything lands: nothing is pinned any more."""
        if not hasattr(self, "ledger"):
            return
        for step in self.steps:
            step.close()
        for client in tuple(self.clients):
            self.end(client)
        self.end_jobs()
        for tier in self.ledger.cache.tiers:
            self.happened[f"evicted {tier.tier.name}"] += tier.num_evicted
        found = self.ledger.statistics()
        assert found.device.num_pinned == found.host.num_pinned == found.num_waiting == found.num_jobs == 0, found
        self.what_was_committed_hits_and_nothing_else_does()


class TestMatch(MatchMachine.TestCase):
    """Whatever is called in whatever order, and however transfers end: a hit is never longer than what was committed
    and not taken back, exactly that where nothing was lost, never the last token, never across a salt, an adapter, a
    namespace or a key span; and looking changes nothing."""

    settings = settings(max_examples=50, stateful_step_count=50)

    def runTest(self) -> None:  # noqa: N802 - the name that unittest knows
        super().runTest()
        assert not [event for event in MUST_HAPPEN if not MatchMachine.happened[event]], MatchMachine.happened
