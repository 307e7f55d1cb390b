"""The packages of aoffload and the direction of their imports, read from the source."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "aoffload"
FLOORS = (
    "errors _common",
    "_config _tiers.remote.clients",
    "_kernel",
    "_extensions _eviction _tiers.fetch.rules _tiers.write_rate"
    " _tiers.lower.rules _tiers.lower.extension"
    " _tiers.disk.plans _tiers.disk.rules _tiers.disk.rules _tiers.disk.extension"
    " _tiers.remote.plans _tiers.remote.rules _tiers.remote.extension",
    "_extensions.assembly",
    "_host_cache",
    "_transfer _tiers",
    "_observe",
    "_runtime _tiers.disk.loop _tiers.lower.loop _tiers.remote.loop _tiers.fetch.loop",
    "ledger host_cache transport ranks cuda stores",
    "demo testing trace top plan _vllm _reference _observe.metrics _observe.kv_events _observe.spans"
    " integrations metrics kv_events otel",
    "__main__",
)
"""Packages, the lowest first: a folder, or a module on another floor than its folder. A package imports from its
own floor and from lower ones. The kernel imports no feature, because every feature stands above it."""
FACES = ("ledger", "host_cache", "transport", "ranks", "cuda", "stores", "integrations")
"""Where public names are imported from that are defined further down."""
TOOLS = ("demo", "testing", "trace", "plan", "top")
MOST_FLAT_MODULES, MOST_PLAIN_FILES = 10, 30
"""Both keep the way in short: 9 and 7 as this is written."""
PURE = " ".join(FLOORS[2:6])
"""The core: packages that decide, and neither wait nor move bytes."""
MOST_KERNEL_FILES, LONGEST_CHAIN = 21, 16
"""Both are lamps: a number that grows is given its reason here. The chain of the core was 12 while the ledger named the
features, which stood beside each other below it; they stand above it now, and the assembly and `HostCache` above
them."""
LONELY_BASES = {
    "CacheTransfers": "what a `HostCache` has of them; a `Ledger` has prefetches and demotions, too",
    "CoreLedger": "the kernel alone; `Ledger` puts the features beside it",
    "EvictionOrder": "a protocol: the orders of tenants are compared, too",
    "Pins": "quotas bound the pins of each tenant, too",
    "LedgerRequest": "a request of a `HostCache` has more",
    "LeastRecentlyUsed": "the orders of tenants number their uses together",
    "Shadow": "a simulated cache in LRU order; that in the learned order evicts others",
    "DevicePool": "a protocol: a restart takes slots of a disk by their ids, too",
    "EngineBlocks": "a protocol: an engine may also find blocks by their tokens",
    "ExtentPool": "the slots of a disk remember what they held",
    "RequestOptions": "a TypedDict: a request of a runtime takes these options, too",
    "LedgerStatistics": "a runtime adds the counts of its transfers",
    "TokenRange": "a protocol",
}
"""Bases with one class derived from them, and why that is no chain."""
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
MAY_USE_TORCH = {"_transfer", "_tiers", "_vllm", "_reference", "demo", "testing"}
NOWHERE = {"pickle", "shelve", "marshal", "dill", "cloudpickle"}
MODULES = sorted(path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py"))

each_module = pytest.mark.parametrize("module", MODULES, ids=str)


def dotted(path: Path) -> str:
    """The module of a file, within the package."""
    return ".".join(part for part in path.with_suffix("").parts if part != "__init__")


def is_in(module: str, packages: str) -> bool:
    return any(module == package or module.startswith(f"{package}.") for package in packages.split())


def floor_of(module: str) -> int:
    """The floor of the longest package name that begins `module`; -1 if there is none."""
    packages = {package: number for number, names in enumerate(FLOORS) for package in names.split()}
    parts = module.split(".")
    names = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
    return next((packages[name] for name in names if name in packages), -1)


CORE = [path for path in MODULES if is_in(dotted(path), PURE) and path.stem != "__init__"]

each_core_module = pytest.mark.parametrize("module", CORE, ids=str)


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
    assert [path for path in MODULES if dotted(path) and floor_of(dotted(path)) < 0] == []


def test_imports_go_down() -> None:
    """A package imports from its own floor and lower ones; types may be upwards. The kernel imports no feature."""
    upwards: set[str] = set()
    for path in MODULES:
        here = dotted(path)
        for name, only_types in imports(path) if here else ():
            module = name.partition(".")[2]
            if name.split(".")[0] != "aoffload" or only_types:
                continue
            assert module, f"{path} imports the whole package"
            if floor_of(module) < 0:
                assert floor_of(here) >= floor_of("demo"), f"{path} imports {name} from the package's face"
            elif floor_of(module) > floor_of(here):
                upwards.add(f"{here} -> {module}")
    assert upwards == set()


@pytest.mark.parametrize("face", FACES)
def test_a_face_defines_nothing(face: str) -> None:
    """It imports names from where they are defined, and lists all of them: nothing runs in it, and nothing else comes
    along."""
    (path,) = (path for path in MODULES if dotted(path) == face)
    docstring, *imported, names = ast.parse((PACKAGE / path).read_text()).body
    assert isinstance(docstring, ast.Expr) and isinstance(names, ast.Assign)
    assert all(isinstance(statement, ast.ImportFrom) and statement.level for statement in imported)
    found = [alias.name for each in imported if isinstance(each, ast.ImportFrom) for alias in each.names]
    assert sorted(found) == sorted(ast.literal_eval(names.value))


def test_the_way_in_is_short() -> None:
    """Few modules lie at the top of the package. Few files have no underscore in their path: who looks for what a
    program may import reads these. A package counts with its modules, not with its `__init__`. The tools and
    `aoffload.testing` do not count, because nobody reads them to learn what the library offers."""
    flat = [path for path in MODULES if len(path.parts) == 1]
    plain = [
        path for path in MODULES if path.parts[0] not in TOOLS and not any(part.startswith("_") for part in path.parts)
    ]
    assert len(flat) <= MOST_FLAT_MODULES
    assert len(plain) <= MOST_PLAIN_FILES


@each_module
def test_torch_stays_in_its_rooms(module: Path) -> None:
    """Only what moves bytes or computes knows torch; nothing at all loads pickles."""
    heads = {name.split(".")[0] for name, only_types in imports(module) if not only_types}
    assert not heads & NOWHERE
    if module.parts[0] not in MAY_USE_TORCH:
        assert "torch" not in heads


def test_the_core_can_be_read_in_order() -> None:
    """Few files, and a short way from the first to the last: who reads them by floors meets no name that comes later.
    Imports for types count."""
    below = {dotted(path): {name.partition(".")[2] for name, _ in imports(path)} for path in CORE}
    chains: dict[str, int] = {}

    def chain(module: str) -> int:
        if module not in chains:
            chains[module] = 1 + max((chain(name) for name in below[module] if name in below), default=0)
        return chains[module]

    assert len([path for path in CORE if path.parts[0] == "_kernel"]) <= MOST_KERNEL_FILES
    assert max(map(chain, below)) <= LONGEST_CHAIN


def test_a_class_is_one_class() -> None:
    """No base exists for one class alone, because a chain of bases hides which verb changes what."""
    nodes = [node for path in MODULES for node in ast.walk(ast.parse((PACKAGE / path).read_text()))]
    classes = [node for node in nodes if isinstance(node, ast.ClassDef)]
    bases = Counter(ast.unparse(base).partition("[")[0] for node in classes for base in node.bases)
    core = {
        node.name
        for path in CORE
        for node in ast.parse((PACKAGE / path).read_text()).body
        if isinstance(node, ast.ClassDef)
    }
    assert {name for name in core if bases[name] == 1} == set(LONELY_BASES)


@each_core_module
def test_no_method_only_sets_fields(module: Path) -> None:
    """The verb that decides assigns the field: a setter would hide which verb it was."""
    found = []
    for kind in ast.walk(ast.parse((PACKAGE / module).read_text())):
        methods = kind.body if isinstance(kind, ast.ClassDef) else []
        for method in methods:
            is_own = isinstance(method, ast.FunctionDef) and not method.name.startswith("__")
            if is_own and method.name != "on_attach" and _only_sets(method):
                found.append(method.name)
    assert found == []


def _only_sets(method: ast.FunctionDef) -> bool:
    """Whether `method` is one line that assigns names and constants to fields of its own object."""
    *_, line = method.body
    if len(method.body) > 1 + (ast.get_docstring(method) is not None) or not isinstance(line, ast.Assign):
        return False
    targets = line.targets[0].elts if isinstance(line.targets[0], ast.Tuple) else [line.targets[0]]
    values = line.value.elts if isinstance(line.value, ast.Tuple) else [line.value]
    of_self = all(isinstance(one, ast.Attribute) and ast.unparse(one.value) == "self" for one in targets)
    return of_self and all(isinstance(value, ast.Name | ast.Constant | ast.Attribute) for value in values)


RECORDS = ("_kernel.records",)
CHANGES = {"add", "append", "clear", "discard", "extend", "insert", "pop", "popitem", "remove", "setdefault", "update"}
WRITTEN_BY_FEATURES = {
    "_eviction.accounts": "last_use",
    "_eviction.checkpoints": "last_use",
    "_eviction.counts": "before key num_after start tokens",
    "_eviction.learned": "last_use rank",
    "_extensions.forks": (
        "checkpoints has_parent hit_stop last_step leases match num_computed_tokens num_units published ready_stop "
        "resume tables"
    ),
    "_extensions.invalidation": "epoch num_computed_tokens",
    "_extensions.overlap": "job_settled",
    "_extensions.pins": "leases match since_s",
    "_extensions.preemption": "computing hit_limit leases num_computed_tokens published ready_stop",
    "_extensions.prefetch": "hit_limit incoming num_units tables",
    "_extensions.transfers": "load",
    "_extensions.watermark": "offered_stop",
    "_extensions.weights": "epoch sequence",
    "_host_cache.host_cache": (
        "computing epoch has_committed hit_limit hit_stop load num_computed_tokens num_lost_tokens published "
        "ready_stop reason sequence wake"
    ),
    "_host_cache.matches": "branch_stop checkpoints hit_stop leases match published ready_stop",
    "_tiers.fetch.rules": "hit_limit leases",
}
"""Fields of the kernel's records that features write, too. The list may only shrink."""


