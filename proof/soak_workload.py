"""The workload of the soak, and the engine that serves it: conversations, tickets, and KV whose every byte is known."""

from __future__ import annotations

import hashlib
import random
import threading
import time
from collections.abc import Callable
from typing import Any, Literal

import anyio
import attrs
import numpy as np
from numpy.typing import NDArray

from aoffload import KVCacheGroup, OffloadConfig, OffloadRuntime, Request
from aoffload._common.tiers import Tier

from .soak_memory import HostMemory, MakeMemory
from .soak_owners import OwnedBlocks, OwnedTransport, Owners

__all__ = ["Conversation", "Interruption", "Server", "Ticket", "Workload", "WrongBytes"]

BLOCK_SIZE = 16
NUM_FAMILIES = 40
CONVERSATIONS_PER_FAMILY = 4
SHARED_BLOCKS = 6
"""How many leading blocks the conversations of a family have in common."""
NUM_TURNS = 4
TURN_BLOCKS = 4
ANSWER_TOKENS = 24
"""Tokens of a turn that are generated."""
SLICE_TOKENS = 8
"""Tokens that are generated at a time."""
WORKING_SET_BLOCKS = NUM_FAMILIES * (SHARED_BLOCKS + CONVERSATIONS_PER_FAMILY * NUM_TURNS * TURN_BLOCKS)
NUM_HOST_BLOCKS = WORKING_SET_BLOCKS // 4
NUM_DEVICE_BLOCKS = WORKING_SET_BLOCKS // 14
"""Without the null block; well below what the clients could hold at a time."""
NUM_TENSORS = 2
VALUES_PER_BLOCK = 256
"""Values of 8 bytes, in each tensor: a block has 4 KiB."""
LONGEST_PAUSE_S = 0.03
LONGEST_FORWARD_S = 0.002

Values = NDArray[np.int64]


class WrongBytes(AssertionError):  # noqa: N818 - what was found
    """A block that a request was told is ready holds other bytes than those of its prefix."""


@attrs.frozen(eq=False)
class Conversation:
    """`blocks[t, i]` is what block `i` holds in tensor `t`: a function of the salt and all tokens up to its end."""

    name: str
    salt: str
    token_ids: NDArray[np.int32]
    blocks: Values


@attrs.frozen
class Interruption:
    """`native`: `asyncio.Task.cancel` (trio has none: a scope there); `scope`: a cancel scope around the request."""

    kind: Literal["native", "scope", "request", "runtime"]
    num_turns: int
    """Turns of the event loop before it, followed by `pause_s` seconds."""
    pause_s: float
    again_after_turns: int | None


@attrs.frozen
class Ticket:
    """One request. Everything but the timing is known before it starts."""

    name: str
    conversation: Conversation
    num_prompt_tokens: int
    num_tokens: int
    """Prompt and answer."""
    server: Literal["plain", "verified"]
    form: Literal["request", "run"]
    home: Literal["plain task", "caller's task"]
    forward: Literal["inline", "thread"]
    forward_s: float
    fails: Literal["never", "at once", "later"]
    """Whether its first forward turns out to have failed: right after its commit, or some turns of the loop later."""
    deadline_s: float | None
    interruption: Interruption | None

    @property
    def prompt(self) -> NDArray[np.int32]:
        return self.conversation.token_ids[: self.num_prompt_tokens]


