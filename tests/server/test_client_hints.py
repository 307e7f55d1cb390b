"""Hints of clients over HTTP: `cache_control`, `prompt_cache_retention` and `kv_hints`, and what is answered."""

from __future__ import annotations

import json
import math
import random
from typing import Any

import anyio
import pytest
from http_bench import BACKENDS, GUARD_S, Bench, Caller, events_of, let_threads_run, reached, serving

from aoffload.ledger import Pin
from proof.attacks.payloads import hostile

pytestmark = [pytest.mark.anyio, BACKENDS]

LONG = "It was a dark and stormy night; the rain fell in torrents, except at occasional intervals. " * 2
EPHEMERAL = {"type": "ephemeral"}


def pins(bench: Bench) -> tuple[Pin, ...]:
    return bench.service.engine.runtime.ledger.hints.pins


def drop(bench: Bench) -> None:
    bench.service.engine.runtime.ledger.pins.drop()


def left_s(bench: Bench) -> list[int]:
    """Seconds that the pins still last, rounded up."""
    now = bench.service.engine.runtime._session.now()
    return [math.ceil(pin.expires_at - now) for pin in pins(bench)]


@pytest.mark.parametrize(
    ("control", "seconds"),
    [(EPHEMERAL, 300), ({**EPHEMERAL, "ttl": "5m"}, 300), ({**EPHEMERAL, "ttl": "1h"}, 3600)],
)
async def test_a_body_is_pinned_for_its_time(control: Any, seconds: int) -> None:
    """Prompt and answer, as clients of Anthropic's API say it; the answer says what was done."""
    async with serving() as bench:
        answer = await bench.complete(LONG, max_tokens=4, cache_control=control)
        (told,) = answer["kv_hints"]
        assert told == {
            "action_id": "cache_control", "verb": "pin", "outcome": "accepted", "reason": "",
            "num_tokens": 128,
        }  # fmt: skip
        assert left_s(bench) == [seconds]
        assert bench.service.engine.runtime.statistics().device.num_pinned == 8
        drop(bench)


