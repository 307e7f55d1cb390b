"""Guards around the code of programs that the kernel calls: the hooks of extensions, and eviction orders."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from .._common.arguments import shown
from .._common.tiers import Tier
from ..errors import ExtensionError, WrongState
from .extension import HOOKS, LedgerExtension
from .layout import Component
from .protocols import EvictionOrder
from .records import Job, Lease, LedgerRequest, Part, Run
from .tokens import TokenSequence

MAY_RAISE = (
    "on_build", "on_attach", "ask_admit", "ask_commit", "report_blocks", "report_job", "report_leases",
    "report_requests",
)  # fmt: skip
"""Hooks whose exceptions the ledger passes on, because it has changed nothing when it calls them."""
_NOTHING: tuple[Any, ...] = ()


class Hooks:
    """One tuple for each hook, in the order in which the extensions were added."""

    __slots__ = (
        "ask_admit", "ask_blocks", "ask_commit", "ask_deferred", "ask_first_wrong", "ask_former_readers",
        "ask_load_stop", "ask_next_lapse", "ask_store_stop", "ask_take", "calling", "error", "fail", "on_admitted",
        "on_allocated", "on_finishing", "on_invalidated", "on_job_settled", "on_lapse", "on_leaving", "on_load_over",
        "on_matched", "on_published", "on_released", "on_reset", "on_resetting", "on_sequence", "on_step",
        "on_withdrawn", "report_blocks", "report_error", "report_job", "report_leases", "report_requests",
    )  # fmt: skip

    def __init__(self, fail: Callable[[], object]) -> None:
        self.fail = fail
        """Called at the end of a call to raise `error`."""
        self.ask_admit: tuple[Callable[[LedgerRequest], object], ...] = _NOTHING
        self.on_admitted: tuple[Callable[[LedgerRequest, LedgerRequest | None], object], ...] = _NOTHING
        self.on_matched: tuple[Callable[[LedgerRequest], object], ...] = _NOTHING
        self.on_allocated: tuple[Callable[[LedgerRequest], object], ...] = _NOTHING
        self.on_load_over: tuple[Callable[[LedgerRequest], object], ...] = _NOTHING
        self.ask_commit: tuple[Callable[[LedgerRequest, int], object], ...] = _NOTHING
        self.on_published: tuple[Callable[[LedgerRequest, int], object], ...] = _NOTHING
        self.on_finishing: tuple[Callable[[LedgerRequest], object], ...] = _NOTHING
        self.on_leaving: tuple[Callable[[LedgerRequest, bool], object], ...] = _NOTHING
        self.on_released: tuple[Callable[[LedgerRequest], object], ...] = _NOTHING
        self.on_step: tuple[Callable[[LedgerRequest], object], ...] = _NOTHING
        self.on_sequence: tuple[Callable[[TokenSequence], object], ...] = _NOTHING
        self.on_job_settled: tuple[Callable[[Job], object], ...] = _NOTHING
        self.on_withdrawn: tuple[Callable[[], object], ...] = _NOTHING
        self.on_invalidated: tuple[Callable[[TokenSequence, int, int], list[Job]], ...] = _NOTHING
        self.on_resetting: tuple[Callable[[Tier | None], object], ...] = _NOTHING
        self.on_reset: tuple[Callable[[Tier | None], object], ...] = _NOTHING
        self.on_lapse: tuple[Callable[[float], object], ...] = _NOTHING
        self.ask_store_stop: tuple[Callable[[LedgerRequest], int], ...] = _NOTHING
        self.ask_load_stop: tuple[Callable[[LedgerRequest, int], int], ...] = _NOTHING
        self.ask_take: tuple[Callable[[Tier, Run, Component, int], int], ...] = _NOTHING
        self.ask_deferred: tuple[Callable[[Run, int], bool], ...] = _NOTHING
        self.ask_blocks: tuple[Callable[[], bool], ...] = _NOTHING
        self.ask_next_lapse: tuple[Callable[[], float], ...] = _NOTHING
        self.ask_first_wrong: tuple[Callable[[LedgerRequest, Mapping[LedgerRequest, int]], int | None], ...] = _NOTHING
        self.ask_former_readers: tuple[Callable[[], Iterable[LedgerRequest]], ...] = _NOTHING
        self.report_leases: tuple[Callable[[], Iterable[Lease]], ...] = _NOTHING
        self.report_requests: tuple[Callable[[], Iterable[LedgerRequest]], ...] = _NOTHING
        self.report_blocks: tuple[Callable[[Tier], Any], ...] = _NOTHING
        self.report_job: tuple[Callable[[Job], object], ...] = _NOTHING
        self.calling: str = ""
        """The name of the hook of a program's extension that is running. Empty: none is. Verbs are refused while one is
        running."""
        self.error: ExtensionError | None = None
        """The first error of a program's extension in this call, which raises it at its end."""
        self.report_error: Callable[[ExtensionError], object] | None = None
        """Called with each error of a program's extension, in place of raising it: see `CacheBase.report_errors`."""

    def add(self, extension: LedgerExtension, *, is_trusted: bool) -> None:
        """Add the hooks that `extension` overrides. The hooks of an extension that is not trusted are guarded: see
        `GuardedHook`."""
        for name in HOOKS:
            hook = getattr(extension, name)
            if name in ("on_build", "on_attach") or getattr(type(extension), name) is getattr(LedgerExtension, name):
                continue
            if not is_trusted:
                hook = GuardedHook(self, type(extension).__name__, name, hook)
            setattr(self, name, (*getattr(self, name), hook))

    def take_error(self) -> ExtensionError | None:
        """Return and forget the first error of a hook in this call, so that `end_call` does not raise it."""
        error, self.error = self.error, None
        return error

    def failed(self, extension: str, name: str, problem: str, cause: BaseException | None) -> None:
        """Report the error of a program's extension or eviction order, or keep it until the end of the call."""
        error = ExtensionError(extension, name, problem)
        error.__cause__ = cause
        if self.report_error is not None and not isinstance(cause, KeyboardInterrupt | SystemExit):
            self.report_error(error)
        elif self.error is None:
            self.error = error

    def refuse_verb(self) -> None:
        """Raise `WrongState` while a hook of a program's extension is running."""
        if self.calling:
            raise WrongState(f"{self.calling}: a hook must not call the ledger")


