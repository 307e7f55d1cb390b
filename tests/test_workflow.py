"""The workflow that runs the tests with each Python."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from packaging.specifiers import SpecifierSet

yaml = pytest.importorskip("yaml", reason="PyYAML, of the group `docs`, is not installed")

ROOT = Path(__file__).parents[1]
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
TESTS = ROOT / ".github/workflows/tests.yml"

each_workflow = pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)


def read(path: Path) -> dict[str, Any]:
    """YAML takes `on` for a boolean, so that key is True."""
    found = yaml.safe_load(path.read_text())
    assert isinstance(found, dict)
    return found


def steps(path: Path) -> list[dict[str, Any]]:
    return [step for job in read(path)["jobs"].values() for step in job["steps"]]


@each_workflow
def test_a_workflow_may_only_read(path: Path) -> None:
    """It gets a token that reads the repository, and no job asks for more. Runs of the same branch replace each other,
    and none lasts for hours."""
    found = read(path)
    assert found["permissions"] == {"contents": "read"}
    assert found["concurrency"]["cancel-in-progress"] is True and "github.ref" in found["concurrency"]["group"]
    for job in found["jobs"].values():
        assert "permissions" not in job and 0 < job["timeout-minutes"] <= 60
    assert "pull_request_target" not in path.read_text() and "secrets." not in path.read_text()


@each_workflow
def test_what_a_workflow_runs_is_there(path: Path) -> None:
    """Each step is a well-formed one, each action has a version, and each target of make is in the Makefile."""
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for step in steps(path):
        assert ("uses" in step) != ("run" in step), step
        assert re.fullmatch(r"actions/[\w-]+@v\d+", step.get("uses", "actions/none@v1")), step
        if step.get("run", "").startswith("make "):
            assert step["run"].split()[1] in targets
        if step.get("uses", "").startswith("actions/setup-python"):
            assert step["with"]["cache"] == "pip"
            paths = step["with"]["cache-dependency-path"].split()
            assert all(list(ROOT.glob(one)) for one in paths)


def test_the_tests_run_with_each_python_that_the_project_names() -> None:
    """Those with a classifier have to pass. Only Pythons without the GIL may fail."""
    job = read(TESTS)["jobs"]["tests"]
    matrix = job["strategy"]["matrix"]
    assert job["continue-on-error"] == "${{ matrix.may-fail }}" and matrix["may-fail"] == [False]
    given = PROJECT["classifiers"]
    named = {name.rpartition(" ")[2] for name in given if re.search(r"Python :: 3\.\d+$", name)}
    assert named <= {*matrix["python"]} and job["strategy"]["fail-fast"] is False
    assert all(version in SpecifierSet(PROJECT["requires-python"]) for version in matrix["python"])
    assert [(one["python"][-1], one["may-fail"]) for one in matrix["include"]] == [("t", True)]
    commands = [step["run"] for step in job["steps"] if "run" in step]
    assert commands == ["make test PYTHON=python"]


def test_lint_runs_once_and_both_distributions_are_built() -> None:
    jobs = read(TESTS)["jobs"]
    assert set(jobs) == {"lint", "tests", "distributions"}
    assert "strategy" not in jobs["lint"] and "strategy" not in jobs["distributions"]
    assert "python -m build" in [step.get("run") for step in jobs["distributions"]["steps"]]
