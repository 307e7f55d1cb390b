"""How payloads of clients are read: whatever they are, nothing is raised, and little is read."""

from __future__ import annotations

import json
import random
import time
from typing import Any

import pytest
from hypothesis import given as each
from hypothesis import strategies as st

from aoffload.errors import InvalidArgument
from aoffload.ledger import (
    DemoteHint,
    DoneHint,
    GivenHint,
    HintReason,
    HintVerb,
    PinHint,
    PrefetchHint,
    ReturnsHint,
    read_hints,
)
from proof.attacks.payloads import BAD_VALUES, hostile


def action(kind: Any, payload: Any = None, **more: Any) -> dict[str, Any]:
    return {"action_id": "a", "action_type": kind, "action_version": "1", "payload": payload, **more}


@pytest.mark.parametrize(
    ("kind", "payload", "hint"),
    [
        ("pin", {"ttl_s": 300}, PinHint(300)),
        ("pin", {"ttl_s": 1e300}, PinHint(1e9)),
        ("prefetch", {}, PrefetchHint()),
        ("demote", None, DemoteHint()),
        ("returns", {"in_s": 2.5, "category": "shell"}, ReturnsHint(2.5, "shell")),
        ("returns", None, ReturnsHint()),
        ("retain", {"duration_s": 60}, ReturnsHint(60)),
        ("retain", {"in_s": None, "duration_s": 60}, ReturnsHint(60)),
        ("done", {"in_s": "never"}, DoneHint()),
    ],
)
def test_each_verb_is_read(kind: str, payload: Any, hint: Any) -> None:
    """From an envelope as vLLM has it, from a list of its actions, and from one action."""
    one = action(kind, payload)
    envelope = {"protocol_version": "1", "message_id": "m", "actions": [one]}
    assert read_hints(envelope) == read_hints([one]) == read_hints(one) == [GivenHint.of(hint, "a")]


def test_null_is_no_field() -> None:
    """Many programs write fields that have no value as null."""
    one = {"action_id": "a", "action_type": "done", "action_version": None, "payload": None}
    for payload in ({"protocol_version": None, "message_id": None, "actions": [one]}, {**one, "actions": None}):
        assert read_hints(payload) == [GivenHint.of(DoneHint(), "a")]


def test_a_key_of_another_class_is_never_compared() -> None:
    """Nor is a class with a metaclass of its own."""

    class Key(str):
        __slots__ = ()

        def __eq__(self, other: object) -> bool:
            raise RuntimeError("compared")

        __hash__ = str.__hash__

    for payload in ({Key("actions"): []}, {Key("action_type"): "done"}, action("pin", {Key("ttl_s"): 5})):
        (given,) = read_hints(payload)
        assert given.hint is None
    (given,) = read_hints({str(number): 1 for number in range(10**5)})
    assert given.reason is HintReason.MALFORMED


@pytest.mark.parametrize("number", range(len(BAD_VALUES)))
def test_a_bad_value_is_one_answer(number: int) -> None:
    """Wherever it stands, the action has a reason and no hint, or the hint is one of the good ones."""
    value = BAD_VALUES[number]
    for payload in (
        value, [value], {"actions": value}, {"actions": [value]}, action(value, {"ttl_s": 1}), action("pin", value),
        action("pin", {"ttl_s": value}), action("returns", {"in_s": value}), action("returns", {"category": value}),
        action("done", None, action_version=value), {"protocol_version": value, "actions": [action("done")]},
    ):  # fmt: skip
        for given in read_hints(payload):
            assert (given.hint is None) == (given.reason is not HintReason.NONE)
    (given,) = read_hints(action("pin", {"ttl_s": value}))
    is_good = type(value) in (int, float) and 0 < value < float("inf") and value != 10**400
    assert (given.verb, given.hint is not None) == (HintVerb.PIN, is_good)


def test_an_id_that_cannot_be_repeated_is_left_out() -> None:
    """An answer is written to logs and to JSON: it repeats no long text, no escape sequence, no half of a pair."""
    for name in ("x" * 65, "\x1b[2J", "\ud800", 7, None, ["a"]):
        (given,) = read_hints(action("done", action_id=name))
        assert given.action_id == "" and given.hint == DoneHint()


def test_at_most_sixteen_actions_are_read() -> None:
    """The others have one answer together, however many there are, and cost nothing."""
    began_s = time.process_time()
    found = read_hints({"actions": [action("done")] * 10**6})
    assert time.process_time() - began_s < 0.5
    assert [given.hint for given in found[:16]] == [DoneHint()] * 16
    assert [given.reason for given in found[16:]] == [HintReason.TOO_MANY_ACTIONS]


def test_unknown_types_and_versions_are_no_error() -> None:
    """They may be those of a later version, so they are counted, and nothing else is done."""
    for one in (action("evict"), action("done", action_version="2"), action("x" * 10**7)):
        (given,) = read_hints([one])
        assert (given.verb, given.hint, given.reason) == (HintVerb.UNKNOWN, None, HintReason.UNKNOWN)
    (given,) = read_hints({"protocol_version": "9", "actions": [action("done")] * 3})
    assert given.reason is HintReason.UNKNOWN


def test_ten_thousand_hostile_payloads_are_read() -> None:
    """None raises."""
    rng = random.Random(7)
    counted = 0
    for _ in range(10_000):
        counted += len(read_hints(hostile(rng)))
    assert counted > 10_000


scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text()
words = st.sampled_from(["actions", "action_type", "payload", "ttl_s", "in_s", "category", "pin", "returns", "1"])
json_values = st.recursive(
    scalars | words, lambda inner: st.lists(inner) | st.dictionaries(words | st.text(), inner), max_leaves=30
)


@each(json_values)
def test_any_json_is_read(payload: Any) -> None:
    """It is no error, and is read as what JSON makes of it."""
    found = read_hints(payload)
    try:
        again = json.loads(json.dumps(payload))
    except ValueError:
        return
    assert len(read_hints(again)) == len(found) <= 17


@pytest.mark.parametrize("value", [None, True, 0, -1, float("nan"), float("inf"), 1e10, "60"])
def test_a_program_is_told_of_a_bad_value(value: Any) -> None:
    """Its own call raises, and names the argument."""
    for make in (PinHint, ReturnsHint):
        if make is ReturnsHint and value is None:
            continue
        with pytest.raises(InvalidArgument, match="ttl_s" if make is PinHint else "in_s"):
            make(value)
    with pytest.raises(InvalidArgument, match="category"):
        ReturnsHint(category="x" * 257)
