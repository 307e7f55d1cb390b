"""Error messages name the missing call or the request, and the remedy."""

from __future__ import annotations

import gc
import warnings
from array import array
from collections.abc import Callable
from typing import Any

import anyio
import pytest
import torch
from serving import BACKENDS, assert_at_rest, config, prompt, scripted

from aoffload import (
    CommitError,
    Computed,
    ConfigError,
    InvalidArgument,
    KVCacheGroup,
    KVRegion,
    OffloadConfig,
    OffloadRuntime,
    SlidingWindow,
    Tier,
    WrongState,
)
from aoffload._kernel.plans import PrefixMatch
from aoffload._kernel.states import REQUEST_MOVES, RequestState, require
from aoffload._reference.server import options as server
from aoffload.demo import options as demo
from aoffload.plan import command as plan
from aoffload.transport import LocalTransport, RegionError

pytestmark = pytest.mark.anyio
A, B = prompt(1, 9), prompt(2, 9)
S = RequestState


@pytest.fixture(params=BACKENDS)
def anyio_backend(request: pytest.FixtureRequest) -> Any:
    return request.param


# -- the call that is missing -------------------------------------------------------------------------------------


async def test_a_call_that_comes_too_early_names_the_one_that_is_missing() -> None:
    """Whoever forgets `allocate`, or to await it, is told to call it and await it; the same for a load under way and
    after a preemption. A call that comes too late says that the request has its blocks, or that it is over."""
    async with scripted() as (engine, _):
        async with engine.runtime.request(A) as request:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", RuntimeWarning)
                request.allocate()  # not awaited
                gc.collect()
            with pytest.raises(WrongState, match=r"PINNED.*: call `allocate` first, and await it"):
                await request.load()
            early: list[Callable[[], object]] = [
                request.load_nowait, lambda: request.commit(9), lambda: request.extend_nowait(12),
                lambda: request.block_ids, lambda: engine.runtime.step([request]).__enter__(),
            ]  # fmt: skip
            for call in early:
                with pytest.raises(WrongState, match="call `allocate` first, and await it"):
                    call()
            with pytest.raises(WrongState, match="no blocks to give up"):
                request.preempt_nowait()
            async with engine.runtime.request(B) as other:
                await other.allocate()
                with pytest.raises(WrongState, match=r"ALLOCATED.*it has its blocks: call `extend` for more"):
                    other.allocate_nowait()
            await engine.prefill(request, A)
            with pytest.raises(WrongState, match=r"RUNNING.*it has its blocks: call `extend` for more"):
                request.allocate_nowait()
            with pytest.raises(WrongState, match="only a preempted request can be resumed"):
                await request.resume()
            await request.preempt()
            assert request.block_ids == [[]]
            for call in (lambda: request.commit(9), request.load_nowait):
                with pytest.raises(WrongState, match=r"PREEMPTED.*: call `resume` first, and await it"):
                    call()
        with pytest.raises(WrongState, match="given up its blocks"):
            request.commit(9)
        with pytest.raises(WrongState, match="request mine was not entered: use `async with`"):
            engine.runtime.request(A, "mine").commit(9)
        await assert_at_rest(engine.runtime)


@pytest.mark.parametrize("state", RequestState, ids=lambda state: state.name)
def test_every_refusal_of_a_request_says_what_to_do(state: RequestState) -> None:
    """For each state from which a request may still be computed, a call that takes RUNNING names what comes first, and
    that is a call which moves it on in the table of moves."""
    asked = {
        S.MATCHED: "match_again", S.PINNED: "allocate", S.ALLOCATED: "load", S.PREEMPTED: "resume", S.LOADING: "wait",
        S.DRAINING: "wait", S.REQUEUED: "wait", S.STRANDED: "preempt", S.DONE: "it is over", S.ABORTED: "it is over",
    }  # fmt: skip

    class Of:
        def __init__(self) -> None:
            self.state = state

    if state in asked:
        with pytest.raises(WrongState, match=asked[state]):
            require(Of(), "fork", S.RUNNING)
    assert (state in asked) != (state in (S.QUEUED, S.RUNNING))
    assert bool(REQUEST_MOVES[state]) != (asked.get(state) == "it is over")


# -- which request is meant ---------------------------------------------------------------------------------------


