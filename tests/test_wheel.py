"""The wheel: built from this tree, and installed elsewhere with only its requirements."""

from __future__ import annotations

import importlib.metadata as metadata
import os
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Iterator
from email import message_from_string
from pathlib import Path

import attrs
import pytest
import trove_classifiers
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
NAME = f"aoffload-{PROJECT['version']}"
GENERATED = {"PKG-INFO"}

pytestmark = pytest.mark.slow


def call(*command: str | Path, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a program that sees neither this tree nor what this process was told."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "PIP_"))}
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=kept | {"PYTHONWARNINGS": "error", "NO_COLOR": "1"} | environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done


@attrs.frozen
class Built:
    sdist: Path
    wheel: Path

    def in_sdist(self) -> set[str]:
        with tarfile.open(self.sdist) as archive:
            return {name.removeprefix(f"{NAME}/") for name in archive.getnames()}

    def in_wheel(self) -> set[str]:
        with zipfile.ZipFile(self.wheel) as archive:
            return set(archive.namelist())

    def file_text(self, name: str) -> str:
        with zipfile.ZipFile(self.wheel) as archive:
            return archive.read(f"{NAME}.dist-info/{name}").decode()


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """The source distribution, and the wheel made from nothing but that."""
    for tool in ("build", "hatchling"):
        try:
            metadata.version(tool)
        except metadata.PackageNotFoundError:
            pytest.skip(f"{tool} is not installed (group `dev`)")
    at = tmp_path_factory.mktemp("dist")
    call(sys.executable, "-m", "build", "--no-isolation", "--outdir", at, ROOT, cwd=at, PYTHONWARNINGS="")
    (sdist,), (wheel,) = at.glob("*.tar.gz"), at.glob("*.whl")
    return Built(sdist, wheel)


@attrs.frozen
class Environment:
    """A virtual environment, and an empty folder to work in."""

    at: Path
    folder: Path

    def run(self, program: str, *arguments: str | Path) -> str:
        return call(self.at / "bin" / program, *arguments, cwd=self.folder).stdout

    def python(self, code: str) -> str:
        return self.run("python", "-c", code)


@pytest.fixture(scope="module")
def installed(built: Built, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """The wheel in a new environment whose other packages are those that it requires, and what these require: links to
    the ones installed here, so nothing is downloaded. The extras are really absent."""
    if os.name != "posix":
        pytest.skip("links to installed packages need POSIX")
    at, folder = tmp_path_factory.mktemp("environment"), tmp_path_factory.mktemp("elsewhere")
    call(sys.executable, "-m", "venv", "--without-pip", at, cwd=folder)
    (packages,) = at.glob("lib/python*/site-packages")
    for distribution in required(PROJECT["dependencies"]):
        for entry in top_level(distribution):
            if not (packages / entry.name).exists():  # the packages of CUDA share a folder
                (packages / entry.name).symlink_to(entry)
    # Without an index, pip fails unless every requirement of the wheel is met by what is there.
    pip = [sys.executable, "-m", "pip", "--isolated", "--python", at / "bin/python"]
    call(*pip, "install", "--no-index", "--quiet", built.wheel, cwd=folder, PYTHONWARNINGS="")
    return Environment(at, folder)


def required(requirements: list[str]) -> list[metadata.Distribution]:
    """The installed distributions that meet the requirements, and those that these require."""
    found: dict[str, metadata.Distribution] = {}
    waiting = [Requirement(text) for text in requirements]
    while waiting:
        requirement = waiting.pop()
        name = re.sub(r"[-_.]+", "-", requirement.name).lower()
        is_for_here = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        if is_for_here and name not in found:
            found[name] = metadata.distribution(requirement.name)
            waiting += [Requirement(text) for text in found[name].requires or []]
    return list(found.values())


def top_level(distribution: metadata.Distribution) -> Iterator[Path]:
    """What it has put into site-packages itself."""
    site = Path(str(distribution.locate_file("")))
    names = {file.parts[0] for file in distribution.files or []} - {"..", "__pycache__"}
    return (site / name for name in sorted(names))


def tracked(*where: str) -> set[str]:
    """The files of this tree that are not ignored."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", *where]
    try:
        listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    except (FileNotFoundError, subprocess.CalledProcessError) as error:
        pytest.skip(f"this tree is no work tree of git: {error}")
    return {name for name in listed.stdout.splitlines() if (ROOT / name).exists()}


def test_the_sdist_is_the_tree(built: Built) -> None:
    """Everything that is kept under version control, tests and pages among it, and nothing that was built here."""
    inside = built.in_sdist()
    assert {"tests/test_wheel.py", "docs/index.md", "LICENSE", "Makefile", "constraints.txt"} <= inside
    assert inside - GENERATED == tracked()


def test_the_wheel_is_the_package(built: Built) -> None:
    """The package with its marker for type checkers and its page's files, the licence, and nothing else: no tests, and
    nothing of the proof."""
    inside = {name for name in built.in_wheel() if not name.startswith(f"{NAME}.dist-info/")}
    assert {"aoffload/py.typed", "aoffload/trace/assets/page.html", "aoffload/trace/assets/main.js"} <= inside
    assert "aoffload/plan/assets/plan.html" in inside
    assert inside == tracked("aoffload")
    assert [name for name in inside if {"programs", "proof", "tests"} & {*Path(name).parts}] == []
    assert built.file_text("licenses/LICENSE") == (ROOT / "LICENSE").read_text()


def test_the_wheel_says_what_the_project_says(built: Built) -> None:
    """Name, version, Python, extras and licence."""
    metadata = message_from_string(built.file_text("METADATA"))
    assert (metadata["Name"], metadata["Version"]) == ("aoffload", PROJECT["version"])
    assert (metadata["Requires-Python"], metadata["License-Expression"]) == (
        PROJECT["requires-python"],
        PROJECT["license"],
    )
    assert set(metadata.get_all("Provides-Extra", [])) == set(PROJECT["optional-dependencies"])
    wanted = [text for text in metadata.get_all("Requires-Dist", []) if "extra ==" not in text]
    assert {str(Requirement(text)) for text in wanted} == {str(Requirement(text)) for text in PROJECT["dependencies"]}


def test_the_wheel_tells_an_index_what_it_is(built: Built) -> None:
    """Who wrote it, where to look, and classifiers that an index knows: an index refuses others. Each Python that has
    a classifier is one that the requirement allows and that the workflow tests."""
    found = message_from_string(built.file_text("METADATA"))
    assert (found["Author"], found["Description-Content-Type"]) == ("aoffload developers", "text/markdown")
    urls = dict(text.split(", ") for text in found.get_all("Project-URL", []))
    assert list(urls) == ["Homepage", "Documentation", "Source", "Changelog", "Issues"]
    assert all(url.startswith("https://github.com/aoffload/aoffload") for url in urls.values())
    below_main = [url.partition("/blob/main/")[2] for url in urls.values() if "/blob/main/" in url]
    assert below_main == [path for path in below_main if (ROOT / path).is_file()] == ["docs/index.md", "CHANGELOG.md"]
    assert {"KV cache", "asyncio", "trio", "vLLM"} <= {*found["Keywords"].split(",")}
    given = found.get_all("Classifier", [])
    assert {*given} <= trove_classifiers.classifiers and given == sorted({*given})
    assert {"Development Status :: 3 - Alpha", "Framework :: AnyIO", "Typing :: Typed"} <= {*given}
    assert not [name for name in given if name.startswith("License ::")], "the expression says it"
    versions = re.findall(r"Programming Language :: Python :: (3\.\d+)", "\n".join(given))
    assert versions and all(version in SpecifierSet(PROJECT["requires-python"]) for version in versions)


def test_the_command_is_installed(installed: Environment) -> None:
    """`aoffload` is on the path of the environment, and knows its version; each command has help without any extra but
    the server's, which is missing."""
    assert installed.run("aoffload", "--version").splitlines()[0] == f"aoffload {PROJECT['version']}"
    for command in ("demo", "trace"):
        assert installed.run("aoffload", command, "--help").startswith(f"usage: aoffload {command} ")


def test_a_ledger_and_a_runtime_work_without_extras(installed: Environment) -> None:
    """The ten-line use of the README prints what the README says, and a ledger decides, from the wheel."""
    found = installed.python("import aoffload; print(aoffload.__file__)")
    assert Path(found.strip()).is_relative_to(installed.at)
    readme = (ROOT / "README.md").read_text()
    (code,) = re.findall(r"^```python\n(import anyio.*?)^```$", readme, re.MULTILINE | re.DOTALL)
    (shown,) = re.findall(r"^```text\n(PrefixMatch.*?)^```$", readme, re.MULTILINE | re.DOTALL)
    assert installed.python(code) == shown
    installed.python(
        "import sys; from aoffload import KVCacheGroup, Ledger, OffloadConfig\n"
        "from aoffload.ledger import Prefix, Root\n"
        "ledger = Ledger(OffloadConfig(groups=[KVCacheGroup('full')], num_host_blocks=8), 9)\n"
        "record = ledger.admit(Prefix.of(Root('toy'), range(40)))\n"
        "ledger.release(record); ledger.check_integrity(); assert 'torch' not in sys.modules"
    )


NEEDS = {
    "cuda": "from aoffload._transfer.backends.cuda.nvidia import NvidiaDriver; NvidiaDriver(0)",
    "events": "import aoffload.kv_events",
    "metrics": "import aoffload.metrics",
    "otel": "import aoffload.otel",
    "server": "from aoffload.integrations.openai_server import make_app",
    "transformers": "from aoffload.integrations import load_model; load_model('llama')",
    "trio": "import aoffload.testing",
    "vllm": "from aoffload.integrations.vllm import AoffloadConnector",
}


def test_every_missing_extra_names_itself(installed: Environment) -> None:
    """Not one of them is there, and each says so by its name."""
    output = installed.python(
        "from aoffload import MissingExtra\n"
        f"for extra, code in {NEEDS!r}.items():\n"
        "    try:\n        exec(code)\n    except MissingExtra as error:\n        print(extra, error.extra, error)\n"
    )
    lines = output.splitlines()
    assert [line.split()[:2] for line in lines] == [[extra, extra] for extra in NEEDS]
    installs = {line.split()[0]: line.partition("pip install ")[2] for line in lines}
    assert installs == {extra: "vllm" if extra == "vllm" else f"'aoffload[{extra}]'" for extra in NEEDS}


def test_the_demo_runs_outside_of_the_clone(installed: Environment) -> None:
    """A real model, a device pool too small for its prompts, the same answers; and its log can be looked at."""
    output = installed.run("aoffload", "demo", "--requests", "8", "--log", "demo.log")
    assert "8 requests in " in output
    assert output.count("tokens and logits equal to the reference bit for bit") == 2
    summary = installed.run("aoffload", "trace", "demo.log")
    assert "0 aborted, 0 unfinished" in summary
    installed.run("aoffload", "trace", "demo.log", "html", "demo.html")
    assert "<html" in (installed.folder / "demo.html").read_text()
