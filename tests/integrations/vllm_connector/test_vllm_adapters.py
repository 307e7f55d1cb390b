"""LoRA adapters: KV is that of the weights that vLLM has loaded, whatever their name, their path and their id."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs
import pytest
import torch
from engine_doubles import TEXT, LoraManager, Request, Weights, feature, lora
from small_engine import SmallEngine, counted, to_rest
from test_vllm_disk import settle

from aoffload._vllm.adapters import Adapters
from aoffload._vllm.messages import AdapterSeen, Commands
from aoffload._vllm.worker_adapters import LoadedAdapters, digest_of, watch

HIT = 7
"""Blocks of TEXT that a request loads."""


def say(engine: SmallEngine, name: str, adapter: Any, num_new: int = 2) -> float:
    """Serve TEXT by `adapter`, with nothing in the engine's own cache. Returns how many blocks were loaded."""
    engine.manager.evict_all()
    before = counted(engine, "copied_blocks|load|host")
    engine.run(Request(name, TEXT, lora_request=adapter, num_new=num_new))
    return counted(engine, "copied_blocks|load|host") - before


@pytest.fixture
def tenant(engines: Callable[..., SmallEngine]) -> Callable[..., SmallEngine]:
    """An engine that has stored TEXT of the adapter 1, whose weights are 1."""

    def make(**options: Any) -> SmallEngine:
        engine = engines(**{"num_blocks": 40} | options)
        engine.files |= {"/adapter": 1, "/other": 1}
        assert say(engine, "first", lora(1)) == 0
        return engine

    return make


@pytest.mark.parametrize("options", [{}, {"num_ranks": 2}, {"windows": (0, 12)}])
def test_a_prompt_of_an_adapter_hits(tenant: Callable[..., SmallEngine], options: dict[str, Any]) -> None:
    """Under its id, and as soon as vLLM has loaded it, under another one, and from another place under another name:
    the weights are the same. Without the adapter nothing hits."""
    engine = tenant(**options)
    assert say(engine, "again", lora(1)) >= HIT
    assert say(engine, "another id", lora(2)) == 0, "nobody knows yet what vLLM will read"
    assert say(engine, "another id, again", lora(2)) >= HIT
    other = lora(3, "other", "/other")
    for manager in engine.loras:
        manager.evict()
        manager.add_adapter(other)
    assert (say(engine, "elsewhere", other) >= HIT) is (len(engine.manager.windows) == 1)
    assert say(engine, "base", None) == 0


def test_an_adapter_that_was_trained_again_hits_nothing_of_before(tenant: Callable[..., SmallEngine]) -> None:
    """It lies under the same path and has the same name, and vLLM reads it under a new id. What it computes hits later,
    and so does what the weights before have computed."""
    engine = tenant()
    engine.files["/adapter"] = 2
    assert [say(engine, f"new {number}", lora(2)) for number in range(2)] == [0, HIT]
    assert say(engine, "old", lora(1)) == HIT, "vLLM still has the weights before under their id"


def test_an_adapter_that_is_loaded_in_place_hits_nothing_of_before(tenant: Callable[..., SmallEngine]) -> None:
    """vLLM reads it again under the same id, between two steps. The connector plans the next load before it hears of
    that; the worker does not make it."""
    engine = tenant()
    engine.files["/adapter"] = 2
    engine.loras[0].add_adapter(lora(1, load_inplace=True))
    assert [say(engine, f"new {number}", lora(1)) for number in range(2)] == [0, HIT]
    assert counted(engine, "jobs|load|host|failed") == 1


def test_an_adapter_that_was_evicted_and_is_read_again_hits_nothing_of_before(
    tenant: Callable[..., SmallEngine],
) -> None:
    """Nobody tells of that: the forward over what was loaded reads other weights. vLLM computes it again."""
    engine = tenant()
    engine.files["/adapter"] = 2
    engine.loras[0].evict()
    assert say(engine, "new", lora(1)) == HIT, "loaded, and taken back"
    assert not engine.wrong
    assert say(engine, "second", lora(1)) == 0
    assert say(engine, "third", lora(1)) == HIT


def test_an_adapter_that_was_evicted_and_has_not_changed_hits(tenant: Callable[..., SmallEngine]) -> None:
    """vLLM evicts adapters all the time."""
    engine = tenant()
    engine.loras[0].evict()
    assert say(engine, "again", lora(1)) == HIT
    assert engine.loras[0].num_read == 2
    assert not any(one.invalid for step in engine.worker_outputs for one in step), "nothing was taken back"


