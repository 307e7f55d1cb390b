"""A step-based scheduler with blocks of its own: the ledger looks after host memory only, and holds what it is lent.

The engine has a block pool with a prefix cache in it, computes long prompts chunk by chunk, several requests in a
forward, guesses ahead and rejects most of it, preempts whom it likes, and forks. A copy may fail, bring bytes that
rotted, or hang: what was not loaded is computed, what hangs is given up in time, and who can never fit any more ends
with `OutOfBlocks`. The "model" reads the KV of every token that attention sees, so one wrong byte changes what comes
out.

Prints:
    16 outputs like those of a run without blocks: True
    80 steps, 14 preempted, 4 forked with 6 blocks copied
    35 of 330 drafts accepted, 84 tokens hit in the engine's own blocks
    228 tokens hit in host memory: 123 blocks stored, 85 loaded
    given back at the end: 35 of 35 blocks, 0 lent
"""

from collections import Counter, deque
from itertools import islice

import numpy as np

import aoffload
from aoffload import Completion, Outcome, Prefix, RequestState, Tier, TransferPlan

PATIENCE = 8  # steps that a copy may take

BLOCK, CHUNK, NUM_DRAFTS, VOCABULARY, WINDOW = 4, 12, 2, 5, 9
SLIDING = aoffload.KVCacheGroup("window", aoffload.SlidingWindow(WINDOW), BLOCK)
GROUPS = [aoffload.KVCacheGroup("full", block_size=BLOCK), SLIDING]


def seen(group: int, position: int) -> int:
    return max(0, position - WINDOW + 1) if group else 0  # the first position that attention reads


def kv_of(token: int, position: int, before: np.ndarray) -> int:
    return (token * 7919 + position * 31 + int(before.sum()) * 17 + 1) % 1_000_003


