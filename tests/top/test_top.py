"""`aoffload top`: the activity of a running process, in plain text."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import anyio
import anyio.to_thread
import pytest
import torch
from prometheus_client import CollectorRegistry, start_http_server

from aoffload import KVCacheGroup, OffloadConfig, OffloadRuntime
from aoffload.metrics import Metrics, MetricsCollector
from aoffload.top import command
from aoffload.top.command import Look, NothingToShow, lines, main, watch

BUSY = """
aoffload_requests{state="running"} 1
aoffload_requests{state="pinned"} 1
aoffload_oldest_request_seconds{state="running"} 61
aoffload_oldest_request_seconds{state="pinned"} 41.5
aoffload_requests_waiting 1
aoffload_oldest_wait_seconds 41.5
aoffload_oldest_step_seconds 60
aoffload_blocks{tier="device",state="free"} 0
aoffload_blocks{tier="device",state="pinned"} 24
aoffload_pool_blocks{tier="device"} 24
aoffload_jobs{state="quarantined"} 2
aoffload_copied_bytes_total{direction="load",tier="host",outcome="landed"} 2e6
aoffload_requests_finished_total{outcome="done",reason=""} 4
aoffload_tokens_total{source="host_hit"} 300
aoffload_tokens_total{source="computed"} 100
aoffload_cache_off 1
aoffload_loads_paused 1
aoffload_snapshot_age_seconds 12
"""
LATER = BUSY.replace("2e6", "6e6").replace("} 4\n", "} 8\n").replace("} 300", "} 600").replace("} 100", "} 200")


@pytest.fixture(params=[pytest.param(("asyncio", {}), id="asyncio"), pytest.param(("trio", {}), id="trio")])
def anyio_backend(request: pytest.FixtureRequest) -> Any:
    return request.param


@contextmanager
def listening(registry: CollectorRegistry) -> Iterator[str]:
    server, thread = start_http_server(0, "127.0.0.1", registry)
    try:
        yield f"http://127.0.0.1:{server.server_port}/metrics"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_what_holds_everybody_up_is_seen_in_one_look() -> None:
    """Who runs, how long requests wait and the oldest step lasts, whose blocks are where, what is off."""
    text = "\n".join(lines(Look.of(BUSY, 0.0), None))
    for expected in (
        "requests   1 running (one for 61.0 s), 1 pinned (one for 41.5 s)",
        "waiting    1, the first for 41.5 s", "the oldest is open for 60.0 s",
        "device     0 free, 0 cached, 24 pinned, 0 quarantined; 24 blocks", "2 quarantined", "the cache is off",
        "loads are paused", "12 s old",
    ):  # fmt: skip
        assert expected in text


def test_eviction_that_learns_and_what_is_left_alone_have_lines() -> None:
    """Which order rules where, and what of which tier is not asked for."""
    text = (
        BUSY
        + """
aoffload_eviction_learned{tier="host"} 1
aoffload_eviction_learned{tier="disk"} 0
aoffload_storage_left_alone{tier="remote",use="ask"} 2
aoffload_storage_left_alone{tier="remote",use="load"} 1
aoffload_storage_left_alone{tier="disk",use="load"} 0
"""
    )
    shown = list(lines(Look.of(text, 0.0), None))
    assert "eviction   host by what was learned, disk by the last use" in shown
    assert "WARNING    remote fails and is left alone for a while: questions, loads" in shown
    assert not any(line.startswith(("eviction", "WARNING    disk")) for line in lines(Look.of(BUSY, 0.0), None))


def test_of_an_engines_blocks_only_those_of_copies_are_known() -> None:
    """A scrape has no size of its pool: it is not shown as an empty one."""
    own = "".join(f"{line}\n" for line in BUSY.splitlines() if 'state="free"' not in line and "pool" not in line)
    (device,) = [line for line in lines(Look.of(own, 0.0), None) if line.startswith("device")]
    assert device == "device     24 pinned, 0 quarantined: what copies hold of the engine's blocks"


def test_rates_are_those_between_two_looks() -> None:
    """Of requests, tokens and bytes; the first look has none. A process that began anew makes none negative."""
    first, second = Look.of(BUSY, 10.0), Look.of(LATER, 12.0)
    assert "a second" not in "\n".join(lines(first, None))
    text = "\n".join(lines(second, first))
    assert "  host     load 2.0 MB/s, store 0.0 MB/s" in text
    assert "a second   2.0 done, 0.0 aborted; 200 tokens: 75% host hit, 25% computed" in text
    assert "-" not in "\n".join(lines(first, second))


def test_it_looks_as_often_as_asked_and_waits_in_between() -> None:
    """It ends after the last look without waiting once more."""
    texts, times, slept = iter([BUSY, LATER, BUSY]), iter([0.0, 2.0, 4.0]), []
    shown = list(watch(lambda: next(texts), lambda: next(times), slept.append, 2.0, 3))
    assert len(shown) == 3 and slept == [2.0, 2.0] and "a second" in shown[1]


@pytest.mark.parametrize("text", ["<html>", "", 'python_info{version="3"} 1\n'])
def test_what_is_no_process_of_ours_is_said(text: str) -> None:
    """Another page, or the metrics of another program."""
    with pytest.raises(NothingToShow, match="metric"):
        list(watch(lambda: text, lambda: 0.0, print, 1.0, 1))


def test_a_process_that_goes_away_is_status_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """After what was seen of it."""
    answers = iter([BUSY])

    def fetch(request: Any) -> str:
        for text in answers:
            return text
        raise NothingToShow("no answer")

    monkeypatch.setattr(command, "_fetch", fetch)
    monkeypatch.setattr(command.time, "sleep", lambda seconds: None)
    assert main(["http://127.0.0.1:1/metrics"]) == 1
    captured = capsys.readouterr()
    assert "1 running" in captured.out and captured.err == "aoffload top: http://127.0.0.1:1/metrics: no answer\n"


@pytest.mark.anyio
async def test_a_process_that_serves(capsys: pytest.CaptureFixture[str]) -> None:
    """Over HTTP, from another thread, while the event loop works."""
    metrics, registry = Metrics(), CollectorRegistry()
    config = OffloadConfig(groups=[KVCacheGroup("all", block_size=4)], num_host_blocks=16)
    async with OffloadRuntime(config, torch.zeros(9, 8), observers=[metrics]) as runtime:
        registry.register(MetricsCollector(runtime, metrics))
        async with runtime.request(range(10)) as request:
            await request.allocate()
            await request.load()
            with runtime.step([request]), listening(registry) as url:
                status = await anyio.to_thread.run_sync(partial(main, [url, "--count", "1"]))
    out = capsys.readouterr().out
    assert status == 0 and url in out
    assert "requests   1 running" in out and "steps      the oldest is open for" in out


@pytest.mark.parametrize("url", ["http://127.0.0.1:9/metrics", "file:///etc/passwd", "127.0.0.1:8000", "http://["])
def test_an_address_without_a_process_is_one_line_and_status_2(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([url, "--count", "1"]) == 2
    captured = capsys.readouterr()
    assert not captured.out and captured.err.startswith("aoffload top: ") and captured.err.count("\n") == 1