@pytest.mark.parametrize("is_known", [True, False])
def test_with_several_groups_nothing_is_loaded_that_could_not_be_taken_back(
    tenant: Callable[..., SmallEngine], is_known: bool
) -> None:
    """vLLM takes blocks of a running request back with one group only. So there is no load while vLLM would read the
    adapter again, nor while there are more adapters than it keeps."""
    engine = tenant(windows=(0, 12))
    engine.files["/adapter"] = 2
    if is_known:
        for number in (2, 3):
            say(engine, f"other {number}", lora(number, "other", "/other"))
    engine.loras[0].evict()
    failed = counted(engine, "jobs|load|host|failed")
    assert say(engine, "new", lora(1)) == 0
    assert (counted(engine, "jobs|load|host|failed") > failed) is not is_known


def test_weights_that_change_between_plan_and_copy_are_not_stored(tenant: Callable[..., SmallEngine]) -> None:
    """The step that stores is planned under the weights before, and runs under others."""
    engine = tenant()
    engine.connector.reset_cache()
    engine.files["/adapter"], is_read = 2, []

    def alter(commands: Commands) -> Commands:
        if commands.stores and not is_read:
            is_read.append(engine.loras[0].add_adapter(lora(1, load_inplace=True)))
        return commands

    engine.alter = alter
    say(engine, "new", lora(1), num_new=9)
    assert counted(engine, "jobs|store|host|failed") == 1
    assert engine.connector.ledger.statistics().host.num_cached == 0
    assert [say(engine, f"again {number}", lora(1)) for number in range(2)] == [0, HIT]


def test_weights_that_change_and_change_back_are_not_the_same(tenant: Callable[..., SmallEngine]) -> None:
    """A request that runs meanwhile has KV of both: none of it is stored from then on."""
    engine = tenant()
    engine.connector.reset_cache()
    engine.manager.evict_all()
    engine.most_tokens = 4
    engine.submit(Request("new", TEXT, lora_request=lora(1)))
    for number in (1, 2, 1):
        engine.files["/adapter"] = number
        engine.loras[0].add_adapter(lora(1, load_inplace=True))
        engine.step()
    engine.run()
    engine.wrong.clear()  # vLLM itself computes on behind KV of other weights
    engine.most_tokens = 1_000
    assert say(engine, "again", lora(1)) <= 1


def test_a_load_that_has_landed_under_other_weights_is_lost(tenant: Callable[..., SmallEngine]) -> None:
    """They have changed while vLLM waited for it."""
    engine = tenant()
    engine.manager.evict_all()
    held_back: list[Commands] = []
    engine.alter = lambda commands: (held_back.append(commands), attrs.evolve(commands, loads=()))[1]
    engine.submit(Request("again", TEXT, lora_request=lora(1)))
    engine.step()
    engine.alter = lambda commands: commands
    engine.workers[0].start(held_back[0].loads, held_back[0].uses)
    assert engine.workers[0].copies.wait(30)
    engine.files["/adapter"] = 2
    engine.loras[0].add_adapter(lora(1, load_inplace=True))
    engine.run()
    assert counted(engine, "jobs|load|host|landed") == 1 and not engine.wrong
    assert say(engine, "second", lora(1)) == HIT


def test_what_vllm_has_kept_of_other_weights_is_not_stored(tenant: Callable[..., SmallEngine]) -> None:
    """Its own cache goes by name and path. What a request computes after a hit there is cached nowhere, until that
    cache has been emptied."""
    engine = tenant()
    engine.manager.evict_all()
    engine.run(Request("old", TEXT, lora_request=lora(1)))
    engine.files["/adapter"] = 2
    say(engine, "new", lora(2))
    engine.manager.evict_all()
    engine.run(Request("stale", TEXT[:13], lora_request=lora(1)))
    num_cached = engine.connector.ledger.statistics().host.num_cached
    engine.run(Request("behind", [*TEXT[:13], *range(100, 120)], lora_request=lora(2), num_new=2))
    assert engine.wrong, "vLLM itself has read KV of other weights"
    engine.wrong.clear()
    assert engine.connector.ledger.statistics().host.num_cached == num_cached
    engine.manager.evict_all()
    engine.connector.reset_cache()
    engine.run(Request("head", TEXT[:13], lora_request=lora(2)))
    engine.run(Request("tail", TEXT, lora_request=lora(2)))
    assert say(engine, "again", lora(2)) == HIT


def test_new_weights_right_after_a_reset_are_taken(tenant: Callable[..., SmallEngine]) -> None:
    """An engine of reinforcement learning resets its caches, and then loads the trained adapter in place, before any
    request asks for it."""
    engine = tenant()
    engine.manager.evict_all()
    engine.connector.reset_cache()
    engine.files["/adapter"] = 2
    engine.loras[0].add_adapter(lora(1, load_inplace=True))
    engine.run(Request("base", [1, 2, 3]))
    assert not engine.connector.off_reason
    assert [say(engine, f"new {number}", lora(1)) for number in range(2)] == [0, HIT]


