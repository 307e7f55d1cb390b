"""Each figure that docs/cuda.md waits for has one part of `make gpu`, and each part can be read."""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import pytest

from benchmarks.__main__ import BENCHMARKS
from benchmarks.harness import Row
from proof.gpu.parts import PARTS, PROBE_S, PYTEST, TOTAL_S
from proof.gpu.readings import ALL_TESTS, Reading, benchmark, demo, soak, suite

ROOT = Path(__file__).parent.parent.parent
PAGE = ROOT / "docs/cuda.md"


def awaited() -> list[str]:
    """The first column of the table of figures in docs/cuda.md: `a_{b,c}` is `a_b` and `a_c`."""
    section = PAGE.read_text().partition("## What only a device can show")[2].partition("\n## ")[0]
    return [name for row in re.findall(r"^`([\w{},]+)` \|", section, re.MULTILINE) for name in spelled_out(row)]


def spelled_out(names: str) -> list[str]:
    before, _, rest = names.partition("{")
    if not rest:
        return [before]
    choices, _, after = rest.partition("}")
    return [before + choice + end for choice in choices.split(",") for end in spelled_out(after)]


def test_each_figure_that_the_page_waits_for_has_one_part() -> None:
    """Neither a figure that nobody prints, nor one that the page does not know, nor one twice."""
    claimed = Counter(figure.name for part in PARTS for figure in part.figures)
    assert claimed == Counter(awaited())
    assert max(claimed.values()) == 1


def test_all_parts_fit_into_nine_minutes() -> None:
    """Also if each takes as long as it may."""
    assert PROBE_S + sum(part.limit_s for part in PARTS) <= TOTAL_S == 540


def test_each_benchmark_of_a_device_is_a_part() -> None:
    """And no other."""
    assert {name for name in BENCHMARKS if name.startswith("cuda_")} == {
        part.name for part in PARTS if "benchmarks" in part.words
    }


def test_each_gpu_test_is_in_one_part(tmp_path: Path) -> None:
    """What is marked `gpu` is run, once, and the tests that figures come from are there by that name. Pytest takes the
    parts' options also where no plugin of this project's settings is installed."""
    marked = [str(file.relative_to(ROOT)) for file in sorted((ROOT / "tests").rglob("test_*.py")) if is_marked(file)]
    options = [word.replace("{out}", str(tmp_path / "lines")) for word in PYTEST]
    collected = listed(*options, "-p", "no:asyncio", *marked)
    parts = [part for part in PARTS if "pytest" in part.words]
    in_parts = [{test for test in collected if is_run(test, part.words)} for part in parts]
    assert all(in_parts) and sorted(itertools.chain(*in_parts)) == sorted(collected)
    named = {figure.source for part in parts for figure in part.figures} - {ALL_TESTS}
    assert named - {test.partition("::")[2] for test in collected} == set()


def is_run(test: str, words: Sequence[str]) -> bool:
    """Whether a command with these words runs it: named by its file or itself, and not taken out."""
    taken_out = {name for option, name in itertools.pairwise(words) if option == "--deselect"}
    named = {word for word in words if word.startswith("tests/")} - taken_out
    return any(map(test.startswith, named)) and not any(map(test.startswith, taken_out))


def is_marked(file: Path) -> bool:
    return re.search(r"^(@|    )pytest\.mark\.gpu", file.read_text(), re.MULTILINE) is not None


