"""The transport protocol: a transport executes plans on the tensors and delivers their completions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import attrs
import numpy as np
from numpy.typing import NDArray

from .._common.env import Env
from .._common.tiers import Tier
from .._config.tiers import DiskTier, RemoteTier
from .._kernel.layout import Layout
from .._kernel.plans import Completion, TransferPlan
from .._kernel.states import Direction
from .._tiers.disk.plans import DiskTrouble, RestoredRun
from .._tiers.remote.plans import CellLabel
from .breaker import LeftAlone, StorageMove
from .fences import Fence

if TYPE_CHECKING:
    from .lane import BlockChecksums

TRANSPORTS = "num_device_blocks block_bytes open record_fence launch close statistics"
"""The attributes of a `Transport`."""
TIER_METHODS = "open launch give_up stop_launching join"
"""The methods of a `TransportTier`."""


@attrs.frozen
class TransferStatistics:
    """Counts since the transport was opened. `blocks_loaded` counts blocks that reached the device, corrupt or not."""

    num_loads: int = 0
    num_stores: int = 0
    blocks_loaded: int = 0
    blocks_stored: int = 0
    blocks_verified: int = 0
    """Loaded blocks whose checksum matched. With `verify`, the other loaded blocks are `blocks_corrupt`."""
    blocks_corrupt: int = 0
    bytes_loaded: int = 0
    bytes_stored: int = 0
    load_seconds: float = 0.0
    """Time spent copying, without waiting for fences and without verifying."""
    store_seconds: float = 0.0


@attrs.frozen
class DiskStatistics:
    """Counts of the disk tier since it was opened. Loads bring blocks from the disk into host memory."""

    num_loads: int = 0
    num_stores: int = 0
    blocks_loaded: int = 0
    blocks_stored: int = 0
    blocks_corrupt: int = 0
    """Blocks read from the disk whose bytes differ from the stored ones. They count as misses."""
    bytes_loaded: int = 0
    bytes_stored: int = 0
    load_seconds: float = 0.0
    """Summed duration of jobs; concurrent jobs count separately."""
    store_seconds: float = 0.0
    num_failures: int = 0
    """Jobs that ended in an error of the disk."""
    left_alone: tuple[LeftAlone, ...] = ()
    """The breakers that have opened: calls of their kind are refused for a while."""


@attrs.frozen
class RemoteStatistics:
    """Counts of the remote tier since it was opened. Loads bring cells from the store into host memory."""

    num_loads: int = 0
    """Jobs of one cell each, whatever their outcome."""
    num_stores: int = 0
    blocks_loaded: int = 0
    blocks_stored: int = 0
    bytes_loaded: int = 0
    bytes_stored: int = 0
    load_seconds: float = 0.0
    """Summed duration of jobs; concurrent jobs count separately."""
    store_seconds: float = 0.0
    cells_missing: int = 0
    """Cells that were requested and are not in the store."""
    cells_corrupt: int = 0
    """Objects read from the store that are not the requested cell. They count as misses."""
    cells_removed: int = 0
    num_failures: int = 0
    """Calls of the store that ended in an error."""
    num_questions: int = 0
    question_seconds: float = 0.0
    num_unknown: int = 0
    """Questions that the store did not answer, or not in time."""
    left_alone: tuple[LeftAlone, ...] = ()
    """The breakers that have opened: calls of their kind to their node are refused for a while."""


@attrs.frozen
class PinProgress:
    """Progress of page-locking host memory, reported after each piece. Several pieces are locked at a time."""

    num_bytes: int
    """Bytes that are page-locked so far."""
    total_bytes: int
    piece_bytes: int
    """Size of the piece that was just page-locked."""
    num_pieces: int
    """Pieces in total."""


@runtime_checkable
class SharesHostMemory(Protocol):
    """A transport that can use host memory that other transports use, too. The caller then launches each store on only
    one of them."""

    def share_host_memory(self, path: str) -> None:
        """Use the host memory at `path`. Called before `open`. `ConfigError` if this transport cannot."""
        ...


@runtime_checkable
class ReportsPinning(Protocol):
    """A transport, or a part of one, that reports the progress of page-locking while it opens."""

    def report_pinning(self, hear: Callable[[PinProgress], None]) -> None:
        """Have `open` call `hear` after each piece of host memory, in the thread that opens."""
        ...


@runtime_checkable
class SlowToOpen(Protocol):
    """A transport that says whether `open` may take minutes: the runtime then calls it in a worker thread. If `open`
    raises, it must leave nothing open."""

    @property
    def opens_slowly(self) -> bool: ...


@runtime_checkable
class CopiesAtOnce(Protocol):
    """A transport that makes small copies inside `launch`, and bounds them for each turn of the event loop."""

    def begin_turn(self) -> None:
        """A turn begins: `launch` may again copy as many bytes itself as the bound of a turn allows."""
        ...


@runtime_checkable
class WaitsOnlyAfter(Protocol):
    """A transport that says whether a load with an `OnlyAfter` waits for its fences alone. If so, the runtime records a
    fence at the end of each step."""

    @property
    def waits_only_after(self) -> bool: ...


@runtime_checkable
class KnowsItsLink(Protocol):
    """A transport that knows the rate of the link to its device, once it is open."""

    @property
    def link_bytes_per_s(self) -> float:
        """The rate of the slower direction; 0.0 if it was not measured."""
        ...


@runtime_checkable
class GivesUp(Protocol):
    """A transport that has to know when a launched job is given up."""

    def give_up(self, job_id: int) -> None:
        """Other code may write to the source of this job as soon as this method has returned. The job still reports
        when it is over. Called in the event loop's thread, and does not block."""
        ...


