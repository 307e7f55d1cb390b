"""Bad input: a typed error that names the argument, nothing changed, and the runtime goes on serving."""

from __future__ import annotations

import array
import math
import os
import re
import threading
import warnings
from collections.abc import Callable
from operator import attrgetter
from typing import Any

import anyio
import numpy as np
import pytest
import torch
from scripted import ScriptedTransport
from serving import BACKENDS, Engine, assert_at_rest, config, prompt, scripted, with_bytes

from aoffload import (
    AoffloadError,
    CommitError,
    ConfigError,
    DuplicateRequest,
    FullAttention,
    InvalidArgument,
    KeySpan,
    KVCacheGroup,
    KVRegion,
    OffloadConfig,
    OffloadRuntime,
    OutOfBlocks,
    RuntimeClosed,
    WrongProcess,
    WrongState,
    WrongThread,
)
from aoffload.transport import RegionError

pytestmark = pytest.mark.anyio

A, B = prompt(1, 9), prompt(2, 9)


@pytest.fixture(params=BACKENDS)
def anyio_backend(request: pytest.FixtureRequest) -> Any:
    return request.param


async def goes_on_serving(engine: Engine) -> None:
    """Whatever was refused changed nothing: nothing is pinned, and the next request is served."""
    await assert_at_rest(engine.runtime)
    await engine.serve(A)
    await assert_at_rest(engine.runtime)


# -- token ids ----------------------------------------------------------------------------------------------------

BAD_TOKENS = {
    "empty": [],
    "empty array": np.zeros(0, np.int32),
    "negative": [1, -1, 2],
    "a float": [1, 2.5],
    "a whole float": [1.0, 2.0],
    "nan": [1, math.nan],
    "inf": [math.inf],
    "a float array": np.ones(4),
    "too large": [2**31],
    "too large, unsigned": np.array([2**32 - 1], np.uint32),
    "above int64": [2**63],
    "above uint64": [1, 2**64],
    "a huge int": [10**400],
    "a huge negative int": [-(10**400)],
    "two dimensions": [[1, 2], [3, 4]],
    "two dimensions, empty": [[]],
    "two-dimensional array": np.zeros((2, 2), np.int64),
    "no dimension": np.int64(7),
    "ragged": [[1], [2, 3]],
    "nested tuple": [(1, 2), 3],
    "an int": 7,
    "a bool": True,
    "bools": [True, False],
    "a bool array": np.array([True]),
    "a float alone": 1.5,
    "a str": "1 2 3",
    "strs": ["1", "2"],
    "bytes": b"\x01\x02",
    "a bytearray": bytearray(b"\x01\x02"),
    "None": None,
    "Nones": [None, None],
    "one None": [1, None],
    "a dict": {1: 2},
    "a set": {1, 2},
    "an object": object(),
    "objects": [object()],
    "complex": [1j],
    "a date": np.array(["2026-01-01"], "M8[D]"),
    "a float tensor": torch.ones(3),
    "a bfloat16 tensor": torch.ones(3, dtype=torch.bfloat16),
    "a bool tensor": torch.ones(3, dtype=torch.bool),
    "a tensor of two dimensions": torch.ones(2, 2, dtype=torch.int64),
    "a tensor without dimension": torch.tensor(3),
    "a tensor on no device": torch.ones(3, dtype=torch.int64, device="meta"),
    "a tensor with a gradient": torch.ones(3, requires_grad=True),
    "a negative tensor": torch.tensor([-1]),
}


