"""A step-based scheduler with its own block pool and prefix cache. A `HostCache` manages only host memory.

The engine ref-counts its blocks, computes long prompts in chunks and several requests in one forward, drafts tokens,
preempts, and forks. It reuses a block only if no request and no copy holds it. Copies may fail, bring corrupt bytes, or
hang. The engine computes the tokens that are not loaded. A request that cannot fit ends with `OutOfBlocks`. The "model"
reads the KV of every token that attention reads, so one wrong byte changes the output.

Prints:
    16 outputs like those of a run without blocks: True
    75 steps, 15 preempted, 4 forked, 28 matches PENDING
    35 of 328 drafts accepted, 188 tokens hit in the engine's own blocks
    324 tokens hit in host memory: 132 blocks stored, 119 loaded
    free at the end: 35 of 35 blocks, 0 held by copies
"""

from collections import Counter
from collections.abc import Iterable

import numpy as np

from aoffload import HostCache, KVCacheGroup, OffloadConfig, OutOfBlocks, RequestState, SlidingWindow, Tier
from aoffload.ledger import Completion, Outcome, Prefix, Root, TransferPlan

BLOCK, CHUNK, NUM_DRAFTS, VOCABULARY, WINDOW = 4, 12, 2, 5, 9
PATIENCE = 8  # steps that a copy may take
GROUPS = [KVCacheGroup("full", block_size=BLOCK), KVCacheGroup("window", SlidingWindow(WINDOW), BLOCK)]


def seen(group: int, position: int) -> int:
    return max(0, position - WINDOW + 1) if group else 0  # the first position that attention reads


def kv_of(token: int, position: int, before: np.ndarray) -> int:
    return (token * 7919 + position * 31 + int(before.sum()) * 17 + 1) % 1_000_003


