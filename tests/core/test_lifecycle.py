"""The state tables: every move that they list is possible, and every other move is refused."""

from __future__ import annotations

import itertools
import re
import runpy
from collections import Counter
from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from driving import Driven, prompt

from aoffload._extensions.overlap import OVERLAP_MOVES, LoadOverlap, OverlapMoved
from aoffload._extensions.pins import PIN_MOVES, PinMoved
from aoffload._extensions.transfers import CACHE_TRANSFER_MOVES, CacheTransferMoved
from aoffload._kernel.events import Event, JobMoved, RequestMoved
from aoffload._kernel.moves import Moves
from aoffload._kernel.states import JOB_MOVES, REQUEST_MOVES, RequestState, State
from aoffload.errors import IllegalTransition, WrongState
from proof.programs.fingerprint import fingerprint

PAGE = Path(__file__).parents[2] / "docs" / "lifecycle.md"
TABLES = {
    "request": REQUEST_MOVES,
    "job": JOB_MOVES,
    "pin": PIN_MOVES,
    "cache_transfer": CACHE_TRANSFER_MOVES,
    "overlap": OVERLAP_MOVES,
}
PICTURES = {
    "request": "request",
    "job": "job",
    "pin": "pin",
    "cache_transfer": "cache-transfer",
    "overlap": "load-overlap",
}
"""The name of each picture in docs/images."""
EVENTS: dict[str, Any] = {"pin": PinMoved, "cache_transfer": CacheTransferMoved, "overlap": OverlapMoved}


def entity_of(kind: str) -> Any:
    """Something that has states of this kind, in a ledger of its own."""
    driven = Driven(9, 9)
    driven.on_host_only(prompt(1, 5))
    request = driven.admit(prompt(1, 5))
    if kind == "request":
        return request
    if kind == "overlap":
        return LoadOverlap(request, 0, 0, ())
    if kind == "pin":
        return driven.ledger.pins.hold(driven.prefix(prompt(1, 5)))
    transfer = driven.ledger.transfers.prefetch(driven.prefix(prompt(1, 5)))
    return transfer if kind == "cache_transfer" else driven.ledger.jobs.unsettled[transfer.plans[0].job_id]


class LeftStates:
    """What an observer was told of: the states that were left."""

    def __init__(self) -> None:
        self.left: list[State] = []

    def observe(self, event: Any) -> None:
        self.left.append(event.old)


def pairs(*, legal: bool) -> list[tuple[str, State, State]]:
    found: list[tuple[str, State, State]] = []
    for kind, moves in TABLES.items():
        states = type(next(iter(moves)))
        found += [(kind, old, new) for old, new in product(states, states) if (new in moves[old]) is legal]
    return found


def move(moves: Moves, kind: str, entity: Any, new: State) -> None:
    """Move the state of `entity`, as the kernel and the extensions do."""
    if kind in ("request", "job"):
        getattr(moves, kind)(entity, new)
    else:
        old = moves.other(entity, new, TABLES[kind])
        moves.note(EVENTS[kind](entity, old, new))


@pytest.mark.parametrize(("kind", "old", "new"), pairs(legal=False))
def test_an_illegal_move_raises_and_changes_nothing(kind: str, old: State, new: State) -> None:
    """A move that the table does not have raises, names both states, and leaves the entity as it was."""
    entity = entity_of(kind)
    entity.state = old
    before, recorded = fingerprint(entity), LeftStates()
    with pytest.raises(IllegalTransition) as refusal:
        move(Moves(recorded), kind, entity, new)
    assert fingerprint(entity) == before
    assert not recorded.left
    assert (refusal.value.old, refusal.value.new) == (old.name, new.name)
    assert old.name in str(refusal.value) and new.name in str(refusal.value) and str(entity) in str(refusal.value)


@pytest.mark.parametrize(("kind", "old", "new"), pairs(legal=True))
def test_a_legal_move_happens(kind: str, old: State, new: State) -> None:
    """A move of the table changes the state, and the observer hears which one was left, if there is one."""
    recorded = LeftStates()
    for observer in (None, recorded):
        entity = entity_of(kind)
        entity.state = old
        moves = Moves(observer)
        move(moves, kind, entity, new)
        assert entity.state is new and not recorded.left
        moves.report()
    assert recorded.left == [old]


def test_an_observer_may_ignore_the_moves_of_requests() -> None:
    """If `wants_move` returns False for a move, the ledger makes no event for it. All other events still come."""
    recorded = LeftStates()
    recorded.wants_move = lambda kind, state: kind is not RequestMoved  # type: ignore[attr-defined]
    moves = Moves(recorded)
    for kind in ("request", "job"):
        old, new = next((old, new) for each, old, new in pairs(legal=True) if each == kind)
        entity = entity_of(kind)
        entity.state = old
        move(moves, kind, entity, new)
        assert entity.state is new
        assert len(moves.unreported) == (kind == "job")


