"""The encoding of frames: a version, a kind, and little-endian fields of fixed width. Decoding executes nothing.

Block ids are raw int32. Texts are UTF-8 after their length. A frame that is too short or too long, has another version,
or holds an invalid value is refused with `WireError`: invalid bytes never become a plan. Kinds below 64 go to a rank,
the others come from one:

 1  Open           u64 host blocks, u8 verify, text path of shared host memory (empty: the rank's own)
 2  RecordFence    u64 number
 3  ReleaseFence   u64 number
 4  Launch         u64 job id, u64 fence (0: none), u8 source tier, u8 destination tier, u32 n, u32 m,
                   n * i32 source ids, m * i32 destination ids
 5  Close          f64 seconds
65  Ready          u64 device blocks, u64 bytes of a block
66  Opened
67  Refused        text argument, text problem
68  Completed      u64 job id, u8 outcome, u32 blocks landed, u64 bytes, f64 seconds, u32 n, n * i32 corrupt indices,
                   text error, 8 * u64 and 2 * f64 statistics
69  Closed         u8 whether every copy has ended
70  Lost           text reason: its device answers no more
"""

from __future__ import annotations

import os
import socket
import struct
import sys
import threading
from array import array
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from typing import Any, TypeAlias

import attrs

from ..._common.tiers import HIT_TIERS
from ..._kernel.plans import Completion, TransferPlan
from ..._kernel.states import Outcome
from ...errors import WireError
from ..transport import TransferStatistics

# -- frames ----------------------------------------------------------------------------------------------------------
#
# The messages between the deciding process and a rank, one frame each (`wire.py` encodes them).

# -- to a rank ----------------------------------------------------------------------------------------------------


@attrs.frozen
class Open:
    """Allocate the host memory and answer `Opened` or `Refused`."""

    num_host_blocks: int
    verify: bool
    memory: str = ""
    """The path of host memory that ranks share. Empty: the rank allocates its own."""


@attrs.frozen
class RecordFence:
    """Record a fence after all compute on the device so far, and keep it under this number."""

    number: int


@attrs.frozen
class ReleaseFence:
    """Drop this fence: no later frame names it."""

    number: int


@attrs.frozen
class Launch:
    """Start `plan` once fence number `after` has passed (0: no fence was given)."""

    plan: TransferPlan
    after: int


@attrs.frozen
class Close:
    """Launch nothing more, wait up to `timeout_s` seconds for running copies, answer `Closed`, and end."""

    timeout_s: float


# -- from a rank --------------------------------------------------------------------------------------------------


@attrs.frozen
class Ready:
    """The tensors are built: blocks per region, including the null block, and bytes of a block over all regions."""

    num_device_blocks: int
    block_bytes: int


@attrs.frozen
class Opened:
    """The host memory is allocated."""


@attrs.frozen
class Refused:
    """The tensors or the host memory could not be made. Becomes a `ConfigError` in the deciding process."""

    argument: str
    problem: str


@attrs.frozen
class Completed:
    """One plan is over on this rank. Carries the rank's statistics so far."""

    completion: Completion
    statistics: TransferStatistics


@attrs.frozen
class Closed:
    """Whether every copy ended in time."""

    has_ended: bool


@attrs.frozen
class Lost:
    """The rank's device is lost: nothing will be started from now on."""

    reason: str


Frame: TypeAlias = (
    Open | RecordFence | ReleaseFence | Launch | Close | Ready | Opened | Refused | Completed | Closed | Lost
)  # fmt: skip


# -- wire ------------------------------------------------------------------------------------------------------------

VERSION = 2
MAX_FRAME_BYTES = 64 * 2**20
"""Eight million block pairs: more than any plan has. Longer frames are not read."""
MAX_TEXT = 2000
"""Maximum characters of an error. The rest is neither sent nor accepted."""

_HEADER = struct.Struct("<BB")
_NUMBER, _COUNT, _BYTE, _SECONDS = struct.Struct("<Q"), struct.Struct("<I"), struct.Struct("<B"), struct.Struct("<d")
_TWO_NUMBERS = struct.Struct("<QQ")
_PLAN = struct.Struct("<QQBBII")
_COMPLETION = struct.Struct("<QBIQd")
_STATISTICS = struct.Struct("<8Q2d")
_OUTCOMES = (Outcome.LANDED, Outcome.FAILED, Outcome.CORRUPT, Outcome.UNPROVEN, Outcome.REFUSED)


