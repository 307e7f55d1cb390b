"""Hints that requests of vLLM carry: when they are applied, to what, and what their clients are answered."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from engine_doubles import BLOCK, TEXT, Request, lora
from small_engine import SmallEngine
from test_vllm_disk import only_on_disk, run, settle

from aoffload._vllm.hints import given_by
from aoffload.ledger import HintReason
from proof.attacks.payloads import BAD_VALUES, hostile

OTHER = range(150, 180)


def action(kind: str, action_id: str = "", **payload: Any) -> dict[str, Any]:
    return {"action_id": action_id, "action_type": kind, "action_version": "1", "payload": payload}


def with_hints(request_id: str, tokens: Any, *actions: Any, **fields: Any) -> Request:
    """As a client of the HTTP server sends them."""
    envelope = {"protocol_version": "1", "message_id": "m", "actions": list(actions)}
    return Request(request_id, tokens, kv_transfer_params={"kv_hints": envelope}, **fields)


def hear(engine: SmallEngine) -> dict[str, Any]:
    """What each finished request is answered, by its id."""
    found: dict[str, Any] = {}
    told = engine.connector.request_finished_all_groups

    def finished(request: Any, block_ids: Any) -> Any:
        is_kept, params = told(request, block_ids)
        assert is_kept is False, "a hint does not keep blocks"
        found[request.request_id] = params
        return is_kept, params

    engine.connector.request_finished_all_groups = finished  # type: ignore[method-assign]
    return found


def pinned(engine: SmallEngine) -> int:
    return engine.connector.ledger.statistics().host.num_pinned


def test_a_pin_keeps_the_whole_sequence(engines: Callable[..., SmallEngine]) -> None:
    """Prompt and answer, once the stores that are under way at the end have landed, until its time is over."""
    engine = engines(num_host_blocks=64)
    answers = hear(engine)
    engine.run(with_hints("first", TEXT, action("pin", "a", ttl_s=60), num_new=6))
    assert answers["first"] == {
        "kv_hints": [{"action_id": "a", "verb": "pin", "outcome": "accepted", "reason": "", "num_tokens": 36}]
    }
    settle(engine)
    assert pinned(engine) == 9
    for number in range(10):
        engine.run(Request(f"other {number}", [200 + number, *range(29)]))
    assert pinned(engine) == 9
    engine.manager.evict_all()
    engine.run(again := Request("again", TEXT))
    assert again.num_computed_tokens and engine.connector.ledger.statistics().host.num_pinned == 9
    engine.now = 61.0
    engine.step()
    assert pinned(engine) == 0


def test_a_request_without_hints_is_answered_nothing(engines: Callable[..., SmallEngine]) -> None:
    """And the ledger has no feature of hints for it."""
    engine = engines()
    answers = hear(engine)
    engine.run(Request("plain", TEXT), Request("other", OTHER, kv_transfer_params={"do_remote_decode": False}))
    assert answers == {"plain": None, "other": None}
    assert engine.connector.ledger.statistics().hints is None


def test_an_envelope_of_vllm_is_read(engines: Callable[..., SmallEngine]) -> None:
    """As an object with fields, which comes before the parameters of the request."""
    one = SimpleNamespace(**action("pin", "a", ttl_s=60))
    envelope = SimpleNamespace(protocol_version="1", message_id="m", actions=[one, SimpleNamespace(**action("fly"))])
    engine = engines()
    answers = hear(engine)
    engine.run(Request("first", TEXT, kv_hints=envelope, kv_transfer_params={"kv_hints": [action("done")]}))
    assert [answer["verb"] for answer in answers["first"]["kv_hints"]] == ["pin", "unknown"]


def test_an_envelope_may_be_anything() -> None:
    """Reading it raises nothing."""
    for value in BAD_VALUES:
        for request in (
            SimpleNamespace(kv_hints=value), SimpleNamespace(kv_transfer_params=value),
            SimpleNamespace(kv_transfer_params={"kv_hints": value}),
            SimpleNamespace(kv_hints=SimpleNamespace(protocol_version="1", actions=value)),
            SimpleNamespace(kv_hints=SimpleNamespace(protocol_version=value, actions=[value])),
        ):  # fmt: skip
            assert all(given.hint is None for given in given_by(request))


def test_done_ends_the_pin_of_a_conversation(engines: Callable[..., SmallEngine]) -> None:
    """A later request of the conversation says so."""
    engine = engines(num_host_blocks=64)
    answers = hear(engine)
    engine.run(with_hints("first", TEXT, action("pin", ttl_s=60)))
    settle(engine)
    assert pinned(engine) == 7
    engine.run(with_hints("last", [*TEXT, *range(40, 50)], action("done")))
    assert answers["last"]["kv_hints"][0]["outcome"] == "accepted"
    settle(engine)
    assert pinned(engine) == 0


def test_another_salt_touches_nothing(engines: Callable[..., SmallEngine]) -> None:
    """The same tokens under another salt are another prompt."""
    engine = engines(num_host_blocks=64)
    engine.run(with_hints("mine", TEXT, action("pin", ttl_s=60), cache_salt="a"))
    settle(engine)
    (pin,) = engine.connector.ledger.hints.pins
    engine.run(with_hints("theirs", TEXT, action("done"), action("demote"), action("pin", ttl_s=1), cache_salt="b"))
    settle(engine)
    assert pin in engine.connector.ledger.hints.pins and pin.match.num_tokens == 28


def test_a_preempted_request_applies_its_hints_once(engines: Callable[..., SmallEngine]) -> None:
    """When it has finished."""
    engine = engines(num_blocks=13, most_tokens=8, num_host_blocks=200)
    answers = hear(engine)
    pin = action("pin", ttl_s=60)
    engine.run(*(with_hints(f"r{at}", range(20 * at, 20 * at + 20), pin, num_new=9) for at in range(5)))
    settle(engine)
    assert engine.num_preemptions > 1 and [len(one["kv_hints"]) for one in answers.values()] == [1] * 5
    assert [held.match.num_tokens for held in engine.connector.ledger.hints.pins] == [28] * 5


@pytest.mark.parametrize("was_seen", [False, True])
def test_an_aborted_request_is_only_done(engines: Callable[..., SmallEngine], was_seen: bool) -> None:
    """A client that has gone keeps nothing, whether its request has begun or not; `done` still counts."""
    engine = engines(num_host_blocks=64)
    engine.run(with_hints("first", TEXT, action("pin", ttl_s=60)))
    settle(engine)
    answers = hear(engine)
    request = with_hints("gone", TEXT, action("pin", ttl_s=60), action("done"), num_new=20)
    request.status = SimpleNamespace(name="FINISHED_ABORTED")
    engine.submit(request)
    if was_seen:
        engine.step()
    engine.finish(request)
    settle(engine)
    reasons = [answer["reason"] for answer in answers["gone"]["kv_hints"]]
    assert reasons == (["not_finished", ""] if was_seen else ["not_cacheable", "not_cacheable"])
    assert pinned(engine) == (0 if was_seen else 7)


def test_what_is_not_cached_is_said(engines: Callable[..., SmallEngine]) -> None:
    """Embeddings have no tokens; the weights of an adapter may be unknown."""
    engine = engines()
    answers = hear(engine)
    embeds = with_hints("embeds", TEXT, action("pin", ttl_s=60), action("fly"), prompt_embeds=object())
    engine.run(embeds)
    assert [one["reason"] for one in answers["embeds"]["kv_hints"]] == ["not_cacheable", "unknown"]


def test_a_prefetch_begins_while_the_request_waits(engines: Callable[..., SmallEngine], tmp_path: Path) -> None:
    """From the disk, as soon as the request is in the queue of vLLM; without a disk there is nothing to bring."""
    engine = engines()
    answers = hear(engine)
    engine.connector.on_new_request(request := with_hints("early", TEXT, action("prefetch")))
    engine.run(request)
    assert answers["early"]["kv_hints"][0]["reason"] == HintReason.NO_LOWER_TIER.value

    options = {"num_host_blocks": 128, "namespace": "weights 1", "max_fetch_share": 1.0, "num_blocks": 40}
    engine = engines(disk={"path": str(tmp_path / "kv"), "size": "1MiB"}, **options)
    settle(engine)
    only_on_disk(engine)
    answers = hear(engine)
    request = with_hints("late", TEXT, action("prefetch", "p"), action("pin", ttl_s=60))
    engine.connector.on_new_request(request)
    ledger = engine.connector.ledger
    assert ledger.transfers.under_way, "the fetch has begun before vLLM has asked about the request"
    run(engine, request)
    first, second = answers["late"]["kv_hints"]
    assert (first["verb"], first["outcome"], first["num_tokens"]) == ("prefetch", "accepted", 28)
    assert second["outcome"] == "accepted"


def test_hints_are_counted(engines: Callable[..., SmallEngine]) -> None:
    """For vLLM's log and for Prometheus, by verb, outcome and reason."""
    engine = engines()
    engine.run(with_hints("first", TEXT, action("pin", ttl_s=60), action("pin", ttl_s=0), action("fly")))
    found = engine.connector.get_kv_connector_stats().data
    counted = {name: value for name, value in found.items() if name.startswith("hints")}
    assert counted == {"hints|pin|accepted|": 1, "hints|pin|rejected|malformed": 1, "hints|unknown|rejected|unknown": 1}


