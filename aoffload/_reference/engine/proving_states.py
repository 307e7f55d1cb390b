"""Proves that the recurrent layers of a model resume from a checkpoint.

**Each recurrent layer alone.** The layer computes a sequence in one pass, and then in slices. Between two slices its
state is exported into blocks and imported into a fresh slot. Both results must agree. Models whose scan takes no
initial state fail here: their state is right, and the next slice ignores it.

A layer's decay decides how long its state matters. With a fast decay, as in many weights that are drawn at random, a
lost state changes nothing after a token or two, and a comparison with a lost state would pass. So for this part of the
proof the decay is set slow (`A_log`), and the direct path from input to output around the state is closed (`D`).
The proof is about the model's code, which is the same for all weights. The decay depends on the input, so a test with
the weights as they are would only say something about the tokens of the test. After the comparison each kind of state
is replaced by zeros, and the result must differ clearly. If it does not, the model is refused, because the comparison
would prove nothing.

**The whole model.** The proof of `proving` runs with the weights as they are. Each slice gets a fresh slot that resumes
from the checkpoint of the slice before, so the states go through blocks there, too, and both sequences of the batch
advance by different numbers of tokens. The results of recurrent layers are compared like those of attention layers.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol, cast

import attrs
import torch

from ...errors import ConfigError
from .paged import SequenceSlice
from .proving import BLOCK_SIZE, TOLERANCE, Layers, Probe, Provable, off, tolerance_of
from .recurrent import RecurrentSlice, Slot, StateLayout

SLOW_A_LOG = -4.0
"""`A_log` in the proof: the state decays by a factor of about exp(-0.018 dt) in a token, where dt is about 1."""
CUTS = ((17, 29, 30), (1, 3, 8, 30))
"""Ends of the slices. A slice of one token takes the path of decoding. The second way has slices that are shorter than
a convolution."""
CLEAR = 10 * TOLERANCE
"""In float32: the smallest error that a lost state must cause in the token that is off most. In half precision it is
twice the tolerance."""


def prove_resuming(
    mixers: Mapping[int, Any],
    inputs: Mapping[int, torch.Tensor],
    layout: StateLayout,
    compute: Callable[[Any, torch.Tensor, Slot], torch.Tensor],
) -> None:
    """Raise `ConfigError` naming `model` unless each of `mixers` computes the same in slices as in one pass.

    `inputs` are hidden states for each of them, [1, T, hidden]. `compute` calls one of them with hidden states and a
    slot.
    """
    with _states_visible(mixers.values()):
        for layer, mixer in mixers.items():
            _Mixer(layer, mixer, inputs[layer], layout, compute).check()


@contextmanager
def _states_visible(mixers: Any) -> Iterator[None]:
    """Inside this block, states decay slowly, and outputs depend on nothing else but the states."""
    changed = []
    for mixer in mixers:
        for name, weight in mixer.named_parameters():
            value = {"A_log": SLOW_A_LOG, "D": 0.0}.get(name.rpartition(".")[2])
            if value is not None:
                changed.append((weight, weight.data))
                weight.data = torch.full_like(weight.data, value)
    try:
        yield
    finally:
        for weight, data in changed:
            weight.data = data


@attrs.frozen(eq=False)
class _Mixer:
    layer: int
    module: Any
    hidden: torch.Tensor
    layout: StateLayout
    compute: Callable[[Any, torch.Tensor, Slot], torch.Tensor]

    def check(self) -> None:
        whole = self._advance(self._new_slot(), self.hidden.shape[1])
        tolerance = tolerance_of(self.hidden.dtype)
        for ends in CUTS:
            slot = self._new_slot()
            for start, end in itertools.pairwise((0, *ends)):
                slot = self._moved(slot)
                found = self._advance(slot, end)
                error = float(off(found, whole[:, start:end]).max())
                if not error <= tolerance:  # true for NaN, too
                    ignores = self._ignores_its_state(start, end)
                    what = (
                        f"the scan of layer {self.layer} takes no initial state" if ignores else f"layer {self.layer}"
                    )
                    raise ConfigError(
                        "model",
                        f"cannot resume from a recurrent state: {what}, tokens {start} to {end - 1} have a "
                        f"relative error of {error:.2g}, which is more than rounding ({tolerance:.2g})",
                    )
        for name in ("conv", "recurrent"):
            self._check_that_it_matters(name, whole)

    def _check_that_it_matters(self, name: str, whole: torch.Tensor) -> None:
        start, end = CUTS[0][:2]
        slot = self._new_slot()
        self._advance(slot, start)
        if not self._lose(slot, name):
            return
        error = float(off(self._advance(slot, end), whole[:, start:end]).max())
        if not error >= max(CLEAR, 2 * tolerance_of(self.hidden.dtype)):
            raise ConfigError(
                "model",
                f"gives nearly the same values without the {name} state of layer {self.layer} (relative error "
                f"{error:.2g}), so the engine cannot check it",
            )

    def _ignores_its_state(self, start: int, end: int) -> bool:
        """Whether the tokens from `start` on come out the same if the recurrent state at `start` is lost."""
        outputs = []
        for is_lost in (False, True):
            slot = self._new_slot()
            if start:
                self._advance(slot, start)
            if is_lost and not self._lose(slot, "recurrent"):
                return False
            outputs.append(self._advance(slot, end))
        return start > 0 and torch.equal(*outputs)

    def _lose(self, slot: Slot, name: str) -> bool:
        """Replace one kind of state of this layer by zeros. False if the layer has no such state."""
        lost = [
            view.zero_()
            for piece, view in zip(self.layout.pieces, slot.views, strict=True)
            if (piece.layer, piece.name) == (self.layer, name)
        ]
        return bool(lost)

    def _advance(self, slot: Slot, end: int) -> torch.Tensor:
        found = self.compute(self.module, self.hidden[:, slot.num_tokens : end], slot)
        slot.num_tokens = end
        return found

    def _new_slot(self) -> Slot:
        return self.layout.new_slot(self._blocks())

    def _moved(self, slot: Slot) -> Slot:
        """A fresh slot that has gone through blocks."""
        if slot.num_tokens == 0:
            return slot
        blocks = self._blocks()
        order = list(range(self.layout.num_rows(blocks)))[::-1]
        slot.save(blocks, order)
        fresh = self._new_slot()
        fresh.load(blocks, order, slot.num_tokens)
        return fresh

    def _blocks(self) -> torch.Tensor:
        num_bytes = -(-self.layout.num_bytes // 3)
        return torch.zeros(4, num_bytes, dtype=torch.uint8, device=self.layout.device)


class ServedStates(Provable, Protocol):
    """The part of `HybridModel` that `RecurrentProbe` uses."""

    states: StateLayout
    mixers: Mapping[int, Any]


@attrs.frozen(eq=False)
class RecurrentProbe(Probe):
    """The proof of a whole model, with a checkpoint at the end of every slice."""

    @property
    def _states(self) -> ServedStates:
        return cast(ServedStates, self.served)

    def _layers(self) -> Layers:
        layers = super()._layers()
        names = {module: name for name, module in self.served.model.named_modules()}
        for layer, mixer in self._states.mixers.items():
            around = self.served.model.get_submodule(names[mixer].rpartition(".")[0])
            layers["recurrence", layer] = (around, mixer)
        return layers

    def _slice(self, which: int, number: int) -> SequenceSlice:
        plain = super()._slice(which, number)
        num_rows, num_slices = self._num_rows, len(self.ends[which])
        first = self._num_table_blocks + num_rows * num_slices * which
        rows = [range(first + num_rows * at, first + num_rows * (at + 1)) for at in range(num_slices)]
        return RecurrentSlice(
            plain.token_ids,
            plain.start,
            plain.block_ids,
            slot=self._states.states.new_slot(self._new_kv_cache()),
            resume=list(rows[number - 1]) if number else (),
            checkpoint=list(rows[number]),
        )

    @property
    def _num_rows(self) -> int:
        return self._states.states.num_rows(self.served.new_kv_cache(1, BLOCK_SIZE))

    def _new_kv_cache(self) -> torch.Tensor:
        num_blocks = self._num_table_blocks + self._num_rows * sum(len(ends) for ends in self.ends)
        return self.served.new_kv_cache(num_blocks, BLOCK_SIZE)
