"""What vLLM itself sees of the connector."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from importlib.metadata import entry_points

import pytest

import aoffload.integrations.vllm as package

needs_vllm = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")


def test_the_package_does_not_import_vllm() -> None:
    """An environment without it can import everything but the connector."""
    code = "import sys, aoffload.integrations.vllm.guard; sys.exit('vllm' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_no_other_name_is_made_up() -> None:
    """A name that is wrong in the configuration is an error that tells it."""
    with pytest.raises(AttributeError, match="AofloadConnector"):
        package.AofloadConnector  # noqa: B018


@pytest.mark.vllm
@needs_vllm
def test_vllm_finds_the_connector() -> None:
    """By its name alone, once plugins are loaded, and as often as they are."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.distributed.kv_transfer.kv_connector.v1 import supports_hma

    package.register()
    package.register()
    found = KVConnectorFactory.get_connector_class_by_name("AoffloadConnector")
    assert found is package.AoffloadConnector
    assert supports_hma(found)


@pytest.mark.vllm
@needs_vllm
def test_every_hook_is_one_of_vllms() -> None:
    """A misspelled hook would never be called. Those of sleep mode came with vLLM 0.33."""
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

    hooks = {name for name in vars(package.AoffloadConnector) if not name.startswith("_")}
    assert hooks - set(dir(KVConnectorBase_V1)) - {"request_finished_all_groups"} <= {
        "unregister_kv_caches",
        "restore_kv_caches",
    }


@pytest.mark.vllm
@needs_vllm
def test_statistics_add_up() -> None:
    """Counts are summed over an interval; of a gauge the last value counts."""
    made = package.AoffloadConnector.build_kv_connector_stats
    one, other = made({"lost_tokens": 3.0, "off": 0.0}), made({"lost_tokens": 4.0, "jobs|load|landed": 1.0, "off": 1.0})
    total = one.aggregate(other)
    assert total.reduce() == {"lost_tokens": 7.0, "jobs load landed": 1.0, "off": 1.0}
    assert not total.is_empty()
    assert made().is_empty()


def test_the_entry_point_is_declared() -> None:
    """vLLM calls what stands there in each of its processes."""
    (found,) = [one for one in entry_points(group="vllm.general_plugins") if one.name == "aoffload"] or [None]
    if found is None:
        pytest.skip("this environment has an installation from before the entry point")
    assert found.value == "aoffload.integrations.vllm:register"
