"""Spans of OpenTelemetry, as an exporter gets them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from copy import copy
from typing import Any

import anyio
import pytest
from disk_serving import on_the_disk_only, simulated, with_disk
from engine_serving import OwnEngine, OwnPool
from scripted import ScriptedTransport
from serving import BACKENDS, Checkpoints, Engine, TagBlocks, assert_at_rest, at_every_checkpoint, config, prompt, turns

from aoffload import HostCacheRuntime, InvalidArgument, KVCacheGroup, Ledger, OffloadConfig, OffloadRuntime
from aoffload.ledger import Completion, Event, Observers, Outcome, Prefix, Root

pytest.importorskip("opentelemetry", reason="the extra `otel` is not installed")
pytest.importorskip("opentelemetry.sdk.trace", reason="the SDK of OpenTelemetry is not installed")

from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from aoffload._observe.spans import MAX_OVER
from aoffload.otel import Spans

A, B = prompt(1, 9), prompt(2, 9)


@pytest.fixture(params=BACKENDS)
def anyio_backend(request: pytest.FixtureRequest) -> Any:
    return request.param


class Exported:
    """What an exporter has got, and the observer that it came from."""

    def __init__(self, *others: SpanProcessor) -> None:
        self.provider = TracerProvider(shutdown_on_exit=False)
        self.num_failures = 0
        for other in others:
            self.provider.add_span_processor(other)
        self.exporter = InMemorySpanExporter()
        self.provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.spans = Spans(self.provider)

    @property
    def all(self) -> Sequence[ReadableSpan]:
        return self.exporter.get_finished_spans()

    def named(self, name: str) -> list[ReadableSpan]:
        return [span for span in self.all if span.name == f"aoffload.{name}"]

    def of(self, request_id: str) -> list[ReadableSpan]:
        return [span for span in self.all if fields(span).get("request_id") == request_id]

    def assert_over(self) -> None:
        """No span is open, and every one that began was exported."""
        spans = self.spans
        assert spans.num_open == 0
        assert not (spans._live or spans._by_id or spans._loads or spans._jobs)


def fields(span: ReadableSpan) -> dict[str, Any]:
    found = dict(span.attributes or {})
    assert all(name.startswith("aoffload.") for name in found)
    return {name.removeprefix("aoffload."): value for name, value in found.items()}


def states(span: ReadableSpan) -> list[str]:
    return [event.name for event in span.events]


def is_child(span: ReadableSpan, parent: ReadableSpan) -> bool:
    return span.parent is not None and span.parent.span_id == parent.context.span_id


def linked(span: ReadableSpan) -> set[int]:
    return {link.context.span_id for link in span.links}


@pytest.fixture
def exported() -> Iterator[Exported]:
    found = Exported()
    yield found
    found.provider.shutdown()


@asynccontextmanager
async def traced(
    exported: Exported, num_blocks: int = 16, *, auto: bool = True, **options: Any
) -> AsyncIterator[tuple[Engine, ScriptedTransport]]:
    transport, made = ScriptedTransport(num_blocks + 1, auto=auto), config(**options)
    async with OffloadRuntime(made, transport=transport, observers=[exported.spans]) as runtime:
        yield Engine(runtime, TagBlocks(transport)), transport
    assert runtime.observers.num_failures == exported.num_failures
    exported.assert_over()


# -- requests -----------------------------------------------------------------------------------------------------


@pytest.mark.anyio
async def test_a_request_is_a_span(exported: Exported) -> None:
    """From its admission to its end, with its id, the sizes of its prompt and its hit by tier, its outcome, and its
    states as events in order. Its parent is the span inside of which it began."""
    tracer = exported.provider.get_tracer("server")
    async with traced(exported) as (engine, _):
        await engine.serve(A)
        await engine.runtime.flush()
        await engine.evict_device()
        with tracer.start_as_current_span("POST /v1/completions"):
            await engine.serve(A, request_id="r1")
        await engine.serve(A, request_id="r2")
    (request,), (outer,) = exported.of("r1"), [span for span in exported.all if span.name.startswith("POST")]
    assert is_child(request, outer)
    assert request.context.trace_id == outer.context.trace_id
    assert fields(request) == {
        "request_id": "r1", "num_tokens": 9, "num_device_tokens": 0, "num_host_tokens": 8, "num_disk_tokens": 0,
        "num_ready_tokens": 8, "num_lost_tokens": 0, "num_computed_tokens": 9, "outcome": "done",
    }  # fmt: skip
    assert states(request) == ["matched", "pinned", "allocated", "loading", "running"]
    times = [request.start_time, *(event.timestamp for event in request.events), request.end_time]
    assert times == sorted(times)
    assert request.status.status_code is StatusCode.UNSET
    (second,) = exported.of("r2")
    assert (second.parent, fields(second)["num_device_tokens"]) == (None, 8)


@pytest.mark.anyio
async def test_a_task_of_its_own_keeps_the_caller_s_span(exported: Exported) -> None:
    """`run` serves a request in a new task, and the span is below the caller's all the same."""
    async with traced(exported) as (engine, _):
        with exported.provider.get_tracer("server").start_as_current_span("outer"):
            await engine.runtime.run(lambda request: engine.prefill(request, A), A, "r1")
    (outer,) = [span for span in exported.all if span.name == "outer"]
    assert is_child(exported.of("r1")[0], outer)


