"""Log lines of every kind: lines of aoffload are read, others are counted, and none raises."""

from __future__ import annotations

import inspect
import io
import json
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aoffload._observe import log as ledger_log
from aoffload._observe import log as telemetry
from aoffload.trace.events import MAX_LINE_BYTES, MEANINGS, ParseError
from aoffload.trace.figures import Figures
from aoffload.trace.scan import EmptyLogError, Scan
from aoffload.trace.summary import summary
from benchmarks.synthetic_log import line, write_synthetic

MATCHED = {"request_id": "a", "num_tokens": 40, "num_device_tokens": 16, "num_host_tokens": 0}


def scanned(path: Path, content: bytes) -> tuple[Scan, Figures]:
    path.write_bytes(content)
    figures = Figures()
    scan = Scan.of(path, figures, io.StringIO())
    scan.run()
    return scan, figures


def good(at_s: float = 1_000.0) -> bytes:
    done = line(at_s + 1, "request_done", request_id="a", num_computed_tokens=40)
    return f"{line(at_s, 'request_matched', **MATCHED)}\n{done}\n".encode()


def test_every_event_of_the_telemetry_has_a_meaning() -> None:
    """A new event is not taken for another logger's."""
    source = inspect.getsource(telemetry) + inspect.getsource(ledger_log)
    heads = "transport|worker|store|runtime|ledger|cache|host|disk|remote|fetch|storage|eviction|hint"
    direct = set(re.findall(rf'"((?:{heads})_[a-z_]+)"', source))
    assert direct and direct <= set(MEANINGS)
    tables = [name for name in vars(ledger_log) if re.fullmatch(r"_[A-Z]+_EVENTS", name)]
    assert len(tables) == 7
    for name in tables:
        assert set(vars(ledger_log)[name].values()) <= set(MEANINGS)


@pytest.mark.parametrize(
    ("bad", "parse_error"),
    [
        (b"\n", ParseError.NOT_JSON),
        (b"2026-01-01 INFO something else\n", ParseError.NOT_JSON),
        (b"\xff\xfe\x00\x80\n", ParseError.NOT_JSON),
        (b"[" * 100_000 + b"\n", ParseError.NOT_JSON),
        (b'{"event": ' + b"9" * 5_000 + b"}\n", ParseError.NOT_JSON),
        (b"{" + b" " * (2 * MAX_LINE_BYTES) + b'"event": "request_done"}\n', ParseError.NOT_JSON),
        (b"17\n", ParseError.NO_EVENT),
        (b"[]\n", ParseError.NO_EVENT),
        (b'{"level": "info"}\n', ParseError.NO_EVENT),
        (b'{"event": ["request_done"]}\n', ParseError.NO_EVENT),
        (b'{"event": "started", "timestamp": "2026-01-01T00:00:00Z"}\n', ParseError.FOREIGN),
        (b'{"event": "request_done", "request_id": "b", "num_computed_tokens": 1}\n', ParseError.NO_TIME),
        (b'{"event": "request_done", "timestamp": "yesterday"}\n', ParseError.NO_TIME),
        (b'{"event": "request_done", "timestamp": NaN}\n', ParseError.NO_TIME),
        (b'{"event": "request_done", "timestamp": 1e400}\n', ParseError.NO_TIME),
        (b'{"event": "request_done", "timestamp": 1' + b"0" * 400 + b"}\n", ParseError.NO_TIME),
        (b'{"event": "request_done", "timestamp": true}\n', ParseError.NO_TIME),
        (b'{"event": "request_done", "timestamp": 5, "num_computed_tokens": 1}\n', ParseError.MALFORMED),
        (b'{"event": "request_done", "timestamp": 5, "request_id": 3}\n', ParseError.MALFORMED),
        (b'{"event": "request_done", "timestamp": 5, "request_id": "b", "num_tokens": -1}\n', ParseError.MALFORMED),
        (b'{"event": "request_done", "timestamp": 5, "request_id": "b", "num_tokens": 1.5}\n', ParseError.MALFORMED),
        (b'{"event": "job_launched", "timestamp": 5, "job_id": 1, "direction": "up"}\n', ParseError.MALFORMED),
        (b'{"event": "job_launched", "timestamp": 5, "job_id": true}\n', ParseError.MALFORMED),
        (b'{"event": "runtime_opened", "timestamp": 5}\n', ParseError.MALFORMED),
        (b'{"event": "store_skipped", "timestamp": 5, "reason": null}\n', ParseError.MALFORMED),
        (b'{"event": "request_done", "timestamp": "2026-01-01T00:00:00Z", "request_id": "b", "num', ParseError.CUT_OFF),
    ],
)  # fmt: skip
def test_a_line_that_says_nothing_is_counted(bad: bytes, parse_error: ParseError, tmp_path: Path) -> None:
    """It is left out under its own heading, and what is good before it is read as if it were not there."""
    clean, _ = scanned(tmp_path / "clean.log", good())
    scan, figures = scanned(tmp_path / "odd.log", good() + bad)
    assert {kind: scan.reader.parse_errors.num_lines(kind) for kind in ParseError} == {
        kind: int(kind is parse_error) for kind in ParseError
    }
    assert scan.reader.num_events == clean.reader.num_events == 2
    (remark,) = [remark for remark in scan.remarks() if "left out" in remark]
    assert parse_error.value in remark and "line 3" in remark
    assert figures.in_all.num == 1


