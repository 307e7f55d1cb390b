"""The engine with a model that has a recurrent state: hits resume from checkpoints, on the real runtime."""

from __future__ import annotations

import random
from typing import Any

import anyio
import anyio.lowlevel
import attrs
import pytest
import torch
from recurrent import KINDS, VOCABULARY, FoldingModel, answer, fold, prompt_of, serving
from windowed import OPTIONS

from aoffload import KVCacheGroup, OffloadConfig, OffloadRuntime
from aoffload._config.groups import RecurrentState
from aoffload._reference.engine.batching import EngineOptions, PrefillStart
from aoffload._reference.engine.checkpoints import engine_groups
from aoffload._reference.engine.engine import PagedEngine
from aoffload._reference.engine.loop import StepFailed
from aoffload._reference.engine.recurrent import RecurrentSlice, StateLayout
from aoffload.demo.backends import Tampering
from aoffload.demo.options import Corrupt
from aoffload.errors import ConfigError
from aoffload.integrations import PagedBatch, SequenceSlice, load_model
from aoffload.integrations.openai_server import ServerOptions, open_service

pytestmark = pytest.mark.anyio
each_kind = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@each_kind
@pytest.mark.parametrize("reuse_decoded", [False, True])
async def test_many_at_once_on_few_blocks(kind: str, reuse_decoded: bool) -> None:
    """More requests than places, and more tokens than blocks: each gets its own answer, and nothing is left."""
    options = attrs.evolve(OPTIONS, reuse_decoded=reuse_decoded)
    async with serving(kind, 42, options=options) as bench, anyio.create_task_group() as clients:
        for number in range(24):
            clients.start_soon(bench.ask, prompt_of(number % 7, 9 + 2 * number), 1 + number % 7)


@each_kind
async def test_a_hit_resumes_from_the_checkpoint_at_the_prompt_s_end(kind: str) -> None:
    """A second prompt with the same beginning hits up to the last checkpoint, and its first forward takes the state
    from there."""
    async with serving(kind, 80) as bench:
        first = await bench.ask(prompt_of(1, 46))
        assert bench.model.num_resumed == 0
        second = await bench.ask([*prompt_of(1, 46)[:44], 5, 6, 7])
        assert bench.model.num_resumed == 1
    assert (first.num_device_tokens, first.num_computed_tokens) == (0, 46)
    assert (second.num_device_tokens, second.num_computed_tokens) == (40, 7)


@each_kind
async def test_a_branch_gets_a_checkpoint(kind: str) -> None:
    """Where a second prompt leaves the path of the first one there is no state, so it hits nothing. It writes one, and
    the third prompt resumes from it."""
    async with serving(kind, 120) as bench:
        found = [await bench.ask([*prompt_of(1, 46)[:20], *prompt_of(number, 20)]) for number in (5, 6, 7)]
    assert [each.num_device_tokens for each in found] == [0, 0, 16]


@each_kind
async def test_an_evicted_checkpoint_comes_back_from_host_memory(kind: str) -> None:
    """A state that others pushed off the device is loaded, bit for bit, and gives the same logits."""
    async with serving(kind, 36) as bench:
        first = await bench.ask(prompt_of(1, 46))
        for number in range(2, 6):
            await bench.ask(prompt_of(number, 46))
        again = await bench.ask(prompt_of(1, 46))
    assert (again.num_device_tokens + again.num_host_tokens, again.num_computed_tokens) == (40, 6)
    assert again.num_host_tokens > 0
    assert again.logits_digests == first.logits_digests


@each_kind
async def test_a_load_that_fails_half_way_resumes_from_nothing_wrong(kind: str) -> None:
    """Corrupt blocks are a miss. The request computes from a checkpoint that it has, or from the start."""
    tampering = Tampering.of(Corrupt.CHECKSUM)
    async with serving(kind, 48, tampering=tampering) as bench:
        prompt = prompt_of(1, 78)
        first = await bench.ask(prompt)
        for number in range(2, 6):
            await bench.ask(prompt_of(number, 78))
        again = await bench.ask(prompt)
        third = await bench.ask(prompt)
    assert again.num_computed_tokens > 78 - 72
    assert first.logits_digests == again.logits_digests == third.logits_digests


async def test_who_made_way_resumes_from_its_last_checkpoint() -> None:
    """A request that gives up its blocks loses its slot. Its next try gets the state from a checkpoint, and the client
    hears each token once."""
    heard: dict[int, list[int]] = {0: [], 1: []}
    async with serving("windows", 35) as bench, anyio.create_task_group() as clients:

        async def ask(number: int, num_tokens: int, num_new: int) -> None:
            prompt = prompt_of(number, num_tokens)
            await bench.ask(prompt, num_new, on_token=heard[number].append)
            assert tuple(heard[number]) == answer(prompt, num_new, "windows")

        clients.start_soon(ask, 0, 16, 32)
        clients.start_soon(ask, 1, 24, 20)
    assert bench.engine.statistics().num_made_way > 0


