"""The hints of clients through the synchronous API: their answers, their bounds, and what they must not touch."""

from __future__ import annotations

import math
from typing import Any

import pytest
from disk_driving import HUGE, Disk, disk_of
from driving import ROOT, Driven, prompt
from engine_driving import EngineDriven

from aoffload import ConfigError, InvalidArgument, KVCacheGroup, SlidingWindow, Tier
from aoffload._extensions import hints as hints_module
from aoffload.ledger import (
    DemoteHint,
    DoneHint,
    Event,
    HintAnswer,
    HintAnswered,
    HintOutcome,
    HintReason,
    HintVerb,
    Outcome,
    PinHint,
    PinState,
    PrefetchHint,
    Prefix,
    ReturnsHint,
    Root,
    read_hints,
)

A, B, C = (prompt(name, 17) for name in (1, 2, 3))
"""Four blocks and one more token each."""
ACCEPTED, CLIPPED, REJECTED = HintOutcome
NONE = HintReason.NONE
GROUPS = {
    "full": [KVCacheGroup("full", block_size=4)],
    "full and sliding": [
        KVCacheGroup("full", block_size=4),
        KVCacheGroup("sliding", attention=SlidingWindow(6), block_size=4),
    ],
    "sliding alone": [KVCacheGroup("sliding", attention=SlidingWindow(6), block_size=4)],
}
each_layout = pytest.mark.parametrize("groups", GROUPS.values(), ids=GROUPS.keys())


def give(driven: Driven | EngineDriven, tokens: list[int], hint: Any, now: float = 0.0, root: Root = ROOT) -> Any:
    """The answer, as outcome, reason and tokens; the plans are not launched."""
    answer = driven.ledger.hints.apply(Prefix.of(root, tokens), hint, now)
    driven.ledger.check_integrity()
    return answer.outcome, answer.reason, answer.num_tokens


def storm(driven: Driven, num_prompts: int = 12) -> None:
    for name in range(100, 100 + num_prompts):
        driven.serve(prompt(name, 9))


# -- pin ----------------------------------------------------------------------------------------------------------


@each_layout
def test_a_pin_lasts_until_its_time_is_over(groups: Any) -> None:
    """No block has to be left: what comes and goes evicts nothing of it, and after its time nothing is kept."""
    driven = Driven(40, 40, groups=groups)
    driven.serve(A)
    assert give(driven, A, PinHint(10), now=5.0) == (ACCEPTED, NONE, 16)
    assert driven.ledger.next_lapse == 15.0
    storm(driven, 40)
    driven.evict_device()
    assert sum(driven.hit(A)) == 16
    driven.ledger.lapse(14.9)
    assert max(driven.num_pinned()) > 0
    driven.ledger.lapse(15.0)
    assert driven.num_pinned() == (0, 0) and driven.ledger.hints.pins == ()


def test_a_pin_is_clipped_to_the_longest_time() -> None:
    """That of the configuration. A shorter time is kept as it is."""
    driven = Driven(40, 40, max_hint_pin_s=60)
    driven.serve(A)
    assert give(driven, A, PinHint(1e9)) == (CLIPPED, HintReason.TTL_LIMIT, 16)
    assert driven.ledger.next_lapse == 60
    assert give(driven, A, PinHint(59)) == (ACCEPTED, NONE, 16)
    assert driven.ledger.next_lapse == 59


@pytest.mark.parametrize("share", [0.0, 0.05, 0.1, 0.25])
@each_layout
def test_a_pin_is_clipped_to_what_fits(groups: Any, share: float) -> None:
    """The leading units of the prompt, so that no tier has more of its blocks pinned by hints than their share."""
    driven = Driven(40, 40, groups=groups, max_hint_pinned_share=share)
    for tokens in (A, B, C):
        driven.serve(tokens)
        outcome, reason, num_tokens = give(driven, tokens, PinHint(10))
        assert max(driven.num_pinned()) <= 40 * share
        if outcome is REJECTED:
            assert (reason, num_tokens) == (HintReason.NO_ROOM, 0)
        else:
            assert (reason, num_tokens == 16) in ((NONE, True), (HintReason.NO_ROOM, False))
            assert num_tokens > 0
    if len(groups) == 1 and groups[0].name == "full":
        assert driven.num_pinned()[0] == int(40 * share)


