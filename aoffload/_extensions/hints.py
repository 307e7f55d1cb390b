"""Hints: what a client says about the future of its prompt, such as the pause of an agent during a tool call.

Five verbs, each about one prompt (`_common/hints.py` has them as values). Each is answered ACCEPTED, CLIPPED or
REJECTED with a reason, and changes nothing if it is rejected.

    pin        a pin that ends after its time to live. No `with` block ends it
    prefetch   begins a fetch, if the tiers below the host have more of the prompt. Otherwise, in a `Ledger`, it begins
               a prefetch from the host to the device. After a fetch, the runtime begins that prefetch
    demote     ends the pins of the prompt, and moves its blocks down: in a `Ledger` from the device to the host. In a
               `HostCache` it frees the host blocks that the disk has, too
    returns    a prediction for learned eviction
    done       ends the pins of the prompt, and predicts for learned eviction that it does not return

Clients send hints, so three bounds hold however many they send: a pin lasts at most `max_hint_pin_s`, all pins of hints
together pin at most `max_hint_pinned_share` of each tier (and count in `max_pinned_share`), and there are at most
`MAX_PINS` of them. A pin that does not fit is clipped to the leading units that fit.

**A later hint changes an earlier one.** `pin`, `demote` and `done` end an earlier pin of the same prompt. They also end
the pin of a shorter prompt that this prompt continues, unless other cached prompts continue the shorter one, too. So an
agent that goes on with its conversation replaces its pin, and a system prompt that others share stays pinned.

**A pin grows.** When an engine says `pin` at the end of its request, the last stores of the request are still under
way. The pin keeps the blocks that these stores bring as soon as they have landed.

A hint is always about the prompt of its own request. The root of that prompt contains the salt of the request, so no
hint touches KV of another salt.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import attrs

from .._common.arguments import shown
from .._common.hints import (
    DemoteHint,
    DoneHint,
    GivenHint,
    Hint,
    HintReason,
    HintVerb,
    PinHint,
    PrefetchHint,
    ReturnsHint,
    is_hint,
)
from .._common.prefix import TOKEN_BYTES, Prefix
from .._common.tiers import BELOW, HIT_TIERS, Tier
from .._eviction.extension import Eviction
from .._kernel.base import check_time
from .._kernel.events import Event
from .._kernel.extension import LedgerExtension
from .._kernel.index import covered, find_hit, jobs_into
from .._kernel.plans import TransferPlan
from .._kernel.records import Job, Run
from .._kernel.tokens import TokenSequence
from ..errors import InvalidArgument, OutOfBlocks
from .pins import Pin, Pins, PinState
from .prefetch import DeviceTransfers

MAX_PINS = 1024
"""Maximum pins of hints at a time."""
MAX_TRIES = 4
"""How often a pin is shortened before it is rejected. Two tiers and a quota need three tries."""


class HintOutcome(enum.Enum):
    """Whether a hint was applied."""

    ACCEPTED = "accepted"
    CLIPPED = "clipped"
    """Accepted for a shorter time, or for fewer tokens."""
    REJECTED = "rejected"
    """The hint has changed nothing."""


@attrs.frozen
class HintAnswer:
    """The answer to one hint."""

    verb: HintVerb
    outcome: HintOutcome
    reason: HintReason = HintReason.NONE
    """NONE if the outcome is ACCEPTED."""
    num_tokens: int = 0
    """Number of tokens of the prompt, by the kind of hint. Pin: the leading tokens that are pinned, now or when stores
    under way land. Prefetch: the tokens after the hit that are brought up. Demotion: the tokens that leave their tier.
    `returns` and `done`: the cached tokens. A hint that only ended pins: the tokens that were pinned. Rejected hint:
    0."""
    action_id: str = ""
    """The id of the action that carried the hint; empty if it had none."""
    plans: tuple[TransferPlan, ...] = attrs.field(default=(), eq=False, repr=False)
    """The copies to launch. If a runtime gave the answer, it has launched them."""

    def as_dict(self) -> dict[str, Any]:
        """The answer as a dict for JSON, as a client gets it."""
        return {
            "action_id": self.action_id,
            "verb": self.verb.value,
            "outcome": self.outcome.value,
            "reason": self.reason.value,
            "num_tokens": self.num_tokens,
        }


@attrs.frozen
class HintAnswered(Event):
    """A hint was answered."""

    verb: HintVerb
    outcome: HintOutcome
    reason: HintReason
    num_tokens: int


AnswerKey = tuple[HintVerb, HintOutcome, HintReason]


@attrs.frozen
class HintStatistics:
    """The answers to hints so far, and the number of pins that hints hold."""

    num_pins: int
    answers: Mapping[AnswerKey, int]
    """Number of answers by verb, outcome and reason."""

    def __str__(self) -> str:
        by_outcome = Counter[HintOutcome]()
        for (_, outcome, _), number in self.answers.items():
            by_outcome[outcome] += number
        counted = ", ".join(f"{by_outcome[outcome]:,} {outcome.value}" for outcome in HintOutcome)
        return f"hints: {counted}; {self.num_pins:,} pin{'' if self.num_pins == 1 else 's'}"


@dataclass(slots=True, eq=False)
class _HintPin:
    """A pin that a hint asked for."""

    pin: Pin
    prompt: bytes
    """The digest of the whole units of the prompt, of which the pin may keep only the leading ones."""
    grows: bool
    """Whether stores under way bring more of its units."""


class Hints(LedgerExtension):
    """Acts on hints about prompts (`Ledger.hints`, `HostCache.hints`)."""

    def __init__(self) -> None:
        self._given: list[_HintPin] = []
        """Some may have ended by themselves."""
        self._answers = Counter[AnswerKey]()

    def on_attach(self, ledger: Any) -> None:
        self._ledger, self._cache, self._moves = ledger, ledger.cache, ledger.moves
        self.max_pin_s = ledger.config.max_hint_pin_s
        self.max_share = ledger.config.max_hint_pinned_share

    # -- the verbs ------------------------------------------------------------------------------------------------

    def apply(self, prefix: Prefix, hint: Hint, now: float, *, action_id: str = "") -> HintAnswer:
        """Act on `hint` about `prefix`. `now` is the time by the same clock as the times that the caller passes to
        `lapse`. Launch the `plans` of the answer. Call `lapse` in time (`next_lapse`), because it ends pins."""
        sequence = self._ledger.sequence_of(prefix)
        if not is_hint(hint):
            raise InvalidArgument("hint", f"must be a PinHint or another hint, got {shown(hint)}")
        now = check_time("now", now)
        self._given = [given for given in self._given if given.pin.state is PinState.HELD]
        match hint:
            case PinHint():
                answer = self._pin(prefix, sequence, hint, now)
            case PrefetchHint():
                answer = self._prefetch(prefix)
            case DemoteHint():
                answer = self._demote(prefix, sequence)
            case ReturnsHint():
                answer = self._returns(prefix, hint)
            case DoneHint():
                answer = self._done(prefix, sequence)
        return self.answered(attrs.evolve(answer, action_id=action_id))

    def apply_all(self, prefix: Prefix, given: Sequence[GivenHint], now: float) -> tuple[HintAnswer, ...]:
        """Call `apply` for each action of a payload (`read_hints`), in order. An action that is no hint is rejected
        with its reason."""
        return tuple(
            [
                self.reject(one) if one.hint is None else self.apply(prefix, one.hint, now, action_id=one.action_id)
                for one in given
            ]
        )

    def reject(self, given: GivenHint, reason: HintReason | None = None) -> HintAnswer:
        """Count and report an action that is not applied. If `reason` is None, the action's own reason counts."""
        reason = given.reason if reason is None else reason
        return self.answered(HintAnswer(given.verb, HintOutcome.REJECTED, reason, action_id=given.action_id))

    def answered(self, answer: HintAnswer) -> HintAnswer:
        """Count and report an answer, also one that the caller has made itself."""
        self._answers[answer.verb, answer.outcome, answer.reason] += 1
        self._moves.note(HintAnswered(answer.verb, answer.outcome, answer.reason, answer.num_tokens))
        self._ledger.end_call()
        return answer

    @property
    def pins(self) -> tuple[Pin, ...]:
        """The pins of hints that are held."""
        return tuple([given.pin for given in self._given if given.pin.state is PinState.HELD])

    def statistics(self) -> HintStatistics:
        """The counts of answers, and the pins of hints that are held."""
        return HintStatistics(len(self.pins), dict(self._answers))

    # -- pin ------------------------------------------------------------------------------------------------------

    def _pin(self, prefix: Prefix, sequence: TokenSequence, hint: PinHint, now: float) -> HintAnswer:
        verb, unit = HintVerb.PIN, self._cache.layout.unit_tokens
        reach = self._reach(sequence)
        if not reach:
            return HintAnswer(verb, HintOutcome.REJECTED, HintReason.NOTHING_CACHED)
        prompt = self._digest(sequence)
        earlier = self._earlier(sequence, prompt)
        if len(self._given) - len(earlier) >= MAX_PINS:
            return HintAnswer(verb, HintOutcome.REJECTED, HintReason.TOO_MANY_PINS)
        ttl_s = min(hint.ttl_s, self.max_pin_s)
        # The earlier pins still count, so the new pin gets at least their blocks.
        pin = self._hold(prefix, reach, now + ttl_s)
        if pin is None:
            return HintAnswer(verb, HintOutcome.REJECTED, HintReason.NO_ROOM)
        num_tokens = pin.sequence.num_tokens
        self._given.append(_HintPin(pin, prompt, pin.match.num_tokens < num_tokens))
        self._end(earlier)
        if num_tokens < reach * unit:
            return HintAnswer(verb, HintOutcome.CLIPPED, HintReason.NO_ROOM, num_tokens)
        if ttl_s < hint.ttl_s:
            return HintAnswer(verb, HintOutcome.CLIPPED, HintReason.TTL_LIMIT, num_tokens)
        return HintAnswer(verb, HintOutcome.ACCEPTED, num_tokens=num_tokens)

    def _reach(self, sequence: TokenSequence) -> int:
        """The unit up to which `sequence` is cached, or will be when the stores under way have landed."""
        cache, limit = self._cache, sequence.num_tokens // self._cache.layout.unit_tokens
        stop = 0
        if cache.layout.full.width:
            for run, agreed in cache.index.walk(sequence, limit):
                stop = min(max(covered(run.parts[BELOW])[1], run.parts[Tier.DEVICE].stop), agreed)
                if stop < run.stop:
                    break
        return max(stop, find_hit(cache.index, sequence, cache.layout, limit).stop)

    def _hold(self, prefix: Prefix, stop: int, expires_at: float) -> Pin | None:
        """Pin the units of `prefix` before `stop`, or as many leading ones as fit. None: none fits."""
        layout, pins = self._cache.layout, self._ledger.pins
        for _ in range(MAX_TRIES):
            if stop < 1:
                break
            shorter = first_units(prefix, stop * layout.unit_tokens)
            try:
                self._check_share(pins, self._ledger.sequence_of(shorter))
                found: Pin = pins.hold(shorter, expires_at=expires_at)
                return found
            except OutOfBlocks as error:  # over `max_hint_pinned_share`, `max_pinned_share` or a quota
                excess = max(1, error.num_needed - error.num_available)
                stop -= -(-excess // max(1, layout.full.width))
        return None

    def _check_share(self, pins: Pins, sequence: TokenSequence) -> None:
        pins.check_share(sequence, self.pins, self.max_share, "max_hint_pinned_share")

    def on_job_settled(self, job: Job) -> None:
        """Pin the blocks that a store has brought for a pin that grows."""
        if not any(given.grows for given in self._given) or job.plan.destination not in HIT_TIERS:
            return
        unit = self._cache.layout.unit_tokens
        for given in self._given:
            pin = given.pin
            if not given.grows or pin.state is not PinState.HELD or pin.sequence.root != job.run.root:
                continue
            if not job.start <= pin.match.num_tokens // unit < job.stop:
                continue  # it does not bring the next unit
            try:
                pins = self._ledger.pins
                self._check_share(pins, pin.sequence)
                pins.grow(pin)
                given.grows = pin.match.num_tokens < min(pin.sequence.num_tokens, self._reach(pin.sequence) * unit)
            except OutOfBlocks:
                given.grows = False

    # -- the pins that a later hint changes -----------------------------------------------------------------------

    def _digest(self, sequence: TokenSequence) -> bytes:
        num_units = sequence.num_tokens // self._cache.layout.unit_tokens
        return sequence.hash_on(sequence.root.hasher, 0, num_units).digest()

    def _earlier(self, sequence: TokenSequence, prompt: bytes) -> list[_HintPin]:
        """The pins of the same prompt, and those of shorter prompts that only this prompt continues."""
        found: list[_HintPin] = []
        path: list[tuple[Run, int]] | None = None
        limit = sequence.num_tokens // self._cache.layout.unit_tokens
        for given in self._given:
            pinned = given.pin.sequence
            if given.prompt == prompt:
                found.append(given)
            elif sequence.agrees(pinned, pinned.num_tokens):
                if path is None:
                    path = list(self._cache.index.walk(sequence, limit))
                if not _is_shared(path, pinned.num_tokens // self._cache.layout.unit_tokens):
                    found.append(given)
        return found

    def _end(self, given: Sequence[_HintPin]) -> int:
        """End these pins. Returns the number of tokens that the longest of them kept."""
        for one in given:
            self._given.remove(one)
            self._ledger.pins.release(one.pin)
        return max((one.pin.match.num_tokens for one in given), default=0)

    # -- prefetch and demote --------------------------------------------------------------------------------------

    def _prefetch(self, prefix: Prefix) -> HintAnswer:
        verb, ledger = HintVerb.PREFETCH, self._ledger
        match = ledger.lookup(prefix)
        if match.num_lower_tokens:
            transfer, num_tokens = ledger.fetches.fetch(prefix), match.num_lower_tokens
        elif match.num_host_tokens and isinstance(ledger.transfers, DeviceTransfers):
            transfer, num_tokens = ledger.transfers.prefetch(prefix), match.num_host_tokens
        else:
            reason = HintReason.ALREADY_THERE if match.num_tokens else HintReason.NOTHING_CACHED
            return HintAnswer(verb, HintOutcome.REJECTED, reason)
        if transfer.is_over:  # it has found no free blocks
            return HintAnswer(verb, HintOutcome.REJECTED, HintReason.NO_ROOM)
        return HintAnswer(verb, HintOutcome.ACCEPTED, num_tokens=num_tokens, plans=transfer.plans)

    def _demote(self, prefix: Prefix, sequence: TokenSequence) -> HintAnswer:
        num_pinned = self._end(self._earlier(sequence, self._digest(sequence)))
        transfers = self._ledger.transfers
        if isinstance(transfers, DeviceTransfers):
            answer = self._demote_device(transfers, prefix, sequence)
        else:
            answer = self._demote_host(sequence)
        if num_pinned and answer.outcome is HintOutcome.REJECTED:
            return HintAnswer(HintVerb.DEMOTE, HintOutcome.ACCEPTED, num_tokens=num_pinned)
        return answer

    def _demote_device(self, transfers: DeviceTransfers, prefix: Prefix, sequence: TokenSequence) -> HintAnswer:
        verb, unit = HintVerb.DEMOTE, self._cache.layout.unit_tokens
        num_tokens = sum(run.stop - run.start for run in transfers.leaving(sequence)) * unit
        if not num_tokens:
            limit = sequence.num_tokens // unit
            num_tokens = find_hit(self._cache.index, sequence, self._cache.layout, limit).device_stop * unit
            if not num_tokens:
                return HintAnswer(verb, HintOutcome.REJECTED, HintReason.NOTHING_CACHED)
            path = [run for run, _ in self._cache.index.walk(sequence, limit)]
            # At the end of a request, its own stores keep its blocks. The demotion waits for them.
            if not any(True for run in path for part in run.parts_in(BELOW) for _ in jobs_into(part)):
                return HintAnswer(verb, HintOutcome.REJECTED, HintReason.IN_USE)
        demotion = transfers.demote(prefix)
        if demotion.is_over and not demotion.num_blocks:  # the host cannot hold them
            return HintAnswer(verb, HintOutcome.REJECTED, HintReason.NO_ROOM)
        return HintAnswer(verb, HintOutcome.ACCEPTED, num_tokens=num_tokens, plans=demotion.plans)

    def _demote_host(self, sequence: TokenSequence) -> HintAnswer:
        """Free the host blocks at the end of `sequence` that a lower tier has and that nothing else uses."""
        cache, unit = self._cache, self._cache.layout.unit_tokens
        host = cache.tiers[Tier.HOST]
        lower = [tier.tier for tier in cache.tiers[Tier.HOST + 1 :] if not tier.is_absent]
        num_units, reason, is_last = 0, HintReason.NOTHING_CACHED, True
        for run, agreed in reversed(list(cache.index.walk(sequence, sequence.num_tokens // unit))):
            held = [part for part in run.parts_in(Tier.HOST) if part.blocks]
            if any(part.num_references or part.incoming is not None for part in run.parts_in(Tier.HOST)):
                reason = HintReason.IN_USE
                break
            if agreed < run.stop or run.num_after > (not is_last):
                reason = HintReason.IN_USE if held else reason
                break
            below = [[run.part(tier, part.component) for tier in lower] for part in held]
            if not all(
                any(copy.blocks and copy.first <= part.first and part.stop <= copy.stop for copy in copies)
                for part, copies in zip(held, below, strict=True)
            ):
                reason = HintReason.NO_LOWER_TIER
                break
            for part in held:
                host.trim(part, part.stop - part.first)
            num_units += (run.stop - run.start) * bool(held)
            is_last = False
        if num_units:
            return HintAnswer(HintVerb.DEMOTE, HintOutcome.ACCEPTED, num_tokens=num_units * unit)
        return HintAnswer(HintVerb.DEMOTE, HintOutcome.REJECTED, reason)

    # -- returns and done -----------------------------------------------------------------------------------------

    def _returns(self, prefix: Prefix, hint: ReturnsHint) -> HintAnswer:
        eviction = self._ledger.find(Eviction)
        if eviction is None:
            return HintAnswer(HintVerb.RETURNS, HintOutcome.REJECTED, HintReason.NOT_LEARNED)
        num_tokens = eviction.returns(prefix, in_s=hint.in_s, category=hint.category)
        if not num_tokens:
            return HintAnswer(HintVerb.RETURNS, HintOutcome.REJECTED, HintReason.NOTHING_CACHED)
        return HintAnswer(HintVerb.RETURNS, HintOutcome.ACCEPTED, num_tokens=num_tokens)

    def _done(self, prefix: Prefix, sequence: TokenSequence) -> HintAnswer:
        num_tokens = self._end(self._earlier(sequence, self._digest(sequence)))
        eviction = self._ledger.find(Eviction)
        if eviction is not None:
            num_tokens = max(num_tokens, eviction.done(prefix))
        if num_tokens:
            return HintAnswer(HintVerb.DONE, HintOutcome.ACCEPTED, num_tokens=num_tokens)
        reason = HintReason.NOT_LEARNED if eviction is None else HintReason.NOTHING_CACHED
        return HintAnswer(HintVerb.DONE, HintOutcome.REJECTED, reason)


# -- prefixes --------------------------------------------------------------------------------------------------------


def first_units(prefix: Prefix, num_tokens: int) -> Prefix:
    """The first `num_tokens` tokens of `prefix`, with the spans that touch them."""
    spans = tuple([span for span in prefix.spans if span.start < num_tokens])
    return Prefix(prefix.root, prefix.tokens[: num_tokens * TOKEN_BYTES], spans)


def _is_shared(path: Sequence[tuple[Run, int]], stop: int) -> bool:
    """Whether cached prompts other than that of `path` continue its first `stop` units."""
    for place, (run, agreed) in enumerate(path, 1):
        if run.stop >= stop and (agreed < run.stop or run.num_after > (place < len(path))):
            return True
    return False
