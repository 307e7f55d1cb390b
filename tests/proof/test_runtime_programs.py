"""Programs over the runtime: clean on both backends, the same in every process, sharp enough for planted defects."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from aoffload._extensions.assembly import Ledger
from aoffload._runtime.request import Request
from proof.programs import GroupShape, Program, World, as_test, call, check_program, run_program
from proof.programs.program import Call, Face
from proof.programs.runtime_face import draw_and_run
from proof.programs.shrinking import shorten

MOST_CALLS = 12
"""Of a shortened program."""
BACKENDS: tuple[Face, ...] = ("asyncio", "trio")
MET = {
    "request", "allocate", "extend", "extend before load", "load", "device hit", "load_nowait", "early start", "step",
    "run_step", "commit", "commit_step", "drafts", "invalidate", "preempt", "resume", "flush", "reset", "reset device",
    "reset host", "pin", "prefetch", "demote", "cancel scope", "cancel request", "cancel runtime", "native cancel",
    "deadline", "close", "window", "chunk", "groups", "lazy", "selective", "off", "salt", "span", "verify",
}  # fmt: skip


@pytest.mark.parametrize("backend", BACKENDS)
def test_programs_break_no_law(backend: Face) -> None:
    """Whatever clients call, in whatever order, cancelled or not: the right bytes or a miss, and nothing leaks."""
    met: set[str] = set()
    num_calls = 0
    for seed in range(50):
        program, outcome = draw_and_run(backend, seed, 60)
        assert outcome.violation is None, as_test(program, "found", outcome.violation)
        met |= outcome.features
        num_calls += outcome.num_calls
    assert met >= MET
    assert num_calls > 2_000


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_program_that_is_run_again_comes_to_the_same(backend: Face) -> None:
    """It is drawn while it runs; run from its calls alone, every event is the same."""
    for seed in range(5):
        program, outcome = draw_and_run(backend, seed, 60)
        assert run_program(program) == outcome


def first_broken(first: int) -> Program:
    for seed in range(first, first + 300):
        program, outcome = draw_and_run("asyncio", seed, 60)
        if outcome.violation is not None:
            return program
    raise AssertionError("the planted defect was not found")


def test_a_reader_that_is_not_told_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who has computed on what a failed forward wrote has to hear of it."""

    def reports_nothing(self: Request, from_token: int) -> None:
        self._session.ledger.invalidation.invalidate(self._live(), from_token)

    monkeypatch.setattr(Request, "invalidate", reports_nothing)
    assert_found({"not told", "wrong bytes"}, first=75)


def test_a_step_that_holds_nothing_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block that a forward touches is nobody else's until it ends."""

    step = Ledger.step

    @contextmanager
    def holds_nothing(self: Ledger, records: Any) -> Iterator[None]:
        with step(self, tuple(records)):  # checks, and ends at once
            pass
        yield

    monkeypatch.setattr(Ledger, "step", holds_nothing)
    assert_found({"ownership", "wrong bytes", "two owners", "conservation"})


def assert_found(oracles: set[str], first: int = 10) -> None:
    """Once the defect is planted, a short program breaks one of `oracles`. Looked for from the seed `first` on."""
    program = shorten(first_broken(first), lambda program: run_program(program).violation, 400)
    violation = run_program(program).violation
    assert violation is not None
    assert violation.oracle in oracles
    assert len(program.calls) <= MOST_CALLS, as_test(program, "found", violation)


# -- what programs have found ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
def test_waiting_again_for_a_load_that_can_never_fit_is_refused(backend: Face) -> None:
    """A load of fewer tokens than were matched may need more blocks than there are. Who was told so and waits for it
    again is refused, and does not wait for ever."""
    tokens = (2, 2, 1, 2, 3, 3, 2, 1, 1, 2, 2, 2, 1, 2, 2, 3, 1, 2, 1, 1, 1, 2)
    world = World((GroupShape("full", 0, 1), GroupShape("chunk", 2, 2)), 35, 35, 3, "eager", 0.5, 1.0)
    calls = (
        call("serve", who="c", tokens=tokens),
        call("flush", who="a"),
        call("reset", who="a", tier="DEVICE"),
        call("request", who="c", tokens=(*tokens, 2)),
        call("allocate", who="c", by=4),
        call("request", who="a", tokens=tokens),
        call("load_nowait", who="c", max_tokens=10),
        call("allocate", who="a"),
        call("wait", who="c", give_up_s=0.001),
        call("wait", who="c"),
    )
    check_program(Program(backend, world, calls, 10912))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_pin_that_keeps_no_block_does_not_yield(backend: Face) -> None:
    """A pin ends for a waiting request only if that frees blocks."""
    prompt = (3, 1, 3, 3, 1, 2, 2, 2, 2, 1, 3, 1, 3, 1, 2, 1, 2)
    world = World((GroupShape("window", 10, 4), GroupShape("full", 0, 4)), 21, 21, 2000, "eager", 1.0, 0.5)
    calls = (
        call("serve", who="a", tokens=(3, 3, 3, 2)),
        call("request", who="b", tokens=prompt),
        call("allocate", who="b"),
        call("load", who="b"),
        call("request", who="a", tokens=(*prompt, 1, 3, 1, 2)),
        call("allocate", who="a", by=-2),
        call("extend", who="b", hurry=True),
        call("pin", who="a", tokens=(3, 3, 3, 2), ttl_s=0.02),
        call("extend", who="a"),
    )
    check_program(Program(backend, world, calls, 10883))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_pin_keeps_what_the_same_prompt_would_hit(backend: Face) -> None:
    """With windows, a prompt that is cached to its end may hit far less when it is asked for again: that stays, too."""
    prompt = (3, 3, 1, 2, 1, 1, 1, 3, 3, 1, 3, 3)
    world = World((GroupShape("window", 4, 2),), 8, 40, 3, "off", 0.5, 0.5)
    calls = (
        call("step", who="b"),
        call("serve", who="a", tokens=(*prompt, 1, 1)),
        call("request", who="b", tokens=(*prompt, 1)),
        call("allocate", who="b"),
        call("load", who="b"),
        call("pin", who="b", tokens=prompt, ttl_s=0.3),
        call("commit", who="b"),
        call("request", who="a", tokens=(3, 3, 1, 2, 1, 3), spans=((4, 5, b"i"),), alignment=5),
        call("allocate_nowait", who="a"),
    )
    for seed in range(10):
        check_program(Program(backend, world, calls, seed))


