"""The public modules of the package, and the verbs of handles."""

from __future__ import annotations

import inspect
import runpy
import typing
from pathlib import Path
from types import ModuleType
from typing import Any

import aoffload
import aoffload.cuda
import aoffload.host_cache
import aoffload.integrations
import aoffload.integrations.openai_server
import aoffload.integrations.vllm
import aoffload.kv_events
import aoffload.ledger
import aoffload.metrics
import aoffload.otel
import aoffload.plan
import aoffload.ranks
import aoffload.stores
import aoffload.testing
import aoffload.transport
from aoffload import HostCache, HostCacheRuntime, Ledger, OffloadRuntime
from aoffload._runtime.handles import Handle
from aoffload.ledger import LedgerExtension

MODULES = [
    aoffload,
    aoffload.ledger,
    aoffload.host_cache,
    aoffload.transport,
    aoffload.ranks,
    aoffload.stores,
    aoffload.cuda,
]
"""The modules that `aoffload`'s own names are imported from, each name from one of them."""
EVERY_MODULE: list[ModuleType] = [
    *MODULES,
    aoffload.integrations,
    aoffload.integrations.openai_server,
    aoffload.integrations.vllm,
    aoffload.kv_events,
    aoffload.metrics,
    aoffload.otel,
    aoffload.plan,
    aoffload.testing,
]
"""All public modules."""
FACES = (Ledger, HostCache, OffloadRuntime, HostCacheRuntime)
"""The classes that have handles."""
REFERENCE = runpy.run_path(str(Path(__file__).parents[1] / "docs/site/reference.py"))
INTERNAL: dict[str, set[str]] = {handle: set(names.split()) for handle, names in REFERENCE["INTERNAL"].items()}
"""By handle, methods that only other packages of aoffload call."""


def handles_of(face: type) -> dict[str, type]:
    """The handles of a face, with their classes."""
    properties = inspect.getmembers(face, lambda member: isinstance(member, property))
    kinds = {name: typing.get_type_hints(member.fget)["return"] for name, member in properties}
    return {
        name: kind
        for name, kind in kinds.items()
        if isinstance(kind, type) and issubclass(kind, (LedgerExtension, Handle))
    }


def methods_of(kind: type) -> dict[str, Any]:
    """Public methods and properties, hooks left out."""
    return {
        name: member
        for name, member in inspect.getmembers(kind)
        if not name.startswith(("_", "on_", "ask_", "report_")) and (callable(member) or isinstance(member, property))
    }
