"""The build of a wheel: pure, or with the core compiled by mypyc where AOFFLOAD_COMPILE=1 asks for it.

What is compiled, and how, says pyproject.toml. hatch-mypyc builds into the tree and puts what it built into the wheel;
afterwards this takes it out of the tree again, so that a clone stays pure.
"""

from __future__ import annotations

import os
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

REQUIRED = ["attrs>=24.1", "hatch-mypyc==0.16.0", "mypy==2.4.1", "numpy>=2", "setuptools>=70"]
"""Of the build, where it compiles. The generated C follows the version of mypy, so it is one that the proof has run."""


class CompiledCore(BuildHookInterface):  # type: ignore[type-arg]
    """Does nothing unless it is asked for, and nothing to an editable installation, which runs what is edited."""

    PLUGIN_NAME = "custom"
    _mypyc: Any = None

    def dependencies(self) -> list[str]:
        return REQUIRED if _is_wanted() else []

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if not _is_wanted() or version == "editable":
            return
        from hatch_mypyc.plugin import MypycBuildHook

        self._mypyc = MypycBuildHook(
            self.root, self.config, self.build_config, self.metadata, self.directory, self.target_name, self.app
        )
        self._mypyc.initialize(version, build_data)

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        if self._mypyc is not None:
            self._mypyc.clean([version])


def _is_wanted() -> bool:
    return os.environ.get("AOFFLOAD_COMPILE") == "1"
