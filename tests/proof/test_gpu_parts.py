"""Each figure that proof/gpu/expected.md waits for has one part of `make gpu`, and each part can be read."""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import pytest

from benchmarks.__main__ import BENCHMARKS
from benchmarks.harness import Row
from proof.gpu import probe
from proof.gpu.environment import CONNECTIONS, QUERY, environment
from proof.gpu.parts import PARTS, PYTEST, limits_of
from proof.gpu.readings import ALL_TESTS, Reading, benchmark, demo, soak, suite
from proof.soak import Length
from proof.soak import soak as run_soak

ROOT = Path(__file__).parent.parent.parent
PAGE, FIGURES = ROOT / "docs/cuda.md", ROOT / "proof/gpu/expected.md"


def awaited() -> dict[str, str]:
    """The table of figures in proof/gpu/expected.md: the meaning of each figure by its name. A row has five cells."""
    text = FIGURES.read_text()
    rows = re.findall(r"^`(\w+)` \| ([^|]+) \| [^|]+ \| [^|]+ \|[^|]*$", text, re.MULTILINE)
    assert len(rows) == len(re.findall(r"^`\w+` \|", text, re.MULTILINE)), "a row without all of its cells"
    found = dict(rows)
    assert len(found) == len(rows), "a figure twice"
    return found


def test_each_figure_of_the_table_has_one_part() -> None:
    """Every figure of the table is printed, every printed figure is in the table once, and both describe it alike."""
    figures = [figure for part in PARTS for figure in part.figures]
    assert {figure.name: figure.about for figure in figures} == awaited()
    assert len({figure.name for figure in figures}) == len(figures)


def test_all_parts_fit_into_twelve_minutes() -> None:
    """Also if each takes as long as it may; docs/cuda.md says so."""
    assert limits_of(PARTS) <= 720
    assert "every part: twelve minutes at most" in PAGE.read_text()


def test_the_probe_says_which_package_is_missing_and_how_to_bring_it(tmp_path: Path) -> None:
    """At once, for all parts, before a device is looked for; a machine for minutes has no network."""
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\n"
        "class Missing:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.partition('.')[0] in ('structlog', 'attrs'):\n"
        "            raise ModuleNotFoundError(f'No module named {name!r}', name=name)\n"
        "sys.meta_path.insert(0, Missing())\n"
    )
    command = [sys.executable, "-m", "proof.gpu", "rules"]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, check=False)
    assert done.returncode == 2 and done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("gpu: not run, since attrs, structlog are missing. Install them.")
    assert "pip download --no-deps --dest wheels attrs structlog" in line and "--no-index" in line


def test_a_package_that_cannot_be_imported_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    """In one line, in place of a part after the other that dies."""
    monkeypatch.setattr(probe, "OURS", ("json", "aoffload.nothing_of_that_name"))
    assert probe._imported() == (
        "aoffload.nothing_of_that_name cannot be imported: "
        "ModuleNotFoundError(\"No module named 'aoffload.nothing_of_that_name'\")"
    )
    monkeypatch.setattr(probe, "OURS", ("json",))
    assert probe._imported() == ""


def test_the_environment_has_what_figures_depend_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Driver, link, clocks, the GPU's NUMA node, limits of memory, and the number of hardware queues."""
    asked = {name: name.upper() for name in QUERY} | {"pci.bus_id": "00000000:4B:00.0"}
    (tmp_path / "0000:4b:00.0").mkdir()
    (tmp_path / "0000:4b:00.0/numa_node").write_text("1\n")
    monkeypatch.setenv(CONNECTIONS, "1")
    found = environment(lambda: ", ".join(asked.values()) + "\n", tmp_path)
    assert found["NUMA node of the GPU"] == "1" and found[CONNECTIONS] == "1"
    assert [found[name] for name in ("driver_version", "pcie.link.gen.current", "clocks.sm")] == [
        "DRIVER_VERSION", "PCIE.LINK.GEN.CURRENT", "CLOCKS.SM"
    ]  # fmt: skip
    assert {"ulimit -l", "cgroup memory.max", "NUMA nodes", "cores of this process"} <= found.keys()


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (FileNotFoundError("nvidia-smi"), "not asked: FileNotFoundError('nvidia-smi')"),
        (subprocess.CalledProcessError(2, "nvidia-smi", "no such field"), "refused: no such field"),
        ("lost", "not understood: lost"),
    ],
)
def test_an_environment_without_its_tool_has_the_rest(answer: Any, said: str, tmp_path: Path) -> None:
    """`nvidia-smi` may be missing, or say something else: the limits of the host are there."""

    def query() -> str:
        if isinstance(answer, Exception):
            raise answer
        return str(answer)

    found = environment(query, tmp_path)
    assert found["nvidia-smi"] == said and "ulimit -l" in found


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


def test_a_soak_that_is_cut_off_has_its_figure() -> None:
    """At every rest, what was found so far can be read."""
    kept: list[str] = []
    result = run_soak(length=Length(num_clients=2, num_rests=2), keep=lambda found: kept.append(found.as_json()))
    so_far, whole = (soak(text)["soak"].text for text in kept)
    assert so_far != whole and f"{result.num_requests:,} requests" in whole


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
