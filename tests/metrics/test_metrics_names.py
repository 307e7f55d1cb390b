"""Names, units, help texts, docs/metrics.md and the dashboard: what Prometheus' own lint asks, and that all agree."""

from __future__ import annotations

import json
import re
import urllib.request
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest
import torch
from prometheus_client import generate_latest
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from scraping import BACKENDS, GUARD_S, measured, prompt, serve

from aoffload import KVCacheGroup, OffloadConfig, RequestState
from aoffload._observe.metrics.families import (
    FAMILIES,
    LABEL_VALUES,
    LOWER,
    REASONS,
    Family,
    Kind,
    ShownWith,
    reason_of,
)
from aoffload._observe.metrics.observer import SECONDS, THROUGHPUT, Histogram

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/metrics.md").read_text()
DASHBOARD = json.loads((ROOT / "docs/grafana/aoffload.json").read_text())
NOT_BASE_UNITS = (
    "milli", "micro", "nano", "minutes", "hours", "days", "kilo", "mega", "giga", "kib", "mib", "gib", "percent",
    "bits", "ms", "us", "ns", "kb", "mb", "gb",
)  # fmt: skip
COUNTED = ("requests", "blocks", "pins", "jobs", "tokens", "completions", "events", "failures", "preempted",
    "fetches", "loads", "cells", "switches", "runs", "hints",
)  # fmt: skip
"""What has no unit, but is counted."""
SWITCHES = ("off", "paused", "learned", "alone")
"""What is 0 or 1."""

each_family = pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)


@pytest.fixture(params=BACKENDS)
def anyio_backend(request: pytest.FixtureRequest) -> Any:
    return request.param


@each_family
def test_names_follow_the_rules(family: Family) -> None:
    """Prefix, base units, `_total` on counters and only there, no suffix that the format makes itself."""
    assert re.fullmatch(r"aoffload(_[a-z]+)+", family.name)
    words = family.name.split("_")
    assert (words[-1] == "total") == (family.kind is Kind.COUNTER)
    assert words[-1] not in ("count", "sum", "bucket", "created", "info")
    assert not set(words) & set(NOT_BASE_UNITS)
    unit = words[-2] if family.kind is Kind.COUNTER else words[-1]
    has_unit = unit in ("seconds", "bytes", "blocks") or family.name.endswith("_bytes_per_second")
    assert has_unit or set(words) & {*COUNTED, *SWITCHES}, "what is it in?"
    assert family.kind is not Kind.HISTOGRAM or has_unit
    for kind in Kind:
        assert kind.value not in words, "its type is not part of a name"


@each_family
def test_help_texts_say_something(family: Family) -> None:
    """One or more sentences, on one line, that don't repeat the name."""
    assert family.help.endswith(".") and "\n" not in family.help
    assert len(family.help) > 15
    assert family.name not in family.help


@each_family
def test_labels_are_few_and_known(family: Family) -> None:
    """Each label has a list of all its values, and no family makes more than fifty series of them (and buckets),
    with every tier that there may be."""
    reserved = {"le", "quantile", "job", "instance"}
    num_series = 1
    for label in family.labels:
        assert re.fullmatch(r"[a-z]+", label) and label not in reserved
        assert label not in family.name.split("_"), "a label's name is not part of the metric's"
        num_series *= len(LABEL_VALUES[family.name, label])
    assert num_series <= 50


def test_no_name_is_there_twice() -> None:
    """Nor is one the same as another without `_total`: OpenMetrics knows both by one name."""
    names = [family.name.removesuffix("_total") for family in FAMILIES]
    assert len(set(names)) == len(names)
    assert {name for name, _ in LABEL_VALUES} <= {family.name for family in FAMILIES}


@pytest.mark.anyio
async def test_what_is_shown_is_what_the_table_says() -> None:
    """Every family, all values of its labels from the first scrape on and no other, in both text formats."""
    async with measured() as found:
        for name in ("one", "two"):
            await serve(found.runtime, prompt(1, 8), request_id=name, cache_salt=name)
        shown = list(parse_openmetrics(generate_openmetrics(found.registry).decode()))
        text = generate_latest(found.registry).decode()
    families = [family for family in FAMILIES if family.shown_with is ShownWith.ANYTHING]
    assert [family.name for family in shown] == [family.name.removesuffix("_total") for family in families]
    for metric, family in zip(shown, families, strict=True):
        assert metric.type == family.kind.value
        assert metric.documentation == family.help
        for label in family.labels:
            seen = {sample.labels[label] for sample in metric.samples}
            assert seen == set(LABEL_VALUES[family.name, label]) - (set(LOWER) if label == "tier" else set())
        allowed = {*family.labels, "le"} if family.kind is Kind.HISTOGRAM else set(family.labels)
        assert all(set(sample.labels) <= allowed for sample in metric.samples)
    assert text.count("# HELP ") == len(families)


def test_any_reason_is_one_of_a_few() -> None:
    """Programs abort requests for reasons of their own, with ids in them for all we know."""
    assert reason_of("error: ValueError") == "error"
    assert reason_of("deadline") == "deadline"
    assert reason_of("client 4711 went away") == "other"
    assert "other" in REASONS


def test_a_value_on_a_bound_is_in_its_bucket() -> None:
    """`le` is less or equal; the last bucket has everything."""
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 99.0):
        histogram.add(value)
    assert histogram.cumulative() == [("1.0", 2), ("2.0", 3), ("+Inf", 4)]
    assert (histogram.num_values, histogram.total) == (4, 102.0)
    assert list(SECONDS) == sorted(SECONDS) and list(THROUGHPUT) == sorted(THROUGHPUT)


