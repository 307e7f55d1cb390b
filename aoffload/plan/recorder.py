"""Records the requests of a process, without their tokens, for `aoffload plan`.

One JSON object per line, as in public traces. `timestamp` is in ms since the recorder began. Further fields are
`input_length`, `output_length`, `hash_ids` (the names of the prompt's whole blocks that were committed) and
`output_hash_ids` (the names of blocks that the answer completed). The first line has the block length. A name is a
keyed digest of the prefix up to the block's end (see `BlockDigests`), so it identifies equal prefixes and reveals
nothing else. With `tenants`, a line also has `tenant`: a name that the program gave, or a keyed digest of the salt.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from queue import SimpleQueue
from types import TracebackType
from typing import Any, Self, TextIO

import attrs

from .._common.arguments import check_int, check_type, shown
from .._common.env import Env
from .._common.prefix import TOKEN_BYTES, KeySpan, Root
from .._kernel.events import Event, RequestMoved
from .._kernel.records import LedgerRequest
from .._kernel.states import RequestState
from .._kernel.tokens import TokenSequence
from ..errors import InvalidArgument, TransferRefused

# -- digests ---------------------------------------------------------------------------------------------------------
#
# Names of blocks that reveal nothing about their tokens: a keyed digest of the prefix up to the end of each block.
#
# HMAC-SHA256 (RFC 2104) of the root's digest and all tokens so far, with the records of key spans, cut to 8 bytes. It
# is computed along the prefix: each block's digest continues from the state after the block before. Equal names mean
# equal prefixes. Without the secret, nothing else can be derived from them. With a million blocks per file, one in 37
# million files has two different blocks with the same name.

DIGEST_BYTES = 8
SHA256_BLOCK = 64
SALT = b"aoffload tenant 1"


class BlockDigests:
    """`secret`: at most 64 bytes, the key of all digests."""

    def __init__(self, secret: bytes, block_tokens: int) -> None:
        key = secret.ljust(SHA256_BLOCK, b"\0")
        self._inner = hashlib.sha256(bytes(byte ^ 0x36 for byte in key))
        self._outer = hashlib.sha256(bytes(byte ^ 0x5C for byte in key))
        self.block_tokens = block_tokens

    def of(self, root: Root, tokens: bytes, spans: Iterable[KeySpan] = ()) -> list[str]:
        """The names of the whole blocks of `tokens` (little-endian int32), in hexadecimal digits."""
        running = self._inner.copy()
        running.update(root.hasher.digest())
        width, given = self.block_tokens * TOKEN_BYTES, tuple(spans)
        names: list[str] = []
        for at in range(0, len(tokens) - width + 1, width):
            running.update(tokens[at : at + width])
            if given:
                first = at // TOKEN_BYTES
                running.update(_records(given, first, first + self.block_tokens))
            outer = self._outer.copy()
            outer.update(running.copy().digest())
            names.append(outer.digest()[:DIGEST_BYTES].hex())
        return names

    def of_salt(self, salt: str | bytes) -> str:
        """The name of a salt. No name of a block is made of these bytes."""
        inner, outer = self._inner.copy(), self._outer.copy()
        inner.update(SALT + (b"s" + salt.encode() if isinstance(salt, str) else b"b" + salt))
        outer.update(inner.digest())
        return outer.digest()[:DIGEST_BYTES].hex()


def _records(spans: Sequence[KeySpan], start: int, stop: int) -> bytes:
    """Records of the spans that touch tokens `[start, stop)`. No record is encoded like tokens."""
    return b"".join(span.record() for span in spans if span.start < stop and span.stop > start)


# -- recorder --------------------------------------------------------------------------------------------------------

FORMAT = 1
MAX_BLOCK_TOKENS = 2**20
MAX_TEXT = 256
"""Maximum characters of a text of a line, such as the name of a tenant."""
LEAST_SECRET, MOST_SECRET = 16, 64
REQUESTS_PER_BATCH = 64
"""Requests per wake-up of the thread. Waking it for each request would cost the event loop more than the rest."""
TOKENS_PER_BATCH = 2**20
REQUEST_TOKENS = 128
"""Memory of a waiting request besides its tokens, in tokens of 4 bytes."""
MAX_WAITING_TOKENS = 2**24
"""Tokens of 4 bytes that the thread has received and not yet written. Further requests are dropped and counted."""
_OVER = (RequestState.DONE, RequestState.ABORTED)


@attrs.frozen
class _Asked:
    """One request that has ended, so its sequence does not change any more."""

    at_s: float
    sequence: TokenSequence
    num_computed_tokens: int


class Recorder:
    """One of the `observers` of one runtime, or of one `Ledger`. It writes the requests into `path`, a new file.

    The file has times, lengths and a name for every `block_tokens` tokens of a prefix. Names are keyed with `secret`,
    16 to 64 bytes. Without one, they are keyed with random bytes that are forgotten with the recorder. Give the same
    secret to several processes only if you plan their files as one, and protect it like the prompts. A request is
    recorded when it ends, if it has computed anything. Forks are not recorded.

    The file shows which prompts begin alike. A user who can send prompts and read the file can test, block by block,
    how another user's prompt begins. So only the owner may read it (mode 0600).

    `tenants` adds the field `tenant` for requests with a `cache_salt`: True writes a keyed digest of the salt, because
    salts are secrets. A mapping gives the name of each salt; requests with other salts have no tenant then.

    Use it as a `with` block around the runtime, or call `close()`. A thread writes. After an error in it, `failure` has
    that error and nothing more is written. `env` has the clock: pass the runtime's `env` if the runtime has its own.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        block_tokens: int = 512,
        secret: bytes | None = None,
        tenants: bool | Mapping[str | bytes, str] = False,
        env: Env | None = None,
    ) -> None:
        check_int("block_tokens", block_tokens, 1, MAX_BLOCK_TOKENS)
        key = secrets.token_bytes(32) if secret is None else _checked_secret(secret)
        self._tenants = _checked_tenants(tenants)
        self._env = Env() if env is None else check_type("env", env, Env)
        self._digests = BlockDigests(key, block_tokens)
        self._file = _new_file(path, {"aoffload_plan": FORMAT, "block_tokens": block_tokens})
        self.num_recorded = 0
        """Requests passed to the thread."""
        self.num_dropped = 0
        """Requests that were dropped, because the thread was too slow."""
        self.failure: Exception | None = None
        self._arrived: dict[LedgerRequest, float] = {}
        self._began_s = self._env.now()
        self._batch: list[_Asked] = []
        self._batch_tokens = 0
        self._num_given_tokens = self._num_written_tokens = 0
        """Tokens passed to the thread, and tokens that it has written. Each is written by one thread."""
        self._batches: SimpleQueue[list[_Asked] | None] = SimpleQueue()
        self._is_closed = False
        try:
            self._thread = self._env.start_thread(self._work, "aoffload plan recorder")
        except RuntimeError as error:
            self._file.close()
            os.unlink(path)
            raise TransferRefused(f"no thread can be started that writes {os.fspath(path)!r}: {error}") from error

    def __repr__(self) -> str:
        return f"<Recorder {self.num_recorded} recorded, {self.num_dropped} dropped>"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Write the rest, and close the file. It blocks until that is done. A second call does nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        self._hand_over()
        self._batches.put(None)
        self._thread.join()

    # -- the ledger's thread --------------------------------------------------------------------------------------

    def observe(self, event: Event) -> None:
        if not isinstance(event, RequestMoved):
            return
        record = event.request
        if event.old is RequestState.QUEUED:
            self._arrived[record] = self._env.now()
        elif event.new in _OVER:
            at_s = self._arrived.pop(record, None)
            if at_s is not None and record.has_committed and not record.has_parent:
                self._add(at_s, record)

    def _add(self, at_s: float, record: LedgerRequest) -> None:
        num_tokens = record.sequence.num_tokens
        behind = self._num_given_tokens + self._batch_tokens - self._num_written_tokens
        if self._is_closed or self.failure is not None or (behind and behind + num_tokens > MAX_WAITING_TOKENS):
            self.num_dropped += 1
            return
        self.num_recorded += 1
        self._batch.append(_Asked(at_s, record.sequence, record.num_computed_tokens))
        self._batch_tokens += num_tokens + REQUEST_TOKENS
        if len(self._batch) >= REQUESTS_PER_BATCH or self._batch_tokens >= TOKENS_PER_BATCH:
            self._hand_over()

    def _hand_over(self) -> None:
        batch, self._batch = self._batch, []
        self._num_given_tokens += self._batch_tokens
        self._batch_tokens = 0
        self._batches.put(batch)

    # -- the writing thread ---------------------------------------------------------------------------------------

    def _work(self) -> None:
        try:
            while (batch := self._batches.get()) is not None:
                for asked in batch:
                    self._write(self._line(asked))
                    self._num_written_tokens += asked.sequence.num_tokens + REQUEST_TOKENS
                self._file.flush()
            if self.num_dropped:
                self._write({"num_dropped": self.num_dropped})
            self._file.flush()
        except (OSError, ValueError) as error:  # a full disk, or the file was closed by another part of the program
            self.failure = error
        finally:
            with suppress(OSError):  # nothing more can be written, but the file is closed
                self._file.close()

    def _line(self, asked: _Asked) -> dict[str, Any]:
        sequence = asked.sequence
        num_kept = min(asked.num_computed_tokens, sequence.num_tokens)
        names = self._digests.of(sequence.root, sequence.first_bytes(0, num_kept), sequence.spans)
        num_prompt_blocks = sequence.num_prompt_tokens // self._digests.block_tokens
        tenant = self._tenant(sequence.root.cache_salt)
        return {
            "timestamp": round((asked.at_s - self._began_s) * 1e3, 3),
            "input_length": sequence.num_prompt_tokens,
            "output_length": sequence.num_tokens - sequence.num_prompt_tokens,
            "hash_ids": names[:num_prompt_blocks],
            "output_hash_ids": names[num_prompt_blocks:],
            **({} if tenant is None else {"tenant": tenant}),
        }

    def _tenant(self, salt: str | bytes | None) -> str | None:
        if salt is None or self._tenants is False:
            return None
        return self._digests.of_salt(salt) if self._tenants is True else self._tenants.get(salt)

    def _write(self, line: dict[str, Any]) -> None:
        self._file.write(_encoded(line))


