"""The typed errors of the public API. Each says what was wrong by the name of the argument."""

from __future__ import annotations

__all__ = [
    "AoffloadError",
    "CommitError",
    "ConfigError",
    "DeviceGone",
    "DuplicateRequest",
    "IllegalTransition",
    "IntegrityError",
    "InvalidArgument",
    "LeaseError",
    "OutOfBlocks",
    "RegionError",
    "RegionNotLoaded",
    "RequestAborted",
    "RuntimeClosed",
    "TransferRefused",
    "WireError",
    "WrongProcess",
    "WrongState",
    "WrongThread",
]


class AoffloadError(Exception):
    """Everything this package raises on purpose."""


class InvalidArgument(AoffloadError, ValueError):  # noqa: N818 - reads as what it is at the call
    """An argument that no state of the runtime would make valid."""

    def __init__(self, argument: str, problem: str) -> None:
        super().__init__(f"{argument}: {problem}")
        self.argument = argument
        self.problem = problem


class ConfigError(InvalidArgument):
    """A configuration that cannot work; raised before anything is allocated."""


class RegionError(InvalidArgument):
    """A KV tensor or region that a block id cannot address."""


class CommitError(InvalidArgument):
    """A commit that goes backwards, past what was allocated, or past the tokens that are known."""


class DuplicateRequest(InvalidArgument):
    """A request id that a live request already has."""


class OutOfBlocks(AoffloadError):  # noqa: N818
    """There is no room. `retryable` tells whether letting go of other requests would make some."""

    def __init__(self, num_needed: int, num_available: int, *, retryable: bool) -> None:
        advice = "retry when others have let go" if retryable else "it can never fit"
        super().__init__(f"num_tokens: {num_needed} blocks needed, {num_available} to be had; {advice}")
        self.num_needed = num_needed
        self.num_available = num_available
        self.retryable = retryable


class WrongState(AoffloadError):  # noqa: N818
    """A call that this state of the request does not allow. Nothing was changed."""


class IllegalTransition(WrongState):
    """A move that the state table does not have."""

    def __init__(self, entity: str, old: str, new: str) -> None:
        super().__init__(f"{entity}: no move from {old} to {new}")
        self.entity = entity
        self.old = old
        self.new = new


class LeaseError(WrongState):
    """A lease released twice."""


class RequestAborted(AoffloadError):  # noqa: N818
    """The request of `OffloadRuntime.run` was aborted before its function returned, or that of an async generator
    before it was used again."""

    def __init__(self, request_id: str, reason: str) -> None:
        super().__init__(f"request {request_id} aborted: {reason}")
        self.request_id = request_id
        self.reason = reason


class RuntimeClosed(AoffloadError):  # noqa: N818
    """The runtime is closed, or was never opened."""


class WrongThread(AoffloadError):  # noqa: N818
    """A call from another thread than the one the event loop runs in."""


class WrongProcess(AoffloadError):  # noqa: N818
    """A call in a forked child: neither the copy thread nor the device memory came along."""


class TransferRefused(AoffloadError):  # noqa: N818
    """A transport could not start a transfer. Nothing was started, so nothing has to be waited for."""


class DeviceGone(TransferRefused):
    """A refusal that is final: the device, or one of several ranks, is lost, and nothing will ever be started on it."""


class RegionNotLoaded(AoffloadError):  # noqa: N818
    """A load ended before this region was copied: what its destination holds is anybody's guess."""


class WireError(AoffloadError):
    """Bytes between the deciding process and a rank that are no frame, or a value that no frame can hold."""


class IntegrityError(AoffloadError, AssertionError):
    """`check_integrity` found a broken invariant; the message names it."""
