"""What vLLM itself sees of the connector."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs
import pytest
from engine_doubles import Manager, Request
from vllm_configs import kv_cache_config, vllm_config
from vllm_doubles import CONNECTOR, NAMES, AoffloadConnector, KVConnectorRole, vllm_importable

import aoffload.integrations.vllm as package
from aoffload import ConfigError
from aoffload._vllm.internals import FIELDS, SUPPORTED
from proof.vllm.models import DENSE

needs_vllm = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")


def test_the_package_does_not_import_vllm() -> None:
    """An environment without it can import everything but the connector."""
    code = "import sys, aoffload._vllm.guard; sys.exit('vllm' in sys.modules)"
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
def test_no_stand_in_shadows_vllm() -> None:
    """Where vLLM is installed, all tests of the connector run over its own classes."""
    assert importlib.import_module("vllm").__file__
    assert AoffloadConnector is package.AoffloadConnector and issubclass(AoffloadConnector, base_of_vllm())
    for module_name, made in NAMES.items():
        module = importlib.import_module(module_name)
        assert not [name for name, stand_in in made.items() if getattr(module, name) is stand_in]


@pytest.mark.vllm
@needs_vllm
def test_every_hook_is_one_of_vllms() -> None:
    """A misspelled hook would never be called. Those of sleep mode came with vLLM 0.33."""
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

    hooks = {name for name in vars(package.AoffloadConnector) if not name.startswith("_")}
    ours = {"ledger", "off_reason", "make_transport"}
    later = {"unregister_kv_caches", "restore_kv_caches"}
    assert hooks - set(dir(KVConnectorBase_V1)) - {"request_finished_all_groups"} <= ours | later


@pytest.mark.vllm
@needs_vllm
def test_the_stand_ins_have_vllms_names() -> None:
    """What runs without vLLM runs over names that vLLM has, with fields that vLLM's classes have."""
    for module_name, made in NAMES.items():
        module = importlib.import_module(module_name)
        for name, stand_in in made.items():
            real = getattr(module, name)
            fields = {field.name for field in attrs.fields(stand_in)} if attrs.has(stand_in) else set()
            its = getattr(real, "__dataclass_fields__", None) or getattr(real, "__struct_fields__", ())
            assert fields <= set(its), name
    assert set(dir(NAMES[f"{CONNECTOR}.v1.base"]["KVConnectorBase_V1"])) <= set(dir(base_of_vllm()))


def base_of_vllm() -> Any:
    return importlib.import_module(f"{CONNECTOR}.v1.base").KVConnectorBase_V1


def made(role: str = "SCHEDULER", **changes: Any) -> Any:
    """A connector of a configuration that differs from a sound one: `kv_role="kv_producer"`."""
    config = vllm_config()
    for part in vars(config).values():
        for name, value in changes.items():
            if hasattr(part, name):
                setattr(part, name, value)
    config.speculative_config = changes.get("speculative_config")
    with vllm_importable():
        return AoffloadConnector(config, KVConnectorRole[role], kv_cache_config(9))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("kv_load_failure_policy", "fail"),
        ("kv_role", "kv_producer"),
        ("enable_prefix_caching", False),
        ("pipeline_parallel_size", 2),
    ],
)
def test_what_cannot_work_is_refused(name: str, value: Any) -> None:
    """At the start, by the name of the option, with a way out."""
    with pytest.raises(ConfigError, match=r"Start |Use |Set ") as caught:
        made(**{name: value})
    assert caught.value.argument == name


class VllmConfig:
    """As vLLM's: it asks for the class of the connector when its fields are set, and before anything is loaded."""

    def __init__(self, fields: Any) -> None:
        self.__dict__.update(vars(fields))
        self.__post_init__()

    def __post_init__(self) -> None:
        with vllm_importable():
            assert package.AoffloadConnector.__name__ == "AoffloadConnector"


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"kv_role": "kv_producer"}, "kv_role"),
        ({"enable_prefix_caching": False}, "enable_prefix_caching"),
        ({"kv_connector_extra_config": {"num_host_blocks": 64, "hots_bytes": 1}}, "hots_bytes"),
        ({"kv_connector_extra_config": {}}, "host_bytes"),
        ({"kv_connector_extra_config": {"host_bytes": "64GiB", "disk": {"path": "/kv", "size": "1GB"}}}, "namespace"),
    ],
)
def test_it_is_refused_before_weights_are_loaded(changes: dict[str, Any], named: str) -> None:
    """vLLM makes connectors when a model is loaded, which may take minutes. It looks for their class before."""
    config = vllm_config()
    VllmConfig(config)
    for part in filter(None, vars(config).values()):
        vars(part).update({name: value for name, value in changes.items() if hasattr(part, name)})
    with pytest.raises(ConfigError) as caught:
        VllmConfig(config)
    assert caught.value.argument == named
    config.kv_transfer_config.kv_connector = "MultiConnector"
    VllmConfig(config)  # the keys are those of several connectors


@pytest.mark.parametrize("tells", [True, False])
def test_sleep_mode_takes_a_vllm_that_tells_of_it(monkeypatch: pytest.MonkeyPatch, tells: bool) -> None:
    """Without these hooks, which came with vLLM 0.33, copies would go on while the KV tensors have no memory. The
    refusal says what to do instead."""
    base = AoffloadConnector.__mro__[1]
    monkeypatch.setattr(base, "unregister_kv_caches", lambda self: None, raising=False)
    if not tells:
        monkeypatch.delattr(base, "unregister_kv_caches")
        with pytest.raises(ConfigError, match=r"Use vLLM 0\.33, or start without --enable-sleep-mode") as caught:
            made(enable_sleep_mode=True)
        assert caught.value.argument == "enable_sleep_mode"
    else:
        assert made(enable_sleep_mode=True).off_reason == ""


