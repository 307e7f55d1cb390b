"""The LoRA adapters of a worker: whose KV its forwards compute, by the weights that vLLM has loaded.

A name and a path say nothing about weights: an adapter may be trained again and saved over itself. vLLM reads the files
when it wants to: for a new `lora_int_id`, for `load_inplace`, and again after it has evicted the adapter. A digest of
the files, whoever takes it, may be one of other weights than those that were read. So the worker digests what vLLM has
loaded, and counts the changes of each adapter. A copy that was planned under one count is not made under another.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import logging
import uuid
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import attrs
import torch

from .messages import AdapterSeen, AdapterUse

__all__ = ["LoadedAdapters", "digest_of", "watch"]

_log = logging.getLogger("vllm.aoffload")
_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)
_UNREADABLE = (AttributeError, NotImplementedError, OverflowError, RuntimeError, TypeError, ValueError)
"""What torch and Python raise for tensors and values that have no bytes to read."""
_watching: weakref.WeakSet[LoadedAdapters] = weakref.WeakSet()


@attrs.frozen
class _Seen:
    model: weakref.ref[Any]
    """What vLLM had under the id. It loads into another object each time."""
    serial: int
    digest: str


@attrs.define(eq=False, weakref_slot=True)
class LoadedAdapters:
    """One per worker. All calls come from the thread that runs the model."""

    rank: int
    lora_config: Any
    """vLLM's, of this engine: one process may have several."""
    _manager: Any = attrs.field(default=None, init=False)
    """vLLM's manager of adapters in this worker; None until it has been seen."""
    _seen: dict[int, _Seen] = attrs.field(factory=dict, init=False)
    _news: dict[int, AdapterSeen] = attrs.field(factory=dict, init=False)

    def __attrs_post_init__(self) -> None:
        _watching.add(self)

    def met(self, manager: Any) -> None:
        """vLLM's `manager` is about to add adapters, or has them."""
        if getattr(manager, "lora_config", None) is self.lora_config:
            self._manager = manager

    def take(self) -> tuple[AdapterSeen, ...]:
        """The adapters whose weights have changed since the last call."""
        for adapter, model in self._loaded().items():
            self._look(adapter, model)
        if not self._news:
            return ()  # as in most steps
        found = tuple(self._news.values())
        self._news.clear()
        return found

    def is_loaded(self, adapter: int) -> bool:
        """Whether vLLM need not read the adapter again."""
        return adapter in self._loaded()

    def is_current(self, use: AdapterUse) -> bool:
        """Whether the weights have been the same ever since `use` was told of."""
        model = self._loaded().get(use.adapter)
        if model is not None:
            self._look(use.adapter, model)
        seen = self._seen.get(use.adapter)
        return seen is not None and seen.serial == use.serials.get(self.rank)

    def _loaded(self) -> Mapping[int, Any]:
        of_manager = getattr(self._manager, "_adapter_manager", None)
        found: Mapping[int, Any] = {} if of_manager is None else of_manager.list_adapters()
        return found

    def _look(self, adapter: int, model: Any) -> None:
        seen = self._seen.get(adapter)
        if seen is not None and seen.model() is model:
            return
        digest, number = digest_of(model), 0 if seen is None else seen.serial
        if seen is None or seen.digest != digest:
            number += 1
            self._news[adapter] = AdapterSeen(self.rank, adapter, number, digest)
        self._seen[adapter] = _Seen(weakref.ref(model), number, digest)


def digest_of(model: Any) -> str:
    """SHA-256 over all weights and numbers of an adapter, whatever its name, path and id. What cannot be read has a
    digest that no other load ever has, in this process or another."""
    hasher = hashlib.sha256()
    try:
        fields = {name: value for name, value in vars(model).items() if name != "id"}
        for part in _parts(fields, 0):
            hasher.update(part)
    except _UNREADABLE:
        _log.warning("aoffload: the KV of an adapter is kept until vLLM reads it again: its weights cannot be compared")
        return f"unreadable {uuid.uuid4().hex}"
    return hasher.hexdigest()


def _parts(value: Any, depth: int) -> Iterator[Any]:
    """`value` as bytes and arrays of bytes, from which it can be told apart from any other."""
    if depth > MAX_DEPTH:
        raise ValueError("nested too deeply")
    if isinstance(value, torch.Tensor):
        raw = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        yield f"tensor {value.dtype} {tuple(value.shape)};".encode()
        yield raw.numpy()
    elif isinstance(value, _PLAIN):
        text = repr(value).encode()
        yield b"%s %d " % (type(value).__name__.encode(), len(text)) + text
    elif isinstance(value, Mapping):
        yield b"map %d;" % len(value)
        for name in sorted(value):
            yield from _parts(name, depth + 1)
            yield from _parts(value[name], depth + 1)
    elif isinstance(value, (list, tuple)):
        yield b"list %d;" % len(value)
        for each in value:
            yield from _parts(each, depth + 1)
    elif isinstance(value, (set, frozenset)):
        yield b"set;"
        yield from _parts(sorted(value), depth + 1)
    else:
        yield f"object {type(value).__qualname__};".encode()
        yield from _parts(vars(value), depth + 1)


MAX_DEPTH = 8


def watch(manager_class: Any) -> bool:
    """Have every `LoadedAdapters` of this process meet the managers of `manager_class`, which ask themselves for their
    adapters before they add one. Returns whether that is possible: not with a class that vLLM has changed."""
    inner = getattr(manager_class, "list_adapters", None)
    if getattr(inner, "is_of_aoffload", False):
        return True
    if inner is None or list(inspect.signature(inner).parameters) != ["self"]:
        return False

    @functools.wraps(inner)
    def list_adapters(self: Any) -> Any:
        for each in tuple(_watching):
            each.met(self)
        return inner(self)

    list_adapters.is_of_aoffload = True  # type: ignore[attr-defined]
    manager_class.list_adapters = list_adapters
    return True
