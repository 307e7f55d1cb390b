"""The demo as a command: from options to exit status."""

from __future__ import annotations

import importlib
import json
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NoReturn

import anyio
import torch

from .._common.commands import ProgressLine, by_option
from .._common.env import Env
from .._common.extras import needed
from .._reference.engine.models import load_model
from .._tiers.disk.files import PosixDirectory
from ..errors import AoffloadError, InvalidArgument
from ..plan import Recorder
from .backends import Tampering
from .interrupt import Interrupt, Progress
from .logs import LogFile, make_logger
from .options import DemoOptions, make_parser, parse_options
from .outcome import DemoOutcome
from .report import as_json, as_table
from .runner import Runner, run_kinds
from .workload import ENGINE, Pools, make_workload

# Arguments whose names differ from their options'.
_OPTIONS = {
    "store_policy": "store",
    "num_device_blocks": "device_blocks",
    "num_host_blocks": "host_blocks",
    "path": "disk",
    "size": "disk",
    "url": "remote",
    "secret": "remote_secret",
    "secret_file": "remote_secret",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demo, print a table, and write the file if requested. The exit status says whether all checks have
    passed."""
    options = parse_options(arguments)
    outcome = DemoOutcome(options, tampering=Tampering.of(options.corrupt) if options.corrupt else None)
    progress = Progress(ProgressLine(sys.stderr))
    started = time.monotonic()

    def report() -> None:
        outcome.was_interrupted = interrupt.was_pressed
        outcome.wall_s = time.monotonic() - started
        progress.line.clear()
        print(as_table(outcome), flush=True)
        if options.json is not None:
            _write_json(options.json, outcome)

    with Interrupt(report) as interrupt, ExitStack() as files:
        try:
            log = _open(files, options)
            runner = _prepare(options, outcome, progress, log)
            if options.record is not None:
                runner.recorder = files.enter_context(_recorder(options.record))
        except AoffloadError as error:
            _leave(error)
        anyio.run(_run_all, runner, interrupt, backend=options.backend)
        if interrupt.was_pressed:
            interrupt.leave()  # everything is closed, and only the interpreter's own shutdown would take time
        try:
            interrupt.report_once()
        except InvalidArgument as error:
            _leave(error)
        return outcome.exit_status


def _write_json(path: Path, outcome: DemoOutcome) -> None:
    try:
        path.write_text(json.dumps(as_json(outcome), indent=2) + "\n")
    except OSError as error:
        raise InvalidArgument("json", f"cannot be written: {error}") from error


def _open(files: ExitStack, options: DemoOptions) -> LogFile | None:
    """Open the log, and check the requirements of the options, before the work."""
    if options.backend == "trio":
        with needed("trio", "--backend trio"):
            importlib.import_module("trio")
    if options.device == "cuda" and not torch.cuda.is_available():
        raise InvalidArgument("device", "torch does not find a CUDA device")
    if options.disk is not None:
        with needed("disk", "--disk"):
            importlib.import_module("xxhash")
        PosixDirectory(options.disk).close()  # a directory that may not be used is reported before the work
    if options.remote is not None:
        with needed("remote", "--remote"):
            for name in ("cryptography", "redis", "xxhash"):
                importlib.import_module(name)
    try:
        if options.json is not None:
            options.json.touch()
    except (OSError, ValueError) as error:
        raise InvalidArgument("json", f"cannot be written: {error}") from error
    return files.enter_context(LogFile(options.log)) if options.log is not None else None


def _recorder(path: Path) -> Recorder:
    try:
        return Recorder(path, block_tokens=ENGINE.block_size)
    except InvalidArgument as error:
        raise InvalidArgument("record", error.problem) from error


def _prepare(options: DemoOptions, outcome: DemoOutcome, progress: Progress, log: LogFile | None) -> Runner:
    # One thread computes, one copies, one waits. On a busy machine, more threads for the arithmetic are slower, and
    # another number of threads may give other bits.
    torch.set_num_threads(1)
    model = load_model(options.model, seed=options.seed, device=options.device)
    workload = make_workload(options.seed, options.num_requests, model.vocab_size)
    outcome.pools = Pools.of(options, workload, model.groups)
    outcome.first_turn_ids = workload.first_turn_ids()
    outcome.num_conversations = len(workload.conversations)
    runner = Runner(model, workload, outcome, progress, make_logger(log))
    for kind in run_kinds(outcome.pools, options):
        runner.make_config(kind)  # reports errors of the configuration before the work
    return runner


def _leave(error: AoffloadError) -> NoReturn:
    parser = make_parser()
    parser.exit(2, f"{parser.prog}: error: {by_option(error, _OPTIONS)}\n")


async def _run_all(runner: Runner, interrupt: Interrupt) -> None:
    outcome = runner.outcome
    assert outcome.pools is not None
    with anyio.CancelScope() as scope:
        interrupt.stop_with(Env().loop_waker(scope.cancel))
        try:
            for kind in run_kinds(outcome.pools, outcome.options):
                await runner.run(kind, outcome.options.cancel_rate if kind.has_offload else 0.0)
        finally:
            interrupt.stop_with(None)
