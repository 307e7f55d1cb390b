"""Leaves pages out of the navigation that another change is going to bring."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def on_config(config: Any) -> Any:
    there = Path(config.docs_dir)
    missing = {name for name in config.extra["coming"] if not (there / name).exists()}
    config.nav = without(config.nav, missing)
    return config


def without(nav: list[Any], missing: set[str]) -> list[Any]:
    """`nav` less the entries for files in `missing`."""
    entries = [(title, target) for entry in nav for title, target in entry.items()]
    kept = [(title, target) for title, target in entries if not (isinstance(target, str) and target in missing)]
    return [{title: without(target, missing) if isinstance(target, list) else target} for title, target in kept]
