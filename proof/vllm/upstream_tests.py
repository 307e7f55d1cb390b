"""vLLM's own tests, from the source distribution of the installed version: those that can be run against another
connector, run against ours."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import vllm

from .models import DENSE, build
from .rows import Row, write
from .verdicts import OF_DRAFTS, SAID_AGAIN, Case, count, missed, table

__all__ = ["main"]

OUT = Path("build/vllm")
VERSION = vllm.__version__.partition("+")[0]
FOLDER = OUT / "upstream_tests" / VERSION
WANTED = ("test_scheduler.py", "test_integration.py")
INSIDE = f"vllm-{VERSION}/tests/v1/simple_kv_offload"
OPT = {
    "architectures": ["OPTForCausalLM"], "model_type": "opt", "hidden_size": 768, "ffn_dim": 3072,
    "num_hidden_layers": 12, "num_attention_heads": 12, "vocab_size": 50272, "max_position_embeddings": 2048,
    "word_embed_proj_dim": 768, "torch_dtype": "float16", "bos_token_id": 2, "eos_token_id": 2, "pad_token_id": 1,
}  # fmt: skip
"""The model that these tests name: its configuration is all they need of it."""
BEHAVIOUR = ("proof.vllm.manager_behaviour", "proof.vllm.draft_behaviour")
"""Our tests of what theirs are about."""
STATES = "proof.vllm.state_behaviour"
"""Our tests of recurrent layers that vLLM cannot run on CPUs."""
DOWNLOAD_S, TESTS_S, ACCURACY_S = 120.0, 240.0, 240.0


def fetch() -> Path:
    """Download the source distribution, and take from it the files that are run. `CalledProcessError` if it fails."""
    if not all((FOLDER / name).exists() for name in WANTED):
        FOLDER.mkdir(parents=True, exist_ok=True)
        environment = {**os.environ, "VLLM_VERSION_OVERRIDE": VERSION, "VLLM_TARGET_DEVICE": "empty"}
        words = ("download", "--quiet", "--no-deps", "--no-binary", "vllm", "--no-build-isolation", f"vllm=={VERSION}")
        command = [sys.executable, "-m", "pip", *words, "--dest", str(FOLDER)]
        subprocess.run(command, env=environment, check=True, timeout=DOWNLOAD_S)
        _extract(FOLDER / f"vllm-{VERSION}.tar.gz")
    (FOLDER / "pytest.ini").write_text("[pytest]\n")  # not this repository's, in which every warning is an error
    opt = FOLDER / "facebook" / "opt-125m" / "config.json"
    opt.parent.mkdir(parents=True, exist_ok=True)
    opt.write_text(json.dumps(OPT))
    return FOLDER


def _extract(archive: Path) -> None:
    with tarfile.open(archive) as packed:
        for name in WANTED:
            found = packed.extractfile(f"{INSIDE}/{name}")
            if found is None:
                raise FileNotFoundError(f"{INSIDE}/{name} is not in {archive}")
            (FOLDER / name).write_bytes(found.read())


def scheduler_tests(folder: Path) -> list[Row]:
    """vLLM's tests of its scheduler; and ours of what they are about that read attributes of its manager."""
    began_s = time.monotonic()
    cases = _run(folder, "--pyargs", "test_scheduler.py", *BEHAVIOUR)
    said_again = {*SAID_AGAIN.values(), *OF_DRAFTS.values()}
    ours = [case for case in cases if case.function in said_again]
    theirs = [case for case in cases if case not in ours]
    (OUT / "upstream_tests.md").write_text(f"# vLLM's own tests\n\n{table(theirs)}\n")
    took_s = time.monotonic() - began_s
    row = Row("vLLM's test_scheduler.py", took_s=took_s, found=count(theirs))
    said = Row("what they read in vLLM's manager, as behaviour", took_s=took_s, found=count(ours))
    failed = [f"{case.name} {case.outcome}: {case.why}" for case in ours if case.outcome != "passed"]
    unsaid = sorted(said_again - {case.function for case in ours})
    return [
        row.missed(*(f"{name} fails" for name in missed(theirs)), "" if theirs else "no case was run"),
        said.missed(*failed, *(f"{name} was not run" for name in unsaid)),
    ]


def state_tests(folder: Path) -> list[Row]:
    """Our tests of Mamba 2 over vLLM's scheduler and cache manager."""
    began_s = time.monotonic()
    cases = _run(folder, "--pyargs", STATES)
    failed = [f"{case.name} {case.outcome}: {case.why}" for case in cases if case.outcome != "passed"]
    row = Row("states of Mamba 2 under vLLM's scheduler", took_s=time.monotonic() - began_s, found=count(cases))
    return [row.missed(*failed, "" if cases else "no case was run")]


def _run(folder: Path, *words: str) -> list[Case]:
    """Run tests with the adapter. `OSError` or `ValueError` if there are no results."""
    results = folder / "results.json"
    results.unlink(missing_ok=True)
    plugins = ("-p", "proof.vllm.adapter", "-p", "no:cacheprovider", "--confcutdir=.", "-q")
    environment = {
        **os.environ, "PYTHONPATH": os.getcwd(), "PROOF_VLLM_RESULTS": str(results.resolve()), "HF_HUB_OFFLINE": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
    }  # fmt: skip
    command = [sys.executable, "-m", "pytest", *plugins, *words]
    subprocess.run(command, cwd=folder, env=environment, check=False, timeout=TESTS_S)
    return [Case(name, each["outcome"], each["why"]) for name, each in json.loads(results.read_text()).items()]


def accuracy(folder: Path) -> list[Row]:
    began_s = time.monotonic()
    model = build(DENSE | {"max_position_embeddings": 4096}, OUT / "llama")
    command = [sys.executable, "-m", "proof.vllm.accuracy", str(folder), str(model)]
    environment = {**os.environ, "PYTHONPATH": os.getcwd()}
    subprocess.run(command, env=environment, check=True, timeout=ACCURACY_S)
    found = json.loads((folder / "accuracy.json").read_text())
    least = min(found["cached"])
    row = Row(
        "vLLM's _accuracy_test", f"{found['right']} of {found['runs']} equal",
        cached=f"{least:,} of {found['prompt']:,} at least", took_s=time.monotonic() - began_s,
    )  # fmt: skip
    met = row.missed(
        "" if found["right"] == found["runs"] else "other outputs than the first",
        "" if least >= found["prompt"] - 64 else "not all came from the host",
    )
    return [met]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", type=Path, default=OUT / "rows.json")
    parser.add_argument("--short", action="store_true")
    given = parser.parse_args()
    rows: list[Row] = []
    folder = fetch()
    for scenario in (scheduler_tests, state_tests, accuracy):
        try:
            rows += scenario(folder)
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            rows.append(Row(scenario.__name__, problems=(f"{type(error).__name__}: {error}",)))
        print(*(" | ".join(row.cells()) for row in rows), sep="\n", flush=True)
        write(rows, given.json)


if __name__ == "__main__":
    main()
