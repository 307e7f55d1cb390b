"""Each argument of each public callable is given everything that it is not: a typed error that names it, and nothing
has changed.

A table says how a call is made with one argument open, under which names an error may speak of it, and which of the
wrong values are right ones there. What a callable that is handed in raises is its own affair, as is an object that lies
about its class: `isinstance` asks it.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack, contextmanager
from typing import Any

import attrs
import numpy as np
import pytest
import torch
from serving import ASYNCIO, TRIO, assert_at_rest, config, prompt, scripted

from aoffload import (
    AoffloadError,
    ChunkedLocal,
    Computed,
    DiskTier,
    HostCache,
    InvalidArgument,
    KeySpan,
    KVCacheGroup,
    KVRegion,
    LazyStore,
    Ledger,
    OffloadConfig,
    OffloadRuntime,
    OutOfBlocks,
    RemoteTier,
    SelectiveStore,
    SlidingWindow,
    WrongState,
)
from aoffload.cuda import AdaptivePolling, BreakEven, CudaOptions
from aoffload.ledger import Completion, Outcome, Prefix, Root
from aoffload.ranks import LocalRank, RankTransport
from aoffload.testing import SimulatedStore
from aoffload.transport import Env, LocalTransport
from proof.programs.fingerprint import fingerprint


def _raise(*_: Any, **__: Any) -> Any:
    raise KeyError("any code may be behind it")


class Raises:
    """Whatever is done with it, but for showing it."""

    __array__ = __len__ = __iter__ = __eq__ = __hash__ = __bool__ = __index__ = __float__ = __lt__ = __le__ = _raise  # type: ignore[assignment]
    __gt__ = __ge__ = __getitem__ = __contains__ = __enter__ = __fspath__ = _raise


class RaisesShown:
    __repr__ = __str__ = __format__ = _raise


class RaisesAsked:
    def __getattr__(self, name: str) -> Any:
        raise KeyError(name)


class OddInt(int):
    __le__ = __lt__ = __ge__ = __gt__ = __eq__ = __repr__ = _raise  # type: ignore[assignment]
    __hash__ = int.__hash__


def _read() -> Any:
    raise KeyError("read")
    yield


def _resized() -> torch.Tensor:
    found = torch.zeros(4, 4, dtype=torch.int64)
    found.untyped_storage().resize_(0)
    return found


def _nested() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)])


def quietly(call: Callable[[], Any]) -> Any:
    """What the package warns of and takes."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return call()


WRONG: dict[str, Callable[[], Any]] = {
    "None": lambda: None, "-1": lambda: -1, "0": lambda: 0, "1": lambda: 1, "True": lambda: True, "1.5": lambda: 1.5,
    "nan": lambda: math.nan, "inf": lambda: math.inf, "huge": lambda: 10**400, "2**70": lambda: 2**70,
    "complex": lambda: 1j, "OddInt": lambda: OddInt(3),
    "''": str, "'x'": lambda: "x", "surrogate": lambda: "\ud800", "b''": bytes, "b'x'": lambda: b"x",
    "memoryview": lambda: memoryview(b"abcd"),
    "[]": list, "()": tuple, "{}": dict, "[None]": lambda: [None], "[[]]": lambda: [[]], "{None}": lambda: {None: 1},
    "range": lambda: range(1, 3), "generator": lambda: (one for one in (1, 2)), "raising generator": _read,
    "object": object, "lambda": lambda: lambda: 3, "type": lambda: int, "module": lambda: math,
    "Raises": Raises, "RaisesShown": RaisesShown, "RaisesAsked": RaisesAsked,
    "np.int64": lambda: np.int64(3), "np.float64": lambda: np.float64(2.0), "np.bool": lambda: np.bool_(True),
    "float array": lambda: np.zeros(2), "object array": lambda: np.array([object(), None], object),
    "text array": lambda: np.array(["a"]), "time array": lambda: np.array([1], "M8[s]"),
    "record array": lambda: np.zeros(2, [("a", int)]), "array of no dimension": lambda: np.array(3),
    "float tensor": lambda: torch.zeros(2), "nested tensor": _nested, "resized tensor": _resized,
    "sparse tensor": lambda: torch.zeros(3).to_sparse(), "meta tensor": lambda: torch.zeros(3, device="meta"),
    "grad tensor": lambda: torch.zeros(3, requires_grad=True),
    "bf16 tensor": lambda: torch.zeros(3, dtype=torch.bfloat16),
    "tensor of no dimension": lambda: torch.tensor(3),
}  # fmt: skip
NUMBERS = "1 1.5 inf 2**70 np.float64"
SECONDS = "1 1.5 np.float64"
CALLABLES = "lambda type"
KEYS = "None '' 'x' b'' b'x'"
TENSORS = "float_tensor grad_tensor bf16_tensor"
EMPTY = "[] () {}"


@attrs.frozen
class Row:
    call: Callable[[Any, Any], Any]
    names: str
    """How an error may call the argument."""
    legal: str = ""
    may_raise: tuple[type[AoffloadError], ...] = ()
    """Errors that speak of what is there, not of a wrong value."""
    skip: str = ""


@contextmanager
def refusal(row: Row, name: str) -> Iterator[None]:
    """Within, the value of that name is refused, and the error says which argument it was given for."""
    with pytest.raises((InvalidArgument, *row.may_raise)) as raised:
        yield
    if isinstance(raised.value, InvalidArgument):
        named = any(raised.value.argument.startswith(one) for one in row.names.split())
        assert named, f"{name}: {raised.value}"


