"""Requests with recurrent states in the engine: each resumes from the checkpoint of its hit and writes new ones."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import torch

from ..._config.config import GroupLike
from ..._config.groups import KVCacheGroup, RecurrentState
from ...errors import ConfigError
from .batching import EngineOptions, PrefillStart
from .layers import kv_cache_groups
from .paged import PagedModel
from .recurrent import RecurrentSlice, Slot, StateLayout
from .sequence import RowOutput, RunningSequence


@attrs.define(eq=False)
class RecurrentSequence(RunningSequence):
    """A request of a model with recurrent layers. Its slot has the states at `num_computed`.

    The first slice copies the checkpoint of the hit into the slot. A slice that ends at the position of a planned
    checkpoint copies the slot into the blocks of the checkpoint, and the next commit names the position.
    """

    slot: Slot = attrs.field(kw_only=True)
    resume: Sequence[int] = attrs.field(default=(), kw_only=True)
    """The blocks of the checkpoint at which the hit ends. Empty without a hit."""
    _written: list[int] = attrs.field(factory=list, init=False)
    """Positions whose checkpoints are written and not committed."""

    def next_slice(self) -> RecurrentSlice:
        plain = super().next_slice()
        stop = plain.start + len(plain.token_ids)
        return RecurrentSlice(
            plain.token_ids,
            plain.start,
            plain.block_ids,
            slot=self.slot,
            resume=self.resume if plain.start == self.table.num_ready else (),
            checkpoint=self._planned(stop) if self.is_prefilling else (),
        )

    def advance(self, num_tokens: int, output: RowOutput, now: float) -> bool:
        was_prefilling = self.is_prefilling
        has_token = super().advance(num_tokens, output, now)
        if was_prefilling and self._planned(self.num_computed):
            self._written.append(self.num_computed)
        return has_token

    def commit(self, num_tokens: int, token_ids: Sequence[int] = ()) -> None:
        """As the base's. Also says which of the request's checkpoints are written."""
        now = [position for position in self._written if position <= num_tokens]
        self._written = [position for position in self._written if position > num_tokens]
        self.request.commit(num_tokens, token_ids, checkpoints=now)

    def take_tables(self) -> None:
        num_groups = len(self.table.block_ids)
        self.table = attrs.evolve(self.table, block_ids=self.request.block_ids[:num_groups])

    def _planned(self, position: int) -> Sequence[int]:
        """The blocks for a checkpoint of `position`. Empty: none is planned there."""
        planned = self.request.planned_checkpoints
        return next((each.block_ids for each in planned if each.num_tokens == position), ())


def engine_groups(model: PagedModel, options: EngineOptions) -> list[KVCacheGroup]:
    """The value of `OffloadConfig(groups=...)` for an engine with `model`: the groups of its attention layers, and the
    group of the checkpoints if it has recurrent layers. Checkpoints lie at multiples of `prefill_tokens`."""
    groups = kv_cache_groups(model.groups, options.block_size)
    states: StateLayout | None = getattr(model, "states", None)
    if states is not None:
        groups.append(states.group(model.new_kv_cache(1, options.block_size), options.prefill_tokens))
    return groups


def check_state_group(
    states: StateLayout, configured: Sequence[GroupLike], kv_cache: torch.Tensor, options: EngineOptions
) -> Sequence[GroupLike]:
    """Raise `ConfigError` unless the last group of a runtime has checkpoints of `states`. Return the other groups.

    Checkpoints must lie at multiples of `prefill_tokens`. Then slices end there anyway, and the tokens after a
    checkpoint are computed in the same slices whether or not a request resumes from it, so the results are the same bit
    for bit.
    """
    *others, group = configured
    if not isinstance(getattr(group, "attention", None), RecurrentState):
        raise ConfigError("groups", f"must end with the group of model.states, not {group.name!r}")
    wanted = states.num_rows(kv_cache)
    if getattr(group, "num_rows", None) != wanted:
        raise ConfigError(
            "groups.num_rows", f"is {getattr(group, 'num_rows', None)}, but a state takes {wanted} blocks"
        )
    if group.block_size % options.prefill_tokens:
        raise ConfigError(
            "groups.block_size",
            f"of group {group.name!r} is {group.block_size}, and checkpoints must lie at multiples of prefill_tokens "
            f"{options.prefill_tokens}",
        )
    if options.prefill_start is PrefillStart.BY_LAYER:
        raise ConfigError(
            "prefill_start", "is by layer, but a layer with a recurrent state needs its whole state at once"
        )
    return others
