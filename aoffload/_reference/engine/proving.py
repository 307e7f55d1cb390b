"""Checks, when a model of transformers is loaded, that it computes the same over paged KV as by its own forward.

A config describes a model's attention, but it may omit something. So the model runs a few dozen tokens twice. By its
own forward, it computes each sequence at once. Over paged KV, it computes two sequences in one batch, in two slices and
then one decoded token. The proof compares the input of every layer, the output of its attention, and the logits. Over
paged KV, after the comparison, each layer gets the input that it had in the model's own forward. Otherwise the rounding
error would grow from layer to layer, until a mixture of experts sends a token to another expert. Then the second slice
runs again over negated KV. It must fail the comparison in every layer, because a comparison that passes with wrong KV
proves nothing.

A few dozen tokens do not reach the end of a long window. So the proof also takes the rule of each layer's mask, which
transformers states as a function of two positions, and calls it for positions up to the model's limit.

The proof does not cover parts of a model, other than masks, that change when the input is longer than the proof's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import attrs
import torch

from ...errors import AoffloadError, ConfigError
from .layers import LayerGroup, LayerPlace
from .paged import PagedBatch, SequenceSlice

MaskRule = Callable[..., Any]
"""A mask function of transformers: (batch, head, query position, key position) → whether the query reads the key."""

BLOCK_SIZE = 4
MOST_TOKENS, OTHER_TOKENS = 30, 12
"""Tokens of the two sequences. The first one is shorter if the model has fewer positions."""
TOLERANCE = 1e-3
"""In float32: the largest error of any token, relative to the norm that `off` uses."""
ROUNDINGS = 8
"""In half precision: the largest error of the median token, in units of the last place of 1. Single tokens may differ
more, because rounding may decide between two experts that have nearly equal scores."""


Layers = dict[tuple[str, int], tuple[Any, Any]]
"""By kind and layer: the module that contains the compared one, and the compared module itself."""


@attrs.frozen(eq=False)
class AttentionCall:
    """A layer's call of the attention function, in a forward whose masks carry their rule."""

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
        """A context in which `model` uses the attention of transformers."""

    def attention_calls(self, batch: PagedBatch, kv_cache: torch.Tensor) -> dict[int, AttentionCall]:
        """Run a forward, and return the attention call of each layer."""

    def new_kv_cache(self, num_blocks: int, block_size: int) -> torch.Tensor: ...

    def forward(self, batch: PagedBatch, kv_cache: torch.Tensor) -> torch.Tensor: ...


def prove(served: Provable, kind: type[Probe] | None = None) -> None:
    """Raise `ConfigError` naming `model` unless `served` computes the same over paged KV as its model does by
    itself."""
    try:
        with torch.inference_mode():
            probe = (kind or Probe).of(served)
            probe.compare(probe.own_run())
    except (AoffloadError, MemoryError):
        raise
    except Exception as error:  # the model's code may raise anything in a call that it was not written for
        raise ConfigError("model", f"can't compute over paged KV: {first_line(error)}") from error


def first_line(error: BaseException) -> str:
    """The first line of an error of another library, with its type."""
    return f"{type(error).__name__}: {error}".partition("\n")[0][:300]


@attrs.frozen(eq=False)
class _Run:
    """The results of a forward: by layer, its input and the output of its attention [..., T, hidden]; logits
    [rows, vocab]."""

    inputs: dict[Any, torch.Tensor]
    outputs: dict[Any, torch.Tensor]
    logits: torch.Tensor


