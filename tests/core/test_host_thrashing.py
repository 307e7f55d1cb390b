"""A host that is smaller than the KV of live requests: evicted blocks are stored again once, not at every commit."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from driving import BLOCK, Driven, prompt
from engine_driving import EngineDriven, Seen

from aoffload.ledger import Outcome, TransferPlan

NUM_BLOCKS = 8
NUM_REQUESTS = 3
PROMPT = 4 * BLOCK
WHOLE = NUM_BLOCKS * BLOCK


def new_tokens(name: int, stop: int) -> list[int]:
    """The last token before `stop`, which a step has sampled."""
    return prompt(name, stop)[-1:]


def decoded_together(driven: Driven) -> Iterator[TransferPlan]:
    """Requests that together hold more than the host, a token of each in turn; then their ends."""
    live = [driven.running(prompt(name, PROMPT)) for name in range(NUM_REQUESTS)]
    for request in live:
        driven.ledger.extend_nowait(request, WHOLE)
    for stop in range(PROMPT, WHOLE + 1):
        for name, request in enumerate(live):
            yield from driven.commit(request, stop, new_tokens(name, stop) if stop > PROMPT else ())
    for request in live:
        yield from driven.release(request)


def offered_together(driven: EngineDriven) -> Iterator[TransferPlan]:
    """The same with an engine's blocks, one of which is offered at every token."""
    live = [(driven.admit(prompt(name, PROMPT)), driven.fresh(WHOLE)) for name in range(NUM_REQUESTS)]
    for request, _ in live:
        driven.load(request)
    for stop in range(PROMPT, WHOLE + 1):
        for name, (request, tables) in enumerate(live):
            driven.compute(prompt(name, stop), tables)
            new = new_tokens(name, stop) if stop > PROMPT else ()
            yield from driven.offer(request, stop, tables, new, is_last=stop == WHOLE)
    for request, _ in live:
        driven.release(request)


@pytest.mark.parametrize("num_host", [NUM_BLOCKS, 2 * NUM_BLOCKS])
@pytest.mark.parametrize("is_engines", [False, True], ids=["blocks of ours", "blocks of an engine"])
def test_nothing_is_stored_again_and_again(num_host: int, is_engines: bool) -> None:
    """Else each of them would evict all others at every commit. Two copies of a block are the most, one of them at the
    end of the request; what is skipped is told."""
    seen = Seen()
    driven: Driven | EngineDriven
    if is_engines:
        driven = EngineDriven(num_host, observer=seen)
        plans = offered_together(driven)
    else:
        driven = Driven(NUM_REQUESTS * NUM_BLOCKS, num_host, observer=seen)
        plans = decoded_together(driven)
    num_stored = 0
    for plan in plans:
        num_stored += plan.num_blocks
        driven.land([plan])
    assert num_stored <= 2 * NUM_REQUESTS * NUM_BLOCKS
    assert any(reason == "evicted" for _, reason in seen.skipped)


@pytest.mark.parametrize("num_landed", [0, 2])
def test_the_last_commit_stores_what_was_evicted_meanwhile(num_landed: int) -> None:
    """Its end is the last chance: a later prompt finds all of it, also where the first copy of it had failed."""
    driven = Driven(4 * NUM_BLOCKS, NUM_BLOCKS)
    request = driven.running(prompt(1, PROMPT))
    driven.ledger.extend_nowait(request, WHOLE)
    (first,) = driven.launch(driven.commit(request, PROMPT))
    driven.end(first, Outcome.FAILED, num_landed)
    driven.serve(prompt(2, WHOLE))
    driven.serve(prompt(3, WHOLE))
    stop = PROMPT + BLOCK
    assert driven.commit(request, stop, prompt(1, stop)[PROMPT:]) == [], "the host evicts"
    driven.land(driven.release(request))
    driven.evict_device()
    assert driven.hit(prompt(1, stop + 1)) == (0, stop)


def test_a_copy_that_failed_is_offered_again_while_the_host_keeps_all() -> None:
    """Nothing was evicted, so nothing is lost by another try."""
    driven = Driven(4 * NUM_BLOCKS, 2 * NUM_BLOCKS)
    request = driven.running(prompt(1, PROMPT))
    driven.ledger.extend_nowait(request, WHOLE)
    (first,) = driven.launch(driven.commit(request, PROMPT))
    driven.end(first, Outcome.FAILED)
    stop = PROMPT + BLOCK
    (again,) = driven.commit(request, stop, prompt(1, stop)[PROMPT:])
    assert again.num_blocks == stop // BLOCK