@pytest.mark.parametrize("moves", TABLES.values(), ids=TABLES.keys())
def test_a_table_is_whole(moves: Mapping[State, frozenset[State]]) -> None:
    """Every state has a row, every state but the first is reached, and some end."""
    states = set(type(next(iter(moves))))
    assert set(moves) == states
    assert frozenset().union(*moves.values()) == states - {next(iter(moves))}
    assert any(not targets for targets in moves.values())


def test_every_live_request_can_abort() -> None:
    """Abort is legal in every state that is not final."""
    final = {RequestState.DONE, RequestState.ABORTED}
    assert all((RequestState.ABORTED in targets) is (state not in final) for state, targets in REQUEST_MOVES.items())


CALLS: dict[str, tuple[str, Any]] = {
    "allocate": ("PINNED", lambda ledger, request: ledger.allocate_nowait(request)),
    "queue": ("PINNED", lambda ledger, request: ledger.queue_allocation(request, None, lambda: None)),
    "extend": ("ALLOCATED RUNNING", lambda ledger, request: ledger.extend_nowait(request, 4)),
    "load": ("ALLOCATED LOADING RUNNING", lambda ledger, request: ledger.plan_load(request)),
    "abandon": ("LOADING", lambda ledger, request: ledger.abandon_load(request)),
    "commit": ("ALLOCATED RUNNING", lambda ledger, request: ledger.commit(request, 8)),
    "invalidate": ("RUNNING", lambda ledger, request: ledger.invalidation.invalidate(request, 8)),
    "step": ("ALLOCATED RUNNING", lambda ledger, request: ledger.step([request]).__enter__()),
    "release": ("PINNED ALLOCATED LOADING RUNNING", lambda ledger, request: ledger.release(request)),
}


@pytest.mark.parametrize("state", ["PINNED", "ALLOCATED", "LOADING", "RUNNING", "DONE", "ABORTED"])
@pytest.mark.parametrize("call", CALLS)
def test_a_call_at_the_wrong_time_changes_nothing(call: str, state: str) -> None:
    """Each call of the ledger is refused in every state that does not allow it, by a `WrongState` that names it."""
    driven = Driven(num_device=8)
    tokens = prompt(1, 9)
    driven.on_host_only(tokens)
    request = driven.admit(tokens)
    if state != "PINNED":
        driven.ledger.allocate_nowait(request)
    plans = driven.ledger.plan_load(request) if state in ("LOADING", "RUNNING", "DONE") else ()
    if state in ("RUNNING", "DONE"):
        driven.land(plans)
    if state in ("DONE", "ABORTED"):
        if state == "DONE":
            driven.commit(request)
        driven.release(request)
    assert request.state.name == state
    allowed, function = CALLS[call]
    if state in allowed.split():
        function(driven.ledger, request)
        return
    before = driven.picture()
    with pytest.raises(WrongState, match=state):
        function(driven.ledger, request)
    assert driven.picture() == before
    assert request.state.name == state


def test_every_move_is_told_once() -> None:
    """The observer hears of every move, with the state that was left, after it happened."""
    moves: list[str] = []

    class Witness:
        def observe(self, event: Event) -> None:
            if isinstance(event, RequestMoved | JobMoved):
                kind = "job " if isinstance(event, JobMoved) else ""
                moves.append(f"{kind}{event.old.name}>{event.new.name} {event.reason}".strip())

    driven = Driven(num_device=8, observer=Witness())
    driven.serve(prompt(1, 9))
    driven.release(driven.admit(prompt(2, 9)), "deadline")
    assert moves == [
        "QUEUED>MATCHED", "MATCHED>PINNED", "PINNED>ALLOCATED", "ALLOCATED>RUNNING", "RUNNING>DONE",
        "job QUEUED>LAUNCHED", "job LAUNCHED>COMPLETED landed",
        "QUEUED>MATCHED", "MATCHED>PINNED", "PINNED>ABORTED deadline",
    ]  # fmt: skip


Box = tuple[float, float, float, float]
Point = tuple[float, float]


def numbers(text: str) -> list[float]:
    return [float(number) for number in re.findall(r"-?[\d.]+", text)]


