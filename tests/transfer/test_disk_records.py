"""The pure parts of the disk tier: records as bytes, neighbours, and the validation after a restart."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("xxhash", reason="the extra `disk` is not installed")

from aoffload._common.prefix import Prefix, Root
from aoffload._kernel.tokens import TokenSequence
from aoffload._tiers.disk import recovery
from aoffload._tiers.disk.files import MAX_BUFFERS, stretch_at
from aoffload._tiers.disk.plans import BlockLabel, RestoredRun
from aoffload._tiers.disk.recovery import Chains
from aoffload._tiers.disk.table import RecordFormat, SlotLayout, Superblock
from aoffload.errors import ConfigError, InvalidArgument

UNIT = 4
FULL = SlotLayout(UNIT, 64, (1,), (True,))
ROOT = Root("model", cache_salt="tenant")
FORM = RecordFormat(UNIT)


def labels(token_ids: Sequence[int], component: int = 0, width: int = 1) -> list[BlockLabel]:
    """The labels of every block of a prompt, as the index names its prefixes."""
    sequence, found, hasher, before = TokenSequence(Prefix.of(ROOT, token_ids), UNIT), [], ROOT.hasher.copy(), b""
    for position in range(sequence.num_prompt_units):
        digest = sequence.key_at(hasher, position)
        tokens = sequence.stretch(position, position + 1)
        found += [BlockLabel(component, place, position, ROOT.digest, digest, before, tokens) for place in range(width)]
        hasher.update(tokens)
        before = digest
    return found


def prompt(*units: int) -> list[int]:
    return [unit for unit in units for _ in range(UNIT)]


def recovered(
    given: Sequence[tuple[int, BlockLabel]], layout: SlotLayout = FULL, generation: int = 7, num_slots: int = 64
) -> list[RestoredRun]:
    """What survives of a table with these labels in these slots, the last one written last."""
    table = bytearray(FORM.zeros(num_slots))
    for number, (slot, label) in enumerate(given):
        at = slot * FORM.num_bytes
        table[at : at + FORM.num_bytes] = FORM.encoded(label, slot, generation, number, bytes(15) + b"\1")
    sound = FORM.sound(table, 0, 7)
    chains = Chains(layout, sound, FORM.decoded(table)[sound])
    return [each for part in chains.proven(8) for each in part]


def slots_of(found: Sequence[RestoredRun], component: int = 0) -> list[list[int]]:
    return [each.slots[component].tolist() for each in found]


def test_the_digests_are_those_of_the_index() -> None:
    """A prompt finds the blocks that a restart has proven by the keys that the index has."""
    ids = prompt(1, 2, 3)
    (found,) = recovered(list(enumerate(labels(ids), start=10)))
    hasher = hashlib.sha256(ROOT.digest)
    hasher.update(np.array(ids, "<i4").tobytes())
    assert (found.root, found.before, found.start, found.stop) == (ROOT.digest, b"", 0, 3)
    assert found.digest == hasher.digest() and found.slots == (array("i", [10, 11, 12]),)
    assert found.tokens == np.array(ids, "<i4").tobytes()


def test_no_key_reaches_a_record() -> None:
    """A salt is a secret: only the digest of the root is written."""
    assert b"tenant" not in b"".join(FORM.encoded(label, 0, 1, 1, bytes(16)) for label in labels(prompt(1)))


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_nothing_behind_a_lost_unit_survives(lost: int) -> None:
    """Without a unit, those after it prove nothing: nobody could know what they follow."""
    given = [pair for pair in enumerate(labels(prompt(1, 2, 3))) if pair[0] != lost]
    assert slots_of(recovered(given)) == ([list(range(lost))] if lost else [])


def test_of_two_slots_for_a_block_the_newer_counts() -> None:
    """Eviction writes nothing, so an older copy may still be there."""
    one, two = labels(prompt(1, 2))
    assert slots_of(recovered([(5, one), (6, two), (9, one)])) == [[9, 6]]


def test_branches_share_what_they_have_in_common() -> None:
    """What is common comes once, before both."""
    given = dict(zip((1, 2, 3), labels(prompt(1, 2, 3)), strict=True)) | {7: labels(prompt(1, 2, 4))[2]}
    first, *others = recovered(list(given.items()))
    assert (first.slots, first.stop) == ((array("i", [1, 2]),), 2)
    assert sorted(slots_of(others)) == [[3], [7]] and {each.before for each in others} == {first.digest}


def test_a_window_needs_only_the_tokens_before_it() -> None:
    """Full attention counts after all units before it, a window anywhere; both places of a unit have to be there."""
    layout = SlotLayout(UNIT, 64, (1, 2), (True, False))
    full, window = labels(prompt(1, 2, 3)), labels(prompt(1, 2, 3), component=1, width=2)
    found = recovered([(1, full[0]), (2, full[2]), (20, window[2]), (30, window[4]), (31, window[5])], layout)
    assert [each.stop - each.start for each in found] == [1, 1, 1]
    assert slots_of(found, 0) == [[1], [], []]
    assert slots_of(found, 1) == [[], [], [30, 31]]  # of unit 1 one place is lost, but its tokens are there


def test_tokens_that_are_not_those_of_the_digest_prove_nothing() -> None:
    """A record may be whole and still be of another prompt than it says: then it and what follows is left out."""
    one, two, three = labels(prompt(1, 2, 3))
    forged = BlockLabel(0, 0, 1, two.root, two.digest, two.before, labels(prompt(9))[0].tokens)
    assert slots_of(recovered([(0, one), (1, forged), (2, three)])) == []  # one run is proven as a whole
    assert slots_of(recovered([(0, one), (5, labels(prompt(1, 4))[1]), (1, forged), (2, three)])) == [[0], [5]]


@pytest.mark.parametrize("change", [{"root": bytes(32)}, {"position": 2}, {"before": bytes(31) + b"\1"}])
def test_a_unit_that_follows_another_one_is_an_orphan(change: dict[str, object]) -> None:
    """Root, position and the digest before it have to be those of what it follows."""
    one, two = labels(prompt(1, 2))
    fields = {name: getattr(two, name) for name in BlockLabel.__slots__ if not name.startswith("_")}
    assert slots_of(recovered([(0, one), (1, BlockLabel(**{**fields, **change}))])) == [[0]]


def test_every_bit_of_a_record_counts() -> None:
    """A record with one bit changed, in another slot, or of another generation, is not there."""
    label = labels(prompt(1))[0]
    raw = FORM.encoded(label, 3, 7, 1, bytes(16))
    assert FORM.sound(raw, 3, 7).tolist() == [0]
    for at in range(len(raw) * 8):
        changed = bytearray(raw)
        changed[at // 8] ^= 1 << at % 8
        assert not len(FORM.sound(changed, 3, 7)), at
    assert (
        not len(FORM.sound(raw, 4, 7)) and not len(FORM.sound(raw, 3, 8)) and not len(FORM.sound(FORM.zeros(9), 0, 0))
    )


def test_every_bit_of_a_superblock_counts() -> None:
    """What is not the whole superblock is none: the slots start empty."""
    superblock = Superblock(bytes(range(32)), 2**64 - 1, 12)
    raw = superblock.encoded()
    assert Superblock.decoded(raw) == superblock and Superblock.decoded(raw[:-1]) is None
    for at in range(80 * 8):
        changed = bytearray(raw)
        changed[at // 8] ^= 1 << at % 8
        assert Superblock.decoded(bytes(changed)) is None, at


@pytest.mark.parametrize(
    "change", [{"root": b"short"}, {"digest": b""}, {"before": b"x"}, {"tokens": b"1234"}, {"position": 0}]
)
def test_a_label_that_fits_into_no_record_is_refused(change: dict[str, object]) -> None:
    """By name, before anything is written."""
    label = labels(prompt(1, 2))[1]
    fields = {name: getattr(label, name) for name in BlockLabel.__slots__ if not name.startswith("_")}
    with pytest.raises(InvalidArgument, match="labels"):
        FORM.check(BlockLabel(**{**fields, **change}))


@pytest.mark.parametrize(
    ("name", "values"),
    [("unit_tokens", (0, 8, (1,), (True,))), ("block_bytes", (4, 0, (1,), (True,))), ("widths", (4, 8, (-1,), (True,))),
     ("leading", (4, 8, (1, 1), (True,))), ("leading", (4, 8, (), ()))],
)  # fmt: skip
def test_a_layout_names_what_is_wrong_with_it(name: str, values: tuple[int, int, tuple[int, ...], tuple[bool]]) -> None:
    with pytest.raises(ConfigError) as refusal:
        SlotLayout(*values)
    assert refusal.value.argument == name


def calls(slots: list[int], host_ids: list[int], most: int) -> Iterator[tuple[int, list[int]]]:
    first = 0
    while first < len(slots):
        stretch = stretch_at(np.array(slots), np.array(host_ids), first, most)
        yield stretch.slot, [row for part in stretch.host for row in range(part.start, part.stop)]
        first = stretch.stop


@settings(max_examples=200)
@given(
    slots=st.permutations(range(12)), host_ids=st.permutations(range(12)), most=st.integers(1, 12),
    joined=st.integers(0, 12),
)  # fmt: skip
def test_calls_move_each_block_between_its_own_places(
    slots: list[int], host_ids: list[int], most: int, joined: int
) -> None:
    """Whatever lies together: every block moves once, in order, between its slot and its host block."""
    slots = sorted(slots[:joined]) + slots[joined:]
    moved = [(slot + at, row) for slot, rows in calls(slots, host_ids, most) for at, row in enumerate(rows)]
    assert moved == list(zip(slots, host_ids, strict=True))
    assert max(len(rows) for _, rows in calls(slots, host_ids, most)) <= most


def test_a_call_has_no_more_buffers_than_the_system_takes() -> None:
    """Host blocks that are all apart need a buffer each."""
    num_blocks = 2 * MAX_BUFFERS + 5
    slots, host_ids = np.arange(num_blocks), np.arange(num_blocks) * 2
    lengths, first = [], 0
    while first < num_blocks:
        stretch = stretch_at(slots, host_ids, first, num_blocks)
        lengths.append(len(stretch.host))
        first = stretch.stop
    assert lengths == [MAX_BUFFERS, MAX_BUFFERS, 5]


def test_slices_are_bounded_whatever_the_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt of many units comes in runs, none longer than a slice may be."""
    monkeypatch.setattr(recovery, "RUN_UNITS", 4)
    found = recovered(list(enumerate(labels(prompt(*range(1, 31))))))
    assert [each.stop - each.start for each in found] == [4] * 7 + [2]
    assert [slot for part in slots_of(found) for slot in part] == list(range(30))
