"""Prefixes: accepted and refused arguments, and digests that depend on content alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from aoffload._common.prefix import KeySpan, Prefix, Root, encode_tokens
from aoffload._kernel.tokens import TokenSequence, hash_run
from aoffload.errors import InvalidArgument

ROOT = Root("m")

GOOD = [
    [1, 2, 3],
    (1, 2, 3),
    range(1, 4),
    np.array([1, 2, 3], np.int64),
    np.array([1, 2, 3], np.uint8),
    np.array([1, 2, 3], ">i4"),
    np.array([1, 9, 2, 9, 3])[::2],
    torch.tensor([1, 2, 3]),
]


@pytest.mark.parametrize("tokens", GOOD, ids=lambda tokens: type(tokens).__name__)
def test_any_sequence_of_integers_is_the_same_prompt(tokens: Any) -> None:
    """Lists, ranges, arrays of any integer type, stride and byte order, and tensors encode alike."""
    assert Prefix.of(ROOT, tokens).tokens == np.array([1, 2, 3], "<i4").tobytes()


BAD = [
    ([], "empty"),
    ([1, -1], "negative"),
    ([1.5], "integers"),
    ([1, None], "integers"),
    ([True, False], "integers"),
    (["1"], "integers"),
    ("123", "str"),
    (b"123", "bytes"),
    (None, ""),
    (7, "one dimension"),
    ([[1, 2]], "one dimension"),
    ([[1], [2, 3]], ""),
    (np.zeros((2, 2), np.int32), "one dimension"),
    (np.zeros((0, 2), np.int32), "one dimension"),
    ([2**31], "above"),
    ([2**63], ""),
    ([2**80], "outside"),
    ([-(2**80)], "outside"),
    (np.array([2**63], np.uint64), "above"),
    ({1: 2}, ""),
    ({1, 2}, ""),
    (iter([1]), ""),
    (object(), ""),
    (np.array(["a"]), "integers"),
    (np.array([1 + 2j]), "integers"),
]


@pytest.mark.parametrize(("tokens", "problem"), BAD, ids=lambda value: repr(value)[:24])
def test_bad_token_ids_are_refused_by_name(tokens: Any, problem: str) -> None:
    """Whatever is no sequence of token ids gets one typed error, never something out of numpy."""
    with pytest.raises(InvalidArgument) as refusal:
        Prefix.of(ROOT, tokens)
    assert refusal.value.argument == "token_ids"
    assert problem in refusal.value.problem
    assert isinstance(refusal.value, ValueError)


@pytest.mark.parametrize(
    ("spans", "named"),
    [
        ([KeySpan(3, 3, b"")], "key_spans[0]"),
        ([KeySpan(4, 2, b"")], "key_spans[0]"),
        ([KeySpan(-1, 2, b"")], "key_spans[0]"),
        ([KeySpan(0, 9, b"")], "key_spans[0]"),
        ([KeySpan(0, 3, b""), KeySpan(2, 4, b"")], "key_spans[1]"),
        ([KeySpan(4, 5, b""), KeySpan(0, 1, b"")], "key_spans[1]"),
        ([KeySpan(0, 1, "text")], "key_spans[0]"),  # type: ignore[arg-type]
        ([KeySpan(0.0, 1, b"")], "key_spans[0]"),  # type: ignore[arg-type]
        ([(0, 1, b"")], "key_spans[0]"),
        ([None], "key_spans[0]"),
        (7, "key_spans"),
    ],
)
def test_bad_key_spans_are_refused_by_name(spans: Any, named: str) -> None:
    """Reversed, overlapping, unordered, out of the prompt, of the wrong type: the span is named by its number."""
    with pytest.raises(InvalidArgument) as refusal:
        Prefix.of(ROOT, [1, 2, 3, 4, 5], spans)
    assert refusal.value.argument == named


@pytest.mark.parametrize("value", [7, 1.5, ["a"], "\ud800"], ids=repr)
@pytest.mark.parametrize("name", ["cache_salt", "adapter_key"])
def test_odd_root_keys_are_refused_by_name(name: str, value: Any) -> None:
    """A salt or adapter key is text or bytes; anything else would be a key nobody meant."""
    with pytest.raises(InvalidArgument) as refusal:
        Root("m", **{name: value})
    assert refusal.value.argument == name


def test_roots_are_told_apart_by_where_their_text_stands() -> None:
    """No salt and adapter together read like another namespace."""
    texts: list[Any] = [None, "", "a", "ab", b"", b"a", b"ab"]
    digests = {Root(n, s, a).hasher.digest() for n in ("", "a", "ab") for s in texts for a in texts}
    assert len(digests) == 3 * 7 * 7


tokens = st.lists(st.integers(0, 3), min_size=8, max_size=64)


@settings(max_examples=200)
@given(ids=tokens, cuts=st.sets(st.integers(1, 30)), span=st.tuples(st.integers(0, 20), st.integers(1, 20)))
def test_a_digest_does_not_depend_on_cuts(ids: list[int], cuts: set[int], span: tuple[int, int]) -> None:
    """Hashing in runs, however they were cut, gives the digests that hashing block by block gives."""
    unit = 2
    start, length = span
    spans = [KeySpan(start, start + length, b"s")] if start + length <= len(ids) else []
    sequence = TokenSequence(Prefix.of(ROOT, ids, spans), unit)
    num_units = len(ids) // unit
    whole = ROOT.hasher
    for position in range(num_units):
        whole = hash_run(whole, sequence.stretch(position, position + 1), sequence.spans_at(position), unit * 4)
    hasher, position = ROOT.hasher, 0
    while position < num_units:
        limit = min([cut for cut in cuts if cut > position] + [num_units])
        stop = sequence.run_stop(position, min(limit, num_units))
        assert len({sequence.spans_at(at) for at in range(position, stop)}) == 1
        before = sequence.key_at(hasher, position)
        hasher = hash_run(hasher, sequence.stretch(position, stop), sequence.spans_at(position), unit * 4)
        assert stop > position + 1 or before == hasher.digest()
        position = stop
    assert hasher.digest() == whole.digest()


@settings(max_examples=200)
@given(one=tokens, two=tokens)
def test_equal_digests_mean_equal_prefixes(one: list[int], two: list[int]) -> None:
    """Of two prompts, the digests of a position are equal exactly if all tokens before it are."""
    for count in range(1, min(len(one), len(two)) + 1):
        keys = [TokenSequence(Prefix.of(ROOT, ids[:count]), count).key_at(ROOT.hasher, 0) for ids in (one, two)]
        assert (keys[0] == keys[1]) == (one[:count] == two[:count])


def test_appending_reads_like_a_longer_prompt() -> None:
    """Generated tokens and prompt tokens are the same to the digest."""
    grown = TokenSequence(Prefix.of(ROOT, [1, 2, 3]), 2)
    grown.append(encode_tokens([4, 5]))
    grown.append(b"")
    grown.append(encode_tokens([6]))
    whole = TokenSequence(Prefix.of(ROOT, [1, 2, 3, 4, 5, 6]), 2)
    assert grown.num_tokens == 6
    assert grown.shared_stretch(0, 3) == whole.stretch(0, 3)
    assert [grown.stretch(i, i + 1) for i in range(3)] == [whole.stretch(i, i + 1) for i in range(3)]


@settings(max_examples=200)
@given(ids=tokens, more=st.lists(st.integers(0, 3), max_size=8), start=st.integers(0, 30))
def test_what_is_hashed_ahead_is_what_publishing_hashes(ids: list[int], more: list[int], start: int) -> None:
    """Where the longest runs end after `start`, and nowhere else, the running hash is there before anybody asks."""
    unit, most = 2, 4
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("aoffload._kernel.tokens.MAX_RUN_TOKENS", most * unit)
        sequence = TokenSequence(Prefix.of(ROOT, ids), unit)
        sequence.hash_ahead(start)
        sequence.append(encode_tokens(more))
        whole = ROOT.hasher
        for position in range(sequence.num_tokens // unit):
            whole = hash_run(whole, sequence.stretch(position, position + 1), (), unit * 4)
            ahead = sequence.hasher_at(position + 1)
            is_end = (position + 1) % most == 0 and start < position + 1 <= len(ids) // unit
            assert (ahead is not None) == is_end
            assert ahead is None or ahead.digest() == whole.digest()


def test_spans_that_are_an_array_are_refused_by_name() -> None:
    """What is no `KeySpan` is named, whatever it says when it is compared with something; an empty array is none."""
    assert Prefix.of(ROOT, [1, 2], np.array([])).spans == ()  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match=r"key_spans\[0\]"):
        Prefix.of(ROOT, [1, 2], np.array([1, 2]))  # type: ignore[arg-type]


class Evil(str):
    """Text that is like any other, and fails wherever it is compared or measured."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("compared")

    def __len__(self) -> int:
        raise RuntimeError("measured")

    __hash__ = str.__hash__


