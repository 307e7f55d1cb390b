"""Time to the first token, from hits: one queue for computing prompts, and one for each link.

A request's copies begin when those before it on their link are over, its prompt when the one before is computed and its
own copies have landed. So it waits for the longer of the two queues, then computes what was not hit. The speeds are
those of the whole service; answers are not part of the model, so give the speed at which prompts are computed beside
them.
"""

from __future__ import annotations

import attrs
import numpy as np
from numpy.typing import NDArray

from .distances import Counts
from .trace import Trace

__all__ = ["FirstToken", "Speeds", "first_token"]

Seconds = NDArray[np.float64]


@attrs.frozen(kw_only=True)
class Speeds:
    prefill_tokens_per_s: float
    host_gbs: float
    """GB/s from host memory to the device."""
    disk_gbs: float


@attrs.frozen
class FirstToken:
    times_s: Seconds
    """Of each request."""
    busy: float
    """Compute time of all prompts over the duration of the trace. From 1 on, times grow as long as it lasts."""

    @property
    def p50_s(self) -> float:
        return float(np.median(self.times_s))

    @property
    def p90_s(self) -> float:
        return float(np.percentile(self.times_s, 90))


def first_token(trace: Trace, host_s: Seconds, disk_s: Seconds, computed: Counts, speeds: Speeds) -> FirstToken:
    """`host_s`, `disk_s`: seconds that each request's copies take; `computed`: tokens that each request computes."""
    compute_s = computed / speeds.prefill_tokens_per_s
    host_free = disk_free = compute_free = -np.inf
    times = list[float]()
    rows = zip(trace.requests, host_s.tolist(), disk_s.tolist(), compute_s.tolist(), strict=True)
    for request, of_host, of_disk, of_compute in rows:
        begun = now = request.at_s
        if of_host:
            host_free = max(host_free, now) + of_host
            begun = max(begun, host_free)
        if of_disk:
            disk_free = max(disk_free, now) + of_disk
            begun = max(begun, disk_free)
        compute_free = max(begun, compute_free) + of_compute
        times.append(compute_free - now)
    busy = float(compute_s.sum()) / trace.duration_s if trace.duration_s > 0 else 0.0
    return FirstToken(np.array(times), busy)