def test_pins_of_hints_leave_room_for_those_of_the_program() -> None:
    """Hints fill their own share, and what the program pins counts in neither but that of all pins."""
    driven = Driven(40, 40, max_hint_pinned_share=0.1, max_pinned_share=0.3)
    for tokens in (A, B, C):
        driven.serve(tokens)
    assert give(driven, A, PinHint(10)) == (ACCEPTED, NONE, 16)
    assert give(driven, B, PinHint(10)) == (REJECTED, HintReason.NO_ROOM, 0)
    driven.ledger.pins.hold(driven.prefix(B))
    driven.ledger.pins.hold(driven.prefix(C))
    assert driven.num_pinned() == (12, 12)
    give(driven, A, DoneHint())
    fourth = prompt(4, 17)
    driven.serve(fourth)
    driven.ledger.pins.hold(driven.prefix(fourth))
    assert give(driven, A, PinHint(10)) == (REJECTED, HintReason.NO_ROOM, 0)


def test_there_is_a_bound_on_the_number_of_pins(monkeypatch: pytest.MonkeyPatch) -> None:
    """One more is rejected; one that replaces another is not; one that has ended makes room."""
    monkeypatch.setattr(hints_module, "MAX_PINS", 2)
    driven = Driven(40, 40)
    for tokens in (A, B, C):
        driven.serve(tokens)
    assert [give(driven, tokens, PinHint(10))[0] for tokens in (A, B)] == [ACCEPTED, ACCEPTED]
    assert give(driven, C, PinHint(10)) == (REJECTED, HintReason.TOO_MANY_PINS, 0)
    assert give(driven, B, PinHint(5))[0] is ACCEPTED
    driven.ledger.lapse(6.0)
    assert give(driven, C, PinHint(10))[0] is ACCEPTED


def test_nothing_cached_is_nothing_pinned() -> None:
    """A prompt that is not there, or shorter than a block."""
    driven = Driven(40, 40)
    driven.serve(A)
    for tokens in (B, A[:3]):
        assert give(driven, tokens, PinHint(10)) == (REJECTED, HintReason.NOTHING_CACHED, 0)
    assert driven.num_pinned() == (0, 0)


def test_a_later_pin_replaces_an_earlier_one() -> None:
    """Of the same prompt, with a shorter time, too; and of the conversation that the prompt continues."""
    driven = Driven(40, 40)
    driven.serve(A)
    give(driven, A, PinHint(100))
    give(driven, A, PinHint(10))
    assert (len(driven.ledger.hints.pins), driven.ledger.next_lapse) == (1, 10)
    longer = [*A, *prompt(7, 8)]
    driven.serve(longer)
    give(driven, longer, PinHint(5))
    assert [pin.match.num_tokens for pin in driven.ledger.hints.pins] == [24]
    assert driven.ledger.next_lapse == 5


@pytest.mark.parametrize("hint", [PinHint(5), DoneHint(), DemoteHint()])
def test_a_pin_of_a_shared_prefix_stays(hint: Any) -> None:
    """A prompt that others continue, too, such as a system prompt, is not that of one conversation: hints of one of
    them leave its pin alone, and its own hints end it."""
    driven = Driven(40, 40)
    system = A[:8]
    driven.serve(A)
    driven.serve([*system, *prompt(7, 9)])
    give(driven, system, PinHint(100))
    give(driven, A, hint)
    assert 100 in [pin.expires_at for pin in driven.ledger.hints.pins]
    give(driven, system, DoneHint())
    assert 100 not in [pin.expires_at for pin in driven.ledger.hints.pins]


def test_hints_of_a_prompt_leave_longer_and_other_prompts_alone() -> None:
    """Those of its beginning, and of prompts that branch off."""
    driven = Driven(40, 40)
    driven.serve(A)
    give(driven, A, PinHint(100))
    for tokens in (A[:8], [*A[:8], *prompt(7, 9)], B):
        for hint in (DoneHint(), DemoteHint(), PrefetchHint(), PinHint(1)):
            give(driven, tokens, hint)
    assert 100 in [pin.expires_at for pin in driven.ledger.hints.pins]


def test_no_hint_touches_another_salt() -> None:
    """The same tokens under another salt are another prompt, for every verb."""
    driven = Driven(40, 40, eviction="learned")
    mine, theirs = Root("test", "tenant-a"), Root("test", "tenant-b")
    driven.serve(A, root=theirs)
    give(driven, A, PinHint(100), root=theirs)
    before = driven.num_pinned(), driven.hit(A, theirs)
    for hint in (PinHint(1), PrefetchHint(), DemoteHint(), ReturnsHint(1), DoneHint()):
        outcome, reason, num_tokens = give(driven, A, hint, root=mine)
        assert (outcome, reason, num_tokens) == (REJECTED, HintReason.NOTHING_CACHED, 0)
    assert (driven.num_pinned(), driven.hit(A, theirs)) == before
    assert [pin.state for pin in driven.ledger.hints.pins] == [PinState.HELD]


