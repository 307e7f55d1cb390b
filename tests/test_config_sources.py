"""The configuration read from a file or from the environment: the same settings, and errors that say where."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs
import pytest

from aoffload import (
    ChunkedLocal,
    ConfigError,
    DiskTier,
    FullAttention,
    KVCacheGroup,
    OffloadConfig,
    RecurrentState,
    SlidingWindow,
)
from aoffload.ledger import Quota, Quotas

GROUPS = (
    KVCacheGroup("full", FullAttention(), 32),
    KVCacheGroup("near", SlidingWindow(128)),
    KVCacheGroup("local", ChunkedLocal(8192)),
    KVCacheGroup("state", RecurrentState(), 32, num_rows=147),
)
GROUPS_TEXT = (
    '[{name = "full", block_size = 32}, {name = "near", window = 128}, {name = "local", chunk = 8192}, '
    '{name = "state", block_size = 32, rows = 147}]'
)
OTHERS: dict[str, Any] = {
    "groups": GROUPS,
    "num_host_blocks": 77,
    "host_bytes": "3GiB",
    "namespace": "llama-3.1-8b@bf16",
    "weights_epoch": "step-7",
    "store_policy": "lazy",
    "window_interval_tokens": 512,
    "eviction": "lru",
    "load_choice": "cost",
    "verify": True,
    "max_jobs_in_flight": 9,
    "max_bytes_in_flight": "1MB",
    "max_job_bytes": "77777",
    "load_timeout_s": 1.5,
    "fetch_timeout_s": 1.7,
    "prefill_tokens_per_s": 20_000.5,
    "transfer_timeout_s": 2.0,
    "store_timeout_s": 2.5,
    "close_timeout_s": 3.0,
    "slow_wait_s": 5.0,
    "slow_step_s": 6.0,
    "pending_timeout_s": 4.0,
    "max_pinned_share": 0.1,
    "max_hint_pinned_share": 0.1,
    "max_hint_pin_s": 60.0,
    "max_prefetch_share": 0.2,
    "max_fetch_share": 0.15,
    "max_quarantined_share": 0.3,
}
"""For each field a value that it does not have by default."""
FIELDS = [field.name for field in attrs.fields(OffloadConfig) if field.name not in ("disk", "remote", "quotas")]
LEAST = 'num_host_blocks = 4\n[[groups]]\nname = "full"\n'

each_field = pytest.mark.parametrize("name", FIELDS)


def written(value: object) -> str:
    """A value as it is written in a TOML file."""
    if value is GROUPS:
        return GROUPS_TEXT
    return str(value).lower() if isinstance(value, bool) else repr(value)


def file_of(directory: Path, text: str) -> Path:
    path = directory / "aoffload.toml"
    path.write_text(text)
    return path


def arguments_of(name: str) -> dict[str, Any]:
    """What a configuration needs besides the field `name`."""
    return {"groups": [KVCacheGroup("full")], **({} if name == "host_bytes" else {"num_host_blocks": 4})}


@each_field
def test_every_setting_can_be_in_a_file(name: str, tmp_path: Path) -> None:
    """A field set in a file is the field set in the program."""
    path = file_of(tmp_path, f"{name} = {written(OTHERS[name])}\n")
    others = {key: value for key, value in arguments_of(name).items() if key != name}
    assert OffloadConfig.from_file(path, **others) == OffloadConfig(**others, **{name: OTHERS[name]})


@each_field
def test_every_setting_can_be_in_the_environment(name: str) -> None:
    """The variable has the field's name in capitals; only strings are quoted in a file and not in a variable."""
    value = OTHERS[name]
    text = value if isinstance(value, str) else written(value)
    others = {key: value for key, value in arguments_of(name).items() if key != name}
    found = OffloadConfig.from_env({f"AOFFLOAD_{name.upper()}": text, "HOME": "/"}, **others)
    assert found == OffloadConfig(**others, **{name: value})


def test_arguments_go_before_variables_and_these_before_the_file(tmp_path: Path) -> None:
    """Each setting is taken from the nearest of the three that has it."""
    path = file_of(tmp_path, 'verify = true\nnamespace = "file"\nmax_jobs_in_flight = 2\n' + LEAST)
    environ = {"AOFFLOAD_CONFIG_FILE": str(path), "AOFFLOAD_NAMESPACE": "variable", "AOFFLOAD_MAX_JOBS_IN_FLIGHT": "3"}
    found = OffloadConfig.from_env(environ, max_jobs_in_flight=5)
    assert (found.verify, found.namespace, found.max_jobs_in_flight) == (True, "variable", 5)
    assert OffloadConfig.from_file(path, namespace="argument").namespace == "argument"


