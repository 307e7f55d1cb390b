"""KV events of the connector, and the tiers that hits come from."""

from __future__ import annotations

import importlib.util
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from engine_doubles import BLOCK, TEXT, Request, feature, lora
from small_engine import SmallEngine
from test_vllm_disk import disk as disk  # a fixture
from test_vllm_disk import only_on_disk, settle
from test_vllm_remote import filled as filled
from test_vllm_remote import remote as remote
from test_vllm_remote import store as store
from vllm_configs import eagle
from vllm_doubles import vllm_importable

from aoffload import ConfigError, Tier
from aoffload._vllm.kv_events import hash_converter
from aoffload._vllm.settings import event_media


def told(engine: SmallEngine) -> list[Any]:
    """The events since the last call."""
    settle(engine)
    found, engine.events = engine.events, []
    return found


def hashes_in(events: list[Any], medium: str) -> Counter[Any]:
    """Stored and not removed."""
    found: Counter[Any] = Counter()
    for event in events:
        sign = 1 if type(event).__name__ == "BlockStored" else -1
        found.update({one: sign for one in event.block_hashes if event.medium == medium})
    return +found


def wanted(request: Request, number: int) -> set[Any]:
    return {convert(one) for one in request.block_hashes[:number]}


def convert(value: Any) -> Any:
    with vllm_importable():
        return hash_converter()(value)


def test_without_events_nobody_watches(engines: Callable[..., SmallEngine]) -> None:
    """vLLM publishes no events: the connector makes none, and the ledger reports to nobody."""
    engine = engines()
    engine.run(Request("first", TEXT))
    assert not engine.events
    assert all(tier.watcher is None for tier in engine.connector.ledger.cache.tiers)


def test_what_host_memory_holds_has_vllms_hashes(engines: Callable[..., SmallEngine]) -> None:
    """Stored blocks are named as vLLM names them on its GPU, with tokens, parent, group and block size; a reset of the
    connector takes exactly them back, without `AllBlocksCleared`."""
    engine, request = engines(has_events=True), Request("first", TEXT)
    engine.run(request)
    events = told(engine)
    assert [event.token_ids for event in events] == [TEXT[:28]]
    (stored,) = events
    assert (stored.medium, stored.group_idx, stored.block_size, stored.parent_block_hash) == ("CPU", 0, BLOCK, None)
    assert stored.kv_cache_spec_kind == "full_attention" and stored.lora_name is None
    assert set(hashes_in(events, "CPU")) == wanted(request, 7)
    engine.connector.reset_cache()
    assert engine.connector.has_pending_push_work(), "vLLM has to run a step that publishes the removals"
    events += told(engine)
    assert not hashes_in(events, "CPU")
    assert {type(event).__name__ for event in events} == {"BlockStored", "BlockRemoved"}


