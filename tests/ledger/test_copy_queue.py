"""The copy queue alone: with a ledger, a scripted transport, and a clock that the test sets."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from typing import Any

import attrs
import pytest

from aoffload import (
    DiskTier,
    IntegrityError,
    InvalidArgument,
    KVCacheGroup,
    Ledger,
    OffloadConfig,
    RequestState,
    Tier,
)
from aoffload.ledger import (
    CacheTurnedOff,
    Completion,
    CopyQueue,
    Event,
    JobMoved,
    LedgerRequest,
    Outcome,
    Prefix,
    Root,
    TransferPlan,
    TransportRecovered,
    TransportStalled,
    WorkerFailed,
)
from aoffload.transport import DeviceGone, Fence, TransferRefused

BLOCK, BLOCK_BYTES = 4, 100


@attrs.define(eq=False)
class Copies:
    """Keeps what is launched; `raises` is what the next launch raises."""

    launched: list[TransferPlan] = attrs.field(factory=list)
    raises: Exception | None = None

    def launch(self, plan: TransferPlan, after: Fence | None) -> None:
        if self.raises is not None:
            error, self.raises = self.raises, None
            raise error
        self.launched.append(plan)

    def directions(self) -> str:
        return " ".join(plan.direction.value for plan in self.launched)


@attrs.define(eq=False)
class QueueEvents:
    events: list[str] = attrs.field(factory=list)

    def observe(self, event: Event) -> None:
        match event:
            case TransportStalled(source, destination, num_jobs):
                self.events.append(f"{source.name} to {destination.name}: {num_jobs} late")
            case TransportRecovered(source, destination):
                self.events.append(f"{source.name} to {destination.name}: again")
            case WorkerFailed(error):
                self.events.append(f"bug: {error}")
            case CacheTurnedOff(reason):
                self.events.append(f"off: {reason}")


class Loop:
    """A ledger with its queue; `now` is the time."""

    def __init__(self, **options: Any) -> None:
        options = {"max_job_bytes": 2 * BLOCK_BYTES, "transfer_timeout_s": 10, **options}
        config = OffloadConfig(groups=[KVCacheGroup("full", block_size=BLOCK)], num_host_blocks=40, **options)
        self.ledger, self.copies, self.observer, self.now = (
            Ledger(config, 40, block_bytes=BLOCK_BYTES),
            Copies(),
            QueueEvents(),
            0.0,
        )
        self.queue = CopyQueue(
            self.ledger, self.copies, config, clock=lambda: self.now, block_bytes=BLOCK_BYTES, observer=self.observer
        )

    def store(self, seed: int, num_blocks: int = 2) -> None:
        """A request that computes its prompt and ends; its blocks are to be stored."""
        request = self.ledger.admit(prompt(seed, num_blocks))
        self.ledger.allocate_nowait(request)
        self.queue.submit(self.ledger.plan_load(request))
        self.queue.submit(self.ledger.commit(request, num_blocks * BLOCK + 1))
        self.queue.submit(self.ledger.release(request))

    def load(self, seed: int, num_blocks: int = 2) -> LedgerRequest:
        """A request whose prompt the host holds."""
        request = self.ledger.admit(prompt(seed, num_blocks))
        assert request.match.num_host_tokens == num_blocks * BLOCK
        self.ledger.allocate_nowait(request)
        self.queue.submit(self.ledger.plan_load(request))
        return request

    def host(self, *seeds: int) -> None:
        """Store these prompts and drop them from the device."""
        for seed in seeds:
            self.store(seed)
            self.land()
        self.ledger.reset(Tier.DEVICE)
        self.copies.launched.clear()

    def land(self, *job_ids: int, outcome: Outcome = Outcome.LANDED) -> None:
        """Report these jobs, by default all that are launched."""
        for plan in self.copies.launched:
            if not job_ids or plan.job_id in job_ids:
                num_landed = plan.num_blocks if outcome is Outcome.LANDED else 0
                self.queue.deliver(Completion(plan.job_id, outcome, num_landed))
        self.queue.advance()

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.queue.advance()


def prompt(seed: int, num_blocks: int) -> Prefix:
    first = seed * 1000
    return Prefix.of(Root("toy"), range(first, first + num_blocks * BLOCK + 1))


def test_each_hop_has_bounds_of_its_own() -> None:
    """Stores that fill their bound leave all of the loads' bound to loads; what did not fit follows as room comes."""
    loop = Loop(max_jobs_in_flight=1)
    loop.host(1, 2)
    loop.store(3)
    loop.store(4)
    loads = [loop.load(1), loop.load(2)]
    assert loop.copies.directions() == "store load"
    assert repr(loop.queue) == "<CopyQueue on, 2 queued, 2 in flight>"
    loop.land()
    assert loop.copies.directions() == "store load load store"  # of what may go now, loads first
    loop.land()
    assert [request.state for request in loads] == [RequestState.RUNNING] * 2
    assert (loop.queue.num_in_flight, loop.queue.num_bytes_in_flight, loop.queue.oldest_job) == (0, 0, math.inf)


