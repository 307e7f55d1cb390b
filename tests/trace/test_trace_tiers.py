"""Traces of logs with tiers below host memory."""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any

import pytest
from page_data import column, columns, page_data
from test_trace_events import line

from aoffload._common.tiers import TIERS
from aoffload.trace.command import main
from aoffload.trace.timelines import LINKS

NAMES = [row.tier.name.lower() for row in TIERS]
MATCH = {"num_tokens": 40, "num_device_tokens": 0, "num_host_tokens": 16, "num_disk_tokens": 16}
ENDS = {"outcome": "landed", "num_bytes": 1_000, "duration_s": 0.5}


def job(at_s: float, state: str, job_id: int, num_blocks: int, link: str, **more: Any) -> str:
    source, destination = link.split(">")
    direction = "load" if NAMES.index(destination) < NAMES.index(source) else "store"
    ends = ENDS if state == "completed" else {}
    about = {"job_id": job_id, "direction": direction, "source": source, "destination": destination}
    return line(at_s, f"job_{state}", **about, num_blocks=num_blocks, **{"request_id": "", **ends, **more})


def log(path: Path, *lines: str) -> Path:
    opened = line(1000, "runtime_opened", num_device_blocks=8, num_host_blocks=10, layout="")
    path.write_text("\n".join([opened, *lines, ""]))
    return path


