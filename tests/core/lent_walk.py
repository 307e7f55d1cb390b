"""The random walk with blocks that are the engine's own: it lends them, caches prefixes in them, wants them back."""

from __future__ import annotations

from collections import Counter
from typing import Any, ClassVar

import attrs
from walk import UNIT, Client, S, Walk

from aoffload import Direction, LazyStore, Ledger, LentBlocks, OffloadConfig, OutOfBlocks, Tier


class LentWalk(Walk):
    """`device[i]` holds what the engine's block `i` holds; it hands a free block out again, content and all gone, in
    whatever order, and copies may only touch what is lent."""

    OPERATIONS: ClassVar = {**Walk.OPERATIONS, "fork": 1.5}

    RESETS: ClassVar = [None, None, Tier.HOST]
    OUTCOMES: ClassVar = {Direction.LOAD: [6, 2, 2, 2], Direction.STORE: [90, 5, 0, 1]}

    def make_ledger(self, config: OffloadConfig) -> Ledger:
        self.free = set(range(1, len(self.device)))
        self.keeps = self.random.choice([0.1, 0.5, 0.9])
        self.cached: dict[object, int] = {}
        """The engine's prefix cache: the block of each tag, lent or free."""
        if isinstance(config.store_policy, LazyStore):  # what is lent is gone before it is about to be evicted
            config = attrs.evolve(config, store_policy="eager")
        return Ledger(config, len(self.device), device_pool=LentBlocks(self.given))

    def given(self, block_ids: list[int]) -> None:
        assert block_ids and self.free.isdisjoint(block_ids) and len(set(block_ids)) == len(block_ids)
        assert 0 not in block_ids
        self.free.update(block_ids)
        self.counts["given back"] += len(block_ids)

    def check(self) -> None:
        super().check()
        found, lost = self.ledger.statistics().device, sum(len(p.destination_ids) for p in self.lost_loads())
        assert found.num_blocks == len(self.device) - 1 - len(self.free), "what is lent is not free, and the reverse"
        assert (found.num_free, found.num_cached, found.num_quarantined) == (0, 0, lost), found
        for client in self.clients:
            held = {block_id for table in self.ledger.block_ids(client.holding) for block_id in table}
            assert self.free.isdisjoint(held), "a table names what was given back"

    def lost_loads(self) -> list[Any]:
        return [plan for plan in self.lost.values() if plan.direction is Direction.LOAD]

    def finish(self) -> None:
        super().finish()
        while self.lost:
            self.prove_late()
        assert self.free == set(range(1, len(self.device))), "everything is the engine's again"

    # -- the engine's own cache -----------------------------------------------------------------------------------

    def take_free(self, number: int) -> list[int]:
        ids = self.random.sample(sorted(self.free), number)
        self.free.difference_update(ids)
        for block_id in ids:
            self.device[block_id] = "used again"
        self.cached = {tag: block_id for tag, block_id in self.cached.items() if block_id not in ids}
        return ids

    def cached_ids(self, client: Client, num_tokens: int) -> list[list[int]] | None:
        """For each group the blocks that computing at `num_tokens` reads, null before; None if one is missing."""
        layout, found = self.ledger.layout, list[list[int]]()
        for group, (band, _) in enumerate(layout.places):
            size, start = self.groups[group].block_size, layout.bands[band].first_needed(num_tokens) * UNIT
            tags = [self.tag(client, group, at) for at in range(num_tokens // size)]
            own = [0 if at < start // size else self.cached.get(tag, -1) for at, tag in enumerate(tags)]
            if -1 in own:
                return None
            found.append(own)
        return found

    def engine_hit(self, tokens: list[int], root: int) -> dict[str, int]:
        client = Client(None, tokens, root)
        whole = range((len(tokens) - 1) // UNIT * UNIT, 0, -UNIT)
        hits = [at for at in whole if self.cached_ids(client, at) is not None]
        hit = self.random.choice([0, *hits[:1] * 3, *hits]) if self.random.random() < self.keeps else 0
        self.counts["engine hit"] += hit > 0
        return {"num_device_tokens": hit + (self.random.randrange(UNIT) if hit + UNIT < len(tokens) else 0)}

    def lend(self, client: Client) -> None:
        """The engine's hit, if it is still there, and free blocks behind it."""
        holding, told = client.holding, client.holding.lent_stop * UNIT
        hit = told
        while hit and self.cached_ids(client, hit) is None:
            hit -= UNIT
        ids = (self.cached_ids(client, hit) if hit else None) or [[] for _ in self.groups]
        num_tokens = max(1, len(client.tokens) + self.random.choice([0, 0, 0, 5, -3]))
        num_units = max(-(-num_tokens // UNIT), hit // UNIT)
        revived = {block_id for own in ids for block_id in own} - {0}
        if len(self.free - revived) < (num_units - hit // UNIT) * self.width:
            self.counts["engine is out of blocks"] += 1
            return
        self.free -= revived
        fresh = self.take_free((num_units - hit // UNIT) * self.width)
        skipped = self.skipped(holding, hit)
        for group, own in enumerate(ids):
            per_unit = UNIT // self.groups[group].block_size
            for at in range(hit // UNIT * per_unit, num_units * per_unit):
                block_id = fresh.pop()
                if at // per_unit < skipped[group]:
                    self.free.add(block_id)
                    block_id = 0
                own.append(block_id)
        self.counts["lent to two"] += any(self.pool.find(block_id) for block_id in revived)
        self.counts["skipped"] += any(skipped)
        self.counts["lent again"] += holding.lacks_blocks
        self.ledger.lend(holding, ids, num_tokens, num_device_tokens=hit if hit != told else None)

    def skipped(self, holding: Any, hit: int) -> list[int]:
        """For each group the unit up to which it needs no blocks if the host hit is loaded; now and then."""
        if hit != holding.lent_stop * UNIT or holding.lacks_blocks or self.random.random() < 0.5:
            return [0 for _ in self.groups]
        layout = self.ledger.layout
        return [layout.bands[band].first_needed(holding.hit_stop * UNIT) for band, _ in layout.places]

    @property
    def pool(self) -> LentBlocks:
        pool = self.ledger.cache.tiers[0].pool
        assert isinstance(pool, LentBlocks)
        return pool

    # -- what the ledger did by itself with a pool of its own -----------------------------------------------------

    def allocate(self, client: Client | None = None) -> None:
        client = client or self.pick(S.PINNED)
        if client is not None:
            self.lend(client)

    def load(self, client: Client | None = None) -> None:
        client = client or self.pick(S.ALLOCATED, S.LOADING)
        if client is None:
            return
        if client.holding.lacks_blocks:
            self.lend(client)
            if client.holding.lacks_blocks:
                return
        super().load(client)

    def compute(self, client: Client | None = None) -> None:
        client = client or self.pick(S.RUNNING, S.ALLOCATED)
        if client is None:
            return
        super().compute(client)
        for group, table in enumerate(self.ledger.block_ids(client.holding)):
            for at in range(client.holding.num_computed_tokens // self.groups[group].block_size):
                if at < len(table) and table[at] and self.random.random() < 0.8:
                    self.cached.setdefault(self.tag(client, group, at), table[at])

    def extend(self) -> None:
        client = self.pick(S.RUNNING)
        if client is None or len(self.free) < self.width:
            return
        ids = [self.take_free(UNIT // group.block_size) for group in self.groups]
        self.ledger.lend_more(client.holding, ids, client.holding.num_units * UNIT + self.random.randint(1, UNIT))

    def fork_of(self, client: Client, num_tokens: int) -> Any:
        holding = client.holding
        shared = self.ledger.num_shared_tokens(holding) // UNIT
        num_units = -(-max(num_tokens, len(client.tokens)) // UNIT)
        if len(self.free) < (num_units - shared) * self.width:
            raise OutOfBlocks((num_units - shared) * self.width, len(self.free), retryable=True)
        ids: list[list[int]] = []
        for group, (band, _) in zip(self.groups, self.ledger.layout.places, strict=True):
            per_unit, start = UNIT // group.block_size, holding.tables[band].start
            null = [0] * (max(0, min(start, num_units) - shared) * per_unit)
            ids.append(null + self.take_free((num_units - shared) * per_unit - len(null)))
        return self.ledger.fork(holding, num_tokens=num_tokens, block_ids=ids)

    def invalidate(self) -> None:
        super().invalidate()
        self.cached = {tag: at for tag, at in self.cached.items() if self.device[at] == tag}

    def copy(self, plan: Any) -> Any:
        of_device = plan.destination_ids if plan.direction is Direction.LOAD else plan.source_ids
        assert self.free.isdisjoint(of_device), "a copy touches what is the engine's"
        return super().copy(plan)

    def prove_late(self) -> None:
        for plan in self.lost_loads():
            assert self.free.isdisjoint(plan.destination_ids), "a copy may still write to what is the engine's"
        super().prove_late()


def walks(num_walks: int, num_calls: int, *, with_windows: bool) -> Counter[str]:
    seen: Counter[str] = Counter()
    for seed in range(num_walks):
        try:
            seen += LentWalk(seed, with_windows=with_windows).run(num_calls)
        except BaseException as error:
            error.add_note(f"LentWalk({seed}, with_windows={with_windows})")
            raise
    return seen
