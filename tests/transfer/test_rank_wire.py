"""The protocol between the deciding process and a rank: messages are decoded as encoded, and invalid ones are
refused."""

from __future__ import annotations

import struct
from array import array
from typing import Any

import attrs
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from aoffload._common.tiers import HIT_TIERS, Tier
from aoffload._kernel.plans import Completion, TransferPlan
from aoffload._kernel.states import Outcome
from aoffload._transfer.ranks import wire as frames
from aoffload._transfer.ranks.wire import MAX_FRAME_BYTES, MAX_TEXT, VERSION, decode, encode
from aoffload._transfer.transport import TransferStatistics
from aoffload.errors import WireError

NUMBERS = st.integers(0, 2**64 - 1)
COUNTS = st.integers(0, 2**32 - 1)
SECONDS = st.floats(0, allow_nan=False, allow_infinity=False)
IDS = st.lists(st.integers(-(2**31), 2**31 - 1)).map(lambda ids: array("i", ids))
TEXTS = st.text(st.characters(exclude_categories=["Cs"]))
PLANS = st.builds(TransferPlan, NUMBERS, st.sampled_from(HIT_TIERS), st.sampled_from(HIT_TIERS), IDS, IDS)
COMPLETIONS = st.builds(
    Completion,
    NUMBERS,
    st.sampled_from(Outcome),
    COUNTS,
    st.lists(st.integers(0, 2**31 - 1)).map(tuple),
    TEXTS,
    NUMBERS,
    SECONDS,
)
STATISTICS = st.builds(TransferStatistics, *[NUMBERS] * 8, SECONDS, SECONDS)
FRAMES = st.one_of(
    st.builds(frames.Open, NUMBERS, st.booleans()),
    st.builds(frames.RecordFence, NUMBERS),
    st.builds(frames.ReleaseFence, NUMBERS),
    st.builds(frames.Launch, PLANS, NUMBERS),
    st.builds(frames.Close, SECONDS),
    st.builds(frames.Ready, NUMBERS, NUMBERS),
    st.just(frames.Opened()),
    st.builds(frames.Refused, TEXTS, TEXTS),
    st.builds(frames.Completed, COMPLETIONS, STATISTICS),
    st.builds(frames.Closed, st.booleans()),
    st.builds(frames.Lost, TEXTS),
)

PLAN = TransferPlan(7, Tier.HOST, Tier.DEVICE, array("i", [5, 6]), array("i", [1, 2]))
LAUNCH = encode(frames.Launch(PLAN, 3))
COMPLETED = frames.Completed(Completion(7, Outcome.CORRUPT, 1, (1,), "bad", 48, 0.5), TransferStatistics())


@given(FRAMES)
def test_every_frame_comes_back_as_it_was(frame: frames.Frame) -> None:
    """A plan, a completion or a command is the same value on the other side."""
    assert decode(encode(frame)) == frame


@given(
    st.binary() | st.tuples(FRAMES.map(encode), st.integers(0), st.binary(max_size=4)).map(lambda made: spoil(*made))
)
@example(b"")
@example(bytes([VERSION, 1]) + bytes(8) + b"\x02")
def test_bytes_are_a_frame_in_one_way_or_are_refused(data: bytes) -> None:
    """Whatever arrives, `decode` raises `WireError` or returns what `encode` writes as exactly these bytes."""
    try:
        frame = decode(data)
    except WireError:
        return
    assert encode(frame) == data


def spoil(data: bytes, at: int, by: bytes) -> bytes:
    """`data` with a few bytes replaced, added, or cut off."""
    at %= len(data) + 1
    return data[:at] + by + data[at + len(by) :] if by else data[:at]


@given(FRAMES, st.data())
def test_a_frame_that_is_cut_off_is_refused(frame: frames.Frame, data: st.DataObject) -> None:
    """A peer that dies in the middle of a frame has said nothing."""
    whole = encode(frame)
    with pytest.raises(WireError):
        decode(whole[: data.draw(st.integers(0, len(whole) - 1))])
    with pytest.raises(WireError, match="1 bytes too many"):
        decode(whole + b"\0")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (bytes([VERSION + 1]) + LAUNCH[1:], f"has version {VERSION + 1}, but this process uses version {VERSION}"),
        (bytes([VERSION, 6]), "6 is not a kind"),
        (LAUNCH[:18] + bytes([len(Tier)]) + LAUNCH[19:], f"{len(Tier)} is not an index of"),
        (bytes([VERSION, 5]) + struct.pack("<d", float("nan")), "nan is not a number of seconds"),
        (bytes([VERSION, 5]) + struct.pack("<d", -1.0), "-1.0 is not a number of seconds"),
        (bytes([VERSION, 69, 2]), "2 is not an index of"),
        (bytes([VERSION, 67]) + struct.pack("<I", 1) + b"\xff", "not UTF-8"),
        (LAUNCH[:20] + struct.pack("<II", 2**32 - 1, 2) + LAUNCH[28:], "bytes are missing"),
    ],
)  # fmt: skip
def test_each_field_says_why_it_is_refused(data: bytes, message: str) -> None:
    """The error names what was wrong, and a length that is a lie allocates nothing."""
    with pytest.raises(WireError, match=message):
        decode(data)


@pytest.mark.parametrize(
    "frame",
    [
        frames.RecordFence(2**64),
        frames.RecordFence(-1),
        attrs.evolve(COMPLETED, completion=Completion(1, Outcome.LANDED, num_landed=2**32)),
        attrs.evolve(COMPLETED, completion=Completion(1, Outcome.CORRUPT, corrupt=(2**31,))),
    ],
)
def test_what_does_not_fit_is_not_written(frame: frames.Frame) -> None:
    """A number is never cut down to its width."""
    with pytest.raises(WireError, match="cannot be written"):
        encode(frame)


def test_a_negative_index_is_no_corrupt_block() -> None:
    """It would name a block from the other end of the plan."""
    spoiled: Any = attrs.evolve(COMPLETED, completion=Completion(1, Outcome.CORRUPT, corrupt=(-1,)))
    with pytest.raises(WireError, match="-1 is not an index"):
        decode(encode(spoiled))


def test_an_error_text_of_any_kind_arrives() -> None:
    """Half a surrogate pair in a driver's message must not keep its completion from being told."""
    found = decode(encode(frames.Refused("build", "\ud800 broke")))
    assert found == frames.Refused("build", "\\ud800 broke")


def test_a_frame_beyond_the_bound_is_not_sent() -> None:
    """The other side would not read it."""
    plan = TransferPlan(1, Tier.HOST, Tier.DEVICE, array("i", bytes(MAX_FRAME_BYTES)), array("i"))
    with pytest.raises(WireError, match="bytes, more than"):
        encode(frames.Launch(plan, 0))


def test_no_text_is_longer_than_anybody_sends() -> None:
    """A rank that is not ours may send megabytes: they end up in no event."""
    short = encode(frames.Lost("x"))
    lying = short[:2] + (10**6).to_bytes(4, "little") + b"x" * 10**6
    assert decode(lying) == frames.Lost("x" * MAX_TEXT)
    assert len(encode(frames.Refused("y" * 10**6, "x" * 10**6))) < 3 * MAX_TEXT