@pytest.mark.parametrize("bad", BAD_TOKENS.values(), ids=BAD_TOKENS.keys())
async def test_bad_token_ids(bad: Any) -> None:
    """What is no list of token ids is refused by name, at the door and when tokens are added."""
    async with scripted(eviction="learned") as (engine, _):
        with pytest.raises(InvalidArgument, match="token_ids") as refused:
            engine.runtime.request(bad)
        assert refused.value.argument == "token_ids"
        for call in (engine.runtime.lookup, engine.runtime.transfers.prefetch, engine.runtime.transfers.demote):
            with pytest.raises(InvalidArgument, match="token_ids"):
                call(bad)
        with pytest.raises(InvalidArgument, match="token_ids"):
            engine.runtime.pins.hold(bad, 60)
        for verb in (engine.runtime.hints.prefetch, engine.runtime.hints.demote, engine.runtime.hints.done):
            with pytest.raises(InvalidArgument, match="token_ids"):
                verb(bad)
        is_nothing = (
            isinstance(bad, (list, np.ndarray)) and not np.size(np.array(bad, dtype=object)) and np.ndim(bad) == 1
        )
        if not is_nothing:  # adding no tokens is what most commits do
            async with engine.runtime.request(A) as request:
                await engine.prefill(request, A)
                with pytest.raises(InvalidArgument, match="new_token_ids") as refused:
                    request.commit(9, bad)
                assert refused.value.argument == "new_token_ids"
                request.commit(9)
        await goes_on_serving(engine)


async def test_a_generator_of_token_ids_is_refused() -> None:
    """Something that can be read only once is not taken for a sequence, and is left unread."""
    async with scripted() as (engine, _):
        tokens = (token for token in A)
        with pytest.raises(InvalidArgument, match="token_ids"):
            engine.runtime.request(tokens)
        assert next(tokens) == A[0]
        await goes_on_serving(engine)


GOOD_TOKENS: dict[str, Callable[[], Any]] = {
    "list": lambda: list(A),
    "tuple": lambda: tuple(A),
    "range": lambda: range(A[0], A[0] + 9),
    "array('i')": lambda: array.array("i", A),
    "array('Q')": lambda: array.array("Q", A),
    "memoryview": lambda: memoryview(array.array("i", A)),
    "numpy scalars": lambda: [np.int64(token) for token in A],
    **{name: lambda name=name: np.array(A, name) for name in ("int32", "uint32", "int64", "uint64", ">i4", ">i8")},  # type: ignore[misc]
    "strided": lambda: np.repeat(np.array(A), 3)[::3],
    "read-only": lambda: np.frombuffer(np.array(A, np.int32).tobytes(), np.int32),
    "torch int32": lambda: torch.tensor(A, dtype=torch.int32),
    "torch int64": lambda: torch.tensor(A),
    "torch strided": lambda: torch.tensor(A).repeat_interleave(2)[::2],
}


@pytest.mark.parametrize("make", GOOD_TOKENS.values(), ids=GOOD_TOKENS.keys())
async def test_any_container_of_integers_works(make: Callable[[], Any]) -> None:
    """Lists, arrays and tensors of the same ids are the same prompt, and the caller may reuse what it passed."""
    async with scripted() as (engine, _):
        await engine.serve(A)
        given = make()
        async with engine.runtime.request(given) as request:
            if (
                isinstance(given, (list, array.array, np.ndarray, torch.Tensor))
                and getattr(given, "flags", np.ones(1).flags).writeable
            ):
                given[0] = 5
            assert request.match.num_device_tokens == 8
            await engine.prefill(request, A)
            assert await request.extend(13) is not None
            request.commit(9, make()[:4])
        await assert_at_rest(engine.runtime)


@pytest.mark.parametrize("dtype", ["uint8", "int8", "int16", "uint16"])
async def test_small_integers_work(dtype: str) -> None:
    """Narrow types are widened, not read as something else."""
    async with scripted() as (engine, _):
        await engine.serve([1, 2, 3, 4, 5])
        assert engine.runtime.lookup(np.array([1, 2, 3, 4, 5], dtype)).num_device_tokens == 4


async def test_the_largest_id_is_an_id() -> None:
    """The range is `[0, 2**31)`, both ends as written."""
    async with scripted() as (engine, _):
        edge = [0, 2**31 - 1, 0, 2**31 - 1, 0]
        await engine.serve(edge)
        assert engine.runtime.lookup(edge).num_device_tokens == 4


