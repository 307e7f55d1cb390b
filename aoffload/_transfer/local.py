"""The transport of one process: regions of KV tensors, host memory, a lane for each direction, and the lower tiers.

`launch` finds the lane or the lower tier for the link, checks the ids, and chooses the fences that must pass first. It
makes a small copy itself, and hands any other copy to a thread.

A load overwrites blocks that compute may still read, and a store without `after` reads blocks that compute may still
write. So both wait for all compute so far, unless the caller names the only fences that matter (`OnlyAfter`). No
compute touches host memory, so a copy between the host and a lower tier waits for nothing.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np

from .._common.arguments import check_callable, check_has, check_type, shown
from .._common.env import Env
from .._common.tiers import BELOW, CUSTOM, DEVICE, DISK, HOST, REMOTE, TIERS, Tier
from .._config.config import GroupLike
from .._config.tiers import DiskTier, RemoteTier
from .._kernel.plans import Completion, TransferPlan
from .._kernel.pools import are_neighbours
from .._kernel.states import LOAD, STORE
from ..errors import ConfigError, InvalidArgument, RegionError, TransferRefused, WrongState
from .backends.base import CopyBackend, HasHostRows, RegionBackend
from .backends.cpu import CpuBackend
from .backends.cuda.backend import CudaBackend
from .fences import Fence, OnlyAfter, RegionFences, WatchesRegions
from .lane import TURN_BYTES, BlockChecksums, CopyLane, DeviceLoss, LaneCounts, hand_over_bytes
from .region import KVRegion, regions_of
from .shared_memory import map_checksums
from .transport import (
    TIER_METHODS,
    PinProgress,
    ReportsPinning,
    TransferStatistics,
    TransportDisk,
    TransportRemote,
    TransportTier,
)
from .turns import Turns

if TYPE_CHECKING:
    from .._tiers.disk.lanes import LocalDisk
    from .._tiers.remote.lanes import LocalRemote

_LINKS = {(BELOW, DEVICE): LOAD, (DEVICE, BELOW): STORE}
"""The links that copy backends serve, in the order in which their lanes begin."""
NO_TIERS: Mapping[Tier, TransportTier] = MappingProxyType({})
FEW_IDS = 32
"""Below this number of ids, a Python list is sorted faster than an array."""
_IDLE_S = 10.0
"""How long idle threads may take to end."""


class LocalTransport:
    """Copies between `kv_caches` (see `regions_of`) and host memory, with a lane for each direction. With `disk` and
    `remote`, it also copies between host memory and that disk or store, on threads of their own. `tiers`: the copies of
    tiers that the program adds (see `LowerTier`).

    `backend` makes a `CopyBackend` from the regions; by default `CpuBackend` or `CudaBackend`, by the device of the
    tensors. Raises `RegionError` for tensors that a block id cannot address.
    """

    def __init__(
        self,
        kv_caches: object,
        backend: Callable[[tuple[KVRegion, ...]], CopyBackend] | None = None,
        disk: DiskTier | None = None,
        remote: RemoteTier | None = None,
        tiers: Mapping[Tier, TransportTier] = NO_TIERS,
    ) -> None:
        regions = regions_of(kv_caches)
        if backend is not None:
            check_callable("backend", backend)
        make = _backend_for(regions[0].device.type) if backend is None else backend
        self.backend: CopyBackend = make(regions)
        check_has("backend", self.backend, "factory of copy backends", "num_device_blocks block_bytes")
        self._watcher = self.backend if isinstance(self.backend, WatchesRegions) else None
        self.regions = regions
        self._lanes: dict[tuple[Tier, Tier], CopyLane] = {}
        """The lanes by link."""
        self._bounds: dict[Tier, tuple[int, int]] = {}
        """The block ids of each tier: the lowest one, and the end (exclusive)."""
        self._turns = Turns()
        self._most_bytes_at_once = 0
        """Maximum bytes of a copy that `launch` makes itself. 0: it makes none."""
        # Bytes that `launch` may still copy itself in this turn. 0 until the first `begin_turn`: a caller without turns
        # never calls it, so threads make all its copies.
        self._left_bytes = 0
        self._deliver: Callable[[Completion], object]
        """Set by `open`."""
        self._loss = DeviceLoss()
        self._shared_path = ""
        self._checksums: BlockChecksums | None = None
        """Set by `open`, with `verify`."""
        self._disk = None if disk is None else _disk_of(disk, regions)
        self._remote = None if remote is None else _remote_of(remote, regions)
        self.tiers = check_tiers(tiers)
        """The copies of the program's own tiers."""
        own: dict[Tier, TransportTier | None] = {DISK: self._disk, REMOTE: self._remote}
        self._lower = {tier: found for tier, found in {**own, **self.tiers}.items() if found is not None}
        """The copies of each tier below the host."""
        self._lower_links: dict[tuple[Tier, Tier], TransportTier] = {}
        """The open tiers by link."""
        if self._lower:
            check_has("backend", self.backend, "backend with host memory of its own", "host_rows", ConfigError)

    @property
    def disk(self) -> TransportDisk | None:
        return self._disk

    @property
    def remote(self) -> TransportRemote | None:
        return self._remote

    @property
    def num_device_blocks(self) -> int:
        return self.backend.num_device_blocks

    @property
    def block_bytes(self) -> int:
        return self.backend.block_bytes

    @property
    def num_regions(self) -> int:
        return len(self.regions)

    @property
    def opens_slowly(self) -> bool:
        """Whether `open` takes seconds. Page-locking takes seconds for each 10 GiB; measuring the break-even of the
        copy kernel and allocating the files of a disk also take long. A tier that the program adds may open slowly,
        too."""
        return isinstance(self.backend, ReportsPinning) or self._disk is not None or bool(self.tiers)

    @property
    def link_bytes_per_s(self) -> float:
        return self.backend.bytes_per_s if isinstance(self.backend, CudaBackend) else 0.0

    @property
    def waits_only_after(self) -> bool:
        return True

    def share_host_memory(self, path: str) -> None:
        """Use the host memory at `path` (`SharedMemory`), which other transports use, too. Called before `open`.
        `ConfigError` for a backend or a lower tier that cannot share it."""
        if not isinstance(self.backend, RegionBackend) or self._lower:
            problem = "a backend of your own, or a tier below the host, cannot share host memory"
            raise ConfigError("num_replicas", problem)
        self._shared_path = self.backend.shared_path = path

    def report_pinning(self, hear: Callable[[PinProgress], None]) -> None:
        if isinstance(self.backend, ReportsPinning):
            self.backend.report_pinning(hear)

    def open(self, num_host_blocks: int, *, verify: bool, deliver: Callable[[Completion], None], env: Env) -> None:
        """Allocate and start the threads. `WrongState` if it is called a second time; `ConfigError` without enough
        memory.

        If it raises, it leaves nothing open.
        """
        if self._lanes:
            raise WrongState("this transport was opened before; make another one")
        try:
            self._open(num_host_blocks, verify, deliver, env)
        except BaseException:
            self.close(_IDLE_S)
            raise

    def _open(self, num_host_blocks: int, verify: bool, deliver: Callable[[Completion], None], env: Env) -> None:
        self.backend.open(num_host_blocks)
        self._deliver = deliver
        num_blocks = {DEVICE: self.num_device_blocks, BELOW: num_host_blocks}
        checksums = None
        if verify:
            path = self._shared_path
            digests = map_checksums(path, num_host_blocks, self.block_bytes) if path else None
            checksums = self._checksums = BlockChecksums(num_host_blocks, digests)

        def over(completion: Completion) -> None:
            self._turns.end()
            deliver(completion)

        for link, direction in _LINKS.items():
            self._lanes[link] = CopyLane(direction, self.backend, checksums, over, env, self._loss)
        if isinstance(self.backend, HasHostRows):
            for tier, lower in self._lower.items():
                lower.open(self.backend.host_rows, checksums, over, env)
                num_blocks[tier] = lower.num_blocks
                self._lower_links |= {(tier, HOST): lower, (HOST, tier): lower}
        self._bounds = {tier: (TIERS[tier].lowest_id, stop) for tier, stop in num_blocks.items()}
        # Only `CpuBackend` itself is known to copy without waiting. Verifying takes longer than copying.
        if type(self.backend) is CpuBackend and not verify:
            self._most_bytes_at_once = hand_over_bytes(next(iter(self._lanes.values())).hand_over)

    def record_fence(self) -> Fence:
        """A fence after all compute so far. `TransferRefused` if none can be recorded; `DeviceGone` if the device is
        lost."""
        self._loss.check()
        try:
            return self.backend.record_fence()
        except Exception as error:  # any driver error: nothing was started
            self._loss.notice(error)
            self._loss.check()
            raise TransferRefused(f"no fence could be recorded: {error!r}") from error

    def launch(self, plan: TransferPlan, after: Fence | None) -> None:
        """Hand the plan to its thread. A small copy may be made at once (see `begin_turn`); `deliver` is then called
        before this method returns. `TransferRefused` for invalid block ids, and after closing; `DeviceGone` once the
        device is lost."""
        if not self._lanes:
            raise TransferRefused("the transport is not open")
        self._loss.check()
        link = plan.source, plan.destination
        lane = self._lanes.get(link)
        lower = self._lower_links.get(link) if lane is None else None
        if lane is None and lower is None:
            raise TransferRefused(f"this transport has no link from {plan.source!r} to {plan.destination!r}")
        num_blocks = len(plan.source_ids)
        if num_blocks != len(plan.destination_ids):
            lengths = f"{num_blocks} source_ids, {len(plan.destination_ids)} destination_ids"
            raise TransferRefused(f"job {plan.job_id}: {lengths}")
        self._check_ids(plan, "source_ids", plan.source, plan.source_ids)
        self._check_ids(plan, "destination_ids", plan.destination, plan.destination_ids)

        fences: tuple[Fence, ...] = ()  # a copy below the host waits for none: no compute touches host memory
        if lane is not None:
            if isinstance(after, OnlyAfter):
                fences = after.fences
            elif after is None:
                fences = (self.record_fence(),)
            else:
                # A load overwrites blocks that compute may still read, so it waits for all compute so far, too.
                fences = (after, self.record_fence()) if link[1] is DEVICE else (after,)
            num_bytes = num_blocks * self.backend.block_bytes
            is_small = 0 < num_bytes <= self._most_bytes_at_once and num_bytes <= self._left_bytes
            if is_small and lane.copy_now(plan, fences, self._deliver):
                self._left_bytes -= num_bytes
                return
        self._turns.begin()
        try:
            if lane is not None:
                lane.launch(plan, fences)
            elif lower is not None:
                lower.launch(plan)
        except TransferRefused:
            self._turns.end()
            raise

    def begin_turn(self) -> None:
        """Call this once in each turn of your event loop, after you have settled completions. In this turn, `launch`
        may then again make small copies of CPU tensors itself, up to a number of bytes. Do not call it if you settle
        completions inside `deliver`."""
        self._left_bytes = TURN_BYTES

    def give_up(self, job_id: int) -> None:
        """Called before the host blocks of a job may be reused. A store to the disk then records nothing, because its
        source may be overwritten. A copy from or to a remote store does not touch host memory any more."""
        for lower in self._lower.values():
            lower.give_up(job_id)

    def watch(self, job_id: int, fences: RegionFences) -> None:
        """Copy the load `job_id`, which is launched next, region by region, if the backend can."""
        if self._watcher is not None:
            self._watcher.watch(job_id, fences)

    def forget(self, job_id: int) -> None:
        if self._watcher is not None:
            self._watcher.forget(job_id)

    def close(self, timeout_s: float) -> bool:
        """Refuse new plans, and wait for launched ones. A copy that hangs keeps the memory of both sides alive."""
        deadline_s = time.monotonic() + timeout_s  # not the `Env`'s clock: joining a thread takes real time
        ending: list[CopyLane | TransportTier] = [*self._lanes.values(), *self._lower.values()]
        for each in ending:
            each.stop_launching()
        ended = [each.join(max(0.0, deadline_s - time.monotonic())) for each in ending]
        self._turns.close()
        if all(ended):
            self.backend.close()
            if self._checksums is not None:
                self._checksums.close()
        return all(ended)

    def statistics(self) -> TransferStatistics:
        loads, stores = (self._counts(link) for link in _LINKS)
        return TransferStatistics(
            num_loads=loads.num_jobs,
            num_stores=stores.num_jobs,
            blocks_loaded=loads.num_blocks,
            blocks_stored=stores.num_blocks,
            blocks_verified=loads.num_verified,
            blocks_corrupt=loads.num_corrupt,
            bytes_loaded=loads.num_blocks * self.block_bytes,
            bytes_stored=stores.num_blocks * self.block_bytes,
            load_seconds=loads.copy_seconds,
            store_seconds=stores.copy_seconds,
        )

    def __repr__(self) -> str:
        return f"<LocalTransport {type(self.backend).__name__} blocks={self.num_device_blocks}>"

    def _counts(self, link: tuple[Tier, Tier]) -> LaneCounts:
        lane = self._lanes.get(link)
        return lane.counts if lane is not None else LaneCounts()

    def _check_ids(self, plan: TransferPlan, name: str, tier: Tier, ids: array[int]) -> None:
        """Refuse bad ids before anything is copied: the copy calls would clip them instead."""
        if not ids:
            return
        lowest, stop = self._bounds[tier]
        if lowest <= ids[0] <= ids[-1] < stop and are_neighbours(ids):  # the usual case: consecutive ids
            return
        if len(ids) < FEW_IDS:
            few = sorted(ids)
            first, last, has_duplicates = few[0], few[-1], len(set(few)) < len(few)
        else:
            many = np.frombuffer(ids, np.int32).copy()
            many.sort()
            first, last = int(many[0]), int(many[-1])
            has_duplicates = bool(np.count_nonzero(many[1:] == many[:-1]))
        if not lowest <= first <= last < stop:
            raise TransferRefused(f"job {plan.job_id}: {name} must be in [{lowest}, {stop}), got {first} to {last}")
        if has_duplicates:
            raise TransferRefused(f"job {plan.job_id}: {name} names a block twice")


