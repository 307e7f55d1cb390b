"""Writes docs/dependencies.md from pyproject.toml and the metadata of what is installed: `make dependencies`."""

from __future__ import annotations

import importlib.metadata as metadata
import re
import sys
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
USED_FOR = {
    "": "always",
    "trio": "trio as the event loop; `aoffload.testing`",
    "uvloop": "uvloop as asyncio's event loop",
    "transformers": "[models](models.md) in the demo and the server",
    "cuda": "batched copies on a GPU; torch alone without it",
    "disk": "[a disk tier](disk.md)",
    "remote": "[a remote tier](remote.md) in Redis or Valkey",
    "object-storage": "a remote tier in [object storage](remote.md#stores)",
    "mooncake": "a remote tier in Mooncake Store; brings a large distribution, which is not listed here",
    "metrics": "`aoffload.metrics`",
    "events": "`aoffload.kv_events`",
    "otel": "`aoffload.otel`",
    "server": "`aoffload serve`",
    "vllm": "nothing: vLLM loads the connector",
}
"""The extras that users install, and `""` for what is always required."""
HEAD = """# Dependencies

With the licence that each distribution states about itself. `make dependencies` writes this page, from what is
installed (Linux, torch for CPUs). `make test-lowest` tests the lowest versions.

Extra | For
---|---
"""
TABLE = """
Extra | Distribution | Versions | Written with | Licence | Brings along
---|---|---|---|---|---
"""
LICENCES = {
    "Apache Software License": "Apache-2.0",
    "Apache License, Version 2.0": "Apache-2.0",
    "Apache 2.0 License": "Apache-2.0",
    "Apache 2.0": "Apache-2.0",
    "BSD License": "BSD",
    "MIT License": "MIT",
    "MIT license": "MIT",
    "Mozilla Public License 2.0 (MPL 2.0)": "MPL-2.0",
    "Python Software Foundation License": "PSF-2.0",
}
"""What older metadata say, by its identifier."""
LONGEST = 60
"""Of what is taken for the name of a licence; more is its text."""


def page() -> str:
    purposes = [f"{shown(extra)} | {purpose}\n" for extra, purpose in USED_FOR.items()]
    return HEAD + "".join(purposes) + TABLE + "".join(map(rows, USED_FOR))


def shown(extra: str) -> str:
    return f"`{extra}`" if extra else "(none)"


def requirements(extra: str) -> list[str]:
    found: list[str] = PROJECT["optional-dependencies"][extra] if extra else PROJECT["dependencies"]
    return found


def rows(extra: str) -> str:
    """The distributions that an extra names, and those that they bring along."""
    lines: list[str] = []
    if extra == "mooncake":
        return ""
    known = set() if not extra else {canonicalize_name(name) for name in closure(requirements(""))}
    for text in requirements(extra):
        wanted = Requirement(text)
        found = metadata.distribution(wanted.name)
        others = [name for name in closure(found.requires or []) if canonicalize_name(name) not in known]
        cells = (shown(extra), wanted.name, str(wanted.specifier), found.version, licence(found), by_licence(others))
        lines.append(" | ".join(cells) + "\n")
    return "".join(lines)


def by_licence(names: list[str]) -> str:
    """`MIT: one, another; BSD: a third`."""
    found: dict[str, list[str]] = {}
    for name in names:
        found.setdefault(licence(metadata.distribution(name)), []).append(name)
    return "; ".join(f"{stated}: {', '.join(having)}" for stated, having in sorted(found.items())) or "nothing"


def closure(texts: list[str]) -> list[str]:
    """The names of installed distributions that meet the requirements, and of those that these require."""
    found: dict[str, str] = {}
    waiting = list(texts)
    while waiting:
        wanted = Requirement(waiting.pop())
        name = canonicalize_name(wanted.name)
        if name in found or not (wanted.marker is None or wanted.marker.evaluate({"extra": ""})):
            continue
        distribution = metadata.distribution(wanted.name)
        found[name] = distribution.name
        waiting += distribution.requires or []
    return sorted(found.values(), key=str.lower)


def licence(distribution: metadata.Distribution) -> str:
    """What it says itself: the expression, a short text, or a classifier, whichever comes first."""
    said = distribution.metadata
    classified = [name.split(" :: ")[-1] for name in said.get_all("Classifier") or [] if name.startswith("License ::")]
    stated = [said["License-Expression"] or "", said["License"] or "", *classified]
    named = [re.sub(r"\s+", " ", text).strip().replace("|", "/") for text in stated if 0 < len(text) <= LONGEST]
    return LICENCES.get(named[0], named[0]) if named else "see its files"


if __name__ == "__main__":
    sys.stdout.write(page())
