"""KV events under one topic: vLLM's own, and those of the connector, published by vLLM and read by two routers' rules.

The frames come from vLLM's publisher over ZeroMQ, by its address for missed batches. They are decoded with vLLM's own
structs, and applied by `proof.routers`. What a router has to believe is read from the connector's index and from
vLLM's block pool, with the hashes of vLLM's requests.
"""

from __future__ import annotations

import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from aoffload import Tier
from proof.routers import Block, DynamoRouter, LlmdIndexer

from .bench import OUT, Bench, Scenario, run_part
from .engines import BLOCK_SIZE, Engine
from .models import DENSE, HYBRID, build
from .rows import Row
from .transfers import ours as ours_with

__all__ = ["SCENARIOS"]

SMALL_POOL, SMALLEST_POOL = 70, 34
NUM_HOST_BLOCKS = 100
"""Less than the conversations need: host memory evicts."""
DISK = OUT / "events_disk"
FETCHES_ALL = {"prefill_tokens_per_s": 1, "fetch_timeout_s": 20, "max_fetch_share": 0.5}
POD = "pod-1"
TOPIC = f"kv@{POD}@tiny"
REPLY_MS = 20_000


@dataclass
class Followed:
    """An engine whose events two routers follow."""

    engine: Engine
    replay: Any
    """A socket to the address for missed batches."""
    hashes: dict[tuple[int, ...], bytes] = field(default_factory=dict)
    """vLLM's hash of each block, by all tokens up to its end."""
    dynamo: DynamoRouter = field(default_factory=lambda: DynamoRouter(BLOCK_SIZE))
    llmd: LlmdIndexer = field(default_factory=lambda: LlmdIndexer(BLOCK_SIZE))
    named: set[Block] = field(default_factory=set)
    """The blocks of the connector's events, without any router's rules."""
    seen: Counter[str] = field(default_factory=Counter)
    sources: Counter[str] = field(default_factory=Counter)
    """Tokens of hits by tier, as vLLM heard them."""
    _next: int = 0
    _requests: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        scheduler, connector = self.engine.scheduler, self.engine.connector
        add, hits = scheduler.add_request, connector.get_external_cache_hit_sources

        def adding(request: Any) -> None:
            self._requests.append(request)
            add(request)

        def hitting(request: Any, num_tokens: int) -> Any:
            found = hits(request, num_tokens)
            self.seen["sums"] += sum(found.values()) != num_tokens
            self.sources.update({source.value: number for source, number in found.items()})
            return found

        scheduler.add_request, connector.get_external_cache_hit_sources = adding, hitting

    def read(self) -> None:
        """All batches since the last call."""
        from msgspec import msgpack
        from vllm.distributed.kv_events import KVEventBatch

        decode = msgpack.Decoder(KVEventBatch).decode
        while frames := self._missed():
            for topic, number, payload in frames:
                assert number == self._next, f"batch {number} came for {self._next}"
                self._next += 1
                for event in decode(payload).events:
                    self._note(event)
                self.dynamo.receive([topic, payload])
                self.llmd.receive([topic, payload])

    def _note(self, event: Any) -> None:
        kind, medium = type(event).__name__, getattr(event, "medium", "")
        self.seen[f"{kind} {medium}".strip()] += 1
        if medium and medium != "GPU":
            blocks = {(medium, event.group_idx, one) for one in event.block_hashes}
            self.named = self.named | blocks if kind == "BlockStored" else self.named - blocks

    def _missed(self) -> list[tuple[bytes, int, bytes]]:
        self.replay.send_multipart([b"", self._next.to_bytes(8, "big")])
        found = []
        while self.replay.poll(REPLY_MS):
            _, topic, number, payload = self.replay.recv_multipart()
            if not payload:
                return found
            found.append((topic, int.from_bytes(number, "big"), payload))
        raise RuntimeError("vLLM's publisher does not answer")

    def differences(self, when: str) -> Iterator[str]:
        """What a router believes, and is not so."""
        self.engine.rest()
        self.read()
        wanted = self._cached()
        gpu = {block for block in wanted if block[0] == "GPU"}
        main = {group.number for group in self.engine.connector._event_groups if group.window is None}
        views = [
            (
                "Dynamo",
                self.dynamo.blocks({"GPU": "GPU", "CPU": "CPU", "DISK": "STORAGE"}),
                {(medium, 0, one) for medium, group, one in wanted if group in main},
            ),
            ("a set of our events", self.named, wanted - gpu),
        ]
        if len(main) == len(self.engine.connector._event_groups):
            # vLLM's own events of windows leave blocks out whose tokens they name, which llm-d's keys do not follow.
            tiers = {"gpu": "GPU", "cpu": "CPU", "storage": "STORAGE"}
            views.append(("llm-d", self.llmd.blocks(POD, tiers), wanted))
        for router, view, right in views:
            if view != right:
                wrong = Counter(medium for medium, _, _ in view ^ right)
                yield f"{router} {when}: {dict(wrong)} of {len(right)} blocks are not as they are"
        self.seen["most"] = max(self.seen["most"], len(wanted) - len(gpu))

    def _cached(self) -> set[Block]:
        """The blocks of vLLM's prefix cache, and those that the connector's index has."""
        from vllm.v1.core.kv_cache_utils import get_block_hash, get_group_id, maybe_convert_block_hash

        for request in self._requests:
            tokens = list(request.all_token_ids)
            for at, one in enumerate(request.block_hashes):
                self.hashes[tuple(tokens[: (at + 1) * BLOCK_SIZE])] = one
        pool, ledger = self.engine.scheduler.kv_cache_manager.block_pool, self.engine.connector.ledger
        found = {("GPU", get_group_id(key), maybe_convert_block_hash(get_block_hash(key))) for key in _keys(pool)}
        groups = list(zip(self.engine.connector._event_groups, ledger.layout.places, strict=True))
        for run in ledger.cache.index.runs.values():
            tokens = [token for one in run.whole_path() for token in memoryview(bytes(one.tokens)).cast("i")]
            for part in run.parts:
                medium = {Tier.HOST: "CPU", Tier.DISK: "STORAGE"}.get(part.tier)
                numbers = [group.number for group, (component, _) in groups if component == part.component]
                for unit in range(part.first, part.stop) if medium and part.blocks else ():
                    one = self.hashes[tuple(tokens[: (unit + 1) * BLOCK_SIZE])]
                    found |= {(medium, number, maybe_convert_block_hash(one)) for number in numbers}
        return found


