"""A remote store below a `HostCache`: the same calls and guarantees."""

from __future__ import annotations

from typing import Any

from engine_driving import BLOCK, EngineDriven, loaded, prompt
from remote_driving import CELL, CELL_UNITS, cell_of, remote_tier

from aoffload._common.tiers import Tier
from aoffload._kernel.plans import TransferPlan
from aoffload._kernel.states import Outcome
from aoffload._tiers.remote.plans import CellLabel
from aoffload._tiers.remote.rules import cells_of
from aoffload.ledger import Prefix, Root

TOKENS = [*prompt(1, 3 * CELL), 7]
ROOT = Root("test")


class Engine(EngineDriven):
    """Cells of 4 units; the store keeps the tags of the blocks of a cell."""

    def __init__(self, num_host: int = 64) -> None:
        super().__init__(num_host, remote=remote_tier(), namespace="test", max_fetch_share=1.0)
        self.cells_stored: dict[bytes, list[Any]] = {}

    def put_and_get(self, plans: Any, outcome: Outcome = Outcome.LANDED) -> None:
        for plan in self.launch(plans):
            cell, host = cell_of(plan), self.memory[Tier.HOST]
            if plan.destination is Tier.REMOTE:
                self.cells_stored[cell.digest] = [host[block_id] for block_id in plan.source_ids]
            elif outcome is Outcome.LANDED:
                content = self.cells_stored[cell.digest]
                host.update({to: content[at] for at, to in zip(plan.source_ids, plan.destination_ids, strict=True)})
            self.settle(plan, outcome)

    def settle(self, plan: TransferPlan, outcome: Outcome) -> None:
        from aoffload.ledger import Completion

        self.ledger.settle(Completion(plan.job_id, outcome))
        self.ledger.check_integrity()

    def is_wanted(self, cell: CellLabel) -> bool:
        return cell.digest not in self.cells_stored

    def write_behind(self) -> tuple[TransferPlan, ...]:
        plans = self.ledger.remote.plan_stores(10**6, self.is_wanted)
        self.ledger.check_integrity()
        return plans

    def removed(self) -> list[CellLabel]:
        found = list(self.ledger.remote.take_forgotten())
        for cell in found:
            self.cells_stored.pop(cell.digest, None)
        return found

    def fetch(self, tokens: list[int]) -> Any:
        cells = cells_of(Prefix.of(ROOT, tokens), BLOCK, CELL_UNITS)
        cells_stored = 0
        while cells_stored < len(cells) and cells[cells_stored].digest in self.cells_stored:
            cells_stored += 1
        fetch = self.ledger.fetches.fetch(Prefix.of(ROOT, tokens), num_remote_tokens=cells_stored * CELL)
        self.ledger.check_integrity()
        return fetch


def cells(tokens: list[int]) -> list[CellLabel]:
    return list(cells_of(Prefix.of(ROOT, tokens), BLOCK, CELL_UNITS))


def test_a_prompt_comes_back_for_an_engine() -> None:
    """Offered twice, stored, gone from the host: fetched, matched again and loaded, the right blocks."""
    engine = Engine()
    engine.serve(TOKENS)
    assert engine.write_behind() == ()
    engine.serve(TOKENS)
    engine.put_and_get(engine.write_behind())
    assert len(engine.cells_stored) == 3
    engine.ledger.reset(Tier.HOST)
    request = engine.admit(TOKENS)
    fetch = engine.fetch(TOKENS)
    assert [plan.link for plan in fetch.plans] == [(Tier.REMOTE, Tier.HOST)] * 3
    engine.put_and_get(fetch.plans)
    assert engine.ledger.fetches.match_again(request).num_host_tokens == 3 * CELL
    engine.release(request, "looked")
    assert loaded(engine, TOKENS) == 3 * CELL


def test_a_hit_of_the_engine_s_own_makes_it_wanted_too() -> None:
    """It has the prompt on its device, so the host is not read: it was asked for a second time all the same."""
    engine = Engine()
    engine.serve(TOKENS)
    request = engine.admit(TOKENS, 3 * CELL)
    assert len(engine.write_behind()) == 3
    engine.release(request, "looked")


def test_what_an_engine_takes_back_is_removed() -> None:
    """Its own cells, and those that a request after it has stored; a queued store is given up with its offers."""
    engine = Engine()
    request, tables = engine.computed(TOKENS[: 6 * BLOCK])
    engine.land(engine.offer(request, 6 * BLOCK, tables))
    longer = [*TOKENS[: 6 * BLOCK], *prompt(3, 2 * CELL), 7]
    for _ in range(2):
        engine.serve(longer)
    engine.put_and_get(engine.write_behind())
    assert [cell.digest in engine.cells_stored for cell in cells(longer)] == [True] * 3
    engine.ledger.reset(Tier.HOST)
    engine.invalidate(request, CELL)
    assert set(engine.removed()) >= set(cells(longer)[1:])
    assert [cell.digest in engine.cells_stored for cell in cells(longer)] == [True, False, False]
    engine.release(request, "failed")


def test_a_queued_store_of_an_engine_is_given_up() -> None:
    """It never begins."""
    engine = Engine()
    request, tables = engine.computed(TOKENS)
    engine.land(engine.offer(request, len(TOKENS), tables))
    engine.release(engine.admit(TOKENS), "looked")
    plans = engine.write_behind()
    assert len(plans) == 3
    engine.invalidate(request, CELL)
    assert engine.launch(plans) == list(plans[:1])
    assert engine.removed() == cells(TOKENS)[1:]
    engine.settle(plans[0], Outcome.UNPROVEN)
    engine.release(request, "failed")
    engine.assert_at_rest()


def test_a_cell_that_is_gone_is_a_miss_for_an_engine() -> None:
    """The rest is given back, and nothing stays."""
    engine = Engine()
    for _ in range(2):
        engine.serve(TOKENS)
    engine.put_and_get(engine.write_behind())
    engine.ledger.reset(Tier.HOST)
    engine.put_and_get(engine.fetch(TOKENS).plans, Outcome.FAILED)
    assert (engine.hit(TOKENS), engine.ledger.cache.index.runs) == (0, {})
    engine.assert_at_rest()
