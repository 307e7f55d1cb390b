"""The whole demo on a smaller model and workload."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from aoffload import KVCacheGroup
from aoffload._reference.engine.decoder import Decoder, DecoderConfig
from aoffload._reference.engine.transformers import TransformersModel
from aoffload.demo import command, runner, workload
from aoffload.demo.command import main
from aoffload.plan.forecast import Forecast, Sizes
from aoffload.plan.trace import read_trace

KEYS = {
    "requests",
    "completed",
    "aborted",
    "prompt_tokens",
    "device_hit_tokens",
    "host_hit_tokens",
    "computed_tokens",
    "outputs_identical",
    "blocks_loaded",
    "blocks_verified",
    "blocks_corrupt",
    "pinned_blocks_at_end",
    "quarantined_blocks",
    "ttft_s",
    "ttft_s_without_offload",
    "service_ttft_s",
    "service_ttft_s_without_offload",
    "ttft_share",
    "service_ttft_share",
    "load_gb_per_s",
    "store_gb_per_s",
    "wall_s",
    "store",
    "peak_device_bytes",
    "window_saved_bytes",
    "window_saved_of_bytes",
}


class Demo:
    """Runs the demo in this process."""

    def __init__(self, directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self._directory = directory
        self._capsys = capsys
        self.status = -1
        self.table = ""
        self.json: dict[str, Any] = {}
        self.events: list[dict[str, Any]] = []

    def run(self, *arguments: str) -> None:
        result, log = self._directory / "result.json", self._directory / "events.log"
        files = ["--json", str(result), "--log", str(log)]
        self.status = main(["--requests", "10", "--device-blocks", "40", *files, *arguments])
        self.table = self._capsys.readouterr().out
        self.json = json.loads(result.read_text())
        self.events = [json.loads(line) for line in log.read_text().splitlines()]


SMALL = DecoderConfig(hidden_size=64, intermediate_size=128, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16)


@pytest.fixture
def demo(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Demo:
    def load_small(_: str, *, seed: int, device: str) -> Decoder:
        return Decoder(SMALL, seed=seed, device=device)

    monkeypatch.setattr(command, "load_model", load_small)
    monkeypatch.setattr(workload, "SYSTEM_TOKENS", (64, 96))
    monkeypatch.setattr(workload, "OPENING_TOKENS", (192, 352))
    return Demo(tmp_path, capsys)


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_evicted_prefixes_come_back_and_nothing_changes(demo: Demo, backend: str) -> None:
    """The same tokens and logits bit for bit, a good part of the prompts from host memory, every loaded block verified,
    nothing left behind; and the numbers add up."""
    demo.run("--backend", backend)
    found = demo.json
    assert demo.status == 0
    assert found.keys() >= KEYS
    assert found["outputs_identical"] is True
    assert (found["requests"], found["completed"], found["aborted"]) == (10, 10, 0)
    assert found["blocks_verified"] == found["blocks_loaded"] > 0
    assert found["blocks_corrupt"] == found["pinned_blocks_at_end"] == found["quarantined_blocks"] == 0
    assert found["host_hit_tokens"] > 0.3 * found["prompt_tokens"]
    sources = found["device_hit_tokens"], found["host_hit_tokens"], found["computed_tokens"]
    assert sum(sources) == found["prompt_tokens"]
    assert found["computed_tokens"] < found["computed_tokens_without_offload"]
    for times in ("ttft_s", "ttft_s_without_offload", "service_ttft_s", "service_ttft_s_without_offload"):
        assert 0 < found[times]["p50"] <= found[times]["p99"]
    assert "equal to the reference bit for bit" in demo.table


def test_what_it_was_asked_for_can_be_planned(demo: Demo, tmp_path: Path) -> None:
    """From the record of the run with offload, the planner says how many tokens it computed, give or take what two
    requests computed at the same time."""
    demo.run("--record", str(tmp_path / "asked.jsonl"))
    trace = read_trace(tmp_path / "asked.jsonl")
    assert (len(trace.requests), trace.num_prompt_tokens) == (10, demo.json["prompt_tokens"])
    block_bytes = trace.block_tokens * 1024
    forecast = Forecast(trace, Sizes(1024, 40 * block_bytes, (demo.json["host_blocks"] * block_bytes,)))
    assert forecast.rows[2].num_computed_tokens == pytest.approx(demo.json["computed_tokens"], rel=0.1)


def test_prompts_that_are_begun_layer_by_layer_change_nothing(demo: Demo) -> None:
    """A fourth run: the same tokens and logits, what was begun early is counted, and times stand beside the others'."""
    demo.run("--layered")
    found = demo.json
    assert demo.status == 0
    assert found["outputs_identical"] is found["outputs_identical_by_layer"] is True
    assert 0 <= found["head_starts_used_by_layer"] <= found["head_starts_by_layer"]
    for times in ("ttft_s_by_layer", "service_ttft_s_by_layer"):
        assert 0 < found[times]["p50"] <= found[times]["p99"]
    assert "outputs layer by layer: 10 requests, tokens and logits equal" in demo.table
    assert "prompts begun while loading" in demo.table