def test_a_pin_grows_with_the_stores_under_way() -> None:
    """At the end of a request of an engine nothing of it has landed in the host yet: the pin keeps what lands."""
    driven = EngineDriven(64)
    request, tables = driven.computed(A)
    plans = driven.offer(request, 17, tables, is_last=True)
    driven.release(request)
    assert give(driven, A, PinHint(10)) == (ACCEPTED, NONE, 16)
    assert driven.num_pinned() == 4, "the destinations of the stores"
    driven.land(plans)
    assert driven.num_pinned() == 4
    (pin,) = driven.ledger.hints.pins
    assert pin.match.num_tokens == 16
    driven.ledger.lapse(10.0)
    driven.assert_at_rest()


def test_a_pin_grows_no_further_than_its_share() -> None:
    """A store that lands later is not pinned where there is no room for it; and one that fails is not waited for."""
    driven = EngineDriven(16)
    request, tables = driven.computed(A)
    plans = driven.offer(request, 17, tables, is_last=True)
    driven.release(request)
    give(driven, A, PinHint(10))
    driven.serve(B)
    give(driven, B, PinHint(10))
    driven.land(plans)
    assert driven.num_pinned() == 4
    driven.ledger.lapse(10.0)
    driven.assert_at_rest()
    other, tables = driven.computed(C)
    (plan,) = driven.offer(other, 17, tables, is_last=True)
    driven.release(other)
    assert give(driven, C, PinHint(10))[0] is ACCEPTED
    driven.launch([plan])
    driven.end(plan, Outcome.FAILED, 2)
    assert driven.num_pinned() == 2
    driven.ledger.lapse(20.0)
    driven.assert_at_rest()


@pytest.mark.parametrize("end", ["reset", "yield", "drop"])
def test_a_pin_that_has_ended_by_itself_is_forgotten(end: str) -> None:
    """A reset, a request that needs its blocks and the program's own `drop` end it as any other."""
    driven = Driven(8, 8, max_hint_pinned_share=0.5)
    driven.serve(A)
    give(driven, A, PinHint(10))
    if end == "reset":
        driven.ledger.reset()
    elif end == "drop":
        driven.ledger.pins.drop()
    else:
        request = driven.admit(prompt(9, 32))
        driven.ledger.queue_allocation(request)
        driven.release(request)
    assert driven.ledger.hints.pins == () and driven.num_pinned() == (0, 0)
    assert driven.ledger.statistics().hints.num_pins == 0
    assert give(driven, A, DoneHint()) == (REJECTED, HintReason.NOT_LEARNED, 0)


# -- prefetch and demote ------------------------------------------------------------------------------------------


def apply(driven: Driven | EngineDriven, tokens: list[int], hint: Any) -> HintAnswer:
    """As `give`, and the copies land."""
    answer = driven.ledger.hints.apply(Prefix.of(ROOT, tokens), hint, 0.0)
    driven.land(answer.plans)
    driven.ledger.check_integrity()
    return answer


def test_a_prefetch_brings_a_prompt_onto_the_device() -> None:
    """From the host; what is there already, or nowhere, is rejected, and so is what has no room."""
    driven = Driven(16)
    assert apply(driven, A, PrefetchHint()).reason is HintReason.NOTHING_CACHED
    driven.on_host_only(A)
    request = driven.allocated(prompt(9, 64))
    assert apply(driven, A, PrefetchHint()).reason is HintReason.NO_ROOM
    driven.release(request)
    answer = apply(driven, A, PrefetchHint())
    assert (answer.outcome, answer.num_tokens, driven.hit(A)) == (ACCEPTED, 16, (16, 0))
    assert apply(driven, A, PrefetchHint()).reason is HintReason.ALREADY_THERE


def test_a_prefetch_brings_up_what_only_the_disk_has() -> None:
    """Into the host first; the second one onto the device."""
    disk = Disk()
    disk.on_disk_only(A)
    assert apply(disk, A, PrefetchHint()).num_tokens == 16
    assert disk.hit(A) == (0, 16)
    assert apply(disk, A, PrefetchHint()).num_tokens == 16
    assert disk.hit(A) == (16, 0)


