"""Planted defects of loading models: models that are accepted without proof."""

from __future__ import annotations

from .planting import Mutant

__all__ = ["MODEL_LOADING_MUTANTS"]

PROVING, MODELS = "aoffload._reference.engine.proving", "aoffload._reference.engine.transformers"
TESTS = "tests/integrations/test_model_types.py::"
_PROVEN = "a model is served if it gives over paged KV what it gives by itself"

MODEL_LOADING_MUTANTS = (
    Mutant(
        "proof compares nothing",
        PROVING,
        "                if not error <= tolerance:  # true for NaN, too\n",
        "                if False:\n",
        _PROVEN,
        test=TESTS + "test_a_model_that_depends_on_its_slices_is_refused",
    ),
    Mutant(
        "proof is content with most tokens",
        PROVING,
        "float(errors.max() if tolerance == TOLERANCE else errors.median())",
        "float(errors.median())",
        _PROVEN,
        test=TESTS + "test_in_float32_no_token_may_differ",
    ),
    Mutant(
        "proof lets rounding grow from layer to layer",
        PROVING,
        "        hidden = forced.get(module, hidden)\n",
        "",
        "rounding is no reason to refuse a model",
        test=TESTS + "test_a_layer_that_reads_no_kv_is_refused",
    ),
    Mutant(
        "proof that proves nothing taken for one",
        PROVING,
        "        if not shown or min(shown.values()) <= tolerance:\n",
        "        if False:\n",
        _PROVEN,
        test=TESTS + "test_a_layer_that_reads_no_kv_is_refused",
    ),
    Mutant(
        "equal logits taken for a proof",
        PROVING,
        "            if (each.logits == each.logits[:, :1]).all():\n",
        "            if False:\n",
        _PROVEN,
        test=TESTS + "test_weights_that_prove_nothing_are_refused",
    ),
    Mutant(
        "rule of a mask not asked",
        PROVING,
        "                self._check_rule(layer, window, call.rule)\n",
        "",
        "a mask is what its config says at all positions",
        test=TESTS + "test_a_mask_is_asked_about_positions_far_away",
    ),
    Mutant(
        "calls of a layer not counted",
        MODELS,
        "    if layer in paged_calls:\n",
        "    if False:\n",
        "a block has one place for the KV of a layer",
        test=TESTS + "test_a_directory_is_refused_for_the_same_reasons",
    ),
    Mutant(
        "layers without a call not missed",
        MODELS,
        "        if missing:\n            raise ConfigError",
        "        if False:\n            raise ConfigError",
        "every layer of a config attends",
        test=TESTS + "test_a_layer_that_never_attends_is_refused",
    ),
    Mutant(
        "mask of a model's own ignored",
        MODELS,
        "    if attention_mask is not None and rule is None:\n",
        "    if False:\n",
        "what a model turns to later fails the request",
        test=TESTS + "test_what_a_model_turns_to_later_fails_the_request",
    ),
    Mutant(
        "training mode ignored",
        MODELS,
        '    if others.get("dropout"):\n',
        "    if False:\n",
        "what a model turns to later fails the request",
        test=TESTS + "test_what_a_model_turns_to_later_fails_the_request",
    ),
    Mutant(
        "another library's error about a config let through",
        MODELS,
        "        except Exception as error:  # transformers cannot give",
        "        except MemoryError as error:  # transformers cannot give",
        "a model that can't be served is refused by an error of ours",
        test=TESTS + "test_a_directory_is_refused_for_the_same_reasons",
    ),
)
