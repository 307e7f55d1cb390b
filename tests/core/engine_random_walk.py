"""A random walk over every call of `HostCache`, made by an engine that owns its device blocks.

The engine has a pool, reference counts and a prefix cache of its own, and may take back the blocks of a request at any
time. Each block of both memories holds a tag that names the tokens whose KV it holds. Copies move tags, and a forward
that reads a wrong tag writes wrong tags. After every call, the invariants of the ledger must hold. Unless a failed
forward still has to be invalidated, every cached host block must also hold the KV of exactly its tokens.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any, ClassVar, TypeAlias

from random_walk import UNIT, groups_of

from aoffload import HostCache, KVCacheGroup, OffloadConfig, OutOfBlocks, RequestState, SelectiveStore, Tier
from aoffload._common.prefix import TOKEN_BYTES
from aoffload.ledger import Completion, Direction, LedgerRequest, Outcome, Prefix, Root, TransferPlan

__all__ = ["EngineWalk", "walks"]

Tag: TypeAlias = tuple[int, tuple[int, ...]] | str
WRONG, TORN = "wrong", "torn"
S = RequestState
ROOT = Root("walk")


class Pool:
    """The engine's blocks: referenced by its requests, held by jobs of the ledger, and cached under their tags."""

    def __init__(self, num_blocks: int) -> None:
        self.free = list(range(1, num_blocks))
        self.references: Counter[int] = Counter()
        self.held: Counter[int] = Counter()
        self.cached: dict[Tag, int] = {}
        self.tags: dict[int, Tag] = {}
        """Of the blocks that are cached."""

    def hold(self, block_ids: Any) -> None:
        assert 0 not in block_ids
        for block_id in block_ids:
            if block_id in self.free:
                assert block_id in self.tags, "held, and nobody knows what is in it"
                self.free.remove(block_id)
        self.held.update(block_ids)

    def give(self, block_ids: Any) -> None:
        for block_id in block_ids:
            self.held[block_id] -= 1
            assert self.held[block_id] >= 0, "given, and not held"
            self._put_back(block_id)

    def take(self, num_blocks: int) -> list[int] | None:
        """Off the front; what was cached there is not any more."""
        if num_blocks > len(self.free):
            return None
        taken, self.free = self.free[:num_blocks], self.free[num_blocks:]
        for block_id in taken:
            self.forget(block_id)
            self.references[block_id] += 1
        return taken

    def share(self, block_id: int) -> None:
        if block_id in self.free:
            self.free.remove(block_id)
        self.references[block_id] += 1

    def leave(self, block_id: int) -> None:
        self.references[block_id] -= 1
        self._put_back(block_id)

    def cache(self, block_id: int, tag: Tag) -> None:
        if tag not in self.cached and block_id not in self.tags:
            self.cached[tag], self.tags[block_id] = block_id, tag

    def forget(self, block_id: int) -> None:
        if (tag := self.tags.pop(block_id, None)) is not None:
            del self.cached[tag]

    def _put_back(self, block_id: int) -> None:
        if not self.references[block_id] and not self.held[block_id]:
            self.free.append(block_id)


class Client:
    """One request as the engine knows it."""

    def __init__(self, tokens: list[int], num_prompt: int) -> None:
        self.tokens = tokens
        """All that it will ever be; the prompt, and what it samples."""
        self.num_prompt = num_prompt
        self.record: LedgerRequest
        self.hits: list[list[int]] = []
        """Blocks of the engine's own cache, group by group, with null blocks before the window."""
        self.tables: list[list[int]] = []
        self.num_offered = 0
        self.failed_from: int | None = None
        """A forward failed there, and nobody has said so yet."""


