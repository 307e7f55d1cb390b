"""The connector follows vLLM's weight version: KV of other weights is neither loaded nor stored, and returns with its
version."""

from __future__ import annotations

import random
from collections.abc import Callable

import attrs
import pytest
from engine_doubles import TEXT, Request
from small_engine import SmallEngine, counted, to_rest
from vllm_doubles import AoffloadConnector

from aoffload._vllm.messages import Commands
from aoffload.errors import ConfigError

HITS = 7
"""Blocks of TEXT that a second request with it loads."""


def num_loaded(engine: SmallEngine, name: str) -> int:
    """Blocks of TEXT that a request loads."""
    before = counted(engine, "copied_blocks|load|host")
    engine.manager.evict_all()
    engine.run(Request(name, TEXT))
    assert engine.wrong == []
    return int(counted(engine, "copied_blocks|load|host") - before)


def test_kv_of_other_weights_is_not_loaded_and_returns_with_its_version(warm: Callable[..., SmallEngine]) -> None:
    """Nothing is forgotten: the version names the weights."""
    engine = warm(num_blocks=40)
    engine.update_weights(1, "a")
    assert num_loaded(engine, "first of a") == 0
    assert num_loaded(engine, "second of a") == HITS
    engine.update_weights(0, "default")
    assert num_loaded(engine, "back") == HITS
    engine.update_weights(1, "a")
    assert num_loaded(engine, "a again") == HITS
    assert engine.connector.ledger.weights.epoch == "a"


def test_vllms_own_cache_is_emptied_although_requests_run(engines: Callable[..., SmallEngine]) -> None:
    """No reset of vLLM's is needed for that. The requests keep their blocks."""
    engine = engines(num_blocks=60)
    engine.run(Request("first", TEXT))
    engine.submit(Request("long", range(50, 90), num_new=6))
    engine.step()
    assert engine.manager.block_pool.cached
    engine.update_weights(1, "a", preempts=False)
    engine.submit(Request("again", TEXT))
    engine.run()
    assert [each for each in engine.wrong if not each.startswith("long ")] == []
    engine.wrong.clear()  # vLLM itself went on over KV of two weights


def test_a_request_that_ran_at_the_change_is_not_stored(engines: Callable[..., SmallEngine]) -> None:
    """Under no version, not even when the first one returns."""
    engine = engines(num_blocks=60)
    engine.submit(Request("long", [*TEXT, *TEXT], num_new=6))
    engine.most_tokens = 8
    engine.step()
    engine.update_weights(1, "a", preempts=False)
    engine.most_tokens = 1_000
    engine.run()
    engine.wrong.clear()  # vLLM itself went on over KV of two weights
    assert num_loaded(engine, "of a") == 0
    engine.update_weights(0, "default")
    assert num_loaded(engine, "back") <= 2, "what was stored before the change, and no more"


def test_a_request_that_begins_again_is_stored(engines: Callable[..., SmallEngine]) -> None:
    """vLLM preempts all requests at a reset, so they compute all their KV anew."""
    engine = engines(num_blocks=60)
    engine.submit(Request("long", TEXT, num_new=3))
    engine.step()
    engine.step()
    engine.update_weights(1, "a")
    engine.run()
    assert engine.wrong == [] and num_loaded(engine, "again") == HITS


def test_hits_of_vllms_own_cache_are_not_stored_while_old_requests_run(engines: Callable[..., SmallEngine]) -> None:
    """vLLM goes on to cache the blocks of a request that runs with other weights."""
    engine = engines(num_blocks=80)
    engine.submit(Request("old", TEXT, num_new=40))
    engine.step()
    engine.update_weights(1, "a", preempts=False)
    engine.step()
    half = engine.half
    assert half._mixed == {"old"}
    engine.submit(Request("clean", [*range(100, 120)]))
    for _ in range(4):
        engine.step()
    engine.submit(Request("hits", [*range(100, 120), 1, 2, 3, 4, 5]))
    before = half.ledger.jobs.last_id
    for _ in range(4):
        engine.step()
    assert half.ledger.jobs.last_id == before > 0, "what `clean` has stored is all"
    engine.run()
    assert half._mixed == set()
    engine.wrong.clear()


