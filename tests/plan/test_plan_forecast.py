"""The forecast: against a replay through the real ledger, and against arithmetic by hand."""

from __future__ import annotations

import json
import random
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from synthetic_traces import (
    BLOCK_TOKENS,
    MOST_BLOCKS,
    MOST_OF_ONE,
    REQUESTS,
    Request,
    agents,
    conversations,
    lines,
    made,
    trace_of,
    write_trace,
)

from aoffload import ConfigError, KVCacheGroup, LazyStore, Ledger, OffloadConfig
from aoffload._common.env import Env
from aoffload.ledger import Prefix, Quota, Root, TransferPlan
from aoffload.plan import Recorder
from aoffload.plan.forecast import Forecast, Kind, Prices, Row, Sizes, Speeds, first_token
from aoffload.plan.replay import land, replay
from aoffload.plan.report import as_json, by_tenant, cautions, cells
from aoffload.plan.trace import Trace, TracedRequest, read_trace
from benchmarks import policies

KV_BYTES = 1024
BLOCK_BYTES = KV_BYTES * BLOCK_TOKENS
NUM_DEVICE = 150
SIZES = (60, 140, 200, 400, 800, 1600)
"""Host blocks: below the device, about as many, and several times as many; the last one holds everything."""


def _write_back(ledger: Ledger) -> tuple[TransferPlan, ...]:
    return ledger.write_back.plan() if ledger.writes_back else ()


def forecast_of(trace: Trace, **options: Any) -> Forecast:
    sizes = Sizes(KV_BYTES, NUM_DEVICE * BLOCK_BYTES, tuple(size * BLOCK_BYTES for size in SIZES))
    return Forecast(trace, sizes, **options)


def replayed(seed: int, num_requests: int, policy: Any, num_host: int, eviction: str = "lru") -> policies.Replay:
    """Through a ledger with blocks of 16 tokens, by the benchmark of store policies."""
    prompts = [policies._tokens(ids) for ids in conversations(seed, num_requests)]
    times = [number * 0.5 for number in range(num_requests)]  # as `write_trace` has them
    return policies.replay("made", policy, prompts, NUM_DEVICE, num_host, eviction, times)


def rows_of(forecast: Forecast, *kind: Any) -> list[Row]:
    return [row for row in forecast.rows if row.name == "host" and row.kind == Kind(*kind)]


def test_six_sizes_hit_what_the_ledger_hits(tmp_path: Path) -> None:
    """Eager stores by distances, within 0.1 %, tier by tier; lazy ones, and eviction that learns, by a replay, within
    1 %."""
    seed = 3
    forecast = forecast_of(made(tmp_path, seed, 600), stores=("eager", "lazy"), evictions=("lru", "learned"))
    for store, eviction, policy, most in (
        ("eager", "lru", "eager", 0.001), ("lazy", "lru", LazyStore(), 0.01),
        ("eager", "learned", "eager", 0.01), ("lazy", "learned", LazyStore(), 0.01),
    ):  # fmt: skip
        for size, row in zip(SIZES, rows_of(forecast, store, eviction), strict=True):
            found = replayed(seed, 600, policy, size, eviction)
            assert found.num_hits > 4000 and found.num_device_hits > 100
            assert row.num_hit_blocks == pytest.approx(found.num_hits, rel=most)
            assert row.blocks[0] == pytest.approx(found.num_device_hits, rel=most)
            if size > NUM_DEVICE:
                assert row.stored_bytes / BLOCK_BYTES == pytest.approx(found.num_stored, rel=most)
                assert row.loaded_bytes / BLOCK_BYTES == pytest.approx(found.num_loaded, rel=most)


@given(REQUESTS, st.integers(MOST_OF_ONE + 1, 16), st.integers(MOST_OF_ONE, 25))
@example([(99, [0] * 5, 0), (99, [1] * 5, 0), (99, [2] * 5, 0), (99, [0] * 5, 0)], 16, 10)  # the host has lost the last
def test_distances_say_what_the_ledger_hits_and_stores(asked: list[Request], num_device: int, num_host: int) -> None:
    """Request by request, answers included, if both can hold each request alone. So a policy that has no distances is
    replayed as the others are planned."""
    trace = trace_of(asked)
    sizes = Sizes(KV_BYTES, num_device * BLOCK_BYTES, (num_host * BLOCK_BYTES,))
    forecast, found = Forecast(trace, sizes), replay(trace, num_device, num_host)
    assert found.device.tolist() == forecast.on_device.tolist()
    upper = np.maximum(forecast.on_device, forecast.below(num_host).hits(num_host))
    assert (found.device + found.host).tolist() == upper.tolist()
    assert found.num_stored == forecast.below(num_host).num_missing(num_host)


