"""Where public names are: each in one module, few in the package itself, and the old places of those that moved."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from public import MODULES

import aoffload

ROOT = Path(__file__).parent.parent
BESIDE = ("integrations", "integrations.openai_server", "kv_events", "metrics", "plan", "testing", "testing.programs")
"""Public modules whose names may be those of others: `Outcome` is one of a transfer, and one of a random program."""
MAX_NAMES = 38

each_moved_name = pytest.mark.parametrize("name", sorted(aoffload._MOVED))


def test_the_package_itself_has_few_names() -> None:
    """Whoever looks at `aoffload` sees what a program around the runtime needs, and nothing else."""
    assert len(aoffload.__all__) <= MAX_NAMES
    assert dir(aoffload) == sorted(aoffload.__all__)


def test_each_name_is_exported_by_one_module() -> None:
    """There is one right place to import a name from, and what is exported is there."""
    exported = Counter(name for module in MODULES for name in module.__all__)
    assert [name for name, times in exported.items() if times > 1] == []
    modules = MODULES + [importlib.import_module(f"aoffload.{name}") for name in BESIDE]
    places = Counter(id(getattr(module, name)) for module in modules for name in module.__all__)
    assert max(places.values()) == 1


@each_moved_name
def test_a_name_that_moved_can_be_had_from_its_old_place(name: str) -> None:
    """It is the same object, and the warning names the new place and points at whoever has to change."""
    new = aoffload._RENAMED.get(name, name)
    old = "from" if new == name else f"{name} from"
    with pytest.warns(DeprecationWarning, match=f"import {new} from aoffload") as caught:
        found = getattr(aoffload, name)
    module = importlib.import_module(aoffload._MOVED[name])
    assert found is getattr(module, new)
    assert new in module.__all__ and name not in aoffload.__all__ and name not in dir(aoffload)
    assert [(str(one.message), one.filename) for one in caught] == [
        (f"import {new} from {module.__name__}, not {old} aoffload", __file__)
    ]
    with pytest.warns(DeprecationWarning, match=name):  # every place hears of it, not only the first one
        getattr(aoffload, name)


def test_no_old_name_is_forgotten() -> None:
    """`aoffload` had 92 names before some of them moved: some stayed, the others can be had with a warning."""
    assert len(aoffload._MOVED) == 57
    assert len(aoffload._MOVED.keys() | set(aoffload.__all__)) >= 92


def test_an_old_import_statement_is_told_where_it_stands(tmp_path: Path) -> None:
    """`from aoffload import ...` goes through the import machinery, and still the warning shows the line itself."""
    program = tmp_path / "program.py"
    program.write_text("import sys\n\nfrom aoffload import Prefix, Tier\n\nassert 'torch' not in sys.modules\n")
    command, env = [sys.executable, "-W", "default", str(program)], {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=True)
    assert done.stderr.splitlines() == [
        f"{program}:3: DeprecationWarning: import Prefix from aoffload.ledger, not from aoffload",
        "  from aoffload import Prefix, Tier",
    ]


def test_a_name_that_never_was_is_no_attribute() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'Prefixes'"):
        aoffload.Prefixes  # noqa: B018 - looked up, which is all there is to it
    with pytest.raises(ImportError, match="Prefixes"):
        pass