def test_hints_of_an_adapter_are_about_its_weights(engines: Callable[..., SmallEngine]) -> None:
    """The pin of a request with an adapter keeps nothing that a request without it could hit."""
    engine = engines(num_host_blocks=64, num_blocks=40)
    engine.files |= {"/adapter": 1}
    answers = hear(engine)
    for name in ("first", "again"):
        engine.run(with_hints(name, TEXT, action("pin", ttl_s=60), action("prefetch"), lora_request=lora(1)))
        settle(engine)
    assert [one["reason"] for one in answers["again"]["kv_hints"]] == ["", "not_cacheable"]
    roots = {pin.sequence.root for pin in engine.connector.ledger.hints.pins}
    engine.run(with_hints("plain", TEXT, action("pin", ttl_s=60)))
    settle(engine)
    assert {pin.sequence.root for pin in engine.connector.ledger.hints.pins} > roots


def test_hostile_hints_fail_no_request(engines: Callable[..., SmallEngine]) -> None:
    """Whatever requests carry: each is computed, the connector stays on, the answers are JSON, and no more is pinned
    than the share of hints."""
    engine = engines(num_host_blocks=40, num_blocks=40)
    answers = hear(engine)
    rng = random.Random(3)
    for number in range(400):
        tokens = [number % 9, *range(rng.randrange(4, 28))]
        where = {"kv_hints": hostile(rng)} if number % 3 else {"kv_transfer_params": {"kv_hints": hostile(rng)}}
        request = Request(f"request {number}", tokens, cache_salt=f"salt {number % 2}", **where)
        engine.connector.on_new_request(request)
        engine.run(request)
        assert pinned(engine) <= 40 // 4 + len(engine.connector.ledger.jobs.unsettled) * BLOCK
        engine.now += rng.choice((0, 1, 40))
    settle(engine)
    assert pinned(engine) <= 40 // 4
    assert len(answers) == 400
    json.dumps(list(answers.values()))
