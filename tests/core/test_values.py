"""Returned values, and the integers that a pool accepts: the same in every build of the core."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest

from aoffload import ConfigError, Extension, KVCacheGroup, Ledger, OffloadConfig, Preemption
from aoffload.ledger import Fork, LearnedEviction, Prefix, Root

VALUES = (Extension([[3]], [[0]]), Preemption(4, 0, (1, 2)), LearnedEviction(device=True))


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_a_value_can_be_copied_and_pickled(value: Any) -> None:
    """What a call answers, or a configuration holds, is itself after a copy and in another process."""
    assert copy.copy(value) == copy.deepcopy(value) == pickle.loads(pickle.dumps(value)) == value  # noqa: S301


def test_a_fork_can_be_copied() -> None:
    """With the same request: there is only one of it."""
    ledger = Ledger(OffloadConfig(groups=[KVCacheGroup("full", block_size=4)], num_host_blocks=4), 9)
    request = ledger.admit(Prefix.of(Root("test"), range(4)))
    ledger.allocate_nowait(request)
    ledger.commit(request, 4)
    fork = ledger.forks.fork(request)
    assert isinstance(fork, Fork) and copy.copy(fork) == fork and copy.copy(fork).request is fork.request


@pytest.mark.parametrize("value", [np.int64(8), True, 8.0, None, -1])
@pytest.mark.parametrize("name", ["num_blocks", "num_free"])
def test_a_pool_counts_in_integers(name: str, value: object) -> None:
    """A pool that counts in anything else is refused when the ledger is made: its counts end up in every sum."""
    config = OffloadConfig(groups=[KVCacheGroup("full", block_size=4)], num_host_blocks=4)
    with pytest.raises(ConfigError, match=f"device_pool.{name}: "):
        Ledger(config, 9, device_pool=_Counting(name, value))  # type: ignore[arg-type]


class _Counting:
    def __init__(self, name: str, value: object) -> None:
        self.num_blocks: object = 8
        self.num_free: object = 8
        self.take = self.give = self.free_ids = print
        setattr(self, name, value)