class TransportTier(Protocol):
    """The copies between host memory and one tier below it: a disk, a remote store, or a tier of the program's own.

    `launch` and `give_up` are called in the event loop's thread and must not block. Every launched plan gets exactly
    one completion, from any thread. Its `num_landed` counts the leading blocks that are proven: the blocks of a store
    are readable from then on, and the blocks of a load equal the stored ones byte for byte."""

    @property
    def num_blocks(self) -> int:
        """Blocks of the tier, once it is open. Its block ids start at 0."""
        ...

    def open(
        self, host: NDArray[np.uint8], checksums: BlockChecksums | None, deliver: Callable[[Completion], None], env: Env
    ) -> None:
        """Prepare to launch. `host` is `[num_host_blocks, block_bytes]`. With `checksums`, a store must store only
        blocks that match their checksums, and a load must record the checksums of the blocks that it has loaded. Called
        once. If it raises, `stop_launching` and `join` still follow."""
        ...

    def launch(self, plan: TransferPlan) -> None:
        """Start copying. If it raises `TransferRefused`, nothing was started, and no completion follows."""
        ...

    def give_up(self, job_id: int) -> None:
        """Give up a job. Its source may be overwritten once this method has returned, so a store must not complete any
        more. The job still reports when it is over. `job_id` may be that of another tier's job, or of a job that is
        over."""
        ...

    def stop_launching(self) -> None:
        """Refuse new plans; launched ones continue. May be called twice."""
        ...

    def join(self, timeout_s: float) -> bool:
        """Wait up to `timeout_s` seconds for launched plans. Returns whether all have ended. Called outside of the
        event loop."""
        ...


@runtime_checkable
class HasTiers(Protocol):
    """A transport that may have tiers of the program's own."""

    @property
    def tiers(self) -> Mapping[Tier, TransportTier]: ...


class TransportDisk(Protocol):
    """The disk of a transport. All calls come in the event loop's thread and do not block, except during
    `Transport.open`."""

    @property
    def tier(self) -> DiskTier: ...

    @property
    def num_slots(self) -> int:
        """Number of slots, once the disk is open."""
        ...

    def identify(self, layout: Layout, namespace: str) -> None:
        """Set the identity of the KV: how the groups share blocks, and the namespace. Called before `Transport.open`.
        Blocks that were stored for another identity are never found."""
        ...

    def read_back(
        self, hear: Callable[[Sequence[RestoredRun]], None], over: Callable[[str], None],
        hear_trouble: Callable[[DiskTrouble], None],
    ) -> None:  # fmt: skip
        """Read the records that an earlier process has left. `hear` is called with slices of them, and `over` once,
        with the reason of a failure or with an empty text; both in a thread. Nothing is stored before `over`. From then
        on, `hear_trouble` is called in a thread whenever records that were passed to `forget` could not be erased."""
        ...

    def reset(self, num_resets: int, over: Callable[[str], None]) -> None:
        """Make sure that no restart finds the blocks that were planned before this reset. `over` is called as in
        `read_back`."""
        ...

    def disown(self) -> None:
        """Make sure that no restart finds the blocks that are planned after the next reset, because their KV may belong
        to another model than the one that `identify` has set."""
        ...

    def forget(self, slots: Sequence[int]) -> None:
        """Make sure that neither a load nor a restart finds the blocks in these slots, even after a power failure.
        Stores that are launched later wait for it. If the records cannot be erased, `hear_trouble` receives a
        `DiskTrouble` with the outcome of the further attempts."""
        ...

    def refuses(self, direction: Direction) -> bool:
        """Whether jobs in this direction should not be launched now, because the disk has failed lately."""
        ...

    def take_moves(self) -> Sequence[StorageMove]:
        """The breakers that have opened or closed since the last call. A move is available before the job that caused
        it reports."""
        ...

    def statistics(self) -> DiskStatistics: ...


