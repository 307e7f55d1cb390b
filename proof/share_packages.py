"""Gives an environment without its own packages those of this one, except aoffload:
`python proof/share_packages.py build/compiled`.

Beside it comes `tree`, links to all of the clone but the package: who works there imports the one that is installed.
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
