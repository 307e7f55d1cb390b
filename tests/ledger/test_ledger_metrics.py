"""Metrics of a ledger without a runtime: every scrape equals its statistics."""

from __future__ import annotations

import random
import re
import threading
from typing import Any

import pytest
from engine_driving import EngineDriven
from prometheus_client import CollectorRegistry
from scraping import GUARD_S, Scrape
from step_programs import PROGRAMS, EngineSteps, Program, Seen

from aoffload import InvalidArgument, RequestState, Tier
from aoffload._observe.metrics.families import FAMILIES, ShownWith
from aoffload.ledger import (
    CacheTurnedOff,
    Completion,
    Direction,
    Event,
    JobState,
    LedgerLog,
    Observers,
    Outcome,
    StoreSkipped,
)
from aoffload.metrics import LedgerCollector, Metrics

NOT_OVER_A_LEDGER = {"aoffload_room_wait_seconds", "aoffload_verified_blocks_total", "aoffload_loads_declined_total"}
AGES = {"aoffload_oldest_request_seconds", "aoffload_oldest_wait_seconds", "aoffload_oldest_step_seconds"}
"""What is shown where the ledger has a clock, which an engine with blocks of its own gives it in any case."""

each_program = pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS.keys())


class Measured:
    """A program whose ledger is scraped, now and then between two of its steps, and compared with its statistics."""

    def __init__(self, program: Program, seed: int) -> None:
        self.seen, self.metrics, self.lock = Seen(), Metrics(), threading.RLock()
        self.steps = program(seed, Observers(self.seen, self.metrics), self.look)
        self.registry = CollectorRegistry()
        self.registry.register(LedgerCollector(self.steps.ledger, self.metrics, self.lock, GUARD_S))
        self.random, self.scrapes = random.Random(seed), list[Scrape]()

    def look(self) -> None:
        if self.random.random() < 0.1:
            self.check()

    def check(self) -> None:
        scrape, found, ledger = Scrape.of(self.registry), self.steps.ledger.statistics(), self.steps.ledger
        self.check_blocks(scrape)
        live, over = scrape.sum("aoffload_requests"), scrape.sum("aoffload_requests_finished_total")
        assert (live, live + over) == (found.num_requests, scrape.sum("aoffload_requests_admitted_total"))
        for state in ("matched", "pinned", "loading", "running"):
            really = sum(request.state.value == state for request in ledger.live_requests.values())
            assert scrape.sum("aoffload_requests", state=state) == really
        assert scrape.sum("aoffload_requests_waiting") == found.num_waiting
        under_way = scrape.sum("aoffload_jobs") - scrape.sum("aoffload_jobs", state="quarantined")
        assert under_way == found.num_jobs
        assert scrape.sum("aoffload_late_completions_total") == found.num_late_completions
        assert scrape.sum("aoffload_skipped_store_blocks_total") == self.seen.num_skipped_blocks
        for direction in Direction:
            of_it = {"direction": direction.value}
            landed = scrape.sum("aoffload_jobs_finished_total", outcome="landed", **of_it)
            assert landed == self.seen.jobs.get((direction, JobState.COMPLETED), 0)
            discarded = scrape.sum("aoffload_jobs_finished_total", outcome="discarded", **of_it)
            assert discarded == self.seen.jobs.get((direction, JobState.DISCARDED), 0)
        assert scrape.sum("aoffload_observer_failures_total") == scrape.sum("aoffload_lost_log_events_total") == 0
        if self.scrapes:
            scrape.check_follows(self.scrapes[-1])
        self.scrapes.append(scrape)

    def check_blocks(self, scrape: Scrape) -> None:
        found = self.steps.ledger.statistics()
        for tier, blocks in ((Tier.DEVICE, found.device), (Tier.HOST, found.host)):
            name = tier.name.lower()
            really = {state: getattr(blocks, f"num_{state}") for state in ("free", "cached", "pinned", "quarantined")}
            if tier is Tier.DEVICE and isinstance(self.steps, EngineSteps):
                assert not really.pop("free") and not really.pop("cached")
            else:
                assert scrape.sum("aoffload_pool_blocks", tier=name) == blocks.num_blocks
                evicted = scrape.sum("aoffload_evicted_blocks_total", tier=name)
                assert evicted == self.steps.ledger.cache.tiers[tier].num_evicted
            for state, number in really.items():
                assert scrape.sum("aoffload_blocks", tier=name, state=state) == number
            assert scrape.sum("aoffload_blocks", tier=name) == blocks.num_blocks


