"""A ledger with a remote store, driven by hand: the store is the set of the cells that were put there."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from disk_driving import disk_of
from driving import BLOCK, Driven, prompt

from aoffload._common.tiers import Tier
from aoffload._config.tiers import RemoteTier
from aoffload._kernel.plans import TransferPlan
from aoffload._kernel.states import Outcome
from aoffload._tiers.remote.plans import CellLabel
from aoffload._tiers.remote.rules import cells_of

__all__ = ["BLOCK", "CELL", "CELL_UNITS", "LOAD", "STORE", "NoStore", "Remote", "cell_of", "prompt"]

CELL_UNITS = 4
CELL = CELL_UNITS * BLOCK
"""Tokens of a cell."""
HUGE = 10**6
LOAD, STORE = (Tier.REMOTE, Tier.HOST), (Tier.HOST, Tier.REMOTE)


class NoStore:
    """What a configuration names; a ledger never calls it."""

    def exist(self, keys: Any, timeout_s: float) -> Any: ...
    def get(self, key: bytes, timeout_s: float) -> Any: ...
    def put(self, key: bytes, value: Any, timeout_s: float) -> None: ...
    def remove(self, key: bytes, timeout_s: float) -> None: ...
    def node_of(self, key: bytes) -> str:
        return "none"

    def close(self) -> None: ...


def remote_tier() -> RemoteTier:
    """For blocks of a byte, of which a unit has one."""
    return RemoteTier(NoStore(), cell_bytes=CELL_UNITS)


def cell_of(plan: TransferPlan) -> CellLabel:
    """The cell that a plan from or to the store copies."""
    assert isinstance(plan.payload, CellLabel)
    return plan.payload


class Remote(Driven):
    """Cells of 4 units, 16 tokens. `num_slots`: of a disk beside the store; 0: none."""

    def __init__(self, num_device: int = 64, num_host: int = 64, num_slots: int = 0, **config: Any) -> None:
        config.setdefault("max_fetch_share", 1.0)
        if num_slots:
            config["disk"] = disk_of(num_slots)
        super().__init__(num_device, num_host, remote=remote_tier(), namespace="test", **config)
        assert self.ledger.remote.cell_units == CELL_UNITS
        self.cells_stored: dict[bytes, CellLabel] = {}

    def cells(self, tokens: list[int], **options: Any) -> tuple[CellLabel, ...]:
        return cells_of(self.prefix(tokens, **options), BLOCK, CELL_UNITS)

    def end(
        self, plan: TransferPlan, outcome: Outcome = Outcome.LANDED, num_landed: int = 0, corrupt: Any = ()
    ) -> None:
        if plan.destination is Tier.REMOTE and outcome is Outcome.LANDED:
            cell = cell_of(plan)
            self.cells_stored[cell.digest] = cell
        super().end(plan, outcome, num_landed, corrupt)

    def is_wanted(self, cell: CellLabel) -> bool:
        return cell.digest not in self.cells_stored

    def write_behind(
        self, max_blocks: int = HUGE, is_wanted: Callable[[CellLabel], bool] | None = None
    ) -> list[TransferPlan]:
        plans = list(self.ledger.remote.plan_stores(max_blocks, is_wanted or self.is_wanted))
        self.ledger.check_integrity()
        assert {plan.link for plan in plans} <= {STORE}
        return plans

    def ask_for(self, *prompts: list[int], times: int = 2, **options: Any) -> None:
        for tokens in prompts * times:
            self.serve(tokens, **options)

    def in_store_only(self, *prompts: list[int], **options: Any) -> None:
        """Asked for twice, put into the store, and gone from the tiers above."""
        self.ask_for(*prompts, **options)
        self.land(self.write_behind())
        self.forget_all()

    def forget_all(self) -> None:
        self.evict_device()
        self.ledger.reset(Tier.HOST)
        self.ledger.check_integrity()

    def num_stored_tokens(self, tokens: list[int], **options: Any) -> int:
        """The tokens that the store has of a prompt, as a question would tell."""
        found = 0
        for cell in self.cells(tokens, **options):
            if cell.digest not in self.cells_stored:
                break
            found = cell.stop * BLOCK
        return found

    def fetch(self, tokens: list[int], num_tokens: int | None = None, **options: Any) -> Any:
        num_tokens = self.num_stored_tokens(tokens, **options) if num_tokens is None else num_tokens
        fetch = self.ledger.fetches.fetch(self.prefix(tokens, **options), num_remote_tokens=num_tokens)
        self.ledger.check_integrity()
        return fetch

    def fetched(self, tokens: list[int], **options: Any) -> int:
        """Fetches all that a request would want; returns the tokens that hit then."""
        fetch = self.fetch(tokens, **options)
        self.land(fetch.plans)
        assert fetch.is_over
        found: int = fetch.num_tokens
        return found

    def removed(self) -> list[CellLabel]:
        """Takes the forgotten cells, and removes them from the store."""
        found = self.ledger.remote.take_forgotten()
        for cell in found:
            self.cells_stored.pop(cell.digest, None)
        return list(found)


def spans_of(plans: Iterable[TransferPlan]) -> list[tuple[int, int, list[int]]]:
    """Of loads and stores: the units of the cell, and the places that are copied."""
    found = []
    for plan in plans:
        cell = cell_of(plan)
        ids = plan.source_ids if plan.source is Tier.REMOTE else plan.destination_ids
        found.append((cell.start, cell.stop, list(ids)))
    return found