@pytest.mark.anyio
async def test_an_abort_has_its_reason(exported: Exported) -> None:
    """An error and a deadline set the status. A client that leaves is no error."""
    async with traced(exported) as (engine, _):
        with pytest.raises(ValueError, match="bad"):
            async with engine.runtime.request(A, "raises"):
                raise ValueError("bad")
        async with engine.runtime.request(A, "late", deadline_s=0) as request:
            await request.allocate()
        async with engine.runtime.request(A, "leaves") as request:
            request.cancel()
            await request.allocate()
    found = {name: exported.of(name)[0] for name in ("raises", "late", "leaves")}
    assert {name: fields(span)["reason"] for name, span in found.items()} == {
        "raises": "error: ValueError", "late": "deadline", "leaves": "cancelled",
    }  # fmt: skip
    assert {fields(span)["outcome"] for span in found.values()} == {"aborted"}
    codes = {name: span.status.status_code for name, span in found.items()}
    assert codes == {"raises": StatusCode.ERROR, "late": StatusCode.ERROR, "leaves": StatusCode.UNSET}
    assert found["raises"].status.description == "error: ValueError"
    assert "cancelled" in states(found["leaves"])


@pytest.mark.anyio
async def test_no_token_and_no_salt_is_in_a_span(exported: Exported) -> None:
    """Spans leave the process, so they have sizes of prompts, and nothing of what is in them."""
    async with traced(exported) as (engine, _):
        for _ in range(2):
            await engine.serve(A, salt="a secret salt", request_id="r1")
            await engine.runtime.flush()
            await engine.evict_device()
    text = "".join(span.to_json() for span in exported.all)
    assert len(exported.named("request")) == 4 and exported.named("load") and exported.named("store")
    assert "secret" not in text and not [token for token in A if str(token) in text]


@pytest.mark.anyio
async def test_a_text_that_is_not_unicode_can_be_exported(exported: Exported) -> None:
    """A lone surrogate in a reason, an id or the error of a copy is escaped. Exporters would lose the whole batch."""
    async with traced(exported, auto=False) as (engine, transport):
        async with engine.runtime.request(A, "r\ud800") as request:
            request.cancel("error: no \udcff file")
            await turns()
        await engine.serve(B, request_id="r1")
        transport.fail(next(iter(transport.in_flight)), error="no \udcff")
        transport.auto = True
        transport.land_all()
        await engine.runtime.flush()
    (aborted,), (store, *_) = exported.of("r\\ud800"), exported.named("store")
    assert aborted.status.description == fields(aborted)["reason"] == "error: no \\udcff file"
    (cancelled,) = [event for event in aborted.events if event.name == "cancelled"]
    assert cancelled.attributes == {"aoffload.reason": "error: no \\udcff file"}
    assert store.status.description == "no \\udcff"


# -- copies -------------------------------------------------------------------------------------------------------


