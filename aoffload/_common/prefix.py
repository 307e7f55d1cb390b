"""The identity of KV: root keys, token ids and key spans, in one canonical encoding.

Two prompts share a block only if everything that the KV of the block depends on is equal: the model and its settings
(the namespace), the tenant (`cache_salt`), the adapter (`adapter_key`), all token ids up to the end of the block, and
the content that placeholder tokens stand for (`key_spans`). If an administrator has set a weights' epoch, the epoch
is part of the root as well. The encoding is canonical: equal identities have equal bytes, and different identities have
different bytes:

    root      each key with its type and its length, so that no two pairs of keys run together to the same bytes
    epoch     another mark, the digest of the root without an epoch, the name of the epoch
    tokens    little-endian int32, 4 bytes an id
    spans     a mark that no token id encodes to, the two positions, the length of the digest, the digest

The digest of a prefix is SHA-256 over the digest of the root and every block up to its end. It does not depend on how
the index cut its runs, so the same prefix has the same digest in every tier and every process.

Callers may change their arrays after a call, so the ids are copied. An array is copied in one call. A list is read id
by id, which could block the event loop for milliseconds, so a long list is read in slices, on entering (`LongList`).
"""

from __future__ import annotations

import hashlib
import struct
from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol, TypeAlias, TypedDict

import attrs
import numpy as np

from .._common.arguments import as_tuple, check_text, check_type, shown
from ..errors import InvalidArgument


class Hasher(Protocol):
    """A running hash of `hashlib`."""

    def copy(self) -> Hasher: ...
    def update(self, data: bytes | memoryview, /) -> None: ...
    def digest(self) -> bytes: ...


TokenIds: TypeAlias = "Sequence[int] | np.ndarray[Any, Any] | bytes | Any"

TOKEN_BYTES = 4
MAX_TOKEN_ID = 2**31 - 1
INT32 = np.dtype("<i4")
MAX_LIST = 2**13
"""Maximum ids of a list that are encoded in one go, in about a tenth of a millisecond."""
MAX_WITHOUT_NUMPY = 16
"""Up to this many ids, a loop is faster than numpy. Most commits append none or one."""
MAX_CHECKED_AS_BYTES = 2**11
"""Up to this many ids, looking for a negative id in the encoded bytes is faster than with numpy."""
# No token id encodes to this, so a span record can never be mistaken for tokens.
_SPAN_MARK = b"\xff\xff\xff\xff"
_KEY_TYPES = (str, bytes)
_KEY_OR_NONE = (*_KEY_TYPES, type(None))


@attrs.frozen(order=True)
class KeySpan:
    """Tokens `[start, stop)` are placeholders for other content: an image, audio, an embedding.

    `digest` identifies that content. Two prompts whose placeholder tokens are equal but whose spans differ never share
    a block that a span touches.
    """

    start: int
    stop: int
    digest: bytes

    def __attrs_post_init__(self) -> None:
        if type(self.digest) is not bytes and isinstance(self.digest, bytes):
            object.__setattr__(self, "digest", plain(self.digest))

    def record(self) -> bytes:
        return _SPAN_MARK + struct.pack("<qqq", self.start, self.stop, len(self.digest)) + self.digest


class Identity(TypedDict, total=False):
    """The arguments that identify KV in addition to the token ids. KV is shared only if all of them are equal."""

    cache_salt: str | bytes | None
    """For example the tenant. Default: None."""
    adapter_key: str | bytes | None
    """For example the name and version of a LoRA adapter. Default: None."""
    key_spans: Iterable[KeySpan]
    """The content that placeholder tokens stand for. Default: none."""


@attrs.frozen
class Root:
    """The root keys. Prompts with different root keys share no blocks."""

    namespace: str = attrs.field(eq=False)
    cache_salt: str | bytes | None = attrs.field(default=None, eq=False)
    adapter_key: str | bytes | None = attrs.field(default=None, eq=False)
    weights_epoch: str | None = attrs.field(default="", init=False, eq=False, repr=False)
    """The weights' epoch of the KV. Empty if none was set, None if unknown (`of_digest`). Only `under_weights` sets
    it."""
    base: Root | None = attrs.field(default=None, init=False, eq=False, repr=False)
    """The root of the same keys without an epoch; None if this root has no epoch."""
    digest: bytes = attrs.field(init=False, repr=False)
    """SHA-256 of the encoded keys. It replaces the keys in places where they must not be written, such as a file."""
    hasher: Hasher = attrs.field(init=False, eq=False, repr=False)
    """The hash state of `digest`. The hash of every prefix under this root starts from it. Copy it, never update it."""

    def __attrs_post_init__(self) -> None:
        self._stand_for(hashlib.sha256(self._encode()).digest())

    @classmethod
    def of_digest(cls, digest: bytes) -> Root:
        """The root with this digest. Its keys are unknown, so they are left empty."""
        found = cls("")
        object.__setattr__(found, "weights_epoch", None)
        found._stand_for(digest)
        return found

    def under_weights(self, epoch: str) -> Root:
        """The root of the same keys, for KV of the weights' epoch `epoch`. If `epoch` is empty, the result is the root
        without an epoch, whose digest a disk or a remote store may already have."""
        base = self.base or self
        if not epoch:
            return base
        found = Root(base.namespace, base.cache_salt, base.adapter_key)
        object.__setattr__(found, "weights_epoch", epoch)
        object.__setattr__(found, "base", base)
        found._stand_for(hashlib.sha256(b"aoffload weights 1" + base.digest + _utf8("epoch", epoch)).digest())
        return found

    def _stand_for(self, digest: bytes) -> None:
        object.__setattr__(self, "digest", digest)
        object.__setattr__(self, "hasher", hashlib.sha256(digest))

    def _encode(self) -> bytes:
        parts = [b"aoffload prefix 1"]
        for name in ("namespace", "cache_salt", "adapter_key"):
            value = getattr(self, name)
            if value is None and name != "namespace":
                parts.append(b"n")
                continue
            if not isinstance(value, _KEY_TYPES):
                raise InvalidArgument(name, f"must be str, bytes or None, got {type(value).__name__}")
            value = plain(value)
            object.__setattr__(self, name, value)
            kind, raw = (b"s", _utf8(name, value)) if isinstance(value, str) else (b"b", value)
            parts.append(kind + struct.pack("<q", len(raw)) + raw)
        return b"".join(parts)


