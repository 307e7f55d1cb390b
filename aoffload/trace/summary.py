"""`summary`: the log as a whole, on one screen."""

from __future__ import annotations

from collections.abc import Iterator

from .._kernel.states import Outcome, RequestState
from .events import Kind
from .figures import Durations, Figures, Tally
from .output import text_table
from .scan import Scan
from .timelines import FETCHING, RuntimeLife, Timeline
from .wording import counted, duration, plain, share, size, time_of_day

MAX_RUNTIMES = 8
MAX_REASONS = 10
MAX_NAMED = 4
_PLURALS = {Kind.PREFETCH: "prefetches", Kind.FETCH: "fetches"}
STATES = {
    RequestState.MATCHED.value: "was looked up in the cache",
    RequestState.PINNED.value: "waits for blocks",
    FETCHING: "waits for a fetch from a lower tier",
    RequestState.ALLOCATED.value: "has blocks, not loading yet",
    RequestState.LOADING.value: "waits for copies",
    RequestState.DRAINING.value: "its load failed, waits for its step",
    RequestState.REQUEUED.value: "its load failed, waits for blocks",
    RequestState.STRANDED.value: "its load failed, can't get blocks",
    RequestState.RUNNING.value: "computes",
    RequestState.PREEMPTED.value: "gave up its blocks",
}
"""The activity of a request, by state."""
ENGINE_OWNED = {
    RequestState.MATCHED.value: "was looked up, may have to ask again",
    RequestState.PINNED.value: "waits for its program",
}
"""The differences for an engine that owns the device blocks. Here a match may be PENDING, and no request waits for
blocks."""


def summary(scan: Scan, figures: Figures) -> Iterator[str]:
    """Lines of text."""
    yield scan.title()
    yield from _runtimes(scan)
    if figures.wanted:
        yield f"of these, only {plain(figures.wanted)}:"
    for block in (
        _requests(figures),
        _open(scan, figures),
        _states(scan, figures),
        _jobs(figures),
        _others(figures),
        _eviction(figures),
        _quotas(figures),
        _slowest(figures),
        _reasons("why requests were aborted", figures.aborts),
        _skipped(figures),
        _reasons("needs attention", figures.alarms),
        _remarks(scan),
    ):
        if block:
            yield ""
            yield from block


def _runtimes(scan: Scan) -> Iterator[str]:
    lives = scan.runtimes.lives
    for life in lives[:MAX_RUNTIMES]:
        yield f"  {life.describe()}"
    if len(lives) > MAX_RUNTIMES:
        yield f"  and {counted(len(lives) - MAX_RUNTIMES, 'more runtime')}"


def _requests(figures: Figures) -> list[str]:
    outcomes = figures.outcomes.get(Kind.REQUEST, Tally())
    counts = ", ".join(f"{outcomes.count(name):,} {name}" for name in ("done", "aborted", "unfinished"))
    lines = [f"{counted(outcomes.total, 'request')}: {counts}"]
    prompt = figures.tokens.count("num_tokens")
    if prompt:
        found, host = figures.tokens.count("num_device_tokens"), figures.tokens.count("num_host_tokens")
        lines.append(
            f"  {counted(prompt, 'prompt token')} of those that got blocks: "
            f"{share(found, prompt)} found on the device, {share(host, prompt)} in host memory"
        )
    if num_refused := figures.refusals.total:
        lines.append(f"  {counted(num_refused, 'extension')} refused: too few free blocks")
    for what, several in (("load", "loads"), ("fetch", "fetches")):
        if number := figures.declines.count(what):
            lines.append(f"  {counted(number, what, several)} declined: computing was faster")
    for tier, number in figures.skipped_fetches.highest_first():
        lines.append(f"  {counted(number, 'fetch', 'fetches')} skipped: {plain(tier)} was suspended after failures")
    return lines


def _open(scan: Scan, figures: Figures) -> list[str]:
    """Open requests and steps. They come first, because they may be stuck."""
    rows = [
        [
            f"  {duration(timeline.duration_s)}",
            timeline.title(),
            doing(timeline),
            f"from {time_of_day(timeline.start_s)}",
        ]
        for timeline in figures.still_open()
    ]
    if not rows:
        return []
    lines = [f"not over at {time_of_day(scan.last_s)}, the longest first", *text_table(rows, 4)]
    rest = figures.num_open - len(rows)
    return [*lines, f"  and {rest:,} more"] if rest else lines


def meaning(state: str, *lives: RuntimeLife) -> str:
    """Describes a request of these runtimes in `state`."""
    found = (ENGINE_OWNED.get(state, STATES[state]) if life.is_engine_owned else STATES[state] for life in lives)
    return ", or ".join(dict.fromkeys(found)) or STATES[state]


def doing(timeline: Timeline) -> str:
    """Describes the activity of an unfinished request, or the requests whose blocks an open step holds."""
    if timeline.kind is not Kind.STEP:
        state = timeline.last_state()
        does = f", {meaning(state, timeline.runtime)}" if state in STATES else ""
        if state == RequestState.RUNNING.value:
            does = f", in step {', '.join(timeline.in_steps[:MAX_NAMED])}" if timeline.in_steps else ", in no step"
        cancelled = f", cancelled ({timeline.cancelled})" if timeline.cancelled else ""
        return f"{state} for {duration(timeline.last_state_s)}{cancelled}{does}"
    live = [plain(name) for name in timeline.members if plain(name) not in timeline.kept]
    over = [f"{counted(count, 'block')} of {name}, which is over" for name, count in timeline.kept.items()]
    parts = over + ([f"those of {', '.join(live[:MAX_NAMED])}"] if live else [])
    rest = len(live) - MAX_NAMED
    return f"holds {'; '.join(parts)}{f' and {rest:,} more' if rest > 0 else ''}" if parts else "open"


