"""A forward that starts during its load (layer-wise overlap), and the laws about its result."""

from __future__ import annotations

from collections.abc import Sequence

import anyio
import attrs

from .._runtime.loading import PendingLoad
from .._runtime.request import Request
from .._transfer.fences import LoadedRegion
from ..errors import CommitError, RegionNotLoaded
from .asks import Ask
from .engine import TagEngine
from .memory import POISON
from .violations import Violation

__all__ = ["EarlyForward", "until_given"]

FIRST_LOOK_S = 0.001


@attrs.define(eq=False)
class EarlyForward:
    """Computes `[start, stop)` after a load in progress. Wrong bytes are a violation only if the load succeeds."""

    engine: TagEngine
    request: Request
    ask: Ask
    start: int = 0
    stop: int = 0
    """End of the computed tokens that count. 0 if there are none."""
    misread: Violation | None = None

    async def load(self) -> int:
        """Load, and compute meanwhile. Returns the number of tokens that are ready."""
        pending = self.request.load_nowait(self.ask.max_load_tokens)
        if not pending.is_over and pending.can_start:
            await self._run(pending)
        num_ready = await pending.wait()
        self._check_end(pending, num_ready)
        return num_ready

    def commit(self, num_ready: int) -> int:
        """Commit the computed tokens, if they count. Returns the first token that is still to be computed."""
        if self.stop <= num_ready:
            return num_ready
        self.engine.commit(self.request, self.ask, self.ask.tokens, self.stop)
        return self.stop

    async def _run(self, pending: PendingLoad) -> None:
        runtime, ask = self.engine.runtime, self.ask
        with runtime.step([pending]):
            self.start = pending.num_expected_tokens
            stop = min(len(ask.tokens), self.start + ask.slice_tokens)
            table, regions = pending.block_ids, pending.regions
            await until_given(regions)

            def compute() -> None:
                try:
                    for region in regions:
                        region.synchronize()
                except RegionNotLoaded:
                    return
                self._compute(table, stop)

            if ask.style == "inline":
                compute()
            elif ask.style == "step":
                await self.engine.env.run_in_thread(compute)
            elif pending.can_start:  # checked again, because the load may have been lost during the wait
                await runtime.run_step([pending], compute)

    def _compute(self, table: list[list[int]], stop: int) -> None:
        engine, name = self.engine, self.request.request_id
        touched = engine.touched(table, self.start, stop)
        try:
            is_spoiled = engine.check_blocks(self.request, self.ask, table, self.ask.tokens, self.start)
        except Violation as violation:
            self.misread, is_spoiled = violation, False
        if self.ask.style != "inline":
            engine.env.meanwhile()
        engine.check_owners(name, touched)
        engine.write(self.ask, table, self.ask.tokens, self.start, stop, is_spoiled=is_spoiled)
        if self.misread is not None:
            engine.fill(table, self.start, stop, POISON)
        self.stop = stop

    def _check_end(self, pending: PendingLoad, num_ready: int) -> None:
        """Check that tokens computed from wrong bytes do not count, and that tokens that do not count can't be
        committed."""
        first = pending.first_invalid_token
        if first is None:
            if self.misread is not None:
                raise self.misread
            return
        if first != num_ready:
            raise Violation("early start", f"invalid from token {first} on, but {num_ready} are ready")
        if self.stop > num_ready:
            try:
                self.request.commit(self.stop)
            except CommitError:
                pass
            else:
                raise Violation("early start", f"{self.request.request_id} committed what stood on a load that failed")
        self.stop = 0


async def until_given(regions: Sequence[LoadedRegion]) -> None:
    """Wait until `regions` have their fences, or are known to get none. It polls in virtual time, because a simulated
    thread must not block."""
    delay_s = FIRST_LOOK_S
    while not all(region.is_given for region in regions):
        await anyio.sleep(delay_s)
        delay_s *= 2
