"""The documentation matches the package, and its examples run."""

from __future__ import annotations

import ast
import contextlib
import inspect
import io
import json
import re
import textwrap
import typing
from itertools import pairwise
from operator import attrgetter
from pathlib import Path
from types import ModuleType
from typing import Any

import anyio
import pytest
import torch
from public import EVERY_MODULE, FACES, INTERNAL, handles_of, methods_of

from aoffload import (
    HostCache,
    HostCacheRuntime,
    KVCacheGroup,
    Ledger,
    OffloadConfig,
    OffloadRuntime,
    Request,
)
from aoffload._extensions.overlap import OVERLAP_MOVES
from aoffload._extensions.pins import PIN_MOVES
from aoffload._extensions.transfers import CACHE_TRANSFER_MOVES
from aoffload._kernel.states import JOB_MOVES, REQUEST_MOVES
from aoffload._observe import log as ledger_log
from aoffload._observe import log as telemetry
from aoffload._reference.server.hints import read_control
from aoffload.host_cache import EngineRequest
from aoffload.ledger import Build, LedgerExtension, PinHint, read_hints
from aoffload.plan import command as plan
from aoffload.plan import report
from aoffload.plan.mixes import MIXES
from proof import architecture

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "aoffload"
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]
README, API, TRACING, LOGS = ROOT / "README.md", DOCS / "api.md", DOCS / "tracing.md", DOCS / "howto/logs-and-spans.md"
CHANGELOG = ROOT / "CHANGELOG.md"
ARCHITECTURE = DOCS / "architecture.md"
TUTORIAL, OWN_ENGINE = DOCS / "tutorial.md", ROOT / "examples/own_engine.py"

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def code_blocks(page: Path, language: str) -> list[str]:
    return code_blocks_in(page.read_text(), language)


def code_blocks_in(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def code_spans(page: Path) -> set[str]:
    """What stands between single backticks outside of code blocks."""
    prose = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    return set(re.findall(r"`([^`\n]+)`", prose))


def names_in(spans: set[str]) -> set[str]:
    return {name for span in spans for name in re.findall(r"\w+", span)}


def about_module(name: str) -> str:
    """What docs/api.md says under the heading of a module."""
    (found,) = re.findall(rf"^## {re.escape(name)}$(.*?)(?=^## |\Z)", API.read_text(), re.MULTILINE | re.DOTALL)
    return str(found)


@pytest.mark.parametrize("module", EVERY_MODULE, ids=attrgetter("__name__"))
def test_the_index_lists_every_public_name(module: ModuleType) -> None:
    """docs/api.md lists each name of `__all__` under the heading of its module, and no name of another module there."""
    listed = set(re.findall(r"`(\w+)`", about_module(module.__name__)))
    others = {name for other in EVERY_MODULE if other is not module for name in other.__all__}
    assert set(module.__all__) - listed == set()
    assert listed & others == set()


def says_something(docstring: str | None) -> bool:
    return docstring is not None and len(docstring.split()) >= 3


def documented_constants() -> set[str]:
    """The variables of all modules of the package with a docstring after their assignment."""
    found: set[str] = set()
    for path in PACKAGE.rglob("*.py"):
        body = ast.parse(path.read_text()).body
        for node, after in pairwise(body):
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            is_docstring = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
            if is_docstring and says_something(str(ast.literal_eval(after.value))):
                found |= {target.id for target in targets if isinstance(target, ast.Name)}
    return found


@pytest.mark.parametrize("module", EVERY_MODULE, ids=attrgetter("__name__"))
def test_every_public_name_has_a_docstring(module: ModuleType) -> None:
    """Each class and function has a docstring of its own, and each constant one after it: the reference shows them."""
    constants = documented_constants()
    lacking = []
    for name in module.__all__:
        if name == "AoffloadConnector":  # cannot be imported without vLLM
            tree = ast.parse((PACKAGE / "_vllm/connector.py").read_text())
            (found,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)
            docstring = ast.get_docstring(found)
        elif isinstance(member := getattr(module, name), type) or inspect.isfunction(member):
            docstring = vars(member).get("__doc__") if isinstance(member, type) else member.__doc__
        else:
            docstring = "a docstring follows" if name in constants else None
        if not says_something(docstring) or str(docstring).startswith(f"{name}("):  # the latter: made by a decorator
            lacking.append(name)
    assert lacking == []


def test_what_the_page_of_testing_shows_runs_and_prints_what_it_says() -> None:
    """Each program in docs/testing.md is whole, finds nothing, and the block after it is its output."""
    page = ROOT / "docs/testing.md"
    for code, shown in zip(code_blocks(page, "python"), code_blocks(page, "text"), strict=True):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(code, "testing.md", "exec"), {"__name__": "testing_page"})
        assert printed.getvalue() == shown