class EvilBytes(bytes):
    def __eq__(self, other: object) -> bool:
        raise RuntimeError("compared")

    def __len__(self) -> int:
        raise RuntimeError("measured")

    __hash__ = bytes.__hash__


@pytest.mark.parametrize("is_text", [True, False])
def test_keys_are_kept_as_plain_values(is_text: bool) -> None:
    """A key that compares or measures in its own way would fail in somebody else's call: what is kept is plain."""
    evil: Any = Evil("s") if is_text else EvilBytes(b"s")
    plain: Any = "s" if is_text else b"s"
    for name in ("cache_salt", "adapter_key"):
        assert Root("m", **{name: evil}) == Root("m", **{name: plain})
        assert type(getattr(Root("m", **{name: evil}), name)) is type(plain)
    if isinstance(plain, bytes):
        assert type(KeySpan(0, 1, evil).digest) is bytes


def test_a_prefix_takes_nothing_but_spans() -> None:
    """Also where it is made without `Prefix.of`."""
    for spans in ((1,), [KeySpan(0, 1, b"x")], (None,)):
        with pytest.raises(InvalidArgument) as refusal:
            Prefix(ROOT, b"\1\0\0\0", spans)  # type: ignore[arg-type]
        assert refusal.value.argument == "spans"


def test_nearly_all_of_a_long_prompt_is_shared() -> None:
    """Memory for another copy would cost several times the copy. A smaller part does not keep the whole alive; where
    spans are hashed along, or generated tokens follow, there is a copy, too."""
    ids = np.arange(40_001, dtype=np.int32)
    sequence = TokenSequence(Prefix.of(ROOT, ids), 16)
    shared = sequence.shared_stretch(0, 2_500)
    assert isinstance(shared, memoryview) and shared == sequence.stretch(0, 2_500)
    assert type(sequence.shared_stretch(0, 2_300)) is type(sequence.shared_stretch(200, 2_500)) is bytes
    assert type(TokenSequence(Prefix.of(ROOT, ids[:4_001]), 16).shared_stretch(0, 250)) is bytes
    with_span = Prefix.of(ROOT, ids, [KeySpan(3, 9, b"cat")])
    assert type(TokenSequence(with_span, 16).shared_stretch(0, 2_500)) is bytes
    sequence.append(encode_tokens(range(15)))
    assert type(sequence.shared_stretch(0, 2_501)) is bytes
