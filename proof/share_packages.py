"""Lets another environment import the packages of this one, except aoffload:
`python proof/share_packages.py build/compiled`.

Also makes the folder `tree` in that environment, with links to the sources of the clone except `aoffload`. A
program that runs in `tree` imports the `aoffload` that is installed in the environment.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).parent.parent
LEFT_OUT = {"aoffload", "build", "dist"}


def main(environment: Path) -> None:
    code = "import sysconfig; print(sysconfig.get_paths()['purelib'])"
    command = [str(environment / "bin" / "python"), "-c", code]
    packages = Path(subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip())
    # Files like this one that lie there are not read: that of an editable installation is one.
    (packages / "beside.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    tree = environment / "tree"
    tree.mkdir()
    for path in ROOT.iterdir():
        if path.name not in LEFT_OUT and not path.name.startswith("."):
            (tree / path.name).symlink_to(path)


if __name__ == "__main__":
    main(Path(sys.argv[1]).absolute())
