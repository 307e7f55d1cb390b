"""The keys of `kv_connector_extra_config`, and the configuration that they make."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ...config import GroupLike, OffloadConfig, parse_bytes
from ...errors import ConfigError

__all__ = ["KEYS", "offload_config"]

_SIZES = ("host_bytes", "cpu_bytes_to_use", "num_host_blocks")
_PASSED_ON = (
    "store_policy", "eviction", "verify", "max_bytes_in_flight", "transfer_timeout_s", "store_timeout_s",
    "pending_timeout_s", "max_quarantined_share",
)  # fmt: skip
_DEFAULTS = {"transfer_timeout_s": 30}
"""Nothing else bounds how long a request of vLLM waits for its load."""
KEYS = (*_SIZES, *_PASSED_ON)


def offload_config(
    extra: Mapping[str, Any], groups: Sequence[GroupLike], *, namespace: str, num_ranks: int
) -> OffloadConfig:
    """The configuration of one rank. `host_bytes` (or `cpu_bytes_to_use`) is what all `num_ranks` take together;
    `num_host_blocks` counts blocks, each of which has a part on every rank.

    `ConfigError` names a key that is unknown or whose value is invalid.
    """
    for key in extra:
        if key not in KEYS:
            raise ConfigError(key, f"is no key of kv_connector_extra_config; there are {', '.join(KEYS)}")
    sizes = [key for key in _SIZES if extra.get(key) is not None]
    if len(sizes) != 1:
        given = " and ".join(sizes) if sizes else "none"
        raise ConfigError("host_bytes", f"give one of {', '.join(_SIZES)} in kv_connector_extra_config, not {given}")
    options = _DEFAULTS | {key: extra[key] for key in _PASSED_ON if key in extra}
    if sizes == ["num_host_blocks"]:
        options["num_host_blocks"] = extra["num_host_blocks"]
    else:
        options["host_bytes"] = max(1, parse_bytes(sizes[0], extra[sizes[0]]) // num_ranks)
    return OffloadConfig(groups=groups, namespace=namespace, **options)
