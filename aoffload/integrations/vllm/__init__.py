"""The vLLM connector: host memory as a tier below vLLM's own prefix cache. See docs/vllm.md.

vLLM is imported only with `AoffloadConnector`, which vLLM itself looks up.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ..._vllm import internals
from ..._vllm.refusals import check_early

if TYPE_CHECKING:
    from ..._vllm.connector import AoffloadConnector

__all__ = ["AoffloadConnector", "register"]


def register() -> None:
    """Make `kv_connector="AoffloadConnector"` known to vLLM. Entry point of the group `vllm.general_plugins`."""
    factory = internals.KVConnectorFactory
    if "AoffloadConnector" not in factory._registry:  # vLLM may load plugins more than once in a process
        factory.register_connector("AoffloadConnector", __name__, "AoffloadConnector")


def __getattr__(name: str) -> Any:
    if name != "AoffloadConnector":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = import_module("aoffload._vllm.connector").AoffloadConnector
    check_early()
    return found
