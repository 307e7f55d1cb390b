"""Extensions of a program: permitted calls, and the handling of an extension that fails."""

from __future__ import annotations

import math
import random
import runpy
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from driving import BLOCK, ROOT, Driven, prompt, write_back
from engine_driving import EngineDriven

from aoffload import (
    AoffloadError,
    ConfigError,
    InvalidArgument,
    KVCacheGroup,
    Ledger,
    OffloadConfig,
    SlidingWindow,
    Tier,
)
from aoffload._host_cache.host_cache import HostCache
from aoffload._kernel.extension import HOOKS
from aoffload._kernel.pools import ExtentPool, LeastRecentlyUsed, TierBlocks
from aoffload._kernel.records import Job, Part
from aoffload.errors import CommitError, WrongState
from aoffload.ledger import Build, ExtensionError, JobState, LedgerExtension, Outcome, Prefix, Root, TransferPlan
from proof.programs.random_extension import RandomExtension

A, B = prompt(1, 10), prompt(2, 10)
PASSED_ON = ("ask_admit", "ask_commit", "report_job")
"""Hooks that refuse a call by raising: the caller gets the error itself."""
ENGINE_HOOKS = (
    "ask_admit", "ask_store_stop", "ask_take", "ask_next_lapse", "on_admitted", "on_matched", "on_finishing",
    "on_leaving", "on_released", "on_job_settled", "on_withdrawn", "on_invalidated", "on_resetting", "on_reset",
    "on_lapse",
)  # fmt: skip
"""The hooks that a `HostCache` calls."""


class OopsError(Exception):
    pass


class Misbehaves(LedgerExtension):
    """Each hook does as `act` does, until it `is_over`."""

    def __init__(self, act: Callable[[Any], object]) -> None:
        self.act = act
        self.is_over = False
        self.called: set[str] = set()

    def on_attach(self, ledger: Any) -> None:
        self.ledger = ledger


def misbehaving(name: str, act: Callable[[Any], object]) -> Misbehaves:
    """An extension whose hook `name` does as `act` does, and then answers wrongly."""

    def hook(self: Misbehaves, *_: object) -> object:
        self.called.add(name)
        if not self.is_over:
            self.act(self.ledger)
        return NEUTRAL.get(name)

    kind = type("Naughty", (Misbehaves,), {name: hook})
    return kind(act)  # type: ignore[no-any-return]


NEUTRAL: dict[str, Any] = {
    "ask_store_stop": 99, "ask_load_stop": 99, "ask_take": 99, "ask_deferred": False, "ask_blocks": False,
    "ask_next_lapse": math.inf,
    "ask_former_readers": (), "on_invalidated": [], "report_leases": (), "report_requests": (), "report_blocks": (),
}  # fmt: skip


def raises(_: Any) -> None:
    raise OopsError("by mistake")


def calls_a_verb(ledger: Any) -> None:
    ledger.lookup(Prefix.of(ROOT, A))


class Scenes:
    """A `Ledger` of 8 blocks, and the calls that reach every hook."""

    def __init__(self, extension: LedgerExtension) -> None:
        self.driven = Driven(8)
        config = OffloadConfig(groups=[KVCacheGroup("full", block_size=BLOCK)], num_host_blocks=16)
        self.ledger = self.driven.ledger = Ledger(config, 9, extensions=[extension])

    def scenes(self) -> Iterator[Callable[[], object]]:
        yield self.hit
        yield self.step
        yield self.corrupt
        yield self.invalidated
        yield lambda: self.ledger.pins.release(self.ledger.pins.hold(Driven.prefix(A)))
        yield self.queue
        yield lambda: self.ledger.lapse(1.0)
        yield lambda: (self.ledger.next_lapse, self.ledger.lapse(2.0))
        yield lambda: self.ledger.reset(Tier.HOST)
        yield self.ledger.reset

    def hit(self) -> None:
        self.driven.on_host_only(A)
        self.driven.serve(A)

    def step(self) -> None:
        request = self.driven.running(B)
        with self.ledger.step([request]):
            self.driven.commit(request)
        self.driven.release(request)

    def corrupt(self) -> None:
        self.driven.on_host_only(A)
        request = self.driven.allocated(A)
        for plan in self.driven.launch(self.ledger.plan_load(request)):
            self.driven.end(plan, Outcome.CORRUPT, 0, [0])
        self.driven.release(request)

    def invalidated(self) -> None:
        request, reader = self.driven.running(prompt(5, 10)), self.driven.running(A)
        self.driven.commit(request)
        self.ledger.invalidation.invalidate(request, BLOCK)
        self.driven.release(reader)
        self.driven.release(request)

    def queue(self) -> None:
        """A request waits for blocks that only waiters hold."""
        holds = self.driven.running(prompt(3, 16))
        waits = self.driven.running(prompt(4, 16))
        waiters = [self.ledger.queue_extension(one, 20) for one in (holds, waits)]
        for waiter in waiters:
            if waiter.is_over:
                with suppress(AoffloadError):
                    self.ledger.accept(waiter)
        self.driven.release(holds)
        self.driven.release(waits)

    def works(self) -> None:
        self.driven.on_host_only(A)
        assert self.driven.hit(A) == (0, 8)
        assert self.driven.num_pinned() == (0, 0)
        device = self.ledger.statistics().device
        assert device.num_free + device.num_cached == 8