async def test_a_message_is_pinned_up_to_its_end() -> None:
    """Its mark may stand on the message, or on the last part of it. What comes after it is not pinned."""
    text = LONG[:100]
    async with serving() as bench:
        system = {"role": "system", "content": text, "cache_control": EPHEMERAL}
        parts = [
            {"type": "text", "text": text},
            {"type": "text", "text": "!", "cache_control": {**EPHEMERAL, "ttl": "1h"}},
        ]
        messages = [system, {"role": "user", "content": parts}, {"role": "user", "content": text}]
        body = {"model": "tiny", "messages": messages, "max_tokens": 2}
        answer = (await bench.post("/v1/chat/completions", body)).json()
        first, second = answer["kv_hints"]
        assert (first["action_id"], first["num_tokens"]) == ("messages[0].cache_control", (len(text) + 2) // 16 * 16)
        assert (second["action_id"], second["num_tokens"]) == (
            "messages[1].cache_control", (2 * len(text) + 5) // 16 * 16
        )  # fmt: skip
        drop(bench)


async def test_a_retention_is_clipped_to_the_longest_time() -> None:
    """As clients of OpenAI's API say it: a day is more than the hour that the server allows."""
    async with serving() as bench:
        answer = await bench.complete(LONG, prompt_cache_retention="24h")
        assert [(a["outcome"], a["reason"]) for a in answer["kv_hints"]] == [("clipped", "ttl_limit")]
        assert left_s(bench) == [3600]
        drop(bench)
        assert "kv_hints" not in await bench.complete(LONG, prompt_cache_retention="in_memory")


async def test_every_verb_is_taken_and_the_answers_keep_their_order() -> None:
    """The same payload as vLLM's."""
    async with serving() as bench:
        await bench.complete(LONG)
        kinds = ("pin", "prefetch", "returns", "done", "fly")
        actions = [{"action_id": kind, "action_type": kind, "payload": {"ttl_s": 60}} for kind in kinds]
        answer = await bench.complete(LONG, kv_hints={"protocol_version": "1", "actions": actions})
        told = [(a["action_id"], a["outcome"], a["reason"]) for a in answer["kv_hints"]]
        assert told == [
            ("pin", "accepted", ""), ("prefetch", "rejected", "already_there"),
            ("returns", "rejected", "eviction_not_learned"), ("done", "accepted", ""), ("fly", "rejected", "unknown"),
        ]  # fmt: skip
        assert pins(bench) == ()


@pytest.mark.parametrize("has_usage", [False, True])
async def test_the_last_event_of_a_stream_has_the_answers(has_usage: bool) -> None:
    """And no other event. A request without hints is answered as ever."""
    async with serving() as bench:
        options = {"stream_options": {"include_usage": True}} if has_usage else {}
        body = {"model": "tiny", "prompt": LONG, "max_tokens": 4, "stream": True, **options}
        events = events_of((await bench.post("/v1/completions", {**body, "cache_control": EPHEMERAL})).content)
        assert [("kv_hints" in event) for event in events[:-1]] == [*[False] * (len(events) - 2), True]
        assert ("usage" in events[-2]) is has_usage
        drop(bench)
        plain = events_of((await bench.post("/v1/completions", body)).content)
        assert not any("kv_hints" in event for event in plain[:-1])


async def test_bad_values_are_answered_and_fail_nothing() -> None:
    """Each of them is a reason, and the request is served."""
    async with serving() as bench:
        for bad in (True, 5, "ephemeral", [], {"type": "forever"}, {**EPHEMERAL, "ttl": "2h"}, {**EPHEMERAL, "ttl": 5}):
            for name in ("cache_control", "prompt_cache_retention"):
                answer = await bench.complete(LONG, **{name: bad})
                assert [a["reason"] for a in answer["kv_hints"]] == ["malformed"], (name, bad)
        for bad in (True, 5, "pin", {"pin": 5}, [5], [{"action_type": "pin", "payload": {"ttl_s": -5}}]):
            answer = await bench.complete(LONG, kv_hints=bad)
            assert [a["reason"] for a in answer["kv_hints"]] == ["malformed"], bad
        assert pins(bench) == ()
        found = bench.service.engine.runtime.statistics().hints
        assert found is not None and sum(found.answers.values()) == 20


async def test_only_the_last_marks_of_a_chat_count() -> None:
    """Each is tokenized on its own, so there are few; the others have one answer together."""
    async with serving() as bench:
        messages = [{"role": "user", "content": LONG[:40], "cache_control": EPHEMERAL} for _ in range(7)]
        answer = (await bench.post("/v1/chat/completions", {"model": "tiny", "messages": messages})).json()
        assert [a["reason"] for a in answer["kv_hints"]] == ["", "", "", "", "too_many_actions"]
        drop(bench)


async def test_a_client_that_hangs_up_pins_nothing() -> None:
    """Its request is not complete: only `done` counts."""
    async with serving() as bench:
        await bench.complete(LONG, cache_control=EPHEMERAL)
        assert len(pins(bench)) == 1
        bench.model.may_end.clear()
        bench.model.began.clear()
        actions = [{"action_type": "pin", "payload": {"ttl_s": 60}}, {"action_type": "done"}]
        caller = Caller.of(bench, prompt=LONG, max_tokens=40, kv_hints=actions)
        with anyio.fail_after(GUARD_S):
            async with anyio.create_task_group() as clients:
                clients.start_soon(caller.call)
                await reached(bench.model.began)
                caller.has_hung_up.set()
            while bench.service.engine.runtime.statistics().num_requests:
                await let_threads_run()
        bench.model.may_end.set()
        found = bench.service.engine.runtime.statistics().hints
        assert found is not None
        reasons = [key[2].value for key in found.answers]
        assert "not_finished" in reasons
        drop(bench)


async def test_another_salt_touches_nothing() -> None:
    """The pin of a tenant outlives what another tenant says about the same text."""
    async with serving() as bench:
        await bench.complete(LONG, cache_control=EPHEMERAL, cache_salt="tenant-a")
        (pin,) = pins(bench)
        actions = [{"action_type": kind} for kind in ("done", "demote", "prefetch")]
        await bench.complete(LONG, kv_hints=actions, cache_salt="tenant-b")
        assert pins(bench) == (pin,)
        drop(bench)


async def test_hostile_hints_fail_no_request() -> None:
    """Whatever JSON they are."""
    async with serving() as bench:
        rng, num_sent = random.Random(5), 0
        while num_sent < 60:
            try:
                payload = json.loads(json.dumps(hostile(rng), allow_nan=False, default=None))
            except (TypeError, ValueError, RecursionError, RuntimeError):
                continue
            if len(json.dumps(payload)) > 10**5:
                continue
            num_sent += 1
            answer = await bench.complete(LONG, max_tokens=1, kv_hints=payload, cache_salt=f"{num_sent % 3}")
            assert len(answer.get("kv_hints", ())) <= 17
        drop(bench)
