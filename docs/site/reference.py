"""The reference: a page for each public module, where each name of it has its signature and its docstring.

`aoffload` itself has a page for each of its sections in api.md. api.md is the list. On the site its rows lead to the
entries. The page that has `Ledger` also has the verbs of its handles, whose classes are not public names.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

MODULES = (
    "aoffload.ledger",
    "aoffload.host_cache",
    "aoffload.transport",
    "aoffload.ranks",
    "aoffload.cuda",
    "aoffload.pins",
    "aoffload.stores",
    "aoffload.env",
    "aoffload.integrations",
    "aoffload.integrations.openai_server",
    "aoffload.integrations.vllm",
    "aoffload.kv_events",
    "aoffload.metrics",
    "aoffload.plan",
    "aoffload.testing",
)
BEGIN = re.compile(r"^(?:\| )?`\w+[^`]*`(?:(?:, | or )`\w+[^`]*`)*")
"""The names that a row or a paragraph begins with."""
NAME = re.compile(r"`((\w+(?:\.\w+)?)[^`]*)`")
"""A name, or a verb of a handle, such as `pins.hold(prefix)`."""
OF = re.compile(r"^(?:\| )?Of `(\w+)` \|")
"""The head of a table of somebody's members."""
MODULE = re.compile(r"^## (aoffload[\w.]*)$", re.MULTILINE)
"""The heading above the names of a module."""


def on_files(files: Any, config: Any) -> Any:
    root = Path(config.config_file_path).parent
    names_by_title = sections((root / "docs/api.md").read_text(), public_names(root, "aoffload"))
    classes = handle_classes(root)
    verbs_by_handle = listed_verbs((root / "docs/api.md").read_text(), classes)
    for title, names in names_by_title.items():
        handles = verbs_by_handle.items() if "Ledger" in names else ()
        more = [entry_of(name, classes[name], verbs) for name, verbs in handles]
        files.append(page_about(config, title, "aoffload", names, more))
    for module in MODULES:
        files.append(page_about(config, module, module, public_names(root, module)))
    return files


def public_names(root: Path, module: str) -> list[str]:
    """`__all__`, read and not run: that would import torch."""
    path = root / module.replace(".", "/")
    tree = ast.parse((path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text())
    (names,) = (node.value for node in tree.body if isinstance(node, ast.Assign) and "__all__" in ast.unparse(node))
    return list(ast.literal_eval(names))


def sections(api: str, public: list[str]) -> dict[str, list[str]]:
    """The names of `aoffload` by the heading that they stand under."""
    names_by_title: dict[str, list[str]] = {}
    _, about = api.split("\n## aoffload\n")
    for section in MODULE.split(about)[0].split("\n### ")[1:]:
        title, *lines = section.splitlines()
        begins = [name for line in lines if (found := BEGIN.match(line)) for _, name in NAME.findall(found[0])]
        if names := [name for name in dict.fromkeys(begins) if name in public]:
            names_by_title[title] = names
    return names_by_title


def handle_classes(root: Path) -> dict[str, str]:
    """The class of each handle of `Ledger`: of each property that returns what the same file imports."""
    tree = ast.parse((root / "aoffload/_extensions/assembly.py").read_text())
    modules = {
        alias.name: f"aoffload.{node.module}"
        for node in tree.body
        if isinstance(node, ast.ImportFrom) and node.level == 1
        for alias in node.names
    }
    found: dict[str, str] = {}
    for kind in (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name in ("AnyLedger", "Ledger")):
        for member in kind.body:
            if isinstance(member, ast.FunctionDef) and any(ast.unparse(d) == "property" for d in member.decorator_list):
                returned = ast.unparse(member.returns) if member.returns is not None else ""
                if returned in modules:
                    found[member.name] = f"{modules[returned]}.{returned}"
    return found


def listed_verbs(api: str, handles: Iterable[str]) -> dict[str, list[str]]:
    """The verbs that api.md lists, by handle."""
    found: dict[str, list[str]] = {}
    for line in api.splitlines():
        if begin := BEGIN.match(line):
            for _, name in NAME.findall(begin[0]):
                handle, _, verb = name.partition(".")
                if verb and handle in handles:
                    found.setdefault(handle, []).append(verb)
    return found


def entry_of(handle: str, kind: str, verbs: list[str]) -> str:
    """The entry of a handle: its verbs, and nothing else that its class has."""
    options = f"heading: Ledger.{handle}, toc_label: Ledger.{handle}, show_bases: false, merge_init_into_class: false"
    return f"::: {kind}\n    options: {{{options}, members: [{', '.join(verbs)}]}}\n"


def page_about(config: Any, title: str, module: str, names: list[str], more: Iterable[str] = ()) -> File:
    path = f"reference/{re.sub(r'[^a-z]+', '-', title.lower())}.md"
    entries = "\n".join([*(f"::: {module}.{name}" for name in names), *more])
    content = f"# {title}\n\nFrom the docstrings. [Public names](../api.md) has a line on each.\n\n{entries}\n"
    return File.generated(config, path, content=content)


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:
    if page.file.src_uri != "api.md":
        return markdown
    root = Path(config.config_file_path).parent
    module, owner, public, lines, handles = "", "", set[str](), list[str](), handle_classes(root)
    for line in markdown.splitlines():
        if heading := MODULE.match(line):
            module = heading[1]
            public = set(public_names(root, module))
        head = OF.match(line)
        owner = head[1] if head else owner if "|" in line else ""
        lines.append(linked(line, module, owner, public, handles))
    return "\n".join(lines)


def linked(line: str, module: str, owner: str, public: set[str], handles: dict[str, str]) -> str:
    """The line, where the names that it begins with are links to their entries."""

    def link(found: re.Match[str]) -> str:
        handle, _, verb = found[2].partition(".")
        is_verb = bool(verb) and handle in handles
        entry = f"{handles[handle]}.{verb}" if is_verb else ".".join(filter(None, (module, owner, handle)))
        return f"[{found[0]}][{entry}]" if owner or handle in public else found[0]

    return BEGIN.sub(lambda found: NAME.sub(link, found[0]), line)
