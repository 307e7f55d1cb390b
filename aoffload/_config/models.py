"""A fingerprint of a model's files, for the namespace of a cache that outlives the process."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

from .._common.arguments import shown
from ..errors import InvalidArgument

WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".npz", ".h5")
"""Suffixes of files with weights."""
CONFIGURES = (".json", ".py")
"""Suffixes of files that decide how the weights are used: configurations, and code of the model's own."""
READ_BYTES = 2**20


def fingerprint(model_dir: str | os.PathLike[str]) -> str:
    """SHA-256, as 64 hexadecimal digits, over names, sizes and contents of the weights and configurations below
    `model_dir`. In `OffloadConfig.namespace`, it ensures that KV of other weights or another configuration is never
    used.

    The function reads every byte. Call it outside of the event loop, or call it once and keep the result with the
    model. If one of these files is added or removed, the cache starts empty. `InvalidArgument("model_dir")` if there
    are no weights, or if a file cannot be read.
    """
    try:
        root = Path(model_dir)
        found = sorted(_files(root))
        if not any(name.endswith(WEIGHTS) for name, _ in found):
            raise InvalidArgument("model_dir", f"holds no weights ({', '.join(WEIGHTS)}): {shown(model_dir)}")
        total = hashlib.sha256(b"aoffload model 1\n")
        for name, path in found:
            raw, (size, digest) = os.fsencode(name), _content(path)
            total.update(b"%d %s %d " % (len(raw), raw, size) + digest)
    except OSError as error:
        raise InvalidArgument("model_dir", f"{shown(model_dir)} cannot be read: {error.strerror or error}") from error
    except (TypeError, ValueError) as error:
        if isinstance(error, InvalidArgument):
            raise
        raise InvalidArgument("model_dir", f"must be the path of a directory, got {shown(model_dir)}") from error
    return total.hexdigest()


def _files(root: Path) -> Iterator[tuple[str, Path]]:
    """The files that decide the KV, by their path below `root`. Links are followed, because downloads of model hubs are
    links into a store. Hidden directories and files are skipped."""

    def fail(error: OSError) -> None:
        raise error

    for directory, below, names in os.walk(root, onerror=fail):
        below[:] = [name for name in below if not name.startswith(".")]
        for name in names:
            path = Path(directory, name)
            if name.endswith(WEIGHTS + CONFIGURES) and not name.startswith("."):
                yield path.relative_to(root).as_posix(), path


def _content(path: Path) -> tuple[int, bytes]:
    """The length of a file, and the SHA-256 of its content."""
    hasher, size = hashlib.sha256(), 0
    with path.open("rb", buffering=0) as file:
        while part := file.read(READ_BYTES):
            hasher.update(part)
            size += len(part)
    return size, hasher.digest()