@runtime_checkable
class HasDisk(Protocol):
    """A transport that may have a disk tier: links between host memory and slots."""

    @property
    def disk(self) -> TransportDisk | None: ...


class TransportRemote(Protocol):
    """The remote tier of a transport. Calls come in the event loop's thread and do not block."""

    @property
    def tier(self) -> RemoteTier: ...

    def identify(self, layout: Layout, namespace: str) -> None:
        """Set the identity of the KV: how the groups share blocks, and the namespace. Called before `Transport.open`.
        Cells that were stored for another identity are never found."""
        ...

    def connect(self, hear: Callable[[], None]) -> None:
        """Connect to the store, so that the first question does not have to. Called once, after `Transport.open`.
        `hear` is called once, in any thread, when the store has connected or failed. That is after about
        `load_timeout_s` at the latest, if the store keeps its time-outs."""
        ...

    def ask(self, labels: Sequence[CellLabel], hear: Callable[[int], None]) -> None:
        """Find out how many of these cells, which follow each other in one prefix, the store has, counted from the
        first one.

        `hear` is called once with the number, in any thread, perhaps before this returns. A cell for which the store
        gives no answer within `ask_timeout_s` counts as missing. The answer is a guess; only a load is reliable. A
        store that ignores its time-outs may answer late, so the caller limits its wait."""
        ...

    def is_wanted(self, label: CellLabel) -> bool:
        """Whether this cell is worth storing: False if the store had it lately. Cheap, and never asks the store."""
        ...

    def forget(self, labels: Sequence[CellLabel]) -> None:
        """Remove these cells, whose KV is wrong, from the store. From now on no load of this process finds them. Stores
        of these cells that are launched later wait for the removal."""
        ...

    def refuses(self, direction: Direction) -> bool:
        """Whether jobs in this direction should not be launched now, because the store has failed lately."""
        ...

    def take_moves(self) -> Sequence[StorageMove]:
        """As `TransportDisk.take_moves`; includes the breakers of questions."""
        ...

    def statistics(self) -> RemoteStatistics: ...


@runtime_checkable
class HasRemote(Protocol):
    """A transport that may have a remote tier: links between host memory and cells of an object store."""

    @property
    def remote(self) -> TransportRemote | None: ...


class Transport(Protocol):
    """Copies blocks between device tensors and host memory according to plans.

    `launch` and `record_fence` are called in the event loop's thread and must not block. Every launched plan gets
    exactly one completion, from any thread, perhaps before `launch` returns. After an UNPROVEN completion, a late proof
    may follow. If a transport dies or hangs instead, the ledger survives. Once `launch` or `record_fence` has raised
    `DeviceGone`, the runtime calls neither again; it still closes the transport.
    """

    @property
    def num_device_blocks(self) -> int:
        """Blocks of every KV region, including the null block 0."""
        ...

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all regions."""
        ...

    def open(self, num_host_blocks: int, *, verify: bool, deliver: Callable[[Completion], None], env: Env) -> None:
        """Allocate `num_host_blocks` of host memory and prepare to launch. Host block ids start at 0.

        Called in the event loop's thread, or in a worker thread if the transport is `SlowToOpen` and `opens_slowly` is
        True. If it raises, it leaves nothing open.
        """
        ...

    def record_fence(self) -> Fence:
        """A fence after all compute on the caller's stream so far. Raises `TransferRefused` if none can be recorded."""
        ...

    def launch(self, plan: TransferPlan, after: Fence | None) -> None:
        """Start copying once `after` has passed. If it raises `TransferRefused`, nothing was started, and no completion
        follows. `plan.payload` is None, except in a store to the disk (`DiskPayload`) and in a copy from or to a remote
        store (`CellLabel`).

        A load, and a store without `after`, also wait for all compute on the caller's stream so far, because it may
        still read the load's destination, or write the store's source. With `OnlyAfter` as `after`, the copy waits for
        those fences alone.
        """
        ...

    def close(self, timeout_s: float) -> bool:
        """Launch nothing more, and wait up to `timeout_s` seconds for running copies. Returns whether all have ended.

        May block: call it outside of the event loop.
        """
        ...

    def statistics(self) -> TransferStatistics:
        """The counts so far."""
        ...
