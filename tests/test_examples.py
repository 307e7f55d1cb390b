"""The examples: short, complete programs with the output that they describe."""

from __future__ import annotations

import ast
import re
import runpy
import subprocess
import sys
from pathlib import Path

import anyio
import pytest
import torch

from aoffload import Request

ROOT = Path(__file__).parent.parent
EXTENDING = ROOT / "docs/extending.md"
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
MAX_LINES = 60
MAX_LINES_OF = {
    "own_engine": 80, "engine_blocks": 95, "ledger_step_loop": 115, "continuous_batching": 150, "async_engine": 200,
    "directory_tier": 200, "step_scheduler": 260,
}  # fmt: skip
"""Whole engines, a whole scheduler in miniature, and a whole tier, for who writes one."""

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
    assert len(example.read_text().splitlines()) <= MAX_LINES_OF.get(example.stem, MAX_LINES)


@each_example
def test_imports_public_names_only(example: Path) -> None:
    """Whatever an example does, a program can do, too."""
    imports = [node for node in ast.walk(ast.parse(example.read_text())) if isinstance(node, ast.ImportFrom)]
    ours = [node for node in imports if (node.module or "").startswith("aoffload")]
    names = {name for node in ours for name in (*str(node.module).split("."), *(alias.name for alias in node.names))}
    assert not [name for name in names if name.startswith("_")]


def test_the_page_about_extending_shows_the_examples() -> None:
    """Each block of docs/extending.md is a class of an example of at most 60 lines that the page links to."""
    page = EXTENDING.read_text()
    linked = [ROOT / "examples" / name for name in dict.fromkeys(re.findall(r"\(../examples/(\w+\.py)\)", page))]
    shown = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    short = [example.read_text() for example in linked if example.stem != "directory_tier"]
    assert [f"\n\n\n{block}\n\n" in text for block, text in zip(shown, short, strict=True)] == [True] * 3
    assert max(len(text.splitlines()) for text in short) <= MAX_LINES
    assert all(figure in page for figure in re.findall(r"([\d,]+) tokens loaded", short[0]))


def test_the_proof_of_the_own_engine_notices_a_wrong_byte(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One wrong number in one block that came from the cache, and not all tokens are called right any more."""
    num_threads, load = torch.get_num_threads(), Request.load
    engine = runpy.run_path(str(ROOT / "examples/own_engine.py"))
    torch.set_num_threads(num_threads)

    async def load_and_spoil(request: Request) -> int:
        num_ready = await load(request)
        if num_ready:
            engine["kv_cache"][request.block_ids[0][0], 3, 0, 5] += 1.0
        return num_ready

    monkeypatch.setattr(Request, "load", load_and_spoil)
    anyio.run(engine["main"])
    right = re.search(r"right, bit for bit: (\d+) of (\d+)", capsys.readouterr().out)
    assert right and 0 < int(right[1]) < int(right[2])


@each_example
def test_is_listed_in_the_readme(example: Path) -> None:
    """The README names every example."""
    assert f"examples/{example.name}" in (ROOT / "README.md").read_text()