# -- the other arguments of a request -------------------------------------------------------------------------------

BAD_REQUESTS: list[tuple[str, dict[str, Any]]] = [
    ("request_id", {"request_id": 7}),
    ("request_id", {"request_id": b"r"}),
    ("cache_salt", {"cache_salt": 7}),
    ("cache_salt", {"cache_salt": ["a"]}),
    ("cache_salt", {"cache_salt": bytearray(b"a")}),
    ("cache_salt", {"cache_salt": math.nan}),
    ("cache_salt", {"cache_salt": "\ud800"}),
    ("adapter_key", {"adapter_key": {}}),
    ("adapter_key", {"adapter_key": "\udfff"}),
    ("max_hit_tokens", {"max_hit_tokens": -1}),
    ("max_hit_tokens", {"max_hit_tokens": 1.5}),
    ("max_hit_tokens", {"max_hit_tokens": True}),
    ("hit_alignment", {"hit_alignment": 0}),
    ("hit_alignment", {"hit_alignment": "4"}),
    ("deadline_s", {"deadline_s": math.nan}),
    ("deadline_s", {"deadline_s": "soon"}),
    ("deadline_s", {"deadline_s": True}),
    ("deadline_s", {"deadline_s": 10**400}),
    ("key_spans", {"key_spans": 5}),
    ("key_spans", {"key_spans": [(0, 1, b"x")]}),
    ("key_spans", {"key_spans": KeySpan(0, 1, b"x")}),
    ("key_spans", {"key_spans": [KeySpan(3, 3, b"x")]}),
    ("key_spans", {"key_spans": [KeySpan(4, 2, b"x")]}),
    ("key_spans", {"key_spans": [KeySpan(-1, 2, b"x")]}),
    ("key_spans", {"key_spans": [KeySpan(0, 10, b"x")]}),
    ("key_spans", {"key_spans": [KeySpan(0, 10**30, b"x")]}),
    ("key_spans", {"key_spans": [KeySpan(0, 4, b"x"), KeySpan(3, 5, b"y")]}),
    ("key_spans", {"key_spans": [KeySpan(4, 6, b"x"), KeySpan(0, 2, b"y")]}),
    ("key_spans", {"key_spans": [KeySpan(0, 2, "x")]}),  # type: ignore[arg-type]
    ("key_spans", {"key_spans": [KeySpan(0.0, 2, b"x")]}),  # type: ignore[arg-type]
    ("key_spans", {"key_spans": [KeySpan(False, True, b"x")]}),
]


@pytest.mark.parametrize(("argument", "options"), BAD_REQUESTS, ids=[f"{k}-{v}"[:60] for k, v in BAD_REQUESTS])
async def test_bad_options_of_a_request(argument: str, options: dict[str, Any]) -> None:
    """Overlapping or reversed key spans, salts that are no text, odd limits: refused by name, with nothing pinned."""
    async with scripted() as (engine, _):
        with pytest.raises(InvalidArgument, match=argument) as refused:
            async with engine.runtime.request(A, **options):
                raise AssertionError("entered")
        assert refused.value.argument.startswith(argument)
        await goes_on_serving(engine)


async def test_two_live_requests_of_one_id() -> None:
    """A live request's id is taken; it is free again after its block."""
    async with scripted() as (engine, _):
        async with engine.runtime.request(A, "r1") as first:
            with pytest.raises(DuplicateRequest, match="request_id") as refused:
                await engine.serve(B, request_id="r1")
            assert refused.value.argument == "request_id"
            await engine.prefill(first, A)
        await engine.serve(B, request_id="r1")
        await goes_on_serving(engine)


