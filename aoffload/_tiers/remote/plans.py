"""Values that cross to and from a remote store."""

from __future__ import annotations

import attrs


@attrs.frozen(slots=True)
class CellLabel:
    """Name of an object in a remote store, a cell: units `[start, stop)` of one component. `digest` is the digest of
    the prefix that ends at unit `stop`. `stop - start` is a power of two, and `start` a multiple of it.

    The label is the payload of each plan from or to a remote store: a job copies one cell. The ids on the remote side
    of the plan are the places of the blocks in the cell, in prefix order from 0. A load may leave out units at the
    beginning or the end of a cell.
    """

    component: int
    digest: bytes
    start: int
    stop: int
