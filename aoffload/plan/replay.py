"""Replays a trace through a `Ledger`, for eviction orders that depend on more than the last use, so that stack
distances do not apply.

Requests run one after the other. Each block of the trace becomes a block of two tokens, so that a prompt can have a
partial block after its last whole one. Every copy lands at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Any

import attrs
import numpy as np

from .._common.prefix import Prefix, Root
from .._config.config import OffloadConfig
from .._config.groups import KVCacheGroup
from .._config.quotas import Quotas
from .._extensions.assembly import Ledger
from .._host_cache.host_cache import HostCache
from .._kernel.plans import Completion, TransferPlan
from .._kernel.records import LedgerRequest
from .._kernel.states import Outcome
from .distances import Counts
from .trace import Blocks, Trace, TracedRequest

ROOT, BLOCK_SIZE = Root("plan"), 2
HINTS = ("none", "stop", "returns")
"""Where hints come from: there are none, the reason why the answer ended, or the time of the return."""


@attrs.frozen
class Predicted:
    """A hint at the end of a request."""

    in_s: float | None = None
    """Seconds until the prompt returns, from the beginning of the request on; infinite if it does not return. None: the
    hint predicts no time."""
    category: str = ""


def predictions(trace: Trace, source: str) -> list[Predicted | None]:
    """A hint for each request. Empty for "none". Requests without the field that `source` reads have no hint."""
    if source == "stop":
        return [Predicted(category=each.stop) if each.stop else None for each in trace.requests]
    if source == "returns":
        return [None if each.returns_s is None else Predicted(each.returns_s) for each in trace.requests]
    return []


@attrs.define(eq=False)
class Replay:
    device: Counts
    """Blocks that each request hits on the device."""
    host: Counts
    """Blocks that it hits in host memory, after those on the device."""
    num_stored: int = 0


def replay(
    trace: Trace,
    num_device: int,
    num_host: int,
    *,
    store: Any = "eager",
    eviction: Any = "lru",
    hints: Sequence[Predicted | None] = (),
    quotas: Quotas | None = None,
    begins: Callable[[int], object] | None = None,
) -> Replay:
    """Serve the whole trace. A request that does not fit the device is left out, and hits nothing. `hints`: for each
    request, what it predicts at its end; only with learned eviction. `quotas`: by tenant of the trace, with blocks for
    bytes. `begins` is called with the number of each request that begins."""
    most = 2 * (trace.num_blocks + trace.most_blocks + 1)  # with more, nothing is evicted, nor about to be
    if quotas is not None and num_host > most:  # so floors have no effect, but may be above `most`
        quotas = Quotas({salt: attrs.evolve(quota, host_floor=None) for salt, quota in quotas.salts.items()})
    num_device, num_host = min(num_device, most), min(num_host, most)
    groups = [KVCacheGroup("trace", block_size=BLOCK_SIZE)]
    config = OffloadConfig(
        groups=groups, num_host_blocks=num_host, store_policy=store, eviction=eviction, quotas=quotas
    )
    roots = {None: ROOT} | {tenant: Root(ROOT.namespace, tenant) for tenant in trace.tenants}
    now = 0.0
    ledger, size = Ledger(config, num_device + 1, clock=lambda: now), len(trace.requests)
    found = Replay(np.zeros(size, np.int64), np.zeros(size, np.int64))
    for number, request in enumerate(trace.requests):
        if len(request.blocks) >= num_device:
            continue
        now = request.at_s
        if begins is not None:
            begins(number)
        tokens = _tokens(trace, request)
        num_prompt_tokens = request.num_prompt_blocks * BLOCK_SIZE + 1
        record = ledger.admit(Prefix.of(roots[request.tenant], tokens[:num_prompt_tokens]))
        ledger.allocate_nowait(record)
        found.device[number] = record.match.num_device_tokens // BLOCK_SIZE
        found.host[number] = record.match.num_host_tokens // BLOCK_SIZE
        found.num_stored += _serve(ledger, record, tokens, hints[number] if hints else None)
    return found


def _tokens(trace: Trace, request: TracedRequest) -> Blocks:
    """The tokens of its blocks, and one more, because a request computes at least one. That token's block stays
    private, like a block that is not full."""
    return np.append(np.repeat(request.blocks, BLOCK_SIZE), np.int32(trace.num_blocks))


def _serve(ledger: Ledger, record: LedgerRequest, tokens: Blocks, hint: Predicted | None) -> int:
    """Load and compute it, the prompt at once and its answer block by block, and release it. Returns the number of
    stored blocks."""
    land(ledger, ledger.plan_load(record))
    computed = record.sequence.num_tokens
    num_stored = land(ledger, chain(ledger.commit(record, computed), _write_back(ledger)))
    while computed < len(tokens):
        before, computed = computed, computed + BLOCK_SIZE
        ledger.extend_nowait(record, computed)
        plans = ledger.commit(record, computed, tokens[before:computed])
        num_stored += land(ledger, chain(plans, _write_back(ledger)))
    if hint is not None:
        prefix = Prefix.of(record.sequence.root, tokens[:computed])
        if hint.in_s == math.inf:
            ledger.eviction.done(prefix, category=hint.category)
        else:
            ledger.eviction.returns(prefix, in_s=hint.in_s, category=hint.category)
    return num_stored + land(ledger, chain(ledger.release(record), _write_back(ledger)))


def _write_back(ledger: Ledger) -> tuple[TransferPlan, ...]:
    return ledger.write_back.plan() if ledger.writes_back else ()


def land(ledger: Ledger | HostCache, plans: Iterable[TransferPlan]) -> int:
    """Copy at once. Returns the number of copied blocks."""
    num_blocks = 0
    for plan in tuple(plans):
        ledger.launch(plan.job_id)
        ledger.settle(Completion(plan.job_id, Outcome.LANDED))
        num_blocks += plan.num_blocks
    return num_blocks
