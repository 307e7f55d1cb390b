"""Store policies on a trace: `python -m benchmarks.policies --trace FILE`.

The trace is one JSON object per line, with `hash_ids`: one id for each block of the prompt, where equal ids mean equal
prefixes up to that block (as in Mooncake's FAST'25 traces). Each request has one more token than its blocks. It is
matched, loaded, committed and released, and every copy lands before the next request. Nothing is generated.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterable, Sequence
from itertools import chain, count, islice
from pathlib import Path
from typing import Any

import attrs
import numpy as np
from numpy.typing import NDArray

from aoffload import KVCacheGroup, LazyStore, Ledger, OffloadConfig, SelectiveStore
from aoffload.ledger import Prefix, Root, TransferPlan
from aoffload.plan.replay import land

BLOCK_TOKENS = 16
ROOT = Root("trace")
POLICIES: dict[str, Any] = {
    "off": "off",
    "eager": "eager",
    "lazy": LazyStore(),
    "selective": SelectiveStore(),
}
HEADING = (
    "policy", "device hits", "host hits", "all hits", "stored", "loaded", "copies", "hits per copy", "seconds",
)  # fmt: skip

Tokens = NDArray[np.int32]


def _write_back(ledger: Ledger) -> tuple[TransferPlan, ...]:
    return ledger.write_back.plan() if ledger.writes_back else ()


@attrs.define
class Replay:
    """Results of one trace under one policy, in blocks. Copies are stores and loads."""

    policy: str
    num_device_hits: int = 0
    num_host_hits: int = 0
    num_stored: int = 0
    num_loaded: int = 0
    seconds: float = 0.0

    @property
    def num_hits(self) -> int:
        return self.num_device_hits + self.num_host_hits

    def cells(self) -> tuple[str, ...]:
        copies = self.num_stored + self.num_loaded
        per_copy = f"{self.num_hits / copies:.2f}" if copies else "-"
        counts = (self.num_device_hits, self.num_host_hits, self.num_hits, self.num_stored, self.num_loaded, copies)
        return (self.policy, *(f"{count:,}" for count in counts), per_copy, f"{self.seconds:.1f}")


def read_trace(path: Path, limit: int | None = None) -> list[Tokens]:
    """The prompts: each block's tokens repeat its id, and one more token follows."""
    with path.open() as lines:
        found = [json.loads(line)["hash_ids"] for line in islice(lines, limit)]
    return [_tokens(hash_ids) for hash_ids in found]


def _tokens(hash_ids: Sequence[int]) -> Tokens:
    return np.append(np.repeat(np.array(hash_ids, np.int32), BLOCK_TOKENS), np.int32(0))


def replay(
    name: str,
    policy: Any,
    prompts: Iterable[Tokens],
    num_device: int,
    num_host: int,
    eviction: Any = "lru",
    times: Iterable[float] | None = None,
) -> Replay:
    """Serve `prompts` one after the other, at `times` in seconds; by default, one each second."""
    groups = [KVCacheGroup("full", block_size=BLOCK_TOKENS)]
    config = OffloadConfig(groups=groups, num_host_blocks=num_host, store_policy=policy, eviction=eviction)
    now = 0.0
    ledger, found = Ledger(config, num_device + 1, clock=lambda: now), Replay(name)
    begun = time.perf_counter()
    for prompt, now in zip(prompts, count() if times is None else times, strict=False):  # noqa: B007 - the clock's
        request = ledger.admit(Prefix.of(ROOT, prompt))
        found.num_device_hits += request.match.num_device_tokens // BLOCK_TOKENS
        found.num_host_hits += request.match.num_host_tokens // BLOCK_TOKENS
        ledger.allocate_nowait(request)
        found.num_loaded += land(ledger, ledger.plan_load(request))
        found.num_stored += land(ledger, chain(ledger.commit(request, len(prompt)), _write_back(ledger)))
        found.num_stored += land(ledger, chain(ledger.release(request), _write_back(ledger)))
    found.seconds = time.perf_counter() - begun
    return found


def as_table(replays: Iterable[Replay]) -> str:
    """Aligned columns under a heading."""
    rows = [HEADING, *(replay.cells() for replay in replays)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEADING))]
    return "\n".join(
        "  ".join(cell.ljust(width) if not column else cell.rjust(width) for column, (cell, width) in enumerate(cells))
        for cells in (list(zip(row, widths, strict=True)) for row in rows)
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Replay the trace under each policy, and print the table."""
    parser = argparse.ArgumentParser("python -m benchmarks.policies", description=__doc__.partition("\n")[0])
    parser.add_argument("--trace", type=Path, required=True, help="one JSON object with hash_ids a line")
    parser.add_argument("--device", type=int, default=3000, help="device blocks (%(default)s)")
    parser.add_argument("--host", type=int, default=20_000, help="host blocks (%(default)s)")
    parser.add_argument("--limit", type=int, default=4000, help="so many requests (%(default)s)")
    parser.add_argument("--watermark", type=int, nargs="*", default=(), help="lazy with these watermarks, too")
    given = parser.parse_args(arguments)
    prompts = read_trace(given.trace, given.limit)
    policies = POLICIES | {f"lazy, {size}": LazyStore(size) for size in given.watermark}
    print(f"{len(prompts):,} requests, {sum(len(p) // BLOCK_TOKENS for p in prompts):,} blocks asked for")
    print(as_table(replay(name, policies[name], prompts, given.device, given.host) for name in policies))


if __name__ == "__main__":
    main()
