"""Planted defects of the cache: keys, matching, pins, runs, eviction, publishing."""

from __future__ import annotations

from .planting import Mutant, Patch

__all__ = ["CACHE_MUTANTS"]

PREFIX, TOKENS, MATCHING = "aoffload._common.prefix", "aoffload._kernel.tokens", "aoffload._kernel.index"
PINS, CACHE, TIERS = "aoffload._kernel.leases", "aoffload._kernel.cache", "aoffload._kernel.pools"
EVICTION, RECORDS = "aoffload._kernel.pools", "aoffload._kernel.records"
PUBLISH, COMMITS, OWNERS = "aoffload._kernel.leases", "aoffload._kernel.commits", "aoffload._kernel.records"
INVALIDATION = "aoffload._extensions.invalidation"
KNOWS_LEASES = (
    "from .records import NO_LIMIT, BlockTable, Checkpoints, LedgerRequest, Part, Run, nulls",
    "from .records import NO_LIMIT, BlockTable, Checkpoints, Lease, LedgerRequest, Part, Run, nulls",
)

_KEYS = (
    Mutant(
        "salt missing from the root",
        PREFIX,
        '("namespace", "cache_salt", "adapter_key")',
        '("namespace", "adapter_key")',
        "another salt is never a hit",
        scenarios=("tenants",),
    ),
    Mutant(
        "adapter missing from the root",
        PREFIX,
        '("namespace", "cache_salt", "adapter_key")',
        '("namespace", "cache_salt")',
        "another adapter is never a hit",
        scenarios=("tenants",),
    ),
    Mutant(
        "key spans missing from the key",
        TOKENS,
        "self.spans = prefix.spans",
        "self.spans = ()",
        "another image behind the same placeholder tokens is never a hit",
        scenarios=("tenants",),
    ),
    Mutant(
        "tokens under a span missing from the digest",
        TOKENS,
        "        after.update(tokens[at : at + unit_bytes])\n        after.update(record)\n",
        "        after.update(record)\n",
        "equal digests mean equal prefixes, under a span too",
        scenarios=("tenants",),
    ),
    Mutant(
        "hit up to the last token",
        PINS,
        "(request.sequence.num_tokens - 1) // layout.unit_tokens",
        "request.sequence.num_tokens // layout.unit_tokens",
        "at least one token is always left to compute",
    ),
    Mutant(
        "device island counts as a hit",
        MATCHING,
        "            if device_stop == run.start:\n                device_stop",
        "            if run.parts[0].blocks:\n                device_stop",
        "no device island behind a missing block is shared",
        scenarios=("evicted_otherwise",),
    ),
    Mutant(
        "a store in flight counts as a hit",
        MATCHING,
        "            reached = run.parts[BELOW].stop\n",
        "            reached, job = run.parts[BELOW].stop, run.parts[BELOW].incoming\n"
        "            reached = reached if job is None else max(reached, min(job.stop, run.stop))\n",
        "publish on completion",
        scenarios=("tier_resets",),
    ),
)

_PINS = (
    Mutant(
        "device hit not pinned",
        PINS,
        "= cache.lease(DEVICE, cache.cut(last, hit.device_stop))",
        "= Lease(DEVICE, cache.cut(last, hit.device_stop))",
        "match and pin are one step, on the device (I2)",
        also=(Patch(PINS, *KNOWS_LEASES),),
    ),
    Mutant(
        "host hit not pinned",
        PINS,
        "= cache.lease(BELOW, last)",
        "= Lease(BELOW, last)",
        "match and pin are one step, on the host (I1)",
        also=(Patch(PINS, *KNOWS_LEASES),),
    ),
    Mutant(
        "lease released twice",
        CACHE,
        '            raise LeaseError(f"{lease.tier.name} lease on {lease.run} released twice")',
        "            return",
        "a lease is single-use: releasing twice raises",
        scenarios=("bad_input",),
    ),
    Mutant(
        "duplicates not given back",
        "aoffload._kernel.records",
        "            found.extend(not_null(self.at(units.start, units.stop)))",
        "            found.extend(not_null(self.at(units.start, units.start)))",
        "nothing leaks: private duplicates go at close",
    ),
    Mutant(
        "destinations of a load freed with the request",
        "aoffload._kernel.loads",
        "ids = table.take(start, stop)",
        "ids = table.at(start, stop)",
        "a job owns its blocks, never the request",
    ),
    Mutant(
        "request without its grant holds no room",
        OWNERS,
        "return self.num_units > 0 or granted or DEVICE in self.leases",
        "return granted or DEVICE in self.leases",
        "a waiting extend fails only if nobody else will let go",
        scenarios=("growing",),
    ),
)

