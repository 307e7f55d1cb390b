"""The requests that clients make in a simulated run."""

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
    """The thread that runs the forward: the loop's thread ("inline"), a worker thread inside the loop's step ("step"),
    or a thread that owns its step ("thread", by `run_step`). With "stream", the forward runs later, on the device's
    stream."""
    key_spans: tuple[KeySpan, ...] = ()
    max_load_tokens: int | None = None
    max_hit_tokens: int | None = None
    hit_alignment: int = 1
    reads_cache: bool = True
    store: str = "all"
    max_store_tokens: int | None = None
    deadline_s: float | None = None
    waits: bool = True
    """Whether the request loads with `load`. Otherwise it uses `load_nowait` and a later `wait`."""
    num_preemptions: int = 0
    """Maximum number of times that the request is preempted and resumed."""
    starts_early: bool = False
    """Whether the first forward of the request begins during its load (layer-wise overlap). Not with `in_slices`."""
    in_slices: bool = False
    """Whether the request allocates slice by slice. Blocks that have left a window are free for the next slice."""