async def test_ids_of_callers_do_not_collide_with_ours() -> None:
    """A client may call its request what we would call one without a name: nobody else is harmed."""
    async with scripted() as (engine, _):
        async with engine.runtime.request(A, "request-0"), engine.runtime.request(A, "request-3"):
            for _ in range(4):
                await engine.serve(B)
        await goes_on_serving(engine)


async def test_a_request_is_entered_once() -> None:
    """A request can be entered once; used outside of its block it says so."""
    async with scripted() as (engine, _):
        request = engine.runtime.request(A)
        with pytest.raises(WrongState, match="async with"):
            request.commit(1)
        async with request:
            with pytest.raises(WrongState, match="entered before"):
                await request.__aenter__()
            await engine.prefill(request, A)
        for call in (request.allocate_nowait, lambda: request.commit(9), lambda: request.block_ids):
            with pytest.raises(WrongState, match="DONE"):
                call()
        with pytest.raises(WrongState, match="entered before"):
            await request.__aenter__()
        await goes_on_serving(engine)


# -- sizes --------------------------------------------------------------------------------------------------------


async def test_a_prompt_larger_than_the_pool() -> None:
    """What can never fit is refused at once, not waited for, whether others hold room or not."""
    async with scripted(4) as (engine, _):
        for others in (0, 1):
            async with engine.runtime.request(B) as holder:
                if others:
                    holder.allocate_nowait()
                with pytest.raises(OutOfBlocks, match="num_tokens") as refused:
                    await engine.serve(prompt(3, 17))
                assert not refused.value.retryable
                async with engine.runtime.request(A) as request:
                    request.allocate_nowait(4) if others else await engine.prefill(request, A)
                    with pytest.raises(OutOfBlocks) as refused:
                        await request.extend(17)
                    assert not refused.value.retryable
            await engine.runtime.flush()
        await goes_on_serving(engine)


@pytest.mark.parametrize("bad", [0, -1, 1.5, True, "9", None, math.nan, np.float64(3), [9]])
async def test_bad_numbers_of_tokens(bad: Any) -> None:
    """Numbers of tokens are positive integers, wherever they are given."""
    async with scripted() as (engine, _):
        async with engine.runtime.request(A) as request:
            if bad is not None:
                with pytest.raises(InvalidArgument, match="num_tokens"):
                    await request.allocate(bad)
                with pytest.raises(InvalidArgument, match="num_tokens"):
                    request.allocate_nowait(bad)
            await request.allocate()
            if bad not in (0, None):
                with pytest.raises(InvalidArgument, match="max_tokens"):
                    await request.load(bad)
            await engine.runtime.flush()
            await request.load()
            with pytest.raises(InvalidArgument, match="num_tokens"):
                await request.extend(bad)
            if bad != 0:
                with pytest.raises(CommitError, match="num_computed_tokens"):
                    request.commit(bad)
                with pytest.raises(InvalidArgument, match="from_token"):
                    request.invalidate(bad)
        await goes_on_serving(engine)


async def test_bad_commits() -> None:
    """Backwards, beyond what was allocated, beyond what is known: refused by name, and the request goes on."""
    async with scripted() as (engine, _):
        async with engine.runtime.request(A) as request:
            with pytest.raises(WrongState, match="PINNED"):
                request.commit(1)
            await request.allocate()
            engine.compute(request, A, 0)
            request.commit(8)
            for bad, problem in ((4, "goes back"), (10, "known"), (13, "known"), (10**30, "known")):
                with pytest.raises(CommitError, match=problem) as refused:
                    request.commit(bad)
                assert refused.value.argument == "num_computed_tokens"
                assert request.num_computed_tokens == 8
            with pytest.raises(CommitError, match="allocated"):
                request.commit(13, [1, 2, 3, 4])
            request.commit(9)  # the refused tokens were not appended
            with pytest.raises(CommitError, match="known"):
                request.commit(10)
        await goes_on_serving(engine)