class EngineScenes:
    """A `HostCache`, and the calls that reach every hook of it."""

    def __init__(self, extension: LedgerExtension) -> None:
        self.driven = EngineDriven()
        self.ledger = self.driven.ledger = HostCache(
            self.driven.ledger.config, 1000, self.driven.engine, clock=lambda: 0.0, extensions=[extension]
        )

    def scenes(self) -> Iterator[Callable[[], object]]:
        yield lambda: self.driven.serve(A)
        yield self.load
        yield self.corrupt
        yield self.invalidated
        yield lambda: self.ledger.pins.release(self.ledger.pins.hold(Driven.prefix(A)))
        yield lambda: self.ledger.lapse(1.0)
        yield lambda: (self.ledger.next_lapse, self.ledger.lapse(2.0))
        yield lambda: self.ledger.reset(Tier.HOST)
        yield self.ledger.reset

    def load(self) -> None:
        request, plans = self.driven.loading(A)
        self.driven.land(plans)
        self.driven.release(request)

    def corrupt(self) -> None:
        self.driven.serve(A)
        request, plans = self.driven.loading(A)
        for plan in plans:
            self.driven.end(plan, Outcome.CORRUPT, 0, [0])
        self.driven.release(request)

    def invalidated(self) -> None:
        request, tables = self.driven.computed(B)
        self.driven.land(self.driven.offer(request, 10, tables))
        self.driven.invalidate(request, BLOCK)
        self.driven.release(request)

    def works(self) -> None:
        self.driven.serve(A)
        assert self.driven.hit(A) == 8
        assert self.driven.num_pinned() == 0
        assert self.driven.held() == []


def clear(ledger: Any) -> None:
    """Give up all jobs and requests, as an engine does that has got an error."""
    for job_id in [*ledger.jobs.unsettled]:
        with suppress(ExtensionError):
            ledger.discard(job_id)
    for request in [*ledger.live_requests.values()]:
        with suppress(ExtensionError):
            ledger.release(request, "error")
    ledger.check_integrity()


CASES = [(Scenes, hook) for hook in HOOKS] + [(EngineScenes, hook) for hook in ENGINE_HOOKS]


@pytest.mark.parametrize("act", [raises, calls_a_verb])
@pytest.mark.parametrize(
    ("scenes", "name"),
    [case for case in CASES if case[1] not in (*PASSED_ON, "on_build", "on_attach") and "report_" not in case[1]],
)
def test_an_error_in_a_hook_names_it_and_harms_nobody(scenes: Any, name: str, act: Callable[[Any], object]) -> None:
    """Whatever hook raises or calls a verb: the call raises `ExtensionError` with the names of the extension and of the
    hook, the ledger is whole, and it works as before once the extension does."""
    extension = misbehaving(name, act)
    if name == "ask_former_readers" or name == "ask_first_wrong":
        extension.ledger = None
    driven = scenes(extension)
    caught: list[ExtensionError] = []
    for scene in driven.scenes():
        try:
            scene()
        except ExtensionError as error:
            caught.append(error)
            # The call gave no answer, so nobody would launch the copies that it has planned.
            assert all(job.state is not JobState.QUEUED for job in driven.ledger.jobs.unsettled.values())
        driven.ledger.check_integrity()
        for job in [*driven.ledger.jobs.unsettled.values()]:
            if job.state.name == "LAUNCHED":  # its copy goes on
                with suppress(ExtensionError):
                    driven.driven.end(job.plan)
        clear(driven.ledger)
    assert extension.called == {name}
    assert caught, "the error was swallowed"
    for error in caught:
        assert (error.extension, error.hook) == ("Naughty", name)
        assert isinstance(error.__cause__, OopsError if act is raises else WrongState)
    extension.is_over = True
    driven.ledger.reset()
    driven.works()


