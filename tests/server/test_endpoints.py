"""The answers of each endpoint, without sockets."""

from __future__ import annotations

import sys
from typing import Any

import anyio
import attrs
import pytest
from http_bench import BACKENDS, OPTIONS, Caller, events_of, let_threads_run, reached, serving, text_of

pytestmark = [pytest.mark.anyio, BACKENDS]

LONG = "It was a dark and stormy night; the rain fell in torrents, except at occasional intervals. " * 2
CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": [{"type": "text", "text": "Hello"}]}]


async def test_models_are_listed_and_found_by_name() -> None:
    """The one model, with the longest request it takes; another name is a 404 that names the field."""
    async with serving() as bench:
        (model,) = (await bench.client.get("/v1/models")).json()["data"]
        assert (model["id"], model["max_model_len"]) == ("tiny", 1024)
        assert (await bench.client.get("/v1/models/tiny")).json() == model
        missing = await bench.client.get("/v1/models/gpt-9")
    assert (missing.status_code, missing.json()["error"]["param"]) == (404, "model")


async def test_an_answer_says_where_its_prompt_came_from() -> None:
    """Tokens of the prompt by tier: computed first, then on the device, then, pushed off by others, in host memory."""
    async with serving(attrs.evolve(OPTIONS, num_device_blocks=16)) as bench:
        first, again = [(await bench.complete(LONG))["usage"] for _ in range(2)]
        for number in range(2):
            await bench.complete(str(number) + LONG)
        loaded = (await bench.complete(LONG))["usage"]
    tiers = [usage["prompt_tokens_details"]["cached_tokens_by_tier"] for usage in (first, again, loaded)]
    assert tiers == [{"device": 0, "host": 0}, {"device": 128, "host": 0}, {"device": 0, "host": 128}]
    assert [usage["prompt_tokens_details"]["cached_tokens"] for usage in (first, again, loaded)] == [0, 128, 128]
    assert first["prompt_tokens"] == len(LONG)
    assert first["total_tokens"] == len(LONG) + first["completion_tokens"]


async def test_a_stream_says_the_same_as_a_whole_answer() -> None:
    """Pieces put together are the text, the last of them says why it ended, and one about tokens comes if asked."""
    async with serving() as bench:
        whole = await bench.complete(LONG, max_tokens=12)
        body = {"model": "tiny", "prompt": LONG, "max_tokens": 12, "stream": True}
        plain = events_of((await bench.post("/v1/completions", body)).content)
        counted = events_of(
            (await bench.post("/v1/completions", {**body, "stream_options": {"include_usage": True}})).content
        )
    assert text_of(plain) == text_of(counted) == whole["choices"][0]["text"]
    assert plain[-1] == counted[-1] == "[DONE]"
    assert plain[-2]["choices"][0]["finish_reason"] == whole["choices"][0]["finish_reason"] == "length"
    assert all("usage" not in event for event in plain[:-1])
    assert [event["usage"] for event in counted[:-2]] == [None] * (len(counted) - 2)
    assert counted[-2]["usage"]["completion_tokens"] == 12


async def test_a_chat_is_answered_as_a_message_and_as_deltas() -> None:
    """The role comes first and once; the text is the same in both forms."""
    async with serving() as bench:
        body = {"model": "tiny", "messages": CHAT, "max_completion_tokens": 6}
        whole = (await bench.post("/v1/chat/completions", body)).json()
        stream = events_of((await bench.post("/v1/chat/completions", {**body, "stream": True})).content)
    assert whole["object"] == "chat.completion"
    assert whole["choices"][0]["message"]["role"] == "assistant"
    deltas = [event["choices"][0]["delta"] for event in stream[:-1]]
    assert [delta.get("role") for delta in deltas] == ["assistant", *[None] * (len(deltas) - 1)]
    assert text_of(stream) == whole["choices"][0]["message"]["content"]


async def test_a_prompt_may_be_token_ids() -> None:
    """The ids of a text's tokens are the same prompt as the text."""
    async with serving() as bench:
        as_text = await bench.complete("Once upon")
        as_ids = await bench.complete(list(b"Once upon"))
        as_one = await bench.complete(["Once upon"])
    assert as_text["choices"] == as_ids["choices"] == as_one["choices"]


async def test_a_stop_string_ends_the_answer() -> None:
    """The text ends before it, the reason is `stop`, and nothing is computed that nobody reads."""
    async with serving() as bench:
        text = (await bench.complete(max_tokens=40, ignore_eos=True))["choices"][0]["text"]
        stop = text[10:14]
        num_forwards = bench.model.num_forwards
        ended = await bench.complete(max_tokens=40, ignore_eos=True, stop=["never seen", stop])
    assert ended["choices"][0] == {
        "index": 0, "text": text[: text.index(stop)], "logprobs": None, "finish_reason": "stop",
    }  # fmt: skip
    assert ended["usage"]["completion_tokens"] < 40
    assert bench.model.num_forwards - num_forwards < 40


