"""The reference model: the same cache, kept one block at a time, without runs, splits and merges.

A key stands for the prefix that ends with one unit of `width` blocks. Every launched copy lands."""

from __future__ import annotations

from collections import Counter

import attrs

DEVICE, HOST = 0, 1
Job = attrs.make_class("Job", ["source", "keys", "start", "before", "claims", "launched", "landed"], eq=False)


class Tier:
    def __init__(self, num_blocks: int, width: int = 1) -> None:
        self.free, self.width, self.num_evicted = num_blocks, width, 0
        self.cached, self.pins, self.incoming = set(), Counter(), {}
        self.lru: dict[int, None] = {}  # cached and unpinned, oldest first

    def num_available(self) -> int:
        return self.free + len(self.lru) * self.width

    def take(self, num_blocks: int) -> None:
        while self.free < num_blocks:
            self.cached.remove(oldest := next(iter(self.lru)))
            del self.lru[oldest]
            self.free += self.width
            self.num_evicted += 1
        self.free -= num_blocks

    def pin(self, keys: list[int], instead_of: list[int]) -> None:
        for key in keys:
            self.pins[key] += 1
            self.lru.pop(key, None)
        for key in reversed(instead_of):  # the tail first
            self.pins[key] -= 1
            if not self.pins[key] and key in self.cached:
                self.lru[key] = None


class Request:
    def __init__(self, keys: list[int], num_tokens: int, hit_limit: int, alignment: int) -> None:
        self.keys, self.num_tokens, self.hit_limit, self.alignment = keys, num_tokens, hit_limit, alignment
        self.device_hit = self.hit = self.published = self.units = self.private = self.load_stop = 0
        self.evicted_before = 0
        self.held: dict[int, list[int]] = {}  # what it pins, by tier


class Naive:
    def __init__(self, device: Tier, host: Tier, unit_tokens: int) -> None:
        self.tiers, self.unit_tokens = (device, host), unit_tokens
        self.jobs: list[Job] = []  # not settled yet

    def hold(self, r: Request, tier: int, stop: int) -> None:
        self.tiers[tier].pin(r.keys[:stop], instead_of=r.held.get(tier, []))
        r.held[tier] = r.keys[:stop]

    def pin(self, r: Request) -> None:
        limit, (device, host) = min((r.num_tokens - 1) // self.unit_tokens, r.hit_limit), self.tiers
        near = next((i for i in range(limit) if r.keys[i] not in device.cached), limit)
        stop = next((i for i in range(near, limit) if r.keys[i] not in host.cached), limit)
        r.hit = stop - stop % r.alignment
        r.device_hit = r.published = min(near, r.hit)
        self.hold(r, DEVICE, r.published)
        self.hold(r, HOST, r.hit if r.hit > near else 0)

    def take(self, r: Request, units: int) -> bool:
        present, device = r.units or r.published, self.tiers[DEVICE]
        if (missing := max(0, units - present) * device.width) > device.num_available():
            return False
        device.take(missing)
        r.private, r.units = r.private + missing, max(units, present)
        return True

    def plan(self, source: int, keys: list[int], start: int) -> None:
        to = self.tiers[1 - source]
        before = to.incoming.get(keys[start - 1]) if start else None
        self.jobs.append(Job(source, keys, start, before, set(), False, False))
        to.incoming |= dict.fromkeys(keys[start:], self.jobs[-1])
        for tier in self.tiers:
            tier.pin(keys, instead_of=[])

    def load(self, r: Request, max_units: int) -> None:
        device, start, stop = self.tiers[DEVICE], r.published, min(r.hit, r.units, max_units)
        if stop > start:
            self.hold(r, DEVICE, stop)
            r.published = next((i for i in range(start, stop) if r.keys[i] not in device.cached), stop)
            coming = next((i for i in range(r.published, stop) if r.keys[i] not in device.incoming), stop)
            if coming < stop:
                self.plan(HOST, r.keys[:stop], coming)
            for key in r.keys[r.published : stop]:
                device.incoming[key].claims.add(r)
            device.free += (coming - start) * device.width
            r.private -= (stop - start) * device.width
            r.load_stop = stop
        self.conclude(r)

    def conclude(self, r: Request) -> None:
        if not any(r in job.claims for job in self.jobs):
            r.published, r.load_stop = max(r.published, r.load_stop), 0
            self.hold(r, HOST, 0)

    def land(self, job: Job) -> None:
        job.landed = True
        if job.before not in self.jobs:
            self.close(job)
            for successor in [other for other in self.jobs if other.before is job and other.landed]:
                self.land(successor)

    def close(self, job: Job) -> None:
        self.jobs.remove(job)
        to = self.tiers[1 - job.source]
        to.incoming = {key: other for key, other in to.incoming.items() if other is not job}
        for i in range(job.start, len(job.keys)):
            if job.landed and job.keys[i] not in to.cached and (i == 0 or job.keys[i - 1] in to.cached):
                to.cached.add(job.keys[i])
            else:
                to.free += to.width
        for tier in self.tiers:
            tier.pin([], instead_of=job.keys)

    def commit(self, r: Request, num_computed_tokens: int) -> None:
        first, r.published = r.published, num_computed_tokens // self.unit_tokens
        device, computed = self.tiers[DEVICE], set(r.keys[first : r.published])
        new, unused = computed - device.cached, computed & device.lru.keys()  # the others stay private duplicates
        self.hold(r, HOST, 0)
        self.hold(r, DEVICE, r.published)
        r.private -= len(new | unused) * device.width
        device.free += len(unused) * device.width  # ours take their place
        device.cached |= new
        evicts = self.tiers[HOST].num_evicted != r.evicted_before
        if not evicts or not first or self.is_there(r.keys[first - 1]):
            self.store(r, first)

    def is_there(self, key: int) -> bool:
        return key in self.tiers[HOST].cached or key in self.tiers[HOST].incoming

    def store(self, r: Request, first: int) -> None:
        host, keys = self.tiers[HOST], r.held[DEVICE]
        missing = [i for i, key in enumerate(keys) if not self.is_there(key)]
        covered = max((i for i in range(first) if i not in missing), default=-1)
        for start in [i for i in missing if i > covered and i - 1 not in missing]:  # where a gap begins
            stop = next(i for i in range(start, len(keys) + 1) if i not in missing)
            host.pin(keys[:stop], instead_of=[])
            if stored := min(stop - start, host.num_available() // host.width):
                host.take(stored * host.width)
                self.plan(DEVICE, keys[: start + stored], start)
            host.pin([], instead_of=keys[:stop])

    def release(self, r: Request) -> None:
        for job in [job for job in reversed(self.jobs) if r in job.claims]:
            job.claims.remove(r)
            if not job.claims and not job.launched:
                self.close(job)
        self.tiers[DEVICE].free += r.private
        r.private = r.units = r.load_stop = r.published = 0
        self.hold(r, DEVICE, 0)
        self.hold(r, HOST, 0)
