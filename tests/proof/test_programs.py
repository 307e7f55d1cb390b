"""Programs over the ledger: the violations that they find, shrinking, replay, and equality in every process."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from typing import Any, get_args

import attrs
import pytest

from aoffload import Ledger, Tier
from aoffload._extensions.pins import Pins
from aoffload._kernel.cache import ComponentManager, PrefixCache
from aoffload._kernel.leases import RequestLeases
from aoffload._kernel.pools import TierBlocks
from aoffload._kernel.records import LedgerRequest
from aoffload._kernel.waiting import Admission
from aoffload.errors import OutOfBlocks
from aoffload.testing import Violation
from proof.programs import (
    Broken,
    Face,
    GroupShape,
    Program,
    World,
    as_test,
    call,
    check_program,
    explore_programs,
    replay_program,
    run_program,
)
from proof.programs.shrinking import shorten

PLAIN = World((GroupShape("full", 0, 2),), 13, 8, 1000, "eager")


def found(num_programs: int = 400) -> Broken:
    """The first broken program."""
    for first in range(0, num_programs, 20):
        if broken := explore_programs("ledger", first, 20).broken:
            return broken[0]
    raise AssertionError("nothing was found")


def test_programs_break_no_law() -> None:
    """Whatever is called in whatever order: right bytes or a miss, nothing leaks, a refused call changes nothing."""
    tally = explore_programs("ledger", 0, 80)
    assert not tally.broken, tally.broken[0]
    assert tally.num_programs == 80 and tally.num_calls > 4_000
    met = {name for pair in tally.pairs for name in pair}
    assert {"device hit", "host hit", "evict", "invalidate", "fork", "preempt", "reset", "step", "window", "pin"} <= met


def digests() -> dict[str, str]:
    """What a few programs of each face show."""
    return {face: explore_programs(face, 40, 8 if face == "ledger" else 2).digest for face in get_args(Face)}


def test_the_same_seed_is_the_same_program_in_every_process() -> None:
    """Over whatever it runs, what a seed stands for depends on no hash seed, no address and no clock."""
    code = f"import runpy; print(runpy.run_path({__file__!r})['digests']())"
    answers_by_process = {
        subprocess.run(
            [sys.executable, "-c", code], env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, check=True
        ).stdout.splitlines()[-1].decode()
        for seed in ("0", "1")
    }  # fmt: skip
    assert len(answers_by_process) == 1


@pytest.mark.pure("plants a defect in the core")
def test_bytes_of_another_prefix_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache that hands out a block that somebody still reads is found, and the program shortened to a few calls."""

    def pins_nothing(_: ComponentManager, blocks: TierBlocks, run: Any, start: int, is_use: bool) -> None:
        run.parts[blocks.tier].num_references += 1

    monkeypatch.setattr(ComponentManager, "pin", pins_nothing)
    broken = found()
    shortest = broken.shortest()
    assert len(shortest.calls) <= 12 and run_program(shortest).violation is not None


def test_what_only_makes_sense_together_goes_together() -> None:
    """A program is made short by taking out two calls at once, by asking for all the room at first, by cutting prompts
    that share a prefix alike, and by a reset in place of what takes more calls."""
    calls = (
        call("admit", who="a", tokens=[1, 2, 3, 4, 5, 6]), call("begin", step="s", who=["a"]), call("land"),
        call("admit", who="b", tokens=[1, 2, 3, 4, 5, 6]), call("allocate", who="b"),
        call("extend", who="b", num_tokens=9), call("end", step="s", commits=False),
        call("invalidate", who="a", from_token=0),
    )  # fmt: skip

    def run(program: Program) -> Violation | None:
        names = [one.name for one in program.calls]
        prompts = {tuple(one.args["tokens"]) for one in program.calls if one.name == "admit"}
        breaks = (
            names.count("begin") == names.count("end")
            and len(prompts) == 1 and names.count("admit") == 2 and len(min(prompts)) > 2
            and "allocate" in names and any(one.args.get("num_tokens") == 9 for one in program.calls)
            and ("invalidate" in names or "reset" in names)
        )  # fmt: skip
        return Violation("made up", "for this test") if breaks else None

    assert shorten(Program("ledger", PLAIN, calls), run).calls == (
        call("admit", who="a", tokens=[1, 2, 3]), call("admit", who="b", tokens=[1, 2, 3]),
        call("allocate", who="b", num_tokens=9), call("reset"),
    )  # fmt: skip