@pytest.mark.parametrize(
    "kind",
    [
        OffloadRuntime, HostCacheRuntime, Request, EngineRequest, Ledger, HostCache, LedgerExtension, Build,
        OffloadConfig,
    ],
)  # fmt: skip
def test_every_public_member_of_the_main_classes_has_a_docstring(kind: type) -> None:
    """Every method, property and option has a docstring of its own, also where it overrides one of a base class."""
    methods = {name: member for name, member in inspect.getmembers(kind) if not name.startswith("_")}
    found = {
        name: (member.fget if isinstance(member, property) else member).__doc__
        for name, member in methods.items()
        if inspect.isroutine(member) or isinstance(member, property)
    }
    (tree,) = ast.parse(inspect.getsource(kind)).body
    assert isinstance(tree, ast.ClassDef)
    for node, after in pairwise(tree.body):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and hasattr(kind, "__attrs_attrs__"):
            follows = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
            found[node.target.id] = str(ast.literal_eval(after.value)) if follows else None
    assert {field.name for field in getattr(kind, "__attrs_attrs__", ())} <= set(found)
    assert [name for name, docstring in found.items() if not says_something(docstring)] == []


@pytest.mark.parametrize("face", FACES, ids=attrgetter("__name__"))
def test_every_verb_of_a_handle_has_a_docstring(face: type) -> None:
    """Each handle and each of its verbs says what it does; what the reference leaves out as internal exists."""
    handles = handles_of(face)
    assert handles
    for handle, kind in handles.items():
        assert says_something(getattr(face, handle).__doc__), handle
        verbs = {name: member for name, member in methods_of(kind).items() if name not in INTERNAL.get(handle, ())}
        docstrings = {name: (m.fget if isinstance(m, property) else m).__doc__ for name, m in verbs.items()}
        assert [name for name, docstring in docstrings.items() if not says_something(docstring)] == [], handle
        if face is Ledger:
            assert INTERNAL.get(handle, set()) <= set(methods_of(kind)), handle


OF_RUNTIMES = {"disk": {"wait_restored"}, "hints": {"pin", "prefetch", "demote", "returns", "done"}}
"""By handle, the verbs that a ledger does not have. Those of hints are values there (`PinHint`)."""


def test_a_runtime_has_the_handles_of_its_ledger() -> None:
    """A handle, and a verb, has the same name on both."""
    for runtime, ledger in ((OffloadRuntime, Ledger), (HostCacheRuntime, HostCache)):
        for name, member in inspect.getmembers(runtime, lambda member: isinstance(member, property)):
            handle = typing.get_type_hints(member.fget)["return"]
            of_ledger = typing.get_type_hints(getattr(ledger, name).fget)["return"]
            verbs = {verb for verb, _ in inspect.getmembers(handle, inspect.isfunction) if not verb.startswith("_")}
            assert verbs - set(dir(of_ledger)) == OF_RUNTIMES.get(name, set())


@each_page
def test_relative_links_resolve(page: Path) -> None:
    """No link of a page leads nowhere."""
    targets = re.findall(r"\]\((?!https?://)([^)#]+)", page.read_text())
    assert [target for target in targets if not (page.parent / target).exists()] == []


def heading_anchors(page: Path) -> set[str]:
    """What a repository's viewer, and the site, call the headings of a page."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading).lower().replace(" ", "-") for heading in headings}


@each_page
def test_no_line_becomes_a_heading_by_chance(page: Path) -> None:
    """An issue's number at the beginning of a line is one on the site, though not on GitHub."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    assert not re.findall(r"^#+[^# \n].*", text, re.MULTILINE)


@each_page
def test_links_into_a_page_resolve(page: Path) -> None:
    """A link to a heading has that heading."""
    links = re.findall(r"\]\((?!https?://)([^)#]*)#([^)]+)\)", page.read_text())
    lost = [link for link in links if link[1] not in heading_anchors(page.parent / link[0] if link[0] else page)]
    assert lost == []


@each_page
def test_files_that_a_page_names_exist(page: Path) -> None:
    """A file named in the text is where the text says, from the root or inside the package."""
    named = {span for span in code_spans(page) if re.fullmatch(r"[\w/]+(\.py|\.md|/)", span)}
    kept = {name for name in named if not name.startswith("build/")}  # what is in there is made
    assert [name for name in sorted(kept) if not any((at / name).exists() for at in (ROOT, PACKAGE))] == []


