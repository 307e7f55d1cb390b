"""The proof that a model of transformers computes over paged KV what it computes by itself, made when it is loaded.

A config says how a model attends, but it may leave something out. So the model runs a few dozen tokens twice: by its
own forward, each sequence at once, and over paged KV, two sequences side by side, in two slices and a decoded token.
The proof compares the input of every layer, the output of its attention, and the logits. Over paged KV each layer gets
the input that it had in the model's own forward, after the comparison: rounding would grow from layer to layer, until
a mixture of experts sends a token elsewhere. Then the second slice runs again over negated KV, and must fail the
comparison in every layer, because a comparison that it passes proves nothing.

So few tokens do not reach the end of a long window. Therefore the proof also takes the rule of each layer's mask, which
transformers states as a function of two positions, and asks it about positions up to the model's limit.

Not proven: what depends on the length of the input in another way than by its mask, beyond the tokens of the proof.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import attrs
import torch

from ..errors import AoffloadError, ConfigError
from .layers import LayerGroup, LayerPlace
from .paged import PagedBatch, SequenceSlice

__all__ = ["AttentionCall", "MaskRule", "Provable", "first_line", "prove"]

MaskRule = Callable[..., Any]
"""A mask function of transformers: batch, head, query's position, key's position → whether the query reads the key."""

BLOCK_SIZE = 4
MOST_TOKENS, OTHER_TOKENS = 30, 12
"""Tokens of the two sequences. Of a model with fewer positions, the first one has fewer tokens."""
TOLERANCE = 1e-3
"""In float32: the largest error of any token, as a share of the size of what is compared."""
ROUNDINGS = 8
"""In half precision: the largest error of the median token, in units of the last place of 1. Not of any token, because
rounding decides between two experts that have nearly equal scores."""


@attrs.frozen(eq=False)
class AttentionCall:
    """A layer's call of the attention function, in a forward in which masks say what they hide."""

    module: Any
    rule: MaskRule | None
    """None: the model passed no mask, although it could have had one."""


class Provable(Protocol):
    """The part of `TransformersModel` that `prove` uses."""

    model: Any
    groups: tuple[LayerGroup, ...]
    places: dict[int, LayerPlace]
    vocab_size: int
    max_positions: int

    def own_attention(self) -> AbstractContextManager[None]:
        """A block in which `model` attends by itself."""

    def attention_calls(self, batch: PagedBatch, kv_cache: torch.Tensor) -> dict[int, AttentionCall]:
        """Run a forward; the call of each layer."""

    def new_kv_cache(self, num_blocks: int, block_size: int) -> torch.Tensor: ...

    def forward(self, batch: PagedBatch, kv_cache: torch.Tensor) -> torch.Tensor: ...


def prove(served: Provable) -> None:
    """Raise `ConfigError` naming `model` unless `served` computes over paged KV what its model computes by itself."""
    try:
        with torch.inference_mode():
            probe = _Probe.of(served)
            probe.compare(probe.own_run())
    except (AoffloadError, MemoryError):
        raise
    except Exception as error:  # whatever a model's code makes of a call that it was not written for
        raise ConfigError("model", f"can't compute over paged KV: {first_line(error)}") from error


def first_line(error: BaseException) -> str:
    """What an error of another library says, in one line."""
    return f"{type(error).__name__}: {error}".partition("\n")[0][:300]


@attrs.frozen(eq=False)
class _Run:
    """What a forward gave: of each layer its input and its attention's output, [..., T, hidden]; [rows, vocab]."""

    inputs: dict[Any, torch.Tensor]
    outputs: dict[Any, torch.Tensor]
    logits: torch.Tensor


