"""The server as a command: from options to exit status."""

from __future__ import annotations

import gc
import socket
import sys
from collections.abc import Sequence
from contextlib import ExitStack

import anyio
import attrs
import torch

from ..._common.commands import by_option
from ...demo.logs import LogFile, make_logger
from ...errors import AoffloadError, InvalidArgument
from ..engine.models import load_model
from .admission import Admission
from .app import make_app
from .gate import find_key, is_loopback
from .listening import Connections, EndSignals, Listener, bind, bounded_logs, max_connections_here
from .opening import limits_of, open_service
from .options import ServerOptions, make_parser, parse_options
from .tokenizer import ByteTokenizer, write_tokenizer

# Arguments whose names differ from their options'.
_OPTIONS = {
    "num_device_blocks": "device_blocks",
    "num_host_blocks": "host_blocks",
    "store_policy": "store",
    "path": "disk",
    "size": "disk_size",
    "url": "remote",
    "secret": "remote_secret",
    "secret_file": "remote_secret",
    "directory": "write_tokenizer",
    "max_positions": "max_tokens",
    "vocab_size": "model",
    "groups": "model",
    "namespace": "model",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve until SIGTERM or SIGINT. Returns the exit status. After one of them, the process ignores both, because it
    is ending."""
    options = parse_options(arguments)
    torch.set_num_threads(options.num_threads)
    try:
        if options.device == "cuda" and not torch.cuda.is_available():
            raise InvalidArgument("device", "torch does not find a CUDA device")
        if options.write_tokenizer is not None:
            _write_tokenizer(options)
        else:
            _listen(attrs.evolve(options, api_key=find_key(options.api_key, options.api_key_file)))
    except AoffloadError as error:
        parser = make_parser()
        parser.exit(
            2, f"{parser.prog}: error: {by_option(error, _OPTIONS)}\n"
        )  # `error` prints two dozen lines of usage first
    return 0


def _write_tokenizer(options: ServerOptions) -> None:
    assert options.write_tokenizer is not None
    model = load_model(options.model, seed=options.seed)
    limits = limits_of(options, model)
    write_tokenizer(ByteTokenizer(model.vocab_size), options.write_tokenizer, max_tokens=limits.num_tokens)


def _listen(options: ServerOptions) -> None:
    with ExitStack() as files:  # everything that may be refused, before the model is loaded, which takes long
        sock = files.enter_context(bind(options.host, options.port))
        log = files.enter_context(LogFile(options.log)) if options.log is not None else None
        files.enter_context(bounded_logs())
        if options.api_key is None and not is_loopback(options.host):
            print(
                f"warning: every client that can reach {options.host} can use this server: set --api-key",
                file=sys.stderr,
            )
        anyio.run(_serve, options, sock, log)


async def _serve(options: ServerOptions, sock: socket.socket, log: LogFile | None) -> None:
    signals = EndSignals()
    model = load_model(options.model, seed=options.seed, device=options.device)
    async with open_service(options, model, make_logger(log)) as service:
        gc.freeze()  # these objects stay, and scanning them repeatedly blocks the loop for 200 ms at a time
        max_open = max_connections_here(options.max_connections)
        connections = Connections(max_open, options.max_unread_bytes, options.read_timeout_s)
        listener = Listener(make_app(service), service.admission, sock, connections)
        async with anyio.create_task_group() as group:
            await group.start(listener.run)
            about = f"prompt and answer up to {service.limits.num_tokens:,} tokens"
            print(f"{service.limits.model_name} at {listener.url}/v1, {about}", flush=True)
            await _drain_on_signal(signals, listener, service.admission, options.drain_timeout_s)
    signals.ignore()


async def _drain_on_signal(signals: EndSignals, listener: Listener, admission: Admission, timeout_s: float) -> None:
    """Drain at the first signal. A second one ends the drain at once."""
    await signals.wait(1)
    async with anyio.create_task_group() as group:

        async def hurry() -> None:
            await signals.wait(2)
            admission.end()

        group.start_soon(hurry)
        await listener.drain(timeout_s)
        group.cancel_scope.cancel()