@pytest.mark.parametrize("name", ["ask_admit", "ask_commit"])
def test_a_hook_that_may_refuse_passes_its_error_on(name: str) -> None:
    """`ask_admit` and `ask_commit` refuse a call by an error of the program's own: nothing has changed."""
    extension = misbehaving(name, raises)
    extension.is_over = True
    driven = Scenes(extension)
    request = driven.driven.running(A)
    before = driven.driven.picture()
    extension.is_over = False
    call: Any = {"ask_admit": lambda: driven.driven.admit(B), "ask_commit": lambda: driven.driven.commit(request)}[name]
    with pytest.raises(OopsError):
        call()
    assert driven.driven.picture() == before
    assert [*driven.ledger.live_requests.values()] == [request]


def test_an_answer_of_the_wrong_type_is_an_error_of_the_extension() -> None:
    """An answer that is no answer is named like an exception, and counts as no wish."""
    extension = misbehaving("ask_store_stop", lambda _: None)
    driven = Scenes(extension)
    NEUTRAL["ask_store_stop"] = "many"
    try:
        with pytest.raises(ExtensionError, match=r"Naughty\.ask_store_stop must not return 'many'"):
            driven.driven.serve(A)
    finally:
        NEUTRAL["ask_store_stop"] = 99
    driven.ledger.check_integrity()


@pytest.mark.parametrize("hook", ["report_leases", "report_requests", "report_blocks"])
@pytest.mark.parametrize("answer", [None, 5, "abc", [5], [None]], ids=repr)
def test_a_report_of_the_wrong_type_is_an_error_of_the_extension(hook: str, answer: object) -> None:
    """`check_integrity` names the extension, and the ledger goes on."""
    ledger = Scenes(type("Naughty", (LedgerExtension,), {hook: lambda *_: answer})()).ledger
    for _ in range(2):
        with pytest.raises(ExtensionError, match=rf"Naughty\.{hook} must not return "):
            ledger.check_integrity()
        assert ledger.lookup(Prefix.of(ROOT, A)).num_tokens == 0


def test_a_request_that_an_extension_refuses_is_not_counted() -> None:
    """A selective store policy counts the requests that are admitted: the program's own extensions are asked first."""

    class Refuses(LedgerExtension):
        is_on = True

        def ask_admit(self, request: object) -> None:
            if self.is_on:
                raise OopsError

    extension, driven = Refuses(), Driven(8)
    config = OffloadConfig(groups=driven.ledger.config.groups, num_host_blocks=16, store_policy="selective")
    driven.ledger = Ledger(config, 9, extensions=[extension])
    for _ in range(2):
        with pytest.raises(OopsError):
            driven.ledger.admit(Prefix.of(ROOT, A))
    extension.is_on = False
    assert not driven.commit(driven.running(A))


def test_a_refused_invalidation_asks_no_extension() -> None:
    """So the call after it does not raise the error of a hook."""
    extension = misbehaving("ask_former_readers", raises)
    driven = Scenes(extension).driven
    request = driven.running(A)
    with pytest.raises(CommitError, match="from_token"):
        driven.ledger.invalidation.invalidate(request, 10**6)
    driven.ledger.lapse(0.0)
    assert extension.called == set()


def test_commits_that_are_undone_leave_no_error() -> None:
    """One of several is refused, after a hook that was asked about another one failed: the next call is fine."""
    extension = misbehaving("ask_store_stop", raises)
    driven = Scenes(extension).driven
    first, second = driven.running(A), driven.running(B)
    with pytest.raises(CommitError):
        driven.ledger.commit_all([(first, 10, ()), (second, 10**6, ())])
    assert extension.called == {"ask_store_stop"}
    driven.ledger.lapse(0.0)