def test_the_environment_of_the_process_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AOFFLOAD_NUM_HOST_BLOCKS", "12")
    assert OffloadConfig.from_env(groups=GROUPS).num_host_blocks == 12


def test_a_later_source_may_size_the_host_pool_in_the_other_way(tmp_path: Path) -> None:
    """Blocks in the file and bytes in a variable are no contradiction; both in one source are."""
    path = file_of(tmp_path, LEAST)
    found = OffloadConfig.from_env({"AOFFLOAD_CONFIG_FILE": str(path), "AOFFLOAD_HOST_BYTES": "1GiB"})
    assert (found.num_host_blocks, found.host_bytes) == (None, "1GiB")
    assert OffloadConfig.from_file(path, host_bytes=2**20).host_bytes == 2**20
    with pytest.raises(ConfigError, match=r"either num_host_blocks or host_bytes: both are given \(.*aoffload.toml"):
        OffloadConfig.from_file(file_of(tmp_path, 'host_bytes = "1GiB"\n' + LEAST))


WRONG = {
    "num_host_block = 4": "num_host_block",
    "num_host_blocks = 'many'": "num_host_blocks",
    "num_host_blocks = 4.0": "num_host_blocks",
    "host_bytes = '8 gigs'": "host_bytes",
    "max_job_bytes = []": "max_job_bytes",
    "namespace = 7": "namespace",
    "store_policy = 'lazily'": "store_policy",
    "store_policy = {name = 'lazy'}": "store_policy",
    "load_choice = 'dear'": "load_choice",
    "eviction = 3": "eviction",
    "verify = 'yes'": "verify",
    "load_timeout_s = nan": "load_timeout_s",
    "transfer_timeout_s = 1979-05-27": "transfer_timeout_s",
    "max_pinned_share = 2": "max_pinned_share",
    "groups = []": "groups",
    "groups = 'full'": "groups",
    "groups = ['full']": "groups",
    "groups = [{}]": "groups.name",
    "groups = [{name = 'a', blocksize = 16}]": "groups.blocksize",
    "groups = [{name = 'a', block_size = 0}]": "groups.block_size",
    "groups = [{name = 'a', window = 0}]": "groups.window",
    "groups = [{name = 'a', chunk = '8'}]": "groups.chunk",
    "groups = [{name = 'a', window = 8, chunk = 8}]": "groups.window",
    "groups = [{name = 'a', window = 8, rows = 8}]": "groups.window",
    "groups = [{name = 'a', chunk = 8, rows = 8}]": "groups.chunk",
    "groups = [{name = 'a', rows = 0}]": "groups.rows",
    "groups = [{name = 'a', rows = '8'}]": "groups.rows",
    "groups = [{name = 'a', num_rows = 8}]": "groups.num_rows",
    "groups = [{name = 'a'}, {name = 'a'}]": "groups",
}
"""Lines of a file, and the setting that the error names."""


@pytest.mark.parametrize("line", WRONG)
def test_what_is_wrong_in_a_file_is_named_with_the_file(line: str, tmp_path: Path) -> None:
    """Unknown keys, wrong types, values out of range, contradictions: one typed error, the key and the file in it."""
    name = line.partition(" ")[0]
    others = {key: value for key, value in arguments_of(name).items() if key != name}
    path = file_of(tmp_path, line)
    with pytest.raises(ConfigError) as refusal:
        OffloadConfig.from_file(path, **others)
    assert refusal.value.argument == WRONG[line]
    assert str(refusal.value).endswith(f"({path})")
    assert str(refusal.value).count(str(path)) == 1