class Workload:
    """Tickets by number: the same seed and number give the same tickets, in whatever order they are drawn."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        families = range(NUM_FAMILIES)
        self.conversations = [self._conversation(f, n) for f in families for n in range(CONVERSATIONS_PER_FAMILY)]

    def session(self, number: int) -> list[Ticket]:
        """Some turns of a conversation, one after the other."""
        draw = random.Random(f"{self.seed} {number}")
        conversation = draw.choice(self.conversations)
        first = draw.randrange(NUM_TURNS)
        turns = range(first, min(NUM_TURNS, first + draw.randint(1, 3)))
        return [_ticket(draw, f"s{number}.{turn}", conversation, turn) for turn in turns]

    def _conversation(self, family: int, number: int) -> Conversation:
        """Two tenants have the same texts: nothing but the salt keeps their blocks apart."""
        text, salt = family // 2, ("tenant-a", "tenant-b")[family % 2]
        shared = self._tokens(SHARED_BLOCKS, text)
        own = self._tokens(NUM_TURNS * TURN_BLOCKS, text, number)
        token_ids = np.concatenate([shared, own])
        return Conversation(f"{salt}/{text}/{number}", salt, token_ids, _contents(salt, token_ids))

    def _tokens(self, num_blocks: int, *key: int) -> NDArray[np.int32]:
        draw = np.random.default_rng([self.seed, *key])
        return draw.integers(0, 2**31, num_blocks * BLOCK_SIZE, dtype=np.int64).astype(np.int32)


def _ticket(draw: random.Random, name: str, conversation: Conversation, turn: int) -> Ticket:
    num_tokens = (SHARED_BLOCKS + (turn + 1) * TURN_BLOCKS) * BLOCK_SIZE
    interruption = _interruption(draw)
    kind = interruption.kind if interruption is not None else None
    return Ticket(
        name=name,
        conversation=conversation,
        num_prompt_tokens=num_tokens - ANSWER_TOKENS,
        num_tokens=num_tokens,
        server="verified" if draw.random() < 0.3 else "plain",
        form="run" if draw.random() < 0.2 else "request",
        home=_home(draw, kind),
        forward=draw.choice(("inline", "thread")),
        forward_s=draw.random() * LONGEST_FORWARD_S,
        fails=draw.choices(("never", "at once", "later"), (96, 2, 2))[0],
        deadline_s=draw.random() * LONGEST_PAUSE_S if draw.random() < 0.03 else None,
        interruption=interruption,
    )


def _home(draw: random.Random, kind: str | None) -> Literal["plain task", "caller's task"]:
    """A scope around it has to be in the same task; `Task.cancel` must not hit a task of anyio's."""
    if kind == "native":
        return "plain task"
    return "plain task" if kind != "scope" and draw.random() < 0.6 else "caller's task"


def _interruption(draw: random.Random) -> Interruption | None:
    kinds: tuple[Literal["native", "scope", "request", "runtime"] | None, ...]
    kinds = ("native", "scope", "request", "runtime", None)
    kind = draw.choices(kinds, (4, 3, 3, 3, 87))[0]
    if kind is None:
        return None
    pause_s = draw.choice((0.0, draw.random() * LONGEST_PAUSE_S))
    again = draw.randrange(6) if draw.random() < 0.4 else None
    return Interruption(kind, draw.randrange(60), pause_s, again)


def _contents(salt: str, token_ids: NDArray[np.int32]) -> Values:
    """int64 `[NUM_TENSORS, num_blocks, VALUES_PER_BLOCK]`: no two blocks look alike, nor two places in one."""
    prefix, blocks = hashlib.blake2b(salt.encode(), digest_size=8), []
    for block in token_ids.reshape(-1, BLOCK_SIZE):
        prefix.update(block.tobytes())
        draw = np.random.default_rng(int.from_bytes(prefix.copy().digest(), "little"))
        blocks.append(draw.integers(1, 2**63, (NUM_TENSORS, VALUES_PER_BLOCK), dtype=np.uint64).astype(np.int64))
    return np.stack(blocks, axis=1)