def test_a_waiter_that_was_not_handed_out_has_left_the_queue() -> None:
    """`queue_allocation` whose hook has failed hands out no waiter, so the request may try again."""
    extension = misbehaving("ask_blocks", raises)
    driven = Scenes(extension).driven
    driven.ledger.pins.hold(driven.prefix(A), expires_at=9.0)
    driven.serve(A)
    pin = driven.ledger.pins.hold(driven.prefix(A), expires_at=9.0)
    request = driven.ledger.admit(driven.prefix(prompt(7, 30)))
    with pytest.raises(ExtensionError, match="ask_blocks"):
        driven.ledger.queue_allocation(request)
    assert request.waiter is None and driven.ledger.num_waiting == 0
    driven.ledger.pins.release(pin)
    driven.ledger.allocate_nowait(request)


def test_a_request_that_was_not_handed_out_is_over() -> None:
    """`admit` whose hook has failed hands out no request, so it keeps none."""
    driven = Scenes(misbehaving("on_matched", raises))
    with pytest.raises(ExtensionError):
        driven.driven.admit(A)
    assert not driven.ledger.live_requests


class CapStores(LedgerExtension):
    def __init__(self, stop: int) -> None:
        self.stop = stop

    def ask_store_stop(self, request: Any) -> int:
        return self.stop


def test_the_lowest_store_stop_counts() -> None:
    """Of the store policy and several extensions, the one that stores least decides."""
    driven = Driven(8)
    driven.ledger = Ledger(driven.ledger.config, 9, extensions=[CapStores(2), CapStores(1), CapStores(9)])
    driven.on_host_only(A)
    assert driven.hit(A) == (0, 4)


def test_a_tier_has_one_eviction_order() -> None:
    """Two extensions that set the order of a tier are refused when the ledger is made, and so is an extension beside
    an order of the configuration."""

    class Orders(LedgerExtension):
        def on_build(self, build: Build) -> None:
            build.set_order(Tier.HOST, LeastRecentlyUsed)

    config = OffloadConfig(groups=[KVCacheGroup("full", block_size=BLOCK)], num_host_blocks=16)
    with pytest.raises(ConfigError, match="two of them set the eviction order of HOST"):
        Ledger(config, 9, extensions=[Orders(), Orders()])
    config = OffloadConfig(groups=config.groups, num_host_blocks=16, eviction=LeastRecentlyUsed)
    with pytest.raises(ConfigError, match="and so does `eviction`"):
        Ledger(config, 9, extensions=[Orders()])


@pytest.mark.parametrize("name", ["step", "commit_all"])
def test_a_verb_that_a_hook_calls_with_nothing_is_refused(name: str) -> None:
    """Its end would serve the wait queue in the middle of a change."""

    def calls(ledger: Any) -> None:
        found = getattr(ledger, name)(())
        if name == "step":
            found.__enter__()

    driven = Scenes(misbehaving("on_matched", calls)).driven
    with pytest.raises(ExtensionError, match="must not call the ledger"):
        driven.serve(A)


@pytest.mark.parametrize(
    ("handle", "key"),
    [("disk", "disk"), ("remote", "remote"), ("fetches", "disk"), ("eviction", "eviction")],
)
def test_a_handle_that_is_off_names_its_key(handle: str, key: str) -> None:
    """A feature that the configuration leaves out has no handle; the error names the key that turns it on."""
    for ledger in (Driven(8).ledger, EngineDriven().ledger):
        with pytest.raises(ConfigError) as caught:
            getattr(ledger, handle)
        assert caught.value.argument == key
    with pytest.raises(ConfigError, match="store_policy"):
        _ = Driven(8).ledger.write_back


def test_extensions_that_are_none_are_refused() -> None:
    """`extensions` names the argument, and says what belongs there."""
    config = OffloadConfig(groups=[KVCacheGroup("full", block_size=BLOCK)], num_host_blocks=16)
    for wrong in (None, 3, [object()], [LedgerExtension]):
        with pytest.raises(AoffloadError, match="extensions"):
            Ledger(config, 9, extensions=wrong)  # type: ignore[arg-type]


