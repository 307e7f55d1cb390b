"""KV events of a ledger without a runtime: a subscriber finds the same hits as `lookup`."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from event_subscriber import EventSubscriber, Hash, cached_blocks
from step_programs import PROGRAMS, EngineSteps, OwnSteps, Program

from aoffload import Ledger
from aoffload._observe.kv_events.changes import Changes
from aoffload._observe.kv_events.format import EventEncoder
from aoffload.kv_events import EventFormat
from aoffload.ledger import Prefix, Root

each_program = pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS.keys())


class Router(EventSubscriber):
    """Follows a ledger's events, and answers from them alone how much of a prompt it would find."""

    def __init__(self, ledger: Ledger) -> None:
        super().__init__()
        self.ledger, self.num_woken = ledger, 0
        self.changes = Changes(ledger, 10_000, self.wake)
        self.changes.begin()
        self.encoder = EventEncoder(ledger.layout, EventFormat(), 0)

    def wake(self) -> None:
        self.num_woken += 1

    def catch_up(self) -> None:
        self.changes.expect()
        while told := self.changes.take(50):
            self.apply(self.encoder.batch(told, 0.0))

    def hit(self, tokens: Sequence[int], medium: str) -> int:
        """Leading tokens whose blocks it has been told of, one after the other in the first group, and as many as
        attention reads at the end of it in the others."""
        groups, chain = self.ledger.layout.groups, self.chain(tokens, medium)
        for num_blocks in range(len(chain), 0, -1):
            stop = num_blocks * groups[0].block_size
            needed = [(at, g.attention.required_blocks(stop, g.block_size)) for at, g in enumerate(groups)]
            if all((medium, at, chain[block]) in self.cached for at, blocks in needed for block in blocks):
                return stop
        return 0

    def chain(self, tokens: Sequence[int], medium: str, predecessors: Sequence[Hash] = ()) -> list[Hash]:
        """The hashes of the leading blocks of the first group; `predecessors`: of which these are known already."""
        size, found = self.ledger.layout.groups[0].block_size, [*predecessors]
        by_content = {
            (self.known[group, its_hash], content): its_hash
            for (its_medium, group, its_hash), content in self.cached.items()
            if (its_medium, group) == (medium, 0)
        }
        for at in range(size * len(found), len(tokens) - size + 1, size):
            following = by_content.get((found[-1] if found else None, tuple(tokens[at : at + size])))
            if following is None:
                break
            found.append(following)
        return found


def prompts(steps: OwnSteps | EngineSteps) -> list[list[int]]:
    """All beginnings of what its requests began with, with one token more than can be found."""
    lengths = range(4, len(steps.stories[0]) + 1, 4)
    return [[*story[:length], 9999] for story in steps.stories for length in lengths]


@each_program
def test_events_replay_to_what_a_look_up_finds(program: Program) -> None:
    """In the middle of a program's steps and at their end. Host memory, and the device where it is the ledger's; of an
    engine's own blocks nothing is told. The subscriber answers from the events alone, token by token."""
    num_compared = num_found = 0
    for seed in range(0, 8, 2):  # of the ledger's own blocks: one group of full attention
        steps = program(seed, None)
        router = Router(steps.ledger)
        rng = random.Random(seed)

        def look(steps: OwnSteps | EngineSteps = steps, router: Router = router, rng: random.Random = rng) -> None:
            nonlocal num_compared, num_found
            if rng.random() > 0.1:
                return
            router.catch_up()
            assert router.cached == cached_blocks(steps.ledger)
            media = {medium for medium, _, _ in router.cached}
            assert media <= ({"GPU", "CPU"} if isinstance(steps, OwnSteps) else {"CPU"})
            for tokens in prompts(steps):
                found = steps.ledger.lookup(Prefix.of(Root("toy"), tokens))
                if isinstance(steps, EngineSteps):
                    # With too many blocks in quarantine, nothing is loaded, so nothing hits.
                    hit = 0 if steps.ledger.loads_paused else router.hit(tokens, "CPU")
                    assert (found.num_device_tokens, found.num_host_tokens) == (0, hit)
                else:
                    device = router.chain(tokens, "GPU")  # from its end on, the host may go on
                    both = router.chain(tokens, "CPU", predecessors=device)
                    assert (found.num_device_tokens, found.num_tokens) == (4 * len(device), 4 * len(both))
                num_compared, num_found = num_compared + 1, num_found + (found.num_tokens > 0)

        steps.between = look
        steps.drive()
        assert router.num_woken > 3
        router.changes.end()
        router.catch_up()
        assert router.cached == {}, "the last batch says that nothing is cached"
    assert num_compared > 200 and num_found > num_compared / 20