def check_tiers(tiers: object) -> dict[Tier, TransportTier]:
    """Check the argument `tiers` of `LocalTransport`, and return it: tiers of the program's own."""
    if not isinstance(tiers, Mapping):
        raise InvalidArgument("tiers", f"must be a mapping of tiers, got {shown(tiers)}")
    for tier, found in tiers.items():
        if tier is not CUSTOM:
            raise InvalidArgument("tiers", f"must have only the key Tier.CUSTOM, got {shown(tier)}")
        check_has("tiers", found, "TransportTier", TIER_METHODS)
    return dict(tiers)


def _disk_of(tier: DiskTier, regions: tuple[KVRegion, ...]) -> LocalDisk:
    from .._tiers.disk.lanes import LocalDisk

    return LocalDisk(check_type("disk", tier, DiskTier), regions)


def _remote_of(tier: RemoteTier, regions: tuple[KVRegion, ...]) -> LocalRemote:
    from .._tiers.remote.lanes import LocalRemote

    return LocalRemote(check_type("remote", tier, RemoteTier), regions)


def _backend_for(device_type: str) -> Callable[[tuple[KVRegion, ...]], CopyBackend]:
    return CudaBackend if device_type == "cuda" else CpuBackend


MIN_TELLING_AXES = 3
"""Minimum axes of a block whose shape shows its tokens: with fewer, an axis may combine tokens, heads and head size."""