async def test_a_commit_before_the_load_has_settled() -> None:
    """While blocks are on their way nothing can be committed, and no forward may touch them."""
    async with scripted(auto=False) as (engine, transport):
        await engine.serve(A)
        transport.land_all()
        await engine.runtime.flush()
        await engine.evict_device()
        async with engine.runtime.request(A) as request:
            await request.allocate()
            request.load_nowait()
            with pytest.raises(WrongState, match="LOADING"):
                request.commit(9)
            with pytest.raises(WrongState, match="LOADING"), engine.runtime.step([request]):
                pass
            transport.land_all()
            assert await request.load() == 8
            engine.check(request, A, 8)
        transport.auto = True
        transport.land_all()
        await goes_on_serving(engine)


# -- salts --------------------------------------------------------------------------------------------------------


async def test_odd_salts_are_salts() -> None:
    """Empty, long, bytes or text: each is a cache of its own, and none of them is the one without a salt."""
    salts: list[Any] = [None, "", b"", "a", b"a", "a" * 2**20, b"a" * 2**20, "\x00", "n", "ä", "a\u0308", "\U0001d54a"]
    async with scripted(2 * len(salts) + 2, num_host_blocks=0) as (engine, _):
        for salt in salts:
            async with engine.runtime.request(A, cache_salt=salt) as request:
                assert request.match.num_tokens == 0, salt
                await engine.prefill(request, A, salt)
        for salt in salts:
            async with engine.runtime.request(A, cache_salt=salt) as request:
                assert await engine.prefill(request, A, salt) == 8
            assert engine.runtime.lookup(A, adapter_key=salt).num_tokens == (8 if salt is None else 0)
        await assert_at_rest(engine.runtime)


async def test_long_salts_are_not_kept() -> None:
    """What a client can make as long as it likes does not stay in memory when its request is over."""
    async with scripted() as (engine, _):
        for index in range(64):
            engine.runtime.lookup(A, cache_salt=f"{index}" * 100_000)
            engine.runtime.lookup(A, adapter_key=b"%d" % index * 100_000)
        kept = engine.runtime._session.roots._kept
        assert sum(len(key or "") for keys in kept for key in keys) < 100_000
        for index in range(5000):
            engine.runtime.lookup(A, cache_salt=f"tenant {index}")
        assert len(kept) <= 2000


# -- the configuration and the regions ----------------------------------------------------------------------------

BAD_CONFIGS: list[tuple[str, dict[str, Any]]] = [
    ("groups", {"groups": []}),
    ("groups", {"groups": 5}),
    ("groups", {"groups": "full"}),
    ("groups", {"groups": [object()]}),
    ("groups", {"groups": [KVCacheGroup("a"), KVCacheGroup("a")]}),
    ("num_host_blocks", {"num_host_blocks": -1}),
    ("num_host_blocks", {"num_host_blocks": 1.5}),
    ("num_host_blocks", {"num_host_blocks": True}),
    ("num_host_blocks", {"num_host_blocks": 2**31}),
    ("num_host_blocks", {"num_host_blocks": "many"}),
    ("num_host_blocks", {"num_host_blocks": None}),
    ("num_host_blocks", {"host_bytes": "1GiB"}),
    ("host_bytes", {"num_host_blocks": None, "host_bytes": 0}),
    ("host_bytes", {"num_host_blocks": None, "host_bytes": -5}),
    ("host_bytes", {"num_host_blocks": None, "host_bytes": "-5GiB"}),
    ("host_bytes", {"num_host_blocks": None, "host_bytes": "8 elephants"}),
    ("host_bytes", {"num_host_blocks": None, "host_bytes": 2**60}),
    ("host_bytes", {"num_host_blocks": None, "host_bytes": "9" * 400 + "GiB"}),
    ("host_bytes", {"num_host_blocks": None, "host_bytes": 1.5}),
    ("host_bytes", {"num_host_blocks": None, "host_bytes": True}),
    ("host_bytes", {"num_host_blocks": None, "host_bytes": ""}),
    ("namespace", {"namespace": 5}),
    ("namespace", {"namespace": "\ud800"}),
    ("store_policy", {"store_policy": "sometimes"}),
    ("eviction", {"eviction": "random"}),
    ("eviction", {"eviction": "learn"}),
    ("verify", {"verify": "yes"}),
    ("verify", {"verify": 1}),
    ("max_jobs_in_flight", {"max_jobs_in_flight": 0}),
    ("max_jobs_in_flight", {"max_jobs_in_flight": 10**9}),
    ("max_bytes_in_flight", {"max_bytes_in_flight": 0}),
    ("max_job_bytes", {"max_job_bytes": "nothing"}),
    *(
        (name, {name: bad})
        for name in ("load_timeout_s", "transfer_timeout_s", "close_timeout_s")
        for bad in (0, -1, math.inf, math.nan, "1", None, True, 10**400)
    ),
]