def small_gemma() -> TransformersModel:
    from transformers import AutoModelForCausalLM, Gemma3TextConfig

    sizes = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "head_dim": 16}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "query_pre_attn_scalar": 16, "sliding_window": 64}
    layer_types = ["sliding_attention"] * 3 + ["full_attention"]
    config = Gemma3TextConfig(**sizes, layer_types=layer_types, tie_word_embeddings=False, initializer_range=0.06)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return TransformersModel(AutoModelForCausalLM.from_config(config))


def full_groups(model: Any, options: Any) -> list[KVCacheGroup]:
    return [KVCacheGroup(group.name, block_size=options.block_size) for group in model.groups]


@pytest.mark.parametrize(("backend", "kind", "num_blocks"), [("asyncio", "stand-in", "150"), ("trio", "windows", "90")])
def test_a_model_with_windows(
    demo: Demo, monkeypatch: pytest.MonkeyPatch, backend: str, kind: str, num_blocks: str
) -> None:
    """Sliding and full layers: the same answers bit for bit, host hits, nothing left; and the device memory that went
    back to the pool as windows moved on, as a number. With full groups in their place there is none."""
    monkeypatch.setattr(command, "load_model", lambda *_, **__: small_gemma())
    if kind == "stand-in":
        monkeypatch.setattr(runner, "engine_groups", full_groups)
    demo.run("--backend", backend, "--device-blocks", num_blocks)
    assert demo.status == 0
    assert demo.json["outputs_identical"] is True
    assert demo.json["blocks_verified"] == demo.json["blocks_loaded"] > 0
    assert demo.json["blocks_corrupt"] == demo.json["pinned_blocks_at_end"] == 0
    assert demo.json["host_hit_tokens"] > 0.3 * demo.json["prompt_tokens"]
    saved, of = demo.json["window_saved_bytes"], demo.json["window_saved_of_bytes"]
    assert ("device memory saved by freeing out-of-window blocks" in demo.table) == (kind == "windows")
    assert 0 < saved < of if kind == "windows" else saved == 0
    assert demo.json["peak_device_bytes"] > 0


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_nothing_is_stored_unless_asked_for(demo: Demo, backend: str) -> None:
    """`--store off` copies nothing to host memory, so nothing comes back, and the answers are the same."""
    demo.run("--backend", backend, "--store", "off")
    assert demo.status == 0
    assert (demo.json["store"], demo.json["blocks_stored"], demo.json["host_hit_tokens"]) == ("off", 0, 0)
    assert demo.json["outputs_identical"] is True


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_clients_that_go_away_harm_nobody(demo: Demo, backend: str) -> None:
    """Who stays gets the reference's answer; every aborted request says so exactly once, in the run with offload
    alone; no pin is left."""
    demo.run("--backend", backend, "--cancel-rate", "0.6")
    assert demo.status == 0
    assert demo.json["outputs_identical"] is True
    assert demo.json["aborted"] > 0
    assert demo.json["completed"] + demo.json["aborted"] == 10
    assert demo.json["pinned_blocks_at_end"] == 0
    aborted = Counter(event["request_id"] for event in demo.events if event["event"] == "request_aborted")
    assert len(aborted) == demo.json["aborted"]
    assert set(aborted.values()) == {1}
    assert all(name.startswith("with-offload-") for name in aborted)