def test_bytes_are_bounded_and_a_larger_job_goes_alone() -> None:
    """At most `max_bytes_in_flight` of a link; one job that is larger is not kept for ever."""
    loop = Loop(max_bytes_in_flight=2 * BLOCK_BYTES, max_jobs_in_flight=9)
    loop.store(1)
    loop.store(2)
    assert loop.queue.num_bytes_in_flight == 2 * BLOCK_BYTES
    small = Loop(max_bytes_in_flight=1)
    small.store(1, num_blocks=1)
    assert small.queue.num_bytes_in_flight == BLOCK_BYTES


def test_a_late_copy_is_given_up_and_nothing_is_launched_behind_it() -> None:
    """After its time, by the clock given: its load is a miss, its destination is quarantined, later loads are misses at
    once, stores go on; its late report ends all that."""
    loop = Loop()
    loop.host(1, 2)
    late = loop.load(1)
    (plan,) = loop.copies.launched
    assert loop.queue.next_deadline == 10
    loop.pass_time(9.9)
    assert late.state is RequestState.LOADING
    loop.pass_time(0.2)
    assert (late.state, late.num_computed_tokens) == (RequestState.RUNNING, 0)
    assert loop.ledger.statistics().device.num_quarantined == 2
    assert loop.queue.overdue == {plan.job_id}
    refused = loop.load(2)
    assert (refused.state, refused.num_computed_tokens) == (RequestState.RUNNING, 0)
    loop.store(3)
    assert loop.copies.directions() == "load store"
    loop.land()
    assert loop.observer.events == ["HOST to DEVICE: 1 late", "HOST to DEVICE: again"]
    assert loop.ledger.statistics().device.num_quarantined == 0
    loop.ledger.release(refused)
    loop.ledger.reset(Tier.DEVICE)
    loop.load(2)
    assert loop.copies.directions() == "load store load"


def test_stores_have_a_time_of_their_own() -> None:
    """A store that hangs is given up after `store_timeout_s`: a load that was launched before it still has time."""
    loop = Loop(store_timeout_s=1)
    loop.host(1)
    loading = loop.load(1)
    loop.store(2)
    assert loop.queue.next_deadline == 1
    loop.pass_time(1)
    assert loop.observer.events == ["DEVICE to HOST: 1 late"]
    assert loop.ledger.statistics().host.num_quarantined == 2
    assert (loading.state, loop.queue.next_deadline) == (RequestState.LOADING, 10)


def test_a_store_that_hangs_lets_go_of_its_blocks_early() -> None:
    """Where no time of its own is set, after ten seconds: a rank that was stopped keeps the device from nobody for the
    two minutes that a copy may take."""
    loop = Loop(transfer_timeout_s=120)
    loop.store(2)
    num_pinned = loop.ledger.statistics().device.num_pinned
    loop.pass_time(10)
    assert (num_pinned, loop.ledger.statistics().device.num_pinned) == (2, 0)
    assert loop.observer.events == ["DEVICE to HOST: 1 late"]
    assert (Loop(transfer_timeout_s=3).queue.config.store_bound_s, loop.queue.config.store_bound_s) == (3, 10)