def check_all(row: Row, world: Any, digest: Callable[[], Any]) -> None:
    """Everything that is wrong there is refused, by name, and the digest is what it was. Last comes what is right."""
    legal = [name.replace("_", " ") for name in row.legal.split()]
    skipped = [name.replace("_", " ") for name in row.skip.split()]
    assert WRONG.keys() >= {*legal, *skipped}
    for name, make in WRONG.items():
        if name in legal or name in skipped:
            continue
        before, value = digest(), make()
        with refusal(row, name):
            row.call(world, value)
        assert digest() == before, f"{name} has changed something"
    for name in legal:
        row.call(world, WRONG[name]())


# -- the ledger ---------------------------------------------------------------------------------------------------


def prefix(seed: int = 1, num_tokens: int = 20) -> Prefix:
    return Prefix.of(Root("m"), prompt(seed, num_tokens))


def ledger(**options: Any) -> Ledger:
    return Ledger(config(**options), 200)


class Cache:
    """A ledger with a request in each state that a call may want."""

    def __init__(self, **options: Any) -> None:
        self.ledger = one = ledger(**options)
        self.waiting: Any = None
        self.num_others = 0
        self.running = self.at("running", 20)
        self.gone = one.admit(prefix(9), request_id="gone")
        one.release(self.gone)
        other = ledger()
        self.foreign = other.admit(prefix(2))

    def at(self, name: str, num_tokens: int) -> Any:
        record = self.ledger.admit(prefix(len(name), num_tokens), request_id=name)
        self.ledger.allocate_nowait(record, num_tokens + 8)
        self.ledger.plan_load(record)
        self.ledger.commit(record, num_tokens)
        return record

    @property
    def fresh(self) -> Any:
        """Of a legal call each."""
        self.num_others += 1
        return self.ledger.admit(prefix(20 + self.num_others, 8))

    def digest(self) -> Any:
        records = [(h.request_id, h.state, h.num_computed_tokens) for h in self.ledger.live_requests.values()]
        tables = [[list(t.ids) for t in h.tables] for h in self.ledger.live_requests.values()]
        self.ledger.check_integrity()
        return self.ledger.statistics(), records, tables


def allocated(cache: Cache) -> Any:
    record = cache.fresh
    cache.ledger.allocate_nowait(record)
    return record


def preempted(cache: Cache) -> Any:
    record = allocated(cache)
    cache.ledger.plan_load(record)
    cache.ledger.preemption.preempt(record)
    return record


def with_holding(make: Callable[[Cache], Any], call: Callable[[Ledger, Any, Any], Any]) -> Callable[[Cache, Any], Any]:
    """A call of a request that is there before; it is gone again whatever the call does, if it was refused."""

    def made(cache: Cache, value: Any) -> Any:
        record = make(cache)
        try:
            return call(cache.ledger, record, value)
        finally:
            if not record.is_over:
                cache.ledger.release(record, "tried")

    return made


def entered(step: Any) -> None:
    with step:
        pass


def completed(**values: Any) -> Completion:
    return attrs.evolve(Completion(0, Outcome.LANDED), **values)