_RUNS = (
    Mutant(
        "split loses a reference",
        "aoffload._kernel.cache",
        "        num_references = part.num_references  # leases",
        "        num_references = 0  # leases",
        "references are leases: what pinned a run pins both parts",
    ),
    Mutant(
        "runs merged with a job in flight",
        "aoffload._kernel.cache",
        "            if front.num_references or following.num_references or front.rank != following.rank:\n"
        "                return False\n"
        "            if front.incoming is not None or following.incoming is not None:\n                return False\n",
        "",
        "the ids of an unfinished transfer belong to the job's own runs",
    ),
    Mutant(
        "pinned blocks stay evictable",
        TIERS,
        "        self.num_cached -= len(part.blocks)",
        "        self.num_cached -= 0",
        "all-or-nothing rests on the count of evictable blocks",
    ),
    Mutant(
        "evicted from the head",
        TIERS,
        "        freed = part.truncate(part.stop - num_units)\n",
        "        freed = part.blocks[: num_units * part.width]\n"
        "        del part.blocks[: num_units * part.width]\n"
        "        part.stop -= num_units\n",
        "a prefix loses its tail before its head",
    ),
    Mutant(
        "evicted newest first",
        EVICTION,
        "        return self.first\n",
        "        return self._newest\n",
        "the least recently used goes first, a prefix by its tail",
    ),
    Mutant(
        "split head older than its tail",
        EVICTION,
        "self._link(part, than)",
        "self._link(part, than.older)",
        "a head outlives its tail",
        scenarios=("least_recently_used",),
    ),
    Mutant(
        "shared run grown in place",
        PUBLISH,
        "part.incoming is not None or part.num_references > is_ours",
        "part.incoming is not None",
        "a run grows only under its sole reference",
    ),
    Mutant(
        "reset keeps the entries",
        CACHE,
        "self.index = RunIndex(self.layout, self.epoch, self.index.tiers)",
        "runs = self.index.runs\n"
        "        self.index = RunIndex(self.layout, self.epoch, self.index.tiers)\n"
        "        self.index.runs = runs",
        "reset makes everything unfindable",
    ),
    Mutant(
        "reset keeps the epoch",
        CACHE,
        "self.epoch += 1",
        "self.epoch += 0",
        "what was admitted before a reset never publishes or stores again",
    ),
    Mutant(
        "blocks of an old epoch kept",
        TIERS,
        "        if part.run.epoch != self.epoch:\n            self.pool.give(part.clear())",
        "        if part.run.epoch > self.epoch:\n            self.pool.give(part.clear())",
        "reset: what is pinned is free once it is let go of",
    ),
    Mutant(
        "corrupt block freed under a reader",
        CACHE,
        "part.entomb(position, part.truncate(position))",
        "self.tiers[part.tier].pool.give(part.truncate(position))",
        "a block is free when everybody has let go",
        scenarios=("rotten",),
    ),
)

_PUBLISHING = (
    Mutant(
        "partial block published",
        COMMITS,
        "publish(self.request_leases, request, num_units)",
        "publish(self.request_leases, request, self.cache.layout.num_units(num_tokens))",
        "partial blocks are never cached",
    ),
    Mutant(
        "published after a reset",
        COMMITS,
        "        if is_current:\n            if num_units > first:\n",
        "        if request.epoch:\n            if num_units > first:\n",
        "requests admitted before a reset never publish again",
    ),
    Mutant(
        "private duplicate published",
        RECORDS,
        "self.append(ids[(self.stop - first) * self.width : (last - first) * self.width], last)",
        "self.append(ids[: (last - first) * self.width], last)",
        "a private duplicate is never findable (I3)",
        scenarios=("kept_windows",),
    ),
    Mutant(
        "takes the place of blocks that somebody reads",
        PUBLISH,
        "        if not any(part.num_references or part.incoming is not None for part in parts):\n",
        "        if run is not request.device_run:\n",
        "blocks that somebody uses stay where they are",
    ),
    Mutant(
        "second copy of what nobody uses",
        PUBLISH,
        "        if not any(part.num_references or part.incoming is not None for part in parts):\n",
        "        if False:\n",
        "what a request computed again keeps it waiting for no room of its own",
        test="tests/core/test_leases.py::test_hit_caps_leave_a_request_the_whole_device",
    ),
    Mutant(
        "private duplicate forgotten",
        PUBLISH,
        "                table.duplicates.append(known)\n",
        "                del known\n",
        "the private copy stays until close, and goes then",
    ),
    Mutant(
        "invalidate leaves it published",
        INVALIDATION,
        "wrong = dict.fromkeys(self._runs_from(request, first_published(self.cache, request, start), ()))",
        "wrong: dict[Run, None] = {}",
        "what a failed forward committed is a miss",
    ),
    Mutant(
        "invalidate leaves the host copy",
        CACHE,
        "for part in run.parts:\n                self.tiers[part.tier].invalidated(part.blocks)\n",
        "for part in run.parts_in(Tier.DEVICE):\n                self.tiers[part.tier].invalidated(part.blocks)\n",
        "taken back in every tier, in flight too",
    ),
    Mutant(
        "invalidate leaves what others built on it",
        CACHE,
        "if not heads.isdisjoint(run.path())] if heads else []",
        "if run in heads]",
        "what was computed on wrong bytes is wrong",
        scenarios=("failed_forwards",),
    ),
    Mutant(
        "invalidate tells no reader",
        INVALIDATION,
        "        found = True\n        while found:\n",
        "        found = False\n        while found:\n",
        "whoever matched wrong bytes is aborted",
    ),
    Mutant(
        "tainted readers publish on",
        INVALIDATION,
        "                    other.epoch = NoEpoch.INVALIDATED  # its task may still commit before it unwinds\n",
        "",
        "whoever matched wrong bytes publishes nothing more",
        scenarios=("failed_forwards",),
    ),
)

CACHE_MUTANTS: tuple[Mutant, ...] = _KEYS + _PINS + _RUNS + _PUBLISHING