@pytest.mark.parametrize(
    ("variable", "text", "argument"),
    [
        ("AOFFLOAD_NUM_HOST_BLOCK", "4", "AOFFLOAD_NUM_HOST_BLOCK"),
        ("AOFFLOAD_num_host_blocks", "4", "AOFFLOAD_num_host_blocks"),
        *(("AOFFLOAD_NUM_HOST_BLOCKS", text, "num_host_blocks") for text in ("", "many", "1.5", "-4", "9" * 9999)),
        *(("AOFFLOAD_VERIFY", text, "verify") for text in ("", "yes", "1")),
        *(("AOFFLOAD_LOAD_TIMEOUT_S", text, "load_timeout_s") for text in ("", "soon", "inf", "-1")),
        ("AOFFLOAD_HOST_BYTES", "8 gigs", "host_bytes"),
        ("AOFFLOAD_STORE_POLICY", "LAZY", "store_policy"),
        ("AOFFLOAD_NAMESPACE", "\udcff", "namespace"),
        *(("AOFFLOAD_GROUPS", text, "groups") for text in ("", "full", "7", "[]\nverify = true", "[" * 9999)),
        ("AOFFLOAD_GROUPS", '[{name = "a", block_size = "16"}]', "groups.block_size"),
    ],
)
def test_what_is_wrong_in_the_environment_is_named_with_the_variable(variable: str, text: str, argument: str) -> None:
    """A misspelled variable is refused, too: a setting is never left out in silence."""
    name = variable.removeprefix("AOFFLOAD_").lower()
    others = {key: value for key, value in arguments_of(name).items() if key != name}
    with pytest.raises(ConfigError) as refusal:
        OffloadConfig.from_env({variable: text}, **others)
    assert refusal.value.argument == argument
    assert str(refusal.value).count(variable) == 1


@pytest.mark.parametrize(
    "content", [None, b"num_host_blocks", b"verify = true\nverify = true", b"\xff\xfe", b"[" * 9999]
)
def test_a_file_that_cannot_be_read_is_named(content: bytes | None, tmp_path: Path) -> None:
    """Missing, no TOML, no UTF-8: as a file of its own, and as the one that the environment names."""
    path = tmp_path / "aoffload.toml"
    if content is not None:
        path.write_bytes(content)
    for argument, read in {
        "path": lambda: OffloadConfig.from_file(path),
        "AOFFLOAD_CONFIG_FILE": lambda: OffloadConfig.from_env({"AOFFLOAD_CONFIG_FILE": str(path)}),
    }.items():
        with pytest.raises(ConfigError, match=r"aoffload\.toml") as refusal:
            read()
        assert refusal.value.argument == argument


@pytest.mark.parametrize("path", [None, 3, "", "a\0b", ".", b"aoffload.toml"])
def test_a_path_that_is_none_is_refused(path: Any) -> None:
    """Another type, a directory, or nothing at all."""
    with pytest.raises(ConfigError) as refusal:
        OffloadConfig.from_file(path)
    assert refusal.value.argument == "path"


def test_what_is_missing_everywhere_is_named_with_all_sources(tmp_path: Path) -> None:
    """Whoever forgot the groups, or the host pool, sees where they were looked for."""
    path = file_of(tmp_path, "num_host_blocks = 4")
    with pytest.raises(ConfigError, match=r"groups: is missing .*aoffload.toml and variables AOFFLOAD_"):
        OffloadConfig.from_env({"AOFFLOAD_CONFIG_FILE": str(path)})
    with pytest.raises(ConfigError, match=r"num_host_blocks: .*variables AOFFLOAD_"):
        OffloadConfig.from_env({}, groups=GROUPS)


def test_an_error_about_an_argument_names_no_source(tmp_path: Path) -> None:
    """What the program says wrongly stands in no file."""
    with pytest.raises(ConfigError) as refusal:
        OffloadConfig.from_file(file_of(tmp_path, LEAST), verify="yes")
    assert "aoffload.toml" not in str(refusal.value)


@pytest.mark.parametrize("name", ["slow_wait_s", "slow_step_s", "store_timeout_s"])
def test_none_can_be_said_in_a_file_and_in_the_environment(tmp_path: Path, name: str) -> None:
    """Neither has a word of its own for it. Where a setting is a number only, the word is refused."""
    file = file_of(tmp_path, f'{name} = "none"\nload_timeout_s = "none"\n' + LEAST)
    with pytest.raises(ConfigError, match="load_timeout_s"):
        OffloadConfig.from_file(file)
    file = file_of(tmp_path, f'{name} = "none"\n' + LEAST)
    assert getattr(OffloadConfig.from_file(file), name) is None
    environ = {"AOFFLOAD_CONFIG_FILE": str(file), f"AOFFLOAD_{name.upper()}": "none"}
    assert getattr(OffloadConfig.from_env(environ), name) is None


