"""The planner: its time, the cost of recording, and the error of its forecasts, compared with measurements.

`TRACE=FILE` and `SYNTHETIC=FILE` name traces to plan and to replay through the ledger. Without one, its rows are left
out.
"""

from __future__ import annotations

import io
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from itertools import count
from operator import attrgetter
from pathlib import Path
from tempfile import TemporaryDirectory

import anyio
import attrs
import numpy as np

from aoffload import LazyStore, Ledger, OffloadConfig
from aoffload._common.commands import ProgressLine
from aoffload._reference.engine.sequence import Generation
from aoffload.demo.command import _prepare
from aoffload.demo.interrupt import Progress
from aoffload.demo.options import DemoOptions
from aoffload.demo.outcome import DemoOutcome, RunOutcome
from aoffload.demo.runner import Runner, run_kinds
from aoffload.demo.workload import ENGINE
from aoffload.plan import Recorder
from aoffload.plan.forecast import Forecast, Sizes, Speeds
from aoffload.plan.report import as_text
from aoffload.plan.trace import read_trace

from .cycle import BLOCK_SIZE, Tokens
from .harness import Row, Sample
from .peer import Peer
from .policies import read_trace as read_prompts
from .policies import replay
from .pools import ONE_GROUP, serve

__all__ = ["run"]

NUM_ACCESSES = 1_000_000
WANTED_S = 5.0
NUM_DEVICE = 3000
HOST_SIZES = (1000, 2500, 5000, 10_000, 20_000, 40_000)
KV_BYTES, BLOCK_TOKENS = 1024, 512
BLOCK_BYTES = KV_BYTES * BLOCK_TOKENS
POLICIES = (("eager", "lru", "eager", 0.001), ("lazy", "lru", LazyStore(), 0.01), ("eager", "learned", "eager", 0.01))
"""Names of stores and eviction, policy of the replay, and the permitted error of the planned hits."""
SIZES = Sizes(KV_BYTES, NUM_DEVICE * BLOCK_BYTES, tuple(size * BLOCK_BYTES for size in HOST_SIZES))
PREFILL_TOKENS_PER_S = 25_000
RECORDED = (1024, 8192)
NUM_RECORDED, NUM_ROUNDS = 1000, 5
MOST_OF_A_REQUEST = 0.02
MOST_OF_FIRST_TOKEN = 0.2


def run(vllm: Peer | None = None) -> Iterator[Row]:
    with TemporaryDirectory() as directory:
        at = Path(directory)
        yield _takes(at)
        yield from _against_replays()
        for number in RECORDED:
            yield _records(at, number)
        yield _first_tokens(at)


def _row(name: str, value: float, unit: str, against: str, limit: float, ratio: float, wanted: float) -> Row:
    return Row(
        name=name, value=value, unit=unit, against=against, limit=limit, ratio=ratio, wanted=wanted, is_at_most=True
    )


# -- planning time -----------------------------------------------------------------------------------------------------


def _takes(at: Path) -> Row:
    """CPU time from the file to the table, for six sizes of host memory."""
    path = at / "large.jsonl"
    path.write_text("\n".join(_large(NUM_ACCESSES)))
    begun = time.process_time()
    trace = read_trace(path)
    lines = list(as_text(Forecast(trace, SIZES)))
    took = time.process_time() - begun
    assert trace.num_asked >= NUM_ACCESSES and len(lines) > len(HOST_SIZES)
    name = f"plan of {trace.num_asked:,} block accesses, six sizes"
    return _row(name, took, "s", "its aim", WANTED_S, took, WANTED_S)


def _large(num_accesses: int) -> Iterator[str]:
    """Conversations that grow from turn to turn. Some stop, and others begin."""
    draw, ids, talks, asked = random.Random(0), count(), list[list[int]](), 0
    for number in count():
        if asked >= num_accesses:
            return
        if len(talks) < 500 or draw.random() < 0.25:
            talks.append([0, *(next(ids) + 1 for _ in range(draw.randint(4, 30)))])
        place = int(len(talks) * draw.random() ** 2)
        talk = talks[place]
        talk += [next(ids) + 1 for _ in range(draw.randint(0, 4))]
        asked += len(talk)
        about = {"timestamp": number * 300, "input_length": len(talk) * BLOCK_TOKENS, "output_length": 300}
        yield json.dumps({**about, "hash_ids": talk})
        if len(talk) > 80:
            del talks[place]


# -- accuracy ----------------------------------------------------------------------------------------------------------


def _against_replays() -> Iterator[Row]:
    for variable in ("TRACE", "SYNTHETIC"):
        if (named := os.environ.get(variable)) is None:
            print(f"plan: {variable}=FILE names a trace to plan and to replay", file=sys.stderr)
            continue
        trace, prompts = read_trace(Path(named)), read_prompts(Path(named))
        for store, eviction, policy, wanted in POLICIES:
            forecast = Forecast(trace, SIZES, stores=(store,), evictions=(eviction,))
            planned = [row.num_hit_blocks for row in forecast.rows if row.name == "host"]
            times = [request.at_s for request in trace.requests]
            replayed = [
                replay(store, policy, prompts, NUM_DEVICE, size, eviction, times).num_hits for size in HOST_SIZES
            ]
            name = f"{variable.lower()}, {store}, {eviction}"
            print(f"plan: {name}, planned {planned}, replayed {replayed}", file=sys.stderr)
            worst = max(abs(one / other - 1) for one, other in zip(planned, replayed, strict=True))
            yield _row(f"hits planned, {name}, worst of six sizes", 100 * worst, "% off", "replay", 0.0, worst, wanted)


