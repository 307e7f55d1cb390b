"""The keys that identify the KV of a request."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from engine_doubles import Request, feature, lora

from aoffload._common.prefix import Roots
from aoffload._vllm.drafts import Drafts
from aoffload._vllm.requests import Keys
from aoffload.ledger import Prefix

TOKENS = range(40)
KEYS = Keys("model")
AHEAD = Keys("model", Drafts(num_ahead=1))


def key(**fields: Any) -> Prefix:
    found = KEYS.prefix_of(Request("r", TOKENS, **fields))
    assert found is not None
    return found


def test_equal_requests_have_equal_prefixes() -> None:
    """Nothing else enters: not the request's name, not when it came."""
    assert key() == KEYS.prefix_of(Request("other", TOKENS))
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
    keys, requests = Keys("model"), [Request(name, TOKENS, lora_request=lora(1)) for name in "ab"]
    one, other = (keys.prefix_of(request) for request in requests)
    assert one is not None and other is not None and one != other
    assert keys.under(one, requests[0], "weights") == keys.under(other, requests[1], "weights")
    assert keys.under(one, requests[0], "weights") != keys.under(one, requests[0], "others")
    salted = Request("c", TOKENS, lora_request=lora(1), cache_salt="salt")
    assert keys.under(one, salted, "weights") != keys.under(one, requests[0], "weights")
    for number in range(Roots.MAX_KEPT + 1):
        keys.prefix_of(Request(str(number), TOKENS, lora_request=lora(1)))
    (roots,) = keys._roots.values()
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
    assert KEYS.prefix_of(Request("r", token_ids, **fields)) is None


def test_a_prefix_grows() -> None:
    """By the tokens that were generated, as if the prompt had had them."""
    request = Request("r", TOKENS)
    before = key()
    assert KEYS.grown(before, request) is before
    request.all_token_ids += [7, 8]
    assert KEYS.grown(before, request) == KEYS.prefix_of(request)


# -- drafts ----------------------------------------------------------------------------------------------------------


def ahead(token_ids: Iterable[int], **fields: Any) -> Prefix:
    found = AHEAD.prefix_of(Request("r", token_ids, **fields))
    assert found is not None
    return found


def test_a_draft_layer_reads_one_token_more() -> None:
    """The first token is in the root. So the first sixteen tokens of a prefix are seventeen tokens of the prompt, and
    a prefix grows as any other."""
    found = ahead(TOKENS)
    assert found.tokens == KEYS.prefix_of(Request("r", TOKENS[1:])).tokens  # type: ignore[union-attr]
    assert found.root != key().root != ahead([5, *TOKENS[1:]]).root != found.root
    request = Request("r", [*TOKENS, 7, 8])
    assert AHEAD.grown(found, request) == ahead([*TOKENS, 7, 8])
    assert AHEAD.grown(found, Request("r", TOKENS)) is found
    assert AHEAD.num_known(found) == len(TOKENS)


def test_a_prompt_that_draft_layers_read_past_is_not_cached() -> None:
    """No block of it could be identified."""
    assert AHEAD.prefix_of(Request("r", TOKENS[:1])) is None
    assert ahead(TOKENS[:2]).num_tokens == 1


def test_an_image_is_read_ahead_too() -> None:
    """The KV at the token before an image depends on the image, and so does that of the image's own tokens. An image at
    the first token stays another one than an image at the second."""
    assert [(span.start, span.stop) for span in ahead(TOKENS, mm_features=[feature(3, 4, "cat")]).spans] == [(2, 6)]
    first, second = (ahead(TOKENS, mm_features=[feature(start, 4, "cat")]) for start in (0, 1))
    assert [(span.start, span.stop) for span in first.spans] == [(0, 3)]
    assert first.spans[0].digest != second.spans[0].digest
    assert ahead(TOKENS, mm_features=[feature(0, 1, "cat")]) != ahead(TOKENS, mm_features=[feature(0, 1, "dog")])


def test_roots_of_first_tokens_are_bounded() -> None:
    """Prompts choose their first token."""
    for token_id in range(2 * Keys.MAX_ROOTS):
        ahead([token_id, 1, 2])
    assert len(AHEAD._roots) <= Keys.MAX_ROOTS
