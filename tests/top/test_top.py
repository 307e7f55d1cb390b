"""`aoffload top`: the activity of a running process, in plain text."""

from __future__ import annotations

import errno
import io
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from socket import socket
from typing import Any

import anyio
import anyio.to_thread
import pytest
import torch
from prometheus_client import CollectorRegistry, Metric, start_http_server

from aoffload import KVCacheGroup, OffloadConfig, OffloadRuntime
from aoffload.metrics import Metrics, MetricsCollector
from aoffload.top import command
from aoffload.top.command import Look, NothingToShow, Screen, lines, main, watch
from benchmarks.synthetic_log import line as log_line

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
    shown = list(lines(Look.of(BUSY, 0.0), None))
    text = "\n".join(shown)
    for expected in (
        "requests   1 running (longest 61.0 s), 1 pinned (longest 41.5 s)",
        "waiting    1 for blocks, the first for 41.5 s", "the oldest is open for 60.0 s",
        "2 quarantined", "the cache is off", "loads are paused", "12 s old",
    ):  # fmt: skip
        assert expected in text
    assert row(shown, "device")[:6] == ["device", "24", "0", "0", "24", "0"]
    assert all(line.startswith("WARNING") for line in shown[:3])


def row(shown: list[str], first: str) -> list[str]:
    """The cells of the row of a table that begins so."""
    (found,) = [line for line in shown if line.startswith(f"{first} ")]
    return found.split()


def test_eviction_that_learns_and_storage_that_fails_have_lines() -> None:
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
    assert "eviction   host learned, disk least recently used" in shown
    assert "WARNING    remote fails, so for a while it gets no questions and no loads" in shown
    assert not any(line.startswith(("eviction", "WARNING    disk")) for line in lines(Look.of(BUSY, 0.0), None))


def test_of_an_engines_blocks_only_those_of_copies_are_known() -> None:
    """A scrape has no size of its pool: it is not shown as an empty one."""
    own = "".join(f"{line}\n" for line in BUSY.splitlines() if 'state="free"' not in line and "pool" not in line)
    shown = list(lines(Look.of(own, 0.0), None))
    assert "device     the blocks are the engine's: only those that copies hold are known" in shown
    assert ["device", "-", "-", "-", "24", "0", "-", "-"] in [line.split() for line in shown]


def test_rates_are_those_between_two_looks() -> None:
    """Of requests, tokens and bytes; the first look has none. A process that began anew makes none negative."""
    first, second = Look.of(BUSY, 10.0), Look.of(LATER, 12.0)
    once = list(lines(first, None))
    assert "/s" not in "\n".join(once)
    assert "hit share  - now, 75% since the start" in once
    shown = list(lines(second, first))
    assert "finished   2.0/s done, 0.0/s aborted" in shown
    assert row(shown, "host")[-4:] == ["1.91", "MiB/s", "0", "B/s"]
    tokens = {line[:15]: line[15:].split() for line in shown if line.startswith(("found", "computed"))}
    assert list(tokens.values()) == [["0", "0%"], ["150", "75%"], ["50", "25%"]]
    assert not any(cell.startswith("-") and cell != "-" for line in lines(first, second) for cell in line.split())


def test_the_hit_share_now_is_that_since_the_look_before() -> None:
    """What was found and what was computed in between, not in all."""
    better = LATER.replace("} 200\n", "} 100\n")
    assert "hit share  100% now, 86% since the start" in list(lines(Look.of(better, 12.0), Look.of(BUSY, 10.0)))
    assert "hit share  - now, 75% since the start" in list(lines(Look.of(BUSY, 12.0), Look.of(BUSY, 10.0)))


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(0, "0 B/s"), (999, "999 B/s"), (2048, "2.00 KiB/s"), (1e6, "977 KiB/s"), (31.5 * 2**30, "31.5 GiB/s"),
     (5 * 2**40, "5.00 TiB/s"), (5000 * 2**40, "5000 TiB/s")],
)  # fmt: skip
def test_bytes_a_second_can_be_read(num_bytes: float, text: str) -> None:
    assert command.byte_rate(num_bytes) == text


