"""What identifies the KV of a request of vLLM: salt, weights of the LoRA adapter, multi-modal inputs, token ids."""

from __future__ import annotations

import uuid
from array import array
from typing import Any

import numpy as np

from .._kernel.prefix import INT32, KeySpan, Prefix, Roots, encode_tokens
from ..errors import InvalidArgument

__all__ = ["grown", "prefix_of", "under"]

MAX_WITHOUT_NUMPY = 1024
"""Up to this many ids, a look at each is over before numpy has begun."""


def prefix_of(roots: Roots, request: Any) -> Prefix | None:
    """All tokens of `request` under its keys. None if it cannot be cached, because a prompt of embeddings has no token
    ids, and a session removes tokens when its next input comes.

    With a LoRA adapter, the key is unique until `under` puts the prefix under the weights, because name, path and id of
    an adapter do not say which weights vLLM has loaded."""
    if request.prompt_embeds is not None or request.resumable:
        return None
    try:
        root = roots.of(request.cache_salt or None, None if request.lora_request is None else _unknown())
        tokens, features = encoded(request.all_token_ids[:]), request.mm_features
        return Prefix.of(root, np.frombuffer(tokens, INT32), _spans(features)) if features else Prefix(root, tokens)
    except (InvalidArgument, OverflowError):  # inputs that overlap, such as the sound of a video; no token ids
        return None


def under(prefix: Prefix, roots: Roots, request: Any, adapter_key: str) -> Prefix:
    """`prefix` of `request`, under the adapter weights that `adapter_key` identifies."""
    return Prefix(roots.of(request.cache_salt or None, f"lora {adapter_key}"), prefix.tokens, prefix.spans)


def grown(prefix: Prefix, request: Any, num_known: int) -> Prefix:
    """`prefix` with the tokens of `request` from the first `num_known` on."""
    added = request.all_token_ids[num_known:]
    if not added:
        return prefix
    return Prefix(prefix.root, prefix.tokens + encoded(added), prefix.spans)


def encoded(token_ids: list[int]) -> bytes:
    """vLLM's token ids, which are ints: read faster than what might be anything. `OverflowError`, `InvalidArgument`:
    they are none."""
    ids = array("i", token_ids)
    if len(ids) > MAX_WITHOUT_NUMPY:
        return encode_tokens(np.frombuffer(ids, INT32))
    if ids and min(ids) < 0:
        raise InvalidArgument("token_ids", "holds a negative id")
    return ids.tobytes()


def _unknown() -> str:
    """A unique key. It is so long that `Roots` does not keep its root."""
    return f"unknown {uuid.uuid4().hex}".ljust(Roots.MAX_KEY + 1)


def _spans(features: Any) -> tuple[KeySpan, ...]:
    spans = []
    for feature in features:
        start, digest = feature.mm_position.offset, f"{feature.modality}:{feature.identifier}".encode()
        spans.append(KeySpan(start, start + feature.mm_position.length, digest))
    return tuple(sorted(spans))
