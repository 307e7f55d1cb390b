"""What calls about a request's room answer: values, which can be copied and pickled."""

from __future__ import annotations

import attrs

from .plan import TransferPlan

__all__ = ["Extension", "Preemption"]


@attrs.frozen
class Extension:
    """What `extend` changed in the block tables, a list per group."""

    added: list[list[int]]
    """Ids appended."""
    nulled: list[list[int]]
    """Positions that became null because they left the window of their group."""


@attrs.frozen
class Preemption:
    """What a preempted request has given up."""

    num_freed: int
    """Device blocks by which the room grew, without those of an abandoned load. Blocks shared with other requests stay
    in use."""
    num_pending: int
    """Blocks that copies still read: released when the jobs in `job_ids` are over."""
    job_ids: tuple[int, ...]
    plans: tuple[TransferPlan, ...] = ()
    """Stores to launch."""
