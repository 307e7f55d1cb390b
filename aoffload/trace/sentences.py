"""One event in plain words."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from .._kernel.plans import Answer
from .._kernel.states import Outcome
from .._transfer.breaker import at_node
from .events import Event
from .timelines import link_of
from .wording import counted, duration, plain, size

_UNSAID = {"event", "level", "timestamp", "request_id"}
REASONS = {
    "closed_early": "its block was left without a commit",
    "cancelled": "its task was cancelled",
    "deadline": "its deadline passed",
    "abandoned": "nobody left its block; the garbage collector found it",
    "prefix_invalidated": "another request took back what it had matched",
    "runtime_closed": "the runtime was closed under it",
}
"""Explanations of the reasons in docs/howto/reading-a-trace.md. Other reasons are shown as they are."""
SKIPPED = {
    "host_full": "host memory was full",
    "in_flight": "too much was under way",
    "custom_full": "the custom tier was full",
    "disk_full": "the disk was full",
    "evicted": "the host evicts what live requests store",
    "refused": "the tenant's quota, or an extension, allowed no more",
}

_STORAGE = {"disk": "the disk", "remote": "the remote store"}
_USES = {"ask": "questions", "load": "loads", "store": "stores"}
_TELLING = ("source", "destination", "num_jobs", "num_quarantined", "num_quarantined_jobs", "reason", "error")
"""Fields of alarms that have no words of their own."""
_LIMITS = {"ceiling": "its ceiling", "daily_writes": "its daily writes"}
_ORDERS = {"lru": "LRU", "learned": "the learned order"}


def sentence(event: Event, *, is_engine_owned: bool = False) -> str:
    """The description of `event`. `is_engine_owned`: whether an engine owns the device blocks. May raise
    `FieldError`."""
    if is_engine_owned and event.name == "request_pinned":
        return "pinned what was found; its program loads next"
    tell = _SENTENCES.get(event.name)
    return tell(event) if tell is not None else _note(event)


def note_of(event: Event) -> str:
    """The description of an event that concerns more than one request."""
    tell = _SENTENCES.get(event.name)
    if tell is not None:
        name = event.fields.get("request_id")
        return f"{plain(name)} {tell(event)}" if type(name) is str and name else tell(event)
    return plain(f"{event.name.replace('_', ' ')}{_about(event)}")


def _about(event: Event) -> str:
    """The fields of an event, without those that are bound to its logger."""
    named = [(name, event.fields[name]) for name in _TELLING if name in event.fields]
    return f": {', '.join(f'{name} {value}' for name, value in named)}" if named else ""


def _matched(event: Event) -> str:
    found = _match(event)
    if event.fields.get("answer") == Answer.PENDING.value:
        found = f"{event.count('num_device_tokens'):,} on the device; another request loads what follows: asks again"
    return f"looked up {counted(event.count('num_tokens'), 'prompt token')}: {found}"


def _match(event: Event) -> str:
    device, host = event.count("num_device_tokens"), event.count("num_host_tokens")
    disk = event.count("num_disk_tokens") if "num_disk_tokens" in event.fields else 0
    if not (device or host or disk):
        return "nothing of them is cached"
    return f"{device:,} on the device, {host:,} in host memory{f', {disk:,} on the disk' if disk else ''}"


def _allocated(event: Event) -> str:
    num_blocks = event.count("num_blocks")
    given = counted(num_blocks, "block") if num_blocks else "blocks of its engine"
    return f"was given {given}; matched in that step: {_match(event)}"


def _running(event: Event) -> str:
    ready = event.count("num_ready_tokens")
    start = f"computes from token {ready:,} on" if ready else "computes from its first token on"
    lost = event.count("num_lost_tokens") if "num_lost_tokens" in event.fields else 0
    return f"{start}: its load has not brought {counted(lost, 'token')}" if lost else start


def _done(event: Event) -> str:
    return f"done; committed as far as token {event.count('num_computed_tokens'):,}"


def _aborted(event: Event) -> str:
    reason = event.text("reason")
    known = f" ({REASONS[reason]})" if reason in REASONS else ""
    return f"aborted while {plain(event.text('previous'))}: {plain(reason)}{known}"


def _cancelled(event: Event) -> str:
    reason = event.text("reason")
    known = f" ({REASONS[reason]})" if reason in REASONS else ""
    return f"cancelled: {plain(reason)}{known}; it is over once its task has left its block"


def _job(event: Event) -> str:
    return f"job {event.count('job_id')}, {link_of(event).of(counted(event.count('num_blocks'), 'block'))}"


def _launched(event: Event) -> str:
    return f"{_job(event)}: launched"


def _completed(event: Event) -> str:
    seconds, num_bytes = event.seconds("duration_s"), event.count("num_bytes")
    rate = f", {size(num_bytes / seconds)}/s" if seconds else ""
    return f"{_job(event)}: landed, {size(num_bytes)} in {duration(seconds)}{rate}"


def _failed(event: Event) -> str:
    if event.fields.get("outcome") == Outcome.REFUSED.value:
        return f"{_job(event)}: not begun, {plain(str(event.fields.get('error') or 'the tier is suspended'))}"
    return f"{_job(event)}: FAILED, {plain(str(event.fields.get('error') or 'no error given'))}"


def _discarded(event: Event) -> str:
    return f"{_job(event)}: given up before it was launched"


def _skipped(event: Event) -> str:
    reason = event.text("reason")
    return f"a store of {counted(event.count('num_blocks'), 'block')} was skipped: {plain(SKIPPED.get(reason, reason))}"


def _prefetch(event: Event) -> str:
    words = {"moving": "begins to fetch", "done": "has fetched", "cancelled": "was given up;"}[event.meaning.state]
    blocks, tokens = counted(event.count("num_blocks"), "block"), counted(event.count("num_tokens"), "token")
    return f"{words} {blocks}; {tokens} on the device"


def _fetch(event: Event) -> str:
    words = {"moving": "waits for {}", "done": "{} is over", "cancelled": "no longer waits for {}"}
    about = f"{plain(event.text('request_id'))} of {counted(event.count('num_blocks'), 'block')}"
    return f"{words[event.meaning.state].format(about)} from below host memory"


def _declined(event: Event) -> str:
    tokens, seconds = counted(event.count("num_tokens"), "token"), duration(event.seconds("fetch_s"))
    return f"computes {tokens} rather than wait about {seconds} for their fetch"


def _declined_load(event: Event) -> str:
    load, compute = (duration(event.seconds(name)) for name in ("load_s", "compute_s"))
    tokens = counted(event.count("num_tokens"), "token")
    return f"computes {tokens} of a host hit: its first token comes in about {compute}, and with the load in {load}"


def _skipped_fetch(event: Event) -> str:
    return f"fetches nothing from {_STORAGE.get(event.text('tier'), 'a tier')}, which is suspended after failures"


def storage(event: Event) -> str:
    """A message for a link that is disabled for a while, or enabled again."""
    where = at_node(event.text("node"), str(event.fields.get("error")))
    return plain(f"{_USES.get(event.text('use'), 'calls')} of {_STORAGE.get(event.text('tier'), 'a tier')}{where}")


def _left_alone(event: Event) -> str:
    times, for_s = counted(event.count("num_failures"), "time"), duration(event.seconds("for_s"))
    refused = event.count("num_refused")
    since = f", {counted(refused, 'job')} refused so far" if refused else ""
    failed = f"failed {times} in a row, suspended for {for_s}{since}: {event.fields.get('error') or 'no error given'}"
    return plain(f"{storage(event)}: {failed}")


def _back(event: Event) -> str:
    refused = counted(event.count("num_refused"), "job")
    return f"{storage(event)}: succeed again after {duration(event.seconds('after_s'))}, {refused} refused meanwhile"


def ruling(event: Event) -> str:
    """The eviction order and its tier."""
    order, tier = event.text("order"), event.text("tier")
    return plain(f"{tier} evicts by {_ORDERS.get(order, order)}")


def _switched(event: Event) -> str:
    learned, lru = event.seconds("learned_hits"), event.seconds("lru_hits")
    hits = f"{learned:,.0f} by the learned order, {lru:,.0f} by LRU"
    return f"{ruling(event)} from now on: recent hits of the guard's caches: {hits}"


def _weights(event: Event) -> str:
    old, new = (repr(plain(event.text(name))) if event.text(name) else "none" for name in ("old", "new"))
    return f"the weights' epoch is {new} from now on, it was {old}: KV of other epochs is not found"


def quota(event: Event) -> str:
    """The account, the tier, and the quota that cuts stores there."""
    about = f"account {event.text('account')}, {event.text('tier')}"
    if event.meaning.state == "left":
        return plain(f"{about}: stores are whole again")
    limit = event.text("limit")
    return plain(f"{about}: stores are cut by {_LIMITS.get(limit, limit)}")


def answer_to_hint(event: Event) -> str:
    """The answer to a hint of a client, without its number of tokens."""
    reason = event.text("reason")
    return plain(f"{event.text('verb')} {event.text('outcome')}{f', {reason}' if reason else ''}")


def _hint_answered(event: Event) -> str:
    return f"a client's hint: {answer_to_hint(event)} ({counted(event.count('num_tokens'), 'token')})"


def _demotion(event: Event) -> str:
    words = {"moving": "begins to send blocks away;", "done": "is over;", "cancelled": "was given up;"}
    return f"{words[event.meaning.state]} {counted(event.count('num_blocks'), 'device block')} given back"


def _early(event: Event) -> str:
    words = {
        "speculative": "starts to compute while {} are still being loaded",
        "confirmed": "{} that it had started on were loaded as expected",
        "invalid": "fewer than the {} that it had started on were loaded: it has to compute again",
        "acknowledged": "knows that the {} were not all loaded",
    }
    return words[event.meaning.state].format(counted(event.count("num_tokens"), "token"))


def _refused(event: Event) -> str:
    needed, there = counted(event.count("num_needed"), "block"), event.count("num_available")
    return f"asked for more blocks and was refused: {needed} needed, {there:,} available"


def _slow_wait(event: Event) -> str:
    wanted = f"{counted(event.count('num_blocks'), 'block')} for {duration(event.seconds('waited_s'))}"
    return f"WAITS LONG for {wanted}, held by {plain('; '.join(event.texts('holders')) or 'nothing')}"


def _slow_step(event: Event) -> str:
    return f"step {event.count('step_id')} IS OPEN FOR LONG: {duration(event.seconds('open_s'))}"


def _step(event: Event) -> str:
    return f"step {event.count('step_id')} has ended: until then it has held the blocks"


def _note(event: Event) -> str:
    about = ", ".join(f"{name}={value}" for name, value in event.fields.items() if name not in _UNSAID)
    return plain(f"your program: {event.name} {about}".rstrip())


_SENTENCES: Mapping[str, Callable[[Event], str]] = {
    "request_matched": _matched,
    "request_pinned": lambda _: "pinned what was found; asks for blocks",
    "request_allocated": _allocated,
    "request_loading": lambda _: "waits for copies from host memory",
    "request_draining": lambda _: "its load fell short: gives its blocks back when its step has ended",
    "request_requeued": lambda _: "its load fell short, without room to compute instead: waits at its old place",
    "request_stranded": lambda _: "will never have room again: it has to leave, or to take fewer tokens",
    "request_running": _running,
    "request_preempted": lambda _: "preempted: gives its device blocks away",
    "request_done": _done,
    "request_aborted": _aborted,
    "request_cancelled": _cancelled,
    "job_launched": _launched,
    "job_completed": _completed,
    "job_failed": _failed,
    "job_discarded": _discarded,
    "store_skipped": _skipped,
    "extension_refused": _refused,
    "slow_wait": _slow_wait,
    "slow_step": _slow_step,
    "step_ended": _step,
    "load_overlap_speculative": _early,
    "load_overlap_confirmed": _early,
    "load_overlap_invalid": _early,
    "load_overlap_acknowledged": _early,
    "prefetch_moving": _prefetch,
    "prefetch_done": _prefetch,
    "prefetch_cancelled": _prefetch,
    "fetch_moving": _fetch,
    "fetch_done": _fetch,
    "fetch_cancelled": _fetch,
    "fetch_declined": _declined,
    "load_declined": _declined_load,
    "fetch_skipped": _skipped_fetch,
    "storage_left_alone": _left_alone,
    "storage_back": _back,
    "eviction_switched": _switched,
    "weights_changed": _weights,
    "quota_reached": quota,
    "quota_cleared": quota,
    "hint_answered": _hint_answered,
    "demotion_moving": _demotion,
    "demotion_done": _demotion,
    "demotion_cancelled": _demotion,
}