@pytest.mark.parametrize("width", [30, 40, 60, 80])
def test_it_fits_the_screen(width: int) -> None:
    """Of a narrow one, a table continues below with the same first column, and no figure is lost."""
    first, second = Look.of(BUSY, 10.0), Look.of(LATER, 12.0)
    shown, whole = list(lines(second, first, width)), list(lines(second, first, 1000))
    assert max(map(len, shown)) <= width
    assert {cell for line in shown for cell in line.split()} == {cell for line in whole for cell in line.split()}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_view_is_drawn_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the upper left corner, no line more than the screen has. At the end the last view stays above the prompt."""
    monkeypatch.setenv("COLUMNS", "10")
    monkeypatch.setenv("LINES", "3")
    monkeypatch.delenv("TERM", raising=False)
    terminal = Terminal()
    with Screen(terminal) as screen:
        assert screen.width == 10
        screen.show(["first", "view"])
        screen.show([f"line {number}, which is too long" for number in range(9)])
    entered, first, second = terminal.getvalue().split(command.HOME)
    assert entered == command.ENTER
    assert first == f"first{command.CLEAR_LINE}\r\nview{command.CLEAR_LINE}{command.CLEAR_BELOW}"
    second, left = second.split(command.LEAVE)
    assert second.count("\n") == 2 and "line 0, wh\x1b" in second
    assert left.startswith("line 0, which is too long\n") and left.count("\n") == 9


@pytest.mark.parametrize("is_dumb", [True, False])
def test_elsewhere_it_prints_plain_lines(is_dumb: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Into a pipe or a file, and on a terminal that can't move its cursor."""
    monkeypatch.setenv("TERM", "dumb" if is_dumb else "xterm")
    output = Terminal() if is_dumb else io.StringIO()
    with Screen(output) as screen:
        screen.show(["one"])
        screen.show(["two"])
    assert output.getvalue() == "one\n\ntwo\n\n"


@pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudo-terminal")
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_the_terminal_is_as_before_after_a_signal(number: int, status: int) -> None:
    """Ctrl-C and `kill` leave the alternate screen and bring the cursor back."""
    import pty

    registry = CollectorRegistry()
    registry.register(Fixed())
    ours, theirs = pty.openpty()
    with listening(registry) as url, open(ours, "rb", buffering=0) as terminal:
        run = [sys.executable, "-m", "aoffload", "top", url, "--interval", "3600"]
        before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a program in the background ignores it
        try:
            process = subprocess.Popen(run, stdout=theirs, env={**os.environ, "TERM": "xterm"})
        finally:
            signal.signal(signal.SIGINT, before)
            os.close(theirs)
        try:
            seen = b""
            while command.CLEAR_BELOW.encode() not in seen:
                seen += terminal.read(4096)
            assert seen.startswith(command.ENTER.encode()) and b"1 running" in seen
            process.send_signal(number)
            assert process.wait(60) == status
        finally:
            process.kill()
            process.wait()
        left = terminal.read(65536)
    assert command.LEAVE.encode() in left and b"1 running" in left.partition(command.LEAVE.encode())[2]


class Fixed:
    """A collector of one metric."""

    def collect(self) -> Iterator[Metric]:
        metric = Metric("aoffload_requests", "", "gauge")
        metric.add_sample("aoffload_requests", {"state": "running"}, 1)
        yield metric


def test_it_looks_as_often_as_asked_and_waits_in_between() -> None:
    """It ends after the last look without waiting once more."""
    texts, times, slept = iter([BUSY, LATER, BUSY]), iter([0.0, 2.0, 4.0]), []
    shown = list(watch(lambda: next(texts), lambda: next(times), slept.append, 2.0, 3))
    assert [(look.at_s, before and before.at_s) for look, before in shown] == [(0.0, None), (2.0, 0.0), (4.0, 2.0)]
    assert slept == [2.0, 2.0]


