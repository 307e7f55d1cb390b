"""`DiskSlots`: slab and slot table of one directory, opened together.

Stores are not synced. A loss of power may leave any part of the writes, in any order. A restart still finds no wrong
bytes:

- A record that was written in part has a wrong checksum of its own.
- A record has the checksum of its data. A load compares it before it reports the block.
- A record has the generation in which its store was planned. A reset raises the generation in the superblock, and syncs
  it, so no block from before the reset is found.
- The data of an invalidated block matches its checksum. So the disk erases its record and syncs the table. If that
  fails three times, the disk raises the generation, so that a restart finds nothing. If that fails, too, the disk drops
  the table and is turned off.

`python -m proof.disk` tests this on a simulated disk that tears, loses and reorders writes.
"""

from __future__ import annotations

import errno
import hashlib
import itertools
import os
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from typing import TypeAlias

import attrs
import numpy as np
from numpy.typing import NDArray

from ..._common.arguments import check_int
from ..._config.tiers import num_slots_in
from ..._kernel.states import Outcome
from ...errors import ConfigError, InvalidArgument
from .files import READ_BYTES, WRITE_BYTES, DiskDirectory, DiskFile, Slab, Stretch, neighbours
from .plans import BlockLabel, DiskTrouble, RestoredRun, forgotten
from .recovery import Chains
from .table import RecordFormat, SlotLayout, SlotSums, SlotTable, SumThreads, Superblock, as_rows, data_sum

SLAB, TABLE = "slab", "table"
READ_RECORDS = 1024
"""Records that one step of `survivors` reads."""
PROVEN_UNITS = 512
"""Units that one step of `survivors` proves."""
GENERATIONS = 2**64
NUM_SUM_THREADS = 2
Ids: TypeAlias = "Sequence[int] | array[int] | NDArray[np.int64]"


def _never() -> bool:
    return False


@attrs.frozen
class DiskOutcome:
    """How a job of the disk ended. `num_landed`: number of leading blocks that are proven. `corrupt`: indices of blocks
    whose bytes are not those that were stored. Never UNPROVEN: a call that returns is over."""

    outcome: Outcome
    num_landed: int
    corrupt: tuple[int, ...] = ()
    error: str = ""


