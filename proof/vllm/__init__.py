"""The connector inside the real engine: `python -m proof.vllm`, or `make vllm`.

Each scenario runs requests through vLLM's CPU build and compares every token and log-probability with a run whose pool
is so large that nothing has to be offloaded. The runner itself imports nothing but the standard library, so that it can
say what is missing where vLLM is not installed.
"""
