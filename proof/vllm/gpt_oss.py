"""Scenarios with gpt-oss: sliding windows, attention sinks and experts."""

from __future__ import annotations

from functools import partial

from .bench import Scenario, run_part
from .models import GPT_OSS
from .one_rank import ours
from .shared_prompt import POOL, shared_prompts

__all__ = ["SCENARIOS"]

NAME = "gpt-oss: "

SCENARIOS = (
    Scenario("ours", partial(ours, num_blocks=POOL, model=NAME), is_short=True),
    *shared_prompts(NAME),
)

if __name__ == "__main__":
    run_part(GPT_OSS, SCENARIOS)
