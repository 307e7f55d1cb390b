"""An engine with a prefix cache of its own over a `HostCache`, and the KV events of both, as vLLM publishes them.

Random calls: prompts with salts, adapters and images come, hit, load, compute, store and leave; copies end well or
badly; blocks go to a disk and come back; the engine evicts; either cache, or both, are reset. The engine's own blocks
have events as vLLM's block pool makes them. What is cached is read from the index, and hashed from the first token on.
"""

from __future__ import annotations

import hashlib
import random
from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import cached_property
from types import SimpleNamespace
from typing import Any, ClassVar

import msgspec
from disk_driving import disk_of

from aoffload import (
    ChunkedLocal,
    FullAttention,
    HostCache,
    KeySpan,
    KVCacheGroup,
    OffloadConfig,
    RequestState,
    SlidingWindow,
    Tier,
)
from aoffload._kernel.records import Run
from aoffload._observe.kv_events.events import MEDIA, EventGroup
from aoffload._observe.kv_events.format import EventEncoder
from aoffload._vllm.kv_events import RouterEvents
from aoffload.ledger import Completion, Outcome, Prefix, Root, TransferPlan
from proof.routers import Block, DynamoRouter, LlmdIndexer

UNIT = 4
POD, MODEL = "pod-1", "m"
TOPIC = f"kv@{POD}@{MODEL}".encode()
GROUPS = {
    "one group": [KVCacheGroup("full", block_size=UNIT)],
    "windows": [KVCacheGroup("full", block_size=UNIT), KVCacheGroup("near", SlidingWindow(6), UNIT)],
    "block sizes": [KVCacheGroup("far", FullAttention(), UNIT), KVCacheGroup("local", ChunkedLocal(8), UNIT // 2)],
}
KINDS = {FullAttention: "full_attention", SlidingWindow: "sliding_window", ChunkedLocal: "chunked_local_attention"}
ADAPTERS = [None, None, ("tenant", "w1"), ("tenant", "w2"), ("other", "w3")]
"""Name and weights. One name may get other weights."""
SALTS = [None, None, "dynamo-cache-salt:a"]
Event = dict[str, Any]


class Prompt:
    """A request as vLLM has it. The first token tells salts apart, since llm-d reads none."""

    def __init__(self, tokens: list[int], salt: str | None, adapter: Any, image: str | None, per_hash: int) -> None:
        self.all_token_ids, self.cache_salt, self.per_hash, self.image = tokens, salt, per_hash, image
        self.weights = None if adapter is None else adapter[1]
        self.lora_request = None if adapter is None else SimpleNamespace(lora_int_id=7, lora_name=adapter[0])
        self.spans = [] if image is None else [KeySpan(5, 9, f"image:{image}".encode())]
        place = SimpleNamespace(offset=5, length=4)
        self.mm_features = [] if image is None else [SimpleNamespace(mm_position=place, identifier=image)]

    @property
    def root(self) -> Root:
        return Root(MODEL, self.cache_salt, None if self.weights is None else f"lora {self.weights}")

    @cached_property
    def block_hashes(self) -> list[bytes]:
        """A chain, as vLLM's: each hash over the one before, the tokens, and what else they depend on."""
        found, name = list[bytes](), None if self.lora_request is None else self.lora_request.lora_name
        for start in range(0, len(self.all_token_ids) - self.per_hash + 1, self.per_hash):
            stop = start + self.per_hash
            touching = [span.digest for span in self.spans if span.start < stop and span.stop > start]
            salt = self.cache_salt if not start else None
            text = repr((found[-1:], self.all_token_ids[start:stop], name, touching, salt))
            found.append(hashlib.sha256(text.encode()).digest())
        return found


def hash64(value: bytes) -> int:
    return int.from_bytes(value[-8:], "big")


class EngineCache:
    """vLLM's prefix cache, as far as events know it: which hashes it has, and the hash before each."""

    def __init__(self) -> None:
        self.blocks: dict[tuple[int, bytes], bytes | None] = {}
        self.events: list[Event] = []
        self.generation = object()
        """Another one after each reset."""

    def store(self, prompt: Prompt, group: EventGroup, stop: int) -> None:
        """The blocks of the first `stop` tokens."""
        step = group.block_size // prompt.per_hash
        hashes = prompt.block_hashes[step - 1 :: step]
        for at in range(stop // group.block_size):
            if (group.number, hashes[at]) in self.blocks:
                continue
            parent = hashes[at - 1] if at else None
            self.blocks[group.number, hashes[at]] = parent
            start = at * group.block_size
            name = None if prompt.lora_request is None else prompt.lora_request.lora_name
            spans = [one for one in prompt.spans if one.start < start + group.block_size and one.stop > start]
            extra: list[Any] = [name] if name else []
            extra += [[prompt.image, span.start - start] for span in spans]
            extra += [prompt.cache_salt] if prompt.cache_salt and not at else []
            self.events.append({
                "type": "BlockStored", "block_hashes": [hash64(hashes[at])],
                "parent_block_hash": None if parent is None else hash64(parent),
                "token_ids": prompt.all_token_ids[start : start + group.block_size], "block_size": group.block_size,
                "lora_id": None if name is None else 7, "medium": "GPU", "lora_name": name,
                "extra_keys": [extra] if extra else None, "group_idx": group.number, "kv_cache_spec_kind": group.kind,
                "kv_cache_spec_sliding_window": group.window,
            })  # fmt: skip

    def evict(self, rng: random.Random) -> None:
        """A block that no other follows."""
        parents = {(number, parent) for (number, _), parent in self.blocks.items()}
        leaves = [key for key in self.blocks if key not in parents]
        if leaves:
            number, one = key = rng.choice(leaves)
            del self.blocks[key]
            self.events.append(
                {"type": "BlockRemoved", "block_hashes": [hash64(one)], "medium": "GPU", "group_idx": number}
            )

    def clear(self) -> None:
        self.blocks.clear()
        self.generation = object()
        self.events.append({"type": "AllBlocksCleared"})

    def take(self) -> list[Event]:
        taken, self.events = self.events, []
        return taken


class Pool:
    """Device blocks without end: what is in them is nobody's concern here."""

    def hold(self, block_ids: array[int]) -> None: ...

    def give(self, block_ids: array[int]) -> None: ...


def encoded(events: Iterable[Event], shape: str) -> bytes:
    """A batch in one of the shapes. A map leaves out what is None, an array has every field."""
    shaped = [list(event.values()) if shape == "array" else EventEncoder._trimmed(event) for event in events]
    return msgspec.msgpack.encode([0.0, shaped, 0])


class EventsWalk:
    OPERATIONS: ClassVar = {
        "come": 4, "load": 3, "compute": 6, "leave": 1.5, "copy": 9, "write_behind": 1, "fetch": 1.5, "evict": 3,
        "publish": 6, "reset": 0.05, "engine_reset": 0.05, "both_reset": 0.05,
    }  # fmt: skip

    def __init__(self, seed: int, groups: str = "one group", shape: str = "map", **options: Any) -> None:
        self.random = rng = random.Random(f"events {seed}")
        self.shape, self.groups = shape, GROUPS[groups]
        self.per_hash = min(group.block_size for group in self.groups)
        self.cache = EngineCache()
        self.requests: dict[str, Prompt] = {}
        self.records: dict[str, Any] = {}
        self.fetches: list[Any] = []
        self.plans: dict[int, TransferPlan] = {}
        self.counts: Counter[str] = Counter()
        self.event_groups = [
            EventGroup(number, group.block_size, KINDS[type(group.attention)], getattr(group.attention, "window", None))
            for number, group in enumerate(self.groups)
        ]
        self.events = RouterEvents(
            self.event_groups, MEDIA["vllm"], self.per_hash, find=self.requests.get,
            cleared=lambda: self.cache.generation, is_off=lambda: self.is_off, convert=hash64, make=dict, **options,
        )  # fmt: skip
        self.is_off = False
        width = sum(UNIT // group.block_size for group in self.groups)
        config = OffloadConfig(
            groups=self.groups, num_host_blocks=rng.randint(10, 40) * width, disk=disk_of(rng.randint(20, 60) * width),
            max_job_bytes=rng.choice([1, 3, 1000]) * width, max_fetch_share=1.0, window_interval_tokens=1,
            namespace="test",
        )  # fmt: skip
        self.ledger = HostCache(config, 100_000, Pool(), clock=lambda: 0.0, extensions=[self.events])
        self.stems = [[rng.randrange(3) for _ in range(48)] for _ in range(3)]
        self.next_block = 1
        self.names: dict[bytes, str | None] = {}
        """By root: the name of its adapter."""
        self.dynamo, self.llmd = DynamoRouter(UNIT), LlmdIndexer(UNIT)

    def run(self, num_steps: int, check_every: int = 20) -> Counter[str]:
        for number in range(num_steps):
            (name,) = self.random.choices(list(self.OPERATIONS), list(self.OPERATIONS.values()))
            getattr(self, name)()
            if number % check_every == 0:
                self.check()
        self.check()
        return self.counts

    # -- the engine -----------------------------------------------------------------------------------------------

    def prompt(self) -> Prompt:
        rng = self.random
        salt, adapter, stem = rng.choice(SALTS), rng.choice(ADAPTERS), rng.choice(self.stems)
        length = rng.randint(9, 44)
        cut = rng.choice([length, length, rng.randint(0, length)])
        tokens = [SALTS.index(salt) + 100, *stem[:cut], *(rng.randrange(3) for _ in range(length - cut))]
        return Prompt(tokens, salt, adapter, rng.choice([None, None, None, "cat", "dog"]), self.per_hash)

    def come(self) -> None:
        if len(self.records) >= 6:
            return
        prompt, name = self.prompt(), f"r{self.counts['come']}"
        self.requests[name] = prompt
        prefix = Prefix.of(prompt.root, prompt.all_token_ids, prompt.spans)
        self.records[name] = self.ledger.admit(prefix, request_id=name)
        lora = prompt.lora_request
        self.names[prompt.root.digest] = None if lora is None else lora.lora_name
        self.counts["come"] += 1
        self.counts["hit"] += self.records[name].match.num_tokens > 0

    def one_of(self, *states: RequestState) -> str | None:
        found = [name for name, record in self.records.items() if record.state in states]
        return self.random.choice(found) if found else None

    def tables(self, num_tokens: int) -> list[range]:
        """Fresh blocks for `num_tokens`."""
        tables = []
        for group in self.groups:
            number = -(-num_tokens // group.block_size)
            if self.next_block + number >= 100_000:
                self.next_block = 1
            tables.append(range(self.next_block, self.next_block + number))
            self.next_block += number
        return tables

    def load(self) -> None:
        if (name := self.one_of(RequestState.PINNED)) is not None:
            tables = self.tables(len(self.requests[name].all_token_ids))
            self.add(self.ledger.plan_load(self.records[name], into=tables))

    def compute(self) -> None:
        name = self.one_of(RequestState.RUNNING)
        if name is None:
            return
        record, prompt = self.records[name], self.requests[name]
        most = len(prompt.all_token_ids)
        stop = min(most, record.num_computed_tokens + self.random.randint(1, 16))
        for group in self.event_groups:
            self.cache.store(prompt, group, stop)
        is_last = stop == most
        self.add(self.ledger.offer(record, stop, self.tables(most), is_last=is_last))
        if is_last:
            self.end(name)

    def leave(self) -> None:
        if self.records:
            self.end(self.random.choice(list(self.records)))

    def end(self, name: str) -> None:
        """vLLM forgets a request at once, also while its stores are under way."""
        self.ledger.release(self.records.pop(name))
        del self.requests[name]

    def add(self, plans: Sequence[TransferPlan]) -> None:
        self.plans.update({plan.job_id: plan for plan in plans})

    def copy(self) -> None:
        if not self.plans:
            return
        plan = self.plans.pop(self.random.choice(list(self.plans)))
        if not self.ledger.launch(plan.job_id):
            return
        (outcome,) = self.random.choices([Outcome.LANDED, Outcome.FAILED], [90, 10])
        landed = plan.num_blocks if outcome is Outcome.LANDED else self.random.randrange(plan.num_blocks)
        self.ledger.settle(Completion(plan.job_id, outcome, landed))
        self.counts[f"{plan.source.name} to {plan.destination.name} {outcome.value}"] += 1

    def write_behind(self) -> None:
        self.add(self.ledger.disk.plan_stores(self.random.randint(1, 30), is_idle=self.random.random() < 0.5))

    def fetch(self) -> None:
        """What only the disk has of a prompt comes back."""
        prompt = self.prompt()
        fetch = self.ledger.fetches.fetch(Prefix.of(prompt.root, prompt.all_token_ids, prompt.spans))
        self.add(fetch.plans)
        self.counts["fetched"] += bool(fetch.plans)

    def evict(self) -> None:
        self.cache.evict(self.random)

    def reset(self) -> None:
        self.ledger.reset()
        self.counts["reset"] += 1

    def engine_reset(self) -> None:
        self.cache.clear()
        self.counts["engine reset"] += 1

    def both_reset(self) -> None:
        self.cache.clear()
        self.ledger.reset()
        self.counts["both reset"] += 1

    # -- routers --------------------------------------------------------------------------------------------------

    def publish(self) -> None:
        """The end of a step of vLLM: its own events, and after them ours."""
        ours = self.events.take()
        assert all(event["type"] != "AllBlocksCleared" for event in ours)
        batch = [*self.cache.take(), *ours]
        self.counts.update(f"{event['type']} {event.get('medium')}" for event in ours)
        frames = [TOPIC, bytes(8), encoded(batch, self.shape)]
        self.dynamo.receive(frames)
        self.llmd.receive(frames)

    def check(self) -> None:
        """Both routers have what both caches have."""
        self.publish()
        while self.events.is_waiting:
            self.publish()
        wanted = self.cached()
        wanted |= {("GPU", number, hash64(one)) for number, one in self.cache.blocks}
        main = {("DISK" if medium == "STORAGE" else medium, 0, one) for medium, group, one in wanted if not group}
        assert self.dynamo.blocks({"GPU": "GPU", "CPU": "CPU", "DISK": "DISK"}) == main
        if len({group.block_size for group in self.groups}) == 1:  # llm-d follows one block size
            found = self.llmd.blocks(POD, {"gpu": "GPU", "cpu": "CPU", "storage": "STORAGE"})
            missing = wanted - found
            assert found <= wanted
            # A window that was stored, although the full attention before it was not: no hit ends in it.
            assert all(group for _, group, _ in missing) and len(missing) <= self.llmd.dropped["no parent"]
        self.counts["most blocks"] = max(self.counts["most blocks"], len(wanted))

    def cached(self) -> set[Block]:
        """What host memory and the disk hold, by the index alone."""
        found, media = set[Block](), {Tier.HOST: "CPU", Tier.DISK: "STORAGE"}
        layout = self.ledger.layout
        for run in self.ledger.cache.index.runs.values():
            for part in run.parts:
                if part.tier not in media or not part.blocks:
                    continue
                for group, (component, _) in zip(self.event_groups, layout.places, strict=True):
                    if component == part.component:
                        hashes = self.hashes_of(run, group, part.first, part.stop)
                        found |= {(media[part.tier], group.number, one) for one in hashes}
        return found

    def hashes_of(self, run: Run, group: EventGroup, start: int, stop: int) -> list[int]:
        path = run.whole_path()
        tokens = list(memoryview(b"".join(bytes(one.tokens) for one in path)).cast("i"))
        images = {span.digest.decode().partition(":")[2] for one in path for span in one.spans}
        name = self.names[run.root.digest]
        adapter = None if name is None else (name, "")
        prompt = Prompt(tokens, run.root.cache_salt, adapter, next(iter(images), None), self.per_hash)
        step, per_unit = group.block_size // self.per_hash, UNIT // self.per_hash
        return [hash64(one) for one in prompt.block_hashes[start * per_unit : stop * per_unit][step - 1 :: step]]