def listed(*words: str) -> list[str]:
    """The tests that a command would run."""
    command = [sys.executable, *words, "--collect-only"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return [line for line in done.stdout.splitlines() if "::" in line]


# -- reading ----------------------------------------------------------------------------------------------------------

ROW = Row(name="load", value=50.04, unit="GB/s", against="one large copy", limit=54.0, ratio=0.9267, wanted=0.9)


@pytest.mark.parametrize(
    ("changes", "wanted", "verdict"),
    [
        ({}, "at least 0.9", "met"),
        ({"ratio": 0.89}, "at least 0.9", "MISSED"),
        ({"is_at_most": True}, "at most 0.9", "MISSED"),
        ({"wanted": None}, "", ""),
    ],
)
def test_a_row_is_a_figure(changes: dict[str, Any], wanted: str, verdict: str) -> None:
    """With what stands beside it, and whether its ratio is what is wanted."""
    row = attrs.evolve(ROW, spread="49-51", **changes)
    (found,) = benchmark(json.dumps({"rows": [row.as_dict()]})).values()
    assert found.text == f"50.04 GB/s (49-51); one large copy: 54; ratio {row.ratio:.3f}"
    assert (found.wanted, found.verdict) == (wanted, verdict)


DEMO = {
    "ttft_share": 0.25, "ttft_s": {"p50": 0.1}, "ttft_s_without_offload": {"p50": 0.4}, "outputs_identical": True,
    "outputs_compared": 32, "blocks_loaded": 1234,
}  # fmt: skip


def test_the_demo_is_two_figures() -> None:
    """The share of the time to the first token, of which a third is wanted, and whether the outputs are identical."""
    found = demo(json.dumps(DEMO))
    assert found["ttft"] == Reading("0.250: 0.100 s, without offload 0.400 s", "at most 1/3", True)
    assert found["outputs"].verdict == "met" and "1,234 blocks loaded" in found["outputs"].text
    worse = demo(json.dumps({**DEMO, "ttft_share": 0.34, "outputs_identical": False}))
    assert [reading.verdict for reading in worse.values()] == ["MISSED", "MISSED"]
    nothing = demo(json.dumps({**DEMO, "ttft_share": None, "outputs_identical": None}))
    assert [reading.verdict for reading in nothing.values()] == ["not run", "not run"]


def test_a_soak_is_one_figure(tmp_path: Path) -> None:
    """Of a real one of a second: the counts, and whatever it found."""
    file = tmp_path / "soak.json"
    command = [sys.executable, "-m", "proof.soak", "--seconds", "1", "--clients", "4", "--json", str(file)]
    status = subprocess.run(command, capture_output=True, cwd=ROOT, check=False).returncode
    result = json.loads(file.read_text())
    (found,) = soak(file.read_text()).values()
    assert f"{result['num_requests']:,} requests" in found.text
    assert found.is_met == (status == 0) == result["has_passed"]
    (wrong,) = soak(json.dumps({**result, "problems": ["wrong bytes: here"], "has_passed": False})).values()
    assert wrong.verdict == "MISSED" and "wrong bytes: here" in wrong.text


SUITE = """
import os, signal
import pytest

def test_tells(record_property):
    record_property("found", "0 of 30")

def test_fails(record_property):
    record_property("found", "3 of 30")
    assert 1 == 2

@pytest.mark.skip(reason="no such driver")
def test_skips(): ...

@pytest.fixture
def broken():
    yield
    raise ValueError("left behind")

@pytest.mark.parametrize("name", ["a-b"])
def test_breaks(broken, name): ...

def test_dies():
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_tests_are_figures_also_of_a_process_that_died(tmp_path: Path) -> None:
    """What each told and whether it passed, a line as soon as it is over; and a summary of those that were."""
    (tmp_path / "test_it.py").write_text(SUITE)
    file = tmp_path / "lines"
    words = ("-c", "/dev/null", "--rootdir", str(tmp_path), str(tmp_path / "test_it.py"), "--lines", str(file))
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "proof.gpu.listener", *words]
    subprocess.run(command, capture_output=True, cwd=ROOT, check=False)
    found = suite(file.read_text() + '{"test": "test_cut_o')
    assert found["test_tells"] == Reading("0 of 30", "passes", True)
    assert (found["test_fails"].text, found["test_fails"].verdict) == ("3 of 30; failed: assert 1 == 2", "MISSED")
    assert (found["test_skips"].text, found["test_skips"].verdict) == ("no such driver", "not run")
    assert found["test_breaks[a-b]"].text == "failed: ValueError: left behind"
    assert found[ALL_TESTS] == Reading(
        "1 passed, 1 skipped (no such driver), 2 failed: test_fails, test_breaks[a-b]", "none fails", False
    )
    assert "test_dies" not in found