@pytest.mark.parametrize("num_ahead", [1, BLOCK, BLOCK + 1])
def test_events_have_the_tokens_of_their_own_blocks(engines: Callable[..., SmallEngine], num_ahead: int) -> None:
    """However far draft layers read ahead, also further than a block."""
    engine = engines(has_events=True, drafts=eagle(num_ahead=num_ahead))
    for number in range(BLOCK, len(TEXT)):  # a block is stored at a time
        engine.manager.evict_all()
        engine.run(Request(str(number), TEXT[: number + 1]))
    events = told(engine)
    assert len(events) > 4
    assert [token for event in events for token in event.token_ids] == TEXT[: (len(TEXT) - num_ahead) // BLOCK * BLOCK]


def test_vllms_own_reset_has_all_named_again(engines: Callable[..., SmallEngine]) -> None:
    """vLLM has published that all blocks are cleared, and routers drop those of host memory, too."""
    engine, request = engines(has_events=True), Request("first", TEXT)
    engine.run(request)
    told(engine)
    engine.manager.reset()
    engine.step()
    again = told(engine)
    assert [type(event).__name__ for event in again] == ["BlockRemoved", "BlockStored"]
    assert set(hashes_in(again[1:], "CPU")) == wanted(request, 7)


def test_an_adapter_has_its_name(engines: Callable[..., SmallEngine]) -> None:
    """The index knows the SHA-256 of its weights, and vLLM's hashes and events its name."""
    engine = engines(has_events=True)
    engine.files["/adapter"] = 5
    for name in ("first", "second"):
        engine.run(Request(name, TEXT, lora_request=lora(3)))
    (stored,) = [event for event in told(engine) if type(event).__name__ == "BlockStored"]
    assert (stored.lora_name, stored.lora_id) == ("tenant", 3)
    assert stored.extra_keys == [["tenant"]] * 7


def test_each_group_has_its_own_events(engines: Callable[..., SmallEngine]) -> None:
    """With vLLM's number, kind and window. Blocks before the window are not stored, and have no event."""
    engine, request = engines(has_events=True, windows=(0, 12)), Request("first", TEXT)
    engine.run(request)
    events = {event.group_idx: event for event in told(engine)}
    assert {number: one.kv_cache_spec_kind for number, one in events.items()} == {
        0: "full_attention",
        1: "sliding_window",
    }
    assert (events[0].kv_cache_spec_sliding_window, events[1].kv_cache_spec_sliding_window) == (None, 12)
    assert set(events[0].block_hashes) == wanted(request, 7)
    assert set(events[1].block_hashes) == wanted(request, 7) - wanted(request, 3)
    assert events[1].token_ids == TEXT[12:28]
    assert events[1].parent_block_hash in wanted(request, 3) - wanted(request, 2)


def test_ranks_have_one_voice(engines: Callable[..., SmallEngine]) -> None:
    """Blocks with a part on each rank are named once, when all ranks have stored them."""
    engine, request = engines(has_events=True, num_ranks=2), Request("first", TEXT)
    engine.run(request)
    assert hashes_in(told(engine), "CPU") == Counter(wanted(request, 7))


def test_the_disk_has_vllms_name_or_ours(disk: Callable[..., SmallEngine]) -> None:
    """`STORAGE`, and `DISK` if the key says so; any other value is refused by its name."""
    for media, medium in (("vllm", "STORAGE"), ("aoffload", "DISK")):
        assert event_media({"event_media": media})[Tier.DISK] == medium
    with pytest.raises(ConfigError, match="event_media"):
        event_media({"event_media": "SSD"})
    engine = disk(has_events=True)
    only_on_disk(engine)
    request = Request("again", TEXT)
    events = told(engine)
    assert {event.medium for event in events} == {"CPU", "STORAGE"}
    engine.submit(request)
    settle(engine)
    events += told(engine)
    assert wanted(request, 7) <= set(hashes_in(events, "STORAGE"))


# -- hits by tier ----------------------------------------------------------------------------------------------------


def sources(engine: SmallEngine) -> dict[str, dict[str, int]]:
    """What vLLM hears for each request when it has allocated blocks."""
    found: dict[str, dict[str, int]] = {}
    allocated = engine.connector.update_state_after_alloc

    def hear(request: Any, blocks: Any, num_external: int) -> None:
        allocated(request, blocks, num_external)
        heard = engine.connector.get_external_cache_hit_sources(request, num_external)
        found[request.request_id] = {source.value: number for source, number in heard.items()}

    engine.connector.update_state_after_alloc = hear
    return found


def test_a_hit_in_host_memory_is_the_hosts(warm: Callable[..., SmallEngine]) -> None:
    """All tokens that are loaded; none for a request without a load."""
    engine = warm()
    found = sources(engine)
    engine.run(Request("hit", TEXT))
    engine.run(Request("miss", range(100, 130)))
    assert found == {"hit": {"host": 28}, "miss": {}}


def test_what_a_fetch_has_brought_is_the_disks(disk: Callable[..., SmallEngine]) -> None:
    """Also if only a part of the hit came from there, and only for the request for which it came."""
    engine = disk()
    only_on_disk(engine)
    found = sources(engine)
    engine.submit(Request("fetches", TEXT))
    settle(engine)
    engine.manager.evict_all()
    engine.submit(Request("in the host", TEXT))
    settle(engine)
    assert found["fetches"] == {"disk": 28}
    assert found["in the host"] == {"host": 28}


def test_only_what_the_fetch_has_brought_counts_for_the_disk(disk: Callable[..., SmallEngine]) -> None:
    """The front of a prompt is in host memory, the rest comes from the disk: each has its tokens, and vLLM's own hit
    has none of them."""
    engine = disk()
    only_on_disk(engine)
    found = sources(engine)
    engine.submit(Request("front", TEXT[:14]))
    settle(engine)
    engine.manager.evict_all()
    engine.submit(Request("whole", TEXT))
    settle(engine)
    assert found["front"] == {"disk": 12}
    assert found["whole"] == {"host": 12, "disk": 16}


def test_what_a_store_has_brought_has_vllms_last_name(filled: Callable[..., SmallEngine]) -> None:
    """vLLM has no name for a remote store but the one of what it does not know."""
    engine = filled()
    found = sources(engine)
    engine.submit(Request("there", TEXT))
    settle(engine)
    assert found["there"] == {"external_unspecified": 24}


def test_an_error_makes_no_hits(warm: Callable[..., SmallEngine]) -> None:
    """The figures are of no use to a request, and must not end the scheduler."""
    engine = warm()
    engine.may_be_off = True
    engine.half.hit_tiers = None  # type: ignore[method-assign, assignment]
    assert engine.connector.get_external_cache_hit_sources(SimpleNamespace(request_id="x"), 4)
    assert engine.connector.off_reason


# -- vLLM's own structs ----------------------------------------------------------------------------------------------


@pytest.mark.vllm
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
def test_vllm_decodes_what_the_connector_makes(disk: Callable[..., SmallEngine], tmp_path: Path) -> None:
    """A batch of its own structs, encoded as its publisher does, decodes to the same batch."""
    import msgspec
    from vllm.distributed.kv_events import BlockRemoved, BlockStored, KVEventBatch

    engine = disk(has_events=True)
    only_on_disk(engine)
    engine.connector.reset_cache()
    engine.step()
    batch = KVEventBatch(ts=0.0, events=told(engine), data_parallel_rank=0)
    again = msgspec.msgpack.Decoder(KVEventBatch).decode(msgspec.msgpack.Encoder().encode(batch))
    assert again == batch
    assert {type(event) for event in again.events} == {BlockStored, BlockRemoved}


# -- drafts ----------------------------------------------------------------------------------------------------------


def test_events_with_drafts_have_the_tokens_of_vllms_blocks(engines: Callable[..., SmallEngine]) -> None:
    """The index identifies a block by the token after it. Routers get the block's own tokens, hash and images."""
    engine = engines(has_events=True, drafts=eagle())
    cat = feature(5, 4, "cat")
    request = Request("first", TEXT, mm_features=[feature(0, 2, "dog"), cat])
    engine.run(request)
    stored = [event for event in told(engine) if event.medium == "CPU"]
    assert [one for event in stored for one in event.block_hashes] == [convert(one) for one in request.block_hashes[:7]]
    assert [token for event in stored for token in event.token_ids] == TEXT[: 7 * BLOCK]
    keys = [each for event in stored for each in event.extra_keys or [None] * len(event.block_hashes)]
    assert keys[:4] == [[["dog", 0]], [["cat", 1]], [["cat", -3]], None]


def test_two_blocks_of_one_hash_are_one_for_a_router(engines: Callable[..., SmallEngine]) -> None:
    """Prompts that part at the end of a block have two copies of it in host memory, and vLLM one hash. The router hears
    of it once, and loses it when the last copy goes."""
    engine = engines(has_events=True, drafts=eagle(), num_host_blocks=12, num_blocks=60)
    shared = TEXT[: 4 * BLOCK]
    for name in "ab":
        engine.run(Request(name, [*shared, *(ord(name) for _ in range(9))]))
        engine.manager.evict_all()
    events = told(engine)
    for number in range(3):
        engine.manager.evict_all()
        engine.run(Request(f"other {number}", [number + 7] * (4 * BLOCK + 1)))
        events += told(engine)
        counted = Counter[Any]()
        for event in events:
            for one in event.block_hashes if event.medium == "CPU" else ():
                counted[one] += 1 if type(event).__name__ == "BlockStored" else -1
        assert set(counted.values()) <= {0, 1}
    assert sum(counted.values()) <= engine.connector.ledger.statistics().host.num_cached