def _keys(pool: Any) -> list[Any]:
    """The hashes of vLLM's prefix cache."""
    return [block.block_hash for block in pool.blocks if block.block_hash is not None]


@contextmanager
def followed(bench: Bench, num_blocks: int, **extra: Any) -> Iterator[Followed]:
    import zmq
    from vllm.config import KVEventsConfig

    folder = tempfile.mkdtemp(prefix="aoffload")
    endpoint, replay = (f"ipc://{folder}/{name}" for name in ("events", "replay"))
    events = KVEventsConfig(
        enable_kv_cache_events=True, publisher="zmq", endpoint=endpoint, replay_endpoint=replay, topic=TOPIC
    )
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    try:
        with bench.engine(num_blocks, ours_with(**extra), kv_events_config=events) as engine:
            socket.connect(replay)
            yield Followed(engine, socket)
            engine.scheduler.kv_event_publisher.shutdown()
    finally:
        socket.close(linger=0)
        context.term()
        shutil.rmtree(folder, ignore_errors=True)


def _row(bench: Bench, name: str, told: Followed, problems: list[str]) -> Row:
    seen, served = told.seen, told.engine.rest()
    at_most, dropped = f"{seen['most']} blocks at most below the GPU", told.dynamo.dropped + told.llmd.dropped
    kinds = ", ".join(f"{seen[kind]} {kind}" for kind in sorted(seen) if kind[0].isupper())
    row = bench.judge(name, served, f"{at_most}; {kinds}; hits by tier: {dict(told.sources)}")
    return row.missed(
        *problems,
        f"dropped by a router: {dict(dropped)}" if dropped else "",
        "" if not seen["sums"] else "hits by tier do not add up",
    )