@pytest.mark.anyio
async def test_a_load_is_a_child_and_a_store_is_linked(exported: Exported) -> None:
    """A load is below its request's span. A store is in a trace of its own, whatever span is current where it is
    launched, and has a link to the request."""
    tracer = exported.provider.get_tracer("server")
    async with traced(exported, auto=False) as (engine, transport):
        with tracer.start_as_current_span("outer"):
            await engine.serve(A, request_id="r1")
        assert fields(exported.of("r1")[0])["outcome"] == "done"
        assert not exported.named("store")  # the store is still on its way
        transport.land_all()
        await engine.runtime.flush()
        transport.auto = True
        await engine.evict_device()
        await engine.serve(A, request_id="r2")
    (first,), (second,), (store,), (load,) = (
        exported.of("r1"), exported.of("r2"), exported.named("store"), exported.named("load"),
    )  # fmt: skip
    assert store.parent is None and linked(store) == {first.context.span_id}
    assert store.context.trace_id != first.context.trace_id
    assert is_child(load, second) and not load.links and not second.links
    assert (load.start_time or 0) >= (second.start_time or 0) and (load.end_time or 0) <= (second.end_time or 0)
    assert fields(store) | {"duration_s": 0} == {
        "job_id": 1, "source": "device", "destination": "host", "num_blocks": 2, "outcome": "landed", "num_bytes": 2,
        "duration_s": 0,
    }  # fmt: skip
    assert (fields(load)["source"], fields(load)["destination"]) == ("host", "device")


@pytest.mark.anyio
async def test_requests_that_wait_for_the_same_copy_are_linked_to_it(exported: Exported) -> None:
    """The copy is a child of the request that began it. A request that joins, before the launch or after, names the
    copy, and the copy names it."""
    async with traced(exported) as (engine, transport):
        await engine.serve(A)
        await engine.runtime.flush()
        await engine.evict_device()
        transport.auto = False
        async with anyio.create_task_group() as group:
            for name in ("r1", "r2", "r3"):
                group.start_soon(lambda name=name: engine.serve(A, request_id=name))
            await turns()
            transport.land_all()
            transport.auto = True
        await engine.runtime.flush()
    (load,) = exported.named("load")
    requests = [exported.of(name)[0] for name in ("r1", "r2", "r3")]  # trio begins them in any order
    (first,), others = (
        [one for one in requests if is_child(load, one)],
        [one for one in requests if not is_child(load, one)],
    )
    assert not first.links and len(others) == 2
    assert linked(load) == {other.context.span_id for other in others}
    assert [linked(other) for other in others] == [{load.context.span_id}] * 2


@pytest.mark.anyio
async def test_a_copy_whose_first_request_has_left_is_below_one_that_waits(exported: Exported) -> None:
    """A queued load goes on for those who joined it: below one of them, and linked to the others."""
    async with traced(exported, max_jobs_in_flight=1) as (engine, transport):
        for tokens in (A, B):
            await engine.serve(tokens)
            await engine.runtime.flush()
        await engine.evict_device()
        transport.auto = False
        async with anyio.create_task_group() as group:
            group.start_soon(lambda: engine.serve(A, request_id="first"))
            await turns()
            assert len(transport.in_flight) == 1  # the loads of the others wait for it

            async def leave() -> None:
                async with engine.runtime.request(B, "leaves") as request:
                    await request.allocate()
                    await request.load()

            group.start_soon(leave)
            await turns()
            for name in ("stays", "stays, too"):
                group.start_soon(lambda name=name: engine.serve(B, request_id=name))
                await turns()
            engine.runtime.cancel("leaves")
            await turns()
            transport.auto = True
            transport.land_all()
        await engine.runtime.flush()
    (stays,), (other,) = exported.of("stays"), exported.of("stays, too")
    (load,) = [load for load in exported.named("load") if is_child(load, stays)]
    assert (linked(load), linked(other)) == ({other.context.span_id}, {load.context.span_id})


