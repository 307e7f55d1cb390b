"""A log file that can't be written any more."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest

from aoffload.demo.command import main
from aoffload.demo.logs import LogFile, make_logger
from aoffload.errors import InvalidArgument

needs_full = pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")


class Short:
    """A disk with room for a few bytes at a time."""

    def __init__(self) -> None:
        self.content = b""
        self.room = 4

    def write(self, data: bytes) -> int:
        self.content += data[: self.room]
        return min(self.room, len(data))

    def close(self) -> None:
        raise OSError("the disk is gone")


def test_what_is_lost_is_said_once_and_counted() -> None:
    """No write raises, the end neither; an event that was cut off doesn't spoil the next one."""
    log_text, disk = io.StringIO(), Short()
    log: Any = LogFile(Path("log"), log_text)
    log._file = disk
    log.write("12\n")
    for _ in range(3):
        log.write("a long event\n")
    disk.room = 100
    log.write("34\n")
    log.__exit__(None, None, None)
    assert disk.content.startswith(b"12\na lo\na l")
    assert disk.content.endswith(b"\n34\n")
    begins, ends, lost = log_text.getvalue().splitlines()
    assert begins == "log: events are lost from here on: the event did not fit completely"
    assert (ends, lost) == ("log: the disk is gone", "log: 3 events were lost in all")


def test_nobody_may_be_left_to_be_told() -> None:
    """Not even a closed stderr is an error."""

    class Closed(io.StringIO):
        def write(self, _: str) -> int:
            raise OSError("closed")

    log: Any = LogFile(Path("log"), Closed())
    log._file = Short()
    log.write("a long event\n")
    assert log.num_lost == 1


@needs_full
def test_a_full_disk_is_no_error_of_the_program() -> None:
    """The events go on, one line says that they go nowhere."""
    log_text = io.StringIO()
    with LogFile(Path("/dev/full"), log_text) as log:
        for number in range(5):
            make_logger(log).info("request_matched", request_id=str(number))
    assert len(log_text.getvalue().splitlines()) == 2


@pytest.mark.parametrize("path", ["/no/such/place/log", "/", "x\0y"])
def test_a_place_that_can_have_no_log(path: str) -> None:
    """Refused by name, before any work."""
    with pytest.raises(InvalidArgument, match=r"^log: cannot be written"):
        LogFile(Path(path)).__enter__()


@needs_full
def test_a_result_that_cannot_be_written(capsys: pytest.CaptureFixture[str]) -> None:
    """The table is printed nevertheless; exit status 2 and the option's name."""
    with pytest.raises(SystemExit) as ended:
        main(["--requests", "2", "--model", "tiny", "--json", "/dev/full"])
    captured = capsys.readouterr()
    assert ended.value.code == 2
    assert "argument --json: cannot be written" in captured.err
    assert "Traceback" not in captured.err and captured.out
