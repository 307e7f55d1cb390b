"""Every place where the package waits, read from its source: a cancellation can arrive at each of them."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from pathlib import Path

import attrs

import aoffload

__all__ = ["Wait", "missed", "waits"]

PACKAGE = Path(aoffload.__file__).parent
NOT_SERVING = ("testing", "demo", "_reference/server")
"""Subpackages that are programs around the runtime, not part of serving; the server waits for real sockets."""
CANCELLED_ELSEWHERE = {
    ("_runtime/request.py", "EngineRequest.match_again"): "test_engine_runtime.py",
    ("_runtime/request.py", "EngineRequest.load"): "test_engine_runtime.py, and test_long_prompts.py for long prompts",
    ("_runtime/runtime.py", "HostCacheRuntime.run"): "test_engine_runtime.py",
}
"""Methods that no simulated run enters, because its engines own no blocks; and the tests that cancel at each of their
checkpoints."""
NEVER_THERE = {
    "anyio.to_thread.run_sync(": "the seam to real threads: simulated runs have another one in its place",
    "create_task_group())": "entering a task group waits for nothing",
    "self._tasks.__aenter__()": "entering a task group waits for nothing",
    "trio.sleep_until(": "the task of a timer: whoever set it calls it off, and nobody waits for it",
    "await self._close()": "waits where the lines of `_close` do, which are to be hit themselves",
    "async with request:": "entering and leaving a request wait for nothing",
    "async with self.runtime.request(": "entering and leaving a request wait for nothing",
    **dict.fromkeys(
        (
            "self._load_by_layer(",
            "early.wait()",
            "head.wait_until_over()",
            "self._is_over.wait()",
            "self._run_ahead(",
            "self._compute(ahead)",
        ),
        "a start by layer: its forward's thread blocks, as no simulated one may; test_head_starts.py cancels",
    ),
}
"""Pieces of the source at which no simulated task is ever suspended, and why."""


@attrs.frozen(order=True)
class Wait:
    path: str
    first_line: int
    last_line: int

    def __str__(self) -> str:
        return f"{self.path}:{self.first_line}"


def waits() -> list[Wait]:
    """Each `await`, `async with` and `async for`, by file and line."""
    return sorted(set(_waits()))


def _waits() -> Iterator[Wait]:
    for path in sorted(PACKAGE.rglob("*.py")):
        name = str(path.relative_to(PACKAGE))
        if name.startswith(NOT_SERVING):
            continue
        source = path.read_text()
        nodes = [*ast.walk(ast.parse(source))]
        elsewhere = {
            inner
            for kind in nodes
            if isinstance(kind, ast.ClassDef)
            for node in kind.body
            if isinstance(node, ast.AsyncFunctionDef) and (name, f"{kind.name}.{node.name}") in CANCELLED_ELSEWHERE
            for inner in ast.walk(node)
        }
        for node in nodes:
            if node in elsewhere or not isinstance(node, (ast.Await, ast.AsyncWith, ast.AsyncFor)):
                continue
            text = ast.get_source_segment(source, node) or ""
            if any(piece in text.partition(":\n")[0] + ":" for piece in NEVER_THERE):
                continue
            if isinstance(node, ast.Await):
                yield Wait(name, node.lineno, node.end_lineno or node.lineno)
            elif isinstance(node, (ast.AsyncWith, ast.AsyncFor)):
                yield Wait(name, node.lineno, node.body[0].lineno - 1)


def missed(hit: Iterable[tuple[str, int]]) -> list[Wait]:
    """Waits at which no cancellation has met a task."""
    lines = set(hit)
    return [
        wait
        for wait in waits()
        if not any((wait.path, line) in lines for line in range(wait.first_line, wait.last_line + 1))
    ]