@pytest.mark.anyio
async def test_a_store_is_not_linked_to_a_later_request_of_the_same_id(exported: Exported) -> None:
    """Ids are unique only among live requests. A store that is launched while another request has the id still names
    the request that it stores for."""
    async with traced(exported, max_jobs_in_flight=1, auto=False) as (engine, transport):
        await engine.serve(A, request_id="r1")
        await engine.serve(B, request_id="r1")
        async with engine.runtime.request(prompt(3, 9), "r1") as request:
            assert len(transport.in_flight) == 1
            transport.land_all()
            await turns()
            transport.land_all()
            await engine.prefill(request, prompt(3, 9))
        transport.land_all()
        await turns()
        transport.land_all()
        await engine.runtime.flush()
        first = len(exported.named("store"))
        for seed in (4, 5, 6):  # over before the second is stored
            await engine.serve(prompt(seed, 9), request_id="r1")
        assert len(transport.in_flight) == 1
        transport.auto = True
        transport.land_all()
        await engine.runtime.flush()
    requests = [span.context.span_id for span in exported.of("r1")]
    links = [linked(span) for span in exported.named("store")]
    assert links[0] == {requests[0]} and links[first - 1] == {requests[2]}
    assert all(link <= {requests[1]} for link in links[1 : first - 1])
    assert [links[first], links[first + 1], links[-1]] == [{requests[3]}, set(), {requests[5]}]


@pytest.mark.anyio
async def test_a_copy_that_fails_sets_the_status(exported: Exported) -> None:
    """Of the copy, with its error. Its request computes instead, so that is no failure; the tokens that it lost are an
    attribute."""
    async with traced(exported, auto=False) as (engine, transport):
        await engine.serve(A)
        transport.land_all()
        await engine.runtime.flush()
        await engine.evict_device()
        async with anyio.create_task_group() as group:
            group.start_soon(lambda: engine.serve(A, request_id="r1"))
            await turns()
            (job_id,) = transport.in_flight
            transport.fail(job_id, error="no route to the disk")
            transport.auto = True
        await engine.runtime.flush()
    (load,), (request,) = exported.named("load"), exported.of("r1")
    assert (load.status.status_code, load.status.description) == (StatusCode.ERROR, "no route to the disk")
    assert fields(load)["outcome"] == "failed"
    assert (request.status.status_code, fields(request)["num_lost_tokens"]) == (StatusCode.UNSET, 8)


@pytest.mark.anyio
async def test_prefetches_and_demotions_have_spans(exported: Exported) -> None:
    """Each is below the caller's span, with its copies as children."""
    async with traced(exported) as (engine, _):
        await engine.serve(A, store="none")
        with exported.provider.get_tracer("server").start_as_current_span("outer"):
            await engine.runtime.transfers.demote(A).wait()
            await engine.runtime.transfers.prefetch(A).wait()
        assert engine.runtime.lookup(A).num_device_tokens == 8
    (outer,) = [span for span in exported.all if span.name == "outer"]
    (demotion,), (prefetch,) = exported.named("demotion"), exported.named("prefetch")
    for transfer, copies in ((demotion, exported.named("store")), (prefetch, exported.named("load"))):
        assert is_child(transfer, outer) and fields(transfer)["outcome"] == "done"
        assert [is_child(span, transfer) for span in copies] == [True]


@pytest.mark.anyio
async def test_a_fetch_is_below_the_request_that_waits_for_it(exported: Exported) -> None:
    """Its copies are below the fetch. The load that follows is below the request. Stores to the disk are for no
    request."""
    pytest.importorskip("xxhash", reason="the extra `disk` is not installed")
    tokens = prompt(1, 25)
    async with with_disk(simulated(), observers=[exported.spans]) as engine:
        await on_the_disk_only(engine, tokens)
        await engine.serve(tokens, request_id="late")
    exported.assert_over()
    (request,), (fetch,), loads = exported.of("late"), exported.named("fetch"), exported.named("load")
    assert is_child(fetch, request) and fields(fetch)["outcome"] == "done"
    parents = {fields(load)["source"]: "fetch" if is_child(load, fetch) else "request" for load in loads}
    assert parents == {"disk": "fetch", "host": "request"}
    assert all(is_child(load, fetch) or is_child(load, request) for load in loads)
    to_disk = [span for span in exported.named("store") if fields(span)["destination"] == "disk"]
    assert to_disk and not [span for span in to_disk if span.parent or span.links]


# -- ends ---------------------------------------------------------------------------------------------------------


