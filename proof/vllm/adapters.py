"""Scenarios with LoRA adapters that are trained again and saved under the same path: no KV of the old weights hits."""

from __future__ import annotations

import argparse
import json
import shutil
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from .bench import OUT
from .engines import Engine
from .models import DENSE, HYBRID, build
from .outputs import Answer
from .prompts import words
from .rows import Row, judge, write
from .transfers import ours

__all__ = ["main"]

FOLDER = OUT / "adapters"
POOL = 70
RANK = 8
HIT = 192
"""Tokens of the prompt in full blocks."""
PROMPT = words("adapter", 200)
OPTIONS = {"enable_lora": True, "max_loras": 1, "max_cpu_loras": 1, "max_lora_rank": RANK}
"""Space for one adapter, so each adapter evicts the one before."""


def train(seed: int, folder: Path) -> Path:
    """Write an adapter with weights drawn from `seed` into `folder`, over the files there."""
    import torch
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    random, tensors = torch.Generator().manual_seed(seed), {}
    sizes = {"q_proj": 128, "k_proj": 64, "v_proj": 64}
    for layer in range(2):
        for name, size in sizes.items():
            stem = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            tensors[f"{stem}.lora_A.weight"] = torch.randn(RANK, 64, generator=random) * 0.3
            tensors[f"{stem}.lora_B.weight"] = torch.randn(size, RANK, generator=random) * 0.3
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA", "r": RANK, "lora_alpha": 2 * RANK, "target_modules": list(sizes), "bias": "none",
        "task_type": "CAUSAL_LM",
    }  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


class Tenant:
    """One adapter under one name and path, in an engine whose own prefix cache is emptied before each request."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.path = engine, FOLDER / "tenant"
        self.answers: dict[str, Answer] = {}
        self.wanted: dict[str, Answer] = {}
        self.problems: list[str] = []

    def request(self, adapter: int, *, load_inplace: bool = False) -> Any:
        from vllm.lora.request import LoRARequest

        return LoRARequest("tenant", adapter, str(self.path), load_inplace=load_inplace)

    def say(self, name: str, adapter: int, wanted: Answer, num_cached: int) -> None:
        """Serve the prompt. Checks that the answer is the one of these weights, and how many tokens come from the
        cache."""
        answer = self.engine.serve({name: PROMPT}, lora=self.request(adapter))[name]
        self.engine.rest()
        self.engine.forget()
        self.answers[name], self.wanted[name] = answer, wanted
        if answer.num_cached_tokens != num_cached:
            self.problems.append(f"{name}: {answer.num_cached_tokens} tokens cached, not {num_cached}")

    def row(self, name: str) -> Row:
        served = self.engine.rest()
        row = judge(
            name, self.answers, self.wanted, num_blocks=served.num_blocks, num_free=served.num_free,
            took_s=served.took_s,
        )  # fmt: skip
        return row.missed(*served.problems, *self.problems)


def reference(model: Path, seeds: Sequence[int]) -> dict[int, Answer]:
    """The answers of the adapters without offload, each under its own id and path."""
    from vllm.lora.request import LoRARequest

    with Engine(model, POOL, **OPTIONS) as engine:
        found = {}
        for seed in seeds:
            lora = LoRARequest(f"seed {seed}", seed, str(train(seed, FOLDER / f"seed {seed}")))
            found[seed] = engine.serve({f"seed {seed}": PROMPT}, lora=lora)[f"seed {seed}"]
    return found


def trained_again(model: Path, disk: Path) -> list[Row]:
    wanted, extra = reference(model, (1, 2, 3, 4, 5)), {"disk": {"path": str(disk), "size": "64MiB"}}
    shutil.rmtree(disk, ignore_errors=True)
    with Engine(model, POOL, ours(**extra), **OPTIONS) as engine:
        tenant = Tenant(engine)
        train(1, tenant.path)
        tenant.say("first", 1, wanted[1], 0)
        tenant.say("again", 1, wanted[1], HIT)
        train(2, tenant.path)
        tenant.say("trained again, another id", 2, wanted[2], 0)
        tenant.say("trained again, another id, again", 2, wanted[2], HIT)
        train(3, tenant.path)
        # The scheduler does not know of the change and promises a hit. vLLM counts the hit, and computes again.
        tenant.say("evicted and read again", 1, wanted[3], HIT)
        tenant.say("evicted and read again, once more", 1, wanted[3], 0)
        tenant.say("evicted and read again, a third time", 1, wanted[3], HIT)
        train(4, tenant.path)
        engine.engine.add_lora(tenant.request(1, load_inplace=True))
        tenant.say("in place", 1, wanted[4], 0)
        tenant.say("in place, once more", 1, wanted[4], HIT)
        train(2, tenant.path)
        tenant.say("the weights of before, under an id of before", 2, wanted[2], HIT)
        rows = [tenant.row("adapters: trained again, saved over themselves")]
    for number, seed, num_cached in ((1, 2, HIT), (2, 5, 0)):
        with Engine(model, POOL, ours(**extra, fetch_timeout_s=20, prefill_tokens_per_s=1), **OPTIONS) as engine:
            tenant = Tenant(engine)
            train(seed, tenant.path)
            engine.engine.add_lora(tenant.request(7))
            engine.rest()
            tenant.say("first", 7, wanted[seed], num_cached)
            tenant.say("again", 7, wanted[seed], HIT)
            rows.append(tenant.row(f"adapters: restart {number}, {'the same' if num_cached else 'other'} weights"))
    return rows


def in_two_groups(model: Path) -> list[Row]:
    """With several groups, vLLM cannot discard blocks of a running request. So KV is loaded only if every adapter
    stays."""
    wanted = reference(model, (1, 2))
    with Engine(model, 2 * POOL, ours(), **{**OPTIONS, "max_cpu_loras": 2}) as engine:
        tenant = Tenant(engine)
        train(1, tenant.path)
        tenant.say("first", 1, wanted[1], 0)
        tenant.say("again", 1, wanted[1], HIT)
        train(2, tenant.path)
        tenant.say("trained again", 2, wanted[2], 0)
        tenant.say("trained again, again", 2, wanted[2], HIT)
        tenant.say("the weights of before", 1, wanted[1], HIT)
        return [tenant.row("adapters, hybrid: trained again, saved over themselves")]


def _rows(name: str, run: Callable[[], list[Row]]) -> list[Row]:
    began_s = time.monotonic()
    try:
        return run()
    except Exception as error:  # noqa: BLE001  any error is a line of the report, and the other scenarios still run
        traceback.print_exc()
        return [Row(name, took_s=time.monotonic() - began_s, problems=(f"{type(error).__name__}: {error}",))]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", type=Path, default=OUT / "rows.json")
    parser.add_argument("--short", action="store_true")
    given = parser.parse_args()
    dense, hybrid = (build(config, OUT / str(config["model_type"])) for config in (DENSE, HYBRID))
    rows = _rows("adapters: trained again", lambda: trained_again(dense, FOLDER / "disk"))
    write(rows, given.json)
    if not given.short:
        rows += _rows("adapters, hybrid: trained again", lambda: in_two_groups(hybrid))
    for row in rows:
        print(" | ".join(row.cells()), flush=True)
    write(rows, given.json)


if __name__ == "__main__":
    main()
