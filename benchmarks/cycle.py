"""The bookkeeping of one request on a host hit, with a full device pool: the ledger as shipped, compared with vLLM's
scheduler side.

The cycle is: admit (token ids given), allocate (which evicts another prompt), plan the load, settle it, commit,
release. Two prompts take turns on a device pool that holds one of them. No bytes move, and every copy is reported
landed at once. The peer does the same work without computing its digests. If it is not installed, a per-block cache
replaces it. After `make compiled`, a ledger with the compiled core takes its turns, too, in a process of its own.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import numpy as np
import numpy.typing as npt

from aoffload import KVCacheGroup, Ledger, OffloadConfig
from aoffload.ledger import Completion, Outcome, Prefix, Root, TransferPlan

from .harness import SAMPLE_S, Row, Sample, Subject, interleave, timed
from .peer import Peer

__all__ = ["BLOCK_SIZE", "ROOT", "SIZES", "PerBlock", "Tokens", "cycle_with", "ledger_with", "prompts_of", "run"]

Tokens = npt.NDArray[np.int32]
BLOCK_SIZE = 16
SIZES = (64, 512, 4096, 8192)
WANTED = (9.0, 55.0, 330.0, 550.0)
WANTED_COMPILED = (18.0, 95.0, 480.0, 800.0)
SECONDS_PER_ROW = 4.0
ROOT = Root("benchmark")


def run(vllm: Peer | None) -> Iterator[Row]:
    """A row for each length of the prompt, and one more with the compiled core if it was built."""
    with ExitStack() as held:
        compiled = None if (peer := Peer.compiled()) is None else held.enter_context(peer)
        for size in SIZES:
            yield from measure(size, vllm, compiled)


def measure(num_blocks: int, vllm: Peer | None, compiled: Peer | None = None) -> list[Row]:
    """The median cycle of each, and the speed of ours relative to the other."""
    prompts = prompts_of(num_blocks, 2)
    subjects: dict[str, Subject] = {"Ledger": _taking_turns(_ledger(num_blocks, prompts)[1], prompts)}
    wanted = {"Ledger": WANTED[SIZES.index(num_blocks)], "compiled Ledger": WANTED_COMPILED[SIZES.index(num_blocks)]}
    if compiled is not None:
        assert compiled.ask("prepare_cycle", num_blocks=num_blocks), "the core there is not compiled"
        subjects["compiled Ledger"] = lambda: Sample(**compiled.ask("cycle", num_blocks=num_blocks, least_s=SAMPLE_S))
    if vllm is None:
        against = "block by block"
        subjects[against] = _taking_turns(PerBlock(num_blocks + 1, prompts).cycle, prompts)
    else:
        against = "vLLM without its hashing"
        found = vllm.ask("prepare_cycle", num_blocks=num_blocks)
        assert found["num_host_hits"] == num_blocks, found
        subjects[against] = vllm.cycles(num_blocks, hashes=False)
    measured = interleave(subjects, seconds=SECONDS_PER_ROW)
    limit = measured.pop(against)
    return [
        Row.faster(
            f"full cycle, {name}, {num_blocks * BLOCK_SIZE:,} tokens", ours, against, limit,
            None if vllm is None else wanted[name],
        )
        for name, ours in measured.items()
    ]  # fmt: skip


def prompts_of(num_blocks: int, number: int) -> list[Tokens]:
    """`number` different prompts of `num_blocks` blocks and one token."""
    generator = np.random.default_rng(0)
    return [generator.integers(0, 100_000, num_blocks * BLOCK_SIZE + 1, dtype=np.int32) for _ in range(number)]


def _taking_turns(cycle: Callable[[Tokens], None], prompts: list[Tokens]) -> Subject:
    turns: Iterator[Tokens] = itertools.cycle(prompts)
    return lambda: timed(lambda: cycle(next(turns)), SAMPLE_S)


def ledger_with(num_blocks: int, prompts: list[Tokens]) -> Ledger:
    """A ledger that has each of `prompts` in host memory, and the last one on the device."""
    return _ledger(num_blocks, prompts)[0]


def cycle_with(num_blocks: int, prompts: list[Tokens]) -> Callable[[Tokens], None]:
    """A function that serves one of `prompts`, all of which are in host memory."""
    return _ledger(num_blocks, prompts)[1]


def _ledger(num_blocks: int, prompts: list[Tokens]) -> tuple[Ledger, Callable[[Tokens], None]]:
    groups = [KVCacheGroup("full", block_size=BLOCK_SIZE)]
    ledger = Ledger(OffloadConfig(groups=groups, num_host_blocks=len(prompts) * num_blocks), num_blocks + 2)

    def land(plans: tuple[TransferPlan, ...]) -> None:
        for plan in plans:
            ledger.launch(plan.job_id)
            ledger.settle(Completion(plan.job_id, Outcome.LANDED))

    def cycle(prompt: Tokens) -> None:
        request = ledger.admit(Prefix.of(ROOT, prompt))
        ledger.allocate_nowait(request)
        land(ledger.plan_load(request))
        land(ledger.commit(request, len(prompt)))
        land(ledger.release(request))

    for prompt in prompts:
        cycle(prompt)
    assert ledger.lookup(Prefix.of(ROOT, prompts[0])).num_host_tokens == num_blocks * BLOCK_SIZE
    return ledger, cycle


class PerBlock:
    """The usual design: per block a running digest, a dictionary entry, a reference count and a place in an LRU."""

    def __init__(self, num_device_blocks: int, prompts: list[Tokens]) -> None:
        self.free = list(range(1, num_device_blocks + 1))
        self.device: dict[bytes, int] = {}
        self.host: dict[bytes, int] = {}
        self.references: dict[bytes, int] = {}
        self.host_references: dict[bytes, int] = {}
        self.evictable: dict[bytes, None] = {}
        for prompt in prompts:
            self.host |= {key: len(self.host) + i for i, key in enumerate(self.keys(prompt))}

    @staticmethod
    def keys(prompt: Tokens) -> list[bytes]:
        hasher, raw = ROOT.hasher.copy(), prompt.tobytes()
        keys = []
        for at in range(0, (len(prompt) - 1) // BLOCK_SIZE * BLOCK_SIZE * 4, BLOCK_SIZE * 4):
            hasher.update(raw[at : at + BLOCK_SIZE * 4])
            keys.append(hasher.copy().digest())
        return keys

    def num_cached(self, prompt: Tokens) -> int:
        return sum(key in self.device or key in self.host for key in self.keys(prompt))

    def cycle(self, prompt: Tokens) -> None:
        keys = self.keys(prompt)
        hits = [key for key in keys if key in self.device]
        loads = [key for key in keys[len(hits) :] if key in self.host]
        for key in hits:
            self._pin(key)
        for key in loads:
            self.host_references[key] = self.host_references.get(key, 0) + 1
        blocks = self._take(len(loads) + 1)
        plan = ([self.host[key] for key in loads], blocks[: len(loads)])
        for key, block in zip(loads, plan[1], strict=True):  # landed
            self.device[key] = block
            self.references[key] = 1
            self.host_references[key] -= 1
        self.free.append(blocks[-1])
        for key in reversed(keys):
            self.references[key] -= 1
            if not self.references[key]:
                self.evictable[key] = None

    def _pin(self, key: bytes) -> None:
        self.references[key] = self.references.get(key, 0) + 1
        self.evictable.pop(key, None)

    def _take(self, num_blocks: int) -> list[int]:
        while len(self.free) < num_blocks:
            key = next(iter(self.evictable))
            del self.evictable[key]
            self.free.append(self.device.pop(key))
        return [self.free.pop() for _ in range(num_blocks)]
