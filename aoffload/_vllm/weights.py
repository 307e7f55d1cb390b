"""The weights' epoch under vLLM: it follows vLLM's own weight version.

vLLM has a text for the weights with which it computes, and calls that set it after an update of the weights. Only the
engine core knows the version, and vLLM passes it to no connector. So the connector reads the version at each hook of
the scheduler. vLLM sets the version between two steps, so the connector matches no request and stores nothing
between the change and its next read of the version.
"""

from __future__ import annotations

import weakref
from typing import Any


class WeightVersion:
    """vLLM's weight version as a weights' epoch."""

    def __init__(self, core: Any, first_epoch: str) -> None:
        """`core`: vLLM's engine core. `first_epoch`: the epoch of the version that `core` has now."""
        self._core, self._first_epoch = weakref.ref(core), first_epoch
        self._first = self._seen = core.get_weight_version()

    def changed(self) -> str | None:
        """The weights' epoch, if the version has changed since the last call; else None."""
        core = self._core()
        version = self._seen if core is None else core.get_weight_version()
        if version == self._seen:
            return None
        self._seen = version
        return self._first_epoch if version == self._first else version
