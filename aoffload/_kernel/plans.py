"""Plans and answers: the values that go in and out of the ledger.

A `TransferPlan` names the blocks to copy, and a `Completion` says how the copy ended. Only these two cross to a
transport. `PrefixMatch` and `Extension` are answers of verbs. All are frozen, can be copied and pickled, and hold no
reference into the ledger.

`check_completion` checks a completion field by field, because a transport may be third-party code.
"""

from __future__ import annotations

import enum
from array import array
from typing import TypedDict

import attrs

from .._common.arguments import check_int, check_text, number_of, shown
from .._common.tiers import Tier
from ..errors import InvalidArgument
from .states import LOAD, STORE, Direction, Outcome


class StoreScope(enum.Enum):
    """The part of one request that may be stored. It narrows what the store policy chooses."""

    ALL = "all"
    PROMPT = "prompt"
    """No generated tokens."""
    NONE = "none"


class RequestOptions(TypedDict, total=False):
    """The options of a request. `Ledger.admit` reads them, and has the defaults. All limits are in tokens."""

    max_hit_tokens: int | None
    """Maximum hit. None (the default): no limit. At least one token is always left to compute."""
    hit_alignment: int
    """The hit is rounded down to a multiple of this number of tokens. Default: 1. A load that falls short, or that is
    limited, may end at any unit."""
    reads_cache: bool
    """False: use no hit. Default: True."""
    store: StoreScope | str
    """The part that may be stored in host memory. Default: `StoreScope.ALL`."""
    max_store_tokens: int | None
    """Maximum number of leading tokens that may be stored. None (the default): no limit."""


@attrs.frozen
class TransferPlan:
    """Copy block `source_ids[i]` of tier `source` to block `destination_ids[i]` of tier `destination`, for every i.

    The order is prefix order. Ids are distinct on each side and never name the null block.
    """

    job_id: int
    source: Tier
    destination: Tier
    source_ids: array[int]
    destination_ids: array[int]
    payload: object = None
    """Data that a tier of the plan needs besides block ids, such as the name of an object. The rules of the tier make
    it, and only its transport reads it. None in most plans. It can be pickled."""

    @property
    def link(self) -> tuple[Tier, Tier]:
        return self.source, self.destination

    @property
    def direction(self) -> Direction:
        return LOAD if self.destination < self.source else STORE

    @property
    def num_blocks(self) -> int:
        return len(self.source_ids)


@attrs.frozen
class Completion:
    """The result of one plan. `num_landed`: number of leading blocks that are proven; 0 means all of them if `outcome`
    is LANDED. `corrupt`: the indices, in the plan, of blocks whose bytes are wrong; none is below `num_landed`.

    If the fields contradict each other, a block counts as proven only if every field agrees with that.
    """

    job_id: int
    outcome: Outcome
    num_landed: int = 0
    corrupt: tuple[int, ...] = ()
    error: str = ""
    num_bytes: int = 0
    duration_s: float = 0.0


class Answer(enum.Enum):
    """The answer of a match: whether a request has a hit."""

    HIT = "hit"
    MISS = "miss"
    PENDING = "pending"
    """Another request is loading the next block: match again later."""


@attrs.frozen
class PrefixMatch:
    """The number of leading tokens of a prompt that are cached: first those on the device, after them those in host
    memory, then those on the disk."""

    num_device_tokens: int
    num_host_tokens: int
    is_pending: bool = False
    num_lower_tokens: int = 0
    """Tokens after the hit that a fetch from the disk would add. They are not part of the hit."""

    def __repr__(self) -> str:
        """Without a disk, `num_lower_tokens` and `is_pending` keep their defaults, so the text leaves them out."""
        also = f", num_lower_tokens={self.num_lower_tokens}" if self.num_lower_tokens else ""
        also += ", is_pending=True" if self.is_pending else ""
        return f"PrefixMatch(num_device_tokens={self.num_device_tokens}, num_host_tokens={self.num_host_tokens}{also})"

    @property
    def num_tokens(self) -> int:
        return self.num_device_tokens + self.num_host_tokens

    @property
    def answer(self) -> Answer:
        if self.is_pending:
            return Answer.PENDING
        return Answer.HIT if self.num_tokens else Answer.MISS


NO_MATCH = PrefixMatch(0, 0)


@attrs.frozen
class Extension:
    """The changes that `extend` made in the block tables. Each field has one list per group."""

    added: list[list[int]]
    """The ids that were appended."""
    nulled: list[list[int]]
    """The positions that became null because they left the window of their group."""


@attrs.frozen
class Checkpoint:
    """A copy of the recurrent state after the first `num_tokens` tokens of a request, and the blocks that hold it: the
    blocks of all groups with `RecurrentState`, `num_rows` for each, in the order of the groups."""

    num_tokens: int
    block_ids: list[int]


@attrs.frozen
class TierStatistics:
    """Blocks of one tier by state; the last four add up to the first."""

    num_blocks: int
    num_free: int
    num_cached: int
    """Findable blocks under no lease, so evictable."""
    num_pinned: int
    """All other blocks: leased, private to a request, destinations of jobs, or unfindable but still leased
    (tombstones)."""
    num_quarantined: int

    def counted(self, name: str) -> str:
        """The counts as a line of text; `name` is the name of the tier."""
        counts = (f"{getattr(self, f'num_{state}'):,} {state}" for state in ("free", "cached", "pinned", "quarantined"))
        return f"{self.num_blocks:,} {name} blocks: {', '.join(counts)}"


def check_completion(completion: Completion) -> None:
    """Check every field before anything is changed: a transport may be third-party code."""
    if (
        type(completion) is Completion  # fast path for most completions: valid, and the copy has landed
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
        check_int(f"completion.{name}", getattr(completion, name), 0)
    if not isinstance(completion.outcome, Outcome):
        raise InvalidArgument("completion.outcome", f"must be an Outcome, got {shown(completion.outcome)}")
    if not isinstance(completion.corrupt, tuple):
        raise InvalidArgument("completion.corrupt", f"must be a tuple of indices, got {shown(completion.corrupt)}")
    for index in completion.corrupt:
        check_int("completion.corrupt", index, 0)
    check_text("completion.error", completion.error)
    duration_s = number_of(completion.duration_s)  # None for NaN, too
    if duration_s is None or duration_s < 0:
        raise InvalidArgument(
            "completion.duration_s", f"must be a number of seconds, got {shown(completion.duration_s)}"
        )


def agreeing(completion: Completion, num_blocks: int) -> Completion:
    """`completion` of a copy of `num_blocks` blocks. If its fields contradict each other, only the blocks that all of
    them name as proven remain so, because a transport may be third-party code."""
    reported, num_landed, corrupt = completion.outcome, completion.num_landed, completion.corrupt
    if reported is Outcome.UNPROVEN or (reported is Outcome.LANDED and num_landed in (0, num_blocks) and not corrupt):
        return completion
    outcome, num_proven = reported, min((num_landed, *corrupt)) if num_landed <= num_blocks else 0
    if corrupt:
        outcome = Outcome.CORRUPT
    elif reported is Outcome.LANDED:
        outcome = Outcome.FAILED
    if outcome is reported and num_proven == num_landed:
        return completion
    problem = f"reported as {reported.value}, with {num_landed} of {num_blocks} blocks and {len(corrupt)} corrupt ones"
    return attrs.evolve(completion, outcome=outcome, num_landed=num_proven, error=completion.error or problem)
