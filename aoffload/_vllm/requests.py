"""Requests of vLLM, each with its record in the ledger."""

from __future__ import annotations

import enum
import math
import uuid
from array import array
from collections import Counter
from typing import Any, ClassVar

import attrs
import numpy as np

from .. import HostCache, PrefixMatch, RequestState, Tier
from .._common.hints import GivenHint
from .._common.prefix import INT32, KeySpan, Prefix, Roots, encode_tokens
from .._host_cache.requests import HostCacheRequest
from .._kernel.records import Job
from ..errors import InvalidArgument
from ..ledger import Fetch, HintAnswer, Outcome
from .drafts import NO_DRAFTS, Drafts
from .messages import AdapterUse
from .remote import Asked

# -- keys ------------------------------------------------------------------------------------------------------------
#
# The keys that identify the KV of a request of vLLM: salt, weights of the LoRA adapter, multi-modal inputs, token ids.

MAX_WITHOUT_NUMPY = 1024
"""Up to this many ids, a Python loop is faster than numpy."""


@attrs.frozen
class Keys:
    """Makes the prefixes of an engine's requests, under the keys that identify their KV."""

    MAX_ROOTS: ClassVar = 64
    """Most entries of `_roots`."""

    namespace: str
    drafts: Drafts = NO_DRAFTS
    _roots: dict[bytes, Roots] = attrs.field(factory=dict, init=False)
    """By the tokens before the prefix (see the module `drafts`)."""

    def prefix_of(self, request: Any) -> Prefix | None:
        """All tokens of `request` under its keys. None if the request cannot be cached: a prompt of embeddings has no
        token ids, a session removes tokens when its next input comes, and a prompt may have fewer tokens than a draft
        layer reads ahead.

        With a LoRA adapter, the key is unique until `under` puts the prefix under the weights, because the adapter's
        name, path and id do not say which weights vLLM has loaded."""
        num_ahead = self.drafts.num_ahead
        if request.prompt_embeds is not None or request.resumable or request.num_tokens <= num_ahead:
            return None
        try:
            adapter_key = None if request.lora_request is None else _unknown()
            root = self._roots_of(request).of(request.cache_salt or None, adapter_key)
            tokens, features = encoded(request.all_token_ids[num_ahead:]), request.mm_features
            if not features:
                return Prefix(root, tokens)
            return Prefix.of(root, np.frombuffer(tokens, INT32), _spans(features, num_ahead))
        except (InvalidArgument, OverflowError):  # inputs that overlap, such as the sound of a video; no token ids
            return None

    def under(self, prefix: Prefix, request: Any, adapter_key: str) -> Prefix:
        """`prefix` of `request`, under the adapter weights that `adapter_key` identifies."""
        root = self._roots_of(request).of(request.cache_salt or None, f"lora {adapter_key}")
        return Prefix(root, prefix.tokens, prefix.spans)

    def grown(self, prefix: Prefix, request: Any) -> Prefix:
        """`prefix`, extended by the tokens of `request` after the prefix."""
        added = request.all_token_ids[self.num_known(prefix) :]
        if not added:
            return prefix
        return Prefix(prefix.root, prefix.tokens + encoded(added), prefix.spans)

    def num_known(self, prefix: Prefix) -> int:
        """The number of tokens of a request that `prefix` identifies."""
        return prefix.num_tokens + self.drafts.num_ahead

    def _roots_of(self, request: Any) -> Roots:
        """The roots of prefixes that begin after the same tokens as the prefix of `request`."""
        before = encoded(request.all_token_ids[: self.drafts.num_ahead])
        found = self._roots.get(before)
        if found is None:
            if len(self._roots) >= self.MAX_ROOTS:
                self._roots.clear()
            found = self._roots[before] = Roots(f"{self.namespace}/after {before.hex()}" if before else self.namespace)
        return found


def encoded(token_ids: list[int]) -> bytes:
    """vLLM's token ids as bytes. They are ints, so they are read faster than arbitrary objects. `OverflowError` or
    `InvalidArgument` if they are not token ids."""
    ids = array("i", token_ids)
    if len(ids) > MAX_WITHOUT_NUMPY:
        return encode_tokens(np.frombuffer(ids, INT32))
    if ids and min(ids) < 0:
        raise InvalidArgument("token_ids", "holds a negative id")
    return ids.tobytes()


def _unknown() -> str:
    """A unique key. It is so long that `Roots` does not cache its root."""
    return f"unknown {uuid.uuid4().hex}".ljust(Roots.MAX_KEY + 1)


