"""Where public names are: each in one module, few in the package itself."""

from __future__ import annotations

import importlib
from collections import Counter
from pathlib import Path

import pytest
from public import MODULES

import aoffload

ROOT = Path(__file__).parent.parent
BESIDE = ("integrations", "integrations.openai_server", "kv_events", "metrics", "otel", "plan", "testing")
"""The other public modules."""
MAX_NAMES = 46


def test_the_package_itself_has_few_names() -> None:
    """`aoffload` has the names that a program around the runtime needs, and no others."""
    assert len(aoffload.__all__) <= MAX_NAMES
    assert dir(aoffload) == sorted(aoffload.__all__)


def test_each_name_is_exported_by_one_module() -> None:
    """There is one right place to import a name from, and what is exported is there."""
    modules = MODULES + [importlib.import_module(f"aoffload.{name}") for name in BESIDE]
    exported = Counter(name for module in modules for name in module.__all__)
    assert [name for name, times in exported.items() if times > 1] == []
    places = Counter(id(getattr(module, name)) for module in modules for name in module.__all__)
    assert max(places.values()) == 1


def test_a_name_that_never_was_is_no_attribute() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'Prefixes'"):
        aoffload.Prefixes  # noqa: B018 - looked up, which is all there is to it
    with pytest.raises(ImportError, match="Prefixes"):
        from aoffload import Prefixes  # noqa: F401