@attrs.frozen(eq=False)
class _Probe:
    served: Provable
    sequences: tuple[list[int], ...]
    ends: tuple[tuple[int, int, int], ...]
    """Where the slices of each sequence end: two slices of a prompt, then one decoded token."""
    tables: tuple[list[list[int]], ...]
    """The block tables of each sequence, one for each group."""
    layers: dict[int, tuple[Any, Any]] = attrs.field(init=False)
    """Of each layer the module around its attention, and the attention."""

    @classmethod
    def of(cls, served: Provable) -> _Probe:
        sizes = (min(MOST_TOKENS, served.max_positions), OTHER_TOKENS)
        if sizes[0] < OTHER_TOKENS:
            raise ConfigError("model", f"has {served.max_positions} positions; its proof takes {OTHER_TOKENS}")
        ids = _ordinary_ids(served)
        drawn = torch.randint(len(ids), (sum(sizes),), generator=torch.Generator().manual_seed(1)).tolist()
        tokens = [ids[index] for index in drawn]
        # The tables lie inside one another, so that no block stands where its position would say.
        num_tables, num_blocks = 2 * len(served.groups), -(-MOST_TOKENS // BLOCK_SIZE)
        tables = [[1 + at + num_tables * block for block in range(num_blocks)] for at in range(num_tables)]
        return cls(
            served,
            (tokens[: sizes[0]], tokens[sizes[0] :]),
            tuple((size - size // 3 - 1, size - 1, size) for size in sizes),
            (tables[: len(served.groups)], tables[len(served.groups) :]),
        )

    @layers.default
    def _check_masks(self) -> dict[int, tuple[Any, Any]]:
        """Compare the rule of each layer's mask with the layer's place."""
        batch = PagedBatch.of([self._slice(0, 0)], BLOCK_SIZE, self.served.model.device)
        calls = self.served.attention_calls(batch, self._new_kv_cache())
        checked = set()
        for layer, call in calls.items():
            if call.rule is None:
                raise ConfigError("model", f"layer {layer} takes no mask from transformers' mask functions")
            window = self.served.places[layer].window
            if (call.rule, window) not in checked:
                self._check_rule(layer, window, call.rule)
                checked.add((call.rule, window))
        names = {module: name for name, module in self.served.model.named_modules()}
        return {
            layer: (self.served.model.get_submodule(names[call.module].rpartition(".")[0]), call.module)
            for layer, call in calls.items()
        }

    def _check_rule(self, layer: int, window: int | None, rule: MaskRule) -> None:
        last = self.served.max_positions - 1
        edges = [] if window is None else [window - 1, window, window + 1, 2 * window + 1]
        queries = {min(position, last) for position in (0, *(2**power for power in range(31)), *edges, last)}
        offsets = {0, -1, 1} if window is None else {0, -1, 1, -window, 1 - window}
        pairs = {(query, query + offset) for query in queries for offset in offsets}
        pairs |= {(query, key) for query in queries for key in (0, query // 2)}
        asked = sorted((query, key) for query, key in pairs if 0 <= key <= last)
        queries_of, keys_of = torch.tensor(asked, device=self.served.model.device).unbind(1)
        zeros = torch.zeros_like(queries_of)
        answers = rule(zeros, zeros, queries_of, keys_of).expand(len(asked)).tolist()
        for (query, key), reads in zip(asked, answers, strict=True):
            if reads and key > query:
                raise ConfigError("model", f"layer {layer} attends to later tokens")
            if reads != (key <= query and (window is None or key > query - window)):
                kind = "full attention" if window is None else f"a window of {window}"
                verb = "reads" if reads else "does not read"
                raise ConfigError(
                    "model", f"layer {layer} has a mask other than {kind}: position {query} {verb} position {key}"
                )

    def own_run(self) -> list[_Run]:
        """What the model gives by its own forward for each sequence, with the logits after every token."""
        with self.served.own_attention():
            found = [self._own_run_of(tokens) for tokens in self.sequences]
        for each in found:
            if not each.logits.isfinite().all():
                raise ConfigError("model", "gives logits that are not finite numbers")
            if (each.logits == each.logits[:, :1]).all():
                raise ConfigError("model", "gives all tokens the same logit, so comparing them proves nothing")
        return found

    def _own_run_of(self, tokens: list[int]) -> _Run:
        model = self.served.model
        with _watched(self.layers, {}) as (inputs, outputs):
            logits = model(input_ids=torch.tensor([tokens], device=model.device), use_cache=False).logits
        return _Run(inputs, outputs, logits[0].float())

    def compare(self, own: Sequence[_Run]) -> None:
        """Compute both sequences side by side over paged KV, and compare what they give with what they gave alone."""
        kv_cache, tolerance = self._new_kv_cache(), self._tolerance
        for number, what in enumerate(("the first slice", "the second slice", "a decoded token")):
            for place, errors in self._errors(number, own, kv_cache).items():
                error = float(errors.max() if tolerance == TOLERANCE else errors.median())
                if not error <= tolerance:  # not a number, perhaps
                    raise ConfigError(
                        "model",
                        f"computes something else over paged KV than by itself: {place}, {what}, is off by {error:.2g} "
                        f"of its size, which is more than rounding ({tolerance:.2g})",
                    )
        kv_cache.neg_()
        alone = {f"attention of layer {layer}" for layer, place in self.served.places.items() if place.window == 1}
        shown = {
            place: float(errors.max())
            for place, errors in self._errors(1, own, kv_cache).items()
            if place.startswith("attention") and place not in alone  # in a window of 1 a token reads itself only
        }
        if not shown or min(shown.values()) <= tolerance:
            where = min(shown, key=shown.__getitem__, default="all layers")
            raise ConfigError("model", f"gives the same whatever KV it reads ({where}), so comparing proves nothing")

    def _errors(self, number: int, own: Sequence[_Run], kv_cache: torch.Tensor) -> dict[str, torch.Tensor]:
        """Run a slice of both sequences; how far each of its tokens is from what the model's own forward gave."""
        spans = [slice(self._start(which, number), ends[number]) for which, ends in enumerate(self.ends)]

        def of_slice(whole: Callable[[_Run], dict[Any, torch.Tensor]], module: Any) -> torch.Tensor:
            return torch.cat([whole(each)[module][..., at, :] for each, at in zip(own, spans, strict=True)], dim=-2)

        forced = {layer: of_slice(lambda run: run.inputs, layer) for layer in own[0].inputs}
        slices = [self._slice(which, number) for which in range(len(self.sequences))]
        with _watched(self.layers, forced) as (inputs, outputs):
            logits = self.served.forward(PagedBatch.of(slices, BLOCK_SIZE, kv_cache.device), kv_cache)
        errors: dict[str, torch.Tensor] = {}
        for layer, (around, attention) in self.layers.items():
            if around in forced:
                errors[f"the input of layer {layer}"] = _off(inputs[around], forced[around])
            wanted = of_slice(lambda run: run.outputs, attention)
            # A layer whose weights are zero adds nothing, whatever it reads.
            if wanted.any() or outputs[attention].any():
                errors[f"attention of layer {layer}"] = _off(outputs[attention], wanted)
        of_own = torch.stack([each.logits[at.stop - 1] for each, at in zip(own, spans, strict=True)])
        mean = of_own.mean(-1, keepdim=True)
        errors["the logits"] = _off(logits - mean, of_own - mean)
        return errors

    def _slice(self, which: int, number: int) -> SequenceSlice:
        start = self._start(which, number)
        return SequenceSlice(self.sequences[which][start : self.ends[which][number]], start, self.tables[which])

    def _start(self, which: int, number: int) -> int:
        return self.ends[which][number - 1] if number else 0

    def _new_kv_cache(self) -> torch.Tensor:
        num_blocks = 1 + sum(len(table) for tables in self.tables for table in tables)
        return self.served.new_kv_cache(num_blocks, BLOCK_SIZE)

    @property
    def _tolerance(self) -> float:
        return max(TOLERANCE, ROUNDINGS * torch.finfo(self.served.model.dtype).eps)


def _off(found: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """The error of each token, as a share of its size, or of the median token's size if that is larger."""
    rows = [each.float().movedim(-2, 0).flatten(1) for each in (found, wanted)]
    sizes = rows[1].norm(dim=-1)
    errors: torch.Tensor = (rows[0] - rows[1]).norm(dim=-1) / sizes.clamp(min=float(sizes.median()))
    return errors


@contextmanager
def _watched(
    layers: Mapping[int, tuple[Any, Any]], forced: Mapping[Any, torch.Tensor]
) -> Iterator[tuple[dict[Any, torch.Tensor], dict[Any, torch.Tensor]]]:
    """The inputs of layers and the outputs of their attention in the block; layers in `forced` get that for input."""
    inputs: dict[Any, torch.Tensor] = {}
    outputs: dict[Any, torch.Tensor] = {}

    def take(module: Any, args: tuple[Any, ...], options: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        hidden = options["hidden_states"] if "hidden_states" in options else args[0]
        inputs[module] = hidden.clone()
        hidden = forced.get(module, hidden)
        if "hidden_states" in options:
            return args, options | {"hidden_states": hidden}
        return (hidden, *args[1:]), options

    def keep(module: Any, _: Any, output: Any) -> None:
        outputs[module] = (output[0] if isinstance(output, tuple) else output).clone()

    handles = [around.register_forward_pre_hook(take, with_kwargs=True) for around, _ in layers.values()]
    handles += [attention.register_forward_hook(keep) for _, attention in layers.values()]
    try:
        yield inputs, outputs
    finally:
        for handle in handles:
            handle.remove()


def _ordinary_ids(served: Provable) -> list[int]:
    """The tokens that no config gives a meaning, such as padding or an image; all of them if none is left."""
    configs = (served.model.config, served.model.config.get_text_config())
    named = [value for config in configs for name, value in vars(config).items() if "token_i" in name]
    special = {each for value in named for each in (value if isinstance(value, (list, tuple)) else [value])}
    return [token for token in range(served.vocab_size) if token not in special] or list(range(served.vocab_size))
