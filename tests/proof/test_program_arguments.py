"""Invalid programs: each mistake raises a typed error that names it, and is neither reported as a violation nor
ignored."""

from __future__ import annotations

from functools import cache
from typing import Any, get_args

import attrs
import pytest

from aoffload import ConfigError, InvalidArgument
from proof.programs import (
    Face,
    GroupShape,
    Program,
    World,
    as_test,
    call,
    calls_of,
    explore_programs,
    program_of,
    replay_program,
    run_program,
)

PLAIN = World((GroupShape("full", 0, 2),), 8, 8, 100, "eager")
WRONG_CALLS = [
    ("ledger", call("frobnicate")),
    ("ledger", call("request", who="a", tokens=[1])),
    ("ledger", call("serve", who="a", tokens=[1])),
    ("ledger", call("serve")),
    ("ledger", call("settle", job="r:load:0", outcome="eaten")),
    ("ledger", call("settle", job="r:load:0", at=-1)),
    ("ledger", call("launch", job=None)),
    ("ledger", call("reset", tier="TAPE")),
    ("engine", call("reset", tier="TAPE")),
    ("engine", call("allocate", who="r")),
    ("engine", call("load", who="r", sparse="yes")),
    ("ledger", call("compute", who="r", stop="x")),
    ("asyncio", call("admit", who="a", tokens=[1])),
    ("asyncio", call("")),
    ("asyncio", call("__init__")),
    ("asyncio", call("serve", tokens=[1, 2])),
    ("asyncio", call("serve", who="a", tokens=[1, 2], bogus=3)),
    ("asyncio", call("serve", who=["a"], tokens=[1, 2])),
    ("asyncio", call("cancel", who="a", how="gently")),
    ("asyncio", call("cancel", who="a", how="native", after="x")),
    ("asyncio", call("step", who="a", style="gpu")),
    ("asyncio", call("flush", who="a", hurry="no")),
    ("asyncio", call("flush", who="a", give_up_s=-1)),
    ("asyncio", call("fault", at=1)),
    ("asyncio", call("fault", kind="eaten")),
    ("asyncio", call("fault", kind="lose", at="x")),
    ("trio", call("configure", nonsense=1)),
    ("engine-asyncio", call("allocate", who="a")),
    ("engine-trio", call("not_here", who="a", verb="load")),
    ("engine-trio", call("request", who="a", tokens=[1, 2], fewer=-1)),
    ("trio", call("reset", who="a", tier=object())),
]


@pytest.mark.parametrize(
    ("face", "wrong"), WRONG_CALLS, ids=[f"{face} {wrong}" for face, wrong in WRONG_CALLS[:-1]] + ["object"]
)
def test_a_call_that_no_program_makes_is_refused(face: Any, wrong: Any) -> None:
    """Unknown calls, unknown and missing arguments, and values that mean nothing."""
    with pytest.raises(InvalidArgument, match="calls"):
        run_program(Program(face, PLAIN, (wrong,)))


def test_a_program_is_made_of_the_right_things() -> None:
    """Of a face, a world, calls and a number."""
    for change, name in (
        ({"face": "uvloop"}, "face"), ({"world": None}, "world"), ({"calls": ("serve",)}, "calls"),
        ({"calls": call("watermark")}, "calls"), ({"seed": "x"}, "seed"),
    ):  # fmt: skip
        with pytest.raises(InvalidArgument, match=name):
            attrs.evolve(Program("ledger", PLAIN, ()), **change)  # type: ignore[arg-type]


def test_a_world_that_cannot_be_is_refused_when_it_is_made() -> None:
    """By the name of what is wrong with it."""
    for change, name in (
        ({"groups": None}, "groups"), ({"groups": ("full",)}, "groups"), ({"groups": ()}, "groups"),
        ({"num_device_blocks": 1}, "num_device_blocks"), ({"num_host_blocks": -1}, "num_host_blocks"),
        ({"store_policy": None}, "store_policy"), ({"store_policy": "lazy:x"}, "store_policy"),
        ({"store_policy": "eager:3"}, "store_policy"), ({"max_pinned_share": 7}, "max_pinned_share"),
    ):  # fmt: skip
        with pytest.raises((InvalidArgument, ConfigError), match=name):
            attrs.evolve(PLAIN, **change)  # type: ignore[arg-type]
    for kind, reach in (("sliding", 3), ("full", 5)):
        with pytest.raises(InvalidArgument):
            GroupShape(kind, reach, 2)


@pytest.mark.parametrize(
    "line",
    ["", "garbage", "uvloop seed=1", "ledger", "ledger seed=x", "ledger seed=1.5", "ledger seed=1 calls=", None, 17,
     "engine-uvloop seed=1", b"ledger seed=1",
     "ledger seed=1 calls=-60", "ledger seed=1 extra=1", "ledger seed=1 seed=2", "ledger seed=1_7"],
)  # fmt: skip
def test_a_line_that_stands_for_no_program_is_refused(line: Any) -> None:
    """Nothing is guessed: what is replayed is what was printed."""
    with pytest.raises(InvalidArgument, match="line"):
        replay_program(line)


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        (("uvloop", 0, 1), "face"),
        ((None, 0, 1), "face"),
        (("ledger", "a", 1), "first_seed"),
        (("trio", -1, 1), "first_seed"),
        (("ledger", 0, 1.5), "num_programs"),
        (("ledger", 0, -1), "num_programs"),
        (("asyncio", 0, 1, "60"), "num_calls"),
        (("ledger", 0, 1, -1), "num_calls"),
    ],
)
def test_what_is_to_be_explored_is_checked(arguments: tuple[Any, ...], name: str) -> None:
    """Before a program is drawn."""
    with pytest.raises(InvalidArgument, match=name):
        explore_programs(*arguments)


@cache
def drawn(face: Any) -> tuple[Program, ...]:
    return tuple(program_of(face, seed)[0] for seed in range(12))


@pytest.mark.parametrize("face", get_args(Face))
def test_drawn_programs_make_known_calls_only(face: Any) -> None:
    """What is drawn can be printed, pasted and run."""
    for program in drawn(face):
        program.check()


@pytest.mark.parametrize("text", ['says """this"""', "ends in a \\", "a name like \\N{", 'ends in "'])
def test_whatever_was_broken_the_printed_test_is_python(text: str) -> None:
    """Violations quote errors, and errors quote anything."""
    compile(as_test(Program("ledger", PLAIN, (call("watermark"),)), "found", text), "found", "exec")


def test_a_name_that_no_test_can_have_is_refused() -> None:
    """It would not be collected."""
    with pytest.raises(InvalidArgument, match="name"):
        as_test(Program("ledger", PLAIN, ()), "not a name", "broken")


@pytest.mark.parametrize("face", get_args(Face))
def test_every_call_says_what_it_takes(face: Face) -> None:
    """Who writes a program by hand finds each call, and can make it with what it says it needs."""
    calls = calls_of(face)
    assert {one.name for program in drawn(face) for one in program.calls} <= calls.keys()
    for name, words in calls.items():
        needed, optional = (part.partition(" ")[2].removeprefix("have ") for part in str(words).split("; "))
        assert {*needed.split(", "), *optional.split(", ")} - {"-"} == words.allowed, name


@pytest.mark.parametrize("face", ["", "LEDGER", "runtime", None, 7, []])
def test_calls_of_no_face_are_refused(face: Any) -> None:
    """A misspelled face has no calls, not those of another one."""
    with pytest.raises(InvalidArgument, match="asyncio") as refusal:
        calls_of(face)
    assert refusal.value.argument == "face"