LOWER = {"disk": DiskTier("unused", 2**20), "remote": RemoteTier(SimulatedStore(), cell_bytes=2)}
REQUEST, PREFIX = "request", "prefix"
ANY_COUNT = "None 0 1 huge 2**70"
LEDGER: dict[str, Row] = {
    "lookup": Row(lambda c, v: c.ledger.lookup(v), PREFIX),
    "admit": Row(lambda c, v: c.ledger.admit(v), PREFIX),
    "admit request_id": Row(lambda c, v: c.ledger.admit(prefix(), request_id=v), "request_id", "None '' 'x' surrogate"),
    "admit max_hit_tokens": Row(lambda c, v: c.ledger.admit(prefix(), max_hit_tokens=v), "max_hit_tokens", ANY_COUNT),
    "admit hit_alignment": Row(lambda c, v: c.ledger.admit(prefix(), hit_alignment=v), "hit_alignment", "1 huge 2**70"),
    "admit reads_cache": Row(lambda c, v: c.ledger.admit(prefix(), reads_cache=v), "reads_cache", "True"),
    "admit store": Row(lambda c, v: c.ledger.admit(prefix(), store=v), "store"),
    "admit max_store_tokens": Row(
        lambda c, v: c.ledger.admit(prefix(), max_store_tokens=v), "max_store_tokens", ANY_COUNT
    ),
    "allocate_nowait": Row(lambda c, v: c.ledger.allocate_nowait(v), REQUEST),
    "allocate_nowait num_tokens": Row(
        with_holding(lambda c: c.fresh, lambda one, h, v: one.allocate_nowait(h, v)),
        "num_tokens", "None 1", (OutOfBlocks,),
    ),
    "queue_allocation num_tokens": Row(
        with_holding(lambda c: c.fresh, lambda one, h, v: one.queue_allocation(h, v)),
        "num_tokens", "None 1", (OutOfBlocks,),
    ),
    "queue_allocation wake": Row(
        with_holding(lambda c: c.fresh, lambda one, h, v: one.queue_allocation(h, None, v)), "wake", CALLABLES
    ),
    "extend_nowait": Row(lambda c, v: c.ledger.extend_nowait(v, 30), REQUEST),
    "extend_nowait num_tokens": Row(
        lambda c, v: c.ledger.extend_nowait(c.running, v), "num_tokens", "1", (OutOfBlocks,)
    ),
    "queue_extension num_tokens": Row(
        with_holding(allocated, lambda one, h, v: one.queue_extension(h, v)), "num_tokens", "1", (OutOfBlocks,)
    ),
    "queue_extension wake": Row(
        with_holding(allocated, lambda one, h, v: one.queue_extension(h, 12, v)), "wake", CALLABLES
    ),
    "accept": Row(lambda c, v: c.ledger.accept(v), "waiter"),
    "withdraw": Row(lambda c, v: c.ledger.withdraw(v), "waiter"),
    "num_shared_tokens": Row(lambda c, v: c.ledger.forks.num_shared_tokens(v), REQUEST),
    "fork": Row(lambda c, v: c.ledger.forks.fork(v), REQUEST),
    "fork request_id": Row(lambda c, v: c.ledger.forks.fork(c.running, v), "request_id", "None '' 'x' surrogate"),
    "fork num_tokens": Row(
        lambda c, v: c.ledger.forks.fork(c.running, num_tokens=v), "num_tokens", "0 1", (OutOfBlocks,)
    ),
    "plan_load max_tokens": Row(
        with_holding(allocated, lambda one, h, v: one.plan_load(h, v)), "max_tokens", ANY_COUNT
    ),
    "plan_load wake": Row(with_holding(allocated, lambda one, h, v: one.plan_load(h, None, v)), "wake", CALLABLES),
    "plan_load max_job_bytes": Row(
        with_holding(allocated, lambda one, h, v: one.plan_load(h, max_job_bytes=v)),
        "max_job_bytes", "None 1 huge 2**70",
    ),
    "abandon_load": Row(lambda c, v: c.ledger.abandon_load(v), REQUEST),
    "launch": Row(lambda c, v: c.ledger.launch(v), "job_id", "0 huge 2**70", (WrongState,), skip="1"),
    "discard": Row(lambda c, v: c.ledger.discard(v), "job_id", "0 huge 2**70", skip="1"),
    "settle": Row(lambda c, v: c.ledger.settle(v), "completion"),
    "settle job_id": Row(
        lambda c, v: c.ledger.settle(completed(job_id=v)), "completion.job_id", "0 huge 2**70", (WrongState,)
    ),
    "settle outcome": Row(lambda c, v: c.ledger.settle(completed(outcome=v)), "completion.outcome"),
    "settle num_landed": Row(
        lambda c, v: c.ledger.settle(completed(num_landed=v)), "completion.num_landed", "0 1 huge 2**70"
    ),
    "settle corrupt": Row(lambda c, v: c.ledger.settle(completed(corrupt=v)), "completion.corrupt", "()"),
    "settle error": Row(lambda c, v: c.ledger.settle(completed(error=v)), "completion.error", "'' 'x' surrogate"),
    "settle num_bytes": Row(
        lambda c, v: c.ledger.settle(completed(num_bytes=v)), "completion.num_bytes", "0 1 huge 2**70"
    ),
    "settle duration_s": Row(
        lambda c, v: c.ledger.settle(completed(duration_s=v)), "completion.duration_s", f"0 {NUMBERS}"
    ),
    "commit": Row(lambda c, v: c.ledger.commit(v, 0), REQUEST),
    "commit num_computed_tokens": Row(lambda c, v: c.ledger.commit(c.running, v), "num_computed_tokens"),
    "commit new_token_ids": Row(
        lambda c, v: c.ledger.commit(c.running, c.running.num_computed_tokens, v),
        "new_token_ids", "[] () range memoryview",
    ),
    "check_commit new_token_ids": Row(
        lambda c, v: c.ledger.check_commit(c.running, 20, v), "new_token_ids", "[] () range memoryview"
    ),
    "invalidate": Row(lambda c, v: c.ledger.invalidation.invalidate(v, 0), REQUEST),
    "invalidate from_token": Row(
        lambda c, v: c.ledger.invalidation.invalidate(c.running, v), "from_token", "0", skip="1"
    ),
    "step": Row(lambda c, v: entered(c.ledger.step(v)), "requests request", EMPTY),
    "step of one": Row(lambda c, v: entered(c.ledger.step([v])), REQUEST),
    "step arriving": Row(lambda c, v: entered(c.ledger.overlap.step([], v)), "arriving request", EMPTY),
    "can_start_early": Row(lambda c, v: c.ledger.overlap.can_start(v), REQUEST),
    "lost_to_reset": Row(lambda c, v: c.ledger.lost_to_reset(v), REQUEST),
    "num_expected_tokens": Row(lambda c, v: c.ledger.overlap.num_expected_tokens(v), REQUEST),
    "expected_block_ids": Row(lambda c, v: c.ledger.overlap.block_ids(v), REQUEST),
    "begin_again": Row(lambda c, v: c.ledger.overlap.begin_again(v), REQUEST),
    "first_invalid_token": Row(lambda c, v: c.ledger.overlap.first_invalid_token(v), REQUEST),
    "block_ids": Row(lambda c, v: c.ledger.block_ids(v), REQUEST),
    "release": Row(lambda c, v: c.ledger.release(v), REQUEST),
    "release reason": Row(
        with_holding(lambda c: c.fresh, lambda one, h, v: one.release(h, v)), "reason", "'' 'x' surrogate"
    ),
    "preempt_nowait": Row(lambda c, v: c.ledger.preemption.preempt(v), REQUEST),
    "resume": Row(lambda c, v: c.ledger.preemption.resume(v), REQUEST),
    "resume num_tokens": Row(
        with_holding(preempted, lambda one, h, v: one.preemption.resume(h, v)), "num_tokens", "None 1", (OutOfBlocks,)
    ),
    "pin": Row(lambda c, v: c.ledger.pins.hold(v), PREFIX),
    "pin expires_at": Row(lambda c, v: c.ledger.pins.hold(prefix(8), expires_at=v), "expires_at", f"-1 0 {NUMBERS}"),
    "unpin": Row(lambda c, v: c.ledger.pins.release(v), "pin"),
    "lapse": Row(lambda c, v: c.ledger.lapse(v), "now", f"-1 0 {NUMBERS}"),
    "prefetch": Row(lambda c, v: c.ledger.transfers.prefetch(v), PREFIX),
    "prefetch wake": Row(lambda c, v: c.ledger.transfers.prefetch(prefix(8), v), "wake", CALLABLES),
    "fetch": Row(lambda c, v: c.ledger.fetches.fetch(v), PREFIX),
    "num_fetch_blocks": Row(lambda c, v: c.ledger.fetches.num_blocks(v), PREFIX),
    "num_remote_fetch_blocks": Row(lambda c, v: c.ledger.fetches.num_remote_blocks(v, 8), PREFIX),
    "num_remote_fetch_blocks num_remote_tokens": Row(
        lambda c, v: c.ledger.fetches.num_remote_blocks(prefix(8), v), "num_remote_tokens", skip="0 1 2**70 huge"
    ),
    "match_fetched": Row(lambda c, v: c.ledger.fetches.match_again(v), REQUEST),
    "plan_disk_stores": Row(lambda c, v: c.ledger.disk.plan_stores(v), "max_blocks", "0 1 2**70 huge"),
    "plan_disk_stores is_idle": Row(lambda c, v: c.ledger.disk.plan_stores(1, is_idle=v), "is_idle", "True"),
    "plan_disk_stores only_requested_twice": Row(
        lambda c, v: c.ledger.disk.plan_stores(1, only_requested_twice=v), "only_requested_twice", "True"
    ),
    "plan_disk_flush": Row(lambda c, v: c.ledger.disk.plan_flush(v), "max_blocks", "0 1 2**70 huge"),
    "fetch num_remote_tokens": Row(
        lambda c, v: c.ledger.fetches.fetch(prefix(8), num_remote_tokens=v), "num_remote_tokens",
        skip="0 2**70 huge",
    ),
    "plan_remote_stores": Row(lambda c, v: c.ledger.remote.plan_stores(v, bool), "max_blocks", "0 1 2**70 huge"),
    "plan_remote_stores is_wanted": Row(lambda c, v: c.ledger.remote.plan_stores(1, v), "is_wanted", CALLABLES),
    "demote": Row(lambda c, v: c.ledger.transfers.demote(v), PREFIX),
    "demote wake": Row(lambda c, v: c.ledger.transfers.demote(prefix(8), v), "wake", CALLABLES),
    "cancel": Row(lambda c, v: c.ledger.transfers.cancel(v), "transfer"),
    "reset": Row(lambda c, v: c.ledger.reset(v), "tier", "None"),
    "watch": Row(lambda c, v: c.ledger.watch(v), "watcher"),
}  # fmt: skip