def test_a_load_under_way_at_the_change_is_lost(warm: Callable[..., SmallEngine]) -> None:
    """The request computes from its first token, with the new weights."""
    engine = warm(num_blocks=40)
    held: list[Commands] = []

    def hold(commands: Commands) -> Commands:
        held.append(commands)
        return attrs.evolve(commands, loads=())

    engine.alter = hold
    engine.submit(Request("again", TEXT))
    engine.step()
    assert list(engine.loading) == ["again"] and held[0].loads
    engine.update_weights(1, "a")
    engine.alter = lambda commands: attrs.evolve(commands, loads=(*held.pop().loads, *commands.loads) if held else ())
    engine.step()
    engine.alter = lambda commands: commands
    engine.run()
    assert engine.wrong == [] and num_loaded(engine, "of a") == HITS


def test_a_match_before_the_change_is_made_again(warm: Callable[..., SmallEngine]) -> None:
    """vLLM has asked about the request, and has not begun it."""
    engine = warm(num_blocks=40)
    request = Request("again", TEXT)
    assert engine.connector.get_num_new_matched_tokens(request, 0)[0]
    engine.update_weights(1, "a")
    assert engine.connector.get_num_new_matched_tokens(request, 0) == (None, False), "vLLM's hit is of old weights"
    assert engine.connector.get_num_new_matched_tokens(request, 0) == (0, False)
    engine.run(request)
    assert engine.wrong == []


def test_deferred_blocks_of_old_requests_are_not_stored(engines: Callable[..., SmallEngine]) -> None:
    """vLLM would find the blocks of new weights under the same hashes."""
    engine = engines(num_blocks=60, max_bytes_in_flight=1)
    engine.submit(Request("first", TEXT), Request("second", range(60, 90)))
    while not engine.connector.ledger.deferred_requests:
        engine.step()
    engine.update_weights(1, "a")
    engine.run(Request("again", TEXT), Request("third", range(60, 90)))
    to_rest(engine)
    for number, version in enumerate(["default", "a"]):
        engine.update_weights(number, version)
        num_loaded(engine, version)


def test_the_key_names_the_first_epoch(engines: Callable[..., SmallEngine]) -> None:
    """vLLM's first version stands for it."""
    engine = engines(weights_epoch="checkpoint 7")
    epochs = [engine.connector.ledger.weights.epoch]
    for version in ("a", "default"):
        engine.weight_version = version
        engine.step()
        epochs.append(engine.connector.ledger.weights.epoch)
    assert epochs == ["checkpoint 7", "a", "checkpoint 7"]
    with pytest.raises(ConfigError, match="weights_epoch"):
        engines(weights_epoch=7)


def test_a_vllm_without_versions_works(monkeypatch: pytest.MonkeyPatch, engines: Callable[..., SmallEngine]) -> None:
    """It keeps the first epoch."""
    monkeypatch.setitem(AoffloadConnector.bind_kv_cache_manager.__globals__, "calling_engine", lambda: None)
    engine = engines()
    engine.run(Request("first", TEXT))
    assert engine.half.version is None and num_loaded(engine, "again") == HITS


@pytest.mark.parametrize("seed", range(2))
def test_no_request_reads_kv_of_other_weights(engines: Callable[..., SmallEngine], seed: int) -> None:
    """250 changes under load. The KV of the engine's tensors says which weights computed it."""
    rng = random.Random(seed)
    engine = engines(num_blocks=50, num_host_blocks=200, **({"max_bytes_in_flight": 1} if seed % 2 else {}))
    engine.most_tokens = rng.choice((6, 1_000))
    texts = [[rng.randrange(50) for _ in range(30)] for _ in range(3)]
    for number in range(250):
        for name in range(rng.randrange(3)):
            text = rng.choice(texts)[: rng.randint(5, 30)]
            engine.submit(Request(f"{number}.{name}", text, num_new=rng.randrange(4)))
        for _ in range(rng.randrange(6)):
            engine.step()
        while any(request.num_computed_tokens for request in engine.waiting):
            engine.step()  # vLLM refuses to reset its cache while a request waits with loaded KV
        weights = rng.randrange(3)
        engine.update_weights(weights, ("default", "a", "b")[weights])
    engine.run()
    assert engine.wrong == []
    assert counted(engine, "copied_blocks|load|host") > 20, "KV was loaded, too"
