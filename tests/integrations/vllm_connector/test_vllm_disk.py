"""A disk below the host memory of the connector: fetches, and the contents after a restart."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from engine_doubles import TEXT, Request
from small_engine import SmallEngine, counted, held
from vllm_configs import kv_cache_config, vllm_config
from vllm_doubles import AoffloadConnector, KVConnectorRole, vllm_importable

from aoffload import ConfigError, Tier
from aoffload._tiers.disk.lanes import LocalDisk
from aoffload._vllm.disk import DiskState
from aoffload._vllm.messages import Commands
from aoffload._vllm.worker import strides_of
from aoffload.ledger import Completion, Outcome, TransferPlan
from aoffload.transport import TransferRefused

OTHER = range(150, 180)
FETCH, DISK_STORE = (Tier.DISK, Tier.HOST), (Tier.HOST, Tier.DISK)


@pytest.fixture
def disk(engines: Callable[..., SmallEngine], tmp_path: Path) -> Callable[..., SmallEngine]:
    """An engine with room for 18 prompts in its host memory, and for many on a disk of the test's own."""

    def make(**options: Any) -> SmallEngine:
        given = {"num_host_blocks": 128, "namespace": "weights 1", "max_fetch_share": 1.0, "num_blocks": 40}
        engine = engines(**given | {"disk": {"path": str(tmp_path / "kv"), "size": "1MiB"}} | options)
        settle(engine)
        return engine

    return make


def settle(engine: SmallEngine, most_s: float = 20.0) -> None:
    """Step until the connector is at rest: threads of the disk take their time."""
    until = time.monotonic() + most_s
    while engine.connector.has_pending_push_work() or engine.waiting or engine.running:
        engine.step()
        assert time.monotonic() < until, "not at rest"


def run(engine: SmallEngine, *requests: Request) -> None:
    engine.submit(*requests)
    settle(engine)


def only_on_disk(engine: SmallEngine) -> None:
    """TEXT leaves the device and host memory, for prompts that come after it."""
    run(engine, Request("first", TEXT))
    for number in range(24):
        run(engine, Request(f"other {number}", [200 + number, *range(29)]))
    engine.manager.evict_all()


def state(engine: SmallEngine) -> DiskState:
    assert engine.half.lower is not None and engine.half.lower.disk is not None
    return engine.half.lower.disk.state


def loaded(engine: SmallEngine, tier: str) -> float:
    return counted(engine, f"copied_blocks|load|{tier}")


def instead(engine: SmallEngine, link: tuple[Tier, Tier], end: Callable[[TransferPlan], Completion | None]) -> None:
    """Copies of this link end like that instead of being made."""

    def alter(commands: Commands) -> Commands:
        for plan in (*commands.loads, *commands.stores):
            if plan.link == link and (completion := end(plan)) is not None:
                engine.workers[0].copies.end(completion)
        loads, stores = ([plan for plan in plans if plan.link != link] for plans in (commands.loads, commands.stores))
        return attrs.evolve(commands, loads=tuple(loads), stores=tuple(stores))

    engine.alter = alter


def test_what_the_host_evicts_comes_back(disk: Callable[..., SmallEngine]) -> None:
    """From the disk into host memory, and from there into vLLM's blocks; the bytes are right."""
    engine = disk()
    only_on_disk(engine)
    assert engine.connector.ledger.statistics().disk.num_cached > 20
    before = loaded(engine, "disk"), loaded(engine, "host")
    run(engine, Request("again", TEXT))
    assert (loaded(engine, "disk") - before[0], loaded(engine, "host") - before[1]) == (7, 7)
    assert held(engine) == 0


def test_an_engine_that_starts_anew_finds_what_was_there(disk: Callable[..., SmallEngine]) -> None:
    """Also what was only in host memory when the first one ended."""
    first = disk()
    run(first, Request("first", TEXT))
    first.close()
    second = disk()
    assert counted(second, "restored_blocks") == 7
    run(second, Request("again", TEXT))
    assert (loaded(second, "disk"), loaded(second, "host")) == (7, 7)


def test_without_a_flush_an_engine_ends_at_once(disk: Callable[..., SmallEngine], tmp_path: Path) -> None:
    """`close_flush_s` says how long it may take: no time, nothing is written."""
    given = {"path": str(tmp_path / "kv"), "size": "1MiB", "close_flush_s": 0}
    first = disk(disk=given)
    run(first, Request("first", TEXT))
    first.close()
    assert counted(disk(), "restored_blocks") == 0