@pytest.mark.parametrize(("argument", "options"), BAD_CONFIGS, ids=[f"{k}-{v}"[:60] for k, v in BAD_CONFIGS])
def test_bad_configurations(argument: str, options: dict[str, Any]) -> None:
    """Zero, negative and absurd sizes: refused by name before anything is allocated."""
    given: dict[str, Any] = {"groups": [KVCacheGroup("full")], "num_host_blocks": 4, "namespace": "test", **options}
    with pytest.raises(ConfigError, match=argument) as refused:
        OffloadConfig(**given)
    assert refused.value.argument == argument


@pytest.mark.parametrize(
    ("argument", "options"),
    [
        ("groups.name", {"name": ""}),
        ("groups.name", {"name": 5}),
        ("groups.block_size", {"name": "a", "block_size": 0}),
        ("groups.block_size", {"name": "a", "block_size": -16}),
        ("groups.block_size", {"name": "a", "block_size": 2**40}),
        ("groups.block_size", {"name": "a", "block_size": 16.0}),
        ("groups.attention", {"name": "a", "attention": "full"}),
    ],
)
def test_bad_groups(argument: str, options: dict[str, Any]) -> None:
    """A group that cannot be is refused where it is made."""
    with pytest.raises(ConfigError, match=argument) as refused:
        KVCacheGroup(**options)
    assert refused.value.argument == argument


def test_bad_runtimes() -> None:
    """Neither or both of tensors and transport, a config that is none, policies that are none: refused by name."""
    transport = ScriptedTransport(4)
    cases: list[tuple[str, Callable[[], object]]] = [
        ("config", lambda: OffloadRuntime({"groups": []}, transport=transport)),  # type: ignore[arg-type]
        ("kv_caches", lambda: OffloadRuntime(config())),
        ("kv_caches", lambda: OffloadRuntime(config(), torch.zeros(4, 2), transport=transport)),
        ("store_policy", lambda: OffloadRuntime(config(store_policy=5), transport=transport)),
        ("eviction", lambda: OffloadRuntime(config(eviction=5), transport=transport)),
        ("num_device_blocks", lambda: OffloadRuntime(config(), transport=ScriptedTransport(1))),
        ("num_device_blocks", lambda: OffloadRuntime(config(), torch.zeros(1, 2))),
    ]
    for argument, make in cases:
        with pytest.raises(InvalidArgument, match=argument) as refused:
            make()
        assert refused.value.argument == argument


