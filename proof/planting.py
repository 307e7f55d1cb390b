"""Planting: puts a defect into aoffload, and calls a function in a forked child that imports it.

A mutant is a patch of one module's source, applied while the module is imported: nothing on disk changes, and a checker
finds exactly what it would find if the defect had been committed.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import resource
import select
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from importlib.util import spec_from_file_location
from pathlib import Path
from typing import IO, Any, NoReturn, TypeAlias

import attrs

__all__ = [
    "JSON", "AlreadyImported", "ChildResult", "Ending", "HasThreads", "Mutant", "Patch", "PatchDoesNotApply",
    "in_child", "patched", "plant", "preload", "source_path",
]  # fmt: skip

JSON: TypeAlias = Any
PRELOADED = ("torch", "numpy", "anyio", "trio", "structlog", "attrs")
"""Modules that take seconds to import: imported once, before the forks."""
THREAD_POOLS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
"""Environment variables that size the thread pools of numpy. One thread means none is started on import: a process with
threads must not fork."""
OUTPUT_BYTES = 8192
MEMORY_BYTES = 4 << 30
"""Memory limit of a child, so that a defect which allocates without end harms no other process."""


class PatchDoesNotApply(Exception):  # noqa: N818 - named for what is the matter, as the errors of aoffload are
    """The text that a mutant replaces is not in its module exactly once: the source has changed."""

    def __init__(self, name: str, module: str, count: int) -> None:
        super().__init__(f"mutant {name!r} replaces a text that occurs {count} times in {module}, not once")
        self.count = count


class AlreadyImported(Exception):  # noqa: N818 - see above
    """Too late to plant: aoffload was imported in this process, without the defect."""


class HasThreads(Exception):  # noqa: N818 - see above
    """A process with threads must not fork: the child has none of the threads, but the locks that they held."""


@attrs.frozen
class Patch:
    """In `module`, `old` (which occurs there exactly once) is replaced by `new`."""

    module: str
    old: str
    new: str


@attrs.frozen
class Mutant:
    """A defect: a patch, and sometimes more that belong to it."""

    name: str
    module: str
    old: str
    new: str
    promise: str
    """The promise it breaks, in a few words."""
    also: tuple[Patch, ...] = attrs.field(default=(), kw_only=True)
    """Further patches of the same defect, applied after the first one."""
    scenarios: tuple[str, ...] = attrs.field(default=(), kw_only=True)
    """The scenarios that its simulated runs are of. Empty: all of them."""
    test: str = attrs.field(default="", kw_only=True)
    """The test that catches it, where no simulated run can."""
    programs: bool = attrs.field(default=False, kw_only=True)
    """Whether only programs meet it, because no scenario makes the calls that it takes."""

    @property
    def patches(self) -> tuple[Patch, ...]:
        return (Patch(self.module, self.old, self.new), *self.also)


# -- planting ---------------------------------------------------------------------------------------------------------


def source_path(module: str) -> Path:
    """Where the source of `module` lies, found without importing anything of its package."""
    package, *rest = module.split(".")
    spec = PathFinder.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError(f"no package named {package!r}")
    path = Path(spec.submodule_search_locations[0], *rest)
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def patched(mutant: Mutant) -> dict[str, str]:
    """The sources of its modules with the defect; `PatchDoesNotApply` unless each patch applies exactly once."""
    sources = {patch.module: source_path(patch.module).read_text() for patch in mutant.patches}
    for patch in mutant.patches:
        count = sources[patch.module].count(patch.old)
        if count != 1:
            raise PatchDoesNotApply(mutant.name, patch.module, count)
        sources[patch.module] = sources[patch.module].replace(patch.old, patch.new)
    return sources


def plant(mutant: Mutant) -> None:
    """Make this process import the mutant instead of its module, for good. Call it before aoffload is imported."""
    _require_not_imported()
    sys.meta_path.insert(0, _finder(mutant))


def _finder(mutant: Mutant) -> _Finder:
    return _Finder(patched(mutant))


def _require_not_imported() -> None:
    if "aoffload" in sys.modules:
        raise AlreadyImported("aoffload is imported in this process already")


def _require_alone() -> None:
    if len(os.listdir("/proc/self/task")) > 1:
        raise HasThreads("this process has threads")


class _Loader(SourceFileLoader):
    """Compiles the source it was given; no bytecode of the sound module is read, and none of the mutant is written."""

    def __init__(self, module: str, path: Path, source: str) -> None:
        super().__init__(module, str(path))
        self._source = source

    def get_source(self, fullname: str) -> str:
        return self._source

    def get_code(self, fullname: str) -> Any:
        return compile(self._source, self.path, "exec", dont_inherit=True)


@attrs.frozen
class _Finder:
    sources: Mapping[str, str]

    def find_spec(self, fullname: str, path: Sequence[str] | None = None, target: object = None) -> ModuleSpec | None:
        if fullname not in self.sources:
            return None
        found = source_path(fullname)
        # A package knows its submodules by where it lies: `spec_from_file_location` asks the loader for that.
        return spec_from_file_location(fullname, found, loader=_Loader(fullname, found, self.sources[fullname]))


# -- children ---------------------------------------------------------------------------------------------------------


class Ending(Enum):
    RETURNED = "returned"
    RAISED = "raised"
    CRASHED = "crashed"
    """It ended without a result: killed by a signal, or by `os._exit`."""
    TIMED_OUT = "timed out"


@attrs.frozen
class ChildResult:
    """How a child ended. Whatever goes wrong in the child is in here; nothing of it raises out of `in_child`."""

    ending: Ending
    value: JSON = None
    """What the function returned, if it did."""
    detail: str = ""
    """The error in one line; otherwise the exit status or the signal."""
    output: str = ""
    """The end of what it printed, the traceback included."""
    duration_s: float = 0.0


def preload(names: Iterable[str] = PRELOADED) -> None:
    """Import what children share, and keep it out of their garbage collections: a fork costs milliseconds then."""
    _require_not_imported()
    for pool in THREAD_POOLS:
        os.environ[pool] = "1"
    for name in names:
        importlib.import_module(name)
    _require_not_imported()
    gc.collect()
    gc.freeze()


def in_child(function_path: str, argument: JSON, mutant: Mutant | None, timeout_s: float) -> ChildResult:
    """Call `module:function` with `argument` in a forked child that has `mutant` planted, and return how it ended.

    Call `preload` first. This process must not have imported aoffload, and must have no other thread. Errors of the
    call itself (such as `PatchDoesNotApply`) raise here, so that they never look like a defect that was found.
    """
    _require_not_imported()
    _require_alone()
    planted = None if mutant is None else _finder(mutant)
    began_s = time.monotonic()
    reader, writer = os.pipe()
    with tempfile.TemporaryFile() as output:
        pid = os.fork()
        if not pid:
            os.close(reader)
            _serve(function_path, argument, planted, writer, output)
        os.close(writer)
        ending, message = _await(pid, reader, began_s + timeout_s)
        result = _result(ending, message, _reap(pid))
        return attrs.evolve(result, output=_tail(output), duration_s=time.monotonic() - began_s)


def _serve(function_path: str, argument: JSON, planted: _Finder | None, writer: int, output: IO[bytes]) -> NoReturn:
    """The child's body: it writes its result or error in one line, and in any case exits here."""
    try:
        os.setsid()  # so that processes which it starts end with it
        resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES))
        for stream in (1, 2):
            os.dup2(output.fileno(), stream)
        message = _call(function_path, argument, planted)
        sys.stdout.flush()
        with os.fdopen(writer, "w") as pipe:
            pipe.write(json.dumps(message) + "\n")
    finally:
        os._exit(0)


