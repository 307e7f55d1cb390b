"""Compares the results of two runs bit for bit: tokens, and the logits behind each of them."""

from __future__ import annotations

from collections.abc import Mapping

import attrs

from .._reference.engine.sequence import Generation

__all__ = ["Difference", "find_differences"]


@attrs.frozen
class Difference:
    turn_id: str
    num_tokens: int
    """Tokens of the answer that differ."""
    num_logits: int
    """Positions whose logits differ; the first position is the prompt's last token."""
    prompt_logits_differ: bool


def find_differences(
    reference: Mapping[str, Generation], generations: Mapping[str, Generation]
) -> tuple[Difference, ...]:
    """Where `generations` (of completed requests, by turn id) differ from those of the reference run."""
    found = (_compare(turn_id, reference[turn_id], given) for turn_id, given in sorted(generations.items()))
    return tuple(difference for difference in found if difference is not None)


def _compare(turn_id: str, expected: Generation, given: Generation) -> Difference | None:
    pairs = zip(expected.token_ids, given.token_ids, strict=True)
    num_tokens = sum(left != right for left, right in pairs)
    logits = [left != right for left, right in zip(expected.logits_digests, given.logits_digests, strict=True)]
    if not num_tokens and not any(logits):
        return None
    return Difference(turn_id, num_tokens, sum(logits), logits[0])
