"""Plans without a trace: invented mixes go through the ordinary planner."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from aoffload import ConfigError
from aoffload.plan import mixes
from aoffload.plan.advice import advise, saved
from aoffload.plan.command import main
from aoffload.plan.forecast import Forecast, Sizes
from aoffload.plan.mixes import LOAD, MIXES, make_mix
from aoffload.plan.trace import Trace, parse_trace

GIB = 2**30
KV_BYTES = 128 * 2**10
NUMBERS = ("--kv-bytes-per-token", "100KiB", "--device", "20GiB", "--prefill-tokens-per-s", "9000", "--host-gbs", "20")
each_mix = pytest.mark.parametrize("name", tuple(MIXES))


def made_trace(name: str, prefill_tokens_per_s: float = 9000.0, users: int | None = None) -> Trace:
    return parse_trace(name, make_mix(name, 512, prefill_tokens_per_s, users).lines)


def planned(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main([*arguments, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


@each_mix
def test_a_mix_is_planned_like_a_trace(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The trace that --save-mix writes, given as TRACE with the same numbers, has the same plan to the last digit."""
    file = tmp_path / "mix.jsonl"
    from_mix = planned(capsys, "--mix", name, *NUMBERS, "--save-mix", str(file))
    from_file = planned(capsys, str(file), *NUMBERS)
    assert from_mix.pop("mix")["users"] > 1 and from_file.pop("mix") is None
    assert (from_mix["trace"].pop("name"), from_file["trace"].pop("name")) == (f"mix {name}", "mix.jsonl")
    of_mix, of_file = (each["advice"].pop("sentence") for each in (from_mix, from_file))
    assert re.sub(r" for [\d,]+ users \(choose with --users\):", ":", of_mix) == of_file != of_mix
    assert from_mix == from_file and from_mix["trace"]["num_requests"] > 100


@each_mix
def test_a_mix_is_the_same_each_time(name: str) -> None:
    """It is drawn from a seed. More users add requests and change none."""
    one, again, more = (make_mix(name, 512, 1.0, users) for users in (3, 3, 5))
    assert one == again and set(one.lines) < set(more.lines)


@each_mix
def test_users_keep_the_device_busy_but_not_overloaded(name: str) -> None:
    """Without --users: computing all prompts takes at most 70 % of the time, and a user more would take more."""
    mix, found = MIXES[name], make_mix(name, 512, 9000.0)
    limit = LOAD * 9000.0 * mix.duration_s
    one_more = made_trace(name, users=found.users + 1)
    assert parse_trace(name, found.lines).num_prompt_tokens <= limit < one_more.num_prompt_tokens


def test_a_slow_device_has_one_user(capsys: pytest.CaptureFixture[str]) -> None:
    """Even if that one overloads it; a warning says so."""
    assert main(["--mix", "agents", "--prefill-tokens-per-s", "20"]) == 0
    printed = capsys.readouterr().out
    assert (
        "\n- 1 user for 4 hours: " in printed and "warning: Computing takes more time than the trace lasts" in printed
    )


