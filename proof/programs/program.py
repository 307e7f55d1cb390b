"""Programs: sequences of public calls as plain data, so that they can be printed, replayed and made shorter."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

import attrs

from aoffload._common.arguments import check_int, shown
from aoffload._common.tiers import Tier
from aoffload._config.config import OffloadConfig
from aoffload._config.groups import (
    AttentionKind,
    ChunkedLocal,
    FullAttention,
    KVCacheGroup,
    RecurrentState,
    SlidingWindow,
)
from aoffload._config.quotas import Quota, Quotas
from aoffload._config.tiers import ROUNDING_BYTES, SUPERBLOCK_BYTES, DiskTier, LearnedEviction, RemoteTier, record_bytes
from aoffload._extensions.store_policies import LazyStore, SelectiveStore
from aoffload.errors import InvalidArgument
from aoffload.testing.violations import Violation

from .vocabulary import check_call

__all__ = [
    "Call",
    "Face",
    "GroupShape",
    "Outcome",
    "QuotaShape",
    "Program",
    "TENANTS",
    "World",
    "check_face",
    "draw_world",
    "with_a_bound",
    "with_a_disk",
    "with_a_store",
    "with_learning",
    "with_quotas",
    "with_states",
    "without_laziness",
]

Face = Literal[
    "ledger", "states", "kernel", "meddled", "engine", "engine-states", "meddled-engine", "asyncio", "trio",
    "engine-asyncio", "engine-trio", "asyncio-states", "trio-states", "engine-asyncio-states", "engine-trio-states",
]  # fmt: skip
"""What a program calls: a `Ledger`, one without any feature (the kernel), a `HostCache`, either of them with an
extension that interferes at every hook, or a runtime of either kind in a simulated loop. The model of the faces with
`states` has a recurrent state."""


def check_face(face: object) -> Face:
    if face not in get_args(Face):
        raise InvalidArgument("face", f"must be one of {', '.join(get_args(Face))}, got {shown(face)}")
    return face  # type: ignore[return-value]


@attrs.frozen
class Call:
    """One call of a program. It refers to requests and other objects by name: if calls before it are left out, it still
    means the same, or nothing."""

    name: str
    args: Mapping[str, Any] = attrs.field(factory=dict, eq=lambda args: tuple(sorted(args.items(), key=lambda i: i[0])))

    def __str__(self) -> str:
        words = "".join(f", {name}={value!r}" for name, value in self.args.items())
        return f"call({self.name!r}{words})"


EPOCHS = ("", "a", "b")
"""The weights' epochs of programs."""


@attrs.frozen
class GroupShape:
    """A KV cache group in words: `kind` is "full", "window", "chunk" or "state", `reach` what a window or a chunk
    spans, or the blocks of a checkpoint."""

    kind: str
    reach: int
    block_size: int

    def __attrs_post_init__(self) -> None:
        if self.kind not in ("full", "window", "chunk", "state"):
            raise InvalidArgument("kind", f"must be full, window, chunk or state, got {shown(self.kind)}")
        if self.kind == "full" and self.reach != 0:
            raise InvalidArgument("reach", f"full attention spans everything: 0, got {shown(self.reach)}")

    def group(self, name: str) -> KVCacheGroup:
        if self.kind == "state":
            return KVCacheGroup(name, RecurrentState(), self.block_size, num_rows=self.reach)
        kinds: dict[str, type[Any]] = {"window": SlidingWindow, "chunk": ChunkedLocal}
        attention: AttentionKind = FullAttention() if self.kind == "full" else kinds[self.kind](self.reach)
        return KVCacheGroup(name, attention, self.block_size)


TENANTS = (None, "other", "third")
"""The salts of the accounts, by number. Prompts without a salt are of the default account."""


@attrs.frozen
class QuotaShape:
    """The quota of one account in blocks, which have one byte each."""

    host_floor: int | None = None
    host_ceiling: int | None = None
    disk_floor: int | None = None
    disk_ceiling: int | None = None
    pinned: int | None = None
    daily_writes: int | None = None

    def floor(self, tier: Tier) -> int | None:
        return self.host_floor if tier is Tier.HOST else self.disk_floor

    def ceiling(self, tier: Tier) -> int | None:
        return self.host_ceiling if tier is Tier.HOST else self.disk_ceiling

    def quota(self) -> Quota:
        return Quota(**attrs.asdict(self))


