"""The sentence that says what to buy, and the lines below it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs
import pytest
from synthetic_traces import BLOCK_TOKENS, MOST_BLOCKS, made, write_trace

from aoffload.plan.advice import ENOUGH, LEAST, advise, consequences, gained, percent, rule, saved
from aoffload.plan.forecast import Forecast, Prices, Row, Sizes, Speeds, binary_size
from aoffload.plan.trace import Trace, read_trace
from aoffload.trace.wording import duration

KV_BYTES = 1024
BLOCK_BYTES = KV_BYTES * BLOCK_TOKENS
DEVICE = (MOST_BLOCKS + 2) * BLOCK_BYTES
HOSTS = tuple(blocks * BLOCK_BYTES for blocks in (70, 200, 400, 800, 1600, 3200))
FAST = Speeds(prefill_tokens_per_s=2000.0, host_gbs=1.0, disk_gbs=1.0)


def forecast_of(
    tmp_path: Path, hosts: tuple[int, ...] = HOSTS, disks: tuple[int, ...] = (), **options: Any
) -> Forecast:
    return Forecast(made(tmp_path, 4, 600), Sizes(KV_BYTES, DEVICE, hosts, disks), **options)


def gain(forecast: Forecast, row: Row) -> float:
    """The part of what unlimited host memory brings that a row brings."""
    least, most = saved(forecast, forecast.rows[1]), saved(forecast, forecast.rows[-1])
    return (saved(forecast, row) - least) / (most - least)


def test_it_names_the_smallest_size_that_is_enough(tmp_path: Path) -> None:
    """The size before it brings less than four fifths of what unlimited memory brings."""
    forecast = forecast_of(tmp_path)
    advice = advise(forecast)
    hosts = [row for row in forecast.rows if row.name == "host"]
    assert advice.row is not None and 0 < hosts.index(advice.row) < len(hosts) - 1
    assert gain(forecast, advice.row) >= ENOUGH > gain(forecast, hosts[hosts.index(advice.row) - 1])
    assert advice.sentence.startswith("Buy ") and "points more than with the device alone" in advice.sentence
    assert "twice the host memory would add" in advice.sentence


def test_a_row_with_exactly_enough_is_named() -> None:
    """Rounding does not decide: of 240 tokens that unlimited memory gains, 192 are enough, and 191 are not."""

    def row(num_tokens: int) -> Any:
        return SimpleNamespace(tokens=(num_tokens,))

    forecast: Any = SimpleNamespace(rows=[row(0), row(384), row(624)])
    assert [gained(forecast, row(n)) >= ENOUGH * gained(forecast, row(624)) for n in (575, 576)] == [False, True]


def test_points_are_the_difference_of_the_percentages_that_are_printed(tmp_path: Path) -> None:
    """A reader who subtracts one from the other finds the same."""
    forecast = forecast_of(tmp_path)
    row = advise(forecast).row
    assert row is not None
    here, alone = (percent(saved(forecast, each)).removesuffix(" %") for each in (row, forecast.rows[1]))
    assert (
        f"{here} % of the prompt tokens would be hits, {int(here) - int(alone)} points more"
        in advise(forecast).sentence
    )


def test_prices_choose_the_cheapest_row(tmp_path: Path) -> None:
    """A disk if it is cheaper than host memory that brings as much; without prices, no disk is named."""
    disk = 1600 * BLOCK_BYTES
    forecast = forecast_of(tmp_path, HOSTS, (disk,))
    row = advise(forecast).row
    assert row is not None and not row.disk_bytes
    huge = (600_000_000 * BLOCK_BYTES,)  # takes all that is evicted within its daily writes
    for price, has_disk in ((1e-9, True), (10.0, False)):
        priced = forecast_of(tmp_path, HOSTS, huge, prices=Prices(1000.0, price))
        row = advise(priced).row
        assert row is not None and bool(row.disk_bytes) == has_disk
        enough = [
            each for each in priced.rows if each.price and each.name != "endless" and gain(priced, each) >= ENOUGH
        ]
        assert row.price == min(each.price or 0.0 for each in enough)
    assert "is based on your prices" in rule(priced) and "is based on hits, not on money" in rule(forecast)


def test_a_disk_that_would_be_written_too_much_is_not_named(tmp_path: Path) -> None:
    """The table shows hits on it that a runtime with its bound on writes would not have."""
    forecast = forecast_of(tmp_path, HOSTS, (3200 * BLOCK_BYTES,), prices=Prices(1000.0, 1e-9))
    (least, *_) = [row for row in forecast.rows if row.disk_bytes]
    assert forecast.writes_too_much(least) and gain(forecast, least) >= ENOUGH
    row = advise(forecast).row
    assert row is not None and not forecast.writes_too_much(row)


def test_prompts_that_do_not_return_need_no_memory(tmp_path: Path) -> None:
    """It says that offloading brings nothing, and every word of it is in the first sentence."""
    path = write_trace(tmp_path / "once.jsonl", [[10 * number + at for at in range(5)] for number in range(300)])
    forecast = Forecast(read_trace(path, BLOCK_TOKENS), Sizes(KV_BYTES, DEVICE), FAST)
    advice = advise(forecast)
    assert advice.row is None and advice.sentence == (
        "Buy nothing: offloading brings nothing here, because the device alone hits 0 % of the prompt tokens, and "
        "unlimited host memory would hit no more."
    )
    first, *_ = consequences(forecast, advice)
    assert "of host memory, the time to the first token would stay the same: " in first


def few_return(tmp_path: Path, count: int = 9) -> Trace:
    """300 prompts that share nothing, and after 200 of them the first `count` again."""
    once = [[10 * number + at for at in range(5)] for number in range(300)]
    return read_trace(write_trace(tmp_path / "few.jsonl", [*once[:200], *once[:count], *once[200:]]), BLOCK_TOKENS)


def test_a_gain_below_the_least_is_not_worth_buying(tmp_path: Path) -> None:
    """A few prompts return late: unlimited memory would hit some more, and the sentence says how many."""
    forecast = Forecast(few_return(tmp_path), Sizes(KV_BYTES, DEVICE))
    assert 0 < saved(forecast, forecast.rows[-1]) < LEAST
    assert advise(forecast).sentence == (
        "Buy nothing: unlimited host memory would reduce prefill by only 3 %, because 3 % of the prompt tokens would "
        "be hits, 3 points more than with the device alone."
    )


def test_times_are_told_also_if_nothing_is_worth_buying(tmp_path: Path) -> None:
    """Those of the smallest size that has enough of the gain: a reader may want them more than hits."""
    trace = few_return(tmp_path)
    forecast = Forecast(trace, Sizes(KV_BYTES, DEVICE), attrs.evolve(FAST, prefill_tokens_per_s=60.0))
    advice = advise(forecast)
    assert advice.row is None and gain(forecast, advice.best) >= ENOUGH
    first, *_ = consequences(forecast, advice)
    before, after = forecast.rows[1].first_token, advice.best.first_token
    assert before is not None and after is not None and after.p90_s < before.p90_s
    tails = f"from {duration(before.p90_s)} to {duration(after.p90_s)} (90th percentile)"
    assert first.startswith(f"With {binary_size(advice.best.host_bytes)} of host memory, ") and tails in first


def test_the_least_is_a_share_of_the_tokens_that_the_device_computes(tmp_path: Path) -> None:
    """The device alone hits nearly all, so the gain is few points; but prefill takes much less with host memory, and
    the first sentence says to buy."""
    often = [[10 * (number // 20) + at for at in range(5)] for number in range(1200)]
    path = write_trace(tmp_path / "often.jsonl", [*often, *often[::20]])
    forecast = Forecast(read_trace(path, BLOCK_TOKENS), Sizes(KV_BYTES, DEVICE))
    alone, endless = forecast.rows[1], forecast.rows[-1]
    assert saved(forecast, endless) - saved(forecast, alone) < 0.05
    assert endless.num_computed_tokens < (1 - LEAST) * alone.num_computed_tokens
    assert advise(forecast).row is not None


def test_the_rule_is_in_short_sentences(tmp_path: Path) -> None:
    """With the two numbers that it depends on."""
    sentences = rule(forecast_of(tmp_path, speeds=FAST)).removesuffix(".").split(". ")
    assert len(sentences) == 5 and max(len(sentence.split()) for sentence in sentences) <= 25
    assert sentences[2] == (
        "The advice names the smallest host memory of the table that has at least 80 % of the gain of unlimited host "
        "memory"
    )
    assert sentences[3] == (
        "The advice is to buy nothing if unlimited host memory would reduce prefill by less than 10 %, or if loading "
        "takes longer than computing"
    )


def test_loads_that_are_slower_than_computing_are_not_worth_buying(tmp_path: Path) -> None:
    """From the speed on at which a load takes as long as computing the same tokens; the lines below name that speed."""
    equal_gbs = KV_BYTES * 2000.0 / 1e9
    for factor, is_bought in ((0.99, False), (1.01, True)):
        speeds = Speeds(prefill_tokens_per_s=2000.0, host_gbs=factor * equal_gbs, disk_gbs=1.0)
        forecast = forecast_of(tmp_path, speeds=speeds)
        advice = advise(forecast)
        assert (advice.row is not None) == is_bought == advice.sentence.startswith("Buy 6.25 MiB")
        *_, line = consequences(forecast, advice)
        assert line.startswith("Loading a token") == is_bought  # else the sentence says it
        assert f"above {equal_gbs:.3g} GB/s" in line and f"below {factor * 2000:,.0f} prefill tokens/s" in line


@pytest.mark.parametrize(("hosts", "begins"), [(HOSTS[:1], "Buy none of these sizes: "), (HOSTS[:2], "Buy at least ")])
def test_sizes_that_are_too_small_are_not_recommended(tmp_path: Path, hosts: tuple[int, ...], begins: str) -> None:
    """If no size of the table is enough, the sentence says so."""
    assert advise(forecast_of(tmp_path, hosts)).sentence.startswith(begins)


def test_it_goes_by_eager_stores_whatever_the_table_has(tmp_path: Path) -> None:
    """The same advice for a table of lazy stores, or of an upper bound."""
    assert advise(forecast_of(tmp_path, stores=("lazy",))).sentence == advise(forecast_of(tmp_path)).sentence


def test_times_with_and_without_are_those_of_the_rows(tmp_path: Path) -> None:
    """And the prefill saved is the difference of the computed tokens, for an hour."""
    forecast = forecast_of(tmp_path, speeds=FAST)
    advice = advise(forecast)
    assert advice.row is not None
    first, *_ = consequences(forecast, advice)
    fewer = forecast.rows[1].num_computed_tokens - advice.row.num_computed_tokens
    minutes, seconds = divmod(round(fewer / 2000 / forecast.trace.duration_s * 3600), 60)
    assert first.endswith(f"Prefill for one hour of requests would take {minutes} min {seconds:02} s less.")
    assert list(consequences(forecast_of(tmp_path), advice)) == []


@pytest.mark.parametrize(
    ("part", "text"), [(0.0, "0 %"), (0.004, "0.4 %"), (0.0099, "1 %"), (0.01, "1 %"), (0.335, "34 %"), (1.6, "160 %")]
)
def test_percent(part: float, text: str) -> None:
    """Whole, with a decimal only below one."""
    assert percent(part) == text