@pytest.mark.parametrize("other", ["namespace", "tensors", "groups"])
def test_another_engine_finds_nothing(
    disk: Callable[..., SmallEngine], other: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other weights; another order of heads and tokens in a block of as many bytes; a model with another layout."""
    first = disk()
    run(first, Request("first", TEXT))
    first.close()
    if other == "tensors":
        monkeypatch.setattr("aoffload._vllm.worker.strides_of", lambda *_: "other strides")
    options: dict[str, dict[str, Any]] = {"namespace": {"namespace": "weights 2"}, "groups": {"windows": (0, 12)}}
    assert counted(disk(**options.get(other, {})), "restored_blocks") == 0


def test_strides_do_not_name_the_number_of_blocks() -> None:
    """It follows the memory that is free at the start, and would be another one each time."""

    def described(num_blocks: int, *order: int) -> str:
        return strides_of({"layer": torch.zeros(2, num_blocks, 16, 8, 4).permute(order or (0, 1, 2, 3, 4))}, num_blocks)

    assert described(70) == described(71)
    assert described(70) != described(70, 0, 1, 3, 2, 4)


def test_others_go_on_while_the_disk_is_read(disk: Callable[..., SmallEngine]) -> None:
    """A request that waits for the disk is asked for again in each step; nothing else waits."""
    engine = disk()
    only_on_disk(engine)
    held_back: list[TransferPlan] = []
    instead(engine, FETCH, lambda plan: held_back.append(plan))
    engine.submit(Request("again", TEXT))
    engine.step()
    engine.submit(Request("other", range(150, 180)))
    for _ in range(4):
        engine.step()
    assert [request.request_id for request in engine.waiting] == ["again"] and not engine.running
    assert sum(plan.num_blocks for plan in held_back) == 7
    copies = engine.workers[0]
    engine.alter = lambda commands: commands
    copies.start(held_back)
    settle(engine)
    assert counted(engine, "fetches") == 1 and counted(engine, "late_fetches") == 0


def test_a_fetch_that_takes_too_long_is_not_waited_for(disk: Callable[..., SmallEngine]) -> None:
    """By the clock of the connector: then the request computes, once, and a late end harms nobody."""
    engine = disk(fetch_timeout_s=2, transfer_timeout_s=30)
    only_on_disk(engine)
    held_back: list[TransferPlan] = []
    instead(engine, FETCH, lambda plan: held_back.append(plan))
    engine.submit(Request("again", TEXT))
    for _ in range(5):
        engine.step()
    assert engine.waiting, "not before its time is over"
    engine.now += 2.0
    for _ in range(5):
        engine.step()
    assert not engine.waiting and not engine.running
    assert counted(engine, "late_fetches") == 1
    engine.alter = lambda commands: commands
    engine.workers[0].start(held_back)
    settle(engine)


def test_a_disk_that_hangs_costs_no_blocks_of_vllm(disk: Callable[..., SmallEngine]) -> None:
    """What it may still write to is quarantined in host memory, and is free once it has ended. Meanwhile nobody asks
    it for anything."""
    engine = disk(fetch_timeout_s=2, transfer_timeout_s=3)
    only_on_disk(engine)
    held_back: list[TransferPlan] = []
    instead(engine, FETCH, lambda plan: held_back.append(plan))
    engine.submit(Request("again", TEXT))
    engine.step()
    engine.now += 3.0
    settle(engine)
    ledger = engine.connector.ledger
    assert ledger.statistics().host.num_quarantined == 7 and held(engine) == 0
    engine.manager.evict_all()
    run(engine, Request("once more", [*TEXT[:29], 99]))
    assert counted(engine, "fetches") == 1
    engine.workers[0].copies.end(Completion(held_back[0].job_id, Outcome.FAILED))
    engine.step()
    assert ledger.statistics().host.num_quarantined == 0


def test_what_is_corrupt_on_the_disk_is_computed(disk: Callable[..., SmallEngine], tmp_path: Path) -> None:
    """Its sum says so before vLLM is told of any hit; the engine asks for it once."""
    engine = disk()
    only_on_disk(engine)
    (slab,) = (tmp_path / "kv").glob("slab*")
    slab.write_bytes(bytes(byte ^ 255 for byte in slab.read_bytes()))
    run(engine, Request("again", TEXT))
    assert counted(engine, "fetches") == 1 and counted(engine, "lost_tokens") == 0
    assert counted(engine, "jobs|load|disk|corrupt") == 1


def test_a_disk_that_fails_is_left_alone(disk: Callable[..., SmallEngine]) -> None:
    """After two failures in a row, for half a second of the clock: requests compute at once."""
    engine = disk()
    only_on_disk(engine)
    instead(engine, FETCH, lambda plan: Completion(plan.job_id, Outcome.FAILED, error="EIO"))
    for turn in range(3):
        run(engine, Request(f"again {turn}", TEXT))
        engine.manager.evict_all()
        engine.connector.ledger.reset(Tier.HOST)
    assert counted(engine, "fetches") == 2
    engine.now += 0.6
    run(engine, Request("later", TEXT))
    assert counted(engine, "fetches") == 3


def test_stores_that_fail_are_not_tried_without_end(disk: Callable[..., SmallEngine]) -> None:
    """A full or broken disk: the engine comes to rest, and tries again later."""
    engine = disk()
    tried: list[TransferPlan] = []

    def fail(plan: TransferPlan) -> Completion:
        tried.append(plan)
        return Completion(plan.job_id, Outcome.FAILED, error="ENOSPC")

    instead(engine, DISK_STORE, fail)
    only_on_disk(engine)
    assert 1 <= len(tried) <= 4, "left alone behind two failures in a row"
    assert engine.connector.ledger.statistics().disk.num_cached == 0


def test_prompts_that_share_a_prefix_load_it_once(disk: Callable[..., SmallEngine]) -> None:
    """They wait for one fetch; then one loads it, and the others hit it in vLLM's own cache."""
    engine = disk()
    only_on_disk(engine)
    before = loaded(engine, "disk"), loaded(engine, "host")
    run(engine, *(Request(f"again {number}", [*TEXT[:28], number, number]) for number in range(4)))
    assert loaded(engine, "disk") - before[0] == 7
    assert loaded(engine, "host") - before[1] == 7


def test_a_fetch_without_free_blocks_is_tried_again(disk: Callable[..., SmallEngine]) -> None:
    """A fetch that finds the share of host memory taken waits for the fetches that take it, also when all of those end
    between two steps."""
    first = disk()
    run(first, Request("first", TEXT), Request("another", OTHER))
    first.close()
    engine = disk(max_fetch_share=0.06)
    assert counted(engine, "restored_blocks") == 14
    held_back: list[TransferPlan] = []
    instead(engine, FETCH, lambda plan: held_back.append(plan))
    engine.submit(Request("again", TEXT), Request("also", OTHER))
    for _ in range(3):
        engine.step()
    assert [request.request_id for request in engine.waiting] == ["again", "also"]
    assert [plan.num_blocks for plan in held_back] == [7], "the share holds one prompt"
    engine.alter = lambda commands: commands
    engine.workers[0].start(held_back)
    engine.workers[0].copies.wait_for_any(20.0)
    settle(engine)
    assert loaded(engine, "disk") == 14


def test_a_request_that_ends_while_it_waits_keeps_nothing(disk: Callable[..., SmallEngine]) -> None:
    """What it has begun to fetch comes all the same, for the next one."""
    engine = disk()
    only_on_disk(engine)
    request = Request("again", TEXT)
    engine.submit(request)
    engine.step()
    engine.finish(request)
    settle(engine)
    assert engine.connector.ledger.statistics().host.num_pinned == 0


def test_a_reset_reaches_the_disk(disk: Callable[..., SmallEngine]) -> None:
    """No restart finds what vLLM has had forgotten, nor what it has stored since: the weights may have changed in the
    engine, and a restart begins with those of the model's files again. The engine itself uses the disk on."""
    engine = disk()
    run(engine, Request("first", TEXT))
    engine.connector.reset_cache()
    assert engine.connector.has_pending_push_work(), "the worker has to hear of it"
    settle(engine)
    only_on_disk(engine)
    run(engine, Request("again", TEXT))
    assert loaded(engine, "disk") == 7
    run(engine, Request("behind it", OTHER))
    engine.close()
    second = disk()
    assert counted(second, "restored_blocks") == 0
    run(second, Request("again", TEXT), Request("other", OTHER))
    assert loaded(second, "disk") == 0


def test_a_reset_that_does_not_reach_the_disk_turns_it_off(
    disk: Callable[..., SmallEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is stored that a restart might mix with what was to be forgotten."""
    engine = disk()
    run(engine, Request("first", TEXT))

    def refuse(*_: object) -> None:
        raise TransferRefused("EIO")

    monkeypatch.setattr(LocalDisk, "reset", refuse)
    engine.connector.reset_cache()
    settle(engine)
    assert state(engine) is DiskState.OFF
    run(engine, Request("again", TEXT))
    engine.close()


def test_no_more_is_written_than_a_day_allows(disk: Callable[..., SmallEngine], tmp_path: Path) -> None:
    """`daily_writes` bounds it, whatever is evicted; the next day there is more."""
    engine = disk(disk={"path": str(tmp_path / "kv"), "size": "1MiB", "daily_writes": 10 * 32})
    only_on_disk(engine)
    assert counted(engine, "copied_bytes|store|disk") <= 10 * 32
    assert engine.connector.ledger.statistics().disk.num_cached > 0


def test_a_disk_takes_one_rank_of_one_engine() -> None:
    """Each rank would need files of its own: refused at the start, by name."""
    described = kv_cache_config(24)
    extra: dict[str, Any] = {"disk": {"path": "/nowhere", "size": "1MiB"}, "namespace": "w"}
    with vllm_importable():
        with pytest.raises(ConfigError, match=r"disk: supports one rank, but there are 2"):
            AoffloadConnector(vllm_config(2, **extra), KVConnectorRole.SCHEDULER, described)
        several = vllm_config(**extra)
        several.parallel_config.data_parallel_size = 2
        with pytest.raises(ConfigError, match=r"disk: supports one engine"):
            AoffloadConnector(several, KVConnectorRole.SCHEDULER, described)


@pytest.mark.parametrize(
    ("extra", "problem"),
    [
        ({"disk": {"path": "/x", "size": "1MiB"}}, "namespace: is needed with disk"),
        ({"disk": {"path": "/x", "size": "1MiB"}, "namespace": 3}, "namespace: must be a string"),
        ({"disk": {"path": "/x"}, "namespace": "w"}, r"disk\.size: is missing"),
        ({"disk": "/x", "namespace": "w"}, "disk: must be a table"),
        ({"disk": {"path": "/x", "size": "much"}, "namespace": "w"}, r"disk\.size"),
    ],
)
def test_a_wrong_disk_is_an_error_that_names_the_key(extra: dict[str, Any], problem: str) -> None:
    """Before anything is allocated, in the scheduler and in the worker."""
    with vllm_importable():
        for role in KVConnectorRole:
            with pytest.raises(ConfigError, match=problem):
                AoffloadConnector(vllm_config(**extra), role, kv_cache_config(24))


def test_a_local_model_needs_no_namespace(disk: Callable[..., SmallEngine], tmp_path: Path) -> None:
    """Its files say which one it is: other weights in the same place are another model."""
    model = tmp_path / "model"
    model.mkdir()
    found = []
    for weights in (b"one", b"one", b"two"):
        (model / "model.safetensors").write_bytes(weights)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("vllm_configs.MODEL", str(model))
            engine = disk(namespace="")
        found.append(counted(engine, "restored_blocks"))
        run(engine, Request("first", TEXT))
        engine.close()
    assert found == [0, 7, 0]


def test_a_transport_without_the_disk_is_refused(disk: Callable[..., SmallEngine]) -> None:
    """A `make_transport` that forgets it: else nothing would ever be found there, without a word."""
    with pytest.MonkeyPatch.context() as patch:
        from aoffload.transport import LocalTransport

        patch.setattr(AoffloadConnector, "make_transport", lambda self, regions: LocalTransport(regions))
        with pytest.raises(ConfigError, match="disk: must be the same in the transport"):
            disk()


def test_what_is_given_up_is_told_to_the_disk(disk: Callable[..., SmallEngine]) -> None:
    """Before anything else is copied: the block that a store still reads may be another prompt's by then."""
    engine = disk(store_timeout_s=2)
    calls: list[int] = []
    engine.workers[0]._transport.give_up = calls.append  # type: ignore[union-attr, method-assign]
    held_back: list[TransferPlan] = []
    instead(engine, DISK_STORE, lambda plan: held_back.append(plan))
    for number in range(24):
        engine.submit(Request(f"other {number}", [200 + number, *range(29)]))
        for _ in range(4):
            engine.step()
    assert held_back
    engine.now += 2.0
    settle(engine)
    assert {plan.job_id for plan in held_back} <= set(calls)  # others are, too, where a copy takes its time
    engine.alter = lambda commands: commands
    engine.workers[0].start(held_back)
    settle(engine)
