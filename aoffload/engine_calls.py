"""The calls of a request whose device blocks are an engine's: see docs/engines.md."""

from __future__ import annotations

from collections.abc import Sequence

import anyio

from .core.answer import PrefixMatch
from .loading import wait_until_woken
from .prefix import TokenIds
from .request_block import RequestBlock
from .transfer.fence import Fence

__all__ = ["EngineCalls"]


class EngineCalls(RequestBlock):
    """What a request has beside its other calls, for a runtime with `engine_blocks`. `WrongState` in any other."""

    @property
    def num_lost_tokens(self) -> int:
        """Tokens that its load failed to bring."""
        return 0 if self._holding is None else self._holding.num_lost_tokens

    @property
    def retry_max_hit_tokens(self) -> int | None:
        """The `max_hit_tokens` for a next request of the same prompt: where a load that fell short ended, so that the
        same copy is not tried for ever. None: no load fell short."""
        return None if self._holding is None else self._holding.retry_max_hit_tokens

    def match_again_nowait(self, *, num_device_tokens: int) -> PrefixMatch:
        """Match again before the load: the engine's own prefix cache has the first `num_device_tokens` tokens now. With
        the same number the pins stay, with another they move."""
        holding = self._live()
        # Not `self._wake`: the ledger would keep an abandoned request alive for as long as it is PENDING.
        wake = holding.when_idle
        self._session.ledger.match_again(holding, num_device_tokens=num_device_tokens, wake=wake)
        self._session.bound(holding, self._left_s())
        return holding.match

    async def match_again(self, *, num_device_tokens: int) -> PrefixMatch:
        """As `match_again_nowait`. If the answer is PENDING, waits until asking again may give another one, and at most
        until `pending_timeout_s` is over. Returns that answer: by then the engine's own cache may have more, so ask
        again with what it has.

            while request.match.is_pending:
                await request.match_again(num_device_tokens=own_hit(tokens))
        """
        await anyio.lowlevel.checkpoint_if_cancelled()
        found = self.match_again_nowait(num_device_tokens=num_device_tokens)
        if found.is_pending:
            session = self._session
            await self._wait_pending(session.ledger.pending_until(self._live()) - session.now())
            self._live()
        return found

    async def _wait_pending(self, bound_s: float) -> None:
        if self._session.worker.has_alarms:
            await wait_until_woken(self, bound_s)
        else:  # a timer of its own: an engine that asks again at once, and again, would not let time pass
            with anyio.move_on_after(bound_s):
                await self._wait(anyio.Event())

    def offer(
        self,
        num_computed_tokens: int,
        block_ids: Sequence[Sequence[int]],
        new_token_ids: TokenIds = (),
        after: Fence | None = None,
        *,
        is_last: bool = False,
    ) -> None:
        """Append `new_token_ids`, then store what the host lacks of the first `num_computed_tokens` tokens, from the
        blocks that `block_ids` names: one table per group, from the first token on. Ids are read, and checked, only
        where something is stored; with `is_last`, all are.

        `after` is the fence behind the compute that wrote them; None: behind all work on the current stream so far.
        Copies hold the blocks until they are over, whatever becomes of the request. `is_last`: the last offer of the
        request, so what a later prompt needs of windows is stored too.
        """
        holding, session = self._live(), self._session
        fence = session.fence_after(after)
        session.offer_behind(fence, holding, num_computed_tokens, block_ids, new_token_ids, is_last=is_last)
