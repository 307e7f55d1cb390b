"""`make vllm` without vLLM: its parts are replaced by one-line programs."""

from __future__ import annotations

import time
import zipfile
from pathlib import Path

import pytest

from proof.gpu.running import Ended
from proof.vllm import __main__ as runner
from proof.vllm.connector_tests import cases_of, row_of
from proof.vllm.newer import lay
from proof.vllm.parts import NEWER, PARTS, TOTAL_S, Part
from proof.vllm.rows import Row, write
from proof.vllm.verdicts import OF_DRAFTS, SAID_AGAIN, Case, count, missed, table


def test_all_parts_have_time() -> None:
    """Their limits fit into the whole, and each is a module."""
    assert all(sum(part.limit_s for part in parts) <= TOTAL_S for parts in (PARTS, NEWER))
    folder = Path(runner.__file__).parent
    assert all((folder / f"{part.name}.py").exists() for part in (*PARTS, *NEWER))
    assert any(part.is_short for part in PARTS) and not all(part.is_short for part in PARTS)


def test_thirds_of_the_short_form_are_all_of_it() -> None:
    """Each has one rank, and a third of the other parts."""
    short = runner.short_of(PARTS, True, None)
    thirds = [runner.short_of(PARTS, True, third) for third in range(3)]
    assert all(part.is_short for part in short) and {third[0].name for third in thirds} == {"one_rank"}
    assert sorted(part.name for third in thirds for part in third[1:]) == sorted(part.name for part in short[1:])
    assert runner.short_of(PARTS, False, None) == list(PARTS)


def test_without_vllm_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """In one line, with a status of its own."""
    monkeypatch.setattr(runner.importlib.util, "find_spec", lambda name: None)
    assert runner.main([]) == 2
    assert capsys.readouterr().err == "vllm: not run, since vLLM is not installed here\n"


def run(rows: dict[str, list[Row]], out: Path, monkeypatch: pytest.MonkeyPatch, problem: str = "") -> int:
    """Run parts that write `rows`, and end with `problem`."""

    def ended(command: list[str], limit_s: float, log: Path) -> Ended:
        file = Path(command[command.index("--json") + 1])
        if rows[file.stem]:
            write(rows[file.stem], file)
        return Ended(1.0, problem)

    monkeypatch.setattr(runner, "run_process", ended)
    parts = [Part(name, "a part", 10.0) for name in rows]
    return runner.run_parts(parts, out, time.monotonic() + 60)


def test_all_rows_are_in_the_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Status 0 if all are met."""
    assert run({"a": [Row("one")], "b": [Row("two"), Row("three")]}, tmp_path, monkeypatch) == 0
    report = (tmp_path / runner.REPORT).read_text()
    assert all(f"| met | {name} |" in report for name in ("one", "two", "three"))


@pytest.mark.parametrize(
    ("rows", "problem", "said"),
    [
        ([Row("one", problems=("slow",))], "", "slow"),
        ([], "", "no rows"),
        ([Row("one")], "ended after 9 s, its limit", "its limit"),
    ],
    ids=["missed", "nothing", "ended"],
)
def test_what_is_missing_is_missed(
    rows: list[Row], problem: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A scenario that is missed, a part that wrote nothing, a part that had to be ended."""
    assert run({"a": rows}, tmp_path, monkeypatch, problem) == 1
    assert said in (tmp_path / runner.REPORT).read_text()