def _call(function_path: str, argument: JSON, planted: _Finder | None) -> dict[str, JSON]:
    try:
        if planted is not None:
            sys.meta_path.insert(0, planted)
        module, _, function = function_path.partition(":")
        value = getattr(importlib.import_module(module), function)(argument)
        return {"value": json.loads(json.dumps(value))}
    except BaseException as error:  # noqa: BLE001 - that is the result; SystemExit and cancellations, too
        traceback.print_exc()
        return {"error": "".join(traceback.format_exception_only(error)).strip()}


def _await(pid: int, reader: int, deadline_s: float) -> tuple[Ending, bytes]:
    """Read until a whole line has come, the child has ended (what it started may keep the pipe open), or time is up."""
    message = b""
    os.set_blocking(reader, False)
    process = os.pidfd_open(pid)
    try:
        while not message.endswith(b"\n"):
            ready, _, _ = select.select([reader, process], [], [], max(0.0, deadline_s - time.monotonic()))
            if not ready:
                return Ending.TIMED_OUT, b""
            read = _read(reader)
            if not read and process in ready:
                return Ending.CRASHED, b""
            message += read
        return Ending.RETURNED, message
    finally:
        os.close(reader)
        os.close(process)


def _read(reader: int) -> bytes:
    try:
        return os.read(reader, 1 << 16)
    except BlockingIOError:
        return b""


def _reap(pid: int) -> str:
    """Kill the child and everything that it has started. Returns how it ended, in words."""
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        os.kill(pid, signal.SIGKILL)  # it has not reached its `setsid`
    _, status = os.waitpid(pid, 0)
    code = os.waitstatus_to_exitcode(status)
    return f"exit status {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"


def _result(ending: Ending, message: bytes, status: str) -> ChildResult:
    if ending is not Ending.RETURNED:
        return ChildResult(ending, detail=status if ending is Ending.CRASHED else ending.value)
    message_read = json.loads(message)
    if "error" in message_read:
        return ChildResult(Ending.RAISED, detail=message_read["error"])
    return ChildResult(ending, message_read["value"])


def _tail(output: IO[bytes]) -> str:
    size = output.seek(0, os.SEEK_END)
    output.seek(max(0, size - OUTPUT_BYTES))
    return output.read().decode(errors="replace")