def test_the_first_sentence_names_the_users(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """On the terminal, on the page and in JSON. If --users is not given, a line says that the number depends on the
    prefill speed, because a plan of other hardware is then one of another workload."""
    file = tmp_path / "page.html"
    slow = ("--mix", "agents", "--prefill-tokens-per-s", "8000")
    for chosen, named in (((), "6 users (choose with --users)"), (("--users", "2"), "2 users")):
        assert main([*slow, *chosen, "--html", str(file)]) == 0
        first, *others = capsys.readouterr().out.splitlines()
        assert first.startswith("Buy ") and f" for {named}: " in first
        assert f"<h1>{first}</h1>" in file.read_text()
        found = planned(capsys, *slow, *chosen)
        assert found["advice"]["sentence"] == first and found["mix"]["has_own_users"] == (not chosen)
        assert any(line.startswith("The number of users depends on the prefill speed") for line in others) != bool(
            chosen
        )
        assert ("The number of users depends" in file.read_text()) != bool(chosen)


def test_what_the_mix_assumes_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    """Users, prompts, turns, answers and pauses, and the numbers that were not given; and that all is invented."""
    assert main(["--mix", "agents"]) == 0
    printed = capsys.readouterr().out
    assert (
        "\nThis mix is an invented workload. Plan with a trace of your own for a real answer (aoffload plan TRACE).\n"
        in printed
    )
    assert "128 KiB of KV in a token, 40 GiB of device memory" in printed
    assert "prefill at 25,000 tokens/s, 25 GB/s from the host" in printed
    assumed = printed.partition("The mix assumes:\n")[2].splitlines()
    assert len(assumed) == 8 and all(line.startswith("- ") for line in assumed)
    for part in (
        "5,120 tokens that all prompts share",
        "600 tokens (median; p90 3,600)",
        "67 on average",
        "16 s",
        "200 s",
    ):
        assert part in "".join(assumed)


@each_mix
def test_prompts_are_as_the_assumptions_say(name: str) -> None:
    """Lengths of first prompts and pauses have the median and the 90th percentile of the parameters, about."""
    mix, lines = MIXES[name], make_mix(name, 512, 1.0, 300 if name != "agents" else 60).lines
    requests = [json.loads(line) for line in lines[1:]]
    seen, first = set[int](), list[int]()
    for request in requests:
        own = [block for block in request["hash_ids"] if block > 2**20]
        if own and own[0] not in seen:
            first.append(request["input_length"] - mix.shared_tokens)
        seen.update(own[:1])
    first.sort()
    for at, expected in ((0.5, mix.first_tokens.median), (0.9, mix.first_tokens.p90)):
        assert first[int(at * len(first))] == pytest.approx(expected, rel=0.25)
    assert all(request["input_length"] <= mix.max_tokens for request in requests)
    tools = [request["returns_s"] for request in requests if request["stop"] == "tool_use"]
    assert bool(tools) == (mix.tool_s is not None)
    if mix.tool_s is not None:
        assert sorted(tools)[len(tools) // 2] == pytest.approx(mix.tool_s.median, rel=0.1)


REAL = {
    # of the first 4,000 requests of Mooncake's conversation trace, 3.07 a second
    "conversations": (3.07, 570, 4000, {0: 0.04, 80: 0.04, 160: 0.06, 320: 0.12, 640: 0.21, 1280: 0.28, 10**5: 0.33}),
    # of 350 recorded sessions of coding agents, 20,522 requests, 0.57 a second
    "agents": (0.57, 60, None, {0: 0.06, 80: 0.21, 160: 0.56, 320: 0.85, 640: 0.94, 1280: 0.96, 10**5: 0.96}),
}
"""By mix: requests a second of the public trace; users and requests that have about that rate and length; and the share
of prompt tokens that hit there, by GiB of host memory after a device of 40 GiB, at 128 KiB a token."""


@pytest.mark.parametrize("name", tuple(REAL))
def test_the_mix_hits_like_the_public_trace(name: str) -> None:
    """At its rate of requests, the shares of hits are in the same range: at most 20 points apart where the curve is
    steep, and at most 5 with unlimited memory; the curve bends at the same size or the one before."""
    rate, users, limit, real = REAL[name]
    trace = parse_trace(name, make_mix(name, 512, 1.0, users).lines, limit=limit)
    sizes = Sizes(KV_BYTES, 40 * GIB, tuple(size * GIB for size in real if size))
    rows = Forecast(trace, sizes).rows[1:-1]
    found = {size: saved(Forecast(trace, sizes), row) for size, row in zip(real, rows, strict=True)}
    assert len(trace.requests) / trace.duration_s == pytest.approx(rate, rel=0.15)
    assert max(abs(found[size] - real[size]) for size in real) <= 0.2
    assert abs(found[10**5] - real[10**5]) <= 0.05

    def enough(shares: dict[int, float]) -> int:
        goal = shares[0] + 0.8 * (shares[10**5] - shares[0])
        return min(size for size, share in shares.items() if share >= goal)

    assert enough(found) in (enough(real), enough(real) // 2)


def test_documents_that_are_read_once_need_no_memory(capsys: pytest.CaptureFixture[str]) -> None:
    """For those whose prompts do not return, the first line says that offloading brings nothing."""
    assert main(["--mix", "documents"]) == 0
    assert capsys.readouterr().out.startswith(
        "Buy nothing for 156 users (choose with --users): offloading brings nothing here, because "
    )


def test_a_slow_link_makes_it_worthless(capsys: pytest.CaptureFixture[str]) -> None:
    """At the same hits."""
    assert main(["--mix", "agents", "--host-gbs", "3"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith(
        "Buy nothing for 17 users (choose with --users): loading a token from host memory takes 109 %"
    )
    assert "the time to the first token would go from 1.98 s to 2.14 s (median)" in printed
    assert "Loading is faster only above 3.28 GB/s from the host at this prefill speed" in printed


def test_hints_can_be_planned_with_a_mix() -> None:
    """A mix says why each answer ended and when its session returns."""
    trace = made_trace("agents", users=4)
    forecast = Forecast(
        trace, Sizes(KV_BYTES, 40 * GIB, (60 * GIB,)), evictions=("lru", "learned"), hints=("none", "stop", "returns")
    )
    lru, learned, _, returns = forecast.rows[2:-1]
    assert returns.num_hit_blocks >= max(lru.num_hit_blocks, learned.num_hit_blocks) > 0


def test_the_page_of_a_mix_says_that_it_is_invented(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """At the top, with the sentence; and it lists the assumptions."""
    file = tmp_path / "page.html"
    assert main(["--mix", "conversations", *NUMBERS, "--html", str(file)]) == 0
    page, sentence = file.read_text(), capsys.readouterr().out.splitlines()[0]
    assert f"<h1>{sentence}</h1><p>mix conversations</p>" in page
    assert page.index("This mix is an invented workload.") < page.index("<svg") and page.count("<li>") >= 6


# -- options -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ([], "give either TRACE, a file, or --mix, an invented workload"),
        (["trace.jsonl", "--mix", "agents"], "give either TRACE, a file, or --mix"),
        (["--mix", "robots"], "argument --mix: invalid choice: 'robots'"),
        (["trace.jsonl", "--device", "1GiB"], "argument --kv-bytes-per-token: either this or --model is required"),
        (["trace.jsonl", "--kv-bytes-per-token", "1"], "argument --device: is required with TRACE"),
        (["--mix", "agents", "--kv-bytes-per-token", "many"], "argument --kv-bytes-per-token: is not a size: 'many'"),
        (["--mix", "agents", "--prefill-tokens-per-s", "0"], "argument --prefill-tokens-per-s: must be a number from"),
        (["--mix", "agents", "--host-gbs", "fast"], "argument --host-gbs: must be a number from 1e-9 on, got 'fast'"),
        (["--mix", "agents", "--users", "0"], "argument --users: must be an integer in [1, 1000000], got '0'"),
        (["--mix", "agents", "--model", "m", "--kv-bytes-per-token", "1"], "argument --model: has no effect with"),
        (["t", "--kv-bytes-per-token", "1", "--device", "1", "--users", "2"], "--users: has an effect only with --mix"),
        (["t", "--kv-bytes-per-token", "1", "--device", "1", "--save-mix", "f"], "--save-mix: has an effect only with"),
        (["--mix", "documents", "--save-mix", "m.gz"], "--save-mix: must name a file that is not compressed"),
        (["--mix", "documents", "--save-mix", "-"], "--save-mix: must name a file that is not compressed"),
    ],
)
def test_wrong_options_are_named(arguments: list[str], problem: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit status 2, and nothing on standard output."""
    with pytest.raises(SystemExit) as left:
        main(arguments)
    captured = capsys.readouterr()
    assert left.value.code == 2 and captured.out == "" and problem in captured.err


def test_more_users_than_can_be_planned_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the number that can be; without --users, the mix has that number."""
    monkeypatch.setattr(mixes, "MAX_ACCESSES", 2000)
    assert main(["--mix", "conversations", "--users", "1000"]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1
    found = re.search(r"argument --users: must be at most (\d+) with --mix conversations, got 1,000", captured.err)
    assert found is not None
    assert make_mix("conversations", 512, 1e9).users == int(found[1])
    with pytest.raises(ConfigError):
        make_mix("conversations", 512, 1e9, int(found[1]) + 1)


def test_the_bytes_of_a_token_come_from_the_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """--model reads a config.json, or finds it in a directory. Anything else is one line that names the option."""
    config = Path(__file__).parents[1] / "model_configs" / "Qwen--Qwen3-8B.json"
    by_model = planned(capsys, "--mix", "documents", "--model", str(config))
    assert by_model["block_bytes"] == 512 * 36 * 2 * 8 * 128 * 2  # layers, keys and values, heads, size, bfloat16
    (tmp_path / "config.json").write_text("{}")
    assert main(["--mix", "documents", "--model", str(tmp_path)]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("aoffload plan: argument --model: ") and captured.err.count("\n") == 1


def test_a_mix_is_not_written_over_a_directory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One line, and status 2."""
    assert main(["--mix", "documents", "--save-mix", str(tmp_path)]) == 2
    assert "Is a directory" in capsys.readouterr().err


def test_the_advice_of_a_mix_is_that_of_its_forecast() -> None:
    """There is no rule of its own for mixes."""
    trace = made_trace("conversations")
    assert advise(Forecast(trace, Sizes(KV_BYTES, 40 * GIB))).sentence.startswith("Buy ")
