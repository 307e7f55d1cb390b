"""The oracle: the same cache kept one block at a time, without runs, splits or merges.

Written from the rules of the design, not from the ledger: a dictionary of blocks per tier, a reference count per block,
one LRU of unpinned blocks per tier, released tail first. A block here is one index unit of `width` pool blocks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import attrs

DEVICE, HOST = 0, 1
Key = int
_interned: dict[Any, Key] = {}


def keys_of(root: object, tokens: list[int], spans: Iterable[Any], size: int) -> list[Key]:
    """One key per full block: equal keys mean equal prefixes."""
    keys: list[Key] = []
    for at in range(0, len(tokens) // size * size, size):
        touching = tuple(span for span in spans if span.start < at + size and span.stop > at)
        content = (keys[-1] if keys else root, tuple(tokens[at : at + size]), touching)
        keys.append(_interned.setdefault(content, len(_interned)))
    return keys


@attrs.define(eq=False)
class Tier:
    free: int
    width: int
    cached: set[Key] = attrs.field(factory=set)
    pins: Counter[Key] = attrs.field(factory=Counter)
    lru: dict[Key, None] = attrs.field(factory=dict)  # cached and unpinned, oldest first
    incoming: dict[Key, Job] = attrs.field(factory=dict)
    evicted: int = 0

    @property
    def room(self) -> int:
        return self.free + len(self.lru) * self.width

    def take(self, count: int) -> None:
        while self.free < count:
            oldest = next(iter(self.lru))
            del self.lru[oldest]
            self.cached.remove(oldest)
            self.free += self.width
            self.evicted += self.width
        self.free -= count

    def pin(self, keys: list[Key]) -> None:
        for key in keys:
            self.pins[key] += 1
            self.lru.pop(key, None)

    def unpin(self, keys: list[Key]) -> None:
        for key in reversed(keys):
            self.pins[key] -= 1
            if not self.pins[key] and key in self.cached:
                self.lru[key] = None


@attrs.define(eq=False)
class Job:
    source: int
    keys: list[Key]
    start: int
    before: Job | None
    claims: set[Request] = attrs.field(factory=set)
    launched: bool = False
    landed: bool = False


@attrs.define(eq=False)
class Request:
    ticket: int
    root: object
    tokens: list[int]
    spans: tuple[Any, ...] = ()
    max_hit: int = 1 << 30
    alignment: int = 1
    device_hit: int = 0
    hit: int = 0
    published: int = 0
    units: int = 0  # of its table
    private: int = 0  # pool blocks
    held: dict[int, list[Key]] = attrs.field(factory=dict)
    load_stop: int | None = None
    jobs: set[Job] = attrs.field(factory=set)
    running: bool = False
    waits_for: int | None = None
    granted: int | None = None
    failed: bool = False


class Naive:
    def __init__(self, device: int, host: int, size: int, width: int = 1, per_job: int = 1 << 30) -> None:
        self.size, self.width, self.per_job = size, width, per_job
        self.tiers = (Tier(device, width), Tier(host, width))
        self.num_host = host
        self.requests: set[Request] = set()
        self.jobs: list[Job] = []
        self.allocating: list[Request] = []
        self.extending: list[Request] = []
        self.num_shared = self.num_duplicates = 0

    def keys(self, r: Request) -> list[Key]:
        return keys_of(r.root, r.tokens, r.spans, self.size)

    def hold(self, r: Request, tier: int, count: int) -> None:
        old, new = r.held.pop(tier, []), self.keys(r)[:count]
        self.tiers[tier].pin(new)
        self.tiers[tier].unpin(old)
        if new:
            r.held[tier] = new

    # -- match, pin, room

    def pin(self, r: Request) -> None:
        limit = min((len(r.tokens) - 1) // self.size, r.max_hit)
        keys, (device, host) = self.keys(r), self.tiers
        on_device = next((i for i in range(limit) if keys[i] not in device.cached), limit)
        stop = next((i for i in range(on_device, limit) if keys[i] not in host.cached), limit)
        r.hit = stop - stop % r.alignment
        r.device_hit = r.published = min(on_device, r.hit)
        self.hold(r, DEVICE, r.published)
        self.hold(r, HOST, r.hit if r.hit > r.published else 0)

    def unpin(self, r: Request) -> None:
        self.hold(r, DEVICE, 0)
        self.hold(r, HOST, 0)
        r.published = r.hit = 0

    def admit(self, r: Request) -> None:
        self.requests.add(r)
        self.pin(r)

    def missing(self, r: Request, units: int) -> int:
        return max(0, units - (r.units or r.published)) * self.width

    def allocate(self, r: Request, units: int) -> bool:
        """What `*_nowait` does; False: refused."""
        waiting = self.extending if r.units else self.allocating + self.extending
        if waiting or self.missing(r, units) > self.tiers[DEVICE].room:
            return False
        count = self.missing(r, units)
        self.tiers[DEVICE].take(count)
        self.enter(r, count)
        return True

    def enter(self, r: Request, count: int) -> None:
        r.units = (r.units or r.published) + count // self.width
        r.private += count

    def queue(self, r: Request, units: int) -> None:
        r.waits_for = units
        if r.units:
            self.extending.append(r)
        else:
            self.allocating = sorted([*self.allocating, r], key=lambda waiting: waiting.ticket)
            for waiting in self.allocating[1:]:
                self.unpin(waiting)

    def accept(self, r: Request) -> None:
        count, r.waits_for, r.granted, failed, r.failed = r.granted, None, None, r.failed, False
        if not failed:
            assert count is not None
            self.enter(r, count)

    def leave(self, r: Request) -> None:
        self.tiers[DEVICE].free += r.granted or 0
        self.allocating = [w for w in self.allocating if w is not r]
        self.extending = [w for w in self.extending if w is not r]
        r.waits_for, r.granted, r.failed = None, None, False

    def pump(self) -> None:
        device = self.tiers[DEVICE]
        while self.extending:
            r = self.extending[0]
            if self.missing(r, r.waits_for or 0) > device.room and self.allocating:
                self.unpin(self.allocating[0])
            if not self.grant(r, self.extending):
                if self.someone_else_holds_room():
                    return
                youngest = self.extending.pop()
                youngest.failed = True
        while self.allocating:
            self.unpin(self.allocating[0])
            self.pin(self.allocating[0])
            if not self.grant(self.allocating[0], self.allocating):
                return

    def grant(self, r: Request, line: list[Request]) -> bool:
        count = self.missing(r, r.waits_for or 0)
        if count > self.tiers[DEVICE].room:
            return False
        line.pop(0)
        self.tiers[DEVICE].take(count)
        r.granted = count
        return True

    def someone_else_holds_room(self) -> bool:
        waiting = [*self.allocating, *self.extending]
        return bool(self.jobs) or any((r.units or DEVICE in r.held) and r not in waiting for r in self.requests)
