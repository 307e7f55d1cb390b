"""Calls about a request: from its match to its release."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs

from aoffload._common.prefix import KeySpan, Prefix, Root
from aoffload._kernel.states import RequestState
from aoffload.errors import OutOfBlocks
from aoffload.testing.violations import Violation

from .ledger_state import Client
from .ledger_steps import StepCalls

__all__ = ["RequestCalls"]

_S = RequestState


class RequestCalls(StepCalls):
    """Calls name their request. A call about a request that is not there (any more) is skipped."""

    def do_admit(
        self,
        who: str,
        tokens: Sequence[int],
        salt: str | None = None,
        spans: Sequence[tuple[int, int, bytes]] = (),
        **options: Any,
    ) -> str:
        root, key_spans = Root("programs", salt), tuple(KeySpan(*span) for span in spans)
        record = self.ledger.admit(Prefix.of(root, tokens, key_spans), request_id=who, **options)
        text = self.bytes.text((salt,), tokens, key_spans)
        self.clients[who] = Client(who, record, text, len(tokens), born=self.bytes.weights)
        self._require(record.match.num_tokens < len(tokens), "a token is always left to compute", record)
        self._require(
            options.get("reads_cache", True) or not record.match.num_tokens, "a hit that was not wanted", record
        )
        self._note("device hit", record.match.num_device_tokens)
        self._note("host hit", record.match.num_host_tokens)
        self._note("salt", salt)
        self._note("span", spans)
        self.features.update(f"admit {name}" for name in options)
        return f"{record.match}"

    def do_allocate(self, who: str, num_tokens: int | None = None) -> str:
        if (client := self.clients.get(who)) is None:
            return "skipped"
        self.ledger.allocate_nowait(client.record, num_tokens)
        return self._tables(client)

    def do_queue(self, who: str, num_tokens: int | None = None) -> str:
        if (client := self.clients.get(who)) is None:
            return "skipped"
        waiter = self.ledger.queue_allocation(client.record, num_tokens)
        self.features.add("queue")
        return f"{waiter}"

    def do_extend(self, who: str, num_tokens: int) -> str:
        if (client := self.clients.get(who)) is None:
            return "skipped"
        before = client.record.state
        added = self.ledger.extend_nowait(client.record, num_tokens)
        self.features.add("extend before load" if before is _S.ALLOCATED else "extend")
        return f"{added}"

    def do_queue_extension(self, who: str, num_tokens: int) -> str:
        if (client := self.clients.get(who)) is None:
            return "skipped"
        waiter = self.ledger.queue_extension(client.record, num_tokens)
        self.features.add("queue extension")
        return f"{waiter}"

    def do_accept(self, who: str) -> str:
        client = self.clients.get(who)
        if client is None or client.record.waiter is None:
            return "skipped"
        is_over = client.record.waiter.error is not None
        try:
            said = f"{self.ledger.accept(client.record.waiter)}"
        except OutOfBlocks as error:
            if not is_over:
                raise
            return f"failed {error}"  # the wait has ended: no refusal
        self.features.add("granted")
        return said + self._tables(client)

    def do_withdraw(self, who: str) -> str:
        client = self.clients.get(who)
        if client is None or client.record.waiter is None:
            return "skipped"
        self.ledger.withdraw(client.record.waiter)
        self.features.add("withdraw")
        return "withdrawn"

    def do_load(self, who: str, max_tokens: int | None = None, max_job_bytes: int | None = None) -> str:
        if (client := self.clients.get(who)) is None:
            return "skipped"
        found = self.ledger.loadable(client.record, max_tokens)
        plans = self.ledger.plan_load(client.record, max_tokens, max_job_bytes=max_job_bytes)
        most = 0 if found is None else found.num_blocks
        self._require(sum(plan.num_blocks for plan in plans) <= most, "a load copies what it has said", client.record)
        self.take(plans)
        self._note("load", plans)
        self._note("load shared", client.record.load is not None and not plans)
        return self._tables(client)

    def do_abandon(self, who: str) -> str:
        if (client := self.clients.get(who)) is None:
            return "skipped"
        self.ledger.abandon_load(client.record)
        self.features.add("load abandoned")
        return self._tables(client)

    def do_release(self, who: str, reason: str = "closed_early") -> str:
        if (client := self.clients.pop(who, None)) is None:
            return "skipped"
        self.take(self.ledger.release(client.record, reason))
        return str(client.record.state.name)

    def do_serve(self, tokens: Sequence[int], salt: str | None = None, new: Sequence[int] = ()) -> str:
        """Serve a whole request if there is room: load, compute, store as far as the policy wants it, release."""
        self.num_served += 1
        who = f"served{self.num_served}"
        self.do_admit(who, tokens, salt)
        client = self.clients[who]
        try:
            self.ledger.allocate_nowait(client.record, len(tokens) + len(new))
            self.do_load(who)
            self.do_land(who)
            if client.record.state is _S.RUNNING:
                self.do_compute(who, len(tokens), new)
        except OutOfBlocks:
            return "no room"
        finally:
            self.do_release(who)
            self.do_land(who)
        return "served"

    def do_evict(self, num_tokens: int, token: int) -> str:
        """A request that shares nothing takes its room, and is released without computing."""
        record = self.ledger.admit(Prefix.of(Root("programs", "pressure"), [token] * num_tokens))
        try:
            self.ledger.allocate_nowait(record)
            self.features.add("evict")
        except OutOfBlocks:
            return "no room"
        finally:
            self.take(self.ledger.release(record))
        return "evicted"

    def do_preempt(self, who: str) -> str:
        if (client := self.clients.get(who)) is None:
            return "skipped"
        found = self.ledger.preemption.preempt(client.record)
        self.take(found.plans)
        self.features.add("preempt")
        client.marks.clear()
        client.state_at = -1
        return f"{found.num_freed} {found.num_pending}"

    def do_resume(self, who: str, num_tokens: int | None = None) -> str:
        if (client := self.clients.get(who)) is None:
            return "skipped"
        self.ledger.preemption.resume(client.record, num_tokens)
        self.features.add("resume")
        return f"{client.record.match}"

    def do_fork(self, who: str, child: str, num_tokens: int = 0) -> str:
        if (client := self.clients.get(who)) is None:
            return "skipped"
        fork = self.ledger.forks.fork(client.record, child, num_tokens=num_tokens)
        for source, destination in fork.copies:
            self.bytes.copy(0, source, 0, destination)
        text = attrs.evolve(
            client.text,
            tokens=client.text.tokens[:],
            prefixes=client.text.prefixes[:],
            sampled_marks=client.text.sampled_marks[:],
        )
        self.clients[child] = Client(
            child, fork.request, text, client.num_prompt, client.must_end, client.born, oldest=client.oldest,
            state_at=client.state_at, state_marks=client.state_marks,
        )  # fmt: skip
        self.features.add("fork")
        return f"{fork.copies}" + self._tables(self.clients[child])

    def do_invalidate(self, who: str, from_token: int) -> str:
        if (client := self.clients.get(who)) is None:
            return "skipped"
        affected = self.ledger.invalidation.invalidate(client.record, from_token)
        self._forget(client, from_token, affected)
        for other in self.clients.values():
            if other is not client and not other.must_end and other.text.marks & self.bytes.invalid:
                raise Violation("not told", f"{other.name} goes on with what a failed forward has sampled")
        for step in self.steps.values():
            for forward in step.forwards:
                # A request that is over is not told: there is nothing left to abort.
                is_over = self.clients.get(forward.client.name) is not forward.client
                forward.is_void |= forward.client is client or is_over
        self.features.add("invalidate")
        self._note("told", affected)
        self._require(
            client.record.sequence.num_tokens == len(client.text.tokens), "tokens are kept or lost", client.record
        )
        return f"{[record.request_id for record in affected]}"
