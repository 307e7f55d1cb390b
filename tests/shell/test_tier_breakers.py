"""The breaker of a failing disk or store disables it. The log, metrics, `explain` and trace show this."""

from __future__ import annotations

import io
import json
import threading
from pathlib import Path
from typing import Any

import pytest
from disk_serving import assert_quiet, on_the_disk_only, simulated, with_disk
from remote_serving import Later, failing, forget_locally, in_the_store, with_remote
from scraping import registry_of, scraped

from aoffload.demo.logs import make_logger
from aoffload.stores import StoreError
from aoffload.testing import SimulatedStore
from aoffload.top.command import lines
from aoffload.trace.command import main
from proof.disk.simulated_disk import DiskFault

A, B = list(range(17)), list(range(100, 117))
pytestmark = pytest.mark.anyio


class Log(io.StringIO):
    """A log that remembers which threads wrote it."""

    def __init__(self) -> None:
        super().__init__()
        self.threads: set[int] = set()

    def write(self, text: str) -> int:
        self.threads.add(threading.get_ident())
        return super().write(text)

    def events(self, *names: str) -> list[dict[str, Any]]:
        found = [json.loads(line) for line in self.getvalue().splitlines()]
        return [event for event in found if event["event"] in names]


async def test_a_store_that_fails_is_one_line_in_the_log_and_so_is_its_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """However many cells are refused meanwhile: these are counted. Told in the event loop's thread."""
    store, env, log = SimulatedStore(), Later(), Log()
    async with with_remote(store, num_blocks=16, logger=make_logger(log), env=env) as engine:
        runtime = engine.runtime
        registry = registry_of(runtime)
        await in_the_store(engine, A, B)
        await forget_locally(engine)
        store.fault = failing("get")
        await engine.serve(A, request_id="unlucky")
        (left,) = log.events("storage_left_alone")
        assert left["level"] == "warning" and (left["tier"], left["use"]) == ("remote", "load")
        assert (left["for_s"], left["num_failures"], left["num_refused"]) == (0.5, 2, 0) and left["error"]
        await engine.serve(B, request_id="without")
        assert runtime.statistics().num_fetches_skipped == 1
        assert "the remote store is suspended, no loads" in runtime.explain()
        look = scraped(registry)
        assert look.get("aoffload_storage_left_alone", tier="remote", use="load") == 1
        assert look.get("aoffload_storage_left_alone") == look.get("aoffload_fetches_skipped_total") == 1
        assert any("WARNING" in line and "remote fails" in line for line in lines(look, None))
        store.fault = lambda call: None
        env.leapt_s += 0.6
        await forget_locally(engine)
        await engine.serve(B, request_id="late")
        (back,) = log.events("storage_back")
        assert back["level"] == "warning" and back["after_s"] >= 0.6
        assert "suspended" not in runtime.explain()
        assert scraped(registry).get("aoffload_storage_left_alone") == 0
        await assert_quiet(runtime)
    refused = [event for event in log.events("job_failed") if event["outcome"] == "refused"]
    assert all(event["level"] == "debug" for event in refused) and back["num_refused"] <= len(refused)
    assert log.threads == {threading.get_ident()}
    file = tmp_path / "log"
    file.write_text(log.getvalue())
    assert main([str(file), "request", "without"]) == 0
    assert "fetches nothing from the remote store, which is suspended after failures" in capsys.readouterr().out
    assert main([str(file)]) == 0
    output = capsys.readouterr().out
    assert "storage_left_alone: loads of the remote store" in output and "1 fetch skipped" in output
    assert "is suspended after failures" not in output, "a refused job is no failure of its own"


async def test_a_store_that_answers_no_question_is_not_asked() -> None:
    """After two failures, requests compute at once, and are counted as skipped."""
    store, log = SimulatedStore(), Log()
    async with with_remote(store, num_blocks=16, logger=make_logger(log)) as engine:
        await in_the_store(engine, A)
        store.fault = failing("exist")
        for _ in range(3):
            await forget_locally(engine)
            await engine.serve(A, store="none")
        assert [event["tier"] for event in log.events("fetch_skipped")] == ["remote"]
        (left,) = engine.runtime.statistics().remote_transfers.left_alone  # type: ignore[union-attr]
        assert left.use.value == "ask" and str(left).startswith("no questions")
        await assert_quiet(engine.runtime)


async def test_what_a_store_says_commands_no_terminal() -> None:
    """Its errors may be anybody's words: what is not printable is escaped in `explain`."""

    class Shouting(SimulatedStore):
        def exist(self, keys: Any, timeout_s: float) -> Any:
            raise StoreError("\x1b[2J\nnobody waits")

    async with with_remote(Shouting(), num_blocks=16) as engine:
        for _ in range(3):
            await engine.serve(A, store="none")
            await forget_locally(engine)
        output, _ = engine.runtime.explain().splitlines()[-2:]
        assert output == "the remote store is suspended, no questions at node-0 for now: \\x1b[2J\\nnobody waits"


async def test_a_disk_that_fails_is_one_line_in_the_log_and_so_is_its_end() -> None:
    """Each time that it is tried in vain is another one, that no operator is woken by."""
    disk, env, log = simulated(), Later(), Log()
    async with with_disk(disk, logger=make_logger(log), env=env) as engine:
        runtime = engine.runtime
        registry = registry_of(runtime)
        await on_the_disk_only(engine, A)
        disk.fault = lambda call: DiskFault.ERROR if call.kind == "read" else None
        for _ in range(2):
            assert await runtime.fetches.fetch(A).wait() == 0
        env.leapt_s += 0.6
        assert await runtime.fetches.fetch(A).wait() == 0
        async with runtime.request(A) as request:
            await request.allocate()
        output = [(event["level"], event["for_s"]) for event in log.events("storage_left_alone")]
        assert output == [("warning", 0.5), ("info", 1.0)]
        assert "the disk is suspended, no loads for now: " in runtime.explain()
        assert runtime.explain().endswith("\nfetches from the disk skipped so far: 1")
        assert scraped(registry).get("aoffload_storage_left_alone", tier="disk", use="load") == 1
        disk.fault = lambda call: None
        env.leapt_s += 1.1
        assert await runtime.fetches.fetch(A).wait() == 16
        (back,) = log.events("storage_back")
        assert (back["tier"], back["use"], back["node"]) == ("disk", "load", "")
        await assert_quiet(runtime)
