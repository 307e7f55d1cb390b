"""What `make vllm` makes of the answers of an engine: comparisons, rows and verdicts. No vLLM is needed."""

from __future__ import annotations

import math
from pathlib import Path

import attrs
import pytest

from proof.vllm.hooks import HookTimes, mean, percentile
from proof.vllm.outputs import MOST_APART, Answer, compare, digest
from proof.vllm.prompts import Conversations, burst, users, words
from proof.vllm.rows import HEAD, Row, judge, read, table, write

ONE = Answer((5, 6, 7), (-0.5, -1.5, -2.5), num_prompt_tokens=64, num_cached_tokens=32)
TWO = Answer((8, 9, 10), (-0.25, -0.5, -0.75), num_prompt_tokens=40)


def shifted(answer: Answer, by: float) -> Answer:
    return Answer(answer.tokens, (*answer.logprobs[:-1], answer.logprobs[-1] + by))


def test_equal_answers_are_equal() -> None:
    """Up to the order of summation, which moves log-probabilities by much less than other KV does."""
    found = compare({"a": ONE, "b": shifted(TWO, MOST_APART / 2)}, {"a": ONE, "b": TWO})
    assert found.is_equal and found.num_equal == 2 and found.most_apart == pytest.approx(MOST_APART / 2)


@pytest.mark.parametrize(
    "other",
    [
        Answer((5, 6, 8), ONE.logprobs),
        Answer(ONE.tokens[:2], ONE.logprobs[:2]),
        shifted(ONE, 2 * MOST_APART),
        shifted(ONE, math.nan),
    ],
    ids=["token", "shorter", "logprob", "no-number"],
)
def test_another_answer_differs(other: Answer) -> None:
    """In one token, in length or in a log-probability."""
    found = compare({"a": other, "b": TWO}, {"a": ONE, "b": TWO})
    assert not found.is_equal and found.different == ("a",)
    assert str(found) == "1 of 2 differ: a"


def test_a_missing_answer_differs() -> None:
    """On either side; and where nothing was answered, nothing is equal."""
    assert compare({}, {"a": ONE}).different == compare({"a": ONE}, {}).different == ("a",)
    assert not compare({}, {}).is_equal


def test_the_digest_is_that_of_the_tokens() -> None:
    """In the order of names, whatever the order of answers."""
    assert digest({"a": ONE, "b": TWO}) == digest({"b": shifted(TWO, 1.0), "a": ONE})
    assert digest({"a": ONE, "b": TWO}) != digest({"a": TWO, "b": ONE})


def judged(answers: dict[str, Answer], num_free: int = 10, may_differ: bool = False) -> Row:
    reference = {"a": ONE}
    return judge("s", answers, reference, num_blocks=10, num_free=num_free, took_s=1.0, may_differ=may_differ)


def test_a_scenario_is_met() -> None:
    """With equal outputs and no block held."""
    row = judged({"a": ONE})
    assert row.is_met and row.verdict == "met"
    assert (row.cached, row.free, row.held) == ("32 of 64", "10 of 10", "0")


def test_what_makes_a_scenario_missed() -> None:
    """Other outputs, unless they may differ; blocks that are held; any further problem."""
    assert judged({"a": TWO}).problems == ("other outputs than the reference",)
    assert judged({"a": TWO}, may_differ=True).is_met
    assert judged({"a": ONE}, num_free=7).problems == ("3 blocks are still held",)
    assert judged({"a": ONE}).missed("", "slow").problems == ("slow",)
    assert judged({"a": ONE}).missed("").is_met


def test_rows_are_read_as_they_were_written(tmp_path: Path) -> None:
    """And anything else is an error."""
    rows = [judged({"a": ONE}), judged({"a": TWO}, num_free=1)]
    write(rows, tmp_path / "rows.json")
    assert read(tmp_path / "rows.json") == rows
    (tmp_path / "rows.json").write_text('[{"no": 1}]')
    with pytest.raises(ValueError, match="holds no rows"):
        read(tmp_path / "rows.json")


def test_the_table_has_a_line_for_each_row() -> None:
    """Whatever its cells hold."""
    lines = table([Row("a | b\nc", problems=("x",)), Row("d", was_run=False)]).splitlines()
    assert len(lines) == 4 and lines[2].startswith("| MISSED | a \\| b c |") and lines[3].startswith("| not run | d |")
    assert lines[3].count("|") == len(HEAD) + 1


def test_prompts_are_the_same_everywhere() -> None:
    """Drawn by their seed alone; those of a burst share what they have to share."""
    assert words("x", 5) == words("x", 5) != words("y", 5)
    first, second = list(burst(2, 64, 10).values())
    assert first[:64] == second[:64] and first[64:] != second[64:] and len(first) == 74


def test_users_of_a_system_prompt_ask_questions_of_their_own() -> None:
    """They share the system prompt, and no token block after it."""
    prompts = users(8, 64, range(20, 40))
    assert len(prompts) == 8 and len({tuple(prompt[:64]) for prompt in prompts.values()}) == 1
    assert len({tuple(prompt[64:72]) for prompt in prompts.values()}) == 8
    assert all(20 <= len(prompt) - 64 < 40 for prompt in prompts.values())
    assert prompts == users(8, 64, range(20, 40))


def test_a_conversation_goes_on_with_its_answer() -> None:
    """A prompt is all that was said before, and something new."""
    talks = Conversations(2)
    first = talks.prompts(0)
    talks.hear("c1.0", (7, 8))
    second = talks.prompts(1)
    said = [*first["c1.0"], 7, 8]
    assert second["c1.1"][: len(said)] == said and len(second["c1.1"]) > len(said)
    assert second["c0.1"][: len(first["c0.0"])] == first["c0.0"]


@attrs.define
class Clock:
    now: int = 0

    def __call__(self) -> int:
        return self.now


class Hooked:
    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def request_finished(self) -> str:
        self.clock.now += 1_000
        return self.request_finished_all_groups()

    def request_finished_all_groups(self) -> str:
        self.clock.now += 2_000
        return "told"

    def update_state_after_alloc(self) -> None:
        self.clock.now += 4_000

    def has_pending_push_work(self) -> None:
        self.clock.now += 500
        raise ValueError


def test_hooks_are_timed_step_by_step() -> None:
    """One that calls another counts once, one that raises counts, and polling counts for the step that follows."""
    clock = Clock()
    hooked = Hooked(clock)
    times = HookTimes(hooked, clock)
    assert hooked.request_finished() == "told"
    times.end_step(num_scheduled_tokens=5)
    with pytest.raises(ValueError):
        hooked.has_pending_push_work()
    times.end_step(num_scheduled_tokens=0)
    hooked.update_state_after_alloc()
    times.end_step(num_scheduled_tokens=0)
    assert times.working_us() == [3.0, 4.5]


def test_means_and_percentiles() -> None:
    """The nearest rank: at least so many percent are not above it."""
    assert mean([1.0, 2.0, 6.0]) == 3.0
    assert percentile([float(number) for number in range(1, 101)], 99) == 99.0
    assert percentile([3.0], 99) == 3.0
