"""Mistakes of an operator, signals, and logs: on a full disk, with malformed requests, with many open requests."""

from __future__ import annotations

import gzip
import json
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

from .clients import Known, crowd, head
from .figures import Figure
from .victims import PROGRAMS, cpu_s, ended, reading, serving

__all__ = ["full_disks", "half_bodies", "malformed", "many_signals", "mistakes", "open_requests", "words"]

NEVER = float("inf")


def mistakes(tree: Path) -> Iterator[Figure]:
    """Options that cannot work, and model directories that are broken."""
    found = json.loads(ended(tree, str(PROGRAMS / "mistakes.py"), timeout_s=300).stdout)
    about = f"not status 2 and a message {'; '.join(found['missed'])}"
    yield Figure("C1", f"{found['num']} mistakes of an operator", about[:46], len(found["missed"]), 0)


def full_disks(tree: Path) -> Iterator[Figure]:
    """A log on a disk that is full, and the end of the server."""
    with serving(tree, "--log=/dev/full") as victim:
        answers = [Known(victim.port).answer_s() for _ in range(3)]
        before = len(victim.stderr_text.splitlines())
        status = victim.end()
        stderr_text = victim.stderr_text
    yield Figure("C2", "--log on a full disk", "answers that come", sum(s < NEVER for s in answers), 3, "", True)
    yield Figure("C2", "--log on a full disk", "lines that say so, before the end", before, 1, "", True)
    yield Figure("C2", "--log on a full disk", "lines of traceback at SIGTERM", _num_traced(stderr_text), 0)
    yield Figure("C2", "--log on a full disk", "exit status", NEVER if status is None else abs(status), 0)


def half_bodies(tree: Path) -> Iterator[Figure]:
    """SIGTERM while bodies are half sent."""
    attack = "SIGTERM with 20 half-sent bodies"
    with serving(tree) as victim, crowd(victim.port) as halves:
        halves.connect(20, head("/v1/completions", "content-length: 9") + b"{")
        Known(victim.port).answer_s()
        victim.process.send_signal(signal.SIGTERM)
        num_found = sum(b" 503 " in first for first in halves.first_bytes())
        status = victim.end()
        stderr_text = victim.stderr_text
    yield Figure("C3", attack, "told 503", num_found, 20, "", True)
    yield Figure("C3", attack, "written on stderr", len(stderr_text) / 1e3, 1.0, "kB")
    yield Figure("C3", attack, "exit status", NEVER if status is None else abs(status), 0)


def many_signals(tree: Path) -> Iterator[Figure]:
    """Signals that come until the process is gone."""
    with serving(tree) as victim:
        for _ in range(30):
            victim.process.send_signal(signal.SIGTERM)
        while victim.process.poll() is None:
            with suppress(ProcessLookupError):
                victim.process.send_signal(signal.SIGTERM)
            time.sleep(0.001)
        status = victim.process.returncode
    yield Figure("C4", "SIGTERM until it has ended", "exit status", abs(status), 0)


def open_requests(tree: Path) -> Iterator[Figure]:
    """A log of requests that begin and never end, read from a pipe."""
    early, late = range(100_000, 140_000), range(210_000, 250_000)
    with reading(tree, "-m", "aoffload.trace", "-", "summary") as process:
        slices = range(early.start), early, range(early.stop, late.start), late
        took_s = [_fed_s(process, numbers) for numbers in slices]
    attack = f"trace of {late.stop:,} open requests"
    yield Figure("C7", attack, f"an event after {late.start:,}, times as long", took_s[3] / took_s[1], 2.0)


def _fed_s(process: subprocess.Popen[bytes], numbers: range) -> float:
    """What so many events take of a processor, but for the few that fit into the pipe."""
    lines = "".join(map(_begun, numbers)).encode()
    assert process.stdin is not None
    before_s = cpu_s(process.pid)
    process.stdin.write(lines)
    process.stdin.flush()
    return cpu_s(process.pid) - before_s


def _begun(number: int) -> str:
    stamp = f"2026-01-01T{number // 36000:02}:{number // 600 % 60:02}:{number % 600 / 10:04.1f}Z"
    event = {"request_id": f"r{number}", "num_tokens": 64, "event": "request_matched", "timestamp": stamp}
    return json.dumps({**event, "num_device_tokens": 0, "num_host_tokens": 0, "level": "debug"}) + "\n"


def malformed(tree: Path) -> Iterator[Figure]:
    """Requests that are none, and what is written about them."""
    attack = "1,000 malformed requests"
    with serving(tree) as victim, crowd(victim.port) as clients:
        for number in range(1000):
            clients.connect(1, f"GET / HTTP/9.{number}\r\nx\r\n\r\n".encode())
        answer_s = Known(victim.port).answer_s()
        num_written = len(victim.stderr_text)
    yield Figure("D", attack, "written on stderr", num_written / 1e3, 5.0, "kB")
    yield Figure("D", attack, "a client in order is answered", answer_s < NEVER, 1, "", True)


def words(tree: Path) -> Iterator[Figure]:
    """What an error calls an option, and what is said of a missing extra or a compressed log."""
    server = ("-m", "aoffload.integrations.openai_server", "--model", "tiny", "--port", "0")
    blames = {
        "--host-blocks": ("--host-blocks", "10000000"),
        "--write-tokenizer": ("--write-tokenizer", "/dev/null/x"),
        "--host": ("--host", "192.0.2.1"),
    }
    wrong = sum(
        f"argument {name}:" not in ended(tree, *server, *options).stderr.decode() for name, options in blames.items()
    )
    yield Figure("D", f"{len(blames)} options that cannot be had", "errors with another name", wrong, 0)
    bare = "import sys; sys.modules['prometheus_client'] = None; import aoffload.metrics"
    error = ended(tree, "-c", bare).stderr.decode()
    yield Figure("D", "no prometheus_client", "errors without the extra's name", "aoffload[metrics]" not in error, 0)
    with ExitStack() as stack:
        log = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "events.log.gz"
        log.write_bytes(gzip.compress(_begun(1).encode()))
        status = ended(tree, "-m", "aoffload.trace", str(log)).returncode
    yield Figure("D", "a compressed log", "exit status of trace", status, 0)


def _num_traced(stderr_text: str) -> int:
    return stderr_text.count("Traceback") + stderr_text.count('  File "')
