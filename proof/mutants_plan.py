"""Planted defects of the planner's hints, quotas and tenants."""

from __future__ import annotations

from .planting import Mutant

__all__ = ["PLAN_MUTANTS"]

REPLAY, TRACE, RECORDER = "aoffload.plan.replay", "aoffload.plan.trace", "aoffload.plan.recorder"
TESTS = "tests/plan/test_plan_forecast.py::test_"

PLAN_MUTANTS = (
    Mutant(
        "a replay drops its hints",
        REPLAY,
        "    if hint is not None:\n",
        "    if hint is None and hint is not None:\n",
        "a plan with hints hits what hints bring",
        test=f"{TESTS}hints_hit_more_and_the_true_time_hits_most",
    ),
    Mutant(
        "a plan takes the time of return for the stop reason",
        REPLAY,
        "        return [Predicted(category=each.stop) if each.stop else None for each in trace.requests]\n",
        "        return [None if each.returns_s is None else Predicted(each.returns_s) for each in trace.requests]\n",
        "the row of the stop reason knows no more than the stop reason",
        test=f"{TESTS}hints_hit_more_and_the_true_time_hits_most",
    ),
    Mutant(
        "a replay knows no tenants",
        REPLAY,
        "Prefix.of(roots[request.tenant], tokens",
        "Prefix.of(ROOT, tokens",
        "a floor keeps the blocks of its tenant",
        test=f"{TESTS}a_floor_keeps_a_tenant_from_a_scan",
    ),
    Mutant(
        "tenants share blocks",
        TRACE,
        "before = self._numbers, -1 - self._tenants.setdefault(tenant, len(self._tenants))\n",
        "before = self._numbers, -1\n",
        "equal ids of two tenants are two blocks",
        test="tests/plan/test_plan_trace.py::test_tenants_share_no_block",
    ),
    Mutant(
        "the recorder writes salts",
        RECORDER,
        "        return self._digests.of_salt(salt) if self._tenants is True else self._tenants.get(salt)\n",
        "        return str(salt) if self._tenants is True else self._tenants.get(salt)\n",
        "a salt is a secret of its tenant",
        test="tests/plan/test_recorder.py::test_tenants_are_written_if_they_are_asked_for",
    ),
)