def test_what_vllm_has_made_of_an_image_under_other_weights_is_not_stored(tenant: Callable[..., SmallEngine]) -> None:
    """It keeps what its encoder has made of an image by the name of the adapter."""
    engine = tenant()
    engine.files["/adapter"] = 2
    assert [say(engine, f"new {number}", lora(2)) for number in range(2)] == [0, HIT]
    num_cached = engine.connector.ledger.statistics().host.num_cached
    for name in ("image", "image again"):
        engine.manager.evict_all()
        request = Request(name, TEXT, lora_request=lora(2), mm_features=[feature(0, 4, "tenant:cat")], num_new=2)
        engine.run(request)
    assert engine.connector.ledger.statistics().host.num_cached == num_cached


@pytest.mark.parametrize("is_loaded", [True, False])
@pytest.mark.parametrize("number", [1, 2])
def test_a_restart_finds_the_kv_of_the_same_weights(
    engines: Callable[..., SmallEngine], tmp_path: Path, number: int, is_loaded: bool
) -> None:
    """On the disk, with the first request where vLLM has loaded the adapter before, as its server does; else with the
    second. An adapter that was trained again meanwhile finds nothing."""
    disk = {"path": str(tmp_path / "kv"), "size": "1MiB"}
    options: dict[str, Any] = {"num_host_blocks": 128, "namespace": "w", "max_fetch_share": 1.0, "num_blocks": 40}
    first = engines(**options, disk=disk)
    first.files["/adapter"] = 1
    settle(first)
    first.submit(Request("first", TEXT, lora_request=lora(1), num_new=2))
    settle(first)
    first.close()
    second = engines(**options, disk=disk)
    settle(second)
    second.files["/adapter"] = number
    if is_loaded:
        second.loras[0].add_adapter(lora(5))
    for name in ("again", "once more"):
        second.manager.evict_all()
        second.submit(Request(name, TEXT, lora_request=lora(5), num_new=2))
        settle(second)
    fetched = counted(second, "copied_blocks|load|disk")
    assert fetched == (HIT if number == 1 and is_loaded else 0)
    assert counted(second, "copied_blocks|load|host") == (2 * HIT if number == 1 and is_loaded else HIT)


def test_ranks_that_have_read_other_weights_share_nothing(tenant: Callable[..., SmallEngine]) -> None:
    """Each reads the files by itself. KV of the one weights here and the others there is that of neither."""
    engine = tenant(num_ranks=2)
    for manager in engine.loras:
        manager.evict()
    engine.loras[1].files = {"/adapter": 2}
    engine.manager.evict_all()
    engine.run(Request("mixed", TEXT, lora_request=lora(2), num_new=2))
    assert counted(engine, "copied_blocks|load|host") == 0
    seen = {use.key for use in engine.half.adapters._uses.values()}
    assert len(seen) == 2


