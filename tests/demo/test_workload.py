"""The demo's workload."""

from __future__ import annotations

import pytest

from aoffload.demo.workload import make_workload


@pytest.mark.parametrize("num_requests", [1, 2, 3, 4, 5, 31, 32, 50])
def test_as_many_requests_as_asked_for(num_requests: int) -> None:
    """Any number of requests is dealt out completely, and no conversation is empty."""
    workload = make_workload(0, num_requests, vocab_size=1000)
    assert workload.num_requests == num_requests
    assert all(conversation.turns for conversation in workload.conversations)


def test_a_seed_fixes_it() -> None:
    """The same seed is the same workload; another seed is another one."""
    assert make_workload(7, 12, 1000) == make_workload(7, 12, 1000)
    assert make_workload(7, 12, 1000) != make_workload(8, 12, 1000)


def test_a_prompt_is_everything_said_so_far() -> None:
    """Turn n's prompt starts with turn n-1's prompt and answer, so that a cache can help; its length is known."""
    conversation = make_workload(0, 8, 1000).conversations[0]
    answers = {turn.turn_id: [5] * turn.num_answer_tokens for turn in conversation.turns}
    for index in range(1, len(conversation.turns)):
        before = conversation.prompt(index - 1, answers)
        prompt = conversation.prompt(index, answers)
        answer = answers[conversation.turns[index - 1].turn_id]
        assert prompt[: len(before) + len(answer)] == [*before, *answer]
        assert len(prompt) == conversation.num_prompt_tokens(index)


def test_prompts_share_system_prompts_and_have_the_announced_lengths() -> None:
    """Some hundred to two thousand tokens; few system prompts for many conversations; ids within the vocabulary."""
    workload = make_workload(0, 64, 1000)
    lengths = [c.num_prompt_tokens(i) for c in workload.conversations for i in range(len(c.turns))]
    assert min(lengths) >= 300
    assert max(lengths) <= workload.max_tokens <= 2000
    assert len({conversation.system for conversation in workload.conversations}) == 2
    tokens = {token for c in workload.conversations for turn in c.turns for token in turn.message}
    assert min(tokens) >= 0
    assert max(tokens) < 1000
