"""Plan from a trace; see `aoffload plan --help`."""

from __future__ import annotations

from .command import main

if __name__ == "__main__":
    raise SystemExit(main())
