"""Calls about forwards: computed at once, or in a step that is held while other calls are made."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

from aoffload._kernel.states import RequestState
from aoffload.errors import AoffloadError, CommitError, IllegalTransition, IntegrityError, LeaseError
from aoffload.testing.violations import Violation

from .ledger_jobs import JobCalls
from .ledger_state import Client, Forward, Step

__all__ = ["BROKEN", "StepCalls"]

_S = RequestState
BROKEN = (IllegalTransition, IntegrityError, LeaseError)
"""Errors that report an internal inconsistency: no call may be refused with them."""


class StepCalls(JobCalls):
    """A forward reads and writes at its end, the latest possible moment."""

    def do_compute(self, who: str, stop: int, new: Sequence[int] = (), most: int = 9) -> str:
        """A forward up to token `stop`, and its commit with the `new` tokens that it has sampled. It writes at most
        `most` of the planned checkpoints that it passes."""
        client = self.clients.get(who)
        if client is None or client.record.num_steps or client.record.state not in (_S.ALLOCATED, _S.RUNNING):
            return "skipped"
        record, start = client.record, client.record.num_computed_tokens
        if start > stop:
            stop = start
        self.ledger.check_commit(record, stop, new)
        forward = self._forward(client, start, stop, is_early=False)
        num_drafts = max(0, stop - len(client.text.tokens))
        with self.ledger.step([record]):
            self.bytes.append(client.text, new[:num_drafts])  # drafts: computed in the forward that accepts them
            marks = self._run(forward, most)
        client.text.sampled_marks += marks[len(marks) - num_drafts :]
        return self._commit(client, forward, marks, new, num_drafts)

    def do_commit(self, who: str, num_computed_tokens: int) -> str:
        """A commit without a forward, of tokens that are committed already."""
        client = self.clients.get(who)
        if client is None or num_computed_tokens > client.record.num_computed_tokens:
            return "skipped"
        self.take(self.ledger.commit(client.record, num_computed_tokens))
        return "committed again"

    def do_begin(self, step: str, who: Sequence[str], arriving: Sequence[str] = ()) -> str:
        """Begin a forward. It computes as many tokens of each client as there is room for."""
        clients = [self.clients[name] for name in who if name in self.clients]
        early = [self.clients[name] for name in arriving if name in self.clients]
        if step in self.steps or not (clients or early) or any(c.record.num_steps for c in (*clients, *early)):
            return "skipped"
        stack = ExitStack()
        held = [client.record for client in clients]
        step_of = self.ledger.overlap.step(held, [c.record for c in early]) if early else self.ledger.step(held)
        stack.enter_context(step_of)
        forwards = [self._whole_forward(client, client in early) for client in (*clients, *early)]
        self.steps[step] = Step(stack, forwards)
        self.features.add("step")
        self._note("early start", any(forward.is_early for forward in forwards))
        return f"{[(f.start, f.stop, f.tables) for f in forwards]}"

    def do_end(self, step: str, commits: bool = True, new: Sequence[int] = (), most: int = 9) -> str:
        """End the forward and its step, and then commit what it has computed; `most`: see `do_compute`."""
        if step not in self.steps:
            return "skipped"
        ended = self.steps.pop(step)
        said: list[str] = []
        results = [(forward, self._run(forward, most)) for forward in ended.forwards]
        ended.held.close()
        for forward, marks in results:
            if commits and self._may_commit(forward):
                try:
                    said.append(self._commit(forward.client, forward, marks, self._sampled(forward, new)))
                except BROKEN:
                    raise
                except AoffloadError as error:
                    said.append(f"{error}")
        return f"{said}"

    def do_begin_again(self, who: str) -> str:
        if (client := self.clients.get(who)) is None:
            return "skipped"
        found = self.ledger.overlap.begin_again(client.record)
        self._note("begin again", found is not None)
        return f"{found}"

    def _whole_forward(self, client: Client, is_arriving: bool) -> Forward:
        record = client.record
        is_early = is_arriving and record.load is not None and bool(record.load.jobs)
        start = self.ledger.overlap.num_expected_tokens(record) if is_early else record.num_computed_tokens
        stop = max(start, min(len(client.text.tokens), record.num_units * self.unit))
        forward = self._forward(client, start, stop, is_early=is_early)
        if is_early:
            forward.tables = self.ledger.overlap.block_ids(record)
        return forward

    def _forward(self, client: Client, start: int, stop: int, *, is_early: bool) -> Forward:
        record = client.record
        planned = self.ledger.planned_checkpoints(record)
        passed = tuple(checkpoint for checkpoint in planned if start < checkpoint.num_tokens <= stop)
        resume = self.ledger.resume_checkpoint(record)
        return Forward(client, start, stop, self.ledger.block_ids(record), is_early, resume=resume, passed=passed)

    def _run(self, forward: Forward, most: int = 9) -> list[int]:
        """Do the reads and writes of a forward, at its end. Returns the marks of the tokens that it has computed.

        What an early start reads may still be on its way, so its reads are checked at the commit."""
        client, marks = forward.client, 0
        if client.must_end or forward.is_void:
            self.bytes.garble(forward.tables, forward.start, forward.stop)
            for checkpoint in forward.passed:
                self.bytes.spoil(0, checkpoint.block_ids)
            return [0] * (forward.stop - forward.start)
        if not forward.is_early:
            marks = self.read(client, forward.tables, forward.start)
            if forward.stop > forward.start:
                marks |= self.enter_state(client, forward.start, forward.resume)
        own = self.bytes.write(client.text, forward.tables, forward.start, forward.stop, marks)
        self._write_checkpoints(forward, marks, own, most)
        return own

    def _write_checkpoints(self, forward: Forward, marks: int, own: Sequence[int], most: int) -> None:
        """Write the first `most` planned checkpoints of a forward that has read `marks`. Of the others it leaves half a
        copy, which nobody may read."""
        forward.state_marks = marks
        for mark in own:
            forward.state_marks |= mark
        for checkpoint in forward.passed:
            seen = marks
            for mark in own[: checkpoint.num_tokens - forward.start]:
                seen |= mark
            self.bytes.write_checkpoint(forward.client.text, checkpoint.block_ids, checkpoint.num_tokens, seen)
            if len(forward.written) < most:
                forward.written.append(checkpoint.num_tokens)
            else:
                self.bytes.spoil(0, checkpoint.block_ids[::2])
        self._note("checkpoint left out", len(forward.written) < len(forward.passed))
        self._note("checkpoint", forward.written)
        self._note("checkpoint hit", forward.resume is not None)

    def _may_commit(self, forward: Forward) -> bool:
        client, record = forward.client, forward.client.record
        if self.clients.get(client.name) is not client or record.state is not _S.RUNNING or forward.is_void:
            return False
        return forward.start == record.num_computed_tokens and forward.stop <= len(client.text.tokens)

    def _sampled(self, forward: Forward, new: Sequence[int]) -> Sequence[int]:
        return new if forward.stop == len(forward.client.text.tokens) else ()

    def _commit(
        self, client: Client, forward: Forward, marks: list[int], new: Sequence[int], num_drafts: int = 0
    ) -> str:
        try:
            plans = self.ledger.commit(client.record, forward.stop, new, forward.written)
        except CommitError as error:
            if error.argument == "checkpoints":
                raise Violation(
                    "a checkpoint", f"{client.name} may not commit what it was to write: {error}"
                ) from error
            raise
        if forward.stop > forward.start:
            client.state_at, client.state_marks = forward.stop, forward.state_marks
        self.take(plans)
        self.take(self.ledger.write_back.plan() if self.ledger.writes_back else ())
        client.computed(forward.start, marks)
        sampled = new[num_drafts:]
        self.bytes.append(client.text, sampled)
        if client.must_end:
            client.text.sampled_marks += [0] * len(sampled)
        else:
            seen = self.read(client, self.ledger.block_ids(client.record), forward.stop)
            if (client.text.marks | seen) & self.bytes.invalid:
                raise Violation("bytes taken back", f"{client.name} goes on with what a failed forward has sampled")
            client.text.sampled_marks += [seen | (marks[-1] if marks else 0)] * len(sampled)
            self._note("early start committed", forward.is_early)
        self._note("store", plans)
        return f"{[plan.num_blocks for plan in plans]}" + self._tables(client)