@pytest.mark.parametrize("store", ["eager", LazyStore(3)], ids=["eager", "lazy"])
@pytest.mark.parametrize(("seed", "num_host"), [(1, 60), (2, 80), (3, 160)])
def test_what_is_recorded_of_a_ledger_that_learns_is_replayed_alike(
    tmp_path: Path, store: Any, seed: int, num_host: int
) -> None:
    """Request by request and tier by tier, answers that come token by token included: the plan counts what was asked
    for as the ledger does, so both evict the same."""
    path, num_device, draw = tmp_path / "asked.jsonl", 30, random.Random(seed)
    befores = [int(number * (1 - draw.random() ** 3)) for number in range(600)]
    talks = [(before, draw.randint(1, 20), draw.randint(1, 25)) for before in befores]
    clock = Clock()
    with Recorder(path, block_tokens=BLOCK_TOKENS, env=clock) as recorder:
        found = spoken(talks, store, num_device, num_host, recorder, clock)
    planned = replay(read_trace(path), num_device, num_host, store=store, eviction="learned")
    assert list(zip(planned.device.tolist(), planned.host.tolist(), strict=True)) == found
    assert sum(host for _, host in found) > 200


class Clock(Env):
    """Of the ledger and of the recorder; each request takes no time."""

    at_s = 0.0

    def now(self) -> float:
        return self.at_s


