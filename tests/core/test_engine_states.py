"""An engine that owns its blocks, with recurrent layers: a hit ends at a checkpoint, and KV may go further."""

from __future__ import annotations

from engine_driving import BLOCK, EngineDriven

from aoffload import KVCacheGroup
from aoffload._config.groups import RecurrentState

GROUPS = [KVCacheGroup("full", block_size=BLOCK), KVCacheGroup("state", RecurrentState(), block_size=BLOCK)]


def engine_with(checkpoint: int) -> EngineDriven:
    """An engine that has computed tokens 0 to 20, and has offered the state after `checkpoint` blocks alone."""
    driven = EngineDriven(64, groups=GROUPS)
    tokens = list(range(21))
    request, (full, states) = driven.admit(tokens), driven.fresh(20)
    offered = [block_id if at == checkpoint - 1 else 0 for at, block_id in enumerate(states)]
    plans = driven.ledger.offer(request, 20, [full, offered], is_last=True)
    assert {block_id for plan in plans for block_id in plan.source_ids} == {*full, *filter(None, offered)}
    driven.compute(tokens, [full, offered])
    driven.land(driven.launch(plans))
    driven.ledger.release(request)
    return driven


def test_a_branch_is_where_kv_goes_further_than_the_checkpoint() -> None:
    """A prompt shares three blocks of KV, and the only checkpoint lies after five: nothing hits, and the next
    checkpoint belongs after three."""
    driven = engine_with(checkpoint=5)
    request = driven.admit([*range(12), *range(50, 62)])
    assert request.match.num_tokens == 0
    assert driven.ledger.branch(request) == 3 * BLOCK


def test_a_hit_that_has_all_kv_has_no_branch() -> None:
    driven = engine_with(checkpoint=5)
    request = driven.admit(list(range(30)))
    assert request.match.num_tokens == 5 * BLOCK
    assert driven.ledger.branch(request) == 0
