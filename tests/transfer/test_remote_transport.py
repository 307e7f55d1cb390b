"""A transport with a remote tier: stored cells are loaded again, and every failure of the store is a miss."""

from __future__ import annotations

import itertools
import threading
import time
from array import array
from collections.abc import Callable, Iterator
from typing import Any

import attrs
import pytest
import torch
from copies import GUARD_S

pytest.importorskip("xxhash", reason="the extra `remote` is not installed")

from remotes import BLOCK, CELL, SECRET, RemoteCopies, Waiting, cell

from aoffload import ConfigError, InvalidArgument, KVCacheGroup, Ledger, OffloadConfig, RemoteTier
from aoffload._common.tiers import Tier
from aoffload._kernel.plans import TransferPlan
from aoffload._kernel.pools import absent_tier
from aoffload._kernel.states import Direction, Outcome
from aoffload._tiers.remote.cells import HEADER, OVERHEAD_BYTES
from aoffload._tiers.remote.memory import Removals
from aoffload._tiers.remote.plans import CellLabel
from aoffload._tiers.remote.questions import positions
from aoffload._transfer.breaker import Closed, Opened, Use
from aoffload._transfer.copy_queue import link_of
from aoffload._transfer.local import LocalTransport
from aoffload.errors import StoreError, TransferRefused, WrongState
from aoffload.testing import SimulatedStore, StoreFault

Open = Callable[..., RemoteCopies]
HAS_CIPHER = True
try:
    import cryptography  # noqa: F401
except ModuleNotFoundError:
    HAS_CIPHER = False
needs_cipher = pytest.mark.skipif(not HAS_CIPHER, reason="cryptography is not installed")
SECRETS = [pytest.param(None, id="sum"), pytest.param(SECRET, id="secret", marks=needs_cipher)]
each_secret = pytest.mark.parametrize("secret", SECRETS)


@pytest.fixture
def open_remote() -> Iterator[Open]:
    opened: list[RemoteCopies] = []

    def open_one(store: SimulatedStore | None = None, *args: Any, **options: Any) -> RemoteCopies:
        opened.append(RemoteCopies(SimulatedStore() if store is None else store, *args, **options))
        return opened[-1]

    yield open_one
    for copies in opened:
        assert copies.close()


def faults(store: SimulatedStore, **kinds: StoreFault) -> None:
    store.fault = lambda call: kinds.get(call.kind)


# -- what is stored comes back ----------------------------------------------------------------------------------------


@each_secret
@pytest.mark.parametrize("verify", [False, True])
def test_what_one_process_stores_another_one_loads(open_remote: Open, secret: bytes | None, verify: bool) -> None:
    """Bytes are those of the device that computed them, whichever host blocks they pass, in whole or from the middle of
    the cell on."""
    store = SimulatedStore()
    first, second = open_remote(store, secret, verify=verify), open_remote(store, secret, verify=verify)
    assert first.transport is not second.transport
    first.transport.launch(
        TransferPlan(99, Tier.DEVICE, Tier.HOST, array("i", [1, 2, 3, 4]), array("i", [7, 5, 6, 2])), None
    )
    assert first.next().outcome is Outcome.LANDED
    stored = first.store(cell(0), [7, 5, 6, 2])
    assert (stored.outcome, stored.num_landed, stored.num_bytes) == (Outcome.LANDED, CELL, CELL * BLOCK)
    assert second.ask([cell(0), cell(1)]) == 1
    assert second.load(cell(0), [9, 8, 3, 4]).outcome is Outcome.LANDED
    assert (second.host[[9, 8, 3, 4]] == first.host[[7, 5, 6, 2]]).all()
    middle = second.load(cell(0), [0, 1], first=1)
    assert (middle.num_landed, middle.num_bytes) == (2, 2 * BLOCK)
    assert (second.host[[0, 1]] == first.host[[5, 6]]).all()
    second.transport.launch(
        TransferPlan(98, Tier.HOST, Tier.DEVICE, array("i", [9, 8, 3, 4]), array("i", [1, 2, 3, 4])), None
    )
    assert second.next().outcome is Outcome.LANDED
    assert second.pool[1:5].equal(first.pool[1:5])
    found = second.remote.statistics()
    assert (found.num_loads, found.blocks_loaded, found.bytes_loaded) == (2, 6, 6 * BLOCK)
    assert (found.num_questions, found.num_unknown, found.num_failures) == (1, 0, 0)


def test_what_the_store_has_is_not_written_again(open_remote: Open) -> None:
    """Neither by whom has stored it, nor by another one, whose store has then landed without a byte."""
    store = SimulatedStore()
    first, second = open_remote(store), open_remote(store)
    assert first.remote.is_wanted(cell(0))
    first.store(cell(0))
    assert not first.remote.is_wanted(cell(0)) and second.remote.is_wanted(cell(0))
    again = second.store(cell(0))
    assert (again.outcome, again.num_landed, again.num_bytes, store.num_puts) == (Outcome.LANDED, CELL, 0, 1)
    assert not second.remote.is_wanted(cell(0))


def test_what_is_gone_is_wanted_again(open_remote: Open) -> None:
    """A load that finds nothing forgets that the cell was stored."""
    store = SimulatedStore()
    copies = open_remote(store)
    copies.store(cell(0))
    store.evict([copies.name(cell(0))])
    assert copies.load(cell(0)).outcome is Outcome.FAILED
    assert copies.remote.is_wanted(cell(0))
    copies.store(cell(0))
    assert copies.load(cell(0)).outcome is Outcome.LANDED
    assert copies.remote.statistics().cells_missing == 1


