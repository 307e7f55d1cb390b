"""A device that is lost for good: the cache turns itself off, once, and the engine goes on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import structlog
from scripted import ScriptedTransport
from serving import BACKENDS, Engine, TagBlocks, assert_at_rest, config, prompt, scripted, turns

from aoffload import OffloadRuntime, RequestState
from aoffload._transfer.fences import PASSED, Fence
from aoffload.ledger import TransferPlan
from aoffload.ranks import LocalRank, RankTransport
from aoffload.transport import DeviceGone

pytestmark = pytest.mark.anyio

A, B, C = prompt(1, 9), prompt(2, 9), prompt(3, 9)


@pytest.fixture(params=BACKENDS)
def anyio_backend(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.fixture
def events() -> Iterator[list[Any]]:
    with structlog.testing.capture_logs() as logs:
        yield logs
    structlog.reset_defaults()


class LossyTransport(ScriptedTransport):
    """Can lose its device: every call is refused from then on, and what is in flight is told to be in doubt."""

    is_lost = False
    num_asked_in_vain = 0

    def record_fence(self) -> Fence:
        self._check_device()
        return super().record_fence()

    def launch(self, plan: TransferPlan, after: Fence | None) -> None:
        self._check_device()
        super().launch(plan, after)

    def _check_device(self) -> None:
        if self.is_lost:
            self.num_asked_in_vain += 1
            raise DeviceGone("device lost: planted")


def reasons(events: list[Any]) -> list[str]:
    return [event["reason"] for event in events if event["event"] == "cache_turned_off"]


async def on_the_host(engine: Engine, *prompts: list[int]) -> None:
    for tokens in prompts:
        await engine.serve(tokens)
    await engine.runtime.flush()
    await engine.evict_device()


async def goes_on_without(engine: Engine, transport: LossyTransport) -> None:
    """Requests come and go; nobody asks the transport for anything but what it has counted."""
    num_asked = transport.num_asked_in_vain
    for tokens in (A, B, C, A):
        num_device = engine.runtime.lookup(tokens).num_device_tokens
        assert await engine.serve(tokens) == num_device
    async with engine.runtime.request(C) as request:
        await request.allocate()
        await request.load()
        engine.compute(request, C, 0)
        request.commit(9)
        await request.extend(40)
    assert request.state is RequestState.DONE
    assert await engine.runtime.transfers.prefetch(B).wait() == engine.runtime.lookup(B).num_device_tokens
    await engine.runtime.reset()
    await assert_at_rest(engine.runtime)
    assert transport.num_asked_in_vain == num_asked


@pytest.fixture
def lossy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("serving.ScriptedTransport", LossyTransport)


def lose(transport: ScriptedTransport) -> LossyTransport:
    assert isinstance(transport, LossyTransport)
    transport.is_lost = True
    return transport


@pytest.mark.usefixtures("lossy")
async def test_a_load_that_is_refused_for_good_turns_the_cache_off(events: list[Any]) -> None:
    """The first launch reports it: a miss, one event, one question to the transport; nothing in quarantine."""
    async with scripted() as (engine, transport):
        await on_the_host(engine, A, B)
        lost = lose(transport)
        assert await engine.serve(A) == 0
        found = engine.runtime.statistics()
        assert found.off_reason == "device lost: planted"
        assert (found.device.num_quarantined, found.host.num_quarantined) == (0, 0)
        assert lost.num_asked_in_vain == 1
        await goes_on_without(engine, lost)
    assert reasons(events) == ["device lost: planted"]


@pytest.mark.usefixtures("lossy")
async def test_a_commit_without_a_fence_for_good_turns_the_cache_off(events: list[Any]) -> None:
    """The commit counts, and is not stored. No error of the transport is told besides."""
    async with scripted() as (engine, transport):
        async with engine.runtime.request(A) as request:
            await request.allocate()
            await request.load()
            engine.compute(request, A, 0)
            lost = lose(transport)
            request.commit(9)
        assert request.state is RequestState.DONE
        assert engine.runtime.lookup(A).num_device_tokens == 8
        await engine.runtime.flush()
        assert engine.runtime.statistics().host.num_cached == 0
        await goes_on_without(engine, lost)
    assert reasons(events) == ["device lost: planted"]
    assert "transport_failed" not in [event["event"] for event in events]


@pytest.mark.usefixtures("lossy")
@pytest.mark.parametrize("end", ["lose", "fail"])
async def test_a_copy_that_a_lost_device_has_ended_turns_the_cache_off(end: str, events: list[Any]) -> None:
    """A completion does not say why; asked for a fence, the device does. What waits after it is dropped, and only what
    was under way is in doubt."""
    async with scripted(num_host_blocks=32, max_jobs_in_flight=1) as (engine, transport):
        await on_the_host(engine, A, B)
        transport.auto = False
        async with engine.runtime.request(A) as one, engine.runtime.request(B) as other:
            pending = []
            for request in (one, other):
                await request.allocate()
                pending.append(request.load_nowait())
            assert len(transport.in_flight) == 1
            lost = lose(transport)
            getattr(transport, end)(next(iter(transport.in_flight)))
            await turns()
            assert [load.is_over for load in pending] == [True, True]
            assert [await load.wait() for load in pending] == [0, 0]
            found = engine.runtime.statistics()
            assert (found.device.num_quarantined, found.host.num_quarantined) == (2 if end == "lose" else 0, 0)
            for request, tokens in ((one, A), (other, B)):
                engine.compute(request, tokens, 0)
                request.commit(9, after=PASSED)
        assert lost.num_asked_in_vain == 1
        await goes_on_without(engine, lost)
        assert engine.runtime.statistics().device.num_quarantined == (2 if end == "lose" else 0)
    assert reasons(events) == ["device lost: planted"]


@pytest.mark.usefixtures("lossy")
async def test_the_cache_is_off_as_soon_as_a_copy_is_in_doubt(events: list[Any]) -> None:
    """Nobody has to try and be refused first."""
    async with scripted() as (engine, transport):
        transport.auto = False
        await engine.serve(A)
        lost = lose(transport)
        transport.lose(next(iter(transport.in_flight)))
        await turns()
        assert engine.runtime.statistics().off_reason == "device lost: planted"
        assert lost.num_asked_in_vain == 1
    assert reasons(events) == ["device lost: planted"]


@pytest.mark.usefixtures("lossy")
async def test_what_is_in_flight_at_the_loss_may_still_end_well(events: list[Any]) -> None:
    """The one direction finds out while the other has just landed: what is proven is used."""
    async with scripted() as (engine, transport):
        transport.auto = False
        await engine.serve(A)
        lost = lose(transport)
        await engine.serve(B)  # finds out
        assert reasons(events) == ["device lost: planted"]
        transport.land_all()
        await turns()
        assert engine.runtime.statistics().host.num_cached == 2
        await goes_on_without(engine, lost)


@pytest.mark.usefixtures("lossy")
async def test_a_device_that_refuses_for_a_while_is_used_again(events: list[Any]) -> None:
    """A copy that failed for another reason turns nothing off."""
    async with scripted() as (engine, transport):
        await on_the_host(engine, A)
        transport.auto = False
        async with engine.runtime.request(A) as request:
            await request.allocate()
            pending = request.load_nowait()
            transport.lose(next(iter(transport.in_flight)))
            assert await pending.wait() == 0
            transport.land_all()
        transport.auto = True
        await turns()
        assert engine.runtime.statistics().off_reason == ""
        assert await engine.serve(A) == 8
        await assert_at_rest(engine.runtime)
    assert reasons(events) == []


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("find_out", ["launch", "record_fence"])
async def test_one_rank_that_is_lost_takes_the_others_with_it(number: int, find_out: str, events: list[Any]) -> None:
    """A part of every block is gone, so every rank is refused from then on; whichever rank it is, whoever asks."""
    ranks = [LossyTransport(17, auto=True) for _ in "01"]
    transport = RankTransport([LocalRank(one) for one in ranks])
    async with OffloadRuntime(config(), transport=transport) as runtime:
        engine = Engine(runtime, TagBlocks(ranks[0]))
        await on_the_host(engine, A)
        lose(ranks[number])
        calls: dict[str, Callable[[], object]] = {
            "launch": lambda: runtime.transfers.prefetch(A),
            "record_fence": transport.record_fence,
        }
        if find_out == "record_fence":
            with pytest.raises(DeviceGone, match=f"rank {number}: device lost"):
                calls[find_out]()
        else:
            calls[find_out]()
        await turns()
        with pytest.raises(DeviceGone, match=f"rank {number}: device lost"):
            transport.record_fence()
        assert ranks[number].num_asked_in_vain == 1
        assert await engine.serve(B) == 0
        found = runtime.statistics()
        assert found.off_reason == f"rank {number}: device lost: planted"
        assert (found.device.num_quarantined, found.host.num_quarantined) == (0, 0)
        await assert_at_rest(runtime)
    assert reasons(events) == [f"rank {number}: device lost: planted"]


@pytest.mark.parametrize("broken", ["settle", "launch"])
async def test_a_cache_that_a_bug_has_turned_off_says_so_too(
    broken: str, events: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Statistics and log have one word for it, whatever the cause."""

    def fails(*_: object) -> None:
        raise ZeroDivisionError("planted")

    async with scripted(load_timeout_s=0.05, close_timeout_s=0.1) as (engine, _):
        with monkeypatch.context() as patch:
            patch.setattr(type(engine.runtime.ledger), broken, fails)
            await engine.serve(A)
            await turns()
        assert engine.runtime.statistics().off_reason == "the ledger failed"
        await engine.serve(B)
    assert reasons(events) == ["the ledger failed"]


async def test_a_cache_that_is_closed_has_not_turned_itself_off(events: list[Any]) -> None:
    """Closing is no failure."""
    async with scripted() as (engine, _):
        await engine.serve(A)
    assert engine.runtime.statistics().off_reason == ""
    assert reasons(events) == []