def test_what_was_delivered_in_time_is_not_late() -> None:
    """A report that waits to be settled counts, however late `advance` is called."""
    loop = Loop()
    loop.host(1)
    loading = loop.load(1)
    loop.queue.deliver(Completion(loop.copies.launched[0].job_id, Outcome.LANDED, 2))
    loop.pass_time(1000)
    assert (loading.num_computed_tokens, loop.observer.events) == (2 * BLOCK, [])


@pytest.mark.parametrize("error", [TransferRefused("full"), OSError("a driver's error")])
def test_a_launch_that_raises(error: Exception) -> None:
    """What was refused frees its destination; what nobody knows of is quarantined. The engine goes on."""
    loop = Loop()
    loop.host(1)
    loop.copies.raises = error
    loading = loop.load(1)
    loop.queue.advance()
    assert (loading.state, loading.num_computed_tokens) == (RequestState.RUNNING, 0)
    assert loop.ledger.statistics().device.num_quarantined == (0 if isinstance(error, TransferRefused) else 2)
    assert loop.queue.is_accepting


def test_a_lost_device_and_a_bug_turn_the_cache_off() -> None:
    """Once, with the reason; what is planned afterwards is discarded, and requests compute."""
    lost, broken = Loop(), Loop()
    lost.host(1)
    lost.copies.raises = DeviceGone("the device fell off the bus")
    lost.load(1)
    lost.queue.advance()
    assert lost.observer.events == ["off: the device fell off the bus"]
    broken.store(1)

    def settle(completion: Completion) -> None:
        raise IntegrityError("planted")

    broken.ledger.settle = settle  # type: ignore[method-assign]
    broken.land()
    assert broken.observer.events == ["bug: planted", "off: the ledger failed"]
    for loop in (lost, broken):
        num_launched = len(loop.copies.launched)
        loop.store(9)
        assert len(loop.copies.launched) == num_launched
        assert not loop.queue.is_accepting and loop.queue.off_reason in loop.observer.events[-1]


def test_stopping_settles_what_has_ended_and_quarantines_the_rest() -> None:
    """Nothing queued is launched; what has been delivered counts; only what is in doubt is lost."""
    loop = Loop(max_jobs_in_flight=2)
    for seed in (1, 2, 3):
        loop.store(seed)
    first, second = loop.copies.launched
    loop.queue.deliver(Completion(first.job_id, Outcome.LANDED, 2))
    loop.queue.stop("the end")
    assert loop.copies.directions() == "store store"
    host = loop.ledger.statistics().host
    assert (host.num_cached, host.num_quarantined, loop.ledger.statistics().num_jobs) == (2, 2, 0)
    assert loop.queue.overdue == {second.job_id}
    loop.ledger.check_integrity()


def test_a_report_wakes_in_its_own_thread_and_pins_lapse_by_the_same_clock() -> None:
    """`wake` is what a loop sleeps by, together with `next_deadline`, which counts pins, too."""
    loop, woken = Loop(), list[int]()
    loop.queue.wake = lambda: woken.append(threading.get_ident())
    loop.host(1)
    pin = loop.ledger.pins.hold(prompt(1, 2), expires_at=3)
    assert loop.queue.next_deadline == 3
    before = len(woken)
    thread = threading.Thread(target=loop.queue.deliver, args=(Completion(99, Outcome.LANDED),))
    thread.start()
    thread.join()
    assert woken[before:] == [thread.ident]
    loop.pass_time(3)
    assert pin.has_lapsed and loop.queue.next_deadline == math.inf


@pytest.mark.parametrize(
    ("field", "value"),
    [("num_landed", -1), ("num_landed", 4.0), ("outcome", "landed"), ("corrupt", None), ("error", 5)],
)
def test_a_report_that_is_none_is_refused_at_the_door(field: str, value: object) -> None:
    """By name, to the transport that made it; its job is given up in its time, and nothing is lost for ever."""
    loop = Loop()
    loop.host(1)
    loading = loop.load(1)
    (plan,) = loop.copies.launched
    wrong: dict[str, Any] = {"num_landed": 2, field: value}
    with pytest.raises(InvalidArgument, match=field):
        loop.queue.deliver(Completion(plan.job_id, **{"outcome": Outcome.LANDED, **wrong}))
    loop.pass_time(10)
    assert (loading.state, loading.num_computed_tokens) == (RequestState.RUNNING, 0)
    assert loop.ledger.statistics().device.num_quarantined == 2 and loop.queue.is_accepting
    loop.land()
    assert loop.ledger.statistics().device.num_quarantined == 0


