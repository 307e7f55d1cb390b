"""Scenarios with an EAGLE head beside a model with full attention."""

from __future__ import annotations

from typing import Any

from .bench import OUT, run_model
from .draft_models import build_eagle
from .drafts import NUM_DRAFTS, STEP_TOKENS, draft_scenarios

__all__ = ["SCENARIOS"]

SCENARIOS = draft_scenarios("EAGLE: ")

if __name__ == "__main__":
    target, head = build_eagle(OUT / "eagle")
    drafts: dict[str, Any] = {"method": "eagle", "model": str(head), "num_speculative_tokens": NUM_DRAFTS}
    run_model(target, SCENARIOS, speculative_config=drafts, max_num_batched_tokens=STEP_TOKENS)
