"""A request of vLLM and what the ledger holds for it."""

from __future__ import annotations

import enum
import math
import uuid
from array import array
from typing import Any

import attrs
import numpy as np

from .. import HostCache, PrefixMatch, RequestState
from .._common.prefix import INT32, KeySpan, Prefix, Roots, encode_tokens
from .._host_cache.requests import HostCacheRequest
from ..errors import InvalidArgument
from ..ledger import Fetch
from .messages import AdapterUse
from .remote import Asked

# -- keys ------------------------------------------------------------------------------------------------------------
#
# What identifies the KV of a request of vLLM: salt, weights of the LoRA adapter, multi-modal inputs, token ids.

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


# -- requests --------------------------------------------------------------------------------------------------------

_ASKING = (RequestState.MATCHED, RequestState.PINNED)


class Wait(enum.Enum):
    """Whether vLLM waits for a load of the request. It has to be told exactly once that the load is over."""

    NONE = "none"
    LOAD = "load"
    TOLD = "told"
    """A report that the load fell short is on its way. vLLM still takes the tokens for computed."""


class Fetching(enum.Enum):
    """Whether more of the request is to be brought from below host memory, in this try."""

    OPEN = "open"
    OVER = "over"
    """What was brought counts: the rest is lost, has no room, or took too long."""


@attrs.define(eq=False)
class EngineRequest:
    engine: Any
    """vLLM's own request."""
    request_id: str
    prefix: Prefix
    """Its tokens when it was last admitted; a long list of ids is read once."""
    record: HostCacheRequest | None = None
    """None before it asks, and once it was preempted or its load was lost."""
    num_known: int = 0
    """Tokens that the ledger knows."""
    num_local: int = 0
    """Tokens that vLLM has in its own cache."""
    promised: int = 0
    """Tokens that vLLM takes for computed once the load is over."""
    wait: Wait = Wait.NONE
    max_hit_tokens: int | None = None
    """Set once a load was lost: vLLM asks again, and the same load would be lost again."""
    offered_stop: int = -1
    """Units that were offered last."""
    next_offer: int = 0
    """With fewer computed tokens, there is no new block."""
    ask_at: float = -math.inf
    """Until then the same question has the same answer, unless `ask_now` is called or a copy fails."""
    num_failed: int = 0
    """`Counts.num_failed` when it was answered."""

    use: AdapterUse | None = None
    """The weights of its LoRA adapter for all its KV. None: no adapter, or no worker has reported its weights yet."""
    is_late: bool = False
    """It runs already, and is admitted to the ledger once the workers report the weights of its adapter."""
    is_barred: bool = False
    """Its KV may be of several weights, so it is not cached."""
    has_to_be_compared: bool = False
    """Its first forward after a load has to compare the weights of its adapter with those that the load was planned
    for."""

    chosen: PrefixMatch | None = None
    """The match of which was decided last what is loaded: what is left of it."""

    fetching: Fetching = Fetching.OPEN
    fetch: Fetch | None = None
    """What is under way, or has ended since it was asked last."""
    asked: Asked | None = None
    """What the remote store was asked for it."""
    fetch_until: float = math.inf
    """None begins later."""
    num_tried: int = -1
    """Loads from below host memory that were over when it last asked for a fetch."""
    num_fetched: int = -1
    """Tokens of its hit when its last fetch began that had anything to load."""

    @property
    def is_asking(self) -> bool:
        return self.record is not None and self.record.state in _ASKING

    @property
    def has_asked_again(self) -> bool:
        """Whether it has come back in the step that tells of its preemption: vLLM preempts between steps, too."""
        return self.is_asking or self.wait is Wait.LOAD

    @property
    def is_running(self) -> bool:
        return self.record is not None and self.record.state is RequestState.RUNNING

    def ask_now(self) -> None:
        self.ask_at = -math.inf

    def answer(self, num_local: int, num_failed: int, now: float) -> PrefixMatch | None:
        """The last answer, if the question is the same and nothing can have changed it."""
        record = self.record
        if record is None or num_local != self.num_local or num_failed != self.num_failed or now >= self.ask_at:
            return None
        return record.match if record.state in _ASKING else None

    def ask(self, ledger: HostCache, num_local: int, num_failed: int) -> PrefixMatch:
        """Match what the host has behind `num_local` tokens, with all tokens that the request has by now."""
        record = self._match(ledger, num_local)
        self.num_failed = num_failed
        # What was found is pinned.
        self.ask_at = ledger.pending_until(record) if record.match.is_pending else math.inf
        return record.match

    def _match(self, ledger: HostCache, num_local: int) -> HostCacheRequest:
        self.num_local = num_local
        record = self.record
        if record is not None and self.is_asking:
            ledger.match_again(record, num_device_tokens=num_local, wake=self.ask_now)
            return record
        if self.num_known:  # it was admitted before
            self.leave(ledger, "preempted")
        self.prefix = grown(self.prefix, self.engine, self.prefix.num_tokens)
        self.num_known, self.offered_stop, self.next_offer = self.prefix.num_tokens, -1, 0
        self.record = ledger.admit(
            self.prefix,
            request_id=self.request_id,
            reads_cache=not self.engine.skip_reading_prefix_cache,
            max_hit_tokens=self.max_hit_tokens,
            num_device_tokens=num_local,
            wake=self.ask_now,
        )
        return self.record

    def ask_late(self, ledger: HostCache) -> None:
        """Admit it to the ledger although it runs already. It loads nothing."""
        self.is_late = False
        self.prefix = prefix = grown(self.prefix, self.engine, self.prefix.num_tokens)
        self.num_known = prefix.num_tokens
        self.record = ledger.admit(
            prefix, request_id=self.request_id, reads_cache=False, num_device_tokens=self.num_local
        )

    def bar(self, ledger: HostCache) -> None:
        """Cache nothing of it from now on. If vLLM waits for its load, that load counts as failed."""
        self.is_barred, self.is_late = True, False
        if self.wait is Wait.NONE:
            self.leave(ledger, "adapter_changed")

    def ask_behind_fetch(self, ledger: HostCache, num_failed: int) -> PrefixMatch:
        """A fetch is over. Begin anew: by now, another request may be loading what it has brought."""
        kept = self.fetching, self.asked, self.fetch_until, self.num_tried, self.num_fetched
        self.leave(ledger, "fetched")
        match = self.ask(ledger, self.num_local, num_failed)
        self.fetching, self.asked, self.fetch_until, self.num_tried, self.num_fetched = kept
        return match

    def offers_up_to(self, stop: int, unit: int) -> None:
        """What it has computed up to block `stop` is offered in this step."""
        self.wait, self.offered_stop, self.next_offer = Wait.NONE, stop, (stop + 1) * unit

    def leave(self, ledger: HostCache, reason: str) -> None:
        """Let the ledger forget the request. Copies that are under way hold their blocks themselves."""
        record, self.record = self.record, None
        fetch, self.fetch, self.fetching = self.fetch, None, Fetching.OPEN
        self.asked, self.fetch_until, self.num_tried, self.num_fetched = None, math.inf, -1, -1
        self.has_to_be_compared = False
        if fetch is not None:
            ledger.transfers.cancel(fetch)
        if record is not None:
            ledger.release(record, reason)

    def new_tokens(self) -> list[int]:
        """The tokens that the ledger does not know yet."""
        found: list[int] = self.engine.all_token_ids[self.num_known :]
        self.num_known += len(found)
        return found
