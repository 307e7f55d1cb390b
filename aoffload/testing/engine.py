"""An engine without a model: it writes a tag into every block that it computes, and checks every block that it
reads."""

from __future__ import annotations

from typing import Any, ClassVar
from weakref import WeakKeyDictionary

import anyio
import attrs

from .._config.groups import AttentionKind, ChunkedLocal, KVCacheGroup, SlidingWindow
from .._kernel.states import NoEpoch
from .._runtime.request import Request
from .asks import Ask
from .env import SimulatedEnv
from .memory import Memory, Tags
from .transport import SimulatedTransport
from .violations import Violation

__all__ = ["SPOILED", "ForwardFailed", "TagEngine", "first_read"]

SPOILED = -2
"""The tag that a failed forward writes."""


class ForwardFailed(Exception):  # noqa: N818 - what happened
    """A kernel failed on the simulated device."""


@attrs.define(eq=False)
class TagEngine:
    """Computes and commits on one runtime. A wrong byte is a `Violation`, wherever it is read."""

    SERVES_STATES: ClassVar[bool] = False
    """Whether it keeps the running state of a request whose model has a recurrent state."""
    runtime: Any
    transport: SimulatedTransport
    env: SimulatedEnv
    ranks: tuple[SimulatedTransport, ...]
    """`transport`, and the transports of further ranks."""
    tags: Tags = attrs.field(factory=Tags)
    committed: set[object] = attrs.field(factory=set)
    """Identities of whole blocks that may be cached: all that were committed since the last reset."""
    num_resets: int = 0
    num_resets_of_tiers: int = 0
    num_epochs: int = 0
    """Times that another weights' epoch was set. Then memory also holds KV that no prompt hits."""
    num_invalidations: int = 0
    num_blocks_checked: int = 0
    misled: set[str] = attrs.field(factory=set)
    """Requests that have read a failed forward's bytes."""
    _born: WeakKeyDictionary[Request, int] = attrs.field(factory=WeakKeyDictionary)
    """`num_resets` when each request was made."""

    @property
    def device(self) -> Memory:
        return self.transport.device

    @property
    def proven(self) -> set[int]:
        """Jobs whose end every rank has proven."""
        return set.intersection(*[rank.proven for rank in self.ranks])

    def corrupt(self, job_id: int) -> set[tuple[int, int]]:
        """Host blocks, with their generation, that some rank's completion of that load reported as corrupt."""
        return {bad for rank in self.ranks for bad in rank.corrupt.get(job_id, ())}

    def identity(self, ask: Ask, group: int, tokens: tuple[int, ...]) -> object:
        """Everything that the KV of a block depends on."""
        spans = tuple((span.start, span.digest) for span in ask.key_spans if span.start < len(tokens))
        return (ask.salt, ask.adapter, spans, group, tokens)

    def state_tags(self, identity: object, group: KVCacheGroup) -> list[int]:
        """The tags of the rows of a checkpoint. `identity`: that of the tokens before it, in its group."""
        return [self.tags.of((identity, row)) for row in range(group.num_rows)]

    # -- commits --------------------------------------------------------------------------------------------------

    def commit(self, request: Request, ask: Ask, tokens: tuple[int, ...], stop: int, new: tuple[int, ...] = ()) -> None:
        request.commit(stop, new)
        self.note_commit(request, ask, tokens, stop)

    def note_commit(self, request: Request, ask: Ask, tokens: tuple[int, ...], stop: int) -> None:
        """From now on, whole blocks of `tokens[:stop]` may hit."""
        if self._born[request] != self.num_resets:
            return  # made before a reset: it publishes nothing
        for group, config in enumerate(self.runtime.config.groups):
            for end in range(config.block_size, stop + 1, config.block_size):
                self.committed.add(self.identity(ask, group, tokens[:end]))

    def forget_everything(self) -> None:
        """After a reset, nothing that was committed before may hit."""
        self.num_resets += 1
        self.committed.clear()

    # -- forwards -------------------------------------------------------------------------------------------------

    async def forward(self, request: Request, ask: Ask, tokens: tuple[int, ...], start: int, stop: int) -> None:
        """Compute tokens `[start, stop)`. `ForwardFailed` if the device fails three times."""
        for _ in range(3):
            try:
                await self._forward(request, ask, tokens, start, stop)
                return
            except ForwardFailed:
                continue
        raise ForwardFailed("three times")

    async def _forward(self, request: Request, ask: Ask, tokens: tuple[int, ...], start: int, stop: int) -> None:
        table, name = request.block_ids, request.request_id
        touched = self.touched(table, start, stop)
        if ask.style == "stream":
            assert self.transport.stream is not None, "this device computes at once"
            with self.runtime.step([request]):
                self.transport.stream.submit(
                    f"forward {name}",
                    lambda: self._compute(request, ask, table, tokens, start, stop),
                    [block_id for ids in table for block_id in ids],
                )
            await anyio.lowlevel.checkpoint()
            return

        def compute() -> None:
            self.check_owners(name, touched)
            if self.transport.faults.fire("compute"):
                raise ForwardFailed("the kernel failed")
            if ask.style != "inline":
                self.env.meanwhile()
                self.check_owners(name, touched)
            self._compute(request, ask, table, tokens, start, stop)

        if ask.style == "inline":
            with self.runtime.step([request]):
                compute()
        elif ask.style == "step":
            with self.runtime.step([request]):
                await self.env.run_in_thread(compute)
        else:
            await self.runtime.run_step([request], compute)

    def check_owners(self, name: str, touched: list[tuple[int, int]]) -> None:
        for block_id, generation in touched:
            self.device.check_owner(f"the forward of {name}", block_id, generation)

    def touched(self, table: list[list[int]], start: int, stop: int) -> list[tuple[int, int]]:
        """The blocks that tokens `[start, stop)` are written to, with their current generation."""
        found: list[tuple[int, int]] = []
        for group, config in enumerate(self.runtime.config.groups):
            for block_id in table[group][start // config.block_size : -(-stop // config.block_size)]:
                found.append((block_id, self.device.generation[block_id]))
        return found

    def _compute(
        self, request: Request, ask: Ask, table: list[list[int]], tokens: tuple[int, ...], start: int, stop: int
    ) -> None:
        """Check all blocks that attention reads before `start`. Then write `[start, stop)`."""
        is_spoiled = self.check_blocks(request, ask, table, tokens, start)
        self.write(ask, table, tokens, start, stop, is_spoiled=is_spoiled)

    def write(
        self, ask: Ask, table: list[list[int]], tokens: tuple[int, ...], start: int, stop: int, *, is_spoiled: bool
    ) -> None:
        """Write tokens `[start, stop)`: their correct tags, or `SPOILED` if the forward has read spoiled bytes."""
        if is_spoiled:
            self.fill(table, start, stop, SPOILED)
            return
        for group, config in enumerate(self.runtime.config.groups):
            size = config.block_size
            for index in range(start // size, -(-stop // size)):
                right = self.tags.of(self.identity(ask, group, tokens[: min(stop, (index + 1) * size)]))
                for rank in self.ranks:
                    rank.device.content[table[group][index]] = right

    def fill(self, table: list[list[int]], start: int, stop: int, tag: int) -> None:
        """Write `tag` into every block of tokens `[start, stop)`."""
        for block_id, _ in self.touched(table, start, stop):
            for rank in self.ranks:
                rank.device.content[block_id] = tag

    # -- checks ---------------------------------------------------------------------------------------------------

    def check_blocks(
        self, request: Request, ask: Ask, table: list[list[int]], tokens: tuple[int, ...], stop: int
    ) -> bool:
        """Check that every block that attention reads for the token at `stop` has the KV of exactly these tokens.

        Returns True if a wrong block is excused: a failed forward wrote it and it is not invalidated yet, or it was
        invalidated and `request` is being cancelled.
        """
        is_spoiled = False
        for group, config in enumerate(self.runtime.ledger.layout.groups):
            size = config.block_size
            for index in range(first_read(config.attention, stop) // size, -(-stop // size)):
                expected = self.tags.of(self.identity(ask, group, tokens[: min(stop, (index + 1) * size)]))
                held = [rank.device.content[table[group][index]] for rank in self.ranks]
                found = next((tag for tag in held if tag != expected), expected)
                self.num_blocks_checked += len(held)
                if found != expected and (found == SPOILED or _is_doomed(request)):
                    self.misled.add(request.request_id)  # it has to be invalidated
                    is_spoiled = True
                elif found != expected:
                    where = f"block {index} of group {group} (id {table[group][index]})"
                    about = f"{self.tags.name(found)} instead of {self.tags.name(expected)}"
                    raise Violation("wrong bytes", f"{where} holds {about}")
        return is_spoiled

    def check_ready(self, request: Request, ask: Ask, tokens: tuple[int, ...], num_ready: int) -> None:
        """Check that a load reports no more tokens as ready than were matched or requested, nor the last token, and
        that they are loaded."""
        if num_ready > request.match.num_tokens or num_ready >= len(tokens):
            raise Violation("hit cap", f"{num_ready} of {len(tokens)} ready after a match of {request.match}")
        most = None if ask.max_load_tokens is None else max(ask.max_load_tokens, request.match.num_device_tokens)
        if most is not None and num_ready > most:
            raise Violation("hit cap", f"{num_ready} ready where at most {most} were asked for")
        if ask.style != "stream":
            self.check_blocks(request, ask, request.block_ids, tokens, num_ready)

    def check_match(self, request: Request, ask: Ask) -> None:
        """Check that every hit was committed under the same root since the last reset, and that the last token is no
        hit."""
        found = request.match.num_tokens
        if found >= len(ask.tokens):
            raise Violation("hit cap", f"{found} of {len(ask.tokens)} tokens hit: there is nothing left to compute")
        for group, config in enumerate(self.runtime.config.groups):
            for end in range(config.block_size, found + 1, config.block_size):
                if self.identity(ask, group, ask.tokens[:end]) not in self.committed:
                    raise Violation("may not hit", f"{request.request_id} hit {found} tokens, {end} were never cached")


def _is_doomed(request: Request) -> bool:
    """Whether data that `request` reads were invalidated, and it is being cancelled, for that or for an earlier
    reason."""
    record = request._record
    return bool(request._cancel_reason) and record is not None and record.epoch is NoEpoch.INVALIDATED


def first_read(kind: AttentionKind, token: int) -> int:
    """The first token that computing `token` reads, from the definition of the kind alone."""
    if isinstance(kind, SlidingWindow):
        return max(0, token - kind.window + 1)
    if isinstance(kind, ChunkedLocal):
        return token // kind.chunk * kind.chunk
    return 0
