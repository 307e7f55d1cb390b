"""Routers that know only the published formats see what is cached: the events of both publishers, read by parsers."""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from engine_events import POD, TOPIC, UNIT, EventsWalk, Prompt, encoded, hash64
from event_subscriber import cached_blocks
from random_walk import Walk
from test_kv_event_format import ledger_of, serve

from aoffload import FullAttention, Ledger, Tier
from aoffload._observe.kv_events.changes import Changes
from aoffload._observe.kv_events.events import MEDIA
from aoffload._observe.kv_events.format import EventEncoder
from aoffload.kv_events import EventFormat
from aoffload.ledger import Completion, Outcome, Prefix, RestoredRun, Root
from proof.routers import DynamoRouter, LlmdIndexer

NUM_STEPS = 1000
SEEDS = range(10)


@pytest.mark.parametrize("groups", ["one group", "windows", "block sizes"])
def test_both_routers_see_what_is_cached_after_ten_thousand_random_steps(groups: str) -> None:
    """Beside an engine's own events, under one topic: prompts with salts, adapters and images, copies that fail, a
    disk, evictions, and resets of either cache. The blocks of each medium and group are those of the index, and the
    GPU's are those of the engine."""
    seen: Counter[str] = Counter()
    for seed in SEEDS:
        seen.update(EventsWalk(seed, groups, "map" if seed % 2 else "array").run(NUM_STEPS))
    happened = (
        "hit", "reset", "engine reset", "both reset", "fetched", "DISK to HOST landed", "DEVICE to HOST failed",
        "BlockStored CPU", "BlockStored STORAGE", "BlockRemoved CPU", "BlockRemoved STORAGE",
    )  # fmt: skip
    assert min(seen[what] for what in happened) > 0, seen
    assert seen["BlockStored CPU"] > 500 and seen["most blocks"] > 500


class FollowedByRouters:
    """A ledger whose own publisher feeds both routers."""

    def __init__(self, ledger: Ledger, shape: Any) -> None:
        self.ledger, self.changes = ledger, Changes(ledger, 10**6, lambda: None)
        self.encoder = EventEncoder(ledger.layout, EventFormat(shape=shape), 0)
        self.dynamo, self.llmd = DynamoRouter(UNIT), LlmdIndexer(UNIT)
        self.main = {n for n, group in enumerate(ledger.layout.groups) if isinstance(group.attention, FullAttention)}
        self.changes.begin()

    def check(self) -> None:
        while told := self.changes.take(7):
            frames = [TOPIC, bytes(8), self.encoder.batch(told, 0.0)]
            self.dynamo.receive(frames)
            self.llmd.receive(frames)
        cached = set(cached_blocks(self.ledger))
        tiers = {"GPU": "GPU", "CPU": "CPU", "DISK": "DISK"}
        assert self.dynamo.blocks(tiers) == {(medium, 0, one) for medium, group, one in cached if group in self.main}
        assert self.llmd.blocks(POD, {name.lower(): name for name in tiers}) == cached


@pytest.mark.parametrize("shape", ["map", "array"])
def test_both_routers_see_what_a_ledger_publishes(shape: str) -> None:
    """The events of `KVEventPublisher`, in both shapes, after ten thousand random calls of a ledger."""
    for seed in range(20):
        walk = Walk(seed)
        walk.roots = [Root("m")] * 2  # neither router reads the salts of these walks
        followed = FollowedByRouters(walk.ledger, shape)
        walk.check = followed.check  # type: ignore[method-assign]
        walk.run(500)
        assert not followed.dynamo.dropped and not followed.llmd.dropped


def test_a_step_does_not_do_it_all() -> None:
    """A step makes events for a bounded number of units, and vLLM is asked for another step. If more changes are queued
    than the limit, everything is told anew. The view is right in the end."""
    for seed in range(4):
        walk = EventsWalk(seed, units_per_step=6, max_changes=8)
        sizes: list[int] = []
        walk.events.take = partial(sized, walk.events.take, sizes)  # type: ignore[method-assign]
        walk.run(300, check_every=60)
        assert 6 <= max(sizes) <= 6 + 12  # the last change of a step is told whole


