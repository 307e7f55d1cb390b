"""The HTTP server with 200 clients at once over shared prefixes, 30 % of which disconnect, with offload and without.

The clients are a process of their own and talk over real sockets. The server runs in this process, in one event loop
with a heartbeat, so that its state can be inspected. The device holds a fraction of the conversations. Each server
serves the same ones, and every answer of a client that stayed has to be the same in both.
"""

from __future__ import annotations

import gc
import json
import random
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar
from typing import Any

import anyio
import attrs
import numpy as np
import structlog
import torch

from aoffload._reference.engine.models import load_model
from aoffload._reference.engine.paged import PagedModel
from aoffload._reference.server.listening import Listener, bind
from aoffload.integrations.openai_server import ServerOptions, Service, make_app, open_service

from .harness import Row
from .peer import Peer

__all__ = ["Served", "Server", "Watch", "leaving_swarm", "listening", "run", "serve_swarm", "swarm_of"]

NUM_CLIENTS = 200
NUM_TURNS = 2
NUM_PREFIXES = 8
PREFIX_BYTES = 256
OPENING_BYTES = (128, 256)
"""Bytes of a client's own first message, after the shared prefix."""
MESSAGE_BYTES = (32, 96)
ANSWER_TOKENS = 6
LEAVERS = 0.3
NUM_LEAVERS = 96
LONG_ANSWER_TOKENS = 64
DEVICE_BLOCKS = 384
HOST_BLOCKS = 8192
BEAT_S = 0.001
MOST_LAG_MS = 20.0
MOST_PINNED_MS = 50.0
CLIENTS = [sys.executable, "-m", "benchmarks.serving_clients"]


@attrs.frozen
class Served:
    """Results of one server with one swarm. Times are seconds."""

    clients: list[dict[str, Any]]
    lags_s: list[float]
    pinned_s: list[float]
    """From the moment at which a client closes its socket to the moment at which nothing of its request is pinned."""
    wall_s: float
    num_pinned: int
    num_live: int
    """Live requests in the runtime after the server has none left."""

    def first_s(self, turn: int) -> list[float]:
        """Times to first token of the clients that stayed."""
        return [client["first_s"][turn] for client in self.clients if len(client["answers"]) > turn]


class Watch:
    """Records when requests have ended and no forward touches their blocks any more."""

    def __init__(self) -> None:
        self.released: dict[int, float] = {}
        """By the client's port, the time at which its last pin was released."""
        self._port: ContextVar[int] = ContextVar("port")
        self._in_step = False
        self._step_over = anyio.Event()
        self._waiting: list[int] = []

    def logger(self) -> Any:
        """A logger for the runtime that records requests that were aborted."""
        kind = structlog.make_filtering_bound_logger(10)
        return structlog.wrap_logger(structlog.ReturnLogger(), processors=[self._take_note], wrapper_class=kind)

    def _take_note(self, _logger: object, _name: str, event: Any) -> str:
        if event["event"] == "request_aborted" and (port := self._port.get(None)) is not None:
            if self._in_step:  # perhaps with this request: then its blocks are held until the step ends
                self._waiting.append(port)
            else:
                self.released[port] = time.monotonic()
        return ""

    def watching(self, app: Callable[..., Awaitable[None]]) -> Callable[..., Awaitable[None]]:
        async def watched(scope: Any, receive: Any, send: Any) -> None:
            self._port.set(scope["client"][1])
            await app(scope, receive, send)

        return watched

    def watch_steps(self, service: Service) -> None:
        runtime: Any = service.engine.runtime
        step = runtime.step

        @contextmanager
        def watched(requests: Any) -> Iterator[None]:
            self._in_step = True
            try:
                with step(requests):
                    yield
            finally:
                self._in_step = False
            now = time.monotonic()
            self.released |= dict.fromkeys(self._waiting, now)
            self._waiting.clear()
            self._step_over.set()

        runtime.step = watched

    async def wait_no_step(self) -> None:
        while self._in_step:
            self._step_over = anyio.Event()
            await self._step_over.wait()