def no_order(build: Build) -> None:
    build.set_order(Tier.HOST, lambda: None)  # type: ignore[arg-type,return-value]


def order_of_no_tier(build: Build) -> None:
    build.set_order("host", LeastRecentlyUsed)  # type: ignore[arg-type]


def no_blocks(build: Build) -> None:
    build.add_tier(Tier.CUSTOM, -5, lambda order: TierBlocks(Tier.CUSTOM, ExtentPool(5), order))


def other_blocks(build: Build) -> None:
    build.add_tier(Tier.CUSTOM, 4, lambda order: TierBlocks(Tier.CUSTOM, ExtentPool(5), order))


def other_tier(build: Build) -> None:
    build.add_tier(Tier.CUSTOM, 5, lambda order: TierBlocks(Tier.DISK, ExtentPool(5), order))


def no_tier(build: Build) -> None:
    build.add_tier("custom", 5, lambda order: TierBlocks(Tier.CUSTOM, ExtentPool(5), order))  # type: ignore[arg-type]


def the_host_again(build: Build) -> None:
    build.add_tier(Tier.HOST, 5, lambda order: TierBlocks(Tier.HOST, ExtentPool(5), order))


def order_of_absent_tier(build: Build) -> None:
    build.set_order(Tier.DISK, LeastRecentlyUsed)


def order_of_unhashable_tier(build: Build) -> None:
    build.set_order([], LeastRecentlyUsed)  # type: ignore[arg-type]


def no_function(build: Build) -> None:
    build.when_sized(5)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "add",
    [
        no_order,
        order_of_no_tier,
        order_of_absent_tier,
        order_of_unhashable_tier,
        no_blocks,
        other_blocks,
        other_tier,
        no_tier,
        the_host_again,
        no_function,
    ],
)
def test_what_an_extension_builds_is_checked(add: Callable[[Build], None]) -> None:
    """A tier or an order that cannot work is refused when the ledger is made, by a typed error."""
    kind = type("Builds", (LedgerExtension,), {"on_build": lambda _, build: add(build)})
    config = OffloadConfig(groups=[KVCacheGroup("full", block_size=BLOCK)], num_host_blocks=16)
    with pytest.raises((ConfigError, InvalidArgument)):
        Ledger(config, 9, extensions=[kind()])


def test_a_misspelt_and_an_async_hook_are_refused() -> None:
    """A hook that would never be called, or never be awaited, is refused by name: a quota must not fail silently."""

    class Misspelt(LedgerExtension):
        def on_admit(self, request: Any) -> None:
            pass

    class Waits(LedgerExtension):
        async def ask_admit(self, request: Any) -> None:  # type: ignore[override]
            pass

    class Yields(LedgerExtension):
        async def on_matched(self, request: Any) -> AsyncIterator[None]:  # type: ignore[override]
            yield

    class Generates(LedgerExtension):
        def on_matched(self, request: Any) -> Iterator[None]:  # type: ignore[override]
            yield

    config = OffloadConfig(groups=[KVCacheGroup("full", block_size=BLOCK)], num_host_blocks=16)
    with pytest.raises(InvalidArgument, match=r"extensions: Misspelt\.on_admit is not a hook"):
        Ledger(config, 9, extensions=[Misspelt()])
    with pytest.raises(InvalidArgument, match=r"extensions: Waits\.ask_admit is async"):
        Ledger(config, 9, extensions=[Waits()])
    with pytest.raises(InvalidArgument, match=r"extensions: Yields\.on_matched is async"):
        Ledger(config, 9, extensions=[Yields()])
    with pytest.raises(InvalidArgument, match=r"extensions: Generates\.on_matched is a generator"):
        Ledger(config, 9, extensions=[Generates()])


def test_a_frozen_extension_works() -> None:
    """An extension without state may be frozen."""

    @dataclass(frozen=True)
    class StoresNothing(LedgerExtension):
        def ask_store_stop(self, request: Any) -> int:
            return 0

    driven = Driven(9)
    driven.ledger = Ledger(driven.ledger.config, 9, extensions=[StoresNothing()])
    driven.serve(A)
    assert driven.ledger.statistics().host.num_cached == 0


