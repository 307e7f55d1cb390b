"""Questions: how many cells of a prefix does the store have? Two rounds of at most 64 cells, within one short time-out.

cells of the prefix    0 1 2 3 4 5 6 7 8 9 ...       nearly always, a store has a leading part of them
first round            up to 64, evenly spread       finds the last cell that is there and the first that is missing
second round           up to 64 between those two    loads answer for the rest

Connecting takes longer than the time-out of a question. So, once the tier is open, each thread asks every node about a
cell that does not exist. If no node answers, the tier does not use the store until a trial call succeeds.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import attrs

from ..._common.env import Env
from ...errors import TransferRefused
from .calls import ASK_THREADS, MakesThreads, Steps, StoreCalls, Threads
from .memory import CellMemory, Known, Removals
from .plans import CellLabel

MAX_WAITING = 64
"""Maximum waiting questions; further ones are answered with 0 immediately."""
ROUND_CELLS = 64
"""Maximum cells of one round."""
NAMES = [bytes([number]) * 32 for number in range(64)]
"""Names of cells that do not exist. In a cluster, they are spread over the nodes."""
NUM_ROUNDS = 2

Hear = Callable[[int], None]


def positions(start: int, stop: int) -> range | list[int]:
    """At most `ROUND_CELLS` of the positions `[start, stop)`, evenly spread; the last one is among them."""
    count = stop - start
    if count <= ROUND_CELLS:
        return range(start, stop)
    return [start + (number + 1) * count // ROUND_CELLS - 1 for number in range(ROUND_CELLS)]


@attrs.define(eq=False)
class Question:
    labels: Sequence[CellLabel]
    deadline: float
    hears: list[Hear]


@attrs.define(eq=False)
class Connecting:
    """The work of connecting, which each thread does once."""

    deadline: float
    hear: Callable[[], None]
    num_left: int = ASK_THREADS


class Questions:
    """Asks the store, in threads of its own, how many cells of a prefix it has. Equal questions at the same time are
    asked once."""

    def __init__(
        self, calls: StoreCalls, memory: CellMemory, removals: Removals, timeout_s: float, over: Callable[[], None],
        env: Env, threads: MakesThreads = Threads,
    ) -> None:  # fmt: skip
        self.num_questions = 0
        self.num_unknown = 0
        self.seconds = 0.0
        self._calls, self._memory, self._removals = calls, memory, removals
        self._timeout_s, self._env = timeout_s, env
        self._open: dict[tuple[bytes, bytes], Question] = {}
        self._threads: Threads[Question | Connecting] = threads("ask", ASK_THREADS, _first, self._do, over, env)
        self.stop, self.join = self._threads.stop, self._threads.join

    def ask(self, labels: Sequence[CellLabel], hear: Hear) -> None:
        """Ask how many of the cells `labels`, from the first one on, the store has. `hear` is called once with the
        answer, in any thread. If the answer would come too late, `hear` is called with 0 immediately."""
        now = self._env.now()
        worth = self._worth_asking(labels, now)
        if not worth:
            hear(0)
            return
        key, is_answered = (worth[0].digest, worth[-1].digest), not self._calls.all_are_late()
        with self._threads.lock:
            asked = self._open.get(key)
            is_new = asked is None and is_answered and len(self._open) < MAX_WAITING
            if is_new:
                asked = self._open[key] = Question(worth, now + self._timeout_s, [hear])
                self.num_questions += 1
            elif asked is not None and is_answered and now <= asked.deadline:
                asked.hears.append(hear)
            else:
                asked = None
                self.num_unknown += 1
        if asked is None:
            hear(0)
        elif is_new:
            try:
                self._threads.submit(asked)
            except TransferRefused:
                self._over(asked, 0)

    def connect(self, timeout_s: float, hear: Callable[[], None]) -> None:
        """Connect to every node of the store, for at most `timeout_s`. `hear` is called once, in any thread."""
        connecting = Connecting(self._env.now() + timeout_s, hear)
        for _ in range(ASK_THREADS):
            try:
                self._threads.submit(connecting)
            except TransferRefused:
                self._has_connected(connecting)

    def _connect(self, connecting: Connecting) -> Steps[None]:
        asked = set[str]()
        try:
            for name in NAMES:
                node = self._calls.node_of(name)  # a cluster knows its nodes once one has answered
                left_s = connecting.deadline - self._env.now()
                if node not in asked and left_s > 0:
                    asked.add(node)
                    yield from self._calls.exist(node, [name], left_s)
        finally:
            self._has_connected(connecting)

    def _has_connected(self, connecting: Connecting) -> None:
        with self._threads.lock:
            connecting.num_left -= 1
            is_over = not connecting.num_left
        if is_over:
            connecting.hear()

    def _worth_asking(self, labels: Sequence[CellLabel], now: float) -> Sequence[CellLabel]:
        """The leading cells, up to the first that is known to end the hit."""
        for number, label in enumerate(labels):
            if self._removals.holds(label) or self._memory.of(label, now) in (Known.ABSENT, Known.CORRUPT):
                return labels[:number]
        return labels

    def _do(self, work: Question | Connecting) -> Steps[None]:
        return self._answer(work) if isinstance(work, Question) else self._connect(work)

    def _answer(self, question: Question) -> Steps[None]:
        began_s = self._env.now()
        found = 0
        try:
            found = yield from self._num_present(question)
        except Exception:  # noqa: BLE001 - such as a lack of memory: the answer is unknown, and the next question may succeed
            with self._threads.lock:
                self.num_unknown += 1
        finally:
            with self._threads.lock:
                self.seconds += self._env.now() - began_s
            self._over(question, found)

    def _over(self, question: Question, found: int) -> None:
        key = question.labels[0].digest, question.labels[-1].digest
        with self._threads.lock:
            self._open.pop(key, None)
        for hear in question.hears:  # complete, because no caller finds the question any more
            hear(found)

    def _num_present(self, question: Question) -> Steps[int]:
        start, stop = 0, len(question.labels)
        for _ in range(NUM_ROUNDS):
            asked = positions(start, stop)
            if not asked:
                break
            is_there = yield from self._round([question.labels[position] for position in asked], question.deadline)
            for position, found in zip(asked, is_there, strict=True):
                if not found:
                    stop = position
                    break
                start = position + 1
        return start

    def _round(self, labels: Sequence[CellLabel], deadline: float) -> Steps[list[bool]]:
        """Which of these cells are there. A cell counts as missing if its node does not answer in time."""
        groups: dict[str, list[int]] = {}
        names = [self._calls.name(label) for label in labels]
        for number, name in enumerate(names):
            groups.setdefault(self._calls.node_of(name), []).append(number)
        found = [False] * len(labels)
        for count, (node, numbers) in enumerate(groups.items()):
            left_s = (deadline - self._env.now()) / (len(groups) - count)
            asked, answers = [names[number] for number in numbers], None
            if left_s > 0:
                answers = yield from self._calls.exist(node, asked, left_s)
            if answers is None:
                with self._threads.lock:
                    self.num_unknown += 1
                continue
            now = self._env.now()
            for number, answer in zip(numbers, answers, strict=True):
                found[number] = answer
                self._memory.note_seen(labels[number], answer, now)
        return found


def _first(waiting: deque[Question | Connecting]) -> Question | Connecting | None:
    return waiting.popleft() if waiting else None
