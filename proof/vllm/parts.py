"""The parts of a run: processes that share an import of vLLM, with the scenarios that each reports."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["NEWER", "PARTS", "TOTAL_S", "Part"]

TOTAL_S = 1740.0
"""Twenty-nine minutes."""


@dataclass(frozen=True)
class Part:
    name: str
    """Also that of its module in this package."""
    about: str
    limit_s: float
    """It may take longer if the parts before it took less."""
    is_short: bool = False
    """Belongs to the short form."""


PARTS = (
    Part("one_rank", "one rank, a model with full attention", 145, is_short=True),
    Part("hybrid", "one rank, a model with a window in one of its layers", 80, is_short=True),
    Part("gpt_oss", "one rank, gpt-oss: windows, attention sinks, experts", 60, is_short=True),
    Part("llama4", "one rank, Llama 4: attention to chunks, experts", 50, is_short=True),
    Part("states", "one rank, Qwen3-Next: layers with a recurrent state", 130, is_short=True),
    Part("beside", "one rank: n-gram drafts, MultiConnector, preemptions", 140, is_short=True),
    Part("adapters", "one rank, LoRA adapters that are trained again", 120, is_short=True),
    Part("eagle", "one rank, an EAGLE head", 90, is_short=True),
    Part("mtp", "one rank, a layer for multi-token prediction", 90),
    Part("events", "KV events that vLLM publishes, read by the rules of two routers", 90, is_short=True),
    Part("two_ranks", "tensor parallelism over two processes", 100),
    Part("mla", "latents, also on two ranks that share their host memory", 60),
    Part("serving", "the API server over HTTP", 125),
    Part("cost", "what the connector costs the scheduler", 90),
    Part("throughput", "what stores cost where nothing hits", 100),
    Part("upstream_tests", "vLLM's own tests of such a connector", 150),
    Part("connector_tests", "the connector's tests over vLLM's classes", 120, is_short=True),
)
"""In the order in which they run."""
NEWER = (
    *(part for part in PARTS if part.name in ("one_rank", "hybrid", "adapters", "eagle")),
    Part("sleep", "sleep mode, which tells connectors from vLLM 0.33 on", 120),
    *(part for part in PARTS if part.name in ("upstream_tests", "connector_tests")),
)
"""Those for a newer vLLM, whose Python runs over the kernels of another version."""
