"""How no restart finds what was taken back, on a disk whose writes may fail.

    erase the records             a restart does not find them
    raise the generation          a restart finds nothing that was there
    drop the table                the same; a process that cannot raise the generation uses the disk no more
    all of these have failed      a restart may find them: whoever runs the engine has to be told

Data and sum of such a block agree, so no check after a restart would notice it.
"""

from __future__ import annotations

from collections.abc import Callable

import attrs

__all__ = ["ERASES", "DiskTrouble", "forgotten"]

ERASES = 3
"""How often records are erased: a write may fail once and then succeed."""


@attrs.frozen
class DiskTrouble:
    """A write that safety depends on has failed."""

    reason: str
    is_off: bool
    """Whether the disk must not be used any more."""


def forgotten(
    erase: Callable[[], None], raise_generation: Callable[[], None], drop: Callable[[], None]
) -> DiskTrouble | None:
    """Call these, which raise `OSError`, until one of them has made sure that no restart finds what was taken back.
    Returns None if the records were erased."""
    for _ in range(ERASES):
        try:
            erase()
        except OSError as error:
            reason = f"what was taken back could not be erased: {error.strerror or error}"
        else:
            return None
    for empty, is_off in ((raise_generation, False), (drop, True)):
        try:
            empty()
        except OSError:
            continue
        return DiskTrouble(f"{reason}; a restart finds nothing of what was stored until now", is_off)
    return DiskTrouble(f"{reason}; a restart may find it: delete the files before the next start", is_off=True)