def test_a_field_is_written_in_one_room() -> None:
    """The kernel alone writes the fields of its records, but for those that `WRITTEN_BY_FEATURES` names."""
    records = [PACKAGE / f"{name.replace('.', '/')}.py" for name in RECORDS]
    classes = [node for path in records for node in ast.parse(path.read_text()).body if isinstance(node, ast.ClassDef)]
    fields = {
        name
        for node in classes
        for line in node.body
        if isinstance(line, ast.Assign) and ast.unparse(line.targets[0]) == "__slots__"
        for name in ast.literal_eval(line.value)
    }
    found: dict[str, set[str]] = {}
    for path in CORE:
        if path.parts[0] != "_kernel":
            for field in written(path) & fields:
                found.setdefault(".".join(path.with_suffix("").parts), set()).add(field)
    assert {package: " ".join(sorted(fields)) for package, fields in found.items()} == WRITTEN_BY_FEATURES


def written(path: Path) -> set[str]:
    """The fields of other objects than `self` that a file assigns to, or changes in place."""
    found: set[str] = set()
    for node in ast.walk(ast.parse((PACKAGE / path).read_text())):
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
            elif isinstance(target, ast.Attribute) and not (
                isinstance(target.value, ast.Name) and target.value.id == "self"
            ):
                found.add(target.attr)
    return found