async def test_tenants_share_nothing() -> None:
    """Another `cache_salt` finds nothing of the same prompt, the same one does."""
    async with serving() as bench:
        found = []
        for salt in ("a", "b", "a"):
            usage = (await bench.complete(LONG, cache_salt=salt))["usage"]
            found.append(usage["prompt_tokens_details"]["cached_tokens"])
    assert found == [0, 0, 128]


@pytest.mark.parametrize(
    ("first", "then", "found"),
    [({}, {"read": False}, 0), ({"store": False}, {}, 0), ({"store": True}, {"read": True}, 128), ({}, {}, 128)],
)
async def test_a_request_says_what_it_reads_and_what_is_stored_of_it(first: Any, then: Any, found: int) -> None:
    """`kv_offload` of one request: not stored, or not read, is computed again once the device has forgotten it."""
    async with serving(attrs.evolve(OPTIONS, num_device_blocks=16)) as bench:
        await bench.complete(LONG, kv_offload=first)
        for number in range(2):
            await bench.complete(str(number) + LONG)
        usage = (await bench.complete(LONG, kv_offload=then))["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == found


async def test_who_is_one_too_many_is_told_when_to_come_back() -> None:
    """429 with Retry-After and OpenAI's shape, while those inside get their answers; a place that is left is taken."""
    async with serving(attrs.evolve(OPTIONS, max_requests=2)) as bench:
        bench.model.may_end.clear()
        async with anyio.create_task_group() as inside:
            for _ in range(2):
                inside.start_soon(bench.complete)
            await reached(bench.model.began)
            while bench.service.admission.num_inside < 2:
                await let_threads_run()
            refused = await bench.post("/v1/completions", {"model": "tiny", "prompt": "x"})
            bench.model.may_end.set()
        assert (await bench.complete())["choices"]
    assert refused.status_code == 429
    assert int(refused.headers["retry-after"]) >= 1
    assert refused.json()["error"]["type"] == "rate_limit_error"
    assert bench.service.admission.num_refused == 1


async def test_a_server_that_drains_says_so() -> None:
    """No new work (503, with Retry-After), a health that says why; those inside are told to go in the way they read."""
    async with serving() as bench:
        assert (await bench.client.get("/health")).json() == {"status": "ok", "num_requests": 0}
        bench.model.may_end.clear()
        streaming, whole = Caller.of(bench, stream=True, max_tokens=40), Caller.of(bench, max_tokens=40)
        async with anyio.create_task_group() as inside:
            inside.start_soon(streaming.call)
            await reached(bench.model.began)
            bench.model.may_end.set()
            while not streaming.messages:
                await let_threads_run()
            bench.model.may_end.clear()
            inside.start_soon(whole.call)
            while bench.service.admission.num_inside < 2:
                await let_threads_run()
            bench.service.admission.drain()
            health = await bench.client.get("/health")
            refused = await bench.post("/v1/completions", {"model": "tiny", "prompt": "x"})
            bench.service.admission.end()
    assert (health.status_code, health.json()["status"]) == (503, "draining")
    assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
    assert (whole.status, whole.content.count(b'"unavailable"')) == (503, 1)
    events = events_of(streaming.content)
    assert events[-1]["error"]["code"] == "unavailable"
    assert streaming.messages[-1]["more_body"] is False


async def test_a_failed_forward_is_an_error_of_its_own_request() -> None:
    """500 with OpenAI's shape for the one in it; the next one is served."""
    async with serving() as bench:
        bench.model.fails = True
        failed = await bench.post("/v1/completions", {"model": "tiny", "prompt": "x"})
        streamed = await bench.post("/v1/completions", {"model": "tiny", "prompt": "x", "stream": True})
        bench.model.fails = False
        assert (await bench.complete())["choices"]
    for response in (failed, streamed):
        assert (response.status_code, response.json()["error"]["type"]) == (500, "server_error")


async def test_an_answer_that_takes_too_long_is_ended() -> None:
    """504 for a client that waits for the whole answer, and nothing of the request stays."""
    async with serving(attrs.evolve(OPTIONS, answer_timeout_s=0.05)) as bench:
        bench.model.may_end.clear()
        caller = Caller.of(bench)
        await caller.call()
        bench.model.may_end.set()
    assert (caller.status, b"timeout" in caller.content) == (504, True)


async def test_metrics_that_are_not_there_are_said_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """501 and a clear text where the module can't be imported."""
    monkeypatch.setitem(sys.modules, "aoffload.metrics", None)
    async with serving() as bench:
        response = await bench.client.get("/metrics")
    assert response.status_code == 501
    assert "metrics are not installed" in response.json()["error"]["message"]


async def test_metrics_that_are_there_are_those_of_this_server() -> None:
    """Two servers in one process count for themselves, and the page is one that Prometheus reads."""
    pytest.importorskip("aoffload.metrics", reason="there is no aoffload.metrics in this installation")
    async with serving() as bench, serving() as other:
        await bench.complete()
        pages = [await each.client.get("/metrics") for each in (bench, other)]
    assert all(page.headers["content-type"].startswith("text/plain") for page in pages)
    assert [page.text.count("aoffload_requests_admitted_total 1.0") for page in pages] == [1, 0]
