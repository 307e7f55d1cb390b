"""The server as a command: from options to exit status."""

from __future__ import annotations

import gc
import signal
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack

import anyio
import torch

from ...demo.logs import make_logger
from ...errors import AoffloadError, ConfigError, InvalidArgument
from ..models import load_model
from .admission import Admission
from .app import make_app
from .listening import Listener, bind
from .opening import limits_of, open_service
from .options import ServerOptions, make_parser, parse_options
from .tokenizer import ByteTokenizer
from .tokenizer_directory import write_tokenizer

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve until SIGTERM or SIGINT; returns the exit status."""
    options = parse_options(arguments)
    torch.set_num_threads(options.num_threads)
    try:
        if options.device == "cuda" and not torch.cuda.is_available():
            raise InvalidArgument("device", "torch sees no CUDA device here")
        if options.write_tokenizer is not None:
            _write_tokenizer(options)
        else:
            with bind(options.host, options.port) as sock:  # before the model is loaded, which takes long
                anyio.run(_serve, options, sock)
    except AoffloadError as error:
        make_parser().error(_by_option(error))
    return 0


def _write_tokenizer(options: ServerOptions) -> None:
    assert options.write_tokenizer is not None
    model = load_model(options.model, seed=options.seed)
    limits = limits_of(options, model)
    write_tokenizer(ByteTokenizer(model.vocab_size), options.write_tokenizer, max_tokens=limits.num_tokens)


async def _serve(options: ServerOptions, sock: socket.socket) -> None:
    with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals, ExitStack() as files:
        log = files.enter_context(options.log.open("w", encoding="utf-8")) if options.log is not None else None
        model = load_model(options.model, seed=options.seed, device=options.device)
        async with open_service(options, model, make_logger(log)) as service:
            gc.freeze()  # these objects stay: scanning them again and again blocks the loop for 200 ms at a time
            listener = Listener(make_app(service), service.admission, sock)
            async with anyio.create_task_group() as group:
                await group.start(listener.run)
                about = f"prompt and answer up to {service.limits.num_tokens:,} tokens"
                print(f"{service.limits.model_name} at {listener.url}/v1, {about}", flush=True)
                await _drain_on_signal(signals, listener, service.admission, options.drain_timeout_s)


async def _drain_on_signal(
    signals: AsyncIterator[signal.Signals], listener: Listener, admission: Admission, timeout_s: float
) -> None:
    """Drain at the first signal; a second one ends the drain at once."""
    await anext(signals)
    async with anyio.create_task_group() as group:

        async def hurry() -> None:
            await anext(signals)
            admission.end()

        group.start_soon(hurry)
        await listener.drain(timeout_s)
        group.cancel_scope.cancel()


def _by_option(error: AoffloadError) -> str:
    """The message, with the name of the option in place of the argument's."""
    if isinstance(error, (InvalidArgument, ConfigError)):
        return f"argument --{error.argument.replace('_', '-')}: {error.problem}"
    return str(error)
