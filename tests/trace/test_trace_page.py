"""The page as a file: complete, without network access, and with the contents of the log."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import re
import shutil
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from page_data import column, columns, page_data
from real_log import write_real

from aoffload._kernel.states import RequestState
from aoffload.trace import drawing
from aoffload.trace.page import SCRIPTS, write_page
from benchmarks.synthetic_log import line, write_synthetic

ASSETS = Path(drawing.__file__).parent / "assets"


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    directory = tmp_path_factory.mktemp("page")
    events = write_real(directory / "real.log")
    write_page(directory / "real.log", directory / "page.html", io.StringIO())
    return directory / "page.html", events


def test_the_page_needs_nothing_else(real: tuple[Path, list[dict[str, Any]]]) -> None:
    """No address, no other file: and the browser is told to fetch nothing, whatever is in the log."""
    text = real[0].read_text()
    assert "default-src 'none'" in text
    assert not re.search(r"<[^>]*\b(src|href|action)\s*=", text) and not re.search(r"https?:|url\(|@import", text)
    assert "fetch(" not in text and "XMLHttpRequest" not in text and "innerHTML" not in text


def test_only_the_page_s_own_script_and_style_may_run(real: tuple[Path, list[dict[str, Any]]]) -> None:
    """The policy names both by their hash, so nothing that a log smuggles in runs."""
    text = real[0].read_text()
    for tag, directive in (("style", "style-src"), ("script", "script-src")):
        (content,) = re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert f"{directive} 'sha256-{digest}'" in text


def test_the_data_are_those_of_the_log(real: tuple[Path, list[dict[str, Any]]]) -> None:
    """Names, states, times, jobs and pool sizes come back as they were written."""
    page, events = real
    data = page_data(page)
    timelines, moves, jobs = columns(data["timelines"]), columns(data["moves"]), columns(data["jobs"])
    kinds = [data["kinds"][kind] for kind in timelines["kind"]]
    names = [name for name, kind in zip(timelines["name"], kinds, strict=True) if kind == "request"]
    ended = [event["request_id"] for event in events if event["event"] in ("request_done", "request_aborted")]
    assert names == ended
    states = Counter(data["words"][state] for state in moves["state"])
    assert states["running"] == sum(event["event"] == "request_running" for event in events)
    assert sum(timelines["moves"]) == len(moves["state"]) == len(moves["at_s"])
    launched = [event for event in events if event["event"] == "job_launched"]
    assert sorted(jobs["num_blocks"]) == sorted(event["num_blocks"] for event in launched)
    assert Counter(data["links"][at]["direction"] for at in jobs["link"]) == Counter(e["direction"] for e in launched)
    assert set(jobs["timeline"]) <= {0, *timelines["number"]}
    assert [(life["num_device_blocks"], life["num_host_blocks"]) for life in data["runtimes"]] == [(8, 9), (8, 9)]
    assert "Estimated, because no event carries the counts of a pool" in data["derived"]


def test_occupancy_never_leaves_what_the_log_allows(real: tuple[Path, list[dict[str, Any]]]) -> None:
    """Nothing is in tables, on its way or negative when all is over; the host is never fuller than it is large."""
    data = page_data(real[0])
    for usage in data["usages"].values():
        values = {measure: column(series["value"]) for measure, series in usage.items()}
        assert {measure: found[-1] for measure, found in values.items()} == dict.fromkeys(values, 0)
        assert max(values["host_filled"]) <= 9 and max(values["device_tables"]) > 0
        for series in usage.values():
            times = column(series["at_s"])
            assert times == sorted(times)


@pytest.mark.parametrize(
    "name", ["</script><script>alert(1)</script>", "<!--<script>", "&amp;'\"\u2028\ud800\\", "%SCRIPT%"]
)
def test_no_request_id_breaks_out_of_the_data(name: str, tmp_path: Path) -> None:
    """A request id is text on the page, whatever it looks like; so is the name of the log."""
    log, page = tmp_path / "%STYLE%<b>ü.log", tmp_path / "page.html"
    log.write_text(line(5, "request_aborted", request_id=name, reason=name, previous="running") + "\n")
    write_page(log, page, io.StringIO())
    text = page.read_text()
    assert text.isascii() and len(re.findall("<script", text)) == 2 and "%SCRIPT%" not in text.replace(name, "")
    assert "<title>%STYLE%&lt;b&gt;&#252;.log - aoffload trace</title>" in text
    shown = name.encode("unicode_escape").decode() if not name.isprintable() else name
    assert len(column(page_data(page)["timelines"]["name"])[0]) >= min(len(name), len(shown))


def test_what_a_page_cannot_hold_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A log too long for one page gives its beginning, and the page says so."""
    monkeypatch.setattr(drawing, "MAX_DRAWN", 50)
    write_synthetic(tmp_path / "log", 3_000)
    write_page(tmp_path / "log", tmp_path / "page.html", io.StringIO())
    data = page_data(tmp_path / "page.html")
    assert data["timelines"]["name"]["length"] == data["jobs"]["job_id"]["length"] == 50
    assert any("not drawn: a page holds the first" in remark for remark in data["remarks"])


