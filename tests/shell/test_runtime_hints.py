"""Hints of clients as a program hands them to a runtime: pins that end by themselves, copies, and hostile payloads."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest
from clocks import JUMPING, jumping_backend
from disk_serving import on_the_disk_only, with_disk
from engine_serving import own_engine
from serving import BACKENDS, assert_at_rest, on_the_host_only, pinned, prompt, scripted, with_bytes
from structlog.testing import capture_logs

from aoffload import InvalidArgument
from aoffload.ledger import DoneHint, HintOutcome, HintReason, PinHint

pytestmark = pytest.mark.anyio

A, B = prompt(1, 9), prompt(2, 9)
ACCEPTED, CLIPPED, REJECTED = HintOutcome
ROOT = Path(__file__).parents[2]


@pytest.fixture(params=JUMPING)
def anyio_backend(request: pytest.FixtureRequest) -> Any:
    return jumping_backend(request.param) if isinstance(request.param, str) else request.param


with_threads = pytest.mark.parametrize("anyio_backend", BACKENDS, indirect=True)
"""Time passes for threads that copy."""


async def test_a_pin_ends_by_itself() -> None:
    """Nothing is left by a block: the runtime ends it in time, whatever else it waits for."""
    async with scripted(num_host_blocks=16) as (engine, _):
        runtime = engine.runtime
        await engine.serve(A)
        await runtime.flush()
        answer = runtime.hints.pin(A, 30)
        assert (answer.outcome, answer.num_tokens, pinned(runtime)) == (ACCEPTED, 8, (2, 2))
        await anyio.sleep(29)
        assert pinned(runtime) == (2, 2)
        await anyio.sleep(2)
        assert pinned(runtime) == (0, 0)
        await assert_at_rest(runtime)


async def test_predicted_seconds_are_those_of_the_runtime() -> None:
    """Learned eviction measures by the clock of the runtime, which the ledger has once the runtime is entered."""
    async with scripted(num_host_blocks=16, eviction="learned") as (engine, _):
        runtime = engine.runtime
        for _ in range(5):
            await engine.serve(A)
            assert runtime.hints.returns(A, in_s=20.0, category="tool").num_tokens == 8
            await anyio.sleep(20)
        (found,) = [each for each in runtime.statistics().eviction.buckets if each.category == "tool"]
        assert found.returned > 0.7 and found.median_s == pytest.approx(20, rel=0.3)
        assert found.predicted_s == pytest.approx(20, rel=0.3)


async def test_a_shorter_pin_ends_first() -> None:
    """The later pin of the same prompt counts, and the runtime wakes up for it."""
    async with scripted(num_host_blocks=16, max_hint_pin_s=1000) as (engine, _):
        runtime = engine.runtime
        await engine.serve(A)
        await runtime.flush()
        assert runtime.hints.pin(A, 1e9).reason is HintReason.TTL_LIMIT
        runtime.hints.pin(A, 5)
        await anyio.sleep(6)
        assert pinned(runtime) == (0, 0)


async def test_closing_ends_the_pins_of_hints() -> None:
    """They keep nothing beyond the runtime."""
    async with scripted(num_host_blocks=16) as (engine, _):
        await engine.serve(A)
        engine.runtime.hints.pin(A, 3600)
        ledger = engine.runtime.ledger
    assert ledger.statistics().num_pins == 0


@with_threads
async def test_a_demoted_prompt_is_prefetched_again() -> None:
    """The copies are made, and the bytes are those of the prompt."""
    async with with_bytes(16, num_host_blocks=16) as engine:
        runtime = engine.runtime
        await engine.serve(A)
        assert runtime.hints.demote(A).outcome is ACCEPTED
        await runtime.flush()
        assert runtime.lookup(A).num_host_tokens == 8
        assert runtime.hints.prefetch(A).num_tokens == 8
        await runtime.flush()
        assert runtime.lookup(A).num_device_tokens == 8
        await engine.serve(A)
        assert runtime.hints.prefetch(A).reason is HintReason.ALREADY_THERE


@with_threads
async def test_a_prefetch_goes_on_from_the_disk_to_the_device(tmp_path: Path) -> None:
    """One hint brings the prompt all the way."""
    async with with_disk(tmp_path) as engine:
        runtime = engine.runtime
        await on_the_disk_only(engine, A)
        assert runtime.hints.prefetch(A).outcome is ACCEPTED
        with anyio.fail_after(30):
            while runtime.lookup(A).num_device_tokens < 8:
                await runtime.flush()
                await anyio.lowlevel.checkpoint()
        assert runtime.hints.prefetch(B).reason is HintReason.NOTHING_CACHED


@with_threads
async def test_an_engine_with_its_own_blocks_has_the_same_verbs() -> None:
    """For host memory: nothing is demoted without a tier below."""
    async with own_engine() as engine:
        runtime = engine.runtime
        await engine.stored(A)
        assert runtime.hints.pin(A, 3600).num_tokens == 8
        assert runtime.statistics().host.num_pinned == 2
        assert runtime.hints.prefetch(A).reason is HintReason.ALREADY_THERE
        assert runtime.hints.done(A).outcome is ACCEPTED
        assert runtime.hints.demote(A).reason is HintReason.NO_LOWER_TIER


async def test_payloads_are_answered_in_their_order() -> None:
    """With their ids; a program may also pass a hint itself."""
    async with scripted(num_host_blocks=16) as (engine, _):
        runtime = engine.runtime
        await on_the_host_only(engine, A)
        payload = [{"action_type": "prefetch", "action_id": "p"}, 5, {"action_type": "done", "action_id": "d"}]
        answers = runtime.hints.apply(A, payload, cache_salt=None)
        assert [(a.action_id, a.outcome) for a in answers] == [("p", ACCEPTED), ("", REJECTED), ("d", REJECTED)]
        await runtime.flush()
        assert [a.outcome for a in runtime.hints.apply(A, PinHint(5))] == [ACCEPTED]
        assert runtime.hints.apply(A, DoneHint())[0].num_tokens == 8
        assert runtime.hints.apply(A, None) == ()
        assert [a.reason for a in runtime.hints.apply(A, "pin")] == [HintReason.MALFORMED]


@pytest.mark.parametrize("bad", [0, -1, None, True, "60", float("nan"), float("inf"), 1e10])
async def test_a_bad_time_of_the_program_is_an_error(bad: Any) -> None:
    """Its own call raises and names the argument; nothing is counted."""
    async with scripted(num_host_blocks=16) as (engine, _):
        with pytest.raises(InvalidArgument, match="ttl_s"):
            engine.runtime.hints.pin(A, bad)
        if bad is not None:
            with pytest.raises(InvalidArgument, match="in_s"):
                engine.runtime.hints.returns(A, in_s=bad)
        with pytest.raises(InvalidArgument, match="category"):
            engine.runtime.hints.returns(A, category=bad if not isinstance(bad, str) else "x" * 300)
        assert engine.runtime.statistics().hints is None


async def test_each_answer_is_logged() -> None:
    """One event with verb, outcome, reason and tokens."""
    with capture_logs() as events:
        import structlog

        async with scripted(num_host_blocks=16, logger=structlog.get_logger()) as (engine, _):
            await engine.serve(A)
            engine.runtime.hints.pin(A, 1e6)
            engine.runtime.hints.done(A)
    told = [event for event in events if event["event"] == "hint_answered"]
    assert told == [
        {"event": "hint_answered", "log_level": "debug", "verb": "pin", "outcome": "clipped", "reason": "ttl_limit",
         "num_tokens": 8},
        {"event": "hint_answered", "log_level": "debug", "verb": "done", "outcome": "accepted", "reason": "",
         "num_tokens": 8},
    ]  # fmt: skip


@pytest.mark.parametrize("face", ["asyncio", "trio", "vllm"])
def test_hostile_hints_do_no_damage(face: str) -> None:
    """A short form of `python -m proof.attacks H1`: no error, no pin beyond the share, no victim touched."""
    program = ROOT / "proof/attacks/programs/hostile_hints.py"
    done = subprocess.run(
        [sys.executable, str(program), face, "200"], cwd=ROOT, capture_output=True, text=True, check=False,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert (found["errors"], found["beyond"] <= 0, found["touched"]) == (0, True, 0), found
    assert found["answers"] > 200
