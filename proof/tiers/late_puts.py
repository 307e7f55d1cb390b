"""Invalidations while failed puts reach a real Redis up to ten seconds late: no wrong bytes."""

from __future__ import annotations

import asyncio
import random
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Self
from unittest.mock import patch

import anyio
import attrs
import torch
from anyio.abc import SocketAttribute, SocketStream

from aoffload import KVCacheGroup, OffloadConfig, RemoteTier, Request, Tier
from aoffload._tiers.remote.memory import Removals
from aoffload.stores import RedisStore
from benchmarks.redis_servers import NoServerError, RedisServer
from proof.report_lines import Line

from .engine import BLOCK_TOKENS, NUMBERS, ByteEngine, WrongBytes, tokens_of

__all__ = ["storm"]

CELL_BLOCKS = 2
BLOCK_BYTES = 2 * NUMBERS * 8
BATCH = 10
"""Forwards that fail together."""
LATEST_S = 10.0
STORE_S = 0.15
"""The time-out of a put."""
LATE_SHARE = 0.6
"""The share of puts that are delayed."""
LOOK_S = 0.3
GUARD_S = 20.0
MIN_LATE = 0.3
"""Puts that arrive after they have failed, at least, as a share of the invalidations."""
SECRET = b"of a storm: sixteen bytes or more"


@attrs.define
class Tally:
    num_invalidated: int = 0
    num_late: int = 0
    """Puts that have arrived after their client had given up."""
    num_met: int = 0
    """Cells that were read and not used."""
    num_hit: int = 0
    """Tokens that requests have hit, all of them compared."""
    wrong: list[str] = attrs.field(factory=list)


