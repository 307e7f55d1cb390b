"""Shared parts of the scenarios of a part: the model, the reference run, and the rows so far."""

from __future__ import annotations

import argparse
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from .engines import Engine, Served
from .models import build
from .prompts import Conversations
from .rows import Row, judge, write

__all__ = ["Bench", "Scenario", "Talks", "run_model", "run_part"]

OUT = Path("build/vllm")
LARGE_POOL = 1200


@dataclass(frozen=True)
class Talks:
    """The conversations that are run."""

    number: int = 10
    num_turns: int = 4
    num_new_tokens: int = 16


@dataclass
class Bench:
    """The model of a part, the options of its engines, and the run that everything is compared with."""

    model: Path
    options: dict[str, Any] = field(default_factory=dict)
    talks: Talks = Talks()
    prompts: dict[str, list[int]] = field(default_factory=dict)
    """Of all conversations, turn after turn, with the answers of the reference run in them."""
    reference: Served = field(default_factory=Served)

    def engine(self, num_blocks: int, transfer: Mapping[str, Any] | None = None, **options: Any) -> Engine:
        return Engine(self.model, num_blocks, transfer, **{**self.options, **options})

    def hold_reference(self) -> Row:
        """Run the conversations in a pool where everything fits: no scenario is compared with anything else."""
        said = Conversations(self.talks.number)
        with self.engine(LARGE_POOL) as engine:
            for turn in range(self.talks.num_turns):
                prompts = said.prompts(turn)
                self.prompts |= prompts
                for name, answer in engine.serve(prompts, self.talks.num_new_tokens).items():
                    said.hear(name, answer.tokens)
            self.reference = engine.rest()
        row = self.judge("a large pool, without offload", self.reference)
        return replace(row, outputs="the reference")

    def talk(self, engine: Engine, *, rests: bool = False) -> Served:
        """The same conversations, turn after turn. `rests`: the copies of a turn end before the next turn begins."""
        for turn in range(self.talks.num_turns):
            engine.serve(self.turn(turn), self.talks.num_new_tokens)
            if rests:
                engine.rest()
        return engine.rest()

    def turn(self, turn: int) -> dict[str, list[int]]:
        return {name: prompt for name, prompt in self.prompts.items() if name.endswith(f".{turn}")}

    def judge(self, name: str, served: Served, found: str = "", *, may_differ: bool = False) -> Row:
        row = judge(
            name, served.answers, self.reference.answers, num_blocks=served.num_blocks,
            num_free=served.num_free, took_s=served.took_s, found=found, may_differ=may_differ,
        )  # fmt: skip
        return row.missed(*served.problems)


@dataclass(frozen=True)
class Scenario:
    name: str
    run: Callable[[Bench], Row]
    is_short: bool = False
    """Belongs to the short form."""


def run_part(
    config: Mapping[str, Any],
    scenarios: Sequence[Scenario],
    talks: Talks = Talks(),
    *,
    folder: str = "",
    **options: Any,
) -> None:
    """The process of a part: run its scenarios in turn with a model of `config`, and write the rows after each.
    `folder`: of the model, if there is another one of its type."""
    model = build(dict(config), OUT / (folder or str(config["model_type"])))
    run_model(model, scenarios, talks, **options)


def run_model(model: Path, scenarios: Sequence[Scenario], talks: Talks = Talks(), **options: Any) -> None:
    """The same with a model that is there already."""
    given = _given()
    rows: list[Row] = []
    bench = Bench(model, options, talks)
    chosen = [each for each in scenarios if (each.is_short or not given.short) and given.only in each.name]
    for scenario in (Scenario("reference", Bench.hold_reference), *chosen):
        rows.append(_row(scenario, bench))
        print(" | ".join(rows[-1].cells()), flush=True)
        write(rows, given.json)


def _row(scenario: Scenario, bench: Bench) -> Row:
    began_s = time.monotonic()
    try:
        return scenario.run(bench)
    except Exception as error:  # noqa: BLE001  whatever an engine raises is a line of the report; the others still run
        traceback.print_exc()
        return Row(scenario.name, took_s=time.monotonic() - began_s, problems=(f"{type(error).__name__}: {error}",))


def _given() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", type=Path, default=OUT / "rows.json")
    parser.add_argument("--short", action="store_true")
    parser.add_argument("--only", default="", metavar="TEXT", help="scenarios with it in their name")
    return parser.parse_args()
