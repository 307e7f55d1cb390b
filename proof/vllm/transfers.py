"""Which connector an engine is given: fields of vLLM's `KVTransferConfig`."""

from __future__ import annotations

from typing import Any

__all__ = ["IN_ONE_THREAD", "OURS", "PEER", "faulty", "ours", "peer"]

HOST_BYTES = 1 << 28


def ours(name: str = "AoffloadConnector", module: str = "aoffload.integrations.vllm", **extra: Any) -> dict[str, Any]:
    """Our connector, or a subclass of it in `module`. `extra` goes into `kv_connector_extra_config`."""
    return {
        "kv_connector": name, "kv_connector_module_path": module, "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute", "kv_connector_extra_config": {"host_bytes": HOST_BYTES, **extra},
    }  # fmt: skip


def peer(name: str = "CPUPeer", module: str = "proof.vllm.peer") -> dict[str, Any]:
    """vLLM's own connector for the same purpose, or a subclass of it in `module`."""
    return {
        "kv_connector": name, "kv_connector_module_path": module, "kv_role": "kv_both",
        "kv_connector_extra_config": {"cpu_bytes_to_use": HOST_BYTES},
    }  # fmt: skip


def faulty(name: str, **extra: Any) -> dict[str, Any]:
    """One of the connectors of `proof.vllm.faulty_connectors`."""
    return ours(name, "proof.vllm.faulty_connectors", **extra)


OURS = ours()
IN_ONE_THREAD = ours("InOneThread", "proof.vllm.one_thread")
"""Ours with copies in the calling thread, where those of `PEER` are."""
PEER = peer()