def test_a_demotion_ends_pins_and_frees_the_device() -> None:
    """Of the prompt alone: blocks that others use stay, and are the reason."""
    driven = Driven(16, 32)
    driven.serve(A)
    give(driven, A, PinHint(10))
    answer = apply(driven, A, DemoteHint())
    assert (answer.outcome, driven.hit(A), driven.num_pinned()) == (ACCEPTED, (0, 16), (0, 0))
    assert apply(driven, A, DemoteHint()).reason is HintReason.NOTHING_CACHED
    apply(driven, A, PrefetchHint())
    held = driven.ledger.pins.hold(driven.prefix(A))
    assert apply(driven, A, DemoteHint()).reason is HintReason.IN_USE
    assert driven.hit(A) == (16, 0)
    driven.ledger.pins.release(held)


def test_a_demotion_of_a_pin_in_the_host_is_the_end_of_the_pin() -> None:
    """There is nothing to move, and that the pin is over was not in vain."""
    driven = Driven(16)
    driven.on_host_only(A)
    give(driven, A, PinHint(10))
    assert give(driven, A, DemoteHint()) == (ACCEPTED, NONE, 16)
    assert driven.num_pinned() == (0, 0)


def with_disk(**config: Any) -> EngineDriven:
    found = EngineDriven(32, disk=disk_of(64), namespace="test", max_fetch_share=1.0, **config)
    found.memory[Tier.DISK] = {}
    return found


def flushed(driven: EngineDriven) -> None:
    driven.land(driven.ledger.disk.plan_flush(HUGE))


def test_host_blocks_are_freed_where_the_disk_has_them() -> None:
    """For an engine with blocks of its own; a fetch brings them back. Without a copy below, they stay."""
    driven = with_disk()
    driven.serve(A)
    assert apply(driven, A, DemoteHint()).reason is HintReason.NO_LOWER_TIER
    assert apply(driven, B, DemoteHint()).reason is HintReason.NOTHING_CACHED
    flushed(driven)
    answer = apply(driven, A, DemoteHint())
    assert (answer.outcome, answer.num_tokens) == (ACCEPTED, 16)
    assert (driven.hit(A), driven.ledger.statistics().host.num_cached) == (0, 0)
    assert driven.ledger.lookup(Prefix.of(ROOT, A)).num_lower_tokens == 16
    assert apply(driven, A, DemoteHint()).reason is HintReason.NOTHING_CACHED
    assert apply(driven, A, PrefetchHint()).num_tokens == 16
    assert driven.hit(A) == 16
    assert apply(driven, A, PrefetchHint()).reason is HintReason.ALREADY_THERE
    driven.assert_at_rest()


def test_host_blocks_that_others_use_stay() -> None:
    """Those of a request, of a pin of the program, and of a prefix that another cached prompt continues."""
    driven = with_disk()
    driven.serve(A)
    driven.serve([*A[:8], *prompt(7, 9)])
    flushed(driven)
    request = driven.admit(A)
    assert apply(driven, A, DemoteHint()).reason is HintReason.IN_USE
    driven.release(request, "looked")
    held = driven.ledger.pins.hold(Prefix.of(ROOT, A))
    assert apply(driven, A, DemoteHint()).reason is HintReason.IN_USE
    driven.ledger.pins.release(held)
    assert apply(driven, A, DemoteHint()).num_tokens == 8
    assert driven.hit(A) == 8
    assert apply(driven, A[:8], DemoteHint()).reason is HintReason.IN_USE
    driven.assert_at_rest()


def test_without_a_disk_an_engine_demotes_nothing() -> None:
    """Freeing the host blocks would lose them."""
    driven = EngineDriven(32)
    driven.serve(A)
    assert apply(driven, A, DemoteHint()).reason is HintReason.NO_LOWER_TIER
    assert driven.hit(A) == 16


# -- returns and done ---------------------------------------------------------------------------------------------


def test_returns_needs_eviction_that_learns() -> None:
    """Without it the reason says so, and nothing is raised."""
    driven = Driven(40, 40)
    driven.serve(A)
    assert give(driven, A, ReturnsHint(5)) == (REJECTED, HintReason.NOT_LEARNED, 0)
    assert give(driven, A, DoneHint()) == (REJECTED, HintReason.NOT_LEARNED, 0)
    with pytest.raises(ConfigError, match="eviction"):
        _ = driven.ledger.eviction


