"""Serves requests of the simulated engine, from the match to the last token."""

from __future__ import annotations

from collections.abc import Callable
from weakref import WeakKeyDictionary

import anyio
import attrs

from .._runtime.request import Request
from ..errors import OutOfBlocks
from .asks import Ask
from .early import EarlyForward
from .engine import TagEngine

__all__ = ["SimulatedEngine"]


@attrs.define(eq=False)
class SimulatedEngine(TagEngine):
    """Serves `Ask`s on one runtime. A wrong byte is a `Violation`, wherever it is read."""

    recomputed: set[str] = attrs.field(factory=set)
    """Requests with fewer ready tokens after their load than they had matched."""
    _preempted: WeakKeyDictionary[Request, int] = attrs.field(factory=WeakKeyDictionary)

    async def serve(self, name: str, ask: Ask, watch: Callable[[Request], None] = lambda request: None) -> None:
        """Serve one request, from its match to its last token. `watch` gets the request directly after it is
        entered."""
        async with self.open(name, ask) as request:
            watch(request)
            await self.run(request, ask)

    def open(self, name: str, ask: Ask) -> Request:
        """Make a request. Enter it at once, because resets are counted from here."""
        request: Request = self.runtime.request(
            ask.tokens, name, cache_salt=ask.salt, adapter_key=ask.adapter, deadline_s=ask.deadline_s,
            max_hit_tokens=ask.max_hit_tokens, hit_alignment=ask.hit_alignment, key_spans=ask.key_spans,
            reads_cache=ask.reads_cache, store=ask.store, max_store_tokens=ask.max_store_tokens,
        )  # fmt: skip
        self._born[request] = self.num_resets
        return request

    async def run(self, request: Request, ask: Ask) -> None:
        """Allocate, load, prefill, decode."""
        born = self._born.setdefault(request, self.num_resets)
        self.check_match(request, ask)
        await self._allocate(request, ask)
        if born == self.num_resets:
            self.check_match(request, ask)  # it may have been matched again
        early = EarlyForward(self, request, ask)
        if ask.starts_early:
            num_ready = await early.load()
        elif ask.waits:
            num_ready = await request.load(ask.max_load_tokens)
        else:
            pending = request.load_nowait(ask.max_load_tokens)
            await anyio.lowlevel.checkpoint()
            num_ready = await pending.wait()
        self.check_ready(request, ask, ask.tokens, num_ready)
        is_whole = ask.max_load_tokens is None and not ask.in_slices  # else it may have fewer blocks than it matched
        if is_whole and num_ready < request.match.num_tokens:
            self.recomputed.add(request.request_id)
        await self.prefill(request, ask, early.commit(num_ready))
        await self.decode(request, ask)

    @staticmethod
    async def _allocate(request: Request, ask: Ask) -> None:
        wanted = len(ask.tokens)
        while ask.in_slices:
            wanted = min(wanted, request.match.num_tokens + ask.slice_tokens)
            try:
                await request.allocate(wanted)
                return
            except OutOfBlocks:
                if wanted <= request.match.num_tokens + ask.slice_tokens:
                    raise
                # The hit that made the request fit was lost during the wait.
        await request.allocate()

    async def prefill(self, request: Request, ask: Ask, num_ready: int) -> None:
        start, stop = num_ready, len(ask.tokens)
        while start < stop:
            end = min(stop, start + ask.slice_tokens)
            if ask.in_slices:
                await request.extend(end)
            await self.forward(request, ask, ask.tokens, start, end)
            self.commit(request, ask, ask.tokens, end)
            start = await self._perhaps_preempt(request, ask, ask.tokens, end)

    async def decode(self, request: Request, ask: Ask) -> None:
        tokens = ask.tokens
        for number in range(ask.num_new_tokens):
            sampled = 1000 + number
            tokens = (*tokens, sampled)
            await request.extend(len(tokens))
            await self.forward(request, ask, tokens, len(tokens) - 1, len(tokens))
            self.commit(request, ask, tokens, len(tokens), (sampled,))
            await self._perhaps_preempt(request, ask, tokens, len(tokens))

    async def _perhaps_preempt(self, request: Request, ask: Ask, tokens: tuple[int, ...], stop: int) -> int:
        """Perhaps preempt and resume the request, then recompute the missing tokens up to `stop`. Returns the number of
        its tokens: more than `stop` if another request has computed further meanwhile."""
        preempted = self._preempted.setdefault(request, 0)
        if preempted >= ask.num_preemptions or self.transport.random.random() < 0.3:
            return stop
        self._preempted[request] = preempted + 1
        await request.preempt()
        await anyio.sleep(self.transport.random.choice((0.0, 0.001, 0.01)))
        start = await request.resume()
        self.check_ready(request, ask, tokens, start)
        if start < stop:
            await self.forward(request, ask, tokens, start, stop)
            self.commit(request, ask, tokens, stop)
        return max(start, stop)
