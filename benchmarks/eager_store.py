"""Eager stores of new blocks: a request for an uncached prompt, all of it stored, with a free and a full host pool.

From the match to the release, with the device pool full: every block is computed, published, offered to the host and
reported landed. Either the host has free blocks for all of them, or each prompt replaces an older one. The peer does
the same work without computing its digests. If it is not installed, a per-block cache replaces it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

from aoffload import Ledger, Tier

from .cycle import BLOCK_SIZE, SIZES, PerBlock, Tokens, prompts_of
from .harness import Row, Sample, Subject, interleave, timed
from .peer import Peer
from .pools import ledger_of, prompt_of, serve

__all__ = ["PerBlockStores", "measure", "run"]

HOSTS = {"free": True, "full": False}
"""Whether the host has free blocks for new prompts."""
SECONDS_PER_LENGTH = 6.0
NUM_KEPT = 2
"""Prompts that a full host holds."""
MOST_BLOCKS, MOST_REQUESTS = 2**19, 512
"""Bounds on one sample of the ledger, large enough to make it last more than 20 ms."""
PEER_BLOCKS = 2**12


def run(vllm: Peer | None) -> Iterator[Row]:
    """For each length of the prompt, a row with a free host and one with a full host."""
    for num_blocks in SIZES:
        yield from measure(num_blocks, vllm)


def measure(num_blocks: int, vllm: Peer | None, seconds: float = SECONDS_PER_LENGTH) -> list[Row]:
    """Time of one request, and its ratio to the time of the peer or its replacement."""
    ours = max(2, min(MOST_REQUESTS, MOST_BLOCKS // num_blocks))
    theirs = max(2, PEER_BLOCKS // num_blocks)
    against = "block by block" if vllm is None else "vLLM without its hashing"
    subjects: dict[str, Subject] = {}
    for host, has_room in HOSTS.items():
        subjects[f"ledger {host}"] = ledger_subject(num_blocks, ours, has_room)
        if vllm is None:
            subjects[f"{against} {host}"] = _per_block_subject(num_blocks, theirs, has_room)
        else:
            subjects[f"{against} {host}"] = _peer_subject(vllm, num_blocks, theirs, has_room)
    measured = interleave(subjects, seconds=seconds)
    return [
        Row.faster(
            f"eager store, Ledger, {num_blocks * BLOCK_SIZE:,} new tokens, {host} host pool",
            measured[f"ledger {host}"], against, measured[f"{against} {host}"], None,
        )
        for host in HOSTS
    ]  # fmt: skip


def ledger_subject(num_blocks: int, number: int, has_room: bool) -> Subject:
    """`number` new prompts per sample. With `has_room` the host is emptied before each sample."""
    (template,) = prompts_of(num_blocks, 1)
    numbers = itertools.count()
    ledger = ledger_of(num_blocks + 1, num_blocks * (number if has_room else NUM_KEPT))

    def once() -> None:
        match = serve(ledger, prompt_of(next(numbers), template))
        assert not match.num_tokens, match

    def sample() -> Sample:
        if has_room:
            ledger.reset(Tier.HOST)
        evicted = ledger.cache.tiers[Tier.HOST].num_evicted
        found = _times(number, once)
        evicted = ledger.cache.tiers[Tier.HOST].num_evicted - evicted
        assert evicted == (0 if has_room else number * num_blocks), evicted
        return found

    _fill(ledger, once)
    return sample


def _fill(ledger: Ledger, once: Callable[[], None]) -> None:
    for _ in range(NUM_KEPT):
        once()
    host = ledger.statistics().host
    assert host.num_free == 0 or host.num_blocks > host.num_cached > 0, host


def _times(number: int, work: Callable[[], None]) -> Sample:
    def all_of_them() -> None:
        for _ in range(number):
            work()

    whole = timed(all_of_them)
    return Sample(whole.wall_s / number, whole.cpu_s / number)


def _peer_subject(vllm: Peer, num_blocks: int, number: int, has_room: bool) -> Subject:
    def sample() -> Sample:
        found = vllm.ask("store", num_blocks=num_blocks, number=number, has_room=has_room)
        assert found["num_host_hits"] == num_blocks, found
        return Sample(found["wall_s"], found["cpu_s"])

    return sample


class PerBlockStores(PerBlock):
    """Stores new prompts block by block in both tiers. A full tier evicts its least recently used blocks."""

    def __init__(self, num_blocks: int, num_host: int) -> None:
        super().__init__(num_blocks + 1, [])
        self.free_host = list(range(num_host))

    def store(self, prompt: Tokens) -> None:
        keys = self.keys(prompt)
        assert not any(key in self.device or key in self.host for key in keys)
        blocks = self._take(len(keys) + 1)
        for key, block in zip(keys, blocks, strict=False):
            self.device[key] = block
        self.free.append(blocks[-1])
        while len(self.free_host) < len(keys):
            oldest = next(iter(self.host))
            self.free_host.append(self.host.pop(oldest))
        for key in keys:  # landed
            self.host[key] = self.free_host.pop()
        for key in reversed(keys):
            self.evictable[key] = None


def _per_block_subject(num_blocks: int, number: int, has_room: bool) -> Subject:
    (template,) = prompts_of(num_blocks, 1)
    numbers = itertools.count()
    num_host = num_blocks * (number if has_room else NUM_KEPT)
    cache = PerBlockStores(num_blocks, num_host)

    def once() -> None:
        cache.store(prompt_of(next(numbers), template))

    def sample() -> Sample:
        if has_room:
            cache.host.clear()
            cache.free_host = list(range(num_host))
        return _times(number, once)

    for _ in range(NUM_KEPT):
        once()
    return sample