_NEUTRAL: Mapping[str, Any] = {
    "ask_store_stop": 2**62,
    "ask_deferred": False,
    "ask_blocks": False,
    "ask_next_lapse": float("inf"),
    "ask_former_readers": (),
    "on_invalidated": (),
}
"""The answers that replace those of hooks that have raised; None for all other hooks."""
_MANY: Mapping[str, type] = {
    "ask_former_readers": LedgerRequest,
    "report_leases": Lease,
    "report_requests": LedgerRequest,
    "report_blocks": array,
}
"""The hooks that answer with several objects, and the type of these objects."""


class GuardedHook:
    """A hook of a program's extension. It checks the answer of the hook, and keeps the first exception until the end of
    the call."""

    __slots__ = ("_extension", "_hook", "_hooks", "_name")

    def __init__(self, hooks: Hooks, extension: str, name: str, hook: Callable[..., Any]) -> None:
        self._hooks = hooks
        self._extension = extension
        self._name = name
        self._hook = hook

    def __call__(self, *args: Any) -> Any:
        hooks, before, cause = self._hooks, self._hooks.calling, None
        hooks.calling = f"{self._extension}.{self._name}"
        try:
            answer = self._hook(*args)
            if self._name in _MANY and isinstance(answer, Iterable):
                answer = tuple(answer)
        except BaseException as raised:
            if self._name in MAY_RAISE:
                raise
            problem, cause = f"has raised {raised!r}", raised
        else:
            if not self._is_wrong(answer):
                return answer
            problem = f"must not return {shown(answer)}"
        finally:
            hooks.calling = before
        if self._name in MAY_RAISE:
            raise ExtensionError(self._extension, self._name, problem)
        hooks.failed(self._extension, self._name, problem, cause)
        return args[-1] if self._name in ("ask_load_stop", "ask_take") else _NEUTRAL.get(self._name)

    def _is_wrong(self, answer: Any) -> bool:
        if self._name in ("ask_store_stop", "ask_load_stop", "ask_take"):
            return type(answer) is not int or answer < 0
        if self._name in ("ask_deferred", "ask_blocks"):
            return type(answer) is not bool
        if self._name == "ask_next_lapse":
            return type(answer) not in (int, float) or answer != answer
        if self._name == "ask_first_wrong":
            return answer is not None and (type(answer) is not int or answer < 0)
        if self._name == "on_invalidated":
            return type(answer) is not list or not all(isinstance(job, Job) for job in answer)
        if (kind := _MANY.get(self._name)) is not None:
            return type(answer) is not tuple or not all(isinstance(one, kind) for one in answer)
        return False