@pytest.mark.parametrize("name", LEDGER)
def test_the_ledger_refuses(name: str) -> None:
    """No value that is wrong for an argument gets into the ledger, and none changes it."""
    cache = Cache(**LOWER)
    check_all(LEDGER[name], cache, cache.digest)


def test_requests_of_others() -> None:
    """Requests of another ledger are nobody's here, and those that are over are told from them."""
    cache = Cache(**LOWER)
    for name, row in LEDGER.items():
        if row.names in (REQUEST, "requests request", "arriving request") and " " not in name:
            before = cache.digest()
            with pytest.raises(InvalidArgument, match="request"):
                row.call(cache, cache.foreign if name != "step" else [cache.foreign])
            assert cache.digest() == before


class NoPool:
    """Blocks of an engine that keeps no account of them."""

    def hold(self, block_ids: object) -> None: ...
    def give(self, block_ids: object) -> None: ...


class EngineCache:
    """A ledger over blocks that an engine keeps."""

    def __init__(self) -> None:
        self.ledger = HostCache(config(), 1000, engine_blocks=NoPool(), clock=lambda: 0.0)
        first = self.ledger.admit(prefix(1, 17))
        (plan,) = self.ledger.offer(first, 17, [range(1, 5)])
        self.ledger.launch(plan.job_id)
        self.ledger.settle(Completion(plan.job_id, Outcome.LANDED))
        self.running = self.ledger.admit(prefix(2, 17))
        self.ledger.offer(self.running, 8, [range(500, 502)])
        self.matched = self.ledger.admit(prefix(1, 17))
        self.pins = self.ledger.pins

    def digest(self) -> Any:
        return fingerprint(self.ledger, self.matched, self.running)