@each_program
def test_every_scrape_equals_the_statistics(program: Program) -> None:
    """Between the steps of a program, whatever happens in it: blocks, requests and jobs by state, and what was counted,
    against the ledger itself and another observer. Nothing that counts goes back."""
    num_seen: dict[str, float] = {}
    for seed in range(6):
        measured = Measured(program, seed)
        measured.steps.drive()
        measured.check()
        for (name, labels), value in measured.scrapes[-1].values.items():
            key = " ".join([name, *sorted(value for label, value in labels if label != "le")])
            num_seen[key] = num_seen.get(key, 0) + value
        assert len(measured.scrapes) > 5
    for key in ("aoffload_tokens_total computed", "aoffload_tokens_total host_hit", "aoffload_tokens_total device_hit"):
        assert num_seen[key] > 0, key
    assert num_seen["aoffload_jobs_finished_total failed host store"] > 0
    assert num_seen["aoffload_request_seconds_count matched"] > 0


def test_what_a_ledger_cannot_know_is_not_shown() -> None:
    """Every family but those that a runtime measures; of an engine's own blocks only those that copies hold."""
    for program in PROGRAMS.values():
        scrape = Measured(program, 1)
        scrape.check()
        shown = {name for name, _ in scrape.scrapes[0].values}
        bare = {re.sub("_(count|sum|bucket)$", "", name) for name in shown}
        hidden = NOT_OVER_A_LEDGER if program is EngineSteps else NOT_OVER_A_LEDGER | AGES
        assert (
            bare & {family.name for family in FAMILIES}
            == {family.name for family in FAMILIES if family.shown_with is ShownWith.ANYTHING} - hidden
        )
        device = {tuple(sorted(labels)) for name, labels in scrape.scrapes[0].values if ("tier", "device") in labels}
        assert len(device) == (2 if program is EngineSteps else 9)


def test_tokens_are_counted_by_where_they_came_from() -> None:
    """What the engine had, what host memory brought, what was computed; also of a request that offers without a load,
    and of one whose load falls short."""
    metrics = Metrics()
    driven = EngineDriven(observer=metrics)
    driven.serve(range(16))  # 16 computed
    declined = driven.admit(range(17), 4)  # has 4, declines 12 in the host, computes 13
    assert declined.match.num_host_tokens == 12
    driven.land(driven.offer(declined, 17, driven.fresh(17)))
    driven.release(declined)
    request = driven.admit(range(17), 4)  # has 4, loads 12 and computes 1
    tables = driven.fresh(17)
    driven.land(driven.load(request, tables))
    driven.land(driven.offer(request, 17, tables))
    driven.release(request)
    assert metrics.tokens == {"device_hit": 0 + 4 + 4, "host_hit": 12, "computed": 16 + 13 + 1}
    short = driven.admit(range(17), 6)  # has 6, of which one block counts; of 12 tokens 4 are brought
    tables = driven.fresh(17)
    (plan,) = driven.launch(driven.load(short, tables))
    driven.end(plan, Outcome.FAILED, num_landed=1)
    assert (short.num_computed_tokens, short.num_lost_tokens) == (8, 8)
    assert (metrics.tokens["device_hit"], metrics.tokens["host_hit"]) == (8 + 6, 12 + 2)


def test_a_request_that_was_told_to_ask_again_is_shown_as_matched() -> None:
    """As long as it is; then its time is counted."""
    metrics = Metrics()
    driven = EngineDriven(observer=metrics)
    registry = CollectorRegistry()
    registry.register(LedgerCollector(driven.ledger, metrics, threading.Lock()))
    driven.serve(range(16))
    request, plans = driven.loading(range(17))
    retried = driven.pending(range(17), [])
    scrape = Scrape.of(registry)
    assert scrape.sum("aoffload_requests", state="matched") == scrape.sum("aoffload_requests", state="loading") == 1
    num_before = scrape.sum("aoffload_request_seconds_count", state="matched")
    driven.land(plans)
    driven.release(request, "left")
    assert driven.ask(retried)[1] == 16
    scrape = Scrape.of(registry)
    assert scrape.sum("aoffload_requests", state="matched") == 0
    assert scrape.sum("aoffload_request_seconds_count", state="matched") == num_before + 1