@pytest.mark.anyio
async def test_no_span_stays_open_wherever_a_request_is_cancelled(exported: Exported) -> None:
    """A request that loads is cancelled at each of its checkpoints in turn."""

    async def cancelled_at(k: int) -> bool:
        async with traced(exported) as (engine, transport), anyio.create_task_group() as group:
            await engine.serve(A)
            await engine.runtime.flush()
            await engine.evict_device()
            checkpoints = Checkpoints(k, lambda: engine.runtime.cancel("r1"))
            transport.auto = False

            async def land() -> None:
                await turns()
                transport.auto = True
                transport.land_all()

            async def serve() -> None:
                async with engine.runtime.request(A, "r1") as request:
                    await anyio.lowlevel.checkpoint()
                    group.start_soon(land)
                    await engine.prefill(request, A)
                    await anyio.lowlevel.checkpoint()

            await checkpoints.run(serve())
            transport.auto = True
            transport.land_all()
            await assert_at_rest(engine.runtime)
            exported.assert_over()
        return checkpoints.reached

    num_checkpoints = await at_every_checkpoint(cancelled_at)
    assert num_checkpoints > 2
    assert {fields(span)["outcome"] for span in exported.of("r1")} == {"aborted", "done"}
    assert len(exported.of("r1")) == num_checkpoints + 1


@pytest.mark.anyio
async def test_no_span_stays_open_when_a_runtime_is_closed(exported: Exported) -> None:
    """Closing ends the requests, and gives up copies that never end. Their spans end, too, and say so."""
    async with traced(exported, auto=False, close_timeout_s=0.001) as (engine, transport):
        await engine.serve(A)
        async with anyio.create_task_group() as group:
            group.start_soon(lambda: engine.serve(B))
            await turns()
        assert len(transport.in_flight) == 2
        engine.runtime.request(A, "never entered")
    assert transport.in_flight, "the copies are still on their way"
    assert {span.status.status_code for span in exported.named("store")} == {StatusCode.ERROR}
    assert {fields(span)["outcome"] for span in exported.named("store")} == {"unproven"}


@pytest.mark.anyio
async def test_a_runtime_over_an_engine_s_blocks(exported: Exported) -> None:
    """The same spans for a `HostCacheRuntime`."""
    transport, pool = ScriptedTransport(33, auto=True), OwnPool(33)
    made = config(num_host_blocks=64)
    async with HostCacheRuntime(
        made, transport=transport, engine_blocks=pool, observers=[exported.spans]
    ) as runtime:  # fmt: skip
        engine = OwnEngine(runtime, transport, pool, 33)
        await engine.stored(A)
        assert await engine.serve(A, request_id="r1") == 8
        await engine.assert_at_rest()
    (request,), (load,) = exported.of("r1"), exported.named("load")
    assert is_child(load, request) and fields(request)["num_host_tokens"] == 8
    assert linked(exported.named("store")[0]) == {exported.named("request")[0].context.span_id}
    exported.assert_over()


class Raises(SpanProcessor):
    """An exporter's worst day."""

    num_calls = 0

    def on_start(self, span: Any, parent_context: Any = None) -> None:
        type(self).num_calls += 1
        if type(self).num_calls % 3 == 0:
            raise OSError("no collector")

    def on_end(self, span: ReadableSpan) -> None:
        raise OSError("no collector")


class Opened(SpanProcessor):
    num_begun = 0

    def on_start(self, span: Any, parent_context: Any = None) -> None:
        self.num_begun += 1


@pytest.mark.anyio
async def test_a_processor_that_raises_harms_nobody() -> None:
    """Requests are served and copies land, what it raises is counted, and no span stays open."""
    exported = Exported(Raises())
    async with traced(exported) as (engine, _):
        for tokens in (A, B, A):
            await engine.serve(tokens)
            await engine.runtime.flush()
            await engine.evict_device()
        assert await engine.serve(A) == 8
        await assert_at_rest(engine.runtime)
        exported.num_failures = engine.runtime.observers.num_failures
        assert exported.num_failures > 5
        assert engine.runtime.statistics().off_reason == ""


# -- a ledger -----------------------------------------------------------------------------------------------------


def ledger_with(observer: Any) -> Ledger:
    made = OffloadConfig(groups=[KVCacheGroup("full", block_size=4)], num_host_blocks=16)
    return Ledger(made, 17, observer=observer)