class Roots:
    """Cache of the roots of one namespace, with their hash states.

    Callers choose the number and length of their keys, so the cache is bounded: it keeps at most `MAX_KEPT` roots, and
    none whose keys are longer than `MAX_KEY` together.
    """

    MAX_KEPT = 1024
    MAX_KEY = 256

    def __init__(self, namespace: str) -> None:
        self._namespace = namespace
        self._kept: dict[tuple[Any, Any], Root] = {}

    def __len__(self) -> int:
        return len(self._kept)

    def of(self, cache_salt: Any, adapter_key: Any) -> Root:
        """The root of these keys. `InvalidArgument` names the key that is invalid."""
        is_plain = type(cache_salt) in _KEY_OR_NONE and type(adapter_key) in _KEY_OR_NONE  # others may hash differently
        root = self._kept.get((cache_salt, adapter_key)) if is_plain else None
        if root is None:
            root = Root(self._namespace, cache_salt, adapter_key)
            if not is_plain:
                return root
            if len(cache_salt or "") + len(adapter_key or "") <= self.MAX_KEY:
                if len(self._kept) >= self.MAX_KEPT:
                    self._kept.clear()
                self._kept[cache_salt, adapter_key] = root
        return root


def plain(key: str | bytes) -> str | bytes:
    """`key` as a plain str or bytes: a subclass may override its methods, and raise in another request's call."""
    return str.__str__(key) if isinstance(key, str) else bytes.join(b"", (key,))


MAX_EPOCH = 256
"""Maximum characters of a weights' epoch."""


def check_epoch(name: str, value: object) -> str:
    """`value` as plain text. `InvalidArgument` naming the argument `name` unless it can be a weights' epoch: text of at
    most `MAX_EPOCH` characters."""
    epoch = check_text(name, value)
    if len(epoch) > MAX_EPOCH:
        raise InvalidArgument(name, f"has {len(epoch):,} characters, more than {MAX_EPOCH}")
    _utf8(name, epoch)
    return epoch


def _utf8(name: str, value: str) -> bytes:
    try:
        return value.encode()
    except UnicodeEncodeError as error:
        raise InvalidArgument(name, "is not valid text (a lone surrogate)") from error


