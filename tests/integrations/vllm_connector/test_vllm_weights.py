"""Tiers over sleep: they keep what they have if the weights are the same, and forget it otherwise."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engine_doubles import TEXT, Request, Worker, lora
from small_engine import SmallEngine, counted
from test_vllm_plugin import needs_vllm

from aoffload import Tier
from aoffload._vllm import internals, worker_weights
from aoffload._vllm.worker_weights import digest_of_models

HITS = 7
"""Blocks of TEXT that a second request with it loads."""


@pytest.fixture
def asleep(warm: Callable[..., SmallEngine]) -> Callable[..., SmallEngine]:
    """An engine that has stored TEXT, and sleeps."""

    def make(level: int = 1, **options: Any) -> SmallEngine:
        engine = warm(can_sleep=True, **options)
        engine.sleep(level)
        return engine

    return make


def num_loaded(engine: SmallEngine, name: str = "again") -> int:
    """Blocks of TEXT that the engine still has in host memory."""
    before = counted(engine, "copied_blocks|load|host")
    engine.manager.evict_all()
    engine.run(Request(name, TEXT))
    return int(counted(engine, "copied_blocks|load|host") - before)


def test_tiers_survive_a_sleep_that_the_weights_survive(asleep: Callable[..., SmallEngine]) -> None:
    """The first request after it waits for one step, and then loads."""
    engine = asleep()
    engine.wake_up()
    engine.submit(Request("again", TEXT))
    engine.step()
    assert not engine.running and not engine.loading
    engine.step()
    assert list(engine.loading) == ["again"]
    engine.run()
    assert counted(engine, "copied_blocks|load|host") == HITS


def test_tiers_forget_what_other_weights_have_computed(asleep: Callable[..., SmallEngine]) -> None:
    """Somebody loads weights while the engine sleeps, although it is asleep at level 1. vLLM does not tell of it."""
    engine = asleep()
    engine.owners[0].load_weights(1)
    engine.wake_up()
    assert num_loaded(engine) == 0
    assert num_loaded(engine, "once more") == HITS  # of the new weights


@pytest.mark.parametrize(("number", "kept"), [(0, HITS), (1, 0), (99, 0)])
def test_after_level_2_the_weights_decide(asleep: Callable[..., SmallEngine], number: int, kept: int) -> None:
    """They have been discarded. If the same ones are loaded again, their KV is as good as before."""
    engine = asleep(2)
    engine.owners[0].load_weights(number)
    engine.wake_up()
    assert num_loaded(engine) == kept


def test_a_reset_without_sleep_forgets(warm: Callable[..., SmallEngine]) -> None:
    """Whoever resets the cache means it, whatever the weights are."""
    engine = warm(can_sleep=True)
    engine.connector.reset_cache()
    assert num_loaded(engine) == 0


@pytest.mark.parametrize("is_before", [True, False])
def test_a_reset_beside_sleep_forgets(warm: Callable[..., SmallEngine], is_before: bool) -> None:
    """Weights may have changed twice. The reset of the sleep itself is the one that does not count."""
    engine = warm(can_sleep=True)
    if is_before:
        engine.connector.reset_cache()
    engine.sleep()
    engine.wake_up()
    if not is_before:
        engine.connector.reset_cache()
    assert num_loaded(engine) == 0


def test_a_reset_between_question_and_answer_forgets(asleep: Callable[..., SmallEngine]) -> None:
    """The answer is older than the reset."""
    engine = asleep()
    engine.wake_up()
    guard, take = engine.connector._deciding, engine.connector._deciding.take

    def reset_first(reports: Any) -> Any:
        guard.take = take
        guard.reset()
        return take(reports)

    guard.take = reset_first
    assert num_loaded(engine) == 0


def test_two_sleeps_in_a_row_are_survived(asleep: Callable[..., SmallEngine]) -> None:
    """No step has run between them."""
    engine = asleep()
    engine.wake_up()
    engine.sleep(2)
    engine.owners[0].load_weights(0)
    engine.wake_up()
    assert num_loaded(engine) == HITS
    engine.sleep()
    engine.wake_up()
    assert num_loaded(engine, "third") == HITS


@pytest.mark.parametrize("number", [0, 1])
def test_weights_that_changed_before_sleep_are_noticed(warm: Callable[..., SmallEngine], number: int) -> None:
    """Without a reset: some of the KV may be of the other weights. Also if the first weights return in the sleep."""
    engine = warm(can_sleep=True)
    engine.owners[0].load_weights(1)
    engine.sleep()
    engine.owners[0].load_weights(number)
    engine.wake_up()
    assert num_loaded(engine) == 0


@pytest.mark.parametrize("rank", [None, 0, 1])
def test_every_rank_has_to_have_its_weights(asleep: Callable[..., SmallEngine], rank: int | None) -> None:
    """Each has its own part of the model."""
    engine = asleep(num_ranks=2)
    engine.wake_up()
    if rank is None:
        assert num_loaded(engine) == HITS
    else:
        engine.owners[rank].model.bias.data[-1] = 0.5
        engine.run(Request("other", range(100, 130)))
        assert engine.connector.ledger.cache.tiers[Tier.HOST].num_cached == HITS  # of the last request alone


def test_a_request_that_ran_before_the_sleep_goes_on(warm: Callable[..., SmallEngine]) -> None:
    """vLLM keeps it, and preempts it. It hits what it has stored itself."""
    engine = warm(can_sleep=True, num_blocks=40)
    engine.submit(Request("long", range(50, 90), num_new=6))
    for _ in range(3):
        engine.step()
    engine.sleep()
    engine.wake_up()
    engine.run()
    assert counted(engine, "copied_blocks|load|host") >= 9


def test_a_reset_that_vllm_could_not_make_forgets_no_adapter(engines: Callable[..., SmallEngine]) -> None:
    """A request runs during the reset, so vLLM's own cache keeps its KV. It has ended by the time that the workers have
    answered for the weights. What other weights compute after that KV is cached nowhere."""
    engine = engines(can_sleep=True, num_blocks=40)
    engine.files["/adapter"] = 1
    engine.submit(Request("old", TEXT[:13], lora_request=lora(1), num_new=2))
    engine.step()
    engine.step()
    assert engine.workers[0].copies.wait(30)
    engine.step()
    assert engine.running and engine.connector.reset_cache()
    engine.run()
    assert not engine.connector.ledger.statistics().host.num_cached
    engine.files["/adapter"] = 2
    engine.loras[0].add_adapter(lora(2))
    engine.run(Request("base", [1, 2, 3]))
    engine.run(Request("behind", [*TEXT[:13], *range(100, 120)], lora_request=lora(2)))
    assert engine.wrong, "vLLM itself has read KV of other weights"
    engine.wrong.clear()
    assert not engine.connector.ledger.statistics().host.num_cached


def test_without_a_model_to_look_at_sleep_forgets(warm: Callable[..., SmallEngine]) -> None:
    """If vLLM calls from elsewhere than a worker, or the weights cannot be read."""
    engine = warm(can_sleep=True)
    engine.owners[0].get_model = lambda: SimpleNamespace()  # type: ignore[method-assign,assignment,return-value]
    engine.sleep()
    engine.wake_up()
    assert num_loaded(engine) == 0


def test_a_worker_that_is_not_found_is_said(monkeypatch: pytest.MonkeyPatch, warm: Callable[..., SmallEngine]) -> None:
    """The cache works as ever until the engine sleeps."""
    said = list[str]()
    monkeypatch.setattr(worker_weights._log, "warning", lambda text, *values: said.append(text % values))
    monkeypatch.setattr(worker_weights, "calling_worker", lambda: None)
    engine = warm(can_sleep=True)
    assert said == ["aoffload: cannot see the weights of the model, so sleep empties the cache"]
    engine.sleep()
    engine.wake_up()
    assert num_loaded(engine) == 0


def test_an_engine_without_sleep_mode_reads_no_weights(
    monkeypatch: pytest.MonkeyPatch, engines: Callable[..., SmallEngine]
) -> None:
    """And its reset forgets at once, with no step."""
    monkeypatch.setattr(worker_weights, "digest_of_models", None)
    engine = engines()
    engine.run(Request("first", TEXT))
    engine.connector.reset_cache()
    assert not engine.connector.ledger.statistics().host.num_cached


def test_the_disk_is_kept_or_forgotten_with_the_rest(tmp_path: Any, engines: Callable[..., SmallEngine]) -> None:
    """A restart finds what is on it, unless the weights have changed."""
    disk = {"path": str(tmp_path), "size": "1MiB"}
    tmp_path.chmod(0o700)
    engine = engines(can_sleep=True, disk=disk, namespace="weights")
    engine.run(Request("first", TEXT))
    engine.sleep()
    engine.wake_up()
    engine.run(Request("again", TEXT))
    assert engine.half.lower is not None and engine.half.lower.disk is not None
    assert not engine.half.lower.disk._num_resets
    engine.sleep()
    engine.owners[0].load_weights(1)
    engine.wake_up()
    engine.run(Request("once more", TEXT))
    assert engine.half.lower.disk._num_resets == engine.half.lower.disk._num_resets_over == 1


def test_an_engine_that_ends_in_doubt_leaves_nothing_behind(tmp_path: Any, engines: Callable[..., SmallEngine]) -> None:
    """Nobody has asked for the weights since the reset. A restart might have others."""
    tmp_path.chmod(0o700)
    engine = engines(can_sleep=True, disk={"path": str(tmp_path), "size": "1MiB"}, namespace="weights")
    engine.run(Request("first", TEXT))
    engine.sleep()
    engine.wake_up()
    engine.connector._deciding.flush(engine.workers[0])
    assert engine.half.lower is not None and engine.half.lower.disk is not None
    assert engine.half.lower.disk._num_resets == 1
    assert not engine.connector.ledger.statistics().host.num_cached


# -- digests ---------------------------------------------------------------------------------------------------------


class Model(torch.nn.Module):
    def __init__(self, *tensors: torch.Tensor) -> None:
        super().__init__()
        for number, each in enumerate(tensors):
            self.register_buffer(f"t{number}", each)


def digest(*tensors: torch.Tensor, draft: torch.Tensor | None = None) -> str:
    model, drafts = Model(*tensors), None if draft is None else Model(draft)
    return digest_of_models(SimpleNamespace(get_model=lambda: model, get_draft_model=lambda: drafts))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.float8_e4m3fn, torch.bool])
@pytest.mark.parametrize("number", [1, 3, 8, 1001])
def test_every_change_of_a_number_is_noticed(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, number: int) -> None:
    """Whatever its type, and wherever it is, also in a tensor of several pieces, of odd size or without a
    neighbour."""
    monkeypatch.setattr(worker_weights, "PIECE", 32)
    tensor = (torch.arange(number) % 2).to(dtype)
    found, before = set[str](), digest(tensor)
    assert before and before == digest(tensor.clone())
    places = range(0, number, max(1, number // 20))
    for at in places:
        changed = tensor.clone()
        changed.view(torch.uint8)[at * tensor.element_size()] ^= 1
        found.add(digest(changed))
    assert len(found | {before}) == len(places) + 1


def test_changes_that_cancel_each_other_in_a_sum_are_noticed() -> None:
    """Two rows that are swapped, signs that change everywhere, and one number that grows as another one shrinks."""
    drawn = torch.randn(64, 64, generator=torch.Generator().manual_seed(3)).to(torch.bfloat16)
    swapped, moved = drawn[[1, 0, *range(2, 64)]], drawn.view(torch.int64).clone()
    moved[0, 0] += 1
    moved[0, 1] -= 1
    others = [drawn, swapped, -drawn, drawn.flip(0), moved.view(torch.bfloat16), drawn.reshape(32, 128), drawn.float()]
    assert len({digest(each) for each in others}) == len(others)
    assert digest(drawn.t()) == digest(drawn.t().contiguous())


def test_a_draft_model_counts() -> None:
    """It has KV of its own."""
    one = torch.ones(8)
    assert len({digest(one), digest(one, draft=one), digest(one, draft=one * 2)}) == 3


@pytest.mark.parametrize("tensor", [torch.ones(8, device="meta"), torch.ones(8).to_sparse()])
def test_weights_that_cannot_be_read_have_no_digest(tensor: torch.Tensor) -> None:
    """So they are never taken for the same."""
    assert digest(tensor) == ""


@pytest.mark.vllm
@needs_vllm
@pytest.mark.parametrize("level", [1, 2])
def test_vllms_own_worker_is_found(monkeypatch: pytest.MonkeyPatch, level: int) -> None:
    """It calls from `sleep` before the weights go, with its model in reach, and from `wake_up` after they are back.
    vLLM 0.32 does not call."""
    from vllm.v1.worker import gpu_worker

    model, calls = torch.nn.Linear(2, 2), list[Any]()
    worker = gpu_worker.Worker.__new__(gpu_worker.Worker)
    worker.model_runner = SimpleNamespace(model=model, get_model=lambda: model, get_draft_model=lambda: None)
    worker.model_config = SimpleNamespace(sleep_preserve_parameter_names=())
    worker.vllm_config = SimpleNamespace(model_config=SimpleNamespace(enable_nccl_comm_suspend=False))
    worker._sleep_saved_parameters = worker._sleep_saved_buffers = worker._sleep_saved_draft_buffers = {}
    said = SimpleNamespace(suspend=lambda level: calls.append("gone"), resume=lambda tags: calls.append("back"))
    worker._sleep_mode_backend = said
    group = SimpleNamespace(
        unregister_kv_caches=lambda: calls.append(internals.models_of(internals.calling_worker())),
        restore_kv_caches=lambda: calls.append("restored"),
    )
    monkeypatch.setattr(gpu_worker, "has_kv_transfer_group", lambda: True)
    monkeypatch.setattr(gpu_worker, "get_kv_transfer_group", lambda: group)
    accelerator = SimpleNamespace(synchronize=lambda: None, get_memory_info=lambda: (1, 2))
    monkeypatch.setattr(gpu_worker.torch, "accelerator", accelerator)
    monkeypatch.setattr(gpu_worker.Worker, "synchronize_device", lambda self: None, raising=False)
    worker.sleep(level)
    worker.wake_up(None)
    assert calls == ([[model], "gone", "back", "restored"] if internals.tells_of_sleep() else ["gone", "back"])


def test_a_worker_that_calls_through_others_is_found() -> None:
    """As under `MultiConnector`."""

    class Several:
        def unregister_kv_caches(self) -> None:
            found.append(internals.calling_worker())

    found = list[Any]()
    worker = Worker(Several(), torch.zeros(1))
    worker.sleep(1)
    assert found == [worker] and internals.calling_worker() is None