def documented() -> dict[str, tuple[list[str], str]]:
    """The rows of the reference tables of docs/metrics.md: by metric, its labels and its meaning."""
    reference = PAGE.partition("\n## Requests\n")[2]
    rows = re.findall(r"^`(aoffload_\w+)(?:\{([\w,]+)\})?` \| (.*)$", reference, re.MULTILINE)
    assert len({name for name, _, _ in rows}) == len(rows)
    return {name: (labels.split(",") if labels else [], meaning) for name, labels, meaning in rows}


def test_the_page_lists_every_metric_and_no_other() -> None:
    """With its labels, its meaning and, if it is a histogram, its kind: a counter's name ends in `_total`."""
    rows = documented()
    assert set(rows) == {family.name for family in FAMILIES}
    for family in FAMILIES:
        labels, meaning = rows[family.name]
        assert labels == list(family.labels), family.name
        assert meaning.startswith("histogram: ") == (family.kind is Kind.HISTOGRAM), family.name
        assert len(meaning) > 10, family.name


def test_what_the_page_tells_to_watch_exists() -> None:
    """Each metric named anywhere on the page is one, and so is each label value."""
    names = {family.name for family in FAMILIES}
    assert set(re.findall(r"`(aoffload_\w+)", PAGE)) == names
    for name, label, value in re.findall(r'`(aoffload_\w+)\{(\w+)="(\w+)"\}`', PAGE):
        assert value in LABEL_VALUES[name, label]


@pytest.mark.anyio
async def test_the_program_of_the_page_runs() -> None:
    """It serves the metrics over HTTP for as long as the runtime is open."""
    code = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)[0]
    assert "9464" in code and "    ...  # your engine\n" in code
    code = code.replace("9464", "0").replace("...  # your engine", "await engine(server.server_port)")
    found: list[str] = []

    async def engine(port: int) -> None:
        found.append(await anyio.to_thread.run_sync(fetch, f"http://127.0.0.1:{port}/metrics"))

    namespace: dict[str, Any] = {"engine": engine}
    exec(compile(code, "metrics.md", "exec"), namespace)
    config = OffloadConfig(groups=[KVCacheGroup("all")], num_host_blocks=4)
    await namespace["serve"](config, torch.zeros(5, 8))
    assert 'aoffload_pool_blocks{tier="host"} 4.0' in found[0]


def fetch(url: str) -> str:
    with urllib.request.urlopen(url, timeout=GUARD_S) as response:
        return str(response.read().decode())


def panels() -> list[dict[str, Any]]:
    return [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]


def queried() -> set[tuple[str, frozenset[str]]]:
    """The metrics that the dashboard asks for, with the labels that it filters by."""
    expressions = [target["expr"] for panel in panels() for target in panel["targets"]]
    found = {
        (name, frozenset(re.findall(r"(\w+)(?==)", selector)) - {"job", "instance"})
        for expression in expressions
        for name, selector in re.findall(r"(aoffload_\w+)\{([^}]*)\}", expression)
    }
    assert {name for name, _ in found} == {n for e in expressions for n in re.findall(r"aoffload_\w+", e)}
    return found


def test_the_dashboard_asks_for_every_metric_and_no_other() -> None:
    """What it asks for exists, with these labels; what exists is shown somewhere."""
    by_name = {family.name: family for family in FAMILIES}
    asked = set()
    for name, labels in queried():
        family = by_name.get(name) or by_name[name.removesuffix("_bucket")]
        assert (family.kind is Kind.HISTOGRAM) == name.endswith("_bucket"), name
        assert labels <= set(family.labels), name
        asked.add(family.name)
    assert asked == set(by_name)


def test_what_the_dashboard_groups_by_is_there() -> None:
    """Labels in `by (...)`, in legends and in filters are labels and values that the metric has."""
    labels_of = {family.name: {*family.labels, "le", "job", "instance"} for family in FAMILIES}
    for panel in panels():
        for target in panel["targets"]:
            names = {name.removesuffix("_bucket") for name in re.findall(r"aoffload_\w+", target["expr"])}
            there = set().union(*(labels_of[name] for name in names))
            groups = {label for inside in re.findall(r"by \(([^)]*)\)", target["expr"]) for label in inside.split(", ")}
            assert groups <= there, target["expr"]
            assert set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])) <= groups, target
            for name, label, values in re.findall(r'(aoffload_\w+)\{[^}]*?,(\w+)=~?"([^"$]*)"', target["expr"]):
                assert set(values.split("|")) <= set(LABEL_VALUES[name, label])


def test_the_dashboard_can_be_loaded() -> None:
    """What Grafana needs of a dashboard: unique ids, panels that don't overlap, variables that it knows."""
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids)
    assert DASHBOARD["schemaVersion"] >= 36 and DASHBOARD["uid"] and DASHBOARD["title"]
    cells = [
        (x, y)
        for panel in DASHBOARD["panels"]
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    ]
    assert len(set(cells)) == len(cells) and max(x for x, _ in cells) < 24
    variables = {variable["name"] for variable in DASHBOARD["templating"]["list"]}
    used = set(re.findall(r"\$\{?(\w+)", json.dumps(DASHBOARD))) - {"__rate_interval", "__all"}
    assert used <= variables
    for panel in panels():
        assert panel["title"].endswith("?") and panel["description"], "one question for each panel"
        assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])


def test_every_state_that_lasts_is_shown() -> None:
    """Each state but those within one call and the final ones has its series."""
    hidden = {RequestState.QUEUED, RequestState.DONE, RequestState.ABORTED}
    assert set(LABEL_VALUES["aoffload_requests", "state"]) == {s.value for s in RequestState if s not in hidden}
