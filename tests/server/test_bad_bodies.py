"""Invalid requests: the error names the field in OpenAI's format, and the server goes on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, ClassVar

import pytest
from http_bench import BACKENDS, serving

from aoffload._reference.server.bodies import Fields, Limits, read_chat, read_completion

pytestmark = [pytest.mark.anyio, BACKENDS]

PROMPT = {"prompt": "x"}
BOTH: list[tuple[dict[str, Any], int, str | None]] = [
    ({"model": None}, 400, "model"),
    ({"model": 3}, 400, "model"),
    ({"model": "gpt-9"}, 404, "model"),
    ({"max_tokens": "5"}, 400, "max_tokens"),
    ({"max_tokens": 0}, 400, "max_tokens"),
    ({"max_tokens": True}, 400, "max_tokens"),
    ({"max_tokens": 1.5}, 400, "max_tokens"),
    ({"max_tokens": 10**30}, 400, "max_tokens"),
    ({"max_tokens": 1024}, 400, "max_tokens"),
    ({"stream": 1}, 400, "stream"),
    ({"stream_options": {"include_usage": True}}, 400, "stream_options"),
    ({"stream": True, "stream_options": []}, 400, "stream_options"),
    ({"stream": True, "stream_options": {"include_usage": "yes"}}, 400, "stream_options.include_usage"),
    ({"n": 2}, 400, "n"),
    ({"temperature": 0.7}, 400, "temperature"),
    ({"temperature": False}, 400, "temperature"),
    ({"top_p": "1"}, 400, "top_p"),
    ({"logit_bias": {"1": 5}}, 400, "logit_bias"),
    ({"stop": 5}, 400, "stop"),
    ({"stop": ""}, 400, "stop"),
    ({"stop": ["a"] * 5}, 400, "stop"),
    ({"stop": ["a", 5]}, 400, "stop[1]"),
    ({"stop": "x" * 300}, 400, "stop"),
    ({"cache_salt": 5}, 400, "cache_salt"),
    ({"cache_salt": ""}, 400, "cache_salt"),
    ({"cache_salt": "\ud800"}, 400, "cache_salt"),
    ({"cache_salt": "x" * 2000}, 400, "cache_salt"),
    ({"kv_offload": True}, 400, "kv_offload"),
    ({"kv_offload": {"read": 1}}, 400, "kv_offload.read"),
    ({"kv_offload": {"store": "no"}}, 400, "kv_offload.store"),
    ({"kv_offload": {"write": True}}, 400, "kv_offload.write"),
    ({"kv_ofload": {}}, 400, "kv_ofload"),
    ({"ignore_eos": "yes"}, 400, "ignore_eos"),
]
COMPLETIONS: list[tuple[dict[str, Any], int, str | None]] = [
    ({"prompt": None}, 400, "prompt"),
    ({"prompt": ""}, 400, "prompt"),
    ({"prompt": 5}, 400, "prompt"),
    ({"prompt": []}, 400, "prompt"),
    ({"prompt": {}}, 400, "prompt"),
    ({"prompt": ["a", "b"]}, 400, "prompt"),
    ({"prompt": [[1, 2]]}, 400, "prompt"),
    ({"prompt": [1, 512]}, 400, "prompt[1]"),
    ({"prompt": [1, 2, -1]}, 400, "prompt[2]"),
    ({"prompt": [1, 2, "x"]}, 400, "prompt[2]"),
    ({"prompt": [1, True]}, 400, "prompt[1]"),
    ({"prompt": "\udc00"}, 400, "prompt"),
    ({"prompt": "x" * 1024}, 400, "prompt"),
    ({"prompt": [5] * 1024}, 400, "prompt"),
    ({"prompt": "x" * 1020, "max_tokens": 5}, 400, "max_tokens"),
    ({"prompt": "x" * 2**20}, 400, "prompt"),
    ({"echo": True}, 400, "echo"),
    ({"best_of": 2}, 400, "best_of"),
    ({"logprobs": 1}, 400, "logprobs"),
    ({"suffix": "x"}, 400, "suffix"),
    ({"messages": []}, 400, "messages"),
]
CHATS: list[tuple[dict[str, Any], int, str | None]] = [
    ({"messages": None}, 400, "messages"),
    ({"messages": []}, 400, "messages"),
    ({"messages": "x"}, 400, "messages"),
    ({"messages": ["x"]}, 400, "messages[0]"),
    ({"messages": [{"content": "x"}]}, 400, "messages[0].role"),
    ({"messages": [{"role": "wizard", "content": "x"}]}, 400, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, 400, "messages[0].content"),
    ({"messages": [{"role": "user", "content": 5}]}, 400, "messages[0].content"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "messages[0].content[0].type"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, 400, "messages[0].content[0].text"),
    ({"messages": [{"role": "user", "content": "\ud800"}]}, 400, "messages[0].content"),
    ({"messages": [{"role": "user", "content": "x", "tool_calls": [1]}]}, 400, "messages[0].tool_calls"),
    ({"messages": [{"role": "user", "content": "x" * 1024}]}, 400, "messages"),
    ({"messages": [{"role": "user", "content": "x" * 2**20}]}, 400, "messages"),
    ({"max_completion_tokens": 0}, 400, "max_completion_tokens"),
    ({"max_completion_tokens": 1021}, 400, "max_completion_tokens"),
    ({"tools": [{}]}, 400, "tools"),
    ({"response_format": {"type": "json_object"}}, 400, "response_format.type"),
    ({"logprobs": True}, 400, "logprobs"),
    ({"prompt": "x"}, 400, "prompt"),
]
NOT_JSON = [
    b"", b"{", b"[]", b"null", b"5", b'"x"', b'{"model": NaN}', b'{"model": Infinity}', b"\xff\xfe", b"[" * 100_000,
    b'{"max_tokens": ' + b"9" * 5000 + b"}",
]  # fmt: skip


async def test_each_wrong_field_is_named() -> None:
    """Every mistake is refused with its status and its place in the body, and the server serves after each of them."""
    async with serving() as bench:
        for path, base, cases in (
            ("/v1/completions", PROMPT, BOTH + COMPLETIONS),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}, BOTH + CHATS),
        ):
            for fields, status, param in cases:
                response = await bench.post(path, {"model": "tiny", **base, **fields})
                shown = json.dumps(fields)[:80]
                assert response.status_code == status, (shown, response.text)
                error = response.json()["error"]
                assert (error["param"], error["type"]) == (param, "invalid_request_error"), shown
                assert set(error) == {"message", "type", "param", "code"}
            good = await bench.post(path, {"model": "tiny", **base})
            assert good.status_code == 200, good.text


async def test_what_is_no_json_is_refused() -> None:
    """Bytes that are no text, no JSON, no object or no number: 400 and OpenAI's shape."""
    async with serving() as bench:
        for path in ("/v1/completions", "/v1/chat/completions"):
            for body in NOT_JSON:
                response = await bench.post(path, body)
                assert (response.status_code, response.json()["error"]["type"]) == (400, "invalid_request_error")


