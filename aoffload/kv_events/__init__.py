"""KV events for cache-aware routers, in the format that vLLM publishes (extra `events`). See docs/kv_events.md."""

from .._common.extras import needed

with needed("events", "aoffload.kv_events"):
    from .._observe.kv_events.format import EventFormat
    from .._observe.kv_events.publisher import KVEventPublisher

__all__ = ["EventFormat", "KVEventPublisher"]