class Drawn:
    """A diagram as a reader sees it: by the positions of its boxes and lines alone."""

    def __init__(self, picture: str) -> None:
        parts = list(ElementTree.fromstring(picture).iter())
        self.boxes: dict[str, Box] = {}
        self.final = set[str]()
        self.frame: Box | None = None
        self.lines: list[list[Point]] = []
        for part, following in itertools.zip_longest(parts, parts[1:]):
            kind = part.get("class")
            if part.tag.endswith("rect"):
                x, y, width, height = (float(part.get(name, "")) for name in ("x", "y", "width", "height"))
                box = (x, y, x + width, y + height)
                if kind == "frame":
                    self.frame = box
                else:
                    self.boxes[following.text or ""] = box
                    if float(part.get("rx", "")) == height / 2:
                        self.final.add(following.text or "")
            elif kind == "move":
                assert part.get("marker-end") == "url(#tip)"
                found = numbers(part.get("d", ""))
                self.lines.append(list(zip(found[::2], found[1::2], strict=True)))

    def at(self, point: Point) -> str:
        """The state whose box has `point` on its border; "frame" on the border of the frame."""
        named = self.boxes | ({"frame": self.frame} if self.frame else {})
        (found,) = [name for name, box in named.items() if box and is_on_border(point, box)]
        return found

    @property
    def moves(self) -> Counter[tuple[str, str]]:
        """Each line, by the states where it begins and ends. A line that begins at the frame is one of each state in
        the frame."""
        found = Counter[tuple[str, str]]()
        for line in self.lines:
            old, new = self.at(line[0]), self.at(line[-1])
            assert new != "frame"
            found.update((each, new) for each in (self.framed if old == "frame" else {old}))
        return found

    @property
    def framed(self) -> set[str]:
        """The states in the frame. A box does not cross the frame."""
        assert self.frame is not None
        left, top, right, bottom = self.frame
        inside = {
            name: [left < x < right and top < y < bottom for x, y in ((box[0], box[1]), (box[2], box[3]))]
            for name, box in self.boxes.items()
        }
        assert all(first == last for first, last in inside.values())
        return {name for name, (first, _) in inside.items() if first}


def is_on_border(point: Point, box: Box) -> bool:
    (x, y), (left, top, right, bottom) = point, box
    return (left <= x <= right and y in (top, bottom)) or (top <= y <= bottom and x in (left, right))


def is_inside(point: Point, box: Box) -> bool:
    return box[0] < point[0] < box[2] and box[1] < point[1] < box[3]


def drawn(kind: str) -> Drawn:
    return Drawn((PAGE.parent / "images" / f"states-{PICTURES[kind]}.svg").read_text())


@pytest.mark.parametrize("kind", TABLES)
def test_a_diagram_shows_the_moves_of_its_table(kind: str) -> None:
    """The lines of a picture, and its frame, are the moves of the table, each once. Round boxes are the final states.
    No line goes through a box."""
    moves, found = TABLES[kind], drawn(kind)
    assert found.boxes.keys() == {state.name for state in moves}
    assert found.moves == Counter((old.name, new.name) for old, targets in moves.items() for new in targets)
    assert found.final == {state.name for state, targets in moves.items() if not targets}
    for line in found.lines:
        steps = [
            (x + (to_x - x) * part / 50, y + (to_y - y) * part / 50)
            for (x, y), (to_x, to_y) in itertools.pairwise(line)
            for part in range(51)
        ]
        assert not [step for step in steps for box in found.boxes.values() if is_inside(step, box)]


def test_a_wrong_diagram_is_noticed() -> None:
    """A line that is missing or drawn twice, and a frame around fewer states, are other moves."""
    picture = (PAGE.parent / "images" / "states-request.svg").read_text()
    line = re.findall(r'<path class="move".*\n', picture)[0]
    (frame,) = re.findall(r'<rect class="frame".*\n', picture)
    for wrong in (
        picture.replace(line, ""),
        picture.replace(line, line * 2),
        picture.replace(frame, re.sub(r'height="\d+"', 'height="100"', frame)),
    ):
        with pytest.raises((AssertionError, ValueError)):
            assert Drawn(wrong).moves == Drawn(picture).moves


def test_the_diagrams_are_current() -> None:
    """docs/site/states.py draws the pictures as they are. After a change of a table, run it again."""
    drawing = runpy.run_path(str(PAGE.parent / "site" / "states.py"))["drawing"]
    for kind in PICTURES.values():
        assert (PAGE.parent / "images" / f"states-{kind}.svg").read_text() == drawing(kind)


def test_the_page_shows_each_diagram_and_explains_each_state() -> None:
    """docs/lifecycle.md has the pictures in the order of the tables, and after each picture a line on each state."""
    _, *sections = re.split(r"^## ", PAGE.read_text(), flags=re.MULTILINE)
    for section, (kind, moves) in zip(sections, TABLES.items(), strict=True):
        assert re.findall(r"\(images/(.*?)\)", section) == [f"states-{PICTURES[kind]}.svg"]
        assert re.findall(r"^`(\w+)` \| ", section, re.MULTILINE) == [state.name for state in type(next(iter(moves)))]
