"""The requests that clients of a simulated run make."""

from __future__ import annotations

from typing import Literal

import attrs

from .._common.prefix import KeySpan

__all__ = ["Ask", "Style"]

Style = Literal["inline", "step", "thread", "stream"]


@attrs.frozen(kw_only=True)
class Ask:
    """One client's request: its prompt and options, and how the simulated engine serves it."""

    tokens: tuple[int, ...]
    salt: str | None = None
    adapter: str | None = None
    num_new_tokens: int = 0
    slice_tokens: int = 1_000_000
    """The prompt is computed and committed in slices of this many tokens."""
    style: Style = "inline"
    """Where the forward runs: in the loop's thread ("inline"), in a worker thread inside the loop's step ("step"), in a
    thread that owns its step ("thread", by `run_step`), or later, on the device's stream ("stream")."""
    key_spans: tuple[KeySpan, ...] = ()
    max_load_tokens: int | None = None
    max_hit_tokens: int | None = None
    hit_alignment: int = 1
    reads_cache: bool = True
    store: str = "all"
    max_store_tokens: int | None = None
    deadline_s: float | None = None
    waits: bool = True
    """Whether it loads with `load`, or with `load_nowait` and a later `wait`."""
    num_preemptions: int = 0
    """How often it is preempted and resumed, at most."""
    starts_early: bool = False
    """Whether its first forward begins while its load is under way (layer-wise overlap). Not with `in_slices`."""
    in_slices: bool = False
    """Whether it allocates slice by slice: blocks that have left a window make room for the next slice."""
