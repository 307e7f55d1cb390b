"""The results as a table, for people, and as JSON, for programs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from .. import Tier, __version__
from ..trace.wording import size
from .outcome import DemoOutcome, RunOutcome
from .workload import ENGINE

LABEL_WIDTH = 34
COLUMN_WIDTH = 20


def as_json(outcome: DemoOutcome) -> dict[str, Any]:
    """Counts and times of the run with offload, `…_without_offload` of the one without, `…_by_layer` of the one that
    `--layered` adds. Token counts are sums over completed requests. null stands for a value that never occurred."""
    options, first_turns = outcome.options, outcome.first_turn_ids
    run = outcome.with_offload or RunOutcome.nothing()
    without = outcome.without_offload or RunOutcome.nothing()
    by_layer = outcome.by_layer or RunOutcome.nothing()
    return {
        "version": __version__,
        "model": options.model,
        "backend": options.backend,
        "device": options.device,
        "seed": options.seed,
        "store": options.store,
        "load": options.load,
        "eviction": options.eviction,
        "host_gbs": options.host_gbs,
        "device_blocks": outcome.pools.num_device_blocks if outcome.pools else None,
        "host_blocks": outcome.pools.num_host_blocks if outcome.pools else None,
        "cancel_rate": options.cancel_rate,
        "corrupt": options.corrupt.value if options.corrupt else None,
        "interrupted": outcome.was_interrupted,
        "requests": run.num_requests,
        "completed": len(run.generations),
        "aborted": run.num_aborted,
        "prompt_tokens": run.sum_of("num_prompt_tokens"),
        "device_hit_tokens": run.sum_of("num_device_tokens"),
        "host_hit_tokens": run.sum_of("num_host_tokens"),
        "computed_tokens": run.sum_of("num_computed_tokens"),
        "computed_tokens_without_offload": without.sum_of("num_computed_tokens"),
        "outputs_identical": outcome.outputs_identical,
        "outputs_compared": len(run.generations),
        "loads_declined": run.num_declined,
        "fetches_declined": run.num_fetches_declined,
        "learned_tiers": [tier.name.lower() for tier in run.learned],
        "host_blocks_free": run.num_host_free,
        "blocks_loaded": run.transfers.get("blocks_loaded", 0),
        "blocks_stored": run.transfers.get("blocks_stored", 0),
        "blocks_verified": run.transfers.get("blocks_verified", 0),
        "blocks_corrupt": run.transfers.get("blocks_corrupt", 0),
        "pinned_blocks_at_end": sum(each.num_pinned for each in outcome.runs),
        "quarantined_blocks": sum(each.num_quarantined for each in outcome.runs),
        "peak_device_bytes": run.bytes_of("peak_pinned_blocks"),
        "window_saved_bytes": run.bytes_of("peak_null_blocks"),
        "window_saved_of_bytes": run.bytes_of("num_blocks_at_peak"),
        "ttft_s": _percentiles(run.times("arrived_s", first_turns)),
        "ttft_s_without_offload": _percentiles(without.times("arrived_s", first_turns)),
        "service_ttft_s": _percentiles(run.times("admitted_s", first_turns)),
        "service_ttft_s_without_offload": _percentiles(without.times("admitted_s", first_turns)),
        "ttft_s_by_layer": _percentiles(by_layer.times("arrived_s", first_turns)),
        "service_ttft_s_by_layer": _percentiles(by_layer.times("admitted_s", first_turns)),
        "head_starts_by_layer": by_layer.engine.num_head_starts if by_layer.engine else None,
        "head_starts_used_by_layer": by_layer.engine.num_head_starts_used if by_layer.engine else None,
        "outputs_identical_by_layer": outcome.by_layer_identical,
        "ttft_share": outcome.ttft_share("arrived_s"),
        "service_ttft_share": outcome.ttft_share("admitted_s"),
        "disk_blocks_at_start": run.num_restored if options.disk else None,
        "disk_blocks_loaded": run.disk_transfers.get("blocks_loaded"),
        "disk_blocks_stored": run.disk_transfers.get("blocks_stored"),
        "disk_blocks_corrupt": run.disk_transfers.get("blocks_corrupt"),
        "remote_blocks_loaded": run.remote_transfers.get("blocks_loaded"),
        "remote_blocks_stored": run.remote_transfers.get("blocks_stored"),
        "remote_cells_corrupt": run.remote_transfers.get("cells_corrupt"),
        "remote_failures": run.remote_transfers.get("num_failures"),
        "load_gb_per_s": run.rate("load"),
        "store_gb_per_s": run.rate("store"),
        "wall_s": outcome.wall_s,
        "run_wall_s": [each.wall_s for each in outcome.runs],
    }


def as_table(outcome: DemoOutcome) -> str:
    """A table of the results so far, at any point of the demo."""
    lines = ["", *_heading(outcome), ""]
    if outcome.runs:
        lines += [_row("", [run.kind.name for run in outcome.runs]), *_rows(outcome), ""]
        lines += [*_shares(outcome), *_transfers(outcome)]
    lines += [f"  {text}" for text in _verdict(outcome)]
    return "\n".join([*lines, f"  {outcome.wall_s:.1f} s in all", ""])


def _heading(outcome: DemoOutcome) -> Iterator[str]:
    options, pools = outcome.options, outcome.pools
    yield f"  aoffload demo: model {options.model}, {options.backend}, {options.device}, seed {options.seed}"
    if pools is not None:
        yield (
            f"  {options.num_requests} requests in {outcome.num_conversations} conversations; "
            f"small pool {pools.num_device_blocks}, host {pools.num_host_blocks} blocks of {ENGINE.block_size} tokens"
        )


def _rows(outcome: DemoOutcome) -> Iterator[str]:
    def row(label: str, cell: Callable[[RunOutcome], str]) -> str:
        return _row(label, [cell(run) for run in outcome.runs])

    def tokens(field: str) -> Callable[[RunOutcome], str]:
        def cell(run: RunOutcome) -> str:
            count, total = run.sum_of(field), run.sum_of("num_prompt_tokens")
            return f"{count:,} {count / total:>4.0%}" if total else "-"

        return cell

    def times(since: str) -> Callable[[RunOutcome], str]:
        def cell(run: RunOutcome) -> str:
            found = _percentiles(run.times(since, outcome.first_turn_ids))
            return f"{_seconds(found['p50'])} / {_seconds(found['p99'])}"

        return cell

    yield row("device blocks", lambda run: f"{run.kind.num_device_blocks:,}")
    yield row("requests done / aborted", lambda run: f"{len(run.generations)} / {run.num_aborted}")
    yield row("prompt tokens", lambda run: f"{run.sum_of('num_prompt_tokens'):,}     ")
    yield row("  found on the device", tokens("num_device_tokens"))
    yield row("  loaded from host memory", tokens("num_host_tokens"))
    yield row("  computed", tokens("num_computed_tokens"))
    yield _row("time to first token, later turns", ["p50 / p99 s" for _ in outcome.runs])
    yield row("  from arrival", times("arrived_s"))
    yield row("  from admission", times("admitted_s"))
    if outcome.options.disk is not None:
        yield row("blocks on the disk at the start", lambda run: f"{run.num_restored:,}" if run.kind.disk else "-")
        yield row("  read from it / written to it", lambda run: _moved(run.disk_transfers))
    if outcome.options.remote is not None:
        yield row("remote store, blocks read/written", lambda run: _moved(run.remote_transfers))
    if outcome.by_layer is not None:
        yield row("prompts begun while loading", lambda run: f"{run.engine.num_head_starts if run.engine else 0}")
    yield row("wall time, s", lambda run: f"{run.wall_s:.1f}")
    yield row("pins left / quarantined", lambda run: f"{run.num_pinned} / {run.num_quarantined}")


def _moved(counts: Mapping[str, Any]) -> str:
    """Blocks loaded from and stored in a tier below the host."""
    return f"{counts['blocks_loaded']:,} / {counts['blocks_stored']:,}" if counts else "-"


def _shares(outcome: DemoOutcome) -> Iterator[str]:
    shares = {since: outcome.ttft_share(f"{since}_s") for since in ("arrived", "admitted")}
    if all(share is not None for share in shares.values()):
        arrived, admitted = shares.values()
        aim = " (aim: at most 0.33)" if outcome.options.device == "cuda" else ""
        yield f"  p50 with offload over p50 without: {arrived:.2f} from arrival{aim}, {admitted:.2f} from admission"


def _transfers(outcome: DemoOutcome) -> Iterator[str]:
    run = outcome.with_offload
    if run is None:
        return
    counts = run.transfers
    yield f"  loaded {counts.get('blocks_loaded', 0):,} blocks{_speed(run.rate('load'))}, " + (
        f"stored {counts.get('blocks_stored', 0):,}{_speed(run.rate('store'))}; "
        f"verified {counts.get('blocks_verified', 0):,}, corrupt {counts.get('blocks_corrupt', 0):,}"
    )
    if run.kind.load != "always":
        yield f"  host hits computed, completely or in part, instead of loaded: {run.num_declined:,}"
    if run.num_fetches_declined:
        yield f"  hits below host memory computed instead of fetched: {run.num_fetches_declined:,}"
    if run.kind.eviction == "learned" and run.is_over:
        yield f"  {_evicted(run)}"
    if run.bytes_of("peak_null_blocks"):
        saved, of, used = map(run.bytes_of, ("peak_null_blocks", "num_blocks_at_peak", "peak_pinned_blocks"))
        yield (
            f"  device memory saved by freeing out-of-window blocks: {_mebibytes(saved)} of {_mebibytes(of)}; "
            f"at most {_mebibytes(used)} in use"
        )


def _evicted(run: RunOutcome) -> str:
    """The eviction order at the end, or that hardly anything was evicted."""
    free, size = run.num_host_free, run.kind.num_host_blocks
    if free:
        return f"learned eviction had little effect, {free:,} of {size:,} host blocks are free: try fewer --host-blocks"
    tiers = (Tier.HOST,) if run.kind.disk is None else (Tier.HOST, Tier.DISK)
    rules = (f"{tier.name.lower()} by {'the learned order' if tier in run.learned else 'LRU'}" for tier in tiers)
    return f"eviction at the end: {', '.join(rules)}"


def _verdict(outcome: DemoOutcome) -> Iterator[str]:
    if outcome.was_interrupted:
        yield "interrupted: these are the results so far"
    for run in outcome.runs[1:]:
        yield f"outputs {run.kind.name}: {_compared(outcome, run)}"
    if outcome.tampering is not None:
        yield from _tampering(outcome)
    yield from _below_host(outcome)
    for run in outcome.runs:
        if run.integrity_error:
            yield f"INTEGRITY {run.kind.name}: {run.integrity_error}"
        if run.is_over and (run.num_pinned or run.num_quarantined):
            yield f"LEAK {run.kind.name}: {run.num_pinned} blocks pinned, {run.num_quarantined} quarantined"


def _compared(outcome: DemoOutcome, run: RunOutcome) -> str:
    differences = outcome.differences(run)
    corrupt = run.transfers.get("blocks_corrupt", 0)
    note = f"; checksums caught {corrupt} corrupt blocks" if corrupt else ""
    if not run.generations:
        return "nothing to compare yet"
    if not differences:
        return f"{len(run.generations)} requests, tokens and logits equal to the reference bit for bit{note}"
    worst = ", ".join(difference.turn_id for difference in differences[:4])
    tokens = sum(difference.num_tokens > 0 for difference in differences)
    among = f"{len(differences)} of {len(run.generations)} requests ({worst}{', …' if differences[4:] else ''})"
    return f"DIFFERENT in {among}: logits in {len(differences)}, tokens in {tokens}{note}"


def _below_host(outcome: DemoOutcome) -> Iterator[str]:
    """The effect of the disk and the remote store."""
    run, options = outcome.with_offload, outcome.options
    if run is None or not run.is_over:
        return
    if options.disk is not None and run.disk_transfers:
        yield from _of_disk(run)
    if options.remote is not None and run.remote_transfers:
        yield from _of_remote(run)


def _of_disk(run: RunOutcome) -> Iterator[str]:
    loaded, stored = run.disk_transfers["blocks_loaded"], run.disk_transfers["blocks_stored"]
    if run.num_restored:
        yield f"disk: found {run.num_restored:,} blocks of earlier runs; {_came(run, loaded)}"
    else:
        yield f"disk: empty at the start, as in a first run; {_came(run, loaded)}"
    if failures := run.disk_transfers.get("num_failures", 0):
        yield f"  the disk failed {failures:,} times: requests computed their tokens instead"
    if stored:
        yield f"  the run wrote {stored:,} blocks to it, and closing wrote the rest: run this command again to use them"


def _of_remote(run: RunOutcome) -> Iterator[str]:
    loaded, stored = run.remote_transfers["blocks_loaded"], run.remote_transfers["blocks_stored"]
    failures = run.remote_transfers.get("num_failures", 0)
    yield f"remote store: {_came(run, loaded)}" + ("" if loaded or failures else ", as in a first run")
    if failures:
        yield f"  {failures:,} of its calls failed: requests computed their tokens instead. Does the store run there?"
    if stored:
        yield f"  the run wrote {stored:,} blocks to it: run this command again, here or elsewhere, to use them"


def _came(run: RunOutcome, num_blocks: int) -> str:
    if not num_blocks:
        return "no blocks were loaded from it"
    moved = _mebibytes(num_blocks * run.block_bytes)
    share = num_blocks * ENGINE.block_size / max(1, run.sum_of("num_prompt_tokens"))
    return f"loaded {num_blocks:,} blocks ({moved}) from it instead of computing them, {share:.0%} of all prompt tokens"


def _tampering(outcome: DemoOutcome) -> Iterator[str]:
    tampering, run = outcome.tampering, outcome.with_offload
    assert tampering is not None
    yield "the demo exchanged two loaded blocks on purpose:"
    if tampering.before_verification:
        caught = run.transfers.get("blocks_corrupt", 0) if run else 0
        result = f"the checksum caught {caught} of {tampering.num_before}" if tampering.num_before else "not done"
        yield f"  before verification: {result}"
    if tampering.after_verification:
        wrong = len(outcome.differences(run)) if run else 0
        result = f"the logits of {wrong} requests were different" if tampering.num_after else "not done"
        yield f"  after verification: {result}"
    if tampering.is_pending:
        yield "  not done, because no load was large enough: try fewer --device-blocks or more --requests"


def _row(label: str, cells: Sequence[str]) -> str:
    return f"  {label:<{LABEL_WIDTH}}{''.join(f'{cell:>{COLUMN_WIDTH}}' for cell in cells)}".rstrip()


def _percentiles(values: Sequence[float]) -> dict[str, float | None]:
    if not values:
        return {"p50": None, "p99": None}
    return {"p50": float(np.percentile(values, 50)), "p99": float(np.percentile(values, 99))}


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}" if value < 10 else f"{value:.1f}"


def _mebibytes(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.1f} MiB"


def _speed(rate: float | None) -> str:
    return "" if rate is None else f" at {size(rate * 1e9)}/s"