"""What raises something of its own when it is read as a table."""
ENGINE: dict[str, Row] = {
    "lookup": Row(lambda c, v: c.ledger.lookup(v), PREFIX),
    "admit": Row(lambda c, v: c.ledger.admit(v), PREFIX),
    "admit num_device_tokens": Row(
        lambda c, v: c.ledger.admit(prefix(3), num_device_tokens=v), "num_device_tokens", "0 1"
    ),
    "admit wake": Row(lambda c, v: c.ledger.admit(prefix(4), wake=v), "wake", CALLABLES),
    "match_again": Row(lambda c, v: c.ledger.match_again(v, num_device_tokens=0), REQUEST),
    "match_again num_device_tokens": Row(
        lambda c, v: c.ledger.match_again(c.matched, num_device_tokens=v), "num_device_tokens", "0 1"
    ),
    "match_again wake": Row(
        lambda c, v: c.ledger.match_again(c.matched, num_device_tokens=0, wake=v), "wake", CALLABLES
    ),
    "plan_load": Row(lambda c, v: c.ledger.plan_load(v), REQUEST),
    "plan_load into": Row(lambda c, v: c.ledger.plan_load(c.matched, into=v), "into"),
    "plan_load into one table": Row(
        lambda c, v: c.ledger.plan_load(c.matched, into=[v]), "into", "memoryview"
    ),
    "plan_load into one block": Row(lambda c, v: c.ledger.plan_load(c.matched, into=[[v] * 4]), "into"),
    "plan_load max_tokens": Row(
        lambda c, v: c.ledger.plan_load(
            c.matched, v, into=[range(700, 704)] if c.matched.state.name == "PINNED" else None
        ),
        "max_tokens",
        ANY_COUNT,
    ),
    "offer": Row(lambda c, v: c.ledger.offer(v, 16, [range(500, 504)]), REQUEST),
    "offer num_computed_tokens": Row(
        lambda c, v: c.ledger.offer(c.running, v, [range(500, 504)]), "num_computed_tokens"
    ),
    "offer block_ids": Row(lambda c, v: c.ledger.offer(c.running, 16, v), "block_ids"),
    "offer one table": Row(lambda c, v: c.ledger.offer(c.running, 16, [v]), "block_ids", "memoryview"),
    "offer one block": Row(
        lambda c, v: c.ledger.offer(c.running, 16, [[500, 501, v, 503]]),
        "block_ids", skip="Raises 0 1 True np.int64 OddInt array_of_no_dimension tensor_of_no_dimension",
    ),
    "offer new_token_ids": Row(
        lambda c, v: c.ledger.offer(c.running, 16, [range(500, 504)], v), "new_token_ids",
        "[] () range memoryview",
    ),
    "offer is_last": Row(lambda c, v: c.ledger.offer(c.running, 16, [range(500, 504)], is_last=v), "is_last", "True"),
    "invalidate": Row(lambda c, v: c.ledger.invalidate(v, 0), REQUEST),
    "invalidate from_token": Row(lambda c, v: c.ledger.invalidate(c.running, v), "from_token", "1 0"),
    "release": Row(lambda c, v: c.ledger.release(v), REQUEST),
    "pin": Row(lambda c, v: c.pins.hold(v), PREFIX),
}  # fmt: skip


@pytest.mark.parametrize("name", ENGINE)
def test_the_ledger_of_an_engine_refuses(name: str) -> None:
    """Nor into one over blocks that an engine keeps."""
    cache = EngineCache()
    check_all(ENGINE[name], cache, cache.digest)


# -- what is made -------------------------------------------------------------------------------------------------


def region(**values: Any) -> KVRegion:
    return KVRegion(**({"tensor": torch.zeros(4, 4), "block_stride_bytes": 16, "block_bytes": 16} | values))


def runtime(**values: Any) -> OffloadRuntime:
    return OffloadRuntime(**({"config": config(), "kv_caches": torch.zeros(17, 4)} | values))


def made_with(**values: Any) -> Ledger:
    """A configuration, and a ledger made from it: some of it is looked at there."""
    return Ledger(OffloadConfig(**({"groups": [KVCacheGroup("g")], "num_host_blocks": 4} | values)), 17)


def ranks(**values: Any) -> RankTransport:
    return RankTransport(**({"ranks": [LocalRank(LocalTransport(torch.zeros(4, 4)))]} | values))