async def test_a_refused_commit_of_a_step_names_the_request() -> None:
    """Of several requests that commit at once, the error says which, and how many tokens `new_token_ids` has added."""
    async with scripted() as (engine, _):
        commit_step = engine.runtime.commit_step
        async with engine.runtime.request(A, "one") as one, engine.runtime.request(B, "two") as two:
            await engine.prefill(one, A)
            await engine.prefill(two, B)
            with pytest.raises(CommitError, match=r"the 10 tokens .* 1 of `new_token_ids`.*request two") as refused:
                commit_step([Computed(one, 9), Computed(two, 11, [5])])
            assert refused.value.argument == "num_computed_tokens"
            with pytest.raises(InvalidArgument, match=r"new_token_ids.*request two") as bad:
                commit_step([Computed(one, 9), Computed(two, 9, [-5])])
            assert bad.value.argument == "new_token_ids"
            with pytest.raises(InvalidArgument, match="names request one twice"):
                commit_step([Computed(one, 9), Computed(one, 9)])
            with pytest.raises(CommitError, match="12 tokens that were allocated: call `extend` for more"):
                one.commit(13, [1, 2, 3, 4])
        await assert_at_rest(engine.runtime)


# -- sizes, and what is shown -------------------------------------------------------------------------------------


def test_a_host_pool_of_an_impossible_size_says_what_is_possible() -> None:
    """Too many blocks: the most that there can be, in blocks and in bytes. None: the size of one block."""
    much = OffloadConfig(groups=[KVCacheGroup("all")], host_bytes="100TiB")
    with pytest.raises(ConfigError, match=r"host_bytes: .*limit is 2,147,483,647 blocks, 1,099,511,627,264 bytes"):
        much.resolve_host_blocks(512)
    little = OffloadConfig(groups=[KVCacheGroup("all")], host_bytes=511)
    with pytest.raises(ConfigError, match="host_bytes: is 511 bytes, less than one block of 512 bytes"):
        little.resolve_host_blocks(512)
    assert little.resolve_host_blocks(511) == 1


def test_a_match_shows_what_only_the_disk_has() -> None:
    """Who prints a match sees tokens on the disk, and an answer that is pending. Without them nothing is added."""
    assert repr(PrefixMatch(1, 2)) == "PrefixMatch(num_device_tokens=1, num_host_tokens=2)"
    shown = repr(PrefixMatch(1, 2, is_pending=True, num_lower_tokens=3))
    assert shown == "PrefixMatch(num_device_tokens=1, num_host_tokens=2, num_lower_tokens=3, is_pending=True)"


def drop(_: object) -> None:
    """The caller has no other reference: what was passed is collected at the end of its statement."""


# -- what was silent ----------------------------------------------------------------------------------------------


async def test_a_part_of_a_prompt_that_ends_inside_of_a_block_is_a_warning() -> None:
    """`num_tokens` is a total: a number that would leave a block half used is taken for a mistake, and said. Whole
    blocks, all tokens and more are not."""
    async with scripted() as (engine, _):
        for num_tokens, is_odd in ((3, True), (8, False), (9, False), (11, False), (None, False)):
            for is_awaited in (False, True):
                async with engine.runtime.request(A) as request:
                    with warnings.catch_warnings(record=True) as found:
                        warnings.simplefilter("always")
                        if is_awaited:
                            await request.allocate(num_tokens)
                        else:
                            request.allocate_nowait(num_tokens)
                    assert [str(one.message) for one in found if "fewer than the 9" in str(one.message)] == (
                        [str(found[0].message)] if is_odd else []
                    )
        await assert_at_rest(engine.runtime)


async def test_with_windows_fewer_tokens_than_the_hit_are_a_warning() -> None:
    """A part of a hit ends where its window is not stored, so it loads nothing: the request would compute all of it,
    and nothing would say so. The whole hit, more, and no hit are no warning."""
    groups = [KVCacheGroup("full", block_size=4), KVCacheGroup("window", SlidingWindow(6), 4)]
    async with OffloadRuntime(OffloadConfig(groups=groups, num_host_blocks=40), torch.zeros(40, 8)) as runtime:
        async with runtime.request(range(33)) as request:
            await request.allocate(16)
            request.commit(16)
            await request.extend(33)
            request.commit(33)
        await runtime.flush()
        await runtime.reset(Tier.DEVICE)
        async with runtime.request(range(33)) as request:
            with pytest.warns(UserWarning, match="allocate: 16 tokens in total are fewer than the hit of 32 of "):
                await request.allocate(16)
            assert await request.load() == 0
        async with runtime.request(range(33)) as request:
            await request.allocate(32)
            assert await request.load() == 32


