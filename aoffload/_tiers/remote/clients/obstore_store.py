"""Objects in object storage, in a directory or in memory, through obstore."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any, Self

from ...._common.arguments import check_has, check_text, number_of, shown
from ...._common.extras import needed
from ....errors import ConfigError, StoreError

HEADS_AT_ONCE = 16
DEFAULT_S = 2.0


class ObstoreStore:
    """An `ObjectStore` in `store`, one of `obstore.store`: S3, Google, Azure, a directory, memory. Needs the extra
    `object-storage`.

    obstore has one time-out for each store, which `from_url` sets, and no time-out for a single call. The name of an
    object is `prefix`, a slash and 64 hexadecimal digits. aoffload does not evict objects: let the bucket expire them
    by age.
    """

    def __init__(self, store: Any, *, prefix: str = "aoffload") -> None:
        with needed("object-storage", "a store in object storage"):
            import obstore
        check_has("store", store, "store of obstore", "get put head delete", ConfigError)
        self._failures = (obstore.exceptions.BaseError, OSError, ValueError)
        self._store, self._prefix = store, check_text("prefix", prefix)
        self._lock = threading.Lock()
        self._heads: ThreadPoolExecutor | None = None

    @classmethod
    def from_url(cls, url: str, *, timeout_s: float = DEFAULT_S, prefix: str = "aoffload", **options: Any) -> Self:
        """A store from a URL: `s3://bucket`, `gs://bucket`, `az://container`, `file:///path` or `memory:///`. `options`
        are those of `obstore.store.from_url`. No call takes longer than `timeout_s`, and no call is retried."""
        with needed("object-storage", "a store in object storage"):
            import obstore
        seconds = number_of(timeout_s)
        if seconds is None or not 0 < seconds <= 3600:
            raise ConfigError("timeout_s", f"must be a positive number of seconds, got {shown(timeout_s)}")
        scheme = check_text("url", url).partition(":")[0]
        if scheme not in ("file", "memory"):
            bound = f"{max(1, round(seconds * 1000))}ms"
            client = {"timeout": bound, "connect_timeout": bound, **options.pop("client_options", {})}
            options = {"retry_config": {"max_retries": 0}, "client_options": client, **options}
        try:
            store = obstore.store.from_url(url, **options)
        except (obstore.exceptions.BaseError, OSError, ValueError, TypeError) as error:
            raise ConfigError("url", f"is not a {scheme} URL that obstore accepts: {error}") from error
        return cls(store, prefix=prefix)

    def __repr__(self) -> str:
        return f"<ObstoreStore {type(self._store).__name__}>"

    def node_of(self, key: bytes) -> str:
        return type(self._store).__name__

    def exist(self, keys: Sequence[bytes], timeout_s: float) -> list[bool]:
        """Runs up to 16 calls at a time, because obstore has no call for several keys."""
        if len(keys) == 1:
            return [self._has(keys[0])]
        asked = [self._pool().submit(self._has, key) for key in keys]
        _, unanswered = wait(asked, timeout_s)
        for each in unanswered:
            each.cancel()
        if unanswered:
            raise StoreError(f"{len(unanswered)} of {len(keys)} existence checks took longer than {timeout_s} s")
        return [each.result() for each in asked]

    def get(self, key: bytes, timeout_s: float) -> memoryview | None:
        try:
            return memoryview(self._store.get(self._path(key)).bytes())
        except FileNotFoundError:
            return None
        except self._failures as error:
            raise StoreError(str(error)) from error

    def put(self, key: bytes, value: memoryview, timeout_s: float) -> None:
        try:  # a copy, because a store in memory keeps the object that it receives
            self._store.put(self._path(key), bytes(value), use_multipart=False)
        except self._failures as error:
            raise StoreError(str(error)) from error

    def remove(self, key: bytes, timeout_s: float) -> None:
        try:
            self._store.delete(self._path(key))
        except FileNotFoundError:
            return
        except self._failures as error:
            raise StoreError(str(error)) from error

    def close(self) -> None:
        with self._lock:
            heads, self._heads = self._heads, None
        if heads is not None:
            heads.shutdown(wait=False, cancel_futures=True)

    def _has(self, key: bytes) -> bool:
        try:
            self._store.head(self._path(key))
        except FileNotFoundError:
            return False
        except self._failures as error:
            raise StoreError(str(error)) from error
        return True

    def _pool(self) -> ThreadPoolExecutor:
        with self._lock:
            if self._heads is None:
                self._heads = ThreadPoolExecutor(HEADS_AT_ONCE, "aoffload-heads")
            return self._heads

    def _path(self, key: bytes) -> str:
        return f"{self._prefix}/{key.hex()}"
