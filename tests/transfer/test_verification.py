"""A checksum for each block: the errors that it detects, and those that it cannot."""

from __future__ import annotations

from collections.abc import Callable

from copies import Copies
from faulty import ExchangingBackend, UnreadableBackend, numbered_pool

from aoffload._kernel.states import Outcome


def test_verification_notices_exchanged_blocks(open_copies: Callable[..., Copies]) -> None:
    """Right bytes at the wrong place are corrupt: the device is read back, not the host."""
    copies = open_copies(numbered_pool(), 4, ExchangingBackend, verify=True)
    copies.store([1, 2, 3], [0, 1, 2])
    corrupt = copies.load([2, 0, 1], [4, 5, 6])
    assert (corrupt.outcome, corrupt.num_landed, corrupt.corrupt) == (Outcome.CORRUPT, 0, (0, 1))
    statistics = copies.transport.statistics()
    assert (statistics.blocks_verified, statistics.blocks_corrupt, statistics.blocks_loaded) == (1, 2, 3)


def test_tampering_behind_verification_is_not_noticed(open_copies: Callable[..., Copies]) -> None:
    """The negative control: what happens after the check has to be caught by somebody else."""
    pool = numbered_pool()
    copies = open_copies(pool, 4, ExchangingBackend, verify=True)
    backend = copies.transport.backend
    assert isinstance(backend, ExchangingBackend)
    backend.moment = "after_verify"
    copies.store([1, 2], [0, 1])
    assert copies.load([0, 1], [4, 5]).outcome is Outcome.LANDED
    assert pool[4:6, 0].tolist() == [2, 1]


def test_without_verification_nothing_is_read_back(open_copies: Callable[..., Copies]) -> None:
    """Off means off; and what cannot be read back is not proven when it is on."""
    copies = open_copies(numbered_pool(), 4, UnreadableBackend)
    copies.store([1], [0])
    assert copies.load([0], [2]).outcome is Outcome.LANDED
    verifying = open_copies(numbered_pool(), 4, UnreadableBackend, verify=True)
    verifying.store([1], [0])
    unread = verifying.load([0], [2])
    assert (unread.outcome, unread.num_landed) == (Outcome.FAILED, 0)