TOKENS = tuple(range(1, 10))
MENDED: dict[str, tuple[World, tuple[Call, ...], int]] = {
    "matched again under block tables": (
        World((GroupShape("full", 0, 1), GroupShape("window", 3, 1)), 41, 64, 1000, "eager"),
        (
            call("serve", who="a", tokens=TOKENS),
            call("flush", who="a"),
            call("reset", who="a", tier="DEVICE"),
            call("request", who="a", tokens=TOKENS),
            call("allocate", who="a"),
            call("serve", who="b", tokens=TOKENS, reads_cache=False),
            call("request", who="b", tokens=TOKENS, reads_cache=False),
            call("allocate", who="b", by=0),
            call("extend", who="a", by=10, give_up_s=0.01),
            call("load", who="a"),
        ),
        1,
    ),
    "another's part of a wrong run left findable": (
        World((GroupShape("window", 3, 1),), 41, 64, 1000, "eager"),
        (
            call("request", who="a", tokens=TOKENS),
            call("allocate", who="a"),
            call("step", who="a", num=3),
            call("commit", who="a"),
            call("request", who="b", tokens=TOKENS),
            call("allocate", who="b"),
            call("load", who="b"),
            call("step", who="b"),
            call("commit", who="b"),
            call("step", who="a", num=3),
            call("commit", who="a"),
            call("invalidate", who="a", back=30),
        ),
        1,
    ),
    "a grant that was not accepted when the device was reset": (
        World((GroupShape("full", 0, 1),), 21, 64, 1000, "eager"),
        (
            call("fault", kind="vanish", at=1),
            call("statistics", who="c"),
            call("serve", who="a", tokens=TOKENS[:7]),
            call("flush", who="a"),
            call("reset", who="a", tier="DEVICE"),
            call("request", who="a", tokens=TOKENS[:7]),
            call("allocate", who="a"),
            call("request", who="b", tokens=(*TOKENS[:3], *[9] * 8), reads_cache=False, store="none"),
            call("allocate", who="b"),
            call("load", who="a"),
            call("step", who="b"),
            call("commit", who="b"),
            call("leave", who="b", hurry=True),
            call("reset", who="c", tier="DEVICE", hurry=True),
        ),
        12,
    ),
    "a load that has landed, and is preempted before its task is woken": (
        World((GroupShape("full", 0, 2),), 10, 100, 1, "eager"),
        (
            call("serve", who="a", tokens=TOKENS[:18]),
            call("flush", who="a"),
            call("reset", who="a", tier="DEVICE"),
            call("request", who="b", tokens=TOKENS[:5]),
            call("begin_prefetch", who="c", tokens=TOKENS[:3]),
            call("allocate", who="b"),
            call("preempt", who="a", of="b", hurry=True),
            call("load", who="b"),
        ),
        200,
    ),
    "a prefix demoted of which windows need nothing": (
        World((GroupShape("window", 1, 2),), 2, 100, 1000, "off"),
        (
            call("serve", who="b", tokens=(2, 3)),
            call("demote", who="a", tokens=(2, 3)),
            call("serve", who="a", tokens=(2, 3, 2, 2)),
            call("demote", who="a", tokens=(2, 3, 2, 2, 2)),
        ),
        1,
    ),
}
"""What went wrong once: the world, the calls, and in how many orders of its tasks they are made."""


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", MENDED)
def test_what_went_wrong_once_goes_right(name: str, backend: Face) -> None:
    """Sequences of calls that led to wrong bytes or leaks, whoever of the clients is first."""
    world, calls, num_orders = MENDED[name]
    for seed in range(num_orders):
        check_program(Program(backend, world, calls, seed))
