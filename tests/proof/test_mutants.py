"""Each planted defect applies to the current source."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

from proof import scenarios
from proof.mutants import MUTANTS
from proof.planting import Mutant, PatchDoesNotApply, patched, source_path
from proof.scenarios import SCENARIOS
from proof.verdicts import chosen

ROOT = Path(__file__).resolve().parent.parent.parent
WHERE_THEY_MUST_BE = ("_kernel", "_extensions", "_eviction", "_host_cache", "_tiers", "_runtime", "_transfer")


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_is_another_program(mutant: Mutant) -> None:
    """Each applies to today's source exactly once, compiles, and is not the same program in other words."""
    for module, mutated in patched(mutant).items():
        tree = ast.parse(mutated)
        compile(tree, module, "exec", dont_inherit=True)
        assert ast.dump(tree) != dump_of(module)


@cache
def dump_of(module: str) -> str:
    """The sound module as a tree."""
    return ast.dump(ast.parse(source_path(module).read_text()))


def test_a_mutant_names_what_is_there(tmp_path: Path) -> None:
    """A defect that is a `NameError` would be found by anything that comes by."""
    for number, mutant in enumerate(MUTANTS):
        for module, source in patched(mutant).items():
            (tmp_path / f"{number}_{module}.py").write_text(source)
    command = [sys.executable, "-m", "ruff", "check", "--isolated", "--no-cache", "--select", "F821", str(tmp_path)]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout


def test_the_mutants_are_many_and_everywhere() -> None:
    """There are enough of them, no two have the same name or the same text, and each says what it breaks."""
    assert len(MUTANTS) >= 45
    assert not [name for name, count in Counter(mutant.name for mutant in MUTANTS).items() if count > 1]
    patches = Counter(tuple(patched(mutant).items()) for mutant in MUTANTS)
    assert not [modules for modules, count in patches.items() if count > 1]
    assert all(mutant.promise for mutant in MUTANTS)
    assert {mutant.module.split(".")[1] for mutant in MUTANTS} >= set(WHERE_THEY_MUST_BE)


def test_where_mutants_are_met_is_there() -> None:
    """A scenario or a test that a mutant names exists; and none names two judges, for then one would never run."""
    for mutant in MUTANTS:
        assert set(mutant.scenarios) <= set(SCENARIOS), mutant.name
        assert bool(mutant.scenarios) + bool(mutant.test) + mutant.programs <= 1, mutant.name
        if mutant.test:
            path, _, function = mutant.test.partition("::")
            assert f"def {function.partition('[')[0]}(" in (ROOT / path).read_text(), mutant.name


def test_the_package_says_what_each_scenario_is_for() -> None:
    """What stays beside programs is listed with what only it sees, and nothing that is gone."""
    listed = re.findall(r"^- [^:]+: ((?:.+\n)(?:  .+\n)*)", scenarios.__doc__ or "", re.MULTILINE)
    assert set(re.findall(r"\w+", " ".join(listed))) == set(SCENARIOS)


@pytest.mark.parametrize("old", ["", "no such text", "self"])
def test_a_patch_that_does_not_apply_once(old: str) -> None:
    """A text that is not there exactly once is refused before anything is planted."""
    with pytest.raises(PatchDoesNotApply) as refusal:
        patched(Mutant("none", "aoffload._kernel.records", old, "new", ""))
    assert refusal.value.count != 1


def test_a_module_that_is_not_there() -> None:
    """A mutant of no module is an error of the mutant, not a defect that was found."""
    with pytest.raises(FileNotFoundError):
        patched(Mutant("none", "aoffload._kernel.nothing", "a", "b", ""))


CHILDREN = """
import threading
from proof.planting import AlreadyImported, Ending, HasThreads, Mutant, in_child, preload

preload(("attrs",))
ARGUMENTS = "aoffload._common.arguments"
double = Mutant("double", ARGUMENTS, "        return value", "        return value * 2", "numbers stay")

def ending(function, argument=None, mutant=None, timeout_s=30.0):
    return in_child(function, argument, mutant, timeout_s)

CODE = "from aoffload._common.arguments import check_int; assert check_int('n', 21, 0) == 21"
sound, wrong = ending("builtins:exec", CODE), ending("builtins:exec", CODE, double)
assert (sound.ending, wrong.ending) == (Ending.RETURNED, Ending.RAISED), (sound, wrong)
assert wrong.detail == "AssertionError" and "Traceback" in wrong.output, wrong
assert ending("builtins:sorted", [3, 1, 2]).value == [1, 2, 3]
assert ending("builtins:exec", "import sys; sys.exit(3)").ending is Ending.RAISED
gone = ending("os:_exit", 3)
assert (gone.ending, gone.detail) == (Ending.CRASHED, "exit status 3"), gone
killed = ending("builtins:exec", "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)")
assert (killed.ending, killed.detail) == (Ending.CRASHED, "signal SIGSEGV"), killed
assert ending("builtins:exec", "while True: pass", timeout_s=0.1).ending is Ending.TIMED_OUT
orphan = ending("builtins:exec", "import os, signal\\nif os.fork(): os._exit(4)\\nsignal.pause()")
assert (orphan.ending, orphan.detail) == (Ending.CRASHED, "exit status 4") and orphan.duration_s < 20, orphan
assert ending("builtins:set", [1]).ending is Ending.RAISED, "no JSON"

def refused(error):
    try:
        ending("builtins:sorted", [])
    except error:
        return True

stop = threading.Event()
thread = threading.Thread(target=stop.wait)
thread.start()
assert refused(HasThreads)
stop.set()
thread.join()
import aoffload
assert refused(AlreadyImported)
print("ok")
"""


