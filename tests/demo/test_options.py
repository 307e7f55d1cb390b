"""The demo's command line."""

from __future__ import annotations

import pytest

from aoffload.demo.options import STORE_POLICIES, Corrupt, DemoOptions, parse_options


def test_defaults_are_the_dataclass_s() -> None:
    """No options at all is a complete demo."""
    assert parse_options([]) == DemoOptions()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], None),
        (["--corrupt"], Corrupt.BOTH),
        (["--corrupt", "checksum"], Corrupt.CHECKSUM),
        (["--corrupt", "logits"], Corrupt.LOGITS),
    ],
)
def test_each_check_can_be_shown_alone(arguments: list[str], expected: Corrupt | None) -> None:
    """`--corrupt` alone shows both checks; with a name, that one."""
    assert parse_options(arguments).corrupt is expected


@pytest.mark.parametrize("name", STORE_POLICIES)
def test_each_store_policy_can_be_asked_for(name: str) -> None:
    """By the name that the configuration knows it by."""
    assert parse_options(["--store", name]).store == name


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--requests", "0"),
        ("--requests", "-3"),
        ("--requests", "many"),
        ("--requests", "1e9"),
        ("--device-blocks", "0"),
        ("--host-blocks", "99999999999"),
        ("--seed", "-1"),
        ("--cancel-rate", "1.5"),
        ("--cancel-rate", "nan"),
        ("--cancel-rate", "often"),
        ("--backend", "curio"),
        ("--device", "tpu"),
        ("--corrupt", "everything"),
        ("--store", "sometimes"),
    ],
)
def test_bad_values_are_named_and_exit_with_2(option: str, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A value that makes no sense gives one message that names the option, and exit status 2."""
    with pytest.raises(SystemExit) as stopped:
        parse_options([option, value])
    assert stopped.value.code == 2
    message = capsys.readouterr().err
    assert option in message
    assert value in message
