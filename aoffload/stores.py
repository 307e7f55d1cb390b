"""Public names of the stores that a remote tier may use, and what a store of your own has to be."""

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