MISSING = re.compile(
    r"not built|not (there )?yet\b|nothing remote|no connector|no plug-in|not in vLLM|not under vLLM|not implemented"
    r"|what is missing|([Pp]rocesses|[Ee]ngines) share nothing"
)


@each_page
def test_what_is_missing_stands_in_one_table(page: Path) -> None:
    """A page that says that something is not there points to the one table that is kept true, in the same paragraph."""
    if page in (CHANGELOG, DOCS / "compatibility.md"):
        return
    prose = re.sub(r"^```.*?^```$|^<!-- types.*?end of types", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    claims = [line for line in re.split(r"\n(?=\n|[-#]|.* \| )", prose) if MISSING.search(re.sub(r"`[^`]*`", "", line))]
    assert [claim for claim in claims if "compatibility.md#what-is-not-there" not in claim] == []


@pytest.mark.parametrize("page", [page for page in PAGES if page != TUTORIAL], ids=attrgetter("stem"))
def test_blocks_of_a_page_are_python(page: Path) -> None:
    """Each block compiles, fragments too, and what it imports from the package is there. The tutorial: one program
    in pieces."""
    for code in code_blocks(page, "python"):
        tree = compile(textwrap.dedent(code), page.name, "exec", ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        imports = [one for one in ast.walk(tree) if isinstance(one, ast.ImportFrom) and "aoffload" in str(one.module)]
        exec(compile(ast.Module(imports, []), page.name, "exec"), {})


def test_the_page_about_a_ledger_in_a_loop_wires_one() -> None:
    """The blocks of docs/ledger_loop.md, one after the other, are a program."""
    namespace: dict[str, Any] = {}
    for code in code_blocks(DOCS / "ledger_loop.md", "python"):
        exec(compile(code, "ledger_loop.md", "exec"), namespace)
    assert namespace["copies"].is_accepting
    assert namespace["transport"].close(10)


def test_settings_of_the_page_are_the_same_in_a_file_and_in_the_environment(tmp_path: Path) -> None:
    """The file that docs/howto/tuning-pools.md shows can be read, and its comments say the variables for its keys."""
    (shown,) = code_blocks(DOCS / "howto/tuning-pools.md", "toml")
    (tmp_path / "aoffload.toml").write_text(shown)
    found = OffloadConfig.from_file(tmp_path / "aoffload.toml")
    assert (found.host_bytes, found.verify, len(found.groups)) == ("64GiB", True, 2)
    variables = dict(re.findall(r"# (AOFFLOAD_\w+)='?(.*?)'?$", shown, re.MULTILINE))
    read = OffloadConfig.from_env(variables, store_policy="lazy")
    assert (read.host_bytes, read.verify, len(read.groups)) == ("64GiB", True, 2)


def test_the_program_about_keeping_runs_and_prints_what_it_says() -> None:
    """The program in docs/pins.md is whole, and the block after it is its output."""
    page = ROOT / "docs/pins.md"
    (code,), (shown,) = code_blocks(page, "python"), code_blocks(page, "text")
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code, "pins.md", "exec"), {"__name__": "keeping_page"})
    assert printed.getvalue() == shown


def test_the_program_about_agents_runs_and_prints_what_it_says(capsys: pytest.CaptureFixture[str]) -> None:
    """The program in docs/howto/agents.md is whole, and the block after it is its output."""
    page = ROOT / "docs/howto/agents.md"
    (code,) = code_blocks(page, "python")
    exec(compile(code, "agents.md", "exec"), {"__name__": "agents_page"})
    assert [capsys.readouterr().out] == code_blocks(page, "text")


def test_bodies_on_the_page_about_hints_carry_hints() -> None:
    """Each body of an HTTP request in docs/hints.md has hints that are read without a fault."""
    vllm, server = (json.loads(body) for body in code_blocks(DOCS / "hints.md", "json"))
    for payload in (vllm["kv_transfer_params"]["kv_hints"], server["kv_hints"]):
        assert payload and [given.hint for given in read_hints(payload)].count(None) == 0
    control = read_control(server["cache_control"], "cache_control")
    assert control is not None and control.hint == PinHint(3600)


