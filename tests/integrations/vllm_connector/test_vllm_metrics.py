"""The counters of the connector, and their export by vLLM."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from engine_doubles import PAGE_BYTES, TEXT, Request
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from small_engine import SmallEngine, instead, over
from vllm_doubles import AoffloadConnector, statistics

from aoffload.ledger import Outcome

BLOCK_BYTES = 2 * PAGE_BYTES


def taken(engine: SmallEngine) -> dict[str, float]:
    found = engine.connector.get_kv_connector_stats()
    return {} if found is None else {name: value for name, value in found.data.items() if "seconds" not in name}


def test_copies_are_counted_by_direction_and_end(warm: Callable[..., SmallEngine]) -> None:
    """Jobs, blocks and bytes; how the blocks of the host are used now. Nothing twice, and nothing when nothing was."""
    engine = warm()
    gauges = {"off": 0, "blocks|host|free": 57, "blocks|host|cached": 7}
    gauges |= dict.fromkeys(["blocks|host|pinned", "blocks|host|quarantined"], 0)
    gauges |= dict.fromkeys(["blocks|device|pinned", "blocks|device|quarantined"], 0)
    stores = {"jobs|store|host|landed": 1, "copied_blocks|store|host": 7, "copied_bytes|store|host": 7 * BLOCK_BYTES}
    assert taken(engine) == stores | gauges
    assert taken(engine) == {}
    engine.run(Request("again", TEXT))
    loads = {"jobs|load|host|landed": 1, "copied_blocks|load|host": 7, "copied_bytes|load|host": 7 * BLOCK_BYTES}
    assert taken(engine) == loads | gauges


@pytest.mark.parametrize(
    ("outcome", "fields"), [(Outcome.FAILED, {}), (Outcome.CORRUPT, {"corrupt": (0,)}), (Outcome.UNPROVEN, {})]
)
def test_lost_loads_are_counted(warm: Callable[..., SmallEngine], outcome: Outcome, fields: dict[str, Any]) -> None:
    """With the tokens that are computed instead, and the blocks that are in quarantine."""
    engine = warm(num_blocks=60)
    taken(engine)
    instead(engine, over(outcome, **fields))
    engine.run(Request("again", TEXT))
    found = taken(engine)
    assert (found[f"jobs|load|host|{outcome.value}"], found["lost_tokens"]) == (1, 28)
    assert found["blocks|device|quarantined"] == (7 if outcome is Outcome.UNPROVEN else 0)


def test_copies_that_take_too_long_are_counted(
    warm: Callable[..., SmallEngine], caplog: pytest.LogCaptureFixture
) -> None:
    """And said once; so is their end."""
    engine = warm(transfer_timeout_s=3, num_blocks=60)
    plans = instead(engine, lambda plan: None)
    engine.submit(Request("again", TEXT))
    engine.step()
    taken(engine)
    engine.now = 3.0
    engine.run()
    assert taken(engine)["overdue_jobs|load|host"] == 1
    engine.workers[0].copies.end(over(Outcome.FAILED)(plans[0]))
    engine.step()
    said = [record.message for record in caplog.records if record.name == "vllm.aoffload"]
    assert [one.partition(" ")[2][:13] for one in said] == ["1 copies exce", "the copies th"]


def test_blocks_without_room_in_the_host_are_counted(engines: Callable[..., SmallEngine]) -> None:
    """By reason."""
    engine = engines(num_host_blocks=2)
    engine.alter = lambda commands: commands
    engine.run(Request("first", TEXT))
    assert taken(engine)["skipped_store_blocks|host_full"] == 5


def test_an_error_is_counted(warm: Callable[..., SmallEngine], monkeypatch: pytest.MonkeyPatch) -> None:
    """The gauge says that the cache is off from then on."""
    engine = warm()
    engine.may_be_off = True
    monkeypatch.setattr(engine.half, "match", lambda *arguments: 1 / 0)
    engine.run(Request("again", TEXT))
    found = taken(engine)
    assert (found["off"], found["turned_off|all"]) == (1, 1)


# -- vLLM's classes ---------------------------------------------------------------------------------------------------


def test_statistics_add_up() -> None:
    """Counts are summed over an interval; of a gauge the last value counts."""
    made = AoffloadConnector.build_kv_connector_stats
    one, other = (
        made({"lost_tokens": 3.0, "off": 1.0}),
        made({"lost_tokens": 4.0, "jobs|load|host|landed": 1.0, "off": 1.0}),
    )
    total = one.aggregate(other)
    assert total.reduce() == {"lost_tokens": 7.0, "jobs load host landed": 1.0, "off": 1.0}
    assert not total.is_empty()
    total.reset()
    assert total.is_empty() and made().is_empty()


def test_vllms_endpoint_shows_all_that_is_counted(warm: Callable[..., SmallEngine]) -> None:
    """Counters grow by each report, gauges follow it; each under its name and labels, for its engine."""
    engine = warm()
    registry = CollectorRegistry()
    kinds = {kind: partial(kind, registry=registry) for kind in (Counter, Gauge, Histogram)}
    shown = AoffloadConnector.build_prom_metrics(
        SimpleNamespace(kv_transfer_config=None), kinds, ["engine"], {0: ["0"], 1: ["1"]}
    )
    for name in ("again", "once more"):
        engine.run(Request(name, TEXT))
        engine.manager.evict_all()
        shown.observe(engine.connector.get_kv_connector_stats().data, 1)

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(f"vllm:aoffload_{name}", {"engine": "1", **labels})

    assert value("jobs_total", direction="load", tier="host", outcome="landed") == 2
    assert value("copied_bytes_total", direction="store", tier="host") == 7 * BLOCK_BYTES
    assert value("blocks", tier="host", state="cached") == 7
    assert value("off") == 0
    assert registry.get_sample_value("vllm:aoffload_off", {"engine": "0"}) is None


def test_every_count_has_a_metric() -> None:
    """A name that no metric has would be an error in vLLM's front end, in the middle of a request."""
    names = {"jobs": 3, "copied_blocks": 2, "copied_bytes": 2, "copy_seconds": 2, "overdue_jobs": 2}
    names |= {"skipped_store_blocks": 1, "lost_tokens": 0, "turned_off": 1, "blocks": 2, "off": 0}
    names |= {"fetches": 0, "late_fetches": 0, "restored_blocks": 0, "disk_budget_bytes": 0, "disk_off": 0}
    names |= {"declined_fetches": 0, "declined_loads": 0, "remote_off": 0, "left_alone": 2, "hints": 3}
    assert {name: len(family.labels) for name, family in statistics.FAMILIES.items()} == names
    assert {name for name, family in statistics.FAMILIES.items() if family.is_gauge} == {
        "blocks", "off", "disk_budget_bytes", "disk_off", "remote_off", "left_alone",
    }  # fmt: skip
