"""Invalidated blocks on a disk whose writes may fail: three ways to hide them from a restart, tried in this order.

    erase the records             a restart does not find the blocks
    raise the generation          a restart finds nothing that was stored until then
    drop the table                the same; this process stops using the disk, because it cannot raise the generation
    all of these have failed      a restart may find the blocks, so the log has to say it

The data and the sum of such a block agree, so no check after a restart would notice it.
"""

from __future__ import annotations

from collections.abc import Callable

import attrs

ERASES = 3
"""Attempts to erase records, because a write may fail once and then succeed."""


@attrs.frozen
class DiskTrouble:
    """All attempts to erase the records of invalidated blocks have failed."""

    reason: str
    is_off: bool
    """Whether the disk must not be used any more."""


def forgotten(
    erase: Callable[[], None], raise_generation: Callable[[], None], drop: Callable[[], None]
) -> DiskTrouble | None:
    """Try these calls in order, until one of them does not raise `OSError`: then no restart finds the invalidated
    blocks. Returns None if the records were erased."""
    for _ in range(ERASES):
        try:
            erase()
        except OSError as error:
            reason = f"invalidated blocks could not be erased: {error.strerror or error}"
        else:
            return None
    for empty, is_off in ((raise_generation, False), (drop, True)):
        try:
            empty()
        except OSError:
            continue
        return DiskTrouble(f"{reason}; a restart finds nothing that was stored until now", is_off)
    return DiskTrouble(f"{reason}; a restart may find them: delete the files before the next start", is_off=True)
