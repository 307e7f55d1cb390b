"""Draft layers of a model: EAGLE, MTP and similar methods of speculative decoding.

A draft layer at token i reads the embedding of token i + 1 and the state of the target model at token i. So the KV of a
draft layer at token i depends on one token more than the KV of the target's layers. Several draft layers in a row may
read further ahead. In vLLM, draft layers usually share a group, and therefore blocks, with layers of the target. vLLM
hashes only the tokens of the block. It drops the last block of each hit and computes that block again, because the
token after the block may differ.

Here, the identity of a block has all tokens that the block's KV depends on. The prefix of a request begins after the
request's first `num_ahead` tokens, and these tokens are part of the root. So tokens [17, 33), and the tokens before
them, identify the unit of the ledger that has the KV of tokens [16, 32). Three rules follow, and need no code:

- A unit is stored when the token after it is known, one token later than without drafts. By then, the draft layers have
  computed the unit's last KV from that token, and not from a rejected draft.
- Two prompts that differ first in the token after a block do not share that block. They share the blocks before it.
- A hit keeps its last block.

The target verifies every draft. So a wrong identity would change no output, but would cost accepted drafts.
"""

from __future__ import annotations

from typing import Any

import attrs


@attrs.frozen
class Drafts:
    """How far the draft layers of an engine read ahead, and what vLLM does about it."""

    num_ahead: int = 0
    """Tokens after token i on which the KV at token i depends; 0 without draft layers."""
    are_dropped: bool = False
    """Whether vLLM drops the last block of a hit in its own prefix cache. A load of that block alone would only delay
    the request, because vLLM computes the block with the rest of the prompt."""

    @classmethod
    def of(cls, vllm_config: Any) -> Drafts:
        speculative = vllm_config.speculative_config
        if speculative is None or not speculative.use_eagle():
            return NO_DRAFTS
        return cls(vllm_config.num_prefill_lookahead_tokens, speculative.use_eagle_block_drop())


NO_DRAFTS = Drafts()


def draft_model_of(vllm_config: Any) -> Any:
    """vLLM's `ModelConfig` of the draft layers. None without draft layers."""
    speculative = vllm_config.speculative_config
    return speculative.draft_model_config if speculative is not None and speculative.use_eagle() else None


def model_paths(vllm_config: Any) -> tuple[str, ...]:
    """Paths of the models whose weights decide the KV: the engine's model, and the draft model if it is another one."""
    found = [vllm_config.model_config, draft_model_of(vllm_config)]
    return tuple(dict.fromkeys([str(model.model) for model in found if model is not None]))