def plain_run(tokens: list[int], num_tokens: int, taste: int) -> list[int]:
    """What comes out without blocks, caches and copies."""
    tokens, kv = list(tokens), np.zeros((len(GROUPS), num_tokens), np.int64)
    for at in range(num_tokens - 1):
        for group in range(len(GROUPS)):
            kv[group, at] = kv_of(tokens[at], at, kv[group, seen(group, at) : at])
        if at + 1 == len(tokens):
            tokens.append((int(kv[:, at].sum()) // 7 + taste) % VOCABULARY)
    return tokens


class Pool:
    """The engine's blocks: free ones keep their content, and hit, until they are used again."""

    def __init__(self, num_rows: int) -> None:
        self.free = dict.fromkeys(range(1, num_rows))  # the oldest first
        self.cached: dict[tuple, int] = {}
        self.keys: dict[int, tuple] = {}

    def give(self, block_ids: list[int]) -> None:
        self.free.update(dict.fromkeys(block_ids))

    def take(self, num_blocks: int) -> list[int]:
        block_ids = list(islice(self.free, num_blocks))
        for block_id in block_ids:
            del self.free[block_id]
            self.cached.pop(self.keys.pop(block_id, ()), None)
        return block_ids

    def cache(self, key: tuple, block_id: int) -> None:
        if block_id and key not in self.cached and block_id not in self.keys:
            self.cached[key], self.keys[block_id] = block_id, key

    def hit(self, tokens: list[int]) -> list[list[int]]:
        """For each group the blocks of the longest hit, null where a window is past."""
        for num_blocks in range((len(tokens) - 1) // BLOCK, 0, -1):
            needed = [group.attention.required_blocks(num_blocks * BLOCK, BLOCK) for group in GROUPS]
            keys = [[(g, *tokens[: (at + 1) * BLOCK]) for at in needed[g]] for g in range(len(GROUPS))]
            if all(key in self.cached for of_group in keys for key in of_group):
                return [[0] * needed[g].start + [self.cached[key] for key in keys[g]] for g in range(len(GROUPS))]
        return [[] for _ in GROUPS]


class Request:
    def __init__(self, name: str, tokens: list[int], num_tokens: int, taste: int = 0, fork_at: int = 0) -> None:
        self.name, self.tokens, self.num_tokens, self.taste, self.fork_at = name, tokens, num_tokens, taste, fork_at
        self.holding: aoffload.Holding  # while it runs
        self.reads_cache = True
        self.error: aoffload.OutOfBlocks | None = None
        self.expected = lambda: plain_run(tokens, num_tokens, taste)


class Scheduler:
    def __init__(self, num_rows: int, num_host: int) -> None:
        self.memory = {Tier.DEVICE: np.zeros((num_rows, BLOCK), np.int64), Tier.HOST: np.zeros((num_host, BLOCK), int)}
        self.pool = Pool(num_rows)
        config = aoffload.OffloadConfig(groups=GROUPS, num_host_blocks=num_host)
        self.ledger = aoffload.Ledger(config, num_rows, device_pool=aoffload.LentBlocks(self.pool.give))
        self.waiting, self.running, self.done = deque[Request](), list[Request](), list[Request]()
        self.in_flight: dict[int, tuple[TransferPlan, int]] = {}  # and the step in which it was launched
        self.counts: Counter[str] = Counter()

    def step(self) -> None:
        self.end_copies()
        for request in [request for request in self.running if request.holding.lacks_blocks]:
            request.reads_cache = False  # its load was lost, with the blocks under it: it computes instead
            self.preempt(request)
        while self.waiting and self.admit(self.waiting[0]):
            self.running.append(self.waiting.popleft())
        batch = [request for request in tuple(self.running) if self.is_scheduled(request)]
        with self.ledger.step([request.holding for request in batch]):
            computed = [self.forward(request) for request in batch]
        for request, result in zip(batch, computed, strict=True):
            self.commit(request, *result)
        self.counts["steps"] += 1

    def end_copies(self) -> None:
        """Settle what is over. What hangs is given up: nobody uses what it writes into until it is proven over."""
        for plan, began in tuple(self.in_flight.values()):
            completion = self.copy(plan)
            if completion is None and self.counts["steps"] - began >= PATIENCE:
                completion = Completion(plan.job_id, Outcome.UNPROVEN)
            if completion is not None:
                del self.in_flight[plan.job_id]
                self.ledger.settle(completion)

    def copy(self, plan: TransferPlan) -> Completion | None:
        """What became of a copy by now; None: it is under way. Here, it takes a step and lands."""
        self.memory[plan.destination][plan.destination_ids] = self.memory[plan.source][plan.source_ids]
        self.counts[plan.direction.value] += plan.num_blocks
        return Completion(plan.job_id, Outcome.LANDED, plan.num_blocks)

    def launch(self, plans: tuple[TransferPlan, ...]) -> None:
        for plan in plans:
            if self.ledger.launch(plan.job_id):
                self.in_flight[plan.job_id] = plan, self.counts["steps"]

    def reject(self, request: Request, num_missing: int) -> None:
        """Nobody else has any of the blocks that it lacks: it can never fit."""
        request.error = aoffload.OutOfBlocks(num_missing, len(self.pool.free), retryable=False)
        self.done.append(request)

    def admit(self, request: Request) -> bool:
        """Lend it its own hit, and blocks for what the host has and the first chunk behind that."""
        ids = self.pool.hit(request.tokens)
        num_hit, prefix = len(ids[0]) * BLOCK, Prefix.of(aoffload.Root("toy"), request.tokens)
        options = {"num_device_tokens": num_hit, "reads_cache": request.reads_cache}
        holding = self.ledger.admit(prefix, request_id=request.name, **options)
        num_tokens = min(holding.match.num_tokens + CHUNK, len(request.tokens))
        missing = -(-num_tokens // BLOCK) - len(ids[0])
        if len(self.pool.free.keys() - set().union(*ids)) < missing * len(GROUPS):
            self.ledger.release(holding, "no_room")
            if not self.running and not self.in_flight:
                self.reject(self.waiting.popleft(), missing * len(GROUPS))
            return False
        for block_id in set().union(*ids):
            self.pool.free.pop(block_id, None)
        self.ledger.lend(holding, [own + self.pool.take(missing) for own in ids], num_tokens)
        self.launch(self.ledger.plan_load(holding))
        self.counts.update(own=num_hit, host=holding.match.num_host_tokens)
        request.holding = holding
        return True

    def is_scheduled(self, request: Request) -> bool:
        """Whether it computes in this step: it has loaded, and has blocks, if need be those of younger ones."""
        if request not in self.running or request.holding.state is not RequestState.RUNNING:
            return False
        wanted = min(request.holding.num_computed_tokens + CHUNK, len(request.tokens) + NUM_DRAFTS)
        missing = -(-wanted // BLOCK) - len(self.ledger.block_ids(request.holding)[0])
        while missing > 0 and len(self.pool.free) < missing * len(GROUPS):
            if request is self.running[-1] and self.in_flight:
                return False  # what was given up comes back when its stores have landed
            is_alone = len(self.running) == 1
            if self.preempt(self.running[-1]) is request:
                if is_alone:
                    self.reject(self.waiting.popleft(), missing * len(GROUPS))
                return False
        if missing > 0:
            self.ledger.lend_more(request.holding, [self.pool.take(missing) for _ in GROUPS], wanted)
        return True

    def preempt(self, victim: Request) -> Request:
        self.launch(self.ledger.release(victim.holding, "preempted"))
        self.running.remove(victim)
        self.waiting.appendleft(victim)
        self.counts["preempted"] += 1
        return victim

    def forward(self, request: Request) -> tuple[int, list[int]]:
        """Compute a chunk, or a token and the drafts behind it: how many tokens count, and what was sampled."""
        done, tokens = request.holding.num_computed_tokens, request.tokens
        tables, stop = self.ledger.block_ids(request.holding), min(done + CHUNK, len(tokens))
        drafts = [(tokens[-1] + at) % VOCABULARY for at in range(NUM_DRAFTS)] if done + CHUNK > len(tokens) + 1 else []
        guessed, sampled = tokens[:stop] + drafts, list[int]()
        for at in range(done, len(guessed)):
            kv = [self.attend(table, group, at, guessed[at]) for group, table in enumerate(tables)]
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
        first, tables = request.holding.num_computed_tokens // BLOCK, self.ledger.block_ids(request.holding)
        request.tokens = request.tokens + new_tokens
        for group, table in enumerate(tables):
            for at in range(first, num_computed // BLOCK):
                self.pool.cache((group, *request.tokens[: (at + 1) * BLOCK]), table[at])
        self.launch(self.ledger.commit(request.holding, num_computed, new_tokens))
        if request.fork_at and len(request.tokens) >= request.fork_at:
            self.fork(request)
        if len(request.tokens) == request.num_tokens:
            self.launch(self.ledger.release(request.holding))
            self.running.remove(request)
            self.done.append(request)

    def fork(self, request: Request) -> None:
        first = self.ledger.num_shared_tokens(request.holding) // BLOCK
        num_own = -(-len(request.tokens) // BLOCK) - first
        if len(self.pool.free) < num_own * len(GROUPS):
            return  # at a later step
        twin = Request(f"{request.name}+", request.tokens, request.num_tokens + 8, request.taste + 1)
        past = [table[first:].count(0) for table in self.ledger.block_ids(request.holding)]  # null there as well
        ids = [[0] * num_past + self.pool.take(num_own - num_past) for num_past in past]
        fork = self.ledger.fork(request.holding, twin.name, block_ids=ids)
        for source, destination in fork.copies:
            self.memory[Tier.DEVICE][destination] = self.memory[Tier.DEVICE][source]
        twin.holding, request.fork_at = fork.holding, 0
        self.running.append(twin)
        self.counts.update(forked=1, copied=len(fork.copies))


def main() -> None:
    scheduler, random = Scheduler(36, 200), np.random.default_rng(1)
    stories = [random.integers(0, VOCABULARY, 30).tolist() for _ in range(3)]
    for number in range(12):
        tokens = [*stories[number % 3][: 10 + 2 * number], number % VOCABULARY]
        fork_at = len(tokens) + 5 if number % 3 == 0 else 0
        scheduler.waiting.append(Request(f"r{number}", tokens, len(tokens) + 12, fork_at=fork_at))
    while scheduler.waiting or scheduler.running or scheduler.in_flight:
        scheduler.step()
    outputs = [request.tokens == request.expected() for request in scheduler.done]
    n, lent = scheduler.counts, scheduler.ledger.statistics().device.num_blocks
    print(f"{len(outputs)} outputs like those of a run without blocks: {all(outputs)}")
    print(f"{n['steps']} steps, {n['preempted']} preempted, {n['forked']} forked with {n['copied']} blocks copied")
    print(f"{n['accepted']} of {n['drafts']} drafts accepted, {n['own']} tokens hit in the engine's own blocks")
    print(f"{n['host']} tokens hit in host memory: {n['store']} blocks stored, {n['load']} loaded")
    print(f"given back at the end: {len(scheduler.pool.free)} of 35 blocks, {lent} lent")


if __name__ == "__main__":
    main()
