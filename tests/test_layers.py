"""The rooms of the package and the one direction between them, read from the imports."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "aoffload"
ROOMS = {
    "errors": 0, "exits": 0, "extras": 0, "arguments": 0, "prefix": 0, "kinds": 0, "groups": 0, "config": 0,
    "config_sources": 0, "config_tables": 0, "env": 0, "sizes": 0, "disk_tier": 0, "remote_tier": 0, "object_stores": 0,
    "evictions": 0, "model_files": 0, "options": 0,
    "core": 1,
    "transfer": 2,
    "worker": 3, "telemetry": 3, "ledger_log": 3, "observers": 3,
    "slow": 3, "disk_work": 3, "remote_work": 3, "write_rate": 3,
    "fetch_gate": 3, "load_costs": 3, "scopes": 3, "session_life": 4,
    "session": 4, "explained": 4,
    "request": 5, "request_block": 5, "engine_calls": 5, "loading": 5, "pins": 5, "opening": 5, "steps": 5,
    "fetching": 5, "runtime_life": 6, "runtime": 6,
    "ledger": 7, "transport": 7, "ranks": 7, "cuda": 7, "stores": 7,
    "demo": 8, "integrations": 8, "testing": 8, "trace": 8, "metrics": 8, "kv_events": 8, "top": 8, "plan": 8,
    "cli": 9, "__main__": 9,
}  # fmt: skip
FACES = ("ledger", "transport", "ranks", "cuda", "stores")
"""Where public names are imported from that are defined further down."""
FLOORS = (
    "build links pools",
    "answer blocks choice intervals lifecycle plan restored returns tokens tombstones",
    "arguments groups records results status table",
    "cells engine_ids eviction index owners paths watching",
    "engine_arrivals forked hit_counts kept labels last_uses learned_order presence tiers waiting",
    "observing",
    "components matching observer policy shadows",
    "engine_blocks splits",
    "cache",
    "jobs learning pins request_leases restores windows",
    "rulings",
    "admission hints integrity overlap publish stores",
    "forks watermark loads",
    "cache_transfers commits disk_stores preemption remote_stores",
    "engine_matches engine_offers fetches situation",
    "engine_owned",
    "ledger_rooms",
    "ledger_requests",
    "ledger_work",
    "ledger_disk",
    "ledger_remote",
    "ledger",
)
"""Of the core, the lowest one first: a file imports from floors below its own only."""
CIRCLES: tuple[set[str], ...] = ()
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


@pytest.mark.parametrize("face", FACES)
def test_a_face_defines_nothing(face: str) -> None:
    """It imports names from where they are defined, and lists all of them: nothing runs in it, and nothing else comes
    along."""
    tree = ast.parse((PACKAGE / f"{face}.py").read_text())
    docstring, *imported, names = tree.body
    assert isinstance(docstring, ast.Expr) and isinstance(names, ast.Assign)
    assert all(isinstance(statement, ast.ImportFrom) and statement.level == 1 for statement in imported)
    found = [alias.name for each in imported if isinstance(each, ast.ImportFrom) for alias in each.names]
    assert sorted(found) == sorted(ast.literal_eval(names.value))


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


RECORDS = ("records", "owners", "table")
"""Where the records and owners of the core are defined; their own methods write them."""
CHANGES = {"add", "append", "clear", "discard", "extend", "insert", "pop", "popitem", "remove", "setdefault", "update"}
SEVERAL_WRITERS = {
    "epoch": {"owners", "records"},  # of a request; of a job
    "leases": {"owners", "pins", "request_leases"},  # of a request that has none left; of a pin; of a request
    "load": {"owners", "records"},  # of a request, which is a claim
    "reserve": {"owners", "request_leases"},  # of a request that has none left
    "match": {"owners", "pins"},  # of a pin; of a request
    "start": {"index", "table"},  # of a run; of a block table
    "sequence": {"commits", "engine_owned"},  # which only appends to itself
    "state": {"observer"},
    "stop": {"index", "records"},  # of a run; of a part and a load
    "wake": {"owners", "records"},  # of a waiter; of a load
    "_hash_after": {"index", "records"},  # computed when it is asked for first
    "last_use": {"components", "eviction", "records"},  # in use; its place in the order; a part that is cut in two
    "ring": {"learned_order", "records"},  # its class in the order; a part that is cut in two
    "offered_stop": {"watermark", "index"},
}
"""Names of fields that more than one file of the core writes. All others are written by one."""


def test_a_field_has_one_writer() -> None:
    """A field of a request, a waiter, a block table, a run, a part, a job, a lease or a load is written by one file."""
    core = PACKAGE / "core"
    classes = [node for name in RECORDS for node in ast.parse((core / f"{name}.py").read_text()).body]
    fields = {
        name
        for node in classes
        if isinstance(node, ast.ClassDef)
        for line in node.body
        if isinstance(line, ast.Assign) and ast.unparse(line.targets[0]) == "__slots__"
        for name in ast.literal_eval(line.value)
    }
    writers: dict[str, set[str]] = {}
    for path in core.glob("*.py"):
        for field in written(path):
            if field in fields:
                writers.setdefault(field, set()).add(path.stem)
    assert {"published", "leases", "blocks", "num_references", "incoming", "released", "claims"} <= writers.keys()
    several = {field: files for field, files in writers.items() if len(files) > 1 or field in SEVERAL_WRITERS}
    assert several == SEVERAL_WRITERS


def written(path: Path) -> set[str]:
    """The attributes that a file assigns to, or changes in place, of other objects than `self`; of any in RECORDS, but
    for what an object begins with."""
    found: set[str] = set()
    tree = ast.parse(path.read_text())
    for node in [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]:
        node.body = [each for each in node.body if getattr(each, "name", "") != "__init__"]
    for node in ast.walk(tree):
        targets: list[ast.expr] = []
        if isinstance(node, ast.Assign | ast.Delete):
            targets = list(node.targets)
        elif isinstance(node, ast.AugAssign):
            targets = [node.target]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in CHANGES:
            targets = [node.func.value]
        while targets:
            target = targets.pop()
            if isinstance(target, ast.Tuple):
                targets += target.elts
            elif isinstance(target, ast.Subscript):
                targets.append(target.value)
            elif isinstance(target, ast.Attribute):
                is_own = isinstance(target.value, ast.Name) and target.value.id == "self"
                if not is_own or path.stem in RECORDS:
                    found.add(target.attr)
    return found


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


def test_what_tests_share_has_a_name_of_its_own() -> None:
    """Folders of tests are put on the path beside each other: of two files of one name, one would hide the other."""
    names = Counter(path.stem for path in Path(__file__).parent.rglob("*.py") if path.stem != "conftest")
    assert [name for name, count in names.items() if count > 1] == []