@pytest.mark.pure("plants a defect in the core")
def test_what_a_refused_call_changes_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A refusal that counts something is found by looking at everything before and after."""
    refuse = Admission._never_fits

    def forgetful(self: Admission, record: LedgerRequest, num_units: int) -> OutOfBlocks | None:
        error = refuse(self, record, num_units)
        if error is not None:
            record.hit_limit += 1
        return error

    monkeypatch.setattr(Admission, "_never_fits", forgetful)
    program = Program(
        "ledger", PLAIN, (call("admit", who="r", tokens=[1, 2]), call("allocate", who="r", num_tokens=99))
    )
    with pytest.raises(Violation, match="a refused call"):
        check_program(program)


def test_a_wait_for_nobody_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks that are freed without waking a waiter are found: the waiter would wait for ever."""

    def serves_no_waiter(self: Admission, wakes: Iterable[Callable[[], object]] = ()) -> None:
        self.moves.report()
        for wake in wakes:
            wake()

    monkeypatch.setattr(Admission, "serve_queue", serves_no_waiter)
    assert found().violation.partition(":")[0] in ("progress", "a wait without a need")


@pytest.mark.pure("plants a defect in the core")
def test_a_leak_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lease that is not given back is found at the latest when everybody has left, by the check or by a law."""
    monkeypatch.setattr(RequestLeases, "end_host_lease", lambda self, record: record.leases.clear())
    assert found().violation.partition(":")[0] in ("integrity", "at rest", "events", "a crash (AssertionError)")


@pytest.mark.parametrize("tier", [None, Tier.DEVICE, Tier.HOST])
def test_a_reset_that_forgets_nothing_is_noticed(tier: Tier | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was cached before can still be found."""
    reset = Ledger.reset

    def forgetful(self: Ledger, which: Tier | None = None) -> None:
        if self.moves._is_reporting or which is not tier:
            reset(self, which)

    monkeypatch.setattr(Ledger, "reset", forgetful)
    assert found(200).violation.startswith("may not hit")


def test_a_lookup_that_says_something_else_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """It answers what a request would match, no more and no less."""
    lookup = Ledger.lookup

    def hopeful(self: Ledger, prefix: Any) -> Any:
        match = lookup(self, prefix)
        return attrs.evolve(match, num_device_tokens=match.num_device_tokens + 1)

    monkeypatch.setattr(Ledger, "lookup", hopeful)
    assert found(200).violation.startswith("an answer")


def test_a_pin_that_is_not_given_back_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """At once, and not only when everybody has left."""
    monkeypatch.setattr(Pins, "release", lambda self, pin: None)
    assert found(200).violation.startswith("an answer")


@pytest.mark.pure("plants a defect in the core")
def test_what_was_taken_back_is_never_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """A failed forward whose blocks stay findable is found by who reads them."""
    monkeypatch.setattr(PrefixCache, "withdraw_all", lambda self, wrong, unsettled: None)
    assert found(2000).violation.partition(":")[0] in (
        "bytes taken back",
        "integrity",
        "wrong bytes",
        "a step's blocks",
    )


def test_a_line_replays_its_program() -> None:
    """One printed line stands for the program, call by call."""
    first, second = (replay_program("ledger seed=7 calls=40") for _ in range(2))
    assert first == second and first[1].violation is None


def test_a_broken_program_is_printed_as_a_test_that_can_be_pasted() -> None:
    """What is printed is Python, and says what it broke."""
    calls = (call("serve", tokens=[1, 2, 3]), call("admit", who="a", tokens=[1, 2, 3], spans=[(0, 1, b"cat")]))
    program = Program("ledger", PLAIN, calls)
    text = as_test(program, "pasted", Violation("wrong bytes", "of somebody else"))
    scope: dict[str, Any] = {}
    exec(compile(text, "pasted", "exec"), scope)
    scope["test_pasted"]()
    assert "wrong bytes: of somebody else" in text


def test_calls_without_an_object_are_skipped() -> None:
    """What is left of a program when calls are left out is a program, too."""
    calls = (call("compute", who="nobody", stop=3), call("settle", job="nobody:load:0"), call("unpin", name="p"))
    check_program(Program("ledger", PLAIN, calls))