def test_reasons_do_not_displace_states_and_outcomes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With more reasons and errors than the page can name, each timeline and job still shows how it ended."""
    monkeypatch.setattr(drawing, "_MAX_TEXTS", 60)
    end = {"previous": "running"}
    log = [line(at, "request_aborted", request_id=f"r{at}", reason=f"reason {at}", **end) for at in range(1, 100)]
    job = {"direction": "load", "source": "host", "destination": "device", "num_blocks": 1, "request_id": "stuck"}
    log += [
        line(100, "request_matched", request_id="stuck"),
        line(101, "request_pinned", request_id="stuck"),
        line(102, "fetch_moving", request_id="f", waiter="stuck", num_blocks=1),
        line(103, "pin_held", pin_id=1, num_blocks=1),
        line(104, "pin_lapsed", pin_id=1, num_blocks=1),
        line(105, "step_begun", step_id=1, request_ids=[], num_blocks=0),
        line(106, "step_ended", step_id=1),
        line(107, "job_launched", job_id=1, **job),
        line(108, "job_completed", job_id=1, **job),
        line(109, "job_failed", job_id=2, outcome="refused", **job),
    ]
    (tmp_path / "log").write_text("".join(f"{one}\n" for one in log))
    write_page(tmp_path / "log", tmp_path / "page.html", io.StringIO())
    data = page_data(tmp_path / "page.html")
    timelines, moves, jobs = columns(data["timelines"]), columns(data["moves"]), columns(data["jobs"])
    words = data["words"]
    assert words[timelines["reason"][98]] == "(one of many)"
    outcomes = {name: words[at] for name, at in zip(timelines["name"], timelines["outcome"], strict=True)}
    assert outcomes["stuck"] == "unfinished" and outcomes["r99"] == "aborted"
    assert {words[at] for at in timelines["outcome"]} == {"aborted", "ended", "lapsed", "unfinished"}
    assert {words[at] for at in jobs["outcome"]} == {"completed", "refused"}
    states = {words[at] for at in moves["state"]}
    assert states >= {"fetching", "moving", "held", "lapsed", "step", "ended", "unfinished"}
    assert "(one of many)" not in states


def test_the_package_has_every_part_of_the_page() -> None:
    """Scripts that are there are on the page, in an order that the page gives."""
    assert sorted(SCRIPTS) == sorted(path.name for path in ASSETS.glob("*.js"))
    assert {path.name for path in ASSETS.iterdir()} == {*SCRIPTS, "page.html", "style.css"}


def test_names_can_be_read_on_every_colour_of_a_bar() -> None:
    """WCAG asks for a contrast of 4.5."""
    colours = dict(re.findall(r"--(\w+): (#\w+)", (ASSETS / "style.css").read_text().partition("@media")[0]))
    states = [state.value for state in RequestState if state.value in colours]
    assert len(states) >= 8
    for name in (*states, "fetching", "moving", "held", "step"):
        assert _contrast(colours[name], colours["label"]) >= 4.5, name


def _contrast(one: str, other: str) -> float:
    light, dark = sorted((_luminance(one), _luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def _luminance(colour: str) -> float:
    digits = colour[1:] if len(colour) == 7 else "".join(digit * 2 for digit in colour[1:])
    parts = [int(digits[at : at + 2], 16) / 255 for at in (0, 2, 4)]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


@pytest.mark.skipif(shutil.which("node") is None, reason="no node on the path")
def test_the_scripts_read_the_data_back(real: tuple[Path, list[dict[str, Any]]], tmp_path: Path) -> None:
    """The page's own code, without a browser: search finds a request, its states and facts are those of the log."""
    page, events = real
    data = tmp_path / "data.json"
    data.write_text(json.dumps(page_data(page)))
    program = "\n".join((ASSETS / name).read_text() for name in ("format.js", "data.js", "gantt.js")) + (
        "\nreadTrace(JSON.parse(require('fs').readFileSync(process.argv[2]))).then((trace) => {"
        " const found = searchTimelines(trace, 'waiter', 9);"
        " const states = found.timelines.map((at) => intervalsOf(trace, at).map((one) => one.state));"
        " const { lane, startS, stopS, name, runtime } = trace.timelines;"
        " const bars = (number) => trace.bars.get(number).requests.concat(trace.bars.get(number).steps);"
        " const indexes = new Map([1, 2].map((number) => [number, new LaneIndex(bars(number), lane, startS, stopS)]));"
        " const near = name.map((_, at) => "
        "   indexes.get(runtime[at]).nearest(lane[at], (startS[at] + stopS[at]) / 2, 0));"
        " console.log(JSON.stringify([found.count, states, factsOf(trace, found.timelines[0]), near, trace.states]));"
        "});"
    )
    (tmp_path / "program.js").write_text(program)
    done = subprocess.run(["node", str(tmp_path / "program.js"), str(data)], capture_output=True, check=True)
    count, states, facts, near, named = json.loads(done.stdout)
    assert named["matched"] == "was looked up in the cache", "the legend names each state that a bar can show"
    assert (
        count == sum(event["event"] == "request_matched" and event["request_id"] == "waiter" for event in events) == 2
    )
    assert states == [["matched", "pinned"]] * 2
    assert facts == {"num_tokens": 100, "num_device_tokens": 0, "num_host_tokens": 0}
    starts = columns(page_data(page)["moves"])["at_s"]
    assert len(near) == len(column(page_data(page)["timelines"]["name"])) and starts == sorted(starts, key=lambda _: 0)
    assert near == list(range(len(near)))