def test_variables_that_are_no_settings_of_ours_but_known(tmp_path: Path) -> None:
    """The HTTP server's key may be in the environment, too; an empty name of a file is none."""
    environ = {"AOFFLOAD_API_KEY": "key", "AOFFLOAD_CONFIG_FILE": "", "AOFFLOAD_NUM_HOST_BLOCKS": "3"}
    assert OffloadConfig.from_env(environ, groups=GROUPS).num_host_blocks == 3


DISK = DiskTier("/var/kv", "2TB", daily_writes="1TB", close_flush_s=2.5, open_timeout_s=7)
DISK_TEXT = '{path = "/var/kv", size = "2TB", daily_writes = "1TB", close_flush_s = 2.5, open_timeout_s = 7}'


def test_a_disk_is_a_table(tmp_path: Path) -> None:
    """In a file, and in a variable as it would be in one; `none` where there is to be none, or no other cap."""
    named = {"namespace": "m"}
    text = f'{LEAST}[disk]\npath = "/var/kv"\nsize = "2TB"\ndaily_writes = "1TB"\n'
    text += "close_flush_s = 2.5\nopen_timeout_s = 7\n"
    path = file_of(tmp_path, text)
    assert OffloadConfig.from_file(path, **named).disk == DISK
    others = {"AOFFLOAD_CONFIG_FILE": str(path), "AOFFLOAD_NAMESPACE": "m"}
    assert OffloadConfig.from_env(others | {"AOFFLOAD_DISK": "none"}).disk is None
    short = OffloadConfig.from_env(others | {"AOFFLOAD_DISK": '{path = "x", size = 1000, daily_writes = "none"}'})
    assert short.disk == DiskTier("x", 1000)
    assert OffloadConfig.from_env(others | {"AOFFLOAD_DISK": DISK_TEXT}).disk == DISK


@pytest.mark.parametrize(
    ("argument", "text"),
    [
        ("disk", "7"),
        ("disk", '"/var/kv"'),
        ("disk", "[1"),
        ("disk.path", '{size = "1GB"}'),
        ("disk.size", '{path = "x"}'),
        ("disk.size", '{path = "x", size = "big"}'),
        ("disk.path", '{path = "", size = 1}'),
        ("disk.pth", '{pth = "x", size = 1}'),
        ("disk.close_flush_s", '{path = "x", size = 1, close_flush_s = -1}'),
        ("disk.daily_writes", '{path = "x", size = 1, daily_writes = 0}'),
    ],
)
def test_what_is_wrong_with_a_disk_is_named(argument: str, text: str) -> None:
    """With the table's name before it, and the variable."""
    with pytest.raises(ConfigError, match="AOFFLOAD_DISK") as refusal:
        OffloadConfig.from_env({"AOFFLOAD_DISK": text, "AOFFLOAD_NUM_HOST_BLOCKS": "4", "AOFFLOAD_NAMESPACE": "m"})
    assert refusal.value.argument == argument


def test_a_remote_store_is_a_table(tmp_path: Path) -> None:
    """With a URL, and the name of the file that has the secret; a line's end is no part of it."""
    pytest.importorskip("redis", reason="the extra `remote` is not installed")
    (tmp_path / "secret").write_bytes(b"0123456789abcdef\n")
    text = f'{{url = "redis://:password@localhost:1/2", secret_file = "{tmp_path}/secret", load_timeout_s = 2.5}}'
    (tmp_path / "config").write_text(f"remote = {text}\n{LEAST}")
    from_file = OffloadConfig.from_file(tmp_path / "config", namespace="m").remote
    variables = {"AOFFLOAD_NUM_HOST_BLOCKS": "4", "AOFFLOAD_GROUPS": '[{name = "full"}]', "AOFFLOAD_REMOTE": text}
    for found in (from_file, OffloadConfig.from_env(variables, namespace="m").remote):
        assert found is not None and type(found.store).__name__ == "RedisStore"
        assert (found.secret, found.load_timeout_s, found.ask_timeout_s) == (b"0123456789abcdef", 2.5, 0.02)
        assert "password" not in repr(found)
    assert OffloadConfig.from_env(variables | {"AOFFLOAD_REMOTE": "none"}).remote is None
    cluster = variables | {"AOFFLOAD_REMOTE": '{url = "rediss+cluster://localhost:1"}'}
    remote = OffloadConfig.from_env(cluster, namespace="m").remote
    assert remote is not None and type(remote.store).__name__ == "RedisClusterStore" and remote.secret is None