async def test_what_changes_nothing_is_taken() -> None:
    """Fields that clients send with their neutral value, or that only concern OpenAI's own service."""
    neutral = {
        "n": 1, "temperature": 0, "top_p": 1.0, "presence_penalty": 0, "logit_bias": {}, "stop": None, "user": "me",
        "seed": 5, "metadata": {"a": "b"}, "stream": False, "top_k": -1, "min_p": 0.0, "service_tier": "auto",
    }  # fmt: skip
    async with serving() as bench:
        plain = await bench.complete("x")
        full = await bench.complete("x", best_of=1, echo=False, logprobs=None, **neutral)
        chat = {"model": "tiny", "messages": [{"role": "developer", "name": "me", "content": "x"}], **neutral}
        response = await bench.post("/v1/chat/completions", {**chat, "response_format": {"type": "text"}, "tools": []})
    assert plain["choices"] == full["choices"]
    assert response.status_code == 200


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/v1/completions", 405), ("DELETE", "/v1/models", 405), ("POST", "/health", 405), ("GET", "/", 404),
     ("GET", "/v1/embeddings", 404)],
)  # fmt: skip
async def test_what_is_not_there_has_the_same_shape(method: str, path: str, status: int) -> None:
    """Paths and methods that there are not: the same kind of error."""
    async with serving() as bench:
        response = await bench.client.request(method, path)
    assert response.status_code == status
    assert set(response.json()["error"]) == {"message", "type", "param", "code"}


async def test_a_mistake_of_ours_is_a_500_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error that nobody thought of reaches the client as one of the same shape, and the server goes on."""
    import httpx

    async with serving() as bench:
        transport = httpx.ASGITransport(bench.app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            monkeypatch.setattr(type(bench.service.tokenizer), "encode", lambda *_: 1 // 0)
            response = await client.post("/v1/completions", json={"model": "tiny", "prompt": "x"})
            monkeypatch.undo()
        assert response.status_code == 500
        assert response.json()["error"]["code"] == "internal_error"
        assert (await bench.complete())["choices"]


class Recorded(Fields):
    """Takes note of every field that somebody looks for."""

    names: ClassVar[set[str]] = set()

    def required(self, name: str, read: Any) -> Any:
        self.names.add(name)
        return super().required(name, read)

    def optional(self, name: str, read: Any, default: Any) -> Any:
        self.names.add(name)
        return super().optional(name, read, default)

    def neutral(self, name: str, *values: object) -> None:
        self.names.add(name)
        super().neutral(name, *values)

    def ignored(self, *names: str) -> None:
        self.names.update(names)
        super().ignored(*names)


async def test_every_field_is_documented() -> None:
    """Whatever is looked for in a body stands in docs/server.md."""
    limits = Limits("tiny", 512, 1024)
    read_completion(Recorded({"model": "tiny", "prompt": "x"}), limits)
    read_chat(Recorded({"model": "tiny", "messages": [{"role": "user", "content": "x"}]}), limits)
    page = (Path(__file__).parents[2] / "docs/server.md").read_text()
    assert len(Recorded.names) > 30
    assert {name for name in Recorded.names if f"`{name}`" not in page} == set()
