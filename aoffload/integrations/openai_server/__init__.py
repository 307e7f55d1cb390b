"""An HTTP server with OpenAI's API around the engine: `python -m aoffload.integrations.openai_server`.

Starlette is imported only with `make_app`.
"""

from typing import TYPE_CHECKING, Any

from ..._common.extras import needed
from ..._reference.server.admission import Admission, ServerState
from ..._reference.server.answering import Service
from ..._reference.server.bodies import Limits
from ..._reference.server.opening import open_service
from ..._reference.server.options import ServerOptions
from ..._reference.server.tokenizer import ByteTokenizer, Speller, Tokenizer, write_tokenizer

if TYPE_CHECKING:
    from ..._reference.server.app import make_app

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
    """Import `make_app` on first use, because it needs starlette."""
    if name == "make_app":
        with needed("server", "make_app"):
            from ..._reference.server.app import make_app

        return make_app
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
