"""The fingerprint of a model: the same for the same files wherever they lie, another one for any change."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from aoffload import InvalidArgument, fingerprint


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "model"
    (path / "parts").mkdir(parents=True)
    (path / "config.json").write_text("{}")
    (path / "a.safetensors").write_bytes(b"weights")
    (path / "parts" / "b.bin").write_bytes(b"more")
    return path


def test_it_is_that_of_the_files(model: Path, tmp_path: Path) -> None:
    """Not of their directory, of what else is there, nor of whether they are links."""
    found = fingerprint(model)
    assert re.fullmatch("[0-9a-f]{64}", found)
    (model / "README.md").write_text("changed")
    (model / ".cache").mkdir()
    (model / ".cache" / "x.safetensors").write_bytes(b"download")
    moved = model.rename(tmp_path / "elsewhere")
    store = (moved / "a.safetensors").rename(tmp_path / "blob")
    (moved / "a.safetensors").symlink_to(store)
    assert fingerprint(str(moved)) == found


CHANGES: dict[str, Callable[[Path], object]] = {
    "a byte of the weights": lambda model: (model / "a.safetensors").write_bytes(b"weightz"),
    "the configuration": lambda model: (model / "config.json").write_text("{ }"),
    "one file more": lambda model: (model / "c.safetensors").write_bytes(b""),
    "one file less": lambda model: (model / "parts" / "b.bin").unlink(),
    "another name": lambda model: (model / "a.safetensors").rename(model / "z.safetensors"),
    "another border": lambda model: [
        (model / "a.safetensors").write_bytes(b"weight"), (model / "parts" / "b.bin").write_bytes(b"smore")
    ],
    "code": lambda model: (model / "modeling.py").write_text("pass"),
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_makes_another(model: Path, change: str) -> None:
    """Whatever could change what is computed."""
    before = fingerprint(model)
    CHANGES[change](model)
    assert fingerprint(model) != before


@pytest.mark.parametrize("value", ["/nowhere/at/all", "\0", 7, None, b"\xff"], ids=repr)
def test_what_is_no_model_is_named(value: Any, tmp_path: Path) -> None:
    """A path without weights must not give every such path one fingerprint."""
    with pytest.raises(InvalidArgument) as refusal:
        fingerprint(value)
    assert refusal.value.argument == "model_dir"
    with pytest.raises(InvalidArgument, match="no weights"):
        fingerprint(tmp_path)
