"""Which memory the open runtimes of this process use.

Two runtimes over the same memory hand out the same block ids, so each overwrites the cached KV of the other. The ids
can be disjoint only if the program hands out those of both runtimes.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from weakref import WeakKeyDictionary

import attrs

from ..errors import RegionError
from .region import KVRegion, share_memory

__all__ = ["claim", "unclaim"]


@attrs.frozen
class _Claim:
    process_id: int
    """The process that made the claim. A forked child has copies of the claims and of the memory."""
    has_own_ids: bool
    """The program hands out the block ids."""


_LOCK = threading.Lock()
_CLAIMS: WeakKeyDictionary[KVRegion, _Claim] = WeakKeyDictionary()
"""Weak keys: a claim ends when no copy refers to its region any more."""


def claim(regions: Sequence[KVRegion], *, has_own_ids: bool) -> None:
    """Claim the memory of `regions`. `RegionError("kv_caches")` if an open runtime uses some of it, unless the program
    hands out the block ids of both."""
    with _LOCK:
        for other, theirs in list(_CLAIMS.items()):
            if theirs.process_id != os.getpid() or (has_own_ids and theirs.has_own_ids):
                continue
            if any(one.device == other.device and share_memory(one, other) for one in regions):
                problem = "is in use by another open runtime: each would overwrite what the other one has cached"
                raise RegionError("kv_caches", problem)
        for region in regions:
            _CLAIMS[region] = _Claim(os.getpid(), has_own_ids)


def unclaim(regions: Sequence[KVRegion]) -> None:
    """No copy uses the memory of `regions` any more."""
    with _LOCK:
        for region in regions:
            _CLAIMS.pop(region, None)