def sized(take: Callable[[], list[Any]], sizes: list[int]) -> list[Any]:
    events = take()
    sizes.append(sum(len(event["block_hashes"]) for event in events))
    return events


def test_what_a_restart_has_found_is_named_once_somebody_asks() -> None:
    """The disk knows no hashes of vLLM. The blocks of a prompt get theirs from the first request that hits them, also
    on the disk, and blocks that nobody asks for have no events."""
    walk = EventsWalk(1)
    prompt, other = (Prompt([100, *[n] * 20], None, None, None, UNIT) for n in (1, 2))
    for number, each in enumerate((prompt, other)):
        tokens = Prefix.of(each.root, each.all_token_ids[:20]).tokens
        run = restored(each.root, tokens, [5 * number + at for at in range(5)])
        assert walk.ledger.disk.restore(run) == 5
    walk.publish()
    assert not walk.counts["BlockStored STORAGE"]
    walk.add(walk.ledger.fetches.fetch(Prefix.of(prompt.root, prompt.all_token_ids)).plans)
    while walk.plans:
        walk.copy()
        for plan in walk.ledger.fetches.fetch(Prefix.of(prompt.root, prompt.all_token_ids)).plans:
            walk.plans[plan.job_id] = plan
    walk.requests["r"] = prompt
    walk.ledger.admit(Prefix.of(prompt.root, prompt.all_token_ids), request_id="r")
    walk.publish()
    walk.requests["r2"] = prompt
    walk.ledger.admit(Prefix.of(prompt.root, prompt.all_token_ids), request_id="r2")
    walk.publish()
    hashes = {hash64(one) for one in prompt.block_hashes}
    names = {"GPU": "GPU", "CPU": "CPU", "DISK": "DISK"}
    assert walk.dynamo.blocks(names) == {(medium, 0, one) for medium in ("CPU", "DISK") for one in hashes}
    assert walk.dynamo.hits(prompt.all_token_ids)["CPU"] == 5


def test_a_hash_that_comes_late_is_waited_for() -> None:
    """vLLM may hash a block with tokens that come after it, and so after its store."""
    walk = EventsWalk(1)
    prompt = Prompt([100, *[1] * 20], None, None, None, UNIT)
    hashes = list(prompt.block_hashes)
    del prompt.block_hashes[4:]
    walk.requests["r"] = prompt
    record = walk.ledger.admit(Prefix.of(prompt.root, prompt.all_token_ids), request_id="r")
    walk.ledger.plan_load(record, into=walk.tables(21))
    for plan in walk.ledger.offer(record, 21, walk.tables(21)):
        walk.ledger.launch(plan.job_id)
        walk.ledger.settle(Completion(plan.job_id, Outcome.LANDED, plan.num_blocks))
    for number in (4, 4, 5):
        prompt.block_hashes[:] = hashes[:number]
        walk.publish()
        assert walk.dynamo.blocks({"CPU": "CPU"}) == {("CPU", 0, hash64(one)) for one in hashes[:number]}


def restored(root: Root, tokens: bytes, slots: list[int]) -> RestoredRun:
    digest = hashlib.sha256(root.digest + tokens).digest()
    return RestoredRun(root.digest, b"", digest, 0, len(slots), tokens, (array("i", slots),))


def test_an_error_takes_back_what_was_named() -> None:
    """A bug in the events ends them: vLLM goes on, and no router counts on blocks of host memory that it hears no more
    of. The same if the cache has turned itself off."""
    for end in ("error", "off"):
        walk = EventsWalk(3)
        walk.run(300)
        assert {medium for medium, _, _ in walk.cached()} == {"CPU", "STORAGE"}
        on_the_gpu = walk.dynamo.blocks({"GPU": "GPU"})
        if end == "off":
            walk.is_off = True
        else:
            walk.events._learn = None  # type: ignore[method-assign, assignment]
        walk.publish()
        while walk.events.is_waiting:
            walk.publish()
        assert not walk.dynamo.blocks({"CPU": "CPU", "DISK": "DISK"})
        assert on_the_gpu <= walk.dynamo.blocks({"GPU": "GPU"})
        walk.come()  # the engine goes on
        assert not walk.events.take()


