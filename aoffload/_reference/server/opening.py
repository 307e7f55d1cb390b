"""Makes a service from options: tokenizer, runtime and engine, open for the duration of a block."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import torch

from ... import DiskTier, OffloadConfig, OffloadRuntime, RemoteTier, fingerprint
from ..._config.groups import KVCacheGroup
from ..._config.sources import secret_in, store_of
from ...errors import ConfigError, InvalidArgument
from ..engine.batching import EngineOptions
from ..engine.checkpoints import engine_groups
from ..engine.engine import PagedEngine
from ..engine.models import MODEL_NAMES
from ..engine.paged import PagedModel
from .admission import Admission, Readings
from .answering import Service
from .bodies import Limits
from .gate import Rules
from .metrics import find_metrics
from .options import ServerOptions
from .tokenizer import ByteTokenizer, PretrainedTokenizer, Tokenizer

BLOCK_SIZE = 16
DEVICE_TOKENS = 8192
HOST_TOKENS = 32_768
CHECKPOINT_TOKENS = 1024
"""Tokens of a default pool for which it also has the blocks of one checkpoint of a recurrent state."""


@asynccontextmanager
async def open_service(options: ServerOptions, model: PagedModel, logger: Any = None) -> AsyncIterator[Service]:
    """A service on an engine with `model`, open inside the block. `ConfigError` or `InvalidArgument` for options that
    cannot work."""
    engine_options = EngineOptions(block_size=BLOCK_SIZE, max_running=options.max_running)
    limits = limits_of(options, model)
    tokenizer = tokenizer_of(options, model)
    metrics = find_metrics()
    groups = engine_groups(model, engine_options)
    num_rows = (options.num_device_blocks or _default_blocks(DEVICE_TOKENS, groups)) + 1  # the null block
    kv_cache = _new_kv_cache(model, num_rows + engine_options.num_scratch_blocks)
    async with (
        OffloadRuntime(
            _config_of(options, groups), kv_cache[:num_rows], logger=logger, **metrics.runtime_options
        ) as runtime,
        PagedEngine(model, runtime, kv_cache, engine_options) as engine,
    ):
        metrics.watch(runtime)
        yield Service(
            engine=engine,
            tokenizer=tokenizer,
            admission=Admission(options.max_requests, Readings(options.max_reading_bytes, options.read_timeout_s)),
            metrics=metrics,
            limits=limits,
            max_body_bytes=options.max_body_bytes,
            answer_timeout_s=options.answer_timeout_s,
            rules=Rules.of(options.host, options.allowed_hosts, options.api_key),
        )


def _new_kv_cache(model: PagedModel, num_rows: int) -> torch.Tensor:
    try:
        return model.new_kv_cache(num_rows, BLOCK_SIZE)
    except (MemoryError, RuntimeError) as error:  # the errors of torch
        problem = str(error).partition("\n")[0]
        raise ConfigError("num_device_blocks", f"{num_rows} blocks cannot be allocated: {problem:.200}") from error


def limits_of(options: ServerOptions, model: PagedModel) -> Limits:
    """The limits of one request: the model's maximum, or the tokens that fit on the device.

    With several groups a request needs blocks of each group, except before that group's window.
    """
    blocks = options.num_device_blocks
    room = DEVICE_TOKENS if blocks is None else blocks // len(model.groups) * BLOCK_SIZE
    most = min(model.max_positions, room)
    if most < 2:
        raise InvalidArgument("device_blocks", "is too small for a prompt and an answer")
    if options.max_tokens is not None and options.max_tokens > most:
        raise InvalidArgument("max_tokens", f"{options.max_tokens} is more than the {most} tokens that fit")
    if options.max_reading_bytes < options.max_body_bytes:
        raise InvalidArgument("max_reading_bytes", f"is less than one body of {options.max_body_bytes} bytes")
    return Limits(_served_name(options), model.vocab_size, options.max_tokens or most, options.requires_salt)


def tokenizer_of(options: ServerOptions, model: PagedModel) -> Tokenizer:
    """The tokenizer in the model's directory if there is one, otherwise the byte-level one."""
    if options.model not in MODEL_NAMES:
        found = PretrainedTokenizer.of_directory(options.model, model.end_token_ids)
        if found is not None:
            return found
    return ByteTokenizer(model.vocab_size)


def _served_name(options: ServerOptions) -> str:
    return options.served_name or (
        options.model if options.model in MODEL_NAMES else Path(options.model).resolve().name
    )


def _default_blocks(num_tokens: int, groups: Sequence[KVCacheGroup]) -> int:
    """Blocks for `num_tokens` tokens of KV in each group, and for checkpoints."""
    return sum(
        num_tokens // CHECKPOINT_TOKENS * group.num_rows if group.is_recurrent else num_tokens // BLOCK_SIZE
        for group in groups
    )


def _config_of(options: ServerOptions, groups: Sequence[KVCacheGroup]) -> OffloadConfig:
    num_host = _default_blocks(HOST_TOKENS, groups) if options.num_host_blocks is None else options.num_host_blocks
    return OffloadConfig(
        groups=groups,
        num_host_blocks=num_host,
        namespace=f"{_identity(options)}@{options.seed}",
        store_policy=options.store if num_host else "off",
        load_choice=options.load,
        eviction=options.eviction,
        disk=None if options.disk is None else DiskTier(options.disk, options.disk_size),
        remote=_remote_of(options),
    )


def _identity(options: ServerOptions) -> str:
    """The identity of the KV, from the files of the model. A later server with the same files can use KV that outlives
    this one."""
    is_kept = options.disk is not None or options.remote is not None
    if not is_kept or options.model in MODEL_NAMES:
        return options.model
    return fingerprint(options.model)


def _remote_of(options: ServerOptions) -> RemoteTier | None:
    if options.remote is None:
        return None
    return RemoteTier(store_of(options.remote), secret_in(options.remote_secret))
