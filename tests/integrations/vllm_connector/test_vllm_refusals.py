"""Refusals before vLLM loads weights: under `MultiConnector`, and of a machine that lacks what the keys ask for."""

from __future__ import annotations

import json
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from test_vllm_plugin import VllmConfig, needs_vllm
from vllm_configs import vllm_config

import aoffload.integrations.vllm as package
from aoffload import ConfigError
from aoffload._vllm import refusals
from aoffload.errors import MissingExtra
from proof.vllm.models import DENSE

OURS = {
    "kv_connector": "AoffloadConnector",
    "kv_load_failure_policy": "recompute",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {"num_host_blocks": 64},
}
OTHER = {"kv_connector": "OtherConnector", "kv_role": "kv_both"}


def several(*connectors: dict[str, Any], **fields: Any) -> Any:
    config = vllm_config()
    transfer = {**OURS, "kv_connector": "MultiConnector", "engine_id": "e", **fields}
    config.kv_transfer_config = SimpleNamespace(
        **transfer | {"kv_connector_extra_config": {"connectors": [*connectors]}}
    )
    return config


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"kv_role": "kv_producer"}, "kv_role"),
        ({"kv_load_failure_policy": "fail"}, "kv_load_failure_policy"),
        ({"kv_connector_extra_config": {"num_host_blocks": 64, "hots_bytes": 1}}, "hots_bytes"),
        ({"kv_connector_extra_config": {}}, "host_bytes"),
    ],
)
def test_one_of_several_connectors_is_refused_early(changes: dict[str, Any], named: str) -> None:
    """The error names the option as for a single connector, and its place."""
    VllmConfig(several(OTHER, OURS))
    with pytest.raises(ConfigError, match=r"\(`connectors\[1\]` of MultiConnector\)") as caught:
        VllmConfig(several(OTHER, OURS | changes))
    assert caught.value.argument == named
    VllmConfig(several(OTHER, OTHER | changes))  # other connectors have other rules


def test_a_connector_within_two_others_is_checked() -> None:
    """With the place in each of them."""
    inner = {"kv_connector": "MultiConnector", "kv_load_failure_policy": "recompute", "kv_role": "kv_both"}
    wrong = inner | {"kv_connector_extra_config": {"connectors": [OURS | {"kv_role": "kv_consumer"}]}}
    with pytest.raises(ConfigError, match=r"\(`connectors\[0\]` of .*\) \(`connectors\[1\]` of") as caught:
        VllmConfig(several(OTHER, wrong))
    assert caught.value.argument == "kv_role"


@pytest.mark.parametrize(
    "connectors", [7, "AoffloadConnector", {"first": OURS}, [None], [OURS, "Other"], [[OURS]], [{1: 2}]]
)
def test_connectors_that_are_no_list_of_configurations_are_refused(connectors: Any) -> None:
    """By name, also within another `MultiConnector`, and not as an error of Python."""
    config = several()
    config.kv_transfer_config.kv_connector_extra_config["connectors"] = connectors
    inner = {"kv_connector": "MultiConnector", "kv_load_failure_policy": "recompute", "kv_role": "kv_both"}
    for each in (config, several(inner | {"kv_connector_extra_config": {"connectors": connectors}})):
        with pytest.raises(ConfigError, match="must be a list of configurations") as caught:
            VllmConfig(each)
        assert caught.value.argument == "connectors"


def test_the_policy_of_the_whole_is_the_one_that_counts() -> None:
    """vLLM reads what becomes of a failed load from `MultiConnector`, and not from its children."""
    with pytest.raises(ConfigError, match=r"MultiConnector got .fail.") as caught:
        VllmConfig(several(OURS, kv_load_failure_policy="fail"))
    assert caught.value.argument == "kv_load_failure_policy"
    VllmConfig(several(OTHER, kv_load_failure_policy="fail"))


def test_the_checks_of_one_connector_leave_the_others_alone() -> None:
    """vLLM goes on with its own configuration, which names several connectors."""
    config = several(OURS)
    VllmConfig(config)
    assert config.kv_transfer_config.kv_connector == "MultiConnector"
    assert vars(config.kv_transfer_config)["kv_connector_extra_config"] == {"connectors": [OURS]}


def refused(**extra: Any) -> ConfigError:
    config = vllm_config(**extra)
    with pytest.raises(ConfigError) as caught:
        VllmConfig(config)
    return caught.value


def test_a_policy_that_vllm_cannot_follow_is_refused_early() -> None:
    """The ledger refuses it, too, but only after vLLM has loaded the weights."""
    found = refused(store_policy="lazy")
    assert found.argument == "store_policy" and found.problem.endswith("Use eager or selective")


def test_a_name_of_the_disk_that_there_is_not_is_refused_early() -> None:
    """Also if vLLM publishes no events yet."""
    assert refused(event_media="SSD").argument == "event_media"


