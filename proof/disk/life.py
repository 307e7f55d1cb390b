"""One life: a process with open slots, and the laws for the results of its calls.

bytes      a block that counts as loaded has the bytes of its prompt, none from before the last reset, and none that
           were invalidated, if the process lived until they were forgotten
corrupt    is said only of a block whose bytes on the disk are others
record     names only data that is there when it is written
survivors  prove themselves, come once, behind what they follow, in slots that exist; a process that is killed
           leaves all that it was told it stored
room       the files never take more than their size; who fails to open leaves nothing open, and with a size that the
           disk has no room for changes nothing
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable

import attrs
import numpy as np
from numpy.typing import NDArray

from aoffload._kernel.states import Outcome
from aoffload._tiers.disk.plans import RestoredRun
from aoffload._tiers.disk.slots import DiskOutcome, DiskSlots
from aoffload._tiers.disk.table import data_sum

from .hanging_calls import HangingCall
from .prompts import Key, Path, World
from .simulated_disk import SimulatedDisk

__all__ = ["Broken", "Life", "TurnedOff", "hold", "open_slots"]


class Broken(AssertionError):  # noqa: N818 - named for what is the matter
    """A law does not hold."""

    def __init__(self, law: str, problem: str) -> None:
        super().__init__(f"{law}: {problem}")
        self.law = law


class TurnedOff(Exception):  # noqa: N818 - see above
    """The disk may not have recorded a reset or an invalidation, so the process stops using it."""


def hold(law: str, condition: bool, problem: object = "") -> None:
    if not condition:
        raise Broken(law, str(problem))


@attrs.define(eq=False)
class Job:
    """A store or a load, with what it occupies until it has ended."""

    keys: list[Key]
    slots: list[int]
    rows: list[int]
    contents: list[bytes] = attrs.field(factory=list)
    is_given_up: bool = False
    is_before: bool = False
    """Whether it began before an invalidation."""


def open_slots(
    world: World, disk: SimulatedDisk, host: NDArray[np.uint8], rng: random.Random, size_bytes: int
) -> DiskSlots:
    fingerprint, draw = b"%d" % world.fingerprint, lambda: rng.getrandbits(63)
    return DiskSlots.open(
        disk.directory(), world.layout, host, size_bytes=size_bytes, fingerprint=fingerprint, draw_generation=draw,
        num_sum_threads=0,
    )  # fmt: skip


class Life:
    """Opens the slots of `world` on `disk`, and does one random thing after another with them."""

    def __init__(self, world: World, disk: SimulatedDisk, rng: random.Random, hangs: float) -> None:
        self.world, self.disk, self.rng, self._hangs = world, disk, rng, hangs
        self.host = world.memory()
        self.held: dict[Key, int] = {}
        self.unlabelled: set[Key] = set()
        self.free: list[int] = []
        self.rows = list(range(world.num_host))
        self.parked: list[tuple[HangingCall, Job]] = []
        self.running: Job | None = None
        self.strand: HangingCall | None = None
        """The one that runs, if a thread of its own does what is done now."""
        self.has_lost = False
        """Whether a write was told as done and was not."""
        self.is_doubtful = False
        """Whether records may name data that is not there: power was lost, or a record could not be written."""
        self.damaged: set[int] = set()
        self.num_loaded = self.num_survivors = 0
        self.is_forgetting = False
        self.counts: Counter[str] = Counter()
        self._waiting: list[tuple[list[Job], set[tuple[Key, int]]]] = []
        """Invalidated versions, which no restart may find once these stores are over."""
        disk.wrote = self._check_record
        disk.hang = lambda call: self.strand.park() if self.strand and not self.strand.is_over else None
        # A job that is over forgets in the thread of the story itself, and nobody would wake that.
        self.slots = open_slots(world, disk, self.host, rng, world.size_bytes)

    # -- what is found at the start -----------------------------------------------------------------------------------

    def find(self) -> None:
        """Take over what the last life has left."""
        digests = dict[bytes, tuple[int, Path]]()
        for part in self.slots.survivors():
            for each in part:
                self._take_over(each, digests)
        used = set(self.held.values())
        hold("survivors", len(used) == len(self.held) and used <= set(range(self.slots.num_slots)), "a slot twice")
        self.free = [slot for slot in range(self.slots.num_slots) if slot not in used]
        self.num_survivors += len(used)
        self.check_room()

    def _take_over(self, found: RestoredRun, digests: dict[bytes, tuple[int, Path]]) -> None:
        world = self.world
        roots = [world.root_digest(root) for root in range(2)]
        hold("survivors", found.root in roots and found.start < found.stop, found)
        hold("survivors", not found.start or found.before in digests, "what it follows did not come first")
        root, path = digests[found.before] if found.start else (roots.index(found.root), ())
        hold("survivors", len(path) == found.start and roots[root] == found.root, "another position or root")
        size = world.layout.unit_tokens
        tokens = np.frombuffer(found.tokens, "<i4").tolist()
        hold("survivors", len(tokens) == (found.stop - found.start) * size, "tokens")
        for number in range(found.stop - found.start):
            path = (*path, tuple(tokens[number * size : (number + 1) * size]))
            digests[world.digest(root, path)] = (root, path)
            for component, slots in enumerate(found.slots):
                width = world.layout.widths[component]
                hold("survivors", len(slots) in (0, width * (found.stop - found.start)), "slots")
                if slots:
                    self._take_unit(root, path, component, slots[number * width : (number + 1) * width].tolist())
        hold("survivors", world.digest(root, path) == found.digest, "a digest that is not that of its tokens")

    def _take_unit(self, root: int, path: Path, component: int, slots: list[int]) -> None:
        before = self.world.keys(root, path[:-1], component)
        is_behind = not self.world.layout.leading[component] or len(path) == 1 or before[0] in self.held
        hold("survivors", is_behind, "a unit without those before it")
        for key, slot in zip(self.world.keys(root, path, component), slots, strict=True):
            hold("survivors", key not in self.held, "a block twice")
            self.held[key] = slot

    def must_survive(self) -> set[Key]:
        """What a process that is killed now has to leave: labelled blocks that a chain of others leads to."""
        labelled = self.held.keys() - self.unlabelled
        units = {(key.root, key.path) for key in labelled}
        return {key for key in labelled if self._is_whole(key, labelled, units)}

    def _is_whole(self, key: Key, labelled: Iterable[Key], units: set[tuple[int, Path]]) -> bool:
        leads = self.world.layout.leading[key.component]
        for length in range(1, len(key.path) + 1):
            path = key.path[:length]
            if (key.root, path) not in units:
                return False
            needed = leads or length == len(key.path)
            if needed and not all(other in labelled for other in self.world.keys(key.root, path, key.component)):
                return False
        return True

    # -- what it does -------------------------------------------------------------------------------------------------

    def act(self) -> None:
        """One random thing."""
        draw = self.rng.random()
        if self.parked and draw < 0.15:
            self._let_go()
        elif draw < 0.55:
            self._store()
        elif draw < 0.9:
            self._load(self.rng.sample(sorted(self.held, key=repr), min(len(self.held), self.rng.randrange(1, 7))))
        elif draw < 0.95:
            self.take_back()
        else:
            self.reset()
        self.check_room()

    def _store(self) -> None:
        root, prompt = self.rng.choice(self.world.prompts)
        components = [component for component, width in enumerate(self.world.layout.widths) if width]
        component = self.rng.choice(components)
        keys = self._wanted(root, prompt, component)
        slots = self._slots_for(len(keys))
        keys = keys[: len(slots)]
        if not keys or len(self.rows) < len(keys):
            self.free += slots
            return
        job = Job(keys, slots, self._rows_for(len(keys)))
        job.contents = [self.world.content(self.world.epoch, key) for key in keys]
        for row, data in zip(job.rows, job.contents, strict=True):
            self.host[row] = np.frombuffer(data, np.uint8)
        labels = [None if self.rng.random() < 0.03 else self.world.label(key) for key in keys]
        without = {key for key, label in zip(keys, labels, strict=True) if label is None}
        generation, self.damaged = self.slots.generation, self.damaged - set(slots)
        self._run(
            job,
            lambda: self.slots.store(job.slots, job.rows, labels, generation, lambda: job.is_given_up),
            lambda outcome: self._stored(job, without, outcome),
        )

    def _wanted(self, root: int, prompt: Path, component: int) -> list[Key]:
        """The blocks of some units that are not held: after what is held, or in a window anywhere."""
        lengths = range(1, len(prompt) + 1)
        missing = [n for n in lengths if self.world.keys(root, prompt[:n], component)[0] not in self.held]
        if not self.world.layout.leading[component]:
            missing = missing[self.rng.randrange(len(missing) + 1) :]
        missing = missing[: self.rng.randrange(1, 6)]
        return [key for length in missing for key in self.world.keys(root, prompt[:length], component)]

    def _slots_for(self, num_blocks: int) -> list[int]:
        """Free slots, or those of units that nothing follows."""
        while len(self.free) < num_blocks and self.held:
            units = {(key.root, key.path) for key in self.held}
            leaves = [
                key
                for key in self.held
                if not any(root == key.root and len(p) == len(key.path) + 1 and p[:-1] == key.path for root, p in units)
            ]
            key = self.rng.choice(sorted(leaves, key=repr))
            for each in self.world.keys(key.root, key.path, key.component):
                if each in self.held:
                    self.free.append(self.held.pop(each))
                self.unlabelled.discard(each)
        num_blocks = min(num_blocks, len(self.free))
        (self.free.sort if self.rng.random() < 0.6 else lambda: self.rng.shuffle(self.free))()
        taken, self.free = self.free[:num_blocks], self.free[num_blocks:]
        return taken

    def _rows_for(self, num_blocks: int) -> list[int]:
        (self.rows.sort if self.rng.random() < 0.6 else lambda: self.rng.shuffle(self.rows))()
        taken, self.rows = self.rows[:num_blocks], self.rows[num_blocks:]
        return taken

    def _load(self, keys: list[Key]) -> None:
        if self.rng.random() < 0.7:
            keys.sort(key=lambda key: self.held[key])
        if not keys or len(self.rows) < len(keys):
            return
        job = Job(keys, [self.held[key] for key in keys], self._rows_for(len(keys)))
        self.host[job.rows] = self.rng.randrange(256)
        self._run(job, lambda: self.slots.load(job.slots, job.rows), lambda outcome: self._loaded(job, outcome))

    def load_all(self) -> None:
        """Load everything, a few blocks at a time."""
        keys = sorted(self.held, key=lambda key: self.held[key])
        for at in range(0, len(keys), 6):
            self._load([key for key in keys[at : at + 6] if key in self.held])

    def reset(self) -> None:
        self.world.perhaps_next_epoch()
        try:
            self.slots.reset()
        except OSError as error:
            raise TurnedOff from error
        self.world.accepted = {self.world.epoch}
        self.free += self.held.values()
        self.held, self.unlabelled = {}, set()

    def take_back(self) -> None:
        """Invalidate a prompt from some unit on. Freed slots may hold some of it, so they are forgotten, too. Slots
        that hanging stores are about to replace are forgotten once these stores are over."""
        wrong = self.world.take_back(self.rng)
        keys = {key for key, _ in wrong} & self.held.keys()
        slots = [*self.free, *[self.held.pop(key) for key in sorted(keys, key=repr)]]
        self.free, self.unlabelled = slots, self.unlabelled - keys
        stores = [job for _, job in self.parked if job.contents]
        for job in stores:
            job.is_before = True
        self._waiting.append((stores, wrong))
        self._forget(self.rng.sample(slots, len(slots)))
        self._take_no_more(None)
        self.counts["taken back"] += 1

    def _forget(self, slots: list[int]) -> None:
        self.is_forgetting = True
        trouble = self.slots.forget(slots)
        self.is_forgetting = False
        self.damaged -= set(slots)
        if trouble is not None:
            self.unlabelled |= self.held.keys()  # a restart finds none of it
            self.counts["not erased"] += 1
            if trouble.is_off:
                self.counts["turned off"] += 1
                if "a restart may find it" not in trouble.reason:
                    self.world.wrong.update(*[wrong for _, wrong in self._waiting])
                raise TurnedOff

    def _take_no_more(self, over: Job | None) -> None:
        """No restart may find invalidated versions once the stores that were under way then are over."""
        self._waiting = [([job for job in jobs if job is not over], wrong) for jobs, wrong in self._waiting]
        self.world.wrong.update(*[wrong for jobs, wrong in self._waiting if not jobs])
        self._waiting = [(jobs, wrong) for jobs, wrong in self._waiting if jobs]

    def _let_go(self) -> None:
        """A call that hung ends after all."""
        number = self.rng.randrange(len(self.parked))
        self.strand, self.running = self.parked[number]
        is_over = self.strand.step()
        self.strand = self.running = None
        if is_over:
            del self.parked[number]

    def _run(self, job: Job, work: Callable[[], DiskOutcome], done: Callable[[DiskOutcome], None]) -> None:
        self.running = job
        if self.rng.random() >= self._hangs:
            done(work())
            self.running = None
            return
        self.strand = HangingCall(work, done)
        if self.rng.random() < 0.2 or not self.strand.step():  # it waits behind a call that hangs, or hangs itself
            self._give_up(job)
            self.parked.append((self.strand, job))
        self.strand = self.running = None

    def _give_up(self, job: Job) -> None:
        """Nobody waits for it any more: its source is others' from now on, its destination stays out of use."""
        job.is_given_up = True
        if job.contents:
            for row in job.rows:
                self.host[row] = self.rng.randrange(256)
            self.rows += job.rows

    # -- what it is told ----------------------------------------------------------------------------------------------

    def _stored(self, job: Job, without: set[Key], outcome: DiskOutcome) -> None:
        is_whole = outcome.num_landed == len(job.keys)
        hold("outcome", outcome.outcome is (Outcome.LANDED if is_whole else Outcome.FAILED), outcome)
        if job.is_before:
            self._forget(job.slots[outcome.num_landed :])
            self._take_no_more(job)
        if job.is_given_up:
            self.free += job.slots
            return
        self.rows += job.rows
        for index, (key, slot) in enumerate(zip(job.keys, job.slots, strict=True)):
            if index >= outcome.num_landed:
                self.free.append(slot)
                continue
            hold("bytes", self.has_lost or self._on_disk(slot) == job.contents[index], "stored, but not on the disk")
            self.held[key] = slot
            if key in without:
                self.unlabelled.add(key)

    def _loaded(self, job: Job, outcome: DiskOutcome) -> None:
        self.rows += job.rows
        if job.is_given_up:
            gone = {job.slots[index] for index in outcome.corrupt}
            self.unlabelled |= {key for key, slot in self.held.items() if slot in gone}
            return
        is_whole = outcome.num_landed == len(job.keys)
        hold("outcome", outcome.outcome is not Outcome.UNPROVEN and is_whole is (outcome.outcome is Outcome.LANDED))
        for key, row in zip(job.keys[: outcome.num_landed], job.rows, strict=False):
            hold("bytes", self.world.is_right(key, self.host[row].tobytes()), f"wrong bytes of {key}")
            self.num_loaded += 1
        for index in outcome.corrupt:
            key, slot = job.keys[index], job.slots[index]
            right = self.world.right(key)  # record and data may be of different versions
            hold("corrupt", len(right) > 1 or self._on_disk(slot) not in right, "good bytes are called corrupt")
            hold("corrupt", self.may_be_corrupt(slot), "nothing has happened to it")
            self.held.pop(key)
            self.free.append(slot)
            self.damaged.discard(slot)  # it is forgotten: nobody is to meet it again

    def may_be_corrupt(self, slot: int) -> bool:
        """Whether anything explains other bytes in this slot."""
        return self.has_lost or self.is_doubtful or slot in self.damaged

    def _on_disk(self, slot: int) -> bytes:
        size = self.world.layout.block_bytes
        return bytes(self.disk.files["slab"].now[slot * size : (slot + 1) * size])

    def _check_record(self, name: str, offset: int, data: bytes) -> None:
        """Called for every write: a sound record names data that is there."""
        table, form = self.slots_table_offset, self.world.form
        if name != "table" or offset < table or self.has_lost or (self.running and self.running.is_given_up):
            return
        first, num_records = (offset - table) // form.num_bytes, len(data) // form.num_bytes
        whole = data[: num_records * form.num_bytes]
        for index, record in enumerate(form.decoded(whole)):
            if record["sum"]:
                there = data_sum(self._on_disk(first + index)) == record["data_sum"].tobytes()
                hold("record", there, "it names data that is not there")

    slots_table_offset = 4096

    def check_room(self) -> None:
        hold("room", self.disk.max_allocated_bytes <= self.world.size_bytes, "more than its size")

    def crash(self) -> None:
        """The process has ended: so do its threads."""
        for strand in (*(strand for strand, _ in self.parked), self.strand):
            if strand is not None and not strand.is_over:
                strand.end_with_its_process()
        self.parked.clear()

    def close(self) -> None:
        """Wait for what hangs, and close. Nothing stays open."""
        while self.parked:
            self._let_go()
        self.slots.close()
        hold("leak", not self.disk.num_open and not self.disk.is_locked, "something is open")
