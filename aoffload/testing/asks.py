"""What the clients of a simulated run ask for."""

from __future__ import annotations

from typing import Literal

import attrs

from ..prefix import KeySpan

__all__ = ["Ask", "Style"]

Style = Literal["inline", "step", "thread", "stream"]


@attrs.frozen(kw_only=True)
class Ask:
    """What one client wants, and how its engine goes about it."""

    tokens: tuple[int, ...]
    salt: str | None = None
    adapter: str | None = None
    num_new_tokens: int = 0
    slice_tokens: int = 1_000_000
    """The prompt is computed, and committed, that much at a time."""
    style: Style = "inline"
    """Where the forward runs: in the loop's thread, in a worker thread inside of a step, in a thread that owns its step
    (`run_step`), or later, on the device's stream."""
    key_spans: tuple[KeySpan, ...] = ()
    max_load_tokens: int | None = None
    max_hit_tokens: int | None = None
    hit_alignment: int = 1
    reads_cache: bool = True
    store: str = "all"
    max_store_tokens: int | None = None
    deadline_s: float | None = None
    waits: bool = True
    """Whether it waits for its load or polls it with `load_nowait` and `wait`."""
    num_preemptions: int = 0
    """How often it is preempted on its way, and resumed."""
    starts_early: bool = False
    """Whether its first forward begins while its load is under way. Not for those that take room slice by slice."""
    in_slices: bool = False
    """Whether it takes room for one slice after the other: what has left a window makes room for the next."""