@pytest.mark.parametrize("num_more", [0, 1])
def test_a_reset_whose_factory_of_orders_fails_changes_nothing(num_more: int) -> None:
    """The orders are made before the first change: a factory that raises, or returns the same order again, is named."""
    left = iter(range(100))

    def factory() -> LeastRecentlyUsed:
        if next(left, None) is None:
            raise OopsError
        return LeastRecentlyUsed()

    driven = Driven(9, eviction=factory)
    driven.serve(A)
    before, left = driven.picture(), iter(range(num_more))
    with pytest.raises(ConfigError, match="eviction"):
        driven.ledger.reset()
    driven.ledger.check_integrity()
    assert driven.picture() == before
    one = LeastRecentlyUsed()
    with pytest.raises(ConfigError, match="the same order"):
        Driven(9, eviction=lambda: one)


def test_an_extension_belongs_to_one_ledger() -> None:
    """One instance in two ledgers, or twice in one, is refused: its state is about one ledger."""
    config = OffloadConfig(groups=[KVCacheGroup("full", block_size=BLOCK)], num_host_blocks=16)
    extension = CapStores(1)
    with pytest.raises(InvalidArgument, match="extensions: has one CapStores twice"):
        Ledger(config, 9, extensions=[extension, extension])
    Ledger(config, 9, extensions=[extension])
    with pytest.raises(InvalidArgument, match="extensions: has a CapStores that belongs to another ledger"):
        Ledger(config, 9, extensions=[extension])


@pytest.mark.parametrize("answer", [None, 5, [None], [object()]])
def test_an_invalidation_is_complete_whatever_a_hook_answers(answer: object) -> None:
    """The error has the readers, so the caller can abort them."""
    driven = Scenes(misbehaving("on_invalidated", lambda _: None)).driven
    first = driven.running(A)
    driven.commit(first)
    second = driven.running(A)
    NEUTRAL["on_invalidated"] = answer
    try:
        with pytest.raises(ExtensionError) as caught:
            driven.ledger.invalidation.invalidate(first, BLOCK)
    finally:
        NEUTRAL["on_invalidated"] = []
    assert caught.value.readers == (second,)
    driven.ledger.check_integrity()


def test_jobs_that_are_not_queued_are_not_discarded() -> None:
    """`on_invalidated` may name a job that runs, or one twice: only a queued job is discarded, and once."""
    jobs: list[Job] = []

    class Names(LedgerExtension):
        def on_invalidated(self, sequence: Any, first: int, stop: int) -> list[Job]:
            return [*jobs, *jobs]

    driven = Driven(8)
    driven.ledger = Ledger(driven.ledger.config, 9, extensions=[Names()])
    request, other = driven.running(A), driven.running(B)
    running, queued = driven.commit(request), driven.commit(other)
    jobs += driven.ledger.jobs.unsettled.values()
    driven.launch(running)
    driven.ledger.invalidation.invalidate(request, BLOCK)
    assert not driven.launch(queued)
    for plan in running:
        driven.end(plan)
    assert not driven.ledger.jobs.unsettled


def test_an_error_of_next_lapse_is_its_own() -> None:
    """`next_lapse` raises the error of `ask_next_lapse` itself: no later call gets it."""
    driven = Scenes(misbehaving("ask_next_lapse", raises)).driven
    with pytest.raises(ExtensionError, match="ask_next_lapse"):
        _ = driven.ledger.next_lapse
    driven.serve(A)


def test_a_plain_ledger_has_no_hooks() -> None:
    """An extension that is off is not made: no hook of a plain ledger has a listener."""
    ledger = Driven(8).ledger
    assert {name for name in HOOKS if getattr(ledger.hooks, name, ())} == set()


def test_what_an_extension_does_in_its_hooks_is_accounted_for() -> None:
    """Leases and blocks that an extension holds and reports belong to it: everything is free after it lets go."""
    acting = RandomExtension(7)
    driven = Driven(8)
    driven.ledger = Ledger(driven.ledger.config, 9, extensions=[acting])
    for name in range(20):
        with suppress(AoffloadError):
            driven.serve(prompt(name % 5, 10))
        clear(driven.ledger)
    assert acting.num_acts
    acting.is_over = True
    acting.return_all()
    driven.ledger.check_integrity()
    assert driven.num_pinned() == (0, 0)


