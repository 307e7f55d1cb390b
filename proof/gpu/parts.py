"""The parts of a run on a GPU, the figures of each part, and the two phases for a GPU that you have for minutes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from .readings import ALL_TESTS, Read, benchmark, demo, soak, suite

__all__ = ["PACKAGE", "PARTS", "PHASES", "PROBE_S", "PYTEST", "SMALL", "Figure", "Part", "limits_of"]

PROBE_S = 120.0
"""Time limit of the probe, beside that of the parts: it may be the first import of torch from a cold disk."""
SMALL = "AOFFLOAD_SMALL"
"""Set in the environment of parts that are to do as little as possible."""
PACKAGE = ("anyio", "attrs", "numpy", "structlog")
"""What `aoffload` imports besides torch."""


@dataclass(frozen=True)
class Figure:
    """A line of the report."""

    name: str
    """Its name in proof/gpu/expected.md."""
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
    small: tuple[str, ...] = ()
    """The arguments of a dry run, if they differ."""

    def command(self, is_small: bool) -> tuple[str, ...]:
        return self.small if is_small and self.small else self.words


def limits_of(parts: Iterable[Part]) -> float:
    return sum(part.limit_s for part in parts)


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
SUITES = (
    GPU_TESTS, "tests/transfer/test_cuda_gpu_graphs.py", "tests/transfer/test_cuda_gpu_losses.py",
    "tests/integrations/test_models.py",
)  # fmt: skip
"""Files with tests that are marked `gpu`."""


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


def _swept() -> list[Figure]:
    """Some of the sweep's rows; the report has the others, too."""
    found = [("batch", "one batch", (4, 16, 64, 1024)), ("each", "one by one", (32,)), ("kernel", "kernel", (16,)),
             ("submit", "submission of a piece", (16,))]  # fmt: skip
    return [
        Figure(f"{name}_{way}_{kib}", source, source)
        for name, words, sizes in found
        for way in ("load", "store")
        for kib in sizes
        for source in [f"{way}, pieces of {kib} KiB, {words}"]
    ]


def _loads() -> list[Figure]:
    about = "until the task that waits goes on"
    return [
        Figure(f"load_{name}_{key}", f"load of {size}, {about}, {key}", f"load of {size}, {key}")
        for name, size in (("512k", "512 KiB"), ("128m", "128 MiB"))
        for key in ("p50", "p99")
    ]


def _interferences() -> list[Figure]:
    copies = {"16": "copies in 16 KiB", "64": "copies in 64 KiB", "1024": "copies in 1 MiB",
              "kernel": "the kernel's copies in 16 KiB"}  # fmt: skip
    return [
        Figure(f"decode_{way}_{name}", f"a decode step by {kind}, beside {words}", f"{way} step beside {words}")
        for way, kind in (("graph", "a graph"), ("eager", "launches from Python"))
        for name, words in copies.items()
    ]


def _regions() -> list[Figure]:
    return [
        Figure(f"{name}_{blocks}", f"{words}, {blocks} blocks", f"load of {blocks} blocks of 32 layers, {source}")
        for name, words, source in (
            ("first_layer", "until the first of 32 layers may run", "first layer"),
            ("by_layer", "loading layer by layer", "by layer"),
        )
        for blocks in (8, 64)
    ]  # fmt: skip


def _choices() -> list[Figure]:
    shares = {share: f"load, {share} the break-even, by what is chosen" for share in ("half", "twice")}
    return [
        Figure("break_even_load", "load: the size up to which the kernel wins by its margin", "load, break-even"),
        *(Figure(f"choice_load_{share}", source, source) for share, source in shares.items()),
    ]


def _latencies() -> list[Figure]:
    return [
        Figure(f"latency_{state}_p{share}", f"fence to task, loop {state}, p{share}, blocking beside polling",
               f"fence to task, loop {state}, p{share}, blocking")
        for state in ("idle", "busy")
        for share in (50, 99)
    ]  # fmt: skip


def _stresses() -> list[Figure]:
    kinds = {"bounded": "4 outstanding", "unbounded": "none awaited"}
    about = "1,000 batches of 4,096 pieces"
    return [Figure(f"stress_{name}", f"{about}, {words}, each", f"{about}, {words}") for name, words in kinds.items()]


def _soak(seconds: int) -> tuple[str, ...]:
    return ("-m", "proof.soak", "--device", "cuda", "--seconds", str(seconds), "--json", "{out}")


def _demo(*words: str) -> tuple[str, ...]:
    return ("-m", "aoffload.demo", "--device", "cuda", *words, "--json", "{out}")