def test_a_report_of_a_job_that_was_never_launched_says_nothing() -> None:
    """A transport that mistakes one job for another turns nothing off; the job itself is launched in its turn."""
    loop = Loop(max_jobs_in_flight=1)
    loop.store(1)
    loop.store(2)
    (first,) = loop.copies.launched
    loop.queue.deliver(Completion(first.job_id + 1, Outcome.LANDED, 2))
    loop.queue.advance()
    assert loop.queue.is_accepting and loop.observer.events == []
    loop.land()
    loop.land()
    assert loop.ledger.statistics().host.num_cached == 4


def test_whoever_is_woken_may_advance_the_queue() -> None:
    """Two loads are late. The wake of the first settles the second, which has landed: it is not overdue as well."""
    loop = Loop()
    loop.host(1, 2)
    first, second = loop.ledger.admit(prompt(1, 2)), loop.ledger.admit(prompt(2, 2))
    for request in (first, second):
        loop.ledger.allocate_nowait(request)

    def woken() -> None:
        loop.queue.deliver(Completion(loop.copies.launched[1].job_id, Outcome.LANDED, 2))
        loop.queue.advance()

    loop.queue.submit(loop.ledger.plan_load(first, wake=woken))
    loop.queue.submit(loop.ledger.plan_load(second))
    loop.pass_time(10)
    assert (first.num_computed_tokens, second.num_computed_tokens) == (0, 2 * BLOCK)
    assert loop.queue.overdue == {loop.copies.launched[0].job_id}
    loop.land(loop.copies.launched[0].job_id)
    assert loop.queue.overdue == frozenset()


def test_a_device_that_cannot_be_asked_ends_nothing() -> None:
    """After a failed copy the device is asked whether it is lost; whatever that raises, the loop goes on."""
    loop = Loop()

    class Unanswering(Copies):
        def record_fence(self) -> Fence:
            raise ZeroDivisionError

    loop.queue.transport = loop.copies = Unanswering()
    loop.store(1)
    loop.land(outcome=Outcome.FAILED)
    assert loop.queue.is_accepting and loop.ledger.statistics().num_jobs == 0


