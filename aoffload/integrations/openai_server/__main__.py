"""Run the server; see `python -m aoffload.integrations.openai_server --help`. `aoffload serve` does the same."""

from __future__ import annotations

import sys

from ..._common.extras import needed
from ...errors import MissingExtra, UnsupportedVersion


def _run() -> int:
    try:
        with needed("server", "the server"):
            from ..._reference.server.command import main
    except (MissingExtra, UnsupportedVersion) as error:
        print(f"aoffload serve: {error}", file=sys.stderr)
        return 2
    return main()


if __name__ == "__main__":
    raise SystemExit(_run())