@attrs.frozen
class Prefix:
    """A prompt, copied and encoded. `tokens` are little-endian int32."""

    root: Root
    tokens: bytes
    spans: tuple[KeySpan, ...] = ()

    def __attrs_post_init__(self) -> None:
        if not isinstance(self.root, Root):
            check_type("root", self.root, Root)
        if not isinstance(self.tokens, bytes) or len(self.tokens) % TOKEN_BYTES or not self.tokens:
            raise InvalidArgument("tokens", f"must be encoded ids in bytes (see Prefix.of), got {shown(self.tokens)}")
        if type(self.spans) is not tuple or (self.spans and not all(isinstance(span, KeySpan) for span in self.spans)):
            raise InvalidArgument("spans", f"must be a tuple of KeySpan, got {shown(self.spans)}")

    @classmethod
    def of(cls, root: Root, token_ids: TokenIds, key_spans: Iterable[KeySpan] = ()) -> Prefix:
        """Copy and check `token_ids` (one dimension, at least one id, each in `[0, 2**31)`) and `key_spans`."""
        return cls._checked(root, encode_tokens(token_ids), key_spans)

    @classmethod
    def _checked(cls, root: Root, tokens: bytes, key_spans: Iterable[KeySpan]) -> Prefix:
        if not tokens:
            raise InvalidArgument("token_ids", "is empty: at least one token has to be computed")
        spans = () if isinstance(key_spans, tuple) and not key_spans else as_tuple("key_spans", key_spans, "KeySpan")
        if spans:
            _check_spans(spans, len(tokens) // TOKEN_BYTES)
        return cls(root, tokens, spans)

    @property
    def num_tokens(self) -> int:
        return len(self.tokens) // TOKEN_BYTES


@attrs.frozen
class LongList:
    """A prompt given as a list of more than `MAX_LIST` ids, to be read in slices."""

    root: Root
    token_ids: Sequence[int]
    key_spans: Iterable[KeySpan]

    def slices(self) -> Iterator[bytes]:
        """The ids, encoded and checked, up to `MAX_LIST` at a time. The list must not change meanwhile."""
        for at in range(0, len(self.token_ids), MAX_LIST):
            yield encode_tokens(self.token_ids[at : at + MAX_LIST])

    def prefix(self, slices: Iterable[bytes]) -> Prefix:
        """The prefix of the whole list, as `Prefix.of`, from its encoded `slices`."""
        return Prefix._checked(self.root, b"".join(slices), self.key_spans)


def prompt_of(root: Root, token_ids: TokenIds, key_spans: Iterable[KeySpan] = ()) -> Prefix | LongList:
    """The prefix, or a `LongList` that has to be read first."""
    if isinstance(token_ids, (list, tuple)) and len(token_ids) > MAX_LIST:
        return LongList(root, token_ids, key_spans)
    return Prefix._checked(root, encode_tokens(token_ids), key_spans)


def encode_tokens(token_ids: TokenIds, argument: str = "token_ids") -> bytes:
    """`token_ids` as little-endian int32 bytes. `InvalidArgument` naming `argument` if they are no token ids."""
    if isinstance(token_ids, (tuple, list)) and len(token_ids) <= MAX_WITHOUT_NUMPY and _are_token_ids(token_ids):
        return array("i", token_ids).tobytes()
    if not isinstance(token_ids, np.ndarray):
        token_ids = _as_array(token_ids, argument)
    if token_ids.ndim != 1:
        got = f"shape {token_ids.shape}" if token_ids.ndim else "a single value"
        raise InvalidArgument(argument, f"must be a sequence of integers, in one dimension, got {got}")
    if token_ids.size == 0:
        return b""
    if token_ids.dtype == INT32:
        encoded = token_ids.tobytes()
        if token_ids.size <= MAX_CHECKED_AS_BYTES:  # the sign is the highest bit of the last byte of each id
            is_valid = encoded[TOKEN_BYTES - 1 :: TOKEN_BYTES].isascii()
        else:
            is_valid = np.minimum.reduce(token_ids) >= 0
        if not is_valid:
            raise InvalidArgument(argument, "holds a negative id")
        return encoded
    if token_ids.dtype.kind not in "iu":
        raise InvalidArgument(argument, f"must be integers, got dtype {token_ids.dtype}")
    if token_ids.dtype.kind == "i" and token_ids.min() < 0:
        raise InvalidArgument(argument, "holds a negative id")
    if token_ids.dtype.itemsize >= TOKEN_BYTES and token_ids.max() > MAX_TOKEN_ID:
        raise InvalidArgument(argument, f"holds an id above {MAX_TOKEN_ID}")
    return token_ids.astype("<i4", copy=False).tobytes()


def _are_token_ids(token_ids: Sequence[object]) -> bool:
    """Whether all are plain ints in range. If not, the path for arrays raises the error."""
    for token in token_ids:  # noqa: SIM110 - a generator costs more than this loop
        if type(token) is not int or not 0 <= token <= MAX_TOKEN_ID:
            return False
    return True


def _as_array(token_ids: TokenIds, argument: str) -> np.ndarray[Any, Any]:
    if isinstance(token_ids, (str, bytes, bytearray)):
        raise InvalidArgument(argument, f"must be a sequence of integers, got {type(token_ids).__name__}")
    try:
        found = np.asarray(token_ids)
    except Exception as error:  # `__array__` and `__len__` may run any code
        raise InvalidArgument(argument, f"cannot be read as integers: {type(error).__name__}: {error}") from error
    if found.dtype.kind == "O" and found.ndim == 1 and all(isinstance(token, int) for token in found):
        raise InvalidArgument(argument, "holds an id outside of [0, 2**31)")
    return found if found.size else found.astype(np.int32)


def _check_spans(spans: tuple[KeySpan, ...], num_tokens: int) -> None:
    last = 0
    for index, span in enumerate(spans):
        where = f"key_spans[{index}]"
        if not isinstance(span, KeySpan):
            raise InvalidArgument(where, f"must be a KeySpan, got {type(span).__name__}")
        if not (_is_int(span.start) and _is_int(span.stop) and isinstance(span.digest, bytes)):
            raise InvalidArgument(where, "needs integer start and stop and a digest in bytes")
        if not 0 <= span.start < span.stop:
            raise InvalidArgument(where, f"is reversed, empty or negative: [{span.start}, {span.stop})")
        if span.stop > num_tokens:
            raise InvalidArgument(where, f"ends at {span.stop}, after the last of {num_tokens} tokens")
        if span.start < last:
            raise InvalidArgument(where, f"starts at {span.start}, inside or before the span that ends at {last}")
        last = span.stop


def _is_int(value: object) -> bool:
    return type(value) is int