def _spans(features: Any, num_ahead: int) -> tuple[KeySpan, ...]:
    """The multi-modal inputs of a prefix that begins after `num_ahead` tokens. If an input begins before the prefix,
    its digest includes the start of the input."""
    spans = []
    for feature in features:
        start = feature.mm_position.offset - num_ahead
        stop = start + feature.mm_position.length
        digest = f"{feature.modality}{min(start, 0) or ''}:{feature.identifier}".encode()
        spans.append(KeySpan(max(start, 0), max(stop, 1), digest))
    return tuple(sorted(spans))


# -- requests --------------------------------------------------------------------------------------------------------

_ASKING = (RequestState.MATCHED, RequestState.PINNED)


class Wait(enum.Enum):
    """Whether vLLM waits for a load of the request. vLLM has to learn the end of the load exactly once."""

    NONE = "none"
    LOAD = "load"
    TOLD = "told"
    """A report that the load fell short was sent. vLLM still counts the tokens as computed."""


class Fetching(enum.Enum):
    """Whether this try of the request may fetch more from below host memory."""

    OPEN = "open"
    OVER = "over"
    """No more fetches: fetched tokens count, and the rest is lost, finds no free blocks, or took too long."""


@attrs.define(eq=False)
class EngineRequest:
    engine: Any
    """vLLM's own request."""
    request_id: str
    keys: Keys
    prefix: Prefix
    """Its tokens when it was last admitted. They are kept, because a long list of ids should be read once."""
    record: HostCacheRequest | None = None
    """None before its first match, and after it was preempted or its load was lost."""
    num_known: int = 0
    """Tokens of vLLM's request that the ledger knows."""
    num_local: int = 0
    """Tokens that vLLM has in its own cache."""
    promised: int = 0
    """Tokens that vLLM counts as computed after the load."""
    wait: Wait = Wait.NONE
    max_hit_tokens: int | None = None
    """Set after a load was lost. vLLM asks again, and the same load would be lost again."""
    offered_stop: int = -1
    """Units offered so far; -1: none."""
    next_offer: int = 0
    """The number of computed tokens from which on a new block can be offered."""
    ask_at: float = -math.inf
    """Until this time the same question has the same answer, unless `ask_now` is called or a copy fails."""
    num_failed: int = 0
    """`Counts.num_failed` at the time of the answer."""

    use: AdapterUse | None = None
    """The weights of its LoRA adapter for all its KV. None: no adapter, or no worker has reported its weights yet."""
    is_late: bool = False
    """It already runs. It is admitted to the ledger when the workers report the weights of its adapter."""
    is_barred: bool = False
    """Its KV may be of several weights, so it is not cached."""
    has_to_be_compared: bool = False
    """Its first forward after a load has to compare the weights of its adapter with those for which the load was
    planned."""

    chosen: PrefixMatch | None = None
    """The match after the last decision of how much of it to load."""

    fetching: Fetching = Fetching.OPEN
    fetch: Fetch | None = None
    """A fetch in progress, or one that has ended since vLLM last asked about the request."""
    asked: Asked | None = None
    """The question to the remote store."""
    fetched: list[Job] = attrs.field(factory=list)
    """The copies of all fetches for this request since it began, was preempted, or lost its load."""
    fetch_until: float = math.inf
    """No fetch begins after this time."""
    num_tried: int = -1
    """Number of loads from below host memory that had ended at its last try to fetch. -1: no try yet."""
    num_fetched: int = -1
    """Tokens of its hit at the start of its last fetch that had anything to load."""

    hints: list[GivenHint] = attrs.field(factory=list)
    """The hints that it carries."""
    answers: dict[int, HintAnswer] = attrs.field(factory=dict)
    """The answers to its prefetches, by the place of the hint."""

    @property
    def is_asking(self) -> bool:
        return self.record is not None and self.record.state in _ASKING

    @property
    def has_asked_again(self) -> bool:
        """Whether it has asked again in the step that reports its preemption. vLLM also preempts between steps."""
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
        """Match the blocks that the host has after the first `num_local` tokens, with all tokens that the request has
        by now."""
        record = self._match(ledger, num_local)
        self.num_failed = num_failed
        # The match is pinned.
        self.ask_at = ledger.pending_until(record) if record.match.is_pending else math.inf
        return record.match

    def _match(self, ledger: HostCache, num_local: int) -> HostCacheRequest:
        self.num_local = num_local
        record = self.record
        if record is not None and self.is_asking:
            num_device_tokens = min(num_local, self.prefix.num_tokens - 1)
            ledger.match_again(record, num_device_tokens=num_device_tokens, wake=self.ask_now)
            return record
        if self.num_known:  # it was admitted before
            self.leave(ledger, "preempted")
        self.prefix = prefix = self.keys.grown(self.prefix, self.engine)
        self.num_known, self.offered_stop, self.next_offer = self.keys.num_known(prefix), -1, 0
        self.record = ledger.admit(
            prefix,
            request_id=self.request_id,
            reads_cache=not self.engine.skip_reading_prefix_cache,
            max_hit_tokens=self.max_hit_tokens,
            num_device_tokens=min(num_local, prefix.num_tokens - 1),
            wake=self.ask_now,
        )
        return self.record

    def ask_late(self, ledger: HostCache) -> None:
        """Admit it to the ledger although it already runs. It loads nothing."""
        self.is_late = False
        self.prefix = prefix = self.keys.grown(self.prefix, self.engine)
        self.num_known = self.keys.num_known(prefix)
        num_device_tokens = min(self.num_local, prefix.num_tokens - 1)
        self.record = ledger.admit(
            prefix, request_id=self.request_id, reads_cache=False, num_device_tokens=num_device_tokens
        )

    def bar(self, ledger: HostCache) -> None:
        """Cache none of its blocks from now on. If vLLM waits for its load, that load counts as failed."""
        self.is_barred, self.is_late = True, False
        if self.wait is Wait.NONE:
            self.leave(ledger, "adapter_changed")

    def ask_behind_fetch(self, ledger: HostCache, num_failed: int) -> PrefixMatch:
        """A fetch has ended. Match anew, because another request may be loading the fetched blocks by now."""
        kept = self.fetching, self.asked, self.fetch_until, self.num_tried, self.num_fetched
        fetched = self.fetched
        self.leave(ledger, "fetched")
        match = self.ask(ledger, self.num_local, num_failed)
        self.fetching, self.asked, self.fetch_until, self.num_tried, self.num_fetched = kept
        self.fetched = fetched
        return match

    def offers_up_to(self, stop: int, unit: int) -> None:
        """Its computed blocks up to block `stop` are offered in this step."""
        self.wait, self.offered_stop = Wait.NONE, stop
        self.next_offer = (stop + 1) * unit + self.keys.drafts.num_ahead

    def committed(self, num_computed: int) -> int:
        """The number of tokens of the prefix whose KV is final after vLLM has computed `num_computed` tokens of the
        request. Drafts that vLLM has not verified do not count."""
        record, num_ahead = self.record, self.keys.drafts.num_ahead
        assert record is not None, "a request without a record"
        found: int = min(num_computed, self.engine.num_tokens) - num_ahead
        return max(found, record.num_computed_tokens, record.engine_tokens)

    def leave(self, ledger: HostCache, reason: str) -> None:
        """Let the ledger forget the request. Copies in progress hold their blocks themselves."""
        record, self.record = self.record, None
        fetch, self.fetch, self.fetching = self.fetch, None, Fetching.OPEN
        self.asked, self.fetch_until, self.num_tried, self.num_fetched = None, math.inf, -1, -1
        self.has_to_be_compared, self.fetched = False, []
        if fetch is not None:
            ledger.transfers.cancel(fetch)
        if record is not None:
            ledger.release(record, reason)

    def brought(self, num_tokens: int, unit: int) -> Counter[Tier]:
        """For each tier, the number of loaded tokens that a fetch for this request has brought from that tier into host
        memory. The loaded tokens are the first `num_tokens` after the tokens in vLLM's own cache. If the tiers of
        several groups differ, the lowest tier counts."""
        start, stop = self.num_local, self.num_local + num_tokens
        tiers: dict[int, Tier] = {}
        for job in self.fetched:
            done = job.completion
            if done is not None:
                width = job.plan.num_blocks // (job.stop - job.start)
                is_whole = done.outcome is Outcome.LANDED
                for at in range(job.start, job.stop if is_whole else job.start + done.num_landed // width):
                    tiers[at] = max(job.plan.source, tiers.get(at, Tier.DEVICE))
        found = Counter[Tier]()
        for at, tier in tiers.items():
            found[tier] += max(0, min(stop, (at + 1) * unit) - max(start, at * unit))
        return found

    def new_tokens(self) -> list[int]:
        """The tokens that the ledger does not know yet."""
        found: list[int] = self.engine.all_token_ids[self.num_known :]
        self.num_known += len(found)
        return found