def test_an_adapter_that_cannot_be_read_hits_as_long_as_it_stays(
    tenant: Callable[..., SmallEngine], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing else has its key: not what was read from the same place later."""
    engine = tenant()
    monkeypatch.setattr(
        Weights, "__init__", lambda self, adapter, number: setattr(self, "number", number) or self.odd()
    )
    monkeypatch.setattr(Weights, "odd", lambda self: setattr(self, "rest", iter(())), raising=False)
    engine.files["/adapter"] = 2
    assert [say(engine, f"new {number}", lora(2)) for number in range(2)] == [0, HIT]
    engine.loras[0].add_adapter(lora(2, load_inplace=True))
    assert [say(engine, f"later {number}", lora(2)) for number in range(2)] == [0, HIT]
    assert "cannot compare" in caplog.text


def test_without_a_look_at_adapters_nothing_of_them_is_cached(engines: Callable[..., SmallEngine]) -> None:
    """A version of vLLM that loads them otherwise. Requests without an adapter are cached as ever."""
    engine = engines(num_blocks=40)
    engine.files["/adapter"] = 1
    engine.workers[0].adapters = None
    for name in ("first", "second", "third"):
        assert say(engine, name, lora(1)) == 0
    assert engine.connector.ledger.statistics().host.num_cached == 0
    assert [say(engine, f"base {number}", None) for number in range(2)] == [0, HIT]


def test_every_copy_of_an_adapter_says_which_weights_it_is_of(tenant: Callable[..., SmallEngine]) -> None:
    """Loads, stores of a step, and those at the end of a request, where windows are stored."""
    engine, unsaid, seen = tenant(windows=(0, 12)), list[int](), list[int]()

    def alter(commands: Commands) -> Commands:
        for plan in (*commands.loads, *commands.stores):
            (seen if plan.job_id in commands.uses else unsaid).append(plan.job_id)
        return commands

    engine.alter = alter
    assert say(engine, "again", lora(1)) >= HIT
    engine.run(Request("other", range(100, 131), lora_request=lora(1), num_new=20))
    assert len(seen) > 3 and not unsaid
    engine.run(Request("base", range(60, 90)))
    assert unsaid


def test_a_step_without_copies_compares_weights_too(tenant: Callable[..., SmallEngine]) -> None:
    """All that the first step of a request over its load has to say to the workers may be that."""
    engine, steps = tenant(), list[Commands]()
    engine.alter = lambda commands: (steps.append(commands), commands)[1]
    assert say(engine, "again", lora(1), num_new=0) == HIT
    compared = [commands for commands in steps if commands.forwards]
    assert len(compared) == 1 and len(compared[0].forwards[0].block_ids) == HIT
    assert not (compared[0].loads or compared[0].stores or compared[0].reports)


def test_a_preempted_request_of_an_adapter_loads_what_it_has_stored(tenant: Callable[..., SmallEngine]) -> None:
    """Also the first one of its adapter, which the ledger knows only after its first step."""
    engine = tenant()
    engine.manager.evict_all()
    request = Request("new", range(100, 130), lora_request=lora(2, "other", "/other"), num_new=12)
    engine.submit(request)
    for _ in range(8):
        engine.step()
        assert engine.workers[0].copies.wait(30)
    engine.preempt(request)
    engine.manager.evict_all()
    engine.run()
    assert counted(engine, "copied_blocks|load|host") >= HIT
    to_rest(engine)


def test_a_digest_is_of_everything_but_the_id() -> None:
    """Weights, their type and shape, numbers and names of layers: whatever changes what is computed."""

    def model(**fields: Any) -> Any:
        layer = {"lora_a": torch.ones(2, 3), "lora_b": [torch.zeros(0), None], "scaling": 1.0, "rank": 2}
        return SimpleNamespace(id=fields.pop("id", 1), loras={"q": SimpleNamespace(**layer | fields)})

    changes: list[dict[str, Any]] = [
        {}, {"lora_a": torch.ones(2, 3, dtype=torch.bfloat16)}, {"lora_a": torch.ones(3, 2)},
        {"lora_a": torch.ones(2, 3) * 2}, {"scaling": 2.0}, {"rank": 4}, {"lora_b": [None, torch.zeros(0)]},
        {"bias": None}, {"names": {"a", "b"}}, {"names": ("a", "b")},
    ]  # fmt: skip
    digests = [digest_of(model(**change)) for change in changes]
    assert len(set(digests)) == len(changes)
    assert digest_of(model(id=2)) == digests[0] == digest_of(model())
    deep: list[Any] = []
    deep.append(deep)
    for odd in (iter(()), deep, torch.ones(2, device="meta")):
        assert digest_of(model(odd=odd)) != digest_of(model(odd=odd))


def test_only_the_manager_of_this_engine_is_looked_at() -> None:
    """One process may have several engines, and each has its adapters. Which weights a dummy has that vLLM warms up
    with is never told."""
    ours, others = SimpleNamespace(max_cpu_loras=2), SimpleNamespace(max_cpu_loras=2)
    seen = LoadedAdapters(0, ours)
    assert seen.take() == () and not seen.is_loaded(1)
    LoraManager(others, {"/adapter": 1}).set_active_adapters([lora(1)], None)
    assert seen.take() == ()
    manager = LoraManager(ours, {"/adapter": 1, "/dummy": 0})
    manager.set_active_adapters([lora(1, path="/dummy")], None)
    manager.evict()
    manager.set_active_adapters([lora(1)], None)
    (news,) = seen.take()
    assert news == AdapterSeen(0, 1, 1, digest_of(Weights(1, 1)))
    assert seen.take() == () and seen.is_loaded(1)


def test_a_manager_that_vllm_has_changed_is_left_alone() -> None:
    """Its method takes other arguments than those that are known: nothing is put in its place."""

    class Other:
        def list_adapters(self, rank: int) -> None: ...

    class Renamed: ...

    before = Other.list_adapters
    assert not watch(Other) and not watch(Renamed)
    assert Other.list_adapters is before
    inner = LoraManager.list_adapters
    assert watch(LoraManager) and LoraManager.list_adapters is inner, "watched once"


def test_an_adapter_is_known_once_every_rank_has_told() -> None:
    """Until then nothing is cached under it."""
    adapters = Adapters(2, 2)
    assert adapters.hear([AdapterSeen(0, 1, 1, "a")]) == [] and adapters.use_of(1) is None
    (use,) = adapters.hear([AdapterSeen(1, 1, 1, "a")])
    assert adapters.use_of(1) == use and use.serials == {0: 1, 1: 1}
    (other,) = adapters.hear([AdapterSeen(1, 1, 2, "b")])
    assert other.serials == {0: 1, 1: 2} and other.key != use.key