BAD_REGIONS: dict[str, tuple[str, Callable[[], Any]]] = {
    "another first dimension": ("kv_caches[1]", lambda: [torch.zeros(8, 4), torch.zeros(7, 4)]),
    "a block that is not contiguous": ("kv_caches", lambda: torch.zeros(8, 4, 4)[:, :, ::2]),
    "named": ("kv_caches['v']", lambda: {"k": torch.zeros(8, 4), "v": torch.zeros(9, 4)}),
    "shared memory": ("kv_caches[1]", lambda: [torch.zeros(8, 4)] * 2),
    "empty": ("kv_caches", list),
    "no blocks": ("kv_caches", lambda: torch.zeros(0, 4)),
    "empty blocks": ("kv_caches", lambda: torch.zeros(8, 0)),
    "a number": ("kv_caches", lambda: 5),
    "numpy": ("kv_caches", lambda: np.zeros((8, 4))),
    "a stride that overlaps": ("block_stride_bytes", lambda: KVRegion(torch.zeros(8, 4), 8, 16)),
    "a block of nothing": ("block_bytes", lambda: KVRegion(torch.zeros(8, 4), 16, 0)),
}


@pytest.mark.parametrize(("argument", "make"), BAD_REGIONS.values(), ids=BAD_REGIONS.keys())
def test_bad_regions(argument: str, make: Callable[[], Any]) -> None:
    """Tensors that a block id cannot address: refused by the name of the member."""
    with pytest.raises(RegionError) as refused:
        OffloadRuntime(config(), make())
    assert refused.value.argument == argument


async def test_host_memory_that_cannot_be_had() -> None:
    """More host memory than there can be is a clear error with the size, and nothing stays behind."""
    before = threading.active_count()
    group = KVCacheGroup("full", attention=FullAttention(), block_size=4)
    absurd = OffloadConfig(groups=[group], num_host_blocks=2**31 - 1, namespace="test")
    with pytest.raises(ConfigError, match=r"GiB|size"):
        async with OffloadRuntime(absurd, torch.zeros(4, 2**17, dtype=torch.int64)):
            raise AssertionError("entered")
    assert threading.active_count() == before


BAD_HINTS: dict[str, tuple[Any, ...]] = {
    "in_s": (-1, math.nan, 2e9, 10**400, "60", b"60", True, False, 1j, [60]),
    "category": (5, None, True, b"search", ["search"], {}, math.nan, "x" * 257),
    "cache_salt": (7, ["a"], "\ud800"),
}


@pytest.mark.parametrize("argument", BAD_HINTS)
async def test_bad_hints(argument: str) -> None:
    """A time that is none, a category that is no text, or one too long to be kept: refused by name, and no hint is
    given."""
    async with scripted(eviction="learned") as (engine, _):
        await engine.serve(A)
        runtime = engine.runtime
        good: dict[str, Any] = {"in_s": 60}
        for bad in BAD_HINTS[argument]:
            with pytest.raises(InvalidArgument, match=argument) as refused:
                runtime.hints.returns(A, **{**good, argument: bad})
            assert refused.value.argument == argument
        assert runtime.statistics().hints is None
        for category in ("", "x" * 256):
            assert runtime.hints.returns(A, in_s=0.5, category=category).num_tokens == 8
        await goes_on_serving(engine)


@pytest.mark.parametrize(
    "call",
    ["lookup", "pins.hold", "transfers.prefetch", "transfers.demote", "hints.pin", "hints.done"],
)
async def test_an_unknown_keyword_names_the_call(call: str) -> None:
    """A keyword that a call does not have is refused as Python does it: by the names of the call and the keyword."""
    more: dict[str, Any] = {
        "pins.hold": {"ttl_s": 60},
        "hints.pin": {"ttl_s": 60},
    }.get(call, {})
    name = f"OffloadRuntime.{call}" if call == "lookup" else call
    async with scripted(eviction="learned") as (engine, _):
        with pytest.raises(TypeError, match=rf"^{re.escape(name)}\(\) .* keyword argument 'cache_sault'$"):
            attrgetter(call)(engine.runtime)(A, cache_sault="tenant-a", **more)
        await goes_on_serving(engine)


# -- when and where -----------------------------------------------------------------------------------------------


def looking(runtime: OffloadRuntime) -> list[Callable[[], Any]]:
    """What may be asked of a runtime that is closed, and does not change any more."""
    reports = runtime.reports
    return [runtime.statistics, reports.requests, reports.holders, runtime.explain, runtime.check_integrity]