MADE: dict[str, Row] = {
    "Root namespace": Row(lambda _, v: Root(v), "namespace", "'' 'x' b'' b'x'"),
    "Root cache_salt": Row(lambda _, v: Root("m", v), "cache_salt", KEYS),
    "Root adapter_key": Row(lambda _, v: Root("m", None, v), "adapter_key", KEYS),
    "Prefix": Row(lambda _, v: Prefix(v, b"1234"), "root"),
    "Prefix tokens": Row(lambda _, v: Prefix(Root("m"), v), "tokens"),
    "Prefix spans": Row(lambda _, v: Prefix(Root("m"), b"1234", v), "spans", "()"),
    "Prefix.of": Row(lambda _, v: Prefix.of(v, [1]), "root"),
    "Prefix.of token_ids": Row(lambda _, v: Prefix.of(Root("m"), v), "token_ids", "range memoryview"),
    "Prefix.of key_spans": Row(lambda _, v: Prefix.of(Root("m"), [1, 2, 3], v), "key_spans", EMPTY),
    "Prefix.of one span": Row(lambda _, v: Prefix.of(Root("m"), [1, 2, 3], [v]), "key_spans"),
    "KeySpan start": Row(lambda _, v: Prefix.of(Root("m"), [1, 2, 3], [KeySpan(v, 2, b"")]), "key_spans", "0 1"),
    "KeySpan stop": Row(lambda _, v: Prefix.of(Root("m"), [1, 2, 3], [KeySpan(0, v, b"")]), "key_spans", "1"),
    "KeySpan digest": Row(lambda _, v: Prefix.of(Root("m"), [1, 2, 3], [KeySpan(0, 1, v)]), "key_spans", "b'' b'x'"),
    "KVCacheGroup name": Row(lambda _, v: KVCacheGroup(v), "groups.name", "'x' surrogate"),
    "KVCacheGroup attention": Row(lambda _, v: KVCacheGroup("g", v), "groups.attention"),
    "KVCacheGroup block_size": Row(lambda _, v: KVCacheGroup("g", block_size=v), "groups.block_size", "1"),
    "SlidingWindow": Row(lambda _, v: SlidingWindow(v), "window", "1"),
    "ChunkedLocal": Row(lambda _, v: ChunkedLocal(v), "chunk", "1"),
    "LazyStore": Row(lambda _, v: LazyStore(v), "store_policy", "None 1"),
    "SelectiveStore": Row(lambda _, v: SelectiveStore(v), "store_policy", "1"),
    "SelectiveStore counted": Row(lambda _, v: SelectiveStore(2, v), "store_policy", "1"),
    "Ledger": Row(lambda _, v: Ledger(v, 17), "config"),
    "Ledger num_device_blocks": Row(lambda _, v: Ledger(config(), v), "num_device_blocks"),
    "Ledger block_bytes": Row(lambda _, v: Ledger(config(), 17, block_bytes=v), "block_bytes", "1 huge 2**70"),
    "Ledger device_pool": Row(lambda _, v: Ledger(config(), 17, device_pool=v), "device_pool", "None"),
    "HostCache": Row(lambda _, v: HostCache(v, 17, engine_blocks=NoPool(), clock=lambda: 0.0), "config"),
    "HostCache num_device_blocks": Row(
        lambda _, v: HostCache(config(), v, engine_blocks=NoPool(), clock=lambda: 0.0), "num_device_blocks"
    ),
    "HostCache engine_blocks": Row(
        lambda _, v: HostCache(config(), 17, engine_blocks=v, clock=lambda: 0.0), "engine_blocks"
    ),
    "Ledger clock": Row(lambda _, v: Ledger(config(), 17, clock=v), "clock", f"None {CALLABLES}"),
    "HostCache clock": Row(lambda _, v: HostCache(config(), 17, engine_blocks=NoPool(), clock=v), "clock", CALLABLES),
    "HostCache extensions": Row(
        lambda _, v: HostCache(config(), 17, engine_blocks=NoPool(), clock=lambda: 0.0, extensions=v),
        "extensions",
        EMPTY,
    ),
    "Ledger extensions": Row(lambda _, v: Ledger(config(), 17, extensions=v), "extensions", EMPTY),
    "Ledger observer": Row(lambda _, v: Ledger(config(), 17, observer=v), "observer", "None"),
    "groups": Row(lambda _, v: made_with(groups=v), "groups"),
    "one group": Row(lambda _, v: made_with(groups=[v]), "groups"),
    "num_host_blocks": Row(lambda _, v: made_with(num_host_blocks=v), "num_host_blocks", "0 1"),
    "host_bytes": Row(lambda _, v: made_with(num_host_blocks=None, host_bytes=v), "host_bytes num_host_blocks", "1"),
    "namespace": Row(lambda _, v: made_with(namespace=v), "namespace", "'' 'x'"),
    "store_policy": Row(lambda _, v: made_with(store_policy=v), "store_policy"),
    "window_interval_tokens": Row(lambda _, v: made_with(window_interval_tokens=v), "window_interval_tokens", "0 1"),
    "eviction": Row(lambda _, v: made_with(eviction=v), "eviction"),
    "verify": Row(lambda _, v: made_with(verify=v), "verify", "True"),
    "max_jobs_in_flight": Row(lambda _, v: made_with(max_jobs_in_flight=v), "max_jobs_in_flight", "None 1"),
    "max_bytes_in_flight": Row(lambda _, v: made_with(max_bytes_in_flight=v), "max_bytes_in_flight", "None 1"),
    "max_job_bytes": Row(lambda _, v: made_with(max_job_bytes=v), "max_job_bytes", "1"),
    "load_timeout_s": Row(lambda _, v: made_with(load_timeout_s=v), "load_timeout_s", SECONDS),
    "prefill_tokens_per_s": Row(
        lambda _, v: made_with(prefill_tokens_per_s=v), "prefill_tokens_per_s", "None 1 1.5 2**70 np.float64"
    ),
    "transfer_timeout_s": Row(lambda _, v: made_with(transfer_timeout_s=v), "transfer_timeout_s", SECONDS),
    "close_timeout_s": Row(lambda _, v: made_with(close_timeout_s=v), "close_timeout_s", SECONDS),
    "slow_wait_s": Row(lambda _, v: made_with(slow_wait_s=v), "slow_wait_s", f"None {SECONDS}"),
    "slow_step_s": Row(lambda _, v: made_with(slow_step_s=v), "slow_step_s", f"None {SECONDS}"),
    "pending_timeout_s": Row(lambda _, v: made_with(pending_timeout_s=v), "pending_timeout_s", SECONDS),
    "max_pinned_share": Row(lambda _, v: made_with(max_pinned_share=v), "max_pinned_share", "0 1"),
    "max_prefetch_share": Row(lambda _, v: made_with(max_prefetch_share=v), "max_prefetch_share", "0 1"),
    "max_fetch_share": Row(lambda _, v: made_with(max_fetch_share=v), "max_fetch_share", "0 1"),
    "disk": Row(lambda _, v: made_with(disk=v), "disk", "None"),
    "KVRegion": Row(
        lambda _, v: region(tensor=v, block_stride_bytes=4, block_bytes=4),
        "tensor", f"{TENSORS} tensor_of_no_dimension",
    ),
    "KVRegion stride": Row(lambda _, v: region(block_stride_bytes=v), "block_stride_bytes"),
    "KVRegion block_bytes": Row(lambda _, v: region(block_bytes=v), "block_bytes", "1"),
    "KVRegion.of": Row(lambda _, v: KVRegion.of(v), "tensor", TENSORS),
    "LocalTransport": Row(lambda _, v: LocalTransport(v), "kv_caches", TENSORS),
    "LocalTransport of one": Row(lambda _, v: LocalTransport([v]), "kv_caches", TENSORS),
    "LocalTransport backend": Row(
        lambda _, v: LocalTransport(torch.zeros(4, 4), v), "backend", "None", skip=CALLABLES
    ),
    "LocalRank": Row(lambda _, v: LocalRank(v), "transport"),
    "RankTransport": Row(lambda _, v: ranks(ranks=v), "ranks"),
    "RankTransport of one": Row(lambda _, v: ranks(ranks=[v]), "ranks"),
    "RankTransport open_timeout_s": Row(lambda _, v: ranks(open_timeout_s=v), "open_timeout_s", f"0 {NUMBERS}"),
    "spawn num_ranks": Row(lambda _, v: RankTransport.spawn("nobody:nothing", v), "num_ranks", skip="1"),
    "spawn timeout_s": Row(
        lambda _, v: RankTransport.spawn("nobody:nothing", 1, timeout_s=v), "timeout_s", skip=f"0 {NUMBERS}"
    ),
    "OffloadRuntime": Row(lambda _, v: runtime(config=v), "config"),
    "OffloadRuntime kv_caches": Row(lambda _, v: runtime(kv_caches=v), "kv_caches", TENSORS),
    "OffloadRuntime transport": Row(lambda _, v: runtime(kv_caches=None, transport=v), "transport kv_caches"),
    "OffloadRuntime device_pool": Row(lambda _, v: runtime(device_pool=v), "device_pool", "None"),
    "OffloadRuntime extensions": Row(lambda _, v: runtime(extensions=v), "extensions", EMPTY),
    "OffloadRuntime env": Row(lambda _, v: runtime(env=v), "env", "None"),
    "OffloadRuntime logger": Row(lambda _, v: runtime(logger=v), "logger", "None"),
    "OffloadRuntime observers": Row(lambda _, v: runtime(observers=v), "observers", EMPTY),
    "Env": Row(lambda _, v: Env(v), "random"),
    "BreakEven load_bytes": Row(lambda _, v: BreakEven(v, 1), "load_bytes", "0 1 huge 2**70"),
    "BreakEven store_bytes": Row(lambda _, v: BreakEven(1, v), "store_bytes", "0 1 huge 2**70"),
    "AdaptivePolling shortest_s": Row(lambda _, v: AdaptivePolling(shortest_s=v), "shortest_s", SECONDS),
    "AdaptivePolling longest_s": Row(lambda _, v: AdaptivePolling(longest_s=v), "longest_s", SECONDS),
    "AdaptivePolling share": Row(lambda _, v: AdaptivePolling(share=v), "share", SECONDS),
    "AdaptivePolling clock": Row(lambda _, v: AdaptivePolling(clock=v), "clock", CALLABLES),
    "AdaptivePolling nap": Row(lambda _, v: AdaptivePolling(nap=v), "nap", CALLABLES),
    "CudaOptions driver": Row(lambda _, v: CudaOptions(driver=v), "driver", CALLABLES),
    "CudaOptions kernel": Row(lambda _, v: CudaOptions(kernel=v), "kernel", CALLABLES),
    "CudaOptions break_even": Row(lambda _, v: CudaOptions(break_even=v), "break_even", "None"),
    "CudaOptions waiting": Row(lambda _, v: CudaOptions(waiting=v), "waiting"),
    "CudaOptions progress": Row(lambda _, v: CudaOptions(progress=v), "progress", CALLABLES),
    "CudaOptions batched": Row(lambda _, v: CudaOptions(batched=v), "batched", "True"),
    "CudaOptions max_batches": Row(lambda _, v: CudaOptions(max_batches=v), "max_batches", "1 huge 2**70"),
    "CudaOptions max_piece_bytes": Row(lambda _, v: CudaOptions(max_piece_bytes=v), "max_piece_bytes", "1 huge 2**70"),
}  # fmt: skip


