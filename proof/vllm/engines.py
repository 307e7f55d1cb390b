"""vLLM's engine in this process, run step by step, with access to its scheduler and block pool."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .hooks import HookTimes
from .outputs import Answer

__all__ = ["BLOCK_SIZE", "Engine", "Served"]

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_NO_USAGE_STATS="1", HF_HUB_OFFLINE="1")
# One thread for each rank: such small products gain nothing from more, and threads that spin take time from others.
os.environ.update(OMP_NUM_THREADS="1", VLLM_CPU_OMP_THREADS_BIND="nobind")

BLOCK_SIZE = 32
NUM_NEW_TOKENS = 16
PATIENCE_S = 60.0
"""An engine that has not come to rest by then hangs."""


@dataclass
class Served:
    """What an engine has answered, and the state it has come to rest in."""

    answers: dict[str, Answer] = field(default_factory=dict)
    num_blocks: int = 0
    num_free: int = 0
    num_preemptions: int = 0
    num_scheduled_tokens: int = 0
    """Tokens that were computed, drafts and what was computed again included."""
    num_drafted: int = 0
    num_accepted: dict[str, int] = field(default_factory=dict)
    """Accepted drafts by request."""
    problems: tuple[str, ...] = ()
    """What is wrong with the connector at rest."""
    took_s: float = 0.0
    started_s: float = 0.0
    """How long the engine took to start, of `took_s`."""

    @property
    def num_held(self) -> int:
        """Blocks that somebody still refers to."""
        return self.num_blocks - self.num_free

    @property
    def num_prompt_tokens(self) -> int:
        return sum(answer.num_prompt_tokens for answer in self.answers.values())

    @property
    def num_cached_tokens(self) -> int:
        return sum(answer.num_cached_tokens for answer in self.answers.values())


class Engine:
    """`with Engine(model, num_blocks, transfer) as engine:` runs requests; `served` says what came of them.

    `transfer` are the fields of vLLM's `KVTransferConfig`; without it nothing is offloaded. `options` are further
    fields of its `EngineArgs`.
    """

    def __init__(self, model: Path, num_blocks: int, transfer: Mapping[str, Any] | None = None, **options: Any) -> None:
        from vllm import EngineArgs, LLMEngine
        from vllm.config import KVTransferConfig

        given: dict[str, Any] = {
            "model": str(model), "tokenizer": str(model), "skip_tokenizer_init": True, "dtype": "float32",
            "enforce_eager": True, "block_size": BLOCK_SIZE, "num_gpu_blocks_override": num_blocks,
            "max_model_len": 1024, "max_num_seqs": 8, "max_num_batched_tokens": 512, "enable_prefix_caching": True,
            "seed": 0,
        }  # fmt: skip
        if transfer is not None:
            given["kv_transfer_config"] = KVTransferConfig(**transfer)
        self._began_s = time.monotonic()
        self.engine = LLMEngine.from_engine_args(EngineArgs(**given | options))
        self.scheduler = self.engine.engine_core.engine_core.scheduler
        self.served = Served(
            num_blocks=num_blocks - 1, started_s=time.monotonic() - self._began_s
        )  # the null block is nobody's
        self.times: HookTimes | None = None
        """Set: the time that every step spends in hooks of the connector."""
        self.params: dict[str, Any] = {}
        """The `kv_transfer_params` of the answers, by request id."""
        self._expected: set[str] = set()
        self._scheduled_now = 0
        self._count_steps()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *error: object) -> None:
        self.engine.engine_core.shutdown()

    def _count_steps(self) -> None:
        schedule = self.scheduler.schedule

        def counting(*arguments: Any, **options: Any) -> Any:
            output = schedule(*arguments, **options)
            self.served.num_preemptions += len(output.preempted_req_ids or ())
            self.served.num_scheduled_tokens += output.total_num_scheduled_tokens
            self._scheduled_now = output.total_num_scheduled_tokens
            return output

        self.scheduler.schedule = counting
        make_stats = self.scheduler.make_spec_decoding_stats

        def counting_drafts(stats: Any, **counts: Any) -> Any:
            name = counts["request_id"].rpartition("-")[0]
            self.served.num_drafted += counts["num_draft_tokens"]
            accepted = self.served.num_accepted
            accepted[name] = accepted.get(name, 0) + counts["num_accepted_tokens"]
            return make_stats(stats, **counts)

        self.scheduler.make_spec_decoding_stats = counting_drafts

    @property
    def connector(self) -> Any:
        """The scheduler's side of the connector."""
        return self.scheduler.connector

    @property
    def worker_connector(self) -> Any:
        """The side of the connector that copies, where the worker is in this process."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        return get_kv_transfer_group()

    @property
    def num_held(self) -> int:
        """Blocks that somebody refers to now."""
        return self.served.num_blocks - self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()

    def request(self, name: str) -> Any:
        """The scheduler's request, or None."""
        named = (each for each in self.scheduler.requests.values() if each.request_id.rpartition("-")[0] == name)
        return next(named, None)

    def forget(self) -> None:
        """Empty the engine's own prefix cache. `RuntimeError` if blocks are in use."""
        if not self.engine.reset_prefix_cache():
            raise RuntimeError("the prefix cache could not be emptied")

    # -- requests ---------------------------------------------------------------------------------------------------

    def submit(
        self,
        prompts: Mapping[str, Sequence[int]],
        num_new_tokens: int = NUM_NEW_TOKENS,
        lora: Any = None,
        params: Mapping[str, Any] | None = None,
    ) -> None:
        """`params`: the `kv_transfer_params` of the requests that have some."""
        from vllm import SamplingParams

        for name, prompt in prompts.items():
            more = {} if params is None or name not in params else {"kv_transfer_params": params[name]}
            how = SamplingParams(
                temperature=0, max_tokens=num_new_tokens, logprobs=0, detokenize=False, ignore_eos=True, extra_args=more
            )
            self.engine.add_request(name, {"prompt_token_ids": list(prompt)}, how, lora_request=lora)
            self._expected.add(name)

    def step(self) -> list[str]:
        """One step of the engine. Returns the ids of requests that have finished in it."""
        found = []
        self._scheduled_now = 0
        outputs = self.engine.step()
        if self.times is not None:
            self.times.end_step(self._scheduled_now)
        for output in outputs:
            if output.finished:
                self.served.answers[output.request_id] = _answer(output)
                self.params[output.request_id] = output.kv_transfer_params
                self._expected.discard(output.request_id)
                found.append(output.request_id)
        return found

    def serve(
        self, prompts: Mapping[str, Sequence[int]], num_new_tokens: int = NUM_NEW_TOKENS, lora: Any = None
    ) -> dict[str, Answer]:
        """Run these requests to their end, with the adapter `lora` if it is given."""
        self.submit(prompts, num_new_tokens, lora)
        self.finish()
        return {name: self.served.answers[name] for name in prompts}

    def abort(self, names: Iterable[str]) -> None:
        names = list(names)
        self.engine.abort_request(names)
        self._expected.difference_update(names)

    def finish(self) -> None:
        """Step until every request that was submitted has its answer. `RuntimeError` if that never comes."""
        self._step_while(lambda: bool(self._expected))

    def rest(self) -> Served:
        """Step until nothing is under way any more, and say what is left."""
        self._step_while(self.scheduler.has_requests)
        self.served.num_free = self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
        connectors = getattr(self.connector, "sub_connectors", [self.connector])
        self.served.problems = tuple(problem for each in connectors for problem in _problems(each))
        self.served.took_s = time.monotonic() - self._began_s
        return self.served

    def _step_while(self, is_busy: Callable[[], bool]) -> None:
        deadline_s = time.monotonic() + PATIENCE_S
        while is_busy():
            self.step()
            if time.monotonic() > deadline_s:
                raise RuntimeError(f"not at rest after {PATIENCE_S:.0f} s; without an answer: {sorted(self._expected)}")


def _problems(connector: Any) -> Iterator[str]:
    """What our connector must not be at rest: off, because of an error that it has hidden from the scheduler; record
    pins; or at odds with itself. Others have none of that."""
    if not hasattr(connector, "ledger"):
        return
    if connector.off_reason:
        yield f"the cache has turned itself off: {connector.off_reason}"
        return
    ledger = connector.ledger
    ledger.check_integrity()
    found = ledger.statistics()
    for tier in ("device", "host", "disk"):
        if (of_tier := getattr(found, tier)) is not None and (pinned := of_tier.num_pinned):
            yield f"{pinned} blocks are still pinned by the ledger, {tier}"


def _answer(output: Any) -> Answer:
    (only,) = output.outputs
    return Answer(
        tokens=tuple(only.token_ids),
        logprobs=tuple(each[token].logprob for each, token in zip(only.logprobs, only.token_ids, strict=True)),
        num_prompt_tokens=len(output.prompt_token_ids),
        num_cached_tokens=output.num_cached_tokens or 0,
    )
