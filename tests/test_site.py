"""The site that `make docs` builds from docs/ and the docstrings."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from operator import attrgetter
from pathlib import Path
from types import ModuleType
from urllib.parse import unquote

import pytest
import yaml
from public import EVERY_MODULE, INTERNAL, handles_of, methods_of

from aoffload import Ledger, OffloadRuntime

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
CONFIG = yaml.safe_load((ROOT / "mkdocs.yml").read_text())


def navigated(entries: list[dict[str, object]]) -> Iterator[str]:
    """The files that the navigation leads to."""
    for entry in entries:
        for target in entry.values():
            yield from navigated(target) if isinstance(target, list) else [str(target)]


class Elements(HTMLParser):
    """What a page names: its ids, its links, and what a browser fetches to show it."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.ids, self.links, self.fetched = set[str](), list[str](), list[str]()
        self.feed(page.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        named = {name: value or "" for name, value in attrs}
        self.ids.add(named.get("id", ""))
        if tag == "a":
            self.links.append(named.get("href", ""))
        elif target := named.get("src") or (tag == "link" and named.get("href")):
            self.fetched.append(str(target))


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built with every warning as an error."""
    pytest.importorskip("mkdocs", reason="the group `docs` is not installed")
    pytest.importorskip("mkdocstrings_handlers.python", reason="the group `docs` is not installed")
    at = tmp_path_factory.mktemp("site")
    # Not --quiet: that would silence the warnings before they are counted.
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(at)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return at


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Elements]:
    return {page: Elements(page) for page in site.rglob("*.html")}


def test_every_page_is_in_the_navigation() -> None:
    """The navigation has every page, and each of its links exists."""
    pages = {str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")}
    listed = {name for name in navigated(CONFIG["nav"]) if not name.startswith("reference/")}
    assert pages - listed == set()
    assert listed - pages == set()


def test_pages_fetch_nothing_from_another_host(site: Path, pages: dict[Path, Elements]) -> None:
    """Scripts, styles, fonts and pictures of every page are files of the site; reading it tells nobody."""
    outside = re.compile(r"(https?:)?//")
    fetched = {(page.name, name) for page, elements in pages.items() for name in elements.fetched}
    styles = {(style.name, url) for style in site.rglob("*.css") for url in named_in(style)}
    assert len(fetched) > 10 and styles
    assert {each for each in fetched | styles if outside.match(each[1])} == set()


def named_in(style: Path) -> list[str]:
    return re.findall(r"(?:url\(|@import )[\"']?([^\"')]+)", style.read_text())


def test_links_of_the_site_resolve(pages: dict[Path, Elements]) -> None:
    """Every link of every page has its page and its place in it, the reference and the sources included."""
    lost = []
    for page, elements in pages.items():
        for link in elements.links if page.name != "404.html" else ():
            path, _, anchor = unquote(link).partition("#")
            at = (page.parent / path).resolve() if path else page
            is_there = anchor in pages[at].ids if anchor and at in pages else at.is_file() and not anchor
            if not re.match(r"\w+:", link) and not is_there:
                lost.append((page.name, link))
    assert lost == []


def entries_of(pages: dict[Path, Elements]) -> set[str]:
    return {name for page, elements in pages.items() if page.parent.name == "reference" for name in elements.ids}


@pytest.mark.parametrize("module", EVERY_MODULE, ids=attrgetter("__name__"))
def test_every_public_name_has_an_entry(pages: dict[Path, Elements], module: ModuleType) -> None:
    """The reference has the signature and the docstring of each name in `__all__`."""
    assert {f"{module.__name__}.{name}" for name in module.__all__} - entries_of(pages) == set()


@pytest.mark.parametrize("face", [Ledger, OffloadRuntime], ids=attrgetter("__name__"))
def test_every_verb_of_a_handle_has_an_entry(pages: dict[Path, Elements], face: type) -> None:
    """The reference has each verb of each handle, and no method that only other packages of aoffload call. The handles
    of a `HostCache` have no other verbs."""
    attributes, entries = {"epoch"}, entries_of(pages)
    for handle, kind in handles_of(face).items():
        owner = f"{kind.__module__}.{kind.__qualname__}."
        verbs = set(methods_of(kind)) - INTERNAL.get(handle, set())
        shown = {entry.removeprefix(owner) for entry in entries if entry.startswith(owner)}
        assert shown - attributes == verbs - attributes, handle


def test_names_on_the_index_are_links(site: Path) -> None:
    """On the site, each name in api.md leads to its entry."""
    text = (site / "api.html").read_text()
    linked = set(re.findall(r'href="reference/[^"]*#(aoffload[\w.]*)"', text))
    assert {f"{module.__name__}.{name}" for module in EVERY_MODULE for name in module.__all__} - linked == set()


def test_states_are_drawn(site: Path, pages: dict[Path, Elements]) -> None:
    """The five diagrams of the lifecycle are pictures of the site. They load nothing themselves."""
    drawn = [name for name in pages[site / "lifecycle.html"].fetched if "images/states-" in name]
    assert len(drawn) == 5
    for name in drawn:
        text = (site / name).read_text()
        assert text.startswith("<svg") and not re.search(r"href|url\((?!#)|@import|<script", text)
