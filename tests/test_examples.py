"""The examples: short, complete programs with the output that they describe."""

from __future__ import annotations

import ast
import os
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
    "directory_tier": 200, "host_cache_step_loop": 185, "step_scheduler": 260,
}  # fmt: skip
"""Complete engines, a small scheduler, and a tier. They are longer than the other examples."""

each_example = pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.stem)


RUN_ALL = """
import os, runpy, sys
import torch, numpy, anyio, attrs, structlog

folder, *examples = sys.argv[1:]
for example in examples:
    said = os.path.join(folder, os.path.basename(example))
    process = os.fork()
    if not process:
        for number, name in ((1, "out"), (2, "err")):
            os.dup2(os.open(f"{said}.{name}", os.O_WRONLY | os.O_CREAT), number)
        sys.argv, sys.path[0] = [example], os.path.dirname(example)
        runpy.run_path(example, run_name="__main__")
        sys.exit()
    with open(f"{said}.status", "w") as file:
        print(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]), file=file)
"""
"""Each example in a fork of a process that has imported torch, which takes longer than most examples."""


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the examples have said: a file of each for its output, its errors and its exit status."""
    folder = tmp_path_factory.mktemp("examples")
    command = [sys.executable, "-W", "error", "-c", RUN_ALL, str(folder), *map(str, EXAMPLES)]
    one_thread = dict.fromkeys(
        ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1"
    )  # so that it can fork
    subprocess.run(command, cwd=ROOT, env=os.environ | one_thread, timeout=300, check=True)
    return folder


@each_example
def test_prints_what_its_docstring_says(example: Path, said: Path) -> None:
    """Run as a program, with warnings as errors, an example prints exactly what stands under `Prints:`."""
    docstring = ast.get_docstring(ast.parse(example.read_text())) or ""
    promised = [line.removeprefix("    ") for line in docstring.partition("Prints:\n")[2].splitlines()]
    out, err, status = ((said / f"{example.name}.{name}").read_text() for name in ("out", "err", "status"))
    assert err == ""
    assert int(status) == 0
    assert out.splitlines() == promised


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
    """Each block of docs/extending.md is a class, or whole methods, of an example of at most 60 lines. The page links
    to these examples in the order of their blocks, and has their figures."""
    page = EXTENDING.read_text()
    linked = [ROOT / "examples" / name for name in dict.fromkeys(re.findall(r"\(../examples/(\w+\.py)\)", page))]
    shown = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    short = [example.read_text() for example in linked if example.stem != "directory_tier"]
    assert [f"\n\n{block}\n" in text for block, text in zip(shown, short, strict=True)] == [True] * 3
    assert [bool(re.match(r" *(class|def) ", block)) for block in shown] == [True] * 3
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
