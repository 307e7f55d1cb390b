"""KV events for cache-aware routers, in the format that vLLM publishes (extra `events`). See docs/kv_events.md."""

from .._extras import needed

with needed("events", "aoffload.kv_events"):
    from .format import EventFormat
    from .publisher import KVEventPublisher

__all__ = ["EventFormat", "KVEventPublisher"]
