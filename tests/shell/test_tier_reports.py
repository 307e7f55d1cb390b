"""Reports of a runtime on the tiers below its host memory."""

from __future__ import annotations

import io
import json
import runpy
from pathlib import Path
from typing import Any

import anyio
import pytest
from disk_serving import Hanging, assert_quiet, of_slab, on_the_disk_only, simulated, with_disk
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families
from remote_serving import HangingStore, only_in_the_store, with_remote
from scraping import registry_of, scraped

from aoffload import DiskTier, OffloadRuntime
from aoffload._observe.metrics.families import FAMILIES, LABEL_VALUES
from aoffload.demo.logs import make_logger
from aoffload.ledger import LearnedEviction, Quota, Quotas, RequestStatus, WaitsFor
from aoffload.testing import SimulatedStore
from aoffload.top.command import lines
from aoffload.trace.command import main

TOKENS = list(range(25))
EXAMPLE = Path(__file__).parents[2] / "examples/directory_tier.py"
MOST_S = 20.0
"""Only waited for where nobody says so."""
pytestmark = pytest.mark.anyio


async def fetching(runtime: OffloadRuntime) -> RequestStatus:
    """The request that waits for a fetch, once there is one."""
    with anyio.fail_after(MOST_S):
        while True:
            for status in runtime.reports.requests():
                if status.waits_for is WaitsFor.FETCH:
                    return status
            await anyio.lowlevel.checkpoint()
    raise AssertionError


async def test_a_request_that_waits_for_the_disk_says_so() -> None:
    """For what, how much of it and from where, to whom it may concern: `requests()`, `explain()`, metrics, `top`."""
    disk = simulated()
    async with with_disk(disk, fetch_timeout_s=60) as engine:
        runtime = engine.runtime
        await on_the_disk_only(engine, TOKENS)
        registry, hanging = registry_of(runtime), Hanging(disk, of_slab("read"))
        async with anyio.create_task_group() as group:
            group.start_soon(engine.serve, TOKENS)
            await hanging.wait_for()
            status = await fetching(runtime)
            assert str(status.fetching[0]) == "24 tokens from disk" and len(status.fetching) == 1
            explained = runtime.explain()
            assert "a fetch of 24 tokens from disk: load " in explained
            assert ": 6 blocks" in explained.splitlines()[4], "of the host"
            assert [line.split()[1] for line in explained.splitlines()[:3]] == ["device", "host", "disk"]
            look = scraped(registry)
            assert look.get("aoffload_fetching_requests") == 1
            assert look.get("aoffload_fetching_tokens", tier="disk") == 24
            assert "fetching   1 requests: 24 tokens from disk" in list(lines(look, None))
            hanging.resume()
        look = scraped(registry)
        assert (look.get("aoffload_fetching_requests"), look.get("aoffload_fetches_total", outcome="done")) == (0, 1)
        landed = {"direction": "load", "outcome": "landed"}
        assert look.get("aoffload_copied_bytes_total", tier="disk", **landed) == 6 * runtime.transport.block_bytes
        assert look.get("aoffload_copied_bytes_total", tier="host", **landed) == 6 * runtime.transport.block_bytes
        await assert_quiet(runtime)


async def test_a_request_that_waits_for_a_remote_store_says_so() -> None:
    """It is a tier like others: a row in each list."""
    store = SimulatedStore()
    async with with_remote(store, secret=None, fetch_timeout_s=60, load_timeout_s=60) as engine:
        await only_in_the_store(engine, TOKENS)
        registry, hanging = registry_of(engine.runtime), HangingStore(store, "get")
        async with anyio.create_task_group() as group:
            group.start_soon(engine.serve, TOKENS)
            await hanging.wait_for()
            assert str((await fetching(engine.runtime)).fetching[0]) == "24 tokens from remote"
            assert scraped(registry).get("aoffload_fetching_tokens", tier="remote") == 24
            hanging.resume()
        assert (
            scraped(registry).get("aoffload_jobs_finished_total", tier="remote", outcome="landed", direction="load")
            == 3
        )


async def test_every_label_of_every_tier_is_there(tmp_path: Path) -> None:
    """From the first scrape on, where the tiers are configured: a rate needs a point to begin at."""
    disk = DiskTier(tmp_path / "disk", 1 << 18)
    learned = LearnedEviction(device=True)
    custom = runpy.run_path(str(EXAMPLE))["Directory"](str(tmp_path / "directory"), 8)
    more: dict[str, Any] = {"disk": disk, "custom": custom, "eviction": learned, "quotas": Quotas({"a": Quota()})}
    async with with_remote(SimulatedStore(), secret=None, **more) as engine:
        await engine.runtime.disk.wait_restored()
        text = generate_latest(registry_of(engine.runtime)).decode()
    shown: dict[tuple[str, str], set[str]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            for label, value in sample.labels.items():
                shown.setdefault((family.name, label), set()).add(value)
    assert {family.name.removesuffix("_total") for family in FAMILIES} <= {
        family.name for family in text_string_to_metric_families(text)
    }
    for (name, label), values in LABEL_VALUES.items():
        if label == "tenant":  # the configuration names them
            continue
        assert shown[name.removesuffix("_total"), label] == set(values), (name, label)


async def test_a_restart_and_what_is_left_to_write_are_seen(tmp_path: Path) -> None:
    """Blocks that were found, bytes of the day, and a tier that is off."""
    async with with_disk(tmp_path, tier={"daily_writes": 10_000}) as engine:
        await on_the_disk_only(engine, TOKENS)
    async with with_disk(tmp_path, tier={"daily_writes": 10_000}) as engine:
        runtime = engine.runtime
        await runtime.disk.wait_restored()
        registry = registry_of(runtime)
        look = scraped(registry)
        assert look.get("aoffload_restored_blocks") == look.get("aoffload_blocks", tier="disk", state="cached") == 6
        assert look.get("aoffload_write_budget_bytes") == 10_000
        disk = runtime._session.disk
        assert disk is not None
        disk._fail("EIO")
        look = scraped(registry)
        assert look.get("aoffload_storage_off", tier="disk") == 1
        assert "WARNING    disk is off: nothing is fetched from it or stored there any more" in list(lines(look, None))


async def test_the_log_of_a_fetch_names_who_waits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And the trace tells it in that request's story, with the tiers of every job."""
    log = io.StringIO()
    async with with_disk(simulated(), logger=make_logger(log)) as engine:
        await on_the_disk_only(engine, TOKENS)
        await engine.serve(TOKENS, request_id="late")
        await assert_quiet(engine.runtime)
    events: list[dict[str, Any]] = [json.loads(line) for line in log.getvalue().splitlines()]
    moves = [event for event in events if event["event"].startswith("fetch_")]
    assert [(event["event"], event["waiter"], event["num_blocks"]) for event in moves] == [
        ("fetch_moving", "late", 6), ("fetch_done", "late", 6),
    ]  # fmt: skip
    links = {(event["source"], event["destination"]) for event in events if event["event"] == "job_completed"}
    assert links == {("device", "host"), ("host", "disk"), ("disk", "host"), ("host", "device")}
    file = tmp_path / "log"
    file.write_text(log.getvalue())
    assert main([str(file), "request", "late"]) == 0
    output = capsys.readouterr().out
    assert "24 on the disk" in output and "waits for fetch-1 of 6 blocks from below host memory" in output
    assert main([str(file)]) == 0
    assert "1 fetch: 1 done" in capsys.readouterr().out