def storm(num_invalidations: int, seed: int = 0, *, shows: bool = False) -> Iterator[Line]:
    """With `shows`, run once more without the protection, which has to give wrong bytes."""
    what = f"{num_invalidations} invalidations, puts up to {LATEST_S:g} s late"
    torch.set_num_threads(1)
    try:
        tally = _blow(num_invalidations, seed)
    except NoServerError as error:
        yield Line(what, "no wrong bytes", f"not run: {error}", True)
        return
    yield Line(f"{what}: wrong bytes", "0", f"{len(tally.wrong)} {tally.wrong[:3] or ''}", not tally.wrong)
    least = int(tally.num_invalidated * MIN_LATE)
    yield Line(
        "puts that arrived after they had failed", f"{least} at least", f"{tally.num_late}", tally.num_late >= least
    )
    about = f"{tally.num_met} cells not used, {tally.num_hit:,} tokens hit"
    wanted, is_met = ("some, and hits", tally.num_met > 0) if shows else ("hits", True)
    yield Line("cells that were invalidated and are met again", wanted, about, is_met and tally.num_hit > 0)
    if shows:
        with patch.object(Removals, "has_revoked", lambda self, label, number: False):
            found = _blow(num_invalidations // 2, seed)
        yield Line("without the protection: wrong bytes", "some", f"{len(found.wrong)}", bool(found.wrong))


def _blow(num_invalidations: int, seed: int) -> Tally:
    """Half on each event loop."""
    tally = Tally()
    for backend in ("asyncio", "trio"):
        rng = random.Random(f"storm {backend} {seed}")
        with (
            tempfile.TemporaryDirectory(prefix="aoffload-storm-") as place,
            RedisServer(Path(place) / "redis") as server,
            Proxy(server.port, rng, tally) as proxy,
        ):
            anyio.run(_serve, proxy, rng, tally, num_invalidations // 2, backend=backend)
    return tally


async def _serve(proxy: Proxy, rng: random.Random, tally: Tally, num_invalidations: int) -> None:
    engine = FailingEngine(64)
    store = SpreadStore(RedisStore.from_url(f"redis://127.0.0.1:{proxy.port}"))
    tier = RemoteTier(
        store, SECRET, cell_bytes=CELL_BLOCKS * BLOCK_BYTES, ask_timeout_s=2.0, load_timeout_s=2.0,
        store_timeout_s=STORE_S,
    )  # fmt: skip
    config = OffloadConfig(
        groups=[KVCacheGroup("all", block_size=BLOCK_TOKENS)], num_host_blocks=64, namespace="storm", remote=tier,
        max_fetch_share=0.5, prefill_tokens_per_s=1.0,
    )  # fmt: skip
    prompts = [_prompt(number) for number in range(num_invalidations)]
    async with engine.run_with(config) as runtime:
        for first in range(0, len(prompts), BATCH):
            batch = prompts[first : first + BATCH]
            await engine.fail(batch, rng)
            tally.num_invalidated += len(batch)
            await _look(engine, rng.sample(prompts[: first + BATCH], min(len(prompts), BATCH)), tally)
        over_s = anyio.current_time() + LATEST_S + 1.0
        while anyio.current_time() < over_s:  # until all puts have arrived
            await _look(engine, prompts, tally)
            await anyio.sleep(LOOK_S)
        await _look(engine, prompts, tally)
        found = runtime.statistics().remote_transfers
        assert found is not None
        tally.num_met += found.cells_corrupt
        tally.num_hit += engine.num_hit


async def _look(engine: FailingEngine, prompts: Sequence[list[int]], tally: Tally) -> None:
    """Serve prompts whose KV only the store has."""
    for tier in (Tier.HOST, Tier.DEVICE):
        await engine.runtime.reset(tier)
    for tokens in prompts:
        try:
            with anyio.fail_after(GUARD_S):
                await engine.serve(tokens)
        except WrongBytes as error:
            tally.wrong.append(str(error))


def _prompt(number: int) -> list[int]:
    """A prompt of one cell that no other prompt has, and one token."""
    return tokens_of(number * 10, BLOCK_TOKENS * CELL_BLOCKS + 2)[: BLOCK_TOKENS * CELL_BLOCKS + 1]


class FailingEngine(ByteEngine):
    async def fail(self, prompts: Sequence[list[int]], rng: random.Random) -> None:
        """Commit wrong KV, request it until it is stored, and invalidate it after a random time."""
        async with anyio.create_task_group() as group:
            for tokens in prompts:
                group.start_soon(self._fail, tokens, rng.uniform(0.0, BATCH * STORE_S))

    async def _fail(self, tokens: list[int], after_s: float) -> None:
        async with self.runtime.request(tokens, reads_cache=False) as request:
            await request.allocate()
            num_ready = await request.load()
            self._spoil(request, num_ready)
            request.commit(len(tokens))
            for _ in range(2):
                self.runtime.lookup(tokens)
                await self._want(tokens)
            await anyio.sleep(after_s)
            request.invalidate(num_ready)

    async def _want(self, tokens: list[int]) -> None:
        """Request the prompt without checking its KV, which is not invalidated yet."""
        async with self.runtime.request(tokens) as request:
            await request.allocate()
            await request.load()

    def _spoil(self, request: Request, num_ready: int) -> None:
        for block_id in request.block_ids[0][num_ready // BLOCK_TOKENS :]:
            for tensor in self.tensors:
                tensor[block_id] = -666


@attrs.frozen
class SpreadStore:
    """`store` as many nodes, so that a put that fails does not stop the puts to other nodes."""

    store: RedisStore

    def node_of(self, key: bytes) -> str:
        return f"node {key[0]}"

    def exist(self, keys: Sequence[bytes], timeout_s: float) -> list[bool]:
        return self.store.exist(keys, timeout_s)

    def get(self, key: bytes, timeout_s: float) -> bytes | None:
        return self.store.get(key, timeout_s)

    def put(self, key: bytes, value: memoryview, timeout_s: float) -> None:
        self.store.put(key, value, timeout_s)

    def remove(self, key: bytes, timeout_s: float) -> None:
        self.store.remove(key, max(timeout_s, 2.0))

    def close(self) -> None:
        self.store.close()


class Proxy:
    """A proxy in a thread, between a client and the server at `port`. It delays puts, and passes them on even if the
    client has disconnected meanwhile."""

    def __init__(self, port: int, rng: random.Random, tally: Tally) -> None:
        self.port = 0
        self._to, self._rng, self._tally = port, random.Random(rng.random()), tally
        self._end: Callable[[], object] = lambda: None
        self._thread = threading.Thread(target=lambda: anyio.run(self._listen), daemon=True)
        self._listens = threading.Event()

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._listens.wait(GUARD_S)
        return self

    def __exit__(self, *_: object) -> None:
        self._end()
        self._thread.join(GUARD_S)

    async def _listen(self) -> None:
        async with (
            anyio.create_task_group() as group,
            await anyio.create_tcp_listener(local_host="127.0.0.1") as server,
        ):
            self._end = partial(asyncio.get_running_loop().call_soon_threadsafe, group.cancel_scope.cancel)
            self.port = server.extra(SocketAttribute.local_port)
            self._listens.set()
            await server.serve(self._carry, group)

    async def _carry(self, client: SocketStream) -> None:
        async with client, await anyio.connect_tcp("127.0.0.1", self._to) as server, anyio.create_task_group() as group:
            group.start_soon(self._answer, server, client)
            with suppress(anyio.BrokenResourceError, anyio.EndOfStream):
                while True:
                    data = await client.receive(2**20)
                    if b"\r\nSET\r\n" in data and self._rng.random() < LATE_SHARE:
                        delay_s = self._rng.uniform(0.0, LATEST_S)
                        await anyio.sleep(delay_s)
                        self._tally.num_late += delay_s > STORE_S
                    await server.send(data)
            await server.send_eof()

    @staticmethod
    async def _answer(server: SocketStream, client: SocketStream) -> None:
        with suppress(anyio.BrokenResourceError, anyio.ClosedResourceError, anyio.EndOfStream):
            while True:
                await client.send(await server.receive(2**20))