@each_kind
@pytest.mark.parametrize("seed", range(3))
async def test_hardly_more_room_than_the_largest_needs(kind: str, seed: int) -> None:
    """A request that is preempted any number of times gets its answer: none is refused, and none waits for ever."""
    draw = random.Random(seed)
    asks = [(draw.randint(1, 60), draw.randint(1, 30)) for _ in range(draw.randint(3, 9))]
    num_groups = 2 if kind == "windows" else 1
    num_blocks = max(num_groups * OPTIONS.num_blocks(sum(ask)) for ask in asks) + 3 + draw.randint(0, 12)
    options = attrs.evolve(OPTIONS, reuse_decoded=draw.random() < 0.5, decode_rows=draw.choice([1, 2, 4]))
    async with serving(kind, num_blocks, options=options) as bench:
        with anyio.fail_after(60):
            async with anyio.create_task_group() as clients:
                for number, (num_tokens, num_new) in enumerate(asks):
                    clients.start_soon(bench.ask, prompt_of(number % 4, num_tokens), num_new)


@each_kind
@pytest.mark.parametrize("num_passes", range(0, 60, 6))
async def test_a_client_may_leave_at_any_time(kind: str, num_passes: int) -> None:
    """Wherever a client is cancelled, its blocks come back, and no checkpoint is published that was not written."""
    async with serving(kind, 40) as bench:
        async with anyio.create_task_group() as clients:
            for number in range(4):
                clients.start_soon(bench.ask, prompt_of(number), 8)
            with anyio.CancelScope() as scope:
                async with anyio.create_task_group() as pair:

                    async def leave() -> None:
                        for _ in range(num_passes):
                            await anyio.lowlevel.checkpoint()
                        scope.cancel()

                    pair.start_soon(bench.ask, prompt_of(9), 4)
                    pair.start_soon(leave)
        await bench.ask(prompt_of(9), 4)


async def test_a_hit_without_its_checkpoint_gives_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """If a runtime reported a hit and no checkpoint of it, the request would fail, not begin with an empty state."""
    async with serving("full", 80) as bench:
        await bench.ask(prompt_of(1, 46))
        monkeypatch.setattr("aoffload._runtime.request.Request.resume_checkpoint", None)
        with pytest.raises(StepFailed, match="one starts at token 40, but its slot is at 0"):
            await bench.ask(prompt_of(1, 46))


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_the_named_model_is_served() -> None:
    """Qwen3-Next on a pool that is too small for three prompts: the third and fourth answer resume from checkpoints in
    host memory, and their logits are those of an engine that has computed everything."""
    model, options = load_model("qwen3-next", seed=7), EngineOptions(decode_rows=2)
    base = torch.randint(0, 4096, (230,), generator=torch.Generator().manual_seed(3)).tolist()
    prompts = [base[:150], base[150:] + base[:80], [*base[:140], 7, 8, 9], base[:150]]
    found: list[list[Any]] = []
    for num_blocks, num_host_blocks in ((300, 0), (28, 200)):
        kv_cache = model.new_kv_cache(num_blocks + options.num_scratch_blocks, options.block_size)
        config = OffloadConfig(groups=engine_groups(model, options), num_host_blocks=num_host_blocks, verify=True)
        async with (
            OffloadRuntime(config, kv_cache[:num_blocks]) as runtime,
            PagedEngine(model, runtime, kv_cache, options) as engine,
        ):
            reads_cache = num_host_blocks > 0
            found.append([await engine.generate(prompt, 3, reads_cache=reads_cache) for prompt in prompts])
    assert [each.logits_digests for each in found[0]] == [each.logits_digests for each in found[1]]
    assert [each.num_computed_tokens for each in found[0]] == [150, 160, 143, 150]
    assert [each.num_host_tokens for each in found[1]] == [0, 0, 128, 0]
    assert [each.num_device_tokens for each in found[1]] == [0, 0, 0, 128]


