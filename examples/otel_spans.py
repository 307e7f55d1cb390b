"""Spans of OpenTelemetry: a request below that of a client, its load, and a store that outlives it.

Prints:
    POST /v1/completions
      aoffload.request: done, 0 of 90 tokens from host memory
    aoffload.store: landed, from device to host, linked to aoffload.request
    POST /v1/completions
      aoffload.request: done, 80 of 90 tokens from host memory
        aoffload.load: landed, from host to device
"""

import anyio
import torch
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from aoffload import KVCacheGroup, OffloadConfig, OffloadRuntime, Tier
from aoffload.otel import Spans

PROMPT = list(range(90))
exporter = InMemorySpanExporter()  # a server takes a BatchSpanProcessor and an exporter to its collector
provider = TracerProvider()
provider.add_span_processor(SimpleSpanProcessor(exporter))
server = provider.get_tracer("server")


async def main() -> None:
    config = OffloadConfig(groups=[KVCacheGroup("full", block_size=16)], num_host_blocks=64)
    async with OffloadRuntime(config, torch.zeros(9, 2, 16, 64), observers=[Spans(provider)]) as runtime:
        for _ in range(2):
            with server.start_as_current_span("POST /v1/completions"):
                async with runtime.request(PROMPT) as request:
                    await request.allocate()
                    await request.load()
                    request.commit(len(PROMPT))
            await runtime.flush()
            await runtime.reset(Tier.DEVICE)
    spans = sorted(exporter.get_finished_spans(), key=lambda span: span.start_time)
    for span in [span for span in spans if span.parent is None]:
        show(span, spans)


def show(span: ReadableSpan, spans: list[ReadableSpan], indent: str = "") -> None:
    found = {name.removeprefix("aoffload."): value for name, value in span.attributes.items()}
    about = ""
    if "num_tokens" in found:
        about = f": {found['outcome']}, {found['num_host_tokens']} of {found['num_tokens']} tokens from host memory"
    elif "source" in found:
        about = f": {found['outcome']}, from {found['source']} to {found['destination']}"
    for link in span.links:
        about += f", linked to {next(one.name for one in spans if one.context == link.context)}"
    print(f"{indent}{span.name}{about}")
    for child in spans:
        if child.parent is not None and child.parent.span_id == span.context.span_id:
            show(child, spans, indent + "  ")


if __name__ == "__main__":
    anyio.run(main)
