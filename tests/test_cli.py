"""The command `aoffload`, and its message when an extra is missing."""

from __future__ import annotations

import importlib
import os
import platform
import re
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest

from aoffload import AoffloadError, MissingExtra, UnsupportedVersion, __version__
from aoffload.__main__ import COMMANDS, Command, main
from aoffload._common.extras import MODULES, needed
from aoffload.ledger import is_compiled

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
BLOCKED = """
import sys


class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {blocked!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)


sys.meta_path.insert(0, Missing())
"""


def run(program: str, *, without: str = "") -> subprocess.CompletedProcess[str]:
    """Run Python code in a process of its own that cannot import what the extra `without` brings."""
    code = BLOCKED.format(blocked=MODULES.get(without, ())) + program
    command = [sys.executable, "-W", "error", "-c", code]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_the_version_and_its_surroundings(capsys: pytest.CaptureFixture[str]) -> None:
    """The first line is the name and the version alone; the second what a report of a fault needs."""
    assert main(["--version"]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first == f"aoffload {__version__}"
    assert second.startswith(f"Python {platform.python_version()}, ") and "torch 2." in second
    assert f", {'compiled' if is_compiled else 'pure'} core, " in second


def test_the_version_is_the_changelog_s() -> None:
    """What is installed has a section of its own in CHANGELOG.md, the first one after what is not released."""
    headings = re.findall(r"^## (.*)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings[:2] == ["Unreleased", PROJECT["version"]]


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    """On standard output where it was asked for; on standard error, with status 2, where nothing was asked for."""
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert re.findall(r"^  (\w+) ", shown, re.MULTILINE) == [command.name for command in COMMANDS]
    assert main([]) == 2
    assert capsys.readouterr() == ("", shown)


@pytest.mark.parametrize("wrong", ["demos", "--versio", "-", "\n\x1b[31m"])
def test_an_unknown_command_is_one_line(wrong: str, capsys: pytest.CaptureFixture[str]) -> None:
    """It names what there is, and the status is 2."""
    assert main([wrong, "--help"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and "\x1b" not in err
    assert err.startswith(f"aoffload: {wrong!r} is not a command") and "demo, trace, plan, top, serve" in err


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)
def test_a_command_has_its_own_help(command: Command, capsys: pytest.CaptureFixture[str]) -> None:
    """Its parser's, under the name that was typed; and arguments go to it as they are."""
    name = command.name
    with pytest.raises(SystemExit) as left:
        main([name, "--help"])
    assert left.value.code == 0
    assert capsys.readouterr().out.startswith(f"usage: aoffload {name} ")
    with pytest.raises(SystemExit) as left:
        main([name, "--no-such-option"])
    assert left.value.code == 2
    assert f"aoffload {name}: error: " in capsys.readouterr().err


def test_the_status_is_the_command_s(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What a command returns is what the shell sees."""
    assert main(["trace", str(tmp_path / "no.log")]) == 2
    assert capsys.readouterr().err == f"aoffload trace: {tmp_path / 'no.log'}: No such file or directory\n"


def test_the_module_and_the_console_script_are_the_same() -> None:
    """`python -m aoffload` works where scripts are not on the path."""
    assert PROJECT["scripts"] == {"aoffload": f"{main.__module__}:{main.__name__}"}
    done = subprocess.run([sys.executable, "-m", "aoffload", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith(f"aoffload {__version__}\n")


def test_a_command_imports_what_it_needs_alone() -> None:
    """Importing the package imports no command, and looking at a log imports no torch: it takes seconds."""
    done = run(
        "import aoffload; assert not {'aoffload.__main__', 'argparse'} & set(sys.modules)\n"
        "from aoffload.__main__ import main; main(['--version']); main(['trace', '/no/such/log'])\n"
        "assert not {'torch', 'aoffload.demo', 'aoffload._reference'} & set(sys.modules)"
    )
    assert (done.returncode, done.stderr) == (0, "aoffload trace: /no/such/log: No such file or directory\n")


@pytest.mark.skipif(os.name != "posix", reason="signals")
def test_ctrl_c_while_a_command_is_imported_leaves_at_once(tmp_path: Path) -> None:
    """No traceback through the imports, and status 130."""
    (tmp_path / "torch.py").write_text(
        "import signal\nprint('importing', flush=True)\nsignal.alarm(60)\nsignal.pause()\n"
    )
    env = os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    command = [sys.executable, "-m", "aoffload", "demo"]
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "importing\n"
        started = time.monotonic()
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=30)
    assert (process.returncode, said.strip()) == (130, "interrupted before anything was done")
    assert time.monotonic() - started < 20


WANTED = {
    "cuda": ("from aoffload._transfer.backends.cuda.nvidia import NvidiaDriver; NvidiaDriver(0)", "NvidiaDriver"),
    "disk": ("import aoffload._tiers.disk.table", "a disk tier"),
    "events": ("import aoffload.kv_events", "aoffload.kv_events"),
    "metrics": ("import aoffload.metrics", "aoffload.metrics"),
    "mooncake": (
        "from aoffload.stores import MooncakeStore; MooncakeStore.from_addresses('a:1', 'b')",
        "a store in Mooncake",
    ),
    "object-storage": ("from aoffload.stores import ObstoreStore; ObstoreStore(None)", "a store in object storage"),
    "otel": ("import aoffload.otel", "aoffload.otel"),
    "remote": ("from aoffload.stores import RedisStore; RedisStore.from_url('redis://a')", "a store in Redis"),
    "server": ("from aoffload.integrations.openai_server import make_app", "make_app"),
    "transformers": ("from aoffload.integrations import load_model; load_model('llama')", "the model"),
    "trio": ("import aoffload.testing", "aoffload.testing"),
    "vllm": ("from aoffload.integrations.vllm import AoffloadConnector", "AoffloadConnector"),
}
"""For each extra, what cannot be had without it, and how that is called."""


@pytest.mark.parametrize("extra", WANTED)
def test_a_missing_extra_names_itself(extra: str) -> None:
    """One typed error says who needs which module, and what to install."""
    program, user = WANTED[extra]
    done = run(
        "from aoffload import MissingExtra\n"
        f"try:\n    {program}\nexcept MissingExtra as error:\n    print(error.extra, error.name, str(error), sep='|')",
        without=extra,
    )
    assert (done.returncode, done.stderr) == (0, "")
    named, module, problem = done.stdout.strip().split("|")
    assert named == extra and module in MODULES[extra]
    install = "vllm" if extra == "vllm" else f"'aoffload[{extra}]'"
    assert problem == f"{user} needs {module}, which is not installed: pip install {install}"


@pytest.mark.parametrize(("arguments", "extra"), [("serve", "server"), ("demo --backend trio", "trio")])
def test_a_command_without_its_extra_ends_with_2(arguments: str, extra: str) -> None:
    """The last line says what to install, and there is no traceback."""
    done = run(f"from aoffload.__main__ import main; sys.exit(main({arguments.split()!r}))", without=extra)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert done.stderr.endswith(f"pip install 'aoffload[{extra}]'\n")


def test_extras_are_those_of_the_project() -> None:
    """Each extra that users install is known here, and each that is known here can be installed."""
    assert set(MODULES) == set(PROJECT["optional-dependencies"])
    assert set(WANTED) == set(MODULES) - {"uvloop"}  # programs import it, nothing here does


def test_another_missing_module_is_no_missing_extra() -> None:
    """A mistake inside of a module that an extra guards is not taken for the extra's absence."""
    with pytest.raises(ModuleNotFoundError) as raised, needed("metrics", "anybody"):
        import no_such_module  # noqa: F401
    assert not isinstance(raised.value, MissingExtra)
    assert issubclass(MissingExtra, AoffloadError)


def test_a_part_that_an_installed_package_lacks_is_no_missing_extra() -> None:
    """Another version of it is installed. The error says which, and what to do."""
    with pytest.raises(UnsupportedVersion, match=r"pip install --upgrade 'aoffload\[metrics\]'") as raised:
        with needed("metrics", "anybody"):
            importlib.import_module("prometheus_client.no_such_part")
    assert "prometheus_client.no_such_part" in str(raised.value) and not isinstance(raised.value, ModuleNotFoundError)
    with pytest.raises(ImportError, match="cannot import name") as other, needed("metrics", "anybody"):
        from prometheus_client import no_such_name  # noqa: F401
    assert not isinstance(other.value, UnsupportedVersion), "nobody has said which versions are supported"