@pytest.mark.parametrize("text", ["<html>", "", 'python_info{version="3"} 1\n', 'aoffload_x{a="b", ="c"} 1\nmetrics'])
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
        raise NothingToShow("can't be reached: connection refused")

    monkeypatch.setattr(command, "_fetch", fetch)
    monkeypatch.setattr(command.time, "sleep", lambda seconds: None)
    assert main(["http://127.0.0.1:1/metrics"]) == 1
    captured = capsys.readouterr()
    assert "1 running" in captured.out and captured.err == (
        "aoffload top: http://127.0.0.1:1/metrics can't be reached: connection refused\n"
    )


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


@pytest.mark.parametrize(
    ("status", "body", "said"),
    [
        (401, "", "answers 401 Unauthorized (set AOFFLOAD_API_KEY)"),
        (404, "", "answers 404 Not Found"),
        (200, "<html>", "answers with something else than metrics"),
        (200, "other 1\n", "has no metrics of aoffload"),
        (200, "vllm:aoffload_off 0\n", "has no metrics of aoffload, only those of its vLLM connector"),
    ],
)
def test_what_is_wrong_with_an_address_is_said_in_plain_words(
    status: int, body: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, *_: object) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Answer) as server:
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        url = f"http://127.0.0.1:{server.server_port}/metrics"
        assert main([url]) == 2
        thread.join()
    assert capsys.readouterr().err == f"aoffload top: {url} {said}\n"


