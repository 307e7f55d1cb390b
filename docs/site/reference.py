"""The reference: a page for each public module, where each name of it has its signature and its docstring.

`aoffload` itself has a page for each of its sections in api.md. api.md is the list. On the site its rows lead to the
entries. The pages that have `Ledger` and `OffloadRuntime` also have the verbs of their handles, whose classes are not
public names.
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
    "aoffload.stores",
    "aoffload.integrations",
    "aoffload.integrations.openai_server",
    "aoffload.integrations.vllm",
    "aoffload.kv_events",
    "aoffload.metrics",
    "aoffload.otel",
    "aoffload.plan",
    "aoffload.testing",
)
BEGIN = re.compile(r"^(?:\| )?`\w+[^`]*`(?:(?:, | or )`\w+[^`]*`)*")
"""The names that a row or a paragraph begins with."""
NAME = re.compile(r"`((\w+(?:\.\w+)?)[^`]*)`")
"""A name, or a verb of a handle, such as `pins.hold(prefix)`."""
FACES = {
    "Ledger": ("aoffload/_extensions/assembly.py", ("AnyLedger", "Ledger")),
    "OffloadRuntime": ("aoffload/_runtime/runtime.py", ("RuntimeBase", "OffloadRuntime")),
}
"""Where the handles of a face are: the file, and its classes."""
OF = re.compile(r"^(?:\| )?Of `(\w+)` \|")
"""The head of a table of somebody's members."""
MODULE = re.compile(r"^## (aoffload[\w.]*)$", re.MULTILINE)
"""The heading above the names of a module."""


def on_files(files: Any, config: Any) -> Any:
    root = Path(config.config_file_path).parent
    api = (root / "docs/api.md").read_text()
    for title, names in sections(api, public_names(root, "aoffload")).items():
        more: list[str] = []
        for face in [face for face in FACES if face in names]:
            classes = handle_classes(root, face)
            verbs_by_handle = listed_verbs(api, face, classes)
            more += [entry_of(face, name, classes[name], verbs) for name, verbs in verbs_by_handle.items()]
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


def handle_classes(root: Path, face: str) -> dict[str, str]:
    """The class of each handle of `face`: of each property that returns what the same file imports."""
    path, kinds = FACES[face]
    tree = ast.parse((root / path).read_text())
    package = path.removesuffix(".py").split("/")
    modules = {
        alias.name: ".".join([*package[: -node.level], node.module])
        for node in tree.body
        if isinstance(node, ast.ImportFrom) and node.level and node.module
        for alias in node.names
    }
    found: dict[str, str] = {}
    for kind in (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name in kinds):
        for member in kind.body:
            if isinstance(member, ast.FunctionDef) and any(ast.unparse(d) == "property" for d in member.decorator_list):
                returned = ast.unparse(member.returns) if member.returns is not None else ""
                if returned in modules:
                    found[member.name] = f"{modules[returned]}.{returned}"
    return found


def listed_verbs(api: str, face: str, handles: Iterable[str]) -> dict[str, list[str]]:
    """The verbs of `face` that api.md lists, by handle."""
    found: dict[str, list[str]] = {}
    owner = ""
    for line in api.splitlines():
        owner = owner_of(line, owner)
        if owner == face and (begin := BEGIN.match(line)):
            for _, name in NAME.findall(begin[0]):
                handle, _, verb = name.partition(".")
                if verb and handle in handles:
                    found.setdefault(handle, []).append(verb)
    return found


def owner_of(line: str, owner: str) -> str:
    """The class whose members the table of `line` lists; `owner`: that of the line before."""
    head = OF.match(line)
    return head[1] if head else owner if "|" in line else ""


def entry_of(face: str, handle: str, kind: str, verbs: list[str]) -> str:
    """The entry of a handle: its verbs, and nothing else that its class has."""
    options = f"heading: {face}.{handle}, toc_label: {face}.{handle}, show_bases: false, merge_init_into_class: false"
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
    module, owner, public, lines = "", "", set[str](), list[str]()
    handles = {face: handle_classes(root, face) for face in FACES}
    for line in markdown.splitlines():
        if heading := MODULE.match(line):
            module = heading[1]
            public = set(public_names(root, module))
        owner = owner_of(line, owner)
        lines.append(linked(line, module, owner, public, handles.get(owner, {})))
    return "\n".join(lines)


def linked(line: str, module: str, owner: str, public: set[str], handles: dict[str, str]) -> str:
    """The line, where the names that it begins with are links to their entries."""

    def link(found: re.Match[str]) -> str:
        handle, _, verb = found[2].partition(".")
        is_verb = bool(verb) and handle in handles
        entry = f"{handles[handle]}.{verb}" if is_verb else ".".join(filter(None, (module, owner, handle)))
        return f"[{found[0]}][{entry}]" if owner or handle in public else found[0]

    return BEGIN.sub(lambda found: NAME.sub(link, found[0]), line)
