"""vLLM's own API server with the connector, over HTTP: `python -m vllm.entrypoints.openai.api_server`."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from .bench import Bench, Scenario, Talks, run_part
from .models import DENSE
from .outputs import Answer
from .rows import Row, judge
from .transfers import HOST_BYTES

__all__ = ["SCENARIOS"]

SMALL_POOL = 34
TALKS = Talks(number=5, num_turns=3)
START_S, STOP_S = 240.0, 30.0
HOST = "127.0.0.1"
TRANSFER = {
    "kv_connector": "AoffloadConnector", "kv_role": "kv_both", "kv_load_failure_policy": "recompute",
    "kv_connector_extra_config": {"host_bytes": HOST_BYTES},
}  # fmt: skip
"""Without a module path: the entry point of the package has to have registered the name."""


class Server:
    """A server process on the loopback; leaving the `with` block stops it, by its process id."""

    def __init__(self, model: Path, log: Path) -> None:
        self._model, self._log = model, log
        self.port = _free_port()

    def __enter__(self) -> Server:
        words: Sequence[str] = (
            "--model", str(self._model), "--served-model-name", "tiny", "--host", HOST, "--port", str(self.port),
            "--dtype", "float32", "--enforce-eager", "--block-size", "32", "--max-model-len", "1024",
            "--num-gpu-blocks-override", str(SMALL_POOL), "--max-num-seqs", "8", "--max-num-batched-tokens", "512",
            "--enable-prompt-tokens-details", "--kv-transfer-config", json.dumps(TRANSFER),
        )  # fmt: skip
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *words]
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True, env=_environment())
        try:
            self._wait_until_it_serves()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def _wait_until_it_serves(self) -> None:
        deadline_s = time.monotonic() + START_S
        while self.process.poll() is None and time.monotonic() < deadline_s:
            try:
                if self.get("/health")[0] == 200:
                    return
            except OSError:
                time.sleep(0.2)
        raise RuntimeError(f"the server does not serve (status {self.process.poll()}): {self._log}")

    def stop(self) -> int | None:
        """Ask the process to end; kill its session if it does not. Its exit status, None if it had to be killed."""
        self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            return None

    def get(self, path: str) -> tuple[int, str]:
        return self._ask("GET", path)

    def complete(self, prompt: Sequence[int], num_new_tokens: int) -> Answer:
        asked = {
            "model": "tiny", "prompt": list(prompt), "max_tokens": num_new_tokens, "temperature": 0, "logprobs": 0,
            "ignore_eos": True, "return_token_ids": True,
        }  # fmt: skip
        status, text = self._ask("POST", "/v1/completions", json.dumps(asked))
        if status != 200:
            raise RuntimeError(f"status {status}: {text[:300]}")
        return _answer(json.loads(text))

    def _ask(self, verb: str, path: str, body: str | None = None) -> tuple[int, str]:
        connection = http.client.HTTPConnection(HOST, self.port, timeout=120)
        try:
            connection.request(verb, path, body, {"Content-Type": "application/json"})
            reply = connection.getresponse()
            return reply.status, reply.read().decode()
        finally:
            connection.close()


def _free_port() -> int:
    with socket.socket() as asked:
        asked.bind((HOST, 0))
        port: int = asked.getsockname()[1]
        return port


def _environment() -> dict[str, str]:
    """The server's engine runs in a process of its own, as it does for everybody."""
    found = {name: value for name, value in os.environ.items() if name != "VLLM_ENABLE_V1_MULTIPROCESSING"}
    return found | {"PYTHONPATH": os.pathsep.join((os.getcwd(), found.get("PYTHONPATH", "")))}


def _answer(reply: Mapping[str, Any]) -> Answer:
    (choice,), usage = reply["choices"], reply["usage"]
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    return Answer(
        tuple(choice["token_ids"]), tuple(choice["logprobs"]["token_logprobs"]), usage["prompt_tokens"], cached
    )


def metric(text: str, name: str) -> float:
    """The sum of a metric over its labels, in the text format of Prometheus."""
    lines = [line for line in text.splitlines() if line.startswith((f"{name}{{", f"{name} "))]
    if not lines:
        raise RuntimeError(f"there is no metric {name}")
    return sum(float(line.rpartition(" ")[2]) for line in lines)


def served(bench: Bench) -> Row:
    began_s = time.monotonic()
    answers: dict[str, Answer] = {}
    with Server(bench.model, Path("build/vllm/server.log")) as server, ThreadPoolExecutor(8) as clients:
        for turn in range(bench.talks.num_turns):
            prompts = bench.turn(turn)
            told = clients.map(lambda prompt: server.complete(prompt, bench.talks.num_new_tokens), prompts.values())
            answers |= dict(zip(prompts, told, strict=True))
        metrics = _metrics_at_rest(server)
        status = server.stop()
    used = metric(metrics, "vllm:kv_cache_usage_perc")
    hits = metric(metrics, "vllm:external_prefix_cache_hits_total")
    own = sorted({line.partition("{")[0] for line in metrics.splitlines() if line.startswith("vllm:aoffload_")})
    row = judge(
        "the API server over HTTP", answers, bench.reference.answers, num_blocks=SMALL_POOL - 1,
        num_free=round((SMALL_POOL - 1) * (1 - used)), took_s=time.monotonic() - began_s,
        found=f"{hits:,.0f} tokens were external hits, {len(own)} metrics of ours",
    )  # fmt: skip
    return row.missed(
        "" if hits else "nothing was loaded",
        "" if own else "no metric of ours",
        "" if status is not None else "it had to be killed",
    )


def _metrics_at_rest(server: Server) -> str:
    """The metrics, once no block is in use any more or that is not going to happen."""
    for _ in range(20):
        _, metrics = server.get("/metrics")
        if not metric(metrics, "vllm:kv_cache_usage_perc"):
            break
        time.sleep(0.25)
    return metrics


SCENARIOS = (Scenario("the API server", served, is_short=True),)

if __name__ == "__main__":
    run_part(DENSE, SCENARIOS, TALKS)
