"""The workload: conversations of several turns that share system prompts, fixed by a seed.

A turn's prompt is everything before it, answers included, plus the user's next message. Lengths are known before
anything runs, because answers have a fixed length.

In every run the prompts contain the answers of the reference run. So each request has the same prompt in all runs and
is compared on its own: one wrong answer counts once, where it happened, and does not change the prompts after it. This
hides nothing, because each run's own answers are compared with the reference's, token by token.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

import attrs

from .._reference.engine.batching import EngineOptions
from .._reference.engine.layers import LayerGroup
from ..errors import InvalidArgument
from .options import DemoOptions

TURNS_PER_CONVERSATION = 4
SYSTEM_TOKENS = (192, 320)
"""Two system prompts. Conversations take turns with them."""
OPENING_TOKENS = (128, 960)
"""The first message, including a document that may come with it."""
MESSAGE_TOKENS = (16, 64)
ANSWER_TOKENS = (6, 12)


@attrs.frozen
class Turn:
    turn_id: str
    message: tuple[int, ...]
    num_answer_tokens: int


@attrs.frozen
class Conversation:
    system: tuple[int, ...]
    turns: tuple[Turn, ...]

    def prompt(self, index: int, answers: Mapping[str, Sequence[int]]) -> list[int]:
        """The prompt of turn `index`, given the answers of the turns before it by turn id."""
        tokens = [*self.system]
        for turn in self.turns[:index]:
            tokens += [*turn.message, *answers[turn.turn_id]]
        return [*tokens, *self.turns[index].message]

    def num_prompt_tokens(self, index: int) -> int:
        before = sum(len(turn.message) + turn.num_answer_tokens for turn in self.turns[:index])
        return len(self.system) + before + len(self.turns[index].message)

    @property
    def max_tokens(self) -> int:
        """Prompt and answer of the last turn."""
        return self.num_prompt_tokens(len(self.turns) - 1) + self.turns[-1].num_answer_tokens


@attrs.frozen
class Workload:
    conversations: tuple[Conversation, ...]

    @property
    def num_requests(self) -> int:
        return sum(len(conversation.turns) for conversation in self.conversations)

    @property
    def max_tokens(self) -> int:
        """Prompt and answer of the longest request."""
        return max(conversation.max_tokens for conversation in self.conversations)

    def first_turn_ids(self) -> frozenset[str]:
        return frozenset(conversation.turns[0].turn_id for conversation in self.conversations)


def make_workload(seed: int, num_requests: int, vocab_size: int) -> Workload:
    """`num_requests` turns, dealt out to conversations of about four."""
    draw = random.Random(seed)

    def tokens(count: int) -> tuple[int, ...]:
        return tuple(draw.randrange(vocab_size) for _ in range(count))

    systems = [tokens(count) for count in SYSTEM_TOKENS]
    num_conversations = -(-num_requests // TURNS_PER_CONVERSATION)
    openings = _spread(draw, *OPENING_TOKENS, num_conversations)
    conversations: list[Conversation] = []
    for number in range(num_conversations):
        num_turns = num_requests // num_conversations + (number < num_requests % num_conversations)
        lengths = [openings[number]] + [draw.randint(*MESSAGE_TOKENS) for _ in range(num_turns - 1)]
        turns = tuple(
            Turn(f"c{number:02}-t{index}", tokens(length), draw.randint(*ANSWER_TOKENS))
            for index, length in enumerate(lengths)
        )
        conversations.append(Conversation(systems[number % len(systems)], turns))
    return Workload(tuple(conversations))


def _spread(draw: random.Random, low: int, high: int, count: int) -> list[int]:
    """`count` numbers evenly spread over [low, high], in random order. So no seed has only short ones, or only long
    ones."""
    numbers = [low + int((index + draw.random()) * (high - low) / count) for index in range(count)]
    draw.shuffle(numbers)
    return numbers


# -- pools -----------------------------------------------------------------------------------------------------------
#
# Sizes of the demo's pools: the requested ones, or ones that suit the model's groups.

# Enough for all conversations at once, so requests wait only in the runtime's queue for blocks.
ENGINE = EngineOptions(block_size=16, prefill_tokens=64, decode_rows=4, max_running=4096)
DEVICE_TOKENS = 2048
"""Default size of the small device pool: more than the longest request, less than two of them."""
HOST_TOKENS = 32_768


@attrs.frozen
class Pools:
    """Blocks of the small device pool, of host memory, and of the pool that evicts nothing."""

    num_device_blocks: int
    num_host_blocks: int
    num_reference_blocks: int

    @classmethod
    def of(cls, options: DemoOptions, workload: Workload, groups: Sequence[LayerGroup]) -> Pools:
        """Raises `InvalidArgument` naming `device_blocks` if the longest request does not fit."""
        device = options.num_device_blocks or sum(_default_blocks(group) for group in groups)
        host = options.num_host_blocks or ENGINE.num_blocks(HOST_TOKENS) * len(groups)
        needed = sum(_most_blocks(group, workload) for group in groups)
        if needed > device:
            raise InvalidArgument("device_blocks", f"{device} is too few: the longest request takes {needed} blocks")
        # Every conversation keeps its longest prompt, and may hold it twice while two requests compute the same tokens.
        tokens = [conversation.max_tokens for conversation in workload.conversations]
        everything = 2 * sum(map(ENGINE.num_blocks, tokens)) * len(groups)
        return cls(device, host, max(everything, device))


def _default_blocks(group: LayerGroup) -> int:
    """Blocks for `DEVICE_TOKENS`; in a windowed group blocks for two windows, if those are fewer."""
    return min(ENGINE.num_blocks(DEVICE_TOKENS), 2 * _window_blocks(group))


def _most_blocks(group: LayerGroup, workload: Workload) -> int:
    """The most blocks of the group that one request needs."""
    answer = max(turn.num_answer_tokens for each in workload.conversations for turn in each.turns)
    return min(ENGINE.num_blocks(workload.max_tokens), _window_blocks(group) + ENGINE.num_blocks(answer))


def _window_blocks(group: LayerGroup) -> int:
    """Blocks of the window before a slice, of the slice, and of the shorter one after it, which is not committed."""
    start = -(-MANY_TOKENS // ENGINE.prefill_tokens) * ENGINE.prefill_tokens
    return len(group.attention.required_blocks(start, ENGINE.block_size)) + 2 * ENGINE.num_scratch_blocks


MANY_TOKENS = 2**20
"""A position with more tokens before it than any window has."""
