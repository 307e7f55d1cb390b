"""Time to the first token, from hits: one queue for computing, and one for each link.

A request's copies begin when those before it on their link are over, its prompt when the request before is computed and
its own copies have landed. So it waits for the longer of the two queues, then computes what was not hit. Its answer
keeps the next prompt waiting for as long as it takes of the service's time. The speeds are those of the whole service.
"""

from __future__ import annotations

import math

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
    decode_tokens_per_s: float = math.inf
    """Of all answers together. Infinity: they take no time from prompts."""


@attrs.frozen
class FirstToken:
    times_s: Seconds
    """Of each request."""
    busy: float
    """Compute time of all requests over the duration of the trace. From 1 on, times grow as long as it lasts."""

    @property
    def p50_s(self) -> float:
        return float(np.median(self.times_s))

    @property
    def p90_s(self) -> float:
        return float(np.percentile(self.times_s, 90))


def first_token(trace: Trace, host_s: Seconds, disk_s: Seconds, computed: Counts, speeds: Speeds) -> FirstToken:
    """`host_s`, `disk_s`: seconds that each request's copies take; `computed`: tokens that each request computes."""
    compute_s = computed / speeds.prefill_tokens_per_s
    answer_s = np.array([each.num_output_tokens for each in trace.requests]) / speeds.decode_tokens_per_s
    host_free = disk_free = compute_free = -np.inf
    times = list[float]()
    columns = (each.tolist() for each in (host_s, disk_s, compute_s, answer_s))
    for request, of_host, of_disk, of_prompt, of_answer in zip(trace.requests, *columns, strict=True):
        begun = now = request.at_s
        if of_host:
            host_free = max(host_free, now) + of_host
            begun = max(begun, host_free)
        if of_disk:
            disk_free = max(disk_free, now) + of_disk
            begun = max(begun, disk_free)
        first_s = max(begun, compute_free) + of_prompt
        times.append(first_s - now)
        compute_free = first_s + of_answer
    busy = float(compute_s.sum() + answer_s.sum()) / trace.duration_s if trace.duration_s > 0 else 0.0
    return FirstToken(np.array(times), busy)
