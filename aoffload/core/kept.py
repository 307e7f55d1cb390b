"""What keeps blocks beside a request: pins, prefetches, fetches, demotions and steps, and what each owns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from .answer import NO_MATCH, PrefixMatch
from .lifecycle import CacheTransferState, PinState
from .owners import Holding
from .plan import TransferPlan
from .records import Lease
from .tokens import TokenSequence

__all__ = ["CacheTransfer", "Demotion", "Fetch", "Pin", "Prefetch", "Step"]


@dataclass(slots=True, eq=False, repr=False)
class Pin:
    """What `Ledger.pin` returns. Ends once: by `unpin`, its deadline, `drop_pins` or `reset`, or to make room."""

    pin_id: int
    sequence: TokenSequence
    expires_at: float
    """By the clock whose time `Ledger.lapse` is given."""
    ledger: Any
    state: PinState = PinState.NEW
    match: PrefixMatch = NO_MATCH
    """What it keeps, or has kept."""
    leases: list[Lease] = field(default_factory=list)
    since_s: float = 0.0
    """When it entered its state, where the ledger has a clock."""

    def __repr__(self) -> str:
        return f"<Pin {self.pin_id} {self.state.name} {self.match.num_tokens} tokens>"

    def __str__(self) -> str:
        return f"pin {self.pin_id}"

    @property
    def has_lapsed(self) -> bool:
        """Whether its time was over before it was released."""
        return self.state is PinState.LAPSED

    def all_leases(self) -> list[Lease]:
        return self.leases


@dataclass(slots=True, eq=False, repr=False)
class CacheTransfer:
    holding: Holding
    wake: Callable[[], object]
    """Called once it is over."""
    state: CacheTransferState = CacheTransferState.NEW
    plans: tuple[TransferPlan, ...] = ()
    """To be launched. Even without any, it may wait for jobs of other requests."""

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.holding.request_id} {self.state.name}>"

    def __str__(self) -> str:
        return self.holding.request_id

    @property
    def is_over(self) -> bool:
        return self.state in (CacheTransferState.DONE, CacheTransferState.CANCELLED)


@dataclass(slots=True, eq=False, repr=False)
class Prefetch(CacheTransfer):
    num_blocks: int = 0
    """Device blocks that it has taken: they count in the share of all prefetches while it is under way."""
    num_tokens: int = 0
    """Tokens of the prompt on the device when it was over."""


@dataclass(slots=True, eq=False, repr=False)
class Demotion(CacheTransfer):
    num_blocks: int = 0
    """Device blocks that it has given back."""


@dataclass(slots=True, eq=False, repr=False)
class Fetch(CacheTransfer):
    request: Holding | None = None
    """Who waits for it; None for one that was begun ahead."""
    num_blocks: int = 0
    """Host blocks that it has taken: they count in the share of all fetches while it is under way."""
    num_tokens: int = 0
    """Tokens that a request for the prompt would have hit when it was over, on the device and in the host."""


@dataclass(slots=True, eq=False, repr=False)
class Step:
    """A forward over the blocks of `holdings`, which it holds until it ends, also of requests that are over."""

    step_id: int
    holdings: tuple[Holding, ...]
    begun_s: float = 0.0
    """Where the ledger has a clock."""

    def __repr__(self) -> str:
        return f"<Step {self.step_id} {' '.join(holding.request_id for holding in self.holdings)}>"

    @property
    def num_blocks(self) -> int:
        """Device blocks that it holds; those that requests share count for each of them."""
        return sum(holding.num_held for holding in dict.fromkeys(self.holdings))