@attrs.frozen
class Server:
    """A listening server, and the watch over its requests."""

    service: Service
    port: int
    watch: Watch

    async def face(self, swarm: dict[str, Any]) -> Served:
        """Run a swarm against it, wait until all requests have ended, and count the remaining pins and requests."""
        lags: list[float] = []
        began = time.monotonic()
        async with anyio.create_task_group() as group:
            group.start_soon(beat, lags)
            about = json.dumps({"port": self.port, **swarm}).encode()
            done = await anyio.run_process(CLIENTS, input=about, stderr=subprocess.PIPE, check=False)
            group.cancel_scope.cancel()
        wall_s = time.monotonic() - began
        if done.returncode:
            raise RuntimeError(done.stderr.decode())
        await self.wait_rest()
        found = self.service.engine.runtime.statistics()
        clients = json.loads(done.stdout)
        left = {client["port"]: client["left_at"] for client in clients if client["left_at"] is not None}
        pinned = [self.watch.released[port] - at for port, at in left.items() if port in self.watch.released]
        num_pinned = found.device.num_pinned + found.host.num_pinned
        return Served(clients, lags, pinned, wall_s, num_pinned, found.num_requests)

    async def wait_rest(self) -> None:
        """Wait until no request, step or copy is left. `TimeoutError` if that takes more than 60 s."""
        runtime = self.service.engine.runtime
        with anyio.fail_after(60):
            await self.service.admission.wait_empty()
            await runtime.flush()
            await self.watch.wait_no_step()  # a step whose requests have all ended


@asynccontextmanager
async def listening(options: ServerOptions, model: PagedModel) -> AsyncIterator[Server]:
    """A server on a free port of loopback."""
    watch = Watch()
    with bind("127.0.0.1", 0) as sock:
        async with open_service(options, model, watch.logger()) as service:
            watch.watch_steps(service)
            listener = Listener(watch.watching(make_app(service)), service.admission, sock)
            async with anyio.create_task_group() as group:
                await group.start(listener.run)
                yield Server(service, sock.getsockname()[1], watch)
                await listener.drain(1.0)


async def serve_swarm(options: ServerOptions, model: PagedModel, swarm: dict[str, Any]) -> Served:
    """Start a server for one swarm."""
    async with listening(options, model) as server:
        return await server.face(swarm)


async def beat(lags: list[float]) -> None:
    """Append the delay of each beat to `lags`."""
    while True:
        due = time.monotonic() + BEAT_S
        await anyio.sleep(BEAT_S)
        lags.append(time.monotonic() - due)


def swarm_of(
    model_name: str, *, num_clients: int = NUM_CLIENTS, num_turns: int = NUM_TURNS, leavers: float = LEAVERS,
    prefix_bytes: int = PREFIX_BYTES, opening_bytes: tuple[int, int] = OPENING_BYTES,
    answer_tokens: int = ANSWER_TOKENS, seed: int = 0,
) -> dict[str, Any]:  # fmt: skip
    """Conversations that share their beginnings, and for some clients a random point at which they hang up."""
    draw = random.Random(seed)
    prefixes = [_text(draw, prefix_bytes) for _ in range(NUM_PREFIXES)]
    num_events = int(num_clients * (1 - leavers)) * num_turns * answer_tokens
    clients = []
    for number in range(num_clients):
        messages = [_text(draw, draw.randint(*MESSAGE_BYTES)) for _ in range(num_turns)]
        messages[0] = prefixes[number % NUM_PREFIXES] + _text(draw, draw.randint(*opening_bytes))
        client: dict[str, Any] = {"messages": messages}
        if draw.random() < leavers:
            client |= {"leaves_after": draw.randrange(num_events), "how": draw.choice(["close", "reset", "half"])}
        clients.append(client)
    body = {"model": model_name, "max_tokens": answer_tokens, "stream": True, "stream_options": {"include_usage": True}}
    return {"path": "/v1/completions", "field": "prompt", "body": body, "clients": clients}


