"""The keys of `kv_connector_extra_config`, and the configuration that they make."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from fractions import Fraction
from pathlib import Path
from typing import Any

import attrs

from .. import Tier
from .._common.arguments import shown
from .._config.config import GroupLike, OffloadConfig
from .._config.sources import disk_from_table, quotas_from_table, remote_from_table
from .._config.tiers import parse_bytes
from .._observe.kv_events.events import media_of
from ..errors import ConfigError

BYTES = ("host_bytes", "cpu_bytes_to_use")
_SIZES = (*BYTES, "num_host_blocks")
WINDOW_INTERVAL = "window_interval_tokens"
_PASSED_ON = (
    "store_policy", "eviction", "load_choice", "verify", "max_bytes_in_flight", "max_jobs_in_flight", "max_job_bytes",
    "transfer_timeout_s", "store_timeout_s", "pending_timeout_s", "max_quarantined_share", "fetch_timeout_s",
    "max_fetch_share", "prefill_tokens_per_s", WINDOW_INTERVAL, "weights_epoch", "max_pinned_share",
    "max_hint_pinned_share", "max_hint_pin_s",
)  # fmt: skip
_DEFAULTS = {"transfer_timeout_s": 30, "fetch_timeout_s": 5}
"""Without these defaults, a request of vLLM could wait for its load, the disk or the remote store without bound."""
_LOWER = {"disk": disk_from_table, "remote": remote_from_table}
QUOTAS = "quotas"
NAMESPACE = "namespace"
EVENT_MEDIA = "event_media"
KEYS = (*_SIZES, *_PASSED_ON, *_LOWER, QUOTAS, NAMESPACE, EVENT_MEDIA)


def offload_config(
    extra: Mapping[str, Any], groups: Sequence[GroupLike], *, namespace: str, num_ranks: int, num_replicas: int = 1
) -> OffloadConfig:
    """The configuration of one rank. `host_bytes` (or `cpu_bytes_to_use`) is the total for all `num_ranks`, of which
    groups of `num_replicas` share one memory, and so are the sizes in host memory of `quotas`. `num_host_blocks` counts
    blocks, each of which has a part on every rank.

    `ConfigError` names a key that is unknown or whose value is invalid.
    """
    for key in extra:
        if key not in KEYS:
            meant = "".join(f". Did you mean {close}?" for close in get_close_matches(str(key), KEYS, 1)) or "."
            raise ConfigError(key, f"is not a key of kv_connector_extra_config{meant} The keys are {', '.join(KEYS)}")
    sizes = [key for key in _SIZES if extra.get(key) is not None]
    if len(sizes) != 1:
        given = " and ".join(sizes) if sizes else "none"
        raise ConfigError("host_bytes", f"give one of {', '.join(_SIZES)} in kv_connector_extra_config, not {given}")
    options = _DEFAULTS | {key: extra[key] for key in _PASSED_ON if key in extra}
    if options.get("store_policy") == "lazy":
        raise ConfigError(
            "store_policy",
            "must not be lazy, because only vLLM knows which blocks it evicts next. Use eager or selective",
        )
    if sizes == ["num_host_blocks"]:
        options["num_host_blocks"] = extra["num_host_blocks"]
    else:
        options["host_bytes"] = max(1, parse_bytes(sizes[0], extra[sizes[0]]) * num_replicas // num_ranks)
    for key, from_table in _LOWER.items():
        if extra.get(key) is not None:
            if num_ranks > 1:
                raise ConfigError(key, f"supports one rank, but there are {num_ranks}, and each has a part of a block")
            options[key] = from_table(extra[key], "kv_connector_extra_config")
    if extra.get(QUOTAS) is not None:
        quotas = quotas_from_table(extra[QUOTAS], "kv_connector_extra_config")
        options[QUOTAS] = quotas.scaled(Fraction(num_replicas, num_ranks))
    return OffloadConfig(groups=groups, namespace=namespace, **options)


def with_a_step_in_flight(config: OffloadConfig, most_tokens: int, block_bytes: int) -> OffloadConfig:
    """`config`, with a configured `max_bytes_in_flight` raised to the bytes that a step of `most_tokens` computes.

    A worker copies the jobs of a step one after the other. So a lower bound would not reduce the bytes that are copied
    at a time. It would only store less of each step."""
    if config.max_bytes_in_flight is None:
        return config
    step_bytes = block_bytes * sum(-(-most_tokens // group.block_size) for group in config.groups)
    return attrs.evolve(config, max_bytes_in_flight=max(config.bytes_in_flight, step_bytes))


def with_windows_as_retained(config: OffloadConfig, extra: Mapping[str, Any], cache_config: Any) -> OffloadConfig:
    """`config`, with windows stored where vLLM's own prefix cache retains them, unless the key says where: at each
    multiple of `prefix_cache_retention_interval` tokens. In vLLM, None means every block. 0 means only where prompts
    end and part, and so does a version of vLLM without that option."""
    if WINDOW_INTERVAL in extra:
        return config
    interval = getattr(cache_config, "prefix_cache_retention_interval", 0)
    return attrs.evolve(config, window_interval_tokens=1 if interval is None else interval)


def event_media(extra: Mapping[str, Any]) -> Mapping[Tier, str]:
    """The names of the tiers in KV events, as the key `event_media` chooses them."""
    return media_of(extra.get(EVENT_MEDIA, "vllm"), EVENT_MEDIA)


def given_namespace(extra: Mapping[str, Any], models: Iterable[str]) -> str:
    """The key `namespace`, which names weights and revision of all `models` for a disk or a remote store. If it is
    empty, the files of local models identify them."""
    given = extra.get(NAMESPACE, "")
    if not isinstance(given, str):
        raise ConfigError(NAMESPACE, f"must be a string, got {shown(given)}")
    kept = [key for key in _LOWER if extra.get(key) is not None]
    unknown = [model for model in models if not Path(model).is_dir()]
    if kept and not given and unknown:
        problem = f"is needed with {' and '.join(kept)} to name the weights and their revision, because the model"
        raise ConfigError(NAMESPACE, f"{problem}, {shown(unknown[0])}, is not a local directory")
    return given
