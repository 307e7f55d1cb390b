"""A story: a few lives on one disk, with faults, from a seed. The same seed is the same story."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Mapping

import attrs

from aoffload.errors import ConfigError

from .life import Broken, Life, TurnedOff, hold, open_slots
from .prompts import World
from .simulated_disk import Crash, DiskFault, IOCall, SimulatedDisk

__all__ = ["Story", "every_call", "run_story"]

KINDS = (
    (DiskFault.ERROR, 3), (DiskFault.PART_ERROR, 2), (DiskFault.NO_SPACE, 1), (DiskFault.SHORT, 3), (DiskFault.LOST, 1),
    (DiskFault.HANG, 4), (DiskFault.KILL, 1), (DiskFault.POWER, 2),
)  # fmt: skip
OF_ERASURES = (DiskFault.ERROR, DiskFault.PART_ERROR, DiskFault.NO_SPACE, DiskFault.SHORT)
RATES = (0.0, 0.02, 0.1)
MOST_TRIES = 5


@attrs.define(eq=False)
class Story:
    """`at`: the calls that go wrong, by number; without it, they are drawn. With `erases` above 0, each `erases`-th
    erasure of invalidated blocks goes wrong in some way, and no other call does."""

    seed: int
    at: Mapping[int, DiskFault] | None = None
    erases: int = 0
    counts: Counter[str] = attrs.field(factory=Counter)
    world: World = attrs.field(init=False)
    disk: SimulatedDisk = attrs.field(init=False)
    _rng: random.Random = attrs.field(init=False)
    _faults: random.Random = attrs.field(init=False)
    _life: Life | None = attrs.field(init=False, default=None)
    _rate: float = attrs.field(init=False, default=0.0)
    _has_faults: bool = attrs.field(init=False, default=False)
    """In this life, beside calls that hung."""
    _is_doubtful: bool = attrs.field(init=False, default=False)
    _damaged: set[int] = attrs.field(init=False, factory=set)
    _expected: set[object] = attrs.field(init=False, factory=set)
    """What the next life has to find."""
    _sizes: random.Random = attrs.field(init=False)
    _num_erases: int = attrs.field(init=False, default=0)

    def __attrs_post_init__(self) -> None:
        self._rng, self._faults = random.Random(self.seed), random.Random(self.seed + 1)
        self.world = World(self._rng)
        self.disk = SimulatedDisk(random.Random(self.seed + 2), 2 * self.world.size_bytes)
        self._sizes = random.Random(self.seed + 3)
        self.disk.fault = self._fault

    def run(self) -> None:
        """Raises `Broken`."""
        for number in range(self._rng.randrange(2, 6)):
            self._begin(number)
            try:
                self._live()
            except TurnedOff:
                self._end_process(power=self._rng.random() < 0.5)
            except Crash:
                self._after_crash()
            self.counts["lives"] += 1
        self._rate = 0.0
        self._look_at_the_end()

    def _begin(self, number: int) -> None:
        self._rate = 0.0 if self.erases else self._faults.choice(RATES)
        if number and self._rng.random() < 0.1:
            self.world.fingerprint = 1 - self.world.fingerprint
            self._expected = set()
        self._has_faults = False

    def _live(self) -> None:
        if self._sizes.random() < 0.2:
            self._ask_for_too_much()
        life = self._opened()
        life.find()
        hold("survivors", self._has_faults or self._expected <= life.held.keys(), "a kill has lost what was stored")
        if self._rng.random() < 0.5:
            life.load_all()
        for _ in range(self._rng.randrange(1, 14)):
            life.act()
            if self.erases and self._rng.random() < 0.3:
                life.take_back()
            if self._rng.random() < 0.02:
                self._rot(life)
        self._end(life)

    def _ask_for_too_much(self) -> None:
        """A start with a size that the disk has no room for. It changes nothing."""
        self._life, before = None, self._contents()
        self.disk.hang = lambda call: None  # the last life waits there for a thread of its own
        size_bytes = self._sizes.randrange(self.disk.num_bytes + 100_000, 10 * self.disk.num_bytes + 100_000)
        try:
            open_slots(self.world, self.disk, self.world.memory(), self._sizes, size_bytes).close()
        except ConfigError as error:
            hold("outcome", error.argument == "size" or self._has_faults, error)
            hold("leak", not self.disk.num_open and not self.disk.is_locked, "something is open")
            hold("room", self._has_faults or self._contents() == before, "a start in vain has changed something")
            self.counts["too large"] += 1
        else:
            hold("room", False, "more than the disk has")

    def _contents(self) -> dict[str, bytes]:
        return {name: bytes(content.now) for name, content in self.disk.files.items() if content.now}

    def _opened(self) -> Life:
        """Try until it opens. Who fails to open leaves nothing open."""
        for number in itertools.count():
            if number == MOST_TRIES:
                self._rate = 0.0
            try:
                # Only for a hang in a plan, all jobs may hang: threads take time.
                hangs = 1.0 if DiskFault.HANG in (self.at or {}).values() else 0.15
                self._life = None
                life = self._life = Life(self.world, self.disk, self._rng, hangs)
            except ConfigError as error:
                hold("outcome", error.argument in ("size", "path") and self._has_faults, error)
                hold("leak", not self.disk.num_open and not self.disk.is_locked, "something is open")
                self.counts["opened in vain"] += 1
                continue
            life.is_doubtful, life.damaged, life.counts = self._is_doubtful, set(self._damaged), self.counts
            self._damaged = set()
            return life
        raise AssertionError

    def _end(self, life: Life) -> None:
        draw = self._rng.random()
        if draw < 0.4:
            life.close()
            self._note_end(life)
        else:
            self._end_process(power=draw >= 0.7)

    def _end_process(self, *, power: bool) -> None:
        """Between two calls."""
        life = self._life
        (self.disk.lose_power if power else self.disk.kill)()
        self.counts["power" if power else "killed"] += 1
        if life is not None:
            self._note_end(life)
            life.crash()
            if power:
                self._is_doubtful, self._expected = True, set()

    def _note_end(self, life: Life) -> None:
        """The next life finds what this one has stored, if no call of it has failed."""
        self._expected = set() if self._has_faults else set(life.must_survive())
        if len(self.world.accepted) > 1:
            self._expected = set()
        self._damaged = life.damaged | {slot for _, job in life.parked for slot in job.slots}
        self._is_doubtful |= life.has_lost

    def _after_crash(self) -> None:
        """In the middle of a call."""
        life, self._expected = self._life, set()
        self.counts["in a call"] += 1
        if life is None:
            return
        self._damaged = life.damaged | {slot for _, job in life.parked for slot in job.slots}
        self._damaged |= set(life.running.slots) if life.running else set()
        self._is_doubtful |= life.has_lost
        life.crash()

    def _rot(self, life: Life) -> None:
        name = self._rng.choice(("slab", "table"))
        at = self.disk.rot(name)
        if name == "slab":
            life.damaged.add(at // self.world.layout.block_bytes)
        self._has_faults = True
        self.counts["rot"] += 1

    def _look_at_the_end(self) -> None:
        """Everything that is left is loaded once."""
        self._begin(0)
        self._rate, self.at = 0.0, {}
        life = self._opened()
        life.find()
        life.load_all()
        self.counts["survived"] += life.num_survivors
        life.close()

    def _fault(self, call: IOCall) -> DiskFault | None:
        self.counts["calls"] += 1
        if self.erases and self._life is not None and self._life.is_forgetting and call.kind != "allocate":
            self._num_erases += 1
            if self._num_erases % self.erases:
                return None
            found = DiskFault.ERROR if call.kind == "sync" else self._faults.choice(OF_ERASURES)
            self.counts["erasures failed"] += 1
        elif self.at is not None:
            found = self.at.get(call.number)
        elif self._faults.random() < self._rate:
            (found,) = self._faults.choices([kind for kind, _ in KINDS], [weight for _, weight in KINDS])
        else:
            return None
        if found is DiskFault.LOST and (call.kind, call.name) != ("write", "slab"):
            return None
        if found is not None:
            self._note_fault(found, call)
        return found

    def _note_fault(self, fault: DiskFault, call: IOCall) -> None:
        self.counts[fault.name] += 1
        if fault is DiskFault.HANG:
            return
        self._has_faults = True
        self._is_doubtful |= fault is DiskFault.POWER or (call.kind, call.name) == ("write", "table")
        if self._life is not None:
            self._life.is_doubtful |= self._is_doubtful
            self._life.has_lost |= fault is DiskFault.LOST


def run_story(seed: int, at: Mapping[int, DiskFault] | None = None, erases: int = 0) -> tuple[Story, Broken | None]:
    """The story of `seed`, and the law that it breaks, if any."""
    story = Story(seed, at, erases)
    try:
        story.run()
    except Broken as broken:
        return story, broken
    return story, None


def every_call(seed: int) -> tuple[int, Broken | None]:
    """Fail the k-th call of the story of `seed`, in each way, for every k. How many stories that are; the first law
    that is broken."""
    num_stories = 0
    for kind in DiskFault:
        for k in itertools.count():
            story, broken = run_story(seed, {k: kind})
            num_stories += 1
            if broken is not None:
                return num_stories, Broken(broken.law, f"{broken} (seed {seed}, call {k}, {kind.name})")
            if story.disk.num_calls <= k:
                break
    return num_stories, None