# -- what does not belong to whom asks --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "other",
    [
        pytest.param({"namespace": "another model"}, id="model"),
        pytest.param({"dtype": torch.float16}, id="dtype"),
        pytest.param({"group": KVCacheGroup("full", block_size=8)}, id="layout"),
        pytest.param({"secret": SECRET}, id="secret", marks=needs_cipher),
    ],
)
def test_another_kind_of_kv_is_never_found(open_remote: Open, other: dict[str, Any]) -> None:
    """Another model, dtype, layout or secret has other names, and its objects are none even under the right name."""
    store = SimulatedStore()
    first, second = open_remote(store), open_remote(store, **other)
    first.store(cell(0))
    second.store(cell(1))
    assert second.ask([cell(0)]) == 0 == first.ask([cell(1)])
    assert second.load(cell(0)).outcome is Outcome.FAILED
    store.objects[first.name(cell(1))] = store.objects[second.name(cell(1))]
    before = first.host.copy()
    assert first.load(cell(1)).outcome is Outcome.FAILED
    assert (first.host == before).all()
    assert first.remote.statistics().cells_corrupt == 1


@needs_cipher
def test_another_secret_reads_nothing(open_remote: Open) -> None:
    """Names differ, and so do keys."""
    store = SimulatedStore()
    first, second = open_remote(store, SECRET), open_remote(store, SECRET + b"!")
    first.store(cell(0))
    assert second.ask([cell(0)]) == 0
    store.objects[second.name(cell(0))] = store.objects[first.name(cell(0))]
    second.forget_memories()
    assert second.load(cell(0)).outcome is Outcome.FAILED


@needs_cipher
def test_what_lies_in_the_store_tells_nothing(open_remote: Open) -> None:
    """With a secret, neither key nor object has a digest or a byte of KV in it, and no two objects are alike."""
    store = SimulatedStore()
    copies = open_remote(store, SECRET)
    copies.host[:4] = 7
    copies.store(cell(0))
    ((key, value),) = store.objects.items()
    assert cell(0).digest not in key + value and bytes([7] * 16) not in value
    store.objects.clear()
    copies.forget_memories()
    copies.store(cell(0))
    assert store.objects[key] != value


@each_secret
def test_an_object_of_another_cell_is_none(open_remote: Open, secret: bytes | None) -> None:
    """Writers to the store may exchange objects, so each names its cell."""
    store = SimulatedStore()
    copies = open_remote(store, secret)
    copies.store(cell(0))
    copies.store(cell(1), range(4, 8))
    names = [copies.name(cell(number)) for number in range(2)]
    store.objects[names[0]] = store.objects[names[1]]
    assert copies.load(cell(0)).outcome is Outcome.FAILED
    assert copies.load(cell(1)).outcome is Outcome.LANDED


