"""The options of the server, and its command line."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import attrs

from ..._common.commands import check_goes_with, count, number
from ...demo.options import EVICTIONS, LOAD_CHOICES, STORE_POLICIES
from ..engine.models import MODEL_NAMES
from .admission import MAX_READING_BYTES, READ_TIMEOUT_S

MAX_BLOCKS = 10_000_000
SECONDS = number("a positive number of seconds up to 1e6", lambda value: 0 < value <= 1e6)


@attrs.frozen(kw_only=True)
class ServerOptions:
    """The options of the server. Times are seconds."""

    model: str = "llama"
    """A name of `MODEL_NAMES`, or a local directory."""
    served_name: str | None = None
    """Name of the model for clients. None: the name in `model`, or that of its directory."""
    seed: int = 0
    device: str = "cpu"
    host: str = "127.0.0.1"
    port: int = 8000
    """0: any free port."""
    api_key: str | None = attrs.field(default=None, repr=False)
    """The key that clients send as `Authorization: Bearer`. None: no key is needed."""
    api_key_file: Path | None = None
    """A file with the key, for the command."""
    allowed_hosts: tuple[str, ...] = ()
    """Host names that clients may use in URLs. A server on loopback always accepts the names of loopback."""
    requires_salt: bool = False
    """Refuse requests without a `cache_salt`."""
    num_device_blocks: int | None = None
    """None: 8,192 tokens for each group of layers."""
    num_host_blocks: int | None = None
    """None: 32,768 tokens for each group of layers. 0: no offload."""
    store: str = "eager"
    load: str = "always"
    """How much of a hit in host memory to load: `always` loads all of it, `cost` only tokens that load faster than they
    compute."""
    eviction: str = "lru"
    disk: Path | None = None
    """The directory of a disk tier. A later server can use its contents."""
    disk_size: str = "16GiB"
    remote: str | None = None
    """The URL of a store, which other servers may share."""
    remote_secret: Path | None = None
    """A file with the secret for the store's contents."""
    max_running: int = 16
    """Requests in the engine at a time."""
    max_requests: int = 256
    """Requests in the server at a time. Further requests are refused with 429."""
    max_tokens: int | None = None
    """Maximum tokens of prompt and answer of one request. None: the most that the model supports and that fits on the
    device."""
    max_body_bytes: int = 2**20
    max_reading_bytes: int = MAX_READING_BYTES
    """Bound on the bytes of all incomplete bodies."""
    max_connections: int = 1024
    """Maximum connections. The limit is lower if the process may not open that many descriptors."""
    max_unread_bytes: int = 2**24
    """Bound on the unread bytes of complete answers."""
    read_timeout_s: float = READ_TIMEOUT_S
    """Time limit for a client to send a header, to send a body, or to read more of its answer."""
    answer_timeout_s: float = 600.0
    """Time from the end of the body until the client has read the last byte of the answer."""
    drain_timeout_s: float = 30.0
    """Time for admitted requests to finish after SIGTERM."""
    num_threads: int = 1
    """Threads of torch."""
    log: Path | None = None
    """A file for one JSON line for each event of the runtime."""
    write_tokenizer: Path | None = None
    """A directory. The command writes the byte-level tokenizer into it, and serves nothing."""