def test_how_a_child_may_end() -> None:
    """A planted defect shows in the child alone, and no way to end is lost: a value, an error, a signal, no end."""
    found = subprocess.run([sys.executable, "-c", CHILDREN], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert found.stdout.strip() == "ok", found.stderr


WORKERS = """
import os
from proof.workers import WorkerFailed, share_out

double = lambda number: [number * 2, os.getpid() != parent]
parent = os.getpid()
assert share_out(double, 7, 2) == [[2 * number, True] for number in range(7)]
assert share_out(double, 0, 2) == [] and share_out(double, 1, 3) == [[0, True]]
try:
    share_out(lambda number: 1 // (3 - number), 6, 2)
except WorkerFailed:
    print("ok")
"""


def test_workers_share_one_queue() -> None:
    """Every piece is done once, in another process, in whatever order; a worker that fails is no result."""
    found = subprocess.run([sys.executable, "-c", WORKERS], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert found.stdout.strip() == "ok", found.stderr


VERDICTS = """
import attrs
from proof import verdicts
from proof.mutants import MUTANTS
from proof.planting import Mutant
from proof.report_mutants import mutant_verdicts

old = "        return value"
sound = Mutant("sound", "aoffload._common.arguments", old, "        return +value", "", scenarios=("two_tasks",))
stuck = attrs.evolve(sound, name="stuck", old="        return value", new="        import os; os._exit(1)")
early = next(mutant for mutant in MUTANTS if mutant.name == "hit up to the last token")
tested = attrs.evolve(sound, name="tested", test="tests/proof/test_mutants.py::test_a_module_that_is_not_there")
tested = attrs.evolve(tested, scenarios=())
met = attrs.evolve(early, name="met", programs=True)
unmet = attrs.evolve(sound, name="unmet", scenarios=(), programs=True)
verdicts.MOST_RUNS, verdicts.FACES = 8, ("ledger",)
budget = verdicts.Budget(programs=12, num_ranges=2)
rows = verdicts.judge(2, (sound, stuck, early, tested, met, unmet), budget)
found = {verdict.name: verdict for verdict in mutant_verdicts(rows)}
assert {name: verdict.judge for name, verdict in found.items()} == {
    "sound": "", "stuck": "", early.name: "scenarios", "tested": "", "met": "programs", "unmet": ""}, rows
assert [row["runs"] for row in found["sound"].rows] == [8] and [row["runs"] for row in found["unmet"].rows] == [12, 12]
assert [(row["judge"], row["runs"]) for row in found["tested"].rows] == [("test", None)]
assert all(0 < row["shortest"] < 10 for row in found["met"].rows), rows
twins = [row for row in rows if row["mutant"] == verdicts.TWIN]
assert {(row["judge"], *row["scenarios"], *row["faces"], row["first_seed"], row["test"]) for row in twins} >= {
    ("scenarios", "two_tasks", 0, ""), ("scenarios", 0, ""), ("test", 0, tested.test),
    ("programs", "ledger", 0, ""), ("programs", "ledger", verdicts.SEED_RANGE, "")}, twins
assert sum(row["runs"] for row in twins if row["judge"] == "programs") >= 24 and not any(row["oracle"] for row in twins)
print("ok")
"""


def test_only_words_are_a_catch_and_the_twin_sees_the_same() -> None:
    """A violation is a catch; a defect that nothing notices, and a child that dies, are none. One that names a test is
    shown to that alone. The program without a defect is shown to whatever judged the others."""
    found = subprocess.run([sys.executable, "-c", VERDICTS], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert found.stdout.splitlines()[-1:] == ["ok"], found.stderr


def test_a_ninth_of_the_mutants_is_chosen() -> None:
    """The ninths have every mutant once, and part of a name finds those that have it."""
    ninths = [chosen(ninth) for ninth in range(9)]
    assert sorted(one.name for ninth in ninths for one in ninth) == sorted(one.name for one in MUTANTS)
    assert max(map(len, ninths)) - min(map(len, ninths)) <= 1
    assert chosen(None) == list(MUTANTS)
    assert [one.name for one in chosen(None, "hit up to the last")] == ["hit up to the last token"]
