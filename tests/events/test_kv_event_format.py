"""The wire format of each KV event, and the keys that identify a block besides its tokens."""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec
import pytest
from event_subscriber import EventSubscriber, OldBlockStored, cached_blocks, decode, decode_old

from aoffload import (
    ChunkedLocal,
    ConfigError,
    FullAttention,
    KeySpan,
    KVCacheGroup,
    Ledger,
    OffloadConfig,
    SlidingWindow,
)
from aoffload._observe.kv_events.changes import Changes
from aoffload._observe.kv_events.format import EventEncoder
from aoffload.kv_events import EventFormat
from aoffload.ledger import Completion, Outcome, Prefix, Root, TransferPlan

TOKENS = list(range(100, 112))


def ledger_of(*groups: KVCacheGroup, num_blocks: int = 64) -> Ledger:
    made = groups or (KVCacheGroup("all", block_size=4),)
    return Ledger(OffloadConfig(groups=made, num_host_blocks=num_blocks), num_blocks + 1)


def land(ledger: Ledger, plans: tuple[TransferPlan, ...]) -> None:
    for plan in plans:
        ledger.launch(plan.job_id)
        ledger.settle(Completion(plan.job_id, Outcome.LANDED, plan.num_blocks))


def serve(ledger: Ledger, prefix: Prefix) -> None:
    record = ledger.admit(prefix)
    ledger.allocate_nowait(record)
    ledger.plan_load(record, 0)
    land(ledger, ledger.commit(record, prefix.num_tokens))
    land(ledger, ledger.release(record))


def published(ledger: Ledger, act: Any, form: EventFormat | None = None) -> bytes:
    """What is published of what `act` does."""
    changes = Changes(ledger, 1000, lambda: None)
    changes.begin()
    changes.take(1000)
    act()
    found = changes.take(1000)
    changes.end()
    return EventEncoder(ledger.layout, form or EventFormat(), 3).batch(found, 12.5)


def test_a_block_on_the_device_and_in_the_host() -> None:
    """Stored on the device at the commit, then in the host when the copy has landed; gone with a reset. Each with the
    chain of hashes, the tokens, the block size, the medium and the group."""
    ledger, prefix = ledger_of(), Prefix.of(Root("m"), TOKENS)
    payload = published(ledger, lambda: serve(ledger, prefix))
    batch = decode(payload)
    assert (batch.ts, batch.data_parallel_rank) == (12.5, 3)
    device, host = batch.events
    digests = [hashlib.sha256(Root("m").digest + prefix.tokens[: 16 * stop]).digest() for stop in (1, 2, 3)]
    hashes = [int.from_bytes(digest, "big") % 2**64 for digest in digests]
    assert device.block_hashes == host.block_hashes == hashes
    assert device.parent_block_hash is host.parent_block_hash is None
    assert device.token_ids == host.token_ids == TOKENS
    assert (device.medium, host.medium, device.block_size) == ("GPU", "CPU", 4)
    assert (device.group_idx, device.kv_cache_spec_kind) == (0, "full_attention")
    (cleared,) = decode(published(ledger, ledger.reset)).events
    assert type(cleared).__name__ == "AllBlocksCleared"


def test_what_is_added_names_its_parent() -> None:
    """Blocks after others name the last of those, also where a run begins; what is evicted is named, tail first."""
    ledger, root = ledger_of(num_blocks=4), Root("m")
    serve(ledger, Prefix.of(root, TOKENS[:4]))
    (stored, *_) = decode(published(ledger, lambda: serve(ledger, Prefix.of(root, TOKENS)))).events
    first = int.from_bytes(hashlib.sha256(root.digest + Prefix.of(root, TOKENS[:4]).tokens).digest(), "big") % 2**64
    assert (stored.parent_block_hash, len(stored.block_hashes)) == (first, 2)
    events = decode(published(ledger, lambda: serve(ledger, Prefix.of(root, [1] * 9)))).events
    removed = [event for event in events if type(event).__name__ == "BlockRemoved" and event.medium == "GPU"]
    assert [event.block_hashes for event in removed] == [stored.block_hashes]


