"""Extras: the modules of each extra, and the errors if a module is missing, too old or too new."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec

from ..errors import MissingExtra, UnsupportedVersion

MODULES = {
    "cuda": ("cuda",),
    "disk": ("xxhash",),
    "events": ("msgspec", "zmq"),
    "metrics": ("prometheus_client",),
    "mooncake": ("cryptography", "mooncake", "xxhash"),
    "object-storage": ("cryptography", "obstore", "xxhash"),
    "otel": ("opentelemetry",),
    "remote": ("cryptography", "hiredis", "redis", "xxhash"),
    "server": ("starlette", "uvicorn"),
    "transformers": ("transformers",),
    "trio": ("trio",),
    "uvloop": ("uvloop",),
    "vllm": ("vllm",),
}
"""Modules that an extra installs and that are imported. The package does not import uvloop: programs do."""


@contextmanager
def needed(extra: str, user: str, supported: str = "") -> Iterator[None]:
    """A block for the imports that `user` needs from `extra`. If a module of `extra` is not installed, the block raises
    `MissingExtra`. If it is installed but lacks a part, the block raises `UnsupportedVersion`, with the `supported`
    versions. Errors about any other module pass unchanged, because they are bugs."""
    try:
        yield
    except ModuleNotFoundError as error:
        module = (error.name or "").partition(".")[0]
        if isinstance(error, MissingExtra) or module not in MODULES[extra]:
            raise
        if error.name == module or not _is_installed(module):
            raise MissingExtra(extra, module, user) from error
        raise _unsupported(extra, module, error, user, supported) from error
    except ImportError as error:  # a name that has moved, or a library that does not load
        module = (error.name or "").partition(".")[0]
        if isinstance(error, UnsupportedVersion) or module not in MODULES[extra] or not supported:
            raise
        raise _unsupported(extra, module, error, user, supported) from error


def _is_installed(module: str) -> bool:
    """Whether the module itself is installed, and not only a namespace folder that several packages share."""
    found = find_spec(module)
    return found is not None and found.origin is not None


def _unsupported(extra: str, module: str, error: ImportError, user: str, supported: str) -> UnsupportedVersion:
    lacks = str(error.name) if isinstance(error, ModuleNotFoundError) else f"such name ({error})"
    advice = f"install {supported}" if supported else f"pip install --upgrade 'aoffload[{extra}]'"
    return UnsupportedVersion(module, str(getattr(sys.modules.get(module), "__version__", "")), lacks, user, advice)
