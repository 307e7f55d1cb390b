"""The engine's decisions: the tokens of the next forward, and the blocks that it writes."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from aoffload._kernel.states import RequestState
from aoffload._reference.engine.batching import EngineOptions, LineUp
from aoffload._reference.engine.layers import LayerGroup
from aoffload._reference.engine.loop import Forward
from aoffload._reference.engine.paged import PagedBatch, SequenceSlice
from aoffload._reference.engine.sequence import PromptTable, RowOutput, RunningSequence
from aoffload.errors import ConfigError

OPTIONS = EngineOptions(block_size=4, prefill_tokens=8, decode_rows=2, max_running=4)
DUMMY = SequenceSlice([0], 0, [[99]])


class StubRequest:
    """As much of a request as the decisions look at."""

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self.state = RequestState.RUNNING


def make_sequence(name: str, num_tokens: int, num_ready: int = 0, num_new: int = 2) -> RunningSequence:
    blocks = list(range(1, 2 + (num_tokens + num_new) // 4))
    table = PromptTable([blocks], num_ready, OPTIONS.prefill_tokens, OPTIONS.block_size, [90, 91])
    request: Any = StubRequest(name)
    prompt = list(range(100, 100 + num_tokens))
    return RunningSequence(request, prompt, num_new, table, lambda _: None, num_computed=table.start)


def advance(line_up: LineUp, token: int = 7) -> list[SequenceSlice]:
    """Pretend that the next step was computed; its slices."""
    step = line_up.next_step()
    assert step is not None
    for sequence, part in zip(step.sequences, step.slices, strict=False):
        sequence.advance(len(part.token_ids), RowOutput(token, b"logits"), now=1.0)
        line_up.has_moved_on(sequence)
    return list(step.slices)


def test_prompts_are_cut_on_the_grid() -> None:
    """Slices start at multiples of the grid wherever the hit ended, so equal tokens are computed in equal shapes."""
    for num_ready in (0, 8, 16):
        line_up = LineUp(OPTIONS, DUMMY)
        line_up.put_in(make_sequence("a", 21, num_ready))
        starts = []
        while line_up.prefilling:
            (part,) = advance(line_up)
            starts.append((part.start, len(part.token_ids)))
        assert starts == [(0, 8), (8, 8), (16, 5)][num_ready // 8 :]


def test_a_hit_off_the_grid_is_computed_from_the_grid_without_touching_shared_blocks() -> None:
    """What lies between the grid and the end of the hit is written to scratch blocks; a cached block never is."""
    sequence = make_sequence("a", 21, num_ready=12)
    first = sequence.next_slice()
    assert (first.start, first.block_ids) == (8, [[1, 2, 90, 4, 5, 6]])
    sequence.advance(8, RowOutput(7, b""), now=0.0)
    assert sequence.next_slice().block_ids == [[1, 2, 3, 4, 5, 6]]


def test_prompts_go_before_decoding_and_one_at_a_time() -> None:
    """A forward has one slice of one prompt, the oldest; decoding goes on when no prompt waits."""
    line_up = LineUp(OPTIONS, DUMMY)
    first, second = make_sequence("first", 5), make_sequence("second", 9)
    line_up.put_in(first)
    line_up.put_in(second)
    order = []
    while (step := line_up.next_step()) is not None and not second.is_complete:
        order.append(step.request_ids)
        advance(line_up)
        for sequence in (first, second):
            if sequence.is_complete:
                line_up.take_out(sequence)
    assert order == [["first"], ["second"], ["second"], ["first", "second"]]


def test_decode_steps_have_one_size_and_take_turns() -> None:
    """A decode forward has the same number of rows whichever requests run, and none waits for more than a round."""
    line_up = LineUp(OPTIONS, DUMMY)
    for name in ("a", "b", "c"):
        line_up.put_in(make_sequence(name, 3, num_new=9))
        advance(line_up)
    assert [line_up.next_step().request_ids for _ in range(4) if advance(line_up)] == [  # type: ignore[union-attr]
        ["c", "a"],
        ["b", "c"],
        ["a", "b"],
        ["c", "a"],
    ]
    for sequence in list(line_up.decoding)[1:]:
        line_up.take_out(sequence)
    step = line_up.next_step()
    assert step is not None
    assert (len(step.sequences), len(step.slices), step.slices[1]) == (1, 2, DUMMY)


def test_a_decode_slice_is_the_last_token_at_its_position() -> None:
    """The last sampled token has no KV yet: it is what the next decode step computes."""
    sequence = make_sequence("a", 5)
    assert sequence.advance(5, RowOutput(42, b""), now=3.0)
    part = sequence.next_slice()
    assert (list(part.token_ids), part.start, sequence.first_token_s) == ([42], 5, 3.0)


def test_whose_request_is_over_is_not_computed() -> None:
    """A request that was cancelled between two steps is in no further step, though its client has not run yet."""
    line_up = LineUp(OPTIONS, DUMMY)
    sequence = make_sequence("a", 5)
    line_up.put_in(sequence)
    sequence.request.state = RequestState.ABORTED  # type: ignore[misc]
    assert line_up.next_step() is None
    sequence.request.state = RequestState.RUNNING  # type: ignore[misc]
    sequence.end(ValueError("over"))
    assert line_up.next_step() is None


@pytest.mark.parametrize("field", ["block_size", "prefill_tokens", "decode_rows", "max_running"])
@pytest.mark.parametrize("value", [0, -1, True, 2.5])
def test_bad_options_are_named(field: str, value: object) -> None:
    """An option that cannot work is refused by its name."""
    with pytest.raises(ConfigError, match=field):
        EngineOptions(**{field: value})  # type: ignore[arg-type]


def test_the_grid_is_made_of_blocks() -> None:
    """A grid that cuts blocks in two would have requests write into shared ones."""
    with pytest.raises(ConfigError, match="prefill_tokens"):
        EngineOptions(block_size=16, prefill_tokens=40)


class WaitingModel:
    """A forward that takes as long as the test wants."""

    vocab_size = 8
    groups = (LayerGroup("full", (0,)),)

    def __init__(self) -> None:
        self.began, self.may_end = threading.Event(), threading.Event()

    def new_kv_cache(self, num_blocks: int, block_size: int) -> torch.Tensor:
        return torch.zeros(num_blocks, 1, 2, block_size, 1, 1)

    def forward(self, batch: PagedBatch, kv_cache: torch.Tensor) -> torch.Tensor:
        self.began.set()
        assert self.may_end.wait(60)
        return torch.zeros(batch.num_sequences, self.vocab_size)


def test_finish_waits_for_a_forward_that_runs() -> None:
    """A request that stops waiting for the thread can't release the blocks while it still writes into them."""
    model = WaitingModel()
    forward = Forward(model, model.new_kv_cache(2, 4), 4, [SequenceSlice([1], 0, [[1]])], 1)
    thread = threading.Thread(target=forward.run)
    thread.start()
    assert model.began.wait(60)
    threading.Timer(0.0, model.may_end.set).start()
    forward.finish()
    assert [output.token_id for output in forward.outputs] == [0]
    thread.join()


def test_a_finished_forward_does_not_begin() -> None:
    """A thread that gets round to it too late computes nothing: the blocks may be somebody else's."""
    model = WaitingModel()
    forward = Forward(model, model.new_kv_cache(2, 4), 4, [SequenceSlice([1], 0, [[1]])], 1)
    forward.finish()
    forward.run()
    assert not model.began.is_set()
    assert not forward.outputs