def _encoded(line: dict[str, Any]) -> str:
    return json.dumps(line, separators=(",", ":")) + "\n"


def _checked_secret(secret: object) -> bytes:
    if not isinstance(secret, bytes) or not LEAST_SECRET <= len(secret) <= MOST_SECRET:
        raise InvalidArgument("secret", f"must be {LEAST_SECRET} to {MOST_SECRET} bytes")
    return secret


def _checked_tenants(tenants: object) -> bool | dict[str | bytes, str]:
    """A copy of `tenants`. No error shows a salt."""
    if isinstance(tenants, bool):
        return tenants
    if not isinstance(tenants, Mapping):
        raise InvalidArgument("tenants", f"must be a bool or a mapping from salts to names, got {shown(tenants)}")
    found = dict(tenants)
    for salt, name in found.items():
        if type(salt) not in (str, bytes) or not isinstance(name, str) or not _is_name(name):
            problem = f"must map salts, str or bytes, to printable names of at most {MAX_TEXT} characters"
            raise InvalidArgument("tenants", problem)
    return found


def _is_name(text: str) -> bool:
    return len(text) <= MAX_TEXT and text.isprintable()


def _new_file(path: object, heading: dict[str, Any]) -> TextIO:
    """Open a new file that only its owner may read. An existing file is refused, because it belongs to others."""
    try:
        number = os.open(Path(path), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)  # type: ignore[arg-type]
        with ExitStack() as stack:
            file = stack.enter_context(os.fdopen(number, "w", encoding="ascii"))
            file.write(_encoded(heading))
            file.flush()
            stack.pop_all()
            return file
    except (OSError, TypeError, ValueError) as error:
        raise InvalidArgument("path", f"cannot be written: {error}") from error