@pytest.mark.parametrize(
    ("status", "location"),
    [(302, "http://["), *((status, "/elsewhere\x1b[31m") for status in (301, 302, 303, 307, 308))],
)
def test_a_redirect_is_not_followed(
    status: int, location: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The key goes to the host that was named, and to no other one. The address is on the line, escaped."""
    monkeypatch.setenv(command.KEY_VARIABLE, "secret")
    asked = []

    class Redirect(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append((self.path, self.headers["authorization"]))
            self.send_response(status if len(asked) == 1 else 200)
            self.send_header("location", location)
            self.end_headers()

        def log_message(self, *_: object) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Redirect) as server:
        address = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            assert main([f"{address}/metrics"]) == 2
        finally:
            server.shutdown()
            thread.join()
    assert asked == [("/metrics", "Bearer secret")]
    shown = location.replace("/elsewhere\x1b", f"{address}/elsewhere\\x1b")
    said = f"redirects to {shown}: use that address\n"
    assert capsys.readouterr().err == f"aoffload top: {address}/metrics {said}"


@contextmanager
def sending(*parts: bytes, gone: threading.Event) -> Iterator[str]:
    """A server that sends one answer, then bytes one by one until `gone`."""

    def serve() -> None:
        peer, _ = server.accept()
        with peer:
            peer.recv(65536)
            for part in parts:
                peer.sendall(part)
            while not gone.wait(0.01):
                peer.sendall(b"#")

    with socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.getsockname()[1]}/metrics"
        finally:
            gone.set()
            thread.join()


@pytest.mark.parametrize("begun", [b"HTTP/1.1 200 OK\r\nX: ", b"HTTP/1.1 200 OK\r\n\r\n# "], ids=["header", "body"])
def test_an_answer_that_drips_is_given_up(
    begun: bytes, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The time is that of the whole answer, not of one byte."""
    monkeypatch.setattr(command, "TIMEOUT_S", 0.25)
    with sending(begun, gone=threading.Event()) as url:
        assert main([url]) == 2
    assert capsys.readouterr().err == f"aoffload top: {url} does not answer within 0.25 s\n"


@pytest.mark.parametrize(
    "header", [b"Content-Length: 9999\r\n\r\n", b"Transfer-Encoding: chunked\r\n\r\nfff\r\n"], ids=["length", "chunk"]
)
def test_a_part_of_an_answer_is_not_shown(header: bytes, capsys: pytest.CaptureFixture[str]) -> None:
    """A missing counter would look like zero."""
    (gone := threading.Event()).set()
    with sending(b"HTTP/1.1 200 OK\r\n" + header, BUSY.encode(), gone=gone) as url:
        assert main([url, "--count", "1"]) == 2
    captured = capsys.readouterr()
    assert not captured.out
    assert captured.err == f"aoffload top: {url} can't be read: the answer was cut off\n"


def test_values_that_are_no_counts_are_not_shown() -> None:
    """NaN and infinity are left out, and an absurd value does not fill the screen."""
    odd = BUSY + 'aoffload_storage_off{tier="disk"} NaN\naoffload_requests{state="loading"} +Inf\n'
    assert list(lines(Look.of(odd, 0.0), None)) == list(lines(Look.of(BUSY, 0.0), None))
    huge = list(lines(Look.of(BUSY.replace("} 24", "} 1e300"), 0.0), None))
    assert max(map(len, huge)) <= 200


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
@pytest.mark.parametrize(
    ("target", "said"), [("> /dev/full", "No space left on device"), (">&-", "standard output is closed")]
)
@pytest.mark.parametrize("run", ["top {url} --count 1", "trace {log}", "plan --mix documents"])
def test_output_that_cannot_be_written_is_one_line(run: str, target: str, said: str, tmp_path: Path) -> None:
    """A full disk or a closed standard output: status 2, no traceback, and nothing more at exit."""
    log = tmp_path / "log"
    log.write_text(log_line(1, "request_aborted", request_id="r", reason="x", previous="running") + "\n")
    registry = CollectorRegistry()
    registry.register(Fixed())
    with listening(registry) as url:
        shell = f"{sys.executable} -m aoffload {run.format(url=url, log=log)} {target}"
        found = subprocess.run(["sh", "-c", shell], stderr=subprocess.PIPE, text=True, timeout=120)
    assert (found.returncode, found.stderr) == (2, f"aoffload {run.split()[0]}: {said}\n")


class HungUp(Terminal):
    """A terminal that was closed."""

    def write(self, text: str) -> int:
        raise OSError(errno.EIO, "Input/output error")


def test_a_closed_terminal_does_not_hide_what_ended_the_view(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ctrl-C stays Ctrl-C, the handler of SIGTERM is put back, and a failed write is one line and status 2."""
    monkeypatch.delenv("TERM", raising=False)
    before = signal.getsignal(signal.SIGTERM)
    screen = Screen(Terminal()).__enter__()
    screen.stream = HungUp()
    screen.__exit__()  # raises nothing, which would replace a KeyboardInterrupt
    assert signal.getsignal(signal.SIGTERM) is before
    monkeypatch.setattr(command, "_fetch", lambda request: BUSY)
    monkeypatch.setattr(sys, "stdout", HungUp())
    assert main(["http://127.0.0.1:1/metrics", "--count", "1"]) == 2
    assert capsys.readouterr().err == "aoffload top: Input/output error\n"


def test_no_escape_sequence_of_an_address_reaches_the_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nor in the title, nor in an error."""
    monkeypatch.setattr(command, "_fetch", lambda request: BUSY)
    assert main(["http://127.0.0.1:1/metrics#\x1b[31m", "--count", "1"]) == 0
    assert main(["ftp\x1b[31m", "--count", "1"]) == 2
    captured = capsys.readouterr()
    assert "\x1b" not in captured.out + captured.err and "#\\x1b[31m" in captured.out


def test_an_address_that_does_not_answer_is_said_in_plain_words(capsys: pytest.CaptureFixture[str]) -> None:
    with socket() as free:
        free.bind(("127.0.0.1", 0))  # and does not listen
        url = f"http://127.0.0.1:{free.getsockname()[1]}/metrics"
        assert main([url]) == 2
    assert capsys.readouterr().err == f"aoffload top: {url} can't be reached: connection refused\n"
