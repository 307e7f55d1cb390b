"""Writes docs/dependencies.md from pyproject.toml and the metadata of what is installed: `make dependencies`."""

from __future__ import annotations

import importlib.metadata as metadata
import re
import sys
import tomllib
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
USED_FOR = {
    "": "every installation",
    "trio": "trio as event loop, and `aoffload.testing`",
    "uvloop": "uvloop as event loop",
    "transformers": "[models](models.md) of the demo and the server",
    "cuda": "faster copies on a GPU",
    "disk": "a [disk tier](disk.md)",
    "remote": "a [store](remote.md) in Redis or Valkey",
    "object-storage": "a [store](remote.md#stores) in object storage",
    "mooncake": "a [store](remote.md#stores) in Mooncake Store",
    "metrics": "`aoffload.metrics`",
    "events": "`aoffload.kv_events`",
    "otel": "`aoffload.otel`",
    "server": "`aoffload serve`",
    "vllm": "[vLLM](vllm.md), which you install yourself",
}
"""The extras that users install, and `""` for what is always required."""
NOT_INSTALLED = {"mooncake": "the client of Mooncake Store"}
"""Extras whose distributions are not installed where this page is written."""
HEAD = """# Dependencies

An *extra* is an optional part of the installation, for example `pip install '.[disk]'`. This table lists the packages
of each extra, with their allowed versions and licences.

Extra | Needed for | Packages
---|---|---
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
    rows = [f"{shown(extra)} | {purpose} | {distributions(extra)}\n" for extra, purpose in USED_FOR.items()]
    return HEAD + "".join(rows)


def shown(extra: str) -> str:
    return f"`{extra}`" if extra else "(none)"


def requirements(extra: str) -> list[str]:
    found: list[str] = PROJECT["optional-dependencies"][extra] if extra else PROJECT["dependencies"]
    return found


def distributions(extra: str) -> str:
    """The distributions that an extra names, each with its versions and its licence."""
    if extra in NOT_INSTALLED:
        return NOT_INSTALLED[extra]
    wanted = [Requirement(text) for text in requirements(extra)]
    stated = [f"{one.name} {one.specifier} ({licence(metadata.distribution(one.name))})" for one in wanted]
    return ", ".join(stated) or "none"


def licence(distribution: metadata.Distribution) -> str:
    """What it says itself: the expression, a short text, or a classifier, whichever comes first."""
    said = distribution.metadata
    classified = [name.split(" :: ")[-1] for name in said.get_all("Classifier") or [] if name.startswith("License ::")]
    stated = [said["License-Expression"] or "", said["License"] or "", *classified]
    named = [re.sub(r"\s+", " ", text).strip().replace("|", "/") for text in stated if 0 < len(text) <= LONGEST]
    return LICENCES.get(named[0], named[0]) if named else "licence in its files"


if __name__ == "__main__":
    sys.stdout.write(page())
