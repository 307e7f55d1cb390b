"""Readers of the output of a part. Each takes the text and returns its figures as readings, by source."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["ALL_TESTS", "Read", "Reading", "benchmark", "demo", "soak", "suite"]

ALL_TESTS = "all tests"
"""Name of the reading that sums up a part's tests."""
MOST_TTFT = 1 / 3
SHOWN_TESTS = 8


@dataclass(frozen=True)
class Reading:
    """One figure: its text in the report, and whether it meets its target. `is_met` is None if it has no target."""

    text: str
    wanted: str = ""
    is_met: bool | None = None
    is_missing: bool = False
    """There is no figure; the text says why."""

    @property
    def verdict(self) -> str:
        if self.is_missing:
            return "not run"
        return "" if self.is_met is None else "met" if self.is_met else "MISSED"

    @property
    def is_good(self) -> bool:
        return not self.is_missing and self.is_met is not False


Read = Callable[[str], Mapping[str, Reading]]


def benchmark(text: str) -> dict[str, Reading]:
    """The rows of `python -m benchmarks --json`, by name."""
    return {row["name"]: _row(row) for row in json.loads(text)["rows"]}


def _row(row: Mapping[str, Any]) -> Reading:
    spread = f" ({row['spread']})" if row["spread"] else ""
    about = f"{row['value']:.4g} {row['unit']}{spread}; {row['against']}: {row['limit']:.4g}; ratio {row['ratio']:.3f}"
    if row["wanted"] is None:
        return Reading(about)
    is_met = row["ratio"] <= row["wanted"] if row["is_at_most"] else row["ratio"] >= row["wanted"]
    return Reading(about, f"{'at most' if row['is_at_most'] else 'at least'} {row['wanted']:g}", is_met)


def demo(text: str) -> dict[str, Reading]:
    """The result of `python -m aoffload.demo --json`."""
    found = json.loads(text)
    return {"ttft": _ttft(found), "outputs": _outputs(found)}


def _ttft(found: Mapping[str, Any]) -> Reading:
    share = found["ttft_share"]
    if share is None:
        return Reading("no run was completed", is_missing=True)
    with_s, without_s = found["ttft_s"]["p50"], found["ttft_s_without_offload"]["p50"]
    return Reading(f"{share:.3f}: {with_s:.3f} s, without offload {without_s:.3f} s", "at most 1/3", share <= MOST_TTFT)


def _outputs(found: Mapping[str, Any]) -> Reading:
    if found["outputs_identical"] is None:
        return Reading("no request was completed", is_missing=True)
    about = f"{found['outputs_compared']} compared, {found['blocks_loaded']:,} blocks loaded"
    return Reading(about, "identical, bit for bit", found["outputs_identical"])


def soak(text: str) -> dict[str, Reading]:
    """The result of `python -m proof.soak --json`."""
    found = json.loads(text)
    about = (
        f"{found['wall_s']:.0f} s, {found['num_requests']:,} requests, {found['blocks_checked']:,} blocks checked, "
        f"{found['max_pinned_at_rest']} pinned at rest, {found['slope_mb_per_1000']:+.2f} MB a thousand"
    )
    return {"soak": Reading("; ".join([about, *found["problems"]]), "no problem", found["has_passed"])}


def suite(text: str) -> dict[str, Reading]:
    """What `proof.gpu.listener` has written, by the name of each test, and a summary of them."""
    lines = [line for line in text.splitlines(keepends=True) if line.endswith("\n")]  # without a line that was cut off
    found = {line["test"]: line for line in map(json.loads, lines)}
    return {**{name: _test(line) for name, line in found.items()}, ALL_TESTS: _summary(found)}


def _test(line: Mapping[str, Any]) -> Reading:
    told = line["properties"].get("found", "")
    if line["outcome"] == "skipped":
        return Reading(line["reason"], is_missing=True)
    about = "; ".join(part for part in (told, line["reason"]) if part)
    return Reading(about or line["outcome"], "passes", line["outcome"] == "passed")


def _summary(found: Mapping[str, Mapping[str, Any]]) -> Reading:
    names = {
        outcome: [name for name, line in found.items() if line["outcome"] == outcome]
        for outcome in ("passed", "failed", "skipped")
    }
    reasons = sorted({found[name]["reason"] for name in names["skipped"]})
    about = [f"{len(names['passed'])} passed"]
    about += [f"{len(names['skipped'])} skipped ({'; '.join(reasons)})"] if reasons else []
    about += [f"{len(names['failed'])} failed: {', '.join(names['failed'][:SHOWN_TESTS])}"] if names["failed"] else []
    return Reading(", ".join(about), "none fails", bool(names["passed"]) and not names["failed"])