def test_the_checksum_alone_catches_exchanged_blocks(demo: Demo) -> None:
    """Blocks exchanged before they are verified are a miss: the answers are right, and the demo says what happened."""
    demo.run("--corrupt", "checksum")
    assert demo.status == 1
    assert demo.json["outputs_identical"] is False
    assert demo.json["blocks_corrupt"] == 2
    assert "the checksum caught 2 of 2" in demo.table
    assert "DIFFERENT" not in demo.table


def test_the_logits_alone_catch_exchanged_blocks(demo: Demo) -> None:
    """Blocks exchanged behind the checksum's back give other logits, and nothing else gives them away."""
    demo.run("--corrupt", "logits")
    assert demo.status == 1
    assert demo.json["outputs_identical"] is False
    assert demo.json["blocks_corrupt"] == 0
    assert "were different" in demo.table
    assert "outputs with offload: DIFFERENT" in demo.table
    assert "outputs without offload: 10 requests, tokens and logits equal" in demo.table


def test_both_at_once(demo: Demo) -> None:
    """`--corrupt` alone does both, in different loads, and each check catches its own."""
    demo.run("--corrupt")
    assert demo.status == 1
    assert "the checksum caught 2 of 2" in demo.table
    assert "were different" in demo.table


def test_nothing_to_tamper_with_is_said(demo: Demo) -> None:
    """On a pool where nothing is evicted nothing is loaded: the control did not happen, and that's no success."""
    demo.run("--corrupt", "--device-blocks", "400")
    assert demo.status == 1
    assert demo.json["blocks_loaded"] == 0
    assert "not done" in demo.table


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--model", "nobody"], "--model"),
        (["--device-blocks", "3"], "--device-blocks"),
        (["--store", "sometimes"], "--store"),
        (["--json", "/nonexistent/result.json"], "--json"),
        (["--log", "/nonexistent/events.log"], "--log"),
        (["--record", "/nonexistent/asked.jsonl"], "--record"),
    ],
)
def test_what_cannot_work_is_said_first(arguments: list[str], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Options that are well-formed and impossible all the same give a message that names them, and status 2."""
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    assert named in capsys.readouterr().err


def start_demo(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "aoffload.demo", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )


@pytest.mark.parametrize(
    ("backend", "run"),
    [("asyncio", "reference"), ("trio", "with offload")],
)
def test_ctrl_c_ends_it_with_what_was_done(backend: str, run: str) -> None:
    """Ctrl-C in any of the runs: it is not finished, status 130, no traceback, the table so far."""
    with start_demo("--backend", backend, "--requests", "4") as process:
        assert process.stderr is not None
        for line in process.stderr:
            if line.startswith(run):
                break
        else:
            pytest.fail(f"no progress of {run}")
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in out + err
    assert "interrupted: these are the results so far" in out
    assert "requests done / aborted" in out


def test_a_second_demo_with_a_disk_starts_warm(
    demo: Demo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It computes a fraction of what the first one did, with the same logits; the table has rows for it."""
    pytest.importorskip("xxhash", reason="the extra `disk` is not installed")
    monkeypatch.setattr(runner, "DISK_SIZE", "16MiB")
    found = []
    for _ in range(2):
        demo.run("--disk", str(tmp_path / "disk"))
        assert (demo.status, demo.json["outputs_identical"]) == (0, True)
        found.append(demo.json)
    first, second = found
    assert first["disk_blocks_at_start"] == 0 < second["disk_blocks_at_start"]
    assert second["disk_blocks_loaded"] > 0 == second["disk_blocks_corrupt"]
    assert second["computed_tokens"] < first["computed_tokens"] / 2
    assert "blocks on the disk at the start" in demo.table
    assert f"disk: found {second['disk_blocks_at_start']:,} blocks of earlier runs; " in demo.table
    assert " from it instead of computing them, " in demo.table
    (tmp_path / "open").mkdir(mode=0o755)
    with pytest.raises(SystemExit):
        demo.run("--disk", str(tmp_path / "open"))
    assert "argument --disk: " in capsys.readouterr().err