async def test_the_servers_default_pools_have_room_for_checkpoints() -> None:
    """The default pools hold 8,192 and 32,768 tokens of KV, and a checkpoint of a state of three blocks per 1,024."""
    model = FoldingModel("full")
    model.max_positions, model.vocab_size, model.end_token_ids = 10_000, VOCABULARY, ()  # type: ignore[attr-defined]
    block = model.new_kv_cache(1, 16)[0]
    piece = torch.zeros(1, 3 * block.nbytes // 8, dtype=torch.int64)
    model.states = StateLayout.of([(2, "recurrent", 0, piece)], torch.device("cpu"))
    async with open_service(ServerOptions(model="tiny"), model) as service:
        now = service.engine.runtime.statistics()
        assert (now.device.num_blocks, now.host.num_blocks) == (512 + 3 * 8, 2048 + 3 * 32)
        assert service.limits.num_tokens == 8192


async def test_a_wrong_state_is_noticed() -> None:
    """The negative control of this file: a checkpoint whose blocks were overwritten gives no answer."""
    async with serving("full", 80) as bench:
        await bench.ask(prompt_of(1, 46))
        state = torch.tensor([40] + [fold(prompt_of(1, 46)[:40])] * 3)
        rows = bench.kv_cache.flatten(1).view(torch.int64)
        [hit] = [at for at, row in enumerate(rows) if torch.equal(row, state)]
        bench.kv_cache[hit] = 0
        with pytest.raises(StepFailed, match="the state at 40"):
            await bench.ask(prompt_of(1, 46))


@pytest.mark.parametrize(
    ("changes", "options", "problem"),
    [
        ({"attention": None}, OPTIONS, "groups: must end with the group of model.states"),
        ({"num_rows": 2}, OPTIONS, "groups.num_rows: is 2, but a state takes 3 blocks"),
        ({"block_size": 4}, OPTIONS, "groups.block_size: .* multiples of prefill_tokens 8"),
        ({}, attrs.evolve(OPTIONS, prefill_start=PrefillStart.BY_LAYER), "prefill_start: is by layer"),
    ],
)
async def test_a_runtime_that_cannot_keep_the_states_is_refused(
    changes: dict[str, Any], options: EngineOptions, problem: str
) -> None:
    """A group of checkpoints with another size or grid, or none at all, is an error that names the argument."""
    model = FoldingModel("full")
    kv_cache = model.new_kv_cache(12 + OPTIONS.num_scratch_blocks, 4)
    wanted = model.states.group(kv_cache, 8)
    groups = engine_groups(model, OPTIONS)
    assert groups.pop() == wanted
    if "attention" not in changes:
        groups.append(attrs.evolve(wanted, **changes))
    async with OffloadRuntime(OffloadConfig(groups=groups, num_host_blocks=20), kv_cache[:12]) as runtime:
        with pytest.raises(ConfigError, match=f"^{problem}"):
            PagedEngine(model, runtime, kv_cache, options)


def test_a_state_takes_blocks_of_the_kv_s_size() -> None:
    """The group of the checkpoints has as many blocks for one as its bytes fill."""
    model = FoldingModel("full")
    kv_cache = model.new_kv_cache(4, 4)
    assert model.states.group(kv_cache, 16) == KVCacheGroup("state", RecurrentState(), block_size=16, num_rows=3)


def test_a_slot_must_be_where_its_slice_begins() -> None:
    """A slot at another position, a slot that a failed forward has left half-way, one slot for two slices, and slices
    without any are refused: each would give a wrong answer."""
    model = FoldingModel("full")
    kv_cache = model.new_kv_cache(9, 4)
    slot = model.states.new_slot(kv_cache)

    def part(start: int, **options: Any) -> RecurrentSlice:
        return RecurrentSlice([7, 8], start, [[1]], slot=slot, **options)

    def forward(*slices: SequenceSlice) -> torch.Tensor:
        return model.forward(PagedBatch.of(slices, 4), kv_cache)

    with pytest.raises(Exception, match="one starts at token 2, but its slot is at 0"):
        forward(part(2))
    with pytest.raises(Exception, match="use one slot twice"):
        forward(part(0), part(0))
    with pytest.raises(Exception, match="must be RecurrentSlice"):
        forward(SequenceSlice([7, 8], 0, [[1]]))
    forward(part(0))
    slot.views[0][0, 0] = 5  # the position in the state
    with pytest.raises(ArithmeticError):
        forward(part(2))
    with pytest.raises(Exception, match="one starts at token 2, but its slot is broken"):
        forward(part(2))
    slot.reset()
    forward(part(0, checkpoint=(3, 8, 5)))


@pytest.mark.parametrize("ids", [(3,), (3, 4, 3), (3, 4, 9), (3, 4, -1), (3, 4, 5, 6)])
def test_bad_blocks_of_a_checkpoint_are_named(ids: tuple[int, ...]) -> None:
    """Too few, too many, twice the same one, and none of the tensor's."""
    model = FoldingModel("full")
    kv_cache = model.new_kv_cache(9, 4)
    slot = model.states.new_slot(kv_cache)
    slot.num_tokens = 8
    with pytest.raises(Exception, match=r"^block_ids: must be"):
        slot.save(kv_cache, ids)
    with pytest.raises(Exception, match=r"^block_ids: must be"):
        slot.load(kv_cache, ids, 8)


def test_a_checkpoint_comes_back_bit_for_bit() -> None:
    """Every byte of the states, whatever they mean as numbers, through blocks in any order; no other block changes."""
    model = FoldingModel("full")
    kv_cache = model.new_kv_cache(9, 4).zero_()
    first, second = model.states.new_slot(kv_cache), model.states.new_slot(kv_cache)
    bits = torch.randint(-(2**63), 2**63 - 1, (1, 9), generator=torch.Generator().manual_seed(1))
    first.views[0].copy_(bits)
    first.num_tokens = 8
    first.save(kv_cache, (7, 2, 5))
    first.reset()
    assert first.num_tokens == 0
    assert not first.views[0].any()
    second.load(kv_cache, (7, 2, 5), 8)
    assert second.num_tokens == 8
    assert torch.equal(second.views[0], bits)
    assert kv_cache.flatten(1).any(dim=1).nonzero().flatten().tolist() == [2, 5, 7]
    with pytest.raises(Exception, match="which is not a checkpoint"):
        model.states.new_slot(kv_cache).save(kv_cache, (1, 2, 3))
