"""The LoRA adapters of a worker: the weights that vLLM has loaded for each of them.

A name and a path do not identify weights, because an adapter may be trained again and saved under the same path. vLLM
reads the files for a new `lora_int_id`, for `load_inplace`, and again after it has evicted the adapter. The files may
change between that and any digest of them. So the worker takes the digest of the weights that vLLM has loaded, and
counts the changes of each adapter. A copy is not made if the count has changed since the copy was planned.
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

_log = logging.getLogger("vllm.aoffload")
_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)
_UNREADABLE = (AttributeError, NotImplementedError, OverflowError, RuntimeError, TypeError, ValueError)
"""Errors that torch and Python raise for tensors and values without readable bytes."""
_watching: weakref.WeakSet[LoadedAdapters] = weakref.WeakSet()


@attrs.frozen
class _Seen:
    model: weakref.ref[Any]
    """vLLM's adapter object under the id. Each load makes a new object."""
    serial: int
    digest: str


@attrs.define(eq=False, weakref_slot=True)
class LoadedAdapters:
    """One per worker. All calls come from the thread that runs the model."""

    rank: int
    lora_config: Any
    """The configuration of this engine. It identifies the engine's manager, because the process may have several
    engines."""
    _manager: Any = attrs.field(default=None, init=False)
    """vLLM's manager of adapters in this worker; None until it has been seen."""
    _seen: dict[int, _Seen] = attrs.field(factory=dict, init=False)
    _news: dict[int, AdapterSeen] = attrs.field(factory=dict, init=False)

    def __attrs_post_init__(self) -> None:
        _watching.add(self)

    def met(self, manager: Any) -> None:
        """Take vLLM's `manager` of adapters, if it belongs to this engine."""
        if getattr(manager, "lora_config", None) is self.lora_config:
            self._manager = manager

    def take(self) -> tuple[AdapterSeen, ...]:
        """The adapters whose weights have changed since the last call."""
        for adapter, model in self._loaded().items():
            self._look(adapter, model)
        if not self._news:
            return ()  # in most steps
        found = tuple(self._news.values())
        self._news.clear()
        return found

    def is_loaded(self, adapter: int) -> bool:
        """Whether vLLM has the adapter loaded."""
        return adapter in self._loaded()

    def is_current(self, use: AdapterUse) -> bool:
        """Whether the weights have not changed since this worker reported those of `use`."""
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
    """SHA-256 over all weights and numbers of an adapter, without its name, path and id. If they cannot be read, the
    digest is unique to this load."""
    hasher = hashlib.sha256()
    try:
        fields = {name: value for name, value in vars(model).items() if name != "id"}
        for part in _parts(fields, 0):
            hasher.update(part)
    except _UNREADABLE:
        _log.warning("aoffload: cannot compare the weights of an adapter: its KV is kept until vLLM loads it again")
        return f"unreadable {uuid.uuid4().hex}"
    return hasher.hexdigest()


def _parts(value: Any, depth: int) -> Iterator[Any]:
    """`value` as bytes and arrays of bytes. Different values give different bytes."""
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
    """Give every `LoadedAdapters` of this process the managers of `manager_class`. To see them, wrap `list_adapters`,
    because a manager calls it before it adds an adapter. Returns False if vLLM has changed that method."""
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