@each_secret
def test_no_flipped_bit_is_ever_a_hit(secret: bytes | None) -> None:
    """Each bit of header and seal, 1,000 of the blocks, and any length that is not the right one."""
    import random

    from aoffload._tiers.remote.cells import CellShape, cells_of_tier

    cells = cells_of_tier(CellShape(bytes(32), 4, 1, 512), secret)
    made = memoryview(bytearray(cells.object_bytes))
    blocks = cells.blocks_in(made)
    rng = random.Random(1)
    blocks[:] = [[rng.randrange(256) for _ in range(512)] for _ in range(4)]
    before = blocks.copy()
    cells.seal(cell(0), made, 7)
    good = bytes(made)
    room = memoryview(bytearray(cells.shape.num_bytes))
    found = cells.open(cell(0), good, lambda: room)
    assert found is not None and (found == before).all()
    ends = [*range(HEADER.size * 8), *range((len(good) - 16) * 8, len(good) * 8)]
    for bit in [*ends, *rng.sample(range(HEADER.size * 8, (len(good) - 16) * 8), 1000)]:
        bad = bytearray(good)
        bad[bit // 8] ^= 1 << bit % 8
        assert cells.open(cell(0), bytes(bad), lambda: room) is None, f"bit {bit}"
    for bad_object in (b"", good[:-1], good + b"\0", good[: HEADER.size], bytes(len(good))):
        assert cells.open(cell(0), bad_object, lambda: room) is None
    assert len(good) == 4 * 512 + OVERHEAD_BYTES


@each_secret
@pytest.mark.parametrize("fault", [StoreFault.POISONED, StoreFault.SHORT, StoreFault.FOREIGN])
def test_what_is_not_right_is_a_miss(open_remote: Open, secret: bytes | None, fault: StoreFault) -> None:
    """Host memory stays as it was, the cell is not asked for or loaded for a minute, and the next store replaces it,
    also in a store that keeps what it has and says nothing."""
    store = SimulatedStore(keeps_first=True)
    copies = open_remote(store, secret)
    copies.store(cell(0))
    copies.store(cell(1))
    faults(store, get=fault)
    before = copies.host.copy()
    assert copies.load(cell(0)).outcome is Outcome.FAILED
    assert (copies.host == before).all()
    faults(store)
    assert copies.load(cell(0)).outcome is Outcome.FAILED, "it was loaded again at once"
    assert copies.ask([cell(0), cell(1)]) == 0
    store.poison(copies.name(cell(0)), 200)
    assert copies.remote.is_wanted(cell(0))
    assert copies.store(cell(0)).num_bytes == CELL * BLOCK
    assert copies.load(cell(0)).outcome is Outcome.LANDED
    assert copies.remote.statistics().cells_corrupt == 1


def test_a_corrupt_cell_is_asked_for_again_after_a_minute(open_remote: Open) -> None:
    """Somebody else may have replaced it."""
    store = SimulatedStore()
    copies = open_remote(store)
    copies.store(cell(0))
    store.poison(copies.name(cell(0)), 200)
    copies.load(cell(0))
    store.poison(copies.name(cell(0)), 200)
    copies.clock.seconds = 59.0
    assert copies.ask([cell(0)]) == 0
    copies.clock.seconds = 61.0
    assert copies.ask([cell(0)]) == 1
    assert copies.load(cell(0)).outcome is Outcome.LANDED


def test_wrong_bytes_in_host_memory_never_reach_the_store(open_remote: Open) -> None:
    """With `verify`: a sum over them would make them right for everybody."""
    store = SimulatedStore()
    copies = open_remote(store, verify=True)
    copies.transport.launch(
        TransferPlan(99, Tier.DEVICE, Tier.HOST, array("i", [1, 2, 3, 4]), array("i", [0, 1, 2, 3])), None
    )
    copies.next()
    copies.host[2, 77] ^= 1
    assert copies.store(cell(0)).outcome is Outcome.FAILED
    assert not store.objects


# -- a store that fails -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", [StoreFault.ERROR, StoreFault.LATE_ERROR, StoreFault.GONE])
def test_a_call_that_fails_is_a_miss(open_remote: Open, fault: StoreFault) -> None:
    """Of whichever kind; and the next one that succeeds is a hit."""
    store = SimulatedStore()
    copies = open_remote(store)
    copies.store(cell(0))
    faults(store, get=fault)
    assert copies.load(cell(0)).outcome is Outcome.FAILED
    faults(store, put=fault)
    copies.store(cell(1))
    faults(store)
    copies.forget_memories()
    copies.store(cell(0))
    copies.store(cell(1))
    assert copies.load(cell(1)).outcome is Outcome.LANDED is copies.load(cell(0)).outcome


def test_yes_and_then_gone_is_a_miss(open_remote: Open) -> None:
    """The answer to a question is a guess; the load is the truth."""
    store = SimulatedStore()
    copies = open_remote(store)
    copies.store(cell(0))
    faults(store, exist=StoreFault.GONE)
    assert copies.ask([cell(0)]) == 1
    assert copies.load(cell(0)).outcome is Outcome.FAILED


def test_any_exception_of_a_store_is_a_failure(open_remote: Open) -> None:
    """A store is somebody's code: it ends no thread."""

    class Broken(SimulatedStore):
        def get(self, key: bytes, timeout_s: float) -> bytes | None:
            raise ZeroDivisionError("somebody's mistake")

        def exist(self, keys: Any, timeout_s: float) -> list[bool]:
            return [True] * 99

        def node_of(self, key: bytes) -> str:
            raise KeyError(key)

    copies = open_remote(Broken())
    for _ in range(6):
        assert copies.load(cell(0)).outcome is Outcome.FAILED
        assert copies.ask([cell(0)]) == 0
        copies.clock.seconds += 60
    assert copies.remote.statistics().num_failures >= 6


def test_an_error_of_the_store_says_what_it_is(open_remote: Open) -> None:
    """For whoever reads the log."""
    store = SimulatedStore()
    faults(store, get=StoreFault.ERROR)
    assert "get failed on node-0" in open_remote(store).load(cell(0)).error
    assert issubclass(StoreError, Exception)


def test_a_node_that_fails_is_left_alone(open_remote: Open) -> None:
    """After two failures it is not called for half a second; then one call at a time, and a success ends it. Other
    nodes, and other uses of this one, go on."""
    store = SimulatedStore(num_nodes=2)
    copies = open_remote(store)
    labels = [cell(number) for number in range(40)]
    bad = [label for label in labels if store.node_of(copies.name(label)) == "node-0"]
    good = [label for label in labels if label not in bad]
    for label in (bad[0], good[0]):
        copies.store(label)
    store.fault = lambda call: StoreFault.ERROR if call.node == "node-0" and call.kind == "get" else None
    for _ in range(2):
        assert copies.load(bad[0]).outcome is Outcome.FAILED
    before = store.num_calls
    refused = copies.load(bad[0])
    assert refused.outcome is Outcome.REFUSED and "suspended" in refused.error and store.num_calls == before
    (left,) = copies.remote.statistics().left_alone
    assert (left.use, left.node) == (Use.LOAD, "node-0") and left.error
    assert copies.load(good[0]).outcome is Outcome.LANDED is copies.store(bad[1]).outcome
    assert not copies.remote.refuses(Direction.LOAD) and not copies.remote.refuses(Direction.STORE)
    faults(store)
    copies.clock.seconds = 0.4
    assert copies.load(bad[0]).outcome is Outcome.REFUSED
    copies.clock.seconds = 0.6
    assert copies.load(bad[0]).outcome is Outcome.LANDED
    assert copies.load(bad[1]).outcome is Outcome.LANDED
    opened, closed = copies.remote.take_moves()
    about = [(moved.tier, moved.use, moved.node) for moved in (opened, closed)]
    assert about == [(Tier.REMOTE, Use.LOAD, "node-0")] * 2
    assert opened.move == Opened(0.5, 2, 0, left.error) and closed.move == Closed(0.6, 2)
    assert not copies.remote.take_moves() and not copies.remote.statistics().left_alone


def test_a_node_on_trial_has_one_call_at_a_time(open_remote: Open) -> None:
    """If it still hangs, one thread finds out, and the others are there for other nodes."""
    store = SimulatedStore()
    copies = open_remote(store)
    copies.store(cell(0))
    faults(store, get=StoreFault.ERROR)
    for _ in range(2):
        copies.load(cell(0))
    copies.clock.seconds = 0.6
    waiting = Waiting(store, lambda call: call.kind == "get")
    try:
        trial = copies.launch_load(cell(0))
        waiting.wait_for(1)
        assert "suspended" in copies.load(cell(0)).error
        assert copies.remote.refuses(Direction.LOAD)
    finally:
        waiting.resume()
    assert copies.next().job_id == trial
    assert copies.load(cell(0)).outcome is Outcome.LANDED


def test_a_hop_of_a_remote_store_is_never_in_doubt() -> None:
    """What is late has failed, and others go on; its bounds are those of its tier."""
    tier = RemoteTier(SimulatedStore(), load_timeout_s=2.0, store_timeout_s=3.0)
    config = OffloadConfig(groups=[KVCacheGroup("full")], num_host_blocks=8, namespace="model", remote=tier)
    tiers = Ledger(config, 9, block_bytes=2**24).jobs.tiers
    host, remote = tiers[Tier.HOST], tiers[Tier.REMOTE]
    load, store = link_of(remote, host, config), link_of(host, remote, config)
    assert load.late_outcome is Outcome.FAILED is store.late_outcome
    assert (load.timeout_s, store.timeout_s, load.max_bytes) == (4.0, 6.0, 64 * 2**20)
    load.begin(1, 10, 0.0)
    load.give_up([1])
    assert not load.overdue and not load.in_flight and load.may_settle(1)
    disk = link_of(absent_tier(Tier.DISK), host, config)
    assert disk.late_outcome is Outcome.UNPROVEN and not disk.may_settle(1)


def test_a_store_of_which_every_node_fails_is_refused(open_remote: Open) -> None:
    """In the direction that fails; then nobody need ask."""
    store = SimulatedStore()
    copies = open_remote(store)
    faults(store, get=StoreFault.ERROR)
    for _ in range(2):
        assert not copies.remote.refuses(Direction.LOAD)
        copies.load(cell(0))
    assert copies.remote.refuses(Direction.LOAD) and not copies.remote.refuses(Direction.STORE)
    copies.clock.seconds = 0.6
    assert not copies.remote.refuses(Direction.LOAD)


# -- a store that hangs -----------------------------------------------------------------------------------------------


def test_a_use_that_hangs_leaves_threads_to_the_others(open_remote: Open) -> None:
    """Loads that hang keep neither stores nor questions nor copies of the device waiting, and the other way round."""
    store = SimulatedStore()
    copies = open_remote(store)
    copies.store(cell(0))
    for kind in ("get", "put"):
        waiting = Waiting(store, lambda call, kind=kind: call.kind == kind)
        try:
            launch = copies.launch_load if kind == "get" else copies.launch_store
            hung = {launch(cell(0 if kind == "get" else 10 + number)) for number in range(6)}
            waiting.wait_for(2)
            assert copies.ask([cell(0)]) == 1
            if kind == "get":
                assert copies.store(cell(1)).outcome is Outcome.LANDED
            else:
                assert copies.load(cell(0)).outcome is Outcome.LANDED
        finally:
            waiting.resume()
        assert {copies.next().job_id for _ in range(6)} == hung
        faults(store)


def test_a_node_that_hangs_leaves_a_thread_to_the_others(open_remote: Open) -> None:
    """However many of its loads hang, and before anybody knows that they do."""
    store = SimulatedStore(num_nodes=2)
    copies = open_remote(store)
    labels = [cell(number) for number in range(40)]
    bad = [label for label in labels if store.node_of(copies.name(label)) == "node-0"][:8]
    good = next(label for label in labels if store.node_of(copies.name(label)) == "node-1")
    copies.store(good)
    assert copies.load(good).outcome is Outcome.LANDED
    waiting = Waiting(store, lambda call: call.kind == "get" and call.node == "node-0")
    try:
        hung = {copies.launch_load(label) for label in bad}
        waiting.wait_for(3)
        assert copies.load(good).outcome is Outcome.LANDED
    finally:
        waiting.resume()
    assert {copies.next().job_id for _ in bad} == hung


def test_a_load_that_was_given_up_never_touches_host_memory(open_remote: Open) -> None:
    """Others use its blocks as soon as `give_up` has returned; its completion comes all the same."""
    store = SimulatedStore()
    copies = open_remote(store)
    copies.store(cell(0))
    waiting = Waiting(store, lambda call: call.kind == "get")
    try:
        job_id = copies.launch_load(cell(0))
        waiting.wait_for(1)
        copies.transport.give_up(job_id)
        copies.host[8:12] = 3
    finally:
        waiting.resume()
    late = copies.next()
    assert (late.job_id, late.outcome, late.num_landed) == (job_id, Outcome.FAILED, 0)
    assert (copies.host[8:12] == 3).all()


def test_a_store_that_was_given_up_reads_no_more(open_remote: Open) -> None:
    """What is written to its blocks afterwards never reaches the store; what was copied before is the cell."""
    store = SimulatedStore()
    copies = open_remote(store)
    kept = copies.host[:4].copy()
    for kind in ("exist", "put"):
        waiting = Waiting(store, lambda call, kind=kind: call.kind == kind)
        try:
            job_id = copies.launch_store(cell(0))
            waiting.wait_for(1)
            copies.transport.give_up(job_id)
            copies.host[:4] = 3
        finally:
            waiting.resume()
        copies.next()
        faults(store)
        assert len(store.objects) == (kind == "put")
        copies.host[:4] = kept
        copies.clock.seconds += 60
    copies.load(cell(0))
    assert (copies.host[8:12] == kept).all()


def test_what_waits_behind_a_job_that_is_given_up_fails(open_remote: Open) -> None:
    """Its threads may hang for ever: a node whose calls are given up counts as failing at once."""
    store = SimulatedStore()
    copies = open_remote(store)
    copies.store(cell(0))
    waiting = Waiting(store, lambda call: call.kind == "get")
    try:
        hung = [copies.launch_load(cell(0)) for _ in range(3)]
        waiting.wait_for(3)
        for job_id in hung:
            copies.transport.give_up(job_id)
        assert copies.remote.refuses(Direction.LOAD)
        assert "suspended" in copies.load(cell(0)).error
    finally:
        waiting.resume()
    assert {copies.next().job_id for _ in hung} == set(hung)


def test_closing_does_not_wait_for_a_store_that_hangs() -> None:
    """It says so, and the process ends all the same."""
    store = SimulatedStore()
    copies = RemoteCopies(store)
    waiting = Waiting(store, lambda call: call.kind == "get")
    copies.launch_load(cell(0))
    waiting.wait_for(1)
    assert not copies.transport.close(0.05)
    assert not store.is_closed
    waiting.resume()
    copies.next()
    assert copies.close() and store.is_closed


def test_closing_ends_a_thread_that_found_nothing_it_may_take(open_remote: Open) -> None:
    """It is told when the last job that waited for room at its node has been taken, and ends with the others."""
    store = SimulatedStore(num_nodes=2)
    copies = open_remote(store)
    labels = [cell(number) for number in range(40)]
    bad = [label for label in labels if store.node_of(copies.name(label)) == "node-0"][:5]
    copies.load(next(label for label in labels if store.node_of(copies.name(label)) == "node-1"))
    waiting = Waiting(store, lambda call: call.kind == "get")
    try:
        launched = {copies.launch_load(label) for label in bad}
        waiting.wait_for(3)
        assert not copies.transport.close(0.01)
    finally:
        waiting.resume()
    assert {copies.next().job_id for _ in bad} == launched
    assert copies.remote.join(10.0) and store.is_closed, "without being told again"


# -- questions --------------------------------------------------------------------------------------------------------


def test_a_question_takes_two_rounds_of_64_at_most(open_remote: Open) -> None:
    """And finds the end of what is there to the cell, for prompts of up to 4,000 cells."""
    store = SimulatedStore()
    copies = open_remote(store)
    labels = [cell(number) for number in range(3000)]
    asked: list[int] = []
    original = store.exist

    def exist(keys: Any, timeout_s: float) -> list[bool]:
        asked.append(len(keys))
        return original(keys, timeout_s)

    store.exist = exist  # type: ignore[method-assign]
    names = [copies.name(label) for label in labels]
    for num_there in (0, 1, 63, 64, 65, 1000, 2999, 3000):
        store.objects = dict.fromkeys(names[:num_there], b"")
        asked.clear()
        copies.forget_memories()
        assert copies.ask(labels) == num_there
        assert len(asked) <= 2 and max(asked) <= 64


def test_positions_are_even_and_end_with_the_last() -> None:
    """Each stretch between two of them can be asked for in the second round."""
    assert list(positions(3, 7)) == [3, 4, 5, 6] and list(positions(5, 5)) == []
    for count in (65, 100, 4096):
        found = list(positions(10, 10 + count))
        assert len(set(found)) == 64 and found[-1] == 9 + count
        assert max(b - a for a, b in zip([9, *found], found, strict=False)) <= -(-count // 64)


def test_a_node_that_does_not_answer_has_nothing(open_remote: Open) -> None:
    """The hit ends before its first cell; after two failures it is not asked for a while."""
    store = SimulatedStore(num_nodes=2)
    copies = open_remote(store)
    labels = [cell(number) for number in range(20)]
    for label in labels:
        store.objects[copies.name(label)] = b""
    first_bad = next(n for n, label in enumerate(labels) if store.node_of(copies.name(label)) == "node-1")
    store.fault = lambda call: StoreFault.ERROR if call.node == "node-1" else None
    for _ in range(3):
        assert copies.ask(labels) == first_bad
    found = copies.remote.statistics()
    assert (found.num_unknown, found.num_failures) == (3, 2)


def test_an_absence_is_remembered_for_a_second(open_remote: Open) -> None:
    """Then somebody may have stored it."""
    store = SimulatedStore()
    copies = open_remote(store)
    assert copies.ask([cell(0)]) == 0
    store.objects[copies.name(cell(0))] = b""
    before = store.num_calls
    assert copies.ask([cell(0)]) == 0 and store.num_calls == before
    copies.clock.seconds = 1.1
    assert copies.ask([cell(0)]) == 1


def test_one_question_at_a_time_about_a_prompt(open_remote: Open) -> None:
    """Those who ask meanwhile hear the same answer; and whoever asks when too many do hears 0 at once."""
    store = SimulatedStore()
    copies = open_remote(store)
    for number in range(70):
        store.objects[copies.name(cell(number))] = b""
    waiting = Waiting(store, lambda call: call.kind == "exist")
    heard: list[int] = []
    try:
        for _ in range(3):
            copies.remote.ask([cell(0)], heard.append)
        waiting.wait_for(1)
        for number in range(1, 64):
            copies.remote.ask([cell(number)], heard.append)
        assert heard == []
        copies.remote.ask([cell(64)], heard.append)
        assert heard == [0]
    finally:
        waiting.resume()
    assert copies.close()
    assert sorted(heard) == [0, *[1] * 66]
    assert copies.remote.statistics().num_questions == 64


def test_a_question_whose_time_is_over_is_a_miss(open_remote: Open) -> None:
    """It waited too long for a thread: the store is not asked for it any more. The late calls are another node's, so
    that no breaker stops this one."""
    store = SimulatedStore(num_nodes=2)
    copies = open_remote(store)
    cells: dict[str, list[CellLabel]] = {"node-0": [], "node-1": []}
    for number in range(16):
        store.objects[copies.name(cell(number))] = b""
        cells[store.node_of(copies.name(cell(number)))].append(cell(number))
    waiting = Waiting(store, lambda call: call.kind == "exist")
    heard: list[int] = []
    try:
        for label in cells["node-0"][:2]:
            copies.remote.ask([label], heard.append)
        waiting.wait_for(2)
        copies.remote.ask(cells["node-1"][:1], heard.append)
        copies.clock.seconds = 1.0
    finally:
        waiting.resume()
    assert copies.close()
    assert sorted(heard) == [0, 1, 1] and copies.remote.statistics().num_unknown == 1


def test_questions_after_closing_are_misses(open_remote: Open) -> None:
    """And nothing is launched any more."""
    copies = open_remote()
    assert copies.close()
    assert copies.ask([cell(0)]) == 0 == copies.ask([])
    with pytest.raises(TransferRefused, match="closed"):
        copies.launch_load(cell(0))


# -- what is taken back -----------------------------------------------------------------------------------------------


def test_what_is_forgotten_is_removed_and_can_be_stored_again(open_remote: Open) -> None:
    """From the call on nothing of it is loaded, and the store that follows writes what is right now."""
    store = SimulatedStore()
    copies = open_remote(store)
    copies.store(cell(0))
    waiting = Waiting(store, lambda call: call.kind == "remove")
    try:
        copies.remote.forget([cell(0)])
        waiting.wait_for(1)
        assert copies.load(cell(0)).outcome is Outcome.FAILED
        assert copies.ask([cell(0)]) == 0 and not copies.remote.is_wanted(cell(0))
        assert copies.store(cell(0)).outcome is Outcome.FAILED
    finally:
        waiting.resume()
    copies.store(cell(1))  # the thread of the removal, or the other one, is done with it by then or soon
    assert copies.close()
    assert list(store.objects) == [copies.name(cell(1))]
    assert copies.remote.statistics().cells_removed == 1


def test_a_store_under_way_does_not_bring_back_what_is_forgotten(open_remote: Open) -> None:
    """It is removed when the store is over."""
    store = SimulatedStore()
    copies = open_remote(store)
    waiting = Waiting(store, lambda call: call.kind == "put")
    try:
        copies.launch_store(cell(0))
        waiting.wait_for(1)
        copies.remote.forget([cell(0)])
    finally:
        waiting.resume()
    copies.next()
    assert copies.close()
    assert not store.objects


def test_a_removal_waits_for_the_store_under_way() -> None:
    """A removal before the end of the store would be undone by it."""
    removals = Removals()
    removals.begin_store(cell(0))
    removals.add([cell(0)])
    assert removals.take(lambda label: True, 0.0) is None
    removals.end_store(cell(0))
    assert removals.take(lambda label: True, 0.0) == cell(0)


@pytest.mark.parametrize("is_own", [True, False])
def test_a_load_under_way_does_not_bring_what_is_forgotten(open_remote: Open, is_own: bool) -> None:
    """Its bytes are wrong, although they are what was stored, and had been read before. Only an object of its own has a
    number that was revoked."""
    is_read, go_on = threading.Event(), threading.Event()

    class Late(SimulatedStore):
        def get(self, key: bytes, timeout_s: float) -> bytes | None:
            found = super().get(key, timeout_s)
            is_read.set()
            assert go_on.wait(GUARD_S)
            return found

    store = Late()
    copies = open_remote(store)
    (copies if is_own else open_remote(store)).store(cell(0))
    try:
        copies.launch_load(cell(0))
        assert is_read.wait(GUARD_S)
        copies.remote.forget([cell(0)])
    finally:
        go_on.set()
    assert copies.next().outcome is Outcome.FAILED


def removed(copies: RemoteCopies, num_cells: int) -> None:
    """Wait until the store has released so many. A thread takes removals before stores, but other threads may end any
    number of stores while it is about to remove."""
    numbers, until_s = itertools.cycle(range(100, 200)), time.monotonic() + GUARD_S
    while copies.remote.statistics().cells_removed < num_cells:
        assert time.monotonic() < until_s, f"not {num_cells} cells are removed"
        copies.store(cell(next(numbers)))


@each_secret
def test_a_put_that_arrives_after_the_removal_is_never_loaded(open_remote: Open, secret: bytes | None) -> None:
    """A put times out, what it wrote is invalidated and removed, and only then the put reaches the store. This process
    never loads it, removes it again, and loads what it stores after that."""
    store = SimulatedStore()
    copies = open_remote(store, secret)
    faults(store, put=StoreFault.LATER)
    assert copies.store(cell(0)).outcome is Outcome.FAILED
    faults(store)
    copies.remote.forget([cell(0)])
    removed(copies, 1)
    store.arrive()
    before = copies.host.copy()
    copies.clock.seconds = 2.0
    assert copies.ask([cell(0)]) == 1, "others would find it"
    late = copies.load(cell(0))
    assert (late.outcome, late.error) == (Outcome.FAILED, "the cell in the store was invalidated")
    assert (copies.host == before).all()
    removed(copies, 2)
    assert copies.name(cell(0)) not in store.objects
    copies.store(cell(0), range(4, 8))
    assert copies.load(cell(0)).outcome is Outcome.LANDED
    assert (copies.host[8:12] == before[4:8]).all()


def test_a_put_that_overwrites_a_later_one_is_never_loaded(open_remote: Open) -> None:
    """The put that has failed arrives after right KV was stored in its place."""
    store = SimulatedStore()
    copies = open_remote(store)
    faults(store, put=StoreFault.LATER)
    copies.store(cell(0))
    faults(store)
    copies.remote.forget([cell(0)])
    removed(copies, 1)
    assert copies.store(cell(0), range(4, 8)).outcome is Outcome.LANDED
    store.arrive()
    assert copies.load(cell(0)).outcome is Outcome.FAILED


def test_a_removal_that_the_store_only_tells_as_done_brings_nothing_back(open_remote: Open) -> None:
    """Such as one of a cluster whose node is lost before its replica has heard of it."""
    store = SimulatedStore()
    copies = open_remote(store)
    copies.store(cell(0))
    faults(store, remove=StoreFault.LOST)
    copies.remote.forget([cell(0)])
    removed(copies, 1)
    copies.clock.seconds = 2.0
    assert copies.name(cell(0)) in store.objects
    assert copies.load(cell(0)).outcome is Outcome.FAILED


def test_a_removal_after_a_failed_put_is_repeated(open_remote: Open) -> None:
    """Others do not know what was invalidated. So what arrives late is removed, also if nobody here asks for it; and
    what was stored without a failure is removed once."""
    store = SimulatedStore()
    copies = open_remote(store)
    faults(store, put=StoreFault.LATER)
    copies.store(cell(0))
    faults(store)
    copies.store(cell(1))
    copies.remote.forget([cell(0), cell(1)])
    removed(copies, 2)
    store.arrive()
    for seconds, num_removed in (
        (9.0, 2),
        (10.0, 3),
        (19.0, 3),
        (20.0, 4),
        (39.0, 4),
        (40.0, 5),
        (2000.0, 6),
        (9e9, 6),
    ):
        copies.clock.seconds = seconds
        copies.remote.refuses(Direction.STORE)
        removed(copies, num_removed)
        copies.store(cell(2))
        assert copies.remote.statistics().cells_removed == num_removed
        assert (copies.name(cell(0)) in store.objects) == (seconds < 10.0)


def test_what_is_invalidated_while_it_is_written_is_revoked() -> None:
    """Its number is drawn before its KV is read, whenever the put ends."""
    removals = Removals()
    number = removals.begin_store(cell(0))
    assert number is not None and not removals.has_revoked(cell(0), number)
    removals.add([cell(0)])
    assert removals.has_revoked(cell(0), number) and not removals.has_revoked(cell(1), number)
    assert removals.begin_store(cell(0)) is None
    removals.end_store(cell(0))
    label = removals.take(lambda label: True, 0.0)
    assert label == cell(0)
    removals.done(cell(0), True, 0.0)
    again = removals.begin_store(cell(0))
    assert again is not None and not removals.has_revoked(cell(0), again) and removals.has_revoked(cell(0), number)


def test_what_another_process_stores_is_loaded_whatever_was_invalidated_here(open_remote: Open) -> None:
    """It has computed it itself. Numbers count for the objects of one process."""
    store = SimulatedStore()
    first, second = open_remote(store), open_remote(store)
    for number in range(3):
        first.store(cell(0))
        first.remote.forget([cell(0)])
        removed(first, number + 1)
    assert second.store(cell(0), range(4, 8)).num_bytes
    first.clock.seconds = 2.0
    assert first.load(cell(0)).outcome is Outcome.LANDED
    assert (first.host[8:12] == second.host[4:8]).all()


def test_more_invalidated_cells_than_can_be_remembered_cost_hits_alone(
    open_remote: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then nothing that this process has stored so far is loaded. The store is used on."""
    monkeypatch.setattr("aoffload._tiers.remote.memory.MAX_CELLS", 2)
    store = SimulatedStore()
    copies = open_remote(store)
    for number in range(5):
        copies.store(cell(number))
    kept = dict(store.objects)
    for number in range(3):
        copies.remote.forget([cell(number)])
        removed(copies, number + 1)
    store.objects.update(kept)
    copies.clock.seconds = 2.0
    for number in range(5):
        assert copies.load(cell(number)).outcome is Outcome.FAILED
        removed(copies, number + 4)  # as each such load removes the cell again, and only two may wait
    assert not copies.remote.refuses(Direction.LOAD) and not copies.remote.refuses(Direction.STORE)
    copies.store(cell(9))
    assert copies.load(cell(9)).outcome is Outcome.LANDED


def test_what_was_stored_before_objects_were_numbered_is_loaded(open_remote: Open) -> None:
    """Without a secret, its nonce is empty: it is the object of another process."""
    store = SimulatedStore()
    copies = open_remote(store)
    copies.store(cell(0))
    lanes = copies.remote._lanes
    assert lanes is not None
    old, made = attrs.evolve(lanes.cells, writer=bytes(7)), memoryview(bytearray(store.objects[copies.name(cell(0))]))
    old.seal(cell(0), made, 0)
    assert bytes(made[: HEADER.size]).endswith(bytes(12))
    store.objects[copies.name(cell(0))] = bytes(made)
    assert copies.load(cell(0)).outcome is Outcome.LANDED


def test_what_cannot_be_removed_is_not_used(open_remote: Open) -> None:
    """Until the store releases it; it is tried again when the store is used again."""
    store = SimulatedStore()
    copies = open_remote(store)
    copies.store(cell(0))
    faults(store, remove=StoreFault.ERROR)
    copies.remote.forget([cell(0)])
    numbers = itertools.count(1)
    while not copies.remote.refuses(Direction.STORE):  # until two attempts in a row have failed
        copies.store(cell(next(numbers)))
    ended = copies.load(cell(0))
    assert (ended.outcome, ended.error) == (Outcome.FAILED, "the cell in the store is corrupt or invalidated")
    assert copies.name(cell(0)) in store.objects
    faults(store)
    copies.clock.seconds = 60.0
    assert not copies.remote.refuses(Direction.STORE)
    assert copies.close()
    assert copies.name(cell(0)) not in store.objects


def test_more_removals_than_can_be_remembered_end_the_use_of_the_store(
    open_remote: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rather than that one is forgotten, and what is wrong is loaded."""
    monkeypatch.setattr("aoffload._tiers.remote.memory.MAX_CELLS", 2)
    store = SimulatedStore()
    copies = open_remote(store)
    copies.store(cell(7))
    faults(store, remove=StoreFault.ERROR)
    copies.remote.forget([cell(number) for number in range(3)])
    assert copies.remote.refuses(Direction.LOAD) and copies.remote.refuses(Direction.STORE)
    assert copies.load(cell(7)).outcome is Outcome.FAILED
    assert copies.ask([cell(7)]) == 0


# -- bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ids", "label"),
    [
        pytest.param(range(CELL), None, id="not a label"),
        pytest.param(range(CELL), CellLabel(1, bytes(32), 0, 4), id="another component"),
        pytest.param(range(CELL), CellLabel(0, bytes(32), 2, 6), id="not aligned"),
        pytest.param(range(CELL), CellLabel(0, bytes(32), 0, 8), id="another size"),
        pytest.param([0, 2], cell(0), id="a gap"),
        pytest.param([3, 4], cell(0), id="behind the cell"),
    ],
)
def test_what_is_no_cell_is_refused(open_remote: Open, ids: Any, label: CellLabel | None) -> None:
    """Before anything is copied."""
    copies = open_remote()
    with pytest.raises(TransferRefused):
        copies.launch(Tier.REMOTE, Tier.HOST, ids, range(len(ids)), label)


def test_a_part_of_a_cell_is_not_stored(open_remote: Open) -> None:
    """Whole cells only."""
    with pytest.raises(TransferRefused, match="not a whole cell"):
        open_remote().launch_store(cell(0), range(2))


def test_a_transport_without_a_remote_tier_refuses_its_hops() -> None:
    """As it does before it is open; and a tier that nobody has identified does not open."""
    transport = LocalTransport(torch.zeros(4, 64))
    assert transport.remote is None
    plan = TransferPlan(1, Tier.REMOTE, Tier.HOST, array("i", [0]), array("i", [0]), payload=cell(0))
    from aoffload.transport import Env

    transport.open(4, verify=False, deliver=lambda done: None, env=Env())
    with pytest.raises(TransferRefused, match="has no link from"):
        transport.launch(plan, None)
    assert transport.close(GUARD_S)
    unknown = LocalTransport(torch.zeros(4, 64), remote=RemoteTier(SimulatedStore()))
    assert unknown.remote is not None and unknown.remote.refuses(Direction.LOAD)
    with pytest.raises(WrongState, match="has no layout yet"):
        unknown.open(4, verify=False, deliver=lambda done: None, env=Env())


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("store", {"store": None}),
        ("store", {"store": SimulatedStore}),
        ("secret", {"secret": b"short"}),
        ("secret", {"secret": "a text of sixteen letters"}),
        ("ask_timeout_s", {"ask_timeout_s": 0}),
        ("load_timeout_s", {"load_timeout_s": float("nan")}),
        ("store_timeout_s", {"store_timeout_s": "1"}),
        ("max_write_rate", {"max_write_rate": "fast"}),
        ("max_write_rate", {"max_write_rate": 0}),
    ],
)
def test_a_tier_that_cannot_work_is_refused_by_name(name: str, options: dict[str, Any]) -> None:
    """Before anything is opened."""
    with pytest.raises(ConfigError) as caught:
        RemoteTier(**{"store": SimulatedStore(), **options})
    assert caught.value.argument == name


def test_a_secret_is_never_shown() -> None:
    """Neither in a `repr` nor in an error about it."""
    assert b"sixteen" not in repr(RemoteTier(SimulatedStore(), SECRET)).encode()
    with pytest.raises(ConfigError) as caught:
        RemoteTier(SimulatedStore(), b"nearly right")
    assert "nearly" not in str(caught.value)
    with pytest.raises(InvalidArgument):
        LocalTransport(torch.zeros(4, 64), remote="redis://localhost")  # type: ignore[arg-type]