def make_parser() -> argparse.ArgumentParser:
    default = ServerOptions()
    parser = argparse.ArgumentParser(
        prog="aoffload serve",
        description="Serve a model over HTTP with OpenAI's API and KV cache offload. The default address is loopback.",
        epilog="After SIGTERM or Ctrl-C, the server accepts no requests, and running requests have --drain-timeout to "
        "end. A second signal ends them at once. Exit status: 0 after that; 2 for a wrong option or an address "
        "that is not available.",
    )
    add = parser.add_argument
    add("--model", default=default.model, metavar="|".join((*MODEL_NAMES, "DIR")),
        help="the name of a small model with random weights, or a directory with a model (default: "
        "%(default)s)")  # fmt: skip
    add("--served-name", metavar="NAME", help="the name by which clients ask for the model")
    add("--seed", type=count(0, 2**63 - 1), default=default.seed, metavar="N",
        help="the seed of the weights of a named model (default: %(default)s)")  # fmt: skip
    add("--device", choices=("cpu", "cuda"), default=default.device, help="where the model runs (default: %(default)s)")
    add("--host", default=default.host, metavar="ADDRESS", help="the address to listen on (default: %(default)s)")
    add("--port", type=count(0, 65535), default=default.port, metavar="N",
        help="the port to listen on; 0 chooses a free one (default: %(default)s)")  # fmt: skip
    add("--api-key", metavar="KEY",
        help="the key that clients send as Authorization: Bearer KEY. Other users of this machine can see "
        "a command line, so prefer AOFFLOAD_API_KEY or --api-key-file")  # fmt: skip
    add("--api-key-file", type=Path, metavar="FILE", help="a file with the key in its first line")
    add("--allow-host", dest="allowed_hosts", action="append", default=[], metavar="NAME",
        help="a host name that clients may use in addition to those of loopback; may be repeated")  # fmt: skip
    add("--require-salt", dest="requires_salt", action="store_true", help="refuse requests that have no cache_salt")
    add("--device-blocks", dest="num_device_blocks", type=count(1, MAX_BLOCKS), metavar="N",
        help="the number of blocks of 16 tokens on the device (default: 512 for each group of layers, and "
        "8 checkpoints of a recurrent state)")  # fmt: skip
    add("--host-blocks", dest="num_host_blocks", type=count(0, MAX_BLOCKS), metavar="N",
        help="the number of blocks in host memory; 0 means no offload (default: 2048 for each group of "
        "layers, and 32 checkpoints of a recurrent state)")  # fmt: skip
    add("--store", choices=STORE_POLICIES, default=default.store,
        help="which blocks are copied to host memory (default: %(default)s)")  # fmt: skip
    add("--load", choices=LOAD_CHOICES, default=default.load,
        help="which hits are loaded from host memory: all, or only those that load faster than they are "
        "computed (default: %(default)s)")  # fmt: skip
    add("--eviction", choices=EVICTIONS, default=default.eviction,
        help="which blocks are evicted first (default: %(default)s)")  # fmt: skip
    add("--disk", type=Path, metavar="DIR",
        help="add a disk tier in this directory; the next server finds its blocks there")  # fmt: skip
    add("--disk-size", default=default.disk_size, metavar="SIZE",
        help="the size of the disk tier, allocated at the start (default: %(default)s)")  # fmt: skip
    add("--remote", metavar="URL", help="add a store that servers share, such as redis://cache.internal")
    add("--remote-secret", type=Path, metavar="FILE",
        help="a file with the secret that encrypts the blocks in the store; without a secret, the network "
        "must be trusted")  # fmt: skip
    add("--max-running", type=count(1, 4096), default=default.max_running, metavar="N",
        help="limit on the requests that the engine computes at a time (default: %(default)s)")  # fmt: skip
    add("--max-requests", type=count(1, 1_000_000), default=default.max_requests, metavar="N",
        help="limit on the requests in the server at a time; further requests are answered with 429 "
        "(default: %(default)s)")  # fmt: skip
    add("--max-tokens", type=count(2, 2**31 - 1), metavar="N",
        help="the largest number of tokens of a prompt and its answer together")  # fmt: skip
    add("--max-body-bytes", type=count(1024, 2**30), default=default.max_body_bytes, metavar="N",
        help="limit on the size of a request body (default: %(default)s)")  # fmt: skip
    add("--max-reading-bytes", type=count(1024, 2**40), default=default.max_reading_bytes, metavar="N",
        help="limit on the bytes of all bodies that have not arrived completely (default: %(default)s)")  # fmt: skip
    add("--max-connections", type=count(1, 1_000_000), default=default.max_connections, metavar="N",
        help="limit on the number of connections; a further one closes the connection that has been idle longest "
        "(default: %(default)s)")  # fmt: skip
    add("--max-unread-bytes", type=count(0, 2**40), default=default.max_unread_bytes, metavar="N",
        help="limit on the bytes of complete answers that clients have not read (default: %(default)s)")  # fmt: skip
    add("--read-timeout", dest="read_timeout_s", type=SECONDS, default=default.read_timeout_s, metavar="S",
        help="the seconds in which a client must send a header, send a body, or read a part of an answer "
        "(default: %(default)s)")  # fmt: skip
    add("--answer-timeout", dest="answer_timeout_s", type=SECONDS, default=default.answer_timeout_s, metavar="S",
        help="the seconds that an answer may take, including the time that its client takes to read it "
        "(default: %(default)s)")  # fmt: skip
    add("--drain-timeout", dest="drain_timeout_s", type=SECONDS, default=default.drain_timeout_s, metavar="S",
        help="the seconds that running requests have after SIGTERM (default: %(default)s)")  # fmt: skip
    add("--threads", dest="num_threads", type=count(1, 1024), default=default.num_threads, metavar="N",
        help="the number of threads of torch (default: %(default)s)")  # fmt: skip
    add("--log", type=Path, metavar="FILE", help="write each event of the runtime as a line of JSON to this file")
    add("--write-tokenizer", type=Path, metavar="DIR",
        help="write the byte-level tokenizer to this directory for load generators, and exit")  # fmt: skip
    return parser


def parse_options(arguments: Sequence[str] | None = None) -> ServerOptions:
    """The options. For invalid ones, it prints a message and exits with status 2."""
    parser = make_parser()
    options = parser.parse_args(arguments)
    check_goes_with(parser, options, {"disk_size": "disk", "remote_secret": "remote"})
    found = vars(options)
    return ServerOptions(**found | {"allowed_hosts": tuple(found["allowed_hosts"])})
