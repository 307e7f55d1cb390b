"""Scrapes: from any thread, during load, each of them one consistent snapshot."""

from __future__ import annotations

import random
import threading
from itertools import pairwise
from typing import Any

import anyio
import anyio.to_thread
import pytest
from scraping import BACKENDS, GUARD_S, Scrape, client, measured, prompt, serve
from scripted import ScriptedTransport

from aoffload import InvalidArgument, RequestState
from aoffload._observe.metrics import collector
from aoffload._observe.metrics.observer import MAX_REPORTS
from aoffload._runtime.worker import CopyWorker
from aoffload.ledger import Completion, CompletionDelivered, Event, Outcome, RequestMoved
from aoffload.metrics import MetricsCollector

pytestmark = pytest.mark.anyio


@pytest.fixture(params=BACKENDS)
def anyio_backend(request: pytest.FixtureRequest) -> Any:
    return request.param


async def test_every_scrape_during_load_obeys_the_laws() -> None:
    """Forty scrapes or more from another thread while eight clients hurry, some giving up: in each, the blocks of a
    tier add up, live and finished requests are those that were admitted, and nothing that counts goes back."""
    scrapes: list[Scrape] = []
    async with measured(12) as found:
        async with anyio.create_task_group() as clients:
            is_over = anyio.Event()

            async def scrape() -> None:
                while not is_over.is_set() or len(scrapes) < 40:
                    scrapes.append(await anyio.to_thread.run_sync(found.scrape))

            clients.start_soon(scrape)
            async with anyio.create_task_group() as group:
                for number in range(8):
                    group.start_soon(client, found.runtime, random.Random(number), 40)
            is_over.set()
        await found.runtime.flush()
        scrapes.append(found.scrape())
    for earlier, later in pairwise(scrapes):
        later.check()
        later.check_follows(earlier)
    last = scrapes[-1]
    assert last.sum("aoffload_requests_admitted_total") == 320
    assert last.sum("aoffload_requests") == last.sum("aoffload_jobs") == 0
    assert last.sum("aoffload_blocks", state="pinned") == 0
    assert last.sum("aoffload_room_wait_seconds_count") > 0
    assert any(one.sum("aoffload_requests") > 0 for one in scrapes)


class Scraper:
    """Begins a scrape in another thread in the middle of the change that ends a request, and waits for its question."""

    def __init__(self) -> None:
        self.found: Any = None
        self.scrapes: list[Scrape] = []
        self.thread: threading.Thread | None = None
        self.has_asked = threading.Event()
        """Or is over already, as it must not be."""
        self.was_answered_inside = False

    def observe(self, event: Event) -> None:
        if not isinstance(event, RequestMoved) or event.new is not RequestState.DONE or self.thread is not None:
            return

        def scrape() -> None:
            self.scrapes.append(self.found.scrape())
            self.has_asked.set()

        self.thread = threading.Thread(target=scrape)
        self.thread.start()
        assert self.has_asked.wait(GUARD_S)
        self.was_answered_inside = bool(self.scrapes)


