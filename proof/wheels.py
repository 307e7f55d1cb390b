"""Compares the pure wheel and the compiled one: `python -m proof.wheels build/wheels`.

Each wheel is installed in an environment of its own and runs the demo; the answers must be the same bit for bit. If
both wheels are in one folder, pip must choose the compiled one for this interpreter and platform, and the pure one for
others.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from .share_packages import main as share_packages

ELSEWHERE = ("--python-version", "3.99", "--platform", "any")
"""An interpreter that no wheel was compiled for."""
DEMO = """
import hashlib, sys, anyio
from aoffload.demo import command
from aoffload.demo.interrupt import Interrupt
from aoffload.demo.options import parse_options
from aoffload.demo.outcome import DemoOutcome
from aoffload.demo.interrupt import Progress
from aoffload.ledger import is_compiled

options = parse_options(["--requests", sys.argv[1]])
outcome = DemoOutcome(options)
runner = command._prepare(options, outcome, Progress(sys.stderr), None)
with Interrupt(lambda: None) as interrupt:
    anyio.run(command._run_all, runner, interrupt)
answers = sorted((run.kind.name, turn, one.token_ids, one.logits_digests)
                 for run in outcome.runs for turn, one in run.generations.items())
print(is_compiled, outcome.exit_status, len(answers), hashlib.sha256(repr(answers).encode()).hexdigest())
"""


def call(*command: str | Path, cwd: Path) -> str:
    """Run a program that sees nothing of the clone."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "PIP_"))}
    words = [str(word) for word in command]
    done = subprocess.run(words, cwd=cwd, env=kept, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(words[:6])} ended with status {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout.strip()


def demo(wheel: Path, folder: Path, num_requests: int) -> list[str]:
    """What the demo answers with `wheel`: whether its core is compiled, exit status, answers, and their digest."""
    environment = folder / wheel.stem
    call(sys.executable, "-m", "venv", "--without-pip", environment, cwd=folder)
    python = environment / "bin" / "python"
    call(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", wheel, cwd=folder)
    share_packages(environment)
    return call(python, "-P", "-W", "ignore", "-c", DEMO, str(num_requests), cwd=folder).split()


def taken(wheels: list[Path], folder: Path, *where: str) -> str:
    """The name of the wheel that pip takes of both."""
    both, chosen = folder / "both", folder / f"taken{len(where)}"
    both.mkdir(exist_ok=True)
    for wheel in wheels:
        (both / wheel.name).write_bytes(wheel.read_bytes())
    offline = ("--no-index", "--no-deps", "--only-binary", ":all:", "--find-links", both, "--dest", chosen)
    call(sys.executable, "-m", "pip", "download", *offline, *where, "aoffload", cwd=folder)
    (found,) = chosen.iterdir()
    return found.name


def main(wheels: Path, num_requests: int = 24) -> int:
    (pure,), (compiled,) = (wheels / "pure").glob("*.whl"), (wheels / "compiled").glob("*.whl")
    for wheel in (pure, compiled):
        print(f"{wheel.name}: {wheel.stat().st_size / 1e6:.2f} MB")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        found = [demo(wheel, folder, num_requests) for wheel in (pure, compiled)]
        for is_compiled, status, num_answers, digest in found:
            print(f"demo, compiled {is_compiled}: status {status}, {num_answers} answers, {digest[:16]}")
        here, elsewhere = taken([pure, compiled], folder), taken([pure, compiled], folder, *ELSEWHERE)
        print(f"taken here: {here}\ntaken elsewhere: {elsewhere}")
    is_alike = [one[0] for one in found] == ["False", "True"] and found[0][1:] == found[1][1:] and found[0][1] == "0"
    return 0 if is_alike and (here, elsewhere) == (compiled.name, pure.name) else 1


if __name__ == "__main__":
    raise SystemExit(main(Path(sys.argv[1]).absolute()))