WRONG = {
    "ledger": object(), "transport": object(), "config": {}, "clock": 1.0, "block_bytes": 0, "observer": object(),
    "wake": 1, "ended": "now",
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments_are_named(name: str) -> None:
    """A queue that could not work is not made."""
    loop = Loop()
    right: dict[str, Any] = {
        "ledger": loop.ledger, "transport": loop.copies, "config": loop.ledger.config, "clock": lambda: 0.0,
        "block_bytes": 1,
    }  # fmt: skip
    with pytest.raises(InvalidArgument) as caught:
        CopyQueue(**right | {name: WRONG[name]})
    assert caught.value.argument == name


@pytest.mark.parametrize("how", ["its time is over", "the queue stops", "it cannot be proven"])
def test_a_transport_hears_of_what_is_given_up_before_its_source_is_released(how: str) -> None:
    """Else somebody could write there before the transport knows that what it reads no longer counts."""
    loop = Loop()
    heard: list[tuple[int, bool]] = []

    class Hearing(Copies):
        def give_up(self, job_id: int) -> None:
            heard.append((job_id, job_id in loop.ledger.jobs.unsettled))

    copies = Hearing()
    loop.queue = CopyQueue(
        loop.ledger, copies, loop.ledger.config, clock=lambda: loop.now, block_bytes=BLOCK_BYTES, observer=loop.observer
    )
    loop.store(1)
    (plan,) = copies.launched
    if how == "its time is over":
        loop.now = 11.0
        loop.queue.advance()
    elif how == "the queue stops":
        loop.queue.stop("enough")
    else:
        loop.queue.deliver(Completion(plan.job_id, Outcome.UNPROVEN))
        loop.queue.advance()
    assert heard == [(plan.job_id, True)]
    assert not loop.ledger.jobs.unsettled and not loop.observer.events[1:]


def test_nothing_of_an_observers_goes_through() -> None:
    """A queue tells of a stall in the middle of giving up copies: all of them are given up, whatever is raised."""
    loop = Loop()

    class Raises:
        num_notified = 0

        def observe(self, event: Event) -> None:
            self.num_notified += 1
            raise GeneratorExit

    raises = Raises()
    loop.queue = CopyQueue(
        loop.ledger, loop.copies, loop.ledger.config, clock=lambda: loop.now, block_bytes=BLOCK_BYTES, observer=raises
    )
    loop.store(1)
    (plan,) = loop.copies.launched
    loop.now = 11.0
    loop.queue.advance()
    assert loop.queue.overdue == {plan.job_id} and not loop.ledger.jobs.unsettled
    loop.queue.deliver(Completion(plan.job_id, Outcome.FAILED))
    loop.queue.advance()
    assert not loop.queue.overdue
    loop.queue.turn_off("enough")
    assert raises.num_notified == 3 and loop.queue.off_reason == "enough"


CALLS: dict[str, Callable[[CopyQueue, Any], object]] = {
    "submit": lambda queue, job: queue.submit([job.plan]),
    "refuse": lambda queue, job: queue.refuse([job.plan]),
    "advance": lambda queue, _: queue.advance(),
    "settle_delivered": lambda queue, _: queue.settle_delivered(),
    "settle_now": lambda queue, _: queue.settle_now(),
    "give_up_late": lambda queue, _: queue.give_up_late(),
    "give_up": lambda queue, job: queue.give_up([job.job_id], "mine"),
    "turn_off": lambda queue, _: queue.turn_off("mine"),
    "discard_queued": lambda queue, _: queue.discard_queued(),
    "stop": lambda queue, _: queue.stop("mine"),
}


@pytest.mark.parametrize("name", CALLS)
def test_an_observer_of_the_ledger_may_drive_the_queue(name: str) -> None:
    """The ledger reports after its change, so a call of the queue finds nothing half done: every copy that was launched
    is settled once, and no job is left."""
    loop = Loop(max_jobs_in_flight=2)
    num_calls = 0

    class Calls:
        def observe(self, event: Event) -> None:
            nonlocal num_calls
            if isinstance(event, JobMoved):
                num_calls += 1
                CALLS[name](loop.queue, event.job)

    loop.ledger = Ledger(loop.ledger.config, 40, block_bytes=BLOCK_BYTES, observer=Calls())
    loop.queue = CopyQueue(
        loop.ledger, loop.copies, loop.ledger.config, clock=lambda: loop.now, block_bytes=BLOCK_BYTES, in_steps=False
    )
    for seed in range(4):
        loop.store(seed)
    for _ in range(3):
        loop.now += 4.0
        loop.land()
    loop.land()
    launched = [plan.job_id for plan in loop.copies.launched]
    assert num_calls and len(launched) == len(set(launched)) <= 4
    loop.queue.stop("the test is over")
    assert not loop.ledger.jobs.unsettled
    loop.ledger.check_integrity()


def test_a_late_copy_without_a_proof_keeps_its_hop_stopped() -> None:
    """A report that the end of a copy is unknown is no end: the copy may still be moving bytes. A proof that comes
    after such a report lets the link go on."""
    loop = Loop()
    loop.store(1)
    (plan,) = loop.copies.launched
    loop.now = 11.0
    loop.queue.advance()
    for _ in range(2):
        loop.queue.deliver(Completion(plan.job_id, Outcome.UNPROVEN))
        loop.queue.advance()
        assert loop.queue.is_stalled(plan.source, plan.destination)
        assert loop.ledger.statistics().host.num_quarantined == 2
    loop.queue.deliver(Completion(plan.job_id, Outcome.FAILED))
    loop.queue.advance()
    assert not loop.queue.is_stalled(plan.source, plan.destination)
    assert loop.ledger.statistics().host.num_quarantined == 0


class AtOnce(Copies):
    """Copies inside `launch`, and counts the turns that it is told of."""

    def __init__(self, loop: Loop) -> None:
        super().__init__()
        self.loop, self.num_turns = loop, 0
        self.num_settled_inside = 0

    def begin_turn(self) -> None:
        self.num_turns += 1

    def launch(self, plan: TransferPlan, after: Fence | None) -> None:
        super().launch(plan, after)
        self.loop.queue.deliver(Completion(plan.job_id, Outcome.LANDED, plan.num_blocks))
        self.num_settled_inside += plan.job_id not in self.loop.ledger.jobs.unsettled


def at_once(**options: Any) -> tuple[Loop, AtOnce]:
    loop = Loop(**options)
    copies = loop.copies = AtOnce(loop)
    loop.queue = CopyQueue(
        loop.ledger, copies, loop.queue.config, clock=lambda: loop.now, block_bytes=BLOCK_BYTES, observer=loop.observer
    )
    return loop, copies


def test_what_is_copied_at_once_is_settled_in_the_next_turn() -> None:
    """Nothing is settled inside the call that launches a copy, so a request does not change while it launches one."""
    loop, copies = at_once()
    loop.store(1)
    assert len(copies.launched) == 1 and not copies.num_settled_inside
    assert list(loop.ledger.jobs.unsettled), "settled inside the call that launched it"
    loop.queue.advance()
    assert not loop.ledger.jobs.unsettled
    assert copies.num_turns == 2, "one at the start, and one for each time that completions were settled"


def test_what_is_copied_at_once_may_be_settled_in_its_turn() -> None:
    """`settle_now` settles copies that `launch` has made, and launches waiting jobs. No new turn begins, so the bytes
    of such copies still count. It returns whether it settled anything."""
    loop, copies = at_once(max_jobs_in_flight=1)
    assert not loop.queue.settle_now()
    loop.store(1)
    assert loop.queue.settle_now()
    assert not loop.ledger.jobs.unsettled and not copies.num_settled_inside
    assert copies.num_turns == 1, "the one at the start"


def test_finished_copies_do_not_count_against_max_jobs() -> None:
    """`max_jobs_in_flight` bounds copies that run. A finished copy that waits to be settled is not counted."""
    loop, copies = at_once(max_jobs_in_flight=1)
    for seed in range(3):
        loop.store(seed)
    assert len(copies.launched) == 3
    assert loop.queue.num_in_flight == 3
    loop.queue.advance()
    assert loop.queue.num_in_flight == 0 and not loop.ledger.jobs.unsettled


def test_a_launch_that_is_interrupted_has_an_end() -> None:
    """The handler of a signal may raise in the middle of it: it is heard of, and the job is not in flight for ever."""

    class Interrupted(Copies):
        def launch(self, plan: TransferPlan, after: Fence | None) -> None:
            raise KeyboardInterrupt

    loop = Loop()
    copies = Interrupted()
    loop.queue = CopyQueue(
        loop.ledger, copies, loop.queue.config, clock=lambda: loop.now, block_bytes=BLOCK_BYTES, observer=loop.observer
    )
    with pytest.raises(KeyboardInterrupt):
        loop.store(1)
    loop.queue.advance()
    assert not loop.queue.num_in_flight and not loop.ledger.jobs.unsettled


class Linked(Copies):
    """A transport that reports the rate of its link."""

    link_bytes_per_s = 0.0


@pytest.mark.parametrize(
    ("link", "options", "bounds"),
    [
        (0.0, {}, (128 * 2**20, 4)),
        (1e9, {}, (128 * 2**20, 4)),
        (50e9, {}, (10**9, 29)),
        (50e9, {"max_bytes_in_flight": "64MiB"}, (64 * 2**20, 4)),
        (50e9, {"max_jobs_in_flight": 3}, (10**9, 3)),
    ],
)
def test_a_fast_link_has_more_in_flight(link: float, options: Any, bounds: tuple[int, int]) -> None:
    """The bounds grow to 20 ms of the measured rate, unless the configuration sets them."""
    loop = Loop(max_job_bytes="32MiB", namespace="m", disk=DiskTier("unused", "1MiB"), **options)
    copies = Linked()
    copies.link_bytes_per_s = link
    queue = CopyQueue(
        loop.ledger, copies, loop.queue.config, clock=lambda: loop.now, block_bytes=BLOCK_BYTES, in_steps=False
    )
    for link in ((Tier.HOST, Tier.DEVICE), (Tier.DEVICE, Tier.HOST)):
        assert (queue.link(*link).max_bytes, queue.link(*link).max_jobs) == bounds
    assert queue.link(Tier.DISK, Tier.HOST).max_bytes == 64 * 2**20, "the link does not change the bound of a disk"


# -- an engine that launches once a step ------------------------------------------------------------------------------


def step(loop: Loop) -> None:
    """A step of the engine in which all copies end."""
    plans, loop.copies.launched = loop.copies.launched, []
    for plan in plans:
        loop.queue.deliver(Completion(plan.job_id, Outcome.LANDED, plan.num_blocks))
    loop.queue.advance()


def stepped(num_bytes: int, **options: Any) -> tuple[Loop, Any]:
    """A queue that an engine drives, and its link for stores with a bound of `num_bytes`."""
    loop = Loop(max_job_bytes=BLOCK_BYTES, **options)
    link = loop.queue.link(Tier.DEVICE, Tier.HOST)
    link.max_bytes = link.least_bytes = num_bytes
    return loop, link


def test_all_that_a_step_computes_is_in_flight_at_once() -> None:
    """However many jobs it takes, and a load as large as that too. An engine that launches once a step would otherwise
    need many steps to store what one step has computed."""
    loop, _ = stepped(BLOCK_BYTES)
    loop.store(1, num_blocks=8)
    assert len(loop.copies.launched) == 8
    step(loop)
    loop.queue.link(Tier.HOST, Tier.DEVICE).max_bytes = BLOCK_BYTES
    loop.ledger.reset(Tier.DEVICE)
    loop.load(1, num_blocks=8)
    assert len(loop.copies.launched) == 8


@pytest.mark.parametrize("options", [{"max_bytes_in_flight": 2 * BLOCK_BYTES}, {"max_jobs_in_flight": 2}])
def test_what_is_configured_bounds_a_step_too(options: Any) -> None:
    loop = Loop(max_job_bytes=BLOCK_BYTES, **options)
    loop.store(1, num_blocks=8)
    for _ in range(4):
        assert len(loop.copies.launched) == 2
        step(loop)
    assert not loop.copies.launched


def test_a_link_that_idles_while_jobs_wait_gets_twice_as_much() -> None:
    """So a long queue needs few steps, whatever the speed of the link and however long a step takes. What a slower link
    has not copied by the next step makes the bound fall again, to where it began at the lowest."""
    loop, link = stepped(BLOCK_BYTES)
    loop.queue._step_bytes = 0
    for seed in range(1, 16):
        loop.store(seed, num_blocks=1)
    counts = []
    while loop.copies.launched:
        counts.append(len(loop.copies.launched))
        step(loop)
    assert counts == [1, 2, 4, 8]
    link.max_bytes = 65 * BLOCK_BYTES
    for seed in range(21, 23):
        loop.store(seed, num_blocks=1)
    link.queue.append(link.queue[0] if link.queue else (loop.copies.launched[0], None))  # one waits
    for _ in range(1000):
        link.step_ended()
    assert link.max_bytes == BLOCK_BYTES
    link.queue.clear()


def test_a_job_is_late_only_once_it_is_the_first() -> None:
    """Its time begins when the job before it has ended: a link copies one after the other, and how much is in flight
    must not decide which copy is given up."""
    loop = Loop(max_job_bytes=BLOCK_BYTES)
    loop.store(1, num_blocks=2)
    first, second = loop.copies.launched
    loop.now = 9.0
    loop.queue.deliver(Completion(first.job_id, Outcome.LANDED, 1))
    loop.queue.advance()
    loop.now = 18.0
    loop.queue.advance()
    assert loop.queue.num_in_flight == 1 and loop.queue.next_deadline == 19.0
    loop.now = 19.0
    loop.queue.advance()
    assert not loop.queue.num_in_flight and second.job_id in loop.queue.overdue
