"""Programs: sequences of public calls as plain data, so that they can be printed, replayed and made shorter."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import attrs

from ...config import OffloadConfig
from ...core.groups import AttentionKind, ChunkedLocal, FullAttention, KVCacheGroup, SlidingWindow
from ...core.policy import LazyStore, SelectiveStore

__all__ = ["Call", "Face", "GroupShape", "Program", "World", "draw_world"]

Face = Literal["ledger", "asyncio", "trio"]
"""What a program calls: the ledger, or the runtime in a simulated loop of that kind."""


@attrs.frozen
class Call:
    """One call of a program. Who and what it is about is named, not counted: without the calls before it, it still
    means the same, or nothing."""

    name: str
    args: Mapping[str, Any] = attrs.field(factory=dict, eq=lambda args: tuple(sorted(args.items(), key=lambda i: i[0])))

    def __str__(self) -> str:
        words = "".join(f", {name}={value!r}" for name, value in self.args.items())
        return f"call({self.name!r}{words})"


@attrs.frozen
class GroupShape:
    """A KV cache group in words: `kind` is "full", "window" or "chunk", `reach` what a window or a chunk spans."""

    kind: str
    reach: int
    block_size: int

    def group(self, name: str) -> KVCacheGroup:
        kinds: dict[str, type[Any]] = {"window": SlidingWindow, "chunk": ChunkedLocal}
        attention: AttentionKind = FullAttention() if self.kind == "full" else kinds[self.kind](self.reach)
        return KVCacheGroup(name, attention, self.block_size)


@attrs.frozen
class World:
    """What a program runs in: the layout, the pools and the policy."""

    groups: tuple[GroupShape, ...]
    num_device_blocks: int
    """Rows, with the null block."""
    num_host_blocks: int
    max_job_bytes: int
    """A block counts as one byte."""
    store_policy: str
    """"eager", "off", "lazy:3" (its frontier), "selective:2" (times seen)."""
    max_pinned_share: float = 0.5
    max_prefetch_share: float = 0.5

    def config(self, **options: Any) -> OffloadConfig:
        """The configuration of a ledger or a runtime in this world."""
        return OffloadConfig(
            groups=[shape.group(f"group{number}") for number, shape in enumerate(self.groups)],
            num_host_blocks=self.num_host_blocks,
            max_job_bytes=self.max_job_bytes,
            store_policy=self._policy(),
            max_pinned_share=self.max_pinned_share,
            max_prefetch_share=self.max_prefetch_share,
            **options,
        )

    def _policy(self) -> Any:
        name, _, number = self.store_policy.partition(":")
        if name == "lazy":
            return LazyStore(int(number)) if number else LazyStore()
        return SelectiveStore(int(number), 4000) if name == "selective" else name


@attrs.frozen
class Program:
    """Calls in a world. `seed` decides what no call says: in which order tasks run, when copies end."""

    face: Face
    world: World
    calls: tuple[Call, ...]
    seed: int = 0

    def with_calls(self, calls: Sequence[Call]) -> Program:
        return attrs.evolve(self, calls=tuple(calls))


def draw_world(rng: random.Random) -> World:
    """Any layout of one to three groups, pools from two blocks up, a host from none up, any policy.

    Blocks are small, so that little is enough to fill them."""
    shapes = tuple(_draw_shape(rng) for _ in range(rng.choice((1, 1, 1, 2, 2, 3))))
    unit = _unit(shapes)
    width = sum(unit // shape.block_size for shape in shapes)
    num_units = rng.choice((rng.randint(1, 4), rng.randint(4, 12), rng.randint(12, 30)))
    num_device = max(2, num_units * width + 1 + rng.randrange(3))
    num_host = rng.choice((0, rng.randint(1, 2 * width), *[rng.randint(2, 12) * width] * 3, *[40 * width] * 3))
    policies = (*["eager"] * 5, "lazy", "lazy:1", f"lazy:{rng.randint(2, 12)}", "selective:2", "off")
    return World(
        shapes, num_device, num_host, rng.choice((1, 2, 3, 1000)) * width, rng.choice(policies),
        rng.choice((0.5, 0.5, 1.0, 0.25)), rng.choice((0.5, 1.0)),
    )  # fmt: skip


def _draw_shape(rng: random.Random) -> GroupShape:
    kind = rng.choice(("full", "full", "full", "window", "window", "chunk"))
    return GroupShape(kind, 0 if kind == "full" else rng.randint(1, 12), rng.choice((1, 2, 2, 4)))


def _unit(shapes: Sequence[GroupShape]) -> int:
    return max(shape.block_size for shape in shapes)  # powers of two
