"""Draft layers of a model: EAGLE, MTP and similar methods of speculative decoding.

A draft layer at token i reads the embedding of token i + 1, beside the state of the target model at token i. So its KV
at token i depends on one token more than the KV of the target's layers, and a module of several reads further ahead.
In vLLM, draft layers usually share a group, and so blocks, with layers of the target. vLLM names such blocks by their
own tokens. It drops the last block of each hit, and computes it again, because the token after it may be another one.

Here, the identity of a block has all tokens that its KV depends on. The prefix of a request begins after its first
`num_ahead` tokens, which are part of its root. So the unit of the ledger that has the KV of tokens [16, 32) is
identified by tokens [17, 33), and by those before them. Three rules follow, without a line of code for any of them:

- A unit is stored once the token after it is known, one token later than without drafts. By then, the draft layers have
  written the unit's last KV for that token, and not for a draft that was rejected.
- Prompts that part at the end of a block share the blocks before it, but not that block.
- A hit needs no dropped block.

The target verifies every draft, so a wrong identity would change no output. It would cost accepted drafts.
"""

from __future__ import annotations

from typing import Any

import attrs


@attrs.frozen
class Drafts:
    """What the draft layers of an engine depend on."""

    num_ahead: int = 0
    """Tokens after token i on which the KV at token i depends; 0 without draft layers."""
    are_dropped: bool = False
    """Whether vLLM drops the last block of a hit in its own prefix cache. A load of that block alone would delay the
    request for a block that vLLM computes with the rest of the prompt."""

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
    """The models whose weights decide the KV: that of the engine, and that of its draft layers if it is another one."""
    found = [vllm_config.model_config, draft_model_of(vllm_config)]
    return tuple(dict.fromkeys([str(model.model) for model in found if model is not None]))
