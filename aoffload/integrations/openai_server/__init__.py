"""An HTTP server with the face of OpenAI's API around the engine: `python -m aoffload.integrations.openai_server`.

A request lives in the task of its handler, and in nothing else: there is no table of requests that somebody has to keep
in order. Who hangs up has that task cancelled, and with it goes every pin.

    endpoint `Answering`: body -> `Wish` -> a place of `Admission` -> `Visit` around everything that may be cut short
        engine.generate -> tokens -> `Flow` -> text -> `Stream` or one object -> `Reply`
"""

from typing import TYPE_CHECKING, Any

from .admission import Admission, ServerState
from .answering import Service
from .bodies import Limits
from .opening import open_service
from .options import ServerOptions
from .tokenizer import ByteTokenizer, Speller, Tokenizer
from .tokenizer_directory import write_tokenizer

if TYPE_CHECKING:
    from .app import make_app

__all__ = [
    "Admission",
    "ByteTokenizer",
    "Limits",
    "ServerOptions",
    "ServerState",
    "Service",
    "Speller",
    "Tokenizer",
    "make_app",
    "open_service",
    "write_tokenizer",
]


def __getattr__(name: str) -> Any:
    """`make_app` needs starlette; everything else here doesn't."""
    if name == "make_app":
        from .app import make_app

        return make_app
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
