"""Writes which device and packages there are, as JSON: `python -m proof.gpu.probe FILE MODULE...`."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import json
import platform
import sys
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from .environment import environment
from .parts import PACKAGE

DISTRIBUTIONS = ("triton", "cuda-bindings", "numpy", "pytest", "transformers")
"""Packages whose versions the report names, besides torch."""
OURS = ("aoffload", "aoffload.cuda", "aoffload.transport")
"""Modules that every part imports."""
WHEELS = (
    "Install them. On a machine without a network, first download the wheels elsewhere: "
    "python -m pip download --no-deps --dest wheels {names}. Then: "
    "python -m pip install --no-index --no-deps --target site wheels/*.whl, and put site on PYTHONPATH"
)


def main(file: str, *modules: str) -> None:
    missing = [name for name in modules if not _is_there(name)]
    found = {**_device(missing), "missing": missing, "environment": environment()}
    Path(file).write_text(json.dumps(found))


def _device(missing: Iterable[str]) -> dict[str, Any]:
    """`problem`, or `about`, which the report begins with."""
    if not _is_there("torch"):
        return {"problem": "torch is missing"}
    if lacks := [name for name in PACKAGE if name in missing]:
        are = "is" if len(lacks) == 1 else "are"
        return {"problem": f"{', '.join(lacks)} {are} missing. {WHEELS.format(names=' '.join(lacks))}"}
    import torch

    if torch.version.cuda is None:
        return {"problem": f"torch {torch.__version__} was built without CUDA"}
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        is_available = torch.cuda.is_available()
    if not is_available:
        why = "".join(f": {' '.join(str(each.message).split())}" for each in warned[:1])
        return {"problem": f"torch sees no CUDA device{why}"}
    if problem := _imported():
        return {"problem": problem}
    properties = torch.cuda.get_device_properties(0)
    about = (
        f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB, compute capability "
        f"{properties.major}.{properties.minor}",
        f"torch {torch.__version__} for CUDA {torch.version.cuda}",
        *_versions(DISTRIBUTIONS),
        f"Python {platform.python_version()}",
    )
    return {"about": "; ".join(about)}


def _imported() -> str:
    """Why the package cannot be imported; empty if it can."""
    for name in OURS:
        try:
            importlib.import_module(name)
        except Exception as error:  # noqa: BLE001 - whatever it is, each part would die of it
            return f"{name} cannot be imported: {error!r}"
    return ""


def _versions(names: Iterable[str]) -> list[str]:
    found = []
    for name in names:
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            found.append(f"no {name}")
    return found


def _is_there(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # its parent package is missing
        return False


if __name__ == "__main__":
    main(*sys.argv[1:])
