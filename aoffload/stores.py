"""Public names of the stores that a remote tier may use, and what a store of your own has to be."""

from .errors import StoreError
from .object_stores.mooncake_store import MooncakeStore
from .object_stores.obstore_store import ObstoreStore
from .object_stores.redis_cluster import RedisClusterStore
from .object_stores.redis_store import RedisStore
from .remote_tier import ObjectStore

__all__ = [
    "MooncakeStore",
    "ObjectStore",
    "ObstoreStore",
    "RedisClusterStore",
    "RedisStore",
    "StoreError",
]
