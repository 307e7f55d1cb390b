"""The clients of programs over a runtime whose device blocks are its engine's."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import attrs

from aoffload._kernel.states import RequestState
from aoffload.testing.violations import Violation

from .engine_runtime_requests import EngineServed
from .engine_runtime_stage import EngineStage
from .runtime_clients import Actor
from .runtime_director import Director
from .runtime_requests import Served, Work

__all__ = ["EngineActor", "EngineDirector"]


@attrs.define(eq=False)
class EngineActor(Actor):
    """As any client; but it finds, takes and gives back blocks itself."""

    @property
    def _at(self) -> EngineStage:
        assert isinstance(self.stage, EngineStage)
        return self.stage

    def _own(self, args: Any) -> EngineServed | None:
        """The request that a call is about, once it knows whether its load is over."""
        served = self._target(args)
        if served is None:
            return None
        assert isinstance(served, EngineServed)
        served.look()
        return served

    # -- asking again ---------------------------------------------------------------------------------------------

    async def _do_match_again(self, args: Any) -> None:
        if (served := self._asks(args)) is None:
            return
        num_hit = served.num_hit
        found = await self.stage.attempt_async(
            f"match_again {served.name}",
            lambda: served.request.match_again(num_device_tokens=num_hit), self._give_up_s(args),
        )  # fmt: skip
        if found is not None:
            self.stage.met("asked again")

    async def _do_match_again_nowait(self, args: Any) -> None:
        if (served := self._asks(args)) is None:
            return
        num_hit, what = served.num_hit, f"match_again_nowait {served.name}"
        found = self.stage.attempt(what, lambda: served.request.match_again_nowait(num_device_tokens=num_hit))
        if found is not None:
            self._at.matched(served)
            served.check_match(is_first=False)
            self.stage.met("asked again")

    def _asks(self, args: Any) -> EngineServed | None:
        """The request, with what the engine's cache has now; None if it computes already."""
        served = self._own(args)
        if served is None or served.has_computed:
            return None
        if served.is_asking:
            served.take_hit(args.get("fewer", 0))
        return served

    # -- loading --------------------------------------------------------------------------------------------------

    async def _do_load(self, args: Any) -> None:
        if (found := self._loads(args)) is None:
            return
        served, named = found
        call: Callable[[], Awaitable[int]] = lambda: served.request.load(args.get("max_tokens"), **named)  # noqa: E731
        try:
            num_ready = await self.stage.attempt_async(f"load {served.name}", call, self._give_up_s(args))
        finally:
            served.load_refused()
        self._ready(served, num_ready)

    async def _do_load_nowait(self, args: Any) -> None:
        if (found := self._loads(args)) is None:
            return
        served, named = found
        what, most = f"load_nowait {served.name}", args.get("max_tokens")
        pending = self.stage.attempt(what, lambda: served.request.load_nowait(most, **named))
        served.load_refused()
        if pending is not None:
            served.pending = pending
            self.stage.met("load_nowait")

    def _loads(self, args: Any) -> tuple[EngineServed, dict[str, Any]] | None:
        """The request, and the blocks for its load; none if it has begun, or is to be refused."""
        served = self._own(args)
        if served is None or served.has_computed:
            return None
        if not (served.is_asking and served.is_answered):
            is_to_be_refused = served.request.state is not RequestState.PINNED
            return (served, {}) if is_to_be_refused else None
        if not served.begin_load(args.get("max_tokens"), is_sparse=bool(args.get("sparse"))):
            self.stage.met("no room")
            return None
        return served, served.destinations()

    async def _do_wait(self, args: Any) -> None:
        served = self._own(args)
        if served is None or (pending := served.pending) is None:
            return
        self._ready(served, await self.stage.attempt_async(f"wait {served.name}", pending.wait, self._give_up_s(args)))

    def _ready(self, served: EngineServed, num_ready: int | None) -> None:
        if num_ready is None or served.must_end:
            return
        served.look()
        served.accept_second_answer(num_ready)
        if served.request.match.num_host_tokens:
            self.stage.met("load")
        if served.request.num_lost_tokens:
            self.stage.met("load lost")

    # -- computing ------------------------------------------------------------------------------------------------

    def _begin(self, requests: list[Served], args: Any, early: bool, works: list[Work]) -> AbstractContextManager[None]:
        for served in requests:
            assert isinstance(served, EngineServed)
            served.own.grow(served, len(served.tokens) + len(args.get("drafts", ())))
            if served.request.state is RequestState.PINNED and not served.has_computed:
                served.computes_now()
        return super()._begin(requests, args, early, works)

    @contextmanager
    def _hold(self, requests: list[Served], named: list[Any]) -> Iterator[None]:
        tables = [table for served in requests for table in served.tables_of(None)]
        self._at.own.share(tables)
        try:
            yield
        finally:
            self._at.own.drop(tables)

    def _pending(self, requests: list[Served], early: bool) -> list[Any]:
        return [None for _ in requests]

    async def _step_in_thread(self, requests: list[Served], args: Any, early: bool) -> None:
        """The thread has references of its own, and writes on whatever becomes of the request. If nobody waits for it
        any more before it has begun, it never begins."""
        works: list[Work] = []
        held, env = self._begin(requests, args, early, works), self.stage.engine.env
        is_left: list[bool] = []

        def compute() -> bool:
            if is_left:
                return False
            is_left.append(False)
            try:
                for work in works:
                    work.check_owners()
                env.meanwhile()
                for work in works:
                    work.finish()
            finally:
                held.__exit__(None, None, None)
            return True

        try:
            if await self.stage.attempt_async("a thread", lambda: env.run_in_thread(compute), self._give_up_s(args)):
                self.stage.met("thread")
        finally:
            if not is_left:
                is_left.append(True)
                for work in works:
                    work.drop()
                held.__exit__(None, None, None)

    async def _do_offer(self, args: Any) -> None:
        if (served := self._own(args)) is None or served.is_spent:
            return
        new = tuple(args.get("new", ()))
        chain, num_computed = served.accepted(new)
        stop, is_last = args.get("num", num_computed - args.get("back", 0)), args.get("is_last", False)
        if "num" not in args:
            served.check_computed(stop, chain)
        tables, named = (
            served.tables_of(None),
            args.get("checkpoints", {} if "num" in args else served.named(stop, chain)),
        )

        def offer() -> None:
            served.request.offer(stop, tables, new, checkpoints=named, is_last=is_last)

        if self.stage.make(f"offer {served.name}", offer):
            if "num" in args or "checkpoints" in args:
                raise Violation("not refused", f"offer({stop!r}) of {served.name}")
            served.committed(stop, chain, new, num_computed, named)
            served.offered(num_computed)
            self.stage.met("last offer" if is_last else "offer")

    async def _do_invalidate(self, args: Any) -> None:
        self._own(args)
        await super()._do_invalidate(args)

    # -- whole requests -------------------------------------------------------------------------------------------

    async def _do_serve(self, args: Any) -> None:
        """A whole request in a task of its own: what it has hit is kept until that task has begun."""
        tables = self._at.hit(args)[1]
        self._at.own.share(tables)
        try:
            await super()._do_serve(args)
        finally:
            self._at.own.drop(tables)

    async def _compute(self, served: Served, args: Any) -> None:
        assert isinstance(served, EngineServed)
        request, new = served.request, tuple(args.get("new", ()))
        # Since the hit was looked up, another request may have taken it back.
        request.match_again_nowait(num_device_tokens=served.num_hit)
        while request.match.is_pending:
            self.stage.met("pending")
            await request.match_again(num_device_tokens=served.take_hit(0))
        if not served.begin_load(None, is_sparse=False):
            self.stage.met("no room")
            return
        try:
            await request.load(**served.destinations())
        finally:
            served.load_refused()
        if not served.may_compute:
            return
        works: list[Work] = []
        step = self._begin([served], {}, False, works)
        for work in works:
            work.finish()
        step.__exit__(None, None, None)
        chain, stop = served.accepted(new)
        named = served.named(stop, chain)
        request.offer(stop, served.tables_of(None), new, checkpoints=named, is_last=True)
        served.committed(stop, chain, new, stop, named)
        served.offered(stop)

    # -- beside requests ------------------------------------------------------------------------------------------

    async def _do_offer_deferred(self, args: Any) -> None:
        """A step of the engine begins."""
        runtime = self.stage.engine.runtime
        if self.stage.make("offer_deferred", runtime.offer_deferred):
            self.stage.met("deferred")

    async def _do_evict(self, args: Any) -> None:
        """Empty the engine's own cache."""
        for block_id in self._at.pool.all_cached():
            self._at.pool.forget(block_id)
        self.stage.met("evict")


class EngineDirector(EngineStage, Director):
    """Hands out calls to the clients of an engine with blocks of its own."""

    ACTOR = EngineActor