def _states(scan: Scan, figures: Figures) -> list[str]:
    lives = [life for life in scan.runtimes.lives if figures.is_wanted(life)]
    rows = [["  state", "meaning", "times", "p50", "p90", "p99", "longest", "share"]]
    whole = figures.in_all
    for state in STATES:
        found = figures.in_state.get(state)
        if found is not None:
            part = share(found.total_s, whole.total_s)
            rows.append([f"  {state}", meaning(state, *lives), *_percentiles(found), part])
    if whole.num:
        rows.append(["  total", "from its match to its end", *_percentiles(whole), "100%"])
    if figures.until_running.num:
        rows.append(["  until running", "from its match until it computes", *_percentiles(figures.until_running), ""])
    if figures.steps.num:
        rows.append(["  steps", "hold their blocks until they end", *_percentiles(figures.steps), ""])
    return ["how long requests were in each state", *text_table(rows, 2)] if len(rows) > 1 else []


def _percentiles(found: Durations) -> list[str]:
    return [f"{found.num:,}", *(duration(found.percentile(percent)) for percent in (50, 90, 99)), duration(found.max_s)]


def _jobs(figures: Figures) -> list[str]:
    head = ["  direction", "done", "failed", "dropped", "blocks", "bytes", "rate"]
    rows = [[*head, "copy p50", "copy p99", "job p50", "job p99"]]
    for link, found in figures.jobs.items():
        if not found.outcomes.total:
            continue
        num_dropped = sum(found.outcomes.count(name) for name in ("discarded", Outcome.REFUSED.value))
        outcomes = [*(f"{found.outcomes.count(name):,}" for name in ("completed", "failed")), f"{num_dropped:,}"]
        seconds = found.copies.total_s
        rate = f"{size(found.num_bytes / seconds)}/s" if seconds else "-"
        durations = [duration(times.percentile(at)) for times in (found.copies, found.spans) for at in (50, 99)]
        rows.append([f"  {link.name}", *outcomes, f"{found.num_blocks:,}", size(found.num_bytes), rate, *durations])
    title = "copy jobs (copy: time of the copy alone; job: time from job_launched to job_completed)"
    return [title, *text_table(rows)] if len(rows) > 1 else []


def _others(figures: Figures) -> list[str]:
    return [
        f"{counted(tally.total, kind.value, _PLURALS.get(kind, ''))}: {_outcomes(tally)}"
        for kind in (Kind.PREFETCH, Kind.FETCH, Kind.DEMOTION, Kind.PIN)
        if (tally := figures.outcomes.get(kind)) is not None
    ]


def _eviction(figures: Figures) -> list[str]:
    """The eviction order of each tier with learned eviction, and the changes of the weights' epoch."""
    switches = [f"  {words}: began {counted(count, 'time')}" for words, count in figures.switches.highest_first()]
    found = ["eviction that learns", *switches] if switches else []
    if figures.weights.total:
        found.append(f"weights' epoch: changed {counted(figures.weights.total, 'time')}")
    if figures.hints.total:
        found.append(f"{counted(figures.hints.total, 'hint')} of clients answered")
        found += [f"  {words}: {counted(count, 'time')}" for words, count in figures.hints.highest_first()]
    return found


def _quotas(figures: Figures) -> list[str]:
    """The tenants whose stores quotas have cut."""
    cuts = [f"  {words}: {counted(count, 'time')}" for words, count in figures.quotas.highest_first()]
    return ["quotas of tenants", *cuts] if cuts else []


def _outcomes(tally: Tally) -> str:
    return ", ".join(f"{count:,} {name}" for name, count in tally.highest_first())


def _slowest(figures: Figures) -> list[str]:
    rows = [
        [
            f"  {duration(timeline.duration_s)}",
            timeline.name,
            _longest_states(timeline),
            timeline.outcome,
            f"from {time_of_day(timeline.start_s)}",
        ]
        for timeline in figures.slowest()
    ]
    return ["slowest requests", *text_table(rows, 5)] if rows else []


def _longest_states(timeline: Timeline) -> str:
    sums: dict[str, float] = {}
    for interval in timeline.intervals():
        sums[interval.state] = sums.get(interval.state, 0.0) + interval.duration_s
    longest = sorted(sums.items(), key=lambda item: -item[1])[:2]
    return ", ".join(f"{state} {share(seconds, timeline.duration_s)}" for state, seconds in longest if seconds)


def _skipped(figures: Figures) -> list[str]:
    rows = [
        [f"  {count:,}", plain(reason), counted(figures.skipped_blocks.count(reason), "block")]
        for reason, count in figures.skipped_stores.highest_first()[:MAX_REASONS]
    ]
    return ["why stores were skipped", *text_table(rows, 2)] if rows else []


def _reasons(title: str, tally: Tally) -> list[str]:
    reasons = tally.highest_first()
    rows = [[f"{count:,}", plain(reason)] for reason, count in reasons[:MAX_REASONS]]
    if not rows:
        return []
    width = max(len(count) for count, _ in rows)
    lines = [title, *(f"  {count:>{width}}  {reason}" for count, reason in rows)]
    rest = sum(count for _, count in reasons[MAX_REASONS:])
    return [*lines, f"  {rest:,} for other reasons"] if rest else lines


def _remarks(scan: Scan) -> list[str]:
    remarks = scan.remarks()
    return ["about this log", *(f"  {remark}" for remark in remarks)] if remarks else []
