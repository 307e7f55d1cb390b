"""The core stays compilable: the forms that mypyc translates, read from the source, with or without a compiler."""

from __future__ import annotations

import ast
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
HOOK = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]["hooks"]
INCLUDED = {path for pattern in HOOK["custom"]["include"] for path in ROOT.glob(pattern.removeprefix("/"))}
LEFT_OUT = {path for pattern in HOOK["custom"]["exclude"] for path in ROOT.glob(pattern.removeprefix("/"))}
COMPILED = sorted(path for path in INCLUDED - LEFT_OUT if path.name != "__init__.py")

each_compiled_file = pytest.mark.parametrize("path", COMPILED, ids=lambda path: f"{path.parent.name}/{path.stem}")


def test_what_is_left_out_is_there() -> None:
    """The list names files of the core, each of them, and most of the core is compiled."""
    named = set(HOOK["custom"]["exclude"]) - {"__init__.py"}
    assert LEFT_OUT <= INCLUDED and len(LEFT_OUT) == len(named)
    assert len(COMPILED) > 2 * len(LEFT_OUT)


@each_compiled_file
def test_a_compiled_file_has_forms_that_compile(path: Path) -> None:
    """No class of attrs, no class variable, no field of a plain `object`, and no `super()` in a slotted dataclass."""
    tree = ast.parse(path.read_text())
    for kind in (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)):
        decorators = [ast.unparse(decorator) for decorator in kind.decorator_list]
        assert not [name for name in decorators if name.startswith("attrs.")], f"{path.name}: {kind.name}"
        for line in kind.body:
            if isinstance(line, ast.AnnAssign):
                annotation = ast.unparse(line.annotation)
                assert annotation != "object" and "ClassVar" not in annotation, f"{path.name}:{line.lineno}"
        if any("slots=True" in name for name in decorators):
            assert "super()" not in ast.unparse(kind), f"{path.name}: {kind.name}"


@each_compiled_file
def test_a_generator_does_not_leave_its_function(path: Path) -> None:
    """A generator expression is a list where it is compiled: whoever gets one would see what was true when it was made,
    and the pure core what is true by then. `yield` is lazy in both."""
    handed_on = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Return) and isinstance(node.value, ast.GeneratorExp):
            handed_on.append(node.lineno)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).startswith(("self.", "islice")):
            handed_on += [argument.lineno for argument in node.args if isinstance(argument, ast.GeneratorExp)]
    assert not handed_on, f"{path.name}: {handed_on}"