@pytest.mark.parametrize("name", MADE)
def test_what_is_made_refuses(name: str) -> None:
    """Nothing is made of wrong values: not configurations, regions, transports, or runtimes."""
    check_all(MADE[name], None, lambda: None)


# -- the runtime --------------------------------------------------------------------------------------------------


@attrs.define(eq=False)
class Served:
    runtime: OffloadRuntime
    request: Any

    def digest(self) -> Any:
        self.runtime.check_integrity()
        return self.runtime.ledger.statistics(), self.request.state, self.request.num_computed_tokens


async def used(request: Any) -> None:
    async with request as entered:
        entered.allocate_nowait()


IDS = [1, 2, 3, 4, 5]
RUNTIME: dict[str, Row] = {
    "lookup": Row(lambda s, v: s.runtime.lookup(v), "token_ids", "range memoryview"),
    "lookup cache_salt": Row(lambda s, v: s.runtime.lookup(IDS, cache_salt=v), "cache_salt", KEYS),
    "lookup adapter_key": Row(lambda s, v: s.runtime.lookup(IDS, adapter_key=v), "adapter_key", KEYS),
    "lookup key_spans": Row(lambda s, v: s.runtime.lookup(IDS, key_spans=v), "key_spans", EMPTY),
    "request": Row(lambda s, v: s.runtime.request(v), "token_ids", "range memoryview"),
    "request deadline_s": Row(
        lambda s, v: quietly(lambda: s.runtime.request(IDS, deadline_s=v)), "deadline_s", f"None -1 0 {NUMBERS}"
    ),
    "request key_spans": Row(lambda s, v: s.runtime.request(IDS, key_spans=v), "key_spans", EMPTY),
    "cancel": Row(lambda s, v: s.runtime.cancel(v), "request_id", "'' 'x' surrogate"),
    "cancel reason": Row(lambda s, v: s.runtime.cancel("nobody", v), "reason", "'' 'x' surrogate"),
    "pin": Row(lambda s, v: s.runtime.pins.hold(v, 1.0), "token_ids", "range memoryview"),
    "pin ttl_s": Row(lambda s, v: s.runtime.pins.hold(IDS, v), "ttl_s", SECONDS),
    "prefetch": Row(lambda s, v: s.runtime.transfers.prefetch(v), "token_ids", "range memoryview"),
    "demote": Row(lambda s, v: s.runtime.transfers.demote(v), "token_ids", "range memoryview"),
    "step": Row(lambda s, v: entered(s.runtime.step(v)), "requests", EMPTY),
    "step of one": Row(lambda s, v: entered(s.runtime.step([v])), "requests"),
    "commit_step": Row(lambda s, v: s.runtime.commit_step(v), "computed", EMPTY),
    "commit_step of one": Row(lambda s, v: s.runtime.commit_step([v]), "computed"),
    "commit_step request": Row(lambda s, v: s.runtime.commit_step([Computed(v, 5)]), "computed"),
    "commit_step num_computed_tokens": Row(
        lambda s, v: s.runtime.commit_step([Computed(s.request, v)]), "num_computed_tokens"
    ),
    "commit_step new_token_ids": Row(
        lambda s, v: s.runtime.commit_step([Computed(s.request, s.request.num_computed_tokens, v)]), "new_token_ids",
        "[] () range memoryview",
    ),
    "commit_step after": Row(lambda s, v: s.runtime.commit_step([], v), "after", "None"),
    "commit": Row(lambda s, v: s.request.commit(v), "num_computed_tokens"),
    "commit new_token_ids": Row(
        lambda s, v: s.request.commit(s.request.num_computed_tokens, v), "new_token_ids", "[] () range memoryview"
    ),
    "commit after": Row(lambda s, v: s.request.commit(s.request.num_computed_tokens, (), v), "after", "None"),
    "invalidate": Row(lambda s, v: s.request.invalidate(v), "from_token", skip="0 1"),
    "extend_nowait": Row(lambda s, v: s.request.extend_nowait(v), "num_tokens", "1", (OutOfBlocks,)),
    "cancel of a request": Row(lambda s, v: s.request.cancel(v), "reason", skip="'' 'x' surrogate"),
}  # fmt: skip
AWAITED: dict[str, Row] = {
    "entering request_id": Row(
        lambda s, v: used(s.runtime.request(IDS, v)), "request_id", "None '' 'x' surrogate"
    ),
    "entering max_hit_tokens": Row(
        lambda s, v: used(s.runtime.request(IDS, max_hit_tokens=v)), "max_hit_tokens", ANY_COUNT
    ),
    "entering hit_alignment": Row(
        lambda s, v: used(s.runtime.request(IDS, hit_alignment=v)), "hit_alignment", "1 huge 2**70"
    ),
    "entering reads_cache": Row(lambda s, v: used(s.runtime.request(IDS, reads_cache=v)), "reads_cache", "True"),
    "entering store": Row(lambda s, v: used(s.runtime.request(IDS, store=v)), "store"),
    "entering max_store_tokens": Row(
        lambda s, v: used(s.runtime.request(IDS, max_store_tokens=v)), "max_store_tokens", ANY_COUNT
    ),
    "run": Row(lambda s, v: s.runtime.run(v, IDS), "function", skip=CALLABLES),
    "run token_ids": Row(lambda s, v: s.runtime.run(print, v), "token_ids", skip="range memoryview"),
    "run_step": Row(lambda s, v: s.runtime.run_step(v, int), "requests", EMPTY),
    "run_step function": Row(lambda s, v: s.runtime.run_step([s.request], v), "function", CALLABLES),
    "reset": Row(lambda s, v: s.runtime.reset(v), "tier", "None"),
    "reset timeout_s": Row(lambda s, v: s.runtime.reset(None, v), "timeout_s", f"None 0 {NUMBERS}"),
    "extend": Row(lambda s, v: s.request.extend(v), "num_tokens", "1", (OutOfBlocks,)),
}  # fmt: skip