def test_returns_is_a_prediction_for_learned_eviction() -> None:
    """As `eviction.returns` and `eviction.done` are."""
    driven = Driven(40, 40, eviction="learned")
    driven.serve(A)
    assert give(driven, A, ReturnsHint(5, "shell"), now=2.0) == (ACCEPTED, NONE, 16)
    (found,) = driven.ledger.statistics().eviction.buckets
    assert (found.category, found.num_tokens) == ("shell", 16)
    assert give(driven, A, DoneHint()) == (ACCEPTED, NONE, 16)
    (found,) = driven.ledger.statistics().eviction.buckets
    assert found.predicted_s == math.inf
    assert give(driven, B, ReturnsHint()) == (REJECTED, HintReason.NOTHING_CACHED, 0)


def test_done_ends_the_pins_of_a_prompt() -> None:
    """Also those of the shorter prompts of the same conversation. The second time there is nothing left."""
    driven = Driven(40, 40)
    driven.serve(A)
    give(driven, A, PinHint(100))
    longer = [*A, *prompt(7, 8)]
    driven.serve(longer)
    assert give(driven, longer, DoneHint()) == (ACCEPTED, NONE, 16)
    assert driven.num_pinned() == (0, 0)
    assert give(driven, longer, DoneHint()) == (REJECTED, HintReason.NOT_LEARNED, 0)


# -- answers ------------------------------------------------------------------------------------------------------


class Heard:
    def __init__(self) -> None:
        self.answers: list[tuple[Any, ...]] = []

    def observe(self, event: Event) -> None:
        if isinstance(event, HintAnswered):
            self.answers.append((event.verb, event.outcome, event.reason, event.num_tokens))


def test_each_answer_is_reported_and_counted() -> None:
    """As an event, in the statistics, in `explain`; those of a payload with the id of their action."""
    heard = Heard()
    driven = Driven(40, 40, observer=heard)
    assert driven.ledger.statistics().hints is None and "hints" not in driven.ledger.explain()
    driven.serve(A)
    payload = [
        {"action_type": "pin", "action_id": "one", "payload": {"ttl_s": 10}},
        {"action_type": "pin", "action_id": "two", "payload": {"ttl_s": -1}},
        {"action_type": "fly"},
    ]
    answers = driven.ledger.hints.apply_all(driven.prefix(A), read_hints(payload), 0.0)
    assert [answer.as_dict() for answer in answers] == [
        {"action_id": "one", "verb": "pin", "outcome": "accepted", "reason": "", "num_tokens": 16},
        {"action_id": "two", "verb": "pin", "outcome": "rejected", "reason": "malformed", "num_tokens": 0},
        {"action_id": "", "verb": "unknown", "outcome": "rejected", "reason": "unknown", "num_tokens": 0},
    ]
    assert heard.answers == [(a.verb, a.outcome, a.reason, a.num_tokens) for a in answers]
    found = driven.ledger.statistics().hints
    assert found is not None and found.num_pins == 1
    assert found.answers[HintVerb.PIN, REJECTED, HintReason.MALFORMED] == 1
    assert "hints: 1 accepted, 0 clipped, 2 rejected; 1 pin" in driven.ledger.explain()


@pytest.mark.parametrize("bad", [None, "pin", PinHint, {"ttl_s": 1}, HintVerb.PIN])
def test_a_program_is_told_what_is_no_hint(bad: Any) -> None:
    """By name; nothing is counted."""
    driven = Driven(40, 40)
    with pytest.raises(InvalidArgument, match="hint"):
        driven.ledger.hints.apply(driven.prefix(A), bad, 0.0)
    with pytest.raises(InvalidArgument, match="prefix"):
        driven.ledger.hints.apply(A, DoneHint(), 0.0)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="now"):
        driven.ledger.hints.apply(driven.prefix(A), DoneHint(), "soon")  # type: ignore[arg-type]
    assert not driven.ledger.hints.statistics().answers


def test_a_demotion_waits_for_the_stores_of_its_own_request() -> None:
    """At the end of a request they still keep its blocks: these are freed as soon as the stores have landed."""
    driven = Driven(16, 32)
    request = driven.running(A)
    stores = [*driven.commit(request), *driven.release(request)]
    answer = driven.ledger.hints.apply(driven.prefix(A), DemoteHint(), 0.0)
    assert (answer.outcome, answer.num_tokens, answer.plans) == (ACCEPTED, 16, ())
    assert driven.hit(A) == (16, 0)
    driven.land(stores)
    assert (driven.hit(A), driven.num_pinned()) == ((0, 16), (0, 0))
    other = driven.running(B)
    stores = driven.commit(other)
    driven.ledger.hints.apply(driven.prefix(B), DemoteHint(), 0.0)
    driven.land(stores)
    assert driven.hit(B)[0] == 16, "the request still uses them"
    driven.land(driven.release(other))
