"""Public names around `HostCache`, which is in `aoffload` itself.

For engines that have their own block pool and prefix cache: the protocols that such an engine implements, and the
values and events that it receives. docs/engines.md is the guide. Importing this module does not import torch.
"""

from ._host_cache.events import LoadsPaused, LoadsResumed
from ._host_cache.protocols import EngineBlocks, FindsBlocks
from ._host_cache.requests import HostCacheRequest
from ._runtime.loading import EnginePendingLoad
from ._runtime.request import EngineRequest

__all__ = [
    "EngineBlocks",
    "EnginePendingLoad",
    "EngineRequest",
    "FindsBlocks",
    "HostCacheRequest",
    "LoadsPaused",
    "LoadsResumed",
]
