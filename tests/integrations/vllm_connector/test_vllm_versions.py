"""Versions of vLLM: what the connector needs of one, and the errors for versions that lack it."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path
from typing import Any

import attrs
import pytest
from vllm_configs import kv_cache_config, vllm_config
from vllm_doubles import CONNECTOR, HAS_VLLM, NAMES, AoffloadConnector, KVConnectorRole, vllm_importable

import aoffload
from aoffload._vllm import internals
from aoffload.errors import MissingExtra, UnsupportedVersion

PACKAGE = Path(aoffload.__file__).parent
RAISED = r"AoffloadConnector does not work with vllm \S+, which has no .*{}.*: install vLLM 0\.32 or 0\.33$"
EVERY_FIELD = [
    (module, name, field) for module, classes in internals.FIELDS.items() for name in classes for field in classes[name]
]


def imported(tree: ast.AST) -> list[str]:
    """The modules that a file imports, also by `import_module`."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [each.name for each in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found.append(node.module or "")
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "import_module":
            found += [each.value for each in node.args[:1] if isinstance(each, ast.Constant)]
    return found


def test_one_file_imports_vllm() -> None:
    """Whoever adapts the package to another version of vLLM has one file to read."""
    files = {
        path.relative_to(PACKAGE).as_posix(): imported(ast.parse(path.read_text())) for path in PACKAGE.rglob("*.py")
    }
    users = {name for name, modules in files.items() if any(each.split(".")[0] == "vllm" for each in modules)}
    assert users == {"_vllm/internals.py"}


def test_every_field_of_the_list_is_read() -> None:
    """A version is not refused for a field that no file of the connector needs."""
    text = "\n".join(path.read_text() for path in (PACKAGE / "_vllm").glob("*.py") if path.name != "internals.py")
    assert not [field for _, _, field in EVERY_FIELD if not re.search(rf"\.{field}\b", text)]


def test_the_installed_version_has_all() -> None:
    """Over vLLM itself where it is installed: its modules, classes, and every field of the list."""
    with vllm_importable():
        internals.check()
        if HAS_VLLM:
            assert internals.WorkerLoRAManager and internals.untried() == ""


@pytest.mark.parametrize(("module", "name", "field"), EVERY_FIELD)
def test_a_field_that_has_moved_is_named(monkeypatch: pytest.MonkeyPatch, module: str, name: str, field: str) -> None:
    """Before vLLM loads weights, and not when the first request reads it."""
    with vllm_importable():
        found = getattr(sys.modules.get(module) or __import__(module, fromlist=[name]), name)
        has_field = internals.has_field
        monkeypatch.setattr(
            internals, "has_field", lambda cls, each: has_field(cls, each) and (cls, each) != (found, field)
        )
        with pytest.raises(UnsupportedVersion, match=RAISED.format(f"{module}.{name}.{field}")):
            internals.check()


@pytest.mark.parametrize("name", sorted(set(internals.NAMES) - {"WorkerLoRAManager"}))
def test_a_class_that_was_renamed_is_named(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """The error has the name and its module."""
    with vllm_importable():
        module = internals.NAMES[name]
        internals.check()
        monkeypatch.delattr(sys.modules[module], name)
        with pytest.raises(UnsupportedVersion, match=RAISED.format(f"{name}.*{module}")) as caught:
            internals.check()
    assert not isinstance(caught.value, MissingExtra)


@pytest.mark.parametrize(
    "module", sorted({*internals.NAMES.values(), *internals.FIELDS} - {"vllm.lora.worker_manager"})
)
def test_a_module_that_has_moved_is_named(monkeypatch: pytest.MonkeyPatch, module: str) -> None:
    """It is not taken for a vLLM that is not installed, although Python raises the same error for both."""
    with vllm_importable():
        internals.check()
        monkeypatch.setattr(internals, "import_module", without(module))
        monkeypatch.setattr("aoffload._common.extras._is_installed", lambda name: True)
        with pytest.raises(UnsupportedVersion, match=RAISED.format(module)) as caught:
            internals.check()
    assert not isinstance(caught.value, MissingExtra)


def without(module: str) -> Any:
    def import_module(name: str) -> Any:
        if name == module:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return sys.modules.get(name) or __import__(name, fromlist=["_"])

    return import_module


def test_the_manager_of_adapters_is_needed_with_adapters_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines without LoRA run with a vLLM that has moved it. The others learn it when the connector is made."""

    def made() -> Any:
        return AoffloadConnector(config, KVConnectorRole.WORKER, kv_cache_config(9))

    config = vllm_config()
    with vllm_importable():
        assert internals.WorkerLoRAManager
        monkeypatch.delattr(sys.modules["vllm.lora.worker_manager"], "WorkerLoRAManager")
        internals.check()
        with pytest.raises(UnsupportedVersion, match=RAISED.format("WorkerLoRAManager")):
            made()
        config.lora_config = None
        made().shutdown()


class Base:
    def __init__(self) -> None:
        self.assigned = read.only


read = attrs.make_class("Read", ["only"])(0)


@attrs.frozen
class Declared(Base):
    with_slot: int

    declared: int = attrs.field(init=False)

    def method(self) -> None: ...

    @property
    def computed(self) -> int:
        return 0


def test_fields_are_found_however_a_class_has_them() -> None:
    """As methods, properties, slots, declarations without a value, and attributes that a constructor assigns. A name
    that a constructor only reads is no field."""
    found = ("method", "computed", "with_slot", "declared", "assigned")
    assert all(internals.has_field(Declared, field) for field in found)
    assert not internals.has_field(Declared, "only")
    assert not internals.has_field(Declared, "mehtod")


@pytest.mark.parametrize("version", ["0.32.0", "0.33.0", "0.33.0+cpu", "0.34.0", "0.33.1"])
def test_a_version_that_was_not_tried_is_in_the_log(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    """It is not refused, because it may work. Whoever looks for a fault learns it."""
    said = list[str]()
    monkeypatch.setattr(internals, "version", lambda: version)
    log = AoffloadConnector.__init__.__globals__["_log"]
    monkeypatch.setattr(log, "warning", lambda text, *values: said.append(text % values))
    with vllm_importable():
        AoffloadConnector(vllm_config(), KVConnectorRole.SCHEDULER, kv_cache_config(9))
    warning = f"aoffload: vLLM {version} is not tested with aoffload"
    wanted = [] if version.startswith(("0.32.0", "0.33.0")) else [warning]
    assert [each.partition(";")[0] for each in said] == wanted


def test_no_name_is_made_up() -> None:
    """A typing error in the package is no fault of vLLM."""
    with pytest.raises(AttributeError, match="KVConectorBase"):
        internals.KVConectorBase  # noqa: B018
    assert f"{CONNECTOR}.v1.base" in NAMES