def test_adapter_spans_and_salt_are_extra_keys() -> None:
    """The adapter with every block, what stands for an image with the blocks that it touches, the salt with the first;
    and two prompts that differ in any of them share no hash."""
    span = KeySpan(2, 6, b"\x01\x02")
    plain = Prefix.of(Root("m"), TOKENS)
    rich = Prefix.of(Root("m", "tenant", "adapter"), TOKENS, [span])
    ledger = ledger_of()
    events = decode(published(ledger, lambda: (serve(ledger, plain), serve(ledger, rich)))).events
    stored = [event for event in events if event.medium == "GPU"]
    assert stored[0].extra_keys is None and stored[0].lora_name is None
    named = [keys for event in stored[1:] for keys in event.extra_keys]
    assert named == [("adapter", ["0102", 2], "tenant"), ("adapter", ["0102", -2]), ("adapter",)]
    assert {event.lora_name for event in stored[1:]} == {"adapter"}
    hashes = [block_hash for event in stored for block_hash in event.block_hashes]
    assert len(set(hashes)) == 6
    follower = EventSubscriber()
    follower.apply(published(ledger, lambda: None))
    changes = Changes(ledger, 1000, lambda: None)
    changes.begin()
    follower.apply(EventEncoder(ledger.layout, EventFormat(), 0).batch(changes.take(1000), 0.0))
    assert follower.cached == cached_blocks(ledger)


def test_keys_in_bytes_are_hexadecimal() -> None:
    """The format knows text alone."""
    ledger = ledger_of()
    prefix = Prefix.of(Root("m", b"\xff\x00", b"\xab"), TOKENS[:4])
    (event, *_) = decode(published(ledger, lambda: serve(ledger, prefix))).events
    assert (event.lora_name, event.extra_keys) == ("ab", [("ab", "ff00")])


def test_every_group_has_events_of_its_own() -> None:
    """With its number, its kind and its window. Block sizes that differ: what is told of is what can be found, and that
    is whole units."""
    groups = [
        KVCacheGroup("full", FullAttention(), 4), KVCacheGroup("near", SlidingWindow(100), 2),
        KVCacheGroup("local", ChunkedLocal(64), 4),
    ]  # fmt: skip
    ledger = ledger_of(*groups)
    events = decode(published(ledger, lambda: serve(ledger, Prefix.of(Root("m"), TOKENS)))).events
    kinds = {event.group_idx: (event.kv_cache_spec_kind, event.kv_cache_spec_sliding_window) for event in events}
    assert kinds == {0: ("full_attention", None), 1: ("sliding_window", 100), 2: ("chunked_local_attention", None)}
    assert {event.block_size for event in events} == {4}
    assert len({tuple(event.block_hashes) for event in events if event.medium == "GPU"}) == 1


def test_the_old_shape_and_whole_hashes() -> None:
    """Arrays for consumers of before vLLM 0.23, which stop reading where their fields end; all 256 bits for those who
    want them."""
    ledger, prefix = ledger_of(), Prefix.of(Root("m"), TOKENS)
    payload = published(ledger, lambda: serve(ledger, prefix), EventFormat(shape="array", hash_bits=256))
    batch = decode_old(payload)
    stored = batch.events[0]
    assert isinstance(stored, OldBlockStored)
    assert stored.token_ids == TOKENS and stored.medium == "GPU"
    assert stored.block_hashes[2] == hashlib.sha256(Root("m").digest + prefix.tokens).digest()
    raw = msgspec.msgpack.decode(published(ledger, ledger.reset, EventFormat(shape="array")))
    assert raw[1] == [["AllBlocksCleared"]]


@pytest.mark.parametrize(("name", "value"), [("shape", "list"), ("hash_bits", 32)])
def test_a_format_that_nobody_reads_is_refused_by_name(name: str, value: object) -> None:
    """A typing error is noticed before anything is published."""
    with pytest.raises(ConfigError, match=name):
        EventFormat(**{name: value})  # type: ignore[arg-type]


def test_a_long_run_that_is_evicted_unit_by_unit_is_not_hashed_from_the_start_each_time() -> None:
    """Its digests are made once and kept as long as it is being trimmed; other runs push them out some time."""
    ledger = ledger_of(num_blocks=600)
    root = Root("m")
    serve(ledger, Prefix.of(root, list(range(2000))))
    encoder = EventEncoder(ledger.layout, EventFormat(), 0)
    changes = Changes(ledger, 10_000, lambda: None)
    changes.begin()
    follower = EventSubscriber()
    follower.apply(encoder.batch(changes.take(10_000), 0.0))
    hashed: list[int] = []
    digests = encoder._digests
    make = digests._hash
    digests._hash = lambda change, start: (hashed.append(change.stop - start), make(change, start))[1]  # type: ignore
    for length in range(101, 399, 3):
        serve(ledger, Prefix.of(Root("m", str(length)), list(range(4 * 3))))
        follower.apply(encoder.batch(changes.take(10_000), 0.0))
    assert follower.cached == cached_blocks(ledger)
    assert sum(hashed) < 3500, "an update for each removal of hundreds of units would be above 20,000"
