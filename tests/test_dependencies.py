"""The packages that an installation brings: the page about them, and the lowest versions that are tested."""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import lowest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parent.parent
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT, GROUPS = PYPROJECT["project"], PYPROJECT["dependency-groups"]
PAGE = (ROOT / "docs/dependencies.md").read_text()
ROW = re.compile(r"^(?:`([\w-]+)`|\(none\)) \| [^|]+ \| (.*)$", re.MULTILINE)
DISTRIBUTION = re.compile(r"([\w-]+) ([<>=~!][^ ]*) \(([^()]+)\)")


def rows_by_extra(page: str) -> dict[str, set[tuple[str, str, str]]]:
    """Name, range and licence of what each extra names; "" is what is always required."""
    found = {row[1] or "": set(DISTRIBUTION.findall(row[2])) for row in ROW.finditer(page)}
    return {extra: named for extra, named in found.items() if named}


def without_licences(page: str) -> str:
    return re.sub(r" \([^()]+\)(?=,|$)", "", page, flags=re.MULTILINE)


def test_the_page_is_current() -> None:
    """It has what pyproject.toml requires, extra by extra, with these ranges: run `make dependencies` where it has
    not."""
    wanted = {"": PROJECT["dependencies"]} | {extra: PROJECT["optional-dependencies"][extra] for extra in lowest.EXTRAS}
    named = {extra: {row[:2] for row in rows} for extra, rows in rows_by_extra(PAGE).items()}
    required = {extra: [Requirement(text) for text in texts] for extra, texts in wanted.items()}
    assert named == {extra: {(one.name, str(one.specifier)) for one in ones} for extra, ones in required.items()}
    assert all(licence for rows in rows_by_extra(PAGE).values() for _, _, licence in rows)


def test_the_page_is_what_its_script_writes() -> None:
    """The same text, extras and distributions as in the page. Licences may differ, because they come from the
    installed versions."""
    script = ROOT / "docs/site/dependencies.py"
    written = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True).stdout
    assert without_licences(written) == without_licences(PAGE)


def test_the_lowest_versions_are_those_that_are_stated() -> None:
    """Each requirement of users is pinned to its lower bound, and no extra of theirs is left out."""
    pins = {canonicalize_name(pin.partition("==")[0]): pin.partition("==")[2] for pin in lowest.pins()}
    required = importlib.metadata.requires("aoffload") or []
    for text in required:
        one = Requirement(text)
        extra = re.search(r"extra == ['\"]([\w-]+)['\"]", text)
        if extra is None or extra[1] in lowest.EXTRAS:
            assert pins[canonicalize_name(one.name)] in one.specifier
    assert set(lowest.EXTRAS) == set(PROJECT["optional-dependencies"]) - {"mooncake", "vllm"}


def test_developers_install_each_extra_and_all_tools() -> None:
    """`make test` installs the extras whose lowest versions are tested, and the group `dev`. Tools are in groups, so
    none of them is an extra that a user could install."""
    makefile = (ROOT / "Makefile").read_text()
    extras = re.search(r"^EXTRAS := (.*)$", makefile, re.MULTILINE)
    assert extras is not None and tuple(extras[1].split(",")) == lowest.EXTRAS
    assert "'.[$(EXTRAS)]' --group dev\n" in makefile and "'.[$(EXTRAS)]' --group test\n" in makefile
    tools = {"bench", "browser", "dev", "docs", "mutation", "test"}
    assert set(GROUPS) == tools and not tools & {*PROJECT["optional-dependencies"]}


def test_groups_include_groups_that_exist() -> None:
    """Each group includes others by a name that there is, and `dev` has every tool but that for automatic mutants."""

    def named(group: str) -> set[str]:
        found = {canonicalize_name(Requirement(one).name) for one in GROUPS[group] if isinstance(one, str)}
        return found.union(*(named(one["include-group"]) for one in GROUPS[group] if isinstance(one, dict)))

    assert named("dev") == set[str]().union(*(named(group) for group in GROUPS if group != "mutation"))
    pinned = (ROOT / "constraints.txt").read_text() + (ROOT / "constraints-dev.txt").read_text()
    assert named("dev") <= {canonicalize_name(name) for name in re.findall(r"^([\w.-]+)==", pinned, re.MULTILINE)}
