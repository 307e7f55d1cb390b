"""Lay the Python of another version of vLLM over the compiled kernels of the one that is installed.

There is no build of vLLM 0.33 for CPUs. Its Python runs over the kernels of 0.32, as far as the scenarios of this
package need them. `python -m proof.vllm.newer ENVIRONMENT VERSION`, for a copy of the environment of `make vllm`.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

__all__ = ["lay"]

COMPILED = ".so"
DOWNLOAD_S = 600.0


def lay(packages: Path, wheel: Path) -> int:
    """Replace all but the compiled modules of vLLM in `packages` by what `wheel` has. The number of new files."""
    for path in sorted((packages / "vllm").rglob("*"), reverse=True):
        if path.is_dir() and not any(path.iterdir()):
            path.rmdir()
        elif path.is_file() and path.suffix != COMPILED:
            path.unlink()
    with zipfile.ZipFile(wheel) as packed:
        names = [name for name in packed.namelist() if not name.endswith(COMPILED)]
        packed.extractall(packages, names)
    return len(names)


def main() -> None:
    environment, version = Path(sys.argv[1]), sys.argv[2]
    with tempfile.TemporaryDirectory() as folder:
        words = ("download", "--quiet", "--no-deps", "--only-binary", ":all:", f"vllm=={version}", "--dest", folder)
        subprocess.run([sys.executable, "-m", "pip", *words], check=True, timeout=DOWNLOAD_S)
        (wheel,) = Path(folder).glob("vllm-*.whl")
        (packages,) = environment.glob("lib/python3*/site-packages")
        print(f"{lay(packages, wheel)} files of vLLM {version} in {packages}")


if __name__ == "__main__":
    main()