async def test_a_pin_and_a_step_that_nobody_enters_are_warnings() -> None:
    """Both do nothing until they are entered: one that is thrown away was meant to. One that could not be entered, and
    one that a closed runtime has made, say nothing more."""
    async with scripted() as (engine, _):
        runtime = engine.runtime
        await engine.serve(A)
        with pytest.warns(ResourceWarning, match="pin was never entered"):
            drop(runtime.pins.hold(A, 60))
        with pytest.warns(ResourceWarning, match="step was never entered"):
            drop(runtime.step([]))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with runtime.pins.hold(A, 60), runtime.step([]):
                pass
            async with runtime.request(B) as request:
                with pytest.raises(WrongState), runtime.step([request]):
                    raise AssertionError("entered")
            held = runtime.pins.hold(A, 60)
            gc.collect()
        await assert_at_rest(runtime)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        del held
        gc.collect()


async def test_a_step_that_is_abandoned_ends_in_the_loop() -> None:
    """A dropped step causes a warning, and its blocks are free at the loop's next turn."""
    async with scripted() as (engine, _):
        async with engine.runtime.request(A) as request:
            await request.allocate()
            steps = [engine.runtime.step([request])]
            steps[0].__enter__()
            with pytest.warns(ResourceWarning, match="step was abandoned"):
                drop(steps.pop())
            assert request._record is not None and request._record.num_steps == 1  # not before that turn
            with anyio.fail_after(10):
                await request.preempt()
        await assert_at_rest(engine.runtime)


class Rows:
    """A pool of the program's own: hands out ids from `first` on."""

    def __init__(self, first: int, stop: int) -> None:
        self.free = array("i", range(first, stop))
        self.num_blocks = stop - first

    @property
    def num_free(self) -> int:
        return len(self.free)

    def free_ids(self) -> array[int]:
        return self.free

    def take(self, num_blocks: int) -> array[int]:
        found, self.free = self.free[:num_blocks], self.free[num_blocks:]
        return found

    def give(self, block_ids: Any) -> None:
        self.free.extend(block_ids)


async def test_two_runtimes_over_one_tensor_are_refused() -> None:
    """Each would overwrite what the other has cached. A part of the tensor is refused, too; another tensor, and the
    same one after the first runtime has closed, are not. A program that hands out the block ids of both may share."""
    kv = torch.zeros(9, 8)
    region = KVRegion.of(kv)
    async with OffloadRuntime(config(), kv) as first:
        for shared in (kv, [kv], region, kv[2:7]):
            with pytest.raises(RegionError, match="another open runtime") as refused:
                async with OffloadRuntime(config(), shared):
                    raise AssertionError("entered")
            assert refused.value.argument == "kv_caches"
        with pytest.raises(RegionError):
            async with OffloadRuntime(config(), transport=LocalTransport(kv)):
                raise AssertionError("entered")
        with pytest.raises(RegionError):
            async with OffloadRuntime(config(), kv, device_pool=Rows(1, 5)):
                raise AssertionError("entered")
        async with OffloadRuntime(config(), torch.zeros(9, 8)):
            pass
        async with first.request(A) as request:
            await request.allocate()
    async with OffloadRuntime(config(), kv, device_pool=Rows(1, 5)):
        async with OffloadRuntime(config(), kv, device_pool=Rows(5, 9)):
            pass
    async with OffloadRuntime(config(), kv):
        pass


# -- options of the commands --------------------------------------------------------------------------------------

ALONE: list[tuple[Callable[[list[str]], object], list[str], str]] = [
    (server.parse_options, ["--disk-size", "banana"], "--disk-size: has an effect only with --disk"),
    (server.parse_options, ["--remote-secret", "file"], "--remote-secret: has an effect only with --remote"),
    (demo.parse_options, ["--remote-secret", "file"], "--remote-secret: has an effect only with --remote"),
    *(
        (plan.main, ["t", "--kv-bytes-per-token", "1", "--device", "1", option, "7"], f"{option}: has an effect")
        for option in ("--host-gbs", "--disk-gbs", "--decode-tokens-per-s", "--disk-price-per-gib-month")
    ),
]


@pytest.mark.parametrize(("parse", "arguments", "said"), ALONE, ids=[" ".join(each[1][-2:]) for each in ALONE])
def test_an_option_without_the_one_that_it_is_about_is_refused(
    parse: Callable[[list[str]], object], arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A size of a disk that there is not, the secret of no store, prices and speeds of what is not computed: exit
    status 2, and the option is named, even if its value could not be right."""
    with pytest.raises(SystemExit) as ended:
        parse(arguments)
    assert ended.value.code == 2
    assert said in capsys.readouterr().err
