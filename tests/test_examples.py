"""The examples: short, whole programs that print what they say."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
MAX_LINES = 60
MAX_SCHEDULER_LINES = 225
"""A whole scheduler in miniature, for who writes one."""

each_example = pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.stem)


@each_example
def test_prints_what_its_docstring_says(example: Path) -> None:
    """Run as a program, with warnings as errors, an example prints exactly what stands under `Prints:`."""
    docstring = ast.get_docstring(ast.parse(example.read_text())) or ""
    promised = [line.removeprefix("    ") for line in docstring.partition("Prints:\n")[2].splitlines()]
    command = [sys.executable, "-W", "error", str(example)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.stderr == ""
    assert done.returncode == 0
    assert done.stdout.splitlines() == promised


@each_example
def test_fits_on_a_screen(example: Path) -> None:
    """An example that takes longer than a look is documentation in the wrong place."""
    most = MAX_SCHEDULER_LINES if example.stem == "step_scheduler" else MAX_LINES
    assert len(example.read_text().splitlines()) <= most


@each_example
def test_is_listed_in_the_readme(example: Path) -> None:
    """Whoever reads the README finds every example."""
    assert f"examples/{example.name}" in (ROOT / "README.md").read_text()
