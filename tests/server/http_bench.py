"""A server in this process for tests: a small model that can be held up, and callers without sockets."""

from __future__ import annotations

import json
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import anyio.lowlevel
import attrs
import httpx
import pytest
import torch

from aoffload._reference.engine.decoder import Decoder, DecoderConfig
from aoffload.integrations.openai_server import ServerOptions, Service, make_app, open_service
from aoffload._reference.engine.paged import PagedBatch

GUARD_S = 60.0
"""Long enough for any machine; only a test that fails waits for it."""
BACKENDS = pytest.mark.parametrize("anyio_backend", ["asyncio", "trio"])
SMALL = DecoderConfig(
    vocab_size=512, hidden_size=32, intermediate_size=64, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=16
)
OPTIONS = ServerOptions(model="tiny", num_device_blocks=64, num_host_blocks=256)


class SmallModel(Decoder):
    """Says when a forward has begun, and lets it end when it may."""

    def __init__(self) -> None:
        super().__init__(SMALL, seed=0)
        self.may_end = threading.Event()
        self.may_end.set()
        self.began = threading.Event()
        self.fails = False
        self.num_forwards = 0
        self.threads: set[int] = set()
        """Those in which forwards ran."""

    def forward(self, batch: PagedBatch, kv_cache: torch.Tensor) -> torch.Tensor:
        self.num_forwards += 1
        self.threads.add(threading.get_ident())
        self.began.set()
        assert self.may_end.wait(GUARD_S)
        if self.fails:
            raise ArithmeticError("the device is on fire")
        return super().forward(batch, kv_cache)


@attrs.frozen
class Bench:
    model: SmallModel
    service: Service
    app: Any
    client: httpx.AsyncClient

    async def complete(self, prompt: Any = "Once upon a time", **fields: Any) -> dict[str, Any]:
        """The answer of /v1/completions; it has to be one."""
        response = await self.post("/v1/completions", {"model": "tiny", "prompt": prompt, **fields})
        assert response.status_code == 200, response.text
        return dict(response.json())

    async def post(self, path: str, body: Any) -> httpx.Response:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        return await self.client.post(path, content=content, headers={"content-type": "application/json"})

    async def assert_at_rest(self) -> None:
        """Nobody is inside, nothing is pinned, every block is in one hand."""
        with anyio.fail_after(GUARD_S):
            await self.service.admission.wait_empty()
            runtime = self.service.engine.runtime
            while runtime.statistics().device.num_pinned:  # a step that nobody waits for may still run
                await let_threads_run()
            await runtime.flush()
        found = runtime.statistics()
        assert (found.device.num_pinned, found.host.num_pinned, found.num_requests, found.num_waiting) == (0, 0, 0, 0)
        engine = self.service.engine.statistics()
        assert (engine.num_waiting, engine.num_prefilling, engine.num_decoding) == (0, 0, 0)
        runtime.check_integrity()


@asynccontextmanager
async def serving(options: ServerOptions = OPTIONS) -> AsyncIterator[Bench]:
    model = SmallModel()
    async with open_service(options, model) as service:
        app = make_app(service)
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1", timeout=GUARD_S) as client:
            bench = Bench(model, service, app, client)
            try:
                yield bench
            finally:
                model.may_end.set()
            await bench.assert_at_rest()


@attrs.define(eq=False, slots=False)
class Caller:
    """One request by hand: its client reads what it wants to, and hangs up when it wants to."""

    bench: Bench
    body: bytes
    path: str = "/v1/completions"
    messages: list[Any] = attrs.field(factory=list)
    has_hung_up: anyio.Event = attrs.field(factory=anyio.Event)
    hangs_up_after: int | None = None
    """Messages of the response that it takes."""
    _was_read: bool = False

    @classmethod
    def of(cls, bench: Bench, **fields: Any) -> Caller:
        body = {"model": "tiny", "prompt": "Once upon a time", "max_tokens": 4, **fields}
        return cls(bench, json.dumps(body).encode())

    async def call(self) -> None:
        scope = {
            "type": "http", "method": "POST", "path": self.path, "raw_path": self.path.encode(), "root_path": "",
            "headers": [(b"content-type", b"application/json")], "query_string": b"", "scheme": "http",
            "http_version": "1.1", "client": ("there", 1), "server": ("here", 2), "asgi": {"version": "3.0"},
        }  # fmt: skip
        await self.bench.app(scope, self.receive, self.send)

    async def receive(self) -> dict[str, Any]:
        if not self._was_read:
            self._was_read = True
            return {"type": "http.request", "body": self.body, "more_body": False}
        await self.has_hung_up.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        self.messages.append(message)
        if len(self.messages) == self.hangs_up_after:
            self.has_hung_up.set()
        await anyio.lowlevel.checkpoint()

    @property
    def status(self) -> int:
        return int(self.messages[0]["status"])

    @property
    def content(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.messages[1:])


def events_of(content: bytes) -> list[Any]:
    """The JSON objects of a stream, and `"[DONE]"`."""
    lines = [line.removeprefix("data: ") for line in content.decode().split("\n\n") if line]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


def text_of(events: list[Any]) -> str:
    choices = [choice for event in events if event != "[DONE]" for choice in event.get("choices", [])]
    return "".join(choice.get("text") or choice.get("delta", {}).get("content") or "" for choice in choices)


async def let_threads_run() -> None:
    """A turn of the loop in which it sleeps: a loop that never does keeps the interpreter from a forward's thread."""
    await anyio.to_thread.run_sync(_nothing)


def _nothing() -> None:
    return None


async def reached(event: threading.Event) -> None:
    """Wait until another thread has set `event`."""
    await anyio.to_thread.run_sync(event.wait, GUARD_S)
    assert event.is_set()
