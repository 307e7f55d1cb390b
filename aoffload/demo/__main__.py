"""Run the demo; see `python -m aoffload.demo --help`."""

from __future__ import annotations

import os
import signal


def _leave(*_: object) -> None:
    os.write(1, b"\n  interrupted before anything was done\n")
    os._exit(130)


if __name__ == "__main__":
    # Set before torch is imported, which takes a second. Until then Ctrl-C has nothing to report, and must not print a
    # traceback.
    signal.signal(signal.SIGINT, _leave)

    from .command import main

    raise SystemExit(main())