@pytest.mark.parametrize(
    ("argument", "text"),
    [
        ("remote", "7"),
        ("remote", '"redis://localhost"'),
        ("remote.url", '{secret_file = "x"}'),
        ("remote.url", "{url = 7}"),
        ("remote.url", '{url = "http://:password@localhost"}'),
        ("remote.url", '{url = "redis://localhost:password"}'),
        ("remote.secret", '{url = "redis://localhost", secret = "password"}'),
        ("remote.secret_file", '{url = "redis://localhost", secret_file = "/nowhere/secret"}'),
        ("remote.secret_file", '{url = "redis://localhost", secret_file = 7}'),
        ("remote.secret", '{url = "redis://localhost", secret_file = "/dev/null"}'),
        ("remote.max_write_rate", '{url = "redis://localhost", max_write_rate = "much"}'),
        ("remote.ask_timeout_s", '{url = "redis://localhost", ask_timeout_s = 0}'),
        ("namespace", '{url = "redis://localhost"}'),
    ],
)
def test_what_is_wrong_with_a_remote_store_is_named(argument: str, text: str) -> None:
    """By the key and the variable, and no password is shown."""
    pytest.importorskip("redis", reason="the extra `remote` is not installed")
    variables = {"AOFFLOAD_NUM_HOST_BLOCKS": "4", "AOFFLOAD_GROUPS": '[{name = "full"}]', "AOFFLOAD_REMOTE": text}
    with pytest.raises(ConfigError) as refusal:
        OffloadConfig.from_env(variables)
    assert refusal.value.argument == argument
    assert "password" not in str(refusal.value)


SALTS = """
[default]
host_ceiling = "1GiB"
[salts.secret-a]
name = "team-a"
host_floor = "2GiB"
pinned = "none"
[salts.secret-b]
daily_writes = 5
"""


def test_quotas_are_a_table_or_a_file_of_their_own(tmp_path: Path) -> None:
    """A file of their own, because salts are secrets, and others may read the configuration."""
    (tmp_path / "salts").write_text(SALTS)
    (tmp_path / "config").write_text(f"{LEAST}[quotas]\nfile = {str(tmp_path / 'salts')!r}\n")
    text = """{default = {host_ceiling = "1GiB"}, salts = {secret-b = {daily_writes = 5}}}"""
    wanted = Quotas(
        {"secret-a": Quota(name="team-a", host_floor="2GiB"), "secret-b": Quota(daily_writes=5)},
        Quota(host_ceiling="1GiB"),
    )
    assert OffloadConfig.from_file(tmp_path / "config").quotas == wanted
    variables = {"AOFFLOAD_NUM_HOST_BLOCKS": "4", "AOFFLOAD_GROUPS": '[{name = "full"}]', "AOFFLOAD_QUOTAS": text}
    found = OffloadConfig.from_env(variables)
    assert found.quotas == Quotas({"secret-b": Quota(daily_writes=5)}, Quota(host_ceiling="1GiB"))
    assert "secret" not in repr(found)
    assert OffloadConfig.from_env(variables | {"AOFFLOAD_QUOTAS": "none"}).quotas is None


@pytest.mark.parametrize(
    ("argument", "text"),
    [
        ("quotas", "7"), ("quotas", '"secret"'), ("quotas", "{secret = {host_floor = 1}}"),
        ("quotas.salts", "{salts = 3}"), ("quotas.salts[1]", "{salts = {secret = 3}}"),
        ("quotas.salts[1].floor", "{salts = {secret = {floor = 3}}}"),
        ("quotas.salts[2].pinned", "{salts = {a = {}, secret = {pinned = true}}}"),
        ("quotas.default.host_floor", "{default = {host_floor = 2, host_ceiling = 1}}"),
        ("quotas", '{file = "/nowhere", default = {}}'), ("quotas.file", '{file = "/nowhere"}'),
        ("quotas.file", "{file = 3}"), ("quotas.salts", '{salts = {secret = {name = "secret"}}}'),
    ],
)  # fmt: skip
def test_what_is_wrong_with_quotas_is_named_without_a_salt(argument: str, text: str) -> None:
    variables = {"AOFFLOAD_NUM_HOST_BLOCKS": "4", "AOFFLOAD_GROUPS": '[{name = "full"}]', "AOFFLOAD_QUOTAS": text}
    with pytest.raises(ConfigError) as refusal:
        OffloadConfig.from_env(variables)
    assert refusal.value.argument == argument
    assert "secret" not in str(refusal.value)