class GuardedOrder:
    """An eviction order of a program. Its methods are called in the middle of changes, which must be completed. So if a
    method raises, calls the ledger or answers wrongly, the tier evicts its parts in the order in which they were added
    from then on, and the error is handled like that of a hook."""

    def __init__(self, hooks: Hooks, order: EvictionOrder) -> None:
        self.name = type(order).__name__
        self._hooks = hooks
        self._order: EvictionOrder | None = order
        """None once it has failed."""
        self._parts: dict[Part, None] = {}

    def _call(self, method: str, *parts: Part) -> Any:
        if self._order is None:
            return None
        hooks, before = self._hooks, self._hooks.calling
        hooks.calling = f"{self.name}.{method}"
        try:
            return getattr(self._order, method)(*parts)
        except BaseException as error:  # noqa: BLE001 - a program's code
            self._fail(method, f"has raised {error!r}", error)
            return None
        finally:
            hooks.calling = before

    def _fail(self, method: str, problem: str, cause: BaseException | None = None) -> None:
        self._order = None
        self._hooks.failed(self.name, method, problem, cause)

    def add(self, part: Part) -> None:
        self._parts[part] = None
        self._call("add", part)

    def add_newer(self, part: Part, than: Part) -> None:
        self._parts[part] = None
        self._call("add_newer", part, than)

    def add_back(self, part: Part) -> None:
        self._parts[part] = None
        self._call("add_back", part)

    def remove(self, part: Part) -> None:
        del self._parts[part]
        self._call("remove", part)

    def oldest(self) -> Part | None:
        found = self._call("oldest")
        if isinstance(found, Part) and found in self._parts:
            return found
        if self._order is not None and (found is not None or self._parts):
            self._fail("oldest", f"must return one of its {len(self._parts)} parts, not {shown(found)}")
        return next(iter(self._parts), None)

    def are_adjacent(self, older: Part, newer: Part) -> bool:
        return self._call("are_adjacent", older, newer) is True

    def __iter__(self) -> Iterator[Part]:
        """All parts: those that the order yields, then those that it leaves out."""
        seen: dict[Part, None] = {}
        parts = self._call("__iter__")
        while self._order is not None:
            part = self._next(parts)
            if part is None:
                break
            if not isinstance(part, Part) or part not in self._parts or part in seen:
                self._fail("__iter__", f"yields {shown(part)}, which is not one of its parts or was yielded before")
                break
            seen[part] = None
            yield part
        yield from [part for part in self._parts if part not in seen]

    def _next(self, parts: Any) -> Any:
        hooks, before = self._hooks, self._hooks.calling
        hooks.calling = f"{self.name}.__iter__"
        try:
            return next(parts, None)
        except BaseException as error:  # noqa: BLE001 - a program's code
            self._fail("__iter__", f"has raised {error!r}", error)
            return None
        finally:
            hooks.calling = before
