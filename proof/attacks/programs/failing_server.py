"""The server with a model whose forwards fail."""

from __future__ import annotations

import sys
import time
from typing import Any

from aoffload._reference.server import command
from aoffload._reference.engine.paged import PagedModel

load = vars(command)["load_model"]


def load_failing(name: str, **options: Any) -> PagedModel:
    model: PagedModel = load(name, **options)

    def fail(*_: Any) -> Any:
        time.sleep(0.2)  # for requests to come together
        raise ArithmeticError("/srv/models/secret: the device is on fire")

    model.forward = fail  # type: ignore[method-assign, assignment]
    return model


if __name__ == "__main__":
    vars(command)["load_model"] = load_failing
    sys.exit(command.main())