@attrs.define(eq=False, repr=False)
class DiskSlots:
    """Blocks in the slots of one slab, and records of their contents, which a restart reads.

    The caller decides which slots are free. Concurrent jobs must name different slots, and no other job may get a slot
    before the job that names it is over. `store` and `load` may be called by several threads.
    """

    layout: SlotLayout
    num_slots: int
    generation: int
    """The generation of blocks that are stored now. A job names the generation in which it was planned, so a block that
    was planned before a reset does not count after it."""
    _fingerprint: bytes
    _slab: Slab
    _table: SlotTable
    _held: ExitStack
    """The open files and their directory."""
    _load_threads: SumThreads
    _store_threads: SumThreads
    _sums: SlotSums
    _numbers: Iterator[int] = attrs.field(factory=itertools.count)
    _stale: set[int] = attrs.field(factory=set)
    """Slots whose record could not be written or erased. Such a record may name an old block."""

    @classmethod
    def open(
        cls, directory: DiskDirectory, layout: SlotLayout, host: NDArray[np.uint8], *, size_bytes: int,
        fingerprint: bytes, draw_generation: Callable[[], int], num_sum_threads: int = NUM_SUM_THREADS,
    ) -> DiskSlots:  # fmt: skip
        """Open or make the files in `directory`. They take at most `size_bytes`, all of it allocated now.

        `host` is `uint8 [num_host_blocks, block_bytes]`, contiguous: jobs name its rows. `fingerprint` identifies the
        KV that may be used again: with another fingerprint, layout or size, the slots are empty. `num_sum_threads`
        threads in each direction compute sums during the calls of the disk; with 0, sums are computed between these
        calls. `draw_generation` gives a random number in `[0, 2**63)`. `ConfigError("size")`: the disk has too little
        free space, and nothing on it was changed. `ConfigError("path")`: the files fail in another way. After an error
        nothing is open, `directory` included.
        """
        with ExitStack() as held:
            held.callback(directory.close)
            check_host(host, layout.block_bytes)
            num_slots = num_slots_in(size_bytes, layout.block_bytes, layout.unit_tokens)
            identity = Superblock(_whole(fingerprint, layout), draw_generation(), num_slots)
            threads = SumThreads(num_sum_threads), SumThreads(num_sum_threads)
            for each in threads:
                held.callback(each.close)
            try:
                return cls._open(held, directory, layout, host, identity, threads)
            except OSError as error:
                problem = error.strerror or str(error)
                if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                    raise ConfigError(
                        "size", f"{size_bytes} bytes cannot be allocated on this disk: {problem}"
                    ) from error
                raise ConfigError("path", f"cannot be used: {problem}") from error

    @classmethod
    def _open(
        cls, held: ExitStack, directory: DiskDirectory, layout: SlotLayout, host: NDArray[np.uint8], fresh: Superblock,
        threads: tuple[SumThreads, SumThreads],
    ) -> DiskSlots:  # fmt: skip
        """`fresh`: the superblock of slots that start empty."""
        num_slots = fresh.num_slots
        table = SlotTable(_opened(held, directory, TABLE), RecordFormat(layout.unit_tokens))
        slab = _opened(held, directory, SLAB)
        known, slab_bytes = table.superblock(), num_slots * layout.block_bytes
        is_ours = known is not None and (known.fingerprint, known.num_slots) == (fresh.fingerprint, num_slots)
        if known is not None and is_ours and slab.num_bytes == slab_bytes and table.holds(num_slots):
            slab.allocate(slab_bytes)
            table.keep(num_slots)
            table.replace(known)  # a disk that refuses writes could forget nothing: do not open it
            found = known
        else:
            found = attrs.evolve(fresh, generation=_next(known.generation)) if known is not None else fresh
            _start_empty(slab, slab_bytes, table, found)
        direct = directory.make_direct(slab, layout.block_bytes, host.ctypes.data)
        sums = SlotSums(num_slots)
        identity = (layout, num_slots, found.generation, fresh.fingerprint)
        return cls(*identity, Slab(direct, host), table, held.pop_all(), *threads, sums)

    def __repr__(self) -> str:
        return f"<DiskSlots {self.num_slots} slots of {self.layout.block_bytes} bytes>"

    def close(self) -> None:
        """Close the files, so that another process may open the directory. Call it when no job is under way."""
        self._held.close()

    def _checked(self, slots: Ids, host_ids: Ids) -> tuple[list[int], list[int]]:
        """Both as lists. Raises for an id out of range, which would be a place after the end of the file."""
        found = _plain(slots), _plain(host_ids)
        for name, ids, stop in zip(("slots", "host_ids"), found, (self.num_slots, self._slab.num_host), strict=True):
            if len(ids) != len(found[0]):
                raise InvalidArgument(name, f"must have one id for each slot, {len(found[0])}, got {len(ids)}")
            if ids and not 0 <= min(ids) <= max(ids) < stop:
                raise InvalidArgument(name, f"must be in [0, {stop}), got {min(ids)} to {max(ids)}")
        return found

    def _check_labels(self, labels: Sequence[BlockLabel | None], num_blocks: int) -> None:
        if len(labels) != num_blocks:
            raise InvalidArgument("labels", f"must have one label for each slot, {num_blocks}, got {len(labels)}")
        for label in labels:
            if label is not None:
                self._table.form.check(label)
                check_int("labels", label.component, 0, len(self.layout.widths) - 1)
                check_int("labels", label.place, 0, self.layout.widths[label.component] - 1)

    # -- jobs -----------------------------------------------------------------------------------------------------

    def store(
        self, slots: Ids, host_ids: Ids, labels: Sequence[BlockLabel | None], generation: int,
        is_given_up: Callable[[], bool] = _never,
    ) -> DiskOutcome:  # fmt: skip
        """Write host blocks to slots, in order, and then their records. LANDED, or FAILED with the leading blocks that
        were written. A block without a label is written, but no restart finds it.

        To give the job up, make `is_given_up` return True, and only then let others write into its host blocks. The
        function is called after the sums are taken and before they are recorded. So a recorded sum is always that of
        the KV that the label names, even if others write into the host block while the disk copies it.
        """
        to, source = self._checked(slots, host_ids)
        self._check_labels(labels, len(to))
        if not to:
            return DiskOutcome(Outcome.LANDED, 0)
        first = self._slab.stretch_at(to, source, 0, WRITE_BYTES)
        self._sums.forget(to)
        if is_given_up():
            return DiskOutcome(Outcome.FAILED, 0, error="the job was given up before it began")
        # Started right before the write, because the thread takes the interpreter's lock and would delay the disk.
        records = self._store_threads.start(partial(self._records, to, source, labels, generation))
        done, touched, error = self._write(first, to, source, is_given_up)
        sums, encoded = records()
        if is_given_up():
            done, error = 0, "the job was given up"
        self._note(to[:done], sums[:done], encoded[:done])
        if done and is_given_up():  # meanwhile, so the stored blocks may be wrong
            done, error = 0, "the job was given up"
        if done < len(to):
            # The old blocks of these slots are gone, too, so no restart may look for them there.
            self._sums.forget(to[done:])
            self._erase(to[done:touched])
            return DiskOutcome(Outcome.FAILED, done, error=error)
        return DiskOutcome(Outcome.LANDED, done)

    def _write(
        self, stretch: Stretch, to: list[int], source: list[int], is_given_up: Callable[[], bool]
    ) -> tuple[int, int, str]:
        """Write the blocks, `stretch` first, in order. Returns the number of blocks written, the number of leading
        slots that may have changed, and why no more were written."""
        done = 0
        while not is_given_up():
            error = "the write was cut short"
            try:
                num_written = self._slab.write(stretch)
            except OSError as failure:
                num_written, error = 0, str(failure)
            if not num_written:
                return done, stretch.stop, error
            done += num_written
            if done == len(to):
                break
            stretch = self._slab.stretch_at(to, source, done, WRITE_BYTES)
        return done, done, ""

    def _records(
        self, to: list[int], source: list[int], labels: Sequence[BlockLabel | None], generation: int
    ) -> tuple[NDArray[np.uint8], list[bytes]]:
        """Compute the sum of each block, as a row, and its record. Runs concurrently with the calls that write the
        blocks."""
        sums, records, form = [], [], self._table.form
        for slot, host_id, label in zip(to, source, labels, strict=True):
            found = data_sum(self._slab.block(host_id))
            sums.append(found)
            if label is None:
                records.append(form.zeros(1))
            else:
                records.append(form.encoded(label, slot, generation, next(self._numbers), found))
        return as_rows(sums), records

    def _note(self, slots: list[int], sums: NDArray[np.uint8], records: list[bytes]) -> None:
        """Record blocks that are written: their sums here, then their records on the disk. If a record cannot be
        written, a restart does not find the block, and nothing else is lost."""
        self._sums.record_all(slots, sums)
        for at in neighbours(slots):
            self._put(slots[at], partial(self._table.write, slots[at.start], records[at]))

    def load(self, slots: Ids, host_ids: Ids) -> DiskOutcome:
        """Read slots into host blocks, in order. If the sum of a block is not that of the block that was stored, the
        job is CORRUPT, the slot is forgotten and its record erased. FAILED: only the leading blocks have been read."""
        source, to = self._checked(slots, host_ids)
        expected = self._sums.of(source)
        checks: list[Callable[[], list[int]]] = []
        done, error = 0, ""
        while done < len(source) and not error:
            stretch = self._slab.stretch_at(source, to, done, READ_BYTES)
            try:
                num_read, error = self._slab.read(stretch), ""
            except OSError as failure:
                num_read, error = 0, str(failure)
            error = error or ("" if num_read else "the read was cut short")
            check = partial(self._mismatches, range(done, done + num_read), to, expected)
            done += num_read
            is_last = bool(error) or done == len(source)  # no further read follows, so a thread gains nothing
            checks.append(check if is_last else self._load_threads.start(check))
        corrupt = [index for mismatches in checks for index in mismatches()]
        if corrupt:
            # If a slot holds another block by now, this load was given up: that block stays.
            gone = [source[at] for at in corrupt if self._sums.is_still(source[at], expected[at])]
            self._sums.forget(gone)
            self._erase(gone)
            problem = f"{len(corrupt)} of {done} blocks hold other bytes than were stored"
            return DiskOutcome(Outcome.CORRUPT, corrupt[0], tuple(corrupt), problem)
        return DiskOutcome(Outcome.FAILED if error else Outcome.LANDED, done, error=error)

    def _mismatches(self, indices: range, host_ids: list[int], expected: Sequence[bytes]) -> list[int]:
        """The indices of blocks that differ from the blocks that were stored. An empty slot has a sum that no data
        has."""
        sums = self._data_sums(host_ids[indices.start : indices.stop])
        return [at for at, found in zip(indices, sums, strict=True) if found != expected[at]]

    def _data_sums(self, host_ids: list[int]) -> list[bytes]:
        return [data_sum(self._slab.block(host_id)) for host_id in host_ids]

    # -- forgetting -----------------------------------------------------------------------------------------------

    def forget(self, slots: Sequence[int]) -> DiskTrouble | None:
        """The blocks in these slots are wrong. No load accepts them any more. Once this has returned, no restart finds
        them, even after a kill or a power failure. Waits for the disk. Must not be called while `reset` runs.

        Returns None if the records were erased, otherwise a `DiskTrouble` with the outcome of the further attempts.
        """
        self._sums.forget(slots)
        stale = self._stale.copy()
        self._stale -= stale  # before the erasure, so that slots that a store adds meanwhile stay
        wrong = sorted(stale.union(slots))
        return forgotten(partial(self._table.erase_for_good, wrong), self.reset, self._table.drop_for_good)

    def _erase(self, slots: Sequence[int]) -> None:
        """Erase records whose data is gone. If a record stays, a load after a restart fails, unless a power failure has
        restored the old data."""
        for at in neighbours(slots):
            self._put(slots[at], partial(self._table.erase, slots[at.start], at.stop - at.start))

    def _put(self, slots: Sequence[int], write: Callable[[], None]) -> None:
        try:
            write()
        except OSError:
            self._stale.update(slots)

    def reset(self) -> None:
        """After this call, no restart finds blocks that were planned before it. Waits for the disk. `OSError`: a
        restart may find them, and the files must not be used any more."""
        self.raise_generation(_next(self.generation))

    def disown(self) -> None:
        """Make sure that no restart finds blocks that are stored after the next reset, because the model that computes
        them is not known."""
        self._fingerprint = os.urandom(len(self._fingerprint))

    def raise_generation(self, generation: int) -> None:
        """As `reset`, to this `generation`."""
        self.generation = generation
        self._table.replace(Superblock(self._fingerprint, generation, self.num_slots))

    # -- a restart ------------------------------------------------------------------------------------------------

    def survivors(self) -> Iterator[list[RestoredRun]]:
        """The proven runs that the last process has left, slice by slice: a prefix before the runs after it. Each step
        does a bounded amount of work, and may give an empty list. Read all of it before you store anything.

        Linking all records is one step, in which numpy releases the interpreter lock most of the time.
        """
        slots, records = [], []
        for first in range(0, self.num_slots, READ_RECORDS):
            found = self._table.sound(first, min(READ_RECORDS, self.num_slots - first), self.generation)
            slots.append(found[0])
            records.append(found[1])
            yield []
        every = np.concatenate(records)
        del records
        if len(every):
            self._numbers = itertools.count(int(every["number"].max()) + 1)
        chains = Chains(self.layout, np.concatenate(slots), every)
        del every
        self._sums.record_all(chains.slots, chains.data_sums)
        yield []
        yield from chains.proven(PROVEN_UNITS)