class _Reader:
    """Reads the fields of a frame in order. `WireError` for missing bytes, and for bytes after the last field."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def take(self, fields: struct.Struct) -> tuple[Any, ...]:
        return fields.unpack(self._bytes(fields.size))

    def one(self, field: struct.Struct) -> Any:
        return self.take(field)[0]

    def ids(self, count: int) -> array[int]:
        found = array("i")
        found.frombytes(self._bytes(4 * count))
        return _little_endian(found)

    def text(self) -> str:
        """The next text, limited to the length that `encode` sends, because it ends up in events."""
        try:
            return self._bytes(self.one(_COUNT)).decode()[:MAX_TEXT]
        except UnicodeDecodeError as error:
            raise WireError(f"a text that is not UTF-8: {error}") from None

    def flag(self) -> bool:
        return bool(self.choice((False, True), self.one(_BYTE)))

    def seconds(self) -> float:
        return _not_negative(self.one(_SECONDS))

    def choice(self, among: tuple[Any, ...], index: int) -> Any:
        if index >= len(among):
            raise WireError(f"{index} is not an index of {among}")
        return among[index]

    def end(self) -> None:
        if self._at != len(self._data):
            raise WireError(f"{len(self._data) - self._at} bytes too many")

    def _bytes(self, size: int) -> bytes:
        found = self._data[self._at : self._at + size]
        if len(found) != size:
            raise WireError(f"{size - len(found)} bytes are missing")
        self._at += size
        return found


def _not_negative(seconds: float) -> float:
    if not 0 <= seconds < float("inf"):
        raise WireError(f"{seconds} is not a number of seconds")
    return seconds


def _little_endian(ids: array[int]) -> array[int]:
    if sys.byteorder == "big":
        ids = array("i", ids)
        ids.byteswap()
    return ids


def _ids(ids: array[int]) -> bytes:
    return _little_endian(ids).tobytes()


def _text(text: str) -> bytes:
    # An error's text may hold a lone surrogate, and has to arrive nevertheless.
    data = text[:MAX_TEXT].encode(errors="backslashreplace")
    return _COUNT.pack(len(data)) + data


# -- plans and completions ----------------------------------------------------------------------------------------


def _write_launch(frame: Launch) -> bytes:
    plan = frame.plan
    counts = len(plan.source_ids), len(plan.destination_ids)
    head = _PLAN.pack(plan.job_id, frame.after, plan.source, plan.destination, *counts)
    return head + _ids(plan.source_ids) + _ids(plan.destination_ids)


def _read_launch(reader: _Reader) -> Launch:
    job_id, after, source, destination, num_sources, num_destinations = reader.take(_PLAN)
    source, destination = reader.choice(HIT_TIERS, source), reader.choice(HIT_TIERS, destination)
    source_ids = reader.ids(num_sources)
    return Launch(TransferPlan(job_id, source, destination, source_ids, reader.ids(num_destinations)), after)


def _write_completed(frame: Completed) -> bytes:
    found = frame.completion
    outcome = _OUTCOMES.index(found.outcome)
    head = _COMPLETION.pack(found.job_id, outcome, found.num_landed, found.num_bytes, found.duration_s)
    corrupt = _COUNT.pack(len(found.corrupt)) + _ids(array("i", found.corrupt))
    return head + corrupt + _text(found.error) + _STATISTICS.pack(*attrs.astuple(frame.statistics))


def _read_completed(reader: _Reader) -> Completed:
    job_id, outcome, num_landed, num_bytes, duration_s = reader.take(_COMPLETION)
    corrupt = tuple(reader.ids(reader.one(_COUNT)))
    if corrupt and min(corrupt) < 0:
        raise WireError(f"{min(corrupt)} is not an index of a plan")
    completion = Completion(
        job_id, reader.choice(_OUTCOMES, outcome), num_landed, corrupt,
        reader.text(), num_bytes, _not_negative(duration_s),
    )  # fmt: skip
    statistics = TransferStatistics(*reader.take(_STATISTICS))
    _not_negative(statistics.load_seconds)
    _not_negative(statistics.store_seconds)
    return Completed(completion, statistics)


# -- the kinds ----------------------------------------------------------------------------------------------------


@attrs.frozen
class _Kind:
    """How the fields of one kind of frame are written and read."""

    frame: type
    write: Callable[[Any], bytes]
    read: Callable[[_Reader], Frame]


_KINDS = {
    1: _Kind(
        Open,
        lambda frame: _NUMBER.pack(frame.num_host_blocks) + _BYTE.pack(frame.verify) + _text(frame.memory),
        lambda reader: Open(reader.one(_NUMBER), reader.flag(), reader.text()),
    ),
    2: _Kind(
        RecordFence, lambda frame: _NUMBER.pack(frame.number), lambda reader: RecordFence(reader.one(_NUMBER))
    ),
    3: _Kind(
        ReleaseFence, lambda frame: _NUMBER.pack(frame.number), lambda reader: ReleaseFence(reader.one(_NUMBER))
    ),
    4: _Kind(Launch, _write_launch, _read_launch),
    5: _Kind(Close, lambda frame: _SECONDS.pack(frame.timeout_s), lambda reader: Close(reader.seconds())),
    65: _Kind(
        Ready,
        lambda frame: _TWO_NUMBERS.pack(frame.num_device_blocks, frame.block_bytes),
        lambda reader: Ready(*reader.take(_TWO_NUMBERS)),
    ),
    66: _Kind(Opened, lambda frame: b"", lambda reader: Opened()),
    67: _Kind(
        Refused,
        lambda frame: _text(frame.argument) + _text(frame.problem),
        lambda reader: Refused(reader.text(), reader.text()),
    ),
    68: _Kind(Completed, _write_completed, _read_completed),
    69: _Kind(Closed, lambda frame: _BYTE.pack(frame.has_ended), lambda reader: Closed(reader.flag())),
    70: _Kind(Lost, lambda frame: _text(frame.reason), lambda reader: Lost(reader.text())),
}  # fmt: skip
_NUMBERS = {kind.frame: number for number, kind in _KINDS.items()}


def encode(frame: Frame) -> bytes:
    """The bytes of `frame`. `WireError` if a field does not fit into its width, or the frame is too long."""
    number = _NUMBERS[type(frame)]
    try:
        data = _HEADER.pack(VERSION, number) + _KINDS[number].write(frame)
    except (struct.error, OverflowError) as error:
        raise WireError(f"{type(frame).__name__} cannot be written: {error}") from error
    if len(data) > MAX_FRAME_BYTES:
        raise WireError(f"{type(frame).__name__} has {len(data)} bytes, more than {MAX_FRAME_BYTES}")
    return data


def decode(data: bytes) -> Frame:
    """The frame in `data`. `WireError` for anything that `encode` would not have written."""
    reader = _Reader(data)
    version, number = reader.take(_HEADER)
    if version != VERSION:
        raise WireError(f"the frame has version {version}, but this process uses version {VERSION}")
    if number not in _KINDS:
        raise WireError(f"{number} is not a kind of frame")
    frame = _KINDS[number].read(reader)
    reader.end()
    return frame


# -- channel ---------------------------------------------------------------------------------------------------------
#
# Frames over a socket between two processes, each of which notices when the other is gone.


class Channel:
    """One end of a socket pair. Any thread may `send`; one thread calls `receive` and `close`.

    The peer is gone when its end is closed, or when its process has ended: a process that it forked may keep its end
    open. Both are noticed without a timeout.
    """

    def __init__(self, connection: Connection, peer_pid: int) -> None:
        self._connection = connection
        self._sending = threading.Lock()
        self._peer = _process_fd(peer_pid)
        """Descriptor that is readable when the peer's process has ended. Empty if not supported, and after the end."""

    def send(self, frame: Frame) -> bool:
        """Send `frame`. Returns whether the peer was still there. Blocks while the peer does not read."""
        return self.send_encoded(encode(frame))

    def send_encoded(self, data: bytes) -> bool:
        """As `send`, for a frame that is already encoded."""
        try:
            with self._sending:
                self._connection.send_bytes(data)
        except OSError:  # the peer is gone, and `receive` says so, too
            return False
        return True

    def receive(self) -> Frame | None:
        """The next frame; None if the peer is gone and all it sent was read. `WireError` for any other bytes."""
        while self._peer and self._connection not in wait([self._connection, *self._peer]):
            self._hang_up()
        try:
            return decode(self._connection.recv_bytes(MAX_FRAME_BYTES))
        except (EOFError, OSError):
            return None

    def poll(self, timeout_s: float) -> bool:
        """Wait up to `timeout_s` seconds until `receive` would return at once. Returns whether it would."""
        return bool(wait([self._connection, *self._peer], timeout_s))

    def cut(self) -> None:
        """Shut the connection down. A blocked `send` returns; data that has arrived can still be read."""
        with suppress(OSError):  # the peer has closed it before
            with socket.socket(fileno=os.dup(self._connection.fileno())) as end:
                end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._connection.close()
        self._forget_peer()

    def _hang_up(self) -> None:
        self._forget_peer()
        self.cut()

    def _forget_peer(self) -> None:
        for descriptor in self._peer:
            os.close(descriptor)
        self._peer = ()


def _process_fd(pid: int) -> tuple[int, ...]:
    try:
        return (os.pidfd_open(pid),)
    except (AttributeError, OSError):  # other system, old kernel, or no such process: then only the socket tells
        return ()
