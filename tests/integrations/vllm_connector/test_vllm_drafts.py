"""Draft layers (EAGLE, MTP): their KV at a token depends on the tokens after it. The engine's second layer is one."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from engine_doubles import BLOCK, TEXT, Manager, Request
from small_engine import SmallEngine, counted
from vllm_configs import eagle, kv_cache_config, vllm_config
from vllm_doubles import AoffloadConnector

from aoffload._vllm.drafts import NO_DRAFTS, Drafts, model_paths
from aoffload._vllm.settings import given_namespace
from aoffload.errors import ConfigError

Engines = Callable[..., SmallEngine]


def served(engine: SmallEngine, *requests: Request) -> int:
    """Blocks that are loaded for these requests, of which the engine's own cache has nothing."""
    before = counted(engine, "copied_blocks|load|host")
    engine.manager.evict_all()
    engine.run(*requests)
    return int(counted(engine, "copied_blocks|load|host") - before)


def test_prompts_that_part_at_the_end_of_a_block_do_not_share_it(engines: Engines) -> None:
    """The draft layer's KV at the last token of the block depends on the token after it."""
    engine = engines(drafts=eagle(), num_blocks=60)
    shared = TEXT[: 4 * BLOCK]
    served(engine, Request("a", [*shared, *range(50, 60)]))
    assert served(engine, Request("b", [*shared, *range(70, 80)])) == 3
    assert served(engine, Request("c", [*shared, *range(70, 90)])) == 6, "both have a copy of the fourth block"
    assert served(engine, Request("d", [*shared, *range(50, 70)])) == 6


def test_no_block_of_a_hit_is_dropped(engines: Engines) -> None:
    """vLLM drops the last block of its own hits, since the token after it may be another one. Here, it is known."""
    engine = engines(drafts=eagle(), num_blocks=60)
    served(engine, Request("a", TEXT))
    assert served(engine, Request("b", [*TEXT, 1, 2, 3])) == (len(TEXT) - 1) // BLOCK


def test_a_block_is_stored_one_token_later(engines: Engines) -> None:
    """Its identity has the token after it, and the draft layers write its last KV only then."""
    engine = engines(drafts=eagle())
    served(engine, Request("exact", TEXT[: 3 * BLOCK]))
    assert engine.connector.ledger.statistics().host.num_cached == 2
    served(engine, Request("more", TEXT[: 3 * BLOCK + 1]))
    assert engine.connector.ledger.statistics().host.num_cached == 3


@pytest.mark.parametrize(("drops_block", "num_loaded"), [(True, 0), (False, 1)])
def test_a_block_that_vllm_drops_is_not_loaded(engines: Engines, drops_block: bool, num_loaded: int) -> None:
    """vLLM computes it with the rest of the prompt, without waiting for a load."""
    engine = engines(drafts=eagle(drops_block=drops_block), num_blocks=60)
    engine.run(Request("a", TEXT))
    hit = engine.manager.hit
    engine.manager.hit = lambda request: max(0, hit(request) - 1)  # type: ignore[method-assign]
    engine.run(Request("b", [*TEXT, 1, 2, 3]))
    assert counted(engine, "copied_blocks|load|host") == num_loaded


def test_a_request_behind_a_hit_of_nearly_all_is_served(engines: Engines) -> None:
    """Without the drop, vLLM may have all tokens but one: no prefix is left to load, and nothing breaks."""
    engine = engines(drafts=eagle(drops_block=False), num_blocks=60)
    for number in range(3):
        engine.run(Request(str(number), TEXT[: 4 * BLOCK + 1], num_new=9))


@pytest.mark.parametrize("num_ahead", [1, 3])
@pytest.mark.parametrize("windows", [(0,), (0, 12)])
def test_drafts_of_any_request_are_never_stored(
    engines: Engines, windows: tuple[int, ...], num_ahead: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Conversations that part anywhere, in chunks, with drafts of which some are rejected, and a pool in which requests
    preempt each other: every byte that a hit reads is that of its own tokens, in the draft layer, too."""
    drawn = random.Random(f"{windows} {num_ahead}")
    monkeypatch.setattr(Manager, "cache", lambda *_: None)  # blocks that requests share in vLLM are vLLM's affair
    engine = engines(
        drafts=eagle(num_ahead=num_ahead), num_blocks=30, windows=windows, most_tokens=10, num_host_blocks=200
    )
    said = [TEXT[:8], TEXT[:9], [*TEXT[:12], 99], [1, 2, 3]]
    for turn in range(25):
        texts = [drawn.choice(said)[: drawn.randrange(1, 40)] for _ in range(3)]
        requests = [
            Request(f"{turn}.{number}", [*text, *(drawn.randrange(5) for _ in range(drawn.randrange(9)))], num_new=6)
            for number, text in enumerate(texts)
        ]
        engine.run(*requests)
        said += [request.all_token_ids for request in requests]
    assert counted(engine, "copied_blocks|load|host") > 100
    assert not engine.wrong


def test_a_step_may_compute_less_than_is_read_ahead(engines: Engines) -> None:
    """After a load, the count of tokens whose KV is final does not go back."""
    engine = engines(drafts=eagle(num_ahead=3), num_blocks=60)
    served(engine, Request("a", TEXT))
    engine.most_tokens = 1
    assert served(engine, Request("b", TEXT, num_new=6)) == 6


@pytest.mark.parametrize(
    ("speculative", "wanted"),
    [
        (None, NO_DRAFTS),
        (SimpleNamespace(use_eagle=lambda: False), NO_DRAFTS),
        (eagle(), Drafts(1, are_dropped=True)),
        (eagle(num_ahead=4, drops_block=False), Drafts(4)),
    ],
)
def test_what_draft_layers_read_is_vllms_own_number(speculative: Any, wanted: Drafts) -> None:
    """Modules of MTP read one token further each. N-grams have no layers."""
    config = vllm_config()
    config.speculative_config = speculative
    config.num_prefill_lookahead_tokens = getattr(speculative, "num_ahead", 0)
    assert Drafts.of(config) == wanted


def test_a_disk_knows_the_draft_layers(tmp_path: Path) -> None:
    """A restart with another draft model finds nothing: its KV in the draft layers is another one. Without `namespace`,
    the files of both models say which they are."""
    identity_of = AoffloadConnector.__init__.__globals__["_identity"]
    models = [tmp_path / name for name in ("target", "drafts")]
    for model in models:
        model.mkdir()
        (model / "model.safetensors").write_bytes(b"weights")
    config = vllm_config(drafts=eagle())
    config.model_config.model, config.speculative_config.draft_model_config.model = map(str, models)
    texts = [identity_of(config, kv_cache_config(9), "").text()]
    (models[1] / "model.safetensors").write_bytes(b"other weights")
    texts.append(identity_of(config, kv_cache_config(9), "").text())
    config.speculative_config = None
    texts.append(identity_of(config, kv_cache_config(9), "").text())
    assert len(set(texts)) == 3


def test_a_draft_model_of_a_hub_needs_a_namespace() -> None:
    """Its files cannot be read, and with a disk something has to name them. That is refused before any weights are
    loaded."""
    extra = {"disk": {"path": "/cache", "size": "1GiB"}}
    with pytest.raises(ConfigError, match="namespace: is needed with disk") as caught:
        given_namespace(extra, model_paths(vllm_config(drafts=eagle())))
    assert caught.value.argument == "namespace"
    assert (
        given_namespace({**extra, "namespace": "both models"}, model_paths(vllm_config(drafts=eagle())))
        == "both models"
    )
