"""The process that is attacked: of this checkout, or of another one."""

from __future__ import annotations

import os
import re
import resource
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import IO

__all__ = ["MB", "PROGRAMS", "Victim", "cpu_s", "ended", "has_option", "more_files", "reading", "serving", "started"]

MB = 1e6
PROGRAMS = Path(__file__).parent / "programs"
SERVER = ("-m", "aoffload.integrations.openai_server")
END_S = 40.0
"""How long an end in order may take, before the process is killed and counts as never ended."""


@dataclass
class Victim:
    process: subprocess.Popen[bytes]
    first_line: str
    """What it said once it could be attacked."""
    _errors: IO[bytes]

    @property
    def port(self) -> int:
        return int(re.findall(r":(\d+)", self.first_line)[0])

    @property
    def stdin(self) -> IO[bytes]:
        assert self.process.stdin is not None
        return self.process.stdin

    def next_line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().decode()

    @property
    def mb(self) -> float:
        """Its memory now."""
        return self._status("VmRSS") / MB

    @property
    def peak_mb(self) -> float:
        """The most memory that it has had."""
        return self._status("VmHWM") / MB

    @property
    def num_sockets(self) -> int:
        found = 0
        for entry in Path(f"/proc/{self.process.pid}/fd").iterdir():
            with suppress(OSError):  # closed meanwhile
                found += os.readlink(entry).startswith("socket:")
        return found

    @property
    def stderr_text(self) -> str:
        """All that it wrote on stderr."""
        self._errors.seek(0)
        return self._errors.read().decode(errors="replace")

    def end(self, number: signal.Signals = signal.SIGTERM) -> int | None:
        """Tell it to end; its exit status, None if it has to be killed."""
        with suppress(ProcessLookupError):
            self.process.send_signal(number)
        try:
            return self.process.wait(END_S)
        except subprocess.TimeoutExpired:
            return None

    def _status(self, name: str) -> int:
        text = Path(f"/proc/{self.process.pid}/status").read_text()
        (kilobytes,) = re.findall(rf"^{name}:\s+(\d+) kB", text, re.MULTILINE)
        return 1024 * int(kilobytes)


@contextmanager
def started(tree: Path, words: Sequence[str], num_files: int | None = None) -> Iterator[Victim]:
    """A Python process on the package in `tree`, once it has said a line. `num_files`: descriptors it may have."""
    command = [sys.executable, *words]
    if num_files is not None:
        command = ["sh", "-c", f'ulimit -n {num_files}; exec "$@"', "sh", *command]
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            command, cwd=tree, env=_environment(tree), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors
        )
        assert process.stdout is not None and process.stdin is not None
        with process.stdout, process.stdin:
            try:
                yield Victim(process, process.stdout.readline().decode(), errors)
            finally:
                process.kill()
                process.wait()


@contextmanager
def serving(tree: Path, *options: str, num_files: int | None = None) -> Iterator[Victim]:
    """The HTTP server with the smallest model. Options that the package in `tree` does not have yet are left out."""
    known: list[str] = []
    for option in options:
        name, _, value = option.partition("=")
        if has_option(tree, name):
            known += [name, value] if value else [name]
    with started(tree, [*SERVER, "--model", "tiny", "--port", "0", *known], num_files) as victim:
        if not victim.first_line:
            victim.process.wait()
            raise RuntimeError(victim.stderr_text)
        yield victim


def ended(tree: Path, *words: str, timeout_s: float = 120.0) -> subprocess.CompletedProcess[bytes]:
    """Run a Python process to its end."""
    command = [sys.executable, *words]
    return subprocess.run(
        command, cwd=tree, env=_environment(tree), capture_output=True, timeout=timeout_s, check=False
    )


@contextmanager
def reading(tree: Path, *words: str) -> Iterator[subprocess.Popen[bytes]]:
    """A Python process that reads from a pipe, and is killed in the end."""
    with subprocess.Popen(
        [sys.executable, *words],
        cwd=tree,
        env=_environment(tree),
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as process:
        yield process
        process.kill()


def cpu_s(pid: int) -> float:
    """Seconds of a processor that it has taken, whatever else the machine does."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@cache
def has_option(tree: Path, name: str) -> bool:
    return name in _help(tree)


@cache
def _help(tree: Path) -> frozenset[str]:
    return frozenset(re.findall(r"--[a-z-]+", ended(tree, *SERVER, "--help").stdout.decode()))


def more_files(wanted: int) -> int:
    """Let this process open `wanted` files, or as many as it may have; returns how many."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    found = wanted if most == resource.RLIM_INFINITY else min(wanted, most)
    resource.setrlimit(resource.RLIMIT_NOFILE, (found, most))
    return found


def _environment(tree: Path) -> dict[str, str]:
    about = {name: value for name, value in os.environ.items() if not name.startswith("AOFFLOAD_")}
    return {**about, "PYTHONPATH": str(tree), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
