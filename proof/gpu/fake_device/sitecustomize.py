"""Put this folder on PYTHONPATH, and the stub of libcuda on LD_LIBRARY_PATH, for a process that believes in a GPU.

Python imports this module when it starts. `fake_cuda` changes each of the modules below as soon as it is imported.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import fake_cuda

CHANGES: dict[str, Callable[[Any], None]] = {
    "torch": fake_cuda.give_torch_a_device,
    "aoffload._transfer.backends.cuda.kernel": fake_cuda.copy_small_pieces_on_the_host,
    "aoffload._transfer.backends.cuda.nvidia": fake_cuda.name_the_first_device,
    "aoffload._transfer.local": fake_cuda.take_all_memory_for_the_devices,
}


class Changing(MetaPathFinder):
    """Finds a module of `CHANGES` as usual, and has it changed after its own code has run."""

    def __init__(self) -> None:
        self._wanted = ""
        """The name that the other finders are asked for."""

    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name == self._wanted or name not in CHANGES:
            return None
        self._wanted, change = name, CHANGES[name]
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._wanted = ""
        assert spec is not None and spec.loader is not None, f"there is no {name} to change"
        execute = spec.loader.exec_module

        def execute_and_change(module: ModuleType) -> None:
            execute(module)
            change(module)

        spec.loader.exec_module = execute_and_change  # type: ignore[method-assign]
        return spec


if importlib.util.find_spec("torch") is not None:
    sys.meta_path.insert(0, Changing())
