"""Synthetic logs of any size: many requests at once, each with the events of a real one."""

from __future__ import annotations

import datetime
import heapq
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

BEGIN_S = 1_780_000_000.0
Timed = tuple[float, int, str, dict[str, Any]]


def stamp(at_s: float) -> str:
    """A time in the format of structlog's TimeStamper."""
    return datetime.datetime.fromtimestamp(at_s, datetime.UTC).isoformat(timespec="microseconds")[:-6] + "Z"


def line(at_s: float, name: str, **fields: Any) -> str:
    return json.dumps({**fields, "event": name, "level": "debug", "timestamp": stamp(at_s)})


def write_synthetic(path: Path, num_events: int) -> None:
    """Write `num_events` lines, in the order of time, with about a tenth as many requests."""
    with path.open("w") as file:
        for at_s, _, name, fields in _events(num_events, random.Random(num_events)):
            file.write(line(at_s, name, **fields) + "\n")


def _events(num_events: int, rng: random.Random) -> Iterator[Timed]:
    yield BEGIN_S, 0, "runtime_opened", {"num_device_blocks": 65_536, "num_host_blocks": 262_144}
    waiting: list[Timed] = []
    number, arrival_s, left = 0, BEGIN_S, num_events - 1
    while left:
        number += 1
        arrival_s += rng.expovariate(200)
        for event in _request(number, arrival_s, rng):
            heapq.heappush(waiting, event)
        while waiting and waiting[0][0] <= arrival_s and left:
            left -= 1
            yield heapq.heappop(waiting)


def _request(number: int, at_s: float, rng: random.Random) -> Iterator[Timed]:
    """Events of a request. Every second one loads. Each stores. One in ten is aborted while it computes."""
    name, order = f"req-{number:06}", number * 100
    num_blocks = rng.randint(10, 250)
    host = num_blocks // 2 if number % 2 else 0
    found = {"num_device_tokens": 32, "num_host_tokens": host * 16}
    steps: list[tuple[float, str, dict[str, Any]]] = [
        (0.0, "request_matched", {"num_tokens": num_blocks * 16, **found}),
        (2e-5, "request_pinned", {}),
        (rng.expovariate(20), "request_allocated", {"num_blocks": num_blocks, **found}),
    ]
    if host:
        steps.append((1e-5, "request_loading", {}))
        steps += _job(2 * number, "load", host, rng)
    steps.append((1e-5, "request_running", {"num_ready_tokens": 32 + host * 16}))
    steps.append((rng.expovariate(2), "", {}))
    steps += _job(2 * number + 1, "store", 8, rng)
    if number % 10:
        steps.append((1e-5, "request_done", {"num_computed_tokens": num_blocks * 16}))
    else:
        steps.append((1e-5, "request_aborted", {"reason": "cancelled", "previous": "running"}))
    for pause_s, event, fields in steps:
        at_s, order = at_s + pause_s, order + 1
        if event:
            yield at_s, order, event, {"request_id": name, **fields}


def _job(job_id: int, direction: str, num_blocks: int, rng: random.Random) -> list[tuple[float, str, dict[str, Any]]]:
    about = {"job_id": job_id, "direction": direction, "num_blocks": num_blocks}
    seconds = rng.expovariate(100)
    ended = {"outcome": "landed", "num_bytes": num_blocks * 65_536, "duration_s": round(seconds, 6)}
    return [(1e-5, "job_launched", about), (seconds, "job_completed", {**about, **ended})]