def _opened(held: ExitStack, directory: DiskDirectory, name: str) -> DiskFile:
    file = directory.open(name)
    held.callback(file.close)
    return file


def _start_empty(slab: DiskFile, slab_bytes: int, table: SlotTable, superblock: Superblock) -> None:
    """Drop everything, and allocate anew. `OSError`: nothing was changed if the disk has too little free space; after
    any other failure both files are empty."""
    more = slab_bytes - slab.num_bytes + table.num_more(superblock.num_slots)
    if more > 0:
        slab.allocate(slab.num_bytes + more)  # for both files: nothing is dropped before the space is reserved
    try:
        table.drop()
        slab.allocate(slab_bytes)
        table.start_empty(superblock)
    except OSError:
        for give_back in (table.drop, partial(slab.allocate, 0)):
            with suppress(OSError):
                give_back()
        raise


def _plain(ids: Ids) -> list[int]:
    found: list[int] = np.asarray(ids, dtype=np.int64).tolist()
    return found


def _whole(fingerprint: bytes, layout: SlotLayout) -> bytes:
    """The fingerprint with everything that decides the place of a byte."""
    return hashlib.sha256(hashlib.sha256(fingerprint).digest() + layout.encoded()).digest()


def _next(generation: int) -> int:
    return (generation + 1) % GENERATIONS


def check_host(host: NDArray[np.uint8], block_bytes: int) -> None:
    is_host = host.dtype == np.uint8 and host.ndim == 2 and host.flags.c_contiguous and host.flags.writeable
    if not is_host or host.shape[1] != block_bytes:
        raise InvalidArgument("host", f"must be contiguous uint8 [num_host_blocks, {block_bytes}], got {host.shape}")
