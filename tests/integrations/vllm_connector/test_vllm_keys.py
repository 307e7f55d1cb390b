"""The keys that identify the KV of a request."""

from __future__ import annotations

from typing import Any

import pytest
from engine_doubles import Request, feature, lora

from aoffload._common.prefix import Roots
from aoffload._vllm.requests import grown, prefix_of, under
from aoffload.ledger import Prefix

TOKENS = range(40)


def key(**fields: Any) -> Prefix:
    found = prefix_of(Roots("model"), Request("r", TOKENS, **fields))
    assert found is not None
    return found


def test_equal_requests_have_equal_prefixes() -> None:
    """Nothing else enters: not the request's name, not when it came."""
    assert key() == prefix_of(Roots("model"), Request("other", TOKENS))
    assert key(cache_salt="") == key()


@pytest.mark.parametrize(
    "fields",
    [
        {"cache_salt": "a"},
        {"lora_request": lora(1)},
        {"mm_features": [feature(3, 4, "cat")]},
    ],
)
def test_what_else_identifies_kv_enters(fields: dict[str, Any]) -> None:
    """Salt, adapter and images: none of them ever hits the KV of plain text."""
    assert key(**fields) != key()


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"cache_salt": "a"}, {"cache_salt": "b"}),
        ({"mm_features": [feature(3, 4, "cat")]}, {"mm_features": [feature(3, 4, "dog")]}),
        ({"mm_features": [feature(3, 4, "cat")]}, {"mm_features": [feature(4, 4, "cat")]}),
        ({"mm_features": [feature(3, 4, "a", "image")]}, {"mm_features": [feature(3, 4, "a", "audio")]}),
    ],
)
def test_values_are_told_apart(one: dict[str, Any], other: dict[str, Any]) -> None:
    """Another salt, another image or another place of it."""
    assert key(**one) != key(**other)


def test_an_adapter_says_nothing_about_its_weights() -> None:
    """Neither its name, nor its path, nor its id: a request shares nothing, not with the same request. Once the weights
    are known, they are what counts, and a salt."""
    roots, requests = Roots("model"), [Request(name, TOKENS, lora_request=lora(1)) for name in "ab"]
    one, other = (prefix_of(roots, request) for request in requests)
    assert one is not None and other is not None and one != other
    assert under(one, roots, requests[0], "weights") == under(other, roots, requests[1], "weights")
    assert under(one, roots, requests[0], "weights") != under(one, roots, requests[0], "others")
    salted = Request("c", TOKENS, lora_request=lora(1), cache_salt="salt")
    assert under(one, roots, salted, "weights") != under(one, roots, requests[0], "weights")
    for number in range(Roots.MAX_KEPT + 1):
        prefix_of(roots, Request(str(number), TOKENS, lora_request=lora(1)))
    assert len(roots) == 3, "these roots are nobody else's, so they push none out"


def test_spans_come_in_order() -> None:
    """vLLM lists its inputs by modality."""
    spans = key(mm_features=[feature(20, 4, "dog"), feature(3, 4, "cat")]).spans
    assert [(span.start, span.stop) for span in spans] == [(3, 7), (20, 24)]


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt_embeds": object()},
        {"token_ids": [1, 2, -1]},
        {"token_ids": [*range(2_000), -1]},
        {"token_ids": [1, 2**31]},
        {"token_ids": []},
        {"resumable": True},
        {"mm_features": [feature(3, 8, "video"), feature(4, 2, "sound", "audio")]},
    ],
)
def test_what_has_no_key_is_not_cached(fields: dict[str, Any]) -> None:
    """Embeddings have no token ids; a session takes tokens back; of inputs that overlap no span can be made; what no
    model has in its vocabulary stands for something else."""
    token_ids = fields.pop("token_ids", TOKENS)
    assert prefix_of(Roots("model"), Request("r", token_ids, **fields)) is None


def test_a_prefix_grows() -> None:
    """By the tokens that were generated, as if the prompt had had them."""
    request = Request("r", TOKENS)
    before = key()
    assert grown(before, request, 40) is before
    request.all_token_ids += [7, 8]
    assert grown(before, request, 40) == prefix_of(Roots("model"), request)
