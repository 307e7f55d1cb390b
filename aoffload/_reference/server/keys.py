"""Where the API key comes from. It is in no message and in no `repr`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from ...errors import InvalidArgument

__all__ = ["VARIABLE", "find_key"]

VARIABLE = "AOFFLOAD_API_KEY"
MAX_KEY_BYTES = 4096


def find_key(option: str | None, file: Path | None, environment: Mapping[str, str] = os.environ) -> str | None:
    """The key of an option, a file (its first line) or the environment, in this order; None if there is none.

    Raises `InvalidArgument` naming `api_key` or `api_key_file` for a key that no header can carry.
    """
    if option is not None and file is not None:
        raise InvalidArgument("api_key_file", "give either a key or a file")
    if file is not None:
        return _checked("api_key_file", _read(file))
    if option is not None:
        return _checked("api_key", option)
    found = environment.get(VARIABLE)
    return _checked("api_key", found) if found is not None else None


def _read(file: Path) -> str:
    try:
        with file.open("rb") as opened:
            return opened.read(MAX_KEY_BYTES).decode("latin-1").partition("\n")[0].rstrip("\r")
    except OSError as error:
        raise InvalidArgument("api_key_file", f"cannot be read: {error}") from error


def _checked(argument: str, key: str) -> str:
    if not key or not all("!" <= character <= "~" for character in key):
        raise InvalidArgument(argument, "must be visible ASCII characters without spaces, at least one")
    return key
