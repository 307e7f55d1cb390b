"""Scenarios with Qwen3-Next: three layers with a recurrent state, and one that attends to everything.

vLLM's CPU kernels of these layers need bfloat16. There, outputs depend on how prompts are batched, so one request runs
at a time. A hit computes again from a place where the reference has ended a chunk, too.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from .bench import LARGE_POOL, Bench, Scenario, Talks, run_part
from .engines import Engine, Served
from .models import QWEN3_NEXT
from .outputs import digest
from .prompts import users
from .rows import Row
from .transfers import PEER, faulty
from .transfers import ours as of_tiers

__all__ = ["SCENARIOS"]

POOL = 36
"""There are four groups, so a token takes four times as many blocks as with one. Each turn evicts the one before."""
NUM_USERS, NUM_SHARED = 5, 640
QUESTION = range(100, 200)
NAME = "states: "
TALKS = Talks(number=4, num_turns=4)
DISK = Path("build/vllm/states_disk")
NUM_HOST_BLOCKS = 40
WARM = 0.5
"""Of the prompt tokens of a second engine, at least so many are cached."""


def ours(bench: Bench) -> Row:
    """It has to find all that a large pool finds."""
    with bench.engine(POOL, faulty("Counted", verify=True)) as engine:
        served, transport = bench.talk(engine, rests=True), engine.worker_connector.transport
    row = bench.judge(f"{NAME}a small pool, aoffload", served, f"{transport.blocks_loaded:,} blocks loaded")
    found, wanted = served.num_cached_tokens, bench.reference.num_cached_tokens
    return row.missed(
        f"{found:,} tokens cached, of {wanted:,}" if found < wanted else "",
        "" if transport.blocks_loaded else "nothing was loaded",
    )


def without(bench: Bench) -> Row:
    """What a pool of this size hits by itself."""
    with bench.engine(POOL) as engine:
        return _same_tokens(bench, f"{NAME}a small pool, without offload", bench.talk(engine))


def _same_tokens(bench: Bench, name: str, served: Served, found: str = "") -> Row:
    """For runs that end chunks of a prompt at other places than the reference: log-probabilities differ in bfloat16."""
    row = bench.judge(name, served, found, may_differ=True)
    return row.missed("" if row.digest == digest(bench.reference.answers) else "other tokens than the reference")


def shared(bench: Bench) -> Row:
    """Users of a system prompt, whose blocks vLLM forgets before the next one comes. The second user shows where the
    system prompt ends, and leaves a state there. From the third one on, all of it has to hit."""
    prompts = users(NUM_USERS, NUM_SHARED, QUESTION)
    reference = _one_by_one(bench, prompts)
    served = _one_by_one(bench, prompts, faulty("Counted", verify=True))
    hits, theirs = (
        [found.answers[name].num_cached_tokens for name in prompts]
        for found in (served, _one_by_one(bench, prompts, PEER))
    )
    about = f"by user {' '.join(map(str, hits))}; the peer finds {' '.join(map(str, theirs))}"
    row = Bench(bench.model, reference=reference).judge(f"{NAME}{NUM_USERS} users of a system prompt", served, about)
    return row.missed("" if hits == [0, 0, *[NUM_SHARED] * (NUM_USERS - 2)] else "other hits than the system prompt")


def _one_by_one(bench: Bench, prompts: dict[str, list[int]], transfer: Any = None) -> Served:
    with bench.engine(LARGE_POOL, transfer) as engine:
        for name, prompt in prompts.items():
            engine.serve({name: prompt})
            engine.rest()
            engine.forget()
        return engine.rest()


def all_fail(bench: Bench) -> Row:
    with bench.engine(POOL, faulty("AllFail")) as engine:
        served, transport = bench.talk(engine, rests=True), engine.worker_connector.transport
    row = _same_tokens(bench, f"{NAME}every load fails", served, f"{transport.num_failed_loads} loads failed")
    return row.missed("" if transport.num_failed_loads else "nothing was loaded")


def half_fail(bench: Bench) -> Row:
    """The first half of each load comes, and not its state."""
    with bench.engine(POOL, faulty("HalfFail")) as engine:
        served, transport = bench.talk(engine, rests=True), engine.worker_connector.transport
    row = _same_tokens(bench, f"{NAME}every load fails half-way", served, f"{transport.num_failed_loads} loads failed")
    return row.missed("" if transport.num_failed_loads else "nothing was loaded")


def disk(bench: Bench) -> Row:
    """Host memory holds a part of the conversations. A second engine takes their last turn up from the disk that the
    first one has left, with the same tokens."""
    path, last = DISK.resolve(), TALKS.num_turns - 1
    shutil.rmtree(path, ignore_errors=True)
    transfer = of_tiers(host_bytes=None, num_host_blocks=NUM_HOST_BLOCKS, max_fetch_share=0.5, disk={
        "path": str(path), "size": "64MiB",
    })  # fmt: skip
    with bench.engine(POOL, transfer) as engine:
        served = bench.talk(engine, rests=True)
    with bench.engine(POOL, transfer) as engine:
        engine.rest()
        engine.serve(bench.turn(last), TALKS.num_new_tokens)
        again = engine.rest()
    expected = {name: bench.reference.answers[name] for name in again.answers}
    warm = again.num_cached_tokens / again.num_prompt_tokens
    row = _same_tokens(bench, f"{NAME}a disk", served, f"{warm:.0%} of the second engine's prompt tokens cached")
    return row.missed(
        "" if digest(again.answers) == digest(expected) else "the second engine has other tokens",
        "" if warm >= WARM else "the second engine did not start warm", *again.problems,
    )  # fmt: skip


def lost(bench: Bench) -> Row:
    """The states in host memory are zeroed, and nothing checks them: outputs have to hang on them."""
    with bench.engine(POOL, faulty("Counted")) as engine:
        for turn in range(TALKS.num_turns):
            engine.serve(bench.turn(turn), TALKS.num_new_tokens)
            engine.rest()
            if turn == TALKS.num_turns - 2:
                num_zeroed = _zero_states(engine)
        served = engine.rest()
    row = bench.judge(
        f"{NAME}states are zeroed: outputs have to differ", served, f"{num_zeroed} blocks zeroed", may_differ=True
    )
    return row.missed("" if "differ" in row.outputs else "the outputs do not hang on the states")


def _zero_states(engine: Engine) -> int:
    """Zero the states in host memory. Returns the number of their blocks."""
    from aoffload import Tier

    ledger, host = engine.connector.ledger, engine.worker_connector.transport.inner.backend._host
    (state,) = [each for each in ledger.layout.components if each.number]
    parts = (run.part(Tier.HOST, state.number) for run in ledger.cache.index.runs.values())
    ids = [block_id for part in parts for block_id in part.blocks]
    host[ids] = 0
    return len(ids)


def preemption(bench: Bench) -> Row:
    """A pool so small that running requests take blocks from each other. Every load is verified."""
    prompts = {name: prompt for name, prompt in bench.prompts.items() if name.endswith(".0")}
    with bench.engine(200, max_num_seqs=4) as engine:
        engine.serve(prompts, 200)
        reference = engine.rest()
    with bench.engine(40, faulty("Counted", verify=True), max_num_seqs=4) as engine:
        engine.serve(prompts, 200)
        served, off = engine.rest(), engine.connector.off_reason
    row = Bench(bench.model, reference=reference).judge(
        f"{NAME}preemption", served, f"{served.num_preemptions} preemptions in a pool of 39 blocks", may_differ=True
    )
    return row.missed(off, "" if served.num_preemptions else "nothing was preempted")


SCENARIOS = (
    Scenario("without", without),
    Scenario("ours", ours, is_short=True),
    Scenario("shared", shared, is_short=True),
    Scenario("every load fails", all_fail, is_short=True),
    Scenario("half", half_fail),
    Scenario("disk", disk, is_short=True),
    Scenario("zeroed", lost, is_short=True),
    Scenario("preemption", preemption, is_short=True),
)

if __name__ == "__main__":
    run_part(QWEN3_NEXT, SCENARIOS, TALKS, dtype="bfloat16", max_num_seqs=1)
