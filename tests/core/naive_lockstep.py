"""A ledger and the naive model side by side: every call goes to both, and they have to agree after each."""

from __future__ import annotations

from collections import Counter
from contextlib import AbstractContextManager
from typing import Any

import attrs
import pytest
from naive import DEVICE, HOST, Job, Naive, Request, Tier
from naive_wait_queue import NaiveWaitQueue, Waiting

from aoffload._common.prefix import KeySpan, Prefix, Root
from aoffload._config.config import OffloadConfig
from aoffload._config.groups import KVCacheGroup
from aoffload._extensions.assembly import Ledger
from aoffload._kernel.cache import PrefixCache
from aoffload._kernel.plans import Completion
from aoffload._kernel.records import LedgerRequest, Waiter
from aoffload._kernel.states import Outcome, RequestState, is_compiled
from aoffload.errors import OutOfBlocks

_interned: dict[Any, int] = {}


def extend_keys(keys: list[int], root: Root, tokens: list[int], spans: tuple[KeySpan, ...], size: int) -> None:
    """One key per full unit of `tokens`: equal keys mean equal prefixes."""
    for at in range(len(keys) * size, len(tokens) // size * size, size):
        touching = tuple(span for span in spans if span.start < at + size and span.stop > at)
        content = (keys[-1] if keys else root, tuple(tokens[at : at + size]), touching)
        keys.append(_interned.setdefault(content, len(_interned)))


@attrs.define(eq=False)
class Client:
    root: Root
    tokens: list[int]
    spans: tuple[KeySpan, ...]
    record: LedgerRequest
    request: Request
    waiter: Waiter | None = None
    waiting: Waiting | None = None
    step: AbstractContextManager[None] | None = None

    @property
    def state(self) -> RequestState:
        return self.record.state


@attrs.define(eq=False, slots=False)
class Lockstep:
    block_sizes: tuple[int, ...]
    num_device: int
    num_host: int
    seen: Counter[str] = attrs.field(factory=Counter)
    """How often the interesting things happened."""
    clients: list[Client] = attrs.field(factory=list)
    leaving: list[Client] = attrs.field(factory=list)
    jobs: dict[int, Job] = attrs.field(factory=dict)

    def __attrs_post_init__(self) -> None:
        groups = [KVCacheGroup(f"g{i}", block_size=size) for i, size in enumerate(self.block_sizes)]
        config = OffloadConfig(groups=groups, num_host_blocks=self.num_host)
        self.ledger = Ledger(config, self.num_device + 1)
        self.unit, self.width = self.ledger.layout.unit_tokens, self.ledger.layout.width
        tiers = Tier(self.num_device, self.width), Tier(self.num_host, self.width)
        self.naive = Naive(*tiers, self.unit)
        self.wait_queue = NaiveWaitQueue(self.naive, self._someone_holds_room)
        _count_calls(self.ledger.cache, self.seen)

    def _someone_holds_room(self) -> bool:
        waiting = [other.request for other in (*self.wait_queue.allocating, *self.wait_queue.extending)]
        held = [client.request for client in self.clients if client.request not in waiting]
        return bool(self.naive.jobs or self.leaving) or any(r.units or r.held.get(DEVICE) for r in held)

    # -- calls ----------------------------------------------------------------------------------------------------

    def admit(
        self, root: Root, tokens: list[int], spans: tuple[KeySpan, ...], max_hit_tokens: int | None, alignment: int
    ) -> Client:
        prefix = Prefix.of(root, tokens, spans)
        found = self.ledger.lookup(prefix)
        record = self.ledger.admit(prefix, max_hit_tokens=max_hit_tokens, hit_alignment=alignment * self.unit)
        hit_limit = 1 << 30 if max_hit_tokens is None else max_hit_tokens // self.unit
        client = Client(root, list(tokens), spans, record, Request([], len(tokens), hit_limit, alignment))
        extend_keys(client.request.keys, root, client.tokens, spans, self.unit)
        client.request.evicted_before = self.naive.tiers[HOST].num_evicted
        self.naive.pin(client.request)
        self.clients.append(client)
        self._same_match(client)
        if max_hit_tokens is None and alignment == 1:
            assert found == record.match, "a look-up says something else than the match"
        self.check()
        return client

    def allocate(self, client: Client, num_tokens: int, *, waits: bool) -> None:
        request, units = client.request, -(-num_tokens // self.unit)
        if client.state is RequestState.PINNED:
            units = max(units, request.published)
        if units * self.width > self.num_device:
            self._refused(client, num_tokens, retryable=False)
        elif waits:
            queue = self.ledger.queue_allocation if client.state is RequestState.PINNED else self.ledger.queue_extension
            client.waiter = queue(client.record, num_tokens, lambda: None)
            client.waiting = self.wait_queue.join(client.record.ticket, request, units)
            self.seen["waits"] += client.waiting.state == "waiting"
        elif self.wait_queue.extending or (self.wait_queue.allocating and not request.units):
            self._refused(client, num_tokens, retryable=True)
        elif self.naive.take(request, units):
            self._nowait(client, num_tokens)
        else:
            self._refused(client, num_tokens, retryable=True)
        self.check()

    def _nowait(self, client: Client, num_tokens: int) -> None:
        if client.state is RequestState.PINNED:
            self.ledger.allocate_nowait(client.record, num_tokens)
        else:
            self.ledger.extend_nowait(client.record, num_tokens)

    def _refused(self, client: Client, num_tokens: int, *, retryable: bool) -> None:
        with pytest.raises(OutOfBlocks) as refusal:
            self._nowait(client, num_tokens)
        assert refusal.value.retryable is retryable
        self.seen["out of blocks"] += 1

    def accept(self, client: Client) -> None:
        assert client.waiter is not None and client.waiting is not None
        waiter, client.waiter, waiting, client.waiting = client.waiter, None, client.waiting, None
        was_pinned = client.state is RequestState.PINNED
        try:
            self.ledger.accept(waiter)
        except OutOfBlocks:
            assert waiting.state == "failed"
            self.seen["failed extensions"] += 1
        else:
            assert waiting.state == "granted"
            if was_pinned:
                self._same_match(client)
        self.check()

    def withdraw(self, client: Client) -> None:
        assert client.waiter is not None and client.waiting is not None
        waiter, client.waiter, waiting, client.waiting = client.waiter, None, client.waiting, None
        self.ledger.withdraw(waiter)
        self.wait_queue.leave(waiting)
        if client.state is RequestState.PINNED:
            self.wait_queue.unpin(client.request)
            self.naive.pin(client.request)
            self._same_match(client)
        self.wait_queue.pump()
        self.check()

    def load(self, client: Client, max_tokens: int | None) -> None:
        num_jobs, again = len(self.naive.jobs), client.state is RequestState.LOADING
        self.ledger.plan_load(client.record, max_tokens)
        if again:
            return self.check()
        self.naive.load(client.request, 1 << 30 if max_tokens is None else max_tokens // self.unit)
        self.seen["loads"] += len(self.naive.jobs) - num_jobs
        self.seen["shared loads"] += any(
            client.request in job.claims and len(job.claims) > 1 for job in self.naive.jobs
        )  # fmt: skip
        self.wait_queue.pump()
        return self.check()

    def launch(self, job_id: int) -> None:
        assert self.ledger.launch(job_id)
        self.jobs[job_id].launched = True

    def land(self, job_id: int) -> None:
        job = self.jobs[job_id]
        self.seen["out of order"] += job.before in self.naive.jobs
        self.ledger.settle(Completion(job_id, Outcome.LANDED))
        self.naive.land(job)
        self._conclude()
        self.wait_queue.pump()
        self.check()

    def commit(self, client: Client, num_computed_tokens: int, new: list[int]) -> None:
        self.ledger.commit(client.record, num_computed_tokens, new)
        client.tokens += new
        extend_keys(client.request.keys, client.root, client.tokens, client.spans, self.unit)
        client.request.num_tokens = len(client.tokens)
        self.seen["decoded"] += len(new)
        self.naive.commit(client.request, num_computed_tokens)
        self.wait_queue.pump()
        self.seen["duplicates"] += any(table.duplicates for table in client.record.tables)
        self.check()

    def enter_step(self, client: Client) -> None:
        client.step = self.ledger.step([client.record])
        client.step.__enter__()

    def end_step(self, client: Client) -> None:
        assert client.step is not None
        step, client.step = client.step, None
        step.__exit__(None, None, None)
        if client in self.leaving:
            self.leaving.remove(client)
            self.naive.release(client.request)
        self.wait_queue.pump()
        self.check()

    def release(self, client: Client, reason: str) -> None:
        done = client.state is RequestState.RUNNING and client.record.has_committed and reason == "closed_early"
        self.seen[f"left {client.state.name}"] += 1
        self.ledger.release(client.record, reason)
        self.clients.remove(client)
        if done:
            self.naive.store(client.request, client.request.published)
        if client.waiting is not None:
            self.wait_queue.leave(client.waiting)
        if client.step is None:
            self.naive.release(client.request)
        else:
            self.leaving.append(client)
        self._conclude()
        self.wait_queue.pump()
        self.check()

    def _conclude(self) -> None:
        for client in sorted(self.clients, key=lambda client: client.record.ticket):
            if client.request.load_stop:
                self.naive.conclude(client.request)

    # -- comparing ------------------------------------------------------------------------------------------------

    def _same_match(self, client: Client) -> None:
        match, request = client.record.match, client.request
        mine = (request.device_hit * self.unit, (request.hit - request.device_hit) * self.unit)
        assert (match.num_device_tokens, match.num_host_tokens) == mine, client.record
        self.seen["device hits"] += match.num_device_tokens > 0
        self.seen["host hits"] += match.num_host_tokens > 0

    def check(self) -> None:
        """Every block in one hand, and as many of them free, cached, in flight and private as in the model."""
        self.ledger.check_integrity()
        for blocks, tier in zip(self.ledger.cache.tiers, self.naive.tiers, strict=True):
            found = (blocks.pool.num_free, blocks.num_cached)
            assert found == (tier.free, len(tier.lru) * self.width), f"{blocks}: {tier.free} {tier.lru}"
        unsettled = self.ledger.jobs.unsettled
        before, self.jobs = self.jobs, dict(zip(unsettled, self.naive.jobs, strict=True))
        assert all(before.get(job_id, job) is job for job_id, job in self.jobs.items()), "other jobs"
        for job_id, job in self.jobs.items():
            assert (unsettled[job_id].start, unsettled[job_id].stop) == (job.start, len(job.keys)), unsettled[job_id]
        for client in self.clients:
            self._same_state(client)

    def _same_state(self, client: Client) -> None:
        record, request = client.record, client.request
        if client.waiter is not None and client.waiting is not None:
            over = "granted" if client.waiter.granted is not None else "failed" if client.waiter.error else "waiting"
            assert over == client.waiting.state, client.waiter
        assert (record.state is RequestState.LOADING) == bool(request.load_stop), record
        if record.state is not RequestState.LOADING:  # what is adopted is entered when the load is over
            assert record.published == request.published, record
        assert len(record.private_blocks()) + _granted(client) == request.private, record


def _granted(client: Client) -> int:
    return len(client.waiter.granted or ()) if client.waiter is not None else 0


def _count_calls(cache: PrefixCache, seen: Counter[str]) -> None:
    """Count splits, merges and evictions, which nobody sees from outside, where methods can be replaced."""
    if is_compiled:
        return
    split, join, take = cache.split, cache._join, cache.take

    def counting_split(*args: Any) -> Any:
        seen["splits"] += 1
        return split(*args)

    def counting_join(heads: Any, tail: Any) -> None:
        seen["merges"] += len(heads)
        join(heads, tail)

    def counting_take(tier: Any, num_blocks: int) -> Any:
        before = cache.tiers[tier].num_evicted
        taken = take(tier, num_blocks)
        seen[f"evicted {tier.name}"] += cache.tiers[tier].num_evicted - before
        return taken

    cache.split, cache._join, cache.take = counting_split, counting_join, counting_take  # type: ignore[method-assign]