def described(transport: object) -> str:
    """The regions of `transport` as one line of text, equal ones counted together; empty for other transports.

    For example `4 regions of 100 blocks [16, 8, 64] torch.float16 (16384 bytes) on cpu`.
    """
    kinds: dict[str, int] = {}
    for region in _regions(transport):
        kind = _kind(region)
        kinds[kind] = kinds.get(kind, 0) + 1
    return ", ".join(f"{number} region{'s' * (number > 1)} of {kind}" for kind, number in kinds.items())


def _regions(transport: object) -> Sequence[KVRegion]:
    return transport.regions if isinstance(transport, LocalTransport) else ()


def _kind(region: KVRegion) -> str:
    shape = f" {list(region.block_shape)}" if region.block_shape else ""
    gap = "" if region.block_stride_bytes == region.block_bytes else f", {region.block_stride_bytes} bytes apart"
    blocks = f"{region.num_blocks} blocks{shape} {region.tensor.dtype}"
    return f"{blocks} ({region.block_bytes} bytes{gap}) on {region.device}"


def check_block_sizes(transport: object, groups: Sequence[GroupLike]) -> None:
    """`RegionError` if the shape of a block shows that it holds another number of tokens than the blocks of any group.

    In all layouts in use, a block of at least three axes has one that counts its tokens. Regions made from a stride and
    a size in bytes have no shape, and are not checked.
    """
    sizes = {group.block_size for group in groups}
    for number, region in enumerate(_regions(transport)):
        if len(region.block_shape) >= MIN_TELLING_AXES and sizes.isdisjoint(region.block_shape):
            wanted = " or ".join(map(str, sorted(sizes)))
            problem = f"a block of region {number} is {list(region.block_shape)}, where no axis counts {wanted} tokens"
            advice = "see block_size, and block_axis of KVRegion.of; a KVRegion with a size in bytes is not checked"
            raise RegionError("kv_caches", f"{problem}: {advice}")
