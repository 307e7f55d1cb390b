"""Scenarios with a layer for multi-token prediction (MTP), of a small GLM-4."""

from __future__ import annotations

from .bench import OUT, run_model
from .draft_models import build_mtp
from .drafts import STEP_TOKENS, draft_scenarios

__all__ = ["SCENARIOS"]

SCENARIOS = draft_scenarios("MTP: ")

if __name__ == "__main__":
    drafts = {"method": "mtp", "num_speculative_tokens": 1}
    run_model(build_mtp(OUT / "mtp"), SCENARIOS, speculative_config=drafts, max_num_batched_tokens=STEP_TOKENS)
