"""What identifies the KV of a request."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from engine_doubles import Request, feature

from aoffload.integrations.vllm.keys import grown, prefix_of
from aoffload.ledger import Prefix
from aoffload.prefix import Roots

TOKENS = range(40)


def key(**fields: Any) -> Prefix:
    found = prefix_of(Roots("model"), Request("r", TOKENS, **fields))
    assert found is not None
    return found


def lora(name: str, path: str) -> Any:
    return SimpleNamespace(lora_name=name, lora_path=path)


def test_equal_requests_have_equal_prefixes() -> None:
    """Nothing else enters: not the request's name, not when it came."""
    assert key() == prefix_of(Roots("model"), Request("other", TOKENS))
    assert key(cache_salt="") == key()


@pytest.mark.parametrize(
    "fields",
    [
        {"cache_salt": "a"},
        {"lora_request": lora("a", "/x")},
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
        ({"lora_request": lora("a", "/x")}, {"lora_request": lora("a", "/y")}),
        ({"lora_request": lora("a", "/x")}, {"lora_request": lora("b", "/x")}),
        ({"lora_request": lora("a", "b/x")}, {"lora_request": lora("ab", "/x")}),
        ({"mm_features": [feature(3, 4, "cat")]}, {"mm_features": [feature(3, 4, "dog")]}),
        ({"mm_features": [feature(3, 4, "cat")]}, {"mm_features": [feature(4, 4, "cat")]}),
        ({"mm_features": [feature(3, 4, "a", "image")]}, {"mm_features": [feature(3, 4, "a", "audio")]}),
    ],
)
def test_values_are_told_apart(one: dict[str, Any], other: dict[str, Any]) -> None:
    """Another salt, an adapter under the same name from another place, another image or another place of it."""
    assert key(**one) != key(**other)


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
