"""Checks of what callers hand in: a typed error that names the argument, before anything is changed."""

from __future__ import annotations

import math

from ..errors import InvalidArgument
from .plan import Completion, Outcome, Tier

__all__ = ["check_bool", "check_completion", "check_int", "check_tier"]


def check_int(name: str, value: object, minimum: int, maximum: float = math.inf) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value <= maximum:
        raise InvalidArgument(name, f"must be an integer in [{minimum}, {maximum}], got {value!r}")
    return value


def check_tier(name: str, tier: object) -> Tier:
    if not isinstance(tier, Tier):
        raise InvalidArgument(name, f"must be a Tier, got {tier!r:.80}")
    return tier


def check_bool(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise InvalidArgument(name, f"must be True or False, got {value!r:.80}")


def check_completion(completion: Completion) -> None:
    """A transport may be another program's: what it says is looked at before anything is changed."""
    if not isinstance(completion, Completion):
        raise InvalidArgument("completion", f"must be a Completion, got {type(completion).__name__}")
    check_int("completion.job_id", completion.job_id, 0)
    check_int("completion.num_landed", completion.num_landed, 0)
    if not isinstance(completion.outcome, Outcome):
        raise InvalidArgument("completion.outcome", f"must be an Outcome, got {completion.outcome!r}")
    if not isinstance(completion.corrupt, tuple):
        raise InvalidArgument("completion.corrupt", f"must be a tuple of indices, got {completion.corrupt!r}")
    for index in completion.corrupt:
        check_int("completion.corrupt", index, 0)