@attrs.frozen(eq=False)
class Probe:
    served: Provable
    sequences: tuple[list[int], ...]
    ends: tuple[tuple[int, int, int], ...]
    """Ends of each sequence's slices: two slices of a prompt, then one decoded token."""
    tables: tuple[list[list[int]], ...]
    """The block tables of each sequence, one for each group."""
    layers: Layers = attrs.field(init=False)

    @classmethod
    def of(cls, served: Provable) -> Probe:
        sizes = (min(MOST_TOKENS, served.max_positions), OTHER_TOKENS)
        if sizes[0] < OTHER_TOKENS:
            raise ConfigError(
                "model", f"has {served.max_positions} positions, but the check of the model needs {OTHER_TOKENS}"
            )
        ids = ordinary_ids(served.model, served.vocab_size)
        drawn = torch.randint(len(ids), (sum(sizes),), generator=torch.Generator().manual_seed(1)).tolist()
        tokens = [ids[index] for index in drawn]
        # The tables are interleaved, so that block ids do not follow from positions in the sequence.
        num_tables, num_blocks = 2 * len(served.groups), -(-MOST_TOKENS // BLOCK_SIZE)
        tables = [[1 + at + num_tables * block for block in range(num_blocks)] for at in range(num_tables)]
        return cls(
            served,
            (tokens[: sizes[0]], tokens[sizes[0] :]),
            tuple((size - size // 3 - 1, size - 1, size) for size in sizes),
            (tables[: len(served.groups)], tables[len(served.groups) :]),
        )

    @layers.default
    def _layers(self) -> Layers:
        """The modules to compare. Before that, compare the rule of each layer's mask with the window of the layer in
        the config."""
        batch = PagedBatch.of([self._slice(0, 0)], BLOCK_SIZE, self.served.model.device)
        calls = self.served.attention_calls(batch, self._new_kv_cache())
        checked = set()
        for layer, call in calls.items():
            if call.rule is None:
                raise ConfigError("model", f"layer {layer} does not get its mask from transformers' mask functions")
            window = self.served.places[layer].window
            if (call.rule, window) not in checked:
                self._check_rule(layer, window, call.rule)
                checked.add((call.rule, window))
        names = {module: name for name, module in self.served.model.named_modules()}
        return {
            ("attention", layer): (self.served.model.get_submodule(names[call.module].rpartition(".")[0]), call.module)
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
        """The results of the model's own forward for each sequence, with the logits after every token."""
        with self.served.own_attention():
            found = [self._own_run_of(tokens) for tokens in self.sequences]
        for each in found:
            if not each.logits.isfinite().all():
                raise ConfigError("model", "gives logits that are not finite numbers")
            if (each.logits == each.logits[:, :1]).all():
                raise ConfigError("model", "gives all tokens the same logit, so the engine cannot compare them")
        return found

    def _own_run_of(self, tokens: list[int]) -> _Run:
        model = self.served.model
        with _watched(self.layers, {}) as (inputs, outputs):
            logits = model(input_ids=torch.tensor([tokens], device=model.device), use_cache=False).logits
        return _Run(inputs, outputs, logits[0].float())

    def compare(self, own: Sequence[_Run]) -> None:
        """Compute both sequences in one batch over paged KV, and compare the results with those of the own forward."""
        kv_cache, tolerance = self._new_kv_cache(), tolerance_of(self.served.model.dtype)
        for number, what in enumerate(("the first slice", "the second slice", "a decoded token")):
            for place, errors in self._errors(number, own, kv_cache).items():
                error = float(errors.max() if tolerance == TOLERANCE else errors.median())
                if not error <= tolerance:  # true for NaN, too
                    raise ConfigError(
                        "model",
                        f"computes other values with paged KV than by itself: {place}, {what}, has a relative error of "
                        f"{error:.2g}, which is more than rounding ({tolerance:.2g})",
                    )
        kv_cache.neg_()
        # In a window of 1, a token reads only itself.
        alone = {f"attention of layer {layer}" for layer, place in self.served.places.items() if place.window == 1}
        shown = {
            place: float(errors.max())
            for place, errors in self._errors(1, own, kv_cache).items()
            if place.startswith(("attention", "recurrence")) and place not in alone
        }
        if not shown or min(shown.values()) <= tolerance:
            where = min(shown, key=shown.__getitem__, default="all layers")
            raise ConfigError(
                "model", f"gives the same values whatever KV it reads ({where}), so the engine cannot check it"
            )

    def _errors(self, number: int, own: Sequence[_Run], kv_cache: torch.Tensor) -> dict[str, torch.Tensor]:
        """Run a slice of both sequences. Returns the error of each token against the model's own forward."""
        spans = [slice(self._start(which, number), ends[number]) for which, ends in enumerate(self.ends)]

        def of_slice(whole: Callable[[_Run], dict[Any, torch.Tensor]], module: Any) -> torch.Tensor:
            return torch.cat([whole(each)[module][..., at, :] for each, at in zip(own, spans, strict=True)], dim=-2)

        forced = {layer: of_slice(lambda run: run.inputs, layer) for layer in own[0].inputs}
        slices = [self._slice(which, number) for which in range(len(self.sequences))]
        with _watched(self.layers, forced) as (inputs, outputs):
            logits = self.served.forward(PagedBatch.of(slices, BLOCK_SIZE, kv_cache.device), kv_cache)
        errors: dict[str, torch.Tensor] = {}
        for (kind, layer), (around, compared) in self.layers.items():
            if around in forced:
                errors[f"the input of layer {layer}"] = off(inputs[around], forced[around])
            wanted = of_slice(lambda run: run.outputs, compared)
            # The attention of a layer with zero weights gives zeros, whatever KV it reads: not compared.
            if wanted.any() or outputs[compared].any():
                errors[f"{kind} of layer {layer}"] = off(outputs[compared], wanted)
        of_own = torch.stack([each.logits[at.stop - 1] for each, at in zip(own, spans, strict=True)])
        mean = of_own.mean(-1, keepdim=True)
        errors["the logits"] = off(logits - mean, of_own - mean)
        return errors

    def _slice(self, which: int, number: int) -> SequenceSlice:
        start = self._start(which, number)
        return SequenceSlice(self.sequences[which][start : self.ends[which][number]], start, self.tables[which])

    def _start(self, which: int, number: int) -> int:
        return self.ends[which][number - 1] if number else 0

    def _new_kv_cache(self) -> torch.Tensor:
        return self.served.new_kv_cache(self._num_table_blocks, BLOCK_SIZE)

    @property
    def _num_table_blocks(self) -> int:
        return 1 + sum(len(table) for tables in self.tables for table in tables)


def tolerance_of(dtype: torch.dtype) -> float:
    """The largest error that counts as rounding in a model with weights of `dtype`."""
    return max(TOLERANCE, ROUNDINGS * torch.finfo(dtype).eps)


def off(found: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """The error of each token, relative to the norm of the token, or to the median norm if that is larger."""
    rows = [each.float().movedim(-2, 0).flatten(1) for each in (found, wanted)]
    sizes = rows[1].norm(dim=-1)
    errors: torch.Tensor = (rows[0] - rows[1]).norm(dim=-1) / sizes.clamp(min=float(sizes.median()))
    return errors


@contextmanager
def _watched(
    layers: Layers, forced: Mapping[Any, torch.Tensor]
) -> Iterator[tuple[dict[Any, torch.Tensor], dict[Any, torch.Tensor]]]:
    """Record the inputs of layers and the outputs of their compared modules inside the `with` block. `forced` replaces
    the inputs of its layers."""
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

    arounds = dict.fromkeys(around for around, _ in layers.values())
    handles = [around.register_forward_pre_hook(take, with_kwargs=True) for around in arounds]
    handles += [compared.register_forward_hook(keep) for _, compared in layers.values()]
    try:
        yield inputs, outputs
    finally:
        for handle in handles:
            handle.remove()


def ordinary_ids(model: Any, vocab_size: int) -> list[int]:
    """The token ids to which no config gives a special meaning, such as padding or an image. If none is left, all
    ids."""
    configs = (model.config, model.config.get_text_config())
    named = [value for config in configs for name, value in vars(config).items() if "token_i" in name]
    special = {each for value in named for each in (value if isinstance(value, (list, tuple)) else [value])}
    return [token for token in range(vocab_size) if token not in special] or list(range(vocab_size))