class Server:
    """A runtime over tensors, and forwards that write the right bytes. Wrong bytes raise `WrongBytes`.

    They also go to `report`, from any thread: a thread whose task is gone may find wrong bytes as well.
    """

    def __init__(
        self,
        *,
        verify: bool,
        report: Callable[[str], None],
        logger: Any,
        memory: MakeMemory = HostMemory,
    ) -> None:
        self.memory = memory((NUM_DEVICE_BLOCKS + 1, VALUES_PER_BLOCK), NUM_TENSORS)
        self._report = report
        group = KVCacheGroup("full", block_size=BLOCK_SIZE)
        config = OffloadConfig(groups=[group], num_host_blocks=NUM_HOST_BLOCKS, namespace="soak", verify=verify)
        transport = OwnedTransport(self.memory.tensors, self.memory.backend, report)
        self.runtime = OffloadRuntime(config, transport=transport, logger=logger)
        self._owners = transport.owners = Owners(self.runtime, self.memory.spoil_freed)
        self.num_checked = self.num_failed_forwards = 0
        self._counting = threading.Lock()

    def settle(self) -> None:
        """Report the wrong bytes that forwards on a device have found."""
        for about in self.memory.settle():
            self._report(f"wrong bytes: {about}")

    @property
    def num_evicted(self) -> int:
        """Blocks, device and host together."""
        return sum(self.runtime.ledger.cache.tiers[tier].num_evicted for tier in (Tier.DEVICE, Tier.HOST))

    async def serve(self, request: Request, ticket: Ticket) -> None:
        """Allocate, load, prefill, decode; check every block that is reported as ready."""
        await request.allocate()
        await self._check(request, ticket, request.match.num_device_tokens)
        num_ready = await request.load()
        await self._check(request, ticket, num_ready)
        if ticket.fails != "never":
            await self._fail(request, ticket, num_ready)
        computed = num_ready
        for stop in range(ticket.num_prompt_tokens, ticket.num_tokens + 1, SLICE_TOKENS):
            await request.extend(stop)
            await self._forward(request, ticket, computed, stop)
            request.commit(stop, ticket.conversation.token_ids[stop : min(stop + SLICE_TOKENS, ticket.num_tokens)])
            computed = stop
            await self._check(request, ticket, computed)
        await anyio.lowlevel.checkpoint()
        await self._check(request, ticket, request.num_computed_tokens)

    async def _forward(self, request: Request, ticket: Ticket, start: int, stop: int) -> None:
        ids, first, last = request.block_ids[0], start // BLOCK_SIZE, stop // BLOCK_SIZE
        held = self._owners.owned(Tier.DEVICE, ids[:last])
        if ticket.forward == "thread":
            await self.runtime.run_step([request], lambda: self._compute(ids, ticket, first, last, held))
            return
        with self.runtime.step([request]):
            middle = (first + last) // 2
            self._write(ids, ticket, first, middle)
            await anyio.lowlevel.checkpoint()
            self._write(ids, ticket, middle, last)
            self._compare(ids, ticket, last)
            self._check_hands(ticket, held)

    def _compute(self, ids: list[int], ticket: Ticket, first: int, last: int, held: OwnedBlocks) -> None:
        """A forward in a thread of its own. Its blocks are its own for as long as it runs."""
        self._compare(ids, ticket, first)
        self._write(ids, ticket, first, last)
        time.sleep(ticket.forward_s)
        self._compare(ids, ticket, last)
        self._check_hands(ticket, held)

    async def _fail(self, request: Request, ticket: Ticket, num_ready: int) -> None:
        """Commit a forward and invalidate it; at once: it left garbage, which no request may ever read."""
        ids, first, last = request.block_ids[0], num_ready // BLOCK_SIZE, ticket.num_prompt_tokens // BLOCK_SIZE
        with self.runtime.step([request]):
            self._write(ids, ticket, first, last)
            if ticket.fails == "at once":
                self.memory.spoil(ids[first:last])
        request.commit(ticket.num_prompt_tokens)
        if ticket.fails == "later":
            await turns(4)
        request.invalidate(num_ready)
        self.num_failed_forwards += 1

    def _write(self, ids: list[int], ticket: Ticket, first: int, last: int) -> None:
        if first < last:
            self.memory.write(ids[first:last], ticket.conversation.blocks[:, first:last])

    async def _check(self, request: Request, ticket: Ticket, num_ready: int) -> None:
        """Check the ready blocks, unless the request is cancelled already, for example by an invalidation. In a step,
        because a device reads them later."""
        await anyio.lowlevel.checkpoint_if_cancelled()
        with self.runtime.step([request]):
            self._compare(request.block_ids[0], ticket, num_ready // BLOCK_SIZE)

    def _compare(self, ids: list[int], ticket: Ticket, num_blocks: int) -> None:
        about = f"{ticket.name} of {ticket.conversation.name}"
        blocks = ticket.conversation.blocks[:, :num_blocks]
        if num_blocks and (wrong := self.memory.compare(about, ids[:num_blocks], blocks)):
            self._report(f"wrong bytes: {wrong}")
            raise WrongBytes(wrong)
        with self._counting:
            self.num_checked += num_blocks

    def _check_hands(self, ticket: Ticket, held: OwnedBlocks) -> None:
        if problem := held.problem(f"the forward of {ticket.name}"):
            self._report(problem)


async def turns(count: int) -> None:
    """Let all other tasks run for that many turns of the loop."""
    for _ in range(count):
        await anyio.lowlevel.checkpoint()