def leaving_swarm(model_name: str, *, num_clients: int = NUM_LEAVERS, seed: int = 0) -> dict[str, Any]:
    """Clients that all disconnect in the middle of a long answer."""
    about: dict[str, Any] = {
        "num_turns": 1,
        "prefix_bytes": 64,
        "opening_bytes": MESSAGE_BYTES,
        "answer_tokens": LONG_ANSWER_TOKENS,
    }
    swarm = swarm_of(model_name, num_clients=num_clients, leavers=0.0, **about)
    draw = random.Random(seed)
    for client in swarm["clients"]:
        client |= {"leaves_after": draw.randrange(1, LONG_ANSWER_TOKENS // 2), "counts": "own"}
        client["how"] = draw.choice(["close", "reset"])
    return swarm


def _text(draw: random.Random, num_bytes: int) -> str:
    return "".join(draw.choice("etaoin shrdlu") for _ in range(num_bytes))


def run(vllm: Peer | None = None) -> list[Row]:
    """Rows for first token, loop delay, and pins after disconnects. Prints a table of times to first token."""
    torch.set_num_threads(1)
    model = load_model("llama")
    gc.freeze()  # as the command does
    swarm = swarm_of("llama")
    served = {}
    for name, num_host in (("without offload", 0), ("with offload", HOST_BLOCKS)):
        options = ServerOptions(model="llama", num_device_blocks=DEVICE_BLOCKS, num_host_blocks=num_host)
        served[name] = anyio.run(serve_swarm, options, model, swarm)
    _check(*served.values())
    print(as_table(served), file=sys.stderr)
    left = anyio.run(serve_swarm, options, model, leaving_swarm("llama"))
    print(as_histogram(left.pinned_s), file=sys.stderr)
    return _rows(served["without offload"], served["with offload"], left.pinned_s)


def _check(without: Served, with_offload: Served) -> None:
    """Raise unless clients that stayed in both got the same answers, and no pin and no request is left."""
    for ours, theirs in zip(with_offload.clients, without.clients, strict=True):
        if ours["error"] or theirs["error"]:
            raise RuntimeError(f"a client failed: {ours['error'] or theirs['error']}")
        both = min(len(ours["answers"]), len(theirs["answers"]))
        if ours["answers"][:both] != theirs["answers"][:both]:
            raise RuntimeError(f"answers differ: {ours['answers']} and {theirs['answers']}")
    if any(each.num_pinned or each.num_live for each in (without, with_offload)):
        raise RuntimeError("something is left")


def as_table(served: dict[str, Served]) -> str:
    """Times in milliseconds."""
    lines = [f"{'':34}" + "".join(f"{name:>20}" for name in served)]
    for turn in range(NUM_TURNS):
        cells = [_p50_p99(each.first_s(turn)) for each in served.values()]
        lines.append(f"{f'time to first token, turn {turn + 1}':34}" + "".join(f"{cell:>20}" for cell in cells))
    lines.append(f"{'event loop lag':34}" + "".join(f"{_p50_p99(each.lags_s):>20}" for each in served.values()))
    lines.append(f"{'wall time, s':34}" + "".join(f"{each.wall_s:>20.1f}" for each in served.values()))
    return "\n".join([f"{'p50 / p99, ms':34}", *lines])


def as_histogram(pinned_s: list[float]) -> str:
    """A histogram of the times from the disconnect until nothing was pinned."""
    bounds = [1, 2, 5, 10, 20, 30, 40, 50, 100, 1000]
    counts = np.diff([0, *(sum(each * 1e3 <= bound for each in pinned_s) for bound in bounds)])
    lines = [
        f"  up to {bound:>4} ms {count:>4} {'#' * count}" for bound, count in zip(bounds, counts, strict=True) if count
    ]
    return "\n".join([f"pins gone after a hang-up, {len(pinned_s)} in the middle of an answer", *lines])


def _p50_p99(values: list[float]) -> str:
    p50, p99 = np.percentile(values, (50, 99)) * 1e3
    return f"{p50:,.1f} / {p99:,.1f}"


def _rows(without: Served, with_offload: Served, pinned_s: list[float]) -> list[Row]:
    rows = []
    last = NUM_TURNS - 1
    for quantile in (50, 99):
        ours, theirs = (float(np.percentile(each.first_s(last), quantile)) for each in (with_offload, without))
        rows.append(
            Row(
                name=f"first token p{quantile}, {NUM_CLIENTS} clients, turn {NUM_TURNS}", value=ours * 1e3, unit="ms",
                against="without offload", limit=theirs * 1e3, ratio=theirs / ours,
            )
        )  # fmt: skip
    for name, values, wanted in (
        ("event loop lag p99 meanwhile", with_offload.lags_s, MOST_LAG_MS),
        ("pins gone after a hang-up, p99", pinned_s, MOST_PINNED_MS),
    ):
        p50, p99 = (float(np.percentile(values, quantile)) * 1e3 for quantile in (50, 99))
        rows.append(
            Row(
                name=name, value=p99, unit="ms", spread=f"p50 {p50:.3g}, max {max(values) * 1e3:.3g}",
                against="its aim", limit=wanted, ratio=p99, wanted=wanted, is_at_most=True,
            )
        )  # fmt: skip
    return rows
