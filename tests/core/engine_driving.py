"""A ledger over blocks that an engine keeps, driven by hand: blocks of both memories hold tags, copies move them."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

from driving import BLOCK, ROOT, prompt

from aoffload import HostCache, KVCacheGroup, OffloadConfig, RequestState, Tier
from aoffload._kernel.events import Event, StoreSkipped
from aoffload.ledger import Completion, Direction, JobState, LedgerRequest, Outcome, Prefix, TransferPlan

__all__ = ["BLOCK", "Counted", "EngineDriven", "Finding", "Seen", "destinations", "loaded", "prompt", "sources"]

Tag: TypeAlias = tuple[int, tuple[int, ...]] | str
TORN = "torn"
"""What a copy leaves that did not go well."""


class Counted:
    """The engine's side of it: how often each of its blocks is held."""

    def __init__(self) -> None:
        self.held: Counter[int] = Counter()
        self.given: list[int] = []

    def hold(self, block_ids: array[int]) -> None:
        assert isinstance(block_ids, array) and 0 not in block_ids
        self.held.update(block_ids)

    def give(self, block_ids: array[int]) -> None:
        for block_id in block_ids:
            self.held[block_id] -= 1
            assert self.held[block_id] >= 0, f"block {block_id} was given, and nobody holds it"
        self.given += block_ids


class Finding(Counted):
    """One that can say where its prefix cache still has a block, by request, group and position."""

    def __init__(self) -> None:
        super().__init__()
        self.known: dict[tuple[str, int, int], int] = {}
        self.asked: list[tuple[str, int, int, int]] = []

    def find(self, request_id: str, group: int, start: int, stop: int) -> Sequence[int]:
        self.asked.append((request_id, group, start, stop))
        return [self.known.get((request_id, group, at), 0) for at in range(start, stop)]


class Seen:
    """An observer that keeps what was skipped."""

    def __init__(self) -> None:
        self.skipped: list[tuple[int, str]] = []

    def observe(self, event: Event) -> None:
        if isinstance(event, StoreSkipped):
            self.skipped.append((event.num_blocks, event.reason))


