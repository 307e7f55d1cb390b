"""KV events for cache-aware routers, in the format that vLLM publishes (extra `events`). See docs/kv_events.md."""

from .format import EventFormat
from .publisher import KVEventPublisher

__all__ = ["EventFormat", "KVEventPublisher"]