def prefix(seed: int = 1) -> Prefix:
    return Prefix.of(Root("toy"), prompt(seed, 9))


def test_a_ledger_without_a_runtime(exported: Exported) -> None:
    """One of its observers reports the same spans."""
    ledger = ledger_with(Observers(exported.spans))
    record = ledger.admit(prefix(), request_id="r1")
    ledger.allocate_nowait(record, 9)
    ledger.plan_load(record)
    assert exported.spans.num_open == 1 and "1 open" in repr(exported.spans)
    plans = ledger.commit(record, 9)
    ledger.release(record)
    assert [ledger.launch(plan.job_id) for plan in plans] == [True]
    assert exported.spans.num_open == 1
    ledger.settle(Completion(plans[0].job_id, Outcome.LANDED))
    assert [span.name for span in exported.all] == ["aoffload.request", "aoffload.store"]
    exported.assert_over()


def serve_one(observer: Any) -> None:
    ledger = ledger_with(observer)
    record = ledger.admit(prefix(), request_id="r1")
    ledger.allocate_nowait(record, 9)
    ledger.plan_load(record)
    (plan,) = ledger.commit(record, 9)
    ledger.release(record)
    ledger.launch(plan.job_id)
    ledger.settle(Completion(plan.job_id, Outcome.LANDED))


class Copies:
    """Passes a copy of each event on."""

    def __init__(self, inner: Spans) -> None:
        self.inner = inner

    def observe(self, event: Event) -> None:
        self.inner.observe(copy(event))


@pytest.mark.parametrize("wrap", [lambda spans: spans, Observers, Copies])
def test_spans_that_are_given_twice_end_once(wrap: Any) -> None:
    """Also inside another observer. Each span that began has ended."""
    opened = Opened()
    exported = Exported(opened)
    serve_one(Observers(wrap(exported.spans), exported.spans))
    exported.assert_over()
    assert [span.name for span in exported.all] == ["aoffload.request", "aoffload.store"]
    assert opened.num_begun == 2
    if wrap is not Copies:
        assert states(exported.of("r1")[0]).count("allocated") == 1


def test_spans_of_a_ledger_that_is_dropped(exported: Exported) -> None:
    """`close` ends what is open. What its ledger reports afterwards about the same requests is nothing."""
    observers = Observers(exported.spans)
    ledger = ledger_with(observers)
    record = ledger.admit(prefix())
    exported.spans.close()
    exported.assert_over()
    assert [fields(span)["outcome"] for span in exported.all] == ["closed"]
    ledger.release(record)
    assert (len(exported.all), observers.num_failures) == (1, 0)


def test_close_ends_each_span_though_a_processor_raises() -> None:
    """What it raises is counted, as with `observe`. No span stays open that `num_open` does not count."""

    class Ended(SpanProcessor):
        num_ended = 0

        def on_end(self, span: ReadableSpan) -> None:
            self.num_ended += 1
            raise OSError("no collector")

    ended = Ended()
    spans = Exported(ended).spans
    ledger = ledger_with(Observers(spans))
    for seed in (1, 2, 3):
        ledger.admit(prefix(seed))
    assert spans.num_open == 3
    spans.close()
    assert (spans.num_open, ended.num_ended, spans.num_failures) == (0, 3, 3)


def test_what_is_kept_of_requests_that_are_over_is_bounded(exported: Exported) -> None:
    """Stores may name a request that is over, but not for ever."""
    ledger = ledger_with(exported.spans)
    for number in range(MAX_OVER + 20):
        ledger.release(ledger.admit(prefix(), request_id=f"r{number}"))
    assert len(exported.spans._over) == MAX_OVER
    assert f"r{MAX_OVER + 19}" in exported.spans._over


@pytest.mark.parametrize("bad", [3, "otlp", TracerProvider])
def test_what_is_no_provider_is_refused(bad: Any) -> None:
    with pytest.raises(InvalidArgument, match="tracer_provider"):
        Spans(bad)


def test_without_an_sdk_spans_are_nothing() -> None:
    """`opentelemetry-api` alone: every span is one that records nothing."""
    spans = Spans()
    serve_one(spans)
    assert spans.num_open == 0
