"""Links to files of the repository beside docs/: on the site each such file has a page that shows it."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

LINK = re.compile(r"(\]\()(\.\./[^)#\s]+)")
LANGUAGES = {".py": "python", ".yml": "yaml", ".toml": "toml"}


def on_files(files: Any, config: Any) -> Any:
    for path in sorted({path for file in files.documentation_pages() for path in outside(file)}):
        text = (Path(config.config_file_path).parent / path).read_text()
        content = f"# {path}\n\n````{LANGUAGES.get(Path(path).suffix, 'text')}\n{text}````\n"
        files.append(File.generated(config, page_of(path), content=content))
    return files


def outside(file: Any) -> set[str]:
    """The files outside docs/ that a page links to, from the root of the repository."""
    targets = {resolved(found[2], file.src_uri) for found in LINK.finditer(file.content_string)}
    return {target for target in targets if not target.startswith("docs/")}


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    def link(found: re.Match[str]) -> str:
        target = resolved(found[2], page.file.src_uri)
        here = posixpath.dirname(page.file.src_uri)
        return found[0] if target.startswith("docs/") else found[1] + posixpath.relpath(page_of(target), here or ".")

    return LINK.sub(link, markdown)


def resolved(link: str, page: str) -> str:
    return posixpath.normpath(posixpath.join("docs", posixpath.dirname(page), link))


def page_of(path: str) -> str:
    return f"source/{path}.md"
