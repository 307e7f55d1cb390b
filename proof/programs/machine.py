"""The base of the machines for both kinds of ledgers: it makes a call, and checks every law.

Each `do_...` makes one public call, as an engine would, and keeps the simulated bytes up to date. A call without an
object (the calls before it were left out) is skipped. A call that the ledger refuses must change nothing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from functools import partial
from operator import attrgetter
from typing import Any, ClassVar

from aoffload._common.prefix import Prefix, Root
from aoffload._common.tiers import Tier
from aoffload._extensions.pins import PinState, pinned_parts
from aoffload._kernel.records import Run
from aoffload.errors import AoffloadError
from aoffload.ledger import DemoteHint, DoneHint, HintOutcome, PinHint, PrefetchHint, ReturnsHint
from aoffload.testing.violations import Violation

from .fingerprint import changes, fingerprint
from .ledger_laws import Laws
from .ledger_recorder import Rude
from .ledger_remote import RemoteCalls
from .ledger_steps import BROKEN
from .program import MAX_HINT_S, Call, World
from .state_digest import state_digest

__all__ = ["Machine", "hint_of"]


def hint_of(verb: str, ttl_s: Any) -> Any:
    """The hint of a client. `InvalidArgument` if `ttl_s` is no time."""
    if verb == "pin":
        return PinHint(ttl_s)
    if verb == "returns":
        return ReturnsHint(ttl_s)
    return {"prefetch": PrefetchHint, "demote": DemoteHint, "done": DoneHint}[verb]()


class Machine(RemoteCalls):
    """Makes calls. `refused_before`: the numbers of the calls that were refused in an earlier run of the same program;
    this run checks that they change nothing. `watches`: check what a `BlockWatcher` is told, too."""

    LAWS: ClassVar[type[Laws]]
    HOOKS_CHANGE: ClassVar[bool] = False
    """An extension leases and takes blocks of its own in every call."""
    FAREWELL: ClassVar[tuple[str, ...]]
    """Final calls, which end pins, prefetches and demotions."""

    def __init__(
        self,
        world: World,
        *,
        refused_before: frozenset[int] = frozenset(),
        watches: bool = False,
        whole_every: int = 1,
    ) -> None:
        super().__init__(world)
        self.refused: set[int] = set()
        self.num_calls = 0
        self.taken: list[str] | None = None
        """With a list: each call, what it said, and a digest of all that the ledger and the plans are after it."""
        self._refused_before = refused_before
        self._digest = hashlib.blake2b()
        self._judge = partial(self.LAWS, watches=watches, whole_every=whole_every)
        self.laws = self._judge(self)

    def apply(self, call: Call) -> None:
        """Make `call`, and check the laws that it may have broken."""
        number, self.num_calls = self.num_calls, self.num_calls + 1
        make: Callable[..., str] = getattr(self, f"do_{call.name}")
        before = fingerprint(self.ledger) if number in self._refused_before else None
        try:
            answer = make(**call.args)
        except BROKEN as error:
            raise Violation("a law of its own", f"{call}: {error}") from error
        except AoffloadError as error:
            answer = f"{type(error).__name__} {error}"
            self.refused.add(number)
            self.features.add("refused")
            if before is not None and (changed := changes(before, fingerprint(self.ledger))):
                raise Violation("a refused call", f"{call} said {answer}, and has changed {changed[:6]}") from error
        except (Violation, KeyboardInterrupt):
            raise
        except (Exception, Rude) as error:
            raise Violation(f"a crash ({type(error).__name__})", f"{call}: {error!r}") from error
        self._digest.update(f"{call.name} {answer}\n".encode())
        if self.taken is not None:
            self.taken.append(f"{call} -> {answer} {state_digest(self.ledger, self.plans)}")
        self.erase_forgotten()
        self.note_answers(call.name)
        if self.recorder.problem:
            raise Violation("events", self.recorder.problem)
        if self.ledger.moves.unreported:
            raise Violation("events", f"{call} has not reported {list(self.ledger.moves.unreported)}")
        self.laws.after(call, number)

    def reopen(self) -> None:
        super().reopen()
        self.laws = self._judge(self)

    def digest(self) -> str:
        self._digest.update(repr(self.ledger.statistics()).encode())
        return self._digest.hexdigest()[:32]

    def finish(self) -> None:
        """Release every request, land or prove every copy, and check that nothing is held."""
        for name in list(self.steps):
            self.apply(Call("end", {"step": name, "commits": False}))
        for name in list(self.clients):
            self.apply(Call("release", {"who": name}))
        for name in self.FAREWELL:
            self.apply(Call(name))
        for _ in range(len(self.plans) + 1):
            self.apply(Call("land"))
        for name in list(self.unproven):
            self.apply(Call("late", {"job": name}))
        self.laws.at_rest()

    # -- pins -----------------------------------------------------------------------------------------------------

    def do_pin(self, name: str, tokens: Sequence[int], salt: str | None = None, expires_at: float = 1e9) -> str:
        if name in self.pins:
            return "skipped"
        self.pins[name] = self.ledger.pins.hold(Prefix.of(Root("programs", salt), tokens), expires_at=expires_at)
        self._note("pin", self.pins[name].match.num_tokens)
        return f"{self.pins[name]}"

    def do_unpin(self, name: str) -> str:
        if name not in self.pins:
            return "skipped"
        pin = self.pins.pop(name)
        self.ledger.pins.release(pin)
        self._require(pin.state is not PinState.HELD, "a pin is over when it is given back", pin)
        return "unpinned"

    def do_hint(self, tokens: Sequence[int], expires_at: float, salt: str | None = None, category: str = "") -> str:
        """It spares no more than is asked for, and pins nothing."""
        if self.ledger.statistics().eviction is None:
            return "skipped"
        before = [tier.statistics() for tier in self.ledger.cache.tiers]
        prefix = Prefix.of(Root("programs", salt), tokens)
        if expires_at % 3:
            spared = self.ledger.eviction.returns(prefix, in_s=expires_at, category=category)
        else:
            spared = self.ledger.eviction.done(prefix, category=category)
        after = [tier.statistics() for tier in self.ledger.cache.tiers]
        is_pure = self.HOOKS_CHANGE or before == after
        self._require(is_pure and 0 <= spared <= len(tokens), "a hint pins nothing", spared)
        self._note("hint", spared)
        return f"{spared} spared"

    def do_client_hint(
        self, verb: str, tokens: Sequence[int], salt: str | None = None, ttl_s: float = 5.0, now: float = 0.0
    ) -> str:
        """Its pins stay within their share and their time, and it touches nothing under another root."""
        prefix, hints, hint = Prefix.of(Root("programs", salt), tokens), self.ledger.hints, hint_of(verb, ttl_s)
        sequence = self.ledger.sequence_of(prefix)  # under the root of the weights' epoch
        least = int(verb in ("prefetch", "demote"))  # these may evict blocks of others, as any load does
        before = self._of_others(sequence.root, least)
        may_grant = self.HOOKS_CHANGE or self.ledger.num_waiting > 0
        answer = hints.apply(prefix, hint, now)
        self.take(answer.plans)
        is_alone = self._of_others(sequence.root, least) == before
        self._require(may_grant or is_alone, "a hint is about its own prompt", answer)
        self._require(0 <= answer.num_tokens <= len(tokens), "a hint is about its own prompt", answer)
        self._require((answer.outcome is HintOutcome.ACCEPTED) == (not answer.reason.value), "an answer", answer)
        if verb == "pin" and answer.outcome is not HintOutcome.REJECTED:
            self._require(hints.pins[-1].expires_at <= now + min(ttl_s, MAX_HINT_S), "a pin ends in time", answer)
            self._within_share()
            self._note("client pin", True)
        if verb == "done":
            prompt = hints._digest(sequence)
            held = [given.pin for given in hints._given if given.prompt == prompt]
            self._require(not held, "what is done is pinned no more", held)
        self._note("client hint", True)
        return f"{verb} {answer.outcome.value} {answer.reason.value} {answer.num_tokens}"

    def _of_others(self, root: Root, least_references: int) -> dict[tuple[Run, int], tuple[int, ...]]:
        """The parts under other roots that have at least this number of references."""
        return {
            (run, number): (part.first, part.stop, part.num_references)
            for run in self.ledger.cache.index.runs.values()
            for number, part in enumerate(run.parts)
            if run.root != root and part.num_references >= least_references
        }

    def _within_share(self) -> None:
        for tier in self.ledger.cache.tiers:
            leases = [lease for pin in self.ledger.hints.pins for lease in pin.leases if lease.tier is tier.tier]
            parts = {part for lease in leases for part in pinned_parts(lease)}
            num_blocks, most = sum(len(part.blocks) for part in parts), self.ledger.hints.max_share
            if num_blocks > int(tier.pool.num_blocks * most):
                raise Violation("a law of its own", f"hints pin {num_blocks} blocks of {tier.tier.name}")

    def do_lapse(self, now: float) -> str:
        self.ledger.lapse(now)
        late = [pin for pin in self.ledger.hints.pins if pin.expires_at <= now]
        self._require(not late, "a pin ends in time", late)
        return "lapsed"

    def do_drop_pins(self) -> str:
        self.ledger.pins.drop()
        return "dropped"

    # -- the whole ledger -----------------------------------------------------------------------------------------

    def do_reset(self, tier: str | None = None) -> str:
        self.ledger.reset(None if tier is None else Tier[tier])
        self.laws.after_reset(None if tier is None else Tier[tier])
        if tier is None and not self.world.cell_units:  # a remote store needs another namespace for new weights
            self.bytes.new_weights()
        self.features.add(f"reset {tier.lower()}" if tier else "reset")
        return "reset"

    def do_weights(self, epoch: Any) -> str:
        """Other weights compute from now on, or those of an earlier epoch again."""
        self.ledger.weights.set(epoch)
        if epoch != self.bytes.epoch:
            self.features.add("weights")
            self._note("weights are back", any(epoch == one for _, one in self.bytes.versions))
            self.bytes.set_epoch(epoch)
            self.first_epoch = epoch
            self.laws.after_weights()
        self._require(self.ledger.statistics().weights_epoch == epoch, "the epoch is the one that was set", epoch)
        return f"{epoch}"

    def do_lookup(self, tokens: Sequence[int], salt: str | None = None) -> str:
        """A lookup reports what a request would match."""
        found = self.ledger.lookup(Prefix.of(Root("programs", salt), tokens))
        record = self.ledger.admit(Prefix.of(Root("programs", salt), tokens))
        match = record.match
        self.take(self.ledger.release(record))
        self._require(
            found == match or match.is_pending or self.HOOKS_CHANGE,
            "a lookup says what a request matches",
            f"{found}, {match}",
        )
        return f"{found}"

    def do_wrong(self, method: str, who: str, **arguments: Any) -> str:
        """A call with an argument that no caller should give."""
        if (client := self.clients.get(who)) is None:
            return "skipped"
        attrgetter(method)(self.ledger)(client.record, **arguments)
        return "taken"
