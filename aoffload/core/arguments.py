"""Checks of arguments to the ledger. Checks for the whole package are in `aoffload/arguments.py`."""

from __future__ import annotations

from ..arguments import check_bool, check_int, check_text, check_type, number_of, shown
from ..errors import InvalidArgument
from ..prefix import Prefix
from .hops import Outcome, Tier
from .plan import Completion

__all__ = ["check_bool", "check_completion", "check_int", "check_prefix", "check_text", "check_tier"]


def check_tier(name: str, tier: object) -> Tier:
    if not isinstance(tier, Tier):
        raise InvalidArgument(name, f"must be a Tier, got {shown(tier)}")
    return tier


def check_prefix(prefix: object) -> Prefix:
    return prefix if isinstance(prefix, Prefix) else check_type("prefix", prefix, Prefix)


def check_completion(completion: Completion) -> None:
    """Check every field before anything is changed: a transport may be third-party code."""
    if (
        type(completion) is Completion  # as most are: nothing is wrong with it, or with the copy
        and type(completion.job_id) is type(completion.num_landed) is type(completion.num_bytes) is int
        and min(completion.job_id, completion.num_landed, completion.num_bytes) >= 0
        and completion.outcome is Outcome.LANDED
        and type(completion.corrupt) is tuple
        and not completion.corrupt
        and type(completion.error) is str
        and type(completion.duration_s) is float
        and completion.duration_s >= 0
    ):
        return
    if not isinstance(completion, Completion):
        raise InvalidArgument("completion", f"must be a Completion, got {type(completion).__name__}")
    for name in ("job_id", "num_landed", "num_bytes"):
        value = getattr(completion, name)
        if type(value) is not int or value < 0:
            check_int(f"completion.{name}", value, 0)
    if not isinstance(completion.outcome, Outcome):
        raise InvalidArgument("completion.outcome", f"must be an Outcome, got {shown(completion.outcome)}")
    if not isinstance(completion.corrupt, tuple):
        raise InvalidArgument("completion.corrupt", f"must be a tuple of indices, got {shown(completion.corrupt)}")
    for index in completion.corrupt:
        check_int("completion.corrupt", index, 0)
    if not isinstance(completion.error, str):
        check_text("completion.error", completion.error)
    duration_s: float | None = completion.duration_s
    if type(duration_s) is not float or not duration_s >= 0:  # refuses NaN, too
        duration_s = number_of(duration_s)
    if duration_s is None or duration_s < 0:
        raise InvalidArgument("completion.duration_s", f"must be seconds, got {shown(completion.duration_s)}")
