"""Programs over a ledger whose device blocks belong to an engine: a pool with a prefix cache, which frees at once.

The engine computes into blocks of its own choosing, caches full blocks, and hits its own cache first. It gives blocks
back the moment a request ends, and reuses them; only blocks that jobs hold stay.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from aoffload._common.prefix import KeySpan, Prefix, Root
from aoffload._kernel.states import RequestState
from aoffload.errors import AoffloadError
from aoffload.testing.violations import Violation

from .engine_laws import EngineLaws
from .engine_state import EngineClient, EngineState
from .engine_tables import EngineTables
from .machine import Machine
from .program import World
from .provenance import row_group

__all__ = ["EngineMachine"]

_S = RequestState


class EngineMachine(EngineState, Machine):
    LAWS = EngineLaws
    FAREWELL = ("drop_pins", "cancel_cache_transfers")

    def __init__(self, world: World, **options: Any) -> None:
        super().__init__(world, **options)
        nulls, spoil = world.num_device_blocks % 4 < 2, partial(self.bytes.spoil, 0)
        self.own = EngineTables(self.pool, self.groups, self.unit, nulls, spoil)
        self._ended: list[str] = []

    # -- a request's life -----------------------------------------------------------------------------------------

    def do_admit(
        self,
        who: str,
        tokens: Sequence[int],
        salt: str | None = None,
        spans: Sequence[tuple[int, int, bytes]] = (),
        fewer: int = 0,
        **options: Any,
    ) -> str:
        key_spans = tuple(KeySpan(*span) for span in spans)
        text = self.bytes.text((salt,), tokens, key_spans)
        client = EngineClient(who, None, text, len(tokens), born=self.bytes.weights)
        num_hit, tables = self.own.hit(client.prefix, len(text.tokens), fewer)
        client.num_computed = num_hit
        prefix = Prefix.of(Root("programs", salt), tokens, key_spans)
        client.record = self.ledger.admit(
            prefix, request_id=who, num_device_tokens=num_hit, wake=client.wake, **options
        )
        self.own.change(client, tables)
        self._enter(client)
        self.clients[who] = client
        self.pool.prefixes[who] = client.prefix
        self._note("engine hit", num_hit)
        self._note("salt", salt)
        self._note("span", spans)
        self.features.update(f"admit {name}" for name in options)
        self._matched(client)
        reads_cache = options.get("reads_cache", True)
        self._require(reads_cache or not client.record.match.num_host_tokens, "a hit that was not wanted", client.name)
        return f"{client.record.match}"

    def _enter(self, client: EngineClient) -> None:
        """Copy the checkpoint of the hit in the engine's own cache into the running state."""
        if self.bytes.num_rows and client.num_computed:
            ids = self.own.checkpoint(client.prefix(client.num_computed))
            client.state_marks = self.bytes.read_checkpoint(client.text, ids, client.num_computed, client.name)
        client.state_at = client.num_computed

    def _matched(self, client: EngineClient) -> None:
        record, match = client.record, client.record.match
        self._require(match.num_tokens < len(client.text.tokens), "a token is always left to compute", record)
        self._require(match.num_device_tokens == client.num_computed, "what the engine has is as it said", match)
        self._require(not (match.is_pending and record.leases), "who is told to ask again pins nothing", record)
        state = _S.MATCHED if match.is_pending else _S.PINNED
        self._require(record.state is state, "the state says what the answer is", f"{record} {match}")
        self._note("host hit", match.num_host_tokens)
        self._note("pending", match.is_pending)

    def do_ask(self, who: str, fewer: int = 0) -> str:
        """The engine matches again, with what its own cache has at this moment."""
        client = self.clients.get(who)
        if client is None or client.record.state not in (_S.MATCHED, _S.PINNED) or client.marks:
            return "skipped"
        num_hit, tables = self.own.hit(client.prefix, len(client.text.tokens), fewer)
        client.is_woken = False
        self.ledger.match_again(client.record, num_device_tokens=num_hit, wake=client.wake)
        self.own.change(client, tables)
        client.num_computed = num_hit
        self._enter(client)
        self.features.add("asked again")
        self._matched(client)
        return f"{client.record.match}"

    def do_decline(self, who: str, from_token: int) -> str:
        """Compute what the host has after `from_token`."""
        client = self.clients.get(who)
        if client is None or client.record.state is not _S.PINNED or client.marks:
            return "skipped"
        before = client.record.match.num_tokens
        match = self.ledger.decline(client.record, from_token)
        most = max(match.num_device_tokens, from_token)
        self._require(match.num_tokens <= min(before, most), "what is declined is no hit", match)
        self._note("declined", match.num_tokens < before)
        self._matched(client)
        return f"{match}"

    def do_load(self, who: str, max_tokens: int | None = None, sparse: bool = False) -> str:
        """Take blocks for the prompt and load into them; `sparse`: null blocks where a window is past after that."""
        client = self.clients.get(who)
        if client is None or client.record.state not in (_S.PINNED, _S.LOADING, _S.RUNNING):
            return "skipped"
        if client.record.state is _S.PINNED and client.marks:
            return "skipped"  # it has computed instead, without an offer so far
        record, before = client.record, client.num_computed
        if is_new := record.state is _S.PINNED:
            hit_stop = record.match.num_tokens
            if max_tokens is not None:
                hit_stop = max(before, min(hit_stop, max_tokens // self.unit * self.unit))
            if not self.own.grow(client, len(client.text.tokens), hit_stop if sparse else 0):
                return "no room"
            if self.bytes.num_rows:
                client.incoming = self.own.take_checkpoint()
                if not client.incoming:
                    self.own.shrink(client, before)
                    return "no room"
        try:
            # A load that has begun knows its blocks: whoever asks again names none.
            named: dict[str, Any] = {"into": client.tables} if is_new else {}
            if is_new and client.incoming:
                named["into_checkpoint"] = client.incoming
            plans = self.ledger.plan_load(record, max_tokens, client.wake, **named)
        except AoffloadError:
            if is_new:
                self.own.shrink(client, before)
                self._drop_incoming(client)
            raise
        self.take(plans)
        self._note("load", plans)
        client.has_loaded |= bool(plans)
        if is_new:
            self._loaded(client, before)
        return f"{record.state.name} {client.tables}"

    def do_settle(self, job: str, outcome: str = "landed", at: int = 0) -> str:
        return self._loads_over(partial(super().do_settle, job, outcome, at))

    def do_discard(self, job: str) -> str:
        return self._loads_over(partial(super().do_discard, job))

    def _loads_over(self, ends_a_job: Callable[[], str]) -> str:
        """Requests whose load is over compute the rest. Tokens that were not loaded get other blocks: a copy may still
        write to the old ones."""
        loading = [client for client in self.clients.values() if client.record.state is _S.LOADING]
        problem_found = ends_a_job()
        for client in loading:
            if client.record.state is not _S.RUNNING:
                continue
            self._note("load lost", client.record.num_lost_tokens > 0)
            self._loaded(client, client.num_computed)
        return problem_found

    def _loaded(self, client: EngineClient, before: int) -> None:
        """Let a running request go on from what is there; `before`: the tokens that it had before the load."""
        record = client.record
        if record.state is not _S.RUNNING:
            return
        client.num_computed = record.num_computed_tokens
        is_whole = client.num_computed >= record.match.num_tokens
        self.own.loaded(client, before, client.num_computed, is_whole=is_whole)
        if client.incoming and client.num_computed > before:
            reader = (client.text, client.incoming, client.num_computed, client.name, client.oldest)
            client.state_at, client.state_marks = client.num_computed, self.bytes.read_checkpoint(*reader)
            self.features.add("checkpoint loaded")
        self._drop_incoming(client)

    def _drop_incoming(self, client: EngineClient) -> None:
        self.pool.drop(client.incoming)
        client.incoming = []

    def do_compute(
        self,
        who: str,
        stop: int,
        new: Sequence[int] = (),
        offers: bool = True,
        is_last: bool = False,
        most: int = 9,
        also: int = 0,
    ) -> str:
        """A forward up to token `stop`, which samples `new`. `offers`: the result is offered at once. It writes at most
        `most` of the checkpoints that it should write, and one after `also` units."""
        client = self.clients.get(who)
        if client is None or client.record.state not in (_S.PINNED, _S.RUNNING) or client.must_end:
            return "skipped"
        start = client.num_computed
        stop = max(start, client.record.num_computed_tokens, min(stop, len(client.text.tokens) + len(new)))
        if not self.own.grow(client, stop):
            return "no room"
        num_drafts = max(0, stop - len(client.text.tokens))
        self.bytes.append(client.text, new[:num_drafts])
        marks = self.read(client, client.tables, start)
        if stop > start:
            marks |= self.enter_state(client, start, None)
        own = self.bytes.write(client.text, client.tables, start, stop, marks)
        if self.bytes.num_rows and stop > start:
            self._write_checkpoints(client, start, stop, marks, own, most, also)
        client.text.sampled_marks += own[len(own) - num_drafts :]
        client.computed(start, own)
        client.num_computed = stop
        self._sample(client, new[num_drafts:])
        client.unoffered += new
        if client.born == self.bytes.weights:  # otherwise some of its KV is of old weights
            self.own.cache(client, client.num_computed)
        return self._offer(client, is_last=is_last) if offers else "computed"

    def _write_checkpoints(
        self, client: EngineClient, start: int, stop: int, marks: int, own: Sequence[int], most: int, also: int
    ) -> None:
        """Write checkpoints of a forward from `start` to `stop` that has read `marks`, as far as there is room. The
        engine's own cache has them, too, if it has the KV."""
        wanted = [at for at in self.ledger.planned_checkpoints(client.record) if start < at <= stop][:most]
        if also and start < also * self.unit <= stop:
            wanted.append(also * self.unit)
        for at in sorted({*wanted}):
            taken = self.own.take_checkpoint()
            if not taken:
                break
            seen = marks
            for mark in own[: at - start]:
                seen |= mark
            self.bytes.write_checkpoint(client.text, taken, at, seen)
            self.pool.drop(client.checkpoints.pop(at, []))
            client.checkpoints[at] = taken
            for row, block_id in enumerate(taken) if client.born == self.bytes.weights else ():
                self.pool.cache((row_group(row), client.prefix(at)), block_id)
            self.features.add("checkpoint")
        for mark in own:
            marks |= mark
        client.state_at, client.state_marks = stop, marks

    def _sample(self, client: EngineClient, sampled: Sequence[int]) -> None:
        self.bytes.append(client.text, sampled)
        if sampled:
            seen = self.read(client, client.tables, client.num_computed)
            client.text.sampled_marks += [seen | (client.marks[-1] if client.marks else 0)] * len(sampled)

    def _offer(self, client: EngineClient, *, is_last: bool = False) -> str:
        record = client.record
        named = {"checkpoints": client.checkpoints} if client.checkpoints else {}
        plans = self.ledger.offer(
            record, client.num_computed, client.tables, client.unoffered, is_last=is_last, **named
        )
        self.take(plans)
        client.unoffered, client.has_loaded = [], False
        self._note("store", plans)
        self._note("last offer", is_last)
        self.own.move_windows(client, client.num_computed)
        return f"{[plan.num_blocks for plan in plans]} {client.tables}"

    def do_offer(self, who: str, is_last: bool = False) -> str:
        """Offer again, or offer what was not offered so far."""
        client = self.clients.get(who)
        if client is None or client.record.state not in (_S.PINNED, _S.RUNNING):
            return "skipped"
        return self._offer(client, is_last=is_last)

    def do_offer_deferred(self) -> str:
        """A step of the engine begins."""
        plans = self.ledger.offer_deferred()
        self.take(plans)
        self._note("deferred", plans)
        return f"{[plan.num_blocks for plan in plans]} {self.ledger.deferred_requests}"

    def do_invalidate(self, who: str, from_token: int) -> str:
        """Tokens from `from_token` on were computed wrongly. The engine's cache forgets them; the request goes back."""
        client = self.clients.get(who)
        if client is None or client.unoffered or client.record.num_computed_tokens != client.num_computed:
            return "skipped"
        affected = self.ledger.invalidate(client.record, from_token)
        self._forget(client, from_token, affected)
        for block_id in self.pool.all_cached():
            if any(cell.marks & self.bytes.invalid for cell in self.bytes.tiers[0][block_id]):
                self.pool.forget(block_id)
        self._go_back(client, from_token // self.unit * self.unit)
        self.features.add("invalidate")
        self._note("told", affected)
        self._nobody_else_has_it(client)
        return f"{[record.request_id for record in affected]}"

    def _go_back(self, client: EngineClient, start: int) -> None:
        client.num_computed = min(client.num_computed, start)
        for at in [at for at in client.checkpoints if at > start]:
            self.pool.drop(client.checkpoints.pop(at))
        client.must_end |= self.bytes.num_rows > 0 and start > 0 and client.state_at != start
        client.must_end |= not self.own.go_back(client, start)  # it has to leave if what it would read is not there
        del client.marks[start:]

    def _nobody_else_has_it(self, author: EngineClient) -> None:
        for client in self.clients.values():
            blocks = [self.bytes.tiers[0][block_id] for table in client.tables for block_id in table if block_id]
            found = client.text.marks
            for block in blocks:
                for cell in block:
                    found |= cell.marks
            found |= client.state_marks if client.state_at > 0 else 0
            if client is not author and not client.must_end and found & self.bytes.invalid:
                raise Violation("not told", f"{client.name} goes on with what a failed forward has left")

    def do_release(self, who: str, reason: str = "closed_early") -> str:
        """The engine may reuse its blocks at once, except those that jobs hold."""
        if (client := self.clients.pop(who, None)) is None:
            return "skipped"
        self.take(self.ledger.release(client.record, reason))
        self.own.free(client)
        self._drop_incoming(client)
        for ids in client.checkpoints.values():
            self.pool.drop(ids)
        self._ended.append(who)
        self._forget_ended()
        return str(client.record.state.name)

    def _forget_ended(self) -> None:
        """The engine keeps the tokens of a request that is over until no block of it is deferred."""
        deferred = self.ledger.deferred_requests
        for who in self._ended:
            if who not in deferred and who not in self.clients:
                self.pool.prefixes.pop(who, None)
        self._ended = [who for who in self._ended if who in deferred]

    def do_serve(self, tokens: Sequence[int], salt: str | None = None, new: Sequence[int] = ()) -> str:
        """Serve a whole request: load, compute, store as far as the policy wants it, release."""
        self.num_served += 1
        who = f"served{self.num_served}"
        self.do_admit(who, tokens, salt)
        try:
            self.do_load(who)
            self.do_land(who)
            return self.do_compute(who, len(tokens), new, is_last=True)
        finally:
            self.do_release(who)
            self.do_land(who)

    def do_evict(self) -> str:
        """Empty the engine's own cache."""
        for block_id in self.pool.all_cached():
            self.pool.forget(block_id)
        self.features.add("evict")
        return "evicted"

    def do_reset(self, tier: str | None = None) -> str:
        """Also empties the engine's own cache. Requests that have computed nothing ask again."""
        problem_found = super().do_reset(tier)
        if tier is None:
            self.do_evict()
            for name in self.clients:
                self.do_ask(name)
        return problem_found

    def do_weights(self, epoch: Any) -> str:
        """Also empties the engine's own cache. Requests that have computed nothing ask again."""
        is_other = epoch != self.bytes.epoch
        said = super().do_weights(epoch)
        if is_other:
            self.do_evict()
            for name, client in self.clients.items():
                if self.do_ask(name) != "skipped":
                    client.born = self.bytes.weights
        return said

    def do_tick(self, seconds: float) -> str:
        self.now += seconds
        return f"{self.now}"

    def do_wrong(self, method: str, who: str, **arguments: Any) -> str:
        if (client := self.clients.get(who)) is None:
            return "skipped"
        if method == "offer":
            arguments = {"num_computed_tokens": client.num_computed, "block_ids": client.tables, **arguments}

        def make() -> str:
            getattr(self.ledger, method)(client.record, **arguments)
            return "taken"

        return self._loads_over(make)  # a load that is under way may be abandoned