async def test_no_scrape_sees_the_middle_of_a_change(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that ends is no longer live and not counted as finished yet: a scrape that comes just then waits."""
    scraper, call_soon = Scraper(), CopyWorker.call_soon

    def ask(self: CopyWorker, function: Any) -> None:
        call_soon(self, function)
        scraper.has_asked.set()

    monkeypatch.setattr(CopyWorker, "call_soon", ask)
    async with measured(others=(scraper,)) as found:
        scraper.found = found
        await serve(found.runtime, prompt(1, 8))
        assert scraper.thread is not None
        await anyio.to_thread.run_sync(scraper.thread.join, GUARD_S)
        (scrape,) = scraper.scrapes
        assert not scraper.was_answered_inside
        scrape.check()
        assert scrape.sum("aoffload_requests_finished_total", outcome="done") == 1


async def test_a_loop_that_does_not_answer_makes_an_old_scrape_and_says_how_old() -> None:
    """The loop's thread is busy for ever, as far as a scrape can tell: it shows the last snapshot, with its age."""
    async with measured(timeout_s=0.0) as found:
        first = found.scrape()
        await serve(found.runtime, prompt(1, 8))
        scrapes: list[Scrape] = []
        thread = threading.Thread(target=lambda: scrapes.append(found.scrape()))
        thread.start()
        thread.join(GUARD_S)  # of the loop's thread, which so can't answer
        assert scrapes[0].sum("aoffload_requests_admitted_total") == first.sum("aoffload_requests_admitted_total")
        assert scrapes[0].sum("aoffload_snapshot_age_seconds") > 0
        assert found.scrape().sum("aoffload_requests_admitted_total") == 1


async def test_a_closed_runtime_is_still_shown() -> None:
    """The last scrape before a process ends finds what it has done."""
    async with measured() as found:
        await serve(found.runtime, prompt(1, 8))
    for scrape in (found.scrape(), await anyio.to_thread.run_sync(found.scrape)):
        scrape.check()
        assert scrape.sum("aoffload_requests_finished_total", outcome="done") == 1


async def test_what_goes_wrong_in_a_scrape_stays_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """A scrape that fails in the loop raises in the thread that asked; the cache goes on storing and loading."""
    async with measured() as found:

        def fail(*args: object) -> None:
            raise OSError("no statistics today")

        monkeypatch.setattr(collector, "snapshot_of_runtime", fail)
        with pytest.raises(OSError, match="no statistics"):
            await anyio.to_thread.run_sync(found.scrape)
        monkeypatch.undo()
        assert found.runtime.worker.copies.is_accepting
        (await anyio.to_thread.run_sync(found.scrape)).check()


async def test_the_counters_agree_with_what_happened() -> None:
    """Requests by outcome and reason, tokens by source, bytes and jobs by direction: against what the test knows."""
    async with measured(4) as found:
        runtime = found.runtime
        assert await serve(runtime, prompt(1, 16)) == 0  # 16 computed, 4 blocks stored
        await runtime.flush()
        assert await serve(runtime, prompt(2, 16)) == 0  # evicts them
        await runtime.flush()
        assert await serve(runtime, prompt(1, 16)) == 12  # loads 3 blocks back
        await runtime.flush()
        assert await serve(runtime, prompt(1, 16)) == 12  # has them there
        async with runtime.request(prompt(3, 4)) as request:
            request.cancel("the client said so")
            await request.allocate()
        with pytest.raises(ValueError):
            async with runtime.request(prompt(3, 4)):
                raise ValueError
        scrape = found.scrape()
        scrape.check()
        size = runtime.transport.block_bytes
    finished = "aoffload_requests_finished_total"
    assert scrape.sum(finished, outcome="done", reason="") == 4
    assert scrape.sum(finished, reason="other") == scrape.sum(finished, reason="error") == 1
    by_source = [scrape.sum("aoffload_tokens_total", source=s) for s in ("device_hit", "host_hit", "computed")]
    assert by_source == [12, 12, 16 + 16 + 4 + 4]
    assert scrape.sum("aoffload_copied_bytes_total", direction="load", outcome="landed") == 3 * size
    assert scrape.sum("aoffload_copied_bytes_total", direction="store", outcome="landed") == 8 * size
    num_jobs = {d: scrape.sum("aoffload_jobs_finished_total", direction=d, outcome="landed") for d in ("load", "store")}
    for name in ("copy_seconds", "copy_throughput_bytes_per_second", "fence_latency_seconds"):
        assert {d: scrape.sum(f"aoffload_{name}_count", direction=d) for d in num_jobs} == num_jobs
    assert scrape.sum("aoffload_evicted_blocks_total", tier="device") == 4 + 4 + 1
    assert scrape.sum("aoffload_request_seconds_count", state="loading") == 1


async def test_waits_and_failures_are_counted() -> None:
    """A wait for free blocks that was granted and one that was given up, a copy that failed, one that was never proven
    and proves late: each stands where docs/metrics.md says."""
    transport = ScriptedTransport(9)
    async with measured(8, transport=transport, transfer_timeout_s=1e6) as found, anyio.create_task_group() as group:
        runtime, impatient = found.runtime, anyio.CancelScope()

        async def give_up() -> None:
            with impatient:
                await serve(runtime, prompt(3, 8))

        async with runtime.request(prompt(1, 32)) as holder:
            await holder.allocate()
            group.start_soon(serve, runtime, prompt(2, 8))
            group.start_soon(give_up)
            await anyio.wait_all_tasks_blocked()
            assert found.scrape().sum("aoffload_requests_waiting") == 2
            impatient.cancel()
            await anyio.wait_all_tasks_blocked()
            assert found.scrape().sum("aoffload_room_wait_seconds_count") == 1
            holder.commit(32)
        (first,) = transport.in_flight
        transport.fail(first)
        await anyio.wait_all_tasks_blocked()
        assert found.scrape().sum("aoffload_room_wait_seconds_count") == 2
        second = max(transport.in_flight)
        runtime.worker.copies.give_up([second], "for the test")
        assert found.scrape().sum("aoffload_jobs", state="quarantined") == 1
        assert found.scrape().sum("aoffload_blocks", tier="host", state="quarantined") > 0
        transport.land(second)
        await anyio.wait_all_tasks_blocked()
        scrape = found.scrape()
        for outcome in ("failed", "unproven"):
            assert scrape.sum("aoffload_jobs_finished_total", direction="store", outcome=outcome) == 1
        assert scrape.sum("aoffload_late_completions_total") == 1
        assert scrape.sum("aoffload_blocks", state="quarantined") == 0


async def test_late_reports_leave_nothing_behind() -> None:
    """However many jobs report that nobody waits for any more, what is kept of them is bounded."""
    async with measured() as found:
        for job_id in range(10_000, 10_000 + 3 * MAX_REPORTS):
            found.metrics.observe(CompletionDelivered(Completion(job_id, Outcome.LANDED)))
        await serve(found.runtime, prompt(1, 8))
        await found.runtime.flush()
        assert len(found.metrics._reported) <= MAX_REPORTS


async def test_metrics_of_another_runtime_are_refused() -> None:
    """A collector for metrics that its runtime does not feed would show zeros for ever: it says so at once."""
    async with measured() as one, measured() as other:
        with pytest.raises(InvalidArgument, match="observers"):
            MetricsCollector(one.runtime, other.metrics)