def plain_run(tokens: list[int], num_tokens: int, taste: int) -> list[int]:
    """The output of a run without blocks, caches and copies."""
    tokens, kv = list(tokens), np.zeros((len(GROUPS), num_tokens), np.int64)
    for at in range(num_tokens - 1):
        for group in range(len(GROUPS)):
            kv[group, at] = kv_of(tokens[at], at, kv[group, seen(group, at) : at])
        if at + 1 == len(tokens):
            tokens.append((int(kv[:, at].sum()) // 7 + taste) % VOCABULARY)
    return tokens


class Pool:
    """The engine's blocks, ref-counted. Free blocks keep their content, and hit, until they are reused."""

    def __init__(self, num_rows: int) -> None:
        self.free, self.num_holders = dict.fromkeys(range(1, num_rows)), [0] * num_rows  # least recently freed first
        self.cached, self.keys = dict[tuple, int](), dict[int, tuple]()

    def hold(self, block_ids: Iterable[int]) -> None:
        for block_id in filter(None, block_ids):
            self.free.pop(block_id, None)
            self.num_holders[block_id] += 1

    def give(self, block_ids: Iterable[int]) -> None:
        for block_id in filter(None, block_ids):
            self.num_holders[block_id] -= 1
            if not self.num_holders[block_id]:
                self.free[block_id] = None

    def take(self, num_blocks: int) -> list[int]:
        block_ids = list(self.free)[:num_blocks]
        for block_id in block_ids:
            self.cached.pop(self.keys.pop(block_id, ()), None)
        self.hold(block_ids)
        return block_ids

    def cache(self, key: tuple, block_id: int) -> None:
        if block_id and key not in self.cached and block_id not in self.keys:
            self.cached[key], self.keys[block_id] = block_id, key

    def hit(self, tokens: list[int]) -> list[list[int]]:
        """The blocks of the longest hit, group by group. Null before the window."""
        for stop in range((len(tokens) - 1) // BLOCK, 0, -1):
            needed = [(g, range(seen(g, stop * BLOCK) // BLOCK, stop)) for g in range(len(GROUPS))]
            found = [[self.cached.get((g, *tokens[: (at + 1) * BLOCK])) for at in units] for g, units in needed]
            if all(map(all, found)):
                return [[0] * (stop - len(block_ids)) + block_ids for block_ids in found]
        return [[] for _ in GROUPS]


class Request:
    def __init__(self, name: str, tokens: list[int], num_tokens: int, taste: int = 0, fork_at: int = 0) -> None:
        self.name, self.tokens, self.num_tokens, self.taste, self.fork_at = name, tokens, num_tokens, taste, fork_at
        self.record, self.tables = None, list[list[int]]()  # one block table for each group, while it runs
        self.max_hit, self.error = None, None
        self.expected = lambda: plain_run(tokens, num_tokens, taste)


class Scheduler:
    def __init__(self, num_rows: int, num_host: int, **options) -> None:
        self.memory = {Tier.DEVICE: np.zeros((num_rows, BLOCK), np.int64), Tier.HOST: np.zeros((num_host, BLOCK), int)}
        self.pool, self.counts = Pool(num_rows), Counter[str]()
        config = OffloadConfig(groups=GROUPS, num_host_blocks=num_host, pending_timeout_s=PATIENCE, **options)
        self.ledger = HostCache(config, num_rows, engine_blocks=self.pool, clock=lambda: self.counts["steps"])
        self.requests, self.done = list[Request](), list[Request]()  # waiting and running, oldest first; finished
        self.launched: dict[int, tuple[TransferPlan, int]] = {}  # copies not proven over, with the step of their launch

    def step(self) -> None:
        self.end_copies()
        self.short = None  # the request that lacks blocks, and how many; while it does, no request is admitted
        batch = [request for request in tuple(self.requests) if self.is_scheduled(request)]
        if self.short and not self.is_copying and not any(request.tables for request in self.requests):
            request, num_missing = self.short  # no request holds any block: it can never fit
            request.error = OutOfBlocks(num_missing, len(self.pool.free), retryable=bool(self.launched))
            self.requests.remove(request)
            self.done.append(request)
        for request, result in [(request, self.forward(request)) for request in batch]:
            self.commit(request, *result)
        self.counts["steps"] += 1

    def launch(self, plans: tuple[TransferPlan, ...]) -> None:
        for plan in plans:
            if self.ledger.launch(plan.job_id):
                self.launched[plan.job_id] = plan, self.counts["steps"]

    def copy(self, plan: TransferPlan) -> Completion | None:
        """The result of a copy, or None while it is in progress. Here, every copy lands after one step."""
        self.memory[plan.destination][plan.destination_ids] = self.memory[plan.source][plan.source_ids]
        self.counts[plan.direction.value] += plan.num_blocks
        return Completion(plan.job_id, Outcome.LANDED, plan.num_blocks)

    def end_copies(self) -> None:
        """Settle copies that have ended. One that hangs is UNPROVEN: its destination is held until it ends."""
        for plan, began in tuple(self.launched.values()):
            completion = self.copy(plan)
            if completion is None and self.counts["steps"] - began == PATIENCE:
                completion = Completion(plan.job_id, Outcome.UNPROVEN)
            if completion is not None:
                self.ledger.settle(completion)
                if completion.outcome is not Outcome.UNPROVEN:
                    del self.launched[plan.job_id]
        self.is_copying = any(self.counts["steps"] - began < PATIENCE for _, began in self.launched.values())

    def admit(self, request: Request) -> bool:
        """Match, take blocks for the host hit, and load it, if there are enough for that and for the first chunk."""
        tables, prefix = self.pool.hit(request.tokens), Prefix.of(Root("toy"), request.tokens)
        own = {"num_device_tokens": len(tables[0]) * BLOCK}
        if request.record is None:
            request.record = self.ledger.admit(prefix, request_id=request.name, max_hit_tokens=request.max_hit, **own)
        match = self.ledger.match_again(request.record, **own)
        if match.is_pending:
            self.counts["pending"] += 1
            return False  # another request is loading the next block: ask again in the next step
        for group, table in enumerate(tables):
            self.pool.hold(table)
            table += [0] * (seen(group, match.num_tokens) // BLOCK - len(table))  # before the window
        request.tables, stop = tables, min(match.num_tokens + CHUNK, len(request.tokens))
        num_missing = sum(-(-stop // BLOCK) - len(table) for table in tables)
        if len(self.pool.free) < num_missing:
            self.short = request, num_missing
            self.leave(request, "no_room")
            return False
        for table in tables:
            table += self.pool.take(match.num_tokens // BLOCK - len(table))
        self.launch(self.ledger.plan_load(request.record, into=tables))
        self.counts.update(own=match.num_device_tokens, host=match.num_host_tokens)
        return True

    def is_scheduled(self, request: Request) -> bool:
        """Whether it computes in this step: its load has ended, and it has blocks, perhaps from younger requests."""
        is_admitted = bool(request.tables) or (not self.short and self.admit(request))
        if not is_admitted or request.record.state is not RequestState.RUNNING:
            return False
        num_computed = request.record.num_computed_tokens
        if num_computed < request.record.match.num_tokens:
            self.give(request, -(-num_computed // BLOCK))  # the load fell short: compute into other blocks
        wanted = min(num_computed + CHUNK, len(request.tokens) + NUM_DRAFTS)
        num_missing = sum(-(-wanted // BLOCK) - len(table) for table in request.tables)
        while len(self.pool.free) < num_missing:
            self.short = request, num_missing
            victim = next(other for other in reversed(self.requests) if other.tables)
            if victim is request and self.is_copying:
                return False  # wait for the blocks that copies hold
            self.leave(victim, "preempted")
            if victim is request:
                return False
        for table in request.tables:
            table += self.pool.take(-(-wanted // BLOCK) - len(table))
        return True

    def leave(self, request: Request, reason: str) -> None:
        """Give its blocks back at once. Those that a copy or another request holds are not free yet."""
        request.max_hit = request.record.retry_max_hit_tokens  # a copy that has failed is not repeated for ever
        self.ledger.release(request.record, reason)
        self.give(request, 0)
        request.record, request.tables = None, []
        self.counts[reason] += 1

    def give(self, request: Request, num_kept: int) -> None:
        for table in request.tables:
            self.pool.give(reversed(table[num_kept:]))  # evict a prefix from its end
            del table[num_kept:]

    def forward(self, request: Request) -> tuple[int, list[int]]:
        """Compute a chunk, or a token and its drafts. Returns the number of computed tokens and the sampled ones."""
        done, tokens = request.record.num_computed_tokens, request.tokens
        stop = min(done + CHUNK, len(tokens))
        drafts = [(tokens[-1] + at) % VOCABULARY for at in range(NUM_DRAFTS)] if done + CHUNK > len(tokens) + 1 else []
        guessed, sampled = tokens[:stop] + drafts, list[int]()
        for at in range(done, len(guessed)):
            kv = [self.attend(table, group, at, guessed[at]) for group, table in enumerate(request.tables)]
            known = tokens + sampled
            if len(tokens) <= at + 1 <= len(known) < request.num_tokens and guessed[: at + 1] == known[: at + 1]:
                sampled.append((sum(kv) // 7 + request.taste) % VOCABULARY)
        self.counts.update(drafts=len(drafts), accepted=max(0, len(sampled) - 1))
        return stop + max(0, len(sampled) - 1), sampled

    def attend(self, table: list[int], group: int, at: int, token: int) -> int:
        memory, first = self.memory[Tier.DEVICE], seen(group, at)
        before = memory[table[first // BLOCK : at // BLOCK + 1]].ravel()[first % BLOCK :][: at - first]
        memory[table[at // BLOCK], at % BLOCK] = kv = kv_of(token, at, before)
        return kv

    def commit(self, request: Request, num_computed: int, new_tokens: list[int]) -> None:
        """Offer computed blocks to the host, cache full blocks, and give back those that have left the window."""
        request.tokens = request.tokens + new_tokens
        is_last = len(request.tokens) == request.num_tokens
        self.launch(self.ledger.offer(request.record, num_computed, request.tables, new_tokens, is_last=is_last))
        for group, table in enumerate(request.tables):
            for at in range(num_computed // BLOCK):
                self.pool.cache((group, *request.tokens[: (at + 1) * BLOCK]), table[at])
            past = seen(group, num_computed) // BLOCK
            self.pool.give(table[:past])
            table[:past] = [0] * past
        if request.fork_at and len(request.tokens) >= request.fork_at:
            request.fork_at, self.counts["forked"] = 0, self.counts["forked"] + 1
            # The fork is a request of its own. It hits the full blocks and shares them.
            self.requests.append(Request(f"{request.name}+", request.tokens, request.num_tokens + 8, request.taste + 1))
        if is_last:
            self.leave(request, "closed_early")
            self.requests.remove(request)
            self.done.append(request)


def main() -> None:
    scheduler, random = Scheduler(36, 200), np.random.default_rng(1)
    stories = [random.integers(0, VOCABULARY, 30).tolist() for _ in range(3)]
    for number in range(12):
        tokens = [*stories[number % 3][: 10 + 2 * number], number % VOCABULARY]
        fork_at = len(tokens) + 5 if number % 3 == 0 else 0
        scheduler.requests.append(Request(f"r{number}", tokens, len(tokens) + 12, fork_at=fork_at))
    while scheduler.requests or scheduler.launched:
        scheduler.step()
    outputs = [request.tokens == request.expected() for request in scheduler.done]
    n, held = scheduler.counts, scheduler.ledger.statistics().device.num_blocks
    print(f"{len(outputs)} outputs like those of a run without blocks: {all(outputs)}")
    print(f"{n['steps']} steps, {n['preempted']} preempted, {n['forked']} forked, {n['pending']} matches PENDING")
    print(f"{n['accepted']} of {n['drafts']} drafts accepted, {n['own']} tokens hit in the engine's own blocks")
    print(f"{n['host']} tokens hit in host memory: {n['store']} blocks stored, {n['load']} loaded")
    print(f"free at the end: {len(scheduler.pool.free)} of 35 blocks, {held} held by copies")


if __name__ == "__main__":
    main()