class _Nowhere:
    """The store that a configuration has to name: the programs keep its cells themselves."""

    def exist(self, keys: Sequence[bytes], timeout_s: float) -> Sequence[bool]:
        return [False for _ in keys]

    def get(self, key: bytes, timeout_s: float) -> bytes | None:
        return None

    def put(self, key: bytes, value: object, timeout_s: float) -> None: ...
    def remove(self, key: bytes, timeout_s: float) -> None: ...
    def close(self) -> None: ...

    def node_of(self, key: bytes) -> str:
        return "nowhere"


HINTED = 0.75
"""The share of what pins may keep that hints of clients may keep."""
MAX_HINT_S = 40.0


@attrs.frozen
class World:
    """What a program runs in: the layout, the pools and the policy."""

    groups: tuple[GroupShape, ...]
    num_device_blocks: int
    """Rows, including the null block."""
    num_host_blocks: int
    max_job_bytes: int
    """A block counts as one byte."""
    store_policy: str
    """"eager", "off", "lazy:3" (blocks of its watermark), "selective:2" (times that a prefix must be asked for)."""
    max_pinned_share: float = 0.5
    max_prefetch_share: float = 0.5
    num_disk_blocks: int = 0
    """0: no disk."""
    max_fetch_share: float = 1.0
    cell_units: int = 0
    """Units of a cell of a remote store; 0: no such store."""
    eviction: str = "lru"
    """"lru", "learned", "learned:device" (there, too)."""
    max_in_flight: int = 0
    """Bound of blocks in flight for each direction; 0: the default of the package."""
    window_interval: int = 0
    """`window_interval_tokens` of the configuration."""
    quotas: tuple[QuotaShape, ...] = ()
    """Of each of `TENANTS`; empty: no quotas."""

    def __attrs_post_init__(self) -> None:
        if not isinstance(self.groups, tuple) or not all(isinstance(one, GroupShape) for one in self.groups):
            raise InvalidArgument("groups", f"must be a tuple of GroupShapes, got {shown(self.groups)}")
        check_int("num_device_blocks", self.num_device_blocks, 2)
        if check_int("cell_units", self.cell_units, 0) & (self.cell_units - 1):
            raise InvalidArgument("cell_units", f"must be a power of two, got {self.cell_units}")
        self.config()

    def config(self, **options: Any) -> OffloadConfig:
        """The configuration of a ledger or a runtime in this world."""
        if self.num_disk_blocks:
            unit_tokens = max(shape.block_size for shape in self.groups)
            num_blocks = check_int("num_disk_blocks", self.num_disk_blocks, 0)
            size = num_bytes_of(num_blocks, 1, unit_tokens)
            options |= {"disk": DiskTier("nowhere", size), "namespace": "programs"}
        if self.cell_units:
            unit = _unit(self.groups)
            size = self.cell_units * sum(unit // shape.block_size for shape in self.groups)
            options |= {"remote": RemoteTier(_Nowhere(), cell_bytes=size), "namespace": "programs"}
        if self.quotas:
            default, *others = [shape.quota() for shape in self.quotas]
            options |= {"quotas": Quotas(dict(zip(TENANTS[1:], others, strict=True)), default)}
        if self.max_in_flight:
            options |= {"max_bytes_in_flight": self.max_in_flight}
        return OffloadConfig(
            groups=[shape.group(f"group{number}") for number, shape in enumerate(self.groups)],
            num_host_blocks=self.num_host_blocks,
            max_job_bytes=self.max_job_bytes,
            store_policy=self._policy(),
            eviction=LearnedEviction(device=True) if self.eviction == "learned:device" else self.eviction,
            max_pinned_share=self.max_pinned_share,
            max_hint_pinned_share=self.max_pinned_share * HINTED,
            max_hint_pin_s=MAX_HINT_S,
            max_prefetch_share=self.max_prefetch_share,
            max_fetch_share=self.max_fetch_share,
            window_interval_tokens=self.window_interval,
            **options,
        )

    @property
    def changes_weights(self) -> bool:
        """Whether programs in this world set the weights' epoch. The world itself determines it, so that all other
        programs stay as they were."""
        return (self.num_device_blocks + self.num_host_blocks) % 3 == 0

    def _policy(self) -> Any:
        name, _, number = self.store_policy.partition(":") if isinstance(self.store_policy, str) else ("", "", "")
        if not name or (number and (not number.isdecimal() or name not in ("lazy", "selective"))):
            known = "eager, off, lazy, lazy:NUMBER or selective:NUMBER"
            raise InvalidArgument("store_policy", f"must be {known}, got {shown(self.store_policy)}")
        if name == "lazy":
            return LazyStore(int(number)) if number else LazyStore()
        return SelectiveStore(int(number or 2), 4000) if name == "selective" else name


@attrs.frozen
class Program:
    """Calls in a world. `seed` decides what no call says: in which order tasks run, when copies end."""

    face: Face
    world: World
    calls: tuple[Call, ...]
    seed: int = 0

    def __attrs_post_init__(self) -> None:
        check_face(self.face)
        if not isinstance(self.world, World):
            raise InvalidArgument("world", f"must be a World, got {shown(self.world)}")
        if not isinstance(self.calls, tuple) or not all(isinstance(one, Call) for one in self.calls):
            raise InvalidArgument("calls", f"must be a tuple of Calls, got {shown(self.calls)}")
        check_int("seed", self.seed, 0)

    def check(self) -> None:
        """Raise `InvalidArgument` if the face does not know one of the calls."""
        for one in self.calls:
            check_call(self.face, one)

    def with_calls(self, calls: Sequence[Call]) -> Program:
        return attrs.evolve(self, calls=tuple(calls))


@attrs.frozen
class Outcome:
    """How a program ended."""

    violation: Violation | None
    num_calls: int
    """Public calls made, refused ones included."""
    features: frozenset[str]
    """Names of the features that this program has met, for the table of pairs."""
    digest: str
    """Hash of everything that could be observed: equal in every process."""


def draw_world(rng: random.Random) -> World:
    """Draw a world: one to three groups of any kind, a device of two or more rows, a host of none or more, any policy.

    Blocks are small, so that few tokens fill the pools."""
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


def with_states(world: World) -> World:
    """`world` with one or two groups of layers that have a recurrent state. The world itself determines which."""
    chance = random.Random(f"{words_of(world)} states")
    unit = _unit(world.groups)
    states = tuple(GroupShape("state", chance.choice((1, 1, 2, 3, 5)), unit) for _ in range(chance.choice((1, 1, 2))))
    if chance.random() < 0.2:
        states = (*states[:-1], attrs.evolve(states[-1], block_size=2 * unit))
    num_rows = sum(shape.reach for shape in states)
    more = chance.choice((0, 1, 2, 3, 6)) * num_rows
    num_host = world.num_host_blocks and world.num_host_blocks + chance.choice((0, 2, 6)) * num_rows
    groups = (*states, *world.groups) if chance.random() < 0.2 else (*world.groups, *states)
    return attrs.evolve(
        world, groups=groups, num_device_blocks=world.num_device_blocks + more, num_host_blocks=num_host
    )


def with_a_disk(world: World) -> World:
    """`world`, in half of the cases with a disk. Which, and how large, follows from the world itself."""
    chance = random.Random(words_of(world).replace(", cell_units=0", "").replace(", eviction='lru'", ""))
    if not world.num_host_blocks or chance.random() < 0.5:
        return world
    num_blocks = chance.choice((chance.randint(1, 8), world.num_host_blocks, 4 * world.num_host_blocks, 200))
    return attrs.evolve(world, num_disk_blocks=num_blocks, max_fetch_share=chance.choice((1.0, 0.5, 0.25)))


def with_a_store(world: World) -> World:
    """`world`, in most of the cases that allow it with a remote store. Which follows from the world itself."""
    chance = random.Random(f"{words_of(world)} store".replace(", eviction='lru'", ""))
    if not world.num_host_blocks or any(shape.kind != "full" for shape in world.groups) or chance.random() < 0.2:
        return world
    share, cell_units = chance.choice((1.0, 1.0, 0.5)), chance.choice((1, 1, 2, 2, 4))
    unit = _unit(world.groups)
    num_fit = int(world.num_host_blocks * share) // sum(unit // shape.block_size for shape in world.groups)
    while cell_units > num_fit:  # a store whose cells can never be loaded is refused
        cell_units //= 2
    return attrs.evolve(world, cell_units=cell_units, max_fetch_share=share) if cell_units else world


def with_learning(world: World) -> World:
    """`world`, in a third of the cases with eviction that learns; and in a third of the cases with windows, with
    windows stored at intervals. The world itself determines which case it is."""
    chance = random.Random(f"{words_of(world)} learned")
    kind = chance.choice(("lru", "lru", "lru", "lru", "learned", "learned:device"))
    if any(shape.kind == "state" for shape in world.groups):
        return world
    has_windows = any(shape.kind != "full" for shape in world.groups)
    interval = chance.choice((0, 0, 0, 0, 1, 8)) if has_windows else 0
    return attrs.evolve(world, eviction=kind, window_interval=interval)


def with_a_bound(world: World) -> World:
    """`world`, in most cases with few blocks in flight. The world itself determines which case it is."""
    chance = random.Random(f"{words_of(world)} bound")
    return attrs.evolve(world, max_in_flight=chance.choice((0, 1, 1, 2, 5)))


def with_quotas(world: World) -> World:
    """`world`, in a third of the cases with a host with quotas for tenants. The world itself determines which case it
    is."""
    chance = random.Random(f"{words_of(world)} quotas")
    if not world.num_host_blocks or chance.random() < 0.67:
        return world
    sizes = {"host": world.num_host_blocks} | ({"disk": world.num_disk_blocks} if world.num_disk_blocks else {})
    left = dict(sizes)
    shapes: list[QuotaShape] = []
    for _ in TENANTS:
        drawn: dict[str, int | None] = {}
        for name, size in sizes.items():
            floor = chance.choice((None, 0, left[name] // 2, left[name] // 2, left[name]))
            most = chance.choice((None, None, size, chance.randint(floor or 0, size), floor or 0))
            left[name] -= floor or 0
            drawn |= {f"{name}_floor": floor, f"{name}_ceiling": most}
        drawn["pinned"] = chance.choice((None, None, 0, chance.randint(1, world.num_host_blocks)))
        if world.num_disk_blocks:
            drawn["daily_writes"] = chance.choice((None, None, None, 0, chance.randint(1, 40)))
        shapes.append(QuotaShape(**drawn))
    return attrs.evolve(world, quotas=tuple(shapes))


def words_of(world: World) -> str:
    """`world` as text, without the fields that have their default value."""
    return repr(world).replace(", max_in_flight=0", "").replace(", window_interval=0", "").replace(", quotas=()", "")


def without_laziness(world: World) -> World:
    """`world` without a lazy store policy: only an engine knows which of its blocks it evicts next."""
    return attrs.evolve(world, store_policy="eager") if world.store_policy.startswith("lazy") else world


def num_bytes_of(num_blocks: int, block_bytes: int, unit_tokens: int) -> int:
    """The size of a disk that holds exactly `num_blocks`."""
    return SUPERBLOCK_BYTES + ROUNDING_BYTES + num_blocks * (block_bytes + record_bytes(unit_tokens))


def _draw_shape(rng: random.Random) -> GroupShape:
    kind = rng.choice(("full", "full", "full", "window", "window", "chunk"))
    return GroupShape(kind, 0 if kind == "full" else rng.randint(1, 12), rng.choice((1, 2, 2, 4)))


def _unit(shapes: Sequence[GroupShape]) -> int:
    return max(shape.block_size for shape in shapes)  # powers of two