@pytest.mark.vllm
@needs_vllm
def test_vllm_itself_refuses_before_it_loads_weights(tmp_path: Path) -> None:
    """With the configuration of a model that has no weights at all."""
    from vllm import EngineArgs
    from vllm.config import KVTransferConfig

    (tmp_path / "config.json").write_text(json.dumps(DENSE))
    fields = {"kv_connector_module_path": package.__name__, "kv_load_failure_policy": "recompute"}
    for role, extra in (("kv_producer", {"host_bytes": 1 << 20}), ("kv_both", {"kv_role": 1})):
        transfer = KVTransferConfig("AoffloadConnector", kv_role=role, kv_connector_extra_config=extra, **fields)
        arguments = EngineArgs(str(tmp_path), skip_tokenizer_init=True, kv_transfer_config=transfer, dtype="float32")
        with pytest.raises(ValueError, match="kv_role"):
            arguments.create_engine_config()


@pytest.mark.parametrize("lacks", ["vllm.v1.metrics.cache_hit_source", "SupportsHMA", "get_cached_block"])
def test_another_version_of_vllm_is_named(tmp_path: Path, lacks: str) -> None:
    """What the connector needs of vLLM has moved there: the error says which version is installed, and which are
    supported. It does not say that vLLM is missing."""
    folders = ("vllm.v1", "vllm.v1.metrics", "vllm.v1.core", "vllm.v1.core.sched", "vllm.lora", "vllm.multimodal")
    for name in (*NAMES, *folders):
        path = tmp_path.joinpath(*name.split("."))
        path.mkdir(parents=True, exist_ok=True)
        classes = {each: FIELDS.get(name, {}).get(each, ()) for each in NAMES.get(name, {}) if each[0].isalpha()}
        text = "\n".join(
            f"class {each}:\n    a: int\n" + "".join(f"    {field}: int\n" for field in fields if field != lacks)
            for each, fields in classes.items()
            if each != lacks
        )
        (path / "__init__.py").write_text(text + "\n__version__ = '0.31.0'\n")
    if "." in lacks:
        shutil.rmtree(tmp_path.joinpath(*lacks.split(".")))
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "import aoffload.integrations.vllm as package\n"
        "from aoffload.errors import MissingExtra, UnsupportedVersion\n"
        "try: package.AoffloadConnector\n"
        "except UnsupportedVersion as error: assert not isinstance(error, MissingExtra); print(error.version, error)"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.startswith("0.31.0 AoffloadConnector does not work with vllm 0.31.0, which has no "), done.stderr
    assert lacks in done.stdout and done.stdout.endswith(f"install {SUPPORTED}\n")


def test_speculation_without_kv_of_its_own_is_no_obstacle() -> None:
    """n-gram drafts compute nothing."""
    assert made(speculative_config=SimpleNamespace(method="ngram", use_eagle=lambda: False)).off_reason == ""


def test_what_the_model_is_enters_every_key() -> None:
    """Another model, revision, type of weights or of KV never hits."""
    spaces = [
        made(**changes)._deciding.half._config.namespace
        for changes in ({}, {"model": "n"}, {"revision": "b"}, {"dtype": "float16"}, {"cache_dtype": "fp8"})
    ]
    assert len(set(spaces)) == 5


def test_it_is_a_cache_and_no_delivery() -> None:
    """vLLM neither recomputes a preempted request for it, nor keeps blocks of one that has finished."""
    connector = made()
    connector.bind_kv_cache_manager(Manager(9))
    assert not connector.requires_kv_delivery
    assert connector.request_finished(Request("r", range(9)), [1, 2]) == (False, None)
    assert connector._cache_hit_source.value == "host"


def test_workers_count_nothing() -> None:
    """Their numbers reach the scheduler with what they have copied."""
    worker = made("WORKER")
    assert worker.get_kv_connector_stats() is None
    assert worker.build_connector_worker_meta() is None
    worker.shutdown()


def test_the_entry_point_is_declared() -> None:
    """vLLM calls what stands there in each of its processes."""
    (found,) = [one for one in entry_points(group="vllm.general_plugins") if one.name == "aoffload"] or [None]
    if found is None:
        pytest.skip("this environment has an installation from before the entry point")
    assert found.value == "aoffload.integrations.vllm:register"


def test_what_inputs_are_made_of_enters_the_identity_of_a_disk() -> None:
    """vLLM caches an image by a hash of the image, whatever its processor is told to make of it; and the hash of the
    model leaves that out. An engine that is told nothing finds what it has stored before."""
    identity_of = AoffloadConnector.__init__.__globals__["_identity"]

    def others(**fields: Any) -> str:
        config = vllm_config()
        config.model_config.multimodal_config = SimpleNamespace(**fields) if fields else None
        found: str = identity_of(config, kv_cache_config(9), "weights").others
        return found

    told = [{"mm_processor_kwargs": {"max_pixels": number}} for number in (1, 2)]
    found = [others(**fields) for fields in (*told, {"media_io_kwargs": {"video": {"fps": 1}}}, {"other": 1})]
    assert len(set(found)) == 4
    assert found[-1] == others()