class EngineWalk:
    OPERATIONS: ClassVar = {
        "admit": 4, "ask": 2, "load": 4, "compute": 8, "leave": 1.5, "transfer": 7, "prove_late": 1, "fail": 0.4,
        "reset": 0.1, "wait": 0.5, "pin": 0.3, "unpin": 0.3, "evict": 1,
    }  # fmt: skip

    def __init__(self, seed: int, *, with_windows: bool = False) -> None:
        self.random = rng = random.Random(f"engine {seed}")
        if with_windows:
            groups = groups_of(rng)
        elif rng.random() < 0.3:
            groups = [KVCacheGroup("a", block_size=UNIT // 2), KVCacheGroup("b", block_size=UNIT)]
        else:
            groups = [KVCacheGroup("full", block_size=UNIT)]
        self.groups = groups
        width = sum(UNIT // group.block_size for group in groups)
        num_device, self.num_host = rng.randint(8, 60) * width + 1, rng.choice([0, rng.randint(1, 60), 80]) * width
        self.pool = Pool(num_device)
        self.now = 0.0
        config = OffloadConfig(
            groups=groups, num_host_blocks=self.num_host, max_job_bytes=rng.choice([1, 2, 3, 1000]) * width,
            max_bytes_in_flight=rng.choice([4 * width, 20 * width, 1000 * width]), pending_timeout_s=3.0,
            store_policy=rng.choice(["eager", "eager", "eager", SelectiveStore(2, 2000)]),
        )  # fmt: skip
        self.clients: list[Client] = []
        if rng.random() < 0.5:
            self.pool.find = self.find  # type: ignore[attr-defined]
        self.ledger = HostCache(config, num_device, engine_blocks=self.pool, clock=lambda: self.now)
        self.memory: dict[Tier, dict[int, Tag]] = {Tier.DEVICE: {}, Tier.HOST: {}}
        self.stems = [[rng.randrange(3) for _ in range(48)] for _ in range(3)]
        self.lengths = [rng.randint(6, 40) for _ in range(2)] if with_windows else []
        self.most_clients = rng.choice([2, 4, 8])
        self.plans: dict[int, TransferPlan] = {}
        self.lost: dict[int, TransferPlan] = {}
        self.rotten: set[int] = set()
        self.pins: list[Any] = []
        self.woken: set[str] = set()
        self.counts: Counter[str] = Counter()

    # -- the walk -------------------------------------------------------------------------------------------------

    def run(self, num_calls: int) -> Counter[str]:
        for _ in range(num_calls):
            (self.last,) = self.random.choices(list(self.OPERATIONS), list(self.OPERATIONS.values()))
            getattr(self, self.last)()
            self.check()
        self.finish()
        return self.counts

    def finish(self) -> None:
        """Everybody leaves and every copy ends: the engine has all its blocks, and nothing is pinned."""
        for client in tuple(self.clients):
            if client.failed_from is not None:
                self.take_back(client)
        for client in tuple(self.clients):
            self.end(client)
        self.ledger.pins.drop()
        while self.plans:
            self.transfer()
        for job_id in tuple(self.lost):
            self.ledger.settle(Completion(job_id, Outcome.FAILED))
        self.check()
        host = self.ledger.statistics().host
        assert host.num_free + host.num_cached == host.num_blocks
        assert not +self.pool.held and not +self.pool.references
        assert sorted(set(self.pool.free)) == sorted(self.pool.free)

    # -- calls ----------------------------------------------------------------------------------------------------

    def admit(self) -> None:
        if len(self.clients) >= self.most_clients:
            return
        stem = self.random.choice(self.stems)
        length = self.random.choice(self.lengths) if self.lengths else self.random.randint(2, 44)
        cut = self.random.choice([length, length, self.random.randint(0, length)])
        tokens = [*stem[:cut], *(self.random.randrange(3) for _ in range(length - cut))]
        client = Client(tokens + [self.random.randrange(3) for _ in range(12)], length)
        num_hit = self.hit_in_the_engine(client)
        client.record = self.ledger.admit(
            Prefix.of(ROOT, tokens), num_device_tokens=num_hit, wake=lambda: self.woken.add(client.record.request_id),
            store=self.random.choices(["all", "prompt", "none"], [8, 1, 1])[0],
        )  # fmt: skip
        self.clients.append(client)
        self.counts["engine hit"] += num_hit > 0
        self.counts[client.record.match.answer.value] += 1

    def ask(self) -> None:
        """The engine tries again to schedule a request that has no blocks yet."""
        client = self.one_of(S.MATCHED, S.PINNED)
        if client is None:
            return
        self.free(client)
        num_hit = self.hit_in_the_engine(client)
        name = client.record.request_id
        before = client.record.match
        match = self.ledger.match_again(client.record, num_device_tokens=num_hit, wake=lambda: self.woken.add(name))
        self.counts["pending ended"] += before.is_pending and not match.is_pending
        self.woken.discard(name)

    def load(self) -> None:
        """Scheduled: blocks for the prompt, and what the host has is loaded."""
        client = self.one_of(S.PINNED)
        if client is None:
            return
        request, tables = client.record, []
        stop = request.match.num_tokens
        most = self.random.choice([None, None, None, self.random.randint(0, 40)])
        for group, hits in zip(self.groups, client.hits, strict=True):
            wanted = -(-client.num_prompt // group.block_size)
            # What lies before the window at the end of the hit may stay null, by whole units.
            first = group.attention.required_blocks(stop, group.block_size).start
            first = first * group.block_size // UNIT * UNIT // group.block_size
            nulls = max(0, min(first, wanted) - len(hits)) if most is None else 0
            fresh = self.pool.take(wanted - len(hits) - nulls)
            if fresh is None:
                for table in tables:
                    for block_id in filter(None, table):
                        self.pool.leave(block_id)
                for hits_ in client.hits[len(tables) :]:
                    for block_id in filter(None, hits_):
                        self.pool.leave(block_id)
                client.hits = [[] for _ in self.groups]
                self.end(client)
                return
            tables.append([*hits, *[0] * nulls, *fresh])
        client.tables, client.hits = tables, []
        self.add(self.ledger.plan_load(request, most, into=tables))
        self.counts["loading"] += request.state is S.LOADING

    def compute(self) -> None:
        """A forward over some tokens more, and its offer."""
        client = self.one_of(S.RUNNING)
        if client is None or client.failed_from is not None:
            return
        if not self.compute_to(client, is_failing=False):
            self.end(client)
            return
        self.offer(client)

    def leave(self) -> None:
        """Done, preempted or aborted: at any time, also in the middle of a copy."""
        if self.clients:
            client = self.random.choice(self.clients)
            if client.failed_from is None:
                self.counts["left while loading"] += client.record.state is S.LOADING
                self.end(client)

    def transfer(self) -> None:
        if not self.plans:
            return
        plan = self.plans.pop(self.random.choice(list(self.plans)))
        if self.random.random() < 0.05:
            self.ledger.discard(plan.job_id)
            return
        if not self.ledger.launch(plan.job_id):
            self.counts["not wanted"] += 1
            return
        is_load = plan.direction is Direction.LOAD
        rotten = [at for at, block_id in enumerate(plan.source_ids) if is_load and block_id in self.rotten]
        outcomes = [Outcome.LANDED, Outcome.FAILED, Outcome.UNPROVEN]
        (outcome,) = self.random.choices(outcomes, [80, 10, 4])
        if rotten:
            outcome = Outcome.CORRUPT
        count = len(plan.source_ids)
        whole = count if outcome is Outcome.LANDED else rotten[0] if rotten else self.random.randrange(count)
        for at, (source_id, block_id) in enumerate(zip(plan.source_ids, plan.destination_ids, strict=True)):
            tag = self.memory[plan.source].get(source_id, TORN) if at < whole else TORN
            self.memory[plan.destination][block_id] = tag
            if not is_load:
                self.rotten.discard(block_id)
                if self.random.random() < 0.01:
                    self.rotten.add(block_id)
        if outcome is Outcome.UNPROVEN:
            self.lost[plan.job_id] = plan
        done = Completion(plan.job_id, outcome, whole if outcome is not Outcome.UNPROVEN else 0, tuple(rotten))
        self.ledger.settle(done)
        self.counts[f"{plan.direction.value} {outcome.value}"] += 1
        if is_load and outcome is Outcome.UNPROVEN:
            # Its engine would compute into blocks that the copy may still write to.
            name = self.ledger.jobs.quarantined[plan.job_id].request_id
            for client in [client for client in self.clients if client.record.request_id == name]:
                self.end(client, "load unproven")

    def prove_late(self) -> None:
        if self.lost:
            job_id = self.random.choice(list(self.lost))
            del self.lost[job_id]
            self.ledger.settle(Completion(job_id, Outcome.FAILED))
            self.counts["proven late"] += 1

    def fail(self) -> None:
        """A forward fails, and that is found out after its offer; others may have read it by then."""
        failed = [client for client in self.clients if client.failed_from is not None]
        if failed:
            self.take_back(failed[0])
            return
        client = self.one_of(S.RUNNING)
        if client is None:
            return
        before = client.record.num_computed_tokens
        if before + 1 >= len(client.tokens) or not self.compute_to(client, is_failing=True):
            return
        client.failed_from = before
        self.offer(client)
        self.counts["failed"] += 1

    def take_back(self, client: Client) -> None:
        assert client.failed_from is not None
        start, client.failed_from = client.failed_from, None
        client.num_offered = start
        for group, table in zip(self.groups, client.tables, strict=True):
            for block_id in table[start // group.block_size :]:
                self.pool.forget(block_id)
        affected = self.ledger.invalidate(client.record, start)
        self.counts["told"] += len(affected)
        for other in [one for one in self.clients if one.record in affected]:
            for table in other.tables:
                for block_id in table:
                    if self.memory[Tier.DEVICE].get(block_id) in (WRONG, TORN):
                        self.pool.forget(block_id)
            if other.record.state is S.RUNNING and other.num_offered:
                self.counts["told too late"] += 1
                before = len(self.ledger.jobs.unsettled)
                self.offer(other, is_last=True)
                assert len(self.ledger.jobs.unsettled) == before, "stored on what it has read"
            self.end(other, "read what was wrong")
        for block_id in [one for one in self.pool.tags if self.memory[Tier.DEVICE][one] != self.pool.tags[one]]:
            self.pool.forget(block_id)
        needed = [group.attention.required_blocks(start, group.block_size) for group in self.groups]
        if not all(table[at] for table, units in zip(client.tables, needed, strict=True) for at in units):
            self.end(client, "would have to go back behind its window")
            return
        client.tokens[client.num_prompt :] = [
            *client.tokens[client.num_prompt : start + 1], *(self.random.randrange(3) for _ in range(12))
        ]  # fmt: skip

    def reset(self) -> None:
        if not any(client.failed_from is not None for client in self.clients):
            self.ledger.reset(self.random.choice([None, Tier.HOST]))
            self.counts["reset"] += 1

    def wait(self) -> None:
        self.now += 1.0

    def evict(self) -> None:
        """The engine's own cache forgets what nobody uses."""
        for block_id in [one for one in self.pool.tags if one in self.pool.free]:
            if self.random.random() < 0.7:
                self.pool.forget(block_id)

    def pin(self) -> None:
        if len(self.pins) < 2:
            with suppress(OutOfBlocks):
                self.pins.append(self.ledger.pins.hold(Prefix.of(ROOT, self.random.choice(self.stems)[:30])))

    def unpin(self) -> None:
        if self.pins:
            pin = self.pins.pop()
            if pin.state.name == "HELD":
                self.ledger.pins.release(pin)

    # -- what they are made of ------------------------------------------------------------------------------------

    def one_of(self, *states: RequestState) -> Client | None:
        found = [client for client in self.clients if client.record.state in states]
        return self.random.choice(found) if found else None

    def add(self, plans: Sequence[TransferPlan]) -> None:
        for plan in plans:
            assert plan.num_blocks == len(set(plan.source_ids)) == len(set(plan.destination_ids))
            self.plans[plan.job_id] = plan

    def tag(self, tokens: Sequence[int], group: int, index: int) -> Tag:
        return group, tuple(tokens[: (index + 1) * self.groups[group].block_size])

    def hit_in_the_engine(self, client: Client) -> int:
        """The longest hit, in units, for which every group has what it needs in the engine's own cache; referenced."""
        for stop in range((client.num_prompt - 1) // UNIT * UNIT, -1, -UNIT):
            hits = [list(self.blocks_at(client, number, stop)) for number in range(len(self.groups))]
            if all(None not in blocks for blocks in hits):
                client.hits = [[block_id or 0 for block_id in blocks] for blocks in hits]
                for blocks in client.hits:
                    for block_id in filter(None, blocks):
                        self.pool.share(block_id)
                return stop
        raise AssertionError("nothing is always there")

    def blocks_at(self, client: Client, number: int, stop: int) -> Iterator[int | None]:
        group = self.groups[number]
        needed = group.attention.required_blocks(stop, group.block_size)
        for index in range(stop // group.block_size):
            yield self.pool.cached.get(self.tag(client.tokens, number, index)) if index in needed else 0

    def find(self, request_id: str, group: int, start: int, stop: int) -> list[int]:
        """What the engine's own cache has of blocks that a table names no more."""
        client = next(client for client in self.clients if client.record.request_id == request_id)
        found = [self.pool.cached.get(self.tag(client.tokens, group, at), 0) for at in range(start, stop)]
        self.counts["found"] += len(list(filter(None, found)))
        return found

    def free(self, client: Client) -> None:
        for tables in (client.hits, client.tables):
            for block_id in [block_id for table in tables for block_id in table if block_id]:
                self.pool.leave(block_id)
            tables.clear()

    def end(self, client: Client, reason: str = "closed_early") -> None:
        if client.record.state is S.RUNNING and reason == "closed_early" and client.num_offered:
            self.offer(client, is_last=True)
        self.clients.remove(client)
        self.free(client)  # the engine reuses them at once, but for those that are held
        assert self.ledger.release(client.record, reason) == ()

    def reads_right(self, client: Client) -> bool:
        stop = client.record.num_computed_tokens
        for number, (group, table) in enumerate(zip(self.groups, client.tables, strict=True)):
            for index in group.attention.required_blocks(stop, group.block_size):
                if self.memory[Tier.DEVICE].get(table[index], TORN) != self.tag(client.tokens, number, index):
                    return False
        return True

    def compute_to(self, client: Client, *, is_failing: bool) -> bool:
        """Let a forward go on by some tokens; whether there was room for it."""
        request = client.record
        before = request.num_computed_tokens
        stop = min(before + self.random.randint(1, 14), len(client.tokens) - 1)
        if stop <= before:
            return False
        if not client.num_offered:
            self.drop_what_was_not_brought(client)
        for group, table in zip(self.groups, client.tables, strict=True):
            missing = -(-stop // group.block_size) - len(table)
            # A load that fell short may have left null blocks where it is computed now.
            holes = [at for at in range(before // group.block_size, len(table)) if not table[at]]
            fresh = self.pool.take(max(0, missing) + len(holes))
            if fresh is None:
                return False
            for at in holes:
                table[at] = fresh.pop()
            table += fresh
        is_wrong = is_failing or not self.reads_right(client)
        if is_wrong and not is_failing:
            assert self.is_excused(client), "reads what is not its own"
        for number, (group, table) in enumerate(zip(self.groups, client.tables, strict=True)):
            for index in range(before // group.block_size, stop // group.block_size):
                tag = self.tag(client.tokens, number, index)
                self.pool.forget(table[index])
                self.memory[Tier.DEVICE][table[index]] = WRONG if is_wrong else tag
                self.pool.cache(table[index], tag)
        self.counts["computed"] += 1
        client.num_offered = stop
        return True

    def drop_what_was_not_brought(self, client: Client) -> None:
        """Before the window at the end of the hit nothing was loaded: what stands in the table there is nobody's KV."""
        ready = client.record.num_computed_tokens
        for group, table in zip(self.groups, client.tables, strict=True):
            first = group.attention.required_blocks(ready, group.block_size).start
            for index in range(client.record.engine_tokens // group.block_size, first):
                if table[index]:
                    self.pool.leave(table[index])
                    table[index] = 0

    def is_excused(self, client: Client) -> bool:
        """Whether somebody has failed whose tokens it shares, and nobody has said so yet."""
        return any(other.failed_from is not None for other in self.clients)

    def offer(self, client: Client, *, is_last: bool = False) -> None:
        request, stop = client.record, client.num_offered
        for group, table in zip(self.groups, client.tables, strict=True):
            for index in range(group.attention.required_blocks(stop, group.block_size).start):
                if index < len(table) and table[index] and self.random.random() < 0.5:
                    self.pool.leave(table[index])
                    table[index] = 0  # it has left the window
        new = client.tokens[request.sequence.num_tokens : stop + 1]
        before = len(self.ledger.jobs.unsettled)
        self.add(self.ledger.offer(request, stop, client.tables, new, is_last=is_last))
        self.counts["stored"] += len(self.ledger.jobs.unsettled) - before

    # -- laws -----------------------------------------------------------------------------------------------------

    def check(self) -> None:
        self.ledger.check_integrity()
        touched: Counter[int] = Counter()
        jobs = self.ledger.jobs
        for job in jobs.unsettled.values():
            is_store = job.plan.direction is Direction.STORE
            touched.update(job.plan.source_ids if is_store else job.plan.destination_ids)
        for job in jobs.quarantined.values():
            if job.plan.direction is Direction.LOAD:
                touched.update(job.plan.destination_ids)
        assert touched == +self.pool.held, "held is what jobs touch"
        if not any(client.failed_from is not None for client in self.clients):
            self.check_host()

    def check_host(self) -> None:
        """What the host could hand out is the KV of exactly its tokens."""
        layout = self.ledger.layout
        for run in self.ledger.cache.index.runs.values():
            data = b"".join(one.tokens for one in run.whole_path())
            tokens = list(memoryview(data[: run.stop * UNIT * TOKEN_BYTES]).cast("i"))
            for part in run.parts:
                if part.tier is not Tier.HOST or not part.blocks:
                    continue
                component = part.component
                for unit in range(part.first, part.stop):
                    ids = list(part.ids(unit, unit + 1))
                    right = [
                        self.tag(tokens, group, index)
                        for group, positions in layout.positions(component, unit, unit + 1)
                        for index in positions
                    ]
                    assert [self.memory[Tier.HOST].get(block_id) for block_id in ids] == right, "wrong bytes published"


def walks(num_walks: int, num_calls: int, **options: Any) -> Counter[str]:
    counts: Counter[str] = Counter()
    for seed in range(num_walks):
        counts.update(EngineWalk(seed, **options).run(num_calls))
    return counts
