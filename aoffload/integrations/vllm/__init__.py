"""The vLLM connector: host memory behind vLLM's own prefix cache. See docs/vllm.md.

vLLM is imported with `AoffloadConnector` only, which vLLM itself asks for.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ...extras import needed

if TYPE_CHECKING:
    from .connector import AoffloadConnector

__all__ = ["AoffloadConnector", "register"]


def register() -> None:
    """Make `kv_connector="AoffloadConnector"` known to vLLM. Entry point of the group `vllm.general_plugins`."""
    with needed("vllm", "AoffloadConnector"):
        factory = import_module("vllm.distributed.kv_transfer.kv_connector.factory").KVConnectorFactory
    if "AoffloadConnector" not in factory._registry:  # vLLM loads plugins once in each process, or again
        factory.register_connector("AoffloadConnector", __name__, "AoffloadConnector")


def __getattr__(name: str) -> Any:
    if name != "AoffloadConnector":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with needed("vllm", "AoffloadConnector"):
        return import_module(".connector", __name__).AoffloadConnector