@pytest.mark.parametrize("key", ["host_bytes", "cpu_bytes_to_use"])
def test_more_host_memory_than_the_machine_has_is_refused(monkeypatch: pytest.MonkeyPatch, key: str) -> None:
    """Linux would promise it at the start, and kill the engine when it is used. A container may have less than its
    machine."""
    found = refused(num_host_blocks=None, **{key: "1024TiB"})
    assert found.argument == key and found.problem.endswith("Set a smaller size, and use `disk` for the rest")
    monkeypatch.setattr(refusals, "memory_limit", lambda: SimpleNamespace(limit_bytes=2**20))
    assert refused(num_host_blocks=None, **{key: 2**20}).argument == key
    VllmConfig(vllm_config(num_host_blocks=None, **{key: 2**20 - 1}))


@pytest.mark.parametrize("elsewhere", [{"nnodes": 2}, {"distributed_executor_backend": "ray"}])
def test_other_machines_are_not_judged_by_this_one(tmp_path: Path, elsewhere: dict[str, Any]) -> None:
    """Workers may run where there is more memory, and the directory."""
    config = vllm_config(num_host_blocks=None, host_bytes="1024TiB", **disk_at(tmp_path / "kv", size="1024TiB"))
    vars(config.parallel_config).update(elsewhere)
    VllmConfig(config)


def disk_at(path: Path, size: str = "1MiB") -> dict[str, Any]:
    return {"disk": {"path": str(path), "size": size}, "namespace": "weights"}


def test_a_directory_that_cannot_be_used_is_refused(tmp_path: Path) -> None:
    """A file is there, or where its folder would be, or other users may enter it. One that can be made is not made:
    the configuration is only checked."""
    (tmp_path / "file").touch()
    (tmp_path / "open").mkdir(mode=0o755)
    for name, problem in (
        ("file", "is not a directory"),
        ("file/kv", "is not a directory"),
        ("open", "chmod it to 0700"),
    ):
        found = refused(**disk_at(tmp_path / name))
        assert found.argument == "path" and problem in found.problem
    VllmConfig(vllm_config(**disk_at(tmp_path / "new" / "kv")))
    assert not (tmp_path / "new").exists()


def test_a_directory_of_somebody_else_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The directory, or the one that it would be made in. The error names the one that cannot be written."""
    asked = list[Path]()
    monkeypatch.setattr("os.access", lambda path, mode: asked.append(path))
    found = refused(**disk_at(tmp_path / "new" / "kv"))
    assert found.problem == f"{tmp_path} cannot be written by this user: chown it, or name another directory"
    assert asked == [tmp_path]


def test_a_disk_without_the_space_is_refused(tmp_path: Path) -> None:
    """The files of an earlier engine count as free, because this one takes them over."""
    found = refused(**disk_at(tmp_path / "kv", size="1024TiB"))
    assert found.argument == "size" and found.problem.endswith("Set a smaller size, or free space")


def test_space_that_the_directory_has_already_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A restart finds its disk full of its own files."""
    path = tmp_path / "kv"
    path.mkdir(mode=0o700)
    (path / "slots").write_bytes(b"x" * 2**20)
    monkeypatch.setattr("os.statvfs", lambda path: SimpleNamespace(f_bavail=1, f_frsize=4096))
    VllmConfig(vllm_config(**disk_at(path)))
    assert refused(**disk_at(path, size="2MiB")).argument == "size"


def test_a_disk_without_its_extra_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error says what to install."""
    monkeypatch.setitem(sys.modules, "xxhash", None)
    with pytest.raises(MissingExtra, match=r"aoffload\[disk\]"):
        VllmConfig(vllm_config(**disk_at(tmp_path / "kv")))


@pytest.mark.vllm
@needs_vllm
def test_vllm_itself_refuses_one_of_several(tmp_path: Path) -> None:
    """While it checks the configuration, with a model that has no weights at all. vLLM looks for the classes in order,
    and stops at one without `SupportsHMA`."""
    from vllm import EngineArgs
    from vllm.config import KVTransferConfig

    assert find_spec("vllm")
    (tmp_path / "config.json").write_text(json.dumps(DENSE))
    ours = {**OURS, "kv_connector_module_path": package.__name__, "kv_connector_extra_config": {"hots_bytes": 1}}
    peer = {"kv_connector": "SimpleCPUOffloadConnector", "kv_role": "kv_both"}
    without_hma = {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}
    for connectors in ([ours], [peer, ours], [ours, without_hma]):
        transfer = KVTransferConfig(
            "MultiConnector", kv_role="kv_both", kv_load_failure_policy="recompute",
            kv_connector_extra_config={"connectors": connectors},
        )  # fmt: skip
        arguments = EngineArgs(str(tmp_path), skip_tokenizer_init=True, kv_transfer_config=transfer, dtype="float32")
        with pytest.raises(ValueError, match=rf"hots_bytes.*connectors\[{connectors.index(ours)}\]"):
            arguments.create_engine_config()