def changing(runtime: OffloadRuntime, request: Any) -> list[Callable[[], Any]]:
    """Everything else that does not wait, of a runtime whose eviction learns."""
    return [
        lambda: runtime.request(A),
        lambda: runtime.lookup(A),
        lambda: runtime.pins.hold(A, 60),
        lambda: runtime.hints.pin(A, 60),
        lambda: runtime.hints.apply(A, []),
        lambda: runtime.transfers.prefetch(A),
        lambda: runtime.transfers.demote(A),
        lambda: runtime.cancel("r1"),
        lambda: runtime.step([request]).__enter__(),
        lambda: runtime.commit_step([]),
        request.allocate_nowait,
        request.load_nowait,
        lambda: request.extend_nowait(16),
        lambda: request.commit(9),
        lambda: request.invalidate(0),
        lambda: request.block_ids,
    ]


def errors_of(calls: list[Callable[[], Any]]) -> set[str]:
    found = set()
    for call in calls:
        try:
            call()
        except AoffloadError as error:
            found.add(type(error).__name__)
        else:
            found.add("no error")
    return found


async def test_use_before_opening_and_after_closing() -> None:
    """A runtime outside of its block refuses everything with `RuntimeClosed`, awaited or not; it is entered once."""
    runtime = OffloadRuntime(config(eviction="learned"), transport=ScriptedTransport(8, auto=True))
    with pytest.raises(RuntimeClosed):
        runtime.request(A)
    async with runtime:
        waiting = runtime.request(B)
        async with runtime.request(A, "r1") as request:
            pass
    assert errors_of(changing(runtime, request)) == {"RuntimeClosed"}
    assert errors_of(looking(runtime)) == {"no error"}
    for call in (runtime.flush, runtime.reset, waiting.__aenter__, request.allocate, request.load):
        with pytest.raises(RuntimeClosed):
            await call()
    with pytest.raises(RuntimeClosed):
        await runtime.run(lambda request: request.allocate(), A)
    with pytest.raises(RuntimeClosed, match="once"):
        await runtime.__aenter__()
    assert "closed" in repr(runtime)
    runtime.statistics()
    runtime.check_integrity()


async def test_use_from_another_thread() -> None:
    """Another thread is told so, and nothing of what it tried has happened."""
    async with scripted(eviction="learned") as (engine, _):
        async with engine.runtime.request(A, "r1") as request:
            await request.allocate()
            before = engine.runtime.statistics()
            calls = [*changing(engine.runtime, request), *looking(engine.runtime)]
            assert await anyio.to_thread.run_sync(errors_of, calls) == {"WrongThread"}
            assert engine.runtime.statistics() == before
            with pytest.raises(WrongThread):
                await anyio.to_thread.run_sync(lambda: engine.runtime.request(A))
        await goes_on_serving(engine)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
async def test_use_after_fork() -> None:
    """A forked child is told so: neither the copy thread nor the device came along. The parent goes on."""
    async with with_bytes(eviction="learned") as engine:
        async with engine.runtime.request(A, "r1") as request:
            await request.allocate()
            calls = [*changing(engine.runtime, request), *looking(engine.runtime)]
            receiving, sending = os.pipe()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # newer Pythons warn of forking with threads
                child = os.fork()
            if not child:
                try:
                    found = errors_of(calls)
                    os.write(sending, b"ok" if found == {WrongProcess.__name__} else repr(found).encode())
                finally:
                    os._exit(0)
            os.close(sending)
            answer = os.read(receiving, 1000)
            os.close(receiving)
            os.waitpid(child, 0)  # noqa: ASYNC222 - it has answered, so it is over
            assert answer == b"ok"
            engine.compute(request, A, 0)
            request.commit(9)
        await goes_on_serving(engine)