def test_the_quota_of_the_example_holds_with_stores_in_flight() -> None:
    """examples/store_quota.py: no salt has more blocks than its quota, those that stores are bringing included."""
    quota = runpy.run_path(str(Path(__file__).parents[2] / "examples/store_quota.py"))["StoreQuota"](4)
    rng, driven, in_flight, most = random.Random(5), Driven(12), list[TransferPlan](), Counter[object]()
    driven.ledger = Ledger(driven.ledger.config, 13, extensions=[quota])
    for _ in range(300):
        request = driven.running(prompt(rng.randrange(6), rng.choice((6, 10, 14))), root=Root("test", rng.choice("ab")))
        in_flight += driven.launch([*driven.commit(request), *driven.release(request)])
        held = Counter(quota.num_blocks)
        for job in driven.ledger.jobs.unsettled.values():
            held[job.run.root.cache_salt] += len(job.plan.destination_ids)
        assert max(held.values(), default=0) <= 4
        most |= held
        while in_flight and rng.random() < 0.6:
            driven.end(in_flight.pop(0))
        if rng.random() < 0.02:
            driven.ledger.reset(Tier.HOST)
    assert most == {"a": 4, "b": 4}


@pytest.mark.parametrize("layout", ["full", "window"])
def test_the_eviction_order_of_the_example_keeps_prefixes_longest(layout: str) -> None:
    """examples/eviction_order.py: whatever overlaps, ends, is stored, reset and evicted, no block of full attention is
    evicted before a block that follows it."""
    order = runpy.run_path(str(Path(__file__).parents[2] / "examples/eviction_order.py"))["AgainLast"]
    groups = [KVCacheGroup("full", block_size=BLOCK)]
    if layout == "window":
        groups.append(KVCacheGroup("window", SlidingWindow(9), block_size=BLOCK))
    rng, driven, live = random.Random(3), Driven(60, 40, groups=groups, eviction=lambda: order(20)), list[Any]()
    most = Counter[int]()
    for _ in range(400):
        live.append(driven.running(prompt(rng.randrange(3), 9) + prompt(rng.randrange(9), rng.randrange(20))))
        driven.land(driven.commit(live[-1]))
        while len(live) > rng.randrange(2, 5):  # some live long
            driven.land(driven.release(live.pop(-1 if rng.random() < 0.9 else 0)))
        if rng.random() < 0.01:
            driven.ledger.reset(rng.choice((Tier.HOST, None)))
        for tier in driven.ledger.cache.tiers:
            parts = [part for part in tier.order if not part.component]
            at = {part: number for number, part in enumerate(parts)}
            for part in parts:
                before = part.run.before and part.run.before.part(part.tier, 0)
                assert before not in at or at[before] > at[part]
            most |= Counter(part.rank for part in parts)
    assert most[1] > 5 and most[2] > 5


class Fails(LeastRecentlyUsed):
    """Fails at call number `at` of the method `named`, in the way `how`."""

    def __init__(self, named: str, at: int, how: Callable[[], object]) -> None:
        super().__init__()
        self._named, self._left, self._how = named, at, how

    def _or_fail(self, name: str, *parts: Any) -> Any:
        self._left -= name == self._named
        if name == self._named and not self._left:
            return self._how()
        return getattr(LeastRecentlyUsed, name)(self, *parts)

    def add(self, part: Part) -> None:
        self._or_fail("add", part)

    def add_newer(self, part: Part, than: Part) -> None:
        self._or_fail("add_newer", part, than)

    def add_back(self, part: Part) -> None:
        self._or_fail("add_back", part)

    def remove(self, part: Part) -> None:
        self._or_fail("remove", part)

    def oldest(self) -> Any:
        return self._or_fail("oldest")

    def are_adjacent(self, older: Part, newer: Part) -> bool:
        return bool(self._or_fail("are_adjacent", older, newer))

    def __iter__(self) -> Iterator[Part]:
        return iter(self._or_fail("__iter__"))


def oops() -> object:
    raise OopsError


