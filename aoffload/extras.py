"""Extras: the modules that each of them brings, and one error that names the extra where a module is missing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from .errors import MissingExtra

__all__ = ["MODULES", "needed"]

MODULES = {
    "cuda": ("cuda",),
    "disk": ("xxhash",),
    "events": ("msgspec", "zmq"),
    "metrics": ("prometheus_client",),
    "mooncake": ("cryptography", "mooncake", "xxhash"),
    "object-storage": ("cryptography", "obstore", "xxhash"),
    "remote": ("cryptography", "hiredis", "redis", "xxhash"),
    "server": ("starlette", "uvicorn"),
    "transformers": ("transformers",),
    "trio": ("trio",),
    "uvloop": ("uvloop",),
    "vllm": ("vllm",),
}
"""Modules that are imported from what an extra installs. Nothing here imports uvloop: programs do."""


@contextmanager
def needed(extra: str, user: str) -> Iterator[None]:
    """Around imports for `user`: where a module of `extra` is missing, `MissingExtra` is raised in place of what the
    import raised. Any other missing module is a mistake, and raises as it did."""
    try:
        yield
    except ModuleNotFoundError as error:
        module = (error.name or "").partition(".")[0]
        if isinstance(error, MissingExtra) or module not in MODULES[extra]:
            raise
        raise MissingExtra(extra, module, user) from error
