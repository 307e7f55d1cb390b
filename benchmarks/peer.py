"""A peer: a process in an environment of its own, which does a unit of work on request and returns its time."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from .harness import SAMPLE_S, Sample, Subject

__all__ = ["ENVIRONMENTS", "Peer", "MissingPeerError"]

ENVIRONMENTS = Path("build/peers")
COMPILED = Path("build/compiled")
SCRIPTS = Path(__file__).with_name("peers")


class MissingPeerError(Exception):
    """The peer's environment does not exist."""


class Peer:
    """Runs `peers/NAME_side.py` with the Python of `build/peers/NAME`. Enter it once."""

    def __init__(self, name: str, python: Path | None = None, path: Path | None = None) -> None:
        """`python`: the interpreter in place of the environment's. `path`: a directory of modules that come before all
        others."""
        self.name = name
        self._python = python or ENVIRONMENTS / name / "bin" / "python"
        self._environ = os.environ | ({} if path is None else {"PYTHONPATH": str(path)})
        if not self._python.exists():
            raise MissingPeerError(f"{name} is not installed: make bench-peers")

    def __enter__(self) -> Self:
        ENVIRONMENTS.mkdir(parents=True, exist_ok=True)
        log = (ENVIRONMENTS / f"{self.name}.log").open("w")
        command = [str(self._python), str(SCRIPTS / f"{self.name}_side.py")]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=log, text=True, env=self._environ)
        log.close()
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def ask(self, call: str, **arguments: Any) -> Any:
        """Make a call in the peer. Returns its answer. If the peer ends, the error names its log."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps({"call": call, **arguments}) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.name} ended in {call}: see {ENVIRONMENTS / self.name}.log")
        return json.loads(line)

    @classmethod
    def compiled(cls) -> Self | None:
        """A process with the compiled core; None before `make compiled`."""
        tree = COMPILED / "tree"
        try:
            return cls("compiled", (COMPILED / "bin" / "python").absolute(), tree.absolute())
        except MissingPeerError:
            return None

    def matches(self, num_blocks: int) -> Subject:
        """Look-ups: from token ids to the cached part of them."""
        return lambda: Sample(**self.ask("match", num_blocks=num_blocks, least_s=SAMPLE_S))

    def cycles(self, num_blocks: int, *, hashes: bool) -> Subject:
        """Requests one after the other. With `hashes` the time includes the digests of their tokens."""
        return lambda: Sample(**self.ask("cycle", num_blocks=num_blocks, least_s=SAMPLE_S, hashes=hashes))