def evictions_and_resets(bench: Bench) -> Row:
    """Conversations through a small pool and a small host memory; then the resets of either cache and of both."""
    problems: list[str] = []
    with followed(bench, SMALL_POOL, host_bytes=None, num_host_blocks=NUM_HOST_BLOCKS) as told:
        for turn in range(bench.talks.num_turns):
            told.engine.serve(bench.turn(turn), bench.talks.num_new_tokens)
            problems += told.differences(f"after turn {turn}")
        num_evicted = told.seen["BlockRemoved CPU"]
        for name, reset in (
            ("vLLM's reset", told.engine.forget),
            ("both resets", lambda: told.engine.engine.reset_prefix_cache(reset_connector=True)),
        ):
            reset()  # vLLM publishes this one with the next step
            told.engine.serve({name: bench.turn(0)[min(bench.turn(0))]})
            del told.engine.served.answers[name]
            problems += told.differences(f"after {name}")
        row = _row(bench, "events: evictions and resets", told, problems)
    return row.missed("" if num_evicted else "host memory has evicted nothing")


def preemption(bench: Bench) -> Row:
    """A pool so small that running requests take blocks from each other."""
    problems: list[str] = []
    prompts = bench.turn(0)
    with bench.engine(200) as engine:
        engine.serve(prompts, 96)
        reference = engine.rest()
    with followed(bench, SMALLEST_POOL) as told:
        told.engine.serve(prompts, 96)
        problems += told.differences("after preemptions")
        row = _row(Bench(bench.model, reference=reference), "events: preemption", told, problems)
        number = told.engine.served.num_preemptions
    return row.missed("" if number else "nothing was preempted")


def disk(bench: Bench) -> Row:
    """Host memory holds a part of the conversations, a disk all of them: both have events, and vLLM hears which hits
    came from where."""
    shutil.rmtree(DISK, ignore_errors=True)
    problems: list[str] = []
    below = {"path": str(DISK.resolve()), "size": "64MiB"}
    with followed(
        bench, SMALL_POOL, host_bytes=None, num_host_blocks=NUM_HOST_BLOCKS, disk=below, **FETCHES_ALL
    ) as told:
        for turn in range(bench.talks.num_turns):
            told.engine.serve(bench.turn(turn), bench.talks.num_new_tokens)
            problems += told.differences(f"after turn {turn}")
        row = _row(bench, "events: a disk", told, problems)
    return row.missed(
        "" if told.seen["BlockStored STORAGE"] else "the disk has no events",
        "" if told.sources["disk"] and told.sources["host"] else "no hits of both tiers",
    )


def windows(bench: Bench) -> Row:
    """A model with two groups: each has events under vLLM's number, and Dynamo reads those of full attention."""
    problems: list[str] = []
    hybrid = Bench(build(dict(HYBRID), OUT / "hybrid"), prompts=bench.prompts, talks=bench.talks)
    with followed(hybrid, 2 * SMALL_POOL - 30, host_bytes=None, num_host_blocks=2 * NUM_HOST_BLOCKS) as told:
        for turn in range(bench.talks.num_turns):
            told.engine.serve(hybrid.turn(turn), bench.talks.num_new_tokens)
            problems += told.differences(f"after turn {turn}")
        served, seen = told.engine.rest(), told.seen
        row = Row("events: windows", took_s=served.took_s, found=f"{seen['most']} blocks at most below the GPU")
    dropped = set(told.dynamo.dropped) - {"sliding_window"}
    return row.missed(*problems, *served.problems, f"Dynamo drops {dropped}" if dropped else "")


SCENARIOS = (
    Scenario("events", evictions_and_resets, is_short=True),
    Scenario("preemption", preemption),
    Scenario("disk", disk, is_short=True),
    Scenario("windows", windows),
)

if __name__ == "__main__":
    run_part(DENSE, SCENARIOS)