@pytest.mark.parametrize("broken", ["_make", "_remove"])
def test_events_that_cannot_be_made_do_not_keep_vllm_busy(broken: str) -> None:
    """vLLM's events have other fields, or the removals fail, too: vLLM is not asked for steps without end."""
    walk = EventsWalk(3)
    walk.run(300)
    setattr(walk.events, broken, None)
    walk.ledger.reset()
    for _ in range(3):
        walk.events.take()
    assert not walk.events.is_waiting


# -- what each router needs ------------------------------------------------------------------------------------------


def batch_of(ledger: Ledger, form: EventFormat, *prefixes: Prefix) -> bytes:
    changes = Changes(ledger, 1000, lambda: None)
    changes.begin()
    for prefix in prefixes:
        serve(ledger, prefix)
    return EventEncoder(ledger.layout, form, 0).batch(changes.take(1000), 0.0)


def test_what_llm_d_needs() -> None:
    """A topic of three parts; arrays, for its versions that take no maps; a weight for the disk, which otherwise counts
    as the GPU. Either number of bits will do."""
    prompt = list(range(100, 112))
    for bits in (64, 256):
        payload = batch_of(ledger_of(), EventFormat(shape="array", hash_bits=bits), Prefix.of(Root("m"), prompt))
        indexer = LlmdIndexer(UNIT, takes_maps=False)
        indexer.receive([b"kv@pod-1@m", bytes(8), payload])
        assert indexer.score("pod-1", "m", prompt) == 3.0
    with pytest.raises(ValueError, match="arrays"):
        LlmdIndexer(UNIT, takes_maps=False).receive([TOPIC, bytes(8), batch_of(ledger_of(), EventFormat())])
    assert LlmdIndexer.pod_and_model(b"kv") == ("kv", "")
    on_disk = {
        "type": "BlockStored", "block_hashes": [1], "parent_block_hash": None, "token_ids": prompt[:4], "block_size": 4,
        "lora_id": None, "medium": "DISK", "lora_name": None, "extra_keys": None,
    }  # fmt: skip
    for weights, score in (({"gpu": 1.0, "cpu": 0.8}, 1.0), ({"gpu": 1.0, "cpu": 0.8, "disk": 0.5}, 0.5)):
        indexer = LlmdIndexer(UNIT, weights=weights)
        indexer.receive([TOPIC, bytes(8), encoded([on_disk], "array")])
        assert indexer.score(POD, "m", prompt) == score


def test_what_dynamo_needs() -> None:
    """Hashes of 64 bits, its own block size, and salts that are text and begin as those of its frontend."""
    tokens = list(range(100, 112))
    salted = Prefix.of(Root("m", "dynamo-cache-salt:a"), tokens)
    router = DynamoRouter(UNIT)
    router.receive([b"", bytes(8), batch_of(ledger_of(), EventFormat(), salted)])
    assert router.hits(tokens, salt="a")["GPU"] == 3 and router.hits(tokens)["GPU"] == 0
    unread = DynamoRouter(UNIT)
    unread.receive([b"", bytes(8), batch_of(ledger_of(), EventFormat(), Prefix.of(Root("m", b"\x01"), tokens))])
    assert unread.hits(tokens)["GPU"] == 3, "a salt in bytes is hexadecimal, which Dynamo takes for no salt"
    with pytest.raises(TypeError, match="64 bits"):
        router.receive([b"", bytes(8), batch_of(ledger_of(), EventFormat(hash_bits=256), salted)])
    other = DynamoRouter(16)
    other.receive([b"", bytes(8), batch_of(ledger_of(), EventFormat(), salted)])
    assert other.dropped["block size"] and not other.blocks({"GPU": "GPU"})


def test_the_disk_has_the_name_that_is_asked_for() -> None:
    """`DISK` as before, unless vLLM's names are asked for."""
    assert [MEDIA[name][Tier.DISK] for name in (EventFormat().media, "vllm")] == ["DISK", "STORAGE"]