async def serve_one(stack: AsyncExitStack) -> Served:
    engine, _ = await stack.enter_async_context(scripted(64))
    request = await stack.enter_async_context(engine.runtime.request(prompt(1, 9), "kept"))
    await engine.prefill(request, prompt(1, 9))
    await engine.runtime.flush()
    return Served(engine.runtime, request)


@pytest.fixture(params=[ASYNCIO, TRIO])
def anyio_backend(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.mark.anyio
@pytest.mark.filterwarnings("ignore:a (pin|step) was never entered:ResourceWarning")
async def test_the_runtime_refuses() -> None:
    """No value that is wrong for an argument gets into the runtime or a request, and none changes it."""
    for name, row in RUNTIME.items():
        async with AsyncExitStack() as stack:
            served = await serve_one(stack)
            try:
                check_all(row, served, served.digest)
                await served.runtime.flush()
            except Exception as error:
                error.add_note(name)
                raise


@pytest.mark.anyio
async def test_awaited_calls_refuse() -> None:
    """The same of calls that are awaited."""
    for name, row in AWAITED.items():
        async with AsyncExitStack() as stack:
            served = await serve_one(stack)
            try:
                await check_all_awaited(row, served)
            except Exception as error:
                error.add_note(name)
                raise


async def check_all_awaited(row: Row, served: Served) -> None:
    legal = {name.replace("_", " ") for name in f"{row.legal} {row.skip}".split()}
    for name, make in WRONG.items():
        if name in legal:
            continue
        before, value = served.digest(), make()
        with refusal(row, name):
            await row.call(served, value)
        assert served.digest() == before, f"{name} has changed something"
    for one in row.legal.split():
        await row.call(served, WRONG[one.replace("_", " ")]())
        await served.runtime.flush()


@pytest.mark.anyio
async def test_requests_of_another_runtime() -> None:
    """A step holds blocks of its own runtime's requests, and so does a commit."""
    async with scripted() as (mine, _), scripted() as (other, _):
        async with other.runtime.request(prompt(1, 9)) as request:
            await other.prefill(request, prompt(1, 9))
            with pytest.raises(
                InvalidArgument, match=r"^requests: contains an object that is not a request of this runtime"
            ):
                mine.runtime.step([request]).__enter__()
            with pytest.raises(
                InvalidArgument, match=r"^computed: contains an object that is not a request of this runtime"
            ):
                mine.runtime.commit_step([Computed(request, 9)])
        await assert_at_rest(mine.runtime)