def spoken(
    talks: list[tuple[int, int, int]], store: Any, num_device: int, num_host: int, recorder: Recorder, clock: Clock
) -> list[tuple[int, int]]:
    """Blocks that each request hits, on the device and in the host, of a ledger that serves one after the other.
    `talks`: which earlier one it continues, tokens that it asks, tokens that it is answered."""
    groups = [KVCacheGroup("full", block_size=BLOCK_TOKENS)]
    config = OffloadConfig(groups=groups, num_host_blocks=num_host, store_policy=store, eviction="learned")
    ledger = Ledger(config, num_device + 1, observer=recorder, clock=clock.now)
    heard, hits = list[list[int]](), list[tuple[int, int]]()
    for number, (before, num_asked, num_answered) in enumerate(talks):
        clock.at_s += 1.0
        chunk = list(heard[before]) if before < number and len(heard[before]) < 80 else []
        chunk += [1000 * number + at for at in range(num_asked)]
        chunk += [999_999] * (not len(chunk) % BLOCK_TOKENS)  # else a block less could be hit than the prompt has
        num_answered += not (len(chunk) + num_answered - 1) % BLOCK_TOKENS  # its last block is never full
        answer = [1000 * number + 500 + at for at in range(num_answered)]
        record = ledger.admit(Prefix.of(Root("model"), chunk))
        ledger.allocate_nowait(record)
        hits.append((record.match.num_device_tokens // BLOCK_TOKENS, record.match.num_host_tokens // BLOCK_TOKENS))
        land(ledger, ledger.plan_load(record))
        land(ledger, chain(ledger.commit(record, len(chunk), answer[:1]), _write_back(ledger)))
        for at, token in enumerate(answer[1:], len(chunk) + 1):
            ledger.extend_nowait(record, at)
            land(ledger, chain(ledger.commit(record, at, (token,)), _write_back(ledger)))
        land(ledger, chain(ledger.release(record), _write_back(ledger)))
        heard.append(chunk + answer)
    return hits


def test_an_answer_is_no_hit() -> None:
    """What a request computes as an answer it did not ask for, even if another one has cached the same."""
    blocks = np.arange(3, dtype=np.int32)
    trace = Trace("made", tuple(TracedRequest(float(at), 17, 8, blocks, 2) for at in range(2)), 8, 3)
    assert replay(trace, 20, 20).device.tolist() == [0, 2]
    assert Forecast(trace, Sizes(KV_BYTES, 20 * BLOCK_BYTES, (20 * BLOCK_BYTES,))).on_device.tolist() == [0, 2]


def test_a_replay_leaves_out_what_does_not_fit(tmp_path: Path) -> None:
    """And the forecast says how many requests these are."""
    trace = read_trace(write_trace(tmp_path / "long.jsonl", [[1, 2, 3], [*range(10, 40)], [1, 2, 3]]), BLOCK_TOKENS)
    found = replay(trace, 20, 40)
    assert found.device.tolist() == [0, 0, 3]
    small = Forecast(trace, Sizes(KV_BYTES, 20 * BLOCK_BYTES, (40 * BLOCK_BYTES,)))
    assert "1 request does not fit the device." in cautions(small)


@pytest.mark.parametrize(("num_short", "is_said"), [(0, False), (2, False), (3, True), (4, True)])
def test_prompts_that_are_shorter_than_a_block_are_said(num_short: int, is_said: bool) -> None:
    """Where most of them are: no size would hit anything, since they have no whole block."""
    short, long = (TracedRequest(0.0, tokens, 1, np.arange(tokens // 8, dtype=np.int32), 0) for tokens in (8, 24))
    trace = Trace("made", (short,) * num_short + (long,) * (4 - num_short), 8, 3)
    chunk = [
        one for one in cautions(Forecast(trace, Sizes(KV_BYTES, 20 * BLOCK_BYTES))) if "not longer than a block" in one
    ]
    expected = (
        f"{num_short} of 4 prompts are not longer than a block of the trace (8 tokens), so they never hit. Record"
    )
    assert bool(chunk) == is_said and all(one.startswith(expected) for one in chunk)


def test_hints_hit_more_and_the_true_time_hits_most(tmp_path: Path) -> None:
    """Each kind of hints is a row for learned eviction, and there is one row of LRU. The stop reason tells apart what
    the number of requests does not, and the true time of return is the bound."""
    path = tmp_path / "agents.jsonl"
    path.write_text("\n".join(agents(1, 3000)))
    trace = read_trace(path, BLOCK_TOKENS)
    sizes = Sizes(KV_BYTES, (trace.most_blocks + 2) * BLOCK_BYTES, (100 * BLOCK_BYTES,))
    forecast = Forecast(trace, sizes, evictions=("lru", "learned"), hints=("none", "stop", "returns"))
    assert [str(kind) for kind in forecast.kinds] == [
        "eager, lru", "eager, learned", "eager, learned, hints: stop", "eager, learned, hints: returns",
    ]  # fmt: skip
    lru, learned, stop, returns = (row.num_hit_blocks for row in forecast.rows[2:-1])
    assert learned > 0.97 * lru and stop > 1.05 * max(lru, learned) and returns > stop
    assert [row["hints"] for row in as_json(forecast)["rows"][2:-1]] == ["none", "none", "stop", "returns"]


def test_a_floor_keeps_a_tenant_from_a_scan(tmp_path: Path) -> None:
    """With a floor, a tenant hits at least what it hits alone in a host of that size; without one, the scan of another
    tenant takes its blocks. A ceiling bounds what a tenant hits, and is a row of its own."""
    talks = [json.loads(text) | {"tenant": "team-a"} for text in lines(conversations(3, 400), gap_ms=1000)]
    scans = [
        json.loads(text) | {"tenant": "batch", "timestamp": at * 200 + 100}
        for at, text in enumerate(lines([[10**6 + 20 * number + at for at in range(20)] for number in range(2000)]))
    ]
    path, alone = tmp_path / "both.jsonl", tmp_path / "alone.jsonl"
    path.write_text("\n".join(map(json.dumps, talks + scans)))
    alone.write_text("\n".join(map(json.dumps, talks)))
    device, floor = (MOST_BLOCKS + 22) * BLOCK_BYTES, 400 * BLOCK_BYTES
    sizes = Sizes(KV_BYTES, device, (800 * BLOCK_BYTES,))
    quotas = {"team-a": Quota(host_floor=floor), "batch": Quota(host_ceiling=floor)}
    forecast = Forecast(read_trace(path, BLOCK_TOKENS), sizes, quotas=quotas)
    without, quoted = forecast.rows[2:-1]
    assert (str(without.kind), str(quoted.kind)) == ("eager, lru", "eager, lru, quotas")
    trace = read_trace(alone, BLOCK_TOKENS)
    found = Forecast(trace, Sizes(KV_BYTES, 2 * BLOCK_BYTES, (floor,))).rows[2]
    assert quoted.tenants["team-a"] >= found.num_hit_blocks > 1.5 * without.tenants["team-a"]
    assert quoted.tenants["batch"] == without.tenants["batch"] == 0
    assert quoted.num_hit_blocks == sum(quoted.tenants.values())
    heading, *table = by_tenant(forecast)
    assert heading[2:] == ["team-a", "batch", "others"] and table[2][2].startswith(f"{quoted.tenants['team-a']:,} (")
    rows = as_json(forecast)["rows"]
    assert [row["has_quotas"] for row in rows] == [False, False, False, True, False]
    assert rows[3]["hit_blocks_by_tenant"] == dict(quoted.tenants)


def test_quotas_above_all_that_is_asked_for_change_nothing(tmp_path: Path) -> None:
    """A floor above the blocks of the whole trace, in a host of that size: a replay makes no larger pools."""
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(agents(2, 200, tenant="team-a")))
    sizes = Sizes(KV_BYTES, 200 * BLOCK_BYTES, (2**50,))
    forecast = Forecast(read_trace(path, BLOCK_TOKENS), sizes, quotas={"team-a": Quota(host_floor=2**50)})
    without, quoted = forecast.rows[2:-1]
    assert quoted.blocks == without.blocks and quoted.tenants == without.tenants == {"team-a": without.num_hit_blocks}


@pytest.mark.parametrize(
    ("options", "argument", "problem"),
    [
        ({"hints": ("none", "stop")}, "hints", "has an effect only with --eviction learned"),
        ({"hints": ("stop",), "evictions": ("learned",)}, "hints", "stop needs the field `stop`"),
        ({"hints": ("returns",), "evictions": ("learned",)}, "hints", "returns needs the field `returns_s`"),
        ({"quotas": {"team-a": Quota()}}, "quota", "'team-a' is no `tenant` of any line"),
    ],
)
def test_a_trace_without_the_fields_is_refused(
    tmp_path: Path, options: dict[str, Any], argument: str, problem: str
) -> None:
    """A row of hints that were never given would look as if hints bring nothing."""
    with pytest.raises(ConfigError) as raised:
        forecast_of(made(tmp_path, 1, 20), **options)
    assert raised.value.argument == argument and problem in raised.value.problem


def test_rows_go_from_nothing_to_a_cache_without_end(tmp_path: Path) -> None:
    """No cache computes everything, the device alone hits what it holds, and no size hits more than the last row."""
    trace = made(tmp_path, 5, 600)
    forecast = forecast_of(trace)
    nothing, alone, *sized, endless = forecast.rows
    assert (nothing.num_hit_blocks, nothing.num_computed_tokens) == (0, trace.num_prompt_tokens)
    assert alone.blocks == (int(forecast.on_device.sum()), 0, 0) and alone.age_s is not None
    found = [row.num_hit_blocks for row in (alone, *sized, endless)]
    assert found == sorted(found) and found[-1] == trace.num_asked - trace.num_blocks
    assert endless.age_s is None and not endless.has_evicted
    ages = [row.age_s for row in sized if row.age_s is not None and row.host_bytes > forecast.sizes.device]
    assert ages == sorted(ages)
    for row in forecast.rows:
        assert sum(row.tokens) + row.num_computed_tokens == trace.num_prompt_tokens


def test_a_disk_hits_what_a_host_of_its_size_would(tmp_path: Path) -> None:
    """Its hits go through both links, and are loaded; what the host holds is not read from it."""
    trace = made(tmp_path, 6, 600)
    sizes = Sizes(KV_BYTES, NUM_DEVICE * BLOCK_BYTES, (200 * BLOCK_BYTES, 1600 * BLOCK_BYTES), (1600 * BLOCK_BYTES,))
    rows = {(row.name, row.host_bytes // BLOCK_BYTES): row for row in Forecast(trace, sizes).rows}
    both, host, large = rows["host and disk", 200], rows["host", 200], rows["host", 1600]
    assert both.num_hit_blocks == large.num_hit_blocks and both.blocks[:2] == host.blocks[:2]
    assert both.blocks[2] > 0 and both.loaded_bytes == large.loaded_bytes
    assert rows["host and disk", 1600].blocks == large.blocks


def test_what_it_costs_is_size_times_price(tmp_path: Path) -> None:
    """Of both tiers; the device is there anyway."""
    trace = made(tmp_path, 7, 50)
    sizes = Sizes(KV_BYTES, 2**30, (2**31,), (2**33,))
    rows = Forecast(trace, sizes, prices=Prices(3.0, 0.5)).rows
    assert [(row.name, row.price) for row in rows[:-1]] == [
        ("no cache", 0.0), ("device alone", 0.0), ("host", 6.0), ("host and disk", 10.0),
    ]  # fmt: skip


def test_a_trace_too_short_for_a_size_is_said(tmp_path: Path) -> None:
    """A size that is never full, or full only towards the end; not those that evict early."""
    trace = made(tmp_path, 8, 400)
    sizes = Sizes(KV_BYTES, NUM_DEVICE * BLOCK_BYTES, (200 * BLOCK_BYTES, 2**30))
    (chunk,) = cautions(Forecast(trace, sizes))
    assert "too short for 1 GiB. It never fills this size" in chunk
    nearly = (trace.num_blocks - 30) * BLOCK_BYTES
    (chunk,) = cautions(Forecast(trace, Sizes(KV_BYTES, NUM_DEVICE * BLOCK_BYTES, (nearly,))))
    assert "too short" in chunk and "A block stays there for" in chunk


def test_one_warning_names_one_cause(tmp_path: Path) -> None:
    """Several sizes that the trace never fills, with several disks and orders, are one line."""
    trace = made(tmp_path, 8, 400)
    sizes = Sizes(KV_BYTES, NUM_DEVICE * BLOCK_BYTES, (2**30, 2**31, 2**32), (2**33, 2**34))
    (chunk,) = cautions(Forecast(trace, sizes, evictions=("lru", "learned")))
    assert "too short for 1 GiB and more. " in chunk


def test_rows_say_for_which_sizes_the_trace_is_too_short(tmp_path: Path) -> None:
    """The same as the warnings do, whichever order evicts: their hits are the least that there would be."""
    trace = made(tmp_path, 8, 400)
    sizes = Sizes(KV_BYTES, NUM_DEVICE * BLOCK_BYTES, (200 * BLOCK_BYTES, 2**30), (2**31,))
    forecast = Forecast(trace, sizes, evictions=("lru", "learned"))
    short = [
        (row.kind.eviction, row.host_bytes, row.disk_bytes) for row in forecast.rows if forecast.is_too_short_for(row)
    ]
    assert short == [("lru", 200 * BLOCK_BYTES, 2**31), ("lru", 2**30, 0), ("lru", 2**30, 2**31), ("learned", 2**30, 0)]
    marked = [cells(forecast, row)[2].startswith("≥ ") for row in forecast.rows]
    assert marked == [forecast.is_too_short_for(row) for row in forecast.rows]
    assert marked == [row["is_trace_too_short"] for row in as_json(forecast)["rows"]]


def test_lost_requests_are_said(tmp_path: Path) -> None:
    """What the recorder dropped, from its last line."""
    path = write_trace(tmp_path / "a.jsonl", conversations(9, 400))
    path.write_text(path.read_text() + '{"num_dropped": 7}\n')
    chunk = next(cautions(Forecast(read_trace(path, BLOCK_TOKENS), Sizes(KV_BYTES, NUM_DEVICE * BLOCK_BYTES))))
    assert "7 requests" in chunk


@pytest.mark.parametrize(
    ("sizes", "argument"),
    [
        (Sizes(KV_BYTES, 2 * BLOCK_BYTES - 1), "device"),
        (Sizes(KV_BYTES, 2**30, (BLOCK_BYTES - 1,)), "host"),
        (Sizes(KV_BYTES, 2**30, (2**30,), (1,)), "disk"),
    ],
)
def test_a_size_without_a_block_is_refused(tmp_path: Path, sizes: Sizes, argument: str) -> None:
    """By the name of the argument."""
    with pytest.raises(ConfigError) as raised:
        Forecast(made(tmp_path, 1, 5), sizes)
    assert raised.value.argument == argument


# -- time to the first token -------------------------------------------------------------------------------------------


def timed(
    at_s: list[float], host_s: list[float], disk_s: list[float], computed: list[int], **speed: float
) -> list[float]:
    """With 100 tokens a second; each answer has 20."""
    requests = [TracedRequest(at, 1000, 20, np.zeros(0, np.int32), 0) for at in at_s]
    speeds = Speeds(prefill_tokens_per_s=100.0, host_gbs=1.0, disk_gbs=1.0, **speed)
    trace = Trace("made", tuple(requests), 8, 0)
    found = first_token(trace, np.array(host_s), np.array(disk_s), np.array(computed, np.int64), speeds)
    return list(found.times_s)


def test_a_request_waits_for_the_longer_of_two_queues() -> None:
    """Its copies wait for copies, its prompt for prompts; copies go on while another one is computed."""
    assert timed([0.0], [0.0], [0.0], [100]) == [1.0]
    assert timed([0.0, 0.0], [0.0, 0.0], [0.0, 0.0], [100, 50]) == [1.0, 1.5]
    assert timed([0.0, 0.0], [0.0, 0.4], [0.0, 0.0], [100, 50]) == [1.0, 1.5]  # copied while it waits
    assert timed([0.0, 0.0], [0.0, 3.0], [0.0, 0.0], [100, 50]) == [1.0, 3.5]  # the copy is late
    assert timed([0.0, 0.0], [2.0, 2.0], [0.0, 0.0], [10, 10]) == [2.1, 4.1]  # one link
    assert timed([0.0, 0.0], [2.0, 0.0], [0.0, 2.0], [10, 10]) == [2.1, 2.2]  # two links
    assert timed([0.0, 5.0], [1.0, 1.0], [0.0, 0.0], [100, 100]) == [2.0, 2.0]  # nobody is in the way
    assert timed([0.0, 0.0, 9.0], [0.0] * 3, [0.0] * 3, [100] * 3, decode_tokens_per_s=10.0) == [1.0, 4.0, 1.0]


def test_more_hits_are_faster_and_a_slow_link_is_not(tmp_path: Path) -> None:
    """The row of a large host is faster than the device alone, unless its link is slower than computing."""
    trace = made(tmp_path, 10, 400)
    for host_gbs, is_faster in ((10.0, True), (1e-6, False)):
        speeds = Speeds(prefill_tokens_per_s=1000.0, host_gbs=host_gbs, disk_gbs=1.0)
        rows = forecast_of(trace, speeds=speeds).rows
        alone, large = rows[1].first_token, rows[-2].first_token
        assert alone is not None and large is not None
        assert (large.p50_s < alone.p50_s, large.p90_s < alone.p90_s) == (is_faster, is_faster)
        assert large.busy < alone.busy


def test_more_prompts_than_can_be_computed_are_said(tmp_path: Path) -> None:
    """Times to first token would say how long the trace is."""
    trace = made(tmp_path, 11, 400)
    speeds = Speeds(prefill_tokens_per_s=10.0, host_gbs=10.0, disk_gbs=1.0)
    chunk = list(cautions(forecast_of(trace, speeds=speeds)))
    assert sum("% with device alone). In 8 of the 9 rows" in line for line in chunk) == 1


@pytest.mark.parametrize(("disk_gbs", "is_left_alone"), [(3.5, True), (8.0, False)])
def test_a_disk_that_a_runtime_would_leave_alone_is_said(tmp_path: Path, disk_gbs: float, is_left_alone: bool) -> None:
    """Where a fetch takes longer than the gate of fetches allows, nothing hits there: in the rows, too."""
    trace = made(tmp_path, 12, 400)
    sizes = Sizes(KV_BYTES, NUM_DEVICE * BLOCK_BYTES, (200 * BLOCK_BYTES,), (400 * BLOCK_BYTES,))
    speeds = Speeds(prefill_tokens_per_s=0.9 * 3.5e9 / KV_BYTES, host_gbs=50.0, disk_gbs=disk_gbs)
    forecast = Forecast(trace, sizes, speeds)
    chunk = [line for line in cautions(forecast) if "would not use the disk" in line]
    _, _, host, both, _ = forecast.rows
    assert (both.blocks == host.blocks, both.loaded_bytes == host.loaded_bytes) == (is_left_alone, is_left_alone)
    assert (both.age_s == host.age_s) == is_left_alone and both.blocks[:2] == host.blocks[:2]
    assert len(chunk) == is_left_alone and all("takes 90 % of the time" in line for line in chunk)


def test_more_writes_than_a_disk_takes_in_a_day_are_said(tmp_path: Path) -> None:
    """The budget of writes is the disk's size a day, and a trace of minutes writes that in no time."""
    trace = made(tmp_path, 13, 400)
    sizes = Sizes(KV_BYTES, NUM_DEVICE * BLOCK_BYTES, (40 * BLOCK_BYTES,), (100 * BLOCK_BYTES,))
    assert any("DiskTier.daily_writes" in line for line in cautions(Forecast(trace, sizes)))
    endless = Sizes(KV_BYTES, NUM_DEVICE * BLOCK_BYTES, (trace.num_blocks * BLOCK_BYTES,), (2**40,))
    assert not any("DiskTier.daily_writes" in line for line in cautions(Forecast(trace, endless)))
