"""The weights of the model in a worker, compared before and after sleep.

At level 1, vLLM restores the weights after sleep. At level 2, it discards them. At either level, the user may load
other weights during sleep, and vLLM tells connectors neither the level nor the change. So the worker takes a digest of
all weights when it starts, before it sleeps, and when the scheduler asks after sleep. Cached KV was computed with the
current weights only if all three digests are equal.

The digest detects any change of a single number of 64 bits. It misses one in about 2**64 of other accidental changes.
The device computes the digest at the speed of its memory, in pieces of some MB.
"""

from __future__ import annotations

import hashlib
import logging
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from .internals import calling_worker, models_of
from .messages import WeightsSeen

_log = logging.getLogger("vllm.aoffload")
PIECE = 2**21
"""Numbers of 64 bits that are summed at a time."""
_UNREADABLE = (AttributeError, NotImplementedError, RuntimeError, TypeError, ValueError)
"""Errors that torch raises for tensors without readable bytes."""


class ModelWeights:
    """One per worker of an engine with sleep mode. All calls come from the thread that runs the model."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._worker: weakref.ref[Any] | None = None
        """vLLM's worker; None: it was not found."""
        self._stored = ""
        """Digest of the weights with which all stored KV was computed; empty: unknown."""
        self._num_sleeps = 0
        self._said: list[WeightsSeen] = []

    def begin(self) -> None:
        """Called when vLLM's worker registers its KV tensors. By then, the worker has loaded the weights."""
        worker = calling_worker()
        if worker is None:
            _log.warning("aoffload: cannot see the weights of the model, so sleep empties the cache")
            return
        self._worker, self._stored = weakref.ref(worker), digest_of_models(worker)

    def sleep(self) -> None:
        """Called before vLLM unmaps the memory of the weights."""
        self._num_sleeps += 1
        if self._now() != self._stored:
            self._stored = ""  # the weights have changed without a reset

    def _now(self) -> str:
        worker = None if self._worker is None else self._worker()
        return "" if worker is None else digest_of_models(worker)

    def answer(self, number: int) -> None:
        """Answer question `number`. A step asks it, because all weights are in memory then."""
        found = self._now()
        is_same = bool(found) and found == self._stored
        self._said.append(WeightsSeen(self._rank, number, self._num_sleeps, is_same))
        self._stored, self._num_sleeps = found, 0

    def take(self) -> tuple[WeightsSeen, ...]:
        """The answers since the last call."""
        found = tuple(self._said)
        self._said.clear()
        return found


def digest_of_models(worker: Any) -> str:
    """A digest of all parameters and buffers of a worker's models; empty if they cannot be read."""
    factors: dict[torch.device, torch.Tensor] = {}
    try:
        named = [(name, each) for model in models_of(worker) for name, each in _tensors(model)]
        sums = [torch.stack(list(_sums(each, factors))).cpu() if each.numel() else torch.empty(0) for _, each in named]
    except _UNREADABLE as error:
        _log.warning("aoffload: cannot read the weights of the model, so sleep empties the cache (%s)", error)
        return ""
    hasher = hashlib.sha256()
    for (name, each), found in zip(named, sums, strict=True):
        hasher.update(f"{name} {each.dtype} {tuple(each.shape)};".encode())
        hasher.update(found.numpy().tobytes())
    return hasher.hexdigest() if named else ""


def _tensors(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    for name, each in (*model.named_parameters(), *model.named_buffers()):
        yield from _plain(name, each.detach())


def _plain(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """`tensor`, or the plain tensors that a wrapper consists of, such as quantized numbers and their scales."""
    if is_traceable_wrapper_subclass(tensor):
        for field in tensor.__tensor_flatten__()[0]:
            yield from _plain(f"{name}.{field}", getattr(tensor, field))
    else:
        yield name, tensor


def _sums(tensor: torch.Tensor, factors: dict[torch.device, torch.Tensor]) -> Iterator[torch.Tensor]:
    """A sum over each piece of `tensor`. If one number of 64 bits changes, the sum always changes, because each
    operation before the sum is invertible. If several numbers change, the sum almost always changes, because each
    number has its own factor."""
    raw = tensor.contiguous().reshape(-1).view(torch.uint8)
    if raw.device not in factors:
        factors[raw.device] = _odd_numbers().to(raw.device)
    for piece in torch.split(raw, 8 * PIECE):
        if len(piece) % 8 or piece.storage_offset() % 8:
            piece = torch.nn.functional.pad(piece, (0, -len(piece) % 8)).clone()
        numbers = piece.view(torch.int64)
        mixed = (numbers ^ (numbers >> 32)) * factors[raw.device][: len(numbers)]
        yield (mixed ^ (mixed >> 29)).sum()


def _odd_numbers() -> torch.Tensor:
    """A factor for each number of a piece, the same at each call."""
    drawn = torch.Generator().manual_seed(1)
    return torch.randint(-(2**62), 2**62, (PIECE,), generator=drawn) * 2 + 1
