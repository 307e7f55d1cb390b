"""The memory that the process's cgroup has left, because Linux kills a process that exceeds the limit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import attrs

UNLIMITED_BYTES = 2**60
"""Version 1 of cgroups reports a huge number if there is no limit. Limits from here on count as none."""


@attrs.frozen
class MemoryLimit:
    limit_bytes: int
    used_bytes: int
    """Without the cache of files, which Linux drops where memory is needed."""

    @property
    def left_bytes(self) -> int:
        return max(0, self.limit_bytes - self.used_bytes)


@attrs.frozen
class _Names:
    limit: str
    used: str
    cached: tuple[str, ...]


V1 = _Names("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file"))
V2 = _Names("memory.max", "memory.current", ("inactive_file", "active_file"))


def memory_limit(root: Path = Path("/")) -> MemoryLimit | None:
    """The limit that leaves least, of the process's cgroup and those around it; None if no limit is known."""
    found = [limit for folder, names in _cgroups(root) if (limit := _read(folder, names)) is not None]
    return min(found, key=lambda limit: limit.left_bytes, default=None)


def _cgroups(root: Path) -> Iterator[tuple[Path, _Names]]:
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        mount, names = (root / "sys/fs/cgroup/memory", V1) if controllers else (root / "sys/fs/cgroup", V2)
        # In a container, the path may be one of the host: then only the mount point is there.
        parts = [part for part in path.split("/") if part not in ("", "..")]
        yield from ((mount.joinpath(*parts[:depth]), names) for depth in range(len(parts) + 1))


def _read(folder: Path, names: _Names) -> MemoryLimit | None:
    try:
        limit = int((folder / names.limit).read_text())  # no number: "max"
        used = int((folder / names.used).read_text())
        rows = (line.split() for line in (folder / "memory.stat").read_text().splitlines())
        cached = sum(int(number) for name, number in rows if name in names.cached)
    except (OSError, ValueError):
        return None
    return MemoryLimit(limit, max(0, used - cached)) if limit < UNLIMITED_BYTES else None
