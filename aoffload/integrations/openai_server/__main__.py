"""Run the server; see `python -m aoffload.integrations.openai_server --help`."""

from __future__ import annotations

import sys
from collections.abc import Callable


def _load_main() -> Callable[[], int]:
    try:
        from .command import main
    except ModuleNotFoundError as error:
        if error.name not in {"starlette", "uvicorn"}:
            raise
        sys.exit(f"{error.name} is not installed: pip install aoffload[server]")
    return main


if __name__ == "__main__":
    raise SystemExit(_load_main()())
