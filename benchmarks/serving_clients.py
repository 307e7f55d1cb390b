"""Clients that talk to a server over real sockets, all at once. Some of them disconnect. This is a separate program.

    python -m benchmarks.serving_clients < swarm.json > answers.json

In: {"port", "path", "body": the common fields, "field": the name of the prompt, "one_at_a_time": bool,
"clients": [{"messages": [...], "leaves_after": null or a number of events, "how": "close" | "reset" | "half",
"counts": "all" | "own"}]}. A client's first prompt is its first message. Each further prompt is the previous one, its
answer, and the next message. Clients do not leave by the clock: a client leaves after all clients together (`counts`:
"all"), or it alone ("own"), have received `leaves_after` events.

Out: for each client {"answers", "cached" (tokens by tier, of each answer), "first_s", "left_at", "port", "error"}.
Times are those of the monotonic clock, which all processes of a machine share.
"""

from __future__ import annotations

import asyncio
import json
import socket
import struct
import sys
import time
from collections.abc import Mapping
from typing import Any

import attrs

__all__ = ["Client", "Swarm"]

RESET = struct.pack("ii", 1, 0)
"""For SO_LINGER: closing discards unsent data and resets the connection."""


@attrs.define(eq=False)
class Swarm:
    port: int
    path: str
    body: Mapping[str, Any]
    field: str
    clients: list[Client]
    one_at_a_time: bool = False
    num_events: int = 0

    async def run(self) -> None:
        if self.one_at_a_time:
            for client in self.clients:
                await client.converse(self)
            return
        everybody = [asyncio.ensure_future(client.converse(self)) for client in self.clients]
        waiting = [client.leaves_after is not None and client.counts == "all" for client in self.clients]
        await asyncio.gather(*(task for task, waits in zip(everybody, waiting, strict=True) if not waits))
        for client in self.clients:
            client.is_due.set()  # no client is left to receive the events that it waits for
        await asyncio.gather(*everybody)

    def saw_event(self) -> None:
        self.num_events += 1
        for client in self.clients:
            if client.counts == "all" and client.leaves_after is not None and client.leaves_after <= self.num_events:
                client.is_due.set()


@attrs.define(eq=False)
class Client:
    messages: list[str]
    leaves_after: int | None = None
    how: str = "close"
    counts: str = "all"
    num_events: int = 0
    answers: list[str] = attrs.field(factory=list)
    cached: list[dict[str, int]] = attrs.field(factory=list)
    first_s: list[float] = attrs.field(factory=list)
    left_at: float | None = None
    port: int = 0
    error: str | None = None
    is_due: asyncio.Event = attrs.field(factory=asyncio.Event)

    async def converse(self, swarm: Swarm) -> None:
        prompt = ""
        for message in self.messages:
            prompt += message
            asking = asyncio.ensure_future(self._ask(swarm, prompt))
            leaving = asyncio.ensure_future(self.is_due.wait())
            await asyncio.wait({asking, leaving}, return_when=asyncio.FIRST_COMPLETED)
            leaving.cancel()
            if not asking.done():
                asking.cancel()
            (answer,) = await asyncio.gather(asking, return_exceptions=True)
            if not isinstance(answer, str):
                self.error = None if isinstance(answer, asyncio.CancelledError) else repr(answer)
                return
            self.answers.append(answer)
            prompt += answer

    async def _ask(self, swarm: Swarm, prompt: str) -> str:
        reader, writer = await asyncio.open_connection("127.0.0.1", swarm.port)
        self.port = writer.get_extra_info("sockname")[1]
        try:
            request = _request(swarm, prompt)
            if self.how == "half" and self.leaves_after is not None:
                writer.write(request[: len(request) // 2])
                await asyncio.Event().wait()  # until `converse`, which waits for `is_due`, cancels this
            began = time.monotonic()
            writer.write(request)
            return await self._read(swarm, reader, began)
        except asyncio.CancelledError:
            if self.how == "reset":
                writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
            self.left_at = time.monotonic()
            raise
        finally:
            writer.transport.abort()  # closes the socket in the next turn of the loop

    async def _read(self, swarm: Swarm, reader: asyncio.StreamReader, began: float) -> str:
        status = await reader.readline()
        if b" 200 " not in status:
            raise RuntimeError(f"{status!r} {await reader.read()!r}")
        text = ""
        while line := await reader.readline():
            if not line.startswith(b"data: "):
                continue
            self.saw_event()
            swarm.saw_event()
            if line.startswith(b"data: [DONE]"):
                return text
            event = json.loads(line[6:])
            if "error" in event:
                raise RuntimeError(event["error"]["message"])
            for choice in event["choices"]:
                text += choice.get("text", "") or choice.get("delta", {}).get("content", "")
                if len(self.first_s) == len(self.answers):
                    self.first_s.append(time.monotonic() - began)
            if event.get("usage"):
                self.cached.append(event["usage"]["prompt_tokens_details"]["cached_tokens_by_tier"])
        raise RuntimeError("the stream ended in the middle")

    def saw_event(self) -> None:
        self.num_events += 1
        if self.counts == "own" and self.num_events == self.leaves_after:
            self.is_due.set()

    def as_dict(self) -> dict[str, Any]:
        names = ("answers", "cached", "first_s", "left_at", "port", "error")
        return {name: getattr(self, name) for name in names}


def _request(swarm: Swarm, prompt: str) -> bytes:
    said = [{"role": "user", "content": prompt}] if swarm.field == "messages" else prompt
    body = json.dumps({**swarm.body, swarm.field: said}).encode()
    head = f"POST {swarm.path} HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(body)}\r\n\r\n".encode() + body


async def _main(about: dict[str, Any]) -> list[dict[str, Any]]:
    clients = [Client(**each) for each in about.pop("clients")]
    await Swarm(**about, clients=clients).run()
    return [client.as_dict() for client in clients]


if __name__ == "__main__":
    json.dump(asyncio.run(_main(json.load(sys.stdin))), sys.stdout)