FEATURE_WORDS = (
    "fork", "preempt", "pins", "prefetch", "demot", "overlap", "watermark", "lazy", "write_back", "hint", "fetch",
    "engine", "disk", "remote", "cell", "selective", "policy", "quota", "explain", "learn", "shadow",
)  # fmt: skip
"""What a name in the kernel's code may not have in it. To invalidate is the kernel's own word, for epochs and
tombstones; the feature of that name finds whose KV is wrong. Words of windows are not here: windows stay in it."""
KNOWN_WORDS = {
    "PREEMPTED": "a state: REQUEST_MOVES has a row for each",
    "preempted": "its text",
    "it has given up its blocks: leave it, or `preempt` and `resume` it": "the advice of a state",
}
"""Names that have such a word all the same, with the reason."""


def names_in(path: Path) -> Iterator[str]:
    """Every name and every text in the code of a file, without docstrings."""
    tree = ast.parse((PACKAGE / path).read_text())
    texts = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        for field in ("id", "attr", "arg", "name", "module"):
            if isinstance(value := getattr(node, field, None), str):
                yield value
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in texts:
            yield node.value


def test_the_kernel_has_no_word_of_a_feature() -> None:
    """Who reads the kernel meets no feature: not in a name, and not in a text."""
    kernel = [path for path in CORE if path.parts[0] == "_kernel"]
    found = {name for path in kernel for name in names_in(path) if _has_word(name)}
    assert found == set(KNOWN_WORDS)


def _has_word(name: str) -> bool:
    """Whether a word of `name`, such as `pins` of `num_pins` or `PinsHeld`, begins with a feature's word."""
    words = re.findall(r"[a-z]+|[A-Z]+(?![a-z])|[A-Z][a-z]*", name)
    return any(word.lower().startswith(FEATURE_WORDS) for word in words)


def test_no_files_name_one_another() -> None:
    """No circle of imports, type imports included."""
    files = {dotted(path): path for path in MODULES if path.stem != "__init__"}
    below = {
        name: {target for target, _ in imports(path) if target != f"aoffload.{name}"} for name, path in files.items()
    }
    reached = {name: _reached(name, below) for name in files}
    assert {name for name in files if name in reached[name]} == set()


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


@each_core_module
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