@pytest.mark.pure("derives an order from a class of the core")
@pytest.mark.parametrize("at", [1, 3])
@pytest.mark.parametrize(
    ("named", "how"),
    [
        *[(name, oops) for name in ("add", "add_newer", "add_back", "remove", "oldest", "are_adjacent", "__iter__")],
        ("oldest", lambda: None),
        ("oldest", lambda: 5),
    ],
)
def test_an_eviction_order_that_fails_is_not_used_any_more(named: str, at: int, how: Callable[[], object]) -> None:
    """Nothing is lost: the call is completed, and says which method has failed; all requests are served, in the order
    in which their blocks were released."""
    driven, errors = Driven(12, 20, eviction=lambda: Fails(named, at, how), store_policy="lazy"), list[str]()
    rng = random.Random(1)
    for _ in range(60):
        tokens = [*prompt(rng.randrange(2), 8), *prompt(2 + rng.randrange(3), rng.choice((4, 12)))]
        for call in (lambda: driven.serve(tokens), lambda: driven.land(write_back(driven.ledger))):  # noqa: B023
            try:
                call()
            except ExtensionError as error:
                errors.append(error.hook)
                for request in tuple(driven.ledger.live_requests.values()):
                    driven.ledger.release(request)
            driven.ledger.check_integrity()
    assert set(errors) == {named}
    waiting = driven.admit(prompt(9, 44))
    driven.ledger.allocate_nowait(waiting)
    assert driven.release(waiting) is not None and driven.ledger.statistics().device.num_pinned == 0


@pytest.mark.pure("derives an order from a class of the core")
def test_an_eviction_order_that_fails_makes_nobody_wait() -> None:
    """The waiters of a call in which an order fails get their blocks."""
    order: list[Fails] = []

    def factory() -> Fails:
        order.append(Fails("oldest", 1, oops))
        return order[-1]

    driven, woken = Driven(8, 0, eviction=factory), list[int]()
    first = driven.running(prompt(1, 32))
    driven.commit(first)
    waiters = [
        driven.ledger.queue_allocation(driven.admit(prompt(number, 16)), wake=partial(woken.append, number))
        for number in (2, 3)
    ]
    with pytest.raises(ExtensionError, match=r"Fails\.oldest has raised OopsError"):
        driven.ledger.release(first)
    assert woken == [2, 3] and all(waiter.granted is not None for waiter in waiters)
    driven.ledger.check_integrity()


@pytest.mark.pure("derives an order from a class of the core")
@pytest.mark.parametrize("error", [KeyboardInterrupt, GeneratorExit, OopsError])
@pytest.mark.parametrize("calls", [False, True])
def test_an_order_whose_iteration_fails_harms_no_reset(error: type[BaseException], calls: bool) -> None:
    """A reset is completed, whatever the order raises while it yields its parts, and the order calls no verb then."""
    ledgers: list[Ledger] = []

    class Yields(LeastRecentlyUsed):
        def __iter__(self) -> Iterator[Part]:
            for part in super().__iter__():
                yield part
                if ledgers and calls:
                    ledgers[0].reset()
                if ledgers:
                    raise error

    driven = Driven(12, eviction=Yields)
    for number in range(3):
        driven.serve(prompt(number, 8))
    ledgers.append(driven.ledger)
    with pytest.raises(ExtensionError, match=r"Yields\.__iter__ has raised") as caught:
        driven.ledger.reset()
    assert isinstance(caught.value.__cause__, WrongState if calls else error)
    driven.ledger.check_integrity()
    assert driven.ledger.statistics().host.num_free == 16


@pytest.mark.pure("derives an order from a class of the core")
def test_the_call_in_which_an_order_fails_raises() -> None:
    """No later call raises the error: `extend_nowait` and `check_integrity` raise their own."""
    driven = Driven(8, 0, eviction=lambda: Fails("oldest", 1, oops))
    driven.release(driven.running(prompt(1, 4)))
    request = driven.running(prompt(1, 16))
    driven.commit(request)
    driven.release(request)
    request = driven.running(prompt(2, 16))
    with pytest.raises(ExtensionError, match=r"Fails\.oldest"):
        driven.ledger.extend_nowait(request, 32)
    driven.admit(A)
    driven = Driven(8, 0, eviction=lambda: Fails("__iter__", 1, oops))
    with pytest.raises(ExtensionError, match=r"Fails\.__iter__"):
        driven.ledger.check_integrity()
    driven.ledger.check_integrity()
