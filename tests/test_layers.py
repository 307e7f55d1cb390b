"""The rooms of the package and the one direction between them, read from the imports."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "aoffload"
ROOMS = {
    "errors": 0, "arguments": 0, "prefix": 0, "config": 0, "env": 0,
    "core": 1,
    "transfer": 2,
    "worker": 3, "telemetry": 3, "observers": 3,
    "session": 4, "request": 5, "loading": 5, "keeping": 5, "opening": 5, "steps": 5,
    "runtime": 6,
    "demo": 7, "integrations": 7, "testing": 7, "trace": 7, "metrics": 7, "kv_events": 7,
}  # fmt: skip
FLOORS = (
    "answer blocks kinds lifecycle plan table tokens",
    "arguments groups records",
    "engine_ids eviction index owners",
    "engine_arrivals matching observer seen tiers waiting",
    "borders engine_blocks policy",
    "cache",
    "jobs keeping pins publish windows",
    "admission early integrity stores",
    "forks frontier loads",
    "commits errands preemption",
    "engine_offers",
    "engine_owned",
    "ledger",
)
"""Of the core, the lowest one first: a file imports from floors below its own only."""
CIRCLES = (
    {"testing.early", "testing.engine"},
    {"testing.clients", "testing.injector", "testing.simulation"},
    {f"testing.programs.{name}" for name in ("engine_laws", "engine_machine")},
    {f"testing.programs.ledger_{name}" for name in ("jobs", "laws", "machine", "requests", "state", "steps")}
    | {"testing.programs.machine"},
    {f"testing.programs.runtime_{name}" for name in ("calls", "clients", "keeping", "stage")},
)
"""Files outside of the core that name one another's types. There are to be none."""
NOT_IN_CORE = {
    "anyio",
    "asyncio",
    "trio",
    "torch",
    "time",
    "random",
    "logging",
    "structlog",
    "threading",
    "socket",
    "os",
}
MAY_USE_TORCH = {"transfer", "integrations", "demo", "testing"}
NOWHERE = {"pickle", "shelve", "marshal", "dill", "cloudpickle"}
MODULES = sorted(path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py"))

each_module = pytest.mark.parametrize("module", MODULES, ids=str)


def room_of(path: Path) -> str:
    return path.parts[0].removesuffix(".py")


def is_type_checking(test: ast.expr) -> bool:
    return isinstance(test, ast.Name) and test.id == "TYPE_CHECKING"


def imports(path: Path) -> Iterator[tuple[str, bool]]:
    """Every dotted module that `path` imports, and whether only for type checkers."""
    tree = ast.parse((PACKAGE / path).read_text())
    for_types = {
        id(node)
        for guard in ast.walk(tree)
        if isinstance(guard, ast.If) and is_type_checking(guard.test)
        for statement in guard.body
        for node in ast.walk(statement)
    }
    here = ["aoffload", *path.parts[:-1]]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, id(node) in for_types
        elif isinstance(node, ast.ImportFrom):
            base = here[: len(here) - node.level + 1] if node.level else []
            target = [*base, *(node.module.split(".") if node.module else [])]
            names = [alias.name for alias in node.names] if target == ["aoffload"] else [""]
            for name in names:
                yield ".".join([*target, *([name] if name else [])]), id(node) in for_types


def test_every_module_has_a_room() -> None:
    """A new module says where it belongs before it is let in."""
    assert {room_of(path) for path in MODULES} - {"__init__"} <= set(ROOMS)


@each_module
def test_imports_go_down(module: Path) -> None:
    """A room imports from itself and from lower ones; types may be named upwards, nothing else."""
    if room_of(module) == "__init__":
        return
    level = ROOMS[room_of(module)]
    for name, only_types in imports(module):
        parts = name.split(".")
        if parts[0] != "aoffload" or only_types:
            continue
        assert len(parts) > 1, f"{module} imports the whole package"
        if level == ROOMS["demo"] and parts[1] not in ROOMS:
            continue  # a public name, from the package itself
        assert parts[1] in ROOMS, f"{module} imports {name} from the package's face"
        assert ROOMS[parts[1]] <= level, f"{module} (room {level}) imports {name} (room {ROOMS[parts[1]]})"


@each_module
def test_torch_stays_in_its_rooms(module: Path) -> None:
    """Only what moves bytes or computes knows torch; nothing at all loads pickles."""
    heads = {name.split(".")[0] for name, only_types in imports(module) if not only_types}
    assert not heads & NOWHERE
    if room_of(module) not in MAY_USE_TORCH:
        assert "torch" not in heads


CORE = [path for path in MODULES if room_of(path) == "core"]


@pytest.mark.parametrize("module", CORE, ids=str)
def test_a_file_of_the_core_imports_from_lower_floors(module: Path) -> None:
    """Type imports count: nothing in the core is named from below."""
    floor_of = {name: number for number, names in enumerate(FLOORS, 1) for name in names.split()}
    if module.stem == "__init__":
        return
    assert "TYPE_CHECKING" not in (PACKAGE / module).read_text()
    for name, _ in imports(module):
        parts = name.split(".")
        if parts[:2] == ["aoffload", "core"]:
            below = floor_of[parts[2]]
            assert below < floor_of[module.stem], (
                f"{module} (floor {floor_of[module.stem]}) imports {parts[2]} ({below})"
            )


def test_no_files_name_one_another() -> None:
    """No circle of imports, type imports included, but for those that are known."""
    files = {".".join(path.with_suffix("").parts): path for path in MODULES if path.stem != "__init__"}
    below = {
        name: {target for target, _ in imports(path) if target != f"aoffload.{name}"} for name, path in files.items()
    }
    reached = {name: _reached(name, below) for name in files}
    found = {frozenset(other for other in reached[name] if name in reached[other]) for name in files}
    assert {frozenset(circle) for circle in CIRCLES} == {circle for circle in found if circle}


def _reached(name: str, below: dict[str, set[str]]) -> set[str]:
    """Every file that `name` imports, or one that it imports does."""
    found: set[str] = set()
    waiting = [name]
    while waiting:
        for target in below[waiting.pop()]:
            other = target.removeprefix("aoffload.")
            if other in below and other not in found:
                found.add(other)
                waiting.append(other)
    return found


@pytest.mark.parametrize("module", CORE, ids=str)
def test_the_core_is_pure_and_synchronous(module: Path) -> None:
    """The core waits for nothing, reads no clock, draws no random number, logs nothing and moves no byte."""
    heads = {name.split(".")[0] for name, _ in imports(module)}
    assert not heads & NOT_IN_CORE
    waits = (ast.AsyncFunctionDef, ast.Await, ast.AsyncFor, ast.AsyncWith)
    found = [node for node in ast.walk(ast.parse((PACKAGE / module).read_text())) if isinstance(node, waits)]
    assert not found, f"{module}:{getattr(found[0], 'lineno', 0)} waits"


@each_module
def test_nothing_evaluates_text(module: Path) -> None:
    """No `eval`, no `exec`, no `torch.load`: what comes from outside is data."""
    for node in ast.walk(ast.parse((PACKAGE / module).read_text())):
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            assert called not in {"eval", "exec", "torch.load", "compile"}, f"{module}:{node.lineno} calls {called}"
