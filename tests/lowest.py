"""Prints, as constraints for pip, the lowest version of everything that users install: `make test-lowest`."""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

PROJECT = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
EXTRAS = (
    "cuda", "disk", "events", "metrics", "object-storage", "otel", "remote", "server", "transformers", "trio",
    "uvloop",
)  # fmt: skip
"""Of these, beside what is always required. Tools of developers are as new as they come."""


def pins() -> Iterator[str]:
    optional = PROJECT["optional-dependencies"]
    for text in [*PROJECT["dependencies"], *(text for extra in EXTRAS for text in optional[extra])]:
        yield text.partition(";")[0].strip().replace(">=", "==")


if __name__ == "__main__":
    sys.stdout.writelines(f"{pin}\n" for pin in pins())
