"""The parts of a run on a device, each with its figures."""

from __future__ import annotations

from dataclasses import dataclass

from .readings import ALL_TESTS, Read, benchmark, demo, soak, suite

__all__ = ["PARTS", "PROBE_S", "PYTEST", "TOTAL_S", "Figure", "Part"]

TOTAL_S = 540.0
"""Nine minutes."""
PROBE_S = 40.0
"""Time limit of the probe, which may be the first import of torch from a cold disk."""
PACKAGE = ("anyio", "attrs", "numpy", "structlog")
"""What `aoffload` imports besides torch."""


@dataclass(frozen=True)
class Figure:
    """A line of the report."""

    name: str
    """Its name in docs/cuda.md."""
    about: str
    source: str
    """Its name among the readings of its part."""


@dataclass(frozen=True)
class Part:
    """A process, and the figures that it gives."""

    name: str
    words: tuple[str, ...]
    """The arguments of `python`. `{out}` stands for the file that `read` gets."""
    limit_s: float
    """It may take longer if the parts before it took less."""
    read: Read
    figures: tuple[Figure, ...]
    needs: tuple[str, ...] = PACKAGE
    """Modules without which it cannot run."""


PYTEST = (
    # Without the project's own settings: a missing pytest plugin, or a warning of another torch, is no failure of the
    # GPU tests.
    *("-m", "pytest", "-q", "-s", "-p", "no:cacheprovider", "-p", "proof.gpu.listener"),
    *("-o", "addopts=", "-W", "default", "-o", "faulthandler_timeout=60", "-m", "gpu", "--lines", "{out}"),
)
"""The arguments of `python` for GPU tests; the names of files and tests follow."""
GPU_TESTS = "tests/transfer/test_cuda_gpu.py"
RULES = f"{GPU_TESTS}::test_gpu_with_the_rule_never_and_without_it_sometimes"
EARLY = f"{GPU_TESTS}::test_gpu_how_early_copies_read"


def _of_benchmark(name: str, limit_s: float, *figures: Figure, needs: tuple[str, ...] = ()) -> Part:
    words = ("-m", "benchmarks", name, "--json", "{out}")
    return Part(name, words, limit_s, benchmark, figures, (*PACKAGE, *needs))


def _of_tests(name: str, words: tuple[str, ...], limit_s: float, *figures: Figure) -> Part:
    return Part(name, (*PYTEST, *words), limit_s, suite, figures, (*PACKAGE, "pytest"))


def _rule(name: str, rule: str, mutant: str, about: str) -> list[Figure]:
    test = RULES.partition("::")[2]
    return [
        Figure(f"rule_{name}_{driver}", f"{about}, {driver}", f"{test}[{rule}-{mutant}-{driver}]")
        for driver in ("nvidia", "torch")
    ]


def _copies(kib: int) -> list[Figure]:
    about = f"blocks of 2 MiB in pieces of {kib} KiB"
    names = {"store": "store", "load": "load", "both": "both ways"}
    return [Figure(f"copy_{kib}_{name}", f"{way}, {about}", f"{way}, {about}") for name, way in names.items()]


def _choices(way: str) -> list[Figure]:
    shares = {share: f"{way}, {share} the break-even, by what is chosen" for share in ("half", "twice")}
    return [
        Figure(f"break_even_{way}", f"{way}: the size from which on the copy engine wins", f"{way}, break-even"),
        *(Figure(f"choice_{way}_{share}", source, source) for share, source in shares.items()),
    ]


def _latencies() -> list[Figure]:
    return [
        Figure(f"latency_{state}_p{share}", f"fence to task, loop {state}, p{share}, blocking beside polling",
               f"fence to task, loop {state}, p{share}, blocking")
        for state in ("idle", "busy")
        for share in (50, 99)
    ]  # fmt: skip


PARTS = (
    _of_tests(
        "rules", (RULES, EARLY), 45,
        *_rule("store_after", "store_after_its_compute", "Unfenced", "a store waits for its fence"),
        *_rule("store_unnamed", "store_without_a_fence", "Unfenced", "a store without a fence waits for the stream"),
        *_rule("load_after", "load_after_the_reader", "Unfenced", "a load waits for who reads its destination"),
        *_rule("load_told", "told_when_it_is_there", "Unproven", "who hears of a load finds its bytes"),
        *_rule("fence_kept", "fence_kept_while_another_is_recorded", "OneEvent", "a fence keeps its meaning"),
        Figure("early_loads", "loads read their source before their turn", "test_gpu_how_early_copies_read[load]"),
        Figure("early_stores", "stores would, if they were let", "test_gpu_how_early_copies_read[store]"),
    ),
    _of_benchmark(
        "cuda_copy", 45, *_copies(64), *_copies(16),
        *(Figure(f"piece_{way}", f"{way}, each of many pieces of 4 KiB",
                 f"{way}, each of many pieces of 4 KiB by the engine") for way in ("store", "load")),
    ),
    _of_benchmark("cuda_choice", 35, *_choices("store"), *_choices("load"), needs=("triton", "cuda.bindings")),
    _of_benchmark(
        "cuda_overlap", 40,
        Figure("overlap_products", "bf16 products beside copies both ways", "matrix products beside copies both ways"),
        Figure("overlap_copies", "the copies beside those products", "the copies beside those products"),
    ),
    _of_benchmark(
        "cuda_fitting", 40, Figure("fitting", "requests that fit on the device", "requests that fit on the device")
    ),
    _of_benchmark("cuda_latency", 25, *_latencies()),
    Part(
        "demo", ("-m", "aoffload.demo", "--device", "cuda", "--model", "1b", "--json", "{out}"), 85, demo,
        (
            Figure("demo_ttft", "p50 to the first token, with offload over without", "ttft"),
            Figure("demo_outputs", "the outputs with and without offload", "outputs"),
        ),
    ),
    Part(
        "soak", ("-m", "proof.soak", "--device", "cuda", "--seconds", "80", "--json", "{out}"), 105, soak,
        (Figure("soak", "every byte and owner on real streams", "soak"),),
    ),
    _of_tests(
        "tests", (GPU_TESTS, "tests/integrations/test_models.py", "--deselect", RULES, "--deselect", EARLY), 80,
        Figure("tests", "all other GPU tests", ALL_TESTS),
        Figure("loss_code", "what the driver says of a lost device", "test_gpu_a_lost_device_is_an_outcome"),
        Figure("expandable", "batches across the allocations of an expandable segment",
               "test_gpu_memory_that_grows_in_place_is_copied"),
        Figure("captured", "a capture bears copies in other threads",
               "test_gpu_a_graph_captured_beside_copies_is_not_harmed"),
    ),
)  # fmt: skip
"""In the order in which they run: what docs/cuda.md promises first, what takes longest last."""