def output_of(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    assert main([str(word) for word in words]) == 0
    return capsys.readouterr().out


def usage(page: Path) -> dict[str, list[int]]:
    measures = page_data(page)["usages"]["1"]
    return {measure: column(series["value"]) for measure, series in measures.items()}


def test_each_tier_has_its_hops() -> None:
    """A tier more is a row more, here as well."""
    assert [link.tier for link in LINKS] == [row.tier for row in TIERS if row.above is not None for _ in range(2)]
    assert [link.name for link in LINKS][:4] == ["load from host", "store to host", "load from disk", "store to disk"]


def test_copies_fill_the_tier_that_they_go_to(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A store to the disk frees nothing of the host and fills nothing of it; a load from the disk fills the host."""
    page = tmp_path / "page.html"
    written = log(
        tmp_path / "log",
        line(1000, "disk_opened", path="/kv", num_slots=40),
        line(1001, "disk_restored", num_blocks=12, duration_s=0.1),
        job(1002, "launched", 1, 5, "device>host"), job(1003, "completed", 1, 5, "device>host"),
        job(1004, "launched", 2, 4, "host>disk"), job(1005, "completed", 2, 4, "host>disk"),
        job(1006, "launched", 3, 3, "disk>host"), job(1007, "completed", 3, 3, "disk>host"),
        job(1008, "launched", 4, 2, "host>device"), job(1009, "completed", 4, 2, "host>device"),
        job(1010, "launched", 5, 9, "disk>host"), job(1011, "failed", 5, 9, "disk>host", error="EIO"),
    )  # fmt: skip
    output_of(capsys, written, "html", page)
    found = usage(page)
    assert found["host_filled"] == [0, 5, 8, 0] and found["disk_filled"] == [12, 16, 0]
    assert max(found["disk_filled"]) == 16 and max(found["host_filling"]) == 9 and max(found["disk_filling"]) == 4
    assert max(found["device_filling"]) == 2
    data = page_data(page)
    assert data["runtimes"][0]["num_disk_blocks"] == 40
    names = [data["links"][link]["name"] for link in columns(data["jobs"])["link"]]
    assert names == ["store to host", "store to disk", "load from disk", "load from host", "load from disk"]


def test_the_summary_counts_each_hop_apart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What the disk is slow at is not hidden behind what the device is fast at. Fetches and refusals have lines."""
    written = log(
        tmp_path / "log",
        line(1000, "disk_opened", path="/kv", num_slots=40),
        job(1002, "launched", 1, 5, "device>host"), job(1003, "completed", 1, 5, "device>host"),
        job(1004, "launched", 2, 4, "disk>host"), job(1005, "failed", 2, 4, "disk>host", error="EIO"),
        line(1006, "fetch_moving", request_id="fetch-1", num_blocks=4),
        line(1007, "fetch_done", request_id="fetch-1", num_blocks=4),
        line(1008, "fetch_declined", request_id="a", num_tokens=160, fetch_s=0.2),
        line(1009, "disk_turned_off", reason="EIO"),
    )  # fmt: skip
    text = output_of(capsys, written)
    assert "runtime 1 (8 device blocks, 10 in host memory, 40 on the disk)" in text
    rows = [row.split() for row in text.splitlines()]
    assert ["store", "to", "host", "1", "0", "0", "5"] in [row[:7] for row in rows]
    assert ["load", "from", "disk", "0", "1", "0", "0"] in [row[:7] for row in rows]
    for expected in (
        "1 fetch: 1 done", "1 fetch declined: computing was faster", "1  load from disk failed: EIO",
        "1  disk_turned_off: EIO",
    ):  # fmt: skip
        assert expected in text


def test_a_wait_for_a_fetch_is_told_as_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Not as a wait for free blocks: in the request's story, in the times by state, and on the page."""
    about = {"request_id": "fetch-1", "num_blocks": 4, "waiter": "a"}
    written = log(
        tmp_path / "log",
        line(1001, "request_matched", request_id="a", **MATCH), line(1001, "request_pinned", request_id="a"),
        line(1001, "fetch_moving", **about),
        job(1001, "launched", 1, 4, "disk>host", request_id="fetch-1"),
        job(1003, "completed", 1, 4, "disk>host", request_id="fetch-1"),
        line(1003, "fetch_done", **about),
        line(1004, "request_allocated", request_id="a", num_blocks=8, **MATCH),
        line(1004, "request_running", request_id="a", num_ready_tokens=32, num_lost_tokens=0),
        line(1005, "request_done", request_id="a", num_computed_tokens=40),
    )  # fmt: skip
    text = output_of(capsys, written, "request", "a")
    assert "0 on the device, 16 in host memory, 16 on the disk" in text
    assert "waits for fetch-1 of 4 blocks from below host memory" in text
    assert "fetching 2.00 s (50%)" in text and "pinned 1.00 s (25%)" in text
    assert "job 1, load of 4 blocks from the disk: landed" in output_of(capsys, written, "request", "fetch-1")
    assert "waits for a fetch from a lower tier" in output_of(capsys, written)
    page = tmp_path / "page.html"
    output_of(capsys, written, "html", page)
    data = page_data(page)
    states = [data["words"][word] for word in columns(data["moves"])["state"]]
    assert states.count("fetching") == 1 and states.count("pinned") == 2


def test_a_log_that_ends_in_a_fetch_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What hangs is the disk, not the wait queue."""
    written = log(
        tmp_path / "log",
        line(1001, "request_matched", request_id="a", **MATCH), line(1001, "request_pinned", request_id="a"),
        line(1001, "fetch_moving", request_id="fetch-1", num_blocks=4, waiter="a"),
    )  # fmt: skip
    assert "fetching for 9.00 s, waits for a fetch from a lower tier" in output_of(
        capsys, written, "summary", "--until", "1010"
    )
    output = output_of(capsys, written, "request", "a", "--until", "1010")
    assert "It is not over at 00:16:50.000: fetching for 9.00 s" in output


def test_logs_of_before_are_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Their jobs name no tiers: all of them are between the device and host memory."""
    about = {"job_id": 1, "direction": "store", "num_blocks": 4, "request_id": ""}
    written = log(tmp_path / "log", line(1001, "job_launched", **about), line(1002, "job_completed", **about, **ENDS))
    assert "store to host" in output_of(capsys, written)


@pytest.mark.parametrize(
    "wrong",
    [
        {"source": "host"}, {"source": "host", "destination": "moon"}, {"source": ["host"], "destination": "disk"},
        {"source": "device", "destination": "disk"}, {"source": "disk", "destination": "host", "direction": "store"},
        {"direction": "up"},
    ],
)  # fmt: skip
def test_a_hop_that_is_none_is_left_out(wrong: dict[str, Any], tmp_path: Path) -> None:
    """And counted, as other malformed lines are."""
    about = {"job_id": 1, "direction": "store", "num_blocks": 4, "request_id": ""}
    written = log(tmp_path / "log", line(1001, "job_launched", **about | wrong))
    out = io.StringIO()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.stdout", out)
        assert main([str(written)]) == 0
    assert "1 line left out: one of our events with a field" in out.getvalue() and "store to" not in out.getvalue()


NODE = {"tier": "remote", "use": "load", "node": "a:1"}
LEFT = {**NODE, "num_failures": 2, "num_refused": 0, "for_s": 0.5, "error": "no"}
SWITCH = {"tier": "host", "order": "lru", "learned_hits": 90.0, "lru_hits": 100.0, "num_switches": 1}


def test_what_is_left_alone_and_which_order_rules_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In the summary, and on the page in a line each. What is refused meanwhile is no failure."""
    page, matched = tmp_path / "page.html", {**MATCH, "request_id": "a", "answer": "hit"}
    refused = {"outcome": "refused", "error": "a:1 is left alone for now"}
    written = log(
        tmp_path / "log",
        line(1001, "request_matched", **matched), line(1001, "request_pinned", request_id="a"),
        line(1002, "storage_left_alone", **LEFT),
        line(1003, "fetch_skipped", request_id="a", tier="remote"),
        line(1003, "load_declined", request_id="a", num_tokens=16, load_s=2.0, compute_s=1.0),
        job(1004, "launched", 1, 5, "remote>host"), job(1005, "failed", 1, 5, "remote>host", **refused),
        line(1006, "storage_back", **NODE, after_s=4.0, num_refused=1),
        line(1007, "eviction_switched", **SWITCH),
        line(1008, "hint_answered", verb="pin", outcome="clipped", reason="no_room", num_tokens=16),
        line(1010, "weights_changed", old="", new="step-7"),
        line(1011, "quota_reached", account="team-a", tier="host", limit="ceiling"),
        line(1012, "quota_cleared", account="team-a", tier="host"),
    )  # fmt: skip
    output = output_of(capsys, written)
    for expected in (
        "1  storage_left_alone: loads of the remote store at a:1: no",
        "1  storage_back: loads of the remote store at a:1",
        "1 fetch skipped: remote was suspended", "host evicts by LRU: began 1 time", "1 hint of clients answered",
        "weights' epoch: changed 1 time",
        "account team-a, host: stores are cut by its ceiling: 1 time",
        "account team-a, host: stores are whole again: 1 time",
    ):  # fmt: skip
        assert expected in output
    assert "failed: a:1 is left alone" not in output
    assert re.search(r"load from remote +0 +0 +1 ", output), "dropped"
    output_of(capsys, written, "html", page)
    data = page_data(page)
    assert [note["at_s"] for note in data["notes"]] == [1002, 1006, 1007, 1010, 1011, 1012]
    assert (
        data["notes"][0]["text"]
        == "loads of the remote store at a:1: failed 2 times in a row, suspended for 500 ms: no"
    )
    assert "recent hits of the guard's caches: 90 by the learned order, 100 by LRU" in data["notes"][2]["text"]
    assert data["notes"][3]["text"].startswith("the weights' epoch is 'step-7' from now on, it was none")
    found = columns(data["timelines"])
    assert (found["num_declined_tokens"], found["num_skipped_fetches"]) == ([16], [1])
    assert [data["words"][word] for word in columns(data["jobs"])["outcome"]] == ["refused"]


def test_a_node_that_its_error_names_is_named_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In the summary and on the page."""
    page, error = tmp_path / "page.html", "Error 111 connecting to a:1. Connection refused."
    written = log(tmp_path / "log", line(1002, "storage_left_alone", **{**LEFT, "error": error}))
    assert f"storage_left_alone: loads of the remote store: {error}" in output_of(capsys, written)
    output_of(capsys, written, "html", page)
    (note,) = page_data(page)["notes"]
    assert note["text"].count("a:1") == 1 and note["text"].startswith("loads of the remote store: failed 2 times")


def test_a_request_that_does_without_says_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And a job that was refused is not one that has failed."""
    written = log(
        tmp_path / "log",
        line(1001, "request_matched", **MATCH, request_id="a", answer="hit"),
        line(1002, "fetch_skipped", request_id="a", tier="disk"),
        job(1003, "launched", 1, 5, "disk>host", request_id="a"),
        job(1004, "failed", 1, 5, "disk>host", request_id="a", outcome="refused", error="left alone"),
    )
    output = output_of(capsys, written, "request", "a")
    assert "fetches nothing from the disk, which is suspended after failures" in output
    assert "not begun, left alone" in output and "FAILED" not in output
