"""Public names of the object stores for a remote tier, and the protocol for a store of your own."""

from ._config.tiers import ObjectStore
from ._tiers.remote.clients.mooncake_store import MooncakeStore
from ._tiers.remote.clients.obstore_store import ObstoreStore
from ._tiers.remote.clients.redis import RedisClusterStore, RedisStore
from .errors import StoreError

__all__ = [
    "MooncakeStore",
    "ObjectStore",
    "ObstoreStore",
    "RedisClusterStore",
    "RedisStore",
    "StoreError",
]