FIRST = (
    _of_benchmark(
        "cuda_ceilings", 25,
        *(Figure(f"ceiling_{name}", f"one large copy by torch, {way}", f"one large copy, {way}")
          for name, way in (("load", "load"), ("store", "store"), ("both", "both ways"))),
    ),
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
    _of_benchmark("cuda_sweep", 45, *_swept(), needs=("cuda.bindings",)),
    _of_benchmark("cuda_loads", 30, *_loads()),
    _of_benchmark(
        "cuda_copy", 45, *_copies(64), *_copies(16),
        *(Figure(f"piece_{way}", f"{way}, each of many pieces of 4 KiB",
                 f"{way}, each of many pieces of 4 KiB by the engine") for way in ("store", "load")),
    ),
    _of_benchmark(
        "cuda_pinning", 25,
        Figure("pinning", "opening 4 GiB of host memory", "opening 4096 MiB of host memory"),
        Figure("unpinning", "closing it", "closing 4096 MiB of host memory"),
        Figure("pinning_gap", "the event loop's longest gap meanwhile",
               "longest gap of the event loop, opening 4096 MiB of host memory"),
    ),
)  # fmt: skip
"""What decides about the design: what the link can do, whether the rules hold, and what copies reach."""
SECOND = (
    _of_tests(
        "tests", (*SUITES, "--deselect", RULES, "--deselect", EARLY), 85,
        Figure("tests", "all other GPU tests", ALL_TESTS),
        Figure("loss_code", "what the driver says of a lost device", "test_gpu_a_lost_device_is_an_outcome"),
        *(Figure(f"loss_{code}", f"what the backend says of {words} ({code})",
                 f"test_gpu_a_kernel_that_ends_the_context_is_an_outcome[{code}]")
          for code, words in ((700, "an illegal access"), (719, "a launch that failed"))),
        Figure("graph_loaded", "a graph replayed over loaded blocks reads what was loaded",
               "test_gpu_a_graph_reads_what_was_loaded_and_nothing_that_comes_later[loaded]"),
        Figure("graph_overwritten", "a load waits for a replay that reads its destination",
               "test_gpu_a_graph_reads_what_was_loaded_and_nothing_that_comes_later[overwritten]"),
        Figure("expandable", "batches across the allocations of an expandable segment",
               "test_gpu_memory_that_grows_in_place_is_copied"),
        Figure("captured", "a capture bears copies in other threads",
               "test_gpu_a_graph_captured_beside_copies_is_not_harmed"),
    ),
    _of_benchmark("cuda_interference", 40, *_interferences()),
    _of_benchmark(
        "cuda_ttft", 45,
        *(Figure(f"ttft_{name}", f"first token of an 8B shape at {tokens} tokens, loading over computing",
                 f"first token of {tokens} tokens in host memory")
          for name, tokens in (("8k", "8,192"), ("2k", "2,048"))),
        Figure("ttft_load", "the load of 8,192 tokens", "the load of 8,192 tokens"),
    ),
    Part("soak", _soak(45), 70, soak, (Figure("soak", "every byte and owner on real streams", "soak"),),
         small=_soak(1)),
    _of_benchmark("cuda_regions", 20, *_regions()),
    _of_benchmark(
        "cuda_busy", 20,
        *(Figure(f"busy_{way}", f"{way}, the loop busy, of the rate with an idle loop", f"{way} beside turns of 300 us")
          for way in ("load", "store")),
    ),
    _of_benchmark("cuda_latency", 20, *_latencies()),
    _of_benchmark("cuda_choice", 30, *_choices(), needs=("triton", "cuda.bindings")),
)  # fmt: skip
"""What serving meets: the other tests, what copies cost the forward, and what they save."""
LONG = (
    _of_benchmark(
        "cuda_overlap", 40,
        Figure("overlap_products", "bf16 products beside copies both ways", "matrix products beside copies both ways"),
        Figure("overlap_copies", "the copies beside those products", "the copies beside those products"),
    ),
    _of_benchmark(
        "cuda_fitting", 40, Figure("fitting", "requests that fit on the device", "requests that fit on the device")
    ),
    Part("demo", _demo("--model", "1b"), 60, demo,
         (Figure("demo_outputs", "the outputs with and without offload", "outputs"),), small=_demo("--requests", "8")),
)  # fmt: skip
"""What only a run of everything has time for."""
LAST = _of_benchmark(
    "cuda_stress", 30,
    Figure("held", "a launch while 65,536 pieces wait for a fence", "a launch beside held copies, p99"),
    *_stresses(),
)  # fmt: skip
"""In a process of its own, and after everything else, because it may hang the driver."""
PARTS = (*FIRST, *SECOND, *LONG, LAST)
"""In the order in which they run: what decides most first, what may harm the device last."""
PHASES = {
    1: (tuple(part.name for part in FIRST), 215.0),
    2: (tuple(part.name for part in (*SECOND, LAST)), 365.0),
}
"""Parts and seconds of each phase. A phase takes 4 or 6.5 minutes if the probe takes 25 s; the probe may take 120 s."""