# -- cost of recording -------------------------------------------------------------------------------------------------


def _records(at: Path, num_tokens: int) -> Row:
    """CPU time of both threads that recording adds to a request, compared with computing its tokens."""
    tokens = np.random.default_rng(0).integers(0, 100_000, num_tokens, dtype=np.int32)
    found: dict[str, list[Sample]] = {"without": [], "with": []}
    for number in range(NUM_ROUNDS):
        found["without"].append(_serves(tokens, None))
        with Recorder(at / f"{num_tokens}-{number}.jsonl") as recorder:
            found["with"].append(_serves(tokens, recorder))
        assert recorder.num_dropped == 0 and recorder.failure is None
    both, here = (
        statistics.median(getattr(one, name) for one in found["with"])
        - statistics.median(getattr(one, name) for one in found["without"])
        for name in ("wall_s", "cpu_s")
    )
    print(f"plan: {1e6 * here:.1f} us of it in the ledger's thread", file=sys.stderr)
    computing = num_tokens / PREFILL_TOKENS_PER_S
    against, name = f"{PREFILL_TOKENS_PER_S:,} tokens/s", f"recording a request of {num_tokens:,} tokens"
    return _row(name, both * 1e6, "us", against, computing * 1e6, both / computing, MOST_OF_A_REQUEST)


def _serves(tokens: Tokens, recorder: Recorder | None) -> Sample:
    """CPU seconds of a request: of the whole process, as `wall_s`, and of this thread."""
    config = OffloadConfig(groups=ONE_GROUP, num_host_blocks=0)
    ledger = Ledger(config, len(tokens) // BLOCK_SIZE + 2, observer=recorder)
    here, all_ = time.thread_time(), time.process_time()
    for _ in range(NUM_RECORDED):
        serve(ledger, tokens)
    here = time.thread_time() - here
    if recorder is not None:
        recorder.close()
    return Sample((time.process_time() - all_) / NUM_RECORDED, here / NUM_RECORDED)


# -- time to the first token -------------------------------------------------------------------------------------------


def _first_tokens(at: Path) -> Row:
    """The demo with offload, compared with the plan of its requests, at the measured speeds of the demo."""
    options, path = DemoOptions(), at / "demo.jsonl"
    outcome = DemoOutcome(options)
    runner = _prepare(options, outcome, Progress(ProgressLine(io.StringIO())), None)
    with Recorder(path, block_tokens=ENGINE.block_size) as runner.recorder:
        anyio.run(_demo, runner)
    result = outcome.runs[-1]
    generations = sorted(result.generations.values(), key=attrgetter("arrived_s"))
    measured = statistics.median(one.first_token_s - one.arrived_s for one in generations)
    planned = _planned(path, result, generations)
    name = "time to first token of the demo, planned, p50"
    return _row(name, planned, "s", "measured", measured, abs(planned / measured - 1), MOST_OF_FIRST_TOKEN)


async def _demo(runner: Runner) -> None:
    """The reference run comes first, because its answers are in the prompts of the other."""
    assert runner.outcome.pools is not None
    reference, _, with_offload = run_kinds(runner.outcome.pools, runner.outcome.options)
    for kind in (reference, with_offload):
        await runner.run(kind, 0.0)


def _planned(path: Path, result: RunOutcome, generations: Sequence[Generation]) -> float:
    trace = read_trace(path)
    asked = zip(trace.requests, generations, strict=True)
    requests = tuple(attrs.evolve(one, num_output_tokens=len(each.token_ids)) for one, each in asked)
    token_bytes = result.block_bytes // ENGINE.block_size
    device, host = (
        number * result.block_bytes for number in (result.kind.num_device_blocks, result.kind.num_host_blocks)
    )
    sizes = Sizes(token_bytes, device, (host,))
    forecast = Forecast(attrs.evolve(trace, requests=requests), sizes, _speeds(generations))
    times = forecast.rows[2].first_token
    assert times is not None
    return times.p50_s


def _speeds(generations: Sequence[Generation]) -> Speeds:
    """Speeds of prompts and answers, scaled so that all of them together take the time of the run, which was never
    idle."""
    prompts = sum(one.first_token_s - one.admitted_s for one in generations)
    answers = sum(one.finished_s - one.first_token_s for one in generations)
    lasted = max(one.finished_s for one in generations) - min(one.arrived_s for one in generations)
    share = lasted / (prompts + answers)  # some were computed at the same time
    return Speeds(
        prefill_tokens_per_s=sum(one.num_computed_tokens for one in generations) / (prompts * share),
        decode_tokens_per_s=sum(len(one.token_ids) for one in generations) / (answers * share),
        host_gbs=1.0,
        disk_gbs=1.0,
    )