def test_rows_of_an_earlier_run_do_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A part that writes nothing now has no rows."""
    write([Row("old")], tmp_path / "a.json")
    assert run({"a": []}, tmp_path, monkeypatch) == 1
    assert "old" not in (tmp_path / runner.REPORT).read_text()


def test_a_newer_python_lies_over_older_kernels(tmp_path: Path) -> None:
    """Nothing of the older Python is left, and no compiled module of the newer one is taken."""
    old = tmp_path / "vllm"
    (old / "gone").mkdir(parents=True)
    for name in ("__init__.py", "_C.abi3.so", "gone/module.py"):
        (old / name).write_text("old")
    wheel = tmp_path / "new.whl"
    with zipfile.ZipFile(wheel, "w") as packed:
        for name in ("vllm/__init__.py", "vllm/_C.abi3.so", "vllm/new/module.py", "vllm-2.dist-info/METADATA"):
            packed.writestr(name, "new")
    assert lay(tmp_path, wheel) == 3
    wheel.unlink()
    found = {path.relative_to(tmp_path).as_posix(): path.read_text() for path in tmp_path.rglob("*") if path.is_file()}
    assert found == dict.fromkeys(("vllm/__init__.py", "vllm/new/module.py", "vllm-2.dist-info/METADATA"), "new") | {
        "vllm/_C.abi3.so": "old"
    }
    assert not (old / "gone").exists()


CASES = [
    Case("test_one", "passed"),
    Case("test_lru_eviction_order", "failed", "reads `cpu_block_pool` of vLLM's manager"),
    Case("test_cp_block_size_scaling[2-1]", "failed", "reads `cp_world_size` of vLLM's manager"),
    Case("test_three", "failed", "refused: speculative_config: no"),
    Case("test_four", "skipped", "asks for lazy stores"),
    Case("test_lru_eviction_order", "failed", "AssertionError: assert 0 == 2"),
    Case("test_new", "failed", "reads `_new` of vLLM's manager"),
]


def test_each_case_has_a_verdict() -> None:
    """One that failed for no reason that is said is a failure, also if another failure of it would be excused."""
    verdicts = ["passed", "said again", "otherwise", "refused", "not asked", "FAILED", "FAILED"]
    assert [case.verdict for case in CASES] == verdicts
    assert missed(CASES) == ["test_lru_eviction_order", "test_new"]
    assert count(CASES).startswith("7 run: 2 FAILED, ")
    assert "reads `cpu_block_pool` of vLLM's manager; test_the_oldest_goes_first |" in table(CASES)


def test_what_is_said_again_is_said() -> None:
    """Each of these tests is there."""
    text = (Path(runner.__file__).parent / "manager_behaviour.py").read_text()
    assert all(f"def {name}(" in text for name in SAID_AGAIN.values())
    text = (Path(runner.__file__).parent / "draft_behaviour.py").read_text()
    assert all(f"def {name}(" in text for name in OF_DRAFTS.values())


RESULTS = """<testsuites><testsuite>
<testcase classname="a" name="test_one"/>
<testcase classname="a" name="test_two[x]"><failure message="assert 1 ==&#10; 2">text</failure></testcase>
<testcase classname="a" name="test_three"><skipped message="vLLM is not installed">text</skipped></testcase>
<testcase classname="a" name="tests.test_four"><error message="collection failure">text</error></testcase>
</testsuite></testsuites>"""


def test_every_test_of_ours_has_to_pass(tmp_path: Path) -> None:
    """Over vLLM's classes: one that fails, is skipped or cannot be collected is told with its reason."""
    (tmp_path / "results.xml").write_text(RESULTS)
    cases = cases_of(tmp_path / "results.xml")
    row = row_of(cases, 1.0)
    assert row.found == "4 run: 2 failed, 1 passed, 1 skipped"
    assert row.problems == (
        "test_two[x] failed: assert 1 == 2",
        "test_three skipped: vLLM is not installed",
        "tests.test_four failed: collection failure",
    )
    assert row_of(cases[:1], 1.0).is_met and not row_of([], 1.0).is_met
    assert row_of(cases[1:2] * 9, 1.0).problems[-1] == "and 4 more"


def test_results_that_are_none_are_told(tmp_path: Path) -> None:
    """A run that was ended before it could write."""
    (tmp_path / "results.xml").write_text("<testsuites>")
    with pytest.raises(ValueError, match=r"results\.xml"):
        cases_of(tmp_path / "results.xml")