def test_what_follows_a_line_that_is_too_long_is_read(tmp_path: Path) -> None:
    """One endless line costs itself, and bounded memory."""
    endless = b'{"event": "' + b"x" * (3 * MAX_LINE_BYTES) + b'"}\n'
    scan, figures = scanned(tmp_path / "long.log", endless + good())
    assert scan.reader.num_events == 2 and figures.in_all.num == 1
    assert scan.reader.parse_errors.num_lines(ParseError.NOT_JSON) == 1


@pytest.mark.parametrize(
    "stamp",
    ["2026-01-01T00:00:01.250000Z", "2026-01-01 00:00:01.25", "2026-01-01T01:00:01.25+01:00", 1767225601.25],
)
def test_times_are_read_as_structlog_writes_them(stamp: object, tmp_path: Path) -> None:
    """ISO 8601 with or without a zone, or seconds since 1970."""
    event = json.dumps({"event": "request_pinned", "request_id": "a", "timestamp": stamp}).encode()
    assert scanned(tmp_path / "a.log", event)[0].first_s == 1767225601.25


def test_text_from_a_log_commands_no_terminal(tmp_path: Path) -> None:
    """Escape sequences and half surrogate pairs in reasons and ids are written out."""
    nasty = "\x1b[2J\ud800\u202e"
    fields = {"request_id": nasty, "reason": nasty, "previous": "running"}
    scan, figures = scanned(tmp_path / "n.log", line(5, "request_aborted", **fields).encode())
    text = "\n".join(summary(scan, figures))
    assert "\\x1b[2J" in text and not {"\x1b", "\ud800", "\u202e"} & set(text)


def test_a_clock_that_goes_back_makes_no_negative_times(tmp_path: Path) -> None:
    """Time stands still meanwhile, and the summary says that there was something."""
    lines = [line(100, "request_matched", **MATCHED), line(90, "request_pinned", request_id="a")]
    lines.append(line(95, "request_aborted", request_id="a", reason="cancelled", previous="pinned"))
    scan, figures = scanned(tmp_path / "back.log", "\n".join(lines).encode())
    assert figures.in_all.max_s == figures.in_all.total_s == 0.0
    assert {found.total_s for found in figures.in_state.values()} == {0.0}
    assert any("1 event older than the one before" in remark for remark in scan.remarks())


@given(st.data())
@settings(max_examples=60)
def test_no_damage_to_a_log_makes_it_crash(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """Bytes changed, cut or doubled anywhere: every line is read or counted."""
    path = tmp_path_factory.mktemp("damaged") / "log"
    write_synthetic(path, 120)
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 12))):
        at = data.draw(st.integers(0, len(content) - 1))
        content[at : at + data.draw(st.integers(0, 40))] = data.draw(st.binary(max_size=20))
    try:
        scan, figures = scanned(path, bytes(content))
    except EmptyLogError:
        return
    assert (
        scan.reader.num_events + sum(map(scan.reader.parse_errors.num_lines, ParseError)) == scan.reader.lines.num_lines
    )
    assert list(summary(scan, figures))