def test_the_house_is_drawn_as_it_is() -> None:
    """The drawing in docs/architecture.md has the packages by layer, and their lines of code to within a tenth.
    `python -m proof.architecture --write docs/architecture.md` draws it anew."""
    text = ARCHITECTURE.read_text()
    assert architecture.is_current(text)
    drawn = text.split(architecture.BEGIN)[1].split(architecture.END)[0]
    assert not architecture.is_current(text.replace(drawn, drawn.replace(" _kernel ", " _kernal ", 1)))
    assert not architecture.is_current(text.replace(drawn, re.sub(r"(_kernel +) [\d,]+", r"\1 9,900", drawn)))
    assert {entry.num_lines > 0 and bool(entry.phrase) for entry in architecture.packages()} == {True}


FOREIGN = {("Task", "cancel"), ("Tensor", "copy_"), ("AutoConfig", "from_pretrained")}
"""Members of classes of other packages."""


@each_page
def test_members_that_a_page_names_exist(page: Path, members: dict[str, set[str]]) -> None:
    """`Class.member` on a page is a class of the package that has this member."""
    if page == CHANGELOG:  # it names what was removed, too
        return
    named = {
        tuple(match) for span in code_spans(page) for match in re.findall(r"\b([A-Z]\w*[a-z]\w*)\.([a-z]\w+)", span)
    }
    assert {name for name in named - FOREIGN if name[1] not in members.get(name[0], ())} == set()


@pytest.fixture(scope="module")
def members() -> dict[str, set[str]]:
    """The names in each class of the package."""
    found: dict[str, set[str]] = {}
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                nodes = list(ast.walk(node))
                names = {each.name for each in nodes if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)}
                names |= {each.id for each in nodes if isinstance(each, ast.Name)}
                names |= {each.attr for each in nodes if isinstance(each, ast.Attribute)}
                found.setdefault(node.name, set()).update(names)
    return found


def test_the_tutorial_shows_the_example_line_by_line() -> None:
    """The blocks of docs/tutorial.md one after the other are examples/own_engine.py, and nothing is left out."""
    program = OWN_ENGINE.read_text().partition('"""\n\n')[2]
    shown = [line for block in code_blocks(TUTORIAL, "python") for line in block.splitlines() if line]
    assert shown == [line for line in program.splitlines() if line]


def test_the_tutorial_shows_what_the_example_prints() -> None:
    """Its output is the one in the docstring of the example, which is what the example prints."""
    docstring = ast.get_docstring(ast.parse(OWN_ENGINE.read_text())) or ""
    promised = [line.removeprefix("    ") for line in docstring.partition("Prints:\n")[2].splitlines()]
    assert [shown.splitlines() for shown in code_blocks(TUTORIAL, "text")] == [promised]


def test_the_plan_of_a_mix_prints_what_the_page_says(capsys: pytest.CaptureFixture[str]) -> None:
    """docs/howto/is-it-for-me.md shows lines of the real output, in their order; `...` ends a line that is cut. What
    its table says of each mix is what the first line says."""
    page = ROOT / "docs/howto/is-it-for-me.md"
    (command,), (shown,) = code_blocks(page, "sh"), code_blocks(page, "text")
    assert plan.main(command.split()[2:]) == 0
    printed = iter(capsys.readouterr().out.splitlines())
    for line in shown.splitlines():
        assert any(real.startswith(line.removesuffix(" ...")) for real in printed), line
    for mix, verdict in re.findall(r"^`(\w+)` \| .* \| (.*)$", page.read_text(), re.MULTILINE):
        assert plan.main(["--mix", mix]) == 0
        assert capsys.readouterr().out.startswith("Buy nothing for ") == (verdict == "brings nothing")
    text = page.read_text()
    assert {mix for mix in MIXES if f"\n`{mix}` | " in text} == set(MIXES)


def test_options_of_the_plan_that_pages_name_exist() -> None:
    """In docs/plan.md and docs/howto/is-it-for-me.md, and the names of columns in the former."""
    pages = [DOCS / "plan.md", DOCS / "howto/is-it-for-me.md"]
    known = plan.make_parser().format_help()
    options = {name for page in pages for name in re.findall(r"--[a-z][a-z-]+", page.read_text())} - {"--record"}
    assert len(options) > 10 and [name for name in sorted(options) if not re.search(rf"{name}\b", known)] == []
    columns = re.findall(r"^(`.*`) \|", (DOCS / "plan.md").read_text().partition("Column |")[2], re.MULTILINE)
    source = inspect.getsource(report.heading)
    assert [name for row in columns for name in re.findall(r"`(.*?)`", row) if f'"{name}"' not in source] == []


def test_readme_code_runs_and_prints_what_it_says() -> None:
    """The ten-line use is a whole program, and the block after it is its output."""
    (code,) = code_blocks(README, "python")
    shown = code_blocks(README, "text")[0]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code, "README.md", "exec"), {"__name__": "readme"})
    assert printed.getvalue() == shown


