"""Shortening: the fewest calls of a program that still break the same law, and how they are printed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from ..violations import Violation
from .program import Call, Program

__all__ = ["as_test", "shorten"]

REQUIRED = frozenset(
    {"who", "tokens", "name", "step", "job", "child", "stop", "from_token", "num_computed_tokens", "now"}
)
"""Arguments without which a call is none."""
Run = Callable[[Program], Violation | None]
"""Runs a program; the law that it breaks, if any."""


def shorten(program: Program, run: Run, at_most: int = 2000) -> Program:
    """The shortest program found in `at_most` runs that breaks the law that `program` breaks: calls are left out in
    halves, quarters, and one by one, until none can be spared."""
    broken = run(program)
    assert broken is not None, "nothing is broken"
    num_left = at_most

    def still_breaks(calls: Sequence[Call]) -> bool:
        nonlocal num_left
        num_left -= 1
        found = run(program.with_calls(calls)) if num_left >= 0 else None
        return found is not None and found.oracle == broken.oracle

    calls = list(program.calls)
    while num_left > 0:
        before = len(calls)
        calls = _fewer(calls, still_breaks)
        calls = _plainer(calls, still_breaks)
        if len(calls) == before:
            break
    return program.with_calls(calls)


def _fewer(calls: list[Call], still_breaks: Callable[[Sequence[Call]], bool]) -> list[Call]:
    """`calls` without whatever can be spared: halves, quarters, one by one."""
    size = max(1, len(calls) // 2)
    while True:
        before = len(calls)
        calls = _without_pieces(calls, size, still_breaks)
        if size == 1 and len(calls) == before:
            return calls
        size = max(1, size // 2)


def _without_pieces(calls: list[Call], size: int, still_breaks: Callable[[Sequence[Call]], bool]) -> list[Call]:
    """`calls` less every piece of `size` that can be spared, last first: what comes later hangs on what came before."""
    for start in range((len(calls) - 1) // size * size, -1, -size):
        fewer = calls[:start] + calls[start + size :]
        if fewer and still_breaks(fewer):
            calls = fewer
    return calls


def _plainer(calls: list[Call], still_breaks: Callable[[Sequence[Call]], bool]) -> list[Call]:
    """`calls` with fewer options and shorter prompts, which others of them may then be spared for."""
    for number in range(len(calls)):
        for plainer in _variants(calls[number]):
            changed = [*calls[:number], plainer, *calls[number + 1 :]]
            if still_breaks(changed):
                calls = changed
                break
    return calls


def _variants(call: Call) -> Iterator[Call]:
    args = dict(call.args)
    for name, value in args.items():
        if name not in REQUIRED:
            yield Call(call.name, {other: it for other, it in args.items() if other != name})
        if name in ("tokens", "new") and len(value) > 1:
            yield Call(call.name, {**args, name: value[: len(value) // 2]})
            yield Call(call.name, {**args, name: value[:-1]})


def as_test(program: Program, name: str, violation: Violation) -> str:
    """The program as a test that can be pasted into a file of its own."""
    calls = [f"            {call}," for call in program.calls]
    lines = [
        "from aoffload.testing.programs import GroupShape, Program, World, call, check_program",
        "",
        "",
        f"def test_{name}() -> None:",
        f'    """Broke: {violation}"""',
        "    program = Program(",
        f"        {program.face!r},",
        f"        {program.world!r},",
        "        (",
        *calls,
        "        ),",
        f"        {program.seed},",
        "    )",
        "    check_program(program)",
    ]
    return "\n".join(lines) + "\n"