@each_program
def test_a_scrape_from_another_thread_waits_for_the_end_of_a_step(program: Program) -> None:
    """It reads between two calls, never in the middle of one; a program that does not release its lock makes it show
    the last scrape, and how old that is."""
    metrics, lock, inside, scrapes = Metrics(), threading.Lock(), threading.Event(), list[Scrape]()
    steps = program(2, metrics)
    registry = CollectorRegistry()

    class Slow:
        """Its scrape begins in the middle of a step, and comes no further than this."""

        def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
            inside.set()
            return lock.acquire(blocking, timeout)

        release = staticmethod(lock.release)

    registry.register(LedgerCollector(steps.ledger, metrics, Slow(), GUARD_S))
    thread = threading.Thread(target=lambda: scrapes.append(Scrape.of(registry)))
    with lock:
        thread.start()
        assert inside.wait(GUARD_S)
        steps.drive(30)
        assert not scrapes
    thread.join(GUARD_S)
    (scrape,) = scrapes
    assert scrape.sum("aoffload_requests_admitted_total") == metrics.num_admitted > 0
    impatient = CollectorRegistry()
    impatient.register(LedgerCollector(steps.ledger, metrics, lock, 0.0))
    steps.drive(0)
    with lock:
        late = Scrape.of(impatient)
    assert late.sum("aoffload_snapshot_age_seconds") > 0


def test_latency_losses_and_a_cache_that_is_off_count_once_they_are_told() -> None:
    """What delivers completions and what copies reports to the observers: the time until the settlement, a lost log
    event, an observer that raised, a cache that has turned itself off."""

    class Full:
        def bind(self) -> Any:
            return self

        def debug(self, *args: Any, **fields: Any) -> None:
            raise OSError("no space left")

        info = warning = error = debug

    class Broken(Seen):
        def observe(self, event: Event) -> None:
            if isinstance(event, StoreSkipped):
                raise OSError("no")

    metrics, log = Metrics(), LedgerLog(Full())
    observers = Observers(log, Broken(), Observers(metrics))
    driven = EngineDriven(observer=observers)
    registry = CollectorRegistry()
    registry.register(LedgerCollector(driven.ledger, metrics, threading.Lock()))
    request, tables = driven.computed(range(16))
    (plan,) = driven.launch(driven.offer(request, 16, tables))
    settle = observers.hearing(driven.ledger.settle)
    settle(Completion(plan.job_id, Outcome.LANDED, plan.num_blocks))
    observers.observe(StoreSkipped(None, 3, "host_full"))
    observers.observe(CacheTurnedOff("the device is gone"))
    scrape = Scrape.of(registry)
    assert scrape.sum("aoffload_fence_latency_seconds_count", direction="store") == 1
    assert scrape.sum("aoffload_lost_log_events_total") == log.num_lost_events > 3
    assert scrape.sum("aoffload_observer_failures_total") == observers.num_failures == 1
    assert scrape.sum("aoffload_skipped_store_blocks_total", reason="host_full") == 3
    assert scrape.sum("aoffload_cache_off") == 1
    assert request.state is RequestState.RUNNING


def test_wrong_arguments_are_refused_by_name() -> None:
    """Metrics that nobody feeds would show zeros for ever."""
    metrics = Metrics()
    ledger = EngineDriven(observer=metrics).ledger
    for others in (EngineDriven().ledger, EngineDriven(observer=Observers(Metrics(), Seen())).ledger):
        with pytest.raises(InvalidArgument, match="metrics"):
            LedgerCollector(others, metrics, threading.Lock())
    with pytest.raises(InvalidArgument, match="lock"):
        LedgerCollector(ledger, metrics, None)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="ledger"):
        LedgerCollector(metrics, metrics, threading.Lock())  # type: ignore[arg-type]
