"""The typed errors of the public API. Errors about an argument name it."""

from __future__ import annotations

from typing import Any

__all__ = [
    "AoffloadError",
    "CommitError",
    "ConfigError",
    "DeviceGone",
    "DuplicateRequest",
    "ExtensionError",
    "IllegalTransition",
    "IntegrityError",
    "InvalidArgument",
    "LeaseError",
    "MissingExtra",
    "OutOfBlocks",
    "RegionError",
    "RegionNotLoaded",
    "RequestAborted",
    "RuntimeClosed",
    "StoreError",
    "TransferRefused",
    "UnsupportedVersion",
    "WireError",
    "WrongProcess",
    "WrongState",
    "WrongThread",
]


class AoffloadError(Exception):
    """Base class of all errors that this package raises on purpose."""


class InvalidArgument(AoffloadError, ValueError):  # noqa: N818 - the name says what the error means
    """An argument that is invalid in every state of the runtime."""

    def __init__(self, argument: str, problem: str) -> None:
        super().__init__(f"{argument}: {problem}")
        self.argument = argument
        self.problem = problem


class ConfigError(InvalidArgument):
    """A configuration that cannot work; raised before anything is allocated."""


class RegionError(InvalidArgument):
    """A KV tensor or region that a block id cannot address."""


class CommitError(InvalidArgument):
    """A commit that goes backwards, past the allocated blocks, or past the known tokens."""


class DuplicateRequest(InvalidArgument):
    """A request id that a live request already has."""


class MissingExtra(AoffloadError, ModuleNotFoundError):  # noqa: N818
    """An optional package is not installed. `name` is the missing module, and `extra` is the extra that installs it.
    The message has the command to install it."""

    def __init__(self, extra: str, module: str, user: str) -> None:
        # vLLM brings this package along, not the other way round.
        install = "vllm" if extra == "vllm" else f"'aoffload[{extra}]'"
        super().__init__(f"{user} needs {module}, which is not installed: pip install {install}", name=module)
        self.extra = extra


class UnsupportedVersion(AoffloadError, ImportError):  # noqa: N818
    """The installed version of a package lacks a part that aoffload uses. The message names `version` and a remedy."""

    def __init__(self, module: str, version: str, lacks: str, user: str, advice: str) -> None:
        found = f"{module} {version}".rstrip()
        super().__init__(f"{user} does not work with {found}, which has no {lacks}: {advice}", name=module)
        self.version = version


class OutOfBlocks(AoffloadError):  # noqa: N818
    """Too few blocks are available. `retryable`: whether the end of other requests or pins could free enough blocks."""

    def __init__(self, num_needed: int, num_available: int, *, retryable: bool, argument: str = "num_tokens") -> None:
        advice = "retry when other requests or pins have released blocks" if retryable else "it can never fit"
        super().__init__(f"{argument}: {num_needed} blocks needed, {num_available} available; {advice}")
        self.num_needed = num_needed
        self.num_available = num_available
        self.retryable = retryable


class WrongState(AoffloadError):  # noqa: N818
    """A call that this state of the request does not allow. Nothing was changed."""


class IllegalTransition(WrongState):
    """A state change that the state table does not allow."""

    def __init__(self, entity: str, old: str, new: str) -> None:
        super().__init__(f"{entity}: cannot change from {old} to {new}")
        self.entity = entity
        self.old = old
        self.new = new


class LeaseError(WrongState):
    """A lease released twice."""


class ExtensionError(AoffloadError):
    """A hook of an extension has raised an error, called a method of the ledger, or returned an invalid answer.

    The call that raises this error has made its change, but all queued copies are discarded, and a request or a pin
    that the call would have returned has ended. `__cause__` is the original error. `readers` are the requests that
    `invalidate` would have returned: abort them.
    """

    def __init__(self, extension: str, hook: str, problem: str) -> None:
        super().__init__(f"{extension}.{hook} {problem}")
        self.extension = extension
        self.hook = hook
        self.readers: tuple[Any, ...] = ()


class RequestAborted(AoffloadError):  # noqa: N818
    """A request was aborted: in `OffloadRuntime.run` before its function returned, or in an async generator before the
    next use of the request."""

    def __init__(self, request_id: str, reason: str) -> None:
        super().__init__(f"request {request_id} aborted: {reason}")
        self.request_id = request_id
        self.reason = reason


class RuntimeClosed(AoffloadError):  # noqa: N818
    """The runtime is closed, or was never opened."""


class WrongThread(AoffloadError):  # noqa: N818
    """A call from a thread other than that of the event loop."""


class WrongProcess(AoffloadError):  # noqa: N818
    """A call in a forked child process, which has neither the copy threads nor the device memory."""


class TransferRefused(AoffloadError):  # noqa: N818
    """A transport could not start a transfer or a thread, or could not record a fence. Nothing was started, so no
    completion follows."""


class DeviceGone(TransferRefused):
    """The device, or one of several ranks, is lost, so the transport starts nothing any more."""


class StoreError(AoffloadError):
    """A call to an `ObjectStore` failed, because the store is unreachable, too slow or full. The call may have had an
    effect."""


class RegionNotLoaded(AoffloadError):  # noqa: N818
    """A load ended before this region was copied, or the wait was given up. The content of the destination is
    undefined."""


class WireError(AoffloadError):
    """The deciding process or a rank has received bytes that are not a valid frame, or a value does not fit into a
    frame."""


class IntegrityError(AoffloadError, AssertionError):
    """`check_integrity` found a broken invariant; the message names it."""
