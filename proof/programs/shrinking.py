"""Shortening: finds the fewest calls of a program that still break the same law, and prints them as a test."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import TypeAlias

import attrs

from aoffload._common.arguments import shown
from aoffload.errors import InvalidArgument
from aoffload.testing.violations import Violation

from .program import Call, Program
from .vocabulary import calls_of

__all__ = ["as_test", "shorten"]

Run: TypeAlias = Callable[[Program], Violation | None]
"""Runs a program, and returns its violation, if any."""
StillBreaks: TypeAlias = Callable[[Program], bool]


def shorten(program: Program, run: Run, at_most: int = 2000) -> Program:
    """The shortest program found in `at_most` runs that breaks the same law as `program`. Leaves out calls (all about
    one object, halves, quarters, single ones) and makes the world plainer, until nothing can be spared."""
    broken = run(program)
    assert broken is not None, "nothing is broken"
    num_left = at_most

    def still_breaks(fewer: Program) -> bool:
        nonlocal num_left
        num_left -= 1
        found = run(fewer) if num_left >= 0 else None
        return found is not None and found.oracle == broken.oracle

    while num_left > 0:
        before = program
        for plainer in (_without_some, _fewer, _extended_at_once, _shorter_prompts, _plainer, _plainer_world):
            program = plainer(program, still_breaks)
        if program == before:
            program = _without_two(program, still_breaks)
        if program == before:
            break
    return program


def _without_some(program: Program, still_breaks: StillBreaks) -> Program:
    """Without all calls about one and the same request, step or pin."""
    for whom in dict.fromkeys(value for call in program.calls for value in _about(call)):
        fewer = program.with_calls([call for call in program.calls if whom not in _about(call)])
        if fewer.calls and still_breaks(fewer):
            program = fewer
    return program


def _about(call: Call) -> list[object]:
    return [call.args[name] for name in ("who", "child", "step", "name") if isinstance(call.args.get(name), str)]


def _fewer(program: Program, still_breaks: StillBreaks) -> Program:
    """Without the calls that can be spared: halves, quarters, one by one."""
    size = max(1, len(program.calls) // 2)
    while True:
        before = len(program.calls)
        program = _without_pieces(program, size, still_breaks)
        if size == 1 and len(program.calls) == before:
            return program
        size = max(1, size // 2)


def _without_pieces(program: Program, size: int, still_breaks: StillBreaks) -> Program:
    """Without every piece of `size` calls that can be spared, last first: later calls depend on earlier ones."""
    for start in range((len(program.calls) - 1) // size * size, -1, -size):
        fewer = program.with_calls(program.calls[:start] + program.calls[start + size :])
        if fewer.calls and still_breaks(fewer):
            program = fewer
    return program


def _without_two(program: Program, still_breaks: StillBreaks) -> Program:
    """Without two calls that only make sense together, one opening what the other closes."""
    for first, second in itertools.combinations(range(len(program.calls)), 2):
        fewer = program.with_calls([call for at, call in enumerate(program.calls) if at not in (first, second)])
        if fewer.calls and still_breaks(fewer):
            return fewer
    return program


def _shorter_prompts(program: Program, still_breaks: StillBreaks) -> Program:
    """All prompts without their last token, as often as can be: those that share a prefix go on sharing it."""
    while any(len(call.args.get("tokens", ())) > 1 for call in program.calls):
        shorter = program.with_calls([_less_its_last_token(call) for call in program.calls])
        if not still_breaks(shorter):
            break
        program = shorter
    return program


def _less_its_last_token(call: Call) -> Call:
    tokens = call.args.get("tokens", ())
    return call if len(tokens) < 2 else Call(call.name, {**call.args, "tokens": tokens[:-1]})


def _plainer(program: Program, still_breaks: StillBreaks) -> Program:
    """Fewer options and shorter prompts, after which other calls may be spared."""
    for number in range(len(program.calls)):
        for plainer in _variants(program.face, program.calls[number]):
            changed = program.with_calls((*program.calls[:number], plainer, *program.calls[number + 1 :]))
            if still_breaks(changed):
                program = changed
                break
    return program


def _extended_at_once(program: Program, still_breaks: StillBreaks) -> Program:
    """With `extend` calls left out, and their room asked for by `allocate`."""
    for call in program.calls:
        if call.name == "extend" and "num_tokens" in call.args:  # the ledger's `extend`: an absolute number
            rest = [other for other in program.calls if other is not call]
            changed = program.with_calls([_with_room_of(call, other) for other in rest])
            if still_breaks(changed):
                program = changed
    return program


def _with_room_of(extension: Call, call: Call) -> Call:
    if call.name != "allocate" or call.args["who"] != extension.args["who"]:
        return call
    return Call("allocate", {**call.args, "num_tokens": extension.args["num_tokens"]})


def _variants(face: str, call: Call) -> Iterator[Call]:
    args, needed = dict(call.args), calls_of(face)[call.name].needed
    for name, value in args.items():
        if name not in needed:
            yield Call(call.name, {other: it for other, it in args.items() if other != name})
        if name in ("tokens", "new") and len(value) > 1:
            yield Call(call.name, {**args, name: value[: len(value) // 2]})
            yield Call(call.name, {**args, name: value[:-1]})
    if face in ("ledger", "states", "kernel", "meddled") and call.name in ("evict", "invalidate"):
        yield Call("reset", {"tier": "DEVICE"})


def _plainer_world(program: Program, still_breaks: StillBreaks) -> Program:
    """With eager stores, large jobs, a host with room for all, fewer groups, or a smaller device."""
    world = program.world
    plainer = [
        attrs.evolve(world, store_policy="eager"), attrs.evolve(world, max_job_bytes=1000),
        attrs.evolve(world, num_host_blocks=max(world.num_host_blocks, 100)),
        *(attrs.evolve(world, groups=groups) for groups in (world.groups[:1], world.groups[1:]) if groups),
        *(attrs.evolve(world, num_device_blocks=number) for number in range(2, min(world.num_device_blocks, 40))),
    ]  # fmt: skip
    for other in plainer:
        changed = attrs.evolve(program, world=other)
        if other != world and still_breaks(changed):
            return changed
    return program


def as_test(program: Program, name: str, violation: Violation | str) -> str:
    """The program as a test, `test_NAME`, that can be pasted into a file of its own."""
    if not isinstance(name, str) or not f"test_{name}".isidentifier():
        raise InvalidArgument("name", f"must be a name of Python, got {shown(name)}")
    broken = str(violation).replace("\\", "\\\\").replace('"', '\\"')
    calls = [f"            {call}," for call in program.calls]
    lines = [
        "from proof.programs import GroupShape, Program, World, call, check_program",
        "",
        "",
        f"def test_{name}() -> None:",
        f'    """Broke: {broken}"""',
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