def test_the_pages_stay_short() -> None:
    """All pages together, code and tables included, have at most 20,000 words."""
    assert sum(len(page.read_text().split()) for page in (README, *DOCS.rglob("*.md"))) <= 20_000


def test_figures_of_the_readme_stand_on_the_page_that_says_how_they_were_measured() -> None:
    """Each time, share and count of the README's table of figures is a figure of docs/performance.md, too."""
    table = README.read_text().partition("\nMeasured | ")[2].partition("\n\n")[0]
    figures = set(re.findall(r"(?<![\w.,])\d+(?:,\d{3})*(?= µs| %| to | requests| tokens| MiB)", table))
    known = set(re.findall(r"(?<![\w.,])\d+(?:,\d{3})*(?!\.\d|\w|,\d)", (DOCS / "performance.md").read_text()))
    assert len(figures) >= 12
    assert figures - known == set()


def test_readme_names_commands_that_the_makefile_has() -> None:
    """`make` knows every target that the README tells to run."""
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"\bmake (\w+)", README.read_text())) - targets == set()


def event_rows() -> dict[str, str]:
    """The rows of the first table of docs/tracing.md by event; one row may be about several."""
    table = TRACING.read_text().split("## The events")[1].split("\n## ")[0]
    rows = re.findall(r"^`\w+`.*? \|.*$", table, re.MULTILINE)
    return {event: row for row in rows for event in re.findall(r"`(\w+)`", row.partition(" | ")[0])}


def test_every_event_has_a_row() -> None:
    """docs/tracing.md lists every event that the telemetry can write, and no other one."""
    moves = {state.value for targets in REQUEST_MOVES.values() for state in targets}
    written = {f"request_{state}" for state in moves}
    written |= {f"job_{state.value}" for targets in JOB_MOVES.values() for state in targets}  # type: ignore[union-attr]
    written |= {f"pin_{state.value}" for targets in PIN_MOVES.values() for state in targets}  # type: ignore[union-attr]
    transfers = {state.value for targets in CACHE_TRANSFER_MOVES.values() for state in targets}  # type: ignore[union-attr]
    written |= {f"{kind}_{state}" for kind in ("prefetch", "demotion", "fetch") for state in transfers}
    early = {state.value for targets in OVERLAP_MOVES.values() for state in targets}  # type: ignore[union-attr]
    written |= {f"load_overlap_{state}" for state in early}
    sources = (ast.parse(inspect.getsource(module)) for module in (ledger_log, telemetry))
    for call in (node for source in sources for node in ast.walk(source)):
        if isinstance(call, ast.Call) and call.args and isinstance(call.args[0], ast.Constant):
            name = call.args[0].value
            if isinstance(name, str) and re.fullmatch(r"[a-z]+(_[a-z]+)+", name):
                written.add(name)
    assert written == set(event_rows())


async def _write_log(file: io.StringIO, make_logger: Any, *observers: Any) -> None:
    """Store, evict, load back and give up, on a device of four blocks."""
    config = OffloadConfig(groups=[KVCacheGroup("full")], num_host_blocks=16)
    async with OffloadRuntime(config, torch.zeros(5, 16), logger=make_logger(file), observers=observers) as runtime:
        for prompt in (range(60), range(100, 160), range(60)):
            async with runtime.request(prompt) as request:
                await request.allocate()
                await request.load()
                request.commit(len(prompt))
            await runtime.flush()
        async with runtime.request(range(60), "leaver"):
            pass


def test_the_json_logger_of_the_page_writes_the_fields_of_the_table() -> None:
    """Every field of every event of a real run stands in the row of that event, or of the one it refers to."""
    namespace: dict[str, Any] = {}
    for code in (code_blocks(LOGS, "python")[0], *code_blocks(TRACING, "python")):
        exec(compile(code, "docs/tracing.md", "exec"), namespace)
    file, observer = io.StringIO(), namespace["Finished"]()
    anyio.run(_write_log, file, namespace["json_logger"], observer)
    assert observer.num_done == 3
    events = [json.loads(line) for line in file.getvalue().splitlines()]
    wanted = {"request_loading", "request_done", "request_aborted", "job_completed"}
    assert wanted <= {event["event"] for event in events}
    rows = event_rows()
    rows["job_completed"] += rows["job_launched"]
    for event in events:
        undocumented = set(event) - {"event", "level", "timestamp", "request_id"} - names_in({rows[event["event"]]})
        assert undocumented == set(), event["event"]