class EngineDriven:
    """Blocks of 4 tokens, unless told otherwise, of one byte each. After every call of its own it checks integrity, and
    that the engine has to keep exactly what jobs touch. Its engine hands out blocks from the lowest id on, and no block
    twice: what is read wrongly is not hidden by chance."""

    def __init__(self, num_host: int = 16, *, engine: Any = None, observer: Any = None, **config: Any) -> None:
        config.setdefault("groups", [KVCacheGroup("full", block_size=BLOCK)])
        self.engine: Any = Counted() if engine is None else engine
        self.now = 0.0
        self.ledger = HostCache(
            OffloadConfig(num_host_blocks=num_host, **config), 1000, engine_blocks=self.engine, clock=lambda: self.now,
            observer=observer,
        )  # fmt: skip
        self.memory: dict[Tier, dict[int, Tag]] = {Tier.DEVICE: {}, Tier.HOST: {}}
        self._num_used = 0

    # -- the engine's own -----------------------------------------------------------------------------------------

    def fresh(self, num_tokens: int) -> list[list[int]]:
        """Block tables for so many tokens, of blocks that nobody has had."""
        tables = []
        for group in self.ledger.layout.groups:
            first = self._num_used + 1
            self._num_used += -(-num_tokens // group.block_size)
            tables.append(list(range(first, self._num_used + 1)))
        return tables

    def tag(self, tokens: Sequence[int], group: int, index: int) -> Tag:
        """Of block `index` of a group: it is made from every token up to its end."""
        return group, tuple(tokens[: (index + 1) * self.ledger.layout.groups[group].block_size])

    def compute(self, tokens: Sequence[int], tables: Sequence[Sequence[int]], start: int = 0) -> None:
        """A forward over `tokens` from token `start` on writes into `tables`, but for null blocks."""
        for number, (group, table) in enumerate(zip(self.ledger.layout.groups, tables, strict=True)):
            for index in range(start // group.block_size, min(len(tokens) // group.block_size, len(table))):
                if table[index]:
                    self.memory[Tier.DEVICE][table[index]] = self.tag(tokens, number, index)

    def wrong(self, tokens: Sequence[int], tables: Sequence[Sequence[int]], start: int, stop: int) -> list[Any]:
        """What a forward that goes on at `stop` would read wrongly after `start`: (group, index, what is there)."""
        found = []
        for number, (group, table) in enumerate(zip(self.ledger.layout.groups, tables, strict=True)):
            for index in group.attention.required_blocks(stop, group.block_size):
                there = self.memory[Tier.DEVICE].get(table[index], "never written")
                if index * group.block_size >= start and there != self.tag(tokens, number, index):
                    found.append((number, index, there))
        return found

    # -- one call after the other ---------------------------------------------------------------------------------

    def admit(self, tokens: Sequence[int], num_device_tokens: int = 0, **options: Any) -> LedgerRequest:
        prefix = Prefix.of(options.pop("root", ROOT), tokens)
        request = self.ledger.admit(prefix, num_device_tokens=num_device_tokens, **options)
        self.check()
        return request

    def ask(self, request: LedgerRequest, num_device_tokens: int = 0, **options: Any) -> tuple[int, int, str]:
        """Match again; tokens of the engine's and of the host, and the answer."""
        match = self.ledger.match_again(request, num_device_tokens=num_device_tokens, **options)
        self.check()
        return match.num_device_tokens, match.num_host_tokens, match.answer.value

    def load(self, request: LedgerRequest, into: Any = None, **options: Any) -> list[TransferPlan]:
        plans = list(self.ledger.plan_load(request, into=into, **options))
        self.check()
        return plans

    def offer(
        self, request: LedgerRequest, num_tokens: int, ids: Any, new: Iterable[int] = (), **options: Any
    ) -> list[Any]:
        plans = list(self.ledger.offer(request, num_tokens, ids, list(new), **options))
        self.check()
        return plans

    def invalidate(self, request: LedgerRequest, from_token: int) -> list[LedgerRequest]:
        affected = self.ledger.invalidate(request, from_token)
        self.check()
        return list(affected)

    def launch(self, plans: Iterable[TransferPlan]) -> list[TransferPlan]:
        return [plan for plan in plans if self.ledger.launch(plan.job_id)]

    def end(
        self, plan: TransferPlan, outcome: Outcome = Outcome.LANDED, num_landed: int = 0, corrupt: Sequence[int] = ()
    ) -> None:
        """The copy is over: what it has moved lies there, and the rest of its destinations is torn."""
        whole = len(plan.source_ids) if outcome is Outcome.LANDED else num_landed
        for at, (source_id, block_id) in enumerate(zip(plan.source_ids, plan.destination_ids, strict=True)):
            is_right = at < whole and at not in corrupt
            self.memory[plan.destination][block_id] = (
                self.memory[plan.source].get(source_id, TORN) if is_right else TORN
            )
        self.ledger.settle(Completion(plan.job_id, outcome, num_landed, tuple(corrupt)))
        self.check()

    def land(self, plans: Iterable[TransferPlan]) -> None:
        """Also what was launched before; not what was given up meanwhile."""
        for plan in plans:
            if plan.job_id in self.ledger.jobs.unsettled:
                self.ledger.launch(plan.job_id)
                self.end(plan)

    def release(self, request: LedgerRequest, reason: str = "closed_early") -> None:
        assert self.ledger.release(request, reason) == (), "what is left to store is offered before"
        self.check()

    def reset(self, tier: Tier | None = None) -> None:
        self.ledger.reset(tier)
        self.check()

    # -- whole lives ----------------------------------------------------------------------------------------------

    def computed(self, tokens: Sequence[int], **options: Any) -> tuple[LedgerRequest, list[list[int]]]:
        """Admitted without a hit, and its prompt computed in fresh blocks."""
        tables = self.fresh(len(tokens))
        self.compute(tokens, tables)
        return self.admit(tokens, reads_cache=False, **options), tables

    def serve(self, tokens: Sequence[int], **options: Any) -> list[list[int]]:
        """A whole life: computed, stored, gone. The blocks that it had."""
        request, tables = self.computed(tokens, **options)
        self.land(self.offer(request, len(tokens), tables, is_last=True))
        self.release(request)
        return tables

    def loading(
        self, tokens: Sequence[int], num_device_tokens: int = 0, **options: Any
    ) -> tuple[LedgerRequest, list[Any]]:
        """Admitted, with a load into fresh blocks that was launched; `tables` of the request are kept."""
        wake: Callable[[], object] = options.pop("wake", lambda: None)
        request = self.admit(tokens, num_device_tokens, **options)
        return request, self.launch(self.load(request, self.fresh(len(tokens)), wake=wake))

    def pending(self, tokens: Sequence[int], woken: list[str], name: str = "asker") -> LedgerRequest:
        """Told to ask again; its name is `woken` then."""
        request = self.admit(tokens, wake=lambda: woken.append(name), request_id=name)
        assert (request.match.answer.value, request.state) == ("pending", RequestState.MATCHED)
        return request

    # -- looking --------------------------------------------------------------------------------------------------

    def hit(self, tokens: Sequence[int]) -> int:
        found = self.ledger.lookup(Prefix.of(ROOT, tokens))
        assert not found.num_device_tokens
        return found.num_host_tokens

    def held(self) -> list[int]:
        """The blocks of the engine's that it has to keep now, each as often as it is held."""
        return sorted(self.engine.held.elements())

    def num_pinned(self) -> int:
        """In the host."""
        return self.ledger.statistics().host.num_pinned

    def check(self) -> None:
        self.ledger.check_integrity()
        touched: list[int] = []
        for job in self.ledger.jobs.unsettled.values():
            assert job.state in (JobState.QUEUED, JobState.LAUNCHED)
            if Tier.DEVICE not in job.plan.link:
                continue
            is_store = job.plan.direction is Direction.STORE
            touched += job.plan.source_ids if is_store else job.plan.destination_ids
        for job in self.ledger.jobs.quarantined.values():
            touched += [] if job.plan.direction is Direction.STORE else job.plan.destination_ids
        assert self.held() == sorted(touched), "the engine keeps what no job touches, or the other way round"
        device = self.ledger.statistics().device
        assert device.num_blocks == len(touched) == device.num_pinned + device.num_quarantined

    def assert_at_rest(self) -> None:
        """Nobody holds anything: the engine has all its blocks, and in the host nothing is pinned."""
        self.check()
        statistics = self.ledger.statistics()
        assert (statistics.num_requests, statistics.num_jobs, self.held()) == (0, 0, [])
        assert statistics.host.num_free + statistics.host.num_cached == statistics.host.num_blocks


def sources(plans: Any) -> list[list[int]]:
    return [list(plan.source_ids) for plan in plans]


def destinations(plans: Any) -> list[list[int]]:
    return [list(plan.destination_ids) for plan in plans]


def loaded(driven: EngineDriven, tokens: list[int], num_device_tokens: int = 0) -> int:
    """How many tokens a new request has when its load has landed; that it reads the right bytes is looked at."""
    request = driven.admit(tokens, num_device_tokens)
    tables = driven.fresh(len(tokens))
    driven.land(driven.load(request, tables))
    ready = request.num_computed_tokens
    assert not driven.wrong(tokens, tables, num_device_tokens, ready)
    driven.release(request, "looked")
    return ready
