"""The comparison of two builds of the core covers every call of a ledger."""

from __future__ import annotations

import typing

from aoffload import Ledger
from aoffload.ledger import AnyLedger
from proof import core_answers


def test_each_needed_argument_has_a_usual_value() -> None:
    """A call of a ledger or of a handle that is new, or has a new argument, is noticed here."""
    ledger, record = core_answers.LEDGERS["plain"].running()
    for _, parameters in core_answers.public_calls(Ledger):
        for one in parameters:
            if one.default is one.empty:
                core_answers.usual(one.name, ledger, record)  # a KeyError names what is missing


def test_calls_on_handles_are_asked() -> None:
    """No handle is left out."""
    names = [name for name, _ in core_answers.public_calls(Ledger)]
    assert len(set(names)) == len(names)
    handles = {name.partition(".")[0] for name in names if "." in name}
    own = {name for kind in (AnyLedger, Ledger) for name, member in vars(kind).items() if isinstance(member, property)}
    assert handles == own - {"num_waiting", "loads_paused", "writes_back"}


def test_no_name_is_left_out_that_is_gone() -> None:
    """The names of calls that are not public are names of calls."""
    ledger = core_answers.LEDGERS["plain"].ledger()
    assert all(callable(getattr(ledger, name)) for name in core_answers.FOR_EXTENSIONS)
    for handle, names in core_answers.FOR_HANDLES.items():
        kind = typing.get_type_hints(getattr(Ledger, handle).fget)["return"]
        assert all(callable(getattr(kind, name)) for name in names), handle
