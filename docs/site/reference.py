"""The reference: a page for each public module with the signature and the docstring of each of its names.

`aoffload` itself has a page for each of its sections in api.md. On the site the names in api.md lead to their entries.
The pages of `Ledger` and `OffloadRuntime` also have the verbs of their handles, whose classes are not public names.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

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
NAME = re.compile(r"`(\w+)`")
FACES = {
    "Ledger": ("aoffload/_extensions/assembly.py", ("AnyLedger", "Ledger")),
    "OffloadRuntime": ("aoffload/_runtime/runtime.py", ("RuntimeBase", "OffloadRuntime")),
}
"""Where the handles of a face are: the file, and its classes."""
INTERNAL = {
    "fetches": "transfers",
    "invalidation": "forget has_read keep remember",
    "pins": "check_share end_all grow",
    "preemption": "may_preempt",
    "quotas": "all_cleared ceiling max_pinned num_left part_changed",
    "reports": "fetching num_fetching oldest_by_state oldest_step_s oldest_wait_s step steps wait_for_room",
    "transfers": "begin hit_of leaving new_request over wait_for_jobs",
    "weights": "begin_again is_findable root_of",
}
"""By handle, the methods that only other packages of aoffload call. The reference leaves them out, and hooks, too."""
INNER = "asking declined held is_attached learning num_cache_transfers num_changes num_pins stores when_changed"
"""Attributes of the classes of handles that programs do not need."""
MODULE = re.compile(r"^## (aoffload[\w.]*)$", re.MULTILINE)
"""The heading above the names of a module."""


def on_files(files: Any, config: Any) -> Any:
    root = Path(config.config_file_path).parent
    api = (root / "docs/api.md").read_text()
    for title, names in sections(api, public_names(root, "aoffload")).items():
        handles = {face: handle_classes(root, face) for face in FACES if face in names}
        more = [entry_of(face, name, kind) for face, kinds in handles.items() for name, kind in kinds.items()]
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
    _, about = api.split("\n## aoffload\n")
    found = (section.partition("\n") for section in MODULE.split(about)[0].split("\n### ")[1:])
    return {title: [name for name in dict.fromkeys(NAME.findall(text)) if name in public] for title, _, text in found}


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


def entry_of(face: str, handle: str, kind: str) -> str:
    """The entry of a handle: its verbs, and nothing else that its class has."""
    hidden = "|".join(["_.*", "(on|ask|report)_.*", *INNER.split(), *INTERNAL.get(handle, "").split()])
    options = f"heading: {face}.{handle}, toc_label: {face}.{handle}, show_bases: false, merge_init_into_class: false"
    return f"::: {kind}\n    options: {{{options}, filters: ['!^({hidden})$']}}\n"


def page_about(config: Any, title: str, module: str, names: list[str], more: Iterable[str] = ()) -> Any:
    from mkdocs.structure.files import File  # here, because tests read this file without mkdocs

    path = f"reference/{re.sub(r'[^a-z]+', '-', title.lower())}.md"
    entries = "\n".join([*(f"::: {module}.{name}" for name in names), *more])
    content = f"# {title}\n\nFrom the docstrings. [Public names](../api.md) lists all names.\n\n{entries}\n"
    return File.generated(config, path, content=content)


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:
    if page.file.src_uri != "api.md":
        return markdown
    root = Path(config.config_file_path).parent
    before, *parts = MODULE.split(markdown)
    linked = [
        f"## {module}{with_links(text, module, root)}" for module, text in zip(parts[::2], parts[1::2], strict=True)
    ]
    return before + "".join(linked)


def with_links(text: str, module: str, root: Path) -> str:
    """`text`, where the public names of `module` are links to their entries."""
    public = set(public_names(root, module))
    return NAME.sub(lambda found: f"[{found[0]}][{module}.{found[1]}]" if found[1] in public else found[0], text)
