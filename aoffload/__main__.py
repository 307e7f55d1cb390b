"""The command `aoffload`: runs the program of a subcommand with the other arguments.

`python -m aoffload` is the same command. A subcommand is a row of `COMMANDS`. Its module is imported only when the
subcommand is used, and parses its own arguments.
"""

from __future__ import annotations

import os
import platform
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version

import attrs

from ._common.extras import needed
from ._kernel.states import is_compiled
from .errors import MissingExtra, UnsupportedVersion

__all__ = ["COMMANDS", "main"]

BAD_USAGE = 2
INTERRUPTED = 130
REPORTED = ("torch", "transformers", "vllm", "cuda-bindings")
"""Distributions whose versions `--version` reports if they are installed."""


@attrs.frozen
class Command:
    name: str
    module: str
    """Its `main(arguments)` returns the exit status, or raises `SystemExit` as argparse does."""
    about: str
    extra: str | None = None
    """The extra without which the module cannot be imported."""


COMMANDS = (
    Command("demo", "aoffload.demo.command", "serve conversations with and without offload, and compare them"),
    Command("trace", "aoffload.trace.command", "explain a log of events: as text, as a page, or for Perfetto"),
    Command("plan", "aoffload.plan.command", "say how much host memory to buy, from a trace or a made-up mix"),
    Command("top", "aoffload.top.command", "show live rates and the hit share of a running process", "metrics"),
    Command("serve", "aoffload._reference.server.command", "serve a model over HTTP with OpenAI's API", "server"),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status: that of the subcommand, 2 if the subcommand does not exist or lacks its extra, 130 after
    Ctrl-C."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    first, others = (given[0], given[1:]) if given else ("", [])
    if first in ("-h", "--help"):
        print(usage())
    elif first in ("-V", "--version"):
        print(versions())
    elif not first:
        print(usage(), file=sys.stderr)
        return BAD_USAGE
    else:
        return _dispatch(first, others)
    return 0


def usage() -> str:
    rows = [f"  {command.name:<8}{command.about}" for command in COMMANDS]
    return "\n".join(
        [
            "usage: aoffload COMMAND ...",
            "",
            "KV cache offload for async LLM serving.",
            "",
            "commands (for the options of one: aoffload COMMAND --help):",
            *rows,
            "",
            "options:",
            "  -h, --help     show this help, and exit",
            "  -V, --version  show the installed versions, and exit",
        ]
    )


def versions() -> str:
    """The version, and on a second line the environment, for bug reports."""
    surroundings = [
        f"Python {platform.python_version()}",
        f"{platform.system()} {platform.machine()}",
        "compiled core" if is_compiled else "pure core",
    ]
    for name in REPORTED:
        try:
            surroundings.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            continue
    return f"aoffload {import_module('aoffload').__version__}\n{', '.join(surroundings)}"


def _dispatch(name: str, arguments: list[str]) -> int:
    command = next((command for command in COMMANDS if command.name == name), None)
    if command is None:
        known = ", ".join(command.name for command in COMMANDS)
        return _complain(f"aoffload: {name!r} is not a command or an option; choose from {known}, --help, --version")
    try:
        run = _load(command)
        return run(arguments)
    except (MissingExtra, UnsupportedVersion) as error:
        return _complain(f"aoffload {name}: {error}")
    except KeyboardInterrupt:
        return INTERRUPTED


def _load(command: Command) -> Callable[[Sequence[str]], int]:
    """Import the module and return its `main`. Importing torch takes seconds, so Ctrl-C exits at once without a
    traceback."""
    with _leaving_at_once():
        if command.extra is None:
            module = import_module(command.module)
        else:
            with needed(command.extra, f"`aoffload {command.name}`"):
                module = import_module(command.module)
    found: Callable[[Sequence[str]], int] = module.main
    return found


@contextmanager
def _leaving_at_once() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, _leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _leave(*_: object) -> None:
    os.write(2, b"\n  interrupted before anything was done\n")
    os._exit(INTERRUPTED)


def _complain(problem: str) -> int:
    print(problem, file=sys.stderr)
    return BAD_USAGE


if __name__ == "__main__":
    raise SystemExit(main())
