"""A random walk over every call of the ledger, with two fake memories under it.

Each block of the fake memories holds a tag that says which tokens' KV it is: `(root, tokens up to there, group)`. What
a forward computes, and what a job copies, moves tags; torn, corrupt, stale and invalidated blocks get tags that match
nothing. After every call the ledger's own laws are checked, and every block that a live request may read must hold the
tag of its prefix: right bytes or a miss. What is stored must be what somebody has allowed to be stored.
"""

from __future__ import annotations

import random
from collections import Counter
from contextlib import ExitStack
from typing import Any, ClassVar

from driving import write_back

from aoffload import (
    ChunkedLocal,
    FullAttention,
    KVCacheGroup,
    LazyStore,
    Ledger,
    OffloadConfig,
    OutOfBlocks,
    RequestState,
    SelectiveStore,
    SlidingWindow,
)
from aoffload._common.tiers import HIT_TIERS
from aoffload._kernel.loads import has_holes
from aoffload._kernel.states import Computing
from aoffload.ledger import Completion, Direction, Outcome, Prefix, Root

UNIT = 4
S = RequestState
LOADING = (S.LOADING, S.DRAINING, S.REQUEUED, S.STRANDED)


def full_groups_of(rng: random.Random) -> list[KVCacheGroup]:
    if rng.random() < 0.2:
        return [KVCacheGroup("a", block_size=UNIT // 2), KVCacheGroup("b", block_size=UNIT)]
    return [KVCacheGroup("full", block_size=UNIT)]


def groups_of(rng: random.Random) -> list[KVCacheGroup]:
    """One to four groups, at least one of them of limited reach."""
    kinds = [SlidingWindow(rng.randint(1, 20)), ChunkedLocal(rng.randint(1, 20))]
    attention = [rng.choice(kinds), *rng.choices([FullAttention(), *kinds], [2, 1, 1], k=rng.randint(0, 3))]
    rng.shuffle(attention)
    sizes = [UNIT, *rng.choices([1, 2, UNIT, UNIT], k=3)]
    return [KVCacheGroup(f"g{i}", kind, size) for i, (kind, size) in enumerate(zip(attention, sizes, strict=False))]


def policy_of(rng: random.Random) -> Any:
    """Mostly eager: what is stored most is what can go wrong most."""
    lazy, selective = LazyStore(rng.choice([None, 1, 4, 12])), SelectiveStore(rng.choice([1, 2, 3]), 2000)
    return rng.choices(["eager", lazy, selective, "off"], [5, 3, 2, 0.3])[0]


class Client:
    """One request as its engine knows it."""

    def __init__(self, request: Any, tokens: list[int], root: int) -> None:
        self.record = request
        self.tokens = tokens
        self.num_prompt = len(tokens)
        self.root = root
        self.store = "all"
        self.max_store_tokens: int | None = None

    def may_store(self, num_tokens: int) -> bool:
        """Whether what its first `num_tokens` tokens make may be stored."""
        most = {"all": len(self.tokens), "prompt": self.num_prompt // UNIT * UNIT, "none": 0}[self.store]
        if self.max_store_tokens is not None:
            most = min(most, self.max_store_tokens // UNIT * UNIT)
        return num_tokens <= most


class Walk:
    OPERATIONS: ClassVar = {
        "admit": 4, "allocate": 3, "load": 3, "compute": 8, "extend": 1, "leave": 0.7, "transfer": 7,
        "prove_late": 1, "step": 2, "invalidate": 0.3, "reset": 0.05, "preempt": 1, "resume": 2, "fork": 1,
    }  # fmt: skip

    RESETS: ClassVar = [None, None, *HIT_TIERS]
    OUTCOMES: ClassVar = {Direction.LOAD: [75, 10, 10, 2, 3], Direction.STORE: [75, 10, 0, 2, 3]}

    def __init__(self, seed: int, *, with_windows: bool = False, is_plain: bool = False) -> None:
        """`is_plain`: everything is stored at once, and every request reads what there is."""
        self.random = rng = random.Random(seed)
        groups = self.groups = groups_of(rng) if with_windows else full_groups_of(rng)
        self.width = sum(UNIT // group.block_size for group in groups)
        self.num_units = rng.randint(4, 24)
        num_host = rng.choice([0, rng.randint(1, 10), rng.randint(10, 60)]) * self.width
        job_blocks = rng.choice([1, 2, 3, 1000]) * self.width
        self.is_plain = is_plain
        self.choices = random.Random(f"policy {seed}")  # of its own: plain walks stay what they were
        policy = "eager" if is_plain else policy_of(self.choices)
        config = OffloadConfig(groups=groups, num_host_blocks=num_host, max_job_bytes=job_blocks, store_policy=policy)
        self.device: list[object] = ["never written"] * (self.num_units * self.width + 1)
        self.ledger = self.make_ledger(config)
        self.host: list[object] = ["never written"] * num_host
        self.roots = [Root("m"), Root("m", "another salt")]
        self.prompts = [[rng.randrange(3) for _ in range(40)] for _ in range(3)]
        # With windows a hit needs the same end.
        self.lengths = [rng.randint(6, 38) for _ in range(2)] if with_windows else []
        self.most_clients = rng.choice([1, 2, 3, 5])
        self.clients: list[Client] = []
        self.allowed: set[tuple[int, tuple[int, ...]]] = set()
        """What may be stored: root and tokens up to there."""
        self.plans: dict[int, Any] = {}
        self.lost: dict[int, Any] = {}
        self.steps: list[ExitStack] = []
        # In every other walk some calls are much more frequent than in others: what two of them do to each other.
        rare = not is_plain and self.choices.random() < 0.5
        self.weights = [
            max(weight, self.choices.choice((0.0, 0.0, 1.0))) if rare else weight for weight in self.OPERATIONS.values()
        ]
        self.counts: Counter[str] = Counter()

    def make_ledger(self, config: OffloadConfig) -> Ledger:
        return Ledger(config, len(self.device), block_bytes=1)

    # -- the walk -------------------------------------------------------------------------------------------------

    def run(self, num_calls: int) -> Counter[str]:
        for _ in range(num_calls):
            (self.last,) = self.random.choices(list(self.OPERATIONS), self.weights)
            getattr(self, self.last)()
            self.check()
        self.finish()
        return self.counts

    def finish(self) -> None:
        """Everybody leaves, everything lands: nothing may be pinned."""
        for step in self.steps:
            step.close()
        for client in tuple(self.clients):
            self.end(client)
            self.check()
        while any(job_id in self.ledger.jobs.unsettled for job_id in self.plans):
            self.transfer()
            self.check()
        found = self.ledger.statistics()
        assert found.device.num_pinned == found.host.num_pinned == found.num_waiting == 0, found

    def check(self) -> None:
        self.ledger.check_integrity()
        device, holders = self.ledger.statistics().device, self.ledger.reports.holders()
        held = sum(holder.num_blocks for holder in holders)  # what several hold counts for each
        assert held >= device.num_pinned + device.num_quarantined, f"{device} are held by {list(map(str, holders))}"
        for client in self.clients:
            request = client.record
            if request.state not in (S.ALLOCATED, S.RUNNING):
                continue
            for group, table in enumerate(self.ledger.block_ids(request)):
                for position in self.readable(group, request.num_computed_tokens):
                    found = self.device[table[position]] if table[position] else "null"
                    assert found == self.tag(client, group, position), f"{request}: {group} {position} holds {found}"

    @staticmethod
    def may_compute(request: Any) -> bool:
        """Whether a host hit whose window has no blocks yet is not in the way."""
        return request.state is S.RUNNING or (request.state is S.ALLOCATED and not has_holes(request))

    def readable(self, group: int, num_tokens: int) -> range:
        """The whole blocks that attention reads for computing the token at `num_tokens`."""
        size = self.groups[group].block_size
        return self.groups[group].attention.required_blocks(num_tokens, size)

    def tag(self, client: Client, group: int, position: int) -> object:
        return (client.root, tuple(client.tokens[: (position + 1) * self.groups[group].block_size]), group)

    def pick(self, *states: RequestState) -> Client | None:
        found = [client for client in self.clients if client.record.state in states]
        return self.random.choice(found) if found else None

    # -- a request's life -----------------------------------------------------------------------------------------

    def admit(self) -> None:
        rng = self.random
        if len(self.clients) >= self.most_clients:
            return self.end(max(self.clients, key=lambda client: client.record.num_computed_tokens))
        most = max(UNIT, self.num_units * UNIT * 2 // 3)
        length = rng.choice(self.lengths) if self.lengths and rng.random() < 0.8 else rng.randint(1, most)
        tokens = rng.choice(self.prompts)[: min(length, most)]
        if rng.random() < 0.15:
            tokens = tokens[: rng.randint(0, len(tokens))] + [rng.randrange(3) for _ in range(rng.randint(1, 8))]
        narrowed: dict[str, int] = {}
        if rng.random() < 0.1:
            narrowed["max_hit_tokens"] = rng.randrange(40)
        if rng.random() < 0.1:
            narrowed["hit_alignment"] = rng.choice([4, 6, 8])
        root = int(rng.random() < 0.05)
        options = self.options()
        narrowed |= self.engine_hit(tokens, root)
        request = self.ledger.admit(Prefix.of(self.roots[root], tokens), **narrowed, **options)
        assert request.match.num_tokens < len(tokens), "a token is always left to compute"
        assert options.get("reads_cache", True) or request.match.num_tokens <= narrowed.get("num_device_tokens", 0)
        client = Client(request, list(tokens), root)
        client.store, client.max_store_tokens = options.get("store", "all"), options.get("max_store_tokens")
        self.clients.append(client)
        self.counts["device hit"] += request.match.num_device_tokens > 0
        self.counts["host hit"] += request.match.num_host_tokens > 0
        if rng.random() < 0.8:
            self.check()
            self.allocate(client)
            if request.state is S.ALLOCATED:
                self.check()
                self.load(client)
                self.check()
                self.compute(client)
        return None

    def options(self) -> dict[str, Any]:
        """What one request may read and have stored: mostly everything."""
        rng, options = self.choices, dict[str, Any]()
        if self.is_plain:
            return options
        if rng.random() < 0.15:
            options["store"] = rng.choice(["all", "prompt", "none", "none"])
        if rng.random() < 0.1:
            options["max_store_tokens"] = rng.randrange(30)
        if rng.random() < 0.05:
            options["reads_cache"] = False
        return options

    def engine_hit(self, tokens: list[int], root: int) -> dict[str, int]:
        """What the engine says of its own blocks, if it has any."""
        return {}

    def fork(self) -> None:
        client = self.pick(S.RUNNING)
        if client is None or client.record.waiter is not None or client.record.num_steps:
            return
        try:
            forked = self.fork_of(client, self.random.choice([0, 0, len(client.tokens) + 5]))
        except OutOfBlocks:
            return
        for source, destination in forked.copies:
            assert source != destination
            self.device[destination] = self.device[source]
        twin = Client(forked.request, list(client.tokens), client.root)
        twin.num_prompt = client.num_prompt
        twin.store, twin.max_store_tokens = client.store, client.max_store_tokens
        self.clients.append(twin)
        self.counts["forked"] += 1
        self.counts["forked with copies"] += bool(forked.copies)

    def fork_of(self, client: Client, num_tokens: int) -> Any:
        return self.ledger.forks.fork(client.record, num_tokens=num_tokens)

    def allocate(self, client: Client | None = None) -> None:
        client = client or self.pick(S.PINNED)
        if client is None:
            return None
        if client.record.waiter is not None:
            return self.wait_on(client, "granted")
        num_tokens = max(1, len(client.tokens) + self.random.choice([0, 0, 0, 5, -3]))
        try:
            self.ledger.allocate_nowait(client.record, num_tokens)
        except OutOfBlocks as error:
            if not error.retryable:
                return self.end(client)
            self.ledger.queue_allocation(client.record, num_tokens, lambda: None)
            self.counts["queued"] += 1
        return None

    def wait_on(self, client: Client, what: str) -> None:
        waiter = client.record.waiter
        if self.random.random() < 0.2:
            self.counts["withdrawn"] += 1
            return self.ledger.withdraw(waiter) if client.record.state is not S.REQUEUED else None
        if waiter.is_over:
            try:
                self.ledger.accept(waiter)
                self.counts[what] += 1
            except OutOfBlocks:
                self.counts[f"not {what}"] += 1
                self.end(client)
        return None

    def load(self, client: Client | None = None) -> None:
        client = client or self.pick(S.ALLOCATED, *LOADING)
        if client is None or client.record.num_steps:
            return
        request = client.record
        if request.waiter is not None:
            self.wait_on(client, "granted again")
            if request.waiter is not None or client not in self.clients:
                return
        if request.load is not None:
            if self.random.random() < 0.1:
                self.ledger.abandon_load(request)
                self.counts["load abandoned"] += 1
            return
        jobs_before = len(self.plans)
        self.take(self.ledger.plan_load(request, self.random.choice([None, None, None, self.random.randrange(40)])))
        if request.load is not None:
            self.counts["loading"] += 1
            self.counts["load shared"] += len(request.load.jobs) > len(self.plans) - jobs_before

    def compute(self, client: Client | None = None) -> None:
        client, rng = client or self.pick(S.RUNNING, S.ALLOCATED), self.random
        if client is None or not self.may_compute(client.record):
            return
        request = client.record
        if request.computing is Computing.LOST_BLOCKS:
            with self.ledger.step([request]):
                pass  # after a preemption only what a new step has computed counts
        done = request.num_computed_tokens
        new = [rng.randrange(3) for _ in range(rng.randint(1, 3))] if done >= len(client.tokens) - 1 else []
        most = min(request.num_units * UNIT, len(client.tokens) + len(new))
        if most < done:
            return
        num_computed = most if rng.random() < 0.5 else rng.randint(done, most)
        client.tokens += new
        for group, table in enumerate(self.ledger.block_ids(request)):
            size = self.groups[group].block_size
            for position in range(done // size, num_computed // size):
                assert table[position], "what is to be computed has a block"
                self.device[table[position]] = self.tag(client, group, position)
        self.allow(client, num_computed)
        self.take(self.ledger.commit(request, num_computed, new))
        self.take(write_back(self.ledger))
        self.counts["committed"] += 1

    def allow(self, client: Client, num_tokens: int) -> None:
        for stop in range(num_tokens + 1):
            if client.may_store(stop):
                self.allowed.add((client.root, tuple(client.tokens[:stop])))

    def extend(self) -> None:
        client = self.pick(S.RUNNING)
        if client is None:
            return None
        request = client.record
        if request.waiter is not None:
            return self.wait_on(client, "extended")
        num_tokens = request.num_units * UNIT + self.random.randint(1, 6)
        try:
            self.ledger.extend_nowait(request, num_tokens)
        except OutOfBlocks as error:
            if not error.retryable:
                return self.end(client)
            self.ledger.queue_extension(request, num_tokens, lambda: None)
        return None

    def leave(self) -> None:
        if self.clients:
            self.end(self.random.choice(self.clients), self.random.choice(["closed_early", "cancelled"]))

    def end(self, client: Client, reason: str = "closed_early") -> None:
        self.clients.remove(client)
        self.take(self.ledger.release(client.record, reason))
        if self.choices.random() < 0.9:  # it may be forgotten
            self.take(write_back(self.ledger))
        self.counts[client.record.state.value] += 1

    def step(self) -> None:
        if self.steps and self.random.random() < 0.6:
            return self.steps.pop(self.random.randrange(len(self.steps))).close()
        running = [client.record for client in self.clients if self.may_compute(client.record)]
        if running and len(self.steps) < 2:
            step = ExitStack()
            step.enter_context(self.ledger.step(self.random.sample(running, self.random.randint(1, len(running)))))
            self.steps.append(step)
            self.counts["stepped"] += 1
        return None

    def invalidate(self) -> None:
        client = self.pick(S.RUNNING)
        if client is None:
            return
        request = client.record
        start = self.random.randint(request.ready_stop * UNIT, request.num_computed_tokens)
        wrong = self.written(request, start)
        for tainted in self.ledger.invalidation.invalidate(request, start):
            self.counts["tainted"] += 1
            self.end(next(other for other in self.clients if other.record is tainted), "prefix_invalidated")
        for block_id in wrong - {0}:
            self.device[block_id] = "invalidated"
        client.tokens = client.tokens[: max(client.num_prompt, start + 1)]
        self.counts["invalidated"] += 1

    def written(self, request: Any, start: int) -> set[int]:
        """The whole blocks after token `start` that `request` has computed."""
        found = set()
        for group, table in enumerate(self.ledger.block_ids(request)):
            size = self.groups[group].block_size
            found.update(table[start // size : request.num_computed_tokens // size])
        return found

    def preempt(self) -> None:
        client = self.pick(S.RUNNING, *LOADING, S.ALLOCATED)
        if client is None or client.record.num_steps:
            return
        request = client.record
        if request.waiter is not None and request.state is not S.REQUEUED:
            return
        is_queued = self.ledger.statistics().num_waiting > 0  # who waits may be given room at once
        held, before, is_loading = self.held(request), self.ledger.admission.num_available, request.state in LOADING
        self.allow(client, len(client.tokens))  # also what it has only hit so far
        found = self.ledger.preemption.preempt(request)
        assert request.state is S.PREEMPTED and request.num_blocks == 0
        assert is_loading or is_queued or found.num_freed == max(0, self.ledger.admission.num_available - before)
        assert is_loading or found.num_pending <= len(held)
        self.take(found.plans)
        self.counts["preempted"] += 1

    def held(self, request: Any) -> set[int]:
        return {block_id for table in self.ledger.block_ids(request) for block_id in table if block_id}

    def resume(self) -> None:
        client = self.pick(S.PREEMPTED)
        if client is not None:
            self.ledger.preemption.resume(client.record)
            assert client.record.match.num_tokens < len(client.tokens), "a token is always left to compute"
            self.counts["resumed"] += 1
            self.counts["resumed with a hit"] += client.record.match.num_tokens > 0
            self.allocate(client)

    def reset(self) -> None:
        tier = self.random.choice(self.RESETS)
        self.ledger.reset(tier)
        self.counts["reset"] += 1

    # -- transfers ------------------------------------------------------------------------------------------------

    def take(self, plans: Any) -> None:
        self.plans |= {plan.job_id: plan for plan in plans}
        for plan in plans:
            self.counts["stored on nobody's behalf"] += not self.ledger.jobs.unsettled[plan.job_id].request_id
            for source_id in plan.source_ids if plan.direction is Direction.STORE else ():
                tag = self.device[source_id]
                assert isinstance(tag, tuple) and tag[:2] in self.allowed, f"{plan}: {tag} may not be stored"

    def transfer(self) -> None:
        """Launch a planned job, or end a launched one in one of the ways it can end; now and then twice."""
        if not self.plans:
            return
        job_id = self.random.choice(list(self.plans))
        job = self.ledger.jobs.unsettled.get(job_id)
        if job is None:
            del self.plans[job_id]
        elif job.state.value == "queued":
            self.ledger.launch(job_id)
        elif job.parked is None:
            completion = self.copy(self.plans.pop(job_id))
            self.counts[f"{job.plan.direction.value} {completion.outcome.value}"] += 1
            self.ledger.settle(completion)
            if self.random.random() < 0.1:
                self.ledger.settle(completion)
        elif len(self.plans) == 1:
            raise AssertionError(f"{job} waits for a job that nobody has")

    def copy(self, plan: Any) -> Completion:
        rng, loading = self.random, plan.direction is Direction.LOAD
        source, into = (self.host, self.device) if loading else (self.device, self.host)
        outcome = rng.choices(list(Outcome), self.OUTCOMES[plan.direction])[0]
        num_landed, corrupt = plan.num_blocks, ()
        if outcome is Outcome.FAILED:
            num_landed = rng.randrange(plan.num_blocks)
        elif outcome is Outcome.REFUSED:
            return Completion(plan.job_id, outcome)
        elif outcome is Outcome.CORRUPT:
            corrupt = tuple(sorted(rng.sample(range(plan.num_blocks), rng.randint(1, min(2, plan.num_blocks)))))
        for index, (source_id, block_id) in enumerate(zip(plan.source_ids, plan.destination_ids, strict=True)):
            if index in corrupt:
                source[source_id] = "rotten"
            into[block_id] = source[source_id] if index < num_landed else "torn"
        if outcome is Outcome.UNPROVEN:
            self.lost[plan.job_id] = plan
            return Completion(plan.job_id, outcome)
        return Completion(plan.job_id, outcome, corrupt[0] if corrupt else num_landed, corrupt)

    def prove_late(self) -> None:
        """A copy that was given up writes to the end, then says that it is over."""
        if not self.lost or self.random.random() < 0.5:
            return
        plan = self.lost.pop(self.random.choice(list(self.lost)))
        into = self.device if plan.direction is Direction.LOAD else self.host
        for block_id in plan.destination_ids:
            into[block_id] = "written late"
        self.ledger.settle(Completion(plan.job_id, Outcome.LANDED))
        self.counts["proven late"] += 1
