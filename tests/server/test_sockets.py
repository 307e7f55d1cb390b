"""The server on uvicorn, with real sockets: the official client, and many clients of whom some hang up."""

from __future__ import annotations

import gc
import os
import re
import threading
from pathlib import Path
from typing import Any

import attrs
import openai
import pytest
from http_bench import OPTIONS, SmallModel

from aoffload._reference.server.errors import ApiError
from benchmarks.serving import Served, Server, listening, serve_swarm, swarm_of

pytestmark = [pytest.mark.anyio, pytest.mark.parametrize("anyio_backend", ["asyncio"])]

NUM_CLIENTS = 60
POOL = attrs.evolve(OPTIONS, num_device_blocks=128, num_host_blocks=2048)
each_linux = pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="counts the files in /proc/self/fd")


def client_of(server: Server) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none", max_retries=0)


async def test_the_official_client_streams() -> None:
    """Completions and chats, whole and streamed, the list of models, and our own fields by `extra_body`."""
    async with listening(OPTIONS, SmallModel()) as server, client_of(server) as client:
        assert [model.id async for model in await client.models.list()] == ["tiny"]
        about: dict[str, Any] = {"model": "tiny", "max_tokens": 8, "extra_body": {"kv_offload": {"store": False}}}
        whole = await client.completions.create(prompt="Once upon a time", **about)
        pieces = [
            event.choices[0].text
            async for event in await client.completions.create(prompt="Once upon a time", stream=True, **about)
        ]
        assert "".join(pieces) == whole.choices[0].text
        said: Any = [{"role": "user", "content": "Once upon a time"}]
        chat = await client.chat.completions.create(messages=said, **about)
        stream = await client.chat.completions.create(
            messages=said, stream=True, stream_options={"include_usage": True}, **about
        )
        events = [event async for event in stream]
    deltas = [choice.delta.content or "" for event in events for choice in event.choices]
    assert "".join(deltas) == chat.choices[0].message.content
    assert events[-1].usage is not None and events[-1].usage.completion_tokens == 8
    assert len(events) > 5


async def test_the_official_client_reads_our_errors() -> None:
    """Its own classes, with the status and the field."""
    async with listening(OPTIONS, SmallModel()) as server, client_of(server) as client:
        with pytest.raises(openai.NotFoundError) as missing:
            await client.completions.create(model="gpt-9", prompt="x")
        with pytest.raises(openai.BadRequestError) as wrong:
            await client.completions.create(model="tiny", prompt="x", temperature=0.7)
        with pytest.raises(openai.BadRequestError) as long:
            await client.completions.create(model="tiny", prompt="x" * 3_000_000)
        server.service.admission.drain()
        with pytest.raises(openai.InternalServerError) as closed:
            await client.completions.create(model="tiny", prompt="x")
    assert [error.value.param for error in (missing, wrong, long)] == ["model", "temperature", "prompt"]
    assert closed.value.status_code == 503


async def test_the_official_client_hangs_up_in_a_stream() -> None:
    """`close()` in the middle of a stream ends the request, whose pins go; the next one is served."""
    async with listening(OPTIONS, SmallModel()) as server, client_of(server) as client:
        about: dict[str, Any] = {"model": "tiny", "prompt": "x", "extra_body": {"ignore_eos": True}}
        stream = await client.completions.create(stream=True, max_tokens=900, **about)
        async for _ in stream:
            break
        await stream.close()
        await server.wait_rest()
        assert server.service.engine.statistics().num_decoded_tokens < 800
        assert (await client.completions.create(**about)).choices


def metrics_of(server: Server) -> list[str]:
    """The lines of /metrics about what is held, where there are metrics."""
    try:
        page, _ = server.service.metrics.scrape()
    except ApiError:
        return []
    return [
        line
        for line in page.decode().splitlines()
        if re.match(r'aoffload_(requests|blocks){.*state="(pinned|running)"', line)
    ]


def texts(served: Served) -> list[list[str]]:
    return [client["answers"] for client in served.clients]


@each_linux
async def test_many_clients_of_whom_some_hang_up() -> None:
    """Who stays is told what an idle server says, in every turn; afterwards nothing runs, nothing is pinned, no file is
    open that was not before, and no forward has run in the loop's thread."""
    swarm = swarm_of("tiny", num_clients=NUM_CLIENTS, prefix_bytes=192, opening_bytes=(32, 96), answer_tokens=6)
    alone = {**swarm, "one_at_a_time": True, "clients": [{"messages": each["messages"]} for each in swarm["clients"]]}
    model = SmallModel()
    idle = await serve_swarm(attrs.evolve(POOL, num_host_blocks=0), model, alone)
    gc.freeze()
    try:
        async with listening(POOL, model) as server:
            await server.face({**alone, "clients": alone["clients"][:1]})  # opens what stays open
            num_files = len(os.listdir("/proc/self/fd"))
            served = await server.face(swarm)
            assert len(os.listdir("/proc/self/fd")) == num_files
            server.service.engine.runtime.check_integrity()
            held = metrics_of(server)
    finally:
        gc.unfreeze()
    assert [client["error"] for client in served.clients] == [None] * NUM_CLIENTS
    assert (served.num_pinned, served.num_live, server.service.admission.num_refused) == (0, 0, 0)
    assert all(line.endswith(" 0.0") for line in held), held
    num_left = 0
    for answer, wanted, client in zip(texts(served), texts(idle), swarm["clients"], strict=True):
        assert answer == wanted[: len(answer)]
        if "leaves_after" not in client:
            assert len(answer) == len(wanted)
        num_left += len(answer) < len(wanted)
    assert num_left > NUM_CLIENTS / 5
    cached = [tiers for client in served.clients for tiers in client["cached"]]
    assert sum(tiers["host"] for tiers in cached) > 0
    assert model.threads and threading.get_ident() not in model.threads
